//! Flows that cannot be had: clients of tunnels are told why, sources of raw flows are spared, and both get through
//! as soon as it can be had.

use hermes_testkit::{
    flow::{Flow, FlowMode},
    listener_client::ListenerClient,
    origin::datagram::UdpEcho,
    overlay::Overlay,
    poll::until,
};

use crate::udp::lab::{ANY, HOPS, Lab, echo, overlay};

/// An address at which nobody listens, over TCP or UDP.
fn unused() -> std::net::SocketAddr {
    hermes_testkit::port::reserve(ANY.ip())
}

/// Sends until something comes back: datagrams of a flow that fails are lost, as UDP's are.
async fn gets_through(flow: &mut Flow, what: &str) {
    let Flow::Socket(socket) = flow else { panic!("a raw flow") };
    let mut room = [0; 64];
    until(what, || {
        let _ = socket.try_send(b"?");
        let received = socket.try_recv(&mut room).is_ok();
        async move { received }
    })
    .await;
}

/// Nobody at the target's port: ICMP says so, and ends nothing, since somebody may be there the next moment.
#[tokio::test]
async fn a_flow_waits_for_a_target_that_starts_later() {
    let address = unused();
    let lab = Lab::to(address).await;
    let mut flows = Vec::new();
    for mode in FlowMode::ALL {
        for hop in HOPS {
            let mut flow = lab.open(mode, hop).await;
            flow.send(b"anybody?").await.unwrap();
            flows.push((mode, hop, flow));
        }
    }
    for (node, count) in [(&lab.near, flows.len()), (lab.far.as_ref().unwrap(), flows.len() / HOPS.len() * 4)] {
        until("every datagram was sent into the void", || async {
            let (_, text) = node.ask("/sessions").await.unwrap();
            let sessions: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
            // Eight bytes, or a capsule of them.
            sessions.iter().filter(|session| session["received"].as_u64() >= Some(8)).count() == count
        })
        .await;
    }
    let _origin = UdpEcho::start(address, "").unwrap();
    for (mode, hop, flow) in &mut flows {
        echo(flow, b"hello").await.unwrap_or_else(|error| panic!("{mode:?} over {hop}: {error}"));
    }
    assert!(lab.near.records().is_empty(), "no flow ended: {:?}", lab.near.records());
    for node in [&lab.near, lab.far.as_ref().unwrap()] {
        node.metric_reaches("hermes_datagrams_dropped_total", "reason=\"icmp\"", 5.0).await;
    }
}

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
- {name: raw-H1, bind: '127.0.0.1:0', protocol: udp, authority: 'H1:7'}
- {name: raw-H2, bind: '127.0.0.1:0', protocol: udp, authority: 'H2:7'}
- {name: raw-NOWHERE, bind: '127.0.0.1:0', protocol: udp, authority: 'NOWHERE:7'}
- {name: raw-DENIED, bind: '127.0.0.1:0', protocol: udp, authority: 'DENIED:7'}
- {name: raw-BYTES, bind: '127.0.0.1:0', protocol: udp, authority: 'BYTES:7'}
routes:
- {name: h1, match: {kind: udp, authority: 'H1:*'}, upstream: h1}
- {name: h2, match: {kind: udp, authority: 'H2:*'}, upstream: h2}
- {name: denied, match: {kind: udp, authority: 'DENIED:*'}, respond: {status: 451}}
- {name: bytes, match: {authority: 'BYTES:*'}, upstream: bytes}
- {name: no-name, match: {kind: udp, authority: 'NO-NAME:*'}, terminate: {udp: 'no-such-host.invalid:7'}}
upstreams:
- {name: h1, protocol: h1, overlay: true, endpoints: ['$NEXT']}
- {name: h2, protocol: h2, overlay: true, endpoints: ['$NEXT']}
- {name: bytes, protocol: tcp, endpoints: ['$NEXT']}
";

