//! Tests of NDNLPv2: the field rules, fragmentation within the MTU, bounded reassembly, and recovery from loss.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A packet with a payload of `length` bytes.
fn data(length: usize) -> Bytes {
    let mut out = BytesMut::new();
    tlv::put(&mut out, types::DATA, &vec![7; length]);
    out.freeze()
}

fn decode(fields: &[u8]) -> Result<LpPacket, LpError> {
    let mut out = BytesMut::new();
    tlv::put(&mut out, LP_PACKET, fields);
    LpPacket::decode(out.freeze())
}

#[test]
fn a_frame_without_fields_is_bare() {
    let packet = data(10);
    let frame = LpPacket::decode(packet.clone()).unwrap();
    assert_eq!(frame, LpPacket::bare(packet.clone()));
    assert_eq!(frame.encode(), packet);
    assert_eq!(LpPacket::default().encode(), [100, 0][..]);
    assert_eq!(decode(&[]), Ok(LpPacket::default()));
    let nack = LpPacket::nack(packet, NackReason::NO_ROUTE);
    assert_eq!(LpPacket::decode(nack.encode()), Ok(nack));
}

#[test]
fn fields_follow_the_rules() {
    let sequence = [81, 8, 0, 0, 0, 0, 0, 0, 0, 1];
    let with = |tail: &[u8]| decode(&[&sequence[..], tail].concat());
    for (result, error) in [
        (decode(&[81, 1, 0]), TlvError::BadLength { kind: 81, length: 1 }.into()),
        (with(&sequence), LpError::Order(81)),
        (decode(&[80, 0, 98, 1, 0]), LpError::Order(98)),
        (decode(&[80, 0, 80, 0]), LpError::Order(80)),
        (decode(&[98, 0]), TlvError::BadLength { kind: 98, length: 0 }.into()),
        (decode(&[83, 1, 2, 80, 0]), LpError::Fragmentation),
        (with(&[83, 1, 2]), LpError::Fragmentation),
        (with(&[82, 1, 2, 83, 1, 2, 80, 0]), LpError::Fragmentation),
        (with(&[83, 1, 0, 80, 0]), LpError::Fragmentation),
        (decode(&[99, 0]), LpError::UnknownField(99)),
        (decode(&[253, 3, 34, 0]), LpError::UnknownField(802)),
        (decode(&[253, 3, 192, 0]), LpError::UnknownField(960)),
        (decode(&[253, 3, 76, 1, 0]), TlvError::BadLength { kind: 844, length: 1 }.into()),
        (LpPacket::decode(Bytes::from_static(&[9, 0])), LpError::UnknownFrame(9)),
        (LpPacket::decode(Bytes::from_static(&[5, 0, 0])), TlvError::Trailing(1).into()),
        (LpPacket::decode(Bytes::new()), TlvError::Truncated.into()),
    ] {
        assert_eq!(result, Err(error));
    }
    // IncomingFaceId, CachePolicy, PrefixAnnouncement and an unknown field are ignored.
    let ignored = [253, 3, 44, 1, 0, 253, 3, 52, 0, 253, 3, 80, 0, 253, 3, 188, 0];
    assert_eq!(decode(&ignored), Ok(LpPacket::default()));
    let empty_nack = decode(&[253, 3, 32, 0]).unwrap();
    assert_eq!(empty_nack.nack, Some(NackReason::NONE));
}

fn reassemble(frames: impl IntoIterator<Item = LpPacket>) -> Vec<LpPacket> {
    let mut reassembler = Reassembler::new(ReassemblerConfig::default());
    frames.into_iter().filter_map(|frame| reassembler.push(frame, Duration::ZERO)).collect()
}

#[test]
fn fragmentation_reports_its_limits() {
    let mut fragmenter = Fragmenter::new(u64::MAX);
    let split = |fragmenter: &mut Fragmenter, mtu, reserve| {
        fragmenter.split(LpPacket::bare(data(8000)), mtu, reserve, false).map(|frames| frames.len())
    };
    assert_eq!(split(&mut fragmenter, 26, 0), Err(FragmentError::MtuTooSmall { mtu: 26 }));
    assert_eq!(split(&mut fragmenter, 10, 20), Err(FragmentError::MtuTooSmall { mtu: 10 }));
    assert!(matches!(split(&mut fragmenter, 30, 0), Err(FragmentError::TooManyFragments { .. })));
    assert_eq!(split(&mut fragmenter, 9000, 0), Ok(1));
    // Sequences wrap.
    assert_eq!(split(&mut fragmenter, 1500, 0), Ok(6));
}

#[test]
fn the_first_fragment_carries_the_network_fields() {
    let packet = LpPacket {
        pit_token: Some(Bytes::from_static(&[1; 32])),
        congestion_mark: Some(1),
        ..LpPacket::nack(data(3000), NackReason::CONGESTION)
    };
    let frames = Fragmenter::new(7).split(packet.clone(), 1000, 0, false).unwrap();
    assert!(frames.iter().all(|frame| frame.encode().len() <= 1000));
    assert!(frames[1..].iter().all(|frame| frame.pit_token.is_none() && frame.nack.is_none()));
    assert_eq!(reassemble(frames.into_iter().rev()), [packet]);
}

