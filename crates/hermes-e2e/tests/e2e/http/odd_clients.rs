//! Requests of legitimate programs that no RFC covers, and long waits: each client is served, or gets an error with a
//! reason.

use std::{io, time::Duration};

use hermes_testkit::{
    ca::Subject,
    frames::{Frame, Frames, kind},
    listener_client::{ListenerClient, NODE_NAME},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::{Head, RawHttp1},
};
use http::Request;
use tokio::net::TcpStream;

use crate::http::lab::{Seen, next, overlay, seen};

/// An origin that reports each head; it answers `/slow` after many interim responses, and `/mute` never.
fn origin() -> (Origin, Seen<Head>) {
    let (sender, received) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            loop {
                let head = http1.head().await?;
                let target = head.target().to_owned();
                if target != "/mute" {
                    http1.body(&head).await?;
                }
                let _ = sender.send(head);
                match target.as_str() {
                    "/mute" => http1.to_end().await.map(drop)?,
                    "/slow" => {
                        // Longer in all than the route's `progress`, but with less than that between two responses.
                        for _ in 0..6 {
                            tokio::time::sleep(Duration::from_millis(500)).await;
                            http1.send("HTTP/1.1 102 Processing\r\n\r\n").await?;
                        }
                    }
                    _ => {}
                }
                http1.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await?;
            }
        }
    });
    (origin.unwrap(), received)
}

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: tls, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: balanced, bind: '127.0.0.1:0', protocol: http, proxy-protocol: [127.0.0.0/8]}
routes:
- {name: slow, match: {path: [/slow, /mute]}, upstream: origin, timeout: {progress: 2s}}
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";

async fn node(overlay: &Overlay, origin: &Origin) -> Node {
    let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
    draft.document(DOCUMENT).with("ORIGIN", origin.address()).start().await.unwrap()
}

/// Targets of clients, and those that the origin has to get.
const TARGETS: [(&str, &str); 5] = [
    ("/?q=\"a\"", "/?q=%22a%22"),
    ("/<a>?<b>", "/%3Ca%3E?%3Cb%3E"),
    ("/`", "/%60"),
    ("/caf\u{e9}?\u{e9}", "/caf%C3%A9?%C3%A9"),
    ("/a?{b}|", "/a?{b}|"),
];

#[tokio::test]
async fn characters_that_no_uri_has_are_escaped() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let node = node(&overlay, &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    // Each target on a shared connection, and as the first request of its own.
    for (target, want) in TARGETS {
        let mut first = RawHttp1::connect(node.address("in")).await.unwrap();
        for http1 in [&mut http1, &mut first] {
            http1.send(format!("GET {target} HTTP/1.1\r\nHost: WEB\r\nx: \"<\u{e9}>\"\r\n\r\n")).await.unwrap();
            let head = http1.head().await.unwrap();
            assert_eq!((head.status(), http1.body(&head).await.unwrap().text()), (200, "ok".to_owned()), "{target}");
            let head = next(&mut received).await;
            assert_eq!(head.target(), want);
            assert!(head.headers.iter().any(|(name, value)| name == "x" && value.contains("\"<")), "{head:?}");
        }
    }
    // Not UTF-8 either.
    let mut latin = RawHttp1::connect(node.address("in")).await.unwrap();
    latin.send(&b"GET /caf\xe9 HTTP/1.1\r\nHost: WEB\r\n\r\n"[..]).await.unwrap();
    assert_eq!((latin.head().await.unwrap().status(), next(&mut received).await.target()), (200, "/caf%E9"));
    // A body must not change, even if it looks like a request.
    let body = "GET /\" HTTP/1.1\r\n\r\n";
    http1.send(format!("POST / HTTP/1.1\r\nHost: WEB\r\nContent-Length: {}\r\n\r\n", body.len())).await.unwrap();
    http1.send(body).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    next(&mut received).await;
    let client = ListenerClient::tls(node.address("tls"), overlay.authority().pem(), None);
    let connection = client.h3().await.unwrap();
    for (target, want) in TARGETS {
        let (mut send, mut recv) = connection.open().await.unwrap();
        let fields = [(":method", "GET"), (":scheme", "https"), (":authority", "WEB"), (":path", target)];
        send.headers(&fields).await.unwrap();
        send.finish().unwrap();
        assert_eq!(recv.answer().await.unwrap().status, 200, "{target}");
        assert_eq!(next(&mut received).await.target(), want);
    }
}

