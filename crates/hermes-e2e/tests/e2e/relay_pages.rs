//! The relay for web pages: WebSockets, and the pages that may use a relay.
//!
//! In: a WebSocket client, and requests with the `Origin` of a page. Out: the messages of a subscription, receipts of
//! publications, and the fields or refusals that a browser sees. The tests with a real browser are in `peers/relay.rs`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{curl, field};
use serde_json::{Value, json};
use tungstenite::protocol::{CloseFrame, Role, WebSocket};
use tungstenite::{Error, Message};

const RELAY: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes:
- {name: read-only, match: {path: '/readable/*', method: [POST, PUT]}, respond: {status: 403}}
- {name: readable, match: {path: '/readable/*'}, relay: {}}
- name: chat
  match: {path: '/chat/*'}
  relay: {unit: 1KiB, heartbeat: 1s, max-timeout: 1m, history: {}, origins: ['https://app.example:8443']}
";

/// Opens a WebSocket, and returns it with the head of the response.
fn open(address: SocketAddr, path: &str, fields: &str) -> (WebSocket<TcpStream>, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{fields}\r\n"
    )
    .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    (WebSocket::from_raw_socket(stream, Role::Client, None), String::from_utf8(head).unwrap())
}

/// The next text message.
fn message(socket: &mut WebSocket<TcpStream>) -> Value {
    loop {
        match socket.read().unwrap() {
            Message::Text(text) => return serde_json::from_str(&text).unwrap(),
            Message::Ping(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn close_frame(socket: &mut WebSocket<TcpStream>) -> CloseFrame {
    match socket.read() {
        Ok(Message::Close(Some(frame))) => frame,
        other => panic!("no close: {other:?}"),
    }
}

async fn relay(overlay: &Overlay) -> Node {
    overlay.node("relay").document(RELAY).start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_subscribes_and_publishes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let address = node.address("web");
    let (mut first, head) = open(address, "/chat/a", "");
    assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{head}");
    let start = message(&mut first);
    assert_eq!((start["timeout"].as_u64(), start["subscription"].as_str().map(str::len)), (Some(60), Some(32)));
    let (mut second, _) = open(address, "/chat/a", "");
    message(&mut second);
    node.metric_is("hermes_relay_subscriptions", "", 2.0).await;
    first.send(Message::text("one")).unwrap();
    first.send(Message::binary(&b"\xff\0"[..])).unwrap();
    let mut own = [(); 4].map(|()| message(&mut first));
    own.sort_by_key(|message| message.get("published").is_some());
    let ids: Vec<&Value> = own.iter().map(|message| message.get("published").unwrap_or(&message["id"])).collect();
    assert_eq!(ids[..2], ids[2..], "{own:?}");
    assert_eq!((&own[0]["data"], &own[0]["type"]), (&json!("one"), &json!("text/plain; charset=utf-8")));
    assert_eq!(own[1]["base64"], "/wA=");
    assert_eq!((&own[2]["subscribers"], &own[2]["delivered"]), (&json!(2), &json!(2)));
    assert_eq!([message(&mut second), message(&mut second)], [own[0].clone(), own[1].clone()]);
    // It resumes.
    let path = format!("/chat/a?last-event-id={}", start["id"].as_str().unwrap());
    let (mut third, _) = open(address, &path, "");
    message(&mut third);
    assert_eq!([message(&mut third), message(&mut third)], [own[0].clone(), own[1].clone()]);
    // An orderly end.
    first.close(None).unwrap();
    while first.read().is_ok() {}
    node.metric_is("hermes_relay_subscriptions", "", 2.0).await;
    drop((second, third));
    node.metric_is("hermes_relay_subscriptions", "", 0.0).await;
}

/// Messages of a WebSocket enter the tree as publications of its client, and the root decides about them.
#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_below_another_relay_subscribes_and_publishes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = relay(&overlay).await;
    let below = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: chat, relay: {upstream: next}, rewrite: {authority: chat.example}}]
upstreams: [{name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}]
";
    let node = overlay.node("below").document(below).with("NEXT", root.address("web")).start().await.unwrap();
    // A page of the node itself. The root knows the channel by another authority.
    let origin = format!("origin: http://{}\r\n", node.address("web"));
    let (mut first, _) = open(node.address("web"), "/chat/a", &origin);
    let start = message(&mut first);
    let (mut second, _) = open(node.address("web"), "/chat/a", "");
    message(&mut second);
    root.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    first.send(Message::text("one")).unwrap();
    let mut own = [(); 2].map(|()| message(&mut first));
    own.sort_by_key(|message| message.get("published").is_some());
    assert_eq!((&own[0]["data"], &own[0]["id"]), (&json!("one"), &own[1]["published"]), "{own:?}");
    assert_eq!(message(&mut second), own[0]);
    let path = format!("/chat/a?last-event-id={}", start["id"].as_str().unwrap());
    let (mut third, _) = open(node.address("web"), &path, "");
    message(&mut third);
    assert_eq!(message(&mut third), own[0], "the root has it");
    let page = ["--data", "two", "--header", origin.trim_end()];
    let (status, head, _) = curl(&node, "/chat/a", &page).await;
    assert_eq!(status, 204, "{head}");
    assert!(field(&head, "hermes-event-id").is_some(), "{head}");
    assert_eq!(message(&mut second)["data"], "two");
    assert_eq!(curl(&node, "/chat/a", &["--data", "x", "--header", "origin: https://evil.example"]).await.0, 403);
    // The root refuses publications to one channel, and has no other.
    let (mut reader, _) = open(node.address("web"), "/readable/a", "");
    message(&mut reader);
    reader.send(Message::text("x")).unwrap();
    assert_eq!(message(&mut reader)["refused"], "the next relay responded 403 Forbidden");
    let (_, head) = open(node.address("web"), "/elsewhere", "");
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pongs_refresh_a_websocket_and_silence_ends_it() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let (mut socket, _) = open(node.address("web"), "/chat/a?hermes-timeout=2", "");
    message(&mut socket);
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        // Reading answers pings.
        assert!(matches!(socket.read().unwrap(), Message::Ping(_)));
        socket.flush().unwrap();
    }
    // It answers no ping from now on.
    node.metric_is("hermes_relay_subscriptions", "", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_channel_does_not_delay_the_pings() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let (mut socket, _) = open(node.address("web"), "/chat/a?hermes-timeout=2", "");
    message(&mut socket);
    let begun = std::time::Instant::now();
    let mut number = 0;
    while begun.elapsed() < Duration::from_secs(4) {
        assert_eq!(curl(&node, "/chat/a", &["--data", &number.to_string()]).await.0, 204);
        assert_eq!(message(&mut socket)["data"], number.to_string());
        number += 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_no_answer_is_not_read() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let (socket, _) = open(node.address("web"), "/chat/a", "");
    let mut stream = socket.into_inner();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // Empty messages with a mask of zeros. Each gets an answer of 70 bytes.
    let messages = [0x81, 0x80, 0, 0, 0, 0].repeat(10_000);
    let blocked = (0..1000).find(|_| stream.write_all(&messages).is_err());
    assert!(blocked.is_some(), "the relay reads on without an end");
    assert_eq!(curl(&node, "/chat/b", &["--data", "x"]).await.0, 204, "others are served");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_websocket_may_not_do_is_told() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let address = node.address("web");
    let (mut socket, _) = open(address, "/readable/a", "");
    message(&mut socket);
    socket.send(Message::text("x")).unwrap();
    assert_eq!(message(&mut socket), json!({"refused": "this client may not publish to the channel"}));
    // A client that may only publish must not subscribe by another method.
    let upgrade = ["connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"];
    let fields = upgrade.iter().flat_map(|field| ["--header", field]);
    let put: Vec<&str> = ["--request", "PUT"].into_iter().chain(fields).collect();
    assert_eq!(curl(&node, "/chat/a", &put).await.0, 405);
    // More than a unit.
    let (mut socket, _) = open(address, "/chat/a", "");
    message(&mut socket);
    socket.send(Message::text("x".repeat(1025))).unwrap();
    let frame = close_frame(&mut socket);
    assert_eq!(u16::from(frame.code), 1009, "{frame}");
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    // No WebSocket at all, and pages of other sites.
    let (mut socket, _) = open(address, "/chat/a", "");
    message(&mut socket);
    socket.get_mut().write_all(&b"hello, is this HTTP?".repeat(10)).unwrap();
    let frame = close_frame(&mut socket);
    assert_eq!(u16::from(frame.code), 1002, "{frame}");
    for (path, origin, status) in [
        ("/chat/a", "https://evil.example".to_owned(), "403"),
        ("/chat/a", "null".to_owned(), "403"),
        ("/readable/a", "https://app.example:8443".to_owned(), "403"),
        ("/chat/a", "https://app.example:8443".to_owned(), "101"),
        ("/chat/a", format!("http://{address}"), "101"),
    ] {
        let (_, head) = open(address, path, &format!("origin: {origin}\r\n"));
        assert_eq!(head.split(' ').nth(1), Some(status), "{path} of {origin}");
    }
}

#[tokio::test]
async fn only_pages_of_allowed_origins_use_a_relay() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = relay(&overlay).await;
    let (known, foreign) = ("origin: https://app.example:8443", "origin: https://evil.example");
    let post = ["--data", "x", "--header"];
    let (status, head, _) = curl(&node, "/chat/a", &[&post[..], &[known]].concat()).await;
    assert_eq!(status, 204);
    assert!(head.contains("access-control-allow-origin: https://app.example:8443"), "{head}");
    assert!(head.contains("access-control-expose-headers: ") && head.contains("vary: origin"), "{head}");
    let (status, head, _) = curl(&node, "/chat/a", &[&post[..], &[foreign]].concat()).await;
    assert!(status == 403 && !head.contains("access-control"), "{head}");
    let own = format!("origin: http://{}", node.address("web"));
    assert_eq!(curl(&node, "/chat/a", &[&post[..], &[&*own]].concat()).await.0, 204);
    assert_eq!(curl(&node, "/chat/a", &post[..2]).await.0, 204, "no page at all");
    // The question of a browser before it sends fields of ours.
    let ask = ["--request", "OPTIONS", "--header", "access-control-request-method: GET", "--header"];
    let (status, head, _) = curl(&node, "/chat/a", &[&ask[..], &[known]].concat()).await;
    assert!(status == 204 && head.contains("access-control-allow-methods: get, put, post"), "{head}");
    assert!(head.contains("hermes-subscribe"), "{head}");
    assert_eq!(curl(&node, "/chat/a", &[&ask[..], &[foreign]].concat()).await.0, 403);
}
