//! The receiving half of a flow: reassembly, credit and acknowledgements.
//!
//! In: data PDUs, reads, time. Out: bytes in order, and acknowledgements. Never: more bytes than the window, or more
//! ranges than the limit.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::auth::micros;
use crate::message::{AckInfo, DELAY_UNIT_US, DataHeader, MAX_RANGES};
use crate::range_set::RangeSet;
use crate::rtt::MAX_ACK_DELAY;
use crate::sender::expand;

/// Number of PDUs that one acknowledgement may cover.
const PDUS_PER_ACK: u32 = 2;
/// Payloads shorter than this are copied, so that they do not keep a large datagram buffer in memory.
const COPY_BELOW: usize = 512;
/// Size of a chunk of copied payloads, in bytes.
const SHARED_CHUNK: usize = 8 << 10;
/// Number of acknowledged ranges taken from the lower end.
const LOW_RANGES: usize = MAX_RANGES * 3 / 4;

/// The reason why a data PDU was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    Duplicate,
    OutsideWindow,
    Inconsistent,
    TooManyRanges,
    NoMemory,
}

/// The state of the receiving half.
#[derive(Debug)]
pub(crate) struct Receiver {
    /// The next expected sequence number.
    next: u64,
    /// The sequence number before which the peer may send.
    edge: u64,
    window: u32,
    max_ranges: usize,
    max_held: usize,
    /// Bytes in order that the application has not read.
    ready: VecDeque<Bytes>,
    /// Short payloads in order, after those in `ready`.
    tail: BytesMut,
    ready_len: usize,
    /// Payloads after a gap.
    held: BTreeMap<u64, Bytes>,
    held_len: usize,
    ranges: RangeSet,
    /// The sequence number of the end.
    fin: Option<u64>,
    /// The highest PDU number and its arrival.
    highest: Option<(u64, Duration)>,
    marks: u16,
    unacked: u32,
    ack_at: Option<Duration>,
    is_ack_due: bool,
}

impl Receiver {
    pub(crate) fn new(start: u64, window: u32, max_ranges: usize, unit: usize) -> Self {
        Self {
            next: start,
            edge: start + u64::from(window),
            window,
            max_ranges,
            max_held: (2 * window as usize / unit.max(1)).max(1024),
            ready: VecDeque::new(),
            tail: BytesMut::new(),
            ready_len: 0,
            held: BTreeMap::new(),
            held_len: 0,
            ranges: RangeSet::default(),
            fin: None,
            highest: None,
            marks: 0,
            unacked: 0,
            ack_at: None,
            is_ack_due: false,
        }
    }

    /// Returns the number of bytes in memory.
    pub(crate) fn buffered(&self) -> usize {
        self.ready_len + self.held_len
    }

    /// Returns the number of bytes that can be read.
    pub(crate) fn readable(&self) -> usize {
        self.ready_len
    }

    /// Returns the next expected sequence number.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Whether everything up to the end was received.
    pub(crate) fn is_complete(&self) -> bool {
        self.fin.is_some_and(|fin| self.next > fin)
    }

    /// Processes a data PDU. `room` is the number of bytes that all flows together may still store.
    pub(crate) fn receive(
        &mut self,
        now: Duration,
        header: &DataHeader,
        payload: Bytes,
        room: usize,
    ) -> Result<(), Dropped> {
        let expected = self.highest.map_or(0, |(highest, _)| highest + 1);
        let number = expand(header.number, expected);
        let result = self.store(header, payload, room);
        if matches!(result, Err(Dropped::OutsideWindow | Dropped::Inconsistent)) {
            self.is_ack_due |= header.flags.probe;
            return result;
        }
        if number >= expected {
            self.highest = Some((number, now));
        }
        self.marks = self.marks.wrapping_add(u16::from(header.flags.mark));
        let has_gap = number != expected || !self.ranges.is_empty() || result.is_err();
        self.unacked += 1;
        let is_urgent = has_gap || header.flags.probe || header.flags.fin || header.flags.mark;
        if is_urgent || self.unacked >= PDUS_PER_ACK {
            self.is_ack_due = true;
        } else if self.ack_at.is_none() {
            self.ack_at = Some(now + MAX_ACK_DELAY);
        }
        result
    }

    fn store(&mut self, header: &DataHeader, mut payload: Bytes, room: usize) -> Result<(), Dropped> {
        let mut start = header.sequence;
        let end = start.saturating_add(payload.len() as u64);
        if payload.is_empty() && !header.flags.fin {
            return Ok(());
        }
        if header.flags.fin {
            if self.fin.is_some_and(|fin| fin != end) || self.ranges.iter().next_back().is_some_and(|r| r.end > end) {
                return Err(Dropped::Inconsistent);
            }
        } else if self.fin.is_some_and(|fin| end > fin) {
            return Err(Dropped::Inconsistent);
        }
        if end < self.next || end == self.next && !(header.flags.fin && self.fin.is_none()) {
            return Err(Dropped::Duplicate);
        }
        if end > self.edge {
            return Err(Dropped::OutsideWindow);
        }
        if start < self.next {
            payload = payload.split_off((self.next - start) as usize);
            start = self.next;
        }
        if payload.len() > room {
            return Err(Dropped::NoMemory);
        }
        if start == self.next {
            if self.ranges.intersects(&(start..end)) {
                return Err(Dropped::Inconsistent);
            }
            self.append(payload);
            self.fin = self.fin.or(header.flags.fin.then_some(end));
            self.advance();
            return Ok(());
        }
        self.hold(start, end, payload)?;
        self.fin = self.fin.or(header.flags.fin.then_some(end));
        Ok(())
    }

