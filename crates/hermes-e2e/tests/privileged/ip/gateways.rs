//! Devices that give addresses: where the kernel leads what is for them, as sessions come, move and go.
//!
//! In: clients' tunnels by hand, documents that change. Out: routes, answers and counters of one gateway.

use hermes_testkit::binary::hermes;
use std::{
    io::Write as _,
    net::{IpAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hermes_testkit::{
    ip::{IpMode, IpTunnel, icmp, ping},
    netns::Namespace,
    poll::until,
};

use crate::ip::node_chain::{as_root, hang_up};
use crate::ip::packet_filter::{GatewayFixture, PACKET_TIMEOUT};

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

/// The same where packets may be lost meanwhile.
async fn reaches(tunnel: &mut IpTunnel, gateway: &str) {
    let mut answer = None;
    for _ in 0..40 {
        tunnel.packet(&ping(address(ALICE), address(gateway), 1, b"there?")).await.unwrap();
        if let Ok(received) = tokio::time::timeout(PACKET_TIMEOUT, tunnel.next_packet()).await {
            answer = icmp(&received.unwrap());
            break;
        }
    }
    assert_eq!(answer, Some((0, 0)), "{gateway}");
}

async fn mode(gateway: &GatewayFixture, to: &str) -> String {
    gateway.namespace.output(&["ip", "route", "get", to]).await.unwrap_or_default()
}

#[test]
fn an_address_keeps_its_route_when_its_session_moves_to_another_device() {
    as_root("a move between two devices", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        assert!(mode(&gateway, ALICE).await.contains("dev gw0"));
        // Of another device of the node too nobody gets it: the two share the machine's routes.
        let mut bob = gateway.tunnel(1, IpMode::H1, "*", "*").await.unwrap();
        assert_eq!(bob.ask_for(&[address(ALICE)]).await.unwrap(), [(1, address("0.0.0.0"), 32)]);
        gateway.node.reload(ONE, &[]).await.unwrap();
        until("alice has moved", async || mode(&gateway, ALICE).await.contains("dev gw1")).await;
        let is_gone = async || gateway.namespace.output(&["ip", "link", "show", "gw0"]).await.is_err();
        until("the old device is gone, and the session's end there", is_gone).await;
        assert!(mode(&gateway, ALICE).await.contains("dev gw1"), "{}", mode(&gateway, ALICE).await);
        answers(&mut alice, "10.0.9.1").await;
    });
}

#[test]
fn packets_for_unassigned_pool_addresses_leave_by_no_other_route() {
    as_root("addresses that nobody has", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        // A way for all else, on which the packet would be in the clear.
        let outside = Namespace::new().unwrap();
        let [out, _] = gateway.namespace.join([10, 77, 0, 1].into(), &outside, [10, 77, 0, 2].into()).unwrap();
        gateway.namespace.ip(&["route", "add", "default", "via", "10.77.0.2"]).unwrap();
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        answers(&mut alice, "10.0.0.1").await;
        drop(alice);
        let is_free =
            async || gateway.namespace.output(&["ip", "route", "show", "10.20.0.200/32"]).await.unwrap().is_empty();
        until("alice is away", is_free).await;
        let before = gateway.dropped("no-session").await;
        let _ = gateway.namespace.output(&["ping", "-c1", "-W0.1", ALICE]).await;
        assert!(gateway.dropped("no-session").await > before, "{}", mode(&gateway, ALICE).await);
        // The other device has the pool too; with both of them its routes go.
        gateway.node.reload(ONE, &[]).await.unwrap();
        until("gw1 takes it", async || mode(&gateway, ALICE).await.contains("dev gw1")).await;
        let without = ONE.replace("10.20.0.0/24", "10.30.0.0/24");
        gateway.node.reload(&without, &[]).await.unwrap();
        until("what is no pool goes as all else", async || mode(&gateway, ALICE).await.contains(&out)).await;
        assert!(mode(&gateway, "10.30.0.1").await.contains("dev gw1"));
    });
}

/// The old one lives as long as the session that moves away from it: the kernel has no second one of its name.
#[test]
fn a_device_is_named_again_while_a_session_has_it() {
    as_root("a device is named again", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        for _ in 0..3 {
            gateway.node.reload(ONE, &[]).await.unwrap();
            gateway.node.reload(&TWO.replace("$TUNNELS", "100"), &[]).await.unwrap();
        }
        until("alice is where she was", async || mode(&gateway, ALICE).await.contains("dev gw0")).await;
        reaches(&mut alice, "10.0.0.1").await;
    });
}

