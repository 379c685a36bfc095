//! Inserts a received response: as a replacement, or merged with stored parts of the same representation.
//!
//! In: a head and a content. Out: an updated index, and a job for the disk if that is worthwhile. Merging happens
//! outside of the lock, and is repeated if another insertion was faster. A new content that would exceed the maximum
//! number of runs is not stored. Contents with far more chunks than their bytes need are copied into longer chunks. A
//! file is written again only after the content has grown by much.

use std::sync::Arc;

use super::super::content::{Content, MAX_RUNS};
use super::super::flight::Flight;
use super::super::head::Head;
use super::disk::{Disk, FileId};
use super::index::State;
use super::{Cache, LARGEST_SHARE};

/// Maximum attempts to merge while other insertions are faster.
const MAX_TRIES: usize = 3;
/// A file is written again once the content is complete, or has grown enough. Its new bytes must then be at least
/// [`GROWN_BYTES`], and at least the file's length divided by this number.
const GROWN_SHARE: u64 = 4;
const GROWN_BYTES: u64 = 64 << 10;

/// The stored content of a representation.
pub(crate) struct StoredParts {
    pub(crate) id: u64,
    /// The content in memory; `None` if it is only on disk.
    pub(crate) content: Option<Arc<Content>>,
    pub(crate) length: u64,
}

impl StoredParts {
    fn is(&self, other: &Self) -> bool {
        self.id == other.id && self.content.as_ref().map(Arc::as_ptr) == other.content.as_ref().map(Arc::as_ptr)
    }
}

/// The outcome of a merge.
enum Merged {
    /// The content is not merged, and replaces the variant with the same request fields.
    Alone(Arc<Content>),
    /// The content was merged with that of the variant with this number.
    Within(u64, Arc<Content>),
    /// The content is not stored; the value is the name of the limit that was reached.
    Not(&'static str),
}

/// The job that the disk tier must do after an insertion.
enum Job {
    Nothing,
    Write(u64, Arc<Content>),
    /// The file is up to date except for its head.
    Patch(FileId),
}

impl Cache {
    /// Stores a response, and removes the flight that brought it under the same lock, so that each request finds the
    /// response or the flight.
    pub fn keep(&self, key: &Arc<str>, head: &Arc<Head>, content: Content, flight: Option<&Arc<Flight>>) {
        let (mut gone, content) = (Vec::new(), Arc::new(content));
        let mut tries = 0;
        let job = loop {
            let known = self.lock().known(key, head, content.total());
            let merged = self.merged(known.as_ref(), &content);
            let mut state = self.lock();
            let now = state.known(key, head, content.total());
            let is_same = match (&known, &now) {
                (Some(known), Some(now)) => known.is(now),
                (None, None) => true,
                _ => false,
            };
            tries += 1;
            // A reference to the content would make it count as busy during the eviction below.
            drop((known, now));
            let merged = match merged {
                _ if is_same => merged,
                _ if tries < MAX_TRIES => continue,
                _ => Merged::Not("cache-merge"),
            };
            state.was_kept(key);
            if let Some(flight) = flight {
                state.land(key, flight);
            }
            break self.put(&mut state, key, head, merged, &mut gone);
        };
        self.unlink(gone);
        self.set_to(key, head, job);
    }

    fn merged(&self, known: Option<&StoredParts>, content: &Arc<Content>) -> Merged {
        // A complete content needs no stored parts. It also replaces them on disk, because their bytes may differ.
        let Some(known) = known.filter(|_| !content.shape().covers(&(0..content.total()))) else {
            return Merged::Alone(content.clone());
        };
        let Some(there) = &known.content else {
            let is_more = content.shape().stored_bytes() >= known.length;
            return if is_more { Merged::Alone(content.clone()) } else { Merged::Not("cache-parts") };
        };
        let joined = Content::new(content.runs().iter().chain(there.runs()).cloned(), content.total());
        if joined.runs().len() > MAX_RUNS {
            return Merged::Not("cache-parts");
        }
        let joined = if joined.is_scattered() { joined.gathered(|bytes| self.room(bytes)) } else { Some(joined) };
        joined.map_or(Merged::Not("cache-memory"), |joined| Merged::Within(known.id, Arc::new(joined)))
    }

    fn put(&self, state: &mut State, key: &Arc<str>, head: &Arc<Head>, merged: Merged, gone: &mut Vec<FileId>) -> Job {
        let cost = head.cost() + key.len();
        match merged {
            Merged::Not(limit) => {
                self.hit_limit(limit);
                Job::Nothing
            }
            Merged::Alone(content) => {
                if let Some(id) = state.like(key, &head.vary).map(|variant| variant.id) {
                    gone.extend(state.remove(&(key.clone(), id)));
                }
                let Some(charge) = self.room_for_head(state, cost, gone) else { return Job::Nothing };
                let shape = Arc::new(content.shape());
                let (id, oldest) = state.insert(key, head.clone(), charge, shape, Some(content.clone()), None);
                gone.extend(oldest);
                self.job(state, key, id, content)
            }
            Merged::Within(id, content) => {
                let place = (key.clone(), id);
                state.touch(&place);
                let Some(charge) = self.room_for_head(state, cost, gone) else { return Job::Nothing };
                let Some(variant) = state.find(&place) else { return Job::Nothing };
                (variant.head, variant.charge_of_head) = (head.clone(), charge);
                variant.shape = Arc::new(content.shape());
                variant.content = Some(content.clone());
                self.job(state, key, id, content)
            }
        }
    }

    /// Decides whether the content is written, and records that.
    fn job(&self, state: &mut State, key: &Arc<str>, id: u64, content: Arc<Content>) -> Job {
        let is_open = self.disk.as_ref().is_some_and(Disk::is_open);
        let Some(variant) = state.find(&(key.clone(), id)).filter(|_| is_open) else { return Job::Nothing };
        let length = variant.shape.stored_bytes();
        if length + variant.head.cost() as u64 > self.settings.disk / LARGEST_SHARE {
            return Job::Nothing;
        }
        let more = length.saturating_sub(variant.written);
        let has_grown = more >= (variant.written / GROWN_SHARE).max(GROWN_BYTES);
        let is_first = variant.writes == 0 && variant.file.is_none();
        if is_first || has_grown || (length == variant.shape.total && more > 0) {
            variant.writes += 1;
            variant.written = length;
            return Job::Write(id, content);
        }
        variant.file.as_ref().map_or(Job::Nothing, |file| Job::Patch(file.id))
    }

    fn set_to(&self, key: &Arc<str>, head: &Arc<Head>, job: Job) {
        let Some(disk) = &self.disk else { return };
        match job {
            Job::Nothing => {}
            Job::Patch(file) => disk.patch(file, key, head),
            Job::Write(id, content) => {
                if !disk.keep(key, id, head, content) {
                    self.hit_limit("cache-disk-queue");
                    self.unwritten(key, id);
                }
            }
        }
    }
}