#[test]
fn reassembly_is_bounded_and_counts_drops() {
    let config = ReassemblerConfig { max_partials: 2, ..ReassemblerConfig::default() };
    let mut reassembler = Reassembler::new(config);
    let frames = |first| Fragmenter::new(first).split(LpPacket::bare(data(3000)), 1000, 0, false).unwrap();
    for first in [100, 200, 300] {
        assert!(reassembler.push(frames(first)[0].clone(), MS).is_none());
        assert!(reassembler.push(frames(first)[0].clone(), MS).is_none());
    }
    assert_eq!(reassembler.held().0, 2);
    let wrong = LpPacket { frag_count: 9, ..frames(200)[1].clone() };
    assert!(reassembler.push(wrong, MS).is_none());
    let many = LpPacket { frag_count: 401, ..frames(200)[1].clone() };
    assert!(reassembler.push(many, MS).is_none());
    let long = LpPacket { payload: Some(data(8800)), ..frames(200)[1].clone() };
    assert!(reassembler.push(long, MS).is_none());
    assert_eq!(reassembler.next_timeout(), Some(501 * MS));
    reassembler.expire(501 * MS);
    assert_eq!((reassembler.held(), reassembler.next_timeout()), ((0, 0), None));
    let stats = reassembler.stats();
    assert_eq!((stats.evicted, stats.timed_out, stats.too_long), (1, 1, 1));
    assert_eq!((stats.duplicate, stats.invalid, stats.reassembled), (3, 2, 0));
}

/// Two ends of a link, and a clock.
struct Link {
    ends: [(Reliability, Fragmenter); 2],
    now: Duration,
}

const MTU: usize = 500;

impl Link {
    fn new() -> Self {
        let end = || (Reliability::new(ReliabilityConfig::default(), u64::MAX - 3), Fragmenter::new(u64::MAX - 1));
        Self { ends: [end(), end()], now: Duration::ZERO }
    }

    fn send(&mut self, packet: Bytes) -> Vec<Bytes> {
        let (reliability, fragmenter) = &mut self.ends[0];
        let frames = fragmenter.split(LpPacket::bare(packet), MTU, Reliability::RESERVE, true).unwrap();
        reliability.send(frames, MTU, self.now)
    }

    /// Delivers a frame to the other end. Returns the frame if it is not a duplicate.
    fn deliver(&mut self, to: usize, frame: Bytes) -> Option<LpPacket> {
        assert!(frame.len() <= MTU, "{} bytes exceed the MTU", frame.len());
        let frame = LpPacket::decode(frame).unwrap();
        self.ends[to].0.receive(&frame, self.now).then_some(frame)
    }

    fn poll(&mut self, end: usize) -> Vec<Bytes> {
        std::iter::from_fn(|| self.ends[end].0.poll(MTU, self.now)).collect()
    }

    /// Moves the clock to the next timeout of either end.
    fn advance(&mut self) -> bool {
        let next = self.ends.iter().filter_map(|(reliability, _)| reliability.next_timeout()).min();
        self.now = self.now.max(next.unwrap_or(self.now));
        next.is_some()
    }
}

#[test]
fn idle_acks_end_retransmission() {
    let mut link = Link::new();
    for frame in link.send(data(2000)) {
        link.deliver(1, frame).unwrap();
    }
    assert!(link.poll(1).is_empty());
    assert!(link.advance());
    let acks = link.poll(1);
    assert_eq!(acks.len(), 1);
    assert!(link.deliver(0, acks[0].clone()).unwrap().payload.is_none());
    assert_eq!(link.ends[0].0.outstanding(), 0);
    assert!(!link.advance());
    assert_eq!(link.ends[0].0.rto(), Duration::from_millis(200));
}

#[test]
fn a_lost_frame_is_sent_again_and_a_duplicate_is_dropped() {
    let mut link = Link::new();
    let lost = link.send(data(10));
    assert_eq!(link.ends[0].0.next_timeout(), Some(Duration::from_secs(1)));
    assert!(link.advance());
    let again = link.poll(0);
    assert_eq!(again.len(), 1);
    assert_eq!(link.ends[0].0.rto(), Duration::from_secs(2), "RFC 6298, section 5.5");
    let first = link.deliver(1, again[0].clone()).unwrap();
    assert!(link.deliver(1, lost[0].clone()).is_none(), "the Sequence is known");
    assert_eq!(first.payload, Some(data(10)));
    assert_eq!(link.ends[1].0.stats().duplicate, 1);
}

#[test]
fn three_later_acks_trigger_a_fast_retransmission() {
    let mut link = Link::new();
    let frames: Vec<Bytes> = (0..4).flat_map(|_| link.send(data(10))).collect();
    for frame in &frames[1..] {
        link.deliver(1, frame.clone());
    }
    link.now += 10 * MS;
    let acks = link.poll(1);
    link.deliver(0, acks[0].clone());
    assert_eq!(link.ends[0].0.next_timeout(), Some(Duration::ZERO));
    assert_eq!(link.poll(0).len(), 1);
    assert_eq!(link.ends[0].0.stats().retransmitted, 1);
}