/// Somebody has a queue of it yet: here a successor that took it, and was refused.
#[test]
fn a_device_is_named_again_while_it_goes() {
    as_root("a device is named again while it goes", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut link = std::os::unix::net::UnixStream::connect(gateway.overlay.dir().join("gate.sock")).unwrap();
        link.write_all(b"hermes takeover 1").unwrap();
        let queues = hermes_net::fd_passing::receive(&link).unwrap();
        drop(link);
        gateway.node.says("takeover failed").await;
        let without = ONE.replace("gw1", "gw2");
        gateway.node.reload(&without, &[]).await.unwrap();
        let log = gateway.node.stderr();
        let named = async { gateway.node.reload(&TWO.replace("$TUNNELS", "100"), &[]).await.unwrap() };
        let gone = async {
            let waits = async || {
                std::fs::read_to_string(&log).unwrap().contains("waiting until the previous device is deleted")
            };
            until("the node waits", waits).await;
            drop(queues);
        };
        tokio::join!(named, gone);
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        reaches(&mut alice, "10.0.0.1").await;
    });
}

#[test]
fn doctor_knows_the_devices_of_a_node_that_runs() {
    as_root("doctor and a node that runs", || async {
        let gateway = GatewayFixture::with(TWO, 100).await;
        let file = gateway.overlay.dir().join("wanted.yaml");
        let text = async |node: &str| {
            let document = format!(
                "node: {node}\nadmin: {}\nlisteners:\n- {{name: l3, protocol: tun, device: gw0, address: 10.0.0.1, \
                 capture: [10.1.0.0/16]}}\nroutes:\n- {{name: out, match: {{kind: ip}}, terminate: {{tun: gw1}}}}\n",
                gateway.node.admin()
            );
            std::fs::write(&file, document).unwrap();
            let words = [hermes(), "doctor", "--config", file.to_str().unwrap()];
            gateway.namespace.output(&words).await.unwrap_or_else(|error| error.to_string())
        };
        let (own, stranger) = (text("gate").await, text("stranger").await);
        for device in ["gw0", "gw1"] {
            assert!(own.contains(&format!("device {device}: in use by the running node")), "{own}");
            assert!(stranger.contains(&format!("device {device}: device {device} already exists")), "{stranger}");
        }
    });
}

/// Bob's device cannot be made: alice's, which she still has since she can go nowhere, is as it was.
const FAILING: &str = "
workers: 2
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: alice, match: {kind: ip, user: alice}, upstream: down}
- {name: old, match: {kind: ip, user: carol}, terminate: {tun: gw0, address: [$ADDRESS], assign: [10.40.0.0/24]}}
- {name: bob, match: {kind: ip, user: bob}, terminate: {tun: gw1, address: ['fd00::1'], assign: ['fd01::/64']}}
upstreams:
- {name: down, protocol: h2, endpoints: ['127.0.0.1:9'], tls: {}}
";
const WITHOUT: &str = "
workers: 2
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: alice, match: {kind: ip, user: alice}, upstream: down}
upstreams:
- {name: down, protocol: h2, endpoints: ['127.0.0.1:9'], tls: {}}
";

#[test]
fn a_refused_document_changes_nothing_of_a_device_that_only_a_session_has() {
    as_root("a refused document that names a device again", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        gateway.node.reload(WITHOUT, &[]).await.unwrap();
        gateway.namespace.sysctl("net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        let state = async || {
            let show =
                async |what: &str| gateway.namespace.output(&["ip", "-o", what, "show", "dev", "gw0"]).await.unwrap();
            show("addr").await + &show("route").await
        };
        let before = state().await;
        // In which order devices are given what they lack nobody says.
        for round in 1..=6 {
            gateway.node.replace(FAILING, &[("ADDRESS", format!("10.0.7.{round}"))]).unwrap();
            let refused = async || gateway.node.log().matches("the running configuration stays").count() == round;
            until("it is refused", refused).await;
            assert_eq!(state().await, before);
        }
    });
}

