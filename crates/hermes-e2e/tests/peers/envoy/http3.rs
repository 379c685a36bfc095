//! Envoy over HTTP/3: before a node, and behind one.

use hermes_testkit::{
    ca::Subject,
    flow::FlowMode,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    overlay::{Node, Overlay},
    transfer::{self, Version},
};
use rand::{SeedableRng as _, rngs::SmallRng};

use crate::envoy::{
    config::{self, Speaks, Tls},
    identities::envoy_files,
    lab::{Envoy, Origins, envoy_binary, overlay},
};

const MIB: usize = 1 << 20;

/// A node and an Envoy, whichever comes first.
struct Fixture {
    envoy: Envoy,
    node: Node,
    _origins: Origins,
    overlay: Overlay,
}

const EDGE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, accept-post: true, tls: {client: optional}}
routes:
- {name: tcp, match: {kind: tcp, authority: 'ECHO:7', user: alice}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
- {name: web-h1, match: {kind: http, authority: WEB-H1}, upstream: web-h1}
- {name: web-h2, match: {kind: http, authority: WEB-H2}, upstream: web-h2}
upstreams:
- {name: web-h1, protocol: h1, overlay: false, endpoints: ['$H1']}
- {name: web-h2, protocol: h2, overlay: false, endpoints: ['$H2']}
";

impl Fixture {
    /// Envoy speaks HTTP/3 to the node.
    async fn envoy_before(test: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, origins) = (overlay(), Origins::start());
        let draft = overlay.node("edge").document(EDGE).with("ECHO", origins.echo.address());
        let draft = draft.with("UDP", origins.udp.address()).with("H1", origins.h1.address());
        let draft =
            draft.with("H2", origins.h2.address()).identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let node = draft.start().await.unwrap();
        let files = envoy_files(&overlay, overlay.authority(), "envoy");
        let tls = Tls { files: &files, peer: "spiffe://lab/node/edge" };
        let web = config::http(&Envoy::log(&overlay, "envoy"), &[("*", config::forward("h3"))]);
        let listeners = [
            config::listener("http", &web, None),
            config::listener("tcp", &config::tcp_tunnel("ECHO:7", "h3", false), None),
            config::udp_tunnel("udp", ("ECHO", 7), "h3", false),
        ];
        let clusters = [config::cluster("h3", node.address("door"), Speaks::H3, Some(tls))];
        let document = config::bootstrap(&listeners, &clusters);
        let envoy = Envoy::start(&overlay, &binary, "envoy", &document).await;
        Some(Self { envoy, node, _origins: origins, overlay })
    }

    /// The node speaks HTTP/3 to Envoy, where tunnels end.
    async fn envoy_behind(test: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, origins) = (overlay(), Origins::start());
        let files = envoy_files(&overlay, overlay.authority(), "envoy");
        let hosts = [
            ("ECHO:7", vec![config::terminate("echo", "CONNECT")]),
            ("WEB-H1", config::forward("web-h1")),
            ("WEB-H2", config::forward("web-h2")),
            ("GAME:9", vec![config::terminate("udp", "CONNECT-UDP")]),
        ];
        let tls = Tls { files: &files, peer: "spiffe://lab/node/edge" };
        let listener = config::listener_h3("overlay", &Envoy::log(&overlay, "envoy"), &hosts, tls);
        let clusters = [
            config::cluster("echo", origins.echo.address(), Speaks::Bytes, None),
            config::cluster("udp", origins.udp.address(), Speaks::Bytes, None),
            config::cluster("web-h1", origins.h1.address(), Speaks::H1, None),
            config::cluster("web-h2", origins.h2.address(), Speaks::H2, None),
        ];
        let envoy = Envoy::start(&overlay, &binary, "envoy", &config::bootstrap(&[listener], &clusters)).await;
        let draft = overlay.node("edge").document(BEFORE).with("ENVOY", envoy.address("overlay"));
        let draft = draft.identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let node = draft.start().await.unwrap();
        Some(Self { envoy, node, _origins: origins, overlay })
    }

    fn client(&self) -> ListenerClient {
        ListenerClient::tls(self.node.address("door"), self.overlay.authority().pem(), None)
    }
}