#[test]
fn a_dead_peer_ends_all_retransmissions() {
    let mut link = Link::new();
    link.send(data(2000));
    let mut sent = 0;
    while link.advance() {
        sent += link.poll(0).len();
    }
    let stats = link.ends[0].0.stats();
    assert_eq!((stats.given_up, link.ends[0].0.outstanding()), (1, 0));
    assert_eq!(sent, 5 * 3);
}

#[test]
fn more_frames_than_the_bound_are_sent_unprotected() {
    let config = ReliabilityConfig { max_unacked: 1, max_received: 1, ..ReliabilityConfig::default() };
    let mut reliability = Reliability::new(config, 0);
    let frame = |sequence| LpPacket { sequence: Some(sequence), ..LpPacket::bare(data(1)) };
    let wires = reliability.send(vec![frame(0), frame(1)], MTU, MS);
    assert!(LpPacket::decode(wires[0].clone()).unwrap().tx_sequence.is_some());
    assert!(LpPacket::decode(wires[1].clone()).unwrap().tx_sequence.is_none());
    assert!(reliability.receive(&LpPacket { tx_sequence: Some(5), ..frame(5) }, MS));
    assert!(reliability.receive(&LpPacket { tx_sequence: Some(6), ..frame(6) }, MS));
    assert!(reliability.receive(&LpPacket { tx_sequence: Some(7), ..frame(5) }, MS), "5 has been forgotten");
    assert_eq!((reliability.stats().acks_dropped, reliability.stats().unprotected), (2, 1));
}

prop_compose! {
    fn any_frame()(
        sequence: Option<u64>, token in proptest::option::of(proptest::collection::vec(any::<u8>(), 1..=32)),
        nack: Option<u64>, congestion_mark: Option<u64>, acks in proptest::collection::vec(any::<u64>(), 0..6),
        tx_sequence: Option<u64>, non_discovery: bool, payload: Option<Vec<u8>>, part in (0..9u64, 1..9u64),
    ) -> LpPacket {
        let fragmented = sequence.is_some() && payload.is_some();
        LpPacket {
            sequence,
            frag_index: if fragmented { part.0 % part.1 } else { 0 },
            frag_count: if fragmented { part.1 } else { 1 },
            pit_token: token.map(Bytes::from),
            nack: nack.map(NackReason),
            congestion_mark,
            acks: acks.into(),
            tx_sequence,
            non_discovery,
            payload: payload.map(Bytes::from),
        }
    }
}

proptest! {
    #[test]
    fn frames_round_trip(frame in any_frame()) {
        let wire = frame.encode();
        prop_assert_eq!(wire.len(), frame.encoded_len());
        prop_assert_eq!(LpPacket::decode(wire), Ok(frame));
    }

    #[test]
    fn fragments_fit_and_reassemble(length in 0..8700usize, mtu in 80..1600usize, reserve in 0..20usize, token: bool) {
        let token = token.then(|| Bytes::from_static(&[3; 32]));
        let packet = LpPacket { pit_token: token, ..LpPacket::bare(data(length)) };
        let frames = Fragmenter::new(u64::MAX).split(packet.clone(), mtu, reserve, false).unwrap();
        prop_assert!(frames.iter().all(|frame| frame.encode().len() + reserve <= mtu));
        prop_assert_eq!(reassemble(frames), [packet]);
    }

    /// Every packet arrives once if the link loses less than `max_retries` allow, whatever the order of losses.
    #[test]
    fn packets_survive_random_loss(losses in proptest::collection::vec(any::<bool>(), 0..12), sizes in proptest::collection::vec(0..2000usize, 1..6)) {
        let mut link = Link::new();
        link.ends[0].0 = Reliability::new(ReliabilityConfig { max_retries: 20, ..ReliabilityConfig::default() }, 0);
        let mut reassembler = Reassembler::new(ReassemblerConfig { timeout: Duration::from_secs(3600), ..ReassemblerConfig::default() });
        let mut frames: Vec<Bytes> = sizes.iter().flat_map(|size| link.send(data(*size))).collect();
        let mut losses = losses.into_iter();
        let mut arrived = Vec::new();
        for _ in 0..1000 {
            for frame in frames.drain(..).filter(|_| !losses.next().unwrap_or(false)).collect::<Vec<_>>() {
                let now = link.now;
                if let Some(frame) = link.deliver(1, frame) {
                    arrived.extend(reassembler.push(frame, now).and_then(|packet| packet.payload));
                }
            }
            for acks in link.poll(1) {
                if !losses.next().unwrap_or(false) {
                    link.deliver(0, acks);
                }
            }
            if !link.advance() {
                break;
            }
            frames = link.poll(0);
        }
        prop_assert_eq!(link.ends[0].0.outstanding(), 0);
        let mut expected: Vec<Bytes> = sizes.iter().map(|size| data(*size)).collect();
        expected.sort();
        arrived.sort();
        prop_assert_eq!(arrived, expected);
    }
}
