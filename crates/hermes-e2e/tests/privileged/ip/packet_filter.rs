//! What a client may send, and what becomes of all else: dropped, counted by its reason, answered where the RFCs ask.
//!
//! In: raw packets in tunnels that are opened by hand, over every version. Out: counters and ICMP; the gateway serves on.

use hermes_testkit::binary::hermes;
use std::{net::IpAddr, time::Duration};

use bytes::BytesMut;
use hermes_testkit::{
    ca::{Identity, Subject},
    flow::capsule,
    ip::{self, IpMode, IpTunnel, checksum, icmp, packet, ping},
    listener_client::{ListenerClient, NODE_NAME},
    netns::Namespace,
    overlay::{Draft, Node, Overlay},
    poll::until,
};
use hermes_wire::connect_ip;

use crate::ip::node_chain::as_root;

const DOCUMENT: &str = "
workers: 1
limits: {tunnels: $TUNNELS, datagram-queue: 64KiB}
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}}
routes:
- name: gateway
  match: {kind: ip}
  terminate: {tun: gw0, address: [10.0.0.1, 'fd00:10::1'], assign: [10.20.0.0/24, 'fd00:20::/64'], assign-networks: true}
";

const GATEWAY: &str = "10.0.0.1";
const GATEWAY_V6: &str = "fd00:10::1";
const OWN: &str = "10.20.0.2";
const OWN_V6: &str = "fd00:20::2";
/// The time within which a node that reads delivers a packet; without one, the packet was dropped.
pub(crate) const PACKET_TIMEOUT: Duration = Duration::from_millis(500);
/// Capsules of one session that say how long packets may be.
const FLOOD: usize = 200;
const DROPPED: &str = "hermes_datagrams_dropped_total";

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A gateway in a namespace of its own.
pub(crate) struct GatewayFixture {
    pub(crate) node: Node,
    users: [Identity; 2],
    pub(crate) overlay: Overlay,
    pub(crate) namespace: Namespace,
    /// How many processes the node had.
    processes: usize,
}

impl GatewayFixture {
    async fn new(tunnels: usize) -> Self {
        Self::with(DOCUMENT, tunnels).await
    }

    /// One with a document of its own.
    pub(crate) async fn with(document: &str, tunnels: usize) -> Self {
        Self::by_way_of(&[], document, tunnels).await
    }

    /// One whose process is started by another program.
    pub(crate) async fn by_way_of(wrapper: &[&str], document: &str, tunnels: usize) -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let namespace = Namespace::new().unwrap();
        let document = document.replace("$TUNNELS", &tunnels.to_string());
        let node = Self::process(&overlay, &namespace, "gate", &document).by_way_of(wrapper).start().await.unwrap();
        let user =
            |name: &str| overlay.authority().issue(&Subject::node(&format!("of-{name}")).with_user(name)).unwrap();
        let users = ["alice", "bob"].map(user);
        Self { node, users, overlay, namespace, processes: 1 }
    }

    fn process<'a>(overlay: &'a Overlay, namespace: &'a Namespace, process: &str, document: &str) -> Draft<'a> {
        let subject = Subject::node("gate").with_dns(NODE_NAME);
        let socket = overlay.dir().join("gate.sock");
        let draft = overlay.node("gate").document(document).within(namespace).identity(&subject).unwrap();
        draft.called(process).args(&["--takeover", socket.to_str().unwrap()])
    }

    /// Another process of the node, which takes over from the one that runs, if one does.
    pub(crate) async fn successor(&self, document: &str) -> Node {
        self.next(document).start().await.unwrap()
    }

    /// The same, to be started.
    pub(crate) fn next(&self, document: &str) -> Draft<'_> {
        Self::process(&self.overlay, &self.namespace, &format!("gate-{}", self.processes), document)
    }

    /// The node is another process from now on. Returns the old one.
    pub(crate) fn go_on_with(&mut self, new: Node) -> Node {
        self.processes += 1;
        std::mem::replace(&mut self.node, new)
    }

    /// Another process takes over. Returns the old one, which still has its sessions.
    pub(crate) async fn take_over(&mut self, document: &str) -> Node {
        let new = self.successor(document).await;
        until("the old process parts", async || self.node.log().contains("another process has the listeners")).await;
        self.go_on_with(new)
    }

    /// Where this user comes in.
    pub(crate) fn client(&self, user: usize) -> ListenerClient {
        ListenerClient::tls(self.node.address("overlay"), self.overlay.authority().pem(), Some(&self.users[user]))
    }

    /// A tunnel of this user, scoped to a target and a protocol.
    pub(crate) async fn tunnel(
        &self,
        user: usize,
        mode: IpMode,
        target: &str,
        protocol: &str,
    ) -> std::io::Result<IpTunnel> {
        self.namespace.run(IpTunnel::open(&self.client(user), mode, &ip::path(target, protocol))).await.unwrap()
    }

    /// A tunnel with addresses.
    async fn ready(&self, mode: IpMode, target: &str, protocol: &str) -> IpTunnel {
        let mut tunnel = self.tunnel(0, mode, target, protocol).await.unwrap();
        let wanted = [OWN, OWN_V6].map(address);
        let given = tunnel.ask_for(&wanted).await.unwrap();
        assert_eq!(given, [(1, wanted[0], 32), (2, wanted[1], 128)]);
        tunnel
    }

    pub(crate) async fn dropped(&self, reason: &str) -> f64 {
        self.node.metric(DROPPED, &format!("reason=\"{reason}\"")).await.unwrap()
    }
}