const BEFORE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: raw, bind: '127.0.0.1:0', protocol: tcp, authority: 'ECHO:7'}
- {name: raw-udp, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:9'}
routes:
- {name: game, match: {kind: udp, authority: 'GAME:7'}, upstream: envoy, rewrite: {authority: 'GAME:9'}}
- {name: all, upstream: envoy}
upstreams:
- {name: envoy, protocol: h3, overlay: false, endpoints: ['$ENVOY'], tls: {node: envoy}}
";

#[tokio::test]
async fn requests_that_envoy_sends_on_over_http_3() {
    let Some(fixture) = Fixture::envoy_before("requests_that_envoy_sends_on_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    let client = fixture.envoy.client("http");
    for near in [Version::H1, Version::H2] {
        for origin in ["WEB-H1", "WEB-H2"] {
            for size in [0, 1, 65_536, 3 * MIB] {
                let what = |error| panic!("{size} bytes by {near:?} to {origin}: {error}");
                transfer::upload(&client, near, origin, size, &mut rng).await.unwrap_or_else(what);
                transfer::download(&client, near, origin, size).await.unwrap_or_else(what);
            }
        }
    }
    assert!(fixture.envoy.counter("cluster.h3.upstream_cx_http3_total").await > 0);
}

#[tokio::test]
async fn connections_that_envoy_tunnels_over_http_3() {
    let Some(fixture) = Fixture::envoy_before("connections_that_envoy_tunnels_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(2);
    let client = fixture.envoy.client("tcp");
    for size in [1, 65_536, 3 * MIB] {
        let what = |error| panic!("{size} bytes: {error}");
        transfer::echo(&client, TunnelMode::Raw, "", size, &mut rng).await.unwrap_or_else(what);
    }
    // It shows who it is over QUIC too.
    let record = fixture.node.record(|record| record["kind"] == "tcp").await;
    assert_eq!((&record["peer"], &record["user"]), (&"envoy".into(), &"alice".into()), "{record}");
}

#[tokio::test]
async fn flows_that_envoy_tunnels_over_http_3() {
    let Some(fixture) = Fixture::envoy_before("flows_that_envoy_tunnels_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(3);
    let client = fixture.envoy.client("udp");
    transfer::datagrams_between((0, 1000), &client, FlowMode::Raw, "", 60, &mut rng).await.unwrap();
}

#[tokio::test]
async fn requests_into_an_envoy_over_http_3() {
    let Some(fixture) = Fixture::envoy_behind("requests_into_an_envoy_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(4);
    for near in [Version::H1, Version::H2, Version::H3] {
        for origin in ["WEB-H1", "WEB-H2"] {
            for size in [0, 1, 65_536, 3 * MIB] {
                let what = |error| panic!("{size} bytes by {near:?} to {origin}: {error}");
                transfer::upload(&fixture.client(), near, origin, size, &mut rng).await.unwrap_or_else(what);
                transfer::download(&fixture.client(), near, origin, size).await.unwrap_or_else(what);
            }
        }
    }
}

#[tokio::test]
async fn tunnels_that_end_at_an_envoy_over_http_3() {
    let Some(fixture) = Fixture::envoy_behind("tunnels_that_end_at_an_envoy_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(5);
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::ConnectH3] {
        let client =
            if mode == TunnelMode::Raw { ListenerClient::plain(fixture.node.address("raw")) } else { fixture.client() };
        for size in [1, 65_536, 3 * MIB] {
            let what = |error| panic!("{size} bytes by {mode:?}: {error}");
            transfer::echo(&client, mode, "ECHO:7", size, &mut rng).await.unwrap_or_else(what);
        }
    }
}

#[tokio::test]
async fn flows_that_end_at_an_envoy_over_http_3() {
    let Some(fixture) = Fixture::envoy_behind("flows_that_end_at_an_envoy_over_http_3").await else { return };
    let mut rng = SmallRng::seed_from_u64(6);
    for mode in [FlowMode::Raw, FlowMode::ConnectH2, FlowMode::ConnectH3] {
        let client = if mode == FlowMode::Raw {
            ListenerClient::plain(fixture.node.address("raw-udp"))
        } else {
            fixture.client()
        };
        let what = |error| panic!("datagrams by {mode:?}: {error}");
        transfer::datagrams_between((0, 1000), &client, mode, "GAME", 60, &mut rng).await.unwrap_or_else(what);
    }
}
