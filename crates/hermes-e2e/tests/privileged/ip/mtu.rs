//! MTUs that nobody sets: links shrink under a transfer, and what is too long is cut, answered, or put on the stream.
//!
//! In: rows of nodes whose links change. Out: transfers that go on, and what programs learn of the way.
//! Not here: an HTTP/3 hop whose link falls below the 1,200 bytes that QUIC needs, which moves to HTTP/2.

use hermes_testkit::{netns::Namespace, poll::until};
use serde_json::Value;

use crate::ip::{
    node_chain::{FAR, FAR_DOCUMENT, Hop, NEAR, NEAR_DOCUMENT, NodeChain, as_root, draft},
    pings::pings,
    traffic::iperf,
};

const DROPPED: &str = "hermes_datagrams_dropped_total";
/// For a transfer under way to be so.
const UNDER_WAY: u64 = 256 << 10;

/// Both ends of the link behind a place.
fn shrink(chain: &NodeChain, link: usize, mtu: &str) {
    for (index, device) in [link, link + 1].into_iter().zip(&chain.links[link]) {
        chain.namespaces[index].ip(&["link", "set", device, "mtu", mtu]).unwrap();
    }
}

/// Bytes that the far device has sent or received so far.
async fn moved(chain: &NodeChain) -> u64 {
    let text = chain.far().output(&["ip", "-j", "-s", "link", "show", "gw0"]).await.unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    let count = |mode: &str| text[0]["stats64"][mode]["bytes"].as_u64().unwrap_or_default();
    count("rx") + count("tx")
}

/// A transfer in whose middle the link behind `link` shrinks goes on to its end.
async fn shrinks_under_a_transfer(hops: &[Hop], link: usize, mtu: &str) {
    let chain = NodeChain::start(hops).await;
    for (far, mode) in [(FAR[0], &["-n", "8M"][..]), (FAR[1], &["-n", "8M", "-R"])] {
        shrink(&chain, link, "1500");
        let before = moved(&chain).await;
        let narrowing = async {
            until("a transfer is under way", async || moved(&chain).await > before + UNDER_WAY).await;
            shrink(&chain, link, mtu);
        };
        let (report, ()) = tokio::join!(iperf(&chain, far, mode), narrowing);
        let sent = report["end"]["sum_received"]["bytes"].as_u64();
        assert!(sent > Some(1 << 20), "{hops:?} at {mtu}, {far}: {sent:?}\n{}", chain.dropped().await);
    }
    let large = ["ping", "-q", "-c", "1", "-W", "1", "-s", "8000", FAR[0]];
    until("large packets pass as well", async || chain.near().output(&large).await.is_ok()).await;
}

#[test]
fn a_link_shrinks_to_1280_under_http_3() {
    as_root("a link shrinks to 1280", || shrinks_under_a_transfer(&[Hop::H3, Hop::H3], 1, "1280"));
}

#[test]
fn a_link_shrinks_to_1200_under_http_1_and_2() {
    as_root("a link shrinks to 1200", || async {
        shrinks_under_a_transfer(&[Hop::H1], 0, "1200").await;
        shrinks_under_a_transfer(&[Hop::H2], 0, "1200").await;
    });
}

/// The MTU that the near kernel has for a destination. `None` while it has only the device's.
async fn mtu_of(chain: &NodeChain, address: &str) -> Option<usize> {
    mtu_at(chain.near(), address).await
}

async fn mtu_at(namespace: &Namespace, address: &str) -> Option<usize> {
    let text = namespace.output(&["ip", "route", "get", address]).await.unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "mtu");
    words.get(at? + 1)?.parse().ok()
}

/// Programs that look for the MTU of the path find that of the tunnel.
#[test]
fn programs_find_the_mtu_of_the_tunnel() {
    as_root("programs find the MTU", || async {
        let chain = NodeChain::start(&[Hop::H3, Hop::H2]).await;
        until("QUIC has found what its path takes", async || mtu_of(&chain, FAR[0]).await > Some(1300)).await;
        // The way back crosses the same hop, of which the request said what was known when it was made.
        for near in NEAR {
            until("so it has the other way", async || mtu_at(chain.far(), near).await > Some(1300)).await;
        }
        for far in FAR {
            let mtu = mtu_of(&chain, far).await.expect("the device's routes say an MTU");
            assert!((1281..1500).contains(&mtu), "{mtu}");
            let text = chain.near().output(&["tracepath", "-n", "-m", "2", far]).await.unwrap();
            assert!(text.contains(&format!("pmtu {mtu}")), "{mtu}: {text}");
        }
    });
}

/// A route of the near device gets another MTU, as if nobody had told the kernel of the tunnel's.
async fn widen(chain: &NodeChain, far: &str) {
    let family = if far.contains(':') { "-6" } else { "-4" };
    let text = chain.near().output(&["ip", family, "-j", "route", "show", "table", "all", far]).await.unwrap();
    let routes: Value = serde_json::from_str(&text).unwrap();
    let table = routes.as_array().unwrap().iter().find(|route| route["dev"] == "hermes0").unwrap()["table"].clone();
    let table = table.as_str().unwrap_or("main");
    // In the node's own name: of another one's the node would get rid.
    let replaced = ["route", "replace", far, "dev", "hermes0", "table", table, "proto", "72", "mtu", "9000"];
    chain.near().ip(&[&[family], &replaced[..]].concat()).unwrap();
    chain.near().ip(&[family, "route", "flush", "cache"]).unwrap();
}

