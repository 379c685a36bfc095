//! What a document captures: it goes where the document says or nowhere, and changes as a whole or not at all.
//!
//! In: a near device, a far gateway, documents that change; a far end that says nothing. Out: what gets through, and what
//! the kernel has of it.

use std::net::Ipv4Addr;

use hermes_testkit::{overlay::Node, poll::until};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::ip::node_chain::{FAR_DOCUMENT, Hop, NEAR_DOCUMENT, NodeChain, as_root, draft};

const NEAR: &str = "
workers: 2
listeners:
- {name: l3, protocol: tun, device: hermes0, address: [$ADDRESS], capture: [$CAPTURE], set-headers: {hermes-user: alice}}
routes:
- {name: corp, match: {kind: ip, network: 10.0.0.1/32}, upstream: down}
- {name: vpn, match: {kind: ip}, upstream: next}
upstreams:
- {name: next, protocol: h2, endpoints: ['10.77.0.2:9443'], tls: {}}
- {name: down, protocol: h2, endpoints: ['10.77.0.2:9'], tls: {}}
";
/// The far gateway's, of which the first one's upstream is down.
const GATEWAY: &str = "
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, tls: {client: required}}
routes:
- {name: gateway, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1, 10.0.0.2], assign: [10.20.0.0/24]}}
";
const WIDE: &str = "10.0.0.0/8";

async fn start(chain: &NodeChain, capture: &str) -> Node {
    let draft = draft(chain, 0, "near", NEAR).with("ADDRESS", "10.20.0.2").with("CAPTURE", capture);
    draft.start().await.unwrap()
}

