//! The relay: a GET subscribes to a URI, a PUT or POST publishes to it.
//!
//! In: curl as subscriber and publisher, and clients that read nothing. Out: each publication in each form, and what a
//! slow, late, greedy or foreign client gets.

use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hermes_testkit::binary::hermes;
use hermes_testkit::ca::Subject;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, curl, field, publish};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::process::Command;

const RELAY: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes:
- name: events
  match: {path: '/events/*'}
  relay: {unit: 100KiB, stall: 1s, queue: 4, max-timeout: 1m, per-client: 8, history: {publications: 3}}
- {name: other, match: {path: '/other/*'}, relay: {}}
";

#[tokio::test]
async fn publications_reach_every_subscriber_in_its_form() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let mut events = Subscriber::new(&node, "/events/a", &["--header", "accept: text/event-stream"], 1).await;
    let json = [&SUBSCRIBE[..], &["--http2-prior-knowledge", "--header", "accept: application/x-ndjson"]].concat();
    let mut json = Subscriber::new(&node, "/events/a", &json, 2).await;
    let mut parts = Subscriber::new(&node, "/events/a", &["--header", "subscribe: ?1"], 3).await;
    let (status, head, _) = publish(&node, "/events/a", "one", &[]).await;
    assert_eq!(status, 204, "{head}");
    assert_eq!((field(&head, "hermes-subscribers"), field(&head, "hermes-delivered")), (Some("3"), Some("3")));
    let id = field(&head, "hermes-event-id").unwrap().to_owned();
    let (status, head, _) = publish(&node, "/events/a", "two", &["--http2-prior-knowledge"]).await;
    assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("3")), "{head}");
    // Another channel.
    assert_eq!(field(&publish(&node, "/events/b", "x", &[]).await.1, "hermes-subscribers"), Some("0"));

    let lines = events.lines(5).await;
    assert!(lines[0].starts_with("id: ") && lines[0].ends_with("-0"), "the position before the first: {lines:?}");
    assert_eq!([&lines[1], &lines[2], &lines[4]], [&format!("id: {id}"), "data: one", "data: two"]);
    let first: serde_json::Value = serde_json::from_str(&json.line().await).unwrap();
    assert_eq!(first, serde_json::json!({"id": id, "type": "text/plain", "data": "one"}));
    let second: serde_json::Value = serde_json::from_str(&json.line().await).unwrap();
    assert_eq!(second["data"], "two");
    let lines = parts.lines(6).await;
    assert!(lines[0].starts_with("--hermes-") && lines[0].len() == 41, "{lines:?}");
    assert_eq!(
        lines[1..5],
        [&format!("hermes-event-id: {id}"), "content-type: text/plain", "content-length: 3", "one"]
    );
    assert_eq!(lines[5], lines[0]);
    drop(parts);
    node.metric_reaches("hermes_relay_deliveries_total", r#"result="queued""#, 6.0).await;
}

#[tokio::test]
async fn a_subscription_ends_at_its_timeout_unless_it_is_refreshed() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let arguments = [&SUBSCRIBE[..], &["--header", "hermes-timeout: 2", "--include"]].concat();
    let begun = std::time::Instant::now();
    let mut subscriber = Subscriber::new(&node, "/events/a", &arguments, 1).await;
    let mut id = None;
    while id.is_none() {
        id = subscriber.line().await.strip_prefix("hermes-subscription: ").map(str::to_owned);
    }
    let id = format!("hermes-subscription: {}", id.unwrap());
    // A timeout that is too long is refused, and the subscription stays as it was.
    let (status, head, body) = curl(&node, "/events/a", &["--header", &id, "--header", "hermes-timeout: 61"]).await;
    assert_eq!((status, field(&head, "hermes-max-timeout")), (400, Some("60")), "{body}");
    let (status, head, _) = curl(&node, "/events/a", &["--header", &id, "--header", "hermes-timeout: 4"]).await;
    assert_eq!((status, field(&head, "hermes-timeout")), (204, Some("4")), "{head}");
    let (code, rest) = subscriber.end().await;
    assert_eq!(code, 0, "the body is complete");
    assert!(rest.iter().rev().find(|line| !line.is_empty()).unwrap().ends_with("--"), "{rest:?}");
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(curl(&node, "/events/a", &["--header", &id]).await.0, 404);
    // A first subscription with a timeout that is too long.
    let arguments = [&SUBSCRIBE[..], &["--header", "hermes-timeout: 61"]].concat();
    let (status, head, _) = curl(&node, "/events/a", &arguments).await;
    assert_eq!((status, field(&head, "hermes-max-timeout")), (400, Some("60")));
}

