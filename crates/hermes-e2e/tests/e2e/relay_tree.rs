//! Relays that form a tree: a node subscribes once for all its clients, and publications enter anywhere.
//!
//! In: a root, nodes below it, and curl at each. Out: what every subscriber gets when nodes break off, restart, refuse, or
//! are each other's next relay; and how often a publication crosses a link.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::port;
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, curl, field, publish};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Nodes of the tests trust each other by address, so that they may say how many subscribers they stand for.
const ROOT: &str = "
listeners: [{name: web, bind: '$BIND', protocol: http, trust: [127.0.0.0/8]}]
routes:
- {name: closed, match: {path: '/closed/*', headers: {via: '*'}}, respond: {status: 403}}
- {name: closed-root, match: {path: '/closed/*'}, relay: {}}
- name: events
  match: {path: '/events/*'}
  relay: {queue: 16, unit: 100KiB, max-timeout: 1m, history: {publications: 16}}
";

const BELOW: &str = "
listeners: [{name: web, bind: '$BIND', protocol: http, trust: [127.0.0.0/8]}]
routes:
- name: events
  match: {path: '/*'}
  relay: {upstream: next, queue: 16, unit: 100KiB, max-timeout: 1m, stall: 3s}
upstreams: [{name: next, protocol: h2, endpoints: ['$NEXT']}]
";

/// All clients name the same channel, whichever node they ask.
const HOST: [&str; 2] = ["--header", "host: chat.example"];

async fn root(overlay: &Overlay) -> Node {
    overlay.node("root").document(ROOT).with("BIND", "127.0.0.1:0").start().await.unwrap()
}

async fn below(overlay: &Overlay, name: &str, next: SocketAddr) -> Node {
    let draft = overlay.node(name).document(BELOW).with("BIND", "127.0.0.1:0");
    draft.with("NEXT", next).start().await.unwrap()
}

fn json(arguments: &[&'static str]) -> Vec<&'static str> {
    [&SUBSCRIBE[..], &HOST, &["--header", "accept: application/x-ndjson"], arguments].concat()
}

/// Waits until the root knows of this many subscribers.
async fn counts(root: &Node, channel: &str, expected: &str) {
    let is_known = async || {
        let (_, head, _) = publish(root, channel, "count", &HOST).await;
        field(&head, "hermes-subscribers") == Some(expected)
    };
    hermes_testkit::poll::until("the root knows all subscribers", is_known).await;
}

/// The next publication that is not one of [`counts`].
async fn next(subscriber: &mut Subscriber) -> Value {
    loop {
        let line = subscriber.json().await;
        if line["data"] != "count" {
            return line;
        }
    }
}

#[tokio::test]
async fn each_publication_crosses_each_link_once() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let (left, right) =
        (below(&overlay, "left", root.address("web")).await, below(&overlay, "right", root.address("web")).await);
    let leaf = below(&overlay, "leaf", left.address("web")).await;
    let mut subscribers = vec![Subscriber::new(&root, "/events/a", &json(&[]), 1).await];
    for (node, count) in [(&left, 2), (&right, 3), (&leaf, 2)] {
        for number in 1..=count {
            subscribers.push(Subscriber::new(node, "/events/a", &json(&[]), number).await);
        }
    }
    // Those of left and right at the root, and that of leaf at left.
    root.metric_is("hermes_relay_subscriptions", "", 3.0).await;
    left.metric_is("hermes_relay_subscriptions", "", 3.0).await;
    left.metric_is("hermes_relay_upstream_subscriptions", "", 1.0).await;
    counts(&root, "/events/a", "8").await;
    let text = "x".repeat(50_000);
    for (number, node) in [&root, &left, &right, &leaf].into_iter().enumerate() {
        let (status, head, _) = publish(node, "/events/a", &format!("{number}{text}"), &HOST).await;
        assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("8")), "{}: {head}", node.name());
    }
    let mut ids = Vec::new();
    for subscriber in &mut subscribers {
        let mut all = Vec::new();
        for number in 0..4 {
            let line = next(subscriber).await;
            assert_eq!(line["data"], format!("{number}{text}"));
            all.push(line["id"].clone());
        }
        ids.push(all);
    }
    assert!(ids.iter().all(|of_one| *of_one == ids[0]), "a publication has one identifier everywhere");
    drop(subscribers);
    // A node that no longer subscribes leaves after a moment.
    root.metric_is("hermes_relay_subscriptions", "", 0.0).await;
    for node in [&left, &right, &leaf] {
        node.metric_is("hermes_relay_upstream_subscriptions", "", 0.0).await;
    }
    let is_of_node = |record: &Value| {
        record["method"] == "GET" && record["path"] == "/events/a" && record["sent"].as_u64() > Some(100_000)
    };
    let sent: Vec<u64> = root
        .records()
        .iter()
        .filter(|record| is_of_node(record))
        .filter_map(|record| record["sent"].as_u64())
        .collect();
    assert_eq!(sent.len(), 3, "{sent:?}");
    assert!(sent.iter().all(|sent| *sent < 4 * 50_000 + 20_000), "more than once: {sent:?}");
}

