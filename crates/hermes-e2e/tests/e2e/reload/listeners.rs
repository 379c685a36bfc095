//! Listeners come, move, change their name and go, while others serve and what runs on them goes on.

use std::net::SocketAddr;

use hermes_testkit::{
    ca::{Authority, Subject},
    origin::{self, Origin, datagram::UdpEcho, stream},
    overlay::{Node, Overlay},
    poll::until,
    raw_http1::RawHttp1,
    tls,
    traffic::{Traffic, TunnelTarget},
};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
};
use tokio_rustls::TlsConnector;

use crate::reload::{connect, echoes, get, loopback, overlay};

const DOCUMENT: &str = "
access-log: off
listeners:
- {name: constant, bind: '127.0.0.1:0', protocol: http}
$LISTENERS
routes:
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: video, match: {kind: udp}, terminate: {udp: '$UDP'}, timeout: {idle: 3s}}
- {name: hello, respond: {body: hello}}
";

struct Fixture {
    overlay: Overlay,
    echo: Origin,
    udp: UdpEcho,
}

impl Fixture {
    fn new() -> Self {
        let echo = stream::echo(origin::listen(loopback()).unwrap()).unwrap();
        Self { overlay: overlay(), echo, udp: UdpEcho::start(loopback(), "").unwrap() }
    }

    fn values(&self, listeners: &str) -> Vec<(&'static str, String)> {
        let (echo, udp) = (self.echo.address().to_string(), self.udp.address().to_string());
        vec![("LISTENERS", listeners.to_owned()), ("ECHO", echo), ("UDP", udp)]
    }

    async fn start(&self, listeners: &str) -> Node {
        let mut draft = self.overlay.node("near").document(DOCUMENT);
        for (name, value) in self.values(listeners) {
            draft = draft.with(name, value);
        }
        draft.start().await.unwrap()
    }

    async fn reload(&self, node: &mut Node, listeners: &str) {
        node.reload(DOCUMENT, &self.values(listeners)).await.unwrap();
    }
}

fn free(host: [u8; 4]) -> SocketAddr {
    hermes_testkit::port::reserve(std::net::Ipv4Addr::from(host))
}

fn http(name: &str, at: SocketAddr) -> String {
    format!("- {{name: {name}, bind: '{at}', protocol: http}}")
}

async fn serves(at: SocketAddr) -> bool {
    matches!(get(at, "APP", "/").await, Ok((200, text)) if text == "hello")
}

async fn is_closed(at: SocketAddr) -> bool {
    TcpStream::connect(at).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_come_move_and_go_while_another_serves() {
    let fixture = Fixture::new();
    let [one, two] = [free([127, 0, 35, 1]), free([127, 0, 35, 2])];
    let mut node = fixture.start("").await;
    let mut traffic = Traffic::default();
    traffic.one_shot(node.address("constant"), "APP", "/");
    traffic.keep_alive(node.address("constant"), "APP", "/");
    traffic.h2(node.address("constant"), "app", "/");
    traffic.tunnel(TunnelTarget::Connect(node.address("constant"), "DB:1".to_owned()), 1);
    traffic.progress(1).await;
    for _ in 0..5 {
        fixture.reload(&mut node, &http("extra", one)).await;
        assert!(serves(one).await, "a new listener serves when the document is applied");
        let mut tunnel = connect(one, "DB:1").await;
        fixture.reload(&mut node, &http("extra", two)).await;
        assert!(serves(two).await);
        until("the place that was left is closed", || is_closed(one)).await;
        assert!(echoes(&mut tunnel, b"still").await, "what runs there goes on");
        // The name changes, the address stays: not one connection may be refused.
        let mut visitors = Traffic::default();
        visitors.one_shot(two, "APP", "/");
        visitors.progress(1).await;
        fixture.reload(&mut node, &http("renamed", two)).await;
        visitors.progress(1).await;
        visitors.finish().await.assert_whole(2);
        fixture.reload(&mut node, "").await;
        until("a removed listener is closed", || is_closed(two)).await;
        assert!(echoes(&mut tunnel, b"and on").await);
    }
    traffic.progress(1).await;
    traffic.finish().await.assert_whole(5);
}

/// Two listeners that change places never leave either place without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_change_places() {
    let fixture = Fixture::new();
    let [one, two] = [free([127, 0, 35, 3]), free([127, 0, 35, 3])];
    let both = |first: SocketAddr, second: SocketAddr| format!("{}\n{}", http("a", first), http("b", second));
    let mut node = fixture.start(&both(one, two)).await;
    let mut traffic = Traffic::default();
    traffic.one_shot(one, "APP", "/");
    traffic.one_shot(two, "APP", "/");
    for turn in 0..6 {
        traffic.progress(1).await;
        fixture.reload(&mut node, &if turn % 2 == 0 { both(two, one) } else { both(one, two) }).await;
    }
    traffic.finish().await.assert_whole(6);
}

/// Connections that wait to be accepted when their listener goes are served, not reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_queued_at_a_removed_listener_are_served() {
    let fixture = Fixture::new();
    let at = free([127, 0, 35, 4]);
    for _ in 0..10 {
        let mut node = fixture.start(&http("extra", at)).await;
        // While it is stopped nobody accepts.
        node.signal(nix::sys::signal::Signal::SIGSTOP).unwrap();
        let mut waiting = Vec::new();
        for _ in 0..20 {
            let mut visitor = RawHttp1::connect(at).await.unwrap();
            visitor.send("GET / HTTP/1.1\r\nhost: app\r\n\r\n").await.unwrap();
            waiting.push(visitor);
        }
        node.replace(DOCUMENT, &fixture.values("")).unwrap();
        node.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
        for mut visitor in waiting {
            let head = visitor.head().await.unwrap();
            assert_eq!(visitor.body(&head).await.unwrap().text(), "hello");
        }
        until("the listener is gone", || is_closed(at)).await;
        node.assert_sound();
    }
}