/// What the kernel lets by is judged here: with DF it is answered, without it is cut.
#[test]
fn oversized_packets_are_answered_or_fragmented() {
    as_root("what is too long", || async {
        let chain = NodeChain::start(&[Hop::H3]).await;
        let too_big = async || chain.nodes[0].metric(DROPPED, "reason=\"too-big\"").await.unwrap();
        let ping = async |far: &str, df| {
            chain.near().output(&["ping", "-c", "1", "-W", "5", "-M", df, "-s", "4000", far]).await
        };
        for far in FAR {
            // Before QUIC has found the path's width the tunnel says less, and would say it again after this.
            let is_last = |mtu| (1400..1500).contains(&mtu);
            until("the tunnel has said its MTU", async || mtu_of(&chain, far).await.is_some_and(is_last)).await;
            widen(&chain, far).await;
            let before = too_big().await;
            // Not the kernel's own word, which is "message too long".
            let text = ping(far, "do").await.unwrap_err().to_string();
            assert!(text.contains("Frag needed") || text.contains("Packet too big"), "{text}");
            assert_eq!(too_big().await, before + 1.0);
        }
        widen(&chain, FAR[0]).await;
        let text = ping(FAR[0], "dont").await;
        assert!(text.is_ok(), "{text:?}\n{}", chain.dropped().await);
    });
}

/// IPv6 has 1,280 bytes everywhere (RFC 8200, 5): what no datagram takes goes on the stream.
#[test]
fn ipv6_of_1280_bytes_passes_a_link_of_1280() {
    as_root("IPv6 of 1,280 bytes", || async {
        let mut chain = NodeChain::empty(2);
        shrink(&chain, 0, "1280");
        chain.add(1, FAR_DOCUMENT, None).await;
        chain.add(0, NEAR_DOCUMENT, Some(Hop::H3)).await;
        chain.answers().await;
        assert!(mtu_of(&chain, FAR[0]).await.is_some_and(|mtu| mtu < 1280), "all of it goes in datagrams");
        let whole = ["-i", "0.05", "-M", "do", "-s", "1232"];
        pings(chain.near(), &whole, 5, FAR[1]).await.all_came(&chain, "1,280 bytes").await;
        iperf(&chain, FAR[1], &["-n", "2M"]).await;
    });
}

const INNER_NEAR: &str = "
workers: 1
listeners:
- {name: l3, protocol: tun, device: hermes1, address: [10.21.0.2], capture: [10.1.0.1/32], set-headers: {hermes-user: bob}}
routes:
- {name: vpn, match: {kind: ip}, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['10.0.0.1:9444'], tls: {}}
";

const INNER_FAR: &str = "
workers: 1
listeners:
- {name: overlay, bind: '10.0.0.1:9444', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: gateway, match: {kind: ip}, terminate: {tun: gw1, address: [10.1.0.1]}}
";

/// A laptop with a tunnel of its own, behind a router with another: each tells the kernel what it leaves of the other.
/// (On one machine they would not nest: what Hermes sends is never captured.)
async fn nested(outer: Hop, inner: Hop) {
    let mut chain = NodeChain::empty(3);
    chain.add(2, FAR_DOCUMENT, None).await;
    chain.add(1, NEAR_DOCUMENT, Some(outer)).await;
    let [laptop, router] = [&chain.namespaces[0], &chain.namespaces[1]];
    router.masquerade("10.77.0.0/24").unwrap();
    laptop.ip(&["route", "add", "default", "via", "10.77.0.2"]).unwrap();
    let answers = async |address| laptop.output(&["ping", "-c1", "-W0.3", address]).await.is_ok();
    until("the outer tunnel is there", async || answers(FAR[0]).await).await;
    let start = async |namespace, name, document| {
        draft(&chain, namespace, name, document).with("PROTOCOL", inner.protocol()).start().await.unwrap()
    };
    let _far = start(2, "inner-far", INNER_FAR).await;
    let _near = start(0, "inner-near", INNER_NEAR).await;
    let address = "10.1.0.1";
    until("the inner tunnel is there", async || answers(address).await).await;
    let text = laptop.output(&["ping", "-q", "-c", "3", "-l", "3", "-W", "5", "-s", "20000", address]).await;
    assert!(text.as_ref().is_ok_and(|text| text.contains(" 0% packet loss")), "{outer:?} {inner:?}: {text:?}");
    // Of what it has handed to the kernel the sender knows no more: short buffers, so that it is little.
    let report = iperf(&chain, address, &["-n", "4M", "-w", "128K"]).await;
    assert!(report["end"]["sum_received"]["bytes"].as_u64() > Some(2 << 20), "{outer:?} {inner:?}");
}

#[test]
fn a_tunnel_within_a_tunnel() {
    as_root("a tunnel within a tunnel", || async {
        // Side by side: they wait more than they work.
        tokio::join!(nested(Hop::H3, Hop::H3), nested(Hop::H3, Hop::H2), nested(Hop::H2, Hop::H3));
    });
}