/// Publications during the absence of a node arrive when it is back, without a gap.
#[tokio::test]
async fn a_node_that_restarts_costs_its_subscribers_nothing() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let at = port::reserve(Ipv4Addr::LOCALHOST);
    let middle = |process: &str| {
        let draft = overlay.node("middle").called(process).document(BELOW);
        draft.with("BIND", at).with("NEXT", root.address("web")).start()
    };
    let first = middle("middle-1").await.unwrap();
    let leaf = below(&overlay, "leaf", at).await;
    let mut subscriber = Subscriber::new(&leaf, "/events/a", &json(&[]), 1).await;
    publish(&leaf, "/events/a", "one", &HOST).await;
    assert_eq!(subscriber.json().await["data"], "one");
    drop(first);
    for text in ["two", "three"] {
        publish(&root, "/events/a", text, &HOST).await;
    }
    // Nobody listens there.
    leaf.metric_reaches("hermes_relay_upstream_breaks_total", "", 1.0).await;
    let (status, _, body) = publish(&leaf, "/events/a", "lost", &HOST).await;
    assert!(status >= 500, "{status} {body}");
    let _second = middle("middle-2").await.unwrap();
    for text in ["two", "three"] {
        let line = subscriber.json().await;
        assert_eq!(line["data"], text, "{line}");
    }
    publish(&leaf, "/events/a", "four", &HOST).await;
    assert_eq!(subscriber.json().await["data"], "four");
}

/// A client that resumes at another node gets each publication once, even if that node already subscribes.
#[tokio::test]
async fn a_client_that_moves_to_another_node_misses_nothing() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let (left, right) =
        (below(&overlay, "left", root.address("web")).await, below(&overlay, "right", root.address("web")).await);
    let mut others = Vec::new();
    let mut last = String::new();
    for (round, node) in [&left, &right, &left, &right].into_iter().enumerate() {
        let position = format!("last-event-id: {last}");
        let mut arguments = [&SUBSCRIBE[..], &HOST, &["--header", "accept: application/x-ndjson"]].concat();
        if !last.is_empty() {
            arguments.extend(["--header", &position]);
        }
        let mut mover = Subscriber::start(node, "/events/a", &arguments);
        if round == 0 {
            node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
        }
        for number in [3 * round, 3 * round + 1] {
            publish(&root, "/events/a", &number.to_string(), &HOST).await;
        }
        for number in (3 * round).saturating_sub(1)..3 * round + 2 {
            let line = mover.json().await;
            assert_eq!(line["data"], number.to_string(), "{line}");
            last = line["id"].as_str().unwrap().to_owned();
        }
        drop(mover);
        publish(&root, "/events/a", &(3 * round + 2).to_string(), &HOST).await;
        if round == 1 {
            // From now on, right subscribes all the time.
            others.push(Subscriber::new(&right, "/events/a", &json(&[]), 1).await);
        }
    }
    let (status, _, body) =
        curl(&left, "/events/a", &[&json(&[])[..], &["--header", "last-event-id: x"]].concat()).await;
    assert_eq!(status, 400, "{body}");
    // The client learns how many publications the root no longer has.
    for number in 0..20 {
        publish(&root, "/events/a", &format!("later {number}"), &HOST).await;
    }
    let position = format!("last-event-id: {last}");
    let mut late = Subscriber::start(&left, "/events/a", &[&json(&[])[..], &["--header", &position]].concat());
    assert_eq!(late.json().await["missed"], 5, "1 and 20 were published since, and 16 are kept");
    assert_eq!(late.json().await["data"], "later 4");
}

