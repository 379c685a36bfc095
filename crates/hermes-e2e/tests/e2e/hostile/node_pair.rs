//! Two nodes with a single connection between them, on which one client's behaviour affects all others.

use hermes_testkit::{
    listener_client::{ListenerClient, TunnelMode},
    origin::{self, Origin},
    overlay::{Node, Overlay},
    tunnel::Tunnel,
};

use crate::hostile::lab::overlay;

const BEHIND: &str = "
workers: 1
limits: {$LIMITS}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: origin, match: {authority: ORIGIN}, upstream: origin}
- {name: refuses, match: {authority: REFUSES}, respond: {status: 403}}
- {name: echo, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
upstreams:
- {name: origin, protocol: $PROTOCOL, overlay: false, endpoints: ['$ORIGIN']}
";

const EDGE: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: h2, overlay: true, endpoints: ['$NEXT']}
";

/// Everybody comes to `edge`, which has all from `behind`; that has an origin, an echo, and refuses what it is told to.
pub(crate) struct Pair {
    pub(crate) edge: Node,
    pub(crate) behind: Node,
    _overlay: Overlay,
    _origins: [Origin; 2],
}

impl Pair {
    /// `limits` are those of `behind`.
    pub(crate) async fn before(origin: Origin, protocol: &str, limits: &str) -> Self {
        let overlay = overlay();
        let echo = origin::stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
        let draft = overlay.node("behind").document(BEHIND).with("LIMITS", limits).with("PROTOCOL", protocol);
        let draft = draft.with("ORIGIN", origin.address()).with("ECHO", echo.address());
        let behind = draft.start().await.unwrap();
        let draft = overlay.node("edge").document(EDGE).with("NEXT", behind.address("in"));
        let edge = draft.start().await.unwrap();
        Self { edge, behind, _overlay: overlay, _origins: [origin, echo] }
    }

    /// Somebody else's tunnel, on the same connection.
    pub(crate) async fn bystander(&self) -> Tunnel {
        let mut tunnel =
            ListenerClient::plain(self.edge.address("in")).tunnel(TunnelMode::ConnectH1, "ECHO:7").await.unwrap();
        still_there(&mut tunnel).await;
        tunnel
    }

    /// The bystander's tunnel lives, and there was never another connection.
    pub(crate) async fn assert_shared(&self, tunnel: &mut Tunnel) {
        still_there(tunnel).await;
        let connects = self.edge.metric("hermes_upstream_connects_total", "").await.unwrap();
        assert_eq!(connects, 1.0, "connections between the two");
    }
}

async fn still_there(tunnel: &mut Tunnel) {
    tunnel.writer.send("still there?").await.unwrap();
    assert_eq!(tunnel.reader.at_least(12).await.unwrap(), b"still there?");
}
