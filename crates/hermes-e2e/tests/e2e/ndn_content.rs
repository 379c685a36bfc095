//! Content of HTTP hosts for consumers of Named Data Networking.
//!
//! In: Interests to a listener with `content`, and an HTTP origin that counts its requests. Out: signed Data whose bytes
//! are those of the origin. The gateway of a second node is one consumer; the other one is scripted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::lp::{LpPacket, NackReason};
use hermes_ndn::name::types;
use hermes_ndn::packet::{APPLICATION_NACK, Data, Interest};
use hermes_ndn::signature::VerifyingKey;
use hermes_ndn::{Component, Name};
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin::Origin;
use hermes_testkit::origin::scripted::{self, Heads};
use hermes_testkit::overlay::{Node, Overlay};
use tokio::net::UdpSocket;

use crate::ndn_gateway::key_pair_files;

const PUBLISHER: &str = "
workers: 1
listeners:
- {name: face, bind: '127.0.0.1:0', protocol: ndn, content: {/org/web: web.example}, signing-key: web.key, key-name: /org/web/KEY/1}
routes:
- {name: web, match: {authority: web.example, path: '/org/web/*'}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
const GATEWAY: &str = "
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, terminate: {ndn: '$TRANSPORT://$FACE', anchors: {/org/web: web.pem}}}
";

/// The heads of the requests that the origin got until now.
fn requests(heads: &mut Heads) -> Vec<hermes_testkit::raw_http1::Head> {
    std::iter::from_fn(|| heads.try_recv().ok()).collect()
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn text(bytes: usize) -> String {
    (0..bytes).map(|at| char::from(b'a' + u8::try_from(at * 7 % 26).unwrap())).collect()
}

fn response(status: &str, fields: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{fields}\r\n{body}", body.len())
}

fn origin() -> (Origin, Heads) {
    let changes = Arc::new(AtomicUsize::new(0));
    let answers = move |head: &hermes_testkit::raw_http1::Head| {
        let path = head.target().to_owned();
        match path.strip_prefix("/org/web/").unwrap_or_default() {
            "file" => response("200 OK", "cache-control: max-age=60\r\n", &text(1_000_000)),
            "empty" => response("200 OK", "", ""),
            "changing" => response("200 OK", "", &text(20_000 + changes.fetch_add(1, Ordering::Relaxed))),
            "private" => response("200 OK", "cache-control: private\r\n", "secret"),
            "session" => response("200 OK", "set-cookie: id=1\r\n", "secret"),
            "fails" => response("500 Internal Server Error", "", ""),
            "huge" => format!("HTTP/1.1 200 OK\r\ncontent-length: {0}\r\n\r\n{1}", 40 << 20, text(40 << 20)),
            _ => response("404 Not Found", "", "none"),
        }
    };
    scripted::recording(answers).unwrap()
}

async fn publisher(overlay: &Overlay, origin: &Origin) -> (Node, VerifyingKey) {
    let key = key_pair_files(overlay.dir(), "web");
    let draft = overlay.node("publisher").document(PUBLISHER).with("ORIGIN", origin.address());
    (draft.start().await.unwrap(), key)
}

/// A scripted consumer.
struct Consumer(UdpSocket);

impl Consumer {
    async fn connect(node: &Node) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(node.address("face")).await.unwrap();
        Self(socket)
    }

    async fn send(&self, uri: &str, can_be_prefix: bool) {
        let interest = Interest { can_be_prefix, must_be_fresh: can_be_prefix, ..Interest::new(name(uri)) };
        let frame = LpPacket { pit_token: Some(Bytes::from_static(b"token")), ..LpPacket::bare(interest.encode()) };
        self.0.send(&frame.encode()).await.unwrap();
    }

    /// The next answer: Data, or the reason with which an Interest came back.
    async fn receive(&self) -> Result<Data, NackReason> {
        let mut buffer = vec![0; 65_536];
        let received = tokio::time::timeout(Duration::from_secs(20), self.0.recv(&mut buffer)).await;
        let length = received.expect("an answer").unwrap();
        let frame = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length])).unwrap();
        assert_eq!(frame.pit_token.as_deref(), Some(&b"token"[..]));
        match frame.nack {
            Some(reason) => Err(reason),
            None => Ok(Data::decode(frame.fragment.unwrap()).unwrap()),
        }
    }

    async fn ask(&self, uri: &str, can_be_prefix: bool) -> Result<Data, NackReason> {
        self.send(uri, can_be_prefix).await;
        self.receive().await
    }
}

fn version_of(name: &Name) -> u64 {
    name.components().find_map(|part| part.number(types::VERSION)).unwrap()
}

