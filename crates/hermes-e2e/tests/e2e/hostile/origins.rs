//! Malicious origins: answers that are none, answers for somebody else, answers without end.
//!
//! The client gets a 502, or an answer that is broken off where its head had gone out already; never a part of what
//! was meant for the next one.

use std::io;

use hermes_testkit::{
    frames::{END_HEADERS, END_STREAM, Frame, Frames, block, kind},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};
use tokio::net::TcpStream;

use crate::hostile::lab::{get, last_words, overlay};

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";

/// What the next client must not get.
const POISON: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison";

/// What the client of a malicious origin may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// 502, and nothing of the answer.
    BadGateway,
    /// An answer that breaks off, or a 502.
    Abort,
    /// A whole answer with this body: there is no reason to refuse it.
    Whole(&'static str),
}
use Wanted::{Abort, BadGateway, Whole};

async fn node(overlay: &Overlay, protocol: &str, origin: &Origin) -> Node {
    let draft = overlay.node("fort").document(DOCUMENT).with("PROTOCOL", protocol);
    draft.with("ORIGIN", origin.address()).start().await.unwrap()
}

/// Answers `/N` with the Nth answer, and all else as it should.
fn origin_h1(answers: Vec<String>) -> Origin {
    let serve = move |mut http1: RawHttp1<TcpStream>| {
        let answers = answers.clone();
        async move {
            loop {
                let head = http1.head().await?;
                let at = head.target().strip_prefix('/').and_then(|number| number.parse::<usize>().ok());
                match at.and_then(|at| answers.get(at)) {
                    Some(answer) => http1.send(answer).await?,
                    None => {
                        let text = format!("GET {} 0", head.target());
                        let length = text.len();
                        http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{text}")).await?;
                    }
                }
                if head.header("x-close").is_some() {
                    return Ok(());
                }
            }
        }
    };
    scripted::h1(serve).unwrap()
}

async fn assert_wanted(node: &Node, method: &str, at: usize, close: &str, wanted: Wanted, what: &str) {
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    let request = format!("{method} /{at} HTTP/1.1\r\nHost: WEB\r\n{close}Connection: close\r\n\r\n");
    http1.send(request).await.unwrap();
    let output = last_words(&mut http1, what).await;
    let (head, body) = output.split_once("\r\n\r\n").unwrap_or((&output, ""));
    let status = head.get(9..12).unwrap_or_default();
    assert!(!output.contains("poison"), "{what}: {output:?}");
    match wanted {
        BadGateway => assert_eq!(status, "502", "{what}: {output:?}"),
        Abort => {
            let is_whole = head.contains(&format!("content-length: {}", body.len())) || body.ends_with("0\r\n\r\n");
            assert!(status == "502" || !is_whole, "{what}: {output:?}");
        }
        Whole(text) => {
            assert!(status == "200" || status == "204", "{what}: {output:?}");
            assert!(body == text || body == format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len()), "{what}: {output:?}");
        }
    }
}

async fn still_serves(node: &Node, what: &str) {
    // As many as one worker might have connections left over.
    for number in 0..3 {
        let target = format!("/honest/{number}");
        assert_eq!(get(node.address("in"), &target).await, (200, format!("GET {target} 0")), "behind {what}");
    }
}

