//! Which endpoint a session goes to: in turn, by chance, by load, by a header, and never to a sick one.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use hermes_testkit::{
    listener_client::ListenerClient,
    multiplex::Multiplex,
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    raw_http1::RawHttp1,
};
use http::Request;
use tokio::net::TcpStream;

use crate::http::lab::{Seen, next, overlay, seen};

/// An origin that says its number. `/healthz` is 200 while it is well; `held` requests wait at `gate` before.
struct Site {
    origin: Origin,
    well: Arc<AtomicBool>,
    requests: Arc<AtomicUsize>,
    hold: Arc<AtomicUsize>,
    gate: Arc<tokio::sync::Semaphore>,
}

impl Site {
    fn start(number: usize) -> Self {
        let well = Arc::new(AtomicBool::new(true));
        let requests = Arc::new(AtomicUsize::new(0));
        let hold = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(tokio::sync::Semaphore::new(0));
        let state = (well.clone(), requests.clone(), hold.clone(), gate.clone());
        let origin = scripted::h1(move |mut http1| {
            let (well, requests, hold, gate) = state.clone();
            async move {
                loop {
                    let head = http1.head().await?;
                    if head.target() == "/healthz" {
                        let status = if well.load(Ordering::SeqCst) { 200 } else { 500 };
                        http1.send(format!("HTTP/1.1 {status} Said\r\ncontent-length: 0\r\n\r\n")).await?;
                        continue;
                    }
                    requests.fetch_add(1, Ordering::SeqCst);
                    if !well.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                    let held = hold.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
                    if held.is_ok() {
                        gate.acquire().await.map_err(io::Error::other)?.forget();
                    }
                    http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{number}")).await?;
                }
            }
        });
        Self { origin: origin.unwrap(), well, requests, hold, gate }
    }

    fn address(&self) -> SocketAddr {
        self.origin.address()
    }
}

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: sites $ROUTE}
upstreams:
- {name: sites, protocol: h1, balance: $BALANCE, endpoints: [$ENDPOINTS] $MORE}
";

fn values(balance: &str, route: &str, more: &str, sites: &[&Site]) -> Vec<(&'static str, String)> {
    let endpoints: Vec<String> = sites.iter().map(|site| format!("'{}'", site.address())).collect();
    let values = [("BALANCE", balance), ("ROUTE", route), ("MORE", more)];
    let values = values.map(|(name, value)| (name, value.to_owned()));
    values.into_iter().chain([("ENDPOINTS", endpoints.join(", "))]).collect()
}

async fn node(overlay: &Overlay, balance: &str, route: &str, more: &str, sites: &[&Site]) -> Node {
    let draft = overlay.node("edge").document(DOCUMENT);
    let values = values(balance, route, more, sites);
    values.into_iter().fold(draft, |draft, (name, value)| draft.with(name, value)).start().await.unwrap()
}

async fn connect(node: &Node) -> Multiplex {
    ListenerClient::plain(node.address("in")).h2().await.unwrap()
}

/// The number of the site that answered.
async fn ask(connection: &mut Multiplex, user: &str) -> usize {
    let request = Request::get("http://WEB/").header("x-user", user).body(()).unwrap();
    let answer = connection.ask(request, b"").await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.text().parse().unwrap()
}

#[tokio::test]
async fn round_robin_goes_in_turn() {
    let sites = [Site::start(0), Site::start(1), Site::start(2)];
    let overlay = overlay();
    let node = node(&overlay, "round-robin", "", "", &sites.each_ref()).await;
    // Over several connections: the turn is the node's, not a connection's or a worker's.
    let mut connections = [connect(&node).await, connect(&node).await, connect(&node).await];
    let mut order = Vec::new();
    for number in 0..12 {
        order.push(ask(&mut connections[number % 2], "x").await);
    }
    let first = order[0];
    let wanted: Vec<usize> = (0..12).map(|number| (first + number) % 3).collect();
    assert_eq!(order, wanted);
    assert_eq!(ask(&mut connections[2], "x").await, first);
}

