//! Messages that two readers could take for two different ones: each ends its stream with H3_MESSAGE_ERROR, or is
//! answered with a refusal, reaches no origin, and takes no other stream with it (RFC 9114, 4.1.2, 4.2, 4.3).

use bytes::Bytes;
use hermes_testkit::h3::{
    Abort, abort_of,
    wire::{self, code, get},
};

use crate::h3::lab::NodeFixture;

type Lines<'a> = Vec<(&'a str, &'a str)>;

fn with<'a>(mut lines: Lines<'a>, more: &[(&'a str, &'a str)]) -> Lines<'a> {
    lines.extend_from_slice(more);
    lines
}

fn without<'a>(lines: &Lines<'a>, name: &str) -> Lines<'a> {
    lines.iter().filter(|(found, _)| *found != name).copied().collect()
}

fn malformed() -> Vec<(&'static str, Lines<'static>)> {
    let web = get("WEB", "/smuggled");
    vec![
        (":method twice", with(web.clone(), &[(":method", "POST")])),
        (":path twice", with(vec![(":path", "/other")], &web)),
        (":authority twice", with(vec![(":authority", "HERE")], &web)),
        (":status in a request", with(vec![(":status", "200")], &web)),
        ("unknown pseudo-header field", with(vec![(":colour", "red")], &web)),
        ("a pseudo-header field behind others", with(vec![("a", "b")], &web)),
        ("no :method", without(&web, ":method")),
        ("no :scheme", without(&web, ":scheme")),
        ("no :path", without(&web, ":path")),
        ("an empty :path", with(without(&web, ":path"), &[(":path", "")])),
        ("no authority at all", without(&web, ":authority")),
        ("an empty :authority", with(without(&web, ":authority"), &[(":authority", "")])),
        ("Host that differs", with(web.clone(), &[("host", "HERE")])),
        ("Host twice", with(web.clone(), &[("host", "WEB"), ("host", "WEB")])),
        ("a name in upper case", with(web.clone(), &[("X-Upper", "1")])),
        ("a name with a space", with(web.clone(), &[("a b", "1")])),
        ("a name with a line in it", with(web.clone(), &[("a\r\nb", "1")])),
        ("an empty name", with(web.clone(), &[("", "1")])),
        ("a value with a line in it", with(web.clone(), &[("a", "1\r\nGET /smuggled HTTP/1.1")])),
        ("a value with NUL", with(web.clone(), &[("a", "1\0")])),
        ("a method with a line in it", with(without(&web, ":method"), &[(":method", "GET / HTTP/1.1\r\nx:")])),
        ("a path with a line in it", with(without(&web, ":path"), &[(":path", "/ HTTP/1.1\r\nx: y")])),
        ("a path with a space", with(without(&web, ":path"), &[(":path", "/a b")])),
        ("Connection", with(web.clone(), &[("connection", "close")])),
        ("Transfer-Encoding", with(web.clone(), &[("transfer-encoding", "chunked")])),
        ("Upgrade", with(web.clone(), &[("upgrade", "websocket")])),
        ("Keep-Alive", with(web.clone(), &[("keep-alive", "1")])),
        ("Proxy-Connection", with(web.clone(), &[("proxy-connection", "close")])),
        ("TE of another coding", with(web.clone(), &[("te", "gzip")])),
        ("two lengths", with(web.clone(), &[("content-length", "0"), ("content-length", "1")])),
        ("a length that is none", with(web.clone(), &[("content-length", "+0")])),
        ("a length without a body", with(web.clone(), &[("content-length", "5")])),
        ("CONNECT with :path", vec![(":method", "CONNECT"), (":authority", "ECHO:7"), (":path", "/")]),
        ("CONNECT with :scheme", vec![(":method", "CONNECT"), (":authority", "ECHO:7"), (":scheme", "https")]),
        ("CONNECT to nobody", vec![(":method", "CONNECT")]),
        (":protocol without CONNECT", with(vec![(":protocol", "websocket")], &web)),
        ("userinfo in :authority", with(without(&web, ":authority"), &[(":authority", "me:secret@WEB")])),
    ]
}

#[tokio::test]
async fn malformed_heads_end_their_stream_and_reach_no_origin() {
    let mut fixture = NodeFixture::new().await;
    let connection = fixture.connect().await;
    for (what, lines) in malformed() {
        let (mut send, mut recv) = connection.open().await.unwrap();
        send.headers(&lines).await.unwrap();
        send.finish().unwrap();
        match recv.answer().await {
            Ok(answer) => assert_eq!(answer.status, 400, "{what}: {answer:?}"),
            Err(error) => assert_eq!(abort_of(&error), Some(Abort::Stream(code::MESSAGE_ERROR)), "{what}: {error}"),
        }
        fixture.serves_on(&connection, what).await;
    }
    // Nothing of them came through.
    connection.get("https://WEB/honest").await.unwrap();
    assert_eq!(fixture.sees().await.head.target(), "/honest");
}

