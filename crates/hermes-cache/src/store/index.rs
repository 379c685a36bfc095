//! The index of a cache: which variants there are of which target, who was used when, who is on the way.
//!
//! In: what a cache puts in, takes out and touches, under its lock. Out: the same; and the files that nobody needs any
//! more. What is in memory, and what is on disk, is each in the order of its use. Never: I/O.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use super::super::content::{Charge, Content, Shape};
use super::super::flight::Flight;
use super::super::head::{Head, Millis};
use super::super::key::Vary;
use super::Stored;
use super::disk::FileId;
use super::merge::Known;

/// Responses to one target that are kept beside each other: who asks with ever other fields gets no more room.
const MOST_VARIANTS: usize = 32;
/// Targets known to have answers that are nobody else's, for so long: nobody waits for those.
const MOST_SOLITARY: usize = 4096;
const SOLITARY_FOR: Millis = 60_000;
/// Keys that end before what is on disk is found; of more nothing that is found is of use.
const MOST_ENDED: usize = 65_536;
/// Contents that are looked at for one that may leave memory.
const MOST_LOOKS: usize = 256;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) targets: HashMap<Arc<str>, Vec<Variant>>,
    /// Those with content in memory, by when they were used.
    pub(crate) warm: BTreeMap<u64, Place>,
    /// Those with a file.
    pub(crate) filed: BTreeMap<u64, Place>,
    pub(crate) flights: HashMap<Arc<str>, Vec<Arc<Flight>>>,
    /// Of their keys the hashes, which are small whatever clients ask for. Two that have the same do not wait for each
    /// other, which is all that comes of it.
    solitary: HashMap<u64, Millis>,
    /// What may not be given any more of what is on disk and not found yet. `None`: all of that is found.
    pub(crate) ended: Option<Outdated>,
    hasher: RandomState,
    /// Counts uses, and names variants.
    pub(crate) turn: u64,
    pub(crate) on_disk: u64,
}

pub(crate) type Place = (Arc<str>, u64);

/// Keys by their hashes.
pub(crate) enum Outdated {
    These(HashSet<u64>),
    /// There were too many.
    All,
}

pub(crate) struct Variant {
    pub(crate) id: u64,
    pub(crate) used: u64,
    pub(crate) head: Arc<Head>,
    pub(crate) charge_of_head: Charge,
    pub(crate) shape: Arc<Shape>,
    pub(crate) content: Option<Arc<Content>>,
    pub(crate) file: Option<Filed>,
    /// Writes that are under way; what is written is nowhere but in memory until then.
    pub(crate) writes: u32,
    /// Bytes that it had when it was given to be written last.
    pub(crate) written: u64,
}

/// A file of the disk tier.
pub(crate) struct Filed {
    pub(crate) id: FileId,
    pub(crate) bytes: u64,
    /// What is in it, which may be less than what is in memory.
    pub(crate) shape: Arc<Shape>,
}

impl Variant {
    /// To let go of its content would free nothing: somebody writes it, or reads it.
    pub(crate) fn is_busy(&self) -> bool {
        self.writes > 0 || self.content.as_ref().is_some_and(|content| Arc::strong_count(content) > 1)
    }

    pub(crate) fn stored(&self) -> Stored {
        let (head, shape, content) = (self.head.clone(), self.shape.clone(), self.content.clone());
        Stored { id: self.id, head, shape, content, file: self.file.as_ref().map(|file| file.id) }
    }
}

impl State {
    pub(crate) fn find(&mut self, (key, id): &Place) -> Option<&mut Variant> {
        self.targets.get_mut(key)?.iter_mut().find(|variant| variant.id == *id)
    }

