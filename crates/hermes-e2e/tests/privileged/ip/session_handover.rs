//! One node as several processes in sequence, while sessions of clients stay at their process.
//!
//! In: scripted tunnels, and successors that start, wait and are killed. Out: addresses, routes, packets, and which
//! process ends.

use std::net::IpAddr;

use hermes_testkit::{
    ip::{IpMode, IpTunnel, icmp, ping},
    origin::{self, stream},
    overlay::Node,
    poll::until,
};
use nix::sys::signal::Signal;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{FAR, FAR_DOCUMENT, Hop, NEAR_DOCUMENT, NodeChain, anywhere, as_root, next, process};
use crate::ip::packet_filter::{GatewayFixture, PACKET_TIMEOUT};
use crate::ip::pings::pings;

/// Of one user, and of the other.
const POOL: &str = "
workers: 2
drain: 1s
listeners:
- {name: overlay, bind: '127.0.0.1:9443', protocol: http, tls: {client: required}}
routes:
- {name: all, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}
";
const GATEWAY: &str = "10.0.0.1";
const ALICE: &str = "10.20.0.200";
const ANY: &str = "0.0.0.0";
const ECHO: u16 = 7;
/// Where the far node of a line is.
const NEXT: &str = "10.77.0.2:9443";

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// What is given for any address.
async fn any(tunnel: &mut IpTunnel) -> IpAddr {
    let given = tunnel.ask_for(&[address(ANY)]).await.unwrap();
    assert!(matches!(given[..], [(1, one, 32)] if one != address(ANY)), "{given:?}");
    given[0].1
}

/// The gateway answers, though packets may be lost meanwhile.
async fn reaches(tunnel: &mut IpTunnel, own: IpAddr) {
    let mut answer = None;
    for _ in 0..40 {
        tunnel.packet(&ping(own, address(GATEWAY), 1, b"there?")).await.unwrap();
        if let Ok(received) = tokio::time::timeout(PACKET_TIMEOUT, tunnel.next_packet()).await {
            answer = icmp(&received.unwrap());
            break;
        }
    }
    assert_eq!(answer, Some((0, 0)), "{own}");
}

async fn alice(gateway: &GatewayFixture) -> IpTunnel {
    let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
    assert_eq!(tunnel.ask_for(&[address(ALICE)]).await.unwrap(), [(1, address(ALICE), 32)]);
    tunnel
}

/// Its node lets go of it.
async fn ends(tunnel: &mut IpTunnel, what: &str) {
    loop {
        match tunnel.next().await {
            Ok(Some(_)) => {}
            Ok(None) => return,
            Err(error) => return assert_ne!(error.kind(), std::io::ErrorKind::TimedOut, "{what}: {error}"),
        }
    }
}

async fn is_led(gateway: &GatewayFixture) -> bool {
    !gateway.namespace.output(&["ip", "route", "show", &format!("{ALICE}/32")]).await.unwrap().is_empty()
}

/// Each of its threads.
fn stands_still(node: &Node) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", node.pid())).unwrap();
    let state = |path: std::path::PathBuf| std::fs::read_to_string(path.join("stat")).unwrap_or_default();
    // It stands behind the name, which is in brackets.
    threads
        .flatten()
        .all(|thread| state(thread.path()).rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
}

/// A capture without a far end has the successor wait before it says that it is ready.
pub(crate) const HELD: &str = "
workers: 2
listeners:
- {name: overlay, bind: '127.0.0.1:9443', protocol: http, tls: {client: required}}
- {name: l3, protocol: tun, device: gw0, address: 10.0.0.1, capture: [10.99.0.0/16]}
routes:
- {name: captured, match: {kind: ip, listener: l3}, upstream: down}
- name: all
  match: {kind: ip}
  terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}
  timeout: {connect: 1s}
upstreams:
- {name: down, protocol: h2, endpoints: ['127.0.0.1:9'], tls: {}}
";

