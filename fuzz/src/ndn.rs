//! Properties of NDN packets, of the link protocol, of the forwarder and of fetches.
//!
//! In: bytes of a peer. Out: nothing, or a panic. The tests of `hermes-ndn` include this file, too, and replay the corpus,
//! so that the crate of the fuzz targets needs no library for signatures.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::fetch::{Fetch, FetchLimits};
use hermes_ndn::forwarder::{Delivery, Forwarder, ForwarderLimits, Output};
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{Fragmenter, LpPacket, NackReason, Reassembler, ReassemblyLimits, Retransmitter};
use hermes_ndn::name::types;
use hermes_ndn::packet::{APPLICATION_NACK, Data, DataBuilder, Interest, name_of};
use hermes_ndn::signature::{Signer, VerifyingKey};
use hermes_ndn::trust::TrustSchema;
use hermes_ndn::{Component, MAX_FRAME, Name, Packet};

/// A decoded packet has a name whose URI reads as the same name. The stream of a packet twice has two packets.
pub fn ndn_packet(data: &[u8]) {
    let bytes = Bytes::copy_from_slice(data);
    let Ok(packet) = Packet::decode(bytes.clone()) else { return };
    let name = packet.name();
    assert_eq!(name_of(bytes.clone()).map(|(_, found)| found).as_ref(), Ok(name));
    assert_eq!(name.components().collect::<Name>(), *name);
    assert_eq!(name.to_string().parse::<Name>().as_ref(), Ok(name), "{name}");
    for count in 0..=name.len().min(10) {
        let prefix = name.prefix(count);
        assert!(prefix.is_prefix_of(name) && prefix <= *name && prefix.len() == count);
    }
    if let Packet::Interest(interest) = &packet
        && interest.parameters.is_none()
    {
        assert_eq!(Packet::decode(interest.encode()).as_ref(), Ok(&packet));
    }
    let mut splitter = PacketSplitter::new(MAX_FRAME);
    splitter.push(&bytes);
    splitter.push(&bytes);
    for _ in 0..2 {
        if bytes.len() <= MAX_FRAME {
            assert_eq!(splitter.next_packet(), Ok(Some(bytes.clone())));
        }
    }
}

/// The first byte is the width of a link, in units of eight bytes. A frame reads as it was written. Its fragments join to
/// the same frame. Frames of a peer, cut out of the rest, never leave more than the limits in memory.
pub fn ndn_lp(data: &[u8]) {
    let Some((width, rest)) = data.split_first() else { return };
    let mut reassembler = Reassembler::new(ReassemblyLimits { packets: 4, bytes: 4096, ..ReassemblyLimits::default() });
    let mut stream = PacketSplitter::new(MAX_FRAME);
    stream.push(rest);
    let mut now = Duration::ZERO;
    while let Ok(Some(bytes)) = stream.next_packet() {
        let Ok(frame) = LpPacket::decode(bytes) else { continue };
        assert_eq!(LpPacket::decode(frame.encode()).as_ref(), Ok(&frame));
        now += Duration::from_millis(50);
        if let Some(whole) = reassembler.take(frame.clone(), now) {
            assert!(whole.fragment.is_none_or(|packet| packet.len() <= 4096.max(rest.len())));
        }
        if frame.part.is_none() && frame.sequence.is_none() {
            split_and_join(&frame, usize::from(*width) * 8);
        }
    }
}

fn split_and_join(frame: &LpPacket, width: usize) {
    let Some(fragments) = Fragmenter::new(u64::MAX).split(frame, width) else { return };
    assert!(fragments.iter().all(|fragment| fragment.len() <= width));
    let mut reassembler =
        Reassembler::new(ReassemblyLimits { fragments: u64::MAX, bytes: usize::MAX, ..ReassemblyLimits::default() });
    let joined = fragments.into_iter().filter_map(|fragment| {
        let fragment = LpPacket::decode(fragment).unwrap_or_else(|error| panic!("a fragment is refused: {error}"));
        reassembler.take(fragment, Duration::ZERO)
    });
    let joined: Vec<LpPacket> = joined.collect();
    assert_eq!(joined.len(), 1);
    assert_eq!(joined[0].fragment, frame.fragment);
}

