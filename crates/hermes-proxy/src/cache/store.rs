//! What is kept: the index of a cache, its memory tier, and who is on the way for what.
//!
//! In: heads and contents. Out: the same again, for whoever may have them. Bounded by bytes, heads included, and by
//! variants a target; what was used longest ago goes first. One lock, held for a look at the index and never over I/O.

mod index;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::index::{State, Variant};
use super::content::{Charge, Content, Shape, Tier};
use super::disk::{Disk, FileId};
use super::flight::{Flight, FlightReader};
use super::head::{Head, Millis, Use};
use super::look::Ask;
use crate::error::Error;
use crate::metrics::CacheMetrics;
use http::HeaderMap;

/// An object has at most this share of the memory: one alone shall not push all others out.
const LARGEST_SHARE: u64 = 4;
/// A route's cache.
pub(crate) struct Cache {
    pub(crate) settings: hermes_model::snapshot::Cache,
    /// What it holds is of this; another one's answers are others.
    pub(super) of: String,
    pub(super) directory: Option<PathBuf>,
    tier: Arc<Tier>,
    state: Mutex<State>,
    disk: Option<Disk>,
    pub(crate) metrics: CacheMetrics,
}

/// A kept response, as a session has it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) id: u64,
    pub(crate) head: Arc<Head>,
    pub(crate) shape: Arc<Shape>,
    pub(crate) content: Option<Arc<Content>>,
    pub(crate) file: Option<FileId>,
}

/// Why nothing could be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    Uri,
    Vary,
    Stale,
    Partial,
    Request,
}

/// What a look at the store found.
pub(crate) enum Found {
    /// It may be given.
    Hit(Stored),
    /// It is on its way; and how long it is.
    Join { reader: FlightReader, head: Arc<Head>, total: Option<u64>, miss: Miss },
    /// Somebody asks for it: it may be the same.
    Wait(Arc<Flight>, Miss),
    /// Its origin has to be asked. `lead`: others may wait for the answer.
    Ask { stored: Option<Stored>, miss: Miss, lead: Option<Lead> },
}

/// A fetch whose head is not there yet. Its drop tells those who wait.
pub(crate) struct Lead {
    cache: Arc<Cache>,
    key: Arc<str>,
    pub(crate) flight: Arc<Flight>,
    pub(crate) is_open: bool,
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.is_open {
            self.cache.land(&self.key, &self.flight);
            // Whoever has joined meanwhile waits for nothing.
            let gone = Error::Internal("what was read along came to nothing; ask again".to_owned());
            let _ = self.flight.finish(Err(gone));
        }
    }
}

