//! The link protocol NDNLPv2: frames between two neighbours.
//!
//! In: frames, or packets to frame. Out: packets with the fields of their frame; fragments that fit a link. A bare packet
//! is a frame without fields. A frame with an unknown field is dropped unless the field may be ignored. Never: an
//! unbounded buffer, or a clock.

mod retransmitter;

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;

use crate::packet::{DATA, INTEREST};
use crate::tlv::{Element, NdnError, Result, put, put_integer, put_nested};

pub use retransmitter::{NUMBER_OVERHEAD, Retransmitter, RetransmitterCounters};

/// The type of a frame.
pub const LP_PACKET: u32 = 0x64;

const FRAGMENT: u32 = 0x50;
const SEQUENCE: u32 = 0x51;
const FRAG_INDEX: u32 = 0x52;
const FRAG_COUNT: u32 = 0x53;
const PIT_TOKEN: u32 = 0x62;
const NACK: u32 = 0x0320;
const NACK_REASON: u32 = 0x0321;
const CONGESTION_MARK: u32 = 0x0340;
const ACK: u32 = 0x0344;
const TX_SEQUENCE: u32 = 0x0348;
/// Fields that concern the forwarder itself, and are neither kept nor passed on.
const LOCAL_FIELDS: [u32; 5] = [0x032c, 0x0330, 0x0334, 0x034c, 0x0350];
/// The range of fields that may be ignored if their two lowest bits are 0.
const IGNORABLE: std::ops::RangeInclusive<u32> = 800..=959;
/// A token has at most this many bytes.
const MAX_PIT_TOKEN: usize = 32;
/// Bytes of the header and the fields of a fragment, at most.
const FRAGMENT_OVERHEAD: usize = 40;

/// Why an Interest was not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NackReason {
    /// The link is congested.
    Congestion,
    /// The Interest was seen before.
    Duplicate,
    /// No route leads to the name.
    NoRoute,
    /// No reason was given, or an unknown one.
    None,
}

impl NackReason {
    fn from_number(number: u64) -> Self {
        match number {
            50 => Self::Congestion,
            100 => Self::Duplicate,
            150 => Self::NoRoute,
            _ => Self::None,
        }
    }

    fn number(self) -> u64 {
        match self {
            Self::Congestion => 50,
            Self::Duplicate => 100,
            Self::NoRoute => 150,
            Self::None => 0,
        }
    }
}

/// A frame: a packet, or a part of one, with its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LpPacket {
    /// The packet or a fragment of it; `None` for a frame that only acknowledges.
    pub fragment: Option<Bytes>,
    /// The number of the frame.
    pub sequence: Option<u64>,
    /// The position of the fragment, and the number of fragments.
    pub part: Option<(u64, u64)>,
    /// A token that the answer repeats.
    pub pit_token: Option<Bytes>,
    /// The packet is an Interest that was not forwarded.
    pub nack: Option<NackReason>,
    /// The sender's queue is longer than it should be.
    pub congestion: Option<u64>,
    /// Frames that the sender has received.
    pub acks: Vec<u64>,
    /// The number of the frame for acknowledgement.
    pub tx_sequence: Option<u64>,
}

impl LpPacket {
    /// A frame with a whole packet and no fields.
    pub fn bare(packet: Bytes) -> Self {
        Self { fragment: Some(packet), ..Self::default() }
    }

    /// A frame that returns an Interest.
    pub fn returning(interest: Bytes, reason: NackReason, pit_token: Option<Bytes>) -> Self {
        Self { nack: Some(reason), pit_token, ..Self::bare(interest) }
    }