#[tokio::test]
async fn an_origins_file_crosses_ndn_and_comes_back() {
    let (origin, mut heads) = origin();
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut publisher, _) = publisher(&overlay, &origin).await;
    for transport in ["udp", "tcp"] {
        let draft = overlay.node(transport).document(GATEWAY).with("TRANSPORT", transport);
        let gateway = draft.with("FACE", publisher.address("face")).start().await.unwrap();
        for (target, status, body) in [
            ("/org/web/file", 200, text(1_000_000)),
            ("/org/web/empty", 200, String::new()),
            ("/org/web/missing", 404, String::new()),
            ("/org/web/private", 502, String::new()),
            ("/org/web/session", 502, String::new()),
            ("/org/web/fails", 502, String::new()),
        ] {
            let mut http1 = ListenerClient::plain(gateway.address("web")).h1().await.unwrap();
            http1.send(format!("GET {target} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
            let head = http1.head().await.unwrap();
            assert_eq!(head.status(), status, "{transport} {target}: {head:?}");
            let received = http1.body(&head).await.unwrap().data;
            assert!(status != 200 || received == body.as_bytes(), "{transport} {target}: {} bytes", received.len());
        }
    }
    let requests = requests(&mut heads);
    let of_file = requests.iter().filter(|head| head.target() == "/org/web/file").count();
    assert_eq!(of_file, 1, "the content is stored while it is fresh");
    assert_eq!(requests[0].header("host").as_deref(), Some("web.example"));
    publisher.assert_sound();
}

#[tokio::test]
async fn interests_for_the_same_content_share_one_request() {
    let (origin, mut heads) = origin();
    let overlay = Overlay::new(hermes()).unwrap();
    let (publisher, key) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    for _ in 0..12 {
        consumer.send("/org/web/file", true).await;
    }
    for _ in 0..12 {
        let data = consumer.receive().await.unwrap();
        assert!(key.verifies(&data.signature), "{}", data.name);
        assert_eq!(data.final_block.unwrap().number(types::SEGMENT), Some(128));
    }
    assert_eq!(requests(&mut heads).len(), 1);
}

#[tokio::test]
async fn a_change_has_a_new_version_and_the_old_one_stays_whole() {
    let (origin, _) = origin();
    let overlay = Overlay::new(hermes()).unwrap();
    let (publisher, _) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    let first = consumer.ask("/org/web/changing", true).await.unwrap();
    let old = version_of(&first.name);
    // Freshness is one second without `max-age`.
    let new = loop {
        let version = version_of(&consumer.ask("/org/web/changing/32=metadata", true).await.unwrap().name);
        if version != old {
            break version;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(new > old);
    for (version, bytes) in [(old, 20_000), (new, 20_001)] {
        let mut content = Vec::new();
        for number in 0..3 {
            let segment = name("/org/web/changing").child(&Component::numbered(types::VERSION, version));
            let segment = segment.child(&Component::numbered(types::SEGMENT, number));
            content.extend_from_slice(&consumer.ask(&segment.to_string(), false).await.unwrap().content);
        }
        assert!(content == text(bytes).as_bytes(), "{} bytes of {bytes}", content.len());
    }
}

#[tokio::test]
async fn what_no_content_answers_is_said() {
    let (origin, mut heads) = origin();
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut publisher, key) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    let fresh = consumer.ask("/org/web/file", true).await.unwrap();
    let version = version_of(&fresh.name);
    // Neither of them makes another request while the content is fresh.
    for uri in [format!("/org/web/file/v={version}/seg=129"), "/org/web/file/v=1/seg=0".to_owned()] {
        let data = consumer.ask(&uri, false).await.unwrap();
        assert_eq!((data.content_type, data.name.to_string()), (APPLICATION_NACK, uri));
        assert!(key.verifies(&data.signature));
    }
    assert_eq!(requests(&mut heads).len(), 1);
    assert_eq!(consumer.ask("/org/web/missing", true).await.unwrap().content_type, APPLICATION_NACK);
    // Beyond what is stored as a whole, and a name that leaves no room for content.
    assert_eq!(consumer.ask("/org/web/huge", true).await, Err(NackReason::NoRoute));
    publisher.metric_reaches("hermes_limit_hits_total", "ndn-content-bytes", 1.0).await;
    assert_eq!(consumer.ask(&format!("/org/web/file/{}", "x".repeat(5000)), true).await.unwrap().content_type, 3);
    // Outside of what is published, and without a route.
    assert_eq!(consumer.ask("/org/other", true).await, Err(NackReason::NoRoute));
    publisher.assert_sound();
}

/// The origin answers nobody, and each Interest names other content.
#[tokio::test]
async fn a_flood_of_names_is_bounded() {
    let origin = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut publisher, _) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    for number in 0..400 {
        consumer.send(&format!("/org/web/{number}"), true).await;
    }
    assert_eq!(consumer.receive().await, Err(NackReason::Congestion));
    publisher.metric_reaches("hermes_limit_hits_total", "ndn-content", 1.0).await;
    assert!(publisher.metric("hermes_sessions_open", "").await.unwrap() <= 256.0);
    publisher.assert_sound();
}

/// Each client has its own decision, and a reload repeats it.
#[tokio::test]
async fn stored_content_is_for_those_who_may_request_it() {
    let (origin, mut heads) = origin();
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut publisher, _) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    assert!(consumer.ask("/org/web/file", true).await.is_ok());
    let other = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    other.connect(publisher.address("face")).await.unwrap();
    assert!(Consumer(other).ask("/org/web/file", true).await.is_ok());
    assert_eq!(requests(&mut heads).len(), 2, "one for each address");
    let denying = PUBLISHER.replace("path: '/org/web/*'", "path: '/org/web/other'");
    publisher.reload(&denying, &[("ORIGIN", origin.address().to_string())]).await.unwrap();
    // No route is a 404.
    assert_eq!(consumer.ask("/org/web/file", true).await.unwrap().content_type, APPLICATION_NACK);
    assert_eq!(requests(&mut heads).len(), 0);
}

/// Each response is long, and never ends.
#[tokio::test]
async fn unfinished_responses_are_bounded() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{}", 30 << 20, text(20 << 20))).await?;
        http1.to_end().await.map(drop)
    })
    .unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut publisher, _) = publisher(&overlay, &origin).await;
    let consumer = Consumer::connect(&publisher).await;
    for number in 0..6 {
        consumer.send(&format!("/org/web/{number}"), true).await;
    }
    for _ in 0..3 {
        assert_eq!(consumer.receive().await, Err(NackReason::Congestion));
    }
    publisher.metric_reaches("hermes_limit_hits_total", "\"ndn-content\"", 3.0).await;
    publisher.assert_sound();
}
