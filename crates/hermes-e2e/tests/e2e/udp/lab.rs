//! Two nodes with every kind of hop between them, the far one ending flows at an origin.

use hermes_testkit::binary::hermes;
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use hermes_testkit::{
    flow::{Flow, FlowMode},
    listener_client::ListenerClient,
    overlay::{Node, Overlay},
};

pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Every way on: names of routes of [`Lab`]. `HERE` ends at the first node.
pub(crate) const HOPS: [&str; 5] = ["HERE", "H1", "H2", "POST-H1", "POST-H2"];

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

const FAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
routes:
- {name: origin, match: {kind: udp}, terminate: {udp: '$ORIGIN'}}
";

const NEAR: &str = "
$LIMITS
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
$RAW
routes:
- {name: here, match: {kind: udp, authority: 'HERE:*'}, terminate: {udp: '$ORIGIN'} $ROUTE}
- {name: h1, match: {kind: udp, authority: 'H1:*'}, upstream: h1 $ROUTE}
- {name: h2, match: {kind: udp, authority: 'H2:*'}, upstream: h2 $ROUTE}
- {name: post-h1, match: {kind: udp, authority: 'POST-H1:*'}, upstream: post-h1 $ROUTE}
- {name: post-h2, match: {kind: udp, authority: 'POST-H2:*'}, upstream: post-h2 $ROUTE}
upstreams:
- {name: h1, protocol: h1, overlay: true, endpoints: ['$FAR']}
- {name: h2, protocol: h2, overlay: true, endpoints: ['$FAR']}
- {name: post-h1, protocol: h1, tunnel-method: POST, overlay: true, endpoints: ['$FAR']}
- {name: post-h2, protocol: h2, tunnel-method: POST, overlay: true, endpoints: ['$FAR']}
";

/// A near node, and a far one behind each of its hops.
pub(crate) struct Lab {
    pub(crate) near: Node,
    pub(crate) far: Option<Node>,
    _overlay: Overlay,
}

/// What a lab has beside the usual.
#[derive(Default)]
pub(crate) struct Extras<'a> {
    /// Top-level lines of the near node.
    pub(crate) limits: &'a str,
    /// What each route of the near node has beside its action, with a comma in front.
    pub(crate) route: &'a str,
}

impl Lab {
    pub(crate) async fn to(origin: SocketAddr) -> Self {
        Self::with(origin, Extras::default()).await
    }

    pub(crate) async fn with(origin: SocketAddr, extras: Extras<'_>) -> Self {
        let overlay = overlay();
        let far = overlay.node("far").document(FAR).with("ORIGIN", origin).start().await.unwrap();
        let near = near(&overlay, origin, far.address("door"), &extras).await;
        Self { near, far: Some(far), _overlay: overlay }
    }

    /// The near node before a next hop of the test's own.
    pub(crate) async fn before(next: SocketAddr, extras: Extras<'_>) -> Self {
        let overlay = overlay();
        let near = near(&overlay, next, next, &extras).await;
        Self { near, far: None, _overlay: overlay }
    }

    /// Who ends flows that go by this hop.
    pub(crate) fn terminator(&self, hop: &str) -> &Node {
        self.far.as_ref().filter(|_| hop != "HERE").unwrap_or(&self.near)
    }

    /// The near node's listener for this way and hop.
    pub(crate) fn client(&self, mode: FlowMode, hop: &str) -> ListenerClient {
        let listener = if mode == FlowMode::Raw { format!("raw-{hop}") } else { "door".to_owned() };
        ListenerClient::plain(self.near.address(&listener))
    }

    pub(crate) async fn try_open(&self, mode: FlowMode, hop: &str) -> io::Result<Flow> {
        Flow::open(&self.client(mode, hop), mode, hop, 7).await
    }

    pub(crate) async fn open(&self, mode: FlowMode, hop: &str) -> Flow {
        self.try_open(mode, hop).await.unwrap_or_else(|error| panic!("{mode:?} over {hop}: {error}"))
    }

    /// Every session is over, everywhere.
    pub(crate) async fn quiet(&self) {
        self.near.quiet().await;
        if let Some(far) = &self.far {
            far.quiet().await;
        }
    }
}

async fn near(overlay: &Overlay, origin: SocketAddr, far: SocketAddr, extras: &Extras<'_>) -> Node {
    let raw =
        HOPS.map(|name| format!("- {{name: raw-{name}, bind: '127.0.0.1:0', protocol: udp, authority: '{name}:7'}}\n"));
    let draft = overlay.node("near").document(NEAR).with("RAW", raw.concat()).with("LIMITS", extras.limits);
    draft.with("ROUTE", extras.route).with("ORIGIN", origin).with("FAR", far).start().await.unwrap()
}

/// Sends one datagram and demands that it comes back, from an origin that echoes it as it is.
pub(crate) async fn echo(flow: &mut Flow, payload: &[u8]) -> io::Result<()> {
    flow.send(payload).await?;
    let got = flow.receive().await?;
    if got == payload {
        Ok(())
    } else {
        let (sent, got_length) = (payload.len(), got.len());
        Err(io::Error::other(format!("{sent} bytes were sent, and others ({got_length}) came back")))
    }
}