    /// Decodes a frame, or a bare packet.
    ///
    /// # Errors
    /// The bytes are neither, or a field is unknown and must not be ignored.
    pub fn decode(bytes: Bytes) -> Result<Self> {
        let element = Element::only(bytes)?;
        match element.kind {
            INTEREST | DATA => return Ok(Self::bare(element.whole)),
            LP_PACKET => {}
            other => return Err(NdnError::Unexpected(other)),
        }
        let mut frame = Self::default();
        let (mut index, mut count) = (None, None);
        let mut rest = element.value;
        while let Some(field) = Element::take(&mut rest)? {
            match field.kind {
                FRAGMENT => frame.fragment = Some(field.value).filter(|fragment| !fragment.is_empty()),
                SEQUENCE => frame.sequence = Some(fixed(&field)?),
                FRAG_INDEX => index = Some(field.integer()?),
                FRAG_COUNT => count = Some(field.integer()?),
                PIT_TOKEN if field.value.len() <= MAX_PIT_TOKEN => frame.pit_token = Some(field.value),
                PIT_TOKEN => return Err(NdnError::Invalid("length of a PIT token")),
                NACK => frame.nack = Some(reason(field.value)?),
                CONGESTION_MARK => frame.congestion = Some(field.integer()?),
                ACK => frame.acks.push(fixed(&field)?),
                TX_SEQUENCE => frame.tx_sequence = Some(fixed(&field)?),
                kind if LOCAL_FIELDS.contains(&kind) => {}
                kind if IGNORABLE.contains(&kind) && kind & 3 == 0 => {}
                kind => return Err(NdnError::Unexpected(kind)),
            }
        }
        frame.part = match (index.unwrap_or(0), count.unwrap_or(1)) {
            (0, 1) => None,
            (index, count) if index < count && frame.sequence.is_some() => Some((index, count)),
            _ => return Err(NdnError::Invalid("position of a fragment")),
        };
        Ok(frame)
    }

    /// Encodes the frame; a frame without fields as a bare packet.
    pub fn encode(&self) -> Bytes {
        let has_fields = self.sequence.is_some()
            || self.part.is_some()
            || self.pit_token.is_some()
            || self.nack.is_some()
            || self.congestion.is_some()
            || !self.acks.is_empty()
            || self.tx_sequence.is_some();
        // The neighbour decodes only an Interest or a Data as a bare packet.
        let is_packet =
            |packet: &Bytes| Element::only(packet.clone()).is_ok_and(|element| matches!(element.kind, INTEREST | DATA));
        if let Some(packet) = self.fragment.as_ref().filter(|packet| !has_fields && is_packet(packet)) {
            return packet.clone();
        }
        let mut out = Vec::with_capacity(self.fragment.as_ref().map_or(0, Bytes::len) + 64);
        put_nested(&mut out, LP_PACKET, |out| self.put_fields(out));
        out.into()
    }

    fn put_fields(&self, out: &mut Vec<u8>) {
        if let Some(sequence) = self.sequence {
            put(out, SEQUENCE, &sequence.to_be_bytes());
        }
        if let Some((index, count)) = self.part {
            put_integer(out, FRAG_INDEX, index);
            put_integer(out, FRAG_COUNT, count);
        }
        if let Some(token) = &self.pit_token {
            put(out, PIT_TOKEN, token);
        }
        if let Some(reason) = self.nack {
            put_nested(out, NACK, |out| {
                if reason != NackReason::None {
                    put_integer(out, NACK_REASON, reason.number());
                }
            });
        }
        if let Some(mark) = self.congestion {
            put_integer(out, CONGESTION_MARK, mark);
        }
        for ack in &self.acks {
            put(out, ACK, &ack.to_be_bytes());
        }
        if let Some(number) = self.tx_sequence {
            put(out, TX_SEQUENCE, &number.to_be_bytes());
        }
        if let Some(fragment) = &self.fragment {
            put(out, FRAGMENT, fragment);
        }
    }
}

/// A number of exactly eight bytes.
fn fixed(field: &Element) -> Result<u64> {
    let bytes = field.value[..].try_into().map_err(|_| NdnError::Invalid("length of a frame number"))?;
    Ok(u64::from_be_bytes(bytes))
}

fn reason(mut value: Bytes) -> Result<NackReason> {
    match Element::take(&mut value)? {
        Some(reason) if reason.kind == NACK_REASON => reason.integer().map(NackReason::from_number),
        _ => Ok(NackReason::None),
    }
}

/// Splits frames that are longer than a link carries.
#[derive(Debug, Default)]
pub struct Fragmenter {
    next: u64,
}

impl Fragmenter {
    /// Numbers frames from this number on. A random one distinguishes this sender from an earlier one.
    pub fn new(first: u64) -> Self {
        Self { next: first }
    }

    /// Returns the frame, or fragments of it, each of at most `mtu` bytes. `None` if the link is too narrow for any.
    pub fn split(&mut self, frame: &LpPacket, mtu: usize) -> Option<Vec<Bytes>> {
        Some(self.parts(frame, mtu)?.iter().map(LpPacket::encode).collect())
    }

