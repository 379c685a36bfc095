//! A node restores exactly its own state of a device after other programs change it.
//!
//! In: links that go down, flushed tables and rules, successors that are rejected or killed before they are ready.
//! Out: the kernel's state of the device, before and after.

use std::cell::RefCell;

use hermes_testkit::{ip::IpMode, netns::Namespace, overlay::EFFECT_TIMEOUT, poll::until};
use nix::sys::signal::Signal;

use crate::ip::node_chain::{Hop, NodeChain, as_root};
use crate::ip::packet_filter::GatewayFixture;
use crate::ip::session_handover::HELD;

/// All that the kernel has of a device, and all rules of ours.
async fn kernel_state(namespace: &Namespace, device: &str) -> String {
    let mut all = String::new();
    for what in [
        "ip rule show",
        "ip -6 rule show",
        "ip route show table all",
        "ip -6 route show table all",
        "ip -o addr show",
        "nft list ruleset",
    ] {
        let command: Vec<&str> = what.split(' ').collect();
        let lines = namespace.output(&command).await.unwrap();
        let is_it = |line: &&str| line.contains(if what.contains("rule show") { "proto 72" } else { device });
        let mut lines: Vec<&str> = lines.lines().map(str::trim).filter(is_it).collect();
        lines.sort_unstable();
        all += &format!("{what}\n{}\n", lines.join("\n"));
    }
    all
}

/// Waits until the kernel has this of it.
async fn has_again(namespace: &Namespace, device: &str, before: &str, what: &str) {
    let now = RefCell::new(String::new());
    let as_before = async || {
        now.replace(kernel_state(namespace, device).await);
        *now.borrow() == before
    };
    if tokio::time::timeout(EFFECT_TIMEOUT, until(what, as_before)).await.is_err() {
        assert_eq!(*now.borrow(), before, "{what}");
    }
}

/// The kernel drops the device's routes with the link, and its addresses of IPv6. Sessions go on.
#[test]
fn addresses_and_routes_are_restored_when_the_link_is_up_again() {
    as_root("a link that goes down and up", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        let (near, far) = (&chain.nodes[0], &chain.nodes[1]);
        for (namespace, device, node) in [(chain.near(), "hermes0", near), (chain.far(), "gw0", far)] {
            let before = kernel_state(namespace, device).await;
            namespace.ip(&["link", "set", device, "down"]).unwrap();
            node.says("link down: captured packets").await;
            namespace.ip(&["link", "set", device, "up"]).unwrap();
            node.says("restored its addresses and routes").await;
            // The kernel adds the local route of an IPv6 address a moment after the address.
            has_again(namespace, device, &before, "a link that was down").await;
            chain.answers().await;
        }
        assert!(!near.records().iter().any(|record| record["kind"] == "ip"), "a session has ended");
    });
}

/// More happens at once than the kernel keeps for who listens: among it that the link is up again.
#[test]
fn a_link_that_came_up_unheard_is_not_forgotten() {
    as_root("a link that came up unheard", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        let (node, namespace) = (&chain.nodes[0], chain.near());
        let before = kernel_state(namespace, "hermes0").await;
        namespace.ip(&["link", "set", "hermes0", "down"]).unwrap();
        node.says("link down: captured packets").await;
        node.signal(Signal::SIGSTOP).unwrap();
        make_noise(namespace).await;
        namespace.ip(&["link", "set", "hermes0", "up"]).unwrap();
        node.signal(Signal::SIGCONT).unwrap();
        has_again(namespace, "hermes0", &before, "the link came up unheard").await;
        chain.answers().await;
    });
}

