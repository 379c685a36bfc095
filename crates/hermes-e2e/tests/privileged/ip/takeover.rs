//! A new process takes a device over: its queues, addresses, routes and captures, with live sessions at either end.
//!
//! In: a near and a far node, a ping every hundredth of a second, and a connection. Out: no ping is lost and the
//! connection lives on, whichever of the two is taken over, by processes of more and of fewer workers.

use hermes_testkit::{
    origin::{self, stream},
    overlay::Node,
    poll::until,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::ip::node_chain::{
    FAR, FAR_DOCUMENT, Hop, MIDDLE_DOCUMENT, NEAR_DOCUMENT, NodeChain, anywhere, as_root, draft, next, process,
};
use crate::ip::pings::{pinging, pings};

const ECHO: u16 = 7;

/// Another process of the node at a place, with so many workers.
async fn successor(chain: &NodeChain, index: usize, hop: Hop, called: &str, workers: usize) -> Node {
    let (name, document) = match index {
        0 => ("near".to_owned(), NEAR_DOCUMENT),
        _ if index + 1 == chain.namespaces.len() => (format!("node-{index}"), FAR_DOCUMENT),
        _ => (format!("node-{index}"), MIDDLE_DOCUMENT),
    };
    let document = document.replace("workers: 2", &format!("workers: {workers}\ndrain: 1s"));
    process(chain, index, &name, &document, hop, called).start().await.unwrap()
}

fn taken_over(hop: Hop) {
    as_root(&format!("devices that are taken over, {hop:?}"), || async {
        let mut chain = NodeChain::empty(2);
        let far = successor(&chain, 1, hop, "far-0", 2).await;
        let near = successor(&chain, 0, hop, "near-0", 2).await;
        chain.nodes = vec![near, far];
        chain.answers().await;
        let listening = async { stream::echo(origin::listen(anywhere(ECHO)).unwrap()).unwrap() };
        let _echo = chain.far().run(listening).await.unwrap();
        let target: std::net::IpAddr = FAR[0].parse().unwrap();
        let mut connection = chain.near().run(TcpStream::connect((target, ECHO))).await.unwrap().unwrap();
        let mut retired = Vec::new();
        for (number, (index, workers)) in [(0, 1), (1, 3), (0, 3), (1, 1)].into_iter().enumerate() {
            let what = format!("takeover {number}, at place {index}");
            let began = async {
                let process = format!("process-{number}");
                let successor = successor(&chain, index, hop, &process, workers).await;
                let parted = async || chain.nodes[index].log().contains("another process has the listeners");
                until("the old process parts", parted).await;
                successor
            };
            let (pinged, successor) = pinging(&chain, FAR[number % 2], began).await;
            retired.push(std::mem::replace(&mut chain.nodes[index], successor));
            pinged.all_came(&chain, &what).await;
            connection.write_all(&[number as u8]).await.unwrap();
            assert_eq!(usize::from(connection.read_u8().await.unwrap()), number);
        }
        // A process that ends takes nothing with it that is another one's now, and what sessions it has go elsewhere
        // first.
        for (number, old) in retired.into_iter().enumerate() {
            let what = format!("the end of process {number}");
            let ends = async {
                old.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
                let log = old.log();
                assert!(old.ended().await.success(), "{log}");
            };
            let (pinged, ()) = pinging(&chain, FAR[number % 2], ends).await;
            pinged.all_came(&chain, &what).await;
        }
        chain.answers().await;
        connection.write_all(b"!").await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), b'!');
        let rules = chain.near().output(&["ip", "rule"]).await.unwrap();
        assert!(rules.contains("0x4845524d"), "{rules}");
    });
}

#[test]
fn devices_are_taken_over_with_http_2_between() {
    taken_over(Hop::H2);
}

#[test]
fn devices_are_taken_over_with_http_3_between() {
    taken_over(Hop::H3);
}

/// It has no device, and passes on.
fn taken_over_between(hop: Hop) {
    as_root(&format!("a node between that is taken over, {hop:?}"), || async {
        let mut chain = NodeChain::empty(3);
        for namespace in (0..3).rev() {
            let node = successor(&chain, namespace, hop, &format!("first-{namespace}"), 2).await;
            chain.nodes.insert(0, node);
        }
        chain.answers().await;
        for number in 0..4 {
            let change = async {
                let new = successor(&chain, 1, hop, &format!("process-{number}"), 1 + number % 2).await;
                let old = &chain.nodes[1];
                // Its sessions go to the new one by themselves, and nothing else keeps it.
                until("the old process ends", async || old.log().contains("INFO stopped")).await;
                new
            };
            let (pinged, new) = pinging(&chain, FAR[number % 2], change).await;
            assert!(std::mem::replace(&mut chain.nodes[1], new).ended().await.success());
            pinged.all_came(&chain, &format!("takeover {number}")).await;
        }
    });
}

#[test]
fn a_node_between_is_taken_over_with_http_1() {
    taken_over_between(Hop::H1);
}

#[test]
fn a_node_between_is_taken_over_with_http_2() {
    taken_over_between(Hop::H2);
}

#[test]
fn a_node_between_is_taken_over_with_http_3() {
    taken_over_between(Hop::H3);
}

/// Two nodes between, of which one goes: what it had goes by the other.
#[test]
fn sessions_go_to_another_endpoint_when_theirs_goes() {
    another_endpoint(Hop::H2);
}

