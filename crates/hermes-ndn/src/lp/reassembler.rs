//! Reassembly of fragmented packets (NDNLPv2, section "Indexed Fragmentation").
//!
//! In: decoded frames of one peer, and the current time. Out: frames with whole packets. The reassembler holds at most
//! the configured number of partial packets and bytes, and counts each packet that it drops. Fragments are copied, so
//! that they never keep a receive buffer in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::{Fragmenter, LpPacket};
use crate::tlv;

/// The memory that a fragment is counted with, in addition to its payload.
const FRAGMENT_COST: usize = 64;

/// The bounds of a [`Reassembler`].
#[derive(Debug, Clone, Copy)]
pub struct ReassemblerConfig {
    /// The maximum number of partial packets.
    pub max_partials: usize,
    /// The maximum memory of all partial packets, in bytes.
    pub max_bytes: usize,
    /// The maximum length of a whole packet.
    pub max_packet: usize,
    /// The time after the last new fragment until a partial packet is dropped.
    pub timeout: Duration,
}

impl Default for ReassemblerConfig {
    fn default() -> Self {
        Self { max_partials: 64, max_bytes: 1 << 20, max_packet: tlv::MAX_PACKET, timeout: Duration::from_millis(500) }
    }
}

/// Counts of what a [`Reassembler`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReassemblerStats {
    /// Packets that were reassembled from more than one fragment.
    pub reassembled: u64,
    /// Partial packets that were dropped after the timeout.
    pub timed_out: u64,
    /// Partial packets that were dropped to admit newer ones.
    pub evicted: u64,
    /// Partial packets that were dropped because they exceed the maximum length of a packet.
    pub too_long: u64,
    /// Fragments that were dropped because they contradict another fragment, or exceed the maximum count.
    pub invalid: u64,
    /// Fragments that had been received before.
    pub duplicate: u64,
}

/// Joins the fragments of one peer to packets.
#[derive(Debug)]
pub struct Reassembler {
    config: ReassemblerConfig,
    /// Partial packets by the Sequence of their first fragment.
    partials: BTreeMap<u64, Partial>,
    /// Deadline and key of each partial packet.
    deadlines: BTreeSet<(Duration, u64)>,
    bytes: usize,
    stats: ReassemblerStats,
}

#[derive(Debug)]
struct Partial {
    count: u64,
    fragments: BTreeMap<u64, Bytes>,
    /// The header fields of the first fragment.
    header: LpPacket,
    length: usize,
    deadline: Duration,
}

impl Partial {
    fn cost(&self) -> usize {
        self.length + self.fragments.len() * FRAGMENT_COST
    }
}

impl Reassembler {
    /// A reassembler with these bounds.
    pub fn new(config: ReassemblerConfig) -> Self {
        Self {
            config,
            partials: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            bytes: 0,
            stats: ReassemblerStats::default(),
        }
    }

    /// Accepts a frame. Returns a frame with a whole packet and the network-layer fields of its first fragment; `None`
    /// if fragments are missing, the fragment was dropped, or the frame has no payload.
    pub fn push(&mut self, frame: LpPacket, now: Duration) -> Option<LpPacket> {
        self.expire(now);
        let payload = frame.payload.clone()?;
        if frame.frag_count == 1 {
            return Some(frame);
        }
        let (index, count) = (frame.frag_index, frame.frag_count);
        let Some(sequence) = frame.sequence.filter(|_| index < count && count <= Fragmenter::MAX_FRAGMENTS as u64)
        else {
            self.stats.invalid += 1;
            return None;
        };
        let key = sequence.wrapping_sub(index);
        let mut partial = self.take(key).unwrap_or_else(|| Partial {
            count,
            fragments: BTreeMap::new(),
            header: LpPacket::default(),
            length: 0,
            deadline: now,
        });
        if partial.count != count {
            self.stats.invalid += 1;
            self.put(key, partial);
            return None;
        }
        if partial.fragments.contains_key(&index) {
            self.stats.duplicate += 1;
            self.put(key, partial);
            return None;
        }
        partial.length += payload.len();
        if partial.length > self.config.max_packet {
            self.stats.too_long += 1;
            return None;
        }
        partial.fragments.insert(index, Bytes::copy_from_slice(&payload));
        if index == 0 {
            partial.header = network_fields(frame);
        }
        if partial.fragments.len() as u64 == count {
            self.stats.reassembled += 1;
            return Some(join(partial));
        }
        partial.deadline = now.saturating_add(self.config.timeout);
        self.put(key, partial);
        self.evict();
        None
    }

    /// Drops partial packets whose timeout has expired.
    pub fn expire(&mut self, now: Duration) {
        while let Some((deadline, key)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.take(key);
            self.stats.timed_out += 1;
        }
    }

    /// The next time at which [`expire`](Self::expire) drops a packet.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The number of partial packets and their memory in bytes.
    pub fn held(&self) -> (usize, usize) {
        (self.partials.len(), self.bytes)
    }

    /// The counts so far.
    pub fn stats(&self) -> ReassemblerStats {
        self.stats
    }

    fn take(&mut self, key: u64) -> Option<Partial> {
        let partial = self.partials.remove(&key)?;
        self.deadlines.remove(&(partial.deadline, key));
        self.bytes -= partial.cost();
        Some(partial)
    }

    fn put(&mut self, key: u64, partial: Partial) {
        self.deadlines.insert((partial.deadline, key));
        self.bytes += partial.cost();
        self.partials.insert(key, partial);
    }

    /// Drops the partial packets that have waited longest until the bounds hold.
    fn evict(&mut self) {
        while self.partials.len() > self.config.max_partials || self.bytes > self.config.max_bytes {
            let Some((_, key)) = self.deadlines.first().copied() else {
                return;
            };
            self.take(key);
            self.stats.evicted += 1;
        }
    }
}

/// The frame without payload and link-layer fields. The PitToken is copied like a fragment.
fn network_fields(frame: LpPacket) -> LpPacket {
    LpPacket {
        pit_token: frame.pit_token.map(|token| Bytes::copy_from_slice(&token)),
        nack: frame.nack,
        congestion_mark: frame.congestion_mark,
        non_discovery: frame.non_discovery,
        ..LpPacket::default()
    }
}

fn join(partial: Partial) -> LpPacket {
    let mut payload = BytesMut::with_capacity(partial.length);
    partial.fragments.values().for_each(|fragment| payload.extend_from_slice(fragment));
    LpPacket { payload: Some(payload.freeze()), ..partial.header }
}
