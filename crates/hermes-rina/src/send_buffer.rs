//! Bytes that an application has written and the peer has not acknowledged, by sequence number.
//!
//! In: bytes. Out: copies of a range. Never: a bound of its own; the sender bounds it. Small writes share one chunk, so
//! that the memory used stays proportional to the bytes.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// Writes shorter than this are copied into a shared chunk.
const COPY_BELOW: usize = 1024;
/// Size of a shared chunk, in bytes.
const SHARED_CHUNK: usize = 8 << 10;

/// A queue of bytes.
#[derive(Debug, Default)]
pub(crate) struct SendBuffer {
    chunks: VecDeque<(u64, Bytes)>,
    /// The chunk that small writes share; it follows all others.
    tail: BytesMut,
    start: u64,
    end: u64,
}

impl SendBuffer {
    pub(crate) fn new(start: u64) -> Self {
        Self { start, end: start, ..Self::default() }
    }

    /// Returns the sequence number after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Appends bytes.
    pub(crate) fn push(&mut self, bytes: Bytes) {
        let length = bytes.len() as u64;
        if bytes.is_empty() {
            return;
        }
        if bytes.len() >= COPY_BELOW {
            self.seal();
            self.chunks.push_back((self.end, bytes));
        } else {
            if self.tail.len() + bytes.len() > SHARED_CHUNK {
                self.seal();
            }
            self.tail.extend_from_slice(&bytes);
        }
        self.end += length;
    }

    fn seal(&mut self) {
        if !self.tail.is_empty() {
            let start = self.end - self.tail.len() as u64;
            self.chunks.push_back((start, std::mem::take(&mut self.tail).freeze()));
        }
    }

    /// Appends `length` bytes from `from` on to `out`. The binary search finds the chunk; a window has few chunks.
    pub(crate) fn copy(&self, from: u64, length: usize, out: &mut BytesMut) {
        let (mut from, mut left) = (from, length);
        let mut at = self.chunks.partition_point(|(start, bytes)| start + bytes.len() as u64 <= from);
        while left > 0 {
            let (start, bytes) = match self.chunks.get(at) {
                Some((start, bytes)) => (*start, &bytes[..]),
                None => (self.end - self.tail.len() as u64, &self.tail[..]),
            };
            let rest = from.checked_sub(start).and_then(|offset| bytes.get(offset as usize..)).unwrap_or_default();
            let part = &rest[..left.min(rest.len())];
            if part.is_empty() {
                return;
            }
            out.extend_from_slice(part);
            (from, left, at) = (from + part.len() as u64, left - part.len(), at + 1);
        }
    }

    /// Removes all bytes before `end`; a partly used chunk stays in memory.
    pub(crate) fn release(&mut self, end: u64) {
        let end = end.min(self.end);
        while self.chunks.front().is_some_and(|(start, bytes)| start + bytes.len() as u64 <= end) {
            self.chunks.pop_front();
        }
        if end == self.end {
            self.tail = BytesMut::new();
        }
        self.start = self.start.max(end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_range_is_copied_exactly(sizes in proptest::collection::vec(0usize..3000, 1..30), cut: u16, start in 0u64..1 << 40) {
            let mut buffer = SendBuffer::new(start);
            let mut all = Vec::new();
            for (number, size) in sizes.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..size).map(|at| (at * 7 + number) as u8).collect();
                all.extend_from_slice(&bytes);
                buffer.push(Bytes::from(bytes));
            }
            let cut = usize::from(cut) % (all.len() + 1);
            buffer.release(start + cut as u64);
            prop_assert_eq!(buffer.len(), all.len() - cut);
            for (from, length) in [(cut, all.len() - cut), (cut, (all.len() - cut) / 2), (cut + (all.len() - cut) / 2, 0)] {
                let mut out = BytesMut::new();
                buffer.copy(start + from as u64, length, &mut out);
                prop_assert_eq!(&out[..], &all[from..from + length]);
            }
        }
    }
}