#[tokio::test]
async fn a_client_resumes_after_its_last_publication_and_learns_of_holes() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let mut ids = Vec::new();
    for text in ["1", "2", "3", "4", "5"] {
        let (_, head, _) = publish(&node, "/events/a", text, &[]).await;
        ids.push(field(&head, "hermes-event-id").unwrap().to_owned());
    }
    let resume = |id: &str| {
        [
            "--header".to_owned(),
            "accept: text/event-stream".to_owned(),
            "--header".to_owned(),
            format!("last-event-id: {id}"),
        ]
    };
    let arguments = resume(&ids[2]);
    let mut whole = Subscriber::new(&node, "/events/a", &arguments.each_ref().map(String::as_str), 1).await;
    assert_eq!(
        whole.lines(5).await[1..],
        [format!("id: {}", ids[3]), "data: 4".into(), format!("id: {}", ids[4]), "data: 5".into()]
    );
    // The history has three publications. EventSource can only write the query.
    let path = format!("/events/a?last-event-id={}", ids[0]);
    let mut partial = Subscriber::new(&node, &path, &["--header", "accept: text/event-stream"], 2).await;
    let lines = partial.lines(6).await;
    assert_eq!(lines[2..4], ["event: gap", "data: 1"], "{lines:?}");
    assert_eq!(lines[5], "data: 3");
    // An identifier of an earlier life of the channel.
    let arguments = resume("00000000000000ff-9");
    let mut foreign = Subscriber::new(&node, "/events/a", &arguments.each_ref().map(String::as_str), 3).await;
    assert_eq!(foreign.lines(4).await[2..4], ["event: gap", "data: unknown"]);
    assert_eq!(
        curl(&node, "/events/a", &["--header", "accept: text/event-stream", "--header", "last-event-id: x"]).await.0,
        400
    );
    // Without an identifier, only what is published afterwards.
    let mut late = Subscriber::new(&node, "/events/a", &["--header", "accept: text/event-stream"], 4).await;
    publish(&node, "/events/a", "6", &[]).await;
    assert_eq!(late.lines(3).await[2], "data: 6");
}

/// A subscriber that reads nothing.
async fn stalled(node: &Node, count: u64) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(node.address("web")).await.unwrap();
    stream.write_all(b"GET /events/a HTTP/1.1\r\nhost: relay\r\nhermes-subscribe: true\r\n\r\n").await.unwrap();
    node.metric_is("hermes_relay_subscriptions", "", count as f64).await;
    stream
}

/// The authority that [`stalled`] names.
const AUTHORITY: [&str; 2] = ["--header", "host: relay"];

#[tokio::test]
async fn realtime_drops_for_the_slow_and_reliable_waits_until_they_stall() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let json = [&SUBSCRIBE[..], &AUTHORITY, &["--header", "accept: application/x-ndjson"]].concat();
    let mut reader = Subscriber::new(&node, "/events/a", &json, 1).await;
    let _slow = stalled(&node, 2).await;
    let text = "x".repeat(90_000);
    let mut dropped = 0;
    // Sockets of the loopback interface buffer some megabytes.
    for _ in 0..200 {
        let (status, head, _) = publish(&node, "/events/a", &text, &AUTHORITY).await;
        assert_eq!((status, field(&head, "hermes-subscribers")), (204, Some("2")));
        dropped += u32::from(field(&head, "hermes-delivered") == Some("1"));
        let line: serde_json::Value = serde_json::from_str(&reader.line().await).unwrap();
        assert_eq!(line["data"].as_str().map(str::len), Some(text.len()), "the fast subscriber has each one");
        if dropped >= 3 {
            break;
        }
    }
    assert_eq!(dropped, 3, "the queue of the slow subscriber never filled");
    // A reliable publication waits for it, and for no longer than `stall`.
    let begun = std::time::Instant::now();
    let reliable = [&AUTHORITY[..], &["--header", "hermes-relay: reliable"]].concat();
    let (status, head, _) = publish(&node, "/events/a", "reliable", &reliable).await;
    assert_eq!(
        (status, field(&head, "hermes-subscribers"), field(&head, "hermes-delivered")),
        (204, Some("1"), Some("1"))
    );
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    let line: serde_json::Value = serde_json::from_str(&reader.line().await).unwrap();
    assert_eq!(line["data"], "reliable");
    node.metric_reaches("hermes_limit_hits_total", r#"limit="relay-stalled""#, 1.0).await;
}