#[tokio::test]
async fn random_reaches_everyone() {
    let sites = [Site::start(0), Site::start(1), Site::start(2)];
    let overlay = overlay();
    let node = node(&overlay, "random", "", "", &sites.each_ref()).await;
    let mut connection = connect(&node).await;
    let mut counts = [0; 3];
    // That one of three is missed in 90 draws happens once in 10^15 runs.
    for _ in 0..90 {
        counts[ask(&mut connection, "x").await] += 1;
    }
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

#[tokio::test]
async fn least_request_avoids_the_busy() {
    let sites = [Site::start(0), Site::start(1)];
    let overlay = overlay();
    let node = node(&overlay, "least-request", "", "", &sites.each_ref()).await;
    sites[0].hold.store(16, Ordering::SeqCst);
    let mut held = tokio::task::JoinSet::new();
    // Until sixteen requests hang at the first site.
    while sites[0].hold.load(Ordering::SeqCst) > 0 {
        let mut connection = connect(&node).await;
        held.spawn(async move { connection.get("http://WEB/").await.map(|answer| answer.status) });
        let begun = sites[0].requests.load(Ordering::SeqCst) + sites[1].requests.load(Ordering::SeqCst);
        while sites[0].requests.load(Ordering::SeqCst) + sites[1].requests.load(Ordering::SeqCst) == begun {
            tokio::task::yield_now().await;
        }
    }
    let mut connection = connect(&node).await;
    let mut counts = [0; 2];
    for _ in 0..100 {
        counts[ask(&mut connection, "x").await] += 1;
    }
    // Two are drawn and the less busy one is taken: the busy one only where it was drawn twice, a quarter of the
    // times. That it gets half of a hundred happens once in 10^7 runs.
    assert!(counts[1] > counts[0], "{counts:?}");
    sites[0].gate.add_permits(16);
    while let Some(status) = held.join_next().await {
        assert_eq!(status.unwrap().unwrap(), 200);
    }
}

#[tokio::test]
async fn hashing_keeps_a_user_at_its_endpoint() {
    let sites = [Site::start(0), Site::start(1), Site::start(2)];
    let overlay = overlay();
    let balance = "{hash: {header: x-user}}";
    let mut node = node(&overlay, balance, "", "", &sites.each_ref()).await;
    let users: Vec<String> = (0..60).map(|number| format!("user-{number}")).collect();
    let mut at: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..2 {
        // A connection of its own each time: it may belong to another worker.
        let mut connection = connect(&node).await;
        for user in &users {
            let site = ask(&mut connection, user).await;
            assert_eq!(*at.entry(user).or_insert(site), site, "{user} was sent elsewhere");
        }
    }
    for number in 0..3 {
        let share = at.values().filter(|site| **site == number).count();
        assert!(share > 5, "site {number} has {share} of 60 users");
    }
    // Only the users of an endpoint that goes move.
    node.reload(DOCUMENT, &values(balance, "", "", &[&sites[0], &sites[1]])).await.unwrap();
    let mut connection = connect(&node).await;
    for user in &users {
        let site = ask(&mut connection, user).await;
        assert!(
            at[user.as_str()] == 2 || at[user.as_str()] == site,
            "{user} moved from {} to {site}",
            at[user.as_str()]
        );
    }
}

/// Waits until `upstream_healthy` of a site has this value.
async fn healthy(node: &Node, site: &Site, value: f64) {
    let endpoint = format!("endpoint=\"{}\"", site.address());
    let deadline = std::time::Instant::now() + EFFECT_TIMEOUT;
    while node.metric("hermes_upstream_healthy", &endpoint).await.unwrap() != value {
        assert!(std::time::Instant::now() < deadline, "{endpoint} does not become {value}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn active_checks_take_a_sick_endpoint_out_and_back_in() {
    let sites = [Site::start(0), Site::start(1)];
    let overlay = overlay();
    let health = ", health: {path: /healthz, interval: 100ms, unhealthy: 2, healthy: 2}";
    let node = node(&overlay, "round-robin", "", health, &sites.each_ref()).await;
    let mut connection = connect(&node).await;
    sites[0].well.store(false, Ordering::SeqCst);
    healthy(&node, &sites[0], 0.0).await;
    for _ in 0..10 {
        assert_eq!(ask(&mut connection, "x").await, 1);
    }
    sites[1].well.store(false, Ordering::SeqCst);
    healthy(&node, &sites[1], 0.0).await;
    let answer = connection.get("http://WEB/").await.unwrap();
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.header("proxy-status").unwrap().contains("destination_unavailable"), "{answer:?}");
    assert!(answer.header("retry-after").is_some(), "{answer:?}");
    for site in &sites {
        site.well.store(true, Ordering::SeqCst);
        healthy(&node, site, 1.0).await;
    }
    let answered: std::collections::BTreeSet<usize> =
        [ask(&mut connection, "x").await, ask(&mut connection, "x").await].into();
    assert_eq!(answered.len(), 2);
}

#[tokio::test]
async fn backups_stand_in_one_after_the_other_while_no_endpoint_is_up() {
    let sites = [Site::start(0), Site::start(1), Site::start(2)];
    let overlay = overlay();
    let health = "health: {path: /healthz, interval: 100ms, unhealthy: 2, healthy: 2}";
    let more = format!(", {health}, backup: ['{}', '{}']", sites[1].address(), sites[2].address());
    let node = node(&overlay, "round-robin", "", &more, &[&sites[0]]).await;
    let mut connection = connect(&node).await;
    let set = async |site: &Site, well: bool| {
        site.well.store(well, Ordering::SeqCst);
        healthy(&node, site, f64::from(u8::from(well))).await;
    };
    for (site, well, answers) in [(0, false, 1), (1, false, 2), (1, true, 1), (2, false, 1), (0, true, 0)] {
        set(&sites[site], well).await;
        for _ in 0..5 {
            assert_eq!(ask(&mut connection, "x").await, answers, "since site {site} is {well}");
        }
    }
    assert_eq!(node.metric("hermes_upstream_backups_total", "upstream=\"sites\"").await.unwrap(), 20.0);
}

#[tokio::test]
async fn a_request_without_a_connection_uses_a_backup_without_a_policy() {
    let (site, nobody) = (Site::start(1), hermes_testkit::port::reserve("127.0.0.1"));
    let overlay = overlay();
    let draft = overlay.node("edge").document(DOCUMENT).with("BALANCE", "random").with("ROUTE", "");
    let draft = draft.with("ENDPOINTS", format!("'{nobody}'"));
    let node = draft.with("MORE", format!(", backup: '{}'", site.address())).start().await.unwrap();
    let mut connection = connect(&node).await;
    // Nothing was sent: whatever the method, also once the endpoint rests.
    for _ in 0..8 {
        let request = Request::post("http://WEB/").body(()).unwrap();
        let answer = connection.ask(request, b"").await.unwrap();
        assert_eq!((answer.status, &*answer.text()), (200, "1"));
    }
    node.record(|record| record["attempts"] == 2).await;
    node.record(|record| record["attempts"].is_null()).await;
}

/// That nothing was sent is a word between nodes.
#[tokio::test]
async fn an_origin_does_not_say_that_nothing_was_sent() {
    let requests = Arc::new(AtomicUsize::new(0));
    let count = requests.clone();
    let origin = scripted::h1(move |mut http1| {
        let count = count.clone();
        async move {
            http1.head().await?;
            count.fetch_add(1, Ordering::SeqCst);
            http1.send("HTTP/1.1 502 No\r\nhermes-unsent: 1\r\ncontent-length: 0\r\n\r\n").await
        }
    });
    let (origin, site, overlay) = (origin.unwrap(), Site::start(1), overlay());
    let draft = overlay.node("edge").document(DOCUMENT).with("BALANCE", "random").with("ROUTE", "");
    let draft = draft.with("ENDPOINTS", format!("'{}'", origin.address()));
    let node = draft.with("MORE", format!(", backup: '{}'", site.address())).start().await.unwrap();
    let answer = connect(&node).await.get("http://WEB/").await.unwrap();
    assert_eq!((answer.status, answer.header("hermes-unsent")), (502, None));
    assert_eq!((requests.load(Ordering::SeqCst), site.requests.load(Ordering::SeqCst)), (1, 0));
}

/// The header of whoever speaks for himself: version 2, LOCAL, no addresses.
const PROXY_LOCAL: &[u8; 16] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

/// What connections begin with, and whether they then ask for `/healthz`.
fn behind_a_header() -> (Origin, Seen<(Vec<u8>, bool)>) {
    let (sender, begun) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let header = http1.exactly(PROXY_LOCAL.len()).await?;
            let asks = header == PROXY_LOCAL && http1.head().await.is_ok_and(|head| head.target() == "/healthz");
            sender.send((header, asks)).map_err(io::Error::other)?;
            if asks { http1.send("HTTP/1.1 204 No Content\r\n\r\n").await } else { Ok(()) }
        }
    });
    (origin.unwrap(), begun)
}

