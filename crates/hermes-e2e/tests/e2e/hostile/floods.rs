//! Too much of everything that HTTP/2 has frames for.
//!
//! Whoever floods is told ENHANCE_YOUR_CALM where a limit says so, or is made to wait; the node holds no more than
//! before, writes no log for it, and serves the others. The last words to a client that still sends may be lost with
//! a reset: then the node's own counter tells.

use std::{io, time::Duration};

use hermes_testkit::{
    frames::{ACK, CALM, CANCEL, END_STREAM, Frame, Frames, REFUSED_STREAM, block, kind},
    listener_client::{ListenerClient, TunnelMode},
    origin::{self, scripted, stream},
    poll::until,
};
use tokio::net::TcpStream;

use crate::hostile::lab::{NodeFixture, overlay};

/// What a node of one worker may grow by, whatever is sent to it: some buffers, not what was sent.
const GROWTH: u64 = 24 << 20;

fn id(number: usize) -> u32 {
    u32::try_from(2 * number + 1).unwrap()
}

fn get(number: usize) -> Frame {
    Frame::get(id(number), "WEB", "/flood")
}

/// Sends the same frames again and again, and reads nothing, until all is sent, or the peer takes no more, or is gone.
async fn flood(frames: &mut Frames<TcpStream>, burst: &[Frame], times: usize) {
    for _ in 0..times {
        match tokio::time::timeout(Duration::from_millis(500), frames.send(burst)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

async fn calmed(fixture: &mut NodeFixture, frames: &mut Frames<TcpStream>, times: f64) {
    let output = frames.goodbye().await.unwrap();
    assert!(matches!(output, None | Some(CALM)), "{output:?}");
    fixture.node.metric_reaches("hermes_limit_hits_total", "rapid-reset", times).await;
}

#[tokio::test]
async fn streams_beyond_the_limit_are_refused_and_the_others_served() {
    let mut fixture = NodeFixture::with("streams: 4").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let post = |number: usize| {
        let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/flood")];
        Frame::headers(id(number), false, &fields)
    };
    frames.send(&(0..6).map(post).collect::<Vec<_>>()).await.unwrap();
    for _ in 4..6 {
        let refused = frames.until("a refusal", |frame| frame.kind == kind::RST_STREAM).await.unwrap();
        assert!(refused.stream >= id(4) && refused.reason() == Some(REFUSED_STREAM), "{refused:?}");
    }
    // The first four go on, and make room for others.
    for number in 0..4 {
        frames.send(&[Frame::new(kind::DATA, END_STREAM, id(number), "hello")]).await.unwrap();
        let ends = |frame: &Frame| frame.kind == kind::DATA && frame.flags & END_STREAM != 0;
        assert_eq!(frames.until("an answer", ends).await.unwrap().stream, id(number));
    }
    frames.send(&[get(6)]).await.unwrap();
    let answer = frames.until("an answer", |frame| frame.kind == kind::HEADERS).await.unwrap();
    assert_eq!(answer.stream, id(6));
    assert_eq!(fixture.still_serves("h1").await.len(), 5);
}

#[tokio::test]
async fn resets_in_the_same_breath_end_the_connection() {
    let mut fixture = NodeFixture::with("resets: 20").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let burst: Vec<_> = (0..1000).flat_map(|number| [get(number), Frame::reset(id(number), CANCEL)]).collect();
    let _ = frames.send(&burst).await;
    calmed(&mut fixture, &mut frames, 1.0).await;
    assert!(fixture.still_serves("h1").await.len() <= 1000);
    fixture.node.quiet().await;
}

#[tokio::test]
async fn requests_that_are_begun_only_to_be_broken_off_end_the_connection() {
    let mut fixture = NodeFixture::with("cancels: 50").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let mut broken_off = 0;
    // Each is taken up before it is broken off, which costs the node a request to the origin.
    while broken_off < 500 {
        let batch = broken_off..broken_off + 10;
        broken_off += 10;
        let begun = async {
            let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/flood")];
            let begin = |number| Frame::headers(id(number), false, &fields);
            frames.send(&batch.clone().map(begin).collect::<Vec<_>>()).await?;
            frames.ping().await?;
            frames.send(&batch.map(|number| Frame::reset(id(number), CANCEL)).collect::<Vec<_>>()).await
        };
        if begun.await.is_err() {
            break;
        }
    }
    assert!((50..500).contains(&broken_off), "it went on for {broken_off}");
    fixture.node.metric_reaches("hermes_limit_hits_total", "rapid-reset", 1.0).await;
    fixture.still_serves("h1").await;
    fixture.node.quiet().await;
}

#[tokio::test]
async fn a_client_that_cancels_few_of_its_requests_is_kept() {
    let mut fixture = NodeFixture::with("cancels: 5").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/flood")];
    for round in 0..30 {
        // Two are served for one that is broken off.
        for number in 3 * round..3 * round + 2 {
            frames.send(&[get(number)]).await.unwrap();
            let ends = |frame: &Frame| frame.stream == id(number) && frame.flags & END_STREAM != 0;
            frames.until("an answer", ends).await.unwrap();
        }
        let number = 3 * round + 2;
        frames.send(&[Frame::headers(id(number), false, &fields)]).await.unwrap();
        frames.ping().await.unwrap();
        frames.send(&[Frame::reset(id(number), CANCEL)]).await.unwrap();
    }
    frames.ping().await.unwrap();
    fixture.still_serves("h1").await;
}

#[tokio::test]
async fn streams_that_break_the_rules_end_the_connection_in_the_end() {
    let mut fixture = NodeFixture::with("error-resets: 20").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let mut broken = 0;
    while broken < 500 {
        let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/flood")];
        let lie = Frame::headers(id(broken), false, &[&fields[..], &[("content-length", "1")]].concat());
        let data = Frame::new(kind::DATA, END_STREAM, id(broken), "hello");
        broken += 1;
        if frames.send(&[lie, data]).await.is_err() || frames.ping().await.is_err() {
            break;
        }
    }
    assert!((20..500).contains(&broken), "it went on for {broken}");
    fixture.node.metric_reaches("hermes_limit_hits_total", "rapid-reset", 1.0).await;
    assert!(fixture.still_serves("h1").await.iter().all(|seen| seen.body.is_none()));
}

#[tokio::test]
async fn an_endless_head_ends_the_connection() {
    let mut fixture = NodeFixture::new().await;
    let before = fixture.node.memory().unwrap();
    let start = block(&[(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"WEB")]);
    let mut connections = 0.0;
    // Empty ones, ones that hold a field, and ones that hold as much as they may.
    for chunk in [Vec::new(), block(&[(b"x", b"y")]), block(&[(b"x", &[b'y'; 16_000])])] {
        for begins in [kind::HEADERS, kind::PUSH_PROMISE] {
            let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
            let _ = frames.send(&[Frame::new(begins, 0, 1, start.clone())]).await;
            let burst = vec![Frame::new(kind::CONTINUATION, 0, 1, chunk.clone()); 50];
            flood(&mut frames, &burst, 200).await;
            let output = frames.goodbye().await.unwrap();
            // A client's push is no more than a violation.
            assert!(begins != kind::HEADERS || matches!(output, None | Some(CALM)), "{output:?}");
            connections += f64::from(begins == kind::HEADERS);
        }
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "rapid-reset", connections).await;
    assert!(fixture.still_serves("h1").await.is_empty());
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{grown}");
}

#[tokio::test]
async fn unread_replies_to_control_frames_are_bounded() {
    let mut fixture = NodeFixture::new().await;
    fixture.still_serves("h1").await;
    let before = fixture.node.memory().unwrap();
    let ping = Frame::new(kind::PING, 0, 0, [7; 8].to_vec());
    let settings = Frame::settings(&[(4, 65_535), (1, 4096)]);
    let mut connections = Vec::new();
    for frame in [ping, settings] {
        for _ in 0..4 {
            let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
            flood(&mut frames, &vec![frame.clone(); 1000], 500).await;
            connections.push(frames);
        }
    }
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{grown}");
    assert!(fixture.still_serves("h1").await.is_empty());
}

#[tokio::test]
async fn frames_that_mean_nothing_cost_nothing() {
    let mut fixture = NodeFixture::new().await;
    fixture.still_serves("h1").await;
    let before = fixture.node.memory().unwrap();
    let log = fixture.node.log().len();
    let payload = |length: usize| vec![0; length];
    let floods = [
        ("PING answers that nobody asked for", Frame::new(kind::PING, ACK, 0, [7; 8].to_vec()), 100),
        ("SETTINGS answers", Frame::new(kind::SETTINGS, ACK, 0, ""), 0),
        ("priorities", Frame::new(2, 0, 1, payload(5)), 100),
        ("frames of no known type", Frame::new(0xee, 0xff, 7, payload(16_000)), 20),
        ("window for a connection", Frame::new(kind::WINDOW_UPDATE, 0, 0, 1u32.to_be_bytes().to_vec()), 100),
    ];
    for (what, frame, times) in floods {
        let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
        flood(&mut frames, &vec![frame; 100], times).await;
        frames.ping().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        // It is a connection like any other.
        frames.send(&[get(0)]).await.unwrap();
        frames.until(what, |frame| frame.kind == kind::DATA && frame.flags & END_STREAM != 0).await.unwrap();
    }
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{grown}");
    let written = fixture.node.log().len() - log;
    assert!(written < 4096, "strangers write our log:\n{}", fixture.node.log());
}

#[tokio::test]
async fn empty_data_frames_are_not_buffered() {
    let mut fixture = NodeFixture::new().await;
    fixture.still_serves("h1").await;
    let before = fixture.node.memory().unwrap();
    for flags in [0, 0x8] {
        let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
        let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/flood")];
        frames.send(&[Frame::headers(1, false, &fields)]).await.unwrap();
        // With the flag PADDED: a byte that says how much padding there is, and the padding.
        let payload = if flags == 0 { Vec::new() } else { [&[10][..], &[0; 10]].concat() };
        flood(&mut frames, &vec![Frame::new(kind::DATA, flags, 1, payload); 1000], 200).await;
        drop(frames);
    }
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < GROWTH, "{grown}");
    fixture.still_serves("h1").await;
    fixture.node.quiet().await;
}

#[tokio::test]
async fn tunnels_beyond_the_limit_are_refused() {
    let echo = stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
    let overlay = overlay();
    let document = "
workers: 1
limits: {tunnels: 3}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
";
    let node = overlay.node("fort").document(document).with("ECHO", echo.address()).start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    let mut open = Vec::new();
    for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::ConnectH1] {
        open.push(client.tunnel(mode, "DB:1").await.unwrap());
    }
    for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2] {
        let refused = client.tunnel(mode, "DB:1").await.err().unwrap().to_string();
        assert!(refused.contains("503"), "{refused}");
    }
    node.metric_reaches("hermes_limit_hits_total", "tunnels", 2.0).await;
    for tunnel in &mut open {
        tunnel.writer.send("hello").await.unwrap();
        assert_eq!(tunnel.reader.at_least(5).await.unwrap(), b"hello", "those that are open stay");
    }
    // One that goes makes room.
    drop(open.pop());
    until("room for a tunnel", async || client.tunnel(TunnelMode::ConnectH1, "DB:1").await.is_ok()).await;
}