#[test]
fn sessions_go_to_another_endpoint_when_theirs_goes_with_http_3() {
    another_endpoint(Hop::H3);
}

fn another_endpoint(hop: Hop) {
    as_root(&format!("another endpoint, {hop:?}"), || async {
        let mut chain = NodeChain::empty(3);
        let far = successor(&chain, 2, hop, "far", 2).await;
        let to = format!("{}:9443", next(1));
        let between = async |chain: &NodeChain, name: &str, port: u16| {
            let document = MIDDLE_DOCUMENT.replace("9443", &port.to_string());
            let draft = draft(chain, 1, name, &document).with("NEXT", &to).with("PROTOCOL", hop.protocol());
            draft.start().await.unwrap()
        };
        let [one, other] = [between(&chain, "one", 9001).await, between(&chain, "other", 9002).await];
        let both = "endpoints: ['10.77.0.2:9001', '10.77.0.2:9002']";
        let document = NEAR_DOCUMENT.replace("endpoints: ['$NEXT']", both);
        let near = draft(&chain, 0, "near", &document).with("PROTOCOL", hop.protocol()).start().await.unwrap();
        chain.nodes = vec![near, far];
        chain.answers().await;
        let goes = async |node: Node| {
            node.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
            assert!(node.ended().await.success());
        };
        let (pinged, ()) = pinging(&chain, FAR[0], goes(one)).await;
        pinged.all_came(&chain, "the first goes").await;
        let one = between(&chain, "one", 9001).await;
        let (pinged, ()) = pinging(&chain, FAR[1], goes(other)).await;
        pinged.all_came(&chain, "the second goes").await;
        drop(one);
        // Both of two sessions came back from there, and each move has its line.
        let log = chain.nodes[0].log();
        let moved: Vec<&str> = log.lines().filter(|line| line.contains("INFO a session has moved")).collect();
        let logged_moves = moved
            .iter()
            .filter(|line| line.contains("reason=its far end is shutting down, or another path is better"))
            .count();
        let to = |there: &str| moved.iter().filter(|line| line.contains(&format!("to=next/10.77.0.2:{there}"))).count();
        assert!(logged_moves == moved.len() && to("9001") >= 2, "{log}");
    });
}

/// Of two endpoints a session goes to the new process of its own: behind another gateway it might have another address.
#[test]
fn sessions_stay_with_an_endpoint_that_is_taken_over() {
    as_root("an endpoint of two that is taken over", || async {
        let hop = Hop::H2;
        let chain = NodeChain::empty(3);
        let _far = successor(&chain, 2, hop, "far", 2).await;
        let between = async |name: &str, called: &str, port: u16| {
            let document = MIDDLE_DOCUMENT.replace("9443", &port.to_string());
            process(&chain, 1, name, &document, hop, called).start().await.unwrap()
        };
        let mut nodes = [between("one", "one-0", 9001).await, between("other", "other-0", 9002).await];
        let both = "endpoints: ['10.77.0.2:9001', '10.77.0.2:9002'], balance: round-robin";
        let document = NEAR_DOCUMENT.replace("endpoints: ['$NEXT']", both);
        let _near = draft(&chain, 0, "near", &document).with("PROTOCOL", hop.protocol()).start().await.unwrap();
        chain.answers().await;
        let sessions = async |node: &Node| node.metric("hermes_sessions_open", "").await.unwrap();
        let spread = [sessions(&nodes[0]).await, sessions(&nodes[1]).await];
        // One of each version.
        assert_eq!(spread.iter().sum::<f64>(), 2.0);
        for (number, at) in [0, 1, 0, 1].into_iter().enumerate() {
            let (name, port) = [("one", 9001), ("other", 9002)][at];
            let new = between(name, &format!("{name}-{}", number + 1), port).await;
            let old = std::mem::replace(&mut nodes[at], new);
            assert!(old.ended().await.success());
            assert_eq!([sessions(&nodes[0]).await, sessions(&nodes[1]).await], spread, "takeover {number}");
        }
    });
}

/// What a successor that gives up has taken is still the running process's.
#[test]
fn a_successor_that_fails_takes_nothing() {
    as_root("a successor that fails takes nothing", || async {
        let hop = Hop::H2;
        let mut chain = NodeChain::empty(2);
        chain.add(1, FAR_DOCUMENT, None).await;
        let near = successor(&chain, 0, hop, "near-0", 2).await;
        chain.nodes.insert(0, near);
        chain.answers().await;
        // Every machine has a device of that name.
        let other =
            "- {name: other, protocol: tun, device: lo, address: [10.30.0.2], capture: [10.31.0.0/16]}\nroutes:";
        let document = NEAR_DOCUMENT.replace("routes:", other);
        let failing = process(&chain, 0, "near", &document, hop, "near-1").start();
        let (started, pinged) = tokio::join!(failing, pings(chain.near(), &["-i", "0.01"], 100, FAR[0]));
        let words = started.map(|_| ()).unwrap_err().to_string();
        assert!(words.contains("device lo already exists"), "{words}");
        pinged.all_came(&chain, "a successor that fails").await;
        let rules = chain.near().output(&["ip", "rule"]).await.unwrap();
        assert!(rules.contains("0x4845524d"), "{rules}");
    });
}