/// Each byte sends a frame, acknowledges a number or lets time pass. A frame that was acknowledged is never sent again. At
/// the end of a silence, each of the others was lost. A frame may count as both, if its acknowledgement was too late.
pub fn ndn_acks(data: &[u8]) {
    let first = u64::MAX - 3;
    let (mut sender, mut now) = (Retransmitter::new(first), Duration::ZERO);
    let mut sent = Sent::default();
    for byte in data {
        let operand = byte & 0x3F;
        match byte >> 6 {
            0 => {
                let data = [&[6, 8][..], &sent.frames.to_be_bytes()].concat();
                sent.frames += 1;
                let frame = LpPacket::bare(data.into());
                sent.take(&sender.send(frame, now));
            }
            // A number of the last 64, or one that was never sent.
            1 | 2 => {
                let number = first.wrapping_add(sent.transmissions).wrapping_sub(u64::from(operand));
                sent.acknowledge(number);
                let acks = if byte >> 6 == 1 { vec![number] } else { vec![number; 2] };
                sender.take_acks(&acks, now).iter().for_each(|again| sent.take(again));
            }
            _ => {
                now += Duration::from_millis(1 << (operand % 13));
                sender.handle_timeout(now).iter().for_each(|again| sent.take(again));
            }
        }
        assert!(sent.open.len() as u64 <= 256 + sender.counters.lost);
    }
    while let Some(timeout) = sender.next_timeout() {
        now = now.max(timeout);
        sender.handle_timeout(now).iter().for_each(|again| sent.take(again));
    }
    let unnumbered = sender.counters.unnumbered;
    assert!(sent.done.len() as u64 + sender.counters.lost + unnumbered >= sent.frames);
    assert!(sender.counters.lost + unnumbered <= sent.frames);
    assert_eq!(sent.transmissions + unnumbered, sent.frames + sender.counters.repeated);
    assert!(sender.counters.repeated <= 3 * sent.frames);
}

/// The frames that a neighbour has been sent, and those that it has acknowledged.
#[derive(Default)]
struct Sent {
    frames: u64,
    transmissions: u64,
    /// The content by number, of frames that may be acknowledged, and the number by content.
    open: HashMap<u64, Bytes>,
    numbers: HashMap<Bytes, u64>,
    /// Acknowledged content.
    done: HashSet<Bytes>,
}

impl Sent {
    fn take(&mut self, frame: &Bytes) {
        let frame = LpPacket::decode(frame.clone()).unwrap_or_else(|error| panic!("a frame is refused: {error}"));
        let (Some(number), Some(content)) = (frame.tx_sequence, frame.fragment) else { return };
        assert!(!self.done.contains(&content), "an acknowledged frame was sent again");
        // The number of an earlier transmission means nothing any more.
        if let Some(earlier) = self.numbers.insert(content.clone(), number) {
            self.open.remove(&earlier);
        }
        assert!(self.open.insert(number, content).is_none());
        self.transmissions += 1;
    }

    fn acknowledge(&mut self, number: u64) {
        self.done.extend(self.open.remove(&number));
    }
}

/// Names that begin with each other, and those of certificates.
const NAMES: [&str; 12] = [
    "/a",
    "/a/b",
    "/a/b/c",
    "/a/b/c/seg=0",
    "/a/32=metadata",
    "/b/1",
    "/b/KEY/1",
    "/b/KEY/1/x/v=1",
    "/b/KEY/2/y/v=1",
    "/b/c/KEY/1/x/v=1",
    "/c/params-sha256=0000000000000000000000000000000000000000000000000000000000000000",
    "/d/sha256digest=0000000000000000000000000000000000000000000000000000000000000000",
];

