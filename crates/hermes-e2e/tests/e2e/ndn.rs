//! NDN packets through an overlay: faces at both ends, and nodes between them that balance by user and namespace.
//!
//! In: Interests over UDP, TCP and Unix sockets, from scripted forwarders. Out: Data of the replica that policy names,
//! returned Interests, and bounded memory where a peer misbehaves.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{Fragmenter, LpPacket, NackReason};
use hermes_ndn::packet::{DataBuilder, Interest};
use hermes_ndn::signature::Signer;
use hermes_ndn::{Data, MAX_FRAME, Name, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::poll::until;
use nix::sys::signal::Signal;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket, UnixListener, UnixStream};
use tokio::task::JoinSet;

const NEAR: &str = "
listeners:
- {name: alice, bind: '127.0.0.1:0', unix: $DIR/alice.sock, protocol: ndn, namespaces: $NAMES, set-headers: {hermes-user: alice}}
- {name: bob, bind: '127.0.0.1:0', protocol: ndn, namespaces: $NAMES, set-headers: {hermes-user: bob}}
routes:
- {name: first, match: {headers: {hermes-service: NDN}}, upstream: far}
upstreams:
- {name: far, protocol: $HTTP, endpoints: ['$FAR'], overlay: true}
";
const NAMES: &str = "{DEV: [/org/dev, /org/test/special], TEST: /org/test}";
/// Each user and namespace has a replica of its own.
const FAR: &str = "
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}
routes:
- {name: a, match: {user: alice, headers: {hermes-namespace: DEV}}, terminate: {ndn: '$A'}}
- {name: b, match: {user: alice, headers: {hermes-namespace: TEST}}, terminate: {ndn: '$B'}}
- {name: c, match: {user: bob, headers: {hermes-namespace: DEV}}, terminate: {ndn: '$C'}}
";

/// Producers, which answer each Interest with their own name. They end when the value is dropped.
struct Producers {
    _tasks: JoinSet<()>,
    faces: [String; 3],
}

fn answer(frame: Bytes, who: &str) -> Bytes {
    let frame = LpPacket::decode(frame).unwrap();
    let Packet::Interest(interest) = Packet::decode(frame.fragment.unwrap()).unwrap() else { panic!() };
    let content = [who.as_bytes(), &[b'.'; 7000]].concat();
    let data = DataBuilder { name: interest.name, ..DataBuilder::default() }.sign(&content, &Signer::digest()).unwrap();
    // An answer repeats the token of its Interest.
    LpPacket { pit_token: frame.pit_token, ..LpPacket::bare(data) }.encode()
}

async fn serve_stream(mut stream: impl AsyncRead + AsyncWrite + Unpin, who: &'static str) {
    let mut splitter = PacketSplitter::new(MAX_FRAME);
    let mut buffer = vec![0; 65_536];
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        splitter.push(&buffer[..read]);
        while let Some(packet) = splitter.next_packet().unwrap() {
            if stream.write_all(&answer(packet, who)).await.is_err() {
                return;
            }
        }
    }
}

impl Producers {
    /// Starts one producer for each transport of a face.
    async fn start(dir: &Path) -> Self {
        let mut tasks = JoinSet::new();
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let path: PathBuf = dir.join("forwarder.sock");
        let unix = UnixListener::bind(&path).unwrap();
        let faces = [
            format!("udp://{}", udp.local_addr().unwrap()),
            format!("tcp://{}", tcp.local_addr().unwrap()),
            format!("unix://{}", path.display()),
        ];
        tasks.spawn(async move {
            let mut buffer = vec![0; 65_536];
            loop {
                let (length, from) = udp.recv_from(&mut buffer).await.unwrap();
                udp.send_to(&answer(Bytes::copy_from_slice(&buffer[..length]), "udp"), from).await.unwrap();
            }
        });
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = tcp.accept().await.unwrap();
                connections.spawn(serve_stream(stream, "tcp"));
            }
        });
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = unix.accept().await.unwrap();
                connections.spawn(serve_stream(stream, "unix"));
            }
        });
        Self { _tasks: tasks, faces }
    }
}

