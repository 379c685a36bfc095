//! The stream that an end sends: bytes become chunks, which are kept until the other end has them.
//!
//! In: bytes of the application, acknowledgements, the outcome of each publication, and the time. Out: chunks to publish, the
//! lost ones again. Never: more bytes in memory than the window, or beyond what the other end allows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::frame::Acknowledgement;
use super::incoming::Violation;
use super::ranges::without;

/// The sizes of chunks. Relays accept publications of 1 MiB by default.
const MIN_CHUNK: usize = 1 << 10;
const FIRST_CHUNK: usize = 32 << 10;
const MAX_CHUNK: usize = 256 << 10;
/// A relay that takes a chunk in less than this gets larger ones, and one that takes longer than that smaller ones. So a
/// publication on a slow network ends long before its timeout.
const FAST_PUBLICATION: Duration = Duration::from_millis(100);
const SLOW_PUBLICATION: Duration = Duration::from_secs(1);
/// The bytes that an end may send before it has heard from the other one.
pub(super) const FIRST_LIMIT: u64 = 64 << 10;
/// The wait for the acknowledgement of a published chunk, before it is sent again.
const MIN_REPEAT_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_REPEAT_TIMEOUT: Duration = Duration::from_secs(30);

/// A part of the stream, sent as one publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub offset: u64,
    pub data: Bytes,
    /// The stream ends after it.
    pub is_end: bool,
}

#[derive(Debug)]
struct SentChunk {
    chunk: Chunk,
    /// The publications of it that are under way. There are several on redundant paths.
    under_way: usize,
    /// When a relay accepted it; `None` before.
    published: Option<Instant>,
    /// When a relay accepted it for the first time. Round trips are measured from then, so that a slow path is never taken
    /// for a lossy one for long.
    first_published: Option<Instant>,
    sent: u32,
}

/// A chunk that is sent again.
#[derive(Debug)]
struct LostChunk {
    chunk: Chunk,
    first_published: Option<Instant>,
    sent: u32,
}

#[derive(Debug)]
pub(super) struct Outgoing {
    window: usize,
    max_chunk: usize,
    /// The largest size that the relays accept.
    unit: usize,
    /// The other end allows bytes before this one.
    limit: u64,
    /// Bytes that were never sent, and the place of the first one.
    fresh: BytesMut,
    fresh_at: u64,
    /// The application has ended the stream; a chunk has the end.
    is_ended: bool,
    is_end_sent: bool,
    lost: BTreeMap<u64, LostChunk>,
    in_flight: BTreeMap<u64, SentChunk>,
    /// The bytes of `lost` and `in_flight`.
    unacknowledged: usize,
    /// The smoothed time from a publication to its acknowledgement.
    round_trip: Option<Duration>,
    /// Chunks that were sent more than once.
    pub repeated: u64,
}

impl Outgoing {
    pub(super) fn new(window: usize) -> Self {
        Self {
            window,
            max_chunk: FIRST_CHUNK,
            unit: MAX_CHUNK,
            limit: FIRST_LIMIT,
            fresh: BytesMut::new(),
            fresh_at: 0,
            is_ended: false,
            is_end_sent: false,
            lost: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            unacknowledged: 0,
            round_trip: None,
            repeated: 0,
        }
    }

    /// The bytes that the application may write now.
    pub(super) fn room(&self) -> usize {
        let used = self.fresh.len() + self.unacknowledged;
        if self.is_ended { 0 } else { self.window.saturating_sub(used) }
    }

    pub(super) fn write(&mut self, data: &[u8]) {
        self.fresh.extend_from_slice(data);
    }

    /// Ends the stream after what was written.
    pub(super) fn end(&mut self) {
        self.is_ended = true;
    }

    /// The other end has everything, the end included.
    pub(super) fn is_done(&self) -> bool {
        self.is_end_sent && self.unacknowledged == 0 && self.lost.is_empty() && self.in_flight.is_empty()
    }