/// Another root has other identifiers. The subscribers stay, and learn that something may be missing.
#[tokio::test]
async fn a_root_that_restarts_leaves_a_gap_that_is_told() {
    let overlay = Overlay::new(hermes()).unwrap();
    let at = port::reserve(Ipv4Addr::LOCALHOST);
    let root = |process: &str| overlay.node("root").called(process).document(ROOT).with("BIND", at).start();
    let first = root("root-1").await.unwrap();
    let node = below(&overlay, "node", at).await;
    let mut subscriber = Subscriber::new(&node, "/events/a", &json(&[]), 1).await;
    publish(&node, "/events/a", "one", &HOST).await;
    assert_eq!(subscriber.json().await["data"], "one");
    drop(first);
    let root = root("root-2").await.unwrap();
    root.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    publish(&root, "/events/a", "two", &HOST).await;
    let line = subscriber.json().await;
    assert_eq!(line.get("missed"), Some(&Value::Null), "their number is unknown: {line}");
    assert_eq!(subscriber.json().await["data"], "two");
}

#[tokio::test]
async fn nodes_that_are_each_others_next_relay_refuse() {
    let overlay = Overlay::new(hermes()).unwrap();
    let [one, two, three] = [(); 3].map(|()| port::reserve(Ipv4Addr::LOCALHOST));
    let mut nodes = Vec::new();
    for (name, bind, next) in [("one", one, two), ("two", two, three), ("three", three, one)] {
        let draft = overlay.node(name).document(BELOW).with("BIND", bind).with("NEXT", next);
        nodes.push(draft.start().await.unwrap());
    }
    for node in &nodes {
        let (status, _, body) = curl(node, "/events/a", &json(&[])).await;
        assert_eq!(status, 508, "{}: {body}", node.name());
        assert_eq!(publish(node, "/events/a", "x", &HOST).await.0, 508);
    }
    // Everybody at once: each waits for the other, and one of them notices.
    let all: Vec<Subscriber> =
        nodes.iter().map(|node| Subscriber::start(node, "/events/b", &json(&["--fail"]))).collect();
    for subscriber in all {
        assert_eq!(subscriber.end().await.0, 22, "curl tells of a status of 400 or more");
    }
    for node in &nodes {
        node.metric_is("hermes_relay_upstream_subscriptions", "", 0.0).await;
        node.metric_is("hermes_relay_subscriptions", "", 0.0).await;
    }
}

#[tokio::test]
async fn what_the_next_relay_refuses_is_refused_with_its_status() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let node = below(&overlay, "node", root.address("web")).await;
    let (status, _, body) = curl(&node, "/closed/a", &json(&[])).await;
    assert_eq!((status, &*body), (403, "the next relay responded 403 Forbidden\n"));
    assert_eq!(publish(&node, "/closed/a", "x", &HOST).await.0, 403);
    let (status, _, body) = curl(&node, "/elsewhere", &json(&[])).await;
    assert_eq!(status, 404, "{body}");
    let nowhere = below(&overlay, "nowhere", port::reserve(Ipv4Addr::LOCALHOST)).await;
    let (status, _, body) = curl(&nowhere, "/events/a", &json(&[])).await;
    assert!(status == 502 && body.contains("the next relay cannot be reached"), "{status} {body}");
}

/// A client cannot pass for many, even through a node that the relay believes.
#[tokio::test]
async fn only_nodes_say_how_many_subscribers_they_stand_for() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let forwarding = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: all, upstream: next}]
upstreams: [{name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}]
";
    let device = overlay.node("device").document(forwarding).with("NEXT", root.address("web")).start().await.unwrap();
    let claim = ["--header", "hermes-subscribers-behind: 4294967295"];
    let _claims = Subscriber::start(&device, "/events/a", &[&json(&[])[..], &claim].concat());
    root.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let (_, head, _) = publish(&root, "/events/a", "x", &HOST).await;
    assert_eq!(field(&head, "hermes-subscribers"), Some("1"), "{head}");
    // A node, as an address that the listener trusts proves one.
    let _node = Subscriber::new(&root, "/events/a", &[&json(&[])[..], &claim].concat(), 2).await;
    let (_, head, _) = publish(&root, "/events/a", "x", &HOST).await;
    assert_eq!(field(&head, "hermes-subscribers"), Some("4294967296"), "{head}");
    let (status, _, _) =
        curl(&root, "/events/a", &[&json(&[])[..], &["--header", "hermes-subscribers-behind: -1"]].concat()).await;
    assert_eq!(status, 400);
}