impl Cache {
    pub(super) fn new(
        settings: hermes_model::snapshot::Cache,
        of: String,
        metrics: CacheMetrics,
        directory: Option<PathBuf>,
    ) -> Arc<Self> {
        let cache = Arc::new_cyclic(|this| {
            let on_disk = directory.clone().filter(|_| settings.disk > 0);
            let disk = on_disk.and_then(|at| Disk::start(at, this.clone()));
            let tier = Tier::new(settings.memory, metrics.memory.clone());
            Self { settings, of, directory, tier, state: Mutex::default(), disk, metrics }
        });
        if let Some(disk) = &cache.disk {
            disk.look();
        }
        cache
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panicked with it has ended its session; the index is whole between calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that one object may have.
    pub(crate) fn largest(&self) -> u64 {
        self.tier.most() / LARGEST_SHARE
    }

    pub(crate) fn hit_limit(&self, name: &'static str) {
        self.metrics.limit(name);
    }

    pub(super) fn disk(&self) -> Option<&Disk> {
        self.disk.as_ref()
    }

    /// Room in memory, of which others may have to go. `None`: what is there is being read.
    pub(crate) fn room(&self, bytes: usize) -> Option<Charge> {
        if let Some(charge) = self.tier.take(bytes) {
            return Some(charge);
        }
        let mut gone = Vec::new();
        let charge = self.room_within(&mut self.lock(), bytes, &mut gone);
        self.unlink(gone);
        charge
    }

    fn room_within(&self, state: &mut State, bytes: usize, gone: &mut Vec<FileId>) -> Option<Charge> {
        loop {
            if let Some(charge) = self.tier.take(bytes) {
                return Some(charge);
            }
            self.metrics.evictions_memory.inc();
            if let Some((_, place)) = state.warm.pop_first() {
                state.cool(&place);
            } else if let Some((_, place)) = state.filed.pop_first() {
                gone.extend(state.remove(&place));
            } else {
                return None;
            }
        }
    }

    fn unlink(&self, files: Vec<FileId>) {
        if files.is_empty() {
            return;
        }
        self.metrics.disk.set(self.lock().on_disk as i64);
        if let Some(disk) = &self.disk {
            files.into_iter().for_each(|file| disk.remove(file));
        }
    }

    /// Looks for what a request may be given. `waits`: it may wait for what others ask for.
    pub(crate) fn look(self: &Arc<Self>, ask: &Ask, now: Millis, waits: bool) -> Found {
        let mut state = self.lock();
        let state = &mut *state;
        let variants = state.targets.get(&ask.key).map_or(&[][..], Vec::as_slice);
        // The latest of those that fit.
        let fitting = variants.iter().filter(|variant| variant.head.vary.is_met_by(&ask.fields));
        let best = fitting.max_by_key(|variant| variant.head.times.came).map(|variant| (variant.id, variant.stored()));
        let mut miss = if variants.is_empty() { Miss::Uri } else { Miss::Vary };
        if let Some((id, stored)) = &best {
            let judged = stored.head.judge(&ask.says, now);
            let is_enough = ask.is_served_by(&stored.head, &stored.shape);
            match judged {
                Use::Fresh | Use::StaleAllowed if is_enough => {
                    state.touch(&(ask.key.clone(), *id));
                    return Found::Hit(stored.clone());
                }
                Use::Fresh | Use::StaleAllowed => miss = Miss::Partial,
                Use::Stale => miss = Miss::Stale,
                Use::Asked => miss = Miss::Request,
            }
        }
        let flights = state.flights.get(&ask.key).map_or(&[][..], Vec::as_slice);
        for flight in flights.iter().filter(|_| ask.may_join) {
            if let Some((reader, head, total)) = ask.join(flight, now) {
                return Found::Join { reader, head, total, miss };
            }
        }
        let stored = best.map(|(_, stored)| stored);
        if waits && ask.may_join && state.solitary.get(&ask.key).is_none_or(|until| *until <= now) {
            let known = state.targets.get(&ask.key).and_then(|variants| variants.first());
            let is_same = |flight: &&Arc<Flight>| {
                let names = known.map(|variant| &variant.head.vary);
                let fits = names.is_none_or(|vary| vary.0.iter().all(|(name, _)| same(ask, flight, name)));
                flight.is_asking() && fits && (flight.asked == super::range::Asked::Whole || flight.asked == ask.asked)
            };
            if let Some(flight) = flights.iter().find(is_same) {
                return Found::Wait(flight.clone(), miss);
            }
        }
        let lead = (ask.may_join && !ask.is_head).then(|| {
            let flight = Flight::new(ask.fields.clone(), ask.asked.clone());
            state.flights.entry(ask.key.clone()).or_default().push(flight.clone());
            Lead { cache: self.clone(), key: ask.key.clone(), flight, is_open: false }
        });
        Found::Ask { stored, miss, lead }
    }

    /// Keeps a response, in the place of the one that it stands for; and lets go of the flight that brought it, so that
    /// everybody finds the one or the other.
    pub(crate) fn keep(&self, key: &Arc<str>, head: &Arc<Head>, content: Content, flight: Option<&Arc<Flight>>) {
        let mut gone = Vec::new();
        let mut job = None;
        {
            let mut state = self.lock();
            state.solitary.remove(key);
            if let Some(flight) = flight {
                state.land(key, flight);
            }
            let before = state.take_like(key, &head.vary);
            let content = match &before {
                Some(old) => combined(old, head, content),
                None => content,
            };
            if let Some((file, bytes)) = before.and_then(|old| old.file) {
                state.on_disk = state.on_disk.saturating_sub(bytes);
                gone.push(file);
            }
            if let Some(charge) = self.room_within(&mut state, head.cost() + key.len(), &mut gone) {
                let (shape, content) = (Arc::new(content.shape()), Arc::new(content));
                let (id, oldest) = state.insert(key, head.clone(), charge, shape, Some(content.clone()), None);
                gone.extend(oldest);
                job = Some((id, content));
            } else {
                self.hit_limit("cache-memory");
            }
        }
        self.unlink(gone);
        if let (Some(disk), Some((id, content))) = (&self.disk, job)
            && content.shape().len() + head.cost() as u64 <= self.settings.disk / LARGEST_SHARE
            && !disk.keep(key, id, head, content)
        {
            self.hit_limit("cache-disk-queue");
        }
    }

    /// A fetch is over, or will be read by those alone who read it already.
    pub(crate) fn land(&self, key: &Arc<str>, flight: &Arc<Flight>) {
        self.lock().land(key, flight);
        flight.settle();
    }

    /// What it says has become so: a kept response has a newer head.
    pub(crate) fn freshen(&self, key: &Arc<str>, id: u64, head: &Arc<Head>) {
        let mut gone = Vec::new();
        let mut file = None;
        {
            let mut state = self.lock();
            let Some(charge) = self.room_within(&mut state, head.cost() + key.len(), &mut gone) else { return };
            state.touch(&(key.clone(), id));
            if let Some(variant) = state.find(&(key.clone(), id)) {
                (variant.head, variant.charge_of_head) = (head.clone(), charge);
                file = variant.file;
            }
        }
        self.unlink(gone);
        if let (Some(disk), Some((file, _))) = (&self.disk, file) {
            disk.patch(file, key, head);
        }
    }

    /// Nothing that is kept of it may be given any more.
    pub(crate) fn forget(&self, key: &Arc<str>) {
        let mut state = self.lock();
        let ids: Vec<u64> = state.targets.get(key).into_iter().flatten().map(|variant| variant.id).collect();
        let gone: Vec<FileId> = ids.into_iter().filter_map(|id| state.remove(&(key.clone(), id))).collect();
        // What is on its way may be of before.
        let flights = state.flights.remove(key).unwrap_or_default();
        drop(state);
        flights.iter().for_each(|flight| {
            flight.forget();
            flight.settle();
        });
        self.unlink(gone);
    }

    /// One of them may not be given any more.
    pub(crate) fn drop_one(&self, key: &Arc<str>, id: u64) {
        let gone = self.lock().remove(&(key.clone(), id));
        self.unlink(gone.into_iter().collect());
    }

    /// Its answers are for those who asked alone: nobody waits for another one's for a while.
    pub(crate) fn is_solitary(&self, key: &Arc<str>, now: Millis) {
        self.lock().is_solitary(key, now);
    }
}

/// For the disk tier.
impl Cache {
    /// A response is in a file now. False where it is not kept any more: then nobody needs that.
    pub(super) fn filed(&self, key: &Arc<str>, id: u64, file: FileId, bytes: u64) -> bool {
        let mut gone = Vec::new();
        let is_wanted = {
            let mut state = self.lock();
            let place = (key.clone(), id);
            let found = state.find(&place).map(|variant| {
                variant.file = Some((file, bytes));
                variant.used
            });
            if let Some(used) = found {
                state.filed.insert(used, place);
                state.on_disk += bytes;
                self.shrink(&mut state, &mut gone);
            }
            self.metrics.disk.set(state.on_disk as i64);
            found.is_some()
        };
        self.unlink(gone);
        is_wanted
    }