/// As long as the kernel refuses it, it is tried again.
#[test]
fn a_repair_that_fails_is_retried_until_it_succeeds() {
    as_root("a family that is switched off and on", || async {
        for is_link_down in [false, true] {
            let chain = NodeChain::start(&[Hop::H2]).await;
            let (node, namespace) = (&chain.nodes[0], chain.near());
            let before = kernel_state(namespace, "hermes0").await;
            let family = |is_off| namespace.sysctl("net/ipv6/conf/hermes0/disable_ipv6", is_off).unwrap();
            if is_link_down {
                namespace.ip(&["link", "set", "hermes0", "down"]).unwrap();
                node.says("link down: captured packets").await;
                family("1");
                namespace.ip(&["link", "set", "hermes0", "up"]).unwrap();
                node.says("link up, but cannot restore").await;
            } else {
                family("1");
                node.says("cannot restore all addresses").await;
            }
            family("0");
            has_again(namespace, "hermes0", &before, "the family is there again").await;
            chain.answers().await;
        }
    });
}

/// More changes than the kernel keeps for who stands still.
async fn make_noise(namespace: &Namespace) {
    let noise =
        "for i in $(seq 2000); do echo route add blackhole 10.250.$((i / 250)).$((i % 250)); done | ip -batch -";
    namespace.output(&["sh", "-c", noise]).await.unwrap();
}

/// Whoever looks at everything finds that nothing is gone.
#[test]
fn a_missed_notification_is_not_reported_as_interference() {
    as_root("changes that are not heard", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        for (node, namespace, device) in
            [(&chain.nodes[0], chain.near(), "hermes0"), (&chain.nodes[1], chain.far(), "gw0")]
        {
            let before = kernel_state(namespace, device).await;
            node.signal(Signal::SIGSTOP).unwrap();
            make_noise(namespace).await;
            node.signal(Signal::SIGCONT).unwrap();
            chain.answers().await;
            let (priority, _) = before.lines().find_map(|line| line.split_once(":\t")).unwrap();
            namespace.ip(&["rule", "del", "priority", priority]).unwrap();
            has_again(namespace, device, &before, "somebody removes a rule afterwards").await;
            node.says("restored addresses, routes, rules or NAT").await;
            assert_eq!(node.log().matches("restored addresses, routes, rules or NAT").count(), 1, "{}", node.log());
        }
    });
}

/// By tables, by rules, and by addresses; sessions go on.
#[test]
fn flushed_tables_are_restored_at_once() {
    as_root("what somebody flushes", || async {
        let node_chain = NodeChain::start(&[Hop::H2]).await;
        for (namespace, device) in [(node_chain.near(), "hermes0"), (node_chain.far(), "gw0")] {
            let before = kernel_state(namespace, device).await;
            let lines = before.lines().filter(|line| line.contains("proto 72") && line.contains(" table "));
            let tables = lines.filter_map(|line| line.split_once(" table ")?.1.split(' ').next());
            let mut flushes: Vec<String> = tables.map(|table| format!("route flush table {table}")).collect();
            flushes.sort_unstable();
            flushes.dedup();
            flushes.extend([format!("route flush dev {device} table main proto 72"), "rule flush".to_owned()]);
            flushes.push(format!("addr flush dev {device}"));
            for (flush, family) in flushes.iter().flat_map(|flush| [(flush, "-4"), (flush, "-6")]) {
                let words: Vec<&str> = [family].into_iter().chain(flush.split(' ')).collect();
                namespace.ip(&words).unwrap();
                if flush == "rule flush" {
                    namespace.ip(&[family, "rule", "add", "priority", "32766", "table", "main"]).unwrap();
                }
            }
            has_again(namespace, device, &before, &format!("{flushes:?}")).await;
            node_chain.answers().await;
        }
        assert!(!node_chain.nodes[0].records().iter().any(|record| record["kind"] == "ip"), "a session has ended");
    });
}

/// Also where nothing of ours was removed: `ip route replace` takes its place.
#[test]
fn a_replaced_capture_route_is_restored() {
    as_root("a captured route that somebody replaces", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        let namespace = chain.near();
        let before = kernel_state(namespace, "hermes0").await;
        let captured: Vec<(&str, &str)> = before
            .lines()
            .filter_map(|line| Some((line.split(' ').next()?, line.split_once(" table ")?.1.split(' ').next()?)))
            .filter(|(prefix, table)| prefix.starts_with(|c: char| c.is_ascii_hexdigit()) && table.starts_with("12"))
            .collect();
        assert!(captured.len() > 1, "{before}");
        for (prefix, table) in captured {
            namespace.ip(&["route", "replace", prefix, "dev", "lo", "table", table]).unwrap();
            has_again(namespace, "hermes0", &before, prefix).await;
            chain.answers().await;
        }
        chain.nodes[0].says("restored addresses, routes, rules or NAT").await;
    });
}