/// Only one relay knows all members of a group.
#[tokio::test]
async fn a_group_has_members_at_several_nodes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let (left, right) =
        (below(&overlay, "left", root.address("web")).await, below(&overlay, "right", root.address("web")).await);
    let member = json(&["--header", "hermes-group: w"]);
    let mut one = Subscriber::start(&left, "/events/jobs", &member);
    root.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let mut other = Subscriber::start(&right, "/events/jobs", &member);
    root.metric_is("hermes_relay_subscriptions", "", 2.0).await;
    let job = [&HOST[..], &["--header", "hermes-deliver: one"]].concat();
    for text in ["1", "2"] {
        let (_, head, _) = publish(&left, "/events/jobs", text, &job).await;
        assert_eq!(field(&head, "hermes-delivered"), Some("1"), "{head}");
    }
    assert_ne!(one.json().await["data"], other.json().await["data"]);
}

/// The root knows nothing of the routes of a node below it.
#[tokio::test]
async fn a_member_of_a_group_gets_no_more_than_its_node_allows() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let denies = "routes:\n- {name: no, match: {path: /events/secret}, respond: {status: 403}}\n\
                  - {name: read-only, match: {path: /events/a, method: [PUT, POST]}, respond: {status: 403}}";
    let draft = overlay.node("node").document(&BELOW.replace("routes:", denies)).with("BIND", "127.0.0.1:0");
    let node = draft.with("NEXT", root.address("web")).start().await.unwrap();
    let two = json(&["--header", "hermes-group: w", "--header", "hermes-channels: /events/secret"]);
    let (status, _, body) = curl(&node, "/events/b", &two).await;
    assert!(status == 400 && body.contains("hermes-channels"), "{status} {body}");
    let upgrade = async |field: &str| {
        let mut stream = TcpStream::connect(node.address("web")).await.unwrap();
        let request = format!(
            "GET /events/a HTTP/1.1\r\nhost: chat.example\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{field}\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        (stream, String::from_utf8_lossy(&status).into_owned())
    };
    assert_eq!(upgrade("hermes-group: w\r\n").await.1, "HTTP/1.1 400", "its messages would be published at the root");
    // This node serves a WebSocket, whatever subscription it names, and judges each message.
    let mut subscriber = Subscriber::start(&node, "/events/a", &json(&[]));
    counts(&root, "/events/a", "1").await;
    let (mut socket, status) = upgrade("hermes-subscription: 00000000000000000000000000000007\r\n").await;
    assert_eq!(status, "HTTP/1.1 101");
    socket.write_all(b"\x81\x84\0\0\0\0evil").await.unwrap();
    assert_eq!(publish(&root, "/events/a", "good", &HOST).await.0, 204);
    assert_eq!(next(&mut subscriber).await["data"], "good");
}

/// A subscriber below holds up the publisher above until it reads, and nothing is lost.
#[tokio::test]
async fn a_reliable_publisher_waits_for_a_slow_subscriber_below() {
    let overlay = Overlay::new(hermes()).unwrap();
    let root = root(&overlay).await;
    let node = below(&overlay, "node", root.address("web")).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 << 10).unwrap();
    let mut slow: TcpStream = socket.connect(node.address("web")).await.unwrap();
    let request = "GET /events/a HTTP/1.1\r\nhost: chat.example\r\nhermes-subscribe: true\r\naccept: application/x-ndjson\r\n\r\n";
    slow.write_all(request.as_bytes()).await.unwrap();
    node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let mut quick = Subscriber::new(&root, "/events/a", &json(&[]), 2).await;
    let text = "x".repeat(90_000);
    let reliable = [&HOST[..], &["--header", "hermes-relay: reliable"]].concat();
    let publishing = async {
        for number in 0..200 {
            let (status, head, _) = publish(&root, "/events/a", &format!("{number:03}{text}"), &reliable).await;
            assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("2")), "{number}: {head}");
        }
    };
    let reading = async {
        for number in 0..200 {
            assert_eq!(quick.json().await["data"], format!("{number:03}{text}"));
        }
    };
    let slowly = async {
        let (mut seen, mut buffer, mut lines) = (Vec::new(), vec![0; 64 << 10], 0);
        while lines < 200 {
            let count = slow.read(&mut buffer).await.unwrap();
            assert!(count > 0, "the subscription ended");
            seen.extend_from_slice(&buffer[..count]);
            lines += buffer[..count].iter().filter(|byte| **byte == b'}').count();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        String::from_utf8(seen).unwrap()
    };
    let ((), (), seen) = tokio::join!(publishing, reading, slowly);
    assert_eq!(seen.matches("missed").count(), 0);
    assert_eq!(seen.matches("\"data\":").count(), 200);
}
