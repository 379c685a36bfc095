//! Heads and trailers beyond what a node takes: too long, too many lines, endless, or long only once unpacked.

use std::io;

use bytes::Bytes;
use hermes_testkit::{
    frames::{END_HEADERS, END_STREAM, Frame, Frames, block, kind},
    listener_client::ListenerClient,
    multiplex::{self, Exchange},
    origin::scripted,
    raw_http1::RawHttp1,
};
use http::{HeaderMap, HeaderValue, Request, Response};

use crate::hostile::lab::{BOTH, NodeFixture, last_words, overlay};

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
    let mut fixture = NodeFixture::with(LIMITS).await;
    let fitting = [h1(&format!("x: {}\r\n", "y".repeat(LONG))), h1(&lines(MANY))];
    for head in fitting {
        let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
        http1.send(&head).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{}...", &head[..60]);
        assert_eq!(fixture.still_serves("h1").await.len(), 1);
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
        let mut http1 = RawHttp1::connect(fixture.address("h1")).await.unwrap();
        let _ = http1.send(head).await;
        let output = last_words(&mut http1, &head[..60]).await;
        // Whoever is cut off while it still sends may not hear why.
        assert!(output.is_empty() || output.starts_with("HTTP/1.1 4"), "{}...: {output:?}", &head[..60]);
        assert!(fixture.still_serves("h1").await.is_empty(), "{}... reached the origin", &head[..60]);
    }
    fixture.node.metric_reaches("hermes_limit_hits_total", "headers", beyond.len() as f64).await;
}

#[tokio::test]
async fn a_head_of_http_2_is_bounded_in_bytes_and_lines() {
    let mut fixture = NodeFixture::with(LIMITS).await;
    let request = |count: usize, length: usize| {
        let request = Request::get("http://WEB/head").header("x", "y".repeat(length));
        (1..count).fold(request, |request, number| request.header(format!("x-{number}"), "y")).body(()).unwrap()
    };
    let mut connection = fixture.client("h1").h2().await.unwrap();
    for (count, length, status) in [(1, LONG, 200), (MANY + 1, 1, 200), (1, TOO_LONG, 431), (MANY + 2, 1, 431)] {
        let answer = connection.ask(request(count, length), b"").await.unwrap();
        assert_eq!(answer.status, status, "{count} lines of {length}");
    }
    // The connection is as good as before.
    assert_eq!(connection.get("http://WEB/after").await.unwrap().status, 200);
    let seen: Vec<_> = fixture.still_serves("h1").await.into_iter().map(|seen| seen.target).collect();
    assert_eq!(seen, ["/head", "/head", "/after"]);
    fixture.node.metric_reaches("hermes_limit_hits_total", "headers", 1.0).await;
    // Far beyond, the connection is given up.
    let answer = connection.ask(request(1, 16 * TOO_LONG), b"").await;
    assert!(answer.as_ref().map_or(true, |answer| answer.status == 431), "{answer:?}");
    assert!(fixture.still_serves("h1").await.is_empty());
}

/// So many names, each as short as can be: `a`, `b`, ..., `zz`, `aaa`, ...
fn names(count: usize) -> Vec<String> {
    let letters = || (b'a'..=b'z').map(char::from);
    let mut names: Vec<String> = letters().map(String::from).collect();
    let mut from = 0;
    while names.len() < count {
        let to = names.len();
        for at in from..to {
            for letter in letters() {
                names.push(format!("{}{letter}", names[at]));
            }
        }
        from = to;
    }
    names.retain(|name| name != "te");
    names.truncate(count);
    names
}

/// What the table of a head holds.
const NAMES: usize = 24_576;

