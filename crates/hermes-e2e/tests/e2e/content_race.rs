//! Races of content: NDN and an HTTP origin have the same content, and one of them fails at any moment.
//!
//! In: requests to a node, a scripted producer and a scripted origin that stop by the name of the content. Out: the whole
//! content, or a response that is visibly incomplete. Never: parts of two contents.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hermes_ndn::lp::LpPacket;
use hermes_ndn::name::types;
use hermes_ndn::packet::DataBuilder;
use hermes_ndn::signature::Signer;
use hermes_ndn::{Component, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::Origin;
use hermes_testkit::origin::scripted;
use hermes_testkit::overlay::{Node, Overlay};
use tokio::net::UdpSocket;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- name: ndn-first
  match: {authority: '*.ndn.example'}
  terminate: {race: [{ndn: 'udp://$PRODUCER', accept-digest: true}, {http: '$ORIGIN'}]}
  timeout: {progress: 1s}
- name: http-first
  match: {authority: '*.http.example'}
  terminate: {race: [{http: '$ORIGIN'}, {ndn: 'udp://$PRODUCER', accept-digest: true}]}
  timeout: {progress: 1s}
";
const SEGMENT: usize = 5000;
const SEGMENTS: usize = 200;
/// The component of names for which the producer answers so late that the origin wins.
const LATE: &[u8] = b"ndn-late";

fn content() -> Vec<u8> {
    (0..SEGMENT * SEGMENTS).map(|at| u8::try_from(at % 251 * 31 % 251).unwrap()).collect()
}

/// The answer of the producer to an Interest. Names tell where it stops.
fn data(packet: &Bytes, content: &[u8]) -> Option<Bytes> {
    let Packet::Interest(interest) = Packet::decode(LpPacket::decode(packet.clone()).ok()?.fragment?).unwrap() else {
        panic!()
    };
    let uri = interest.name.to_string();
    let number = usize::try_from(interest.name.last()?.number(types::SEGMENT)?).unwrap();
    if uri.contains("dark") || (uri.contains("ndn-stops") && number > 100) {
        return None;
    }
    let builder = DataBuilder {
        name: interest.name.clone(),
        final_block: Some(Component::numbered(types::SEGMENT, SEGMENTS as u64 - 1)),
        ..DataBuilder::default()
    };
    let mut packet = builder.sign(&content[number * SEGMENT..][..SEGMENT], &Signer::digest()).unwrap().to_vec();
    if uri.contains("ndn-tampers") && number > 100 {
        let middle = packet.len() / 2;
        packet[middle] ^= 1;
    }
    Some(packet.into())
}

/// A node, the requests of its origin, and what must live as long.
async fn race(overlay: &Overlay) -> (Node, UnboundedReceiver<String>, (Origin, JoinSet<()>)) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let producer = socket.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut buffer, content, socket) = (vec![0; 65_536], content(), Arc::new(socket));
        let mut late = JoinSet::new();
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let interest = Bytes::copy_from_slice(&buffer[..length]);
            let Some(answer) = data(&interest, &content) else { continue };
            if interest.windows(LATE.len()).any(|window| window == LATE) {
                let socket = socket.clone();
                late.spawn(async move {
                    // The origin has this time even on a busy machine.
                    tokio::time::sleep(Duration::from_millis(400)).await;
                    socket.send_to(&answer, from).await
                });
            } else {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    let (seen, requests) = unbounded_channel();
    let origin = scripted::h1(move |mut http1| {
        let seen = seen.clone();
        async move {
            let head = http1.head().await?;
            http1.body(&head).await?;
            let (target, mut content) = (head.target().to_owned(), content());
            let _ = seen.send(format!("{} {target}", head.method()));
            if target.contains("http-fails") {
                return http1.send("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy").await;
            }
            if target.contains("ndn-only") {
                return http1.send("HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone").await;
            }
            // The beginning of the content.
            if target.contains("http-shorter") {
                content.truncate(content.len() * 3 / 4);
            }
            if target.contains("http-differs") {
                content[1000] ^= 1;
            }
            let sent = if target.contains("http-stops") { content.len() / 2 } else { content.len() };
            http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", content.len())).await?;
            http1.send(&content[..sent]).await
        }
    });
    let origin = origin.unwrap();
    let draft = overlay.node("race").document(DOCUMENT).with("PRODUCER", producer).with("ORIGIN", origin.address());
    (draft.start().await.unwrap(), requests, (origin, tasks))
}

