//! Envoy as the upstream of a node: the end of its tunnels, and its path to origins.

use hermes_testkit::{
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, TunnelMode},
    overlay::{Node, Overlay},
    transfer::{self, Version},
};
use rand::{SeedableRng as _, rngs::SmallRng};

use crate::envoy::{
    config::{self, Speaks},
    lab::{Envoy, Origins, envoy_binary, overlay},
};

const MIB: usize = 1 << 20;
const HOPS: [&str; 4] = ["h1", "h2", "post-h1", "post-h2"];

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
$LISTENERS
routes:
$ROUTES
upstreams:
- {name: h1, protocol: h1, overlay: false, endpoints: ['$ENVOY']}
- {name: h2, protocol: h2, overlay: false, endpoints: ['$ENVOY']}
- {name: post-h1, protocol: h1, tunnel-method: POST, overlay: false, endpoints: ['$ENVOY']}
- {name: post-h2, protocol: h2, tunnel-method: POST, overlay: false, endpoints: ['$ENVOY']}
";

/// A node before an Envoy that ends tunnels and forwards requests. The name that is asked for chooses the hop.
struct Fixture {
    envoy: Envoy,
    node: Node,
    _origins: Origins,
    _overlay: Overlay,
}

impl Fixture {
    async fn start(test: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, origins) = (overlay(), Origins::start());
        let hosts = [
            ("ECHO:7", vec![config::terminate("echo", "CONNECT"), config::terminate_post("echo")]),
            ("WEB-H1", config::forward("web-h1")),
            ("WEB-H2", config::forward("web-h2")),
            // Of CONNECT-UDP Envoy looks at the target in the path, in the place of the authority.
            ("GAME:9", vec![config::terminate("udp", "CONNECT-UDP")]),
        ];
        let web = config::http(&Envoy::log(&overlay, "envoy"), &hosts);
        let clusters = [
            config::cluster("echo", origins.echo.address(), Speaks::Bytes, None),
            config::cluster("udp", origins.udp.address(), Speaks::Bytes, None),
            config::cluster("web-h1", origins.h1.address(), Speaks::H1, None),
            config::cluster("web-h2", origins.h2.address(), Speaks::H2, None),
        ];
        let document = config::bootstrap(&[config::listener("overlay", &web, None)], &clusters);
        let envoy = Envoy::start(&overlay, &binary, "envoy", &document).await;
        let (mut listeners, mut routes) = (String::new(), String::new());
        for hop in HOPS {
            for protocol in ["tcp", "udp"] {
                listeners += &format!(
                    "- {{name: {protocol}-{hop}, bind: '127.0.0.1:0', protocol: {protocol}, authority: '{hop}:7'}}\n"
                );
            }
            for (kind, target) in [("tcp", "ECHO:7"), ("udp", "GAME:9")] {
                routes += &format!(
                    "- {{name: {kind}-{hop}, match: {{kind: {kind}, authority: '{hop}:7'}}, upstream: {hop}, rewrite: {{authority: '{target}'}}}}\n"
                );
            }
            for origin in ["WEB-H1", "WEB-H2"] {
                routes += &format!(
                    "- {{name: {origin}-{hop}, match: {{authority: {hop}-{origin}}}, upstream: {hop}, rewrite: {{authority: {origin}}}}}\n"
                );
            }
        }
        let node = overlay.node("edge").document(DOCUMENT).with("LISTENERS", listeners).with("ROUTES", routes);
        let node = node.with("ENVOY", envoy.address("overlay")).start().await.unwrap();
        Some(Self { envoy, node, _origins: origins, _overlay: overlay })
    }

    fn client(&self, raw: bool, protocol: &str, hop: &str) -> ListenerClient {
        let listener = if raw { format!("{protocol}-{hop}") } else { "door".to_owned() };
        ListenerClient::plain(self.node.address(&listener))
    }
}

#[tokio::test]
async fn requests() {
    let Some(fixture) = Fixture::start("requests").await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    for near in [Version::H1, Version::H2] {
        for hop in ["h1", "h2"] {
            for origin in ["WEB-H1", "WEB-H2"] {
                let (client, name) = (fixture.client(false, "http", hop), format!("{hop}-{origin}"));
                for size in [0, 1, 65_536, 3 * MIB] {
                    let what = |error| panic!("{size} bytes by {near:?} over {hop} to {origin}: {error}");
                    transfer::upload(&client, near, &name, size, &mut rng).await.unwrap_or_else(what);
                    transfer::download(&client, near, &name, size).await.unwrap_or_else(what);
                }
            }
        }
    }
}

