//! The stored bytes of a representation, complete or as runs (ranges without gaps), and the memory that they use.
//!
//! In: chunks. Out: slices, missing ranges, and the combination of two contents (RFC 9111, section 3.4). A chunk counts
//! as used memory as long as a slice of it exists, in the store or on its way to a slow client. An evicted chunk that
//! is still being read therefore counts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;

/// Maximum number of runs (ranges without gaps) of a stored response. A request searches all of them.
pub const MAX_RUNS: usize = 64;
/// Estimated memory of a chunk besides its bytes. It is charged to the limit, because a client could otherwise exceed
/// the limit by fetching single bytes.
pub const CHUNK_COST: usize = 192;
/// Maximum length, in bytes, of a chunk into which [`Content::gathered`] merges shorter ones.
const GATHERED: usize = 64 << 10;

/// A memory limit that several contents share.
pub struct Tier {
    used: AtomicU64,
    most: u64,
    gauge: Gauge,
}

impl Tier {
    /// Creates a tier for at most `most` bytes; `gauge` shows the bytes in use.
    pub fn new(most: u64, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), most, gauge })
    }

    /// Reserves this many bytes. Returns `None` if that would exceed the limit.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let bytes = bytes as u64;
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        self.gauge.inc_by(bytes as i64);
        Some(Charge { tier: self.clone(), bytes })
    }
}

/// Memory reserved in a [`Tier`], and released on drop.
pub struct Charge {
    tier: Arc<Tier>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.tier.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.tier.gauge.dec_by(self.bytes as i64);
    }
}

/// Bytes, with the memory that is reserved for them.
pub struct ChargedBytes {
    /// The bytes, which may grow up to the reservation.
    pub bytes: Vec<u8>,
    /// The reservation for the bytes.
    pub charge: Charge,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ChargedBytes {
    /// Converts the bytes to a chunk, which holds the reservation until its last slice is dropped.
    pub fn into_chunk(self) -> Bytes {
        debug_assert!(self.charge.bytes >= self.bytes.len() as u64, "nothing is free");
        Bytes::from_owner(self)
    }
}

/// A stored range without gaps, as consecutive chunks.
#[derive(Clone, Debug, Default)]
pub struct Run {
    start: u64,
    /// End offset of each chunk.
    ends: Vec<u64>,
    chunks: Vec<Bytes>,
}

impl Run {
    /// An empty run that begins at `start`.
    pub fn at(start: u64) -> Self {
        Self { start, ..Self::default() }
    }

    /// Returns the range of the representation that this run contains.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end()
    }

    /// Returns the offset after the last byte of the run.
    pub fn end(&self) -> u64 {
        self.ends.last().copied().unwrap_or(self.start)
    }

    /// Appends a chunk.
    pub fn push(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.ends.push(self.end() + chunk.len() as u64);
            self.chunks.push(chunk);
        }
    }

    /// Returns the bytes from this offset to the end of the chunk that contains it. Returns `None` outside of the run.
    pub fn slice(&self, at: u64) -> Option<Bytes> {
        if at < self.start {
            return None;
        }
        let index = self.ends.partition_point(|end| *end <= at);
        let chunk = self.chunks.get(index)?;
        let begins = self.ends[index] - chunk.len() as u64;
        Some(chunk.slice((at - begins) as usize..))
    }

    /// Drops the chunks that end at or before this offset.
    pub fn forget(&mut self, before: u64) {
        let count = self.ends.partition_point(|end| *end <= before);
        if count > 0 {
            self.start = self.ends[count - 1];
            self.ends.drain(..count);
            self.chunks.drain(..count);
        }
    }

    /// The part of the run within a range.
    fn within(&self, range: &Range<u64>) -> Self {
        let (start, end) = (range.start.max(self.start), range.end.min(self.end()));
        let mut part = Self::at(start);
        let mut at = start;
        while at < end {
            let Some(mut chunk) = self.slice(at) else { break };
            chunk.truncate((end - at) as usize);
            at += chunk.len() as u64;
            part.push(chunk);
        }
        part
    }
}

/// The stored ranges of a representation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRanges {
    /// The length of the representation.
    pub total: u64,
    /// Stored ranges, in order, with gaps between them.
    pub runs: Vec<Range<u64>>,
}

impl StoredRanges {
    /// True if all bytes of `range` are present.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.runs.iter().any(|run| run.start <= range.start && range.end <= run.end)
    }

    /// Number of stored bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Returns the range from the first to the last missing byte of `range`, or `None` if no byte is missing. It is one
    /// range, because a single request to the origin fetches it.
    pub fn missing(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let holder = |at: u64| self.runs.iter().find(|run| run.contains(&at));
        let start = holder(range.start).map_or(range.start, |run| run.end);
        let end = range.end.checked_sub(1).and_then(holder).map_or(range.end, |run| run.start);
        (start < end).then_some(start..end)
    }
}

/// The stored bytes of a representation of known length.
#[derive(Clone, Debug)]
pub struct Content {
    runs: Vec<Run>,
    total: u64,
}

impl Content {
    /// Creates a content from runs in any order. If two runs overlap, the bytes of the earlier item are used.
    pub fn new(runs: impl IntoIterator<Item = Run>, total: u64) -> Self {
        let mut this = Self { runs: Vec::new(), total };
        runs.into_iter().for_each(|run| this.add(&run));
        this.runs.sort_by_key(|run| run.start);
        let mut joined: Vec<Run> = Vec::new();
        for run in this.runs {
            match joined.last_mut() {
                Some(last) if last.end() == run.start => run.chunks.into_iter().for_each(|chunk| last.push(chunk)),
                _ => joined.push(run),
            }
        }
        Self { runs: joined, total }
    }