#[tokio::test]
async fn requests_that_wait_for_an_origin_are_bounded() {
    let overlay = overlay();
    let origin = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
    let document = "
workers: 1
limits: {upstream-connections: 2, upstream-pending: 3}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("fort").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let mut frames = Frames::connect(node.address("in"), &[]).await.unwrap();
    frames.send(&(0..20).map(get).collect::<Vec<_>>()).await.unwrap();
    // Two are under way and three wait.
    for _ in 5..20 {
        let refused = frames.until("a refusal", |frame| frame.kind == kind::HEADERS).await.unwrap();
        assert_ne!(refused.payload.first(), Some(&0x88), "{refused:?}");
    }
    node.metric_reaches("hermes_limit_hits_total", "upstream-pending", 15.0).await;
    frames.send(&[Frame::get(id(20), "HERE", "/")]).await.unwrap();
    frames.until("an answer", |frame| frame.stream == id(20) && frame.kind == kind::HEADERS).await.unwrap();
}

#[tokio::test]
async fn the_longest_idle_connections_are_closed_first() {
    let mut fixture = NodeFixture::with("connections: 20").await;
    let mut open = Vec::new();
    for _ in 0..40 {
        open.push(TcpStream::connect(fixture.address("h1")).await.unwrap());
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "connections", 20.0).await;
    let late = open.split_off(20);
    assert_eq!((still_open(open).await.len(), still_open(late).await.len()), (0, 20));
    until("no connection", async || fixture.node.metric("hermes_connections_open", "").await.unwrap() == 0.0).await;
    fixture.still_serves("h1").await;
}

/// Those of the connections that are still open.
async fn still_open(connections: Vec<TcpStream>) -> Vec<TcpStream> {
    let mut open = Vec::new();
    for connection in connections {
        let readable = tokio::time::timeout(Duration::from_millis(20), connection.readable()).await;
        let ended = readable.is_ok()
            && !matches!(connection.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if !ended {
            open.push(connection);
        }
    }
    open
}