#[tokio::test]
async fn what_a_relay_does_not_take_is_refused_with_the_reason() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let large = "x".repeat(110_000);
    let (status, _, body) = publish(&node, "/events/a", &large, &[]).await;
    assert_eq!(status, 413, "{body}");
    assert!(body.contains("102400 bytes"), "{body}");
    let fields = format!("content-x: {}", "x".repeat(9000));
    assert_eq!(publish(&node, "/events/a", "x", &["--header", &fields]).await.0, 431);
    let (status, _, body) = curl(&node, "/events/a", &[]).await;
    assert!(status == 400 && body.contains("hermes-subscribe"), "{body}");
    let (status, head, _) = curl(&node, "/events/a", &["--request", "DELETE"]).await;
    assert_eq!((status, field(&head, "allow")), (405, Some("get, put, post")));
    for (arguments, expected) in [
        (vec!["--header", "hermes-timeout: -1"], 400),
        (vec!["--header", "hermes-timeout: 0"], 400),
        (vec!["--header", "accept: text/html"], 406),
        (vec!["--header", "hermes-group;"], 400),
        (vec!["--header", "hermes-channels: events/b"], 400),
        (vec!["--header", "hermes-channels: /other/b"], 403),
        (vec!["--header", "hermes-channels: /none"], 403),
        (vec!["--header", "hermes-channels: /events/b#c"], 400),
        (vec!["--header", "hermes-channels: /events/b", "--header", "hermes-channels: /none"], 403),
        (vec!["--header", "hermes-timeout: 1", "--header", "hermes-timeout: 2"], 400),
        (vec!["--header", "hermes-subscription: 1"], 404),
    ] {
        let all = [&SUBSCRIBE[..], &arguments].concat();
        let (status, _, body) = curl(&node, "/events/a", &all).await;
        assert_eq!(status, expected, "{arguments:?}: {body}");
    }
    let (status, ..) = publish(&node, "/events/a", "x", &["--header", "hermes-relay: slowly"]).await;
    assert_eq!(status, 400);
    let mut all = Vec::new();
    for count in 1..=8 {
        all.push(Subscriber::new(&node, "/events/a", &SUBSCRIBE, count).await);
    }
    assert_eq!(curl(&node, "/events/a", &SUBSCRIBE).await.0, 429);
    drop(all);
}

#[tokio::test]
async fn one_subscription_has_several_channels() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let json =
        [&SUBSCRIBE[..], &["--header", "accept: application/x-ndjson", "--header", "hermes-channels: /events/b"]]
            .concat();
    let mut both = Subscriber::new(&node, "/events/a", &json, 1).await;
    let mut positions = Vec::new();
    for (path, text) in [("/events/b", "1"), ("/events/a", "2"), ("/events/b", "3")] {
        publish(&node, path, text, &[]).await;
        let line: serde_json::Value = serde_json::from_str(&both.line().await).unwrap();
        assert_eq!((line["channel"].as_str(), line["data"].as_str()), (Some(path), Some(text)));
        positions.push(line["id"].as_str().unwrap().to_owned());
    }
    assert!(positions[0].contains("-0,"), "nothing of the first channel was published: {positions:?}");
    drop(both);
    // A client that leaves is noticed at once, and not at the next heartbeat.
    node.metric_is("hermes_relay_subscriptions", "", 0.0).await;
    publish(&node, "/events/a", "4", &[]).await;
    let position = format!("last-event-id: {}", positions[2]);
    let resumed = [&json[..], &["--header", &position]].concat();
    let mut both = Subscriber::new(&node, "/events/a", &resumed, 1).await;
    let line: serde_json::Value = serde_json::from_str(&both.line().await).unwrap();
    assert_eq!((line["channel"].as_str(), line["data"].as_str()), (Some("/events/a"), Some("4")));
}