/// The gateway answers, and nothing else had been on its way.
async fn still_serves(tunnel: &mut IpTunnel, what: &str) {
    for (own, gateway) in [(OWN, GATEWAY), (OWN_V6, GATEWAY_V6)] {
        let own = address(own);
        tunnel.packet(&ping(own, address(gateway), 1, b"still there?")).await.unwrap();
        let answer = tunnel.next_packet().await.unwrap_or_else(|error| panic!("behind {what}: {error}"));
        let reply = if own.is_ipv4() { (0, 0) } else { (129, 0) };
        assert_eq!(icmp(&answer), Some(reply), "behind {what}: {answer:?}");
    }
}

/// A packet that may not pass.
struct Case {
    what: &'static str,
    packet: Vec<u8>,
    reason: &'static str,
    /// Type and code of the ICMP error that its sender gets.
    answer: Option<(u8, u8)>,
}

fn case(what: &'static str, packet: Vec<u8>, reason: &'static str, answer: Option<(u8, u8)>) -> Case {
    Case { what, packet, reason, answer }
}

/// "Communication administratively prohibited" of RFC 1812 and of RFC 4443.
const PROHIBITED: Option<(u8, u8)> = Some((3, 13));
const PROHIBITED_V6: Option<(u8, u8)> = Some((1, 1));