#[test]
fn no_address_is_given_to_two_users_while_a_process_takes_over() {
    as_root("addresses that are asked for during a takeover", || async {
        let mut gateway = GatewayFixture::with(HELD, 100).await;
        let asks = async |gateway: &GatewayFixture, user: usize| {
            let mut tunnel = gateway.tunnel(user, IpMode::H1, "*", "*").await.unwrap();
            (user, any(&mut tunnel).await, tunnel)
        };
        let mut all = vec![asks(&gateway, 0).await, asks(&gateway, 1).await];
        let log = gateway.overlay.dir().join("gate-1.err");
        let listens = || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("10.99.0.0/16"));
        let waiting = async {
            until("the successor listens", async || listens()).await;
            // Who comes now comes to the successor.
            gateway.node.signal(Signal::SIGSTOP).unwrap();
            until("the old process stands still", async || stands_still(&gateway.node)).await;
            let meanwhile = async {
                let ours = format!("pid={},", gateway.node.pid());
                until("the successor has them", async || {
                    let words = ["ss", "-Htnp", "state", "established", "sport = :9443"];
                    let found = gateway.namespace.output(&words).await.unwrap();
                    let is_its = |line: &&str| line.contains("pid=") && !line.contains(&ours);
                    found.lines().filter(is_its).count() >= 2
                })
                .await;
                gateway.node.signal(Signal::SIGCONT).unwrap();
                // Either has these.
                tokio::join!(asks(&gateway, 0), asks(&gateway, 1), asks(&gateway, 0), asks(&gateway, 1))
            };
            tokio::join!(asks(&gateway, 0), asks(&gateway, 1), meanwhile)
        };
        let (new, (one, other, (a, b, c, d))) = tokio::join!(gateway.successor(HELD), waiting);
        let old = gateway.go_on_with(new);
        until("the old process parts", async || old.log().contains("another process has the listeners")).await;
        all.extend([one, other, a, b, c, d]);
        for user in [0, 1, 0, 1] {
            all.push(asks(&gateway, user).await);
        }
        let addresses: Vec<_> = all.iter().map(|(user, own, _)| (*user, *own)).collect();
        let is_twice =
            |(user, own): &&(usize, IpAddr)| addresses.iter().any(|(other, its)| other != user && its == own);
        assert_eq!(addresses.iter().find(is_twice), None, "{addresses:?}");
        for (_, own, tunnel) in &mut all {
            reaches(tunnel, *own).await;
        }
    });
}

/// Each process that has a session, or passes packets on to one that has, stays as long as that.
#[test]
fn a_session_of_the_first_process_gets_its_packets_by_those_after_it() {
    as_root("two takeovers in a row", || async {
        let mut gateway = GatewayFixture::with(POOL, 100).await;
        let mut tunnel = alice(&gateway).await;
        let mut old = Vec::new();
        for _ in 0..2 {
            old.push(gateway.take_over(POOL).await);
            reaches(&mut tunnel, address(ALICE)).await;
        }
        // Bob has nothing to do with it, and the same way.
        let mut bob = gateway.tunnel(1, IpMode::H1, "*", "*").await.unwrap();
        let own = any(&mut bob).await;
        reaches(&mut bob, own).await;
        reaches(&mut tunnel, address(ALICE)).await;
        for old in &old {
            assert!(!old.log().contains("INFO stopped"), "{}", old.log());
        }
        tunnel.finish().await.unwrap();
        for old in old {
            assert!(old.ended().await.success());
        }
        reaches(&mut bob, own).await;
    });
}

async fn killed_after(takeovers: usize) {
    let mut gateway = GatewayFixture::with(POOL, 100).await;
    let mut tunnel = alice(&gateway).await;
    let mut old = Vec::new();
    for _ in 0..takeovers {
        old.push(gateway.take_over(POOL).await);
    }
    reaches(&mut tunnel, address(ALICE)).await;
    gateway.node.signal(Signal::SIGKILL).unwrap();
    ends(&mut tunnel, "nobody reads the device for it").await;
    for old in old {
        assert!(old.ended().await.success(), "after {takeovers} takeovers");
    }
    // The killed one owes nothing any more.
    let fresh = gateway.successor(POOL).await;
    gateway.go_on_with(fresh).ended().await;
    let mut tunnel = alice(&gateway).await;
    reaches(&mut tunnel, address(ALICE)).await;
}

#[test]
fn sessions_of_a_killed_successor_end() {
    as_root("a successor that is killed", || killed_after(1));
}

#[test]
fn sessions_of_a_killed_successor_end_after_several_takeovers() {
    as_root("a second successor that is killed", || killed_after(2));
}

#[test]
fn a_device_that_somebody_deletes_after_a_takeover_is_nobodys() {
    as_root("a device deleted after a takeover", || async {
        let mut gateway = GatewayFixture::with(POOL, 100).await;
        let mut tunnel = alice(&gateway).await;
        let old = gateway.take_over(POOL).await;
        reaches(&mut tunnel, address(ALICE)).await;
        gateway.namespace.ip(&["link", "del", "gw0"]).unwrap();
        ends(&mut tunnel, "its device is gone").await;
        assert!(old.ended().await.success());
        let is_there = async || {
            gateway.namespace.output(&["ip", "addr", "show", "gw0"]).await.is_ok_and(|text| text.contains(GATEWAY))
        };
        until("it is there again", is_there).await;
        let mut tunnel = alice(&gateway).await;
        reaches(&mut tunnel, address(ALICE)).await;
    });
}

/// It gives whatever private address somebody wants.
#[test]
fn a_route_stays_while_a_session_of_the_process_before_has_it() {
    as_root("an address in two processes", || async {
        let document = POOL.replace(", assign: [10.20.0.0/24]", "");
        let mut gateway = GatewayFixture::with(&document, 100).await;
        let mut tunnel = alice(&gateway).await;
        let old = gateway.take_over(&document).await;
        let mut again = alice(&gateway).await;
        again.finish().await.unwrap();
        ends(&mut again, "she has ended it").await;
        gateway.node.quiet().await;
        assert!(is_led(&gateway).await);
        reaches(&mut tunnel, address(ALICE)).await;
        tunnel.finish().await.unwrap();
        assert!(old.ended().await.success());
        until("nobody has it", async || !is_led(&gateway).await).await;
        reaches(&mut alice(&gateway).await, address(ALICE)).await;
    });
}

