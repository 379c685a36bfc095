//! The fixture of the attacks: one node with one worker before origins that report each request.
//!
//! All sessions share the connections of the one worker, so that leftovers of one client would reach the next one.

use hermes_testkit::binary::hermes;
use std::{io, net::SocketAddr};

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::{self, Exchange},
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::{Head, RawHttp1},
};
use http::Response;
use tokio::{net::TcpStream, sync::mpsc};

/// What attacks want an origin to see.
pub(crate) const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: WEB\r\n\r\n";

/// A request as an origin saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, String)>,
    /// `None` where it broke off.
    pub(crate) body: Option<String>,
}

impl Seen {
    pub(crate) fn values(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(found, _)| found == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// A node before an origin of either version: listener `h1` leads to the one, `h2` to the other.
pub(crate) struct NodeFixture {
    pub(crate) node: Node,
    pub(crate) overlay: Overlay,
    pub(crate) seen: mpsc::UnboundedReceiver<Seen>,
    requests: usize,
    _origins: [Origin; 2],
}

/// Both versions of an origin, by the names of their listeners.
pub(crate) const BOTH: [&str; 2] = ["h1", "h2"];

const DOCUMENT: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- {name: h1, bind: '127.0.0.1:0', protocol: http}
- {name: h2, bind: '127.0.0.1:0', protocol: http}
- {name: tls, bind: '127.0.0.1:0', protocol: http, tls: {client: none}}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: h1, match: {listener: [h1, tls]}, upstream: h1}
- {name: h2, match: {listener: h2}, upstream: h2}
upstreams:
- {name: h1, protocol: h1, endpoints: ['$H1']}
- {name: h2, protocol: h2, overlay: false, endpoints: ['$H2']}
";

impl NodeFixture {
    pub(crate) async fn new() -> Self {
        Self::with("").await
    }

    /// With other limits than the default ones.
    pub(crate) async fn with(limits: &str) -> Self {
        let (sender, seen) = mpsc::unbounded_channel();
        let origins = [origin_h1(sender.clone()), origin_h2(sender)];
        let overlay = overlay();
        let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
        let draft = draft.document(DOCUMENT).with("LIMITS", limits).with("H1", origins[0].address());
        let node = draft.with("H2", origins[1].address()).start().await.unwrap();
        Self { node, overlay, seen, requests: 0, _origins: origins }
    }

    pub(crate) fn address(&self, listener: &str) -> SocketAddr {
        self.node.address(listener)
    }

    /// A listener in the clear, or by TLS for the listener of that name.
    pub(crate) fn client(&self, listener: &str) -> ListenerClient {
        match listener {
            "tls" => ListenerClient::tls(self.address("tls"), self.overlay.authority().pem(), None),
            _ => ListenerClient::plain(self.address(listener)),
        }
    }

    /// An honest client comes behind, is served, and gets the answer to its own request. Returns what origins saw
    /// before it.
    pub(crate) async fn still_serves(&mut self, listener: &str) -> Vec<Seen> {
        self.requests += 1;
        let target = format!("/honest/{}", self.requests);
        let (status, text) = get(self.address(listener), &target).await;
        assert_eq!((status, text), (200, format!("GET {target} 0")), "the answer to somebody else's request");
        let mut before = Vec::new();
        loop {
            let waited = tokio::time::timeout(EFFECT_TIMEOUT, self.seen.recv()).await;
            let seen = waited.expect("the origin saw nothing").expect("the origins are here");
            if seen.target == target {
                return before;
            }
            before.push(seen);
        }
    }
}

pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

/// GET over a connection of its own.
pub(crate) async fn get(to: SocketAddr, target: &str) -> (u16, String) {
    let mut http1 = RawHttp1::connect(to).await.unwrap();
    http1.send(format!("GET {target} HTTP/1.1\r\nHost: WEB\r\nConnection: close\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), http1.body(&head).await.unwrap().text())
}

/// Answers each request with its method, its target, and the length of its body.
fn origin_h1(sender: mpsc::UnboundedSender<Seen>) -> Origin {
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            loop {
                let head = http1.head().await?;
                assert_clean(&head);
                if head.header("expect").is_some() {
                    http1.send("HTTP/1.1 100 Continue\r\n\r\n").await?;
                }
                let body = http1.body(&head).await;
                let seen = Seen {
                    method: head.method().to_owned(),
                    target: head.target().to_owned(),
                    headers: head.headers.clone(),
                    body: body.as_ref().ok().map(hermes_testkit::raw_http1::Content::text),
                };
                let answer = format!("{} {} {}", seen.method, seen.target, seen.body.as_deref().unwrap_or("").len());
                let _ = sender.send(seen);
                body?;
                http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}", answer.len())).await?;
            }
        }
    });
    origin.unwrap()
}

/// A head that any origin reads the same way.
fn assert_clean(head: &Head) {
    let lines = std::iter::once(&head.first).chain(head.headers.iter().flat_map(|(name, value)| [name, value]));
    for line in lines {
        assert!(!line.contains(['\r', '\n', '\0']), "{line:?} of {head:?}");
    }
    let count = |name: &str| head.headers.iter().filter(|(found, _)| found == name).count();
    let framing = (count("content-length"), count("transfer-encoding"));
    assert!(matches!(framing, (0 | 1, 0) | (0, 1)), "more than one way to read it: {head:?}");
    assert!(matches!(head.header("transfer-encoding").as_deref(), None | Some("chunked")), "{head:?}");
    assert_eq!((count("host"), head.first.split(' ').count()), (1, 3), "{head:?}");
}

fn origin_h2(sender: mpsc::UnboundedSender<Seen>) -> Origin {
    let origin = scripted::h2(move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let Exchange { request, mut respond } = exchange;
            let (parts, body) = request.into_parts();
            if parts.headers.contains_key("expect") {
                let continues = Response::builder().status(100).body(()).map_err(io::Error::other)?;
                respond.send_informational(continues).map_err(io::Error::other)?;
            }
            let body = multiplex::receive_all(body).await;
            let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
            let seen = Seen {
                method: parts.method.to_string(),
                target: parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
                headers: parts.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
                body: body.as_ref().ok().map(|(data, _)| String::from_utf8_lossy(data).into_owned()),
            };
            let answer = format!("{} {} {}", seen.method, seen.target, seen.body.as_deref().unwrap_or("").len());
            let _ = sender.send(seen);
            body?;
            let mut stream = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
            multiplex::send_all(&mut stream, answer.into(), true).await
        }
    });
    origin.unwrap()
}

/// All that a connection says up to its end, orderly or not.
///
/// # Panics
/// When it stays open.
pub(crate) async fn last_words(http1: &mut RawHttp1<TcpStream>, what: &str) -> String {
    let ended = http1.to_end().await;
    let waits = matches!(&ended, Err(error) if error.kind() == io::ErrorKind::TimedOut);
    assert!(!waits, "{what}: the connection stays open; it said {:?}", http1.unread());
    let output = ended.unwrap_or_else(|_| http1.unread().to_vec());
    String::from_utf8_lossy(&output).into_owned()
}