#[tokio::test]
async fn a_channel_that_a_client_may_no_longer_read_ends_its_subscription() {
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let arguments = [&SUBSCRIBE[..], &["--header", "hermes-channels: /events/b"]].concat();
    let both = Subscriber::new(&node, "/events/a", &arguments, 1).await;
    let first = Subscriber::new(&node, "/events/a", &SUBSCRIBE, 2).await;
    let denied =
        RELAY.replace("routes:", "routes:\n- {name: denied, match: {path: /events/b}, respond: {status: 403}}");
    node.reload(&denied, &[]).await.unwrap();
    publish(&node, "/events/a", "1", &[]).await;
    let (code, lines) = both.end().await;
    assert_ne!(code, 0, "the body broke off");
    assert!(!lines.contains(&"1".to_owned()), "{lines:?}");
    node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    drop(first);
}

#[tokio::test]
async fn spellings_of_a_uri_are_one_channel() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let arguments = [&SUBSCRIBE[..], &["--header", "host: relay.example"]].concat();
    let _subscriber = Subscriber::new(&node, "/events/a%2fb", &arguments, 1).await;
    for (path, host, subscribers) in [
        ("/events/%61%2Fb", "host: Relay.example:80", "1"),
        ("/events/a%2Fb?query=1", "host: relay.example", "1"),
        ("/events/a/b", "host: relay.example", "0"),
        ("/events/a%2Fb", "host: relay.example:81", "0"),
    ] {
        let (status, head, _) = publish(&node, path, "1", &["--header", host]).await;
        assert_eq!((status, field(&head, "hermes-subscribers")), (204, Some(subscribers)), "{path} {host}");
    }
}

#[tokio::test]
async fn idle_subscriptions_do_not_end_each_other() {
    let overlay = Overlay::new(hermes()).unwrap();
    // Each stream counts 8 KiB beside its head, until it has become a subscription.
    let document =
        format!("workers: 1\nlimits: {{request-memory: 1MiB}}\n{RELAY}").replace("per-client: 8", "per-client: 200");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    let arguments = [&SUBSCRIBE[..], &["--http2-prior-knowledge"]].concat();
    let subscribers: Vec<_> = (0..110).map(|_| Subscriber::start(&node, "/events/a", &arguments)).collect();
    node.metric_is("hermes_relay_subscriptions", "", subscribers.len() as f64).await;
    let (_, head, _) = publish(&node, "/events/a", "x", &[]).await;
    assert_eq!(field(&head, "hermes-delivered"), Some("110"));
}

#[tokio::test]
async fn a_relay_names_channels_that_nobody_can_guess() {
    let overlay = Overlay::new(hermes()).unwrap();
    let document = RELAY.replace("'/other/*'", "/other");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    let ask = ["--request", "POST", "--header", "hermes-new: true"];
    let mut names = std::collections::HashSet::new();
    let mut subscribers = Vec::new();
    for (path, above) in [("/events/", "/events"), ("/events/a", "/events/a"), ("/events/a?b=c", "/events/a")] {
        let (status, head, body) = curl(&node, path, &ask).await;
        let location = field(&head, "location").unwrap_or_default().to_owned();
        let (base, name) = location.rsplit_once('/').unwrap_or_default();
        assert_eq!((status, base, body.trim()), (201, above, &*location));
        assert!(name.len() == 32 && names.insert(name.to_owned()), "{location}");
        subscribers.push(Subscriber::new(&node, &location, &SUBSCRIBE, names.len() as u64).await);
        assert_eq!(field(&publish(&node, &location, "x", &[]).await.1, "hermes-delivered"), Some("1"));
    }
    let (status, _, body) = curl(&node, "/other", &ask).await;
    assert!(status == 404 && body.contains("does not serve the paths below /other"), "{status} {body}");
}

#[tokio::test]
async fn a_publication_goes_to_one_of_a_group() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let worker =
        [&SUBSCRIBE[..], &["--header", "accept: application/x-ndjson", "--header", "hermes-group: w"]].concat();
    let mut first = Subscriber::new(&node, "/events/jobs", &worker, 1).await;
    let mut second = Subscriber::new(&node, "/events/jobs", &worker, 2).await;
    for job in ["1", "2"] {
        let (_, head, _) = publish(&node, "/events/jobs", job, &["--header", "hermes-deliver: one"]).await;
        assert_eq!((field(&head, "hermes-subscribers"), field(&head, "hermes-delivered")), (Some("2"), Some("1")));
        assert_eq!(field(&head, "hermes-event-id"), None, "it has no place in the channel");
    }
    // One each.
    let [one, other] = [first.line().await, second.line().await];
    assert_ne!(one, other);
}