/// Sends a POST with a declared length, and pieces of another.
async fn upload(fixture: &NodeFixture, declared: &str, chunks: &[&'static str], more: &[u8]) -> std::io::Result<u16> {
    let connection = fixture.connect().await;
    let (mut send, mut recv) = connection.open().await.unwrap();
    let head = [(":method", "POST"), (":scheme", "https"), (":authority", "WEB"), (":path", "/upload")];
    send.headers(&with(head.to_vec(), &[("content-length", declared)])).await.unwrap();
    for chunk in chunks {
        // It may have been stopped by now.
        let _ = send.data(Bytes::from_static(chunk.as_bytes())).await;
    }
    let _ = send.bytes(Bytes::copy_from_slice(more)).await;
    let _ = send.finish();
    let answer = recv.answer().await;
    fixture.serves_on(&connection, "after a lie about a length").await;
    Ok(answer?.status)
}

#[tokio::test]
async fn wrong_content_lengths_are_detected_and_never_complete() {
    let mut fixture = NodeFixture::new().await;
    let trailers = wire::headers(&[("a", "b")]);
    for (declared, chunks, more) in [
        ("10", &["hello"][..], &[][..]),
        ("10", &["hello"], &trailers),
        ("10", &[], &[]),
        ("3", &["hello"], &[]),
        ("0", &["hello"], &[]),
        ("5", &["hello", "!"], &[]),
    ] {
        match upload(&fixture, declared, chunks, more).await {
            Ok(status) => assert_eq!(status, 400, "{declared} {chunks:?}"),
            Err(error) => assert_eq!(abort_of(&error), Some(Abort::Stream(code::MESSAGE_ERROR)), "{declared}: {error}"),
        }
    }
    assert_eq!(upload(&fixture, "6", &["hello", "!"], &trailers).await.unwrap(), 200);
    // Of those that began to be sent none was whole.
    loop {
        let seen = fixture.sees().await;
        if seen.head.header("content-length").as_deref() == Some("6") {
            assert_eq!(seen.body.as_deref(), Some("hello!"));
            break;
        }
        assert_eq!(seen.body, None, "{:?}", seen.head);
    }
}

#[tokio::test]
async fn trailers_with_pseudo_headers_are_malformed() {
    let fixture = NodeFixture::new().await;
    for trailers in [&[(":path", "/other")][..], &[("Upper", "1")], &[("connection", "close")]] {
        let connection = fixture.connect().await;
        let (mut send, mut recv) = connection.open().await.unwrap();
        let head = [(":method", "POST"), (":scheme", "https"), (":authority", "WEB"), (":path", "/upload")];
        send.headers(&head).await.unwrap();
        send.data(Bytes::from_static(b"hello")).await.unwrap();
        send.headers(trailers).await.unwrap();
        send.finish().unwrap();
        match recv.answer().await {
            Ok(answer) => assert_eq!(answer.status, 400, "{trailers:?}: {answer:?}"),
            Err(error) => assert_eq!(abort_of(&error), Some(Abort::Stream(code::MESSAGE_ERROR)), "{trailers:?}"),
        }
        fixture.serves_on(&connection, "afterwards").await;
    }
}

#[tokio::test]
async fn oversized_field_sections_are_answered_and_other_streams_continue() {
    let fixture = NodeFixture::with("header-bytes: 4KiB, header-count: 20").await;
    let connection = fixture.connect().await;
    assert_eq!(connection.setting(wire::MAX_FIELD_SECTION_SIZE), Some(4096), "it is announced");
    let (mut other, mut others) = connection.open().await.unwrap();
    other.headers(&with(get("HERE", "/"), &[("a", "b")])).await.unwrap();
    let (long, longer) = ("x".repeat(5000), "x".repeat(100_000));
    let names: Vec<String> = (0..30).map(|number| format!("x-{number}")).collect();
    let many: Lines<'_> = names.iter().map(|name| (name.as_str(), "")).collect();
    for (what, more) in [("long", vec![("a", long.as_str())]), ("longer", vec![("a", &longer)]), ("many", many)] {
        let (mut send, mut recv) = connection.open().await.unwrap();
        // What comes may be more than it takes: then it stops us.
        let _ = send.headers(&with(get("HERE", "/"), &more)).await;
        let _ = send.finish();
        let answer = recv.answer().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(answer.status, 431, "{what}: {answer:?}");
    }
    other.finish().unwrap();
    assert_eq!(others.answer().await.unwrap().status, 200);
    fixture.node.metric_reaches("hermes_limit_hits_total", "headers", 3.0).await;
}

#[tokio::test]
async fn valid_requests_reach_the_origin_unchanged() {
    let mut fixture = NodeFixture::new().await;
    let connection = fixture.connect().await;
    let (mut send, mut recv) = connection.open().await.unwrap();
    // Crumbs of a cookie are one line to HTTP/1.1 (4.2.1); Host instead of :authority, and alike in both.
    let lines = [(":method", "GET"), (":scheme", "https"), (":path", "/a?b=c"), ("host", "WEB")];
    let more = [("cookie", "a=b"), ("cookie", "c=d"), ("x-many", "1"), ("x-many", "2"), ("te", "trailers")];
    send.headers(&with(lines.to_vec(), &more)).await.unwrap();
    send.finish().unwrap();
    assert_eq!(recv.answer().await.unwrap().status, 200);
    let seen = fixture.sees().await;
    assert_eq!((seen.head.method(), seen.head.target()), ("GET", "/a?b=c"));
    let field = |name| seen.head.header(name);
    assert_eq!(field("cookie").as_deref(), Some("a=b; c=d"), "{:?}", seen.head);
    assert_eq!((field("host").as_deref(), field("x-many").as_deref()), (Some("WEB"), Some("1, 2")));
    assert_eq!(field("via").as_deref(), Some("3 fort"));
}