#[test]
fn a_repeated_request_for_any_address_keeps_the_lease_after_a_takeover() {
    as_root("any address, asked for again", || async {
        let mut gateway = GatewayFixture::with(POOL, 100).await;
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        let own = any(&mut tunnel).await;
        assert_eq!(any(&mut tunnel).await, own);
        reaches(&mut tunnel, own).await;
        // It gives no other one any more.
        let _old = gateway.take_over(POOL).await;
        assert_eq!(any(&mut tunnel).await, own);
        reaches(&mut tunnel, own).await;
    });
}

/// As long as the old process lives, which has the same prefixes by the old name.
#[test]
fn a_listener_has_another_name_in_the_process_after() {
    as_root("a listener of another name after a takeover", || async {
        let mut chain = NodeChain::empty(2);
        chain.add(1, FAR_DOCUMENT, None).await;
        let listening = async { stream::echo(origin::listen(anywhere(ECHO)).unwrap()).unwrap() };
        let _echo = chain.far().run(listening).await.unwrap();
        let raw = "listeners:\n- {name: raw, bind: '127.0.0.1:9006', protocol: tcp, authority: 'ECHO:7'}";
        let out = format!("routes:\n- {{name: out, match: {{kind: tcp}}, terminate: {{tcp: '{}:{ECHO}'}}}}", next(0));
        let before = NEAR_DOCUMENT.replace("listeners:", raw).replace("routes:", &out);
        let after = before.replace("name: l3", "name: other");
        let near = async |called: &str, document: &str| -> Node {
            process(&chain, 0, "near", document, Hop::H2, called).start().await.unwrap()
        };
        let old = near("near-0", &before).await;
        chain.answers().await;
        let mut held = chain.near().run(TcpStream::connect(("127.0.0.1", 9006))).await.unwrap().unwrap();
        held.write_all(b"?").await.unwrap();
        assert_eq!(held.read_u8().await.unwrap(), b'?');
        let mut new = near("near-1", &after).await;
        chain.answers().await;
        // It asks for them anew.
        let anew = after.replace("hermes-user: alice", "hermes-user: alice, round: two");
        new.reload(&anew, &[("NEXT", NEXT.to_owned()), ("PROTOCOL", "h2".to_owned())]).await.unwrap();
        new.says_times("packets are captured", 4).await;
        held.write_all(b"!").await.unwrap();
        assert_eq!(held.read_u8().await.unwrap(), b'!');
        drop(held);
        assert!(old.ended().await.success());
        pings(chain.near(), &["-i", "0.01"], 50, FAR[0]).await.all_came(&chain, "once the old process has ended").await;
    });
}

/// What it captures has its far end at a device that is the old process's until the new one is ready; and addresses that
/// stand for names have none before one is asked for.
#[test]
fn a_capture_for_a_gateway_of_its_own_node_delays_no_takeover() {
    as_root("a capture for a gateway of its own node", || async {
        let own = "listeners:\n- {name: l3, protocol: tun, device: tun0, address: 10.20.0.9, capture: [10.99.0.0/16, 10.98.0.0/16, 198.18.0.0/16], set-headers: {hermes-user: bob}}
- {name: names, bind: '127.0.0.1:5353', protocol: dns, names: ['*.corp'], addresses: 198.18.0.0/16}";
        let document = POOL.replace("listeners:", own);
        let mut gateway = GatewayFixture::with(&document, 100).await;
        gateway.node.says_times("packets are captured", 2).await;
        let old = gateway.take_over(&document).await;
        gateway.node.says_times("packets are captured", 2).await;
        assert!(!gateway.node.log().contains("device taken over before"), "{}", gateway.node.log());
        assert!(old.ended().await.success());
        reaches(&mut alice(&gateway).await, address(ALICE)).await;
    });
}

/// Sessions of the old process have it as long as they last; then it goes, and holds nobody up.
#[test]
fn a_device_that_the_successor_does_not_name_goes_with_the_old_process() {
    as_root("a device that the successor does not name", || async {
        let mut gateway = GatewayFixture::with(POOL, 100).await;
        let mut tunnel = alice(&gateway).await;
        let gw0 = async || gateway.namespace.output(&["ip", "-brief", "link"]).await.unwrap().contains("gw0");
        assert!(gw0().await);
        let route =
            "{name: all, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}";
        let without = POOL.replace(route, "{name: none, respond: {status: 404}}");
        assert!(!without.contains("gw0"));
        let new = gateway.successor(&without).await;
        reaches(&mut tunnel, address(ALICE)).await;
        let old = gateway.go_on_with(new);
        old.signal(Signal::SIGTERM).unwrap();
        assert!(old.ended().await.success());
        until("the device goes", async || {
            !gateway.namespace.output(&["ip", "-brief", "link"]).await.unwrap().contains("gw0")
        })
        .await;
        let GatewayFixture { node, .. } = gateway;
        node.signal(Signal::SIGTERM).unwrap();
        assert!(node.ended().await.success());
    });
}
