//! Request smuggling (RFC 9112, 11.2): heads and bodies that two programs might read in two ways.
//!
//! Every attack carries a second request that no honest reader finds. It must be refused, or passed on in the one way
//! that RFC 9112 reads it; and nobody, whoever reads it and however, may find the second request.

use hermes_testkit::{
    frames::{Frame, Frames, kind},
    raw_http1::RawHttp1,
};

use crate::hostile::lab::{BOTH, NodeFixture, SMUGGLED, last_words};

/// What becomes of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Refused before anybody else hears of it.
    Refused,
    /// The head is in order, the body is not: no origin gets a whole request.
    Abort,
    /// One request with this body.
    One(&'static str),
    /// The same, and the connection is closed behind its answer.
    Last(&'static str),
}
use Wanted::{Abort, Last, One, Refused};

struct Attack {
    bytes: String,
    wanted: Wanted,
}

/// A POST with these header lines, each ended as it stands, and this body.
fn post(lines: &str, body: &str, wanted: Wanted) -> Attack {
    Attack { bytes: format!("POST /attack HTTP/1.1\r\nHost: WEB\r\n{lines}\r\n{body}"), wanted }
}

/// A chunked POST with this body.
fn chunked(body: &str, wanted: Wanted) -> Attack {
    post("Transfer-Encoding: chunked\r\n", body, wanted)
}

fn raw(bytes: &str, wanted: Wanted) -> Attack {
    Attack { bytes: bytes.to_owned(), wanted }
}

/// Runs attacks one by one, each on a connection of its own, against both kinds of origin.
async fn run(attacks: &[Attack]) {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        for attack in attacks {
            one(&mut fixture, listener, attack).await;
        }
    }
}

async fn one(fixture: &mut NodeFixture, listener: &str, attack: &Attack) {
    let what = format!("{listener}: {:?}", attack.bytes);
    let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
    // One that is refused at its first bytes may be closed before its last ones are sent.
    let _ = http1.send(&attack.bytes).await;
    let mut body = None;
    if let One(text) | Last(text) = attack.wanted {
        let mut head = http1.head().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        if head.status() == 100 {
            head = http1.head().await.unwrap();
        }
        let answer = http1.body(&head).await.unwrap().text();
        assert_eq!((head.status(), answer), (200, format!("POST /attack {}", text.len())), "{what}");
        body = Some(text.to_owned());
        if attack.wanted == One(text) {
            let _ = http1.finish().await;
        }
    }
    let rest = last_words(&mut http1, &what).await;
    match attack.wanted {
        One(_) | Last(_) => assert_eq!(rest, "", "{what}: a second answer"),
        Refused => assert!(rest.starts_with("HTTP/1.1 4") || rest.starts_with("HTTP/1.1 5"), "{what}: {rest:?}"),
        Abort => assert!(!rest.contains("HTTP/1.1 2"), "{what}: {rest:?}"),
    }
    assert!(rest.matches("HTTP/1.1 ").count() <= 1, "{what}: {rest:?}");
    let seen = fixture.still_serves(listener).await;
    let whole: Vec<_> = seen.iter().filter_map(|seen| seen.body.clone()).collect();
    assert_eq!(whole, body.into_iter().collect::<Vec<_>>(), "{what}: {seen:?}");
    assert!(seen.iter().all(|seen| seen.target == "/attack"), "{what}: {seen:?}");
    assert!(attack.wanted != Refused || seen.is_empty(), "{what} reached the origin: {seen:?}");
}

#[tokio::test]
async fn a_length_beside_chunked_is_ignored_and_ends_the_connection() {
    // RFC 9112, 6.3: the chunks hold, and the connection is closed behind them.
    let length = format!("Content-Length: {}\r\n", SMUGGLED.len() + 5);
    let last = format!("0\r\n\r\n{SMUGGLED}");
    let chunks = "Transfer-Encoding: chunked\r\n";
    run(&[
        post(&format!("{length}{chunks}"), &last, Last("")),
        post(&format!("{chunks}{length}"), &last, Last("")),
        post(&format!("Content-Length: 0\r\n{chunks}"), &last, Last("")),
        post(&format!("{chunks}Content-Length: 0\r\n"), &last, Last("")),
        post("content-LENGTH: 4\r\nX: y\r\ntransfer-ENCODING: CHUNKED\r\n", &last, Last("")),
        post(&format!("{length}Connection: content-length\r\n{chunks}"), &last, Last("")),
        // A bare LF ends a line too (RFC 9112, 2.2).
        post(&format!("{length}X: y\n{chunks}"), &last, Last("")),
    ])
    .await;
}

