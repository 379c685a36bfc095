//! What somebody was believed for when they came, and is not true any more: whoever stays connected keeps none of it.

use std::time::Duration;

use hermes_testkit::{
    ca::{Authority, Subject},
    frames::{Frame, Frames, kind},
    listener_client::{ListenerClient, NODE_NAME},
    origin::{self, stream},
    overlay::EFFECT_TIMEOUT,
    raw_http1::RawHttp1,
};

use crate::reload::{echoes, loopback, overlay};

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, $TRUST}
routes:
- {name: tunnel, match: {kind: tcp, user: alice}, terminate: {tcp: '$ECHO'}}
- {name: alice, match: {user: alice}, respond: {body: alice}}
- {name: nobody, respond: {body: nobody}}
";

#[tokio::test]
async fn an_h2_client_that_ignores_goaway_is_no_longer_served() {
    let overlay = overlay();
    let draft = overlay.node("edge").document(DOCUMENT).with("TRUST", "trust: [127.0.0.0/8]");
    let mut node = draft.with("ECHO", "127.0.0.1:9").start().await.unwrap();
    // It answers no PING, by which the end of a connection would be agreed on.
    let mut frames = Frames::connect(node.address("in"), &[]).await.unwrap();
    let fields =
        [(":method", "GET"), (":scheme", "http"), (":authority", "APP"), (":path", "/"), ("hermes-user", "alice")];
    frames.send(&[Frame::headers(1, true, &fields)]).await.unwrap();
    let answer = frames.until("an answer", |frame| frame.kind == kind::DATA).await.unwrap();
    assert_eq!(answer.payload, "alice");
    let values = [("TRUST", String::new()), ("ECHO", "127.0.0.1:9".to_owned())];
    node.reload(DOCUMENT, &values).await.unwrap();
    let refused = async {
        for stream in (3..).step_by(2) {
            if frames.send(&[Frame::headers(stream, true, &fields)]).await.is_err() {
                return;
            }
            let ends = |frame: &Frame| frame.stream == stream && frame.kind != kind::WINDOW_UPDATE;
            match frames.until("an answer", ends).await {
                Ok(frame) if frame.kind == kind::RST_STREAM => return,
                Ok(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(_) => return,
            }
        }
    };
    tokio::time::timeout(EFFECT_TIMEOUT, refused).await.expect("it is served for ever");
}

#[tokio::test]
async fn a_tunnel_ends_when_its_address_is_no_longer_trusted() {
    let (overlay, echo) = (overlay(), stream::echo(origin::listen(loopback()).unwrap()).unwrap());
    let draft = overlay.node("edge").document(DOCUMENT).with("TRUST", "trust: [127.0.0.0/8]");
    let mut node = draft.with("ECHO", echo.address()).start().await.unwrap();
    let mut tunnel = RawHttp1::connect(node.address("in")).await.unwrap();
    tunnel.send("CONNECT DB:7 HTTP/1.1\r\nhost: DB:7\r\nhermes-user: alice\r\n\r\n").await.unwrap();
    assert_eq!(tunnel.head().await.unwrap().status(), 200);
    assert!(echoes(&mut tunnel, b"before").await);
    // Some trust that still holds ends nothing.
    let values = |trust: &str| [("TRUST", trust.to_owned()), ("ECHO", echo.address().to_string())];
    node.reload(DOCUMENT, &values("trust: [127.0.0.0/8, 192.0.2.0/24]")).await.unwrap();
    assert!(echoes(&mut tunnel, b"between").await);
    node.reload(DOCUMENT, &values("trust: [192.0.2.0/24]")).await.unwrap();
    assert!(tunnel.is_ended().await, "it goes on");
}

#[tokio::test]
async fn connections_that_another_ca_verified_are_let_go() {
    let overlay = overlay();
    let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(DOCUMENT).with("TRUST", "tls: {client: required}").with("ECHO", "127.0.0.1:9");
    let node = draft.start().await.unwrap();
    let alice = overlay.authority().issue(&Subject::node("laptop").with_user("alice")).unwrap();
    let listener = ListenerClient::tls(node.address("in"), overlay.authority().pem(), Some(&alice));
    let mut http1 = listener.h1().await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: APP\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(http1.body(&head).await.unwrap().text(), "alice");
    let before = node.generation().await.unwrap();
    std::fs::write(overlay.dir().join("edge/ca.pem"), Authority::new("lab").unwrap().pem()).unwrap();
    node.says(&format!("applied generation={} ", before + 1)).await;
    assert!(http1.is_ended().await, "it is kept");
}
