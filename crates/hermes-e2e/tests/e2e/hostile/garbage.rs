//! Garbage on every port: random bytes, other protocols, beginnings that go wrong.
//!
//! What cannot be a request is answered with an error or closed; what any bytes may be (a TCP or UDP payload) is
//! carried unchanged. The seed is fixed: a failure is repeated by running the test again.

use std::net::SocketAddr;

use hermes_testkit::{
    ca::Subject,
    frames::{Frame, Frames, PREFACE},
    origin::{self, Origin, stream},
    overlay::{Node, Overlay},
    pattern::Pattern,
    poll::until,
    raw_http1::RawHttp1,
};
use tokio::net::UdpSocket;

use crate::hostile::lab::{get, last_words, overlay};

const DOCUMENT: &str = "
limits: {header-timeout: 300ms, tls-timeout: 300ms, keep-alive: 300ms}
listeners:
- {name: plain, bind: '127.0.0.1:0', protocol: http}
- {name: tls, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
- {name: behind, bind: '127.0.0.1:0', protocol: http, proxy-protocol: [127.0.0.0/8]}
- {name: behind-tcp, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1', proxy-protocol: [127.0.0.0/8]}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1'}
- {name: game, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:1'}
routes:
- {name: db, match: {kind: tcp, authority: 'DB:1'}, terminate: {tcp: '$TCP'}}
- {name: game, match: {kind: udp, authority: 'GAME:1'}, terminate: {udp: '$UDP'}}
- {name: here, respond: {body: here}}
";

struct Fixture {
    node: Node,
    _overlay: Overlay,
    _origins: [Origin; 2],
}

impl Fixture {
    async fn new() -> Self {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        let origins = [stream::echo(origin::listen(loopback).unwrap()).unwrap(), Origin::udp_echo(loopback).unwrap()];
        let overlay = overlay();
        let draft = overlay.node("fort").identity(&Subject::node("fort")).unwrap().document(DOCUMENT);
        let draft = draft.with("TCP", origins[0].address()).with("UDP", origins[1].address());
        Self { node: draft.start().await.unwrap(), _overlay: overlay, _origins: origins }
    }

    async fn still_serves(&self) {
        assert_eq!(get(self.node.address("plain"), "/").await, (200, "here".to_owned()));
        self.node.quiet().await;
    }
}

/// Pieces of noise, from one byte to some thousand.
fn noise(count: u64) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(|seed| Pattern::new(0xbad + seed).bytes(1 + (seed as usize * 97) % 3000))
}

/// What other programs would say first, and beginnings that go wrong.
fn strangers() -> Vec<Vec<u8>> {
    let mut words: Vec<Vec<u8>> = [
        &b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"[..],
        b"\x16\x03\x01\xff\xff",
        b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x01\x00",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"EHLO mail.example\r\n",
        b"\x05\x01\x00",
        b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00",
        b"\x03\x00\x00\x13\x0e\xe0\x00\x00\x00\x00\x00\x01\x00\x08\x00\x03\x00\x00\x00",
        b"*1\r\n$4\r\nPING\r\n",
        b"GET / HTTP/1.1\r\nHost: ",
        b"PRI * HTTP/1.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"\r\n\r\n\r\n\r\n\r\n\r\n",
        b"\0",
        b"\xff\xff\xff\xff",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    ]
    .iter()
    .map(|word| word.to_vec())
    .collect();
    words.push(vec![0; 100_000]);
    words.push(vec![b'A'; 100_000]);
    words.push(vec![b'\n'; 100_000]);
    words
}

/// Nothing, or a status that puts the blame where it belongs.
fn is_refusal(output: &str) -> bool {
    output.is_empty() || (output.starts_with("HTTP/1.") && output.get(9..10) == Some("4"))
}

async fn closed(address: SocketAddr, bytes: &[u8]) -> String {
    let mut http1 = RawHttp1::connect(address).await.unwrap();
    // It may be closed before all is sent.
    let _ = http1.send(bytes).await;
    last_words(&mut http1, &format!("{:?}", &bytes[..bytes.len().min(60)])).await
}

#[tokio::test]
async fn a_port_for_http_answers_or_closes() {
    let fixture = Fixture::new().await;
    for bytes in noise(40).chain(strangers()) {
        let output = closed(fixture.node.address("plain"), &bytes).await;
        assert!(is_refusal(&output), "{:?}: {output:?}", &bytes[..bytes.len().min(60)]);
    }
    fixture.still_serves().await;
}

#[tokio::test]
async fn frames_of_noise_end_their_connection() {
    let fixture = Fixture::new().await;
    for bytes in noise(40) {
        closed(fixture.node.address("plain"), &[PREFACE, &bytes].concat()).await;
    }
    // Each type of frame, with noise in it, on a connection that has begun well.
    for seed in 0..120u64 {
        let noise = Pattern::new(seed).bytes(seed as usize % 40);
        let (kind, stream) = (u8::try_from(seed % 12).unwrap(), u32::try_from(seed / 12).unwrap());
        let mut frames = Frames::connect(fixture.node.address("plain"), &[]).await.unwrap();
        let _ = frames.send(&[Frame::new(kind, noise.first().copied().unwrap_or_default(), stream, noise)]).await;
        let _ = frames.finish().await;
        frames.goodbye().await.unwrap();
    }
    fixture.still_serves().await;
}

#[tokio::test]
async fn a_port_for_tls_closes() {
    let fixture = Fixture::new().await;
    let mut failed = 0.0;
    for bytes in noise(40).chain(strangers()) {
        let output = closed(fixture.node.address("tls"), &bytes).await;
        assert!(!output.contains("HTTP/1.1 2"), "{output:?}");
        failed += 1.0;
    }
    // Some only by their time; those are slow clients.
    let slow = fixture.node.metric("hermes_limit_hits_total", "slow-client").await.unwrap();
    fixture.node.metric_reaches("hermes_tls_handshake_failures_total", "tls", failed - slow).await;
    fixture.still_serves().await;
}

#[tokio::test]
async fn a_port_for_tcp_carries_any_bytes_unchanged() {
    let fixture = Fixture::new().await;
    for bytes in noise(20).chain(strangers()) {
        let mut http1 = RawHttp1::connect(fixture.node.address("db")).await.unwrap();
        http1.send(&bytes).await.unwrap();
        assert!(http1.exactly(bytes.len()).await.unwrap() == bytes, "{:?}", &bytes[..bytes.len().min(60)]);
    }
    fixture.still_serves().await;
}

#[tokio::test]
async fn a_port_for_udp_carries_any_bytes_unchanged() {
    let fixture = Fixture::new().await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(fixture.node.address("game")).await.unwrap();
    let mut room = vec![0; 65_536];
    let lengths = [0, 1, 1472, 9000, 65_507];
    for bytes in noise(20).chain(lengths.map(|length| vec![7; length])) {
        socket.send(&bytes).await.unwrap();
        let received = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, socket.recv(&mut room));
        let length = received.await.expect("a datagram came back").unwrap();
        assert!(room[..length] == bytes, "{} bytes", bytes.len());
    }
    drop(socket);
    assert_eq!(get(fixture.node.address("plain"), "/").await.0, 200);
}

