//! What the tests share: one node of one worker that speaks HTTP/3, before origins that tell whatever they are asked.

use hermes_testkit::binary::hermes;
use std::net::SocketAddr;

use hermes_testkit::{
    ca::Subject,
    h3,
    listener_client::{ListenerClient, NODE_NAME},
    origin::{self, Origin, scripted, stream},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::{Content, Head},
};
use tokio::sync::mpsc;

pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

/// A request as the origin saw it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) head: Head,
    /// `None` where it broke off.
    pub(crate) body: Option<String>,
}

/// A node with `HERE`, which it answers, `WEB`, an HTTP/1.1 origin, and `ECHO:7` behind it.
pub(crate) struct NodeFixture {
    pub(crate) node: Node,
    pub(crate) overlay: Overlay,
    pub(crate) seen: mpsc::UnboundedReceiver<Seen>,
    _origins: [Origin; 3],
    /// Takes connections, and says nothing.
    _mute: std::net::TcpListener,
}

const DOCUMENT: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: $CLIENT} $MORE}
routes:
- {name: here, match: {authority: HERE}, respond: {body: here}}
- {name: alice, match: {path: /who, user: alice}, respond: {body: alice}}
- {name: tcp, match: {kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: mute, match: {kind: udp, authority: 'MUTE:7'}, upstream: mute, timeout: {connect: 1m}}
- {name: udp, match: {kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
- {name: late, match: {kind: http, authority: WEB, path: /late}, upstream: web, early-data: false}
- {name: web, match: {kind: http, authority: WEB}, upstream: web}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
- {name: mute, protocol: h1, endpoints: ['$MUTE']}
";

impl NodeFixture {
    pub(crate) async fn new() -> Self {
        Self::with("").await
    }

    /// With other limits than the default ones.
    pub(crate) async fn with(limits: &str) -> Self {
        Self::of(limits, "none", "").await
    }

    /// With such demands on clients, and more keys of the listener.
    pub(crate) async fn of(limits: &str, client: &str, more: &str) -> Self {
        let (sender, seen) = mpsc::unbounded_channel();
        let web = scripted::h1(move |http1| tell_all(http1, sender.clone())).unwrap();
        let origins = [web, stream::echo(origin::listen(ANY).unwrap()).unwrap(), Origin::udp_echo(ANY).unwrap()];
        let overlay = overlay();
        let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
        let [web, echo, udp] = origins.each_ref().map(Origin::address);
        let draft = draft
            .document(DOCUMENT)
            .with("LIMITS", limits)
            .with("CLIENT", client)
            .with("MORE", more)
            .with("WEB", web)
            .with("ECHO", echo);
        let mute = std::net::TcpListener::bind(ANY).unwrap();
        let draft = draft.with("UDP", udp).with("MUTE", mute.local_addr().unwrap());
        let node = draft.start().await.unwrap();
        Self { node, overlay, seen, _origins: origins, _mute: mute }
    }

    pub(crate) fn client(&self) -> ListenerClient {
        ListenerClient::tls(self.node.address("door"), self.overlay.authority().pem(), None)
    }

    /// A connection that has begun as any client's.
    pub(crate) async fn connect(&self) -> h3::Connection {
        self.client().h3().await.unwrap()
    }

    /// The next request that the origin sees.
    pub(crate) async fn sees(&mut self) -> Seen {
        let waited = tokio::time::timeout(EFFECT_TIMEOUT, self.seen.recv()).await;
        waited.expect("the origin saw nothing").expect("the origin is here")
    }

    /// An honest client is served on this connection.
    pub(crate) async fn serves_on(&self, connection: &h3::Connection, what: &str) {
        let answer = connection.get("https://HERE/").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((answer.status, answer.text()), (200, "here".to_owned()), "{what}");
    }
}

async fn tell_all(
    mut http1: hermes_testkit::raw_http1::RawHttp1<tokio::net::TcpStream>,
    sender: mpsc::UnboundedSender<Seen>,
) -> std::io::Result<()> {
    loop {
        let head = http1.head().await?;
        let body = http1.body(&head).await;
        let text = body.as_ref().ok().map(Content::text);
        let answer = format!("{} {} {}", head.method(), head.target(), text.as_deref().unwrap_or("").len());
        let is_too_early = head.target() == "/picky" && head.header("early-data").is_some();
        let status = if is_too_early { "425 Too Early" } else { "200 OK" };
        let _ = sender.send(Seen { head, body: text });
        body?;
        http1.send(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{answer}", answer.len())).await?;
    }
}