/// What is taken away without end is put back with pauses that grow.
#[test]
fn repairs_of_a_repeatedly_removed_rule_back_off() {
    as_root("a rule that is removed without end", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        let (namespace, near) = (chain.near(), &chain.nodes[0]);
        let before = kernel_state(namespace, "hermes0").await;
        let removed = async {
            let script =
                "for i in $(seq 400); do ip rule del priority 31000 2>/dev/null && echo gone; sleep 0.005; done";
            namespace.output(&["sh", "-c", script]).await.unwrap().matches("gone").count()
        };
        let removed = removed.await;
        assert!((2..20).contains(&removed), "{removed} times in two seconds\n{}", near.log());
        has_again(namespace, "hermes0", &before, "at last").await;
        chain.answers().await;
    });
}

/// As on a router.
#[test]
fn removed_state_is_restored_during_continuous_changes() {
    as_root("changes without a pause", || async {
        let chain = NodeChain::start(&[Hop::H2]).await;
        let (namespace, before) = (chain.near(), kernel_state(chain.near(), "hermes0").await);
        // Each of them ends with the shell that has begun it, or soon after.
        let flood = "for net in 250 251 252 253; do (
            file=$(mktemp)
            for i in $(seq 200); do echo route add blackhole 10.$net.0.$i; echo route del blackhole 10.$net.0.$i; done >$file
            for i in $(seq 2000); do [ -d /proc/$$ ] && ip -batch $file || break; done
            rm $file
        ) & done; wait";
        let flood = ["sh", "-c", flood];
        let restored = async {
            for _ in 0..3 {
                namespace.ip(&["rule", "del", "priority", "31000"]).unwrap();
                has_again(namespace, "hermes0", &before, "there are changes all the time").await;
            }
        };
        tokio::select! {
            text = namespace.output(&flood) => panic!("{text:?}"),
            () = restored => {}
        }
        chain.answers().await;
    });
}

/// With more of everything.
fn more() -> String {
    let more = HELD.replace("capture: [", "capture: [10.98.0.0/16, 10.97.1.0/24, 'fd00:97::/64', ");
    let more = more.replace("address: 10.0.0.1,", "address: [10.0.0.1, 'fd00:10::1'],");
    let more = more.replace("[10.20.0.0/24]", "[10.20.0.0/24, 10.21.0.0/24], nat: true");
    let other = "- {name: other, protocol: tun, device: gw1, address: 10.30.0.2, capture: [10.31.0.0/16]}
routes:
- {name: third, match: {kind: ip, user: carol}, terminate: {tun: gw2, address: [10.32.0.1], assign: [10.33.0.0/24], nat: true}}";
    more.replace("routes:", other)
}

#[test]
fn state_of_a_killed_successor_is_removed() {
    as_root("a successor that is killed early", || async {
        for nat in ["", ", nat: true"] {
            let gateway =
                GatewayFixture::with(&HELD.replace("[10.20.0.0/24]", &format!("[10.20.0.0/24]{nat}")), 100).await;
            let before = kernel_state(&gateway.namespace, "gw0").await;
            let successor = gateway.next(&more()).launch().unwrap();
            let addition = async || kernel_state(&gateway.namespace, "gw1").await.contains("10.31.0.0/16");
            until("the successor waits", addition).await;
            let third = async || kernel_state(&gateway.namespace, "gw2").await.contains("masquerade");
            until("it has another gateway", third).await;
            // This is nobody else's.
            gateway.namespace.ip(&["addr", "add", "10.66.0.1/32", "dev", "gw0"]).unwrap();
            assert_ne!(kernel_state(&gateway.namespace, "gw0").await, before);
            successor.signal(Signal::SIGKILL).unwrap();
            successor.ended().await;
            gateway.node.says("takeover failed").await;
            let others = async || kernel_state(&gateway.namespace, "gw0").await.contains("10.66.0.1");
            until("what it added goes", async || !kernel_state(&gateway.namespace, "gw0").await.contains("fd00:10::1"))
                .await;
            assert!(others().await);
            gateway.namespace.ip(&["addr", "del", "10.66.0.1/32", "dev", "gw0"]).unwrap();
            has_again(&gateway.namespace, "gw0", &before, "the successor was killed").await;
            let tables = async || gateway.namespace.output(&["nft", "list", "tables"]).await.unwrap();
            until("the NAT of its own device goes", async || !tables().await.contains("hermes-gw2")).await;
        }
    });
}

