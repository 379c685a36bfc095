//! The bytes of a representation: all of them, or some runs of them; and what they cost.
//!
//! In: chunks. Out: slices, what is missing, one content of two (RFC 9111, 3.4). A chunk is paid for as long as anybody
//! holds a slice of it, in the store or on its way to a slow client: what is evicted and still read counts on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;

/// An object that is known in more pieces is not worth them: each costs a look with each request.
pub const MOST_RUNS: usize = 64;
/// What a chunk costs beside its bytes, about: who asks for a byte at a time shall not hold more than is counted.
pub const CHUNK_COST: usize = 192;
/// Chunks that are put together have as many bytes.
const GATHERED: usize = 64 << 10;

/// Bytes that may be held together.
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

    /// Takes room for so many bytes, where there is some.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let bytes = bytes as u64;
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        self.gauge.inc_by(bytes as i64);
        Some(Charge { tier: self.clone(), bytes })
    }
}

/// Room that is taken until this is dropped.
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

/// Bytes that are paid for.
pub struct Paid {
    /// The bytes, which may grow within the charge.
    pub bytes: Vec<u8>,
    /// The room that they take.
    pub charge: Charge,
}

impl AsRef<[u8]> for Paid {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Paid {
    /// As a chunk, which is paid for until its last slice is gone.
    pub fn into_chunk(self) -> Bytes {
        debug_assert!(self.charge.bytes >= self.bytes.len() as u64, "nothing is free");
        Bytes::from_owner(self)
    }
}

/// Chunks without a gap.
#[derive(Clone, Debug, Default)]
pub struct Run {
    start: u64,
    /// Where each chunk ends.
    ends: Vec<u64>,
    chunks: Vec<Bytes>,
}

impl Run {
    /// An empty run that begins at `start`.
    pub fn at(start: u64) -> Self {
        Self { start, ..Self::default() }
    }

    /// The bytes that it has.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end()
    }

    /// The first byte after it.
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

    /// What lies there: the rest of one chunk.
    pub fn slice(&self, at: u64) -> Option<Bytes> {
        if at < self.start {
            return None;
        }
        let index = self.ends.partition_point(|end| *end <= at);
        let chunk = self.chunks.get(index)?;
        let begins = self.ends[index] - chunk.len() as u64;
        Some(chunk.slice((at - begins) as usize..))
    }

    /// Forgets the chunks that end there or before.
    pub fn forget(&mut self, before: u64) {
        let count = self.ends.partition_point(|end| *end <= before);
        if count > 0 {
            self.start = self.ends[count - 1];
            self.ends.drain(..count);
            self.chunks.drain(..count);
        }
    }

    /// The part of it within.
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

/// Which bytes of how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The length of the representation.
    pub total: u64,
    /// In order, with gaps between them.
    pub runs: Vec<Range<u64>>,
}

impl Shape {
    /// True if all bytes of `range` are present.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.runs.iter().any(|run| run.start <= range.start && range.end <= run.end)
    }

    /// Bytes that are there.
    pub fn stored_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// From the first missing byte to the last one within. One request has to do for it.
    pub fn missing(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let holder = |at: u64| self.runs.iter().find(|run| run.contains(&at));
        let start = holder(range.start).map_or(range.start, |run| run.end);
        let end = range.end.checked_sub(1).and_then(holder).map_or(range.end, |run| run.start);
        (start < end).then_some(start..end)
    }
}

/// Bytes of a representation whose length is known.
#[derive(Clone, Debug)]
pub struct Content {
    runs: Vec<Run>,
    total: u64,
}

impl Content {
    /// Of runs in any order; the first of two that overlap is the one that counts.
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
            // Each look makes two of one: those that are empty would be as many as there are numbers.
            gaps = gaps.into_iter().flat_map(|gap| without(gap, &known)).filter(|gap| !gap.is_empty()).collect();
        }
        self.runs.extend(gaps.iter().map(|gap| run.within(gap)));
    }

    /// Which bytes are present.
    pub fn shape(&self) -> Shape {
        Shape { total: self.total, runs: self.runs.iter().map(Run::range).collect() }
    }

    /// The bytes, as runs in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The length of the representation.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// It lies in far more chunks than its bytes need.
    pub fn is_scattered(&self) -> bool {
        let chunks: usize = self.runs.iter().map(|run| run.chunks.len()).sum();
        chunks > 2 * MOST_RUNS + 2 * (self.shape().stored_bytes() / GATHERED as u64) as usize
    }

    /// The same in as few chunks as there may be. `None` where there is no room to put them together.
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
                run.push(Paid { bytes, charge }.into_chunk());
            }
            runs.push(run);
        }
        Some(Self { runs, total: self.total })
    }

    /// What lies there: the rest of one chunk.
    pub fn slice(&self, at: u64) -> Option<Bytes> {
        let index = self.runs.partition_point(|run| run.start <= at).checked_sub(1)?;
        self.runs[index].slice(at)
    }
}

/// What is left of a gap beside what is known.
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
        let shape = Shape { total: 100, runs: vec![0..10, 20..30, 90..100] };
        assert_eq!(shape.missing(&(0..100)), Some(10..90));
        assert_eq!(shape.missing(&(5..25)), Some(10..20));
        assert_eq!(shape.missing(&(20..30)), None);
        assert_eq!(shape.missing(&(40..50)), Some(40..50));
        assert_eq!((shape.stored_bytes(), shape.covers(&(0..100))), (30, false));
        assert!(Shape { total: 0, runs: Vec::new() }.covers(&(0..0)));
    }

    #[test]
    fn room_is_taken_until_the_last_slice_is_gone() {
        let tier = Tier::new(10, Gauge::default());
        let charge = tier.take(8).unwrap();
        assert!(tier.take(3).is_none());
        let chunk = Paid { bytes: vec![7; 8], charge }.into_chunk();
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
