//! How connections come to workers: past those that stand still, to those that have fewer, in the mode of the document.
//!
//! In: a node whose workers stand still when a request asks for it. Out: the delay of each new connection, and the connections of
//! each worker. As root, since the kernel loads programs for root alone.

mod sandbox;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Draft, Node, Overlay};
use hermes_testkit::poll;
use hermes_testkit::raw_http1::RawHttp1;
use hermes_testkit::skip::needs_root;
use hermes_testkit::work;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

const WORKERS: usize = 4;
/// Longer than a busy machine keeps a thread waiting, so that only a worker that was stopped counts as hung.
const DIRECTED: &str = "{mode: directed, hung-after: 200ms}";
/// How long a request stops its worker, and the delay of a client that waits for that worker.
const STOP: Duration = Duration::from_millis(1500);

const DOCUMENT: &str = "
workers: 4
dispatch: $MODE
drain: 2s
listeners:
- {name: web, bind: '127.0.0.1:$PORT', protocol: http}
routes:
- {name: all, match: {path: '/*'}, respond: {status: 200, body: ok}}
";

fn draft<'a>(overlay: &'a Overlay, mode: &str, port: u16) -> Draft<'a> {
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let draft = overlay.node("node").document(DOCUMENT).with("MODE", mode).with("PORT", port);
    draft.by_way_of(&["env", &preload])
}

async fn start(overlay: &Overlay, mode: &str) -> Node {
    draft(overlay, mode, 0).start().await.unwrap()
}

async fn change(node: &mut Node, mode: &str) {
    node.reload(DOCUMENT, &[("MODE", mode.to_owned()), ("PORT", "0".to_owned())]).await.unwrap();
}

/// Connects from an address of its own, since addresses are hashed onto workers.
async fn connect(to: SocketAddr, client: u8) -> RawHttp1<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::new(127, 0, 1, client), 0).into()).unwrap();
    RawHttp1::new(socket.connect(to).await.unwrap())
}

/// The time of a request over a connection.
async fn request(http1: &mut RawHttp1<TcpStream>, work: &str) -> Duration {
    let begun = Instant::now();
    http1.send(format!("GET / HTTP/1.1\r\nhost: node\r\nx-work: {work}\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(head.status(), 200);
    http1.body(&head).await.unwrap();
    begun.elapsed()
}

/// Opens new connections while a worker stands still, and returns how many waited for it.
async fn delayed(node: &Node, count: u8) -> usize {
    let to = node.address("web");
    let mut stopping = connect(to, 255).await;
    let mut stopped = JoinSet::new();
    stopped.spawn(async move { request(&mut stopping, &format!("block {}", STOP.as_micros())).await });
    poll::until("a worker stands still", || async { hung(node).await == 1 }).await;
    let mut clients = JoinSet::new();
    for client in 0..count {
        clients.spawn(async move { request(&mut connect(to, client).await, "none").await });
    }
    let times = clients.join_all().await;
    assert!(stopped.join_all().await[0] >= STOP);
    times.iter().filter(|time| **time > STOP / 3).count()
}

async fn status(node: &Node) -> serde_json::Value {
    serde_json::from_str(&node.ask("/workers").await.unwrap().1).unwrap()
}

async fn hung(node: &Node) -> usize {
    let status = status(node).await;
    let workers = status["workers"].as_array().unwrap();
    workers.iter().filter(|worker| worker["silence_ms"].as_u64().unwrap() >= 200).count()
}

async fn connections(node: &Node) -> Vec<u64> {
    let status = status(node).await;
    let workers = status["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker["connections"].as_u64().unwrap()).collect()
}

/// The open connections of each worker, once all are counted.
async fn counted(node: &Node, all: u64) -> Vec<u64> {
    poll::until("all connections are counted", || async { connections(node).await.iter().sum::<u64>() == all }).await;
    connections(node).await
}

#[tokio::test]
async fn no_new_connection_waits_for_a_worker_that_stands_still() {
    if !needs_root("no_new_connection_waits_for_a_worker_that_stands_still") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, DIRECTED).await;
    assert_eq!(delayed(&node, 40).await, 0, "{}", node.log());
    change(&mut node, "reuseport").await;
    // Each of them comes to that worker with a probability of 1/4.
    assert_ne!(delayed(&node, 80).await, 0, "the hash knows nothing of workers");
    change(&mut node, "exclusive").await;
    assert_eq!(delayed(&node, 40).await, 0, "idle workers accept");
}

#[tokio::test]
async fn connections_that_wait_for_a_worker_that_stands_still_are_accepted_by_others() {
    if !needs_root("connections_that_wait_for_a_worker_that_stands_still_are_accepted_by_others") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, "{mode: directed, hung-after: 100ms}").await;
    let to = node.address("web");
    let mut clients = JoinSet::new();
    let mut stopping = connect(to, 255).await;
    stopping.send(format!("GET / HTTP/1.1\r\nhost: node\r\nx-work: block {}\r\n\r\n", STOP.as_micros())).await.unwrap();
    // The worker does not count as hung yet, so that some of these come to it.
    for client in 0..60 {
        clients.spawn(async move { request(&mut connect(to, client).await, "none").await });
    }
    let times = clients.join_all().await;
    assert!(times.iter().all(|time| *time < STOP / 2), "{times:?}");
    node.metric_reaches("hermes_connections_relieved_total", "", 1.0).await;
    assert_eq!(stopping.head().await.unwrap().status(), 200, "what a worker has accepted stays with it");
    node.assert_sound();
}

#[tokio::test]
async fn lasting_connections_are_spread_as_the_mode_says() {
    if !needs_root("lasting_connections_are_spread_as_the_mode_says") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, "directed").await;
    let spread = async |node: &Node| {
        let mut open = Vec::new();
        for client in 0..200 {
            let mut http1 = connect(node.address("web"), client).await;
            request(&mut http1, "none").await;
            open.push(http1);
        }
        let each = counted(node, 200).await;
        drop(open);
        counted(node, 0).await;
        each
    };
    let directed = spread(&node).await;
    // One with more than the average and a half gets nothing; clients come one after the other.
    assert!(directed.iter().all(|count| (20..=80).contains(count)), "{directed:?}");
    change(&mut node, "roundrobin").await;
    assert_eq!(spread(&node).await, [50; WORKERS]);
    change(&mut node, "exclusive").await;
    let exclusive = spread(&node).await;
    let (least, most) = (exclusive.iter().min().unwrap(), exclusive.iter().max().unwrap());
    assert!(*most >= 2 * least, "the kernel prefers one of the idle workers: {exclusive:?}");
    node.assert_sound();
}

