//! Request targets: the target that an origin gets if a client names no path, or an unusual one.
//!
//! In: targets as clients of each version write them, byte by byte. Out: a target that any origin reads the same way.

use std::io;

use hermes_testkit::{
    ca::Subject,
    frames::{END_HEADERS, Frame, Frames, kind},
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::Exchange,
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
};
use http::Response;

use crate::http::lab::{Seen, next, overlay, seen};

/// An origin that reports each request target as it is on the wire.
fn origin_h1() -> (Origin, Seen<String>) {
    let (sender, received) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            loop {
                let head = http1.head().await?;
                let _ = sender.send(head.first.clone());
                http1.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
            }
        }
    });
    (origin.unwrap(), received)
}

fn origin_h2() -> (Origin, Seen<String>) {
    let (sender, received) = seen();
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let target = exchange.request.uri().path_and_query().map(ToString::to_string);
            let _ = sender.send(target.unwrap_or_default());
            exchange.answer(Response::builder().body(()).map_err(io::Error::other)?, "").await
        }
    });
    (origin.unwrap(), received)
}

/// Listener `in` speaks every version, over TLS; listener `clear` speaks the first two.
async fn node(overlay: &Overlay, protocol: &str, origin: &Origin) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: clear, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";
    let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(document).with("PROTOCOL", protocol).with("ORIGIN", origin.address());
    draft.start().await.unwrap()
}

async fn status_h2(node: &Node, path: &str) -> Option<u16> {
    let mut frames = Frames::connect(node.address("clear"), &[]).await.unwrap();
    frames.send(&[Frame::get(1, "WEB", path)]).await.unwrap();
    let answers = |frame: &Frame| matches!(frame.kind, kind::HEADERS | kind::RST_STREAM);
    let answer = frames.until("an answer", answers).await.unwrap();
    // `:status` 200 has an entry of its own in HPACK's static table.
    (answer.kind == kind::HEADERS && answer.flags & END_HEADERS != 0)
        .then(|| if answer.payload.first() == Some(&0x88) { 200 } else { 400 })
}

async fn status_h3(client: &ListenerClient, path: &str) -> Option<u16> {
    let connection = client.h3().await.unwrap();
    let (mut send, mut recv) = connection.open().await.unwrap();
    let fields = [(":method", "GET"), (":scheme", "https"), (":authority", "WEB"), (":path", path)];
    send.headers(&fields).await.unwrap();
    send.finish().unwrap();
    recv.answer().await.ok().map(|answer| answer.status)
}

/// Targets, and those that the origin must get, for each version of client and origin.
const EMPTY: [(&str, &str); 3] = [("#x", "/"), ("?a=1", "/?a=1"), ("?a=1#x", "/?a=1")];

#[tokio::test]
async fn a_target_without_a_path_reaches_origins_as_a_slash() {
    for protocol in ["h1", "h2"] {
        let overlay = overlay();
        let (origin, mut received) = if protocol == "h1" { origin_h1() } else { origin_h2() };
        let node = node(&overlay, protocol, &origin).await;
        let client = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
        for (path, want) in EMPTY {
            let want = if protocol == "h1" { format!("GET {want} HTTP/1.1") } else { want.to_owned() };
            let mut h1 = ListenerClient::plain(node.address("clear")).h1().await.unwrap();
            h1.send(format!("GET http://WEB{path} HTTP/1.1\r\nHost: WEB\r\n\r\n")).await.unwrap();
            assert_eq!(h1.head().await.unwrap().status(), 200, "{protocol}: {path}");
            assert_eq!(next(&mut received).await, want, "http/1.1 to {protocol}: {path}");
            assert_eq!(status_h2(&node, path).await, Some(200), "{protocol}: {path}");
            assert_eq!(next(&mut received).await, want, "h2 to {protocol}: {path}");
            assert_eq!(status_h3(&client, path).await, Some(200), "{protocol}: {path}");
            assert_eq!(next(&mut received).await, want, "h3 to {protocol}: {path}");
        }
    }
}
