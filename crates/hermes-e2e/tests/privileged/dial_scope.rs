//! A route for what the request names never reaches this machine, its networks or its cloud's secrets, unless told to.
//!
//! In: targets in every spelling, by address and by DNS with honest and malicious answers. Out: a refusal that says
//! why, or the one origin that may be reached. Each test has a network of its own, in which a neighbour has a public
//! address and everything else is this node's.

use hermes_testkit::binary::hermes;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hermes_testkit::{
    dns::{self, Data, Dns, Record},
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, TunnelMode},
    netns::Namespace,
    origin::{self, Origin},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    skip::needs_root,
};

/// This node's public address, and its neighbour's. 11.0.0.0/8 is nobody's special block.
const HERE: Ipv4Addr = Ipv4Addr::new(11, 0, 0, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(11, 0, 0, 2);
/// A private network of this node's.
const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const PRIVATE_PEER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const PORT: u16 = 8000;

/// Runs a test on a thread in a namespace of its own, joined to a neighbour's.
fn in_own_network<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Lab) -> F + Send + 'static) {
    if !needs_root(test) {
        return;
    }
    let thread = std::thread::spawn(move || {
        let (here, there) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        here.join(HERE, &there, THERE).unwrap();
        here.join(PRIVATE, &there, PRIVATE_PEER).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // The neighbour's origins are bound there; a socket stays in the namespace that it was made in.
        there.enter().unwrap();
        let neighbours = runtime.block_on(async { [THERE, PRIVATE_PEER].map(|address| Web::at(address.into())) });
        here.enter().unwrap();
        let own = runtime.block_on(async {
            [Ipv4Addr::LOCALHOST.into(), HERE.into(), PRIVATE.into(), "::1".parse().unwrap()].map(Web::at)
        });
        runtime.block_on(body(Lab { own, neighbours, overlay: Overlay::new(hermes()).unwrap() }));
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// An origin that counts its connections.
struct Web {
    _origin: Origin,
    visits: Arc<AtomicUsize>,
}

impl Web {
    fn at(address: IpAddr) -> Self {
        let visits = Arc::new(AtomicUsize::new(0));
        let count = visits.clone();
        let listener = origin::listen(SocketAddr::new(address, PORT)).unwrap();
        let origin = Origin::accepting(listener, move |stream| {
            count.fetch_add(1, Ordering::SeqCst);
            let mut http1 = hermes_testkit::raw_http1::RawHttp1::new(stream);
            async move {
                while http1.head().await.is_ok() {
                    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
                    if http1.send(answer).await.is_err() {
                        return;
                    }
                }
            }
        });
        Self { _origin: origin.unwrap(), visits }
    }

    fn visits(&self) -> usize {
        self.visits.load(Ordering::SeqCst)
    }
}

struct Lab {
    /// On loopback, on the node's public and private addresses, on IPv6 loopback.
    own: [Web; 4],
    /// Public and private.
    neighbours: [Web; 2],
    overlay: Overlay,
}

impl Lab {
    async fn node(&self, reach: &str) -> Node {
        let wrapper = dns::resolving_by(Ipv4Addr::LOCALHOST.into(), self.overlay.dir()).unwrap();
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: tcp, match: {kind: tcp}, terminate: {tcp: authority $REACH}}
- {name: udp, match: {kind: udp}, terminate: {udp: authority $REACH}}
- {name: web, match: {kind: http}, terminate: {http: authority $REACH}}
";
        let draft = self.overlay.node("gate").document(document).with("REACH", reach).by_way_of(&wrapper);
        draft.start().await.unwrap()
    }

    fn own_visits(&self) -> usize {
        self.own.iter().map(Web::visits).sum()
    }
}

/// What became of a host by CONNECT, by a flow and by a request: a status each.
async fn ask(node: &Node, host: &str, port: u16) -> [(u16, String); 3] {
    let client = ListenerClient::plain(node.address("in"));
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let tunnel = match client.tunnel(TunnelMode::ConnectH1, &format!("{bracketed}:{port}")).await {
        Ok(_) => (200, String::new()),
        Err(error) => (status_in(&error.to_string()), error.to_string()),
    };
    let flow = match Flow::open(&client, FlowMode::UpgradeH1, host, port).await {
        Ok(_) => (200, String::new()),
        Err(error) => (status_in(&error.to_string()), error.to_string()),
    };
    let mut http1 = client.h1().await.unwrap();
    http1.send(format!("GET http://{bracketed}:{port}/ HTTP/1.1\r\nhost: {bracketed}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = http1.body(&head).await.unwrap().text();
    [tunnel, flow, (head.status(), format!("{head:?} {body}"))]
}

/// The status in a refusal as `ListenerClient` words it.
fn status_in(text: &str) -> u16 {
    let found = text.split([' ', '"']).filter_map(|word| word.parse::<u16>().ok());
    found.into_iter().find(|number| (400..600).contains(number)).unwrap_or_default()
}

#[track_caller]
fn all_refused(host: &str, outcomes: &[(u16, String); 3]) {
    for (status, text) in outcomes {
        assert_eq!(*status, 403, "{host}: {text}");
        assert!(text.contains("destination_ip_prohibited"), "{host}: {text}");
    }
}

#[test]
fn addresses_that_are_never_public() {
    in_own_network("addresses_that_are_never_public", |lab| async move {
        let node = lab.node("").await;
        for host in [
            // Loopback, this host, this node.
            "127.0.0.1",
            "127.0.0.2",
            "127.255.255.254",
            "0.0.0.0",
            "0.1.2.3",
            "::1",
            "::",
            "11.0.0.1",
            // Private, link-local, metadata.
            "10.9.0.1",
            "10.9.0.2",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "fc00::1",
            "fd12::1",
            "169.254.169.254",
            "169.254.0.1",
            "168.63.129.16",
            "fe80::1",
            "fd00:ec2::254",
            // The same, in IPv6: mapped, compatible, NAT64, 6to4, Teredo.
            "::ffff:127.0.0.1",
            "::ffff:10.9.0.1",
            "::ffff:169.254.169.254",
            "::ffff:11.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::7f00:1",
            "2002:7f00:1::",
            "2001:0:4136:e378:8000:63bf:80ff:fffe",
            // Nobody's.
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.2.1",
            "198.18.0.1",
            "ff02::1",
            "2001:db8::1",
            "::2",
        ] {
            all_refused(host, &ask(&node, host, PORT).await);
        }
        // The admin endpoint is on this node as well.
        all_refused("admin", &ask(&node, "127.0.0.1", node.admin().port()).await);
        all_refused("admin", &ask(&node, "11.0.0.1", node.admin().port()).await);
        // The listener itself: a circle of one.
        all_refused("in", &ask(&node, "127.0.0.1", node.address("in").port()).await);
        assert_eq!((lab.own_visits(), lab.neighbours[1].visits()), (0, 0));
        // What is public is reached.
        let [tunnel, flow, web] = ask(&node, "11.0.0.2", PORT).await;
        assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{tunnel:?} {flow:?} {web:?}");
        assert_eq!(lab.neighbours[0].visits(), 2);
    });
}

#[test]
fn other_spellings_of_loopback_are_names_at_best() {
    in_own_network("other_spellings_of_loopback", |lab| async move {
        let _dns = Dns::serve("127.0.0.1:53".parse().unwrap(), |_| None).await.unwrap();
        let node = lab.node("").await;
        // What `inet_aton` and browsers would take for 127.0.0.1, and names that the hosts file has for it.
        for host in
            ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1.", "localhost", "LOCALHOST", "localhost."]
        {
            for (status, text) in ask(&node, host, PORT).await {
                assert!(matches!(status, 400 | 403 | 502), "{host}: {status} {text}");
            }
        }
        assert_eq!(lab.own_visits(), 0);
    });
}

#[test]
fn the_private_dial_scope_excludes_public_addresses() {
    in_own_network("private_reach", |lab| async move {
        let node = lab.node(", reach: private").await;
        let [tunnel, flow, web] = ask(&node, "10.9.0.2", PORT).await;
        assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{tunnel:?} {flow:?} {web:?}");
        for host in [
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "10.9.0.1",
            "11.0.0.1",
            "169.254.169.254",
            "::ffff:10.9.0.1",
            "fd00:ec2::254",
        ] {
            all_refused(host, &ask(&node, host, PORT).await);
        }
        assert_eq!(lab.own_visits(), 0);
    });
}

#[test]
fn any_reach_is_any() {
    in_own_network("any_reach", |lab| async move {
        let node = lab.node(", reach: any").await;
        for (number, host) in ["127.0.0.1", "11.0.0.1", "10.9.0.1", "::1"].into_iter().enumerate() {
            let [tunnel, flow, web] = ask(&node, host, PORT).await;
            assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{host}: {tunnel:?} {flow:?} {web:?}");
            assert_eq!(lab.own[number].visits(), 2, "{host}");
        }
    });
}

/// The names of a malicious zone, and one of an honest one.
fn zone(name: &str, rebound: &AtomicUsize) -> Option<Vec<Record>> {
    let address = |text: &str| Record::address(60, text.parse::<IpAddr>().unwrap());
    Some(match name {
        "good.test" => vec![address("11.0.0.2")],
        "loopback.test" => vec![address("127.0.0.1")],
        "own.test" => vec![address("11.0.0.1")],
        "metadata.test" => vec![address("169.254.169.254")],
        "mixed.test" => vec![address("11.0.0.2"), address("127.0.0.1")],
        "mixed-families.test" => vec![address("11.0.0.2"), address("::1")],
        "mapped.test" => vec![address("::ffff:127.0.0.1")],
        "nat64.test" => vec![address("64:ff9b::7f00:1")],
        "alias.test" => {
            let alias = Record { ttl: 60, data: Data::Alias("loopback.test".to_owned()) };
            vec![alias, address("127.0.0.1")]
        }
        // Public for the check of whoever checks only once, then not.
        "rebinding.test" => {
            let count = rebound.fetch_add(1, Ordering::SeqCst);
            // Two questions a lookup: A and AAAA.
            let address = if count < 2 { THERE } else { Ipv4Addr::LOCALHOST };
            vec![Record::address(0, address)]
        }
        // An address that nothing leads to, and one that answers.
        "dual.test" => vec![address("2a00:1::1"), address("11.0.0.2")],
        _ => return None,
    })
}

async fn zone_server() -> Dns {
    let rebound = AtomicUsize::new(0);
    Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| zone(name, &rebound)).await.unwrap()
}

#[test]
fn every_address_of_an_answer_is_checked() {
    in_own_network("every_address_of_an_answer", |lab| async move {
        let dns = zone_server().await;
        let node = lab.node("").await;
        for host in [
            "loopback.test",
            "own.test",
            "metadata.test",
            "mapped.test",
            "nat64.test",
            "alias.test",
            // A good address beside a bad one makes the answer no better.
            "mixed.test",
            "mixed-families.test",
            "MIXED.test",
        ] {
            all_refused(host, &ask(&node, host, PORT).await);
            assert!(dns.requests(&host.to_ascii_lowercase()) > 0, "{host} was not asked for");
        }
        assert_eq!((lab.own_visits(), lab.neighbours[0].visits()), (0, 0));
        let [tunnel, flow, web] = ask(&node, "good.test", PORT).await;
        assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{tunnel:?} {flow:?} {web:?}");
        for (status, text) in ask(&node, "nowhere.test", PORT).await {
            assert_eq!(status, 502, "{text}");
            assert!(text.contains("dns_error"), "{text}");
        }
    });
}

#[test]
fn the_address_that_was_checked_is_the_one_that_is_dialled() {
    in_own_network("the_address_that_was_checked", |lab| async move {
        let _dns = zone_server().await;
        let node = lab.node("").await;
        let client = ListenerClient::plain(node.address("in"));
        client.tunnel(TunnelMode::ConnectH1, "rebinding.test:8000").await.unwrap();
        // From now on the name is loopback; whoever asks again is refused, and nobody gets there.
        for _ in 0..3 {
            let output = client.tunnel(TunnelMode::ConnectH1, "rebinding.test:8000").await.err().unwrap().to_string();
            assert!(output.contains("403") && output.contains("destination_ip_prohibited"), "{output}");
        }
        assert_eq!((lab.own_visits(), lab.neighbours[0].visits()), (0, 1));
    });
}

#[test]
fn a_dead_address_family_costs_no_session() {
    in_own_network("a_dead_address_family", |lab| async move {
        let _dns = zone_server().await;
        let node = lab.node("").await;
        let [tunnel, _, web] = ask(&node, "dual.test", PORT).await;
        assert_eq!((tunnel.0, web.0), (200, 200), "{tunnel:?} {web:?}");
        assert_eq!(lab.neighbours[0].visits(), 2);
    });
}

/// With the addresses of one family, a dial does not wait for the other's answer (RFC 8305, section 3).
#[test]
fn a_family_that_is_never_answered_costs_no_session() {
    in_own_network("a_family_that_is_never_answered", |lab| async move {
        let silence = |v6| Record { ttl: 60, data: Data::Silence { v6 } };
        let dns = Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| match name {
            "v4.test" => Some(vec![Record::address(60, THERE), silence(true)]),
            "v6.test" => Some(vec![Record::address(60, std::net::Ipv6Addr::LOCALHOST), silence(false)]),
            // An address without a route, and no answer for the other family: an error in time.
            "nowhere.test" => Some(vec![Record::address(60, [0x2a00, 1, 0, 0, 0, 0, 0, 1u16]), silence(false)]),
            _ => None,
        });
        let dns = dns.await.unwrap();
        let node = lab.node(", reach: any").await;
        for (host, visits) in [("v4.test", &lab.neighbours[0]), ("v6.test", &lab.own[3])] {
            let [tunnel, flow, web] = ask(&node, host, PORT).await;
            assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{host}: {tunnel:?} {flow:?} {web:?}");
            assert_eq!(visits.visits(), 2, "{host}");
            assert!(dns.requests(host) > 0, "{host}");
        }
        for (status, text) in ask(&node, "nowhere.test", PORT).await {
            assert!(matches!(status, 502 | 504), "{status} {text}");
        }
    });
}

/// Compose services, SRV-like names and aliases have them; DNS carries any (RFC 2181, section 11).
#[test]
fn names_with_underscores_are_asked_for() {
    in_own_network("names_with_underscores", |lab| async move {
        let names = ["x_y.test", "_a.test", "a_.b_c.test"];
        let dns = Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| {
            names.contains(&name).then(|| vec![Record::address(60, THERE)])
        });
        let dns = dns.await.unwrap();
        let node = lab.node("").await;
        for name in names {
            let [tunnel, flow, web] = ask(&node, name, PORT).await;
            assert_eq!((tunnel.0, flow.0, web.0), (200, 200, 200), "{name}: {tunnel:?} {flow:?} {web:?}");
            assert!(dns.requests(name) > 0, "{name}");
        }
    });
}

