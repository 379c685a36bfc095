//! Flows of RINA: TCP over a DIF between two nodes, and a node at either end of an application's flow.
//!
//! In: TCP clients, TCP servers, and applications of a DIF that are no nodes. Out: whole bytes, refusals that each
//! side understands, and bounded tables where a peer misbehaves.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use hermes_rina::{FlowRequest, Reason};
use hermes_testkit::binary::hermes;
use hermes_testkit::origin::{self, Origin, stream};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::pattern::Pattern;
use hermes_testkit::rina::RinaApplication;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;

const KEY: &str = "a key that all members have";

const NEAR: &str = "
workers: 2
listeners:
- {name: in, bind: '$IN', protocol: tcp, authority: '$TARGET'}
routes:
- {name: over, match: {kind: tcp}, terminate: {rina: '$FAR', dif: backbone, dif-key: '$KEY'}, timeout: {connect: 5s}}
";

const FAR: &str = "
workers: 2
listeners:
- {name: dif, bind: '$BIND', protocol: rina, dif: backbone, dif-key: '$KEY'}
routes:
- {name: out, match: {listener: dif}, terminate: {tcp: authority, reach: any}}
";

/// A node at each end of a DIF.
struct Pair {
    near: Node,
    far: Node,
    overlay: Overlay,
}

fn key_file(overlay: &Overlay, name: &str, key: &str) -> String {
    let file = overlay.dir().join(name);
    std::fs::write(&file, key).unwrap();
    file.display().to_string()
}

async fn far(overlay: &Overlay, bind: &str) -> Node {
    let key = key_file(overlay, "dif.key", KEY);
    overlay.node("far").document(FAR).with("BIND", bind).with("KEY", key).start().await.unwrap()
}

async fn near(overlay: &Overlay, bind: &str, to: SocketAddr, target: SocketAddr, key: &str) -> Node {
    let key = key_file(overlay, "near.key", key);
    let draft = overlay.node("near").document(NEAR).with("IN", bind).with("TARGET", target);
    draft.with("FAR", to).with("KEY", key).start().await.unwrap()
}

impl Pair {
    async fn new(bind: &str, target: SocketAddr) -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let far = far(&overlay, bind).await;
        let near = near(&overlay, bind, far.address("dif"), target, KEY).await;
        Self { near, far, overlay }
    }

    async fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(self.near.address("in")).await
    }
}

fn echo(bind: &str) -> Origin {
    stream::echo(origin::listen(bind.parse().unwrap()).unwrap()).unwrap()
}

/// Sends bytes in both directions at once, half-closes, and compares.
async fn converse(stream: TcpStream, bytes: usize) {
    let sent = Pattern::new(28).bytes(bytes);
    let (mut read, mut write) = stream.into_split();
    let expected = sent.clone();
    let mut writer = JoinSet::new();
    writer.spawn(async move {
        write.write_all(&sent).await.unwrap();
        write.shutdown().await.unwrap();
    });
    let mut received = Vec::new();
    read.read_to_end(&mut received).await.unwrap();
    writer.join_next().await.unwrap().unwrap();
    assert!(received == expected, "{} of {bytes} bytes came back", received.len());
}

#[tokio::test]
async fn bytes_cross_in_both_directions() {
    for bind in ["127.0.0.1:0", "[::1]:0"] {
        let echo = echo(bind);
        let mut pair = Pair::new(bind, echo.address()).await;
        for bytes in [0, 1, 100_000, 20_000_000] {
            converse(pair.connect().await.unwrap(), bytes).await;
        }
        let record = pair.far.record(|record| record["listener"] == "dif").await;
        assert_eq!(record["authority"], echo.address().to_string());
        pair.near.assert_sound();
        pair.far.assert_sound();
    }
}

/// The answer of the last server decides whether a client is connected.
#[tokio::test]
async fn a_client_shares_the_fate_of_the_far_connection() {
    let overlay = Overlay::new(hermes()).unwrap();
    // A bound port that nobody listens on refuses connections.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = held.local_addr().unwrap();
    let far = far(&overlay, "127.0.0.1:0").await;
    let near = near(&overlay, "127.0.0.1:0", far.address("dif"), closed, KEY).await;
    let mut client = TcpStream::connect(near.address("in")).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let record = near.record(|record| record["listener"] == "in").await;
    assert!(record["reason"].as_str().unwrap().ends_with("the destination refused"), "{record}");
}