/// Of a tunnel that is scoped to the gateway's addresses of either version.
fn cases(own: &str, gateway: &str) -> Vec<Case> {
    let (own, gateway) = (address(own), address(gateway));
    let is_v4 = own.is_ipv4();
    let pick = |v4: &'static str, v6: &'static str| address(if is_v4 { v4 } else { v6 });
    let prohibited = if is_v4 { PROHIBITED } else { PROHIBITED_V6 };
    let udp = |from, to| packet(from, to, 17, &[0, 7, 0, 7, 0, 8, 0, 0]);
    let good = ping(own, gateway, 2, b"");
    let with = |at: usize, byte: u8| {
        let mut bad = good.clone();
        bad[at] = byte;
        bad
    };
    let mut cases = vec![
        case("a spoofed source", udp(pick("10.20.0.3", "fd00:20::3"), gateway), "source-not-assigned", prohibited),
        case("our own gateway's source", udp(gateway, gateway), "source-not-assigned", prohibited),
        case("another destination", udp(own, pick("10.0.0.2", "fd00:10::2")), "out-of-scope", prohibited),
        case("loopback", udp(own, pick("127.0.0.1", "::1")), "out-of-scope", None),
        case("multicast", udp(own, pick("224.0.0.1", "ff02::1")), "not-unicast", None),
        case("from multicast", udp(pick("224.0.0.1", "ff02::1"), gateway), "not-unicast", None),
        case("from nobody", udp(pick("0.0.0.0", "::"), gateway), "not-unicast", None),
        case("version 5", with(0, 0x55), "malformed-packet", None),
        case("a wrong length", with(if is_v4 { 3 } else { 5 }, 0xff), "malformed-packet", None),
        case("half a header", good[..19].to_vec(), "malformed-packet", None),
        case("nothing", Vec::new(), "malformed-packet", None),
    ];
    // Errors come from whichever router met a packet, and cite it: it was for the tunnel, and from whom the error goes to.
    let router = pick("192.0.2.9", "2001:db8::9");
    let error = |kind: u8, about: &[u8]| {
        packet(router, gateway, if is_v4 { 1 } else { 58 }, &[&[kind, 0, 0, 0, 0, 0, 5, 0], about].concat())
    };
    let (too_big, redirect) = if is_v4 { (3, 5) } else { (2, 137) };
    let (other, elsewhere) = (pick("10.20.0.3", "fd00:20::3"), pick("10.0.0.2", "fd00:10::2"));
    cases.extend([
        case("an error about another's packet", error(too_big, &udp(gateway, other)), "source-not-assigned", None),
        case("an error for whom it is not", error(too_big, &udp(elsewhere, own)), "source-not-assigned", None),
        case("an error about nothing", error(too_big, &[]), "source-not-assigned", None),
        case(
            "a redirect",
            error(redirect, &udp(gateway, own)),
            "source-not-assigned",
            if is_v4 { None } else { prohibited },
        ),
        case("link-local", udp(own, pick("169.254.169.254", "fe80::1")), "out-of-scope", None),
    ]);
    let mut no_hops = udp(own, gateway);
    no_hops[if is_v4 { 8 } else { 7 }] = 0;
    let mut routed = udp(own, gateway);
    if is_v4 {
        // A loose source route by way of 10.0.0.2, after an option without a length.
        routed.splice(20..20, [1, 131, 7, 4, 10, 0, 0, 2]);
        (routed[0], routed[3]) = (0x47, routed[3] + 8);
        sum_v4(&mut no_hops);
        sum_v4(&mut routed);
    } else {
        // A routing header of type 0 by way of fd00:10::2.
        let elsewhere: std::net::Ipv6Addr = "fd00:10::2".parse().unwrap();
        let header = [&[17, 2, 0, 1, 0, 0, 0, 0][..], &elsewhere.octets()].concat();
        (routed[5], routed[6]) = (routed[5] + 24, 43);
        routed.splice(40..40, header);
    }
    cases.push(case("a source route", routed, "source-route", None));
    cases.push(case("no hop left", no_hops, "ttl-expired", None));
    if is_v4 {
        cases.push(case("a short header", with(0, 0x44), "malformed-packet", None));
        cases.push(case("a wrong checksum", with(10, good[10] ^ 1), "malformed-packet", None));
    }
    cases
}

