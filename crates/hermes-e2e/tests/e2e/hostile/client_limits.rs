//! One client takes all connections, descriptors, tunnels or flows of a node.
//!
//! Meanwhile another client, an authenticated node and the admin endpoint get responses. The test prints the response
//! times; the target is a second, and a loaded machine may take longer.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Instant,
};

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME, open_h2},
    origin::{self, datagram::UdpEcho, scripted, stream},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    poll::until,
    raw_http1::RawHttp1,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UdpSocket},
    task::JoinSet,
};

use crate::hostile::lab::overlay;

const FLOODER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

const DOCUMENT: &str = "
workers: 2
limits: {$LIMITS}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: tls, bind: '127.0.0.1:0', protocol: http, tls: {client: optional}}
routes:
- {name: stalls, match: {path: /stalls}, upstream: stalls}
- {name: all, respond: {body: here}}
upstreams:
- {name: stalls, protocol: h1, endpoints: ['$STALLS']}
";

pub(crate) async fn connect(from: IpAddr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to).await
}

async fn get(from: IpAddr, to: SocketAddr) -> std::io::Result<u16> {
    let mut http1 = RawHttp1::new(connect(from, to).await?);
    http1.send("GET / HTTP/1.1\r\nHost: HERE\r\nConnection: close\r\n\r\n").await?;
    Ok(http1.head().await?.status())
}