async fn overlay_of(overlay: &Overlay, http: &str) -> (Node, Node, Producers) {
    let producers = Producers::start(overlay.dir()).await;
    let [a, b, c] = &producers.faces;
    let far = overlay.node("far").document(FAR).with("A", a).with("B", b).with("C", c).start().await.unwrap();
    let draft = overlay.node("near").document(NEAR).with("NAMES", NAMES).with("HTTP", http);
    let draft = draft.with("DIR", overlay.dir().display());
    let near = draft.with("FAR", far.address("overlay")).start().await.unwrap();
    (near, far, producers)
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A stream face of a scripted forwarder.
struct StreamFace<S = TcpStream> {
    stream: S,
    splitter: PacketSplitter,
}

impl StreamFace {
    async fn connect(to: SocketAddr) -> Self {
        Self::over(TcpStream::connect(to).await.unwrap())
    }
}

impl StreamFace<UnixStream> {
    async fn connect_locally(to: &Path) -> Self {
        Self::over(UnixStream::connect(to).await.unwrap())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> StreamFace<S> {
    fn over(stream: S) -> Self {
        Self { stream, splitter: PacketSplitter::new(MAX_FRAME) }
    }

    async fn send(&mut self, frame: &Bytes) {
        self.stream.write_all(frame).await.unwrap();
    }

    async fn receive(&mut self) -> LpPacket {
        loop {
            if let Some(packet) = self.splitter.next_packet().unwrap() {
                return LpPacket::decode(packet).unwrap();
            }
            let mut buffer = vec![0; 65_536];
            let read =
                tokio::time::timeout(Duration::from_secs(30), self.stream.read(&mut buffer)).await.unwrap().unwrap();
            assert!(read > 0, "the face has closed");
            self.splitter.push(&buffer[..read]);
        }
    }
}

fn producer_of(frame: &LpPacket) -> (Name, String) {
    let data = Data::decode(frame.fragment.clone().unwrap()).unwrap();
    let who = data.content.iter().take_while(|byte| **byte != b'.').map(|byte| char::from(*byte)).collect();
    (data.name, who)
}

/// User and namespace decide in every single case, over each version of HTTP.
#[tokio::test]
async fn packets_reach_the_replica_of_their_user_and_namespace() {
    for http in ["h1", "h2"] {
        let overlay = Overlay::new(hermes()).unwrap();
        let (near, _far, _producers) = overlay_of(&overlay, http).await;
        for (listener, prefix, replica) in [
            ("alice", "/org/dev", "udp"),
            ("alice", "/org/test", "tcp"),
            ("alice", "/org/test/special", "udp"),
            ("bob", "/org/dev", "unix"),
        ] {
            let mut face = StreamFace::connect(near.address(listener)).await;
            for number in 0..100 {
                let interest = Interest::new(name(&format!("{prefix}/seg={number}")));
                let token = Bytes::from(vec![number; 4]);
                let frame = LpPacket { pit_token: Some(token.clone()), ..LpPacket::bare(interest.encode()) };
                face.send(&frame.encode()).await;
                let answer = face.receive().await;
                assert_eq!(producer_of(&answer), (interest.name, replica.to_owned()), "{http}");
                assert_eq!(answer.pit_token, Some(token));
            }
        }
    }
}

/// A pipeline of Interests over UDP; each Data is longer than the path of one frame would be.
#[tokio::test]
async fn a_datagram_face_is_served_and_its_fragments_are_joined() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (near, _far, _producers) = overlay_of(&overlay, "h2").await;
    let face = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    face.connect(near.address("alice")).await.unwrap();
    let mut fragmenter = Fragmenter::new(u64::MAX - 3);
    let mut buffer = vec![0; 65_536];
    for number in 0..50 {
        // A long name makes an Interest of several frames.
        let long = format!("/org/test/{}/seg={number}", "x".repeat(1500));
        let frame = LpPacket { tx_sequence: Some(number), ..LpPacket::bare(Interest::new(name(&long)).encode()) };
        let frames = fragmenter.split(&frame, 600).unwrap();
        assert!(frames.len() > 2);
        for frame in frames {
            face.send(&frame).await.unwrap();
        }
        let (mut acked, mut answered) = (false, false);
        while !(acked && answered) {
            let length = tokio::time::timeout(Duration::from_secs(30), face.recv(&mut buffer)).await.unwrap().unwrap();
            let frame = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length])).unwrap();
            acked |= frame.acks == [number];
            if frame.fragment.is_some() {
                assert_eq!(producer_of(&frame), (name(&long), "tcp".to_owned()));
                answered = true;
            }
        }
    }
}

#[tokio::test]
async fn an_interest_without_a_namespace_or_a_route_comes_back() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (near, _far, _producers) = overlay_of(&overlay, "h2").await;
    // Bob has no replica for TEST: the session is denied.
    for (listener, of) in [("alice", "/com/x"), ("bob", "/org/test/x")] {
        let mut face = StreamFace::connect(near.address(listener)).await;
        let interest = Interest::new(name(of)).encode();
        let token = Some(Bytes::from_static(b"token"));
        let frame = LpPacket { pit_token: token.clone(), ..LpPacket::bare(interest.clone()) }.encode();
        face.send(&frame).await;
        assert_eq!(
            face.receive().await,
            LpPacket { nack: Some(NackReason::NoRoute), pit_token: token, ..LpPacket::bare(interest) }
        );
    }
}

