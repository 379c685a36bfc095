//! Properties of NDN packets and of the link protocol.
//!
//! In: bytes of a peer. Out: nothing, or a panic. The tests of `hermes-ndn` include this file, too, and replay the corpus,
//! so that the crate of the fuzz targets needs no library for signatures.

use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{Fragmenter, LpPacket, Reassembler, ReassemblyLimits};
use hermes_ndn::packet::name_of;
use hermes_ndn::{MAX_FRAME, Name, Packet};

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
