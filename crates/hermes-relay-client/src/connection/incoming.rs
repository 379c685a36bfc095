//! The stream that an end receives: bytes in any order, several times, become bytes in their order, once.
//!
//! Never: more than twice the window in memory, whatever the other end sends.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};

use super::frame::{Acknowledgement, MAX_RANGES};
use super::ranges::{Range, without};

/// The most parts that wait for an earlier one. The other end sends the rest again.
const MAX_PARTS: usize = 1024;

/// The other end breaks the rules of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("it sent more than this end had allowed")]
    PastLimit,
    #[error("its stream ends at two places")]
    TwoEnds,
    #[error("it acknowledged what was never sent")]
    NotSent,
}

#[derive(Debug)]
pub(super) struct Incoming {
    window: u64,
    /// All bytes before this one have arrived.
    next: u64,
    /// Bytes after `next`. The parts do not overlap, and keep nothing else of their publications.
    parts: BTreeMap<u64, Bytes>,
    /// Bytes that the application may take, and the number of those that it has taken.
    ready: BytesMut,
    taken: u64,
    end: Option<u64>,
}

impl Incoming {
    pub(super) fn new(window: u64) -> Self {
        Self { window, next: 0, parts: BTreeMap::new(), ready: BytesMut::new(), taken: 0, end: None }
    }

    /// Takes bytes of the stream, which ends after them if `is_end`. Returns whether they were the next ones, all of them new.
    pub(super) fn receive(&mut self, offset: u64, data: &Bytes, is_end: bool) -> Result<bool, Violation> {
        let after = offset.checked_add(data.len() as u64).ok_or(Violation::PastLimit)?;
        if after > self.limit() {
            return Err(Violation::PastLimit);
        }
        let latest = self.parts.last_key_value().map_or(self.next, |(at, part)| at + part.len() as u64);
        if self.end.is_some_and(|end| after > end || (is_end && after != end)) || (is_end && after < latest) {
            return Err(Violation::TwoEnds);
        }
        let is_next = offset == self.next && self.parts.is_empty() && self.end.is_none();
        if is_end {
            self.end = Some(after);
        }
        for (from, to) in without((offset.max(self.next), after.max(self.next)), self.ranges()) {
            // The differences are at most the length of `data`.
            let part = &data[(from - offset) as usize..(to - offset) as usize];
            if from == self.next {
                self.advance(part);
            } else if self.parts.len() < MAX_PARTS {
                self.parts.insert(from, Bytes::copy_from_slice(part));
            }
        }
        Ok(is_next)
    }

    /// Takes the next bytes, and the parts that waited for them.
    fn advance(&mut self, part: &[u8]) {
        self.ready.extend_from_slice(part);
        self.next += part.len() as u64;
        while let Some(part) = self.parts.remove(&self.next) {
            self.ready.extend_from_slice(&part);
            self.next += part.len() as u64;
        }
    }

    /// All bytes that are there for the application.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        if self.ready.is_empty() {
            return None;
        }
        self.taken += self.ready.len() as u64;
        Some(self.ready.split().freeze())
    }

    /// All bytes before this one have arrived.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Everything has arrived, the end included.
    pub(super) fn is_whole(&self) -> bool {
        self.end == Some(self.next)
    }

    /// Everything has arrived, and was taken.
    pub(super) fn is_taken(&self) -> bool {
        self.end == Some(self.taken)
    }

    /// The other end may send up to this byte.
    pub(super) fn limit(&self) -> u64 {
        self.taken + self.window
    }

    fn ranges(&self) -> impl Iterator<Item = Range> {
        self.parts.iter().map(|(at, part)| (*at, at + part.len() as u64))
    }

    pub(super) fn acknowledgement(&self) -> Acknowledgement {
        let mut ranges: Vec<Range> = Vec::new();
        for (from, to) in self.ranges() {
            if let Some(last) = ranges.last_mut().filter(|last| last.1 == from) {
                last.1 = to;
            } else if ranges.len() == MAX_RANGES {
                break;
            } else {
                ranges.push((from, to));
            }
        }
        Acknowledgement { before: self.next, ranges, end: self.is_whole(), limit: self.limit() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn taken(incoming: &mut Incoming) -> Vec<u8> {
        std::iter::from_fn(|| incoming.take()).flatten().collect()
    }

    #[test]
    fn parts_have_a_bound() {
        let mut incoming = Incoming::new(1 << 20);
        for at in 1..=MAX_PARTS as u64 + 5 {
            incoming.receive(2 * at, &Bytes::from_static(b"a"), false).unwrap();
        }
        assert_eq!(incoming.parts.len(), MAX_PARTS);
    }

    #[test]
    fn parts_in_any_order_and_overlapping_become_the_stream() {
        let text = Bytes::from_static(b"abcdefghij");
        let mut incoming = Incoming::new(100);
        for (from, to) in [(6, 8), (2, 4), (3, 9), (0, 1), (2, 10), (0, 3)] {
            incoming.receive(from as u64, &text.slice(from..to), to == 10).unwrap();
        }
        assert_eq!((taken(&mut incoming), incoming.is_whole()), (text.to_vec(), true));
    }

    #[test]
    fn adjacent_parts_are_one_range() {
        let mut incoming = Incoming::new(100);
        for at in [5, 7, 20] {
            incoming.receive(at, &Bytes::from_static(b"ab"), false).unwrap();
        }
        let acknowledgement = incoming.acknowledgement();
        assert_eq!((acknowledgement.before, acknowledgement.ranges), (0, vec![(5, 9), (20, 22)]));
    }

    #[test]
    fn an_end_that_breaks_the_rules_is_told() {
        let data = Bytes::from_static(b"abcd");
        let mut incoming = Incoming::new(8);
        assert_eq!(incoming.receive(5, &data, false), Err(Violation::PastLimit));
        assert_eq!(incoming.receive(u64::MAX, &data, false), Err(Violation::PastLimit));
        incoming.receive(2, &data, false).unwrap();
        assert_eq!(incoming.receive(0, &data, true), Err(Violation::TwoEnds));
        incoming.receive(6, &Bytes::new(), true).unwrap();
        assert_eq!(incoming.receive(4, &data, false), Err(Violation::TwoEnds));
        assert_eq!(incoming.receive(5, &Bytes::new(), true), Err(Violation::TwoEnds));
    }
}
