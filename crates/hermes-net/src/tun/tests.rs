//! Tests of merging and splitting: one end of a pair of queues sends merged packets, and the other splits them.

use std::future::poll_fn;

use bytes::Bytes;
use proptest::prelude::{Strategy, any, prop, proptest};

use super::checksum::{fold, of_header, pseudo, store, sum};
use super::*;

/// A segment of a TCP flow, or a datagram of a UDP flow.
#[derive(Clone, Copy)]
struct Packet {
    v6: bool,
    udp: bool,
    port: u16,
    identification: u16,
    sequence: u32,
    flags: u8,
    payload: usize,
}

const DATA: Packet = Packet {
    v6: false,
    udp: false,
    port: 4000,
    identification: 7,
    sequence: u32::MAX - 2000,
    flags: 0x10,
    payload: 1000,
};

impl Packet {
    fn build(self) -> Vec<u8> {
        let transport = if self.udp { 8 } else { 32 };
        let length = transport + self.payload;
        let mut packet = if self.v6 { vec![0x60, 0x01, 2, 3] } else { vec![0x45, 0] };
        if self.v6 {
            packet.extend((length as u16).to_be_bytes());
            packet.extend([if self.udp { 17 } else { 6 }, 64]);
            packet.extend([0xfd; 31]);
            packet.push(1);
        } else {
            packet.extend((20 + length as u16).to_be_bytes());
            packet.extend(self.identification.to_be_bytes());
            packet.extend([0, 0, 64, if self.udp { 17 } else { 6 }, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            of_header(&mut packet);
        }
        let at = packet.len();
        packet.extend(self.port.to_be_bytes());
        packet.extend([0, 80]);
        if self.udp {
            packet.extend((length as u16).to_be_bytes());
            packet.extend([0, 0]);
        } else {
            packet.extend(self.sequence.to_be_bytes());
            packet.extend([0, 0, 0, 9, 8 << 4, self.flags, 1, 0, 0, 0, 0, 0]);
            // Timestamps option.
            packet.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
        }
        packet.extend((0..self.payload).map(|byte| (byte * 7 + self.sequence as usize) as u8));
        let pseudo = pseudo(&packet, if self.udp { 17 } else { 6 }, length);
        let sum = pseudo + sum(&packet[at..]);
        store(&mut packet[at + if self.udp { 6 } else { 16 }..], sum);
        packet
    }

    fn next(self) -> Self {
        let sequence = self.sequence.wrapping_add(self.payload as u32);
        Self { sequence, identification: self.identification.wrapping_add(1), ..self }
    }

    /// A number of segments of one flow, in order.
    fn flow(self, count: usize) -> Vec<Self> {
        std::iter::successors(Some(self), |last| Some(last.next())).take(count).collect()
    }
}

/// Sends packets, receives and compares them; returns the number of messages.
async fn through(packets: &[Vec<u8>]) -> usize {
    let (here, there) = IdleQueue::pair().unwrap();
    let (here, there) = (here.start().unwrap(), there.start().unwrap());
    let packets: Vec<Bytes> = packets.iter().map(|packet| Bytes::copy_from_slice(packet)).collect();
    let send = async {
        let (mut sent, mut calls) = (0, 0);
        while sent < packets.len() {
            match here.try_send(&packets[sent..]) {
                Ok(moved) => (sent, calls) = (sent + moved.taken(), calls + moved.calls),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll_fn(|cx| here.poll_send_ready(cx)).await.unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
        calls
    };
    let receive = async {
        let (mut received, mut buffer) = (Vec::new(), ReceiveBuffer::default());
        while received.len() < packets.len() {
            let mut each = |packet| received.push(packet);
            let moved = poll_fn(|cx| there.poll_receive(cx, &mut buffer, &mut each)).await.unwrap();
            assert_eq!(moved.refused, 0);
        }
        received
    };
    let (calls, received) = tokio::join!(send, receive);
    assert_eq!(received.len(), packets.len());
    for (index, (is, was)) in received.iter().zip(&packets).enumerate() {
        assert_eq!(is, was, "packet {index}");
    }
    calls
}

fn built(packets: impl IntoIterator<Item = Packet>) -> Vec<Vec<u8>> {
    packets.into_iter().map(Packet::build).collect()
}

#[tokio::test]
async fn neighbours_of_a_flow_go_together_and_come_out_as_they_were() {
    for v6 in [false, true] {
        for udp in [false, true] {
            let mut flow = Packet { v6, udp, ..DATA }.flow(30);
            flow[29].payload = 333;
            assert_eq!(through(&built(flow)).await, 1, "v6 {v6}, udp {udp}");
            // 65 times 1,000 bytes with headers exceed one packet.
            assert_eq!(through(&built(Packet { v6, udp, ..DATA }.flow(65))).await, 2, "v6 {v6}, udp {udp}");
        }
    }
}

#[tokio::test]
async fn what_the_kernel_could_not_undo_is_not_merged() {
    let [one, two] = [DATA, DATA.next()];
    let alone: [(&str, Packet, Packet); 8] = [
        ("another flow", one, Packet { port: 4001, ..two }),
        ("a gap", one, Packet { sequence: two.sequence.wrapping_add(1), ..two }),
        ("a longer one", one, Packet { payload: 1001, ..two }),
        ("a pushed one before", Packet { flags: 0x18, ..one }, two),
        ("a reset", one, Packet { flags: 0x14, ..two }),
        ("a start", Packet { flags: 0x02, ..one }, two),
        ("an acknowledgement alone", one, Packet { payload: 0, ..two }),
        ("another identification", one, Packet { identification: 9, ..two }),
    ];
    for (what, one, two) in alone {
        assert_eq!(through(&built([one, two])).await, 2, "{what}");
    }
    assert_eq!(through(&built([one, Packet { flags: 0x18, ..two }])).await, 1, "a pushed one at the end");
}

#[tokio::test]
async fn a_wrong_checksum_stays_wrong() {
    for at in [11, 37, 200] {
        for broken in 0..3 {
            let mut packets = built(DATA.flow(3));
            packets[broken][at] ^= 0x40;
            assert!(through(&packets).await > 1, "byte {at} of packet {broken}");
        }
    }
}

#[tokio::test]
async fn what_is_no_packet_harms_nobody() {
    let [one, two] = [DATA.build(), DATA.next().build()];
    let mut packets: Vec<Vec<u8>> = (1..one.len()).step_by(3).map(|length| one[..length].to_vec()).collect();
    packets.extend([vec![0xff; 1500], one, two, vec![0x60; 45], vec![0x4f; 30], vec![0x45; 24]]);
    through(&packets).await;
}

/// Merges packets as a queue does, and splits them as the kernel would.
fn merged_and_cut(packets: &[Bytes]) -> Vec<Bytes> {
    let (mut rest, mut out) = (packets, Vec::new());
    while !rest.is_empty() {
        let run = gro_merge::MergeRun::of(rest, true);
        let (these, others) = rest.split_at(run.count);
        rest = others;
        if run.count == 1 {
            out.extend_from_slice(these);
            continue;
        }
        let (before, header) = run.header().split_at(offload::LENGTH);
        let mut whole = header.to_vec();
        these.iter().for_each(|packet| whole.extend_from_slice(&packet[run.skipped..]));
        let offload = offload::Offload::parse(before.try_into().unwrap()).unwrap();
        assert_eq!(gso_split::split(offload, &mut whole, &mut |packet| out.push(packet)), Some(run.count));
    }
    out
}

/// Returns the bytes of a packet, with a zero for an identification that no receiver reads (RFC 6864).
fn without_identification(packet: &Bytes) -> Vec<u8> {
    let mut bytes = packet.to_vec();
    if bytes.len() >= 20 && bytes[0] == 0x45 && bytes[6] & 0x40 != 0 {
        bytes[4..6].fill(0);
        bytes[10..12].fill(0);
    }
    bytes
}

fn packets() -> impl Strategy<Value = Vec<Bytes>> {
    let flags = prop::sample::select(vec![0x10u8, 0x18, 0x50, 0x11, 0x90]);
    let flow = (any::<[bool; 2]>(), 0..3u16, any::<u32>(), flags, 0..40usize, 1..5usize);
    let changes =
        prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 0..3);
    (prop::collection::vec(flow, 1..5), changes).prop_map(|(flows, changes)| {
        let mut packets = Vec::new();
        for ([v6, udp], port, sequence, flags, payload, count) in flows {
            packets.extend(built(Packet { v6, udp, port, sequence, flags, payload, identification: port }.flow(count)));
        }
        for (packet, at, byte) in changes {
            let packet = packet.get_mut(&mut packets);
            let place = at.index(packet.len());
            packet[place] = byte;
        }
        packets.into_iter().map(Bytes::from).collect()
    })
}

proptest! {
    /// Packets of clients with arbitrary contents.
    #[test]
    fn what_is_merged_comes_out_as_it_was(packets in packets()) {
        let before: Vec<_> = packets.iter().map(without_identification).collect();
        let after: Vec<_> = merged_and_cut(&packets).iter().map(without_identification).collect();
        assert_eq!(after, before);
    }

    /// An arbitrary header before a packet.
    #[test]
    fn nothing_that_a_queue_says_breaks_it(before in any::<[u8; offload::LENGTH]>(), packet in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Some(offload) = offload::Offload::parse(&before) {
            gso_split::split(offload, &mut packet.clone(), &mut |_| {});
        }
        gro_merge::MergeRun::of(&[packet.clone().into(), packet.into()], true);
    }
}

#[test]
fn what_is_not_what_its_offload_says_is_refused() {
    use offload::{Offload, Segments};
    let packet = DATA.build();
    let split = |segments, size, start| Offload::Split { segments, size, start };
    let wrong = [
        split(Segments::Tcp, 0, 20),
        split(Segments::Tcp, 100, 0),
        split(Segments::Tcp, 100, 1040),
        split(Segments::Tcp, 100, 1051),
        split(Segments::Udp, 100, 60_000),
        Offload::Checksum { start: 2000, offset: 6 },
        Offload::Checksum { start: 20, offset: 1031 },
    ];
    for offload in wrong {
        let mut each = |_| panic!("{offload:?}");
        assert_eq!(gso_split::split(offload, &mut packet.clone(), &mut each), None, "{offload:?}");
    }
    for length in 0..packet.len() {
        for segments in [Segments::Tcp, Segments::Udp] {
            gso_split::split(split(segments, 100, 20), &mut packet[..length].to_vec(), &mut |_| {});
        }
    }
}

#[test]
fn a_checksum_that_was_left_to_us_is_filled_in() {
    let whole = DATA.build();
    let mut packet = whole.clone();
    let pseudo = fold(pseudo(&packet, 6, packet.len() - 20));
    packet[36..38].copy_from_slice(&pseudo.to_ne_bytes());
    let mut received = Vec::new();
    let offload = offload::Offload::Checksum { start: 20, offset: 16 };
    assert_eq!(gso_split::split(offload, &mut packet, &mut |packet| received.push(packet)), Some(1));
    assert_eq!(received, [whole]);
}

#[test]
fn names_that_no_device_can_have_are_refused() {
    for name in ["", ".", "..", "a/b", "a b", "tun%d", "sixteen-letters-", "a:1"] {
        assert!(matches!(Device::create(name, 1, 1500), Err(TunError::Name { .. })), "{name:?}");
    }
}
