//! Intermediate nodes forward capsules of unknown types and datagrams of unknown contexts unchanged.
//!
//! In: a scripted client, a scripted origin that echoes, and two nodes between them over every pair of versions. Out:
//! the same capsules in order, and the same datagrams. Needs no device.

use hermes_testkit::binary::hermes;
use std::io;

use hermes_testkit::{
    ca::{Identity, Subject},
    flow::{self, Capsule},
    h3,
    ip::{IpMessage, IpMode, IpTunnel, path},
    listener_client::{ListenerClient, NODE_NAME},
    multiplex,
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};
use http::Response;
use tokio::net::TcpStream;

/// Which version comes next, the client says by a header for each node.
const DOCUMENT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: h1, match: {kind: ip, headers: {x-$SELF: h1}}, upstream: h1}
- {name: h2, match: {kind: ip, headers: {x-$SELF: h2}}, upstream: h2}
- {name: h3, match: {kind: ip, headers: {x-$SELF: h3}}, upstream: h3}
upstreams:
- {name: h1, protocol: h1, overlay: true, endpoints: ['$H1'] $TLS}
- {name: h2, protocol: h2, overlay: true, endpoints: ['$H2'] $TLS}
- {name: h3, protocol: h3, overlay: true, endpoints: ['$H3'], tls: {}}
";

const VERSIONS: [&str; 3] = ["h1", "h2", "h3"];
/// A node's own words about MTU, which the mirror sends back as well.
const MTU: u64 = 0x2d48_524d_5f4d_5455;

/// Client, two nodes, mirrors.
struct Passage {
    first: Node,
    _second: Node,
    overlay: Overlay,
    user: Identity,
    _mirrors: (Origin, Origin, h3::Origin),
}

impl Passage {
    async fn new() -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let issue =
            |name: &str| overlay.authority().issue(&Subject::node(name).standalone().with_dns(NODE_NAME)).unwrap();
        let mirrors = (
            scripted::h1(mirror_h1).unwrap(),
            scripted::h2(mirror_h2).unwrap(),
            h3::Origin::serve(&issue("mirror"), None, mirror_h3).unwrap(),
        );
        let draft = |name: &'static str| {
            let draft = overlay.node(name).document(DOCUMENT).with("SELF", name);
            draft.identity(&Subject::node(name).standalone().with_dns(NODE_NAME)).unwrap()
        };
        let second = draft("second").with("H1", mirrors.0.address()).with("H2", mirrors.1.address());
        let second = second.with("H3", mirrors.2.address().unwrap()).with("TLS", "").start().await.unwrap();
        let mut first = draft("first").with("TLS", ", tls: {}");
        for version in ["H1", "H2", "H3"] {
            first = first.with(version, second.address("in"));
        }
        let (first, user) = (first.start().await.unwrap(), issue("client"));
        Self { first, _second: second, overlay, user, _mirrors: mirrors }
    }

    async fn open(&self, mode: IpMode, first: &str, second: &str) -> IpTunnel {
        let client = ListenerClient::tls(self.first.address("in"), self.overlay.authority().pem(), Some(&self.user));
        let client = client.with("x-first", first).with("x-second", second);
        let opened = IpTunnel::open(&client, mode, &path("10.0.0.1", "*")).await;
        opened.unwrap_or_else(|error| panic!("{mode:?} {first} {second}: {error}"))
    }
}

async fn mirror_h1(mut http1: RawHttp1<TcpStream>) -> io::Result<()> {
    http1.head().await?;
    let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-ip\r\ncapsule-protocol: ?1\r\n\r\n";
    http1.send(head).await?;
    while let Some(chunk) = http1.some().await? {
        http1.send(&chunk).await?;
    }
    http1.finish().await
}

async fn mirror_h2(exchange: multiplex::Exchange) -> io::Result<()> {
    let multiplex::Exchange { request, mut respond } = exchange;
    let head = Response::builder().header("capsule-protocol", "?1").body(()).map_err(io::Error::other)?;
    let mut send = respond.send_response(head, false).map_err(io::Error::other)?;
    let mut body = request.into_body();
    while let Some(chunk) = multiplex::receive(&mut body).await? {
        multiplex::send_all(&mut send, chunk, false).await?;
    }
    send.send_data(bytes::Bytes::new(), true).map_err(io::Error::other)
}

