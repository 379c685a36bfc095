//! What the tests of HTTP share: one node before one origin, and two nodes with every kind of tunnel between them.

use hermes_testkit::binary::hermes;
use std::net::SocketAddr;

use hermes_testkit::{
    listener_client::{ListenerClient, TunnelMode},
    overlay::{Node, Overlay},
};

/// The values of a channel that a test's origin fills.
pub(crate) type Seen<T> = tokio::sync::mpsc::UnboundedReceiver<T>;

/// A channel for what an origin sees.
pub(crate) fn seen<T>() -> (tokio::sync::mpsc::UnboundedSender<T>, Seen<T>) {
    tokio::sync::mpsc::unbounded_channel()
}

/// The next thing that an origin saw.
pub(crate) async fn next<T>(seen: &mut Seen<T>) -> T {
    let waited = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, seen.recv()).await;
    waited.expect("the origin saw nothing").expect("the origin is gone")
}

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

/// A node whose listener `in` forwards all to an origin of this protocol.
pub(crate) async fn before(overlay: &Overlay, protocol: &str, origin: SocketAddr) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";
    overlay.node("edge").document(document).with("PROTOCOL", protocol).with("ORIGIN", origin).start().await.unwrap()
}

/// A node whose listener `in` forwards all to another node's, by this version.
pub(crate) async fn in_front(overlay: &Overlay, protocol: &str, far: &Node) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: $PROTOCOL, overlay: true, endpoints: ['$FAR']}
";
    let draft = overlay.node("near").document(document).with("PROTOCOL", protocol);
    draft.with("FAR", far.address("in")).start().await.unwrap()
}

/// Every way into an overlay.
pub(crate) const MODES: [TunnelMode; 5] =
    [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2];
/// Every way on: names of routes of [`Tunnels`]. `HERE` ends at the first node.
pub(crate) const HOPS: [&str; 6] = ["HERE", "H1", "H2", "POST-H1", "POST-H2", "BARE"];

/// Two nodes; the far one ends TCP at an origin.
pub(crate) struct Tunnels {
    pub(crate) near: Node,
    pub(crate) far: Node,
    _overlay: Overlay,
}

const FAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
- {name: bare, bind: '127.0.0.1:0', protocol: tcp, authority: 'ORIGIN:7'}
routes:
- {name: origin, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}
";

const NEAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
$RAW
routes:
- {name: here, match: {kind: tcp, authority: 'HERE:*'}, terminate: {tcp: '$ORIGIN'}}
- {name: h1, match: {kind: tcp, authority: 'H1:*'}, upstream: h1}
- {name: h2, match: {kind: tcp, authority: 'H2:*'}, upstream: h2}
- {name: post-h1, match: {kind: tcp, authority: 'POST-H1:*'}, upstream: post-h1}
- {name: post-h2, match: {kind: tcp, authority: 'POST-H2:*'}, upstream: post-h2}
- {name: bare, match: {kind: tcp, authority: 'BARE:*'}, upstream: bare}
upstreams:
- {name: h1, protocol: h1, overlay: true, endpoints: ['$DOOR']}
- {name: h2, protocol: h2, overlay: true, endpoints: ['$DOOR']}
- {name: post-h1, protocol: h1, tunnel-method: POST, overlay: true, endpoints: ['$DOOR']}
- {name: post-h2, protocol: h2, tunnel-method: POST, overlay: true, endpoints: ['$DOOR']}
- {name: bare, protocol: tcp, endpoints: ['$BARE']}
";

impl Tunnels {
    pub(crate) async fn to(origin: SocketAddr) -> Self {
        let overlay = overlay();
        let far = overlay.node("far").document(FAR).with("ORIGIN", origin).start().await.unwrap();
        let raw = HOPS
            .map(|name| format!("- {{name: raw-{name}, bind: '127.0.0.1:0', protocol: tcp, authority: '{name}:7'}}\n"));
        let near = overlay.node("near").document(&NEAR.replace("$RAW", &raw.concat())).with("ORIGIN", origin);
        let near = near.with("DOOR", far.address("door")).with("BARE", far.address("bare")).start().await.unwrap();
        Self { near, far, _overlay: overlay }
    }

    /// The near node's listener for this way and hop.
    pub(crate) fn client(&self, mode: TunnelMode, hop: &str) -> ListenerClient {
        let listener = if mode == TunnelMode::Raw { format!("raw-{hop}") } else { "door".to_owned() };
        ListenerClient::plain(self.near.address(&listener))
    }
}
