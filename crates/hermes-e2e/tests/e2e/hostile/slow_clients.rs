//! Too little for too long: clients that begin and do not go on (Slowloris), in every phase that a connection has.
//!
//! The waits are set short, and nothing here asserts how long they are: only that they end, that the connection is
//! closed, and that the node's counter says why.

use std::{io, time::Duration};

use hermes_testkit::{
    frames::{END_STREAM, Frame, Frames, INITIAL_WINDOW_SIZE, PREFACE, block, kind},
    origin::{self, http},
    overlay::{EFFECT_TIMEOUT, Node},
    raw_http1::RawHttp1,
};
use tokio::net::TcpStream;

use crate::hostile::lab::{NodeFixture, get, last_words, overlay};

const SHORT: &str = "header-timeout: 300ms, tls-timeout: 300ms, keep-alive: 300ms";
/// Between two bytes of one who trickles: several within each wait.
const TRICKLE: Duration = Duration::from_millis(50);

/// Sends the bytes one by one, until all are sent or the peer is gone.
async fn trickle(http1: &mut RawHttp1<TcpStream>, bytes: &[u8]) {
    for byte in bytes {
        if http1.send([*byte]).await.is_err() {
            return;
        }
        tokio::time::sleep(TRICKLE).await;
    }
}

#[tokio::test]
async fn clients_without_a_request_are_closed() {
    let mut fixture = NodeFixture::with(SHORT).await;
    // The beginnings of requests, handshakes, prefaces; none of them goes on.
    let beginnings: [(&str, &[u8]); 7] = [
        ("h1", b""),
        ("h1", b"GET / HT"),
        ("h1", b"GET / HTTP/1.1\r\nHost: WEB\r\n"),
        ("h1", &PREFACE[..12]),
        ("tls", b""),
        ("tls", b"\x16\x03\x01"),
        // A record of TLS that is longer than what comes.
        ("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ];
    let mut waiting = Vec::new();
    for (listener, bytes) in beginnings {
        let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
        http1.send(bytes).await.unwrap();
        waiting.push((listener, bytes, http1));
    }
    for (listener, bytes, mut http1) in waiting {
        let output = last_words(&mut http1, &format!("{listener}: {bytes:?}")).await;
        assert!(!output.starts_with("HTTP/1.1 2"), "{output:?}");
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "slow-client", beginnings.len() as f64).await;
    // A preface, and no request: closed like a connection that is idle.
    let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
    http1.send(PREFACE).await.unwrap();
    last_words(&mut http1, "a preface alone").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    frames.send_bytes(&Frame::get(1, "WEB", "/").bytes()[..20]).await.unwrap();
    frames.goodbye().await.unwrap();
    assert!(fixture.still_serves("h1").await.is_empty());
}

#[tokio::test]
async fn a_byte_now_and_then_wins_no_time() {
    let mut fixture = NodeFixture::with(SHORT).await;
    let head = format!("GET / HTTP/1.1\r\nHost: WEB\r\nx: {}", "y".repeat(10_000));
    let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
    trickle(&mut http1, head.as_bytes()).await;
    last_words(&mut http1, "a head in single bytes").await;
    let start = block(&[(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"WEB")]);
    let begins = Frame::new(kind::HEADERS, 0, 1, start).bytes();
    let chunk = Frame::new(kind::CONTINUATION, 0, 1, block(&[(b"x", b"y")])).bytes();
    let frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    let (stream, ahead) = frames.into_parts();
    let mut http1 = RawHttp1::with_unread(stream, ahead);
    trickle(&mut http1, &[begins, chunk.repeat(1000)].concat()).await;
    last_words(&mut http1, "a header block in single bytes").await;
    assert!(fixture.still_serves("h1").await.is_empty());
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_order() {
    let mut fixture = NodeFixture::with(SHORT).await;
    let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
    http1.send("GET /a HTTP/1.1\r\nHost: WEB\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    http1.body(&head).await.unwrap();
    assert_eq!(http1.to_end().await.unwrap(), b"", "an orderly end");
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    frames.send(&[Frame::get(1, "WEB", "/b")]).await.unwrap();
    frames.until("an answer", |frame| frame.flags & END_STREAM != 0 && frame.stream == 1).await.unwrap();
    assert_eq!(frames.goodbye().await.unwrap(), Some(0), "GOAWAY without an error");
    let seen: Vec<_> = fixture.still_serves("h1").await.into_iter().map(|seen| seen.target).collect();
    assert_eq!(seen, ["/a", "/b"]);
    assert_eq!(fixture.node.metric("hermes_limit_hits_total", "slow-client").await.unwrap(), 0.0);
}

#[tokio::test]
async fn frames_without_a_request_do_not_count_as_a_slow_head() {
    // Far longer than this test waits, and far shorter.
    let mut fixture = NodeFixture::with("header-timeout: 200ms, keep-alive: 10m").await;
    let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
    for number in [1, 3] {
        frames.send(&[Frame::get(number, "WEB", "/x")]).await.unwrap();
        frames.until("an answer", |frame| frame.flags & END_STREAM != 0 && frame.stream == number).await.unwrap();
        // What clients send between requests: a look whether we are there, window, settings.
        let window = Frame::new(kind::WINDOW_UPDATE, 0, 0, 1000u32.to_be_bytes().to_vec());
        frames.send(&[window, Frame::settings(&[(4, 100_000)])]).await.unwrap();
        frames.ping().await.unwrap();
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    frames.send(&[Frame::get(5, "WEB", "/x")]).await.unwrap();
    frames.until("an answer", |frame| frame.flags & END_STREAM != 0 && frame.stream == 5).await.unwrap();
    assert_eq!(fixture.still_serves("h1").await.len(), 3);
}

/// A node whose sessions owe progress soon, before an origin that reads whatever comes.
async fn hasty(overlay: &hermes_testkit::overlay::Overlay) -> (Node, origin::Origin) {
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let origin = http::serve(listener, http::Version::H1, "ok".into()).unwrap();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin, timeout: {progress: 300ms, idle: 300ms}}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let draft = overlay.node("fort").document(document).with("ORIGIN", origin.address());
    (draft.start().await.unwrap(), origin)
}

#[tokio::test]
async fn a_stalled_body_ends_its_session() {
    let overlay = overlay();
    let (node, _origin) = hasty(&overlay).await;
    let mut h1 = RawHttp1::connect(node.address("in")).await.unwrap();
    h1.send("POST /upload HTTP/1.1\r\nHost: WEB\r\nContent-Length: 1000\r\n\r\nhello").await.unwrap();
    let mut h2 = Frames::connect(node.address("in"), &[]).await.unwrap();
    let fields = [(":method", "POST"), (":scheme", "http"), (":authority", "WEB"), (":path", "/upload")];
    let data = Frame::new(kind::DATA, 0, 1, "hello");
    h2.send(&[Frame::headers(1, false, &fields), data]).await.unwrap();
    let output = last_words(&mut h1, "a body that stops").await;
    assert!(output.is_empty() || output.starts_with("HTTP/1.1 4") || output.starts_with("HTTP/1.1 5"), "{output:?}");
    let is_over = |frame: &Frame| frame.stream == 1 && (frame.kind == kind::RST_STREAM || frame.kind == kind::HEADERS);
    let over = h2.until("the end of a stream", is_over).await.unwrap();
    assert!(over.kind == kind::RST_STREAM || over.payload.first() != Some(&0x88), "{over:?}");
    node.quiet().await;
    assert_eq!(get(node.address("in"), "/").await.0, 200);
}

#[tokio::test]
async fn slow_clients_do_not_keep_the_others_out() {
    let mut fixture = NodeFixture::with(&format!("connections: 30, {SHORT}")).await;
    let mut slow = Vec::new();
    for _ in 0..60 {
        let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
        let _ = http1.send("GET / HTTP/1.1\r\n").await;
        slow.push(http1);
    }
    // There is room again though none of them has closed.
    let deadline = tokio::time::Instant::now() + EFFECT_TIMEOUT;
    while !served(&fixture).await.unwrap_or(false) {
        assert!(tokio::time::Instant::now() < deadline, "no room for an honest client");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(slow);
    fixture.still_serves("h1").await;
}

async fn served(fixture: &NodeFixture) -> io::Result<bool> {
    let mut http1 = RawHttp1::connect(fixture.address("h1")).await?;
    http1.send("GET / HTTP/1.1\r\nHost: HERE\r\nConnection: close\r\n\r\n").await?;
    Ok(http1.head().await?.status() == 200)
}

#[tokio::test]
async fn unread_responses_do_not_keep_their_sessions() {
    // An origin that says nothing: each session is ended, and the client does not read that either.
    let origin = origin::scripted::h1(|mut http1| async move {
        http1.head().await?;
        std::future::pending::<io::Result<()>>().await
    });
    let (origin, overlay) = (origin.unwrap(), overlay());
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin, timeout: {progress: 300ms}}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("fort").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let mut frames = Frames::connect(node.address("in"), &[(INITIAL_WINDOW_SIZE, 0)]).await.unwrap();
    frames.send(&[Frame::get(1, "WEB", "/"), Frame::get(3, "WEB", "/")]).await.unwrap();
    frames.until("an answer", |frame| frame.stream == 3 && frame.kind == kind::HEADERS).await.unwrap();
    node.quiet().await;
}