const DEVICE: &str = "
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: all, match: {kind: http}, upstream: next}]
upstreams: [{name: next, protocol: h2, endpoints: ['$NEXT']}]
";

#[tokio::test]
async fn a_node_in_between_passes_publications_on_as_they_arrive() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let device = overlay.node("device").document(DEVICE).with("NEXT", node.address("web")).start().await.unwrap();
    let mut subscriber =
        Subscriber::start(&device, "/events/a", &[&SUBSCRIBE[..], &AUTHORITY, &["--include"]].concat());
    node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let (status, head, _) = publish(&device, "/events/a", "through", &AUTHORITY).await;
    assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("1")), "{head}");
    let mut seen = Vec::new();
    while seen.last().is_none_or(|line| line != "through") {
        seen.push(subscriber.line().await);
    }
    assert!(seen.iter().any(|line| line.starts_with("hermes-subscription: ")), "{seen:?}");
}

/// A node in between must not keep the subscription until the next heartbeat: a publication for one of a group would go to
/// a client that has left.
#[tokio::test]
async fn a_node_in_between_ends_the_subscriptions_of_clients_that_leave() {
    let overlay = Overlay::new(hermes()).unwrap();
    // No heartbeat shows the end.
    let document = RELAY.replace("queue: 4", "queue: 4, heartbeat: 5m");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    for protocol in ["h1", "h2"] {
        let document = DEVICE.replace("protocol: h2", &format!("protocol: {protocol}"));
        let device = overlay.node("device").called(protocol).document(&document);
        let device = device.with("NEXT", node.address("web")).start().await.unwrap();
        for version in ["--http1.1", "--http2-prior-knowledge"] {
            let arguments = [&SUBSCRIBE[..], &AUTHORITY, &[version]].concat();
            let mut subscriber = Subscriber::start(&device, "/events/a", &arguments);
            node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
            // The client has read all that was sent, so that the kernel sends no reset for unread bytes.
            publish(&device, "/events/a", "last", &AUTHORITY).await;
            while subscriber.line().await != "last" {}
            drop(subscriber);
            let ended = node.metric_is("hermes_relay_subscriptions", "", 0.0);
            let ended = tokio::time::timeout(Duration::from_secs(3), ended).await;
            assert!(ended.is_ok(), "{version} to the node, {protocol} to the relay: the subscription remains");
        }
    }
}

#[tokio::test]
async fn publications_cross_a_hop_of_http_3() {
    let overlay = Overlay::new(hermes()).unwrap();
    let listeners =
        "listeners: [{name: overlay, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}},";
    let relay = overlay.node("relay").identity(&Subject::node("relay")).unwrap();
    let relay = relay.document(&RELAY.replace("listeners: [", listeners)).start().await.unwrap();
    let device = overlay.node("device").identity(&Subject::node("device")).unwrap();
    let device = device.document(&DEVICE.replace("protocol: h2", "protocol: h3, tls: {node: relay}"));
    let device = device.with("NEXT", relay.address("overlay")).start().await.unwrap();
    let json = ["--header", "accept: application/x-ndjson"];
    let mut subscriber = Subscriber::start(&device, "/events/a", &[&SUBSCRIBE[..], &AUTHORITY, &json].concat());
    relay.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    for text in ["1", "2", "3"] {
        let (status, head, _) = publish(&device, "/events/a", text, &AUTHORITY).await;
        assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("1")), "{head}");
        let line: serde_json::Value = serde_json::from_str(&subscriber.line().await).unwrap();
        assert_eq!(line["data"], text);
    }
    assert_eq!(device.metric("hermes_quic_fallbacks_total", "").await.unwrap(), 0.0, "it went by HTTP/2");
    drop(subscriber);
    relay.metric_is("hermes_relay_subscriptions", "", 0.0).await;
}