    /// The next chunk to publish.
    pub(super) fn next_chunk(&mut self) -> Option<Chunk> {
        let lost = match self.next_lost() {
            Some(lost) => {
                self.repeated += 1;
                lost
            }
            None => LostChunk { chunk: self.fresh_chunk()?, first_published: None, sent: 0 },
        };
        let LostChunk { chunk, first_published, sent } = lost;
        let flight = SentChunk { chunk: chunk.clone(), under_way: 1, published: None, first_published, sent: sent + 1 };
        self.in_flight.insert(chunk.offset, flight);
        Some(chunk)
    }

    /// The first lost chunk. The part of it that exceeds the present size of chunks stays lost.
    fn next_lost(&mut self) -> Option<LostChunk> {
        let (_, mut lost) = self.lost.pop_first()?;
        if lost.chunk.data.len() > self.max_chunk {
            let rest = lost.chunk.data.split_off(self.max_chunk);
            let rest =
                Chunk { offset: lost.chunk.offset + self.max_chunk as u64, data: rest, is_end: lost.chunk.is_end };
            lost.chunk.is_end = false;
            self.lost.insert(rest.offset, LostChunk { chunk: rest, ..lost });
        }
        Some(lost)
    }

    /// The chunk at this place is published once more at the same time.
    pub(super) fn copied(&mut self, offset: u64) {
        if let Some(flight) = self.in_flight.get_mut(&offset) {
            flight.under_way += 1;
        }
    }

    fn fresh_chunk(&mut self) -> Option<Chunk> {
        let allowed = usize::try_from(self.limit.saturating_sub(self.fresh_at)).unwrap_or(usize::MAX);
        let size = self.fresh.len().min(self.max_chunk).min(allowed);
        let is_end = self.is_ended && !self.is_end_sent && size == self.fresh.len();
        if size == 0 && !is_end {
            return None;
        }
        let (offset, data) = (self.fresh_at, self.fresh.split_to(size).freeze());
        self.fresh_at += size as u64;
        self.unacknowledged += size;
        self.is_end_sent |= is_end;
        Some(Chunk { offset, data, is_end })
    }

    /// A relay has accepted the chunk at this place, after this time.
    pub(super) fn published(&mut self, offset: u64, took: Duration, now: Instant) {
        let Some(flight) = self.in_flight.get_mut(&offset) else { return };
        flight.under_way = flight.under_way.saturating_sub(1);
        flight.published = Some(now);
        flight.first_published.get_or_insert(now);
        let is_full = flight.chunk.data.len() >= self.max_chunk;
        if took > SLOW_PUBLICATION {
            self.max_chunk = (self.max_chunk / 2).max(MIN_CHUNK);
        } else if is_full && took < FAST_PUBLICATION {
            self.max_chunk = (self.max_chunk * 2).min(self.unit);
        }
    }

    /// A publication of the chunk at this place failed, or nobody knows. It is sent again, unless another one of it succeeded
    /// or is under way.
    pub(super) fn failed(&mut self, offset: u64) {
        let Some(flight) = self.in_flight.get_mut(&offset) else { return };
        flight.under_way = flight.under_way.saturating_sub(1);
        if flight.under_way == 0 && flight.published.is_none() {
            self.lose(offset);
        }
    }

    /// Nobody has answered the frame that opens the connection. The next one has its bytes again.
    pub(super) fn repeat_first_chunk(&mut self) {
        self.lose(0);
    }

    fn lose(&mut self, offset: u64) {
        if let Some(SentChunk { chunk, first_published, sent, .. }) = self.in_flight.remove(&offset) {
            self.lost.insert(offset, LostChunk { chunk, first_published, sent });
        }
    }

    /// A relay refuses publications of this size. `false`: they cannot be any smaller.
    pub(super) fn too_large(&mut self, offset: u64, size: usize) -> bool {
        // A copy on another path may have been refused before.
        if size <= self.max_chunk {
            self.unit = (size / 2).max(MIN_CHUNK);
            self.max_chunk = self.max_chunk.min(self.unit);
        }
        self.failed(offset);
        size > MIN_CHUNK
    }