/// Connections of one client, each of which sends the same bytes. A closed connection is opened again at once.
struct Flood(#[allow(dead_code, reason = "its drop ends the clients")] JoinSet<()>);

impl Flood {
    fn begin(from: IpAddr, to: SocketAddr, connections: usize, says: &'static str) -> Self {
        let mut all = JoinSet::new();
        for _ in 0..connections {
            all.spawn(async move {
                loop {
                    let Ok(mut stream) = connect(from, to).await else { continue };
                    let _ = stream.write_all(says.as_bytes()).await;
                    let mut buffer = [0; 512];
                    while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
                    tokio::task::yield_now().await;
                }
            });
        }
        Self(all)
    }
}

/// All other clients get responses, three times. Prints the slowest of each.
pub(crate) async fn others_are_served(what: &str, overlay: &Overlay, node: &Node) {
    let identity = overlay.authority().issue(&Subject::node("peer").with_dns(NODE_NAME)).unwrap();
    let certified = ListenerClient::tls(node.address("tls"), overlay.authority().pem(), Some(&identity));
    let mut slowest = [0; 3];
    for _ in 0..3 {
        let begun = Instant::now();
        let answered = get(OTHER, node.address("in")).await;
        assert_eq!(answered.unwrap_or_else(|error| panic!("{what}: a second client: {error}")), 200);
        slowest[0] = slowest[0].max(begun.elapsed().as_millis());
        let begun = Instant::now();
        let requests = async {
            let mut http1 = certified.h1().await?;
            http1.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await?;
            Ok::<_, std::io::Error>(http1.head().await?.status())
        };
        assert_eq!(requests.await.unwrap_or_else(|error| panic!("{what}: a certified node: {error}")), 200);
        slowest[1] = slowest[1].max(begun.elapsed().as_millis());
        let begun = Instant::now();
        assert_eq!(node.ask("/readyz").await.unwrap().0, 200, "{what}");
        slowest[2] = slowest[2].max(begun.elapsed().as_millis());
    }
    eprintln!("{what}: second client {} ms, certified node {} ms, /readyz {} ms", slowest[0], slowest[1], slowest[2]);
}

async fn node(overlay: &Overlay, limits: &str) -> (Node, origin::Origin) {
    let stalls = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
    let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(DOCUMENT).with("LIMITS", limits).with("STALLS", stalls.address());
    (draft.start().await.unwrap(), stalls)
}

/// Waits until the client holds as many entries as it may.
async fn is_full(node: &Node, least: f64) {
    until("a full table", async || node.metric("hermes_connections_open", "").await.unwrap() >= least).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_one_client_exclude_no_other() {
    let overlay = overlay();
    let (node, _stalls) = node(&overlay, "connections: 300").await;
    let says = [
        ("connections that say nothing", ""),
        ("connections between requests", "GET / HTTP/1.1\r\nHost: HERE\r\n\r\n"),
        ("heads that do not end", "GET / HTTP/1.1\r\nHost: HERE\r\n"),
        ("requests that wait", "GET /stalls HTTP/1.1\r\nHost: HERE\r\n\r\n"),
    ];
    for (what, says) in says {
        let flood = Flood::begin(FLOODER, node.address("in"), 400, says);
        is_full(&node, 255.0).await;
        others_are_served(what, &overlay, &node).await;
        drop(flood);
        // Requests that wait, the last ones, outlive their clients for as long as their origin may take.
        if !says.contains("stalls") {
            until("no connections", async || node.metric("hermes_connections_open", "").await.unwrap() == 0.0).await;
        }
    }
    assert!(node.metric("hermes_limit_hits_total", "connections").await.unwrap() > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_of_one_client_exclude_no_other() {
    let overlay = overlay();
    let (node, _stalls) = node(&overlay, "connections: 300").await;
    let _flood = Flood::begin(STRANGER, node.address("tls"), 400, "");
    is_full(&node, 300.0).await;
    others_are_served("handshakes that do not end", &overlay, &node).await;
}

/// All requests wait, each from another address: nothing is idle, and all clients have the same share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eighth_of_the_connections_is_for_authenticated_nodes() {
    let overlay = overlay();
    let (node, _stalls) = node(&overlay, "connections: 80").await;
    let mut waiting = Vec::new();
    for last in 1..=70 {
        let mut stream = connect(Ipv4Addr::new(127, 0, 1, last).into(), node.address("in")).await.unwrap();
        stream.write_all(b"GET /stalls HTTP/1.1\r\nHost: HERE\r\n\r\n").await.unwrap();
        waiting.push(stream);
    }
    until("requests", async || node.metric("hermes_sessions_open", "").await.unwrap() >= 70.0).await;
    assert!(get(OTHER, node.address("in")).await.is_err(), "the rest is not for strangers");
    let anonymous = ListenerClient::tls(node.address("tls"), overlay.authority().pem(), None);
    let requests = async {
        let mut http1 = anonymous.h1().await?;
        http1.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await?;
        http1.head().await
    };
    assert!(requests.await.is_err(), "it has authenticated nobody");
    let identity = overlay.authority().issue(&Subject::node("peer").with_dns(NODE_NAME)).unwrap();
    let certified = ListenerClient::tls(node.address("tls"), overlay.authority().pem(), Some(&identity));
    let mut peers = Vec::new();
    for _ in 0..10 {
        let mut http1 = certified.h1().await.unwrap();
        http1.send("GET /stalls HTTP/1.1\r\nHost: HERE\r\n\r\n").await.unwrap();
        peers.push(http1);
    }
    until("requests", async || node.metric("hermes_sessions_open", "").await.unwrap() >= 80.0).await;
}

const ONE_CONNECTION: &str = "
workers: 1
limits: {upstream-connections: 1, upstream-pending: 16, resume-pending: 16}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: retrieved, match: {path: /retrieved}, upstream: down, resume: {deadline: 1m}}
- {name: all, upstream: slow}
upstreams:
- {name: slow, protocol: h1, endpoints: ['$SLOW']}
- {name: down, protocol: h1, endpoints: ['127.0.0.1:1']}
";

/// The queue for upstream connections is full. A second client joins it all the same, and is served in its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_waiting_for_an_upstream_exclude_no_other() {
    let overlay = overlay();
    let (release, released) = tokio::sync::watch::channel(false);
    let slow = scripted::h1(move |mut http1| {
        let mut released = released.clone();
        async move {
            loop {
                http1.head().await?;
                let _ = released.wait_for(|released| *released).await;
                http1.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
            }
        }
    });
    let slow = slow.unwrap();
    let node = overlay.node("fort").document(ONE_CONNECTION).with("SLOW", slow.address()).start().await.unwrap();
    let hits = async || node.metric("hermes_limit_hits_total", "upstream-pending").await.unwrap_or_default();
    let flood = Flood::begin(FLOODER, node.address("in"), 40, "GET / HTTP/1.1\r\nHost: HERE\r\n\r\n");
    until("a full queue", async || hits().await > 0.0).await;
    let mut second = RawHttp1::new(connect(OTHER, node.address("in")).await.unwrap());
    second.send("GET / HTTP/1.1\r\nHost: HERE\r\n\r\n").await.unwrap();
    until("the second client's request", async || node.ask("/sessions").await.unwrap().1.contains(&OTHER.to_string()))
        .await;
    drop(flood);
    release.send(true).unwrap();
    assert_eq!(second.head().await.unwrap().status(), 200);
}

/// One client's requests take all entries of those that wait for another try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retried_requests_exclude_no_other() {
    let overlay = overlay();
    let node = overlay.node("fort").document(ONE_CONNECTION).with("SLOW", "127.0.0.1:1").start().await.unwrap();
    let hits = async || node.metric("hermes_limit_hits_total", "resume-pending").await.unwrap_or_default();
    let asks = "GET /retrieved HTTP/1.1\r\nHost: HERE\r\n\r\n";
    let flood = "GET /retrieved HTTP/1.1\r\nHost: HERE\r\nConnection: close\r\n\r\n";
    let _flood = Flood::begin(FLOODER, node.address("in"), 40, flood);
    until("a full table", async || hits().await > 0.0).await;
    let mut second = RawHttp1::new(connect(OTHER, node.address("in")).await.unwrap());
    second.send(asks).await.unwrap();
    let is_there = async || node.ask("/sessions").await.unwrap().1.contains(&OTHER.to_string());
    until("the second client's request", is_there).await;
    let before = hits().await;
    until("more of the flood", async || hits().await > before + 100.0).await;
    assert!(is_there().await, "it was given up");
}

