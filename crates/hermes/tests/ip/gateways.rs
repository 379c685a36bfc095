//! Devices that give addresses: where the kernel leads what is for them, as sessions come, move and go.
//!
//! In: clients' tunnels by hand, documents that change. Out: routes, answers and counters of one gateway.

use std::net::IpAddr;

use hermes_testkit::{
    ip::{IpTunnel, IpWay, icmp, ping},
    netns::Namespace,
    patience::until,
};

use crate::line::as_root;
use crate::rules::Gate;

/// Alice's device is gw0 or gw1; bob has the other one, of the same pool.
const TWO: &str = "
workers: 2
limits: {tunnels: $TUNNELS}
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: alice, match: {kind: ip, user: alice}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}
- {name: bob, match: {kind: ip, user: bob}, terminate: {tun: gw1, address: [10.0.9.1], assign: [10.20.0.0/24]}}
";
/// Both have gw1.
const ONE: &str = "
workers: 2
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: all, match: {kind: ip}, terminate: {tun: gw1, address: [10.0.9.1], assign: [10.20.0.0/24]}}
";

const ALICE: &str = "10.20.0.200";

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

async fn answers(tunnel: &mut IpTunnel, gateway: &str) {
    tunnel.packet(&ping(address(ALICE), address(gateway), 1, b"there?")).await.unwrap();
    assert_eq!(icmp(&tunnel.next_packet().await.unwrap()), Some((0, 0)), "{gateway}");
}

async fn way(gate: &Gate, to: &str) -> String {
    gate.place.output(&["ip", "route", "get", to]).await.unwrap_or_default()
}

#[test]
fn an_address_keeps_its_route_when_its_session_moves_to_another_device() {
    as_root("a move between two devices", || async {
        let mut gate = Gate::with(TWO, 100).await;
        let mut alice = gate.tunnel(0, IpWay::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        assert!(way(&gate, ALICE).await.contains("dev gw0"));
        // Of another device of the node too nobody gets it: the two share the machine's routes.
        let mut bob = gate.tunnel(1, IpWay::H1, "*", "*").await.unwrap();
        assert_eq!(bob.ask_for(&[address(ALICE)]).await.unwrap(), [(1, address("0.0.0.0"), 32)]);
        gate.node.reload(ONE, &[]).await.unwrap();
        until("alice has moved", async || way(&gate, ALICE).await.contains("dev gw1")).await;
        let is_gone = async || gate.place.output(&["ip", "link", "show", "gw0"]).await.is_err();
        until("the old device is gone, and the session's end there", is_gone).await;
        assert!(way(&gate, ALICE).await.contains("dev gw1"), "{}", way(&gate, ALICE).await);
        answers(&mut alice, "10.0.9.1").await;
    });
}

#[test]
fn what_is_for_an_address_of_a_pool_leaves_by_no_other_way() {
    as_root("addresses that nobody has", || async {
        let mut gate = Gate::with(TWO, 100).await;
        // A way for all else, on which the packet would be in the clear.
        let outside = Namespace::new().unwrap();
        let [out, _] = gate.place.join([10, 77, 0, 1].into(), &outside, [10, 77, 0, 2].into()).unwrap();
        gate.place.ip(&["route", "add", "default", "via", "10.77.0.2"]).unwrap();
        let mut alice = gate.tunnel(0, IpWay::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        answers(&mut alice, "10.0.0.1").await;
        drop(alice);
        let is_free = async || gate.place.output(&["ip", "route", "show", "10.20.0.200/32"]).await.unwrap().is_empty();
        until("alice is away", is_free).await;
        let before = gate.dropped("no-session").await;
        let _ = gate.place.output(&["ping", "-c1", "-W0.1", ALICE]).await;
        assert!(gate.dropped("no-session").await > before, "{}", way(&gate, ALICE).await);
        // The other device has the pool too; with both of them its routes go.
        gate.node.reload(ONE, &[]).await.unwrap();
        until("gw1 takes it", async || way(&gate, ALICE).await.contains("dev gw1")).await;
        let without = ONE.replace("10.20.0.0/24", "10.30.0.0/24");
        gate.node.reload(&without, &[]).await.unwrap();
        until("what is no pool goes as all else", async || way(&gate, ALICE).await.contains(&out)).await;
        assert!(way(&gate, "10.30.0.1").await.contains("dev gw1"));
    });
}
