//! Names at the end of a flow: looked up when the flow begins, and again for later flows when their time is over.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hermes_testkit::{
    dns::{self, Dns, Record},
    flow::{Flow, FlowMode},
    listener_client::ListenerClient,
    netns::Namespace,
    origin::datagram::UdpEcho,
    overlay::{Node, Overlay},
    poll::until,
    skip::needs_root,
};

use crate::udp::lab::{echo, overlay};

/// Two places for one name, on the loopback of a namespace of the test's own.
const PLACES: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 11), Ipv4Addr::new(127, 0, 0, 12)];
const PORT: u16 = 7000;

/// One worker: each has a cache of its own.
const DOCUMENT: &str = "
workers: 1
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http}
- {name: raw, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:7'}
routes:
- {name: fixed, match: {kind: udp, authority: 'GAME:7'}, terminate: {udp: 'game.test:7000'}}
- {name: named, match: {kind: udp}, terminate: {udp: authority, reach: any}}
";

/// Runs a test on a thread in a network of its own, where port 53 is free.
fn in_own_network<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Overlay) -> F + Send + 'static) {
    if !needs_root(test) {
        return;
    }
    let thread = std::thread::spawn(move || {
        let namespace = Namespace::new().unwrap();
        namespace.enter().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(body(overlay()));
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

async fn resolving(overlay: &Overlay, wrapper: &[String]) -> Node {
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    overlay.node("edge").document(DOCUMENT).by_way_of(&wrapper).start().await.unwrap()
}

/// An origin at either place.
fn one_and_two() -> [UdpEcho; 2] {
    let origin = |place: Ipv4Addr, label| UdpEcho::start(SocketAddr::new(place.into(), PORT), label).unwrap();
    [origin(PLACES[0], "one"), origin(PLACES[1], "two")]
}

/// Who is at the other end, by the label in front of the echo.
async fn who(flow: &mut Flow) -> String {
    flow.send(b"?").await.unwrap();
    String::from_utf8(flow.receive().await.unwrap()).unwrap()
}

#[test]
fn later_flows_follow_a_name_and_live_ones_stay() {
    in_own_network("later_flows_follow_a_name", |overlay| async move {
        let _origins = one_and_two();
        let place = Arc::new(AtomicUsize::new(0));
        let now = place.clone();
        let dns = Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| match name {
            "game.test" => Some(vec![Record::address(1, PLACES[now.load(Ordering::SeqCst)])]),
            "kept.test" => Some(vec![Record::address(3600, PLACES[now.load(Ordering::SeqCst)])]),
            _ => None,
        });
        let dns = dns.await.unwrap();
        let wrapper = dns::resolving_by(Ipv4Addr::LOCALHOST.into(), overlay.dir()).unwrap();
        let node = resolving(&overlay, &wrapper).await;
        let (client, raw) = (ListenerClient::plain(node.address("door")), ListenerClient::plain(node.address("raw")));
        let mut live = [
            Flow::open(&raw, FlowMode::Raw, "", 0).await.unwrap(),
            Flow::open(&client, FlowMode::UpgradeH1, "game.test", PORT).await.unwrap(),
            Flow::open(&client, FlowMode::ConnectH2, "kept.test", PORT).await.unwrap(),
        ];
        for flow in &mut live {
            assert_eq!(who(flow).await, "one?");
        }
        place.store(1, Ordering::SeqCst);
        for (mode, client) in [(FlowMode::Raw, &raw), (FlowMode::ConnectH2, &client), (FlowMode::UpgradeH1, &client)] {
            until("a new flow follows the name", || async {
                let mut flow = Flow::open(client, mode, "game.test", PORT).await.unwrap();
                who(&mut flow).await == "two?"
            })
            .await;
        }
        for flow in &mut live {
            assert_eq!(who(flow).await, "one?", "a live flow stays where it is");
        }
        // An hour is not over.
        let mut kept = Flow::open(&client, FlowMode::ConnectH2, "kept.test", PORT).await.unwrap();
        assert_eq!(who(&mut kept).await, "one?");
        assert!(dns.requests("game.test") >= 4, "A and AAAA, at least twice: {}", dns.requests("game.test"));
    });
}

/// A laptop in another network asks that network's server.
#[test]
fn another_server_is_asked_once_the_system_names_it() {
    in_own_network("another_server_is_asked", |overlay| async move {
        let _origins = one_and_two();
        let servers = ["127.0.0.1", "127.0.0.2"].map(|server| server.parse::<IpAddr>().unwrap());
        let mut running = Vec::new();
        for (server, place) in servers.into_iter().zip(PLACES) {
            // For an hour: it is not the end of an answer's time that brings the other.
            let answers = move |name: &str| (name == "game.test").then(|| vec![Record::address(3600, place)]);
            running.push(Dns::serve(SocketAddr::new(server, 53), answers).await.unwrap());
        }
        let wrapper = dns::resolving_by(servers[0], overlay.dir()).unwrap();
        let node = resolving(&overlay, &wrapper).await;
        let client = ListenerClient::plain(node.address("door"));
        let ask = async || {
            let mut flow = Flow::open(&client, FlowMode::ConnectH2, "game.test", PORT).await.unwrap();
            who(&mut flow).await
        };
        assert_eq!(ask().await, "one?");
        // Nothing that can be used: the server of before is asked.
        std::fs::write(overlay.dir().join("resolv.conf"), "").unwrap();
        until("it is seen that it cannot be used", || async {
            assert_eq!(ask().await, "one?");
            node.log().contains("keeping the previous one")
        })
        .await;
        dns::resolving_by(servers[1], overlay.dir()).unwrap();
        until("the other server is asked", || async { ask().await == "two?" }).await;
        assert!(running[1].requests("game.test") > 0);
    });
}

#[test]
fn a_flow_uses_the_available_address_family() {
    in_own_network("a_flow_takes_the_family", |overlay| async move {
        let v6: IpAddr = "::1".parse().unwrap();
        let _origins = [
            UdpEcho::start(SocketAddr::new(PLACES[0].into(), PORT), "").unwrap(),
            UdpEcho::start(SocketAddr::new(v6, PORT), "").unwrap(),
        ];
        let dns = Dns::serve("127.0.0.1:53".parse().unwrap(), move |name| match name {
            "four.test" => Some(vec![Record::address(60, PLACES[0])]),
            "six.test" => Some(vec![Record::address(60, v6)]),
            // An address that no route leads to from here beside one that answers.
            "dual.test" => Some(vec![
                Record::address(60, "2001:db8::1".parse::<IpAddr>().unwrap()),
                Record::address(60, PLACES[0]),
            ]),
            _ => None,
        });
        let _dns = dns.await.unwrap();
        let wrapper = dns::resolving_by(Ipv4Addr::LOCALHOST.into(), overlay.dir()).unwrap();
        let node = resolving(&overlay, &wrapper).await;
        let client = ListenerClient::plain(node.address("door"));
        for name in ["four.test", "six.test", "dual.test", "::1", "127.0.0.11"] {
            for mode in [FlowMode::UpgradeH1, FlowMode::ConnectH2] {
                let mut flow = Flow::open(&client, mode, name, PORT).await.unwrap();
                echo(&mut flow, b"hello").await.unwrap_or_else(|error| panic!("{name} by {mode:?}: {error}"));
            }
        }
        let refused = Flow::open(&client, FlowMode::ConnectH2, "nobody.test", PORT).await.err().unwrap().to_string();
        assert!(refused.contains("502") && refused.contains("dns_error"), "{refused}");
    });
}