#[tokio::test]
async fn a_reset_at_one_end_reaches_the_other() {
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let pair = Pair::new("127.0.0.1:0", listener.local_addr().unwrap()).await;
    for by_server in [true, false] {
        let (client, server) = tokio::join!(pair.connect(), listener.accept());
        let (mut client, (mut server, _)) = (client.unwrap(), server.unwrap());
        client.write_all(b"x").await.unwrap();
        server.read_u8().await.unwrap();
        let (resetting, mut other) = if by_server { (server, client) } else { (client, server) };
        socket2::SockRef::from(&resetting).set_linger(Some(Duration::ZERO)).unwrap();
        drop(resetting);
        assert_eq!(other.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset, "{by_server}");
    }
}

#[tokio::test]
async fn a_thousand_flows_share_a_neighbour() {
    let echo = echo("127.0.0.1:0");
    let pair = Pair::new("127.0.0.1:0", echo.address()).await;
    let mut all = Vec::new();
    for _ in 0..1000 {
        let mut stream = pair.connect().await.unwrap();
        stream.write_all(b"ping").await.unwrap();
        all.push(stream);
    }
    for mut stream in all {
        let mut word = [0; 4];
        stream.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"ping");
    }
    pair.near.quiet().await;
    pair.far.quiet().await;
}

/// A server of RINA that knows nothing of TCP: its name leads to it.
#[tokio::test]
async fn a_client_of_tcp_reaches_an_application_of_a_dif() {
    let application = RinaApplication::bind("127.0.0.1:0".parse().unwrap(), "backbone", KEY.as_bytes()).await.unwrap();
    let address = application.address();
    let mut running = JoinSet::new();
    running.spawn(async move { application.echo("127.0.0.1").await });
    let overlay = Overlay::new(hermes()).unwrap();
    let near = near(&overlay, "127.0.0.1:0", address, "127.0.0.1:7".parse().unwrap(), KEY).await;
    for bytes in [0, 1, 3_000_000] {
        converse(TcpStream::connect(near.address("in")).await.unwrap(), bytes).await;
    }
}

#[tokio::test]
async fn an_application_of_a_dif_reaches_a_server_of_tcp() {
    let echo = echo("127.0.0.1:0");
    let overlay = Overlay::new(hermes()).unwrap();
    let far = far(&overlay, "127.0.0.1:0").await;
    let (to, target) = (far.address("dif"), echo.address().to_string());
    let mut application =
        RinaApplication::bind("127.0.0.1:0".parse().unwrap(), "backbone", KEY.as_bytes()).await.unwrap();
    let sent = Pattern::new(3).bytes(1_000_000);
    // By the name of the process, or with the client's address in the name of the instance.
    for request in [FlowRequest::to(target.clone(), ""), FlowRequest::to("web", format!("192.0.2.1:4000>{target}"))] {
        let received = application.exchange(to, request, Bytes::from(sent.clone())).await.unwrap();
        assert!(received == sent);
    }
    far.record(|record| record["source"] == "192.0.2.1:4000").await;
    let nowhere = FlowRequest::to("web", "no address");
    assert_eq!(application.exchange(to, nowhere, Bytes::new()).await.unwrap_err(), Reason::Refused);
}

#[tokio::test]
async fn a_node_without_the_key_does_not_enrol() {
    let echo = echo("127.0.0.1:0");
    let overlay = Overlay::new(hermes()).unwrap();
    let far = far(&overlay, "127.0.0.1:0").await;
    let other = "another key of the same length";
    let near = near(&overlay, "127.0.0.1:0", far.address("dif"), echo.address(), other).await;
    let mut client = TcpStream::connect(near.address("in")).await.unwrap();
    client.read_u8().await.unwrap_err();
    far.metric_reaches("hermes_datagrams_dropped_total", "reason=\"rina-unauthenticated\"", 1.0).await;
    near.record(|record| record["reason"].as_str().is_some_and(|reason| reason.contains("within 5s"))).await;
}

