//! Mutual TLS between Envoy and a node, each known to the other by its SPIFFE URI.

use hermes_testkit::{
    ca::{Authority, IdentityFiles, Subject},
    flow::FlowMode,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    overlay::{Node, Overlay},
    transfer::{self, Version},
};
use rand::{SeedableRng as _, rngs::SmallRng};

use crate::envoy::{
    config::{self, Speaks, Tls},
    lab::{Envoy, Origins, envoy_binary, overlay},
};

const MIB: usize = 1 << 20;

/// Files of a certificate that Envoy shows.
pub(crate) fn envoy_files(overlay: &Overlay, authority: &Authority, node: &str) -> IdentityFiles {
    let subject = Subject::node(node).with_user("alice").with_dns(NODE_NAME);
    let dir = overlay.dir().join(format!("{node}-{}", authority.pem().len()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut files = authority.issue(&subject).unwrap().write(&dir, node).unwrap();
    // Whom it trusts is the overlay's CA, whoever signed for it.
    files.ca = dir.join("overlay-ca.pem");
    std::fs::write(&files.ca, overlay.authority().pem()).unwrap();
    files
}

const EDGE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, tls: {client: required}}
routes:
- {name: tcp, match: {kind: tcp, user: alice}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp, user: alice}, terminate: {udp: '$UDP'}}
- {name: web, match: {kind: http, user: alice}, upstream: web}
upstreams:
- {name: web, protocol: h1, overlay: false, endpoints: ['$WEB']}
";

async fn edge(overlay: &Overlay, origins: &Origins) -> Node {
    let node = overlay.node("edge").document(EDGE).with("ECHO", origins.echo.address());
    let node = node.with("UDP", origins.udp.address()).with("WEB", origins.h1.address());
    node.identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap().start().await.unwrap()
}

/// An Envoy of this identity before the node; it demands that the node is `peer`.
async fn before(overlay: &Overlay, node: &Node, files: &IdentityFiles, peer: &str, name: &str) -> Option<Envoy> {
    let binary = envoy_binary("identities")?;
    let log = Envoy::log(overlay, name);
    let (mut listeners, mut clusters) = (Vec::new(), Vec::new());
    for (version, speaks) in [("h1", Speaks::H1), ("h2", Speaks::H2)] {
        let web = config::http(&log, &[("*", config::forward(version))]);
        listeners.push(config::listener(&format!("http-{version}"), &web, None));
        listeners.push(config::listener(
            &format!("tcp-{version}"),
            &config::tcp_tunnel("ECHO:7", version, false),
            None,
        ));
        listeners.push(config::udp_tunnel(&format!("udp-{version}"), ("ECHO", 7), version, false));
        clusters.push(config::cluster(version, node.address("door"), speaks, Some(Tls { files, peer })));
    }
    Some(Envoy::start(overlay, &binary, name, &config::bootstrap(&listeners, &clusters)).await)
}

#[tokio::test]
async fn a_node_knows_envoy_and_its_user() {
    let (overlay, origins) = (overlay(), Origins::start());
    let node = edge(&overlay, &origins).await;
    let files = envoy_files(&overlay, overlay.authority(), "envoy");
    let Some(envoy) = before(&overlay, &node, &files, "spiffe://lab/node/edge", "envoy").await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    for version in ["h1", "h2"] {
        let failed = |error: std::io::Error| panic!("over {version}: {error}");
        let web = envoy.client(&format!("http-{version}"));
        transfer::upload(&web, Version::H2, "WEB", MIB, &mut rng).await.unwrap_or_else(failed);
        transfer::download(&web, Version::H1, "WEB", MIB).await.unwrap_or_else(failed);
        let tcp = envoy.client(&format!("tcp-{version}"));
        transfer::echo_whole(&tcp, TunnelMode::Raw, "", MIB, &mut rng).await.unwrap_or_else(failed);
        let udp = envoy.client(&format!("udp-{version}"));
        transfer::datagrams(&udp, FlowMode::Raw, "", 40, &mut rng).await.unwrap_or_else(failed);
    }
    let record = node.record(|record| record["kind"] == "tcp").await;
    assert_eq!((&record["peer"], &record["user"]), (&"envoy".into(), &"alice".into()), "{record}");
}

