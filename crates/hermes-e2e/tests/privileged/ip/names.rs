//! Names through a device: programs that ask DNS, and then send packets to what they were told.
//!
//! In: two users with a device each, a node between that decides by user and name, two far machines of one address;
//! dig, getent, ping and curl. Out: each reaches the machine that the name means for its user, with the first packet;
//! what no name stands for, or no route leads to, is said to be unreachable at once, and counted.

use std::net::Ipv4Addr;

use hermes_testkit::{
    dns::{Dns, Record, resolving_by},
    netns::Namespace,
    origin::{self, Origin, http},
    overlay::Node,
    poll::until,
};

use crate::ip::node_chain::{Hop, NodeChain, anywhere, as_root, draft};

const NEAR: &str = "
workers: 2
limits: {name-sessions: $MOST}
listeners:
- name: dns
  bind: '127.0.0.53:53'
  protocol: dns
  names: [FILES, '*.corp']
  addresses: [198.18.0.0/16, 'fd00:6865:726d::/64']
  forward: ['127.0.0.1:1']
- name: l3
  protocol: tun
  device: hermes0
  address: ['10.20.0.$OWN', 'fd00:20::$OWN']
  capture: [$CAPTURE, 'fd00:6865:726d::/64']
  set-headers: {hermes-user: $USER}
routes:
- {name: names, match: {kind: ip}, upstream: next, timeout: {idle: $IDLE}}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT:9443'], tls: {}}
";

const MIDDLE: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: one, match: {kind: ip, authority: [FILES, other.corp], user: alice}, upstream: one}
- {name: other, match: {kind: ip, authority: FILES, user: bob}, upstream: other}
- {name: by-dns, match: {kind: ip, authority: '*.far.corp'}, upstream: other}
upstreams:
- {name: one, protocol: $PROTOCOL, endpoints: ['10.77.1.2:9443'], tls: {}}
- {name: other, protocol: $PROTOCOL, endpoints: ['10.77.2.2:9443'], tls: {}}
";

/// The machine that a name means here has one address of each version, unless DNS knows better.
const END: &str = "
workers: 2
listeners:
- {name: overlay, bind: '0.0.0.0:9443', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: by-dns, match: {kind: ip, authority: '*.far.corp'}, terminate: {tun: gw0}}
- name: v4
  match: {kind: ip, network: 198.18.0.0/16}
  terminate: {tun: gw0, address: [10.0.0.1], dnat: 10.0.0.1}
- name: v6
  match: {kind: ip, network: 'fd00:6865:726d::/64'}
  terminate: {tun: gw0, address: ['fd00:10::1'], dnat: 'fd00:10::1'}
";

/// Where each user's listener answers questions.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);
const DROPPED: &str = "hermes_datagrams_dropped_total";

/// Places: alice's, the node between, the two machines, bob's.
struct Crossing {
    alice: Node,
    bob: Node,
    /// Of the two machines, and the one between.
    others: [Node; 3],
    _pages: [Origin; 2],
    _dns: Dns,
    chain: NodeChain,
}

/// What differs.
struct Wish {
    hop: Hop,
    most: usize,
    idle: &'static str,
    capture: &'static str,
}

const WISH: Wish = Wish { hop: Hop::H3, most: 100, idle: "10m", capture: "198.18.0.0/16" };