#[tokio::test]
async fn a_reload_keeps_subscriptions_and_ends_those_of_a_removed_relay() {
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let json = [&SUBSCRIBE[..], &["--header", "accept: application/x-ndjson"]].concat();
    let mut subscriber = Subscriber::new(&node, "/events/a", &json, 1).await;
    node.reload(&RELAY.replace("unit: 100KiB", "unit: 1KiB"), &[]).await.unwrap();
    assert_eq!(publish(&node, "/events/a", &"x".repeat(2000), &[]).await.0, 413);
    publish(&node, "/events/a", "still", &[]).await;
    assert!(subscriber.line().await.contains("still"));
    node.reload(&RELAY.replace("name: events", "name: renamed"), &[]).await.unwrap();
    let (code, _) = subscriber.end().await;
    assert_ne!(code, 0, "the body broke off");
}

#[tokio::test]
async fn the_commands_publish_and_subscribe() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let url = format!("http://{}/events/a", node.address("web"));
    let mut command = Command::new(hermes());
    command.args(["subscribe", &url, "--timeout", "2s", "-n", "4", "--json"]);
    let mut subscriber = Subscriber::run(&mut command);
    node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let mut publisher = Command::new(hermes())
        .args(["publish", &url, "--lines"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    publisher.stdin.take().unwrap().write_all(b"one\r\ntwo").await.unwrap();
    let output = publisher.wait_with_output().await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "delivered to 1 of 1 subscriber\n".repeat(2));
    for expected in ["one", "two"] {
        let line: serde_json::Value = serde_json::from_str(&subscriber.line().await).unwrap();
        assert_eq!((line["data"].as_str(), line["type"].as_str()), (Some(expected), Some("text/plain; charset=utf-8")));
    }
    // Refreshes keep the subscription for longer than its timeout.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let output = Command::new(hermes())
        .args(["publish", &url, "--data", "three", "--json", "--reliable"])
        .output()
        .await
        .unwrap();
    let receipt: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((receipt["subscribers"].as_u64(), receipt["delivered"].as_u64()), (Some(1), Some(1)));
    let line: serde_json::Value = serde_json::from_str(&subscriber.line().await).unwrap();
    assert_eq!((&line["data"], &line["id"]), (&serde_json::json!("three"), &receipt["id"]));
    // Any bytes arrive whole.
    let bytes: Vec<u8> = (0..=255).collect();
    let mut publisher =
        Command::new(hermes()).args(["publish", &url]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    publisher.stdin.take().unwrap().write_all(&bytes).await.unwrap();
    assert!(publisher.wait().await.unwrap().success());
    let (code, rest) = subscriber.end().await;
    let line: serde_json::Value = serde_json::from_str(&rest[0]).unwrap();
    assert_eq!((code, line["base64"].as_str()), (0, Some(&*BASE64_STANDARD.encode(&bytes))));
    // Another URL of the node.
    for command in ["publish", "subscribe"] {
        let url = format!("http://{}/elsewhere", node.address("web"));
        let output = Command::new(hermes()).args([command, &url]).stdin(Stdio::null()).output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && text.contains("404"), "{command}: {text}");
    }
}

#[tokio::test]
async fn a_node_that_shuts_down_ends_its_subscriptions() {
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("relay").document(RELAY).start().await.unwrap();
    let subscriber = Subscriber::new(&node, "/events/a", &SUBSCRIBE, 1).await;
    let begun = std::time::Instant::now();
    assert!(node.end(Duration::from_secs(60)).unwrap().success());
    // Otherwise the node would wait for the subscription until the drain timeout.
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    subscriber.end().await;
}

