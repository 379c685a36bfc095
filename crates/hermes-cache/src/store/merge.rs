//! What came, put in: in the place of what it stands for, or together with what is there of the same.
//!
//! In: a head and a content. Out: the index with them, and a job for the disk where that is worth it. Parts are put
//! together outside of the lock, and begun anew where somebody was faster. Bounded: an object has so many runs, and as many
//! chunks as its bytes need; what would have more is not kept. Its file is written anew only when it has grown by much.

use std::sync::Arc;

use super::super::content::{Content, MOST_RUNS};
use super::super::flight::Flight;
use super::super::head::Head;
use super::disk::{Disk, FileId};
use super::index::State;
use super::{Cache, LARGEST_SHARE};

/// Who was faster so often is put in beside nobody.
const MOST_TRIES: usize = 3;
/// A file is written anew when this share of it, and as many bytes, have come beside it; or the whole is there.
const GROWN_SHARE: u64 = 4;
const GROWN_BYTES: u64 = 64 << 10;

/// What is known of a representation already.
pub(crate) struct Known {
    pub(crate) id: u64,
    /// `None`: it is on disk alone.
    pub(crate) content: Option<Arc<Content>>,
    pub(crate) length: u64,
}

impl Known {
    fn is(&self, other: &Self) -> bool {
        self.id == other.id && self.content.as_ref().map(Arc::as_ptr) == other.content.as_ref().map(Arc::as_ptr)
    }
}

/// What becomes of what came.
enum Merged {
    /// It stands alone, in the place of what was chosen by the same fields.
    Alone(Arc<Content>),
    /// It is a part of this one now.
    Within(u64, Arc<Content>),
    /// What is there is worth more, or there would be too many pieces.
    Not(&'static str),
}

/// What the disk is to do.
enum Job {
    Nothing,
    Write(u64, Arc<Content>),
    /// Its file has enough of it, and another head.
    Patch(FileId),
}

impl Cache {
    /// Keeps a response, in the place of the one that it stands for; and lets go of the flight that brought it, so that
    /// everybody finds the one or the other.
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
            // Nothing is held of what is about to be let go: it would count as busy.
            drop((known, now));
            let merged = match merged {
                _ if is_same => merged,
                _ if tries < MOST_TRIES => continue,
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

    fn merged(&self, known: Option<&Known>, content: &Arc<Content>) -> Merged {
        // What is whole needs nothing of before; and who asked for all of it anew shall have that on disk as well.
        let Some(known) = known.filter(|_| !content.shape().covers(&(0..content.total()))) else {
            return Merged::Alone(content.clone());
        };
        let Some(there) = &known.content else {
            let is_more = content.shape().stored_bytes() >= known.length;
            return if is_more { Merged::Alone(content.clone()) } else { Merged::Not("cache-parts") };
        };
        let joined = Content::new(content.runs().iter().chain(there.runs()).cloned(), content.total());
        if joined.runs().len() > MOST_RUNS {
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

    /// Whether it is written, and that it will be.
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