#[tokio::test]
async fn answers_of_http_1_that_are_none() {
    let ok = |lines: &str, body: &str| format!("HTTP/1.1 200 OK\r\n{lines}\r\n{body}");
    let length = "Content-Length: 2\r\n";
    let chunks = "Transfer-Encoding: chunked\r\n";
    let attacks: Vec<(String, Wanted)> = vec![
        ("\0\x01garbage\r\n\r\n".repeat(50), BadGateway),
        ("HTTP/9.9 200 OK\r\n\r\n".to_owned(), BadGateway),
        ("HTTP/1.1 20 OK\r\n\r\n".to_owned(), BadGateway),
        ("HTTP/1.1 2000 OK\r\n\r\n".to_owned(), BadGateway),
        ("HTTP/1.1 099 OK\r\n\r\n".to_owned(), BadGateway),
        ("ICY 200 OK\r\n\r\n".to_owned(), BadGateway),
        (ok("Content-Length: 2\r\nContent-Length: 3\r\n", "ok"), BadGateway),
        (ok("Content-Length: -2\r\n", "ok"), BadGateway),
        (ok("Content-Length: 2, 3\r\n", "ok"), BadGateway),
        (ok("Content-Length: two\r\n", "ok"), BadGateway),
        (ok("X: a\r\n b\r\nContent-Length: 2\r\n", "ok"), BadGateway),
        (ok("X: a\0\r\nContent-Length: 2\r\n", "ok"), BadGateway),
        (ok("X: a\rb\r\nContent-Length: 2\r\n", "ok"), BadGateway),
        (ok("X\r\nContent-Length: 2\r\n", "ok"), BadGateway),
        (ok("Content-Length : 2\r\n", "ok"), BadGateway),
        (ok(&format!("X: {}\r\n{length}", "y".repeat(70 << 10)), "ok"), BadGateway),
        (ok(&format!("{}{length}", "X: y\r\n".repeat(120)), "ok"), BadGateway),
        ("HTTP/1.1 200 OK\r\nX: y".to_owned() + &"y".repeat(1 << 20), BadGateway),
        // Nobody asked to switch.
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx".to_owned(), BadGateway),
        (ok(chunks, "2\r\nok\r\nzz\r\npoison\r\n0\r\n\r\n"), Abort),
        (ok(chunks, "2\r\nokay\r\n0\r\n\r\n"), Abort),
        (ok(chunks, "FFFFFFFFFFFFFFFFF\r\nok\r\n0\r\n\r\n"), Abort),
        (ok(chunks, &format!("2\r\nok\r\n0\r\nX: {}\r\n\r\n", "y".repeat(1 << 20))), Abort),
        // More than was said, or than there may be: it is nobody's.
        (ok(length, &format!("ok{POISON}")), Whole("ok")),
        (ok(length, "okpoison"), Whole("ok")),
        (ok(chunks, &format!("2\r\nok\r\n0\r\n\r\n{POISON}")), Whole("ok")),
        (ok(&format!("Content-Length: 50\r\n{chunks}"), &format!("2\r\nok\r\n0\r\n\r\n{POISON}")), Whole("ok")),
        (ok("Content-Length: 2\r\nContent-Length: 2\r\n", "ok"), Whole("ok")),
        (format!("HTTP/1.1 204 No Content\r\n\r\n{POISON}"), Whole("")),
        (format!("HTTP/1.1 204 No Content\r\nContent-Length: 65\r\n\r\n{POISON}"), Whole("")),
        // Hints without end are dropped; the answer behind them counts.
        ("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n".repeat(5000) + &ok(length, "ok"), Whole("ok")),
        ("HTTP/1.1 100 Continue\r\n\r\n".repeat(5000) + &ok(length, "ok"), Whole("ok")),
    ];
    let origin = origin_h1(attacks.iter().map(|(answer, _)| answer.clone()).collect());
    let overlay = overlay();
    let node = node(&overlay, "h1", &origin).await;
    for (at, (answer, wanted)) in attacks.iter().enumerate() {
        let what = answer.chars().take(120).collect::<String>();
        // What is not refused at once may wait for more: the origin closes behind it.
        let close = if matches!(wanted, Abort) { "X-Close: yes\r\n" } else { "" };
        assert_wanted(&node, "GET", at, close, *wanted, &what).await;
        still_serves(&node, &what).await;
    }
}

#[tokio::test]
async fn a_body_for_head_is_not_the_next_answer() {
    let answers = vec![format!("HTTP/1.1 200 OK\r\nContent-Length: 65\r\n\r\n{POISON}")];
    let origin = origin_h1(answers);
    let overlay = overlay();
    let node = node(&overlay, "h1", &origin).await;
    for _ in 0..10 {
        assert_wanted(&node, "HEAD", 0, "", Whole(""), "HEAD").await;
        still_serves(&node, "HEAD").await;
    }
}

#[tokio::test]
async fn an_origin_that_closes_without_a_response_is_a_502() {
    let origin = scripted::h1(|mut http1| async move { http1.head().await.map(drop) }).unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h1", &origin).await;
    assert_eq!(get(node.address("in"), "/").await.0, 502);
}

/// Begins HTTP/2, answers the first request with these bytes, and has nothing more to say.
fn origin_h2(answer: Vec<u8>) -> Origin {
    let serve = move |http1: RawHttp1<TcpStream>| {
        let answer = answer.clone();
        async move {
            let mut frames = Frames::accept(http1, &[]).await?;
            frames.until("a request", |frame| frame.kind == kind::HEADERS).await?;
            frames.send_bytes(answer).await?;
            frames.finish().await?;
            frames.goodbye().await.map(drop)
        }
    };
    scripted::h1(serve).unwrap()
}

fn bytes(frames: &[Frame]) -> Vec<u8> {
    frames.iter().map(Frame::bytes).collect::<Vec<_>>().concat()
}

fn head(ends: bool, fields: &[(&str, &str)]) -> Frame {
    Frame::headers(1, ends, fields)
}