    /// A response was found in a file. False where there is no use for it.
    pub(super) fn found(&self, key: &Arc<str>, head: &Arc<Head>, shape: Shape, file: FileId, bytes: u64) -> bool {
        let mut gone = Vec::new();
        let is_wanted = {
            let mut state = self.lock();
            let known = state.targets.get(key).into_iter().flatten();
            let is_new = !known.into_iter().any(|variant| variant.head.vary == head.vary);
            let charge = is_new.then(|| self.tier.take(head.cost() + key.len())).flatten();
            let is_wanted = charge.is_some();
            if let Some(charge) = charge {
                let (_, oldest) = state.insert(key, head.clone(), charge, Arc::new(shape), None, Some((file, bytes)));
                gone.extend(oldest);
                state.on_disk += bytes;
                self.shrink(&mut state, &mut gone);
            }
            self.metrics.disk.set(state.on_disk as i64);
            is_wanted
        };
        self.unlink(gone);
        is_wanted
    }

    fn shrink(&self, state: &mut State, gone: &mut Vec<FileId>) {
        while state.on_disk > self.settings.disk {
            let Some((_, place)) = state.filed.pop_first() else { break };
            self.metrics.evictions_disk.inc();
            gone.extend(state.unfile(&place));
        }
    }

    /// Its content is in memory again.
    pub(crate) fn warmed(&self, key: &Arc<str>, id: u64, content: &Arc<Content>) {
        let mut state = self.lock();
        let place = (key.clone(), id);
        let found = state.find(&place).map(|variant| {
            variant.content = Some(content.clone());
            variant.used
        });
        if let Some(used) = found {
            state.warm.insert(used, place);
        }
    }
}

fn same(ask: &Ask, flight: &Flight, name: &http::HeaderName) -> bool {
    let all = |fields: &HeaderMap| fields.get_all(name).iter().cloned().collect::<Vec<_>>();
    all(&ask.fields) == all(&flight.fields)
}

/// What came, with what was there where both are sure to be of the same.
fn combined(old: &Variant, head: &Head, content: Content) -> Content {
    let is_same = old.head.strong_etag().is_some() && old.head.strong_etag() == head.strong_etag();
    match &old.content {
        Some(known) if is_same && old.shape.total == content.shape().total => {
            let total = old.shape.total;
            Content::new(content.runs().iter().chain(known.runs()).cloned(), total)
        }
        _ => content,
    }
}

/// How long somebody waits for what another one asks for.
pub(crate) const WAIT: Duration = Duration::from_secs(5);
