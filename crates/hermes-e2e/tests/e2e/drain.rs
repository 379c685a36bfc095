//! SIGTERM: nothing new, what runs may finish within `drain`, and the process ends with status 0.

use hermes_testkit::binary::hermes;
use std::{
    net::SocketAddr,
    process::{ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hermes_testkit::{
    origin::{self, Origin, services::Services},
    overlay::{Node, Overlay},
    poll::until,
    raw_http1::{RawHttp1, SILENCE},
    traffic::Traffic,
};
use nix::sys::signal::Signal;
use tokio::{
    net::{TcpStream, UdpSocket},
    sync::watch,
    task::JoinSet,
};

const DOCUMENT: &str = "
workers: 1
drain: $DRAIN
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1'}
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:1'}
routes:
- {name: web, match: {authority: APP}, upstream: web}
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: video, match: {kind: udp}, terminate: {udp: '$UDP'}, timeout: {idle: 2s}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

struct Fixture {
    overlay: Overlay,
    services: Services,
}

impl Fixture {
    fn new() -> Self {
        Self { overlay: Overlay::new(hermes()).unwrap(), services: Services::start().unwrap() }
    }

    async fn start(&self, drain: &str) -> Node {
        let draft = self.overlay.node("near").document(DOCUMENT).with("DRAIN", drain);
        self.services.fill(draft).start().await.unwrap()
    }
}

async fn echoes(tunnel: &mut RawHttp1<TcpStream>, words: &[u8]) -> bool {
    tunnel.send(words).await.is_ok() && tunnel.exactly(words.len()).await.is_ok_and(|back| back == words)
}

async fn connect(to: SocketAddr) -> RawHttp1<TcpStream> {
    let mut http1 = RawHttp1::connect(to).await.unwrap();
    http1.send("CONNECT DB:1 HTTP/1.1\r\nhost: DB:1\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    http1
}

/// Its admin endpoint says that it takes nothing any more.
async fn is_draining(node: &Node) {
    until("/readyz turns 503", || async { matches!(node.ask("/readyz").await, Ok((503, _))) }).await;
    assert_eq!(node.ask("/healthz").await.unwrap().0, 200, "it lives as long as it drains");
}

/// A slow response that has begun.
async fn download(to: SocketAddr) -> RawHttp1<TcpStream> {
    let mut http1 = RawHttp1::connect(to).await.unwrap();
    http1.send("GET /drip/50/100/20 HTTP/1.1\r\nhost: APP\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(http1.chunk().await.unwrap().unwrap().len(), 100);
    http1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_active_sessions_and_accepts_no_new_ones() {
    let fixture = Fixture::new();
    let node = fixture.start("60s").await;
    let apps = node.address("apps");
    let mut download = download(apps).await;
    let mut upload = RawHttp1::connect(apps).await.unwrap();
    upload.send("POST /upload HTTP/1.1\r\nhost: APP\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
    upload.send_chunk(b"first ").await.unwrap();
    let mut fresh = RawHttp1::connect(apps).await.unwrap();
    let mut tunnel = connect(apps).await;
    let mut raw = RawHttp1::connect(node.address("db")).await.unwrap();
    assert!(echoes(&mut tunnel, b"before").await && echoes(&mut raw, b"before").await);
    let flow = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    flow.connect(node.address("video")).await.unwrap();
    assert!(talks(&flow).await);
    let (sender, connection) = h2::client::handshake(TcpStream::connect(apps).await.unwrap()).await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    node.metric_reaches("hermes_connections_open", "", 6.0).await;

    node.signal(Signal::SIGTERM).unwrap();
    is_draining(&node).await;
    // The only worker drains all connections of a listener in one step: GOAWAY on one shows that all are draining.
    until("GOAWAY", || async { sender.clone().ready().await.is_err() }).await;
    for listener in ["apps", "db"] {
        let address = node.address(listener);
        until("closed for new connections", || async { TcpStream::connect(address).await.is_err() }).await;
    }
    // A request on a connection from before the drain: answered, with the announcement that it was the last one.
    fresh.send("GET / HTTP/1.1\r\nhost: APP\r\n\r\n").await.unwrap();
    let head = fresh.head().await.unwrap();
    assert_eq!((head.status(), head.header("connection").as_deref()), (200, Some("close")));
    assert_eq!(fresh.body(&head).await.unwrap().text(), "web");
    assert!(fresh.to_end().await.unwrap().is_empty());

    upload.send_chunk(b"second").await.unwrap();
    upload.send("0\r\n\r\n").await.unwrap();
    let head = upload.head().await.unwrap();
    assert!(upload.body(&head).await.unwrap().text().contains("\"bytes\":12"));
    let mut chunks = 1;
    while download.chunk().await.unwrap().is_some() {
        chunks += 1;
    }
    assert_eq!(chunks, 50);
    assert!(echoes(&mut tunnel, b"during").await && echoes(&mut raw, b"during").await);
    assert!(talks(&flow).await, "a flow goes on without its listener");
    drop((tunnel, raw));
    let log = node.stderr();
    assert!(node.ended().await.success());
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("stopped") && !log.contains("drain timeout; closed active sessions"), "{log}");
}

async fn talks(flow: &UdpSocket) -> bool {
    flow.send(b"words").await.unwrap();
    let mut room = [0; 16];
    let received = tokio::time::timeout(SILENCE, flow.recv(&mut room)).await;
    received.is_ok_and(|length| &room[..length.unwrap()] == b"words")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_sends_goaway_on_h2_and_its_streams_finish() {
    let fixture = Fixture::new();
    let node = fixture.start("60s").await;
    let tcp = TcpStream::connect(node.address("apps")).await.unwrap();
    let (sender, connection) = h2::client::handshake(tcp).await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let ask = |path: &str| ::http::Request::get(format!("http://app{path}")).body(()).unwrap();
    let (response, _) = sender.send_request(ask("/drip/50/100/20"), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    let mut bytes = body.data().await.unwrap().unwrap().len();

    node.signal(Signal::SIGTERM).unwrap();
    is_draining(&node).await;
    until("GOAWAY", || async { sender.clone().ready().await.is_err() }).await;
    while let Some(data) = body.data().await {
        let length = data.unwrap().len();
        bytes += length;
        body.flow_control().release_capacity(length).unwrap();
    }
    assert_eq!(bytes, 5000);
    driver.join_next().await.unwrap().unwrap().expect("an orderly end: GOAWAY without an error");
    assert!(node.ended().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_closed_at_the_drain_timeout() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let fixture = Fixture::new();
        let node = fixture.start("300ms").await;
        let mut tunnel = connect(node.address("apps")).await;
        assert!(echoes(&mut tunnel, b"before").await);
        let records = node.stdout();
        let log = node.stderr();
        node.signal(signal).unwrap();
        assert!(tunnel.is_ended().await, "the tunnel goes on");
        assert!(node.ended().await.success());
        let log = std::fs::read_to_string(log).unwrap();
        assert!(log.contains("drain timeout; closed active sessions sessions=1\n"), "{log}");
        let records = std::fs::read_to_string(records).unwrap();
        let record: serde_json::Value = serde_json::from_str(records.lines().next().unwrap()).unwrap();
        assert_eq!((record["authority"].as_str(), record["received"].as_u64()), (Some("db:1"), Some(6)), "{record}");
        assert_eq!(record["error"], "proxy_internal_response", "{record}");
        assert!(record["reason"].as_str().unwrap().contains("shutting down"), "{record}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_it_at_once() {
    let fixture = Fixture::new();
    let node = fixture.start("1h").await;
    let mut tunnel = connect(node.address("apps")).await;
    node.signal(Signal::SIGTERM).unwrap();
    is_draining(&node).await;
    assert!(echoes(&mut tunnel, b"during").await);
    // It reads no document any more, and does not end of it either.
    node.signal(Signal::SIGHUP).unwrap();
    assert!(echoes(&mut tunnel, b"still").await);
    node.signal(Signal::SIGTERM).unwrap();
    assert!(node.ended().await.success());
}

/// Connections on which nothing runs do not hold it up until the drain is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_are_let_go() {
    let fixture = Fixture::new();
    let node = fixture.start("1h").await;
    let apps = node.address("apps");
    let _silent = RawHttp1::connect(apps).await.unwrap();
    let mut idle = RawHttp1::connect(apps).await.unwrap();
    idle.send("GET / HTTP/1.1\r\nhost: APP\r\n\r\n").await.unwrap();
    let head = idle.head().await.unwrap();
    idle.body(&head).await.unwrap();
    let (_sender, connection) = h2::client::handshake(TcpStream::connect(apps).await.unwrap()).await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    node.metric_reaches("hermes_connections_open", "", 3.0).await;
    node.signal(Signal::SIGTERM).unwrap();
    assert!(idle.to_end().await.unwrap().is_empty(), "an orderly end");
    assert!(node.ended().await.success());
    driver.join_next().await.unwrap().unwrap().expect("an orderly end");
}

/// A node drains under load; who uses it goes to the other one, and no request fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_node_fails_no_request() {
    for protocol in ["h1", "h2"] {
        let fixture = Fixture::new();
        let far = |name: &str| fixture.overlay.node(name).document(DOCUMENT).with("DRAIN", "10s");
        let start = |name: &'static str| fixture.services.fill(far(name)).start();
        let (one, other) = (start("one").await.unwrap(), start("other").await.unwrap());
        let document = "
access-log: off
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: web, upstream: far, retry: {on: [connect-failure, reset], attempts: 3, backoff: {base: 1ms}, budget: 100%}}
upstreams:
- {name: far, protocol: $PROTOCOL, overlay: true, endpoints: ['$ONE', '$OTHER'], balance: round-robin}
";
        let near = fixture.overlay.node("near").document(document).with("PROTOCOL", protocol);
        let near = near.with("ONE", one.address("apps")).with("OTHER", other.address("apps")).start().await.unwrap();
        let mut traffic = Traffic::default();
        for _ in 0..3 {
            traffic.one_shot(near.address("apps"), "APP", "/");
            traffic.keep_alive(near.address("apps"), "APP", "/");
            traffic.uploads(near.address("apps"), "APP", "/upload");
        }
        traffic.progress(3).await;
        one.signal(Signal::SIGTERM).unwrap();
        assert!(one.ended().await.success());
        traffic.progress(3).await;
        let report = traffic.finish().await;
        println!("{protocol}:\n{report}");
        report.assert_whole(5);
    }
}

/// Flows that may move are with the other node before theirs has gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flows_that_may_move_go_to_the_other_node() {
    let fixture = Fixture::new();
    let start = async |name: &'static str| {
        fixture.services.fill(fixture.overlay.node(name).document(DOCUMENT).with("DRAIN", "1m")).start().await.unwrap()
    };
    let (one, other) = (start("one").await, start("other").await);
    let document = "
listeners:
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:1'}
routes:
- {name: video, match: {kind: udp}, upstream: far, on-change: move}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$ONE', '$OTHER'], balance: round-robin}
";
    let near = fixture.overlay.node("near").document(document).with("ONE", one.address("apps"));
    let near = near.with("OTHER", other.address("apps")).start().await.unwrap();
    let mut flows = Vec::new();
    for _ in 0..4 {
        let flow = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        flow.connect(near.address("video")).await.unwrap();
        assert!(talks(&flow).await);
        flows.push(flow);
    }
    assert_eq!(one.metric("hermes_sessions_open", "").await.unwrap(), 2.0);
    one.signal(Signal::SIGTERM).unwrap();
    assert!(talk_until_the_end_of(one, &flows, &near).await.success());
    assert_eq!(other.metric("hermes_sessions_open", "").await.unwrap(), 4.0);
}

/// Of its flows nobody is silent before it is gone.
async fn talk_until_the_end_of(node: Node, flows: &[UdpSocket], near: &Node) -> ExitStatus {
    let mut ends = JoinSet::new();
    ends.spawn(node.ended());
    loop {
        for flow in flows {
            assert!(talks(flow).await, "{}", near.log());
        }
        if let Some(ended) = ends.try_join_next() {
            return ended.unwrap();
        }
    }
}

/// A listener that leads to `from` until it is shut. Who comes then is accepted, and hears nothing until it opens again, to
/// `to`.
struct Gate {
    origin: Origin,
    is_open: watch::Sender<bool>,
    accepted: Arc<AtomicUsize>,
}

impl Gate {
    fn new(from: SocketAddr, to: SocketAddr) -> Self {
        let (is_open, accepted) = (watch::Sender::new(true), Arc::new(AtomicUsize::new(0)));
        let (opens, counted) = (is_open.subscribe(), accepted.clone());
        let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let origin = Origin::accepting(listener, move |mut stream| {
            let mut opens = opens.clone();
            let to = if counted.fetch_add(1, Ordering::SeqCst) == 0 { from } else { to };
            async move {
                if opens.wait_for(|is_open| *is_open).await.is_ok()
                    && let Ok(mut far) = TcpStream::connect(to).await
                {
                    let _ = tokio::io::copy_bidirectional(&mut stream, &mut far).await;
                }
            }
        });
        Self { origin: origin.unwrap(), is_open, accepted }
    }
}

/// It waits two seconds for an endpoint that says nothing, and goes to the other one. Whoever has no other waits on, for
/// the same dial.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flow_that_gives_up_a_silent_endpoint_leaves_other_waiters_alone() {
    let fixture = Fixture::new();
    let start = async |name: &'static str| {
        fixture.services.fill(fixture.overlay.node(name).document(DOCUMENT).with("DRAIN", "1m")).start().await.unwrap()
    };
    let (one, other) = (start("one").await, start("other").await);
    let gate = Gate::new(one.address("apps"), other.address("apps"));
    let document = "
workers: 1
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:1'}
routes:
- {name: video, match: {kind: udp}, upstream: far, on-change: move, timeout: {connect: 1m}}
- {name: db, match: {kind: tcp}, upstream: far, retry: {attempts: 1}, timeout: {connect: 1m}}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$GATE', '$OTHER'], balance: round-robin}
";
    let near = fixture.overlay.node("near").document(document).with("GATE", gate.origin.address());
    let near = near.with("OTHER", other.address("apps")).start().await.unwrap();
    let sessions = async |node: &Node| node.metric("hermes_sessions_open", "").await.unwrap();
    let mut flows = Vec::new();
    for _ in 0..2 {
        let flow = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        flow.connect(near.address("video")).await.unwrap();
        assert!(talks(&flow).await);
        flows.push(flow);
    }
    assert_eq!([sessions(&one).await, sessions(&other).await], [1.0, 1.0]);
    gate.is_open.send_replace(false);
    one.signal(Signal::SIGTERM).unwrap();
    until("the flow asks its own endpoint again", async || gate.accepted.load(Ordering::SeqCst) == 2).await;
    // Of two one goes to either endpoint.
    let mut tunnels = JoinSet::new();
    for _ in 0..2 {
        let apps = near.address("apps");
        tunnels.spawn(async move {
            let mut tunnel = RawHttp1::connect(apps).await.unwrap();
            tunnel.send("CONNECT DB:1 HTTP/1.1\r\nhost: DB:1\r\n\r\n").await.unwrap();
            (tunnel.head().await.unwrap().status(), tunnel)
        });
    }
    let (status, _held) = tunnels.join_next().await.unwrap().unwrap();
    assert_eq!(status, 200);
    assert!(talk_until_the_end_of(one, &flows, &near).await.success());
    assert_eq!(sessions(&other).await, 3.0);
    assert!(tunnels.try_join_next().is_none(), "it waits on");
    gate.is_open.send_replace(true);
    let (status, mut tunnel) = tunnels.join_next().await.unwrap().unwrap();
    assert_eq!(status, 200, "{}", near.log());
    assert!(echoes(&mut tunnel, b"hello").await);
    assert_eq!(gate.accepted.load(Ordering::SeqCst), 2, "the dial of all was begun anew: {}", near.log());
}

/// Nobody reads what it prints: neither reloads nor its end wait for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_log_delays_no_drain() {
    let fixture = Fixture::new();
    let (_reader, writer) = std::io::pipe().unwrap();
    let text = "node: stuck\nadmin: 127.0.0.1:0\ndrain: 1s\nlisteners: [{name: apps, bind: '127.0.0.1:0', protocol: http}]\n\
                routes: [{name: hello, respond: {body: hello}}]\n";
    let config = fixture.overlay.dir().join("stuck.yaml");
    std::fs::write(&config, text).unwrap();
    let log = fixture.overlay.dir().join("stuck.err");
    let mut child = tokio::process::Command::new(hermes())
        .args(["proxy", "--config"])
        .arg(&config)
        .stdout(Stdio::from(writer))
        .stderr(std::fs::File::create(&log).unwrap())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let output = || std::fs::read_to_string(&log).unwrap();
    until("it runs", || async { output().contains(" running node=") }).await;
    let apps: SocketAddr = output()
        .split_once("listener=apps address=")
        .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
        .unwrap();
    // More records than the pipe and all buffers hold.
    let mut clients = JoinSet::new();
    let path = format!("/{}", "x".repeat(8000));
    for _ in 0..4 {
        let path = path.clone();
        clients.spawn(async move {
            let mut http1 = RawHttp1::connect(apps).await.unwrap();
            for _ in 0..800 {
                http1.send(format!("GET {path} HTTP/1.1\r\nhost: APP\r\n\r\n")).await.unwrap();
                let head = http1.head().await.unwrap();
                assert_eq!(http1.body(&head).await.unwrap().text(), "hello");
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    std::fs::write(&config, text.replace("hello}}", "other}}")).unwrap();
    until("it is reloaded", || async { output().contains("applied generation=2") }).await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id().unwrap().cast_signed()), Signal::SIGTERM).unwrap();
    let status = tokio::time::timeout(SILENCE, child.wait()).await.expect("it does not end").unwrap();
    assert!(status.success(), "{}", output());
}
