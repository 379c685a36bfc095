//! Hostile HTTP/3 origins and neighbours: what an upstream may say to a node, and what its clients hear of it.

use std::time::Duration;

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    h3::{
        Abort, Exchange, Origin, abort_of,
        wire::{code, frame, headers, kind},
    },
    listener_client::NODE_NAME,
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::RawHttp1,
};
use tokio::sync::mpsc;

use crate::h3::lab::overlay;

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: web, timeout: {progress: 5s}, retry: {attempts: 1}}
upstreams:
- {name: web, protocol: h3, overlay: false, endpoints: ['$WEB'], tls: {server-name: node.test, ca: $CA}}
";

/// A node before an HTTP/3 origin that says these bytes to every request, then ends its side.
struct Fixture {
    node: Node,
    origin: Origin,
    /// With what code the node ended the stream, or the connection.
    ends: mpsc::UnboundedReceiver<std::io::Result<Option<u64>>>,
    _overlay: Overlay,
}

impl Fixture {
    async fn saying(says: Bytes, finishes: bool) -> Self {
        let overlay = overlay();
        let (sender, ends) = mpsc::unbounded_channel();
        let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
        let origin = Origin::serve(&identity, None, move |exchange: Exchange| {
            let (says, sender) = (says.clone(), sender.clone());
            async move {
                let Exchange { mut send, recv: _recv, .. } = exchange;
                let _ = send.bytes(says).await;
                if finishes {
                    send.finish()?;
                }
                let _ = sender.send(send.stopped().await);
                Ok(())
            }
        });
        Self::before(overlay, origin.unwrap(), ends, DOCUMENT).await
    }

    async fn before(
        overlay: Overlay,
        origin: Origin,
        ends: mpsc::UnboundedReceiver<std::io::Result<Option<u64>>>,
        document: &str,
    ) -> Self {
        let ca = overlay.dir().join("origin-ca.pem");
        std::fs::write(&ca, overlay.authority().pem()).unwrap();
        let draft = overlay.node("edge").identity(&Subject::node("edge")).unwrap();
        let draft = draft.document(document).with("WEB", origin.address().unwrap()).with("CA", ca.display());
        let node = draft.start().await.unwrap();
        Self { node, origin, ends, _overlay: overlay }
    }

    /// What an HTTP/1.1 client hears: status and body; `Err` where the body broke off.
    async fn requests(&self) -> std::io::Result<(u16, String)> {
        let mut http1 = RawHttp1::connect(self.node.address("door")).await?;
        http1.send("GET / HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n").await?;
        let head = http1.head().await?;
        let body = http1.body(&head).await?;
        Ok((head.status(), body.text()))
    }
}

fn ok(more: &[(&str, &str)]) -> Bytes {
    headers(&[&[(":status", "200")][..], more].concat())
}

#[tokio::test]
async fn malformed_answers_are_bad_gateways() {
    let data = frame(kind::DATA, b"hello");
    let cases: [(&str, Vec<u8>); 12] = [
        ("no :status", headers(&[("a", "b")]).to_vec()),
        (":status twice", ok(&[(":status", "500")]).to_vec()),
        (":status behind others", headers(&[("a", "b"), (":status", "200")]).to_vec()),
        (":status that is none", headers(&[(":status", "ok")]).to_vec()),
        (":path in an answer", ok(&[(":path", "/")]).to_vec()),
        ("101", headers(&[(":status", "101")]).to_vec()),
        ("a name in upper case", ok(&[("Upper", "1")]).to_vec()),
        ("a value with a line in it", ok(&[("a", "1\r\nset-cookie: x=y")]).to_vec()),
        ("Transfer-Encoding", ok(&[("transfer-encoding", "chunked")]).to_vec()),
        ("DATA first", data.to_vec()),
        ("a push", frame(kind::PUSH_PROMISE, &[0, 0, 0]).to_vec()),
        ("nothing", Vec::new()),
    ];
    for (what, says) in cases {
        let fixture = Fixture::saying(says.into(), true).await;
        let (status, text) = fixture.requests().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(status, 502, "{what}: {text}");
    }
}