/// The last thing that can fail: there are descriptors for its listeners, and not for each worker's part of them.
#[test]
fn a_document_that_is_refused_late_changes_nothing_of_a_device_that_only_a_session_has() {
    as_root("a document that is refused late", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        gateway.node.reload(WITHOUT, &[]).await.unwrap();
        let state = async || gateway.namespace.output(&["ip", "-o", "addr", "show", "dev", "gw0"]).await.unwrap();
        let before = state().await;
        let (listeners, open) = (12, gateway.node.descriptors().unwrap());
        let most = format!("--nofile={}", open + listeners + 6);
        gateway.namespace.output(&["prlimit", "--pid", &gateway.node.pid().to_string(), &most]).await.unwrap();
        let listener = |number| {
            format!("- {{name: l{number}, bind: '127.0.0.1:{}', protocol: tcp, authority: 'X:1'}}\n", 9100 + number)
        };
        let all: String = (0..listeners).map(listener).collect();
        let document = FAILING.replace("$ADDRESS", "10.0.7.1").replace("'fd00::1'", "10.0.9.1").replace("gw1", "gw0");
        let document = document.replace("routes:", &format!("{all}dispatch: exclusive\nroutes:"));
        gateway.node.replace(&document, &[]).unwrap();
        gateway.node.says("the running configuration stays").await;
        assert!(gateway.node.log().contains("listener l"), "{}", gateway.node.log());
        assert_eq!(state().await, before);
    });
}

#[test]
fn a_device_that_somebody_deletes_is_made_again() {
    as_root("a device that somebody deletes", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        alice.ask_for(&[address(ALICE)]).await.unwrap();
        gateway.namespace.ip(&["link", "del", "gw0"]).unwrap();
        // Her session ends, and the next one finds the new device.
        while let Ok(Some(_)) = alice.next().await {}
        until("it is there again", async || mode(&gateway, "10.0.0.1").await.contains("local")).await;
        let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        assert_eq!(alice.ask_for(&[address(ALICE)]).await.unwrap(), [(1, address(ALICE), 32)]);
        answers(&mut alice, "10.0.0.1").await;
        // By either worker, and told of once.
        assert_eq!(
            gateway.node.log().matches("device deleted by another program; ending its sessions").count(),
            1,
            "{}",
            gateway.node.log()
        );
        assert_eq!(gateway.node.log().matches("link down: captured packets").count(), 0, "{}", gateway.node.log());
        // What is deleted, and named no more, is in nobody's way.
        gateway.namespace.ip(&["link", "del", "gw0"]).unwrap();
        gateway.node.reload(ONE, &[]).await.unwrap();
        gateway.node.reload(&TWO.replace("$TUNNELS", "100"), &[]).await.unwrap();
    });
}

/// Who reads it learns first that it is gone, and without waiting.
#[test]
fn a_device_that_somebody_deletes_under_load_is_made_again() {
    as_root("a device that somebody deletes under load", || async {
        let gateway = GatewayFixture::with(&TWO.replace("workers: 2", "workers: 1"), 100).await;
        let socket = gateway.namespace.run(async { UdpSocket::bind("0.0.0.0:0") }).await.unwrap().unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let flood = {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // No way leads there while the device is gone.
                    let _ = socket.send_to(&[0; 1000], (ALICE, 9));
                }
            })
        };
        for round in 0..3 {
            let is_there = async || mode(&gateway, "10.0.0.1").await.contains("local");
            until("it is there", is_there).await;
            let mut alice = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
            alice.ask_for(&[address(ALICE)]).await.unwrap();
            alice.next_packet().await.unwrap();
            gateway.namespace.ip(&["link", "del", "gw0"]).unwrap();
            let ended = async { while let Ok(Some(_)) = alice.next().await {} };
            let ended = tokio::time::timeout(20 * PACKET_TIMEOUT, ended).await;
            assert!(ended.is_ok(), "her session hangs, round {round}");
        }
        is_over.store(true, Ordering::Relaxed);
        flood.join().unwrap();
    });
}