    pub(crate) fn touch(&mut self, place: &Place) {
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

    /// Puts one in, and returns its name, and the file of one that had to go.
    pub(crate) fn insert(
        &mut self,
        key: &Arc<str>,
        head: Arc<Head>,
        charge: Charge,
        shape: Arc<Shape>,
        content: Option<Arc<Content>>,
        file: Option<Filed>,
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
        let crowded = variants.len() > MOST_VARIANTS;
        let oldest = variants.iter().min_by_key(|variant| variant.used).map(|variant| variant.id);
        let gone = oldest.filter(|_| crowded).and_then(|oldest| self.remove(&(key.clone(), oldest)));
        (id, gone)
    }

    /// Takes it out, and returns its file.
    pub(crate) fn remove(&mut self, place: &Place) -> Option<FileId> {
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

    /// The one that was chosen by the same fields.
    pub(crate) fn like(&self, key: &Arc<str>, vary: &Vary) -> Option<&Variant> {
        self.targets.get(key)?.iter().find(|variant| variant.head.vary == *vary)
    }

    /// What is known of the same representation, of so many bytes.
    pub(crate) fn known(&self, key: &Arc<str>, head: &Head, total: u64) -> Option<Known> {
        let variant = self.like(key, &head.vary)?;
        let is_same = head.strong_etag().is_some() && head.strong_etag() == variant.head.strong_etag();
        let is_same = is_same && variant.shape.total == total;
        is_same.then(|| Known {
            id: variant.id,
            content: variant.content.clone(),
            length: variant.shape.stored_bytes(),
        })
    }

    /// Whichever content was used longest ago leaves memory, but for those that are busy, which count as used. False
    /// where there is none.
    pub(crate) fn cool_oldest(&mut self) -> bool {
        for _ in 0..MOST_LOOKS.min(self.warm.len()) {
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

    /// It leaves memory; where it is nowhere else, it is gone.
    fn cool(&mut self, place: &Place) {
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

    /// Whichever was used longest ago is gone. `None` where there is none; else its file, if it has one.
    pub(crate) fn remove_oldest(&mut self) -> Option<Option<FileId>> {
        let (warm, filed) = (self.warm.first_key_value(), self.filed.first_key_value());
        let oldest = [warm, filed].into_iter().flatten().min_by_key(|(used, _)| **used);
        let place = oldest.map(|(_, place)| place.clone())?;
        Some(self.remove(&place))
    }

    /// It leaves the disk; where it is nowhere else, it is gone.
    pub(crate) fn unfile(&mut self, place: &Place) -> Option<FileId> {
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

    /// Nobody waits for another one's answer for a while.
    pub(crate) fn is_solitary(&mut self, key: &str, now: Millis) {
        if self.solitary.len() >= MOST_SOLITARY {
            self.solitary.retain(|_, until| *until > now);
        }
        if self.solitary.len() >= MOST_SOLITARY {
            // Of so many at once each is asked for by few.
            self.solitary.clear();
        }
        let key = self.hasher.hash_one(key);
        self.solitary.insert(key, now + SOLITARY_FOR);
    }

    /// It may be waited for.
    pub(crate) fn is_for_many(&self, key: &str, now: Millis) -> bool {
        self.solitary.get(&self.hasher.hash_one(key)).is_none_or(|until| *until <= now)
    }

    /// It was for many.
    pub(crate) fn was_kept(&mut self, key: &str) {
        let key = self.hasher.hash_one(key);
        self.solitary.remove(&key);
    }

    /// What is on disk of it may not be given any more.
    pub(crate) fn ends(&mut self, key: &str) {
        let key = self.hasher.hash_one(key);
        if let Some(Outdated::These(keys)) = &mut self.ended {
            keys.insert(key);
            if keys.len() > MOST_ENDED {
                self.ended = Some(Outdated::All);
            }
        }
    }

    /// What is found of it on disk may be given.
    pub(crate) fn is_valid(&self, key: &str) -> bool {
        match &self.ended {
            None => true,
            Some(Outdated::These(keys)) => !keys.contains(&self.hasher.hash_one(key)),
            Some(Outdated::All) => false,
        }
    }
}