const FEW: &[&str] = &["bash", "-c", "ulimit -n 256 && exec \"$@\"", "bash"];
const MORE: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: more, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {body: more}}
";

/// As many connections as the system allows descriptors, and more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_leave_descriptors_for_all_else() {
    let overlay = overlay();
    let stalls = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
    let draft = overlay.node("fort").identity(&Subject::node("fort").with_dns(NODE_NAME)).unwrap();
    let draft = draft.document(DOCUMENT).with("LIMITS", "").with("STALLS", stalls.address());
    let mut node = draft.by_way_of(FEW).start().await.unwrap();
    let _flood = Flood::begin(FLOODER, node.address("in"), 316, "GET / HTTP/1.1\r\nHost: HERE\r\n\r\n");
    is_full(&node, 100.0).await;
    others_are_served("few descriptors", &overlay, &node).await;
    assert_eq!(node.ask("/metrics").await.unwrap().0, 200);
    node.reload(MORE, &[]).await.unwrap();
    assert_eq!(get(OTHER, node.address("more")).await.unwrap(), 200);
    let complaints = node.log().matches("cannot accept").count();
    assert!(complaints <= 2, "{complaints} lines:\n{}", node.log());
}

#[tokio::test]
async fn a_reload_that_found_no_descriptors_is_retried() {
    let overlay = overlay();
    let (mut node, _stalls) = node(&overlay, "").await;
    let limited = |most: usize| {
        let most = format!("--nofile={most}:");
        let set = std::process::Command::new("prlimit").args(["--pid", &node.pid().to_string(), &most]).status();
        assert!(set.unwrap().success());
    };
    limited(node.descriptors().unwrap());
    node.replace(MORE, &[]).unwrap();
    node.says("for want of resources").await;
    limited(4096);
    // No event triggers the reload, only the retry.
    until("the new document", async || node.generation().await.unwrap() > 1).await;
    node.says("applied generation=2").await;
    node.assert_sound();
}