#[tokio::test]
async fn a_length_has_one_spelling() {
    let mut attacks: Vec<Attack> = ["+5", "-5", "0x5", "5 5", "5,5", "5, 6", "5;", "1e1", "", "five", "5.0", "\u{665}"]
        .iter()
        .map(|length| post(&format!("Content-Length: {length}\r\n"), &format!("hello{SMUGGLED}"), Refused))
        .collect();
    attacks.extend(["18446744073709551616", "99999999999999999999999999"].map(|length| {
        // Neither is taken for a small number.
        post(&format!("Content-Length: {length}\r\n"), SMUGGLED, Refused)
    }));
    attacks.push(post("Content-Length: 5\r\nContent-Length: 6\r\n", &format!("hello{SMUGGLED}"), Refused));
    attacks.push(post("Content-Length: 5\r\nContent-Length: 5\r\nConnection: close\r\n", "hello", One("hello")));
    attacks.push(post("Content-Length: 5\r\nConnection: content-length, close\r\n", "hello", One("hello")));
    run(&attacks).await;
}

#[tokio::test]
async fn a_transfer_coding_is_chunked_or_nothing() {
    let body = format!("0\r\n\r\n{SMUGGLED}");
    let lines = [
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunkedx\r\n",
        "Transfer-Encoding: chunked;q=1\r\n",
        "Transfer-Encoding: \"chunked\"\r\n",
        "Transfer-Encoding: \x0bchunked\r\n",
        "Transfer-Encoding: chunked\x0b\r\n",
        "Transfer-Encoding: ,chunked\r\n",
        "Transfer-Encoding: chunked,\r\n",
        "Transfer-Encoding:\r\n",
        // With a length beside, whoever misses the coding reads the length.
        "Content-Length: 5\r\nTransfer-Encoding : chunked\r\n",
        "Content-Length: 5\r\nTransfer-Encoding\t: chunked\r\n",
        "Content-Length: 5\r\n Transfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\n\tTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nX: y\r\n Transfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nTransfer-Encoding:\r\n chunked\r\n",
        "Content-Length: 5\r\nX: y\rTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nX: y\0\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\0\r\n",
        "Content-Length: 5\r\nTransfer-\0Encoding: chunked\r\n",
    ];
    let mut attacks: Vec<Attack> = lines.iter().map(|lines| post(lines, &body, Refused)).collect();
    let old = format!("POST /attack HTTP/1.0\r\nHost: WEB\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
    attacks.push(raw(&old, Refused));
    attacks.push(post("Transfer-Encoding: CHUNKED\r\nConnection: close\r\n", "5\r\nhello\r\n0\r\n\r\n", One("hello")));
    run(&attacks).await;
}

#[tokio::test]
async fn heads_that_are_no_heads_are_refused() {
    let heads = [
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX : y\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\n: y\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX y: z\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX: a\rb\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX: a\0b\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX: a\r\n b\r\n\r\n",
        "GET /attack HTTP/1.1\r\n X: y\r\nHost: WEB\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nX\u{e9}: y\r\n\r\n",
        "GET /attack HTTP/1.1\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: \r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nHost: WEB\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB\r\nHost: EVIL\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: a b\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB/../\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: user@WEB\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: WEB:port\r\n\r\n",
        "GET /attack HTTP/1.1\r\nHost: [::1\r\n\r\n",
        "GET http://user@WEB/attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET  /attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET /attack  HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET\t/attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET /attack HTTP/1.1 \r\nHost: WEB\r\n\r\n",
        "GET /attack /smuggled HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET /attack HTTP/1.2\r\nHost: WEB\r\n\r\n",
        "GET /attack HTTP/2.0\r\nHost: WEB\r\n\r\n",
        "GET /attack http/1.1\r\nHost: WEB\r\n\r\n",
        "GET /attack\r\n\r\n",
        "G\0T /attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET /att\0ck HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET WEB:80 HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET * HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "GET ftp://WEB/attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "CONNECT /attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
        "CONNECT http://WEB:80/attack HTTP/1.1\r\nHost: WEB:80\r\n\r\n",
        "CONNECT WEB HTTP/1.1\r\nHost: WEB\r\n\r\n",
        " GET /attack HTTP/1.1\r\nHost: WEB\r\n\r\n",
    ];
    let attacks: Vec<Attack> = heads.iter().map(|head| raw(&format!("{head}{SMUGGLED}"), Refused)).collect();
    run(&attacks).await;
}

#[tokio::test]
async fn chunks_are_read_to_the_letter() {
    let behind = |text: &str| format!("{text}\r\nhello\r\n0\r\n\r\n{SMUGGLED}");
    let sizes = [
        "0x5",
        "+5",
        "-5",
        "5,",
        "g",
        "",
        "5 5",
        "5.",
        "FFFFFFFFFFFFFFFFF",
        "10000000000000005",
        "\u{665}",
        "5;a\nb",
        "5\0",
    ];
    let mut attacks: Vec<Attack> = sizes.iter().map(|size| chunked(&behind(size), Abort)).collect();
    attacks.extend(
        [
            // A chunk that is longer than it says, or not ended, or ended otherwise.
            format!("5\r\nhello!\r\n0\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello0\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello\n0\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello\r0\r\n\r\n{SMUGGLED}"),
            format!("5\nhello\r\n0\r\n\r\n{SMUGGLED}"),
            format!("5\rhello\r\n0\r\n\r\n{SMUGGLED}"),
            // A last chunk or trailer section that is none.
            format!("5\r\nhello\r\n0\n\n{SMUGGLED}"),
            format!("5\r\nhello\r\n0\r\nX\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello\r\n0\r\nX : y\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello\r\n0\r\nX: a\0\r\n\r\n{SMUGGLED}"),
            format!("5\r\nhello\r\n0\r\nX: a\r\n b\r\n\r\n{SMUGGLED}"),
        ]
        .iter()
        .map(|body| chunked(body, Abort)),
    );
    let close = |body: &str| post("Transfer-Encoding: chunked\r\nConnection: close\r\n", body, One("hello"));
    // What is behind the last chunk of a connection's last request is nobody's.
    attacks.push(close(&format!("0005\r\nhello\r\n000\r\n\r\n{SMUGGLED}")));
    attacks.push(close(&format!("5;name=\"a;b\"\r\nhello\r\n0;x\r\n\r\n{SMUGGLED}")));
    run(&attacks).await;
}

#[tokio::test]
async fn trailers_do_not_frame_or_route() {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        let trailers =
            "Content-Length: 99\r\nTransfer-Encoding: gzip\r\nHost: EVIL\r\nAuthorization: a\r\nhermes-user: e";
        let body = format!("5\r\nhello\r\n0\r\n{trailers}\r\n\r\n");
        let lines =
            "Transfer-Encoding: chunked\r\nTrailer: content-length, host, authorization\r\nConnection: close\r\n";
        let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
        http1.send(post(lines, &body, One("hello")).bytes).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
        let [seen] = <[_; 1]>::try_from(fixture.still_serves(listener).await).unwrap();
        assert_eq!(seen.body.as_deref(), Some("hello"));
        assert!(seen.values("authorization").is_empty() && !seen.headers.iter().any(|(_, value)| value == "EVIL"));
    }
}