/// An endpoint that expects a PROXY header refuses a connection without one, or waits for it.
#[tokio::test]
async fn active_checks_begin_with_a_proxy_header_where_sessions_do() {
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: sites}
upstreams:
- {name: sites, protocol: h1, proxy-protocol: v2, endpoints: ['$SITE'], health: {interval: 100ms, unhealthy: 1 $PATH}}
";
    for (name, path, requests) in [("asks", ", path: /healthz", true), ("connects", "", false)] {
        let (origin, mut begun) = behind_a_header();
        let draft = overlay.node("edge").called(name).document(document).with("PATH", path);
        let node = draft.with("SITE", origin.address()).start().await.unwrap();
        for _ in 0..3 {
            let (header, asks) = next(&mut begun).await;
            assert_eq!((header.as_slice(), asks), (PROXY_LOCAL.as_slice(), requests), "{name}");
        }
        let endpoint = format!("endpoint=\"{}\"", origin.address());
        assert_eq!(node.metric("hermes_upstream_healthy", &endpoint).await.unwrap(), 1.0, "{name}");
    }
}

#[tokio::test]
async fn passive_watching_lets_a_failing_endpoint_rest() {
    let sites = [Site::start(0), Site::start(1)];
    let overlay = overlay();
    let retry = ", retry: {on: [reset], attempts: 2, backoff: {base: 1ms, max: 1ms}}";
    let outlier = ", outlier: {failures: 2, ejection-time: 1s}";
    let node = node(&overlay, "round-robin", retry, outlier, &sites.each_ref()).await;
    let mut connection = connect(&node).await;
    sites[0].well.store(false, Ordering::SeqCst);
    // Every request is answered all the same, and after two failures the first site is not asked any more.
    for _ in 0..20 {
        assert_eq!(ask(&mut connection, "x").await, 1);
    }
    // Two, and again two for each second that twenty requests may have taken.
    let requests = sites[0].requests.load(Ordering::SeqCst);
    assert!((2..10).contains(&requests), "a site that fails was asked {requests} times");
    // When it is well again, it is found out after its rest.
    sites[0].well.store(true, Ordering::SeqCst);
    let found = async {
        while ask(&mut connection, "x").await != 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(EFFECT_TIMEOUT, found).await.expect("it rests for ever");
}

/// An origin whose accept queue is full is still served by the connections that it has: whoever dials
/// takes one that comes free.
#[tokio::test]
async fn a_request_waiting_for_a_dial_takes_a_freed_connection() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let origin = listener.local_addr().unwrap();
    let overlay = overlay();
    // Each worker has connections of its own.
    let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin).start().await.unwrap();
    let listener_client = ListenerClient::plain(node.address("in"));
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(listener_client.h1().await.unwrap());
    }
    let request = "GET / HTTP/1.1\r\nhost: ORIGIN\r\n\r\n";
    clients[0].send(request).await.unwrap();
    let (only, _) = listener.accept().await.unwrap();
    let mut only = RawHttp1::new(only);
    // From now on nobody else gets in: connections fill the queue until one is not answered.
    let mut crowd = Vec::new();
    while let Ok(connected) = tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(origin)).await {
        crowd.push(connected.unwrap());
    }
    for client in &mut clients[1..] {
        client.send(request).await.unwrap();
    }
    for _ in 0..clients.len() {
        assert_eq!(only.head().await.unwrap().target(), "/");
        only.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    }
    for client in &mut clients {
        assert_eq!(client.head().await.unwrap().status(), 200);
    }
}