async fn mirror_h3(mut exchange: h3::Exchange) -> io::Result<()> {
    exchange.send.headers(&[(":status", "200"), ("capsule-protocol", "?1")]).await?;
    let quic = exchange.connection.clone();
    loop {
        tokio::select! {
            chunk = exchange.recv.chunk() => match chunk? {
                Some(chunk) => exchange.send.data(chunk).await?,
                None => return exchange.send.finish(),
            },
            datagram = quic.read_datagram() => {
                quic.send_datagram(datagram.map_err(io::Error::other)?).map_err(io::Error::other)?;
            }
        }
    }
}

/// Types that nobody has, one of them reserved for greasing (RFC 9297, 5.4), of lengths from none to many frames.
fn capsules() -> Vec<(u64, Vec<u8>)> {
    let filled = |length: usize| (0..length).map(|at| (at % 251) as u8).collect();
    [(0x17, 0), (0x29 + 0x17 * 4, 1), (0x3fff, 63), (0x4000, 64), (0x3fff_ffff, 16_384), ((1 << 62) - 1, 100_000)]
        .map(|(kind, length)| (kind, filled(length)))
        .to_vec()
}

/// Contexts that were never agreed on; one has nothing behind it.
fn datagrams() -> Vec<Vec<u8>> {
    let contexts: [&[u8]; 4] = [&[2], &[63], &[0x40, 64], &[0x80, 0x10, 0, 0]];
    let mut datagrams: Vec<Vec<u8>> = contexts
        .iter()
        .zip([0usize, 1, 500, 1000])
        .map(|(context, length)| [context, &vec![7; length][..]].concat())
        .collect();
    // Longer than any packet of QUIC here: it goes on the stream.
    datagrams.push([&[2][..], &vec![8; 20_000]].concat());
    datagrams
}

/// What comes next, but for a node's own words.
async fn next(tunnel: &mut IpTunnel, what: &str) -> IpMessage {
    loop {
        match tunnel.next().await.unwrap_or_else(|error| panic!("{what}: {error}")) {
            Some(IpMessage::Capsule(Capsule { kind: MTU, .. })) => {}
            Some(received) => return received,
            None => panic!("{what}: it ended"),
        }
    }
}

async fn all_comes_back(tunnel: &mut IpTunnel, what: &str) {
    for (kind, value) in capsules() {
        tunnel.capsule(kind, &value).await.unwrap();
    }
    for (kind, value) in capsules() {
        let received = next(tunnel, what).await;
        assert!(
            received == IpMessage::Capsule(Capsule { kind, value: value.into() }),
            "{what}: capsule {kind:#x} changed"
        );
    }
    // Behind them: those that come in QUIC's datagrams cannot go on a stream that a capsule has not left yet.
    let mut sent = datagrams();
    for datagram in &sent {
        let fits = datagram.len() < 1100;
        let done = if fits { tunnel.datagram(datagram).await } else { tunnel.capsule(0, datagram).await };
        done.unwrap();
    }
    let mut back = Vec::new();
    while back.len() < sent.len() {
        match next(tunnel, &format!("{what}, with {} datagrams", back.len())).await {
            IpMessage::Capsule(Capsule { kind: 0, value }) | IpMessage::Datagram(value) => back.push(value.to_vec()),
            other => panic!("{what}: {other:?}"),
        }
    }
    // Each in a packet of its own: they need not come in order.
    back.sort();
    sent.sort();
    assert!(back == sent, "{what}: datagrams changed");
}

#[tokio::test]
async fn unknown_capsules_and_contexts_pass_every_pair_of_versions() {
    let passage = Passage::new().await;
    for mode in IpMode::ALL {
        for first in VERSIONS {
            for second in VERSIONS {
                let mut tunnel = passage.open(mode, first, second).await;
                all_comes_back(&mut tunnel, &format!("{mode:?}, {first}, {second}")).await;
            }
        }
    }
}

/// A capsule may come byte by byte, and its type and length in more bytes than they need.
#[tokio::test]
async fn a_capsule_in_crumbs_passes() {
    let passage = Passage::new().await;
    for mode in IpMode::ALL {
        let mut tunnel = passage.open(mode, "h3", "h2").await;
        let capsule = [&[0x80, 0, 0, 0x2a, 0x40, 3][..], b"abc", &flow::capsule(0x2b, b"next")].concat();
        for byte in capsule {
            tunnel.bytes(vec![byte]).await.unwrap();
        }
        assert_eq!(tunnel.next_capsule(0x2a).await.unwrap(), "abc", "{mode:?}");
        assert_eq!(tunnel.next_capsule(0x2b).await.unwrap(), "next", "{mode:?}");
    }
}