/// The bytes are steps of consumers, of a face and of time. Consumers get only what they asked for, all bounds hold, and
/// no state is left once everything has timed out.
pub fn ndn_forwarder(data: &[u8]) {
    let limits = ForwarderLimits {
        pending: 8,
        pending_bytes: 200,
        store_bytes: 4096,
        unverified_bytes: 1000,
        certificates: 2,
        chain: 2,
        certificate_timeout: Duration::from_secs(4),
    };
    // A key that signs nothing here: packets without a digest under /b need certificates.
    let anchors = vec![("/b".parse().unwrap_or_default(), VerifyingKey::Public(Bytes::from_static(b"no key")))];
    let mut forwarder = Forwarder::new(limits, TrustSchema::new(anchors, true), 1);
    let mut asked: Vec<(u64, Interest)> = Vec::new();
    let mut now = Duration::ZERO;
    for step in data.chunks_exact(4) {
        let name: Name = NAMES[usize::from(step[1]) % NAMES.len()].parse().unwrap_or_default();
        let consumer = u64::from(step[2] % 4);
        let signer = if step[3] & 1 == 0 { Signer::digest() } else { Signer::hmac(b"key", key_of(step[3])) };
        let freshness = (step[3] & 2 == 0).then_some(Duration::from_millis(300));
        let content_type = if step[3] & 4 == 0 { 0 } else { u64::from(step[2] % 4) };
        match step[0] % 5 {
            0 => {
                let (can_be_prefix, must_be_fresh) = (step[3] & 1 == 0, step[3] & 2 == 0);
                let interest = Interest { can_be_prefix, must_be_fresh, ..Interest::new(name) };
                asked.push((consumer, interest.clone()));
                let _ = forwarder.take_interest(consumer, interest, now);
            }
            1 => {
                let builder = DataBuilder { name, content_type, freshness, final_block: None };
                let packet = builder.sign(step, &signer).unwrap_or_default();
                let packet = Data::decode(packet).unwrap_or_else(|error| panic!("our own packet: {error}"));
                forwarder.take_data(packet, step[3] & 8 == 0, now, Duration::from_secs(1 << 30) + now);
            }
            2 => forwarder.take_nack(&Interest::new(name), NackReason::NoRoute, now),
            3 => now += Duration::from_millis(u64::from(step[1]) * 10),
            _ => forwarder.handle_timeout(now),
        }
        assert!(forwarder.pending() <= limits.pending);
        while let Some(output) = forwarder.next_output() {
            let Output::Deliver(consumer, Delivery::Data(data, _)) = output else { continue };
            let is_answer = |(who, interest): &(u64, Interest)| *who == consumer && data.answers(interest);
            assert!(asked.iter().any(is_answer), "{} was not asked for", data.name);
        }
    }
    forwarder.handle_timeout(now + Duration::from_secs(70));
    assert_eq!((forwarder.pending(), forwarder.next_timeout()), (0, None));
}

/// The name of a key in a signature.
fn key_of(choice: u8) -> Name {
    NAMES[usize::from(choice >> 4) % NAMES.len()].parse().unwrap_or_default()
}

/// The bytes are answers of a producer that contradicts itself. Segments come in order, each once, and the window closes.
pub fn ndn_fetch(data: &[u8]) {
    let Some((begin, steps)) = data.split_first() else { return };
    let limits = FetchLimits { max_window: 8, max_ahead: 16, patience: Duration::from_secs(2) };
    let versioned: Name = "/a/v=1".parse().unwrap_or_default();
    let mut fetch = match begin % 3 {
        0 => Fetch::new("/a".parse().unwrap_or_default(), limits, 1),
        1 => Fetch::new(versioned.clone(), limits, 1),
        _ => Fetch::segments(versioned.clone(), 2..=u64::from(*begin), limits, 1),
    };
    let mut now = Duration::ZERO;
    let mut last: Option<u8> = None;
    for step in steps.chunks_exact(4) {
        let mut sent = 0;
        while fetch.next_interest(now).is_some() {
            sent += 1;
            assert!(sent <= 2 * limits.max_window, "the window is open without an end");
        }
        let segment = |number: u64| Component::numbered(types::SEGMENT, number);
        let name = match step[1] % 8 {
            0 => "/a/32=metadata/v=1/seg=0".parse().unwrap_or_default(),
            1 => "/a".parse().unwrap_or_default(),
            2 => "/a/v=2/seg=0".parse().unwrap_or_default(),
            _ => versioned.child(&segment(u64::from(step[1] >> 3))),
        };
        let final_block = (step[3] & 1 == 0).then(|| segment(u64::from(step[2])));
        let content_type = if step[3] & 2 == 0 { 0 } else { APPLICATION_NACK };
        let ended = match step[0] % 4 {
            0 | 1 => {
                let mut content = Vec::new();
                if step[1] % 8 == 0 {
                    versioned.put(&mut content);
                } else {
                    content.push(step[1] >> 3);
                }
                let builder = DataBuilder { name, content_type, freshness: None, final_block };
                let packet = builder.sign(&content, &Signer::digest()).unwrap_or_default();
                let packet = Data::decode(packet).unwrap_or_else(|error| panic!("our own packet: {error}"));
                fetch.take_data(packet, step[3] & 4 == 0, now)
            }
            2 => fetch.take_nack(&name, NackReason::Congestion, now),
            _ => {
                now += Duration::from_millis(u64::from(step[1]) * 4);
                fetch.handle_timeout(now)
            }
        };
        while let Some(content) = fetch.next_content() {
            let [number] = content[..] else { continue };
            assert!(begin % 3 == 0 || last.is_none_or(|last| number == last + 1), "{number} after {last:?}");
            last = Some(number);
        }
        if ended.is_err() || fetch.is_complete() {
            return;
        }
    }
}
