//! Tunnels of capsules (RFC 9297, RFC 9298) whose capsules are none: wrong lengths, missing contexts, lengths of
//! exabytes, ends in the middle; from clients, and from a proxy that a node relies on.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_testkit::{
    flow::{Flow, FlowMode, capsule, datagram, put_varint},
    ip::{self, IpMode, IpTunnel},
    listener_client::ListenerClient,
    origin::{Origin, scripted},
    overlay::{EFFECT_TIMEOUT, Node, Overlay},
    pattern::Pattern,
    raw_http1::RawHttp1,
};
use tokio::net::{TcpListener, UdpSocket};

use crate::hostile::lab::{get, overlay};

const MODES: [FlowMode; 2] = [FlowMode::UpgradeH1, FlowMode::ConnectH2];

struct Fixture {
    node: Node,
    /// Where probes of its health come.
    web: TcpListener,
    _overlay: Overlay,
    _echo: Origin,
}

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: game, match: {kind: udp, authority: 'GAME:9'}, terminate: {udp: '$ECHO'}}
- {name: web, match: {kind: http, path: /web}, upstream: web}
- {name: here, match: {kind: http}, respond: {body: here}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB'], health: {interval: 100ms}}
";

impl Fixture {
    async fn new() -> Self {
        let echo = Origin::udp_echo(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let overlay = overlay();
        let web = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let draft = overlay.node("fort").document(DOCUMENT).with("ECHO", echo.address());
        let node = draft.with("WEB", web.local_addr().unwrap()).start().await.unwrap();
        Self { node, web, _overlay: overlay, _echo: echo }
    }

    /// A flow that carries datagrams there and back.
    async fn flow(&self, mode: FlowMode) -> Flow {
        let mut flow = Flow::open(&ListenerClient::plain(self.node.address("in")), mode, "GAME", 9).await.unwrap();
        assert!(echoes(&mut flow).await, "{mode:?}");
        flow
    }

    async fn dropped(&self, reason: &str) -> f64 {
        self.node.metric("hermes_datagrams_dropped_total", reason).await.unwrap()
    }

    async fn still_serves(&self) {
        assert!(echoes(&mut self.flow(FlowMode::ConnectH2).await).await);
        assert_eq!(get(self.node.address("in"), "/").await.0, 200);
        self.node.quiet().await;
    }
}

async fn echoes(flow: &mut Flow) -> bool {
    flow.send(b"hello").await.is_ok() && flow.receive().await.is_ok_and(|back| back == b"hello")
}

/// Sends bytes into the tunnel as they are.
async fn send(flow: &mut Flow, bytes: impl Into<Bytes>) {
    // The other side may have given up already.
    let _ = flow.as_capsules().tunnel.writer.send(bytes).await;
}

/// Reads to the end of the tunnel, in whatever way it ends.
async fn ends(flow: &mut Flow, what: &str) {
    let ended = flow.as_capsules().tunnel.reader.to_end().await;
    let waits = matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::TimedOut);
    assert!(!waits, "{what}: the tunnel stays open");
}

/// A type and a length, and what need not be as long.
fn header(kind: u64, length: u64, rest: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    put_varint(&mut out, kind);
    put_varint(&mut out, length);
    out.extend_from_slice(rest);
    out.freeze()
}

/// The largest number that a length may be.
const MAX_VARINT: u64 = (1 << 62) - 1;

#[tokio::test]
async fn a_datagram_that_is_none_ends_its_tunnel() {
    let fixture = Fixture::new().await;
    let attacks = [
        ("no context", capsule(0, b"")),
        ("half a context", capsule(0, &[0xc0])),
        ("a length of exabytes", header(0, MAX_VARINT, b"hello")),
        ("a length beyond all datagrams", header(0, 70_000, &[0; 70_000])),
        ("a payload beyond UDP's", datagram(&[0; 65_528])),
    ];
    for mode in MODES {
        for (what, attack) in &attacks {
            let mut flow = fixture.flow(mode).await;
            send(&mut flow, attack.clone()).await;
            ends(&mut flow, what).await;
        }
        for cut in [&b"\x40"[..], b"\x00", b"\x00\x45", b"\x00\x05\x00hel", b"\x17\x05abc"] {
            let mut flow = fixture.flow(mode).await;
            send(&mut flow, cut.to_vec()).await;
            let _ = flow.as_capsules().tunnel.writer.finish().await;
            ends(&mut flow, &format!("{mode:?}: cut off at {cut:?}")).await;
        }
    }
    // Whose fault it was stands in its record.
    fixture.node.record(|record| record["kind"] == "udp" && record["error"].is_string()).await;
    fixture.still_serves().await;
}

/// Whatever follows it in the same bytes, a datagram that was whole is carried.
#[tokio::test]
async fn datagrams_before_a_malformed_capsule_arrive() {
    let origin = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let overlay = overlay();
    let draft = overlay.node("fort").document(DOCUMENT).with("ECHO", origin.local_addr().unwrap());
    let draft = draft.with("WEB", origin.local_addr().unwrap());
    let node = draft.start().await.unwrap();
    let mut room = [0; 64];
    for mode in MODES {
        for (what, last) in
            [("nothing of a context", capsule(0, b"")), ("a length of exabytes", header(0, MAX_VARINT, b""))]
        {
            let mut flow = Flow::open(&ListenerClient::plain(node.address("in")), mode, "GAME", 9).await.unwrap();
            send(&mut flow, [datagram(b"one"), datagram(b"two"), last].concat()).await;
            for sent in [&b"one"[..], b"two"] {
                let length = tokio::time::timeout(EFFECT_TIMEOUT, origin.recv(&mut room)).await.unwrap().unwrap();
                assert_eq!(&room[..length], sent, "{mode:?}: {what}");
            }
            ends(&mut flow, what).await;
        }
    }
}

const BETWEEN: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: next, match: {kind: ip}, upstream: far}
upstreams:
- {name: far, protocol: h1, endpoints: ['$FAR'], overlay: true}
";

