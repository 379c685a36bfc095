//! Envoy between two nodes: it forwards what it does not interpret, for every pair of versions on its two sides.

use hermes_testkit::{
    flow::FlowMode,
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

const FAR: &str = "
role: standalone
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
routes:
- {name: tcp, match: {kind: tcp, authority: 'ECHO:7', user: alice}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp, authority: 'ECHO:7', user: alice}, terminate: {udp: '$UDP'}}
- {name: web, match: {kind: http, authority: WEB, user: alice}, upstream: web}
upstreams:
- {name: web, protocol: h1, overlay: false, endpoints: ['$WEB']}
";

const NEAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8], set-headers: {hermes-user: alice}}
- {name: tcp, bind: '127.0.0.1:0', protocol: tcp, authority: 'ECHO:7', set-headers: {hermes-user: alice}}
- {name: udp, bind: '127.0.0.1:0', protocol: udp, authority: 'ECHO:7', set-headers: {hermes-user: alice}}
routes:
- {name: on, upstream: envoy}
upstreams:
- {name: envoy, protocol: $PROTOCOL, tunnel-method: $METHOD, overlay: true, endpoints: ['$ENVOY']}
";

struct Fixture {
    overlay: Overlay,
    envoy: Envoy,
    far: Node,
    _origins: Origins,
}

impl Fixture {
    async fn start(test: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, origins) = (overlay(), Origins::start());
        let far = overlay.node("far").document(FAR).with("ECHO", origins.echo.address());
        let far = far.with("UDP", origins.udp.address()).with("WEB", origins.h1.address()).start().await.unwrap();
        let log = Envoy::log(&overlay, "envoy");
        let on = |version| config::listener(version, &config::http(&log, &[("*", config::forward(version))]), None);
        let client = far.address("door");
        let clusters =
            [config::cluster("h1", client, Speaks::H1, None), config::cluster("h2", client, Speaks::H2, None)];
        let document = config::bootstrap(&[on("h1"), on("h2")], &clusters);
        let envoy = Envoy::start(&overlay, &binary, "envoy", &document).await;
        Some(Self { overlay, envoy, far, _origins: origins })
    }

    /// A node that speaks `protocol` to Envoy, which speaks `version` to the far node.
    async fn near(&self, protocol: &str, method: &str, version: &str) -> Node {
        let name = format!("near-{protocol}-{method}-{version}");
        let near = self.overlay.node(&name).document(NEAR).with("PROTOCOL", protocol).with("METHOD", method);
        near.with("ENVOY", self.envoy.address(version)).start().await.unwrap()
    }
}

#[tokio::test]
async fn everything_passes_in_every_pair_of_versions() {
    let Some(fixture) = Fixture::start("everything_passes").await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    for protocol in ["h1", "h2"] {
        for method in ["CONNECT", "POST"] {
            for version in ["h1", "h2"] {
                let near = fixture.near(protocol, method, version).await;
                let what = format!("{method} over {protocol}, then {version}");
                let listener_client = |listener: &str| ListenerClient::plain(near.address(listener));
                for (mode, listener) in [(TunnelMode::Raw, "tcp"), (TunnelMode::ConnectH2, "door")] {
                    for size in [1, 65_536, 2 * MIB] {
                        transfer::echo_whole(&listener_client(listener), mode, "ECHO:7", size, &mut rng)
                            .await
                            .unwrap_or_else(|error| panic!("{size} bytes by {mode:?} by {what}: {error}"));
                    }
                }
                for (mode, listener) in [(FlowMode::Raw, "udp"), (FlowMode::UpgradeH1, "door")] {
                    transfer::datagrams(&listener_client(listener), mode, "ECHO", 40, &mut rng)
                        .await
                        .unwrap_or_else(|error| panic!("datagrams by {mode:?} by {what}: {error}"));
                }
                for client in [Version::H1, Version::H2] {
                    let failed = |error| panic!("a request by {client:?} by {what}: {error}");
                    transfer::upload(&listener_client("door"), client, "WEB", MIB, &mut rng)
                        .await
                        .unwrap_or_else(failed);
                    transfer::download(&listener_client("door"), client, "WEB", MIB).await.unwrap_or_else(failed);
                }
            }
        }
    }
    // Every one of them was known for whose it is.
    fixture.far.record(|record| record["kind"] == "tcp").await;
    let strangers: Vec<_> = fixture.far.records().into_iter().filter(|record| record["user"] != "alice").collect();
    assert!(strangers.is_empty(), "{strangers:#?}");
}