/// The members of a DIF change with its key: flows of former members end, and others begin.
#[tokio::test]
async fn a_new_key_ends_flows_of_the_old_one() {
    let echo = echo("127.0.0.1:0");
    let mut pair = Pair::new("127.0.0.1:0", echo.address()).await;
    let mut before = pair.connect().await.unwrap();
    before.write_all(b"x").await.unwrap();
    before.read_u8().await.unwrap();
    let key = key_file(&pair.overlay, "new.key", "the second key of this DIF");
    let text = format!("{FAR}\n# With the second key.");
    pair.far.reload(&text, &[("KEY", key.clone()), ("BIND", "127.0.0.1:0".to_owned())]).await.unwrap();
    assert_eq!(before.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let text = format!("{NEAR}\n# With the second key.");
    let values = [
        ("KEY", key),
        ("IN", "127.0.0.1:0".to_owned()),
        ("TARGET", echo.address().to_string()),
        ("FAR", pair.far.address("dif").to_string()),
    ];
    pair.near.reload(&text, &values).await.unwrap();
    converse(pair.connect().await.unwrap(), 1000).await;
}

#[tokio::test]
async fn a_removed_listener_lets_its_flows_finish() {
    let echo = echo("127.0.0.1:0");
    let mut pair = Pair::new("127.0.0.1:0", echo.address()).await;
    let mut before = pair.connect().await.unwrap();
    before.write_all(b"x").await.unwrap();
    before.read_u8().await.unwrap();
    pair.far.reload("listeners: [{name: other, bind: '127.0.0.1:0', protocol: http}]", &[]).await.unwrap();
    // The reset may come before the client sees its connection.
    if let Ok(mut late) = pair.connect().await {
        late.read_u8().await.unwrap_err();
    }
    converse(before, 100_000).await;
}

#[tokio::test]
async fn garbage_and_forged_enrolments_leave_nothing() {
    let echo = echo("127.0.0.1:0");
    let pair = Pair::new("127.0.0.1:0", echo.address()).await;
    converse(pair.connect().await.unwrap(), 1000).await;
    let before = pair.far.memory().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for round in 0u32..20_000 {
        let noise = Pattern::new(u64::from(round)).bytes(round as usize % 1200);
        // The first byte is the version, the second the kind of a management PDU.
        let datagram = [&[1, (round % 12) as u8][..], &noise].concat();
        let datagram = if round % 2 == 0 { &datagram[..] } else { &noise };
        let _ = socket.send_to(datagram, pair.far.address("dif")).await;
    }
    converse(pair.connect().await.unwrap(), 1000).await;
    pair.far.metric_reaches("hermes_datagrams_dropped_total", "reason=\"rina-malformed\"", 100.0).await;
    let grown = pair.far.memory().unwrap().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes");
}

const RACING: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: tcp, authority: '$TARGET'}
routes:
- name: over
  match: {kind: tcp}
  timeout: {connect: 5s}
  terminate: {race: [{rina: '$FAR', dif: backbone, dif-key: '$KEY'}, {tcp: '$TCP'}]}
";

/// Serves each connection with a word.
fn greeter(word: &'static str) -> Origin {
    let serve = move |mut stream: TcpStream| async move {
        let _ = stream.write_all(word.as_bytes()).await;
        let _ = stream.shutdown().await;
    };
    Origin::accepting(origin::listen("127.0.0.1:0".parse().unwrap()).unwrap(), serve).unwrap()
}

async fn greeting(node: &Node) -> String {
    let mut word = String::new();
    TcpStream::connect(node.address("in")).await.unwrap().read_to_string(&mut word).await.unwrap();
    word
}

/// A neighbour that vanishes costs one head start; later flows go over TCP at once.
#[tokio::test]
async fn a_race_falls_back_where_an_architecture_fails() {
    let (by_rina, by_tcp) = (greeter("rina"), greeter("tcp"));
    let overlay = Overlay::new(hermes()).unwrap();
    let mut far = far(&overlay, "127.0.0.1:0").await;
    let to = far.address("dif");
    let draft = overlay.node("near").document(RACING).with("TARGET", by_rina.address()).with("FAR", to);
    let draft = draft.with("TCP", by_tcp.address()).with("KEY", key_file(&overlay, "near.key", KEY));
    let near = draft.start().await.unwrap();
    // The first session is a heat; after it, the first of the list is preferred.
    greeting(&near).await;
    assert_eq!(greeting(&near).await, "rina");
    let key = key_file(&overlay, "other.key", "the key of another DIF altogether");
    far.reload(&format!("{FAR}\n# Another key."), &[("KEY", key), ("BIND", "127.0.0.1:0".to_owned())]).await.unwrap();
    assert_eq!(greeting(&near).await, "tcp");
    let record =
        near.record(|record| record["endpoint"].as_str().is_some_and(|one| one.contains(&to.to_string()))).await;
    assert_eq!(record["status"], 200);
    near.record(|record| record["endpoint"] == format!("over/{}", by_tcp.address())).await;
}

#[tokio::test]
async fn a_race_without_a_winner_fails_as_its_preferred_architecture() {
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = held.local_addr().unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let far = far(&overlay, "127.0.0.1:0").await;
    let draft = overlay.node("near").document(RACING).with("TARGET", closed).with("FAR", far.address("dif"));
    let near = draft.with("TCP", closed).with("KEY", key_file(&overlay, "near.key", KEY)).start().await.unwrap();
    let mut client = TcpStream::connect(near.address("in")).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let record = near.record(|record| record["listener"] == "in").await;
    assert!(record["reason"].as_str().unwrap().ends_with("the destination refused"), "{record}");
}