/// A face that closes at either end ends the session, and loses no later Interest.
#[tokio::test]
async fn a_session_ends_with_either_of_its_faces() {
    const DOCUMENT: &str = "
workers: 1
listeners: [{name: face, bind: '127.0.0.1:0', protocol: ndn, namespaces: {ORG: /org}}]
routes: [{name: packets, match: {kind: tcp}, terminate: {ndn: 'tcp://$PRODUCER'}}]
";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let producer = listener.local_addr().unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let mut node = overlay.node("node").document(DOCUMENT).with("PRODUCER", producer).start().await.unwrap();
    let mut face = StreamFace::connect(node.address("face")).await;
    let mut buffer = vec![0; 10_000];
    for _ in 0..3 {
        face.send(&Interest::new(name("/org/x")).encode()).await;
        let (mut stream, _) = listener.accept().await.unwrap();
        let read = stream.read(&mut buffer).await.unwrap();
        stream.write_all(&answer(Bytes::copy_from_slice(&buffer[..read]), "tcp")).await.unwrap();
        assert_eq!(producer_of(&face.receive().await).1, "tcp");
        // The producer restarts, and the next Interest finds the new one.
        drop(stream);
        until("the session has ended", async || node.metric("hermes_sessions_open", "").await.unwrap() == 0.0).await;
    }
    face.send(&Interest::new(name("/org/x")).encode()).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    assert!(stream.read(&mut buffer).await.unwrap() > 0);
    drop(face);
    let end = tokio::time::timeout(Duration::from_secs(30), stream.read(&mut buffer)).await;
    assert_eq!(end.unwrap().unwrap(), 0, "the producer learns that its consumer has gone");
    until("the session has ended", async || node.metric("hermes_sessions_open", "").await.unwrap() == 0.0).await;
    node.assert_sound();
}

/// A consumer that reads nothing stops its own session, and the producer with it; nothing is lost.
#[tokio::test]
async fn a_slow_consumer_slows_its_producer_and_loses_nothing() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (near, far, _producers) = overlay_of(&overlay, "h2").await;
    loses_nothing(StreamFace::connect(near.address("alice")).await).await;
    loses_nothing(StreamFace::connect_locally(&overlay.dir().join("alice.sock")).await).await;
    for node in [&near, &far] {
        assert!(node.peak_memory().unwrap() < 120 << 20, "{}", node.name());
    }
}

async fn loses_nothing(mut face: StreamFace<impl AsyncRead + AsyncWrite + Unpin>) {
    // 20 MB of Data are asked for before any is read.
    const COUNT: usize = 3000;
    let (mut read, mut write) = tokio::io::split(face.stream);
    let asking = async {
        for number in 0..COUNT {
            write.write_all(&Interest::new(name(&format!("/org/test/seg={number}"))).encode()).await.unwrap();
        }
    };
    let reading = async {
        // The queues on the way fill meanwhile.
        let _ = tokio::time::timeout(Duration::from_secs(1), std::future::pending::<()>()).await;
        let mut buffer = vec![0; 65_536];
        let mut received = 0;
        while received < COUNT {
            let length = tokio::time::timeout(Duration::from_secs(60), read.read(&mut buffer)).await.unwrap().unwrap();
            assert!(length > 0);
            face.splitter.push(&buffer[..length]);
            while let Some(packet) = face.splitter.next_packet().unwrap() {
                let (found, _) = producer_of(&LpPacket::decode(packet).unwrap());
                assert_eq!(found, name(&format!("/org/test/seg={received}")));
                received += 1;
            }
        }
    };
    tokio::join!(asking, reading);
}