    /// A publication had no answer in time. The network is slow, or gone.
    pub(super) fn timed_out(&mut self) {
        self.max_chunk = (self.max_chunk / 2).max(MIN_CHUNK);
    }

    /// The other end has received this.
    pub(super) fn acknowledge(&mut self, told: &Acknowledgement, now: Instant) -> Result<(), Violation> {
        let latest = told.ranges.last().map_or(told.before, |(_, to)| *to);
        let are_in_order =
            told.ranges.is_sorted_by(|a, b| a.1 <= b.0) && told.ranges.iter().all(|(from, to)| from <= to);
        if told.before.max(latest) > self.fresh_at || !are_in_order || (told.end && !self.is_end_sent) {
            return Err(Violation::NotSent);
        }
        self.limit = self.limit.max(told.limit);
        let is_received = |chunk: &Chunk| {
            let range = (chunk.offset, chunk.offset + chunk.data.len() as u64);
            let received = std::iter::once((0, told.before)).chain(told.ranges.iter().copied());
            (!chunk.is_end || told.end) && without(range, received).is_empty()
        };
        let mut freed = 0;
        let mut measured = None;
        self.lost.retain(|_, LostChunk { chunk, .. }| {
            let is_received = is_received(chunk);
            freed += if is_received { chunk.data.len() } else { 0 };
            !is_received
        });
        self.in_flight.retain(|_, flight| {
            let is_received = is_received(&flight.chunk);
            if is_received {
                freed += flight.chunk.data.len();
                let published = flight.first_published;
                measured = measured.max(published.map(|published| now.saturating_duration_since(published)));
            }
            !is_received
        });
        self.unacknowledged -= freed;
        if let Some(measured) = measured {
            self.round_trip = Some(self.round_trip.map_or(measured, |smoothed| (smoothed * 7 + measured) / 8));
        }
        Ok(())
    }

    fn timeout(round_trip: Option<Duration>, sent: u32) -> Duration {
        let first = MIN_REPEAT_TIMEOUT.max(round_trip.unwrap_or_default() * 4);
        first.saturating_mul(1 << sent.saturating_sub(1).min(5)).min(MAX_REPEAT_TIMEOUT)
    }

