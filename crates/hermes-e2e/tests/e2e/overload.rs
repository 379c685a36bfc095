//! Overload: what a node does when memory or file descriptors run short, and that it does it no longer afterwards.
//!
//! In: a node whose limits are below what it uses. Out: who is refused, who waits, and who is served.

use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::poll;
use hermes_testkit::raw_http1::RawHttp1;
use tokio::net::TcpStream;
use tokio::time::timeout;

const DOCUMENT: &str = "
workers: 2
overload: $OVERLOAD
listeners:
- {name: web, bind: '127.0.0.1:$PORT', protocol: http}
routes:
- {name: low, match: {path: /low}, importance: low, respond: {status: 200, body: ok}}
- {name: high, match: {path: /high}, importance: high, respond: {status: 200, body: ok}}
- {name: rest, respond: {status: 200, body: ok}}
";
/// So little memory that each node uses more than these steps allow.
const TOO_LITTLE: &str = "limit: 16MiB, shrink: 1, shed: 1";

async fn start(overlay: &Overlay, settings: &str) -> Node {
    overlay.node("node").document(DOCUMENT).with("OVERLOAD", settings).with("PORT", 0).start().await.unwrap()
}

async fn change(node: &mut Node, settings: &str) {
    node.reload(DOCUMENT, &[("OVERLOAD", settings.to_owned()), ("PORT", "0".to_owned())]).await.unwrap();
}

async fn connect(node: &Node) -> RawHttp1<TcpStream> {
    RawHttp1::new(TcpStream::connect(node.address("web")).await.unwrap())
}

/// The status of a request on a connection of its own, and what the response asks the client to do.
async fn request(node: &Node, path: &str, fields: &str) -> (u16, Option<String>) {
    let mut http1 = connect(node).await;
    http1.send(format!("GET {path} HTTP/1.1\r\nhost: node\r\n{fields}\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), head.header("retry-after"))
}

async fn statuses(node: &Node) -> [u16; 4] {
    let background = "priority: u=7\r\n";
    let requests = [("/low", ""), ("/", background), ("/", ""), ("/high", background)];
    let mut statuses = [0; 4];
    for ((path, fields), status) in requests.into_iter().zip(&mut statuses) {
        *status = request(node, path, fields).await.0;
    }
    statuses
}

async fn workers_that(node: &Node, signal: &str, step: &str) -> f64 {
    let labels = format!("signal=\"{signal}\",step=\"{step}\"");
    node.metric("hermes_overload_workers", &labels).await.unwrap_or_default()
}

#[tokio::test]
async fn sessions_are_refused_in_the_order_of_their_importance() {
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, "{}").await;
    assert_eq!(statuses(&node).await, [200; 4]);
    change(&mut node, &format!("{{memory: {{{TOO_LITTLE}, refuse: 1, stop: 1000}}}}")).await;
    poll::until("both workers refuse", || async { workers_that(&node, "memory", "refuse").await == 2.0 }).await;
    assert_eq!(statuses(&node).await, [503, 503, 503, 200]);
    assert_eq!(request(&node, "/", "").await, (503, Some("1".to_owned())), "the client learns when to try again");
    let mut refused = connect(&node).await;
    refused.send("GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
    let why = refused.head().await.unwrap().header("proxy-status").unwrap();
    assert!(why.contains("this node is overloaded"), "no limit of the document was reached: {why}");
    assert!(node.metric("hermes_limit_hits_total", "limit=\"overload\"").await.unwrap() >= 4.0);
    change(&mut node, &format!("{{memory: {{{TOO_LITTLE}, refuse: 1000, stop: 1000}}}}")).await;
    poll::until("no worker refuses all", || async { workers_that(&node, "memory", "refuse").await == 0.0 }).await;
    assert_eq!(statuses(&node).await, [503, 503, 200, 200]);
    change(&mut node, "{}").await;
    poll::until("no worker sheds", || async { workers_that(&node, "memory", "shed").await == 0.0 }).await;
    assert_eq!(statuses(&node).await, [200; 4]);
    let log = node.log().to_string();
    assert!(log.contains("a step begins") && log.contains("a step ends"), "{log}");
}

#[tokio::test]
async fn connections_wait_while_none_is_accepted_and_none_is_lost() {
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = start(&overlay, &format!("{{memory: {{{TOO_LITTLE}, refuse: 1000, stop: 1}}}}")).await;
    poll::until("both workers stop", || async { workers_that(&node, "memory", "stop").await == 2.0 }).await;
    let mut waiting = connect(&node).await;
    waiting.send("GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
    assert!(timeout(Duration::from_millis(500), waiting.head()).await.is_err(), "it waits in the kernel");
    assert_eq!(node.ask("/healthz").await.unwrap().0, 200, "the operator is served");
    assert_eq!(node.ask("/readyz").await.unwrap().0, 503, "and learns of it");
    change(&mut node, "{}").await;
    assert_eq!(waiting.head().await.unwrap().status(), 200);
}

#[tokio::test]
async fn idle_connections_close_before_descriptors_run_out() {
    const IDLE: usize = 150;
    let overlay = Overlay::new(hermes()).unwrap();
    // Steps beyond `shrink` would refuse what this test needs.
    let node = start(&overlay, "{descriptors: {limit: 200, shed: 1000, refuse: 1000, stop: 1000}}").await;
    let mut idle = Vec::new();
    for _ in 0..IDLE {
        let mut http1 = connect(&node).await;
        http1.send("GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        http1.body(&head).await.unwrap();
        idle.push(http1);
    }
    // The step ends as soon as enough have closed.
    poll::until("idle connections close", || async {
        node.metric("hermes_connections_open", "").await.is_ok_and(|open| open < (IDLE / 2) as f64)
    })
    .await;
    poll::until("that was enough", || async { workers_that(&node, "descriptors", "shrink").await == 0.0 }).await;
    assert_eq!(request(&node, "/", "").await.0, 200);
}