/// Connects anew for each request, until told to stop. Every request must have its response.
fn connect_forever(to: SocketAddr) -> (watch::Sender<bool>, JoinSet<usize>) {
    let (stop, stopped) = watch::channel(false);
    let mut clients = JoinSet::new();
    for client in 0..8 {
        let stopped = stopped.clone();
        clients.spawn(async move {
            let mut served = 0;
            while !*stopped.borrow() {
                request(&mut connect(to, client).await, "none").await;
                served += 1;
            }
            served
        });
    }
    (stop, clients)
}

#[tokio::test]
async fn a_successor_directs_connections_as_its_own_document_says() {
    if !needs_root("a_successor_directs_connections_as_its_own_document_says") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let host = Ipv4Addr::LOCALHOST;
    let (web, admin) = (hermes_testkit::port::reserve(host), hermes_testkit::port::reserve(host));
    let socket = overlay.dir().join("takeover.sock");
    let process = |name: &str, mode: &str| {
        let draft = draft(&overlay, mode, web.port()).called(name).admin(admin);
        draft.args(&["--takeover", socket.to_str().unwrap()]).start()
    };
    let first = process("first", DIRECTED).await.unwrap();
    let (stop, clients) = connect_forever(web);
    assert_eq!(delayed(&first, 40).await, 0);
    let second = process("second", DIRECTED).await.unwrap();
    poll::until("the first one parts", || async { first.log().contains("another process has the listeners") }).await;
    // The program of the first one is released while it parts.
    poll::until("the second one directs", || async { status(&second).await["dispatch"] == "directed" }).await;
    assert_eq!(delayed(&second, 40).await, 0, "{}", second.log());
    assert!(!second.log().contains("the kernel hashes"), "{}", second.log());
    let mut third = process("third", "reuseport").await.unwrap();
    poll::until("the second one parts", || async { second.log().contains("another process has the listeners") }).await;
    assert_ne!(delayed(&third, 80).await, 0, "the program of the second one has gone");
    stop.send(true).unwrap();
    assert!(clients.join_all().await.into_iter().sum::<usize>() > 100);
    assert!(first.ended().await.success() && second.ended().await.success());
    third.assert_sound();
}

#[tokio::test]
async fn no_connection_is_lost_while_modes_change() {
    if !needs_root("no_connection_is_lost_while_modes_change") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, "reuseport").await;
    let to = node.address("web");
    let (stop, clients) = connect_forever(to);
    for round in 0..5 {
        for mode in ["directed", "exclusive", "roundrobin", "reuseport"] {
            change(&mut node, mode).await;
            let status = status(&node).await;
            assert_eq!(status["dispatch"], mode, "round {round}");
        }
    }
    stop.send(true).unwrap();
    let served: usize = clients.join_all().await.into_iter().sum();
    assert!(served > 100, "{served} connections");
    node.assert_sound();
}

const OVERLOADED: &str = "
workers: 1
overload: {delay: {limit: 100ms, refuse: 1000, stop: 1000}}
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: low, match: {path: /low}, importance: low, respond: {status: 200, body: ok}}
- {name: high, importance: high, respond: {status: 200, body: ok}}
";