#[tokio::test]
async fn neither_takes_somebody_else_for_the_other() {
    let (overlay, origins) = (overlay(), Origins::start());
    let node = edge(&overlay, &origins).await;
    let (ours, other) = (overlay.authority(), Authority::new("lab").unwrap());
    let cases = [
        // A CA of the same name is another CA: the node refuses.
        ("stranger", envoy_files(&overlay, &other, "stranger"), "spiffe://lab/node/edge"),
        // The node is not whom Envoy wants: Envoy refuses.
        ("choosy", envoy_files(&overlay, ours, "choosy"), "spiffe://lab/node/another"),
    ];
    for (name, files, peer) in cases {
        let Some(envoy) = before(&overlay, &node, &files, peer, name).await else { return };
        let mut connection = envoy.client("http-h2").h2().await.unwrap();
        let answer = connection.get("http://WEB/").await.unwrap();
        assert_eq!(answer.status, 503, "{name}: {answer:?}");
    }
    assert!(node.records().is_empty(), "{:?}", node.records());
}

const NEAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
routes:
- {name: h1, match: {authority: [H1, 'H1:7']}, upstream: h1}
- {name: h2, match: {authority: [H2, 'H2:7']}, upstream: h2}
- {name: another, match: {authority: ANOTHER}, upstream: another}
- {name: auto, match: {authority: AUTO}, upstream: auto}
- {name: game, match: {kind: udp, authority: 'GAME:7'}, upstream: h2}
upstreams:
- {name: h1, protocol: h1, overlay: false, endpoints: ['$ENVOY'], tls: {node: envoy}}
- {name: h2, protocol: h2, overlay: false, endpoints: ['$ENVOY'], tls: {node: envoy}}
- {name: auto, protocol: auto, overlay: false, endpoints: ['$ENVOY'], tls: {}}
- {name: another, protocol: h2, overlay: false, endpoints: ['$ENVOY'], tls: {node: another}}
";

#[tokio::test]
async fn envoy_knows_a_node_and_is_known() {
    let Some(binary) = envoy_binary("envoy_knows_a_node") else { return };
    let (overlay, origins) = (overlay(), Origins::start());
    let files = envoy_files(&overlay, overlay.authority(), "envoy");
    let hosts = [
        ("H1:7", vec![config::terminate("echo", "CONNECT")]),
        ("H2:7", vec![config::terminate("echo", "CONNECT")]),
        ("GAME:7", vec![config::terminate("udp", "CONNECT-UDP")]),
        ("*", config::forward("web")),
    ];
    let web = config::http(&Envoy::log(&overlay, "envoy"), &hosts);
    let tls = |peer| Some(Tls { files: &files, peer });
    let listeners = [
        config::listener("for-edge", &web, tls("spiffe://lab/node/edge")),
        config::listener("for-another", &web, tls("spiffe://lab/node/another")),
    ];
    let clusters = [
        config::cluster("echo", origins.echo.address(), Speaks::Bytes, None),
        config::cluster("udp", origins.udp.address(), Speaks::Bytes, None),
        config::cluster("web", origins.h1.address(), Speaks::H1, None),
    ];
    let envoy = Envoy::start(&overlay, &binary, "envoy", &config::bootstrap(&listeners, &clusters)).await;
    let node = |name: &'static str, listener| {
        let node = overlay.node(name).document(NEAR).with("ENVOY", envoy.address(listener));
        node.identity(&Subject::node(name).with_dns(NODE_NAME)).unwrap().start()
    };
    let edge = node("edge", "for-edge").await.unwrap();
    let client = ListenerClient::plain(edge.address("door"));
    let mut rng = SmallRng::seed_from_u64(2);
    for hop in ["H1", "H2"] {
        let failed = |error: std::io::Error| panic!("over {hop}: {error}");
        transfer::upload(&client, Version::H2, hop, MIB, &mut rng).await.unwrap_or_else(failed);
        transfer::download(&client, Version::H1, hop, MIB).await.unwrap_or_else(failed);
        transfer::echo_whole(&client, TunnelMode::ConnectH2, &format!("{hop}:7"), MIB, &mut rng)
            .await
            .unwrap_or_else(failed);
    }
    transfer::datagrams(&client, FlowMode::ConnectH2, "GAME", 40, &mut rng).await.unwrap();
    // ALPN chooses HTTP/2.
    let before = envoy.counter("http.http.downstream_rq_http2_total").await;
    transfer::download(&client, Version::H1, "AUTO", MIB).await.unwrap();
    assert_eq!(envoy.counter("http.http.downstream_rq_http2_total").await, before + 1);
    // Envoy is not who the route wants.
    let answer = client.h2().await.unwrap().get("http://ANOTHER/").await.unwrap();
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(answer.text().contains("the server is node envoy"), "{}", answer.text());
    // The node is not who Envoy wants.
    let stranger = node("stranger", "for-another").await.unwrap();
    let answer = ListenerClient::plain(stranger.address("door")).h2().await.unwrap().get("http://H2/").await.unwrap();
    assert_eq!(answer.status, 502, "{answer:?}");
}