    /// As [`split`](Self::split), before they are encoded.
    pub fn parts(&mut self, frame: &LpPacket, mtu: usize) -> Option<Vec<LpPacket>> {
        if frame.encode().len() <= mtu {
            return Some(vec![frame.clone()]);
        }
        let packet = frame.fragment.as_ref()?;
        // The fields of the network layer travel with the first fragment.
        let fields = LpPacket { fragment: None, ..frame.clone() }.encode().len();
        let room = mtu.checked_sub(FRAGMENT_OVERHEAD + fields).filter(|room| *room > 0)?;
        let count = packet.len().div_ceil(room) as u64;
        let mut fragments = Vec::with_capacity(packet.len().div_ceil(room));
        for (index, start) in (0..count).zip((0..packet.len()).step_by(room)) {
            let fragment = packet.slice(start..packet.len().min(start + room));
            let base = if index == 0 { frame.clone() } else { LpPacket::default() };
            let sequence = Some(self.next);
            self.next = self.next.wrapping_add(1);
            fragments.push(LpPacket { fragment: Some(fragment), sequence, part: Some((index, count)), ..base });
        }
        Some(fragments)
    }
}

/// Counts of fragments that led to no packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReassemblyCounters {
    /// Incomplete packets that made room for others.
    pub displaced: u64,
    /// Incomplete packets that became too old.
    pub expired: u64,
    /// Fragments that contradict others, or whose packet is too long.
    pub invalid: u64,
}

/// Joins fragments to packets.
#[derive(Debug)]
pub struct Reassembler {
    /// By the number of the first fragment's frame.
    partial: HashMap<u64, PartialPacket>,
    /// Counts of dropped fragments.
    pub counters: ReassemblyCounters,
    limits: ReassemblyLimits,
}

/// The limits of a [`Reassembler`].
#[derive(Clone, Copy, Debug)]
pub struct ReassemblyLimits {
    /// Incomplete packets at once.
    pub packets: usize,
    /// Bytes of a packet.
    pub bytes: usize,
    /// Fragments of a packet.
    pub fragments: u64,
    /// The age at which an incomplete packet is dropped.
    pub age: Duration,
}

impl Default for ReassemblyLimits {
    fn default() -> Self {
        Self { packets: 64, bytes: crate::MAX_PACKET, fragments: 400, age: Duration::from_millis(500) }
    }
}

#[derive(Debug)]
struct PartialPacket {
    began: Duration,
    fields: LpPacket,
    parts: Vec<Option<Bytes>>,
    missing: u64,
    bytes: usize,
}

impl Reassembler {
    /// A reassembler without fragments.
    pub fn new(limits: ReassemblyLimits) -> Self {
        Self { partial: HashMap::new(), counters: ReassemblyCounters::default(), limits }
    }

    /// Takes a frame, and returns it once its packet is whole. `now` is the time since any fixed moment.
    pub fn take(&mut self, frame: LpPacket, now: Duration) -> Option<LpPacket> {
        let (Some((index, count)), Some(sequence)) = (frame.part, frame.sequence) else { return Some(frame) };
        let Some(fragment) = frame.fragment.clone() else { return Some(frame) };
        if count > self.limits.fragments {
            self.counters.invalid += 1;
            return None;
        }
        self.expire(now);
        let key = sequence.wrapping_sub(index);
        if !self.partial.contains_key(&key) && self.partial.len() >= self.limits.packets {
            self.displace_oldest();
        }
        let begun = || PartialPacket {
            began: now,
            fields: LpPacket::default(),
            parts: vec![None; usize::try_from(count).unwrap_or_default()],
            missing: count,
            bytes: 0,
        };
        let partial = self.partial.entry(key).or_insert_with(begun);
        let Some(part) = usize::try_from(index).ok().and_then(|index| partial.parts.get_mut(index)) else {
            self.counters.invalid += 1;
            return None;
        };
        // A repeated fragment changes nothing.
        if part.is_some() {
            return None;
        }
        partial.bytes += fragment.len();
        partial.missing -= 1;
        *part = Some(fragment);
        if index == 0 {
            partial.fields = LpPacket { fragment: None, sequence: None, part: None, ..frame };
        }
        if partial.bytes > self.limits.bytes {
            self.partial.remove(&key);
            self.counters.invalid += 1;
            return None;
        }
        if partial.missing > 0 {
            return None;
        }
        let whole = self.partial.remove(&key)?;
        let packet: Vec<u8> = whole.parts.into_iter().flatten().flatten().collect();
        Some(LpPacket { fragment: Some(packet.into()), ..whole.fields })
    }