/// The status and the content of an answer; `None` for content that broke off.
async fn get(node: &Node, host: &str, target: &str) -> (u16, Option<Vec<u8>>) {
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    http1.send(format!("GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), http1.body(&head).await.ok().map(|body| body.data))
}

#[tokio::test]
async fn content_is_whole_whichever_side_fails() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut node, _requests, _peers) = race(&overlay).await;
    // Each host has a preference of its own.
    for (host, target) in [
        ("1.http.example", "/org/whole/v=1"),
        ("1.ndn.example", "/org/whole/v=1"),
        // It is dark from the start, or stops or is tampered with in mid-life.
        ("2.ndn.example", "/org/dark/v=1"),
        ("3.ndn.example", "/org/ndn-stops/v=1"),
        ("4.ndn.example", "/org/ndn-tampers/v=1"),
        ("2.http.example", "/org/http-stops/v=1"),
        ("3.http.example", "/org/http-fails/v=1"),
    ] {
        // The first session of a host is a heat, the second one is not.
        for version in 1..3 {
            let target = target.replace("v=1", &format!("v={version}"));
            let (status, body) = get(&node, host, &target).await;
            assert_eq!(status, 200, "{host} {target}");
            assert!(body.as_ref() == Some(&content()), "{host} {target}: {:?} bytes", body.map(|body| body.len()));
        }
    }
    // A session that another alternative has completed is no failure.
    let failed: Vec<_> = node.records().into_iter().filter(|record| record["error"].is_string()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    node.assert_sound();
}

/// Requests versions of a content, and returns for how many the origin was asked. On a busy machine, the producer may now and
/// then need longer than its head start.
async fn origin_requests(
    node: &Node,
    requests: &mut UnboundedReceiver<String>,
    content: &str,
    versions: std::ops::Range<usize>,
) -> usize {
    let mut asked = 0;
    while requests.try_recv().is_ok() {}
    for version in versions {
        let (status, body) = get(node, "a.ndn.example", &format!("/org/{content}/v={version}")).await;
        assert_eq!((status, body.unwrap().len()), (200, SEGMENT * SEGMENTS));
        asked += usize::from(requests.try_recv().is_ok());
        while requests.try_recv().is_ok() {}
    }
    asked
}

/// The preferred one alone is asked between heats.
#[tokio::test]
async fn the_winner_is_kept() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, mut requests, _peers) = race(&overlay).await;
    // The first session is a heat.
    get(&node, "a.ndn.example", "/org/heat/v=1").await;
    while requests.try_recv().is_ok() {}
    let asked = origin_requests(&node, &mut requests, "whole", 2..12).await;
    assert!(asked <= 3, "the origin was asked {asked} times of 10 without a reason");
    // A request for no name, or for content that only one of them has, tells nothing about the others.
    for target in ["/org/%61", "/org/ndn-only/v=1", "/org/ndn-only/v=2"] {
        get(&node, "a.ndn.example", target).await;
    }
    let asked = origin_requests(&node, &mut requests, "ndn-only", 3..13).await;
    assert!(asked <= 3, "the preference changed: the origin was asked {asked} times of 10");
    // The first session of a host is a heat, in which a quick 404 does not win.
    assert_eq!(get(&node, "b.ndn.example", "/org/ndn-only/v=1").await.0, 200);
    // One failure changes the preference at once.
    get(&node, "a.ndn.example", "/org/ndn-stops/v=1").await;
    while requests.try_recv().is_ok() {}
    let mut fastest = Duration::MAX;
    // On a busy machine, one of many is quick; with the head start, none is.
    for number in 2..40 {
        if fastest < Duration::from_millis(250) {
            break;
        }
        let begun = Instant::now();
        get(&node, "a.ndn.example", &format!("/org/dark/v={number}")).await;
        fastest = fastest.min(begun.elapsed());
    }
    assert!(fastest < Duration::from_millis(250), "the failed one has kept its head start");
}

#[tokio::test]
async fn two_contents_are_never_joined() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut node, _requests, _peers) = race(&overlay).await;
    // The origin has another byte in the part that the client has already.
    let (status, body) = get(&node, "a.ndn.example", "/org/ndn-stops/http-differs/v=1").await;
    assert_eq!((status, body.map(|body| body.len())), (200, None), "the client must see that it is incomplete");
    // Both stop.
    let (status, body) = get(&node, "a.ndn.example", "/org/ndn-stops/http-stops/v=1").await;
    assert_eq!((status, body.map(|body| body.len())), (200, None));
    // The origin breaks off, and the rest of the producer's content is longer than announced.
    for host in ["1.http.example", "2.http.example"] {
        // The first session of a host is a heat.
        get(&node, host, "/org/ndn-late/whole/v=1").await;
        let (status, body) = get(&node, host, "/org/ndn-late/http-stops/http-shorter/v=1").await;
        let bytes = body.map(|body| body.len());
        assert_eq!((status, bytes), (200, None), "a part of another content must not look complete");
    }
    // Neither has it: the answer of the origin.
    let (status, body) = get(&node, "a.ndn.example", "/org/dark/http-fails/v=1").await;
    assert_eq!((status, body.as_deref()), (503, Some(&b"busy"[..])));
    node.assert_sound();
}

/// A repetition of theirs could change something.
#[tokio::test]
async fn other_requests_go_to_the_origin_once() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, mut requests, _peers) = race(&overlay).await;
    for (method, length) in [("POST", 4), ("PUT", 4), ("DELETE", 0), ("GET", 4)] {
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        let head =
            format!("{method} /org/http-stops/v=1 HTTP/1.1\r\nhost: a.ndn.example\r\ncontent-length: {length}\r\n\r\n");
        http1.send(head + &"x".repeat(length)).await.unwrap();
        let head = http1.head().await.unwrap();
        assert!(http1.body(&head).await.is_err(), "{method}: the origin stopped");
        assert_eq!(requests.recv().await.unwrap(), format!("{method} /org/http-stops/v=1"));
        assert!(requests.try_recv().is_err(), "{method} was repeated");
    }
}