impl Crossing {
    async fn new(wish: &Wish) -> Self {
        let mut chain = NodeChain::empty(3);
        for (third, name) in [(2, "other"), (3, "bobs")] {
            let index = Namespace::new().unwrap();
            let [middle, there] = [1, 2].map(|last| Ipv4Addr::new(10, 77, third, last));
            chain.namespaces[1].join(middle, &index, there).unwrap_or_else(|error| panic!("{name}: {error}"));
            chain.namespaces.push(index);
        }
        let answers = |name: &str| (name == "web.far.corp").then(|| vec![Record::address(60, [10, 0, 0, 1])]);
        let dns = chain.namespaces[3].run(Dns::serve(anywhere(53), answers)).await.unwrap().unwrap();
        // Not the users' directory: their programs have a file of this name there.
        let dir = chain.overlay.dir().join("of-nodes");
        std::fs::create_dir_all(&dir).unwrap();
        let start = async |index: usize, name: &str, document: &str, values: &[(&str, &str)]| {
            let mut draft = draft(&chain, index, name, document).with("PROTOCOL", wish.hop.protocol());
            draft = draft.with("MOST", wish.most).with("IDLE", wish.idle).with("CAPTURE", wish.capture);
            for (key, value) in values {
                draft = draft.with(key, value);
            }
            let wrapper = resolving_by([127, 0, 0, 1].into(), &dir).unwrap();
            let words: Vec<&str> = wrapper.iter().map(String::as_str).collect();
            draft.by_way_of(&words).start().await.unwrap()
        };
        let others =
            [start(2, "one", END, &[]).await, start(3, "other", END, &[]).await, start(1, "middle", MIDDLE, &[]).await];
        let alice = start(0, "near", NEAR, &[("USER", "alice"), ("OWN", "2"), ("NEXT", "10.77.0.2")]).await;
        let bob = start(4, "bobs", NEAR, &[("USER", "bob"), ("OWN", "3"), ("NEXT", "10.77.3.1")]).await;
        let page = async |text: &'static str| {
            http::serve(origin::listen(anywhere(80)).unwrap(), http::Version::H1, text.into()).unwrap()
        };
        let pages = [
            chain.namespaces[2].run(page("of one")).await.unwrap(),
            chain.namespaces[3].run(page("of the other")).await.unwrap(),
        ];
        Self { alice, bob, others, _pages: pages, _dns: dns, chain }
    }

    /// A program of alice's (0) or bob's (4), which asks its own listener for names.
    async fn output(&self, index: usize, program: &[&str]) -> Result<String, String> {
        let mut words = resolving_by(RESOLVER.into(), self.chain.overlay.dir()).unwrap();
        words.extend(program.iter().map(|word| (*word).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.chain.namespaces[index].output(&words).await.map_err(|error| error.to_string())
    }

    /// The first packet has to arrive: it waits for its session.
    async fn pings(&self, index: usize, name: &str) {
        for version in ["-4", "-6"] {
            let text = self.output(index, &["ping", version, "-n", "-c1", "-W20", name]).await;
            assert!(text.as_ref().is_ok_and(|text| text.contains(" 0% packet loss")), "{name} {version}: {text:?}");
        }
    }

    async fn page(&self, index: usize, version: &str, url: &str) -> Result<String, String> {
        self.output(index, &["curl", version, "-sS", "--max-time", "20", url]).await
    }
}

#[test]
fn each_user_reaches_the_machine_that_a_name_means_for_it() {
    as_root("names through a device", || async {
        for hop in [Hop::H1, Hop::H2, Hop::H3] {
            let crossing = Crossing::new(&Wish { hop, ..WISH }).await;
            for (index, text) in [(0, "of one"), (4, "of the other")] {
                crossing.pings(index, "FILES").await;
                for version in ["-4", "-6"] {
                    assert_eq!(crossing.page(index, version, "http://FILES/").await.as_deref(), Ok(text), "{hop:?}");
                }
                let hosts = crossing.output(index, &["getent", "ahosts", "FILES"]).await.unwrap();
                assert!(hosts.contains("198.18.") && hosts.contains("fd00:6865:726d:"), "{hosts}");
                let dug = crossing.output(index, &["dig", "+short", "FILES.", "A"]).await.unwrap();
                assert!(hosts.contains(dug.trim()), "{dug} {hosts}");
                // What DNS knows at the far end is the other machine, for either.
                let page = crossing.page(index, "-4", "http://web.far.corp/").await;
                assert_eq!(page.as_deref(), Ok("of the other"), "{hop:?}");
            }
            for (node, user) in [(&crossing.alice, "alice"), (&crossing.bob, "bob")] {
                let (_, sessions) = node.ask("/sessions").await.unwrap();
                assert!(sessions.contains("\"files\"") && sessions.contains(user), "{sessions}");
            }
        }
    });
}

#[test]
fn names_without_a_destination_are_unreachable_at_once() {
    as_root("names that lead nowhere", || async {
        let crossing = Crossing::new(&WISH).await;
        // The node between has no route for it.
        let refused = crossing.output(0, &["ping", "-4", "-n", "-c1", "-W20", "nobody.corp"]).await.unwrap_err();
        assert!(refused.contains("Net Unreachable"), "{refused}");
        let refused = crossing.page(0, "-4", "http://nobody.corp/").await.unwrap_err();
        assert!(refused.contains("nreachable") || refused.contains("Failed to connect"), "{refused}");
        assert!(crossing.alice.metric(DROPPED, "reason=\"no-session\"").await.unwrap() >= 2.0);
        // The log says so once, with the name and what to do.
        crossing.alice.says("network=nobody.corp reason=next/10.77.0.2:9443 refused the tunnel with status 404").await;
        assert_eq!(crossing.alice.log().matches("WARN no tunnel").count(), 1, "{}", crossing.alice.log());
        // Nobody was told this address.
        let refused = crossing.output(0, &["ping", "-n", "-c1", "-W20", "198.18.0.1"]).await.unwrap_err();
        assert!(refused.contains("Net Unreachable"), "{refused}");
        assert_eq!(crossing.alice.metric(DROPPED, "reason=\"no-name\"").await.unwrap(), 1.0);
        // Far DNS has no address of version 6 for it; who tries both goes by the other.
        assert_eq!(crossing.page(0, "", "http://web.far.corp/").await.as_deref(), Ok("of the other"));
    });
}

#[test]
fn a_name_without_a_tunnel_is_logged_and_so_is_its_recovery() {
    as_root("a name without a tunnel is told of", || async {
        let mut crossing = Crossing::new(&WISH).await;
        let values = [("PROTOCOL", WISH.hop.protocol().to_owned())];
        let elsewhere = MIDDLE.replace("user: alice", "user: nobody");
        crossing.others[2].reload(&elsewhere, &values).await.unwrap();
        let pings =
            async |crossing: &Crossing| crossing.output(0, &["ping", "-4", "-n", "-c1", "-W20", "FILES"]).await.is_ok();
        assert!(!pings(&crossing).await);
        crossing.alice.says("WARN no tunnel").await;
        assert!(crossing.alice.log().contains("network=files"), "{}", crossing.alice.log());
        crossing.others[2].reload(MIDDLE, &values).await.unwrap();
        until("it is there again", async || pings(&crossing).await).await;
        crossing.alice.says("packets are captured again listener=l3 network=files").await;
        assert_eq!(crossing.alice.log().matches("WARN no tunnel").count(), 1, "{}", crossing.alice.log());
    });
}

/// A session that nobody uses ends, and the next packet begins another one. Within a capture of everything names are
/// names as well.
#[test]
fn a_session_that_is_silent_ends_and_the_next_packet_begins_another() {
    as_root("silent sessions for names", || async {
        let crossing = Crossing::new(&Wish { idle: "500ms", capture: "0.0.0.0/0", ..WISH }).await;
        for round in 1..=2 {
            let text = crossing.output(0, &["ping", "-4", "-n", "-c1", "-W20", "FILES"]).await;
            assert!(text.as_ref().is_ok_and(|text| text.contains(" 0% packet loss")), "{round}: {text:?}");
            until("the session is over", async || {
                let records = crossing.alice.records();
                records.iter().filter(|record| record["authority"] == "files").count() == round
            })
            .await;
        }
    });
}

#[test]
fn name_sessions_of_one_client_exclude_no_other_client() {
    as_root("shares of sessions for names", || async {
        let crossing = Crossing::new(&Wish { most: 2, ..WISH }).await;
        crossing.output(0, &["ip", "address", "add", "10.99.0.2/32", "dev", "lo"]).await.unwrap();
        for name in ["FILES", "web.far.corp"] {
            crossing.output(0, &["ping", "-4", "-n", "-c1", "-W20", name]).await.unwrap();
        }
        // The packets of this source may be dropped at the far end. Its session is not refused.
        let _ = crossing.output(0, &["ping", "-4", "-n", "-c1", "-W1", "-I", "10.99.0.2", "other.corp"]).await;
        assert!(crossing.alice.metric("hermes_limit_hits_total", "name-sessions").await.unwrap() >= 1.0);
        assert_eq!(crossing.alice.metric(DROPPED, "reason=\"name-sessions\"").await.unwrap_or_default(), 0.0);
    });
}

#[test]
fn sessions_for_names_meet_a_limit() {
    as_root("a limit of sessions for names", || async {
        let crossing = Crossing::new(&Wish { most: 1, ..WISH }).await;
        let ping = async |name: &'static str| crossing.output(0, &["ping", "-4", "-n", "-c1", "-W20", name]).await;
        assert!(ping("FILES").await.is_ok());
        let refused = ping("other.corp").await.unwrap_err();
        assert!(refused.contains("Net Unreachable"), "{refused}");
        assert!(ping("FILES").await.is_ok());
        assert!(crossing.alice.metric("hermes_limit_hits_total", "name-sessions").await.unwrap() >= 1.0);
        assert!(crossing.alice.metric(DROPPED, "reason=\"name-sessions\"").await.unwrap() >= 1.0);
    });
}