/// A capsule that nobody on the way knows is passed on as it comes, and what came before it is no part of it.
#[tokio::test]
async fn capsules_before_an_unfinished_one_are_forwarded() {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let far = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            http1.head().await?;
            let switching = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-ip\r\n";
            http1.send(format!("{switching}capsule-protocol: ?1\r\n\r\n")).await?;
            drop(sender.send(http1.to_end().await?));
            http1.finish().await
        }
    });
    let far = far.unwrap();
    let overlay = overlay();
    let node = overlay.node("between").document(BETWEEN).with("FAR", far.address()).start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    let mut tunnel = IpTunnel::open(&client, IpMode::H1, &ip::path("10.0.0.1", "*")).await.unwrap();
    let (begun, rest) = (header(0x17, 100, &[7; 10]), vec![7; 90]);
    let sent = [
        [&datagram(b"one")[..], &datagram(b"two"), &begun].concat(),
        [&rest[..], &datagram(b"three"), &begun].concat(),
        [&rest[..], &datagram(b"four")].concat(),
    ];
    for bytes in &sent {
        tunnel.bytes(bytes.clone()).await.unwrap();
    }
    tunnel.finish().await.unwrap();
    let received = tokio::time::timeout(EFFECT_TIMEOUT, receiver.recv()).await.unwrap().unwrap();
    // Behind what the node itself has to say.
    assert!(received.ends_with(&sent.concat()), "{received:?}");
}

/// Each flow is a socket of ours. However many there are, others are heard and told so.
#[tokio::test]
async fn endless_flows_leave_descriptors_for_other_clients() {
    let fixture = Fixture::new().await;
    let most = fixture.node.descriptors().unwrap() + 100;
    let pid = fixture.node.pid().to_string();
    let set = Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={most}")]).status().unwrap();
    assert!(set.success());
    let client = ListenerClient::plain(fixture.node.address("in"));
    let mut flows = Vec::new();
    let refused = loop {
        match Flow::open(&client, FlowMode::ConnectH2, "GAME", 9).await {
            Ok(flow) => flows.push(flow),
            Err(error) => break error,
        }
        assert!(flows.len() < most);
    };
    assert!(refused.to_string().contains("503"), "{refused}");
    fixture.node.metric_reaches("hermes_limit_hits_total", "descriptors", 1.0).await;
    assert_eq!(get(fixture.node.address("in"), "/").await.0, 200);
    assert!(echoes(&mut flows[0]).await);
    // Nor does it take others for ill: they are asked on. Those that came before wait in the queue.
    while tokio::time::timeout(Duration::from_millis(10), fixture.web.accept()).await.is_ok() {}
    for _ in 0..3 {
        tokio::time::timeout(EFFECT_TIMEOUT, fixture.web.accept()).await.expect("no probe comes").unwrap();
    }
    assert!(!fixture.node.log().contains("unhealthy"), "{}", fixture.node.log());
    drop(flows);
    fixture.still_serves().await;
}

#[tokio::test]
async fn unknown_capsules_are_skipped() {
    let fixture = Fixture::new().await;
    let long = |number: u64| (number | 0xc0 << 56).to_be_bytes();
    for mode in MODES {
        let mut flow = fixture.flow(mode).await;
        let before = fixture.dropped("unknown-context").await;
        for (what, harmless) in [
            ("an unknown capsule", capsule(0x17, b"")),
            ("a long one", capsule(0x1717_1717, &[7; 100_000])),
            ("a context that was not agreed on", capsule(0, &[1, b'x'])),
            ("no payload", capsule(0, &[0])),
        ] {
            send(&mut flow, harmless).await;
            if what == "no payload" {
                assert_eq!(flow.receive().await.unwrap(), b"", "{mode:?}: an empty datagram is one");
            }
            assert!(echoes(&mut flow).await, "{mode:?}: {what}");
        }
        // Numbers need not be in their shortest form (RFC 9000, 16).
        send(&mut flow, [&long(0)[..], &long(8 + 5), &long(0), b"hello"].concat()).await;
        assert_eq!(flow.receive().await.unwrap(), b"hello", "{mode:?}");
        assert_eq!(fixture.dropped("unknown-context").await, before + 1.0);
        // A payload that capsules may hold and no socket takes.
        flow.send(&[7; 65_520]).await.unwrap();
        assert!(echoes(&mut flow).await, "{mode:?}");
    }
    assert!(fixture.dropped("too-large").await >= 2.0);
    fixture.still_serves().await;
}

