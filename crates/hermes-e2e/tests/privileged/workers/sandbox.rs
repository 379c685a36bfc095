//! The sandbox: a listener whose requests hold up workers gets workers of its own.
//!
//! In: two listeners of a node, and requests at one of them that stop its worker. Out: the workers to which the new connections of each
//! listener come.

use super::*;

const DOCUMENT: &str = "
workers: 4
dispatch: $MODE
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
- {name: slow, bind: '127.0.0.1:0', protocol: http, connections: 100}
routes:
- {name: all, match: {path: '/*'}, respond: {status: 200, body: ok}}
";
const SANDBOX: &str = "{mode: directed, hung-after: 200ms, sandbox-workers: 1, sandbox-after: 1s}";

async fn start(overlay: &Overlay) -> Node {
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let draft = overlay.node("node").document(DOCUMENT).with("MODE", SANDBOX);
    draft.by_way_of(&["env", &preload]).start().await.unwrap()
}

async fn confined(node: &Node) -> Vec<String> {
    serde_json::from_value(status(node).await["confined"].clone()).unwrap()
}

/// Opens connections to a listener, and returns how many came to each worker. They close afterwards.
async fn spread(node: &Node, listener: &str, count: u8) -> Vec<u64> {
    let before = connections(node).await;
    let mut open = Vec::new();
    for client in 0..count {
        let mut http1 = connect(node.address(listener), client).await;
        request(&mut http1, "none").await;
        open.push(http1);
    }
    let all = before.iter().sum::<u64>() + u64::from(count);
    let after = counted(node, all).await;
    drop(open);
    counted(node, all - u64::from(count)).await;
    after.iter().zip(before).map(|(after, before)| after - before).collect()
}

#[tokio::test]
async fn a_listener_that_holds_up_workers_is_served_by_others_alone() {
    if !needs_root("a_listener_that_holds_up_workers_is_served_by_others_alone") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay).await;
    let (web, slow) = (node.address("web"), node.address("slow"));
    // Nobody is confined: nothing comes to the sandbox.
    assert_eq!(spread(&node, "web", 30).await[3], 0);
    assert_eq!(spread(&node, "slow", 30).await[3], 0);
    let mut lasting = connect(slow, 1).await;
    for _ in 0..3 {
        request(&mut lasting, "block 400000").await;
    }
    poll::until("the listener is confined", || async { confined(&node).await == ["slow"] }).await;
    poll::until("its clients part with the other workers", || async { connections(&node).await == [0; WORKERS] }).await;
    assert_eq!(spread(&node, "slow", 30).await, [0, 0, 0, 30]);
    assert_eq!(spread(&node, "web", 30).await[3], 0);
    assert!(node.log().contains("a listener is confined"), "{}", node.log());
    node.metric_reaches("hermes_listener_confined", "listener=\"slow\"", 1.0).await;
    // Its worker stands still: its clients wait, and those of the other listener do not.
    let mut stopping = JoinSet::new();
    stopping.spawn(async move { request(&mut connect(slow, 1).await, &format!("block {}", STOP.as_micros())).await });
    poll::until("a worker stands still", || async { hung(&node).await == 1 }).await;
    let mut clients = JoinSet::new();
    for client in 0..20 {
        let to = if client % 2 == 0 { web } else { slow };
        clients.spawn(async move { (to == web, request(&mut connect(to, client).await, "none").await) });
    }
    for (is_web, time) in clients.join_all().await {
        // The others accept nothing for the sandbox.
        assert_eq!(is_web, time < STOP / 3, "{time:?}");
    }
    stopping.join_all().await;
    // Without a sandbox, all workers serve all listeners.
    node.reload(DOCUMENT, &[("MODE", DIRECTED.to_owned())]).await.unwrap();
    assert!(confined(&node).await.is_empty());
    assert!(spread(&node, "slow", 60).await.iter().all(|count| *count > 0));
    node.assert_sound();
}

#[tokio::test]
async fn a_flooded_listener_is_confined_and_others_keep_their_room() {
    if !needs_root("a_flooded_listener_is_confined_and_others_keep_their_room") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay).await;
    let mut client = connect(node.address("web"), 1).await;
    request(&mut client, "none").await;
    // Connections that never ask: each flooder has its own address.
    let mut flood = Vec::new();
    for number in 0..250 {
        flood.push(connect(node.address("slow"), number).await);
    }
    node.metric_reaches("hermes_limit_hits_total", "limit=\"listener-connections\"", 1.0).await;
    poll::until("the listener is confined", || async { confined(&node).await == ["slow"] }).await;
    poll::until("the listener keeps to its bound", || async { connections(&node).await.iter().sum::<u64>() <= 101 })
        .await;
    request(&mut client, "none").await;
    drop(flood);
    counted(&node, 1).await;
    assert_eq!(spread(&node, "web", 30).await[3], 0);
    node.assert_sound();
}

#[tokio::test]
async fn a_successor_confines_listeners_too() {
    if !needs_root("a_successor_confines_listeners_too") {
        return;
    }
    let overlay = Overlay::new(hermes()).unwrap();
    let host = Ipv4Addr::LOCALHOST;
    let reserved = ["web", "slow", "admin"].map(|_| hermes_testkit::port::reserve(host));
    let [web, slow, admin] = reserved;
    let socket = overlay.dir().join("takeover.sock");
    let library = work::library(overlay.dir()).unwrap();
    let preload = format!("LD_PRELOAD={}", library.display());
    let document = DOCUMENT.replacen("127.0.0.1:0", &web.to_string(), 1).replacen("127.0.0.1:0", &slow.to_string(), 1);
    let process = |name: &str| {
        let draft = overlay.node("node").document(&document).with("MODE", SANDBOX).called(name).admin(admin);
        draft.by_way_of(&["env", &preload]).args(&["--takeover", socket.to_str().unwrap()]).start()
    };
    let first = process("first").await.unwrap();
    let mut second = process("second").await.unwrap();
    poll::until("the first one parts", || async { first.log().contains("another process has the listeners") }).await;
    poll::until("the second one directs", || async { status(&second).await["dispatch"] == "directed" }).await;
    for _ in 0..3 {
        request(&mut connect(slow, 1).await, "block 400000").await;
    }
    poll::until("the listener is confined", || async { confined(&second).await == ["slow"] }).await;
    poll::until("all clients are gone", || async { connections(&second).await == [0; WORKERS] }).await;
    assert_eq!(spread(&second, "slow", 30).await, [0, 0, 0, 30]);
    assert!(first.ended().await.success());
    second.assert_sound();
}