#[tokio::test]
async fn the_admin_port_answers_or_closes() {
    let fixture = Fixture::new().await;
    for bytes in noise(40).chain(strangers()) {
        let mut http1 = RawHttp1::connect(fixture.node.admin()).await.unwrap();
        let _ = http1.send(&bytes).await;
        // It waits longer than this test would: the client goes first.
        let _ = http1.finish().await;
        let output = last_words(&mut http1, "admin").await;
        assert!(is_refusal(&output), "{output:?}");
    }
    // More connections than it serves at once, all of them idle: those who wait are served when these go.
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(tokio::net::TcpStream::connect(fixture.node.admin()).await.unwrap());
    }
    drop(idle);
    assert_eq!(fixture.node.ask("/healthz").await.unwrap().0, 200);
    fixture.still_serves().await;
}

/// A header of the PROXY protocol v2: version and command, family and transport, length, and what follows.
fn proxy(version: u8, family: u8, length: u16, rest: &[u8]) -> Vec<u8> {
    [&b"\r\n\r\n\0\r\nQUIT\n"[..], &[version, family], &length.to_be_bytes(), rest].concat()
}

#[tokio::test]
async fn a_proxy_header_that_is_none_ends_its_connection() {
    let fixture = Fixture::new().await;
    let addresses = [198, 51, 100, 7, 127, 0, 0, 1, 0x10, 0xe1, 0, 80];
    let attacks = [
        b"PROXY TCP4 198.51.100.7 127.0.0.1 4321\r\n".to_vec(),
        b"PROXY TCP4 198.51.100.7 127.0.0.1 4321 80\n".to_vec(),
        b"\r\n\r\n\0\r\nQUIT\r".to_vec(),
        proxy(0x11, 0x11, 12, &addresses),
        proxy(0x31, 0x11, 12, &addresses),
        proxy(0x22, 0x11, 12, &addresses),
        proxy(0x2f, 0x11, 12, &addresses),
        // Shorter than the addresses of its family.
        proxy(0x21, 0x11, 0, b""),
        proxy(0x21, 0x11, 11, &addresses[..11]),
        proxy(0x21, 0x21, 12, &addresses),
        proxy(0x21, 0x11, 0xffff, &addresses),
    ];
    let request = b"GET / HTTP/1.1\r\nHost: WEB\r\nConnection: close\r\n\r\n";
    for listener in ["behind", "behind-tcp"] {
        for attack in attacks.iter().cloned().chain(noise(20)) {
            // A header that wants more bytes than there are takes some of the request, or waits for the rest.
            let output = closed(fixture.node.address(listener), &[&attack[..], request].concat()).await;
            let honest = output.starts_with("HTTP/1.1 2") || output.contains("GET /");
            assert!(!honest, "{listener}: {:?}: {output:?}", &attack[..attack.len().min(30)]);
        }
    }
    // A connection's end may be seen before it is counted.
    until("each is counted", || async {
        let failed = fixture.node.metric("hermes_tls_handshake_failures_total", "behind").await.unwrap();
        let slow = fixture.node.metric("hermes_limit_hits_total", "slow-client").await.unwrap();
        failed + slow >= 2.0 * (attacks.len() as f64 + 20.0)
    })
    .await;
    let honest = [&proxy(0x21, 0x11, 12, &addresses)[..], request].concat();
    assert!(closed(fixture.node.address("behind"), &honest).await.starts_with("HTTP/1.1 200"));
    fixture.still_serves().await;
}