/// Whoever deletes it may have the name for a while.
#[test]
fn a_deleted_device_is_recreated_once_its_name_is_free() {
    as_root("a deleted device whose name is taken", || async {
        let gateway = GatewayFixture::with(TWO, 100).await;
        gateway.namespace.ip(&["link", "add", "other", "type", "veth", "peer", "name", "further"]).unwrap();
        let script = gateway.overlay.dir().join("batch");
        std::fs::write(&script, "link del gw0\nlink set other name gw0\n").unwrap();
        // Both at once, or the node is faster.
        let taken = async || gateway.namespace.ip(&["-batch", script.to_str().unwrap()]).is_ok();
        until("the name is taken", taken).await;
        until("it cannot be made", async || gateway.node.log().contains("cannot recreate a device:")).await;
        gateway.namespace.ip(&["link", "del", "gw0"]).unwrap();
        until("it is there again", async || mode(&gateway, "10.0.0.1").await.contains("local")).await;
    });
}

/// A user's own addresses are hidden behind the machine's.
const HIDING: &str = "
workers: 1
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: all, match: {kind: ip}, terminate: {tun: $DEVICE, address: [10.0.0.1], assign: [10.20.0.0/24], nat: true}}
";
/// What a killed process leaves, and what somebody else has.
const TABLES: &str = "
table inet hermes-gone0 {
  chain postrouting {
    type nat hook postrouting priority 100; policy accept;
    iifname \"gone0\" oifname != \"gone0\" ip saddr 10.20.0.0/24 masquerade
  }
}
table inet hermes-backup {
  set kept { type ipv4_addr; }
}
table inet hermes-gw2 {
  chain mine {
    type filter hook input priority 0; policy accept;
  }
}
";

#[test]
fn tables_of_somebody_else_stay() {
    as_root("tables of somebody else stay", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let file = gateway.overlay.dir().join("tables");
        std::fs::write(&file, TABLES).unwrap();
        gateway.namespace.output(&["nft", "-f", file.to_str().unwrap()]).await.unwrap();
        let device = |name: &str| [("DEVICE", name.to_owned())];
        gateway.node.reload(HIDING, &device("gw0")).await.unwrap();
        let tables = async || gateway.namespace.output(&["nft", "list", "tables", "inet"]).await.unwrap();
        let found = tables().await;
        for (name, is_there) in [("gw0", true), ("gone0", false), ("backup", true), ("gw2", true)] {
            assert_eq!(found.contains(&format!("inet hermes-{name}\n")), is_there, "{name}: {found}");
        }
        gateway.node.replace(HIDING, &device("gw2")).unwrap();
        let refused = async || gateway.node.log().contains("table inet hermes-gw2 already exists");
        until("what would replace another's table is refused", refused).await;
        assert_eq!(tables().await, found);
    });
}

/// Without a pool, NAT hides all clients' addresses; IPv6 ones only if the route concerns IPv6.
#[test]
fn a_gateway_without_a_pool_forwards_only_the_versions_that_it_needs() {
    as_root("a gateway without a pool", || async {
        let mut gateway = GatewayFixture::with(TWO, 100).await;
        let forwards = async |version: &str| {
            let setting = format!("/proc/sys/net/{version}");
            gateway.namespace.output(&["cat", &setting]).await.unwrap().trim() == "1"
        };
        let (v4, v6) = ("ipv4/ip_forward", "ipv6/conf/all/forwarding");
        gateway.namespace.output(&["sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"]).await.unwrap();
        let lone = HIDING.replace("tun: $DEVICE", "tun: gw3").replace(", assign: [10.20.0.0/24]", "");
        let accepts =
            async || gateway.namespace.output(&["sh", "-c", "cat /proc/sys/net/ipv6/conf/*/accept_ra"]).await.unwrap();
        let before = accepts().await;
        gateway.node.reload(&lone, &[]).await.unwrap();
        assert_eq!((forwards(v4).await, forwards(v6).await), (true, false));
        let rules = gateway.namespace.output(&["nft", "list", "table", "inet", "hermes-gw3"]).await.unwrap();
        assert!(rules.contains("ip saddr 0.0.0.0/0 masquerade") && !rules.contains("ip6 saddr"), "{rules}");
        let both = lone.replace("address: [10.0.0.1]", "address: [10.0.0.1, 'fd00:10::1']");
        gateway.node.reload(&both, &[]).await.unwrap();
        assert!(forwards(v6).await);
        let rules = gateway.namespace.output(&["nft", "list", "table", "inet", "hermes-gw3"]).await.unwrap();
        assert!(rules.contains("ip6 saddr ::/0 masquerade"), "{rules}");
        // No router has advertised here, so no interface has to accept advertisements.
        assert_eq!(accepts().await.matches('2').count(), before.matches('2').count());
    });
}

