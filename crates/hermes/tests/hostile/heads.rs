//! Heads and trailers beyond what a node takes: too long, too many lines, endless, or long only once unpacked.

use hermes_testkit::{
    dialog::Dialog,
    frames::{END_HEADERS, END_STREAM, Frame, Frames, block, kind},
};
use http::Request;

use crate::lab::{BOTH, Fort, last_words};

const LIMITS: &str = "header-bytes: 16KiB, header-count: 20";
/// Fits into 16 KiB with what else a request has.
const LONG: usize = 15 << 10;
const TOO_LONG: usize = 17 << 10;
/// `Host` is the twentieth.
const MANY: usize = 19;

fn h1(lines: &str) -> String {
    format!("GET /head HTTP/1.1\r\nHost: WEB\r\n{lines}\r\n")
}

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("x-{number}: y\r\n")).collect()
}

#[tokio::test]
async fn a_head_of_http_1_is_bounded_in_bytes_and_lines() {
    let mut fort = Fort::with(LIMITS).await;
    let fitting = [h1(&format!("x: {}\r\n", "y".repeat(LONG))), h1(&lines(MANY))];
    for head in fitting {
        let mut dialog = Dialog::connect(fort.address("h1")).await.unwrap();
        dialog.send(&head).await.unwrap();
        assert_eq!(dialog.head().await.unwrap().status(), 200, "{}...", &head[..60]);
        assert_eq!(fort.still_serves("h1").await.len(), 1);
    }
    let beyond = [
        h1(&format!("x: {}\r\n", "y".repeat(TOO_LONG))),
        h1(&lines(MANY + 1)),
        format!("GET /{} HTTP/1.1\r\nHost: WEB\r\n\r\n", "y".repeat(TOO_LONG)),
        // Without an end: what is beyond the limit need not be waited for.
        "y".repeat(TOO_LONG),
        format!("GET / HTTP/1.1\r\nHost: WEB\r\nx: {}", "y".repeat(TOO_LONG)),
    ];
    for head in &beyond {
        let mut dialog = Dialog::connect(fort.address("h1")).await.unwrap();
        let _ = dialog.send(head).await;
        let said = last_words(&mut dialog, &head[..60]).await;
        // Whoever is cut off while it still sends may not hear why.
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{}...: {said:?}", &head[..60]);
        assert!(fort.still_serves("h1").await.is_empty(), "{}... reached the origin", &head[..60]);
    }
    fort.node.metric_reaches("hermes_limit_hits_total", "headers", beyond.len() as f64).await;
}

#[tokio::test]
async fn a_head_of_http_2_is_bounded_in_bytes_and_lines() {
    let mut fort = Fort::with(LIMITS).await;
    let request = |count: usize, length: usize| {
        let request = Request::get("http://WEB/head").header("x", "y".repeat(length));
        (1..count).fold(request, |request, number| request.header(format!("x-{number}"), "y")).body(()).unwrap()
    };
    let mut connection = fort.door("h1").h2().await.unwrap();
    for (count, length, status) in [(1, LONG, 200), (MANY + 1, 1, 200), (1, TOO_LONG, 431), (MANY + 2, 1, 431)] {
        let answer = connection.ask(request(count, length), b"").await.unwrap();
        assert_eq!(answer.status, status, "{count} lines of {length}");
    }
    // The connection is as good as before.
    assert_eq!(connection.get("http://WEB/after").await.unwrap().status, 200);
    let seen: Vec<_> = fort.still_serves("h1").await.into_iter().map(|seen| seen.target).collect();
    assert_eq!(seen, ["/head", "/head", "/after"]);
    fort.node.metric_reaches("hermes_limit_hits_total", "headers", 1.0).await;
    // Far beyond, the connection is given up.
    let answer = connection.ask(request(1, 16 * TOO_LONG), b"").await;
    assert!(answer.as_ref().map_or(true, |answer| answer.status == 431), "{answer:?}");
    assert!(fort.still_serves("h1").await.is_empty());
}

#[tokio::test]
async fn the_crumbs_of_a_cookie_are_one_line() {
    let mut fort = Fort::with(LIMITS).await;
    let request = (0..3 * MANY).fold(Request::get("http://WEB/head"), |request, number| {
        // As browsers split them.
        request.header("cookie", format!("c{number}=1"))
    });
    let mut connection = fort.door("h1").h2().await.unwrap();
    assert_eq!(connection.ask(request.body(()).unwrap(), b"").await.unwrap().status, 200);
    let [seen] = <[_; 1]>::try_from(fort.still_serves("h1").await).unwrap();
    assert_eq!(seen.values("cookie").len(), 1);
}

#[tokio::test]
async fn what_unpacks_to_megabytes_is_not_unpacked() {
    let mut fort = Fort::with(LIMITS).await;
    let before = fort.node.memory().unwrap();
    for _ in 0..20 {
        let mut frames = Frames::connect(fort.address("h1"), &[]).await.unwrap();
        let mut bomb = block(&[(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"WEB")]);
        // A literal that is added to the table (RFC 7541, 6.2.1), then named in a byte a time: 4,000 bytes each.
        let mut literal = block(&[(b"x", &[b'y'; 3900])]);
        literal[0] = 0x40;
        bomb.extend(literal);
        bomb.extend([0xbe; 12_000]);
        // The least size of a frame that everybody takes.
        frames.send(&[Frame::new(kind::HEADERS, END_HEADERS | END_STREAM, 1, bomb)]).await.unwrap();
        let answers = |frame: &Frame| matches!(frame.kind, kind::HEADERS | kind::RST_STREAM | kind::GOAWAY);
        let answer = frames.until("a refusal", answers).await.unwrap();
        assert!(answer.kind != kind::HEADERS || answer.payload.first() != Some(&0x88), "{answer:?}");
    }
    assert!(fort.still_serves("h1").await.is_empty());
    let grown = fort.node.memory().unwrap().saturating_sub(before);
    assert!(grown < 24 << 20, "20 bombs of 47 MB left {grown} bytes behind");
}

#[tokio::test]
async fn trailers_are_bounded_too() {
    let mut fort = Fort::with(LIMITS).await;
    for listener in BOTH {
        for trailers in [format!("x: {}\r\n", "y".repeat(8 * TOO_LONG)), lines(50 * MANY)] {
            let head = "POST /trailers HTTP/1.1\r\nHost: WEB\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n";
            let mut dialog = Dialog::connect(fort.address(listener)).await.unwrap();
            let _ = dialog.send(format!("{head}{trailers}\r\n")).await;
            let said = last_words(&mut dialog, listener).await;
            assert!(!said.starts_with("HTTP/1.1 2"), "{listener}: {said:?}");
            let seen = fort.still_serves(listener).await;
            assert!(seen.iter().all(|seen| seen.body.is_none()), "{listener}: {seen:?}");
        }
    }
}