/// With the greatest limits that a document may have.
#[tokio::test]
async fn more_names_than_a_table_holds_are_refused() {
    let origin = scripted::h2(|exchange: Exchange| async move {
        let many = names(NAMES).iter().fold(Response::builder(), |response, name| response.header(name, ""));
        let many = many.body(()).map_err(io::Error::other)?;
        match exchange.request.uri().path() {
            "/interim" => {
                let Exchange { request: _request, mut respond } = exchange;
                let (mut parts, ()) = many.into_parts();
                parts.status = http::StatusCode::EARLY_HINTS;
                respond.send_informational(Response::from_parts(parts, ())).map_err(io::Error::other)?;
                respond.send_response(Response::new(()), true).map(drop).map_err(io::Error::other)
            }
            "/trailers" => {
                let Exchange { request: _request, mut respond } = exchange;
                let mut body = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
                body.send_trailers(many.into_parts().0.headers).map_err(io::Error::other)
            }
            "/many" => exchange.answer(many, "").await,
            _ => exchange.answer(Response::new(()), "").await,
        }
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let document = "
workers: 1
limits: {header-bytes: 512KiB, header-count: 10000}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin, retry: {on: [reset], attempts: 2}}
upstreams:
- {name: origin, protocol: h2, overlay: false, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("fort").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    for path in ["/many", "/interim", "/trailers"] {
        // Passed on or refused: what matters is that it ends, and what comes after it.
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let _ = connection.get(&format!("http://WEB{path}")).await;
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        assert_eq!(connection.get("http://WEB/").await.unwrap().status, 200, "after {path}");
    }
    for count in [NAMES, NAMES - 2] {
        let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
        let request = names(count).iter().fold(Request::get("http://WEB/"), |request, name| request.header(name, ""));
        let answer = connection.ask(request.body(()).unwrap(), b"").await;
        assert!(answer.as_ref().map_or(true, |answer| answer.status == 431), "{answer:?}");
        let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
        let lines: String = names(count).iter().map(|name| format!("{name}:\r\n")).collect();
        let _ = http1.send(h1(&lines)).await;
        let output = last_words(&mut http1, "many names").await;
        assert!(output.is_empty() || output.starts_with("HTTP/1.1 431"), "{output:?}");
    }
    // A node that panicked is not dropped in silence.
    drop(node);
}

#[tokio::test]
async fn an_origin_s_head_is_bounded_in_lines() {
    let origin = scripted::h2(|exchange: Exchange| async move {
        let count = exchange.request.uri().path().trim_start_matches('/').parse().unwrap_or(0);
        let response = names(count).iter().fold(Response::builder(), |response, name| response.header(name, ""));
        exchange.answer(response.body(()).map_err(io::Error::other)?, "").await
    });
    let (overlay, origin) = (overlay(), origin.unwrap());
    let document = "
limits: {header-count: 20}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h2, overlay: false, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("fort").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    for (count, status) in [(20, 200), (21, 502), (20, 200)] {
        let answer = connection.get(&format!("http://WEB/{count}")).await.unwrap();
        assert_eq!(answer.status, status, "{count} lines");
    }
}

#[tokio::test]
async fn the_crumbs_of_a_cookie_are_one_line() {
    let mut fixture = NodeFixture::with(LIMITS).await;
    let request = (0..3 * MANY).fold(Request::get("http://WEB/head"), |request, number| {
        // As browsers split them.
        request.header("cookie", format!("c{number}=1"))
    });
    let mut connection = fixture.client("h1").h2().await.unwrap();
    assert_eq!(connection.ask(request.body(()).unwrap(), b"").await.unwrap().status, 200);
    let [seen] = <[_; 1]>::try_from(fixture.still_serves("h1").await).unwrap();
    assert_eq!(seen.values("cookie").len(), 1);
}

#[tokio::test]
async fn header_compression_bombs_are_not_expanded() {
    let mut fixture = NodeFixture::with(LIMITS).await;
    let before = fixture.node.memory().unwrap();
    for _ in 0..20 {
        let mut frames = Frames::connect(fixture.address("h1"), &[]).await.unwrap();
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
    assert!(fixture.still_serves("h1").await.is_empty());
    let grown = fixture.node.memory().unwrap().saturating_sub(before);
    assert!(grown < 24 << 20, "20 bombs of 47 MB left {grown} bytes behind");
}

#[tokio::test]
async fn trailers_over_http_2_are_bounded_in_lines_too() {
    let mut fixture = NodeFixture::with(LIMITS).await;
    for (count, is_taken) in [(20, true), (21, false), (20, true)] {
        let mut connection = fixture.client("h2").h2().await.unwrap();
        let request = Request::post("http://WEB/trailers").body(()).unwrap();
        let (answer, mut stream) = connection.open(request, false).await.unwrap();
        multiplex::send_all(&mut stream, Bytes::from_static(b"hello"), false).await.unwrap();
        let trailers = names(count).into_iter().map(|name| (name.parse().unwrap(), HeaderValue::from_static("")));
        stream.send_trailers(trailers.collect::<HeaderMap>()).unwrap();
        let answered = multiplex::answer(answer).await;
        assert_eq!(answered.is_ok_and(|answer| answer.status == 200), is_taken, "{count} lines");
    }
    let seen = fixture.still_serves("h2").await;
    assert_eq!(seen.iter().filter(|seen| seen.body.is_some()).count(), 2, "{seen:?}");
}

#[tokio::test]
async fn trailers_are_bounded_too() {
    let mut fixture = NodeFixture::with(LIMITS).await;
    for listener in BOTH {
        for trailers in [format!("x: {}\r\n", "y".repeat(8 * TOO_LONG)), lines(50 * MANY)] {
            let head = "POST /trailers HTTP/1.1\r\nHost: WEB\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n";
            let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
            let _ = http1.send(format!("{head}{trailers}\r\n")).await;
            let output = last_words(&mut http1, listener).await;
            assert!(!output.starts_with("HTTP/1.1 2"), "{listener}: {output:?}");
            let seen = fixture.still_serves(listener).await;
            assert!(seen.iter().all(|seen| seen.body.is_none()), "{listener}: {seen:?}");
        }
    }
}
