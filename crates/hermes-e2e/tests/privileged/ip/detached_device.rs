//! A device without a node: `hermes tun` on one machine, and the node that forwards its packets on another one.
//!
//! In: the program and its node in their own namespaces, and a gateway after them. Out: programs at both ends
//! communicate although no MTU is configured; `hermes tun` keeps no privilege that it does not need, and removes its
//! state.

use hermes_testkit::binary::hermes;
use std::time::Duration;

use hermes_testkit::{
    Result,
    overlay::Node,
    poll::until,
    process::{Program, Running},
};

use crate::ip::{
    node_chain::{FAR, FAR_DOCUMENT, Hop, NodeChain, as_root},
    traffic::{pings, transfers},
};

const DOCUMENT: &str = "
workers: 2
listeners:
- name: v4
  protocol: ip
  bind: '0.0.0.0:10004'
  network: 10.0.0.1/32
  peers: {from: 10.77.0.1, address: 10.20.0.2}
  set-headers: {hermes-user: alice}
- name: v6
  protocol: ip
  bind: '0.0.0.0:10006'
  network: fd00:10::1/128
  peers: {from: 10.77.0.0/24, address: 'fd00:20::2'}
  set-headers: {hermes-user: alice}
routes:
- {name: vpn, match: {kind: ip, user: alice}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {}}
";

const DROPPED: &str = "hermes_datagrams_dropped_total";
const GRACE: Duration = Duration::from_secs(5);

/// The device's machine, the node's, and a far one.
struct Fixture {
    chain: NodeChain,
    device: Running,
}

impl Fixture {
    async fn new(hop: Hop) -> Self {
        let mut chain = NodeChain::empty(3);
        chain.add(2, FAR_DOCUMENT, None).await;
        chain.add(1, DOCUMENT, Some(hop)).await;
        let device = start(&chain).unwrap();
        chain.answers().await;
        Self { chain, device }
    }

    /// The one that the device's packets come to.
    fn node(&self) -> &Node {
        &self.chain.nodes[0]
    }

    /// Its machine learns what the tunnel takes as of any path: by the answer to the first packet that is too long.
    async fn learn(&self) {
        for far in FAR {
            let long = ["ping", "-c", "1", "-W", "1", "-s", "1444", far];
            let passes = async || self.chain.near().output(&long).await.is_ok();
            until("the path's MTU is known", passes).await;
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.device.stderr()).unwrap()
    }
}

fn start(chain: &NodeChain) -> Result<Running> {
    let program = Program::new("device", hermes(), chain.overlay.dir());
    let program = program.args(["tun", "--device", "hermes7", "--address", "10.20.0.2", "--address", "fd00:20::2"]);
    let program = program.args(["--to", "10.0.0.1=10.77.0.2:10004", "--to", "fd00:10::1=10.77.0.2:10006"]);
    program.within(Some(chain.near())).start()
}

fn carries(hop: Hop) {
    as_root(&format!("a device of its own, over {hop:?}"), || async {
        let fixture = Fixture::new(hop).await;
        fixture.learn().await;
        pings(&fixture.chain).await;
        transfers(&fixture.chain).await;
        // Also from the far end, to whom the device's addresses are.
        for near in crate::ip::node_chain::NEAR {
            let text =
                fixture.chain.far().output(&["ping", "-q", "-c", "3", "-l", "3", "-W", "5", "-s", "8000", near]).await;
            assert!(text.as_ref().is_ok_and(|text| text.contains(" 0% packet loss")), "{near}: {text:?}");
        }
    });
}

#[test]
fn a_device_of_its_own_over_http_2() {
    carries(Hop::H2);
}

#[test]
fn a_device_of_its_own_over_http_3() {
    carries(Hop::H3);
}

/// It has kept the privilege to do so.
#[test]
fn a_device_of_its_own_captures_again_when_its_link_is_up_again() {
    as_root("the link of a device of its own", || async {
        let fixture = Fixture::new(Hop::H2).await;
        for state in ["down", "up"] {
            fixture.chain.near().ip(&["link", "set", "hermes7", state]).unwrap();
        }
        until("it is told", async || fixture.log().contains("restored its addresses and routes")).await;
        fixture.chain.answers().await;
    });
}

/// What reaches the node whole and no datagram of its tunnel takes is answered by the node.
#[test]
fn the_node_answers_packets_larger_than_its_tunnel_mtu() {
    as_root("the node tells what its tunnel takes", || async {
        let fixture = Fixture::new(Hop::H3).await;
        // 1,472 bytes go into a datagram of the link.
        let ping = ["ping", "-c", "1", "-W", "5", "-M", "do", "-s", "1444", FAR[0]];
        let text = fixture.chain.near().output(&ping).await.unwrap_err().to_string();
        assert!(text.contains("Frag needed"), "{text}\n{}", fixture.log());
        assert!(fixture.node().metric(DROPPED, "reason=\"too-big\"").await.unwrap() >= 1.0);
        let text = fixture.chain.near().output(&["ip", "route", "get", FAR[0]]).await.unwrap();
        assert!(text.contains("mtu 1"), "{text}");
    });
}

#[test]
fn hermes_tun_keeps_one_capability_and_removes_its_state() {
    as_root("a device of its own leaves nothing behind", || async {
        let fixture = Fixture::new(Hop::H2).await;
        let status = std::fs::read_to_string(format!("/proc/{}/status", fixture.device.pid())).unwrap();
        let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
        assert!(!of("Uid:").split_whitespace().any(|uid| uid == "0"), "{status}");
        // CAP_NET_ADMIN alone.
        assert_eq!([of("CapEff:"), of("CapPrm:")], ["0000000000001000"; 2], "{status}");
        assert_eq!(of("NoNewPrivs:"), "1", "{status}");
        let rules = async || fixture.chain.near().output(&["ip", "rule"]).await.unwrap();
        assert!(rules().await.contains("0x4845524d"), "{}", rules().await);

        let Fixture { chain, device } = fixture;
        let log = device.stderr().to_owned();
        assert!(device.end(GRACE).unwrap().success());
        let log = std::fs::read_to_string(log).unwrap();
        assert!(log.contains("stopped"), "{log}");
        let rules = chain.near().output(&["ip", "rule"]).await.unwrap();
        assert!(!rules.contains("0x4845524d"), "{rules}\n{log}");
        assert!(chain.near().output(&["ip", "link", "show", "hermes7"]).await.is_err());
        // Another one takes its place at once, though the node has not noticed its end.
        let _device = start(&chain).unwrap();
        chain.answers().await;
    });
}

/// The node ends and begins: packets are lost meanwhile, and the device stays.
#[test]
fn the_node_may_come_back() {
    as_root("the node of a device comes back", || async {
        let mut fixture = Fixture::new(Hop::H2).await;
        let node = fixture.chain.nodes.remove(0);
        node.end(GRACE).unwrap();
        let lost = fixture.chain.near().output(&["ping", "-c", "2", "-i", "0.1", "-W", "1", FAR[0]]).await;
        assert!(lost.is_err(), "{lost:?}");
        until("the device says so", async || fixture.log().contains("does not listen there")).await;
        fixture.chain.add(1, DOCUMENT, Some(Hop::H2)).await;
        fixture.chain.answers().await;
    });
}