/// A Unix socket survives a killed process, moves with the document, and goes with its listener.
#[tokio::test]
async fn a_unix_socket_follows_its_listener() {
    const DOCUMENT: &str = "
listeners: [{name: local, $AT, protocol: ndn, namespaces: {ORG: /org}}]
routes: []
";
    let overlay = Overlay::new(hermes()).unwrap();
    let (first, second) = (overlay.dir().join("first.sock"), overlay.dir().join("second.sock"));
    let at = |path: &Path| format!("unix: {}", path.display());
    let draft = || overlay.node("local").document(DOCUMENT).with("AT", at(&first));
    let killed = draft().start().await.unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    assert!(!killed.ended().await.success());
    assert!(first.exists(), "a killed process removes nothing");
    let mut node = draft().start().await.unwrap();
    returns_an_interest(&first).await;
    // Another process of the same machine cannot have it.
    let rival = overlay.node("rival").document(DOCUMENT).with("AT", at(&first)).launch().unwrap();
    rival.says(&format!("listening on {}: Address already in use", first.display())).await;
    assert_eq!(rival.ended().await.code(), Some(1));
    returns_an_interest(&first).await;

    node.reload(DOCUMENT, &[("AT", at(&second))]).await.unwrap();
    returns_an_interest(&second).await;
    assert!(!first.exists(), "the file of a closed listener goes");
    node.reload(DOCUMENT, &[("AT", format!("bind: '127.0.0.1:0', {}", at(&second)))]).await.unwrap();
    returns_an_interest(&second).await;
    StreamFace::connect(node.address("local")).await;
    node.assert_sound();
    assert!(node.end(Duration::from_secs(30)).unwrap().success());
    assert!(!second.exists());
}

/// The node answers at the socket: no session leads anywhere.
async fn returns_an_interest(path: &Path) {
    let mut face = StreamFace::connect_locally(path).await;
    face.send(&Interest::new(name("/com/x")).encode()).await;
    assert_eq!(face.receive().await.nack, Some(NackReason::NoRoute));
}

#[tokio::test]
async fn garbage_ends_a_stream_and_is_dropped_as_a_datagram() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (mut near, _far, _producers) = overlay_of(&overlay, "h2").await;
    let mut garbage: Vec<Vec<u8>> = vec![
        vec![0; 64],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        // A packet longer than any, an unknown type, an Interest without a name, a Data cut short.
        vec![6, 254, 255, 255, 255, 255],
        vec![9, 1, 0],
        vec![5, 0],
        vec![0x64, 4, 0x50, 2, 6, 9],
    ];
    // A name of 4,000 empty components is long, and valid.
    let mut long = Vec::new();
    hermes_ndn::tlv::put_nested(&mut long, 5, |out| hermes_ndn::tlv::put(out, 7, &[8, 0].repeat(4000)));
    garbage.push(long);
    let datagrams = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    datagrams.connect(near.address("alice")).await.unwrap();
    for bytes in &garbage {
        let mut stream = TcpStream::connect(near.address("alice")).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut rest)).await.unwrap();
        datagrams.send(bytes).await.unwrap();
    }
    near.metric_reaches("hermes_datagrams_dropped_total", "reason=\"ndn-malformed\"", 5.0).await;
    let mut face = StreamFace::connect(near.address("alice")).await;
    face.send(&Interest::new(name("/org/dev/still")).encode()).await;
    assert_eq!(producer_of(&face.receive().await).1, "udp");
    near.assert_sound();
}

/// The socket of a listener that changes its protocol belongs to the new one, in both directions.
#[tokio::test]
async fn a_listener_changes_its_protocol_at_the_same_address() {
    let overlay = Overlay::new(hermes()).unwrap();
    let address = hermes_testkit::port::reserve("127.0.0.1");
    let document = "
listeners: [{name: face, bind: '$ADDRESS', $PROTOCOL}]
routes: []
";
    let (as_ndn, as_udp) = ("protocol: ndn, namespaces: {ORG: /org}", "protocol: udp, authority: 'X:1'");
    let draft = overlay.node("changing").document(document).with("ADDRESS", address).with("PROTOCOL", as_ndn);
    let mut node = draft.start().await.unwrap();
    let face = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    face.connect(address).await.unwrap();
    let interest = Interest::new(name("/com/x")).encode();
    let nack = LpPacket::returning(interest.clone(), NackReason::NoRoute, None).encode();
    for (round, protocol) in [as_ndn, as_udp, as_ndn].into_iter().enumerate() {
        if round > 0 {
            let values = [("ADDRESS", address.to_string()), ("PROTOCOL", protocol.to_owned())];
            node.reload(document, &values).await.unwrap();
        }
        let mut buffer = vec![0; 9000];
        // A datagram may still reach the socket that closes.
        let answered = async {
            loop {
                face.send(&interest).await.unwrap();
                let received = tokio::time::timeout(Duration::from_millis(200), face.recv(&mut buffer)).await;
                if let Ok(Ok(length)) = received {
                    return length;
                }
            }
        };
        let within = Duration::from_secs(if protocol == as_ndn { 30 } else { 1 });
        match tokio::time::timeout(within, answered).await {
            Ok(length) => assert_eq!((protocol, &buffer[..length]), (as_ndn, &nack[..])),
            Err(_) => assert_eq!(protocol, as_udp),
        }
    }
    node.assert_sound();
}