/// Requests over one connection, each of which takes the worker so many microseconds, until told to stop.
fn burn_forever(to: SocketAddr, clients: u8, micros: u32) -> (watch::Sender<bool>, JoinSet<()>) {
    let (stop, stopped) = watch::channel(false);
    let mut burning = JoinSet::new();
    for client in 0..clients {
        let stopped = stopped.clone();
        burning.spawn(async move {
            let mut http1 = connect(to, client).await;
            while !*stopped.borrow() {
                request(&mut http1, &format!("burn {micros}")).await;
            }
        });
    }
    (stop, burning)
}

#[tokio::test]
async fn a_worker_whose_work_waits_too_long_refuses_what_matters_least() {
    if !needs_root("a_worker_whose_work_waits_too_long_refuses_what_matters_least") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let mut node = overlay.node("node").document(OVERLOADED).by_way_of(&["env", &preload]).start().await.unwrap();
    let to = node.address("web");
    let low = async || {
        let mut http1 = connect(to, 200).await;
        http1.send("GET /low HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
        http1.head().await.unwrap().status()
    };
    assert_eq!(low().await, 200);
    // One request at a time waits for nobody, however long it takes.
    let (stop, burning) = burn_forever(to, 1, 60_000);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let shed = "signal=\"delay\",step=\"shed\"";
    assert!(node.metric("hermes_overload_workers", shed).await.unwrap_or_default() < 1.0, "{}", node.log());
    stop.send(true).unwrap();
    burning.join_all().await;
    let (stop, burning) = burn_forever(to, 10, 20_000);
    node.metric_reaches("hermes_overload_workers", shed, 1.0).await;
    assert_eq!(low().await, 503);
    assert!(status(&node).await["workers"][0]["delay_ms"].as_u64().unwrap() >= 100);
    stop.send(true).unwrap();
    burning.join_all().await;
    poll::until("the worker has time", || async { low().await == 200 }).await;
    node.assert_sound();
}

#[tokio::test]
async fn a_node_whose_workers_all_stand_still_is_not_ready() {
    if !needs_root("a_node_whose_workers_all_stand_still_is_not_ready") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let mut node = overlay.node("node").document(OVERLOADED).by_way_of(&["env", &preload]).start().await.unwrap();
    let mut http1 = connect(node.address("web"), 1).await;
    http1.send("GET / HTTP/1.1\r\nhost: node\r\nx-work: block 2500000\r\n\r\n").await.unwrap();
    poll::until("the operator learns of it", || async { node.ask("/readyz").await.unwrap().0 == 503 }).await;
    assert_eq!(http1.head().await.unwrap().status(), 200);
    poll::until("it is ready again", || async { node.ask("/readyz").await.unwrap().0 == 200 }).await;
    node.metric_reaches("hermes_standstills_total", "", 1.0).await;
    assert!(node.log().contains("all workers stood still"), "{}", node.log());
    node.assert_sound();
}

#[tokio::test]
async fn a_slow_worker_parts_with_connections() {
    if !needs_root("a_slow_worker_parts_with_connections") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let document = OVERLOADED.replace("workers: 1", "workers: 2\ndispatch: directed");
    let mut node = overlay.node("node").document(&document).by_way_of(&["env", &preload]).start().await.unwrap();
    let to = node.address("web");
    // Clients that ask for nothing spread over both workers. Those at one of them then ask for much.
    let mut open = Vec::new();
    for client in 0..24 {
        let mut http1 = connect(to, client).await;
        request(&mut http1, "none").await;
        let is_at_first =
            connections(&node).await[0] > open.iter().filter(|(_, is_at_first)| *is_at_first).count() as u64;
        open.push((http1, is_at_first));
    }
    let (stop, stopped) = watch::channel(false);
    let mut burning = JoinSet::new();
    let at_first: Vec<_> = open.into_iter().filter(|(_, is_at_first)| *is_at_first).collect();
    let count = at_first.len() as u64;
    for (mut http1, _) in at_first {
        let stopped = stopped.clone();
        burning.spawn(async move {
            let mut reconnected = 0;
            while !*stopped.borrow() {
                http1.send("GET / HTTP/1.1\r\nhost: node\r\nx-work: block 30000\r\n\r\n").await.unwrap();
                let head = http1.head().await.unwrap();
                assert_eq!(head.status(), 200, "no request is lost");
                http1.body(&head).await.unwrap();
                if head.header("connection").is_some_and(|value| value == "close") {
                    http1 = connect(to, 100 + reconnected % 100).await;
                    reconnected += 1;
                }
            }
        });
    }
    node.metric_reaches("hermes_connections_parted_total", "", 3.0).await;
    poll::until("both workers have their share", || async {
        let each = connections(&node).await;
        // Some may be connecting.
        each.iter().sum::<u64>() + 2 >= count && each[1] * 2 >= each[0]
    })
    .await;
    stop.send(true).unwrap();
    burning.join_all().await;
    node.assert_sound();
}