    /// The time at which [`Self::repeat_lost`] may find something.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let deadline = |flight: &SentChunk| Some(flight.published? + Self::timeout(self.round_trip, flight.sent));
        self.in_flight.values().filter_map(deadline).min()
    }

    /// Sends again what was published, but never acknowledged.
    pub(super) fn repeat_lost(&mut self, now: Instant) {
        let is_lost = |flight: &SentChunk| {
            flight.published.is_some_and(|published| now >= published + Self::timeout(self.round_trip, flight.sent))
        };
        let lost: Vec<u64> =
            self.in_flight.iter().filter(|(_, flight)| is_lost(flight)).map(|(offset, _)| *offset).collect();
        lost.into_iter().for_each(|offset| self.lose(offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: usize = 1 << 20;

    fn with(text: &[u8]) -> Outgoing {
        let mut outgoing = Outgoing::new(WINDOW);
        outgoing.write(text);
        outgoing
    }

    fn told(before: u64, ranges: &[(u64, u64)], end: bool) -> Acknowledgement {
        Acknowledgement { before, ranges: ranges.to_vec(), end, limit: WINDOW as u64 }
    }

    #[test]
    fn a_chunk_is_kept_until_it_is_acknowledged() {
        let now = Instant::now();
        let mut outgoing = with(&[7; 100]);
        outgoing.end();
        let chunk = outgoing.next_chunk();
        assert_eq!(chunk.as_ref().map(|chunk| (chunk.offset, chunk.data.len(), chunk.is_end)), Some((0, 100, true)));
        assert_eq!(outgoing.next_chunk(), None);
        outgoing.published(0, Duration::ZERO, now);
        outgoing.repeat_lost(now + MIN_REPEAT_TIMEOUT / 2);
        assert_eq!(outgoing.next_chunk(), None);
        assert_eq!(outgoing.deadline(), Some(now + MIN_REPEAT_TIMEOUT));
        outgoing.repeat_lost(now + MIN_REPEAT_TIMEOUT);
        assert_eq!(outgoing.next_chunk(), chunk);
        outgoing.published(0, Duration::ZERO, now);
        // The bytes without the end are not the chunk.
        assert_eq!(outgoing.acknowledge(&told(100, &[], false), now), Ok(()));
        assert!(!outgoing.is_done());
        assert_eq!(outgoing.acknowledge(&told(100, &[], true), now), Ok(()));
        assert!(outgoing.is_done());
    }

    #[test]
    fn a_failed_copy_counts_only_if_all_fail() {
        let mut outgoing = with(b"abc");
        let chunk = outgoing.next_chunk();
        outgoing.copied(0);
        outgoing.failed(0);
        assert_eq!(outgoing.next_chunk(), None);
        outgoing.failed(0);
        assert_eq!(outgoing.next_chunk(), chunk);
    }

    #[test]
    fn the_other_end_bounds_what_is_sent() {
        let mut outgoing = with(&vec![1; WINDOW]);
        assert_eq!(outgoing.room(), 0);
        let mut sent = 0;
        while let Some(chunk) = outgoing.next_chunk() {
            sent += chunk.data.len() as u64;
        }
        assert_eq!(sent, FIRST_LIMIT);
        let told = Acknowledgement { before: FIRST_LIMIT, limit: FIRST_LIMIT + 10, ..Acknowledgement::default() };
        assert_eq!(outgoing.acknowledge(&told, Instant::now()), Ok(()));
        assert_eq!(outgoing.next_chunk().map(|chunk| chunk.data.len()), Some(10));
        assert_eq!(outgoing.next_chunk(), None);
    }

    #[test]
    fn a_refused_chunk_becomes_smaller_ones() {
        let mut outgoing = with(&[1; 3000]);
        outgoing.end();
        assert!(outgoing.next_chunk().is_some());
        outgoing.copied(0);
        assert!(outgoing.too_large(0, 3000));
        assert!(outgoing.too_large(0, 3000), "the refusal of a copy says nothing new");
        let parts: Vec<_> = std::iter::from_fn(|| outgoing.next_chunk()).collect();
        let shapes: Vec<_> = parts.iter().map(|chunk| (chunk.offset, chunk.data.len(), chunk.is_end)).collect();
        assert_eq!(shapes, [(0, 1500, false), (1500, 1500, true)]);
        assert!(!outgoing.too_large(0, MIN_CHUNK), "chunks have a smallest size");
    }

    #[test]
    fn a_slow_network_gets_smaller_chunks() {
        let mut outgoing = with(&[1; FIRST_CHUNK]);
        assert!(outgoing.next_chunk().is_some());
        outgoing.timed_out();
        outgoing.failed(0);
        assert_eq!(outgoing.next_chunk().map(|chunk| chunk.data.len()), Some(FIRST_CHUNK / 2));
        assert_eq!(outgoing.next_chunk().map(|chunk| chunk.offset), Some(FIRST_CHUNK as u64 / 2));
    }

    #[test]
    fn what_was_never_sent_cannot_be_acknowledged() {
        let now = Instant::now();
        let mut outgoing = with(&[1; 100]);
        assert!(outgoing.next_chunk().is_some());
        for told in [
            told(101, &[], false),
            told(100, &[], true),
            told(0, &[(50, 101)], false),
            told(0, &[(50, 60), (40, 70)], false),
            told(0, &[(60, 50)], false),
        ] {
            assert_eq!(outgoing.acknowledge(&told, now), Err(Violation::NotSent), "{told:?}");
        }
    }
}
