//! Envoy as the downstream of a node: its HTTP proxying, and its tunnels of TCP and UDP.

use hermes_testkit::{
    flow::FlowMode,
    listener_client::TunnelMode,
    origin::scripted,
    overlay::{Node, Overlay},
    transfer::{self, Version},
};
use rand::{SeedableRng as _, rngs::SmallRng};

use crate::envoy::{
    config::{self, Speaks},
    lab::{Envoy, Origins, envoy_binary, overlay},
};

const MIB: usize = 1 << 20;

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
routes:
- {name: tcp, match: {kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
- {name: web-h1, match: {kind: http, authority: WEB-H1}, upstream: web-h1}
- {name: web-h2, match: {kind: http, authority: WEB-H2}, upstream: web-h2}
upstreams:
- {name: web-h1, protocol: h1, overlay: false, endpoints: ['$H1']}
- {name: web-h2, protocol: h2, overlay: false, endpoints: ['$H2']}
";

/// A node behind an Envoy that speaks to it in both versions.
struct Fixture {
    envoy: Envoy,
    _node: Node,
    _origins: Origins,
    _overlay: Overlay,
}

impl Fixture {
    async fn start(test: &str) -> Option<Self> {
        let binary = envoy_binary(test)?;
        let (overlay, origins) = (overlay(), Origins::start());
        let node = overlay.node("edge").document(DOCUMENT).with("ECHO", origins.echo.address());
        let node = node.with("UDP", origins.udp.address());
        let node = node.with("H1", origins.h1.address()).with("H2", origins.h2.address()).start().await.unwrap();
        let client = node.address("door");
        let log = Envoy::log(&overlay, "envoy");
        let mut listeners = Vec::new();
        for version in ["h1", "h2"] {
            let web = config::http(&log, &[("*", config::forward(version))]);
            listeners.push(config::listener(&format!("http-{version}"), &web, None));
            for (label, post) in [("connect", false), ("post", true)] {
                let tunnel = config::tcp_tunnel("ECHO:7", version, post);
                listeners.push(config::listener(&format!("tcp-{label}-{version}"), &tunnel, None));
                listeners.push(config::udp_tunnel(&format!("udp-{label}-{version}"), ("ECHO", 7), version, post));
            }
        }
        let clusters =
            [config::cluster("h1", client, Speaks::H1, None), config::cluster("h2", client, Speaks::H2, None)];
        let envoy = Envoy::start(&overlay, &binary, "envoy", &config::bootstrap(&listeners, &clusters)).await;
        Some(Self { envoy, _node: node, _origins: origins, _overlay: overlay })
    }
}

#[tokio::test]
async fn requests() {
    let Some(fixture) = Fixture::start("requests").await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    for near in [Version::H1, Version::H2] {
        for hop in ["h1", "h2"] {
            for origin in ["WEB-H1", "WEB-H2"] {
                let client = fixture.envoy.client(&format!("http-{hop}"));
                for size in [0, 1, 65_536, 3 * MIB] {
                    let what = |error| panic!("{size} bytes by {near:?} over {hop} to {origin}: {error}");
                    transfer::upload(&client, near, origin, size, &mut rng).await.unwrap_or_else(what);
                    transfer::download(&client, near, origin, size).await.unwrap_or_else(what);
                }
            }
        }
    }
}

#[tokio::test]
async fn connections_that_envoy_tunnels() {
    let Some(fixture) = Fixture::start("connections_that_envoy_tunnels").await else { return };
    let mut rng = SmallRng::seed_from_u64(2);
    for hop in ["connect-h1", "connect-h2", "post-h1", "post-h2"] {
        let client = fixture.envoy.client(&format!("tcp-{hop}"));
        for size in [1, 65_536, 3 * MIB] {
            transfer::echo_whole(&client, TunnelMode::Raw, "", size, &mut rng)
                .await
                .unwrap_or_else(|error| panic!("{size} bytes over {hop}: {error}"));
            // Envoy's own limit, shown below.
            if hop.ends_with("h2") {
                transfer::echo(&client, TunnelMode::Raw, "", size, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("{size} bytes over {hop}, with half a close: {error}"));
            }
        }
    }
}

#[tokio::test]
async fn tunnels_that_envoy_forwards() {
    let Some(fixture) = Fixture::start("tunnels_that_envoy_forwards").await else { return };
    let mut rng = SmallRng::seed_from_u64(3);
    for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::PostH1, TunnelMode::PostH2] {
        for hop in ["h1", "h2"] {
            let client = fixture.envoy.client(&format!("http-{hop}"));
            for size in [1, 65_536, 3 * MIB] {
                transfer::echo_whole(&client, mode, "ECHO:7", size, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("{size} bytes by {mode:?} over {hop}: {error}"));
            }
            if mode != TunnelMode::ConnectH1 && hop == "h2" {
                transfer::echo(&client, mode, "ECHO:7", MIB, &mut rng)
                    .await
                    .unwrap_or_else(|error| panic!("half a close by {mode:?} over {hop}: {error}"));
            }
        }
    }
}

#[tokio::test]
async fn flows_that_envoy_tunnels() {
    let Some(fixture) = Fixture::start("flows_that_envoy_tunnels").await else { return };
    let mut rng = SmallRng::seed_from_u64(4);
    for hop in ["connect-h1", "connect-h2", "post-h1", "post-h2"] {
        let client = fixture.envoy.client(&format!("udp-{hop}"));
        transfer::datagrams(&client, FlowMode::Raw, "", 60, &mut rng)
            .await
            .unwrap_or_else(|error| panic!("datagrams over {hop}: {error}"));
    }
}

#[tokio::test]
async fn flows_that_envoy_forwards() {
    let Some(fixture) = Fixture::start("flows_that_envoy_forwards").await else { return };
    let mut rng = SmallRng::seed_from_u64(5);
    for mode in FlowMode::TUNNELS {
        for hop in ["h1", "h2"] {
            let client = fixture.envoy.client(&format!("http-{hop}"));
            transfer::datagrams(&client, mode, "ECHO", 60, &mut rng)
                .await
                .unwrap_or_else(|error| panic!("datagrams by {mode:?} over {hop}: {error}"));
        }
    }
}

/// Over HTTP/1.1 an Envoy that tunnels connections hears nothing any more once its client has ended its side: shown
/// with a peer of the test's own, without any node.
#[tokio::test]
async fn envoy_knows_no_half_a_close_over_http_1() {
    let Some(binary) = envoy_binary("envoy_knows_no_half_a_close") else { return };
    let overlay = overlay();
    let peer = scripted::h1(|mut http1| async move {
        let head = http1.head().await?;
        if head.method() == "CONNECT" {
            http1.send("HTTP/1.1 200 OK\r\n\r\n").await?;
            http1.to_end().await?;
            http1.send("answer").await?;
            return http1.finish().await;
        }
        http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
        while http1.chunk().await?.is_some() {}
        http1.trailers().await?;
        http1.send_chunk(b"answer").await?;
        http1.send("0\r\n\r\n").await?;
        http1.to_end().await.map(drop)
    });
    let peer = peer.unwrap();
    let forms = [("connect", false), ("post", true)];
    let listeners = forms.map(|(name, post)| config::listener(name, &config::tcp_tunnel("ECHO:7", "h1", post), None));
    let clusters = [config::cluster("h1", peer.address(), Speaks::H1, None)];
    let envoy = Envoy::start(&overlay, &binary, "envoy", &config::bootstrap(&listeners, &clusters)).await;
    for (name, _) in forms {
        let mut tunnel = envoy.client(name).tunnel(TunnelMode::Raw, "").await.unwrap();
        tunnel.writer.send("question").await.unwrap();
        tunnel.writer.finish().await.unwrap();
        let received = tunnel.reader.to_end().await.unwrap_or_default();
        assert!(received.is_empty(), "{name}: Envoy has learnt it: expect it before nodes as well");
    }
}