#[tokio::test]
async fn the_kernel_holds_few_unsent_bytes_of_a_subscriber() {
    let overlay = Overlay::new(hermes()).unwrap();
    let document = RELAY.replace("queue: 4", "queue: 200").replace("stall: 1s", "stall: 30s");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    let address = node.address("web");
    let mut lazy = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /events/a HTTP/1.1\r\nhost: {address}\r\nhermes-subscribe: true\r\n\r\n");
    lazy.write_all(request.as_bytes()).await.unwrap();
    node.metric_is("hermes_relay_subscriptions", "", 1.0).await;
    let content = "x".repeat(100 << 10);
    for _ in 0..100 {
        assert_eq!(publish(&node, "/events/a", &content, &[]).await.0, 204);
    }
    let port = lazy.local_addr().unwrap().port();
    let filter = format!("sport = :{} and dport = :{port}", address.port());
    let unsent = async || -> u64 {
        let output = Command::new("ss").args(["-Htni", &filter]).output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split("notsent:").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    // Some wait when the client's window is full.
    hermes_testkit::poll::until("bytes wait", async || unsent().await > 0).await;
    let unsent = unsent().await;
    assert!(unsent <= 400 << 10, "{unsent} bytes");
}

/// A publication counts until its subscribers have read it, and not only until it leaves their queues.
#[tokio::test]
async fn what_slow_subscribers_still_read_has_a_bound_of_memory() {
    const MEMORY: u64 = 16 << 20;
    let overlay = Overlay::new(hermes()).unwrap();
    let document =
        RELAY.replace("per-client: 8", "per-client: 2000, memory: 16MiB").replace("unit: 100KiB", "unit: 2MiB");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    let address = node.address("web");
    let lazy = async |channel: &str, accept: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        let request =
            format!("GET {channel} HTTP/1.1\r\nhost: {address}\r\nhermes-subscribe: true\r\naccept: {accept}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    };
    // Too long for an argument of curl.
    let post = async |channel: &str| {
        let content = "\u{e9}".repeat(512 << 10);
        let mut stream = TcpStream::connect(address).await.unwrap();
        let length = content.len();
        let head = format!("POST {channel} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\n\r\n");
        stream.write_all(&[head.as_bytes(), content.as_bytes()].concat()).await.unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        String::from_utf8_lossy(&status[9..]).into_owned()
    };
    let mut all = Vec::new();
    for _ in 0..100 {
        all.push(lazy("/events/a", "application/x-ndjson").await);
        all.push(lazy("/events/a", "text/event-stream").await);
    }
    node.metric_is("hermes_relay_subscriptions", "", 200.0).await;
    let before = node.memory().unwrap();
    assert_eq!(post("/events/a").await, "204");
    let grown = node.memory().unwrap().saturating_sub(before);
    assert!(grown < 96 << 20, "{grown} bytes: a copy for each of them");
    // Each of these holds another publication.
    let mut refused = 0;
    for number in 0..40 {
        let channel = format!("/events/{number}");
        all.push(lazy(&channel, "multipart/mixed").await);
        node.metric_is("hermes_relay_subscriptions", "", 201.0 + f64::from(number)).await;
        let status = post(&channel).await;
        assert!(status == "204" || status == "503", "{status}");
        refused += usize::from(status == "503");
    }
    let held = node.metric("hermes_relay_memory_bytes", "").await.unwrap();
    assert!(refused > 10 && held < 1.5 * MEMORY as f64, "{refused} refused, {held} bytes");
}

/// Subscribers who read nothing. They hold up nobody, and publications in queues have a bound of memory.
#[tokio::test]
async fn a_thousand_subscribers_who_read_nothing_hold_up_nobody() {
    const LAZY: usize = 1000;
    const PUBLICATIONS: usize = 300;
    let overlay = Overlay::new(hermes()).unwrap();
    let document = RELAY.replace("per-client: 8", "per-client: 2000, memory: 16MiB").replace("queue: 4", "queue: 64");
    let node = overlay.node("relay").document(&document).start().await.unwrap();
    let address = node.address("web");
    let mut lazy = Vec::new();
    for _ in 0..LAZY {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        let request = format!("GET /events/a HTTP/1.1\r\nhost: {address}\r\nhermes-subscribe: true\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        lazy.push(stream);
    }
    let json = [&SUBSCRIBE[..], &["--header", "accept: application/x-ndjson"]].concat();
    let mut reader = Subscriber::new(&node, "/events/a", &json, LAZY as u64 + 1).await;
    let before = node.memory().unwrap();
    let content = "x".repeat(20 << 10);
    let begun = std::time::Instant::now();
    for _ in 0..PUBLICATIONS {
        assert_eq!(publish(&node, "/events/a", &content, &[]).await.0, 204);
        assert_eq!(reader.json().await["data"], content);
    }
    let (grown, seconds) = (node.memory().unwrap().saturating_sub(before), begun.elapsed().as_secs_f64());
    // 300 publications of 20 KiB for each of them would be 6 GB.
    assert!(grown < 128 << 20, "{grown} bytes");
    assert!(seconds < 60.0, "{seconds} s");
    let dropped = node.metric("hermes_relay_deliveries_total", r#"result="dropped""#).await.unwrap();
    assert!(dropped > 100_000.0, "{dropped}");
}