#[tokio::test]
async fn a_body_is_a_body_whatever_stands_in_it() {
    let length = format!("Content-Length: {}\r\n", SMUGGLED.len());
    let chunks = format!("{:x}\r\n{SMUGGLED}\r\n0\r\n\r\n", SMUGGLED.len());
    run(&[
        post(&length, SMUGGLED, One(SMUGGLED)),
        chunked(&chunks, One(SMUGGLED)),
        post(&format!("{length}Upgrade: websocket\r\nConnection: upgrade\r\n"), SMUGGLED, One(SMUGGLED)),
        post(
            &format!("{length}Upgrade: h2c\r\nHTTP2-Settings: AAA\r\nConnection: upgrade\r\n"),
            SMUGGLED,
            One(SMUGGLED),
        ),
        post(&format!("{length}Expect: 100-continue\r\nX-No: wait\r\n"), SMUGGLED, One(SMUGGLED)),
        // A line that ends with a bare LF is a line (RFC 9112, 2.2), and is passed on with both.
        raw(
            &format!("POST /attack HTTP/1.1\nHost: WEB\nContent-Length: {}\n\n{SMUGGLED}", SMUGGLED.len()),
            One(SMUGGLED),
        ),
        // The target overrules Host (RFC 9112, 3.2.2).
        raw(
            &format!(
                "POST http://WEB/attack HTTP/1.1\r\nHost: EVIL\r\nContent-Length: {}\r\n\r\n{SMUGGLED}",
                SMUGGLED.len()
            ),
            One(SMUGGLED),
        ),
    ])
    .await;
}

