//! The index of a cache: variants of each target, their order of use, and fetches in progress.
//!
//! In: insertions, removals and uses, under the cache's lock. Out: variants, and files that are no longer needed.
//! Contents in memory and files on disk have separate orders of use. Never: I/O.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use super::super::content::{Charge, Content, StoredRanges};
use super::super::flight::Flight;
use super::super::head::{Head, Millis};
use super::super::key::Vary;
use super::Stored;
use super::disk::FileId;
use super::merge::StoredParts;

/// Maximum number of variants of a target. It limits the memory that a client can use by varying its request fields.
const MAX_VARIANTS: usize = 32;
/// Maximum number of targets marked as solitary, and the time that a mark lasts. Responses of such a target serve a
/// single client, so that requests for it do not wait for each other.
const MAX_SOLITARY: usize = 4096;
const SOLITARY_FOR: Millis = 60_000;
/// Maximum number of targets recorded as invalidated before the files on disk have been read. Beyond it, no file that
/// is still unread is used.
const MAX_ENDED: usize = 65_536;
/// Maximum number of contents that one search for an evictable content examines.
const MAX_EVICTION_CANDIDATES: usize = 256;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) targets: HashMap<Arc<str>, Vec<Variant>>,
    /// Variants with content in memory, by last use.
    pub(crate) warm: BTreeMap<u64, LruPosition>,
    /// Variants with a file, by last use.
    pub(crate) filed: BTreeMap<u64, LruPosition>,
    pub(crate) flights: HashMap<Arc<str>, Vec<Arc<Flight>>>,
    /// Targets whose responses serve a single client: the hash of the key, and when the mark expires. A hash is short,
    /// whatever clients request. After a collision, requests needlessly do not wait for each other.
    solitary: HashMap<u64, Millis>,
    /// Targets that were invalidated before their files have been read; `None` once all files have been read.
    pub(crate) ended: Option<Outdated>,
    hasher: RandomState,
    /// Counter of uses, which also numbers variants.
    pub(crate) turn: u64,
    pub(crate) on_disk: u64,
}

pub(crate) type LruPosition = (Arc<str>, u64);

/// Invalidated targets, by the hashes of their keys.
pub(crate) enum Outdated {
    These(HashSet<u64>),
    /// Too many to list.
    All,
}

pub(crate) struct Variant {
    pub(crate) id: u64,
    pub(crate) used: u64,
    pub(crate) head: Arc<Head>,
    pub(crate) charge_of_head: Charge,
    pub(crate) shape: Arc<StoredRanges>,
    pub(crate) content: Option<Arc<Content>>,
    pub(crate) file: Option<DiskFile>,
    /// Number of queued or running writes. Until they end, the content is only in memory.
    pub(crate) writes: u32,
    /// Bytes that the variant had when it was last queued for writing.
    pub(crate) written: u64,
}

/// A file of the disk tier.
pub(crate) struct DiskFile {
    pub(crate) id: FileId,
    pub(crate) bytes: u64,
    /// Ranges in the file, which may be fewer than those in memory.
    pub(crate) shape: Arc<StoredRanges>,
}

impl Variant {
    /// Whether evicting the content would free nothing, because a writer or reader holds it.
    pub(crate) fn is_busy(&self) -> bool {
        self.writes > 0 || self.content.as_ref().is_some_and(|content| Arc::strong_count(content) > 1)
    }

    pub(crate) fn stored(&self) -> Stored {
        let (head, shape, content) = (self.head.clone(), self.shape.clone(), self.content.clone());
        Stored { id: self.id, head, shape, content, file: self.file.as_ref().map(|file| file.id) }
    }
}

impl State {
    pub(crate) fn find(&mut self, (key, id): &LruPosition) -> Option<&mut Variant> {
        self.targets.get_mut(key)?.iter_mut().find(|variant| variant.id == *id)
    }

    pub(crate) fn touch(&mut self, place: &LruPosition) {
        self.turn += 1;
        let turn = self.turn;
        let Some(variant) = self.find(place) else { return };
        let before = std::mem::replace(&mut variant.used, turn);
        if self.warm.remove(&before).is_some() {
            self.warm.insert(turn, place.clone());
        }
        if self.filed.remove(&before).is_some() {
            self.filed.insert(turn, place.clone());
        }
    }

    /// Inserts a variant. Returns its number. If the target has too many variants, the least recently used one is
    /// removed, and its file is returned.
    pub(crate) fn insert(
        &mut self,
        key: &Arc<str>,
        head: Arc<Head>,
        charge: Charge,
        shape: Arc<StoredRanges>,
        content: Option<Arc<Content>>,
        file: Option<DiskFile>,
    ) -> (u64, Option<FileId>) {
        self.turn += 1;
        let id = self.turn;
        let place = (key.clone(), id);
        if content.is_some() {
            self.warm.insert(id, place.clone());
        }
        if file.is_some() {
            self.filed.insert(id, place);
        }
        let variants = self.targets.entry(key.clone()).or_default();
        let written = file.as_ref().map_or(0, |file| file.shape.stored_bytes());
        let (used, charge_of_head) = (id, charge);
        variants.push(Variant { id, used, head, charge_of_head, shape, content, file, writes: 0, written });
        let crowded = variants.len() > MAX_VARIANTS;
        let oldest = variants.iter().min_by_key(|variant| variant.used).map(|variant| variant.id);
        let gone = oldest.filter(|_| crowded).and_then(|oldest| self.remove(&(key.clone(), oldest)));
        (id, gone)
    }