    fn add(&mut self, run: &Run) {
        let mut gaps = Vec::from_iter((!run.range().is_empty()).then(|| run.range()));
        for known in &self.runs {
            let known = known.range();
            // Empty gaps must be removed, because each step doubles their number.
            gaps = gaps.into_iter().flat_map(|gap| without(gap, &known)).filter(|gap| !gap.is_empty()).collect();
        }
        self.runs.extend(gaps.iter().map(|gap| run.within(gap)));
    }

    /// Returns the stored ranges.
    pub fn shape(&self) -> StoredRanges {
        StoredRanges { total: self.total, runs: self.runs.iter().map(Run::range).collect() }
    }

    /// The stored bytes, as runs ordered by offset.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The length of the representation.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Whether the content has far more chunks than its size needs.
    pub fn is_scattered(&self) -> bool {
        let chunks: usize = self.runs.iter().map(|run| run.chunks.len()).sum();
        chunks > 2 * MAX_RUNS + 2 * (self.shape().stored_bytes() / GATHERED as u64) as usize
    }

    /// Copies the bytes into longer chunks. `room` reserves memory for each chunk; if it fails, the result is `None`.
    pub fn gathered(&self, room: impl Fn(usize) -> Option<Charge>) -> Option<Self> {
        let mut runs = Vec::with_capacity(self.runs.len());
        for scattered in &self.runs {
            let Range { start: mut at, end } = scattered.range();
            let mut run = Run::at(at);
            while at < end {
                let length = (end - at).min(GATHERED as u64) as usize;
                let charge = room(length + CHUNK_COST)?;
                let mut bytes = Vec::with_capacity(length);
                while bytes.len() < length {
                    let slice = scattered.slice(at)?;
                    let most = slice.len().min(length - bytes.len());
                    bytes.extend_from_slice(&slice[..most]);
                    at += most as u64;
                }
                run.push(ChargedBytes { bytes, charge }.into_chunk());
            }
            runs.push(run);
        }
        Some(Self { runs, total: self.total })
    }

    /// Returns the bytes from this offset to the end of the chunk that contains it. Returns `None` if the byte is not
    /// stored.
    pub fn slice(&self, at: u64) -> Option<Bytes> {
        let index = self.runs.partition_point(|run| run.start <= at).checked_sub(1)?;
        self.runs[index].slice(at)
    }
}

/// Returns the parts of `gap` before and after the range `known`; either may be empty.
fn without(gap: Range<u64>, known: &Range<u64>) -> [Range<u64>; 2] {
    let before = gap.start..gap.end.min(known.start.max(gap.start));
    let behind = gap.start.max(known.end.min(gap.end))..gap.end;
    if before.end > behind.start || gap.is_empty() { [gap, 0..0] } else { [before, behind] }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn byte(at: u64) -> u8 {
        (at % 251) as u8
    }

    fn run(range: Range<u64>, chunk: usize) -> Run {
        let mut run = Run::at(range.start);
        let bytes: Vec<u8> = range.map(byte).collect();
        bytes.chunks(chunk).for_each(|chunk| run.push(Bytes::copy_from_slice(chunk)));
        run
    }

    fn read(content: &Content, range: Range<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let slice = content.slice(at).unwrap();
            let most = slice.len().min((range.end - at) as usize);
            bytes.extend_from_slice(&slice[..most]);
            at += most as u64;
        }
        bytes
    }

    #[test]
    fn what_is_missing_is_asked_for_at_once() {
        let shape = StoredRanges { total: 100, runs: vec![0..10, 20..30, 90..100] };
        assert_eq!(shape.missing(&(0..100)), Some(10..90));
        assert_eq!(shape.missing(&(5..25)), Some(10..20));
        assert_eq!(shape.missing(&(20..30)), None);
        assert_eq!(shape.missing(&(40..50)), Some(40..50));
        assert_eq!((shape.stored_bytes(), shape.covers(&(0..100))), (30, false));
        assert!(StoredRanges { total: 0, runs: Vec::new() }.covers(&(0..0)));
    }

    #[test]
    fn room_is_taken_until_the_last_slice_is_gone() {
        let tier = Tier::new(10, Gauge::default());
        let charge = tier.take(8).unwrap();
        assert!(tier.take(3).is_none());
        let chunk = ChargedBytes { bytes: vec![7; 8], charge }.into_chunk();
        let slice = chunk.slice(2..3);
        drop(chunk);
        assert!(tier.take(3).is_none());
        drop(slice);
        assert!(tier.take(10).is_some());
    }

    proptest! {
        #[test]
        fn contents_of_any_runs_are_what_they_were(
            ranges in prop::collection::vec((0_u64..200, 1_u64..60, 1_usize..20), 1..8)
        ) {
            let runs: Vec<Run> =
                ranges.iter().map(|(start, length, chunk)| run(*start..start + length, *chunk)).collect();
            let content = Content::new(runs.clone(), 300);
            let shape = content.shape();
            for at in 0..300 {
                let known = runs.iter().any(|run| run.range().contains(&at));
                prop_assert_eq!(shape.covers(&(at..at + 1)), known);
                prop_assert_eq!(content.slice(at).map(|slice| slice[0]), known.then(|| byte(at)));
            }
            for range in &shape.runs {
                prop_assert_eq!(read(&content, range.clone()), range.clone().map(byte).collect::<Vec<_>>());
            }
            prop_assert!(shape.runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
