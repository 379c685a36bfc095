//! The targets that an IP session may reach: those of its route, whatever its peer claims, and only while the document
//! says so.
//!
//! In: scripted tunnels with the overlay's own fields, and documents that change. Out: the tunnels that open.

use hermes_testkit::{
    ca::Subject,
    ip::{self, IpMode, IpTunnel, icmp, ping},
    listener_client::{ListenerClient, NODE_NAME},
    netns::Namespace,
};

use crate::ip::node_chain::as_root;
use crate::ip::packet_filter::{GatewayFixture, PACKET_TIMEOUT};

/// Only one machine behind the next node is for those who come here.
const NARROW: &str = "
workers: 1
limits: {tunnels: $TUNNELS}
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: one, match: {kind: ip, network: 10.0.9.1/32}, upstream: far}
- {name: other, match: {kind: ip, headers: {hermes-network: 10.0.9.1/32}}, upstream: far}
upstreams:
- {name: far, protocol: h1, endpoints: ['10.77.5.2:9443'], tls: {}}
";
const WIDE: &str = "
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, terminate: {tun: gw1, address: [10.0.9.1, 10.0.9.2], assign: [10.20.0.0/24]}}
";

/// The far end would send the packets to wherever its DNS says that the name is.
#[test]
fn a_claimed_network_admits_no_name() {
    as_root("a told network lets no name through", || async {
        let gateway = GatewayFixture::with(NARROW, 10).await;
        let other = Namespace::new().unwrap();
        gateway.namespace.join([10, 77, 5, 1].into(), &other, [10, 77, 5, 2].into()).unwrap();
        let subject = Subject::node("there").with_dns(NODE_NAME);
        let far = gateway.overlay.node("there").document(WIDE).within(&other).identity(&subject).unwrap();
        let _far = far.start().await.unwrap();
        let with_claim = |listener: ListenerClient| listener.with("hermes-network", "10.0.9.1/32");
        for target in ["localhost", "*"] {
            let opened = gateway
                .namespace
                .run(IpTunnel::open(&with_claim(gateway.client(0)), IpMode::H1, &ip::path(target, "*")))
                .await;
            let refused = opened.unwrap().err().map(|error| error.to_string());
            assert!(refused.as_ref().is_some_and(|output| output.contains("404")), "{target}: {refused:?}");
        }
        // What the path says is what the next node holds the session to.
        let mut tunnel = gateway.tunnel(0, IpMode::H1, "10.0.9.1", "*").await.unwrap();
        let own = "10.20.0.2".parse().unwrap();
        tunnel.ask_for(&[own]).await.unwrap();
        for (there, is_reached) in [("10.0.9.2", false), ("10.0.9.1", true)] {
            tunnel.packet(&ping(own, there.parse().unwrap(), 1, b"there?")).await.unwrap();
            let answer = icmp(&tunnel.next_packet().await.unwrap());
            assert_eq!(answer == Some((0, 0)), is_reached, "{there}: {answer:?}");
        }
    });
}

const TWO_DOORS: &str = "
workers: 1
limits: {tunnels: $TUNNELS}
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
- {name: second, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}
";
/// The listener by which they came is gone, and so are alice's rights.
const BOB_ALONE: &str = "
workers: 1
listeners:
- {name: second, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: vpn, match: {kind: ip, user: bob}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}
";

/// A link lives for days: that nobody listens any more where it began does not keep it.
#[test]
fn a_session_of_a_removed_listener_still_obeys_the_routes() {
    as_root("a session whose listener is gone", || async {
        let mut gateway = GatewayFixture::with(TWO_DOORS, 10).await;
        let own = ["10.20.0.2", "10.20.0.3"].map(|text| text.parse().unwrap());
        let [mut alice, mut bob] = [
            gateway.tunnel(0, IpMode::H1, "*", "*").await.unwrap(),
            gateway.tunnel(1, IpMode::H1, "*", "*").await.unwrap(),
        ];
        alice.ask_for(&own[..1]).await.unwrap();
        bob.ask_for(&own[1..]).await.unwrap();
        gateway.node.reload(BOB_ALONE, &[]).await.unwrap();
        // What else is said of addresses and routes comes before the end.
        while let Ok(Some(_)) = alice.next().await {}
        bob.packet(&ping(own[1], "10.0.0.1".parse().unwrap(), 1, b"there?")).await.unwrap();
        assert_eq!(icmp(&bob.next_packet().await.unwrap()), Some((0, 0)));
        let ended = gateway.node.metric("hermes_sessions_open", "").await.unwrap();
        assert_eq!(ended, 1.0);
    });
}

const NAMED: &str = "
workers: 1
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- name: vpn
  match: {kind: ip, network: [198.18.0.0/15, 127.0.0.0/8]}
  terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}
";

/// Which machine a name means the far end finds, and finds again where the route is for others now.
#[test]
fn a_session_for_a_name_is_held_to_the_networks_that_the_route_has_now() {
    as_root("a session for a name whose route is narrower now", || async {
        let mut gateway = GatewayFixture::with(NAMED, 10).await;
        let client = gateway.client(0).with("hermes-network", "198.18.0.5/32");
        let path = ip::path("localhost", "*");
        let mut tunnel = gateway.namespace.run(IpTunnel::open(&client, IpMode::H1, &path)).await.unwrap().unwrap();
        tunnel.ask_for(&["10.20.0.2".parse().unwrap()]).await.unwrap();
        gateway.node.reload(&NAMED.replace(", 127.0.0.0/8", ""), &[]).await.unwrap();
        let ended = async { while let Ok(Some(_)) = tunnel.next().await {} };
        tokio::time::timeout(20 * PACKET_TIMEOUT, ended)
            .await
            .expect("it goes on to a machine that its route is not for");
    });
}