    /// Removes a variant, and returns its file.
    pub(crate) fn remove(&mut self, place: &LruPosition) -> Option<FileId> {
        let variants = self.targets.get_mut(&place.0)?;
        let at = variants.iter().position(|variant| variant.id == place.1)?;
        let variant = variants.swap_remove(at);
        if variants.is_empty() {
            self.targets.remove(&place.0);
        }
        self.warm.remove(&variant.used);
        self.filed.remove(&variant.used);
        let file = variant.file?;
        self.on_disk = self.on_disk.saturating_sub(file.bytes);
        Some(file.id)
    }

    /// Returns the variant of a target that was selected by the same request fields with the same values.
    pub(crate) fn like(&self, key: &Arc<str>, vary: &Vary) -> Option<&Variant> {
        self.targets.get(key)?.iter().find(|variant| variant.head.vary == *vary)
    }

    /// Returns the stored content of the representation that `head` describes: strong entity tag and length are equal.
    pub(crate) fn known(&self, key: &Arc<str>, head: &Head, total: u64) -> Option<StoredParts> {
        let variant = self.like(key, &head.vary)?;
        let is_same = head.strong_etag().is_some() && head.strong_etag() == variant.head.strong_etag();
        let is_same = is_same && variant.shape.total == total;
        is_same.then(|| StoredParts {
            id: variant.id,
            content: variant.content.clone(),
            length: variant.shape.stored_bytes(),
        })
    }

    /// Evicts the least recently used content from memory. Busy contents are skipped, and count as just used. Returns
    /// false if no examined content can be evicted.
    pub(crate) fn cool_oldest(&mut self) -> bool {
        for _ in 0..MAX_EVICTION_CANDIDATES.min(self.warm.len()) {
            let Some(place) = self.warm.first_key_value().map(|(_, place)| place.clone()) else { break };
            if self.find(&place).is_some_and(|variant| variant.is_busy()) {
                self.touch(&place);
                continue;
            }
            self.warm.pop_first();
            self.cool(&place);
            return true;
        }
        false
    }

    /// Evicts a content from memory. If the variant has no file, the variant is removed.
    fn cool(&mut self, place: &LruPosition) {
        let has_file = self.find(place).is_some_and(|variant| {
            variant.content = None;
            variant.file.as_ref().is_some_and(|file| {
                variant.shape = file.shape.clone();
                true
            })
        });
        if !has_file {
            self.remove(place);
        }
    }

    /// Removes the least recently used variant. Returns `Some` with its file, or `None` if the index is empty.
    pub(crate) fn remove_oldest(&mut self) -> Option<Option<FileId>> {
        let (warm, filed) = (self.warm.first_key_value(), self.filed.first_key_value());
        let oldest = [warm, filed].into_iter().flatten().min_by_key(|(used, _)| **used);
        let place = oldest.map(|(_, place)| place.clone())?;
        Some(self.remove(&place))
    }

    /// Removes and returns a variant's file. If the variant has no content in memory, the variant is removed.
    pub(crate) fn unfile(&mut self, place: &LruPosition) -> Option<FileId> {
        let variant = self.find(place)?;
        if variant.content.is_none() {
            return self.remove(place);
        }
        let file = variant.file.take()?;
        variant.written = 0;
        self.on_disk = self.on_disk.saturating_sub(file.bytes);
        Some(file.id)
    }

    pub(crate) fn land(&mut self, key: &Arc<str>, flight: &Arc<Flight>) {
        if let Some(flights) = self.flights.get_mut(key) {
            flights.retain(|other| !Arc::ptr_eq(other, flight));
            if flights.is_empty() {
                self.flights.remove(key);
            }
        }
    }

    /// Marks a target whose responses serve a single client, for a while.
    pub(crate) fn is_solitary(&mut self, key: &str, now: Millis) {
        if self.solitary.len() >= MAX_SOLITARY {
            self.solitary.retain(|_, until| *until > now);
        }
        if self.solitary.len() >= MAX_SOLITARY {
            // With this many targets, few requests have the same target, so that losing the marks costs little.
            self.solitary.clear();
        }
        let key = self.hasher.hash_one(key);
        self.solitary.insert(key, now + SOLITARY_FOR);
    }

    /// Whether requests may wait for another request's fetch of this target.
    pub(crate) fn is_for_many(&self, key: &str, now: Millis) -> bool {
        self.solitary.get(&self.hasher.hash_one(key)).is_none_or(|until| *until <= now)
    }

    /// Records that a response of this target was stored, so that requests may wait for it again.
    pub(crate) fn was_kept(&mut self, key: &str) {
        let key = self.hasher.hash_one(key);
        self.solitary.remove(&key);
    }

    /// Invalidates the files of a target that have not been read yet.
    pub(crate) fn ends(&mut self, key: &str) {
        let key = self.hasher.hash_one(key);
        if let Some(Outdated::These(keys)) = &mut self.ended {
            keys.insert(key);
            if keys.len() > MAX_ENDED {
                self.ended = Some(Outdated::All);
            }
        }
    }

    /// Whether a file of this target may be used.
    pub(crate) fn is_valid(&self, key: &str) -> bool {
        match &self.ended {
            None => true,
            Some(Outdated::These(keys)) => !keys.contains(&self.hasher.hash_one(key)),
            Some(Outdated::All) => false,
        }
    }
}