/// Recomputes the header's checksum.
fn sum_v4(packet: &mut [u8]) {
    let length = usize::from(packet[0] & 0xf) * 4;
    packet[10..12].fill(0);
    let sum = checksum(&[&packet[..length]]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn packets_that_may_not_pass_are_dropped_counted_and_answered() {
    as_root("packets that may not pass", || async {
        let gateway_fixture = GatewayFixture::new(100).await;
        for mode in IpMode::ALL {
            for (own, gateway) in [(OWN, GATEWAY), (OWN_V6, GATEWAY_V6)] {
                let mut tunnel = gateway_fixture.ready(mode, gateway, "*").await;
                for Case { what, packet, reason, answer } in cases(own, gateway) {
                    let what = format!("{what} ({own} by {mode:?})");
                    let before = gateway_fixture.dropped(reason).await;
                    tunnel.packet(&packet).await.unwrap();
                    if let Some(answer) = answer {
                        let error = tunnel.next_packet().await.unwrap_or_else(|error| panic!("{what}: {error}"));
                        assert_eq!(icmp(&error), Some(answer), "{what}: {error:?}");
                    }
                    until(&what, async || gateway_fixture.dropped(reason).await == before + 1.0).await;
                }
                answers_come(&mut tunnel, own, gateway).await;
            }
        }
    });
}

/// Nothing more had come of what was dropped.
async fn answers_come(tunnel: &mut IpTunnel, own: &str, gateway: &str) {
    let own = address(own);
    tunnel.packet(&ping(own, address(gateway), 3, b"still there?")).await.unwrap();
    let reply = if own.is_ipv4() { (0, 0) } else { (129, 0) };
    assert_eq!(icmp(&tunnel.next_packet().await.unwrap()), Some(reply));
}

/// RFC 9484, 4.8: a protocol in the path is the only one, ICMP aside.
#[test]
fn a_protocol_in_the_path_is_the_only_one() {
    as_root("a protocol in the path", || async {
        let gateway_fixture = GatewayFixture::new(100).await;
        for mode in IpMode::ALL {
            let mut tunnel = gateway_fixture.ready(mode, "*", "17").await;
            let before = gateway_fixture.dropped("out-of-scope").await;
            for (own, gateway, answer) in [(OWN, GATEWAY, PROHIBITED), (OWN_V6, GATEWAY_V6, PROHIBITED_V6)] {
                tunnel.packet(&packet(address(own), address(gateway), 6, &[0; 20])).await.unwrap();
                assert_eq!(icmp(&tunnel.next_packet().await.unwrap()), answer, "TCP by {mode:?}");
                // Nobody is at that port: the gateway's own kernel says so.
                let udp = packet(address(own), address(gateway), 17, &[0, 7, 0, 7, 0, 8, 0, 0]);
                if own == OWN {
                    tunnel.packet(&udp).await.unwrap();
                    assert_eq!(icmp(&tunnel.next_packet().await.unwrap()), Some((3, 3)), "UDP by {mode:?}");
                }
            }
            assert_eq!(gateway_fixture.dropped("out-of-scope").await, before + 2.0, "{mode:?}");
            still_serves(&mut tunnel, "a protocol out of scope").await;
        }
    });
}

#[test]
fn an_address_in_use_is_not_leased_twice() {
    as_root("an address that another holds", || async {
        let gateway = GatewayFixture::new(100).await;
        let mut alice = gateway.ready(IpMode::H2, "*", "*").await;
        let wanted = [OWN, OWN_V6].map(address);
        let nothing = [(1, address("0.0.0.0"), 32), (2, address("::"), 128)];
        for mode in IpMode::ALL {
            let mut bob = gateway.tunnel(1, mode, "*", "*").await.unwrap();
            assert_eq!(bob.ask_for(&wanted).await.unwrap(), nothing, "{mode:?}");
            let before = gateway.dropped("source-not-assigned").await;
            bob.packet(&ping(wanted[0], address(GATEWAY), 1, b"as alice")).await.unwrap();
            assert_eq!(icmp(&bob.next_packet().await.unwrap()), PROHIBITED, "{mode:?}");
            assert_eq!(gateway.dropped("source-not-assigned").await, before + 1.0);
        }
        let log = gateway.node.log();
        assert!(
            log.contains(
                "address=10.20.0.2/32 to=user bob route=gateway device=gw0 reason=another client has the address"
            ),
            "{log}"
        );
        // Nor one that is the gateway's, or that the document does not give.
        let mut bob = gateway.tunnel(1, IpMode::H1, "*", "*").await.unwrap();
        for out in [GATEWAY, "10.30.0.1", "127.0.0.1", "224.0.0.1", "255.255.255.255"] {
            assert_eq!(bob.ask_for(&[address(out)]).await.unwrap(), nothing[..1], "{out}");
        }
        // Nor a network around it, nor an address in a network that another holds.
        let parts =
            [("10.20.0.0", 25), ("10.20.0.2", 31), ("fd00:20::", 96)].map(|(start, length)| (address(start), length));
        for (start, length) in parts {
            let unspecified = if start.is_ipv4() { "0.0.0.0" } else { "::" };
            let given = bob.ask_for_network(start, length).await.unwrap();
            assert_eq!(given.last().map(|(_, address, _)| *address), Some(address(unspecified)), "{start}/{length}");
        }
        let network = alice.ask_for_network(address("10.20.0.128"), 25).await.unwrap();
        assert!(network.contains(&(9, address("10.20.0.128"), 25)), "{network:?}");
        assert!(bob.ask_for(&[address("10.20.0.200")]).await.unwrap().contains(&nothing[0]));
        still_serves(&mut alice, "bob").await;
        // Hers until she says that she goes: a connection that breaks may come again.
        drop(alice);
        until("she is gone", async || {
            gateway.namespace.output(&["ip", "route", "show", OWN]).await.unwrap().is_empty()
        })
        .await;
        assert_eq!(bob_asks(&gateway, wanted[0]).await, nothing[..1]);
        let mut last = gateway.ready(IpMode::H2, "*", "*").await;
        last.finish().await.unwrap();
        while let Ok(Some(_)) = last.next().await {}
        let given = async || bob_asks(&gateway, wanted[0]).await;
        until("what alice has left is bob's", async || given().await == [(1, wanted[0], 32)]).await;
    });
}

/// One user could have all of a pool with a few words.
#[test]
fn a_network_is_assigned_only_if_the_document_allows_it() {
    as_root("networks that are asked for", || async {
        let gateway = GatewayFixture::with(&DOCUMENT.replace(", assign-networks: true", ""), 100).await;
        let mut alice = gateway.ready(IpMode::H2, "*", "*").await;
        for (start, length, nothing) in [("10.20.0.128", 25, "0.0.0.0"), ("fd00:20:0:0:1::", 112, "::")] {
            let given = alice.ask_for_network(address(start), length).await.unwrap();
            assert_eq!(given.last().map(|(_, given, _)| *given), Some(address(nothing)), "{start}/{length}");
        }
        assert_eq!(bob_asks(&gateway, address("10.20.0.200")).await, [(1, address("10.20.0.200"), 32)]);
    });
}

async fn bob_asks(gateway: &GatewayFixture, wanted: IpAddr) -> Vec<(u64, IpAddr, u8)> {
    gateway.tunnel(1, IpMode::H2, "*", "*").await.unwrap().ask_for(&[wanted]).await.unwrap()
}

/// Any address: one that nobody has, for each of two users.
#[test]
fn a_request_for_any_address_gets_a_lease_of_its_own() {
    as_root("any address", || async {
        let gateway = GatewayFixture::new(100).await;
        let any = [address("0.0.0.0"), address("::")];
        let mut seen = Vec::new();
        let mut tunnels = Vec::new();
        for user in [0, 1] {
            let mut tunnel = gateway.tunnel(user, IpMode::H3, "*", "*").await.unwrap();
            let mut wanted = BytesMut::new();
            // All bits of the address being zero asks for any of that length (RFC 9484, 4.7.2).
            ip::put_entry(&mut wanted, 1, any[0], 32);
            ip::put_entry(&mut wanted, 2, any[1], 128);
            tunnel.capsule(ip::ADDRESS_REQUEST, &wanted).await.unwrap();
            let given = ip::entries(&tunnel.next_capsule(ip::ADDRESS_ASSIGN).await.unwrap()).unwrap();
            assert!(given.iter().all(|(_, address, _)| !address.is_unspecified()), "{given:?}");
            seen.extend(given.into_iter().map(|(_, address, _)| address));
            tunnels.push(tunnel);
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4, "{seen:?}");
    });
}

#[test]
fn a_flood_of_sessions_meets_the_limit() {
    as_root("a flood of sessions", || async {
        let gateway = GatewayFixture::new(8).await;
        let mut open = Vec::new();
        for number in 0..8 {
            open.push(gateway.tunnel(0, IpMode::ALL[number % 4], "*", "*").await.unwrap());
        }
        for mode in IpMode::ALL {
            let refused = gateway.tunnel(0, mode, "*", "*").await.err().map(|error| error.to_string());
            assert!(refused.as_ref().is_some_and(|output| output.contains("503")), "{mode:?}: {refused:?}");
        }
        // Another user has a share, at the cost of the one who has most.
        let _other = gateway.tunnel(1, IpMode::H3, "*", "*").await.unwrap();
        drop(open);
        until("there is room again", async || gateway.tunnel(0, IpMode::H2, "*", "*").await.is_ok()).await;
        let limited = gateway.node.metric("hermes_limit_hits_total", "tunnels").await.unwrap();
        assert!(limited >= 4.0, "{limited}");
    });
}

/// Addresses of one session, and requests of one that reads no answer.
#[test]
fn a_flood_of_address_requests_meets_a_limit() {
    as_root("a flood of address requests", || async {
        let gateway = GatewayFixture::new(100).await;
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        let many: Vec<IpAddr> = (10..=200u8).map(|last| [10, 20, 0, last].into()).collect();
        let given = tunnel.ask_for(&many).await.unwrap();
        let held = given.iter().filter(|(_, address, _)| !address.is_unspecified()).count();
        assert_eq!(held, 64, "{given:?}");
        // One user has no more than two sessions may have, and others the rest.
        let mut second = gateway.tunnel(0, IpMode::H2, "*", "*").await.unwrap();
        let mut third = gateway.tunnel(0, IpMode::H2, "*", "*").await.unwrap();
        second.ask_for(&many[64..128]).await.unwrap();
        assert_eq!(third.ask_for(&[many[128]]).await.unwrap(), [(1, address("0.0.0.0"), 32)]);
        assert_eq!(gateway.node.metric("hermes_limit_hits_total", "\"addresses\"").await.unwrap(), 1.0);
        assert_eq!(bob_asks(&gateway, many[128]).await, [(1, many[128], 32)]);
        drop((second, third));
        let asks = async || gateway.tunnel(0, IpMode::H2, "*", "*").await.unwrap().ask_for(&[many[129]]).await.unwrap();
        until("what a session had is free again", async || asks().await == [(1, many[129], 32)]).await;
        still_reads(&gateway, &mut tunnel).await;
    });
}

/// It asks without end and hears nothing: what waits for it stays small.
async fn still_reads(gateway: &GatewayFixture, tunnel: &mut IpTunnel) {
    gateway.node.forget_peak().unwrap();
    let before = gateway.node.peak_memory().unwrap();
    let mut wanted = BytesMut::new();
    ip::put_entry(&mut wanted, 1, [10, 20, 0, 10].into(), 32);
    let many = capsule(ip::ADDRESS_REQUEST, &wanted).repeat(10_000);
    for _ in 0..10 {
        // A node that stops to read for want of somebody who hears it keeps nothing either.
        if tokio::time::timeout(PACKET_TIMEOUT, tunnel.bytes(many.clone())).await.is_err() {
            break;
        }
    }
    let grown = gateway.node.peak_memory().unwrap().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes for requests that nobody hears the answers of");
    // And others are served meanwhile.
    still_serves(&mut gateway.ready(IpMode::H2, "*", "*").await, "a flood of address requests").await;
}

/// Lengths of packets, told anew with every capsule by one who has many addresses: the kernel's routes follow at leisure.
#[test]
fn a_flood_of_lengths_changes_few_routes() {
    as_root("a flood of lengths", || async {
        let gateway = GatewayFixture::new(100).await;
        let mut tunnel = gateway.tunnel(1, IpMode::H1, "*", "*").await.unwrap();
        let many: Vec<IpAddr> = (10..74u8).map(|last| [10, 20, 0, last].into()).collect();
        tunnel.ask_for(&many).await.unwrap();
        let log = gateway.overlay.dir().join("routes");
        let watch = || {
            std::process::Command::new("ip")
                .args(["netns", "exec", gateway.namespace.name(), "ip", "monitor", "route"])
                .stdout(std::fs::File::create(&log).unwrap())
                .spawn()
                .unwrap()
        };
        let monitor = std::cell::RefCell::new(watch());
        let seen = || std::fs::read_to_string(&log).unwrap();
        let metric = std::cell::Cell::new(100);
        until("routes are watched", async || {
            let has_given_up = monitor.borrow_mut().try_wait().unwrap().is_some();
            if has_given_up {
                // The kernel had more to tell than it read.
                let _ = monitor.replace(watch()).wait();
            }
            metric.set(metric.get() + 1);
            let route = ["route", "add", "192.0.2.0/24", "dev", "gw0", "metric", &metric.get().to_string()];
            gateway.namespace.ip(&route).unwrap();
            seen().contains("192.0.2.0/24")
        })
        .await;
        let began = std::time::Instant::now();
        for round in 0..FLOOD {
            let mtu = 1300 + round % 2;
            tunnel.bytes(capsule(connect_ip::MTU, &connect_ip::mtu_payload(mtu))).await.unwrap();
            // It was read by the time of the answer.
            tunnel.packet(&ping(many[0], address(GATEWAY), 1, b"behind it")).await.unwrap();
            assert_eq!(icmp(&tunnel.next_packet().await.unwrap()), Some((0, 0)));
        }
        let ticks = began.elapsed().as_millis() / 100 + 2;
        let mut monitor = monitor.into_inner();
        monitor.kill().unwrap();
        monitor.wait().unwrap();
        let changes = seen().lines().filter(|line| line.contains("10.20.0.")).count();
        assert!(changes > 0 && changes as u128 <= ticks * many.len() as u128, "{changes} changes in {ticks} ticks");
    });
}

/// A request is answered under its number, and holds what that has got last; what was refused holds nothing.
#[test]
fn a_repeated_address_request_keeps_its_lease() {
    as_root("a request asked again", || async {
        let gateway = GatewayFixture::new(100).await;
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        let [one, other] = [address("10.20.0.20"), address("10.20.0.21")];
        assert_eq!(tunnel.ask_for(&[one]).await.unwrap(), [(1, one, 32)]);
        assert_eq!(tunnel.ask_for(&[other]).await.unwrap(), [(1, other, 32)]);
        assert_eq!(bob_asks(&gateway, one).await, [(1, one, 32)]);
        // So many refusals, each with a number of its own, and there is room yet.
        for number in 0..3u64 {
            let mut wanted = BytesMut::new();
            (0..60).for_each(|last| ip::put_entry(&mut wanted, 100 + 60 * number + last, address("192.0.2.1"), 32));
            tunnel.capsule(ip::ADDRESS_REQUEST, &wanted).await.unwrap();
            let output = ip::entries(&tunnel.next_capsule(ip::ADDRESS_ASSIGN).await.unwrap()).unwrap();
            assert_eq!(output.len(), 61, "{output:?}");
        }
        let mut wanted = BytesMut::new();
        ip::put_entry(&mut wanted, 2, address("10.20.0.22"), 32);
        tunnel.capsule(ip::ADDRESS_REQUEST, &wanted).await.unwrap();
        let output = ip::entries(&tunnel.next_capsule(ip::ADDRESS_ASSIGN).await.unwrap()).unwrap();
        assert_eq!(output, [(1, other, 32), (2, address("10.20.0.22"), 32)]);
    });
}

const HERE: &str = "
workers: 1
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, $ACTION}
upstreams:
- {name: far, protocol: h1, endpoints: ['10.77.5.2:9443'], tls: {}}
";
const THERE: &str = "
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, terminate: {tun: gw1, address: [10.0.9.1], assign: [10.20.0.0/24]}}
";