fn values(address: &str, capture: &str) -> [(&'static str, String); 2] {
    [("ADDRESS", address.to_owned()), ("CAPTURE", capture.to_owned())]
}

async fn answers(chain: &NodeChain, far: &str) -> bool {
    chain.near().output(&["ping", "-c1", "-W0.3", far]).await.is_ok()
}

/// The kernel takes both, and one of them gets nothing.
#[test]
fn two_nodes_that_capture_one_prefix_log_a_warning() {
    as_root("two nodes that capture one prefix", || async {
        let chain = NodeChain::empty(2);
        let mut first = start(&chain, WIDE).await;
        let other = NEAR.replace("hermes0", "hermes1");
        let draft = draft(&chain, 0, "beside", &other).with("ADDRESS", "10.20.0.3");
        let mut second = draft.with("CAPTURE", "10.128.0.0/9, 10.0.0.0/9").start().await.unwrap();
        let output = "another process captures the same prefix";
        assert!(!second.log().contains(output), "{}", second.log());
        let changed = [("ADDRESS", "10.20.0.3".to_owned()), ("CAPTURE", format!("10.0.0.0/9, {WIDE}"))];
        second.reload(&other, &changed).await.unwrap();
        assert!(second.log().contains(output) && second.log().contains("hermes0"), "{}", second.log());
        first.reload(NEAR, &values("10.20.0.4", WIDE)).await.unwrap();
        assert!(!first.log().contains(output), "{}", first.log());
    });
}

/// Each has its own prefixes, headers and sessions.
#[test]
fn two_listeners_share_a_device() {
    as_root("two listeners share a device", || async {
        let chain = NodeChain::empty(2);
        let _far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let other = "- {name: other, protocol: tun, device: hermes0, address: [10.20.0.2], capture: [10.0.0.2/32], \
                     set-headers: {hermes-user: alice, x-way: other}}\nroutes:\n\
                     - {name: others, match: {kind: ip, headers: {x-way: other}}, upstream: next}";
        let document = NEAR.replace("upstream: down", "upstream: next").replace("routes:", other);
        let draft = draft(&chain, 0, "near", &document).with("ADDRESS", "10.20.0.2").with("CAPTURE", "10.0.0.1/32");
        let near = draft.start().await.unwrap();
        for far in ["10.0.0.1", "10.0.0.2"] {
            until("both answer", async || answers(&chain, far).await).await;
        }
        let sessions = near.ask("/sessions").await.unwrap().1;
        assert!(sessions.contains("\"others\"") && sessions.contains("\"corp\""), "{sessions}");
    });
}

/// A narrower capture is for its own way alone, though that be down and a wider one's open.
#[test]
fn captured_packets_never_use_a_less_specific_tunnel() {
    as_root("what is captured goes by no wider tunnel", || async {
        let chain = NodeChain::empty(2);
        let _far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let mut near = start(&chain, "10.0.0.1/32, 10.0.0.0/8").await;
        until("the wider one is open", async || answers(&chain, "10.0.0.2").await).await;
        let dropped = "hermes_datagrams_dropped_total";
        let before = near.metric(dropped, "no-session").await.unwrap();
        assert!(!answers(&chain, "10.0.0.1").await);
        assert!(near.metric(dropped, "no-session").await.unwrap() > before);
        // It is nobody's own any more.
        near.reload(NEAR, &values("10.20.0.2", WIDE)).await.unwrap();
        until("it is the wider one's", async || answers(&chain, "10.0.0.1").await).await;
    });
}

/// The kernel refuses the last of it: nothing of what came before stays.
#[test]
fn a_refused_document_changes_nothing_of_a_device() {
    as_root("a refused document changes nothing of a device", || async {
        let chain = NodeChain::empty(2);
        let _far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let near = start(&chain, WIDE).await;
        until("it is open", async || answers(&chain, "10.0.0.2").await).await;
        chain.near().sysctl(&format!("net/ipv4/conf/{}/rp_filter", chain.links[0][0]), "1").unwrap();
        let state = async || {
            let show = async |words: &[&str]| chain.near().output(words).await.unwrap();
            let routes = show(&["ip", "route", "show", "table", "all", "dev", "hermes0"]).await;
            let rules = show(&["ip", "rule", "show"]).await;
            show(&["ip", "-o", "addr", "show", "dev", "hermes0"]).await + &routes + &rules
        };
        let before = state().await;
        let captures = "10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 0.0.0.0/0";
        near.replace(NEAR, &values("10.20.0.2, 10.20.0.9", captures)).unwrap();
        until("it is refused", async || {
            near.metric("hermes_reloads_total", "result=\"refused\"").await.unwrap() >= 1.0
        })
        .await;
        assert_eq!(state().await, before);
        assert!(answers(&chain, "10.0.0.2").await);
    });
}

/// What stays captured keeps its session, wherever it stands in the document.
#[test]
fn a_capture_more_disturbs_no_other() {
    as_root("a capture more disturbs no other", || async {
        let chain = NodeChain::empty(2);
        let _far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let first = "10.0.0.2/32, 10.0.1.0/24, 10.0.2.0/24, 10.0.3.0/24";
        let mut near = start(&chain, first).await;
        near.says_times("packets are captured", 4).await;
        near.reload(NEAR, &values("10.20.0.2", &format!("10.9.0.0/16, {first}"))).await.unwrap();
        near.says("network=10.9.0.0/16").await;
        assert!(answers(&chain, "10.0.0.2").await);
        assert_eq!(near.log().matches("packets are captured").count(), 5, "{}", near.log());
        let ended = near.records().iter().filter(|record| record["kind"] == "ip").count();
        assert_eq!(ended, 0);
    });
}

const MUTE: &str = "
workers: 1
listeners:
- {name: l3, protocol: tun, device: hermes0, address: [10.20.0.2], capture: [10.0.0.0/8]}
routes:
- {name: vpn, match: {kind: ip}, upstream: next, timeout: {connect: 300ms}}
upstreams:
- {name: next, protocol: h1, endpoints: ['10.77.0.2:9443']}
";

/// Takes a tunnel as a proxy does, and says nothing in it.
async fn open(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-ip\r\ncapsule-protocol: ?1\r\n\r\n";
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream
}

/// Packets would wait for its addresses without end.
#[test]
fn a_far_end_that_gives_no_address_is_left() {
    as_root("a far end that gives no address is left", || async {
        let chain = NodeChain::empty(2);
        let namespace = (Ipv4Addr::UNSPECIFIED, 9443);
        let listener = chain.far().run(TcpListener::bind(namespace)).await.unwrap().unwrap();
        let near = draft(&chain, 0, "near", MUTE).start().await.unwrap();
        let _first = open(&listener).await;
        // It is asked anew, since the first one has said nothing.
        let again = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, open(&listener)).await;
        assert!(again.is_ok());
        let ended = near.record(|record| record["kind"] == "ip").await;
        assert!(ended.to_string().contains("assigned no address"), "{ended}");
    });
}