#[tokio::test]
async fn clients_of_failed_tunnels_receive_the_error() {
    let overlay = overlay();
    let node = overlay.node("near").document(DOCUMENT).with("NEXT", unused()).start().await.unwrap();
    let client = ListenerClient::plain(node.address("door"));
    for mode in FlowMode::TUNNELS {
        for (name, status, word) in [
            ("H1", "502", "connection_refused"),
            ("H2", "502", "connection_refused"),
            ("NO-NAME", "502", "dns_error"),
            ("DENIED", "451", ""),
            ("BYTES", "403", "http_request_denied"),
        ] {
            // A POST is a tunnel only where a route says so by its kind.
            if name == "BYTES" && matches!(mode, FlowMode::PostH1 | FlowMode::PostH2) {
                continue;
            }
            let refused =
                Flow::open(&client, mode, name, 7).await.err().unwrap_or_else(|| panic!("{name} by {mode:?}"));
            let output = refused.to_string();
            assert!(output.contains(status) && output.contains(word), "{name} by {mode:?}: {output}");
        }
    }
    for mode in [FlowMode::UpgradeH1, FlowMode::ConnectH2] {
        let output = Flow::open(&client, mode, "NOWHERE", 7).await.err().unwrap().to_string();
        assert!(output.contains("404"), "{mode:?}: {output}");
    }
}

#[tokio::test]
async fn rejected_raw_flows_cost_little() {
    let overlay = overlay();
    let node = overlay.node("near").document(DOCUMENT).with("NEXT", unused()).start().await.unwrap();
    for (name, error) in [
        ("H1", "connection_refused"),
        ("H2", "connection_refused"),
        ("NOWHERE", "http_request_denied"),
        ("BYTES", "http_request_denied"),
    ] {
        let mut flow = Flow::open(&ListenerClient::plain(node.address(&format!("raw-{name}"))), FlowMode::Raw, "", 0)
            .await
            .unwrap();
        let dropped = "hermes_datagrams_dropped_total";
        let before = node.metric(dropped, "reason=\"flow-failed\"").await.unwrap();
        let authority = format!("{}:7", name.to_lowercase());
        let ended = || node.records().iter().filter(|record| record["authority"] == authority).count();
        flow.send(b"hello").await.unwrap();
        let record = node.record(|record| record["authority"] == authority).await;
        assert_eq!(record["error"], error, "{record}");
        // A source that goes on and on is one session a second at most, whatever it sends.
        let begun = std::time::Instant::now();
        for _ in 0..500 {
            flow.send(b"hello").await.unwrap();
            tokio::task::yield_now().await;
        }
        node.metric_reaches(dropped, "reason=\"flow-failed\"", before + 100.0).await;
        let most = begun.elapsed().as_secs() as usize + 3;
        assert!(ended() <= most, "{name}: {} sessions, at most {most} are due", ended());
    }
}

const FAR: &str = "
listeners:
- {name: door, bind: '$BIND', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: end, match: {kind: udp}, terminate: {udp: '$ORIGIN'}}
";

async fn far(
    overlay: &Overlay,
    bind: std::net::SocketAddr,
    origin: &UdpEcho,
    name: &str,
) -> hermes_testkit::overlay::Node {
    overlay.node(name).document(FAR).with("BIND", bind).with("ORIGIN", origin.address()).start().await.unwrap()
}

/// The next node is down, comes up, goes down and comes up again: a source that goes on sending gets through.
#[tokio::test]
async fn a_next_node_that_comes_back() {
    let (next, origin, overlay) = (unused(), UdpEcho::start(ANY, "").unwrap(), overlay());
    let node = overlay.node("near").document(DOCUMENT).with("NEXT", next).start().await.unwrap();
    for name in ["H1", "H2"] {
        let client = ListenerClient::plain(node.address(&format!("raw-{name}")));
        let mut flow = Flow::open(&client, FlowMode::Raw, "", 0).await.unwrap();
        flow.send(b"too early").await.unwrap();
        let authority = format!("{}:7", name.to_lowercase());
        node.record(|record| record["authority"] == authority && record["error"] == "connection_refused").await;
        let first = far(&overlay, next, &origin, &format!("first-{name}")).await;
        gets_through(&mut flow, "through the first").await;
        drop(first);
        // A node that is killed closes its connections, in order where nothing was unread.
        node.record(|record| record["authority"] == authority && record["status"] != 502).await;
        let _second = far(&overlay, next, &origin, &format!("second-{name}")).await;
        gets_through(&mut flow, "through the second").await;
    }
}