    /// Stores a payload after a gap.
    fn hold(&mut self, start: u64, end: u64, payload: Bytes) -> Result<(), Dropped> {
        if start == end {
            return Ok(());
        }
        let range = start..end;
        if self.ranges.intersects(&range) {
            let is_known = self.held.get(&start).is_some_and(|held| held.len() == payload.len());
            return Err(if is_known { Dropped::Duplicate } else { Dropped::Inconsistent });
        }
        let has_slot = self.ranges.len() < self.max_ranges || self.ranges.joins(&range);
        if !has_slot || self.held.len() >= self.max_held {
            return Err(Dropped::TooManyRanges);
        }
        let payload = if payload.len() < COPY_BELOW { Bytes::copy_from_slice(&payload) } else { payload };
        self.held_len += payload.len();
        self.ranges.insert(range, |_| ());
        self.held.insert(start, payload);
        Ok(())
    }

    fn append(&mut self, payload: Bytes) {
        self.next += payload.len() as u64;
        self.ready_len += payload.len();
        if payload.len() >= COPY_BELOW {
            self.seal();
            self.ready.push_back(payload);
        } else {
            if self.tail.len() + payload.len() > SHARED_CHUNK {
                self.seal();
            }
            self.tail.extend_from_slice(&payload);
        }
    }

    fn seal(&mut self) {
        if !self.tail.is_empty() {
            self.ready.push_back(std::mem::take(&mut self.tail).freeze());
        }
    }

    /// Moves payloads that have no gap before them any longer, and the end.
    fn advance(&mut self) {
        while self.held.first_key_value().is_some_and(|(start, _)| *start == self.next) {
            if let Some((_, payload)) = self.held.pop_first() {
                self.held_len -= payload.len();
                self.append(payload);
            }
        }
        self.ranges.remove_below(self.next);
        if self.fin == Some(self.next) {
            self.next += 1;
        }
    }

    /// Returns at most `max` bytes in order. `None`: no byte is ready.
    pub(crate) fn read(&mut self, max: usize) -> Option<Bytes> {
        if self.ready.is_empty() {
            self.seal();
        }
        let front = self.ready.front_mut()?;
        let bytes = if front.len() <= max { self.ready.pop_front()? } else { front.split_to(max) };
        self.ready_len -= bytes.len();
        // A small growth of the window needs no PDU of its own.
        let growth = (self.next - self.ready_len as u64 + u64::from(self.window)).saturating_sub(self.edge);
        self.is_ack_due |= growth >= u64::from(self.window / 4).max(1) && self.fin.is_none();
        Some(bytes)
    }

    /// Whether an acknowledgement must be sent now.
    pub(crate) fn is_ack_due(&self) -> bool {
        self.is_ack_due
    }

    /// Whether a PDU was received and not acknowledged.
    pub(crate) fn is_ack_pending(&self) -> bool {
        self.is_ack_due || self.ack_at.is_some()
    }

    /// Whether ranges must be acknowledged, which a data PDU cannot carry.
    pub(crate) fn has_ranges(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Demands an acknowledgement.
    pub(crate) fn demand_ack(&mut self) {
        self.is_ack_due = true;
    }

    /// Returns when a delayed acknowledgement is due.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        if self.is_ack_due { None } else { self.ack_at }
    }

    pub(crate) fn timeout(&mut self, now: Duration) {
        self.is_ack_due |= self.ack_at.is_some_and(|at| at <= now);
    }

    /// Returns the acknowledgement to send. `room` is the number of bytes that all flows together may still store.
    pub(crate) fn acknowledgement(&mut self, now: Duration, room: usize) -> AckInfo {
        (self.unacked, self.ack_at, self.is_ack_due) = (0, None, false);
        let free = u64::from(self.window).saturating_sub(self.ready_len as u64).min(room as u64);
        // The edge never moves back.
        self.edge = self.edge.max(self.next + free);
        let delay = self.highest.map_or(0, |(_, at)| micros(now.saturating_sub(at)) / DELAY_UNIT_US);
        AckInfo {
            sequence: self.next,
            credit: u32::try_from(self.edge.saturating_sub(self.next)).unwrap_or(u32::MAX),
            echo: self.highest.map(|(number, _)| number as u32),
            delay: u16::try_from(delay).unwrap_or(u16::MAX),
            marks: self.marks,
        }
    }

    /// Returns the ranges to acknowledge: the lowest ones, which the sender needs first, and the newest ones.
    pub(crate) fn ranges(&self) -> Vec<(u32, u32)> {
        let skipped = self.ranges.len().saturating_sub(MAX_RANGES - LOW_RANGES).max(LOW_RANGES);
        let low = self.ranges.iter().take(LOW_RANGES);
        let chosen = low.chain(self.ranges.iter().skip(skipped));
        // The end belongs to the range of the bytes before it.
        let end = |range: &Range<u64>| range.end + u64::from(self.fin == Some(range.end));
        chosen.map(|range| ((range.start - self.next) as u32, (end(range) - range.start) as u32)).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;