/// Of the machine's own end: its captures are there again, and their sessions.
#[test]
fn captures_of_a_deleted_device_are_restored() {
    as_root("a deleted device captures again", || async {
        let chain = NodeChain::empty(2);
        let far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let near = start(&chain, WIDE).await;
        until("it is open", async || answers(&chain, "10.0.0.2").await).await;
        let rules = async || chain.near().output(&["ip", "rule", "show"]).await.unwrap().lines().count();
        let before = rules().await;
        chain.near().ip(&["link", "del", "hermes0"]).unwrap();
        until("it is open again", async || answers(&chain, "10.0.0.2").await).await;
        assert_eq!(rules().await, before);
        assert!(!near.log().contains("has ended it"), "{}", near.log());
        near.record(|record| record.to_string().contains("device hermes0 was deleted")).await;
        chain.far().ip(&["link", "del", "gw0"]).unwrap();
        far.record(|record| record.to_string().contains("device gw0 was deleted")).await;
        until("it is open once more", async || answers(&chain, "10.0.0.2").await).await;
    });
}

const WARNING: &str = "WARN no tunnel";

/// Said once, however often it is tried, and when it is over.
#[test]
fn a_capture_without_a_tunnel_is_logged_and_so_is_its_recovery() {
    as_root("a capture without a tunnel is told of", || async {
        let chain = NodeChain::empty(2);
        let near = start(&chain, WIDE).await;
        near.metric_reaches("hermes_sessions_total", "kind=\"ip\"", 3.0).await;
        near.says("reason=cannot connect to next/10.77.0.2:9443").await;
        near.says("connection refused: check that the node runs").await;
        assert_eq!(near.log().matches(WARNING).count(), 1, "{}", near.log());
        // It is ready: another far end is what is missing, and `/sessions` tells of that.
        let ready = async || near.ask("/readyz").await.unwrap().0;
        let has_tunnel = async || {
            let listed: serde_json::Value = serde_json::from_str(&near.ask("/sessions").await.unwrap().1).unwrap();
            let is_it = |session: &serde_json::Value| {
                session["path"].as_str().unwrap().contains("/10.0.0.0%2F8/") && session["phase"] != "opening"
            };
            listed.as_array().unwrap().iter().any(is_it)
        };
        assert_eq!((ready().await, has_tunnel().await), (200, false));
        let far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        near.says("packets are captured again").await;
        assert!(answers(&chain, "10.0.0.2").await);
        assert_eq!((ready().await, has_tunnel().await), (200, true));
        drop(far);
        near.says_times(WARNING, 2).await;
    });
}

/// `connect` is longer than the test waits.
const UNREACHABLE: &str = "
listeners:
- {name: l3, protocol: tun, device: hermes0, address: [10.20.0.2], capture: [10.1.0.0/16, 10.2.0.0/16, 10.3.0.0/16]}
routes:
- {name: refused, match: {kind: ip, network: 10.1.0.0/16}, upstream: refused, timeout: {connect: 5m}}
- {name: offline, match: {kind: ip, network: 10.2.0.0/16}, upstream: offline, timeout: {connect: 5m}}
- {name: nobody, match: {kind: ip, network: 10.3.0.0/16}, upstream: nobody, timeout: {connect: 5m}}
upstreams:
- {name: refused, protocol: $PROTOCOL, endpoints: ['10.77.0.2:9443'], tls: {}}
- {name: offline, protocol: $PROTOCOL, endpoints: ['203.0.113.1:9443'], tls: {}}
- {name: nobody, protocol: $PROTOCOL, endpoints: ['10.77.0.77:9443'], tls: {}}
";