#[tokio::test]
async fn tunnels_of_one_connection_exclude_no_other() {
    let echo = stream::echo(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap()).unwrap();
    let overlay = overlay();
    let document = "
workers: 2
limits: {tunnels: 40}
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
";
    let node = overlay.node("fort").document(document).with("ECHO", echo.address()).start().await.unwrap();
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    let mut tunnels = Vec::new();
    for _ in 0..40 {
        let request = http::Request::connect("DB:1").body(()).unwrap();
        tunnels.push(open_h2(&mut connection, request).await.unwrap());
    }
    let more = http::Request::connect("DB:1").body(()).unwrap();
    let refused = open_h2(&mut connection, more).await.err().unwrap().to_string();
    assert!(refused.contains("503"), "its own stay: {refused}");
    // On whichever worker it arrives.
    let mut others = Vec::new();
    for number in 1..=10 {
        let begun = Instant::now();
        // Some attempts may come before the other worker has closed the entries that it owes.
        let mut http1 = loop {
            let mut http1 = RawHttp1::new(connect(OTHER, node.address("in")).await.unwrap());
            http1.send("CONNECT DB:1 HTTP/1.1\r\nHost: DB:1\r\n\r\n").await.unwrap();
            if http1.head().await.unwrap().status() == 200 {
                break http1;
            }
            assert!(begun.elapsed() < EFFECT_TIMEOUT, "tunnel {number}");
        };
        http1.send("hello").await.unwrap();
        assert_eq!(http1.exactly(5).await.unwrap(), b"hello", "after {} ms", begun.elapsed().as_millis());
        others.push(http1);
    }
    until("as many as there may be", async || node.metric("hermes_sessions_open", "").await.unwrap() <= 40.0).await;
    for other in &mut others {
        other.send("still").await.unwrap();
        assert_eq!(other.exactly(5).await.unwrap(), b"still");
    }
}

#[tokio::test]
async fn flows_of_one_address_exclude_no_other() {
    let echo = UdpEcho::start("127.0.0.1:0".parse().unwrap(), "").unwrap();
    let overlay = overlay();
    let document = "
workers: 2
limits: {udp-flows: 100}
listeners:
- {name: game, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:1'}
routes:
- {name: game, match: {kind: udp}, terminate: {udp: '$ECHO'}}
";
    let node = overlay.node("fort").document(document).with("ECHO", echo.address()).start().await.unwrap();
    let socket = async |from: IpAddr| {
        let socket = UdpSocket::bind((from, 0)).await.unwrap();
        socket.connect(node.address("game")).await.unwrap();
        socket
    };
    let answers = async |socket: &UdpSocket| {
        let deadline = Instant::now() + EFFECT_TIMEOUT;
        loop {
            socket.send(b"hello").await.unwrap();
            let mut room = [0; 16];
            let answer = tokio::time::timeout(std::time::Duration::from_millis(100), socket.recv(&mut room));
            if answer.await.is_ok_and(|received| received.is_ok()) {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
        }
    };
    // The flows keep sending, so that none is idle.
    let mut flood = JoinSet::new();
    for _ in 0..150 {
        let socket = socket(FLOODER).await;
        flood.spawn(async move {
            loop {
                let _ = socket.send(b"flood").await;
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        });
    }
    until("a full table", async || node.metric("hermes_limit_hits_total", "udp-flows").await.unwrap() > 0.0).await;
    let begun = Instant::now();
    let mut others = Vec::new();
    for _ in 0..10 {
        let socket = socket(OTHER).await;
        assert!(answers(&socket).await);
        others.push(socket);
    }
    eprintln!("ten flows of a second client: {} ms", begun.elapsed().as_millis());
    assert!(node.metric("hermes_sessions_open", "").await.unwrap() <= 113.0);
    for other in &others {
        assert!(answers(other).await, "those that are in stay");
    }
}

/// Each source is another client's, so that newcomers displace flows that are still being opened.
#[tokio::test]
async fn flows_of_forged_sources_do_not_outlive_their_entries() {
    let stalls = scripted::h1(|mut http1| async move { http1.to_end().await.map(drop) }).unwrap();
    let overlay = overlay();
    let document = "
workers: 1
limits: {udp-flows: 20}
listeners:
- {name: game, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:1'}
routes:
- {name: game, match: {kind: udp}, upstream: stalls}
upstreams:
- {name: stalls, protocol: h1, endpoints: ['$STALLS']}
";
    let node = overlay.node("fort").document(document).with("STALLS", stalls.address()).start().await.unwrap();
    for last in 0..200 {
        let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 1, last), 0)).await.unwrap();
        socket.send_to(b"hello", node.address("game")).await.unwrap();
    }
    until("newcomers displaced others", async || {
        node.metric("hermes_limit_hits_total", "udp-flows").await.unwrap() >= 180.0
    })
    .await;
    assert_eq!(node.metric("hermes_datagrams_dropped_total", "udp-flows").await.unwrap_or_default(), 0.0);
    until("as many as there may be", async || node.metric("hermes_sessions_open", "").await.unwrap() <= 20.0).await;
}