#[tokio::test]
async fn requests_in_a_row_are_answered_in_their_order() {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
        let body = "5\r\nhello\r\n0\r\n\r\n";
        let chunks = format!("POST /b HTTP/1.1\r\nHost: WEB\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
        let gets = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: WEB\r\n\r\n");
        let length = "POST /c HTTP/1.1\r\nHost: WEB\r\nContent-Length: 5\r\n\r\nhello";
        http1.send([gets("/a"), length.to_owned(), gets("/d"), chunks].concat()).await.unwrap();
        for wanted in ["GET /a 0", "POST /c 5", "GET /d 0", "POST /b 5"] {
            let head = http1.head().await.unwrap();
            assert_eq!(http1.body(&head).await.unwrap().text(), wanted, "{listener}");
        }
        let seen: Vec<_> = fixture.still_serves(listener).await.into_iter().map(|seen| seen.target).collect();
        assert_eq!(seen, ["/a", "/c", "/d", "/b"], "{listener}");
    }
}

#[tokio::test]
async fn connection_names_nothing_of_ours() {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        let named = "via, forwarded, traceparent, host, content-length, hermes-user, x-mine";
        let lines = format!("Connection: close, {named}\r\nContent-Length: 5\r\nVia: 1.1 client\r\nX-Mine: 1\r\n");
        let mut http1 = RawHttp1::connect(fixture.address(listener)).await.unwrap();
        http1.send(post(&lines, "hello", One("hello")).bytes).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
        let [seen] = <[_; 1]>::try_from(fixture.still_serves(listener).await).unwrap();
        assert_eq!(seen.body.as_deref(), Some("hello"));
        // Its own may go. What this node says of the request stays, or loops would be hidden.
        assert!(seen.values("x-mine").is_empty(), "{seen:?}");
        assert!(seen.values("via").last().is_some_and(|via| via.ends_with("1.1 fort")), "{seen:?}");
        assert_eq!(seen.values("forwarded"), ["for=127.0.0.1"], "{seen:?}");
        assert_eq!(seen.values("traceparent").len(), 1, "{seen:?}");
    }
}

#[tokio::test]
async fn a_protocol_is_a_token_or_nothing() {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        for protocol in ["web\r\nx: 1", "a\0b", "", "web socket", "\u{e9}", "websocket, h2c"] {
            let mut frames = Frames::connect(fixture.address(listener), &[]).await.unwrap();
            let fields = [
                (":method", "CONNECT"),
                (":protocol", protocol),
                (":scheme", "http"),
                (":authority", "WEB"),
                (":path", "/"),
            ];
            frames.send(&[Frame::headers(1, false, &fields)]).await.unwrap();
            let answer = frames.until("a refusal", |frame| frame.stream == 1).await.unwrap();
            // `:status: 400` is entry 12 of the static table; or the stream is none.
            let is_refused = answer.kind == kind::RST_STREAM || answer.payload.first() == Some(&0x8c);
            assert!(is_refused, "{listener}, {protocol:?}: {answer:?}");
            assert!(fixture.still_serves(listener).await.is_empty(), "{listener}, {protocol:?}: it reached the origin");
        }
    }
}
