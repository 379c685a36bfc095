//! Routes of a relay with `cut-through`: subscribers get long content while it arrives.
//!
//! In: publishers that pause, break off, or send too slowly. Out: the beginning of the content before its end, the same bytes in
//! all forms, and a gap where a publisher broke off.

use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, field, publish};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const RELAY: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}]
routes:
- name: events
  match: {path: '/events/*'}
  relay: {mode: reliable, cut-through: true, unit: 1MiB, stall: 20s, history: {publications: 4}}
- name: hasty
  match: {path: '/hasty/*'}
  relay: {mode: reliable, cut-through: true, stall: 1s}
";
/// All clients name the same channel, whichever node they ask.
const HOST: [&str; 2] = ["--header", "host: chat.example"];

/// Lines of 64 bytes.
const LINES: usize = 4096;

fn line(number: usize) -> String {
    format!("{number:063}")
}

fn content() -> String {
    (0..LINES).map(|number| line(number) + "\n").collect()
}

/// A publisher that has sent a part of its content.
struct Publisher(TcpStream);

impl Publisher {
    async fn begin(node: &Node, path: &str, part: &[u8]) -> Self {
        let mut stream = TcpStream::connect(node.address("web")).await.unwrap();
        let head = format!("PUT {path} HTTP/1.1\r\nhost: chat.example\r\ncontent-length: {}\r\n\r\n", content().len());
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(part).await.unwrap();
        Self(stream)
    }

    /// Sends more, and returns the status of the response.
    async fn end(mut self, rest: &[u8]) -> String {
        // A relay that has responded reads no more.
        let _ = self.0.write_all(rest).await;
        let mut status = [0; 12];
        self.0.read_exact(&mut status).await.unwrap();
        String::from_utf8(status[9..].to_vec()).unwrap()
    }
}

fn parts() -> Vec<&'static str> {
    [SUBSCRIBE, HOST].concat()
}

fn json() -> Vec<&'static str> {
    [&parts()[..], &["--header", "accept: application/x-ndjson"]].concat()
}

/// Reads until a line of the content.
async fn reaches(subscriber: &mut Subscriber, number: usize) {
    while subscriber.line().await != line(number) {}
}

#[tokio::test]
async fn content_reaches_subscribers_before_it_has_arrived() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let mut early = Subscriber::new(&node, "/events/a", &parts(), 1).await;
    let over_h2 = [&parts()[..], &["--http2-prior-knowledge"]].concat();
    let mut over_h2 = Subscriber::new(&node, "/events/a", &over_h2, 2).await;
    let mut whole = Subscriber::new(&node, "/events/a", &json(), 3).await;
    let before = field(&publish(&node, "/events/a", "short", &HOST).await.1, "hermes-event-id").unwrap().to_owned();
    let content = content();
    let (first, rest) = content.as_bytes().split_at(content.len() / 2);
    let publisher = Publisher::begin(&node, "/events/a", first).await;
    // The last lines wait for the rest of their part.
    for subscriber in [&mut early, &mut over_h2] {
        reaches(subscriber, LINES / 4).await;
    }
    // It begins meanwhile, and gets what has arrived.
    let after = format!("last-event-id: {before}");
    let resumed = [&parts()[..], &["--header", &after]].concat();
    let mut late = Subscriber::new(&node, "/events/a", &resumed, 4).await;
    reaches(&mut late, LINES / 4).await;
    assert_eq!(publisher.end(rest).await, "204");
    for subscriber in [&mut early, &mut over_h2, &mut late] {
        for number in LINES / 4 + 1..LINES {
            assert_eq!(subscriber.line().await, line(number));
        }
        assert!(subscriber.line().await.starts_with("--hermes-"));
    }
    assert_eq!(whole.json().await["data"], "short");
    assert_eq!(whole.json().await["data"], content);
    // From the history.
    let arguments = [&json()[..], &["--header", &after]].concat();
    let mut later = Subscriber::new(&node, "/events/a", &arguments, 5).await;
    assert_eq!(later.json().await["data"], content);
}

#[tokio::test]
async fn a_publisher_that_breaks_off_leaves_a_gap() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = overlay.node("root").document(RELAY).start().await.unwrap();
    let document = format!(
        "listeners: [{{name: web, bind: '127.0.0.1:0', protocol: http}}]
upstreams: [{{name: root, endpoints: ['{}'], protocol: h2}}]
routes: [{{name: events, match: {{path: '/events/*'}}, relay: {{upstream: root, history: {{publications: 4}}}}}}]",
        root.address("web")
    );
    let leaf = overlay.node("leaf").document(&document).start().await.unwrap();
    let mut behind = Subscriber::new(&leaf, "/events/a", &json(), 1).await;
    let mut whole = Subscriber::start(&root, "/events/a", &json());
    let mut early = Subscriber::start(&root, "/events/a", &parts());
    root.metric_is("hermes_relay_subscriptions", "", 3.0).await;
    let before = field(&publish(&root, "/events/a", "before", &HOST).await.1, "hermes-event-id").unwrap().to_owned();
    let content = content();
    // A publisher that has sent hardly anything reaches nobody.
    for count in [0, 100] {
        drop(Publisher::begin(&root, "/events/a", &content.as_bytes()[..count]).await);
    }
    let publisher = Publisher::begin(&root, "/events/a", &content.as_bytes()[..content.len() / 2]).await;
    reaches(&mut early, LINES / 4).await;
    drop(publisher);
    assert_ne!(early.end().await.0, 0, "a part of the content was sent");
    assert_eq!(publish(&root, "/events/a", "after", &HOST).await.0, 204);
    for subscriber in [&mut whole, &mut behind] {
        assert_eq!(subscriber.json().await["data"], "before");
        let gap = subscriber.json().await;
        assert_eq!((&gap["missed"], &gap["data"]), (&1.into(), &serde_json::Value::Null), "{gap}");
        assert_eq!(subscriber.json().await["data"], "after");
    }
    // The histories of both have no hole.
    let after = format!("last-event-id: {before}");
    for node in [&root, &leaf] {
        let arguments = [&json()[..], &["--header", &after]].concat();
        let mut resumed = Subscriber::start(node, "/events/a", &arguments);
        assert_eq!(resumed.json().await["missed"], 1);
        assert_eq!(resumed.json().await["data"], "after");
    }
}

#[tokio::test]
async fn a_publisher_does_not_hold_up_subscribers_for_long() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let mut whole = Subscriber::new(&node, "/hasty/a", &json(), 1).await;
    let content = content();
    let mut publisher = Publisher::begin(&node, "/hasty/a", &content.as_bytes()[..100_000]).await;
    // The publisher continues, but too slowly.
    let trickle = async {
        for byte in content.as_bytes()[100_000..].chunks(1) {
            if publisher.0.write_all(byte).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let gap = tokio::select! {
        () = trickle => panic!("the publisher is faster than the bound, or the relay closed early"),
        gap = whole.json() => gap,
    };
    assert_eq!(gap["missed"], 1);
    assert_eq!(publisher.end(b"").await, "408");
    assert_eq!(publish(&node, "/hasty/a", "next", &HOST).await.0, 204);
    assert_eq!(whole.json().await["data"], "next");
}
