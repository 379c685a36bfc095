//! Relays that share their channels: each channel has one of them as its root, and another one takes over when it goes.
//!
//! In: three nodes that are peers, nodes that are none, and curl at each. Out: what every subscriber gets when roots are
//! killed, return, and change by configuration.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::port;
use hermes_testkit::relay::{SUBSCRIBE, Subscriber, curl, field, publish};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PEER: &str = "
listeners:
- {name: web, bind: '$BIND', protocol: http}
- {name: nodes, bind: '$NODES', protocol: http, trust: [127.0.0.0/8]}
routes:
- name: events
  match: {path: '/*'}
  relay: {mode: reliable, peers: [$PEERS], root: $ROOT, queue: 16, history: {publications: 1000}, max-timeout: 1m, stall: 3s}
upstreams:
- {name: one, protocol: h2, overlay: true, endpoints: ['$ONE']}
- {name: two, protocol: h2, overlay: true, endpoints: ['$TWO']}
- {name: three, protocol: h2, overlay: true, endpoints: ['$THREE']}
";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// All clients name the same channel, whichever node they ask.
const HOST: [&str; 2] = ["--header", "host: chat.example"];
/// A node repeats a PUT whose connection breaks, and no POST.
const POST: [&str; 4] = ["--header", "host: chat.example", "--request", "POST"];

/// Three peers, each at an address of its own.
struct Peers {
    overlay: Overlay,
    /// For clients, and for nodes.
    addresses: [SocketAddr; 3],
    inner: [SocketAddr; 3],
    nodes: Vec<Option<Node>>,
    starts: usize,
    /// The peers in the documents, and the choice of a root.
    peers: String,
    root: &'static str,
}

impl Peers {
    async fn new() -> Self {
        Self::with("{node: one}, {node: two}, {node: three}", "hash").await
    }

    async fn with(peers: &str, root: &'static str) -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let addresses = [(); 3].map(|()| port::reserve(Ipv4Addr::LOCALHOST));
        let inner = [(); 3].map(|()| port::reserve(Ipv4Addr::LOCALHOST));
        let (nodes, peers) = (vec![None, None, None], peers.to_owned());
        let mut peers = Self { overlay, addresses, inner, nodes, starts: 0, peers, root };
        for index in 0..NAMES.len() {
            peers.start(index).await;
        }
        peers
    }

    fn document(&self, index: usize, peers: &str) -> String {
        let mut text = PEER.replace("$PEERS", peers).replace("$ROOT", self.root);
        text = text.replace("$BIND", &self.addresses[index].to_string());
        text = text.replace("$NODES", &self.inner[index].to_string());
        for (name, address) in ["$ONE", "$TWO", "$THREE"].into_iter().zip(self.inner) {
            text = text.replace(name, &address.to_string());
        }
        text
    }

