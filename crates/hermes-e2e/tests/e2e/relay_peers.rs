//! Relays that share their channels: each channel has one of them as its root, and another one takes over when it goes.
//!
//! In: three nodes that are peers, nodes that are none, and curl at each. Out: what every subscriber gets when roots are
//! killed, return, and change by configuration.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::port;
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, field, publish};
use serde_json::Value;

const PEER: &str = "
listeners: [{name: web, bind: '$BIND', protocol: http, trust: [127.0.0.0/8]}]
routes:
- name: events
  match: {path: '/*'}
  relay: {mode: reliable, peers: [$PEERS], queue: 16, history: {publications: 1000}, max-timeout: 1m, stall: 3s}
upstreams:
- {name: one, protocol: h2, endpoints: ['$ONE']}
- {name: two, protocol: h2, endpoints: ['$TWO']}
- {name: three, protocol: h2, endpoints: ['$THREE']}
";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// All clients name the same channel, whichever node they ask.
const HOST: [&str; 2] = ["--header", "host: chat.example"];

/// Three peers, each at an address of its own.
struct Peers {
    overlay: Overlay,
    addresses: [SocketAddr; 3],
    nodes: Vec<Option<Node>>,
    starts: usize,
}

impl Peers {
    async fn new() -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let addresses = [(); 3].map(|()| port::reserve(Ipv4Addr::LOCALHOST));
        let mut peers = Self { overlay, addresses, nodes: vec![None, None, None], starts: 0 };
        for index in 0..NAMES.len() {
            peers.start(index).await;
        }
        peers
    }

    fn document(&self, index: usize, peers: &str) -> String {
        let mut text = PEER.replace("$BIND", &self.addresses[index].to_string()).replace("$PEERS", peers);
        for (name, address) in ["$ONE", "$TWO", "$THREE"].into_iter().zip(self.addresses) {
            text = text.replace(name, &address.to_string());
        }
        text
    }

    async fn start(&mut self, index: usize) {
        self.starts += 1;
        let process = format!("{}-{}", NAMES[index], self.starts);
        let document = self.document(index, "{node: one}, {node: two}, {node: three}");
        let draft = self.overlay.node(NAMES[index]).called(&process).document(&document);
        self.nodes[index] = Some(draft.start().await.unwrap());
    }

    fn at(&self, index: usize) -> &Node {
        self.nodes[index].as_ref().unwrap()
    }

    /// The index of the root of the only channel.
    async fn root(&self) -> usize {
        for _ in 0..200 {
            for (index, node) in self.nodes.iter().enumerate() {
                if let Some(node) = node
                    && node.metric("hermes_relay_roots", "").await.is_ok_and(|count| count == 1.0)
                {
                    return index;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no node is the root");
    }
}

fn json(arguments: &[&'static str]) -> Vec<&'static str> {
    [&SUBSCRIBE[..], &HOST, &["--header", "accept: application/x-ndjson"], arguments].concat()
}

/// The next publication. Another root must not cost any.
async fn next(subscriber: &mut Subscriber) -> Value {
    loop {
        let line = subscriber.json().await;
        match line.get("missed") {
            Some(missed) => assert_eq!(missed, 0, "{line}"),
            None => return line,
        }
    }
}

#[tokio::test]
async fn each_channel_has_one_root_that_all_nodes_agree_on() {
    let peers = Peers::new().await;
    let mut subscribers = Vec::new();
    for number in 0..12 {
        let path = format!("/events/{number}");
        for node in peers.nodes.iter().flatten() {
            subscribers.push((path.clone(), Subscriber::start(node, &path, &json(&["--fail"]))));
        }
    }
    let mut roots = Vec::new();
    for number in 0..12 {
        let path = format!("/events/{number}");
        let has_all = async || {
            let (status, head, _) = publish(peers.at(number % 3), &path, "x", &HOST).await;
            status == 204 && field(&head, "hermes-subscribers") == Some("3")
        };
        hermes_testkit::poll::until("the root knows the subscribers of all nodes", has_all).await;
    }
    for node in peers.nodes.iter().flatten() {
        roots.push(node.metric("hermes_relay_roots", "").await.unwrap());
    }
    assert_eq!(roots.iter().sum::<f64>(), 12.0, "{roots:?}");
    assert!(roots.iter().all(|count| *count > 0.0), "each node is the root of some: {roots:?}");
    for (path, subscriber) in &mut subscribers {
        assert_eq!(next(subscriber).await["data"], "x", "{path}");
    }
}

/// Whatever was confirmed to the publisher is delivered, once and in order, to subscribers of other nodes, and to those who
/// resume.
#[tokio::test]
async fn a_root_that_is_killed_takes_nothing_along() {
    let mut peers = Peers::new().await;
    let mut subscribers: Vec<Subscriber> =
        peers.nodes.iter().flatten().map(|node| Subscriber::start(node, "/events/a", &json(&[]))).collect();
    let root = peers.root().await;
    let (second, third) = ((root + 1) % 3, (root + 2) % 3);
    let stands = async || {
        let (_, head, _) = publish(peers.at(root), "/events/a", "begin", &HOST).await;
        field(&head, "hermes-copies") == Some("1") && field(&head, "hermes-subscribers") == Some("3")
    };
    hermes_testkit::poll::until("all subscribe, and a peer keeps a copy", stands).await;
    let mut confirmed: Vec<String> = Vec::new();
    let mut publish_some = async |node: &Node, from: usize| {
        for number in from..from + 10 {
            if publish(node, "/events/a", &number.to_string(), &HOST).await.0 == 204 {
                confirmed.push(number.to_string());
            }
        }
    };
    publish_some(peers.at(third), 0).await;
    drop(peers.nodes[root].take());
    publish_some(peers.at(third), 10).await;
    let after_it = peers.root().await;
    assert_ne!(after_it, root);
    // It returns with nothing, and takes over what the others have.
    peers.start(root).await;
    peers.at(root).metric_is("hermes_relay_roots", "", 1.0).await;
    peers.at(after_it).metric_is("hermes_relay_roots", "", 0.0).await;
    publish_some(peers.at(root), 20).await;
    assert!(confirmed.len() >= 29, "{confirmed:?}");
    let mut position = String::new();
    for index in [second, third] {
        let mut seen: Vec<String> = Vec::new();
        while seen.last() != confirmed.last() {
            let line = next(&mut subscribers[index]).await;
            match line["data"].as_str().unwrap() {
                "begin" => position = format!("last-event-id: {}", line["id"].as_str().unwrap()),
                text => seen.push(text.to_owned()),
            }
        }
        assert_eq!(seen, confirmed);
    }
    // Clients that resume from before both changes get all, wherever they ask.
    for node in peers.nodes.iter().flatten() {
        let arguments = [&json(&[])[..], &["--header", &position]].concat();
        let mut late = Subscriber::start(node, "/events/a", &arguments);
        for text in &confirmed {
            assert_eq!(next(&mut late).await["data"], **text, "{}", node.name());
        }
    }
}