/// As soon as the kernel knows it, and with what that means.
#[test]
fn an_unreachable_endpoint_is_logged_at_once() {
    as_root("an endpoint that cannot be reached", || async {
        for protocol in ["h2", "h3"] {
            let chain = NodeChain::empty(2);
            let near = draft(&chain, 0, "near", UNREACHABLE).with("PROTOCOL", protocol).start().await.unwrap();
            for (upstream, reason, remedy) in [
                ("refused/10.77.0.2:9443", "Connection refused", "connection refused: check that the node runs"),
                ("offline/203.0.113.1:9443", "Network is unreachable", "no route to that address"),
                ("nobody/10.77.0.77:9443", "No route to host", "host unreachable: check that the machine is up"),
            ] {
                near.says(&format!("reason=cannot connect to {upstream}: {reason}")).await;
                let log = near.log();
                let line = log.lines().find(|line| line.contains(upstream) && line.contains(WARNING)).unwrap();
                assert!(line.contains(remedy), "{line}");
            }
        }
    });
}

/// Who answers is there, though somebody says that he is not.
#[test]
fn a_firewall_that_drops_only_empty_datagrams_causes_no_harm() {
    as_root("a firewall that refuses the empty datagram", || async {
        let mut chain = NodeChain::empty(2);
        let rule = "table inet door { chain in { type filter hook input priority 0; udp length 8 counter reject; }; }";
        chain.far().output(&["nft", rule]).await.unwrap();
        chain.add(1, FAR_DOCUMENT, None).await;
        chain.add(0, NEAR_DOCUMENT, Some(Hop::H3)).await;
        chain.answers().await;
        let refused = chain.far().output(&["nft", "list", "table", "inet", "door"]).await.unwrap();
        assert!(refused.contains("counter packets") && !refused.contains("counter packets 0"), "{refused}");
        let log = chain.nodes[0].log();
        assert!(!log.contains("QUIC does not get through"), "{log}");
    });
}

/// By both ends: which address, by which route or for which prefix, and what to do.
#[test]
fn an_address_that_the_gateway_refuses_is_logged() {
    as_root("an address that the far end does not give", || async {
        let chain = NodeChain::empty(2);
        let far = draft(&chain, 1, "far", GATEWAY).start().await.unwrap();
        let near =
            draft(&chain, 0, "near", NEAR).with("ADDRESS", "10.30.0.2").with("CAPTURE", WIDE).start().await.unwrap();
        near.says("assigns none of the requested addresses").await;
        near.says("network=10.0.0.0/8 asked=10.30.0.2/32 by=next/10.77.0.2:9443").await;
        far.says("address=10.30.0.2/32 to=").await;
        far.says("route=gateway device=gw0 reason=the route's `assign` does not contain it").await;
    });
}

const NOWHERE: &str = "
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, tls: {client: required}}
routes:
- {name: web, match: {kind: http}, respond: {body: web}}
";

/// By the near node's own routes, and by the far one's.
#[test]
fn a_capture_without_a_route_is_logged_with_the_remedy() {
    as_root("a capture that no route takes is told of", || async {
        let chain = NodeChain::empty(2);
        let _far = draft(&chain, 1, "far", NOWHERE).start().await.unwrap();
        let mut near = start(&chain, WIDE).await;
        near.says("reason=next/10.77.0.2:9443 refused the tunnel with status 404").await;
        near.says("with the document of the node that refused").await;
        let before = near.log().len();
        let elsewhere = NEAR.replace("kind: ip, network: 10.0.0.1/32", "kind: http").replace("kind: ip", "kind: http");
        near.reload(&elsewhere, &values("10.20.0.9", WIDE)).await.unwrap();
        near.says("reason=no route for ip").await;
        assert!(near.log()[before..].contains("with this node's document"), "{}", near.log());
    });
}