/// Whoever connects by TLS while the listener goes is served by TLS or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_goes_never_drops_its_tls() {
    let fixture = Fixture::new();
    let at = free([127, 0, 35, 5]);
    let strangers = Authority::new("strangers").unwrap();
    let files =
        strangers.issue(&Subject::server("shop.example")).unwrap().write(fixture.overlay.dir(), "shop").unwrap();
    let (cert, key, ca) = (files.cert.display(), files.key.display(), files.ca.display());
    let secure = format!(
        "- {{name: secure, bind: '{at}', protocol: http, proxy-protocol: 127.0.0.0/8, \
         tls: {{client: required, cert: '{cert}', key: '{key}', ca: '{ca}'}}}}"
    );
    let mut node = fixture.start(&secure).await;
    let connect = || async { RawHttp1::connect(at).await.unwrap() };
    let (mut plain, mut client) = (connect().await, connect().await);
    node.metric_reaches("hermes_connections_total", "secure", 2.0).await;
    fixture.reload(&mut node, "").await;
    // Both were accepted before; their first bytes come after. A PROXY header that speaks for nobody:
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00";
    plain.send(local).await.unwrap();
    plain.send("GET / HTTP/1.1\r\nhost: app\r\n\r\n").await.unwrap();
    let answer = plain.to_end().await.unwrap_or_default();
    assert!(!answer.starts_with(b"HTTP/"), "served without TLS: {}", String::from_utf8_lossy(&answer));

    client.send(local).await.unwrap();
    let identity = strangers.issue(&Subject::node("visitor")).unwrap();
    let connector = TlsConnector::from(tls::client(strangers.pem(), Some(&identity), &["http/1.1"]).unwrap());
    let name = ServerName::try_from("shop.example").unwrap();
    let mut stream = connector.connect(name, client.into_parts().0).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: app\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"), "{answer}");
}

async fn talks(flow: &UdpSocket, words: &[u8]) -> bool {
    let mut room = [0; 64];
    for _ in 0..5 {
        flow.send(words).await.unwrap_or_default();
        let received = tokio::time::timeout(std::time::Duration::from_secs(1), flow.recv(&mut room));
        if let Ok(Ok(length)) = received.await {
            return &room[..length] == words;
        }
    }
    false
}

async fn flow_to(at: SocketAddr) -> UdpSocket {
    let flow = UdpSocket::bind(loopback()).await.unwrap();
    flow.connect(at).await.unwrap();
    flow
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn udp_flows_outlive_their_listener_and_its_address_can_be_had_again() {
    let fixture = Fixture::new();
    let at = free([127, 0, 35, 6]);
    let udp = |name: &str| format!("- {{name: {name}, bind: '{at}', protocol: udp, authority: 'VIDEO:1'}}");
    let mut node = fixture.start(&udp("video")).await;
    let mut flows = Vec::new();
    for round in 1..=4 {
        let old = flow_to(at).await;
        assert!(talks(&old, b"one").await);
        flows.push(old);
        fixture.reload(&mut node, "").await;
        let stranger = flow_to(at).await;
        is_heard_by_nobody(&stranger).await;
        for flow in &flows {
            assert!(talks(flow, b"two").await, "a flow of round {round} does not go on");
        }
        // Back at once, although flows of the old one still live there.
        fixture.reload(&mut node, &udp(if round % 2 == 0 { "video" } else { "video-again" })).await;
        let new = flow_to(at).await;
        assert!(talks(&new, b"three").await);
        for flow in &flows {
            assert!(talks(flow, b"four").await);
        }
        flows.push(new);
        assert_eq!(fixture.udp.sources(), flows.len(), "each flow is one session");
    }
    drop(flows);
    node.quiet().await;
    let descriptors = node.descriptors().unwrap();
    let last = flow_to(at).await;
    assert!(talks(&last, b"five").await);
    drop(last);
    node.quiet().await;
    until("descriptors are given back", || async { node.descriptors().unwrap() <= descriptors }).await;
}

/// At an address without a listener a datagram comes to nobody, or to its flow's own socket.
async fn is_heard_by_nobody(stranger: &UdpSocket) {
    stranger.send(b"nobody").await.unwrap_or_default();
    let received = tokio::time::timeout(std::time::Duration::from_millis(50), stranger.recv(&mut [0; 16])).await;
    assert!(!matches!(received, Ok(Ok(_))), "somebody answers where nobody listens");
}

/// Which of the sockets it is, and what to do. Nothing of the document is applied.
#[tokio::test]
async fn an_address_in_use_is_reported_with_its_transport() {
    let fixture = Fixture::new();
    let node = fixture.start("").await;
    let taken = UdpSocket::bind(loopback()).await.unwrap();
    let taken_too = UdpSocket::bind(loopback()).await.unwrap();
    let (udp, dns) = (taken.local_addr().unwrap(), taken_too.local_addr().unwrap());
    let listeners = format!(
        "- {{name: flows, bind: '{udp}', protocol: udp, authority: 'VIDEO:1'}}\n\
         - {{name: dns, bind: '{dns}', protocol: dns, names: [A], addresses: [198.18.0.0/16]}}\n"
    );
    node.replace(DOCUMENT, &fixture.values(&listeners)).unwrap();
    let remedy = "Address already in use (os error 98). Stop the process that uses the address";
    node.says(&format!("listeners[1].bind: listening on {udp} over UDP: {remedy}")).await;
    node.says(&format!("listeners[2].bind: listening on {dns} over UDP (DNS): {remedy}")).await;
    assert_eq!(node.log().matches("the running configuration stays").count(), 1, "{}", node.log());
}