#[test]
fn state_of_a_rejected_successor_is_removed() {
    as_root("a successor that is refused late", || async {
        let gateway = GatewayFixture::with(HELD, 100).await;
        let before = kernel_state(&gateway.namespace, "gw0").await;
        // Where answers would come from.
        gateway.namespace.ip(&["link", "add", "uplink", "type", "veth", "peer", "name", "world"]).unwrap();
        gateway.namespace.ip(&["addr", "add", "10.55.0.1/24", "dev", "uplink"]).unwrap();
        gateway.namespace.sysctl("net/ipv4/conf/uplink/rp_filter", "1").unwrap();
        let document = more().replace("10.98.0.0/16", "0.0.0.0/0");
        assert!(gateway.next(&document).start().await.is_err());
        gateway.node.says("takeover failed").await;
        has_again(&gateway.namespace, "gw0", &before, "the successor was refused").await;
    });
}

/// It finds that it has waited too long when it goes on, and ends; and what it does until then is undone. What is released
/// has one limit, of a minute.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "waits for a minute")]
fn a_successor_that_stands_still_gets_nothing() {
    as_root("a successor that stands still", || async {
        let hasty = ["env", "HERMES_TEST_TAKEOVER_PATIENCE=9000"];
        let mut gateway = GatewayFixture::by_way_of(&hasty, HELD, 100).await;
        let before = kernel_state(&gateway.namespace, "gw0").await;
        let successor = gateway.next(&more()).launch().unwrap();
        let addition = async || kernel_state(&gateway.namespace, "gw1").await.contains("10.31.0.0/16");
        until("the successor waits", addition).await;
        successor.signal(Signal::SIGSTOP).unwrap();
        gateway.node.says("the successor did not become ready within").await;
        // It has a device of its own yet.
        let goes = async || !kernel_state(&gateway.namespace, "gw0").await.contains("10.98.0.0/16");
        until("what it added goes", goes).await;
        // As one of its workers might yet do.
        gateway.namespace.ip(&["route", "add", "10.20.0.77", "dev", "gw0", "proto", "72"]).unwrap();
        successor.signal(Signal::SIGCONT).unwrap();
        successor.says("did not release its listeners and devices: it timed out").await;
        assert_eq!(successor.ended().await.code(), Some(1));
        has_again(&gateway.namespace, "gw0", &before, "the successor has ended").await;
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        tunnel.ask_for(&["10.20.0.200".parse().unwrap()]).await.unwrap();
        tunnel.finish().await.unwrap();
        // Nor has it the place where successors call.
        let old = gateway.take_over(HELD).await;
        assert!(old.ended().await.success());
        has_again(&gateway.namespace, "gw0", &before, "another one has taken over").await;
    });
}

#[test]
fn leftover_state_of_an_earlier_process_is_removed() {
    as_root("what a killed process has led to its device", || async {
        let mut gateway = GatewayFixture::with(HELD, 100).await;
        let before = kernel_state(&gateway.namespace, "gw0").await;
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        tunnel.ask_for(&["10.20.0.200".parse().unwrap()]).await.unwrap();
        let old = gateway.take_over(HELD).await;
        // As of another session that the old process has, and nobody was told of.
        gateway.namespace.ip(&["route", "add", "10.20.0.77", "dev", "gw0", "proto", "72"]).unwrap();
        tunnel.finish().await.unwrap();
        assert!(old.ended().await.success());
        has_again(&gateway.namespace, "gw0", &before, "the old process has ended").await;
    });
}