#[tokio::test]
async fn answers_of_http_2_that_are_none() {
    let ok = head(false, &[(":status", "200")]);
    let data = |flags: u8, text: &str| Frame::new(kind::DATA, flags, 1, text.as_bytes().to_vec());
    let long = "y".repeat(100 << 10);
    let flood = {
        let begins = Frame::new(kind::HEADERS, 0, 1, block(&[(b":status", b"200")]));
        let chunk = Frame::new(kind::CONTINUATION, 0, 1, block(&[(b"x", b"y")]));
        bytes(&[&[begins][..], &vec![chunk; 20_000]].concat())
    };
    let hints = head(false, &[(":status", "103"), ("link", "</x>")]);
    let push = [&2u32.to_be_bytes()[..], &block(&[(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])];
    let attacks: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0xee; 4096]),
        ("HTTP/1.1", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()),
        ("no status", bytes(&[head(true, &[("x", "y")])])),
        ("content-length is not a number", bytes(&[head(true, &[(":status", "abc")])])),
        ("no such status", bytes(&[head(true, &[(":status", "99999")])])),
        ("two statuses", bytes(&[head(true, &[(":status", "200"), (":status", "204")])])),
        ("upper case", bytes(&[head(true, &[(":status", "200"), ("X", "y")])])),
        ("two lines in one", bytes(&[head(true, &[(":status", "200"), ("x", "y\r\nz: a")])])),
        ("HTTP/1.1 framing", bytes(&[head(true, &[(":status", "200"), ("transfer-encoding", "chunked")])])),
        ("too long", bytes(&[head(true, &[(":status", "200"), ("x", &long)])])),
        ("a flood of CONTINUATION", flood),
        ("101", bytes(&[head(true, &[(":status", "101")])])),
        ("hints and no answer", bytes(&[&vec![hints.clone(); 5000][..], &[Frame::reset(1, 2)]].concat())),
        ("data before the head", bytes(&[data(END_STREAM, "ok")])),
        ("a push that nobody wants", bytes(&[Frame::new(kind::PUSH_PROMISE, END_HEADERS, 1, push.concat())])),
        ("a stream that nobody opened", bytes(&[Frame::headers(99, true, &[(":status", "200")])])),
        ("a reset", bytes(&[Frame::reset(1, 2)])),
        ("a goodbye with an error", bytes(&[Frame::new(kind::GOAWAY, 0, 0, [0, 0, 0, 0, 0, 0, 0, 2].to_vec())])),
        ("illegal settings", bytes(&[Frame::settings(&[(4, u32::MAX)])])),
        ("half a setting", bytes(&[Frame::new(kind::SETTINGS, 0, 0, "abc")])),
        ("no window", bytes(&[Frame::new(kind::WINDOW_UPDATE, 0, 0, [0; 4].to_vec())])),
        ("a window beyond all", bytes(&vec![Frame::new(kind::WINDOW_UPDATE, 0, 0, [0x7f, 255, 255, 255].to_vec()); 2])),
        ("a frame beyond all", vec![255, 255, 255, kind::DATA, 0, 0, 0, 0, 1, 0, 0]),
        ("less than was said", bytes(&[head(false, &[(":status", "200"), ("content-length", "9")]), data(1, "ok")])),
        ("more than was said", bytes(&[head(false, &[(":status", "200"), ("content-length", "1")]), data(1, "ok")])),
        (
            "two lengths",
            bytes(&[
                head(false, &[(":status", "200"), ("content-length", "2"), ("content-length", "3")]),
                data(1, "ok"),
            ]),
        ),
        ("broken off", bytes(&[ok.clone(), data(0, "ok"), Frame::reset(1, 2)])),
        ("cut off in a frame", [&bytes(&[ok]), &[0, 0, 9, 0, 1, 0, 0, 0, 1, b'o'][..]].concat()),
    ];
    let overlay = overlay();
    for (what, answer) in attacks {
        let origin = origin_h2(answer);
        let node = node(&overlay, "h2", &origin).await;
        assert_wanted(&node, "GET", 0, "", Abort, what).await;
        assert_eq!(node.ask("/healthz").await.unwrap().0, 200, "behind {what}");
        node.quiet().await;
    }
}

#[tokio::test]
async fn lengths_that_agree_are_one_length() {
    let fields = [(":status", "200"), ("content-length", "2"), ("content-length", "2")];
    let answer = bytes(&[head(false, &fields), Frame::new(kind::DATA, END_STREAM, 1, "ok")]);
    let origin = origin_h2(answer);
    let overlay = overlay();
    let node = node(&overlay, "h2", &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("GET / HTTP/1.1\r\nHost: WEB\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.headers.iter().filter(|(name, _)| name == "content-length").count(), 1, "{head:?}");
    assert_eq!(http1.body(&head).await.unwrap().text(), "ok");
}

#[tokio::test]
async fn an_origin_that_floods_is_not_remembered() {
    let ping = Frame::new(kind::PING, 0, 0, [7; 8].to_vec());
    let settings = Frame::settings(&[(4, 65_535)]);
    let serve = move |http1: RawHttp1<TcpStream>| {
        let (ping, settings) = (ping.clone(), settings.clone());
        async move {
            let mut frames = Frames::accept(http1, &[]).await?;
            frames.until("a request", |frame| frame.kind == kind::HEADERS).await?;
            for frame in [ping, settings] {
                let burst = vec![frame; 1000];
                for _ in 0..100 {
                    // Answers are not read: a peer that collected them would grow.
                    match tokio::time::timeout(std::time::Duration::from_secs(1), frames.send(&burst)).await {
                        Ok(sent) => sent?,
                        Err(_) => return io::Result::Ok(()),
                    }
                }
            }
            Ok(())
        }
    };
    let origin = scripted::h1(serve).unwrap();
    let overlay = overlay();
    let node = node(&overlay, "h2", &origin).await;
    let before = node.memory().unwrap();
    assert_wanted(&node, "GET", 0, "", Abort, "a flood").await;
    node.quiet().await;
    let grown = node.memory().unwrap().saturating_sub(before);
    assert!(grown < 24 << 20, "a flood of 4 MB left {grown} bytes behind");
}