#[tokio::test]
async fn an_endless_capsule_is_not_buffered() {
    let fixture = Fixture::new().await;
    for mode in MODES {
        let mut flow = fixture.flow(mode).await;
        fixture.node.forget_peak().unwrap();
        let before = fixture.node.memory().unwrap();
        send(&mut flow, header(0x17, MAX_VARINT, b"")).await;
        for _ in 0..64 {
            send(&mut flow, vec![7; 1 << 20]).await;
        }
        let _ = flow.as_capsules().tunnel.writer.finish().await;
        ends(&mut flow, "a capsule without end").await;
        let grown = fixture.node.peak_memory().unwrap().saturating_sub(before);
        assert!(grown < 24 << 20, "{mode:?}: 64 MiB of a capsule took {grown} bytes");
    }
    fixture.still_serves().await;
}

#[tokio::test]
async fn noise_in_a_tunnel_ends_it_and_nothing_else() {
    let fixture = Fixture::new().await;
    for seed in 0..60 {
        let mut flow = fixture.flow(MODES[seed as usize % 2]).await;
        send(&mut flow, Pattern::new(seed).bytes(1 + seed as usize * 50)).await;
        // Some noise is the beginning of a long capsule: that ends where the client ends it.
        let _ = flow.as_capsules().tunnel.writer.finish().await;
        ends(&mut flow, &format!("seed {seed}")).await;
    }
    fixture.still_serves().await;
}

#[tokio::test]
async fn a_proxy_that_answers_with_noise_costs_the_flow_and_nothing_else() {
    // Says yes to a tunnel, and then what it should not.
    let proxy = scripted::h1(|mut http1: RawHttp1<_>| async move {
        let head = http1.head().await?;
        http1.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: connect-udp\r\n\r\n").await?;
        let number = head.header("x-number").unwrap_or_default().parse().unwrap_or(0);
        let words = match number {
            0 => header(0, MAX_VARINT, b"hello").to_vec(),
            1 => capsule(0, b"").to_vec(),
            2 => b"\x00\x05\x00hel".to_vec(),
            _ => datagram(&[7; 65_528]).to_vec(),
        };
        http1.send(words).await?;
        http1.finish().await?;
        http1.to_end().await.map(drop)
    });
    let proxy = proxy.unwrap();
    let overlay = overlay();
    let listeners: String = (0..4)
        .map(|number| {
            format!(
                "- {{name: g{number}, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:9', set-headers: {{x-number: '{number}'}}}}\n"
            )
        })
        .collect();
    let document = format!(
        "
listeners:
- {{name: in, bind: '127.0.0.1:0', protocol: http}}
{listeners}
routes:
- {{name: game, match: {{kind: udp}}, upstream: proxy}}
- {{name: here, respond: {{body: here}}}}
upstreams:
- {{name: proxy, protocol: h1, overlay: true, endpoints: ['$PROXY']}}
"
    );
    let node = overlay.node("fort").document(&document).with("PROXY", proxy.address()).start().await.unwrap();
    for number in 0..4 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let listener = format!("g{number}");
        socket.send_to(b"hello", node.address(&listener)).await.unwrap();
        node.record(|record| record["listener"] == listener && record["error"].is_string()).await;
    }
    assert_eq!(get(node.address("in"), "/").await.0, 200);
}

#[tokio::test]
async fn targets_that_are_none_are_refused() {
    let fixture = Fixture::new().await;
    let mut connection = ListenerClient::plain(fixture.node.address("in")).h2().await.unwrap();
    for target in
        ["GAME/0", "GAME/65536", "GAME/+9", "GAME/9x", "GAME", "/9", "a%2Fb/9", "a%00b/9", "..%2F/9", "%/9", "a@b/9"]
    {
        let path = format!("/.well-known/masque/udp/{target}/");
        let mut http1 = RawHttp1::connect(fixture.node.address("in")).await.unwrap();
        http1
            .send(format!("GET {path} HTTP/1.1\r\nHost: p\r\nConnection: upgrade\r\nUpgrade: connect-udp\r\n\r\n"))
            .await
            .unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 400, "{path}");
        let request = http::Request::connect(format!("http://p{path}")).version(http::Version::HTTP_2);
        let request = request.extension(h2::ext::Protocol::from_static("connect-udp")).body(()).unwrap();
        let (response, _send) = connection.open(request, false).await.unwrap();
        assert_eq!(hermes_testkit::multiplex::answer(response).await.unwrap().status, 400, "{path}");
    }
    fixture.still_serves().await;
}
