//! What a peer says that it takes of a head or of trailers (SETTINGS_MAX_FIELD_SECTION_SIZE; RFC 9114, 4.2.2): more is
//! never sent to it, whoever asked hears why, and the connection goes on.

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    h3::{
        Abort, Connection, Exchange, Origin, abort_of,
        wire::{MAX_FIELD_SECTION_SIZE, code, frame, get, kind, settings},
    },
    listener_client::{ListenerClient, NODE_NAME},
    origin,
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::RawHttp1,
};
use tokio::sync::mpsc;

use crate::h3::lab::{ANY, NodeFixture, overlay};

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: plain, bind: '127.0.0.1:0', protocol: http}
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: all, upstream: web}
upstreams:
- {name: web, protocol: h3, overlay: false, endpoints: ['$WEB'], tls: {server-name: node.test, ca: $CA}}
";

/// A node before an origin that begins like this, and answers with trailers of so many bytes as the path says.
struct Fixture {
    overlay: Overlay,
    node: Node,
    /// What the origin was asked for.
    requests: mpsc::UnboundedReceiver<String>,
    origin: Origin,
}

impl Fixture {
    async fn greeted_with(greeting: &[u8]) -> Self {
        let overlay = overlay();
        let (sender, requests) = mpsc::unbounded_channel();
        let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
        let socket = origin::bind_udp(ANY).unwrap();
        let origin = Origin::greeting(greeting, socket, &identity, None, move |mut exchange: Exchange| {
            let sender = sender.clone();
            async move {
                let path = exchange.pseudo(":path").to_owned();
                let _ = sender.send(path.clone());
                // A request whose trailers do not come is none.
                while exchange.recv.chunk().await.is_ok_and(|chunk| chunk.is_some()) {}
                let mut send = exchange.send;
                send.headers(&[(":status", "200")]).await?;
                send.data(Bytes::from_static(b"web")).await?;
                if let Ok(length) = path[1..].parse() {
                    send.headers(&[("x", &"y".repeat(length))]).await?;
                }
                send.finish()
            }
        });
        let origin = origin.unwrap();
        let ca = overlay.dir().join("origin-ca.pem");
        std::fs::write(&ca, overlay.authority().pem()).unwrap();
        let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let draft = draft.document(DOCUMENT).with("WEB", origin.address().unwrap()).with("CA", ca.display());
        Self { node: draft.start().await.unwrap(), overlay, requests, origin }
    }

    /// The status, and all that is said, of an answer over HTTP/1.1.
    async fn says(&self, request: &str) -> (u16, String) {
        let mut http1 = RawHttp1::connect(self.node.address("plain")).await.unwrap();
        http1.send(request).await.unwrap();
        let head = http1.head().await.unwrap();
        let body = http1.body(&head).await.unwrap();
        (head.status(), format!("{head:?} {}", body.text()))
    }

    fn client(&self) -> ListenerClient {
        ListenerClient::tls(self.node.address("door"), self.overlay.authority().pem(), None)
    }

    /// Every request was on one connection.
    async fn has_connected_once(&self) {
        assert_eq!(self.node.metric("hermes_upstream_connects_total", "").await.unwrap(), 1.0);
    }
}

const SMALL: &str = "GET /small HTTP/1.1\r\nhost: WEB\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn requests_that_an_upstream_rejects_are_not_blamed_on_the_endpoint() {
    let mut fixture = Fixture::greeted_with(&settings(&[(MAX_FIELD_SECTION_SIZE, 1000)])).await;
    let long = "y".repeat(1000);
    let chunked = "transfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n0\r\n";
    let large = [
        ("a head", format!("GET /head HTTP/1.1\r\nhost: WEB\r\nx: {long}\r\nconnection: close\r\n\r\n")),
        ("a tunnel's head", format!("CONNECT WEB:7 HTTP/1.1\r\nhost: WEB:7\r\nx: {long}\r\n\r\n")),
        ("trailers", format!("POST /trailers HTTP/1.1\r\nhost: WEB\r\n{chunked}x: {long}\r\n\r\n")),
    ];
    assert_eq!(fixture.says(SMALL).await.0, 200);
    // More often than an endpoint may fail before it rests.
    for (what, request) in large.iter().cycle().take(15) {
        let (status, output) = fixture.says(request).await;
        assert_eq!(status, 431, "{what}: {output}");
        assert!(output.contains("http_request_error") && output.contains("the limit is 1000"), "{what}: {output}");
    }
    assert_eq!(fixture.says(SMALL).await.0, 200, "the endpoint is not at fault");
    fixture.has_connected_once().await;
    let mut requests = Vec::new();
    while let Ok(path) = fixture.requests.try_recv() {
        requests.push(path);
    }
    // The reset for the trailers may overtake the head of their request.
    requests.retain(|path| path != "/trailers");
    assert_eq!(requests, ["/small", "/small"], "a request that is too large was sent");
}