#[tokio::test]
async fn responses_with_a_wrong_length_are_not_complete() {
    for (what, length, body) in [("fewer", "10", "hello"), ("more", "3", "hello"), ("none", "5", "")] {
        let says = [&ok(&[("content-length", length)])[..], &frame(kind::DATA, body.as_bytes())].concat();
        let fixture = Fixture::saying(says.into(), true).await;
        match fixture.requests().await {
            Ok((status, text)) => assert_eq!(status, 502, "{what}: {text}"),
            // It had begun: it breaks off.
            Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::TimedOut, "{what}: {error}"),
        }
    }
}

#[tokio::test]
async fn an_answer_that_breaks_the_framing_costs_its_connection_and_the_next_is_served_on_another() {
    let says = [&ok(&[])[..], &frame(kind::SETTINGS, &[])].concat();
    let mut fixture = Fixture::saying(says.into(), false).await;
    for _ in 0..2 {
        let requests = fixture.requests().await;
        assert!(requests.is_err() || requests.as_ref().is_ok_and(|(status, _)| *status == 502), "{requests:?}");
        let ended = tokio::time::timeout(EFFECT_TIMEOUT, fixture.ends.recv()).await.unwrap().unwrap();
        assert!(ended.is_err(), "the connection ends: {ended:?}");
    }
}

/// RFC 9114, 7.2.5: none of its identifiers was ever allowed.
#[tokio::test]
async fn a_push_ends_the_connection() {
    for (what, payload, wanted) in [("a push", &[0, 0, 0][..], code::ID_ERROR), ("half a push", &[], code::FRAME_ERROR)]
    {
        let promise = frame(kind::PUSH_PROMISE, payload);
        for says in [promise.to_vec(), [&ok(&[])[..], &promise].concat()] {
            let mut fixture = Fixture::saying(says.into(), false).await;
            let _ = fixture.requests().await;
            let ended = tokio::time::timeout(EFFECT_TIMEOUT, fixture.origin.ended.recv()).await.unwrap().unwrap();
            assert_eq!(abort_of(&ended), Some(Abort::Connection(wanted)), "{what}: {ended}");
        }
    }
}

#[tokio::test]
async fn interim_answers_without_end_end() {
    let says = headers(&[(":status", "103"), ("link", "</style.css>; rel=preload")]);
    let mut many = Vec::new();
    (0..10_000).for_each(|_| many.extend_from_slice(&says));
    many.extend_from_slice(&ok(&[]));
    let fixture = Fixture::saying(many.into(), true).await;
    assert_eq!(fixture.requests().await.unwrap().0, 502);
}

#[tokio::test]
async fn a_silent_neighbor_is_given_up() {
    let fixture = Fixture::saying(Bytes::new(), false).await;
    let began = std::time::Instant::now();
    assert_eq!(fixture.requests().await.unwrap().0, 504);
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    drop(fixture.origin);
    assert_ne!(code::NO_ERROR, 0);
}

/// It takes connections, and what can be asked of it stays unknown. None of them is left to count as one of the pool's.
#[tokio::test]
async fn an_origin_that_never_sends_settings_is_given_up_each_time() {
    let overlay = overlay();
    let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mute = Origin::greeting(b"", socket, &identity, None, |_: Exchange| async { Ok(()) }).unwrap();
    let document = format!("limits: {{upstream-connections: 2}}{DOCUMENT}").replace("5s}", "5s, connect: 1s}");
    let document = document.replace("protocol: h3,", "protocol: h3, outlier: {failures: 0},");
    let (_, ends) = mpsc::unbounded_channel();
    let mut fixture = Fixture::before(overlay, mute, ends, &document).await;
    for ask in 0..4 {
        let (status, body) = fixture.requests().await.unwrap();
        assert_eq!(status, 504, "ask {ask}: {body}");
        let end = tokio::time::timeout(EFFECT_TIMEOUT, fixture.origin.ended.recv())
            .await
            .expect("its connection ends")
            .unwrap();
        assert_eq!(abort_of(&end), Some(Abort::Connection(code::MISSING_SETTINGS)), "ask {ask}: {end}");
    }
    let output = fixture.node.record(|record| record.to_string().contains("did not send its SETTINGS within 1s")).await;
    assert_eq!(output["status"], 504, "{output}");
}
