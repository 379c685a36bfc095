//! The link reliability of NDNLPv2 over UDP faces that lose datagrams.
//!
//! In: scripted forwarders that lose every fifth datagram, and acknowledge the others. Out: every packet, although nobody
//! sends an Interest twice.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{LpPacket, Reassembler, ReassemblyLimits};
use hermes_ndn::packet::{DataBuilder, Interest};
use hermes_ndn::signature::Signer;
use hermes_ndn::{Data, MAX_FRAME, Name, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{EFFECT_TIMEOUT, Overlay};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

const DOCUMENT: &str = "
workers: 1
listeners: [{name: face, bind: '127.0.0.1:0', protocol: ndn, namespaces: {ORG: /org}}]
routes: [{name: packets, match: {kind: tcp}, terminate: {ndn: '$FACE'$RELIABLE}}]
";
const COUNT: usize = 200;

fn interest(number: usize) -> Interest {
    Interest::new(format!("/org/{number}").parse().unwrap())
}

fn answer(frame: &LpPacket) -> Bytes {
    let Packet::Interest(interest) = Packet::decode(frame.fragment.clone().unwrap()).unwrap() else { panic!() };
    let data = DataBuilder { name: interest.name, ..DataBuilder::default() };
    data.sign(&[b'.'; 3000], &Signer::digest()).unwrap()
}

fn ack(number: u64) -> Bytes {
    LpPacket { acks: vec![number], ..LpPacket::default() }.encode()
}

/// The node sends Interests again that the forwarder has lost.
#[tokio::test]
async fn a_reliable_face_sends_lost_frames_again() {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let forwarder = socket.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = vec![0; 65_536];
        for received in 0.. {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let frame = LpPacket::decode(Bytes::copy_from_slice(&buffer[..length])).unwrap();
            let number = frame.tx_sequence.expect("a number");
            if received % 5 != 4 {
                socket.send_to(&ack(number), from).await.unwrap();
                socket.send_to(&answer(&frame), from).await.unwrap();
            }
        }
    });
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("node").document(DOCUMENT).with("RELIABLE", ", reliable: true");
    let mut node = draft.with("FACE", format!("udp://{forwarder}")).start().await.unwrap();
    let mut stream = TcpStream::connect(node.address("face")).await.unwrap();
    let (mut splitter, mut buffer) = (PacketSplitter::new(MAX_FRAME), vec![0; 65_536]);
    let mut missing: BTreeSet<Name> = BTreeSet::new();
    for number in 0..COUNT {
        missing.insert(interest(number).name);
        stream.write_all(&interest(number).encode()).await.unwrap();
    }
    while !missing.is_empty() {
        let read = tokio::time::timeout(EFFECT_TIMEOUT, stream.read(&mut buffer)).await;
        splitter.push(&buffer[..read.unwrap_or_else(|_| panic!("{missing:?}")).unwrap()]);
        while let Some(packet) = splitter.next_packet().unwrap() {
            missing.remove(&Data::decode(LpPacket::decode(packet).unwrap().fragment.unwrap()).unwrap().name);
        }
    }
    node.assert_sound();
}

/// A face that numbers its frames gets numbered ones, until it has acknowledged each.
#[tokio::test]
async fn a_listener_sends_frames_again_to_a_face_that_asks_for_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let forwarder = listener.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut splitter, mut buffer) = (PacketSplitter::new(MAX_FRAME), vec![0; 65_536]);
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            splitter.push(&buffer[..read]);
            while let Some(packet) = splitter.next_packet().unwrap() {
                stream.write_all(&answer(&LpPacket::decode(packet).unwrap())).await.unwrap();
            }
        }
    });
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("node").document(DOCUMENT).with("RELIABLE", "");
    let mut node = draft.with("FACE", format!("tcp://{forwarder}")).start().await.unwrap();
    let face = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    face.connect(node.address("face")).await.unwrap();
    let mut reassembler = Reassembler::new(ReassemblyLimits { age: Duration::from_secs(60), ..Default::default() });
    let (mut buffer, mut received) = (vec![0; 65_536], 0);
    for number in 0..COUNT {
        let frame = LpPacket { tx_sequence: Some(number as u64), ..LpPacket::bare(interest(number).encode()) };
        face.send(&frame.encode()).await.unwrap();
        let (mut is_acknowledged, mut is_answered) = (false, false);
        while !(is_acknowledged && is_answered) {
            let read = tokio::time::timeout(EFFECT_TIMEOUT, face.recv(&mut buffer)).await.unwrap().unwrap();
            let mut frame = LpPacket::decode(Bytes::copy_from_slice(&buffer[..read])).unwrap();
            is_acknowledged |= frame.acks.contains(&(number as u64));
            let Some(sequence) = frame.tx_sequence.take() else { continue };
            received += 1;
            if received % 5 == 4 {
                continue;
            }
            face.send(&ack(sequence)).await.unwrap();
            is_answered |= reassembler.take(frame, Duration::ZERO).is_some();
        }
    }
    node.assert_sound();
}