#[tokio::test]
async fn answers_that_a_client_does_not_take_are_not_sent() {
    let fixture = NodeFixture::new().await;
    let udp = [
        (":method", "CONNECT"),
        (":protocol", "connect-udp"),
        (":scheme", "https"),
        (":authority", "fort"),
        (":path", "/.well-known/masque/udp/ECHO/7/"),
        ("capsule-protocol", "?1"),
    ];
    // `:status: 200` has 42 bytes, and one line more has 32 of its own.
    for (most, answers) in [(41, None), (42, Some(502)), (1000, Some(200))] {
        let connection = Connection::connect(&fixture.client(), &[(MAX_FIELD_SECTION_SIZE, most)]).await.unwrap();
        for (what, lines) in [("an answer", get("WEB", "/")), ("a tunnel", udp.to_vec())] {
            let (mut send, mut recv) = connection.open().await.unwrap();
            send.headers(&lines).await.unwrap();
            if what == "an answer" {
                // Without this the request has an unfinished body, and the origin waits for it.
                send.finish().unwrap();
            }
            match (recv.head().await, answers) {
                (Ok((pseudo, fields)), Some(status)) => {
                    assert_eq!(pseudo[0].1, status.to_string(), "{what} of {most}: {fields:?}");
                    let size: usize = fields.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
                    assert!(size + 42 <= most as usize, "{what} of {most}: {fields:?}");
                }
                (Err(error), None) => {
                    assert_eq!(abort_of(&error), Some(Abort::Stream(code::REQUEST_CANCELLED)), "{what}: {error}");
                }
                (other, _) => panic!("{what} of {most}: {other:?}"),
            }
            assert_eq!(connection.quic.close_reason(), None, "{what} of {most}");
        }
    }
}

#[tokio::test]
async fn trailers_that_a_client_does_not_take_break_their_answer_off() {
    let fixture = Fixture::greeted_with(&settings(&[])).await;
    let connection = Connection::connect(&fixture.client(), &[(MAX_FIELD_SECTION_SIZE, 500)]).await.unwrap();
    let answer = connection.get("https://WEB/100").await.unwrap();
    assert_eq!((answer.text(), answer.trailers.is_some()), ("web".to_owned(), true));
    let error = connection.get("https://WEB/1000").await.unwrap_err();
    assert_eq!(abort_of(&error), Some(Abort::Stream(code::REQUEST_CANCELLED)), "{error}");
    // Others take them.
    let connection = Connection::connect(&fixture.client(), &[]).await.unwrap();
    assert_eq!(connection.get("https://WEB/1000").await.unwrap().trailer("x").map(|x| x.len()), Some(1000));
    fixture.has_connected_once().await;
    let record = fixture.node.record(|record| record["error"] == "http_response_header_section_size").await;
    assert!(record["reason"].as_str().unwrap().contains("the limit is 500"), "{record}");
}

/// What a server says on its control stream, or to a request, that names what was never there (RFC 9114, 5.2, 7.2.3,
/// 7.2.5 to 7.2.7).
#[tokio::test]
async fn identifiers_that_a_server_cannot_name_end_the_connection() {
    let begun = settings(&[]);
    let goaway = |id: u8| frame(kind::GOAWAY, &[id]);
    for (what, behind, wanted) in [
        ("GOAWAY that grows", [goaway(4), goaway(8)].concat(), code::ID_ERROR),
        ("GOAWAY that names no request", goaway(5).to_vec(), code::ID_ERROR),
        ("CANCEL_PUSH of no push", frame(kind::CANCEL_PUSH, &[0]).to_vec(), code::ID_ERROR),
        ("an empty CANCEL_PUSH", frame(kind::CANCEL_PUSH, &[]).to_vec(), code::FRAME_ERROR),
        ("MAX_PUSH_ID", frame(kind::MAX_PUSH_ID, &[0]).to_vec(), code::FRAME_UNEXPECTED),
        ("PUSH_PROMISE", frame(kind::PUSH_PROMISE, &[0, 0, 0]).to_vec(), code::FRAME_UNEXPECTED),
    ] {
        let mut fixture = Fixture::greeted_with(&[&begun[..], &behind].concat()).await;
        // It may be that nothing is asked any more: what is said comes before.
        let _ = fixture.says(SMALL).await;
        let ended = tokio::time::timeout(EFFECT_TIMEOUT, fixture.origin.ended.recv()).await.expect(what).expect(what);
        assert_eq!(abort_of(&ended), Some(Abort::Connection(wanted)), "{what}: {ended}");
    }
}
