//! The index of a cache: which variants there are of which target, who was used when, who is on the way.
//!
//! In: what a cache puts in, takes out and touches, under its lock. Out: the same; and the files that nobody needs any
//! more. What is in memory, and what is on disk, is each in the order of its use. Never: I/O.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::super::content::{Charge, Content, Shape};
use super::super::disk::FileId;
use super::super::flight::Flight;
use super::super::head::{Head, Millis};
use super::super::key::Vary;
use super::Stored;

/// Responses to one target that are kept beside each other: who asks with ever other fields gets no more room.
const MOST_VARIANTS: usize = 32;
/// Targets known to have answers that are nobody else's, for so long: nobody waits for those.
const MOST_SOLITARY: usize = 4096;
const SOLITARY_FOR: Millis = 60_000;

#[derive(Default)]
pub(super) struct State {
    pub(super) targets: HashMap<Arc<str>, Vec<Variant>>,
    /// Those with content in memory, by when they were used.
    pub(super) warm: BTreeMap<u64, Place>,
    /// Those with a file.
    pub(super) filed: BTreeMap<u64, Place>,
    pub(super) flights: HashMap<Arc<str>, Vec<Arc<Flight>>>,
    pub(super) solitary: HashMap<Arc<str>, Millis>,
    pub(super) solitary_turns: VecDeque<Arc<str>>,
    /// Counts uses, and names variants.
    pub(super) turn: u64,
    pub(super) on_disk: u64,
}

pub(super) type Place = (Arc<str>, u64);

pub(super) struct Variant {
    pub(super) id: u64,
    pub(super) used: u64,
    pub(super) head: Arc<Head>,
    pub(super) charge_of_head: Charge,
    pub(super) shape: Arc<Shape>,
    pub(super) content: Option<Arc<Content>>,
    pub(super) file: Option<(FileId, u64)>,
}

impl Variant {
    pub(super) fn stored(&self) -> Stored {
        let (head, shape, content) = (self.head.clone(), self.shape.clone(), self.content.clone());
        Stored { id: self.id, head, shape, content, file: self.file.map(|(file, _)| file) }
    }
}

impl State {
    pub(super) fn find(&mut self, (key, id): &Place) -> Option<&mut Variant> {
        self.targets.get_mut(key)?.iter_mut().find(|variant| variant.id == *id)
    }

    pub(super) fn touch(&mut self, place: &Place) {
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
    pub(super) fn insert(
        &mut self,
        key: &Arc<str>,
        head: Arc<Head>,
        charge: Charge,
        shape: Arc<Shape>,
        content: Option<Arc<Content>>,
        file: Option<(FileId, u64)>,
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
        variants.push(Variant { id, used: id, head, charge_of_head: charge, shape, content, file });
        let crowded = variants.len() > MOST_VARIANTS;
        let oldest = variants.iter().min_by_key(|variant| variant.used).map(|variant| variant.id);
        let gone = oldest.filter(|_| crowded).and_then(|oldest| self.remove(&(key.clone(), oldest)));
        (id, gone)
    }

    /// Takes it out, and returns its file.
    pub(super) fn remove(&mut self, place: &Place) -> Option<FileId> {
        let variants = self.targets.get_mut(&place.0)?;
        let at = variants.iter().position(|variant| variant.id == place.1)?;
        let variant = variants.swap_remove(at);
        if variants.is_empty() {
            self.targets.remove(&place.0);
        }
        self.warm.remove(&variant.used);
        self.filed.remove(&variant.used);
        let (file, bytes) = variant.file?;
        self.on_disk = self.on_disk.saturating_sub(bytes);
        Some(file)
    }

    /// Takes out the one that was chosen by the same fields.
    pub(super) fn take_like(&mut self, key: &Arc<str>, vary: &Vary) -> Option<Variant> {
        let variants = self.targets.get_mut(key)?;
        let at = variants.iter().position(|variant| variant.head.vary == *vary)?;
        let variant = variants.swap_remove(at);
        if variants.is_empty() {
            self.targets.remove(key);
        }
        self.warm.remove(&variant.used);
        self.filed.remove(&variant.used);
        Some(variant)
    }

    /// It leaves memory; where it is nowhere else, it is gone.
    pub(super) fn cool(&mut self, place: &Place) {
        let has_file = self.find(place).is_some_and(|variant| {
            variant.content = None;
            variant.file.is_some()
        });
        if !has_file {
            self.remove(place);
        }
    }

    /// It leaves the disk; where it is nowhere else, it is gone.
    pub(super) fn unfile(&mut self, place: &Place) -> Option<FileId> {
        let variant = self.find(place)?;
        if variant.content.is_none() {
            return self.remove(place);
        }
        let (file, bytes) = variant.file.take()?;
        self.on_disk = self.on_disk.saturating_sub(bytes);
        Some(file)
    }

    pub(super) fn land(&mut self, key: &Arc<str>, flight: &Arc<Flight>) {
        if let Some(flights) = self.flights.get_mut(key) {
            flights.retain(|other| !Arc::ptr_eq(other, flight));
            if flights.is_empty() {
                self.flights.remove(key);
            }
        }
    }

    /// Nobody waits for another one's answer for a while.
    pub(super) fn is_solitary(&mut self, key: &Arc<str>, now: Millis) {
        if self.solitary.insert(key.clone(), now + SOLITARY_FOR).is_none() {
            self.solitary_turns.push_back(key.clone());
        }
        while self.solitary_turns.len() > MOST_SOLITARY {
            if let Some(first) = self.solitary_turns.pop_front() {
                self.solitary.remove(&first);
            }
        }
    }
}