/// Of a session that broke before a takeover, and of one that ends with the old process.
#[test]
fn a_resting_address_is_not_reassigned_after_a_takeover() {
    as_root("addresses that rest, and a takeover", || async {
        const OTHER: &str = "10.20.0.201";
        let document = TWO.replace("$TUNNELS", "100").replace("'127.0.0.1:0'", "'127.0.0.1:9443'") + "drain: 1s\n";
        let mut gateway = GatewayFixture::with(&document, 100).await;
        let mut first = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        first.ask_for(&[address(ALICE)]).await.unwrap();
        let mut second = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        second.ask_for(&[address(OTHER)]).await.unwrap();
        let is_led = async |gateway: &GatewayFixture, net: &str| {
            !gateway.namespace.output(&["ip", "route", "show", &format!("{net}/32")]).await.unwrap().is_empty()
        };
        drop(first);
        until("her first session is over", async || !is_led(&gateway, ALICE).await).await;
        let old = gateway.take_over(&document).await;
        let gets = async |gateway: &GatewayFixture, user: usize, net: &str| {
            let mut tunnel = gateway.tunnel(user, IpMode::H1, "*", "*").await.unwrap();
            let given = tunnel.ask_for(&[address(net)]).await.unwrap();
            tunnel.finish().await.unwrap();
            given == [(1, address(net), 32)]
        };
        for net in [ALICE, OTHER] {
            assert!(!gets(&gateway, 1, net).await, "bob gets {net}, which waits for alice");
        }
        old.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(old.ended().await.success());
        until("her second session is over", async || !is_led(&gateway, OTHER).await).await;
        for net in [ALICE, OTHER] {
            assert!(!gets(&gateway, 1, net).await, "bob gets {net}, which waits for alice");
            assert!(gets(&gateway, 0, net).await, "alice gets no {net}");
        }
    });
}

/// Who looks for a free address and who gives one back, on workers of their own, wait for the same tables.
#[test]
fn addresses_are_looked_for_while_others_are_given_back() {
    as_root("addresses that come and go", || async {
        let gateway = GatewayFixture::with(TWO, 100).await;
        let rounds = async |user: usize| {
            for _ in 0..40 {
                let mut tunnel = gateway.tunnel(user, IpMode::H1, "*", "*").await.unwrap();
                tunnel.ask_for(&[address("0.0.0.0"); 30]).await.unwrap();
                tunnel.finish().await.unwrap();
            }
        };
        let all = async { tokio::join!(rounds(0), rounds(1), rounds(0), rounds(1), rounds(0), rounds(1)) };
        let done = tokio::time::timeout(60 * PACKET_TIMEOUT, all).await;
        assert!(done.is_ok(), "the node hangs");
    });
}

#[test]
fn flushed_nat_rules_are_restored_at_once() {
    as_root("a nat that somebody flushes", || async {
        let gateway = GatewayFixture::with(&HIDING.replace("$DEVICE", "gw0"), 100).await;
        let file = gateway.overlay.dir().join("tables");
        let nft = async |words: &[&str]| gateway.namespace.output(&[&["nft"], words].concat()).await.unwrap();
        let listed = async || nft(&["list", "ruleset"]).await;
        let before = listed().await;
        assert!(before.contains("masquerade"), "{before}");
        for flush in ["flush ruleset", "flush table inet hermes-gw0", "delete table inet hermes-gw0"] {
            nft(&[flush]).await;
            until(flush, async || listed().await == before).await;
        }
        hang_up(&gateway.node).await;
        assert_eq!(listed().await, before);
        // Whoever takes the name keeps it.
        std::fs::write(&file, format!("flush ruleset\n{}", TABLES.replace("gw2", "gw0"))).unwrap();
        nft(&["-f", file.to_str().unwrap()]).await;
        let before = nft(&["list", "table", "inet", "hermes-gw0"]).await;
        gateway.node.signal(nix::sys::signal::Signal::SIGHUP).unwrap();
        until("it is refused", async || gateway.node.log().contains("table inet hermes-gw0 already exists")).await;
        assert_eq!(nft(&["list", "table", "inet", "hermes-gw0"]).await, before);
    });
}