#[tokio::test]
async fn http_1_0_without_a_host_asks_whom_it_has_come_to() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let node = node(&overlay, &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("GET /check HTTP/1.0\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(next(&mut received).await.header("host"), Some(node.address("in").to_string()));
    // HTTP/1.1 requires `Host`.
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("GET /check HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 400);
    let mut admin = RawHttp1::connect(node.admin()).await.unwrap();
    admin.send("GET /healthz HTTP/1.0\r\n\r\n").await.unwrap();
    assert_eq!(admin.head().await.unwrap().status(), 200);
    let mut admin = RawHttp1::connect(node.admin()).await.unwrap();
    admin.send("GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n").await.unwrap();
    assert_eq!(admin.head().await.unwrap().status(), 403);
}

#[tokio::test]
async fn a_port_that_is_empty_is_none() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let node = node(&overlay, &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("GET / HTTP/1.1\r\nHost: web:\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(next(&mut received).await.header("host").as_deref(), Some("web"));
}

#[tokio::test]
async fn interim_responses_count_as_progress() {
    let overlay = overlay();
    let (origin, _told) = origin();
    let node = node(&overlay, &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("GET /slow HTTP/1.1\r\nHost: WEB\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
}

#[tokio::test]
async fn an_upload_that_stalls_is_its_client_s_fault() {
    let overlay = overlay();
    let (origin, _told) = origin();
    let node = node(&overlay, &origin).await;
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("POST /mute HTTP/1.1\r\nHost: WEB\r\nContent-Length: 10\r\n\r\nhello").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 408);
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let request = Request::post("http://WEB/mute").body(()).unwrap();
    let (answer, _stream) = connection.open(request, false).await.unwrap();
    assert_eq!(hermes_testkit::multiplex::answer(answer).await.unwrap().status, 408);
    // A client that has sent its whole request waits for the origin.
    http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send("POST /mute HTTP/1.1\r\nHost: WEB\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 504);
}

#[tokio::test]
async fn a_proxy_protocol_v1_line_sets_the_client_address() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let node = node(&overlay, &origin).await;
    for (line, client) in [
        ("PROXY TCP4 192.0.2.7 198.51.100.2 50000 443\r\n", "192.0.2.7"),
        ("PROXY TCP6 2001:db8::7 2001:db8::2 50000 443\r\n", "2001:db8::7"),
        ("PROXY UNKNOWN\r\n", "127.0.0.1"),
    ] {
        let mut http1 = RawHttp1::new(TcpStream::connect(node.address("balanced")).await.unwrap());
        http1.send(format!("{line}GET / HTTP/1.1\r\nHost: WEB\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{line}");
        assert_eq!(next(&mut received).await.header("x-forwarded-for").as_deref(), Some(client), "{line}");
    }
}

#[tokio::test]
async fn a_byte_order_mark_before_a_pem_is_none_of_it() {
    let overlay = overlay();
    let (origin, _told) = origin();
    let identity = overlay.authority().issue(&Subject::node("marked").with_dns(NODE_NAME)).unwrap();
    let file = |name: &str, pem: &str| -> io::Result<String> {
        let path = overlay.dir().join(name);
        std::fs::write(&path, format!("\u{feff}{pem}"))?;
        Ok(path.display().to_string())
    };
    let document = "
identity: {cert: $CERT, key: $KEY, ca: $CA}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, tls: {client: none}}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let draft = overlay.node("marked").document(document).with("CERT", file("marked.pem", &identity.cert_pem).unwrap());
    let draft = draft.with("KEY", file("marked.key", &identity.key_pem).unwrap());
    let draft = draft.with("CA", file("marked-ca.pem", overlay.authority().pem()).unwrap());
    let node = draft.with("ORIGIN", origin.address()).start().await.unwrap();
    let listener = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
    assert_eq!(listener.h2().await.unwrap().get("https://WEB/").await.unwrap().status, 200);
}

/// The HTTP/2 library parses `:path` before the node sees it: some characters cost the client its stream, and no other.
#[tokio::test]
async fn characters_that_no_uri_has_end_their_stream_alone_over_h2() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let mut node = node(&overlay, &origin).await;
    let mut frames = Frames::connect(node.address("in"), &[]).await.unwrap();
    let mut stream = 1;
    for path in ["/?q=\"a\"", "/?a<b", "/?a>b", "/a<b", "/`"] {
        frames.send(&[Frame::get(stream, "WEB", path)]).await.unwrap();
        let reset = frames.until("a reset", |frame| frame.kind == kind::RST_STREAM).await.unwrap();
        assert_eq!((reset.stream, reset.reason()), (stream, Some(PROTOCOL_ERROR)), "{path}");
        stream += 2;
    }
    for (path, want) in [("/a\"b", "/a\"b"), ("/caf\u{e9}?\u{e9}", "/caf\u{e9}?\u{e9}"), ("/fine", "/fine")] {
        frames.send(&[Frame::get(stream, "WEB", path)]).await.unwrap();
        assert_eq!(next(&mut received).await.target(), want);
        stream += 2;
    }
    node.assert_sound();
}

const PROTOCOL_ERROR: u32 = 1;