    fn expire(&mut self, now: Duration) {
        let (before, age) = (self.partial.len(), self.limits.age);
        self.partial.retain(|_, partial| now.saturating_sub(partial.began) < age);
        self.counters.expired += (before - self.partial.len()) as u64;
    }

    fn displace_oldest(&mut self) {
        let oldest = self.partial.iter().min_by_key(|(_, partial)| partial.began).map(|(key, _)| *key);
        if let Some(key) = oldest {
            self.partial.remove(&key);
            self.counters.displaced += 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packet(bytes: usize) -> Bytes {
        let mut out = Vec::new();
        put(&mut out, DATA, &vec![7; bytes]);
        out.into()
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let frame = LpPacket {
            pit_token: Some(Bytes::from_static(&[1, 2, 3, 4])),
            nack: Some(NackReason::NoRoute),
            congestion: Some(1),
            acks: vec![1, u64::MAX],
            tx_sequence: Some(9),
            sequence: Some(10),
            ..LpPacket::bare(packet(5))
        };
        assert_eq!(LpPacket::decode(frame.encode()), Ok(frame));
        // A packet without fields has no frame.
        assert_eq!(LpPacket::bare(packet(5)).encode(), packet(5));
    }

    #[test]
    fn unknown_fields_are_ignored_where_the_protocol_says_so() {
        let with = |kind: u32| {
            let mut out = Vec::new();
            put_nested(&mut out, LP_PACKET, |out| {
                put(out, kind, &[1]);
                put(out, FRAGMENT, &packet(1));
            });
            LpPacket::decode(out.into())
        };
        assert_eq!(with(956), Ok(LpPacket::bare(packet(1))));
        for critical in [957, 799, 1000, 0x63] {
            assert_eq!(with(critical), Err(NdnError::Unexpected(critical)));
        }
    }

    proptest! {
        #[test]
        fn fragments_join_in_any_order(
            bytes in 1..8000_usize, mtu in 100..1500_usize, order in any::<u64>(), first in any::<u64>()
        ) {
            let frame = LpPacket { pit_token: Some(Bytes::from_static(b"tok")), ..LpPacket::bare(packet(bytes)) };
            let mut fragments = Fragmenter::new(first).split(&frame, mtu).unwrap();
            prop_assert!(fragments.iter().all(|fragment| fragment.len() <= mtu));
            let count = fragments.len();
            fragments.rotate_left(usize::try_from(order % count as u64).unwrap());
            let mut reassembler = Reassembler::new(ReassemblyLimits::default());
            let taken: Vec<_> = fragments
                .into_iter()
                .filter_map(|fragment| reassembler.take(LpPacket::decode(fragment).unwrap(), Duration::ZERO))
                .collect();
            prop_assert_eq!(taken, [frame]);
        }

        #[test]
        fn garbage_is_an_error_and_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = LpPacket::decode(bytes.into());
        }
    }

    #[test]
    fn incomplete_packets_are_bounded_and_expire() {
        let limits = ReassemblyLimits { packets: 2, ..ReassemblyLimits::default() };
        let mut reassembler = Reassembler::new(limits);
        let part = |sequence, index, count| LpPacket {
            sequence: Some(sequence),
            part: Some((index, count)),
            ..LpPacket::bare(Bytes::from_static(b"x"))
        };
        for sequence in [0, 10, 20] {
            assert_eq!(reassembler.take(part(sequence, 0, 3), Duration::from_millis(sequence)), None);
        }
        assert_eq!(reassembler.counters.displaced, 1);
        assert_eq!(reassembler.take(part(30, 0, 1000), Duration::ZERO), None);
        assert_eq!(reassembler.take(part(11, 1, 2), Duration::ZERO), None);
        assert_eq!(reassembler.counters.invalid, 1);
        assert_eq!(reassembler.take(part(40, 0, 2), Duration::from_secs(9)), None);
        assert_eq!(reassembler.counters.expired, 2);
    }
}