#[test]
fn names_are_resolved_again_after_their_ttl() {
    in_own_network("names_are_asked_for_again", |lab| async move {
        let moved = Arc::new(AtomicUsize::new(0));
        let namespace = moved.clone();
        let dns = Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| match name {
            "kept.test" => Some(vec![Record::address(3600, THERE)]),
            "moving.test" if namespace.load(Ordering::SeqCst) == 0 => Some(vec![Record::address(1, THERE)]),
            "moving.test" => Some(vec![Record::address(1, PRIVATE_PEER)]),
            _ => None,
        });
        let dns = dns.await.unwrap();
        let node = lab.node(", reach: private").await;
        let client = ListenerClient::plain(node.address("in"));
        // One connection, one worker, one cache.
        let mut connection = client.h2().await.unwrap();
        for _ in 0..5 {
            assert_eq!(connection.get("http://kept.test:8000/").await.unwrap().status, 200);
            assert_eq!(connection.get("http://moving.test:8000/").await.unwrap().status, 200);
        }
        assert!(
            dns.requests("kept.test") <= 2,
            "asked {} times in an hour that has not passed",
            dns.requests("kept.test")
        );
        assert_eq!(lab.neighbours[1].visits(), 0);
        moved.store(1, Ordering::SeqCst);
        let followed = async {
            while lab.neighbours[1].visits() == 0 {
                // A tunnel is a new connection each time.
                drop(client.tunnel(TunnelMode::ConnectH1, "moving.test:8000").await.unwrap());
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(EFFECT_TIMEOUT, followed).await.expect("it still goes where the name led before");
    });
}