/// What a client has begun to say comes to its end where it began: the rest would be nonsense elsewhere.
#[test]
fn no_session_moves_within_a_capsule_of_its_client() {
    as_root("no session moves within a capsule", || async {
        let action = "terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}";
        let mut gateway = GatewayFixture::with(&HERE.replace("$ACTION", action), 10).await;
        let other = Namespace::new().unwrap();
        gateway.namespace.join([10, 77, 5, 1].into(), &other, [10, 77, 5, 2].into()).unwrap();
        let subject = Subject::node("there").with_dns(NODE_NAME);
        let there = gateway.overlay.node("there").document(THERE).within(&other).identity(&subject).unwrap();
        let there = there.start().await.unwrap();
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap();
        tunnel.ask_for(&[address(OWN)]).await.unwrap();
        // To whom its rest is a beginning, that is the head of a capsule without end.
        let unknown = capsule(0x2f37, &[0xff; 40]);
        tunnel.bytes(unknown[..20].to_vec()).await.unwrap();
        // The node goes elsewhere in the midst of it, which takes longer than to read it.
        gateway.node.reload(HERE, &[("ACTION", "upstream: far".to_owned())]).await.unwrap();
        until("the other way is open", async || there.metric("hermes_sessions_open", "").await.unwrap() >= 1.0).await;
        tunnel.bytes(unknown[20..].to_vec()).await.unwrap();
        // A packet that is read together with the capsule's end goes where that goes: nobody is there to answer it.
        let question = ping(address(OWN), address("10.0.9.1"), 1, b"there?");
        let mut answer = None;
        for _ in 0..40 {
            tunnel.packet(&question).await.unwrap();
            if let Ok(received) = tokio::time::timeout(PACKET_TIMEOUT, tunnel.next_packet()).await {
                answer = icmp(&received.unwrap());
                break;
            }
        }
        assert_eq!(answer, Some((0, 0)));
    });
}