#[tokio::test]
async fn tunnels_end_at_envoy() {
    let Some(fixture) = Fixture::start("tunnels_end_at_envoy").await else { return };
    let mut rng = SmallRng::seed_from_u64(2);
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2]
    {
        for hop in HOPS {
            let client = fixture.client(mode == TunnelMode::Raw, "tcp", hop);
            for size in [1, 65_536, 3 * MIB] {
                transfer::echo_whole(&client, mode, &format!("{hop}:7"), size, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("{size} bytes by {mode:?} over {hop}: {error}"));
            }
        }
    }
}

#[tokio::test]
async fn half_a_close_reaches_the_target() {
    let Some(fixture) = Fixture::start("half_a_close_reaches_the_target").await else { return };
    let mut rng = SmallRng::seed_from_u64(3);
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2]
    {
        for hop in HOPS {
            let client = fixture.client(mode == TunnelMode::Raw, "tcp", hop);
            for size in [0, 1, MIB] {
                let echoed = transfer::echo(&client, mode, &format!("{hop}:7"), size, &mut rng).await;
                match hop {
                    // Envoy's own limit, shown below.
                    "h1" => {}
                    _ => echoed.unwrap_or_else(|error| panic!("{size} bytes by {mode:?} over {hop}: {error}")),
                }
            }
        }
    }
}

/// CONNECT over HTTP/1.1 ends in both directions at Envoy as soon as one of them does: without any node of ours.
#[tokio::test]
async fn envoy_knows_no_half_a_close_of_connect_over_http_1() {
    let Some(fixture) = Fixture::start("envoy_knows_no_half_a_close").await else { return };
    let mut rng = SmallRng::seed_from_u64(4);
    let client = fixture.envoy.client("overlay");
    let error = transfer::echo(&client, TunnelMode::ConnectH1, "ECHO:7", MIB, &mut rng).await.err();
    let output = error.expect("Envoy has learnt it: expect it of the nodes' tunnels as well").to_string();
    assert!(output.contains("bytes came back"), "{output}");
    // What is no half a close is whole.
    transfer::echo_whole(&client, TunnelMode::ConnectH1, "ECHO:7", MIB, &mut rng).await.unwrap();
    transfer::echo(&client, TunnelMode::ConnectH2, "ECHO:7", MIB, &mut rng).await.unwrap();
}

#[tokio::test]
async fn flows_end_at_envoy() {
    let Some(fixture) = Fixture::start("flows_end_at_envoy").await else { return };
    let mut rng = SmallRng::seed_from_u64(5);
    for mode in FlowMode::ALL {
        let client = fixture.client(mode == FlowMode::Raw, "udp", "h2");
        transfer::datagrams(&client, mode, "h2", 60, &mut rng)
            .await
            .unwrap_or_else(|error| panic!("datagrams by {mode:?}: {error}"));
    }
}

/// At the end of CONNECT-UDP over HTTP/1.1 Envoy answers 200 where RFC 9298, 3.3, has 101: no node takes that for a
/// tunnel, and neither does a client without any node.
#[tokio::test]
async fn envoy_ends_no_flows_over_http_1() {
    let Some(fixture) = Fixture::start("envoy_ends_no_flows_over_http_1").await else { return };
    let mut http1 = fixture.envoy.client("overlay").h1().await.unwrap();
    let upgrade = "connection: upgrade\r\nupgrade: connect-udp\r\ncapsule-protocol: ?1\r\n";
    let path = hermes_testkit::flow::path("GAME", 9);
    http1.send(format!("GET {path} HTTP/1.1\r\nhost: proxy.test\r\n{upgrade}\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 200, "Envoy has learnt it: expect it of the nodes' flows as well: {head:?}");
    for mode in FlowMode::TUNNELS {
        let refused =
            Flow::open(&fixture.client(false, "udp", "h1"), mode, "h1", 7).await.err().expect("it is no tunnel");
        assert!(refused.to_string().contains("http_upgrade_failed"), "{mode:?}: {refused}");
    }
}