    async fn start(&mut self, index: usize) {
        self.starts += 1;
        let process = format!("{}-{}", NAMES[index], self.starts);
        let document = self.document(index, &self.peers);
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
            let (status, head, _) = publish(peers.at(number % 3), &path, "x", &POST).await;
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
        let (_, head, _) = publish(peers.at(root), "/events/a", "begin", &POST).await;
        field(&head, "hermes-copies") == Some("1") && field(&head, "hermes-subscribers") == Some("3")
    };
    hermes_testkit::poll::until("all subscribe, and a peer keeps a copy", stands).await;
    let mut confirmed: Vec<String> = Vec::new();
    let mut publish_some = async |node: &Node, from: usize| {
        for number in from..from + 10 {
            if publish(node, "/events/a", &number.to_string(), &POST).await.0 == 204 {
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

/// The copy of a new channel begins after its first publication, and still confirms it.
#[tokio::test]
async fn the_first_publication_of_a_channel_is_confirmed_at_once() {
    let mut peers = Peers::with("{node: one}, {node: two}", "hash").await;
    for index in 0..3 {
        // A copy that confirms nothing is seen by the time alone.
        let document = peers.document(index, &peers.peers).replace("stall: 3s", "stall: 30s");
        peers.nodes[index].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    }
    for number in 0..6 {
        let path = format!("/events/{number}");
        let first = publish(peers.at(number % 3), &path, "x", &POST);
        let first = tokio::time::timeout(Duration::from_secs(3), first).await;
        let (status, head, _) = first.unwrap_or_else(|_| panic!("{path}: no copy has confirmed it"));
        assert_eq!((status, field(&head, "hermes-copies")), (204, Some("1")), "{path}: {head}");
    }
}

/// Strangers publish to names that nobody uses. Both peers still have room for channels.
#[tokio::test]
async fn invented_channels_leave_room_for_others() {
    let mut peers = Peers::with("{node: one}, {node: two}", "hash").await;
    for index in 0..3 {
        let document = peers.document(index, &peers.peers).replace("queue: 16", "channels: 40, queue: 16");
        peers.nodes[index].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    }
    for number in 0..120 {
        publish(peers.at(number % 2), &format!("/flood/{number}"), "x", &POST).await;
    }
    let briefly = [&SUBSCRIBE[..], &HOST, &["--header", "hermes-timeout: 1"]].concat();
    let begun = std::time::Instant::now();
    for index in [0, 1, 0, 1] {
        let mut attempt = 0;
        while curl(peers.at(index), &format!("/new/{index}-{attempt}"), &briefly).await.0 != 200 {
            attempt += 1;
            assert!(begun.elapsed() < Duration::from_secs(45), "no room after {:?}", begun.elapsed());
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Roots come and go while a publisher is at work.
#[tokio::test]
async fn a_channel_survives_restarts_under_load() {
    let mut peers = Peers::new().await;
    let mut subscribers: Vec<Subscriber> =
        peers.nodes.iter().flatten().map(|node| Subscriber::start(node, "/events/a", &json(&[]))).collect();
    let root = peers.root().await;
    let stands = async || {
        let (_, head, _) = publish(peers.at(root), "/events/a", "begin", &POST).await;
        field(&head, "hermes-copies") == Some("1") && field(&head, "hermes-subscribers") == Some("3")
    };
    hermes_testkit::poll::until("all subscribe, and a peer keeps a copy", stands).await;
    drop(peers.nodes[root].take());
    let second = peers.root().await;
    let third = (0..3).find(|index| ![root, second].contains(index)).unwrap();
    let publisher = peers.nodes[third].take().unwrap();
    let publishing = async {
        let mut confirmed = Vec::new();
        for number in 0..150 {
            // One without a response may have been published or not.
            if publish(&publisher, "/events/a", &number.to_string(), &POST).await.0 == 204 {
                confirmed.push(number.to_string());
            }
        }
        confirmed
    };
    let restarting = async {
        for _ in 0..3 {
            peers.start(root).await;
            peers.at(root).metric_is("hermes_relay_roots", "", 1.0).await;
            // The second one has the copy by then.
            let has_copy = async || {
                let (_, head, _) = publish(peers.at(second), "/events/a", "begin", &POST).await;
                field(&head, "hermes-copies") == Some("1")
            };
            hermes_testkit::poll::until("a peer keeps a copy", has_copy).await;
            drop(peers.nodes[root].take());
            peers.at(second).metric_is("hermes_relay_roots", "", 1.0).await;
        }
    };
    let (confirmed, ()) = tokio::join!(publishing, restarting);
    assert!(confirmed.len() > 100, "{}", confirmed.len());
    for index in [second, third] {
        let mut seen: Vec<u64> = Vec::new();
        while seen.last().map(u64::to_string).as_ref() != confirmed.last() {
            let line = next(&mut subscribers[index]).await;
            seen.extend(line["data"].as_str().unwrap().parse::<u64>());
        }
        assert!(seen.is_sorted_by(|before, after| before < after), "{seen:?}");
        let missing: Vec<&String> = confirmed.iter().filter(|text| !seen.contains(&text.parse().unwrap())).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

/// The nodes of a configuration decide alone where the roots are. Subscribers notice nothing but another epoch.
#[tokio::test]
async fn a_change_of_the_peers_moves_the_channels() {
    let mut peers = Peers::with("{node: one}, {node: two}", "hash").await;
    let mut subscribers = Vec::new();
    for number in 0..8 {
        let path = format!("/events/{number}");
        // The third node is no peer, but knows where the channels are.
        let subscriber = Subscriber::start(peers.at(2), &path, &json(&["--fail"]));
        let is_known = async || {
            let (_, head, _) = publish(peers.at(number % 3), &path, "begin", &POST).await;
            field(&head, "hermes-subscribers") == Some("1")
        };
        hermes_testkit::poll::until("the root knows the subscriber", is_known).await;
        subscribers.push((path, subscriber));
    }
    peers.at(2).metric_is("hermes_relay_roots", "", 0.0).await;
    peers.peers.push_str(", {node: three}");
    for index in [2, 0, 1] {
        let document = peers.document(index, &peers.peers);
        peers.nodes[index].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    }
    peers.at(2).metric_reaches("hermes_relay_roots", "", 1.0).await;
    let count = async || {
        let mut sum = 0.0;
        for node in peers.nodes.iter().flatten() {
            sum += node.metric("hermes_relay_roots", "").await.unwrap();
        }
        sum == 8.0
    };
    hermes_testkit::poll::until("each channel has one root", count).await;
    for (number, (path, subscriber)) in subscribers.iter_mut().enumerate() {
        let (status, head, _) = publish(peers.at((number + 1) % 3), path, "after", &POST).await;
        assert_eq!((status, field(&head, "hermes-subscribers")), (204, Some("1")), "{path}: {head}");
        while next(subscriber).await["data"] != "after" {}
    }
}

/// A client that is at no peer gets the one with the fewest channels.
#[tokio::test]
async fn the_least_loaded_peer_is_the_root_for_a_client_below_all() {
    let peers = Peers::with("{node: one}, {node: two}", "first").await;
    let mut subscribers = Vec::new();
    // The third node is no peer.
    for (at, name) in [(0, "near"), (2, "below")] {
        for number in 0..12 {
            let path = format!("/events/{name}-{number}");
            let subscriber = Subscriber::start(peers.at(at), &path, &json(&["--fail"]));
            let is_known = async || {
                let (_, head, _) = publish(peers.at(at), &path, "begin", &POST).await;
                field(&head, "hermes-subscribers") == Some("1")
            };
            hermes_testkit::poll::until("the root knows the subscriber", is_known).await;
            subscribers.push(subscriber);
        }
        if at == 0 {
            peers.at(0).metric_is("hermes_relay_roots", "", 12.0).await;
        }
    }
    // Each home knows about half of the channels, and evens out what it knows.
    peers.at(1).metric_reaches("hermes_relay_roots", "", 9.0).await;
}

/// Only one relay knows all members of a group, wherever they subscribe.
#[tokio::test]
async fn a_group_has_members_at_all_peers() {
    let peers = Peers::new().await;
    let members: Vec<Subscriber> = peers
        .nodes
        .iter()
        .flatten()
        .map(|node| Subscriber::start(node, "/events/jobs", &json(&["--header", "hermes-group: w"])))
        .collect();
    let job = [&POST[..], &["--header", "hermes-deliver: one"]].concat();
    let all = async || {
        let (_, head, _) = publish(peers.at(0), "/events/jobs", "count", &POST).await;
        field(&head, "hermes-subscribers") == Some("3")
    };
    hermes_testkit::poll::until("all members subscribe", all).await;
    for index in 0..3 {
        let (status, head, _) = publish(peers.at(index), "/events/jobs", &format!("job {index}"), &job).await;
        assert_eq!((status, field(&head, "hermes-delivered")), (204, Some("1")), "{head}");
    }
    let mut jobs = Vec::new();
    for mut member in members {
        loop {
            let text = next(&mut member).await["data"].as_str().unwrap().to_owned();
            if text != "count" {
                jobs.push(text);
                break;
            }
        }
    }
    jobs.sort();
    assert_eq!(jobs, ["job 0", "job 1", "job 2"], "each member gets one");
}

/// A client cannot take a channel away from its root.
#[tokio::test]
async fn only_peers_ask_for_a_copy() {
    let overlay = Overlay::new(hermes()).unwrap();
    let at = port::reserve(Ipv4Addr::LOCALHOST).to_string();
    let other = port::reserve(Ipv4Addr::LOCALHOST).to_string();
    let document = PEER.replace("$NODES", "127.0.0.1:0").replace("$PEERS", "{node: one}, {node: two}");
    let document = document.replace("$ROOT", "hash");
    let document =
        document.replace("$BIND", &at).replace("$ONE", &at).replace("$TWO", &other).replace("$THREE", &other);
    let node = overlay.node("one").document(&document).start().await.unwrap();
    let mut subscriber = Subscriber::new(&node, "/events/a", &json(&[]), 1).await;
    let forged = ["--header", "hermes-stand-by: 60", "--header", "last-event-id: 0000000000000001-0"];
    let (status, _, body) = curl(&node, "/events/a", &[&HOST[..], &forged].concat()).await;
    assert_eq!(status, 400, "the field of a client is ignored: {body}");
    let confirmed = ["--header", "hermes-confirmed: 0000000000000001-9"];
    let _claims = Subscriber::new(&node, "/events/a", &[&json(&[])[..], &confirmed].concat(), 2).await;
    // The other peer does not run, so there is no copy.
    let (status, head, _) = publish(&node, "/events/a", "x", &POST).await;
    assert_eq!((status, field(&head, "hermes-copies")), (204, None), "{head}");
    assert_eq!(next(&mut subscriber).await["data"], "x");
    node.metric_is("hermes_relay_roots", "", 1.0).await;
}

/// The peers with `root: first`.
async fn first() -> Peers {
    Peers::with("{node: one}, {node: two}, {node: three}", "first").await
}

/// Publishes at a node until the root has counted `subscribers`, and a peer has a copy.
async fn settled(node: &Node, path: &str, subscribers: &str) {
    let is_settled = async || {
        let (_, head, _) = publish(node, path, "begin", &POST).await;
        field(&head, "hermes-copies").is_some() && field(&head, "hermes-subscribers") == Some(subscribers)
    };
    hermes_testkit::poll::until("all subscribe, and a peer keeps a copy", is_settled).await;
}

async fn next_text(subscriber: &mut Subscriber) -> String {
    loop {
        let line = next(subscriber).await;
        if line["data"] != "begin" {
            return line["data"].as_str().unwrap().to_owned();
        }
    }
}

#[tokio::test]
async fn the_root_is_where_the_first_client_is_or_wishes() {
    let peers = first().await;
    for (index, node) in peers.nodes.iter().flatten().enumerate() {
        let path = format!("/events/{index}");
        let mut subscriber = Subscriber::start(node, &path, &json(&["--fail"]));
        settled(node, &path, "1").await;
        node.metric_is("hermes_relay_roots", "", 1.0).await;
        let mut others: Vec<Subscriber> =
            peers.nodes.iter().flatten().map(|node| Subscriber::start(node, &path, &json(&["--fail"]))).collect();
        settled(node, &path, "4").await;
        let (status, _, body) = publish(peers.at((index + 1) % 3), &path, "x", &POST).await;
        assert_eq!(status, 204, "{body}");
        assert_eq!(next_text(&mut subscriber).await, "x");
        for other in &mut others {
            assert_eq!(next_text(other).await, "x");
        }
        node.metric_is("hermes_relay_roots", "", 1.0).await;
    }
    let wish = ["--header", "hermes-root: two"];
    let _wishes = Subscriber::start(peers.at(0), "/events/wish", &json(&wish));
    peers.at(1).metric_is("hermes_relay_roots", "", 2.0).await;
    settled(peers.at(0), "/events/wish", "1").await;
    // It counts only for a channel without a root.
    let _late = Subscriber::start(peers.at(0), "/events/wish", &json(&["--header", "hermes-root: three"]));
    settled(peers.at(2), "/events/wish", "2").await;
    peers.at(2).metric_is("hermes_relay_roots", "", 1.0).await;
    let (status, _, body) = curl(peers.at(0), "/events/wish", &json(&["--header", "hermes-root: four"])).await;
    assert!(status == 400 && body.contains("four is no peer"), "{status} {body}");
}

/// All participants follow a root that moves, and nothing is lost.
#[tokio::test]
async fn a_client_moves_the_root() {
    let peers = first().await;
    let mut subscribers: Vec<Subscriber> = vec![Subscriber::start(peers.at(0), "/events/a", &json(&["--fail"]))];
    settled(peers.at(0), "/events/a", "1").await;
    for node in peers.nodes.iter().flatten().skip(1) {
        subscribers.push(Subscriber::start(node, "/events/a", &json(&["--fail"])));
    }
    settled(peers.at(0), "/events/a", "3").await;
    peers.at(0).metric_is("hermes_relay_roots", "", 1.0).await;
    let mut sent = Vec::new();
    for (round, (at, to)) in [(1, 2), (0, 1), (2, 0), (0, 2)].into_iter().enumerate() {
        let moves =
            [&HOST[..], &["--header", ["hermes-move: one", "hermes-move: two", "hermes-move: three"][to]]].concat();
        for (number, index) in [0, 1, 2, 0, 1, 2].into_iter().enumerate() {
            let text = format!("{round}.{number}");
            let (status, _, body) = match number {
                2 => loop {
                    let answer = publish(peers.at(at), "/events/a", &text, &moves).await;
                    // Once a second.
                    if answer.0 != 429 {
                        break answer;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                },
                _ => publish(peers.at(index), "/events/a", &text, &POST).await,
            };
            assert_eq!(status, 204, "{text}: {body}");
            sent.push(text);
        }
        peers.at(to).metric_is("hermes_relay_roots", "", 1.0).await;
        for index in (0..3).filter(|index| *index != to) {
            peers.at(index).metric_is("hermes_relay_roots", "", 0.0).await;
        }
        settled(peers.at(at), "/events/a", "3").await;
    }
    for subscriber in &mut subscribers {
        for text in &sent {
            assert_eq!(next_text(subscriber).await, *text);
        }
    }
    let moves = [&POST[..], &["--header", "hermes-move: four"]].concat();
    let (status, _, body) = publish(peers.at(0), "/events/a", "x", &moves).await;
    assert!(status == 400 && body.contains("four is no peer"), "{status} {body}");
}

/// The home of a channel knows its root. If the home goes, the root stays; if the root goes, the home has its copy.
#[tokio::test]
async fn a_channel_survives_its_root_and_its_home() {
    let mut peers = first().await;
    let mut numbers = 0_u32..;
    for killed in 0..3 {
        let path = format!("/events/{killed}");
        let (second, third) = ((killed + 1) % 3, (killed + 2) % 3);
        let mut subscriber = Subscriber::start(peers.at(second), &path, &json(&["--fail"]));
        settled(peers.at(second), &path, "1").await;
        let mut expected = Vec::new();
        // Those that are no root of this channel, and the root.
        for victim in [killed, third, second] {
            if victim == second {
                subscriber = Subscriber::start(peers.at(third), &path, &json(&["--fail"]));
                settled(peers.at(third), &path, "1").await;
                expected.clear();
            }
            drop(peers.nodes[victim].take());
            let at = if victim == third { second } else { third };
            for _ in 0..5 {
                let text = numbers.next().unwrap().to_string();
                if publish(peers.at(at), &path, &text, &POST).await.0 == 204 {
                    expected.push(text);
                }
            }
            assert!(expected.len() >= 4, "{expected:?}");
            peers.start(victim).await;
            settled(peers.at(victim), &path, "1").await;
        }
        for text in &expected {
            assert_eq!(next_text(&mut subscriber).await, *text, "{path}");
        }
    }
}

/// Clients may be sent to the root, and nodes are not.
#[tokio::test]
async fn clients_are_redirected_to_the_root() {
    let mut peers = first().await;
    let url = |index: usize| format!("http://{}", peers.addresses[index]);
    let list = format!(
        "{{node: one, url: '{}'}}, {{node: two, url: '{}'}}, {{node: three, url: '{}'}}",
        url(0),
        url(1),
        url(2)
    );
    peers.peers = list.clone();
    for index in 0..3 {
        let document = peers.document(index, &list);
        peers.nodes[index].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    }
    let follow = json(&["--location-trusted", "--fail"]);
    let mut subscriber = Subscriber::start(peers.at(1), "/events/a", &follow);
    peers.at(1).metric_is("hermes_relay_roots", "", 1.0).await;
    let (status, head, _) = publish(peers.at(0), "/events/a", "lost", &POST).await;
    assert_eq!(status, 307, "{head}");
    assert_eq!(field(&head, "location"), Some(&*format!("http://{}/events/a", peers.addresses[1])));
    // The content is not sent in vain.
    let mut stream = TcpStream::connect(peers.addresses[0]).await.unwrap();
    let request = b"PUT /events/a HTTP/1.1\r\nhost: chat.example\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 307");
    let follows = [&HOST[..], &["--location-trusted"]].concat();
    let (_, head, _) = publish(peers.at(0), "/events/a", "x", &follows).await;
    assert!(head.contains("307"), "{head}");
    assert_eq!(next_text(&mut subscriber).await, "x");
    // A client that takes over the host of the location, as browsers do, means the same channel.
    let (_, head, _) = publish(peers.at(0), "/events/a", "lost", &["--location"]).await;
    assert!(head.contains("hermes-subscribers: 0"), "another channel: {head}");
    for index in 0..3 {
        let document = peers.document(index, &list).replace("peers: [", "authority: chat.example, peers: [");
        assert!(document.contains("authority: chat.example"), "{document}");
        peers.nodes[index].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    }
    let (_, head, rest) = publish(peers.at(0), "/events/a", "y", &["--location"]).await;
    assert!(head.contains("307") && rest.contains("hermes-subscribers: 1"), "{head}\n{rest}");
    assert_eq!(next_text(&mut subscriber).await, "y");
    // A route that denies the channel's own authority denies that of a peer, too.
    let denied = "routes:\n- {name: no, match: {method: PUT, authority: chat.example}, respond: {status: 403}}";
    let document = peers.document(1, &list).replace("peers: [", "authority: chat.example, peers: [");
    let document = document.replace("routes:", denied);
    peers.nodes[1].as_mut().unwrap().reload(&document, &[]).await.unwrap();
    for host in [&HOST[..], &[]] {
        assert_eq!(publish(peers.at(1), "/events/a", "no", host).await.0, 403, "{host:?}");
    }
}
