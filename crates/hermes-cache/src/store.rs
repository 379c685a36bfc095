//! The store of a route's cache: index, memory tier, and fetches in progress.
//!
//! In: heads and contents of received responses. Out: stored responses that may serve a request. Limits apply to bytes
//! (heads included) and to the variants of a target; the least recently used are evicted first.
//!
//! Heads have a separate share of memory. Heads of objects on disk thus use no memory of contents, and contents that
//! fill the memory remove nothing from disk. One lock protects the index; it is held for one access, and never during
//! I/O.

pub mod disk;
mod index;
mod merge;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::disk::{CacheDir, Disk, Ended, FileId, Loaded};
use self::index::{DiskFile, State};
use super::content::{Charge, Content, StoredRanges, Tier};
use super::flight::{Flight, FlightReader};
use super::head::{Head, Millis, Use};
use super::lookup::CacheLookup;
use crate::error::FetchError;
use crate::metrics::CacheMetrics;
use http::HeaderMap;

/// The maximum share of memory for one object, as a divisor. One object must not push out all others.
const LARGEST_SHARE: u64 = 4;
/// The share of memory for heads, as a divisor.
const HEADS_SHARE: u64 = 4;

/// A route's cache.
pub struct Cache {
    /// The settings of the route.
    pub settings: hermes_model::snapshot::Cache,
    /// The identity of the route. Responses for another identity differ, so this cache does not serve them.
    pub of: String,
    /// The directory on disk; `None` if the node has no state directory.
    pub directory: Option<PathBuf>,
    tier: Arc<Tier>,
    heads: Arc<Tier>,
    state: Mutex<State>,
    disk: Option<Disk>,
    /// The counters of the route.
    pub metrics: CacheMetrics,
}

/// A stored response, as a session receives it.
#[derive(Clone)]
pub struct Stored {
    /// The number of the stored response.
    pub id: u64,
    /// The head of the response.
    pub head: Arc<Head>,
    /// The stored ranges.
    pub shape: Arc<StoredRanges>,
    /// The bytes; `None` if they are not in memory.
    pub content: Option<Arc<Content>>,
    /// The file on disk; `None` if the response is only in memory.
    pub file: Option<FileId>,
}

/// The reason why the store could not serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// No response of this target is stored.
    Uri,
    /// The stored responses depend on other request fields.
    Vary,
    /// The stored response is stale.
    Stale,
    /// A part of the stored response is missing.
    Partial,
    /// The request or the stored response demands validation at the origin.
    Request,
    /// The response is stored, but cannot be read now, because memory or the disk queue is full.
    Busy,
}

impl Miss {
    /// The parameter `fwd` of `Cache-Status` (RFC 9211, section 2.2).
    pub fn as_str(self) -> &'static str {
        match self {
            Miss::Uri => "uri-miss",
            Miss::Vary => "vary-miss",
            Miss::Stale => "stale",
            Miss::Partial => "partial",
            Miss::Request => "request",
            Miss::Busy => "miss",
        }
    }
}

/// The result of a lookup.
pub enum LookupResult {
    /// The stored response may be served.
    Hit(Stored),
    /// A fetch in progress may be joined.
    Join {
        /// The reader of the fetch.
        reader: FlightReader,
        /// The head of the response.
        head: Arc<Head>,
        /// The length of the representation; `None` if it is unknown.
        total: Option<u64>,
        /// Why the store could not serve the request.
        miss: Miss,
    },
    /// The head of another request's fetch has not arrived yet; its response may serve this request.
    Wait(Arc<Flight>, Miss),
    /// The request must go to the origin.
    Fetch {
        /// A stored response that the origin may validate; `None` if no stored response matches.
        stored: Option<Stored>,
        /// Why the store could not serve the request.
        miss: Miss,
        /// The fetch that this request begins for other requests; `None` if they may not join it.
        lead: Option<FlightOwner>,
    },
}

/// The guard of a fetch whose head has not arrived yet. If it is dropped before that, the fetch ends, and the requests
/// that wait for the head are woken.
pub struct FlightOwner {
    cache: Arc<Cache>,
    key: Arc<str>,
    /// The fetch.
    pub flight: Arc<Flight>,
    /// True once the head has arrived; the fetch then continues without this guard.
    pub is_open: bool,
}

impl Drop for FlightOwner {
    fn drop(&mut self) {
        if !self.is_open {
            self.cache.land(&self.key, &self.flight);
            // The fetch is ended, because readers that have joined meanwhile would otherwise wait forever.
            let gone = FetchError::Abandoned;
            let _ = self.flight.finish(Err(gone));
        }
    }
}

impl Cache {
    /// Creates the cache of a route, and begins to read its directory.
    pub fn new(
        settings: hermes_model::snapshot::Cache,
        of: String,
        metrics: CacheMetrics,
        place: Option<CacheDir>,
    ) -> Arc<Self> {
        let directory = place.as_ref().map(|place| place.directory.clone());
        let cache = Arc::new_cyclic(|this| {
            let place = place.filter(|_| settings.disk > 0);
            let disk = place.and_then(|place| Disk::start(place, this.clone()));
            let of_heads = settings.memory / HEADS_SHARE;
            let heads = Tier::new(of_heads, metrics.memory.clone());
            let tier = Tier::new(settings.memory - of_heads, metrics.memory.clone());
            Self { settings, of, directory, tier, heads, state: Mutex::default(), disk, metrics }
        });
        if let Some(disk) = &cache.disk {
            cache.lock().ended = Some(index::Outdated::These(HashSet::new()));
            disk.begin();
        }
        cache
    }

    /// Releases the directory; the cache uses only memory from now on. Returns the directory and the signal that it is
    /// free; `None` without a directory, or after the first call.
    pub fn retire(&self) -> Option<(PathBuf, Ended)> {
        let ended = self.disk.as_ref()?.retire()?;
        Some((self.directory.clone()?, ended))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A task that panicked with the lock has ended its session; the index is consistent between calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maximum bytes of one object.
    pub fn largest(&self) -> u64 {
        self.settings.memory / LARGEST_SHARE
    }

    /// Counts that the limit `name` was reached.
    pub fn hit_limit(&self, name: &'static str) {
        (self.metrics.limit)(name);
    }

    /// Reserves memory for a content, and evicts other contents if necessary. Returns `None` if no content can be
    /// evicted, because readers or the disk thread use them.
    pub fn room(&self, bytes: usize) -> Option<Charge> {
        loop {
            if let Some(charge) = self.tier.take(bytes) {
                return Some(charge);
            }
            if !self.lock().cool_oldest() {
                return None;
            }
            self.metrics.evictions_memory.inc();
        }
    }

    /// Reserves memory for a head. If necessary, it removes the least recently used responses, and appends their files
    /// to `gone`.
    fn room_for_head(&self, state: &mut State, bytes: usize, gone: &mut Vec<FileId>) -> Option<Charge> {
        loop {
            if let Some(charge) = self.heads.take(bytes) {
                return Some(charge);
            }
            let Some(file) = state.remove_oldest() else {
                self.hit_limit("cache-memory");
                return None;
            };
            self.metrics.evictions_memory.inc();
            gone.extend(file);
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

    /// Looks up a request. `waits` is true if it may wait for another request's fetch.
    pub fn lookup(self: &Arc<Self>, ask: &CacheLookup, now: Millis, waits: bool) -> LookupResult {
        let mut state = self.lock();
        let state = &mut *state;
        let variants = state.targets.get(&ask.key).map_or(&[][..], Vec::as_slice);
        // The latest matching variant is used.
        let fitting = variants.iter().filter(|variant| variant.head.vary.is_met_by(&ask.fields));
        let best = fitting.max_by_key(|variant| variant.head.times.came).map(|variant| (variant.id, variant.stored()));
        let mut miss = if variants.is_empty() { Miss::Uri } else { Miss::Vary };
        if let Some((id, stored)) = &best {
            let judged = stored.head.usability(&ask.says, now);
            let is_enough = ask.is_served_by(&stored.head, &stored.shape);
            match judged {
                Use::Fresh | Use::StaleAllowed if is_enough => {
                    state.touch(&(ask.key.clone(), *id));
                    return LookupResult::Hit(stored.clone());
                }
                Use::Fresh | Use::StaleAllowed => miss = Miss::Partial,
                Use::Stale => miss = Miss::Stale,
                Use::Asked => miss = Miss::Request,
            }
        }
        let flights = state.flights.get(&ask.key).map_or(&[][..], Vec::as_slice);
        for flight in flights.iter().filter(|_| ask.may_join) {
            if let Some((reader, head, total)) = ask.join(flight, now) {
                return LookupResult::Join { reader, head, total, miss };
            }
        }
        let stored = best.map(|(_, stored)| stored);
        if waits && ask.may_wait() && state.is_for_many(&ask.key, now) {
            let known = state.targets.get(&ask.key).and_then(|variants| variants.first());
            let is_same = |flight: &&Arc<Flight>| {
                let names = known.map(|variant| &variant.head.vary);
                let fits = names.is_none_or(|vary| vary.0.iter().all(|(name, _)| same(ask, flight, name)));
                flight.is_asking()
                    && fits
                    && (flight.asked == super::range::RequestedRanges::Whole || flight.asked == ask.asked)
            };
            if let Some(flight) = flights.iter().find(is_same) {
                return LookupResult::Wait(flight.clone(), miss);
            }
        }
        let lead = (ask.may_join && !ask.is_head).then(|| {
            let flight = Flight::new(ask.fields.clone(), ask.asked.clone());
            state.flights.entry(ask.key.clone()).or_default().push(flight.clone());
            FlightOwner { cache: self.clone(), key: ask.key.clone(), flight, is_open: false }
        });
        LookupResult::Fetch { stored, miss, lead }
    }

    /// Removes a fetch that has ended, or that only its present readers may read.
    pub fn land(&self, key: &Arc<str>, flight: &Arc<Flight>) {
        self.lock().land(key, flight);
        flight.settle();
    }

    /// Replaces the head of a stored response with a newer one, in memory and in its file.
    pub fn freshen(&self, key: &Arc<str>, id: u64, head: &Arc<Head>) {
        let mut gone = Vec::new();
        let mut file = None;
        {
            let mut state = self.lock();
            // The touch protects this response from the eviction below.
            state.touch(&(key.clone(), id));
            let charge = self.room_for_head(&mut state, head.cost() + key.len(), &mut gone);
            if let (Some(charge), Some(variant)) = (charge, state.find(&(key.clone(), id))) {
                (variant.head, variant.charge_of_head) = (head.clone(), charge);
                file = variant.file.as_ref().map(|file| file.id);
            }
        }
        self.unlink(gone);
        if let (Some(disk), Some(file)) = (&self.disk, file) {
            disk.patch(file, key, head);
        }
    }

    /// Invalidates all stored responses of a target.
    pub fn forget(&self, key: &Arc<str>) {
        let mut state = self.lock();
        state.ends(key);
        let ids: Vec<u64> = state.targets.get(key).into_iter().flatten().map(|variant| variant.id).collect();
        let gone: Vec<FileId> = ids.into_iter().filter_map(|id| state.remove(&(key.clone(), id))).collect();
        // A fetch in progress may bring an outdated response.
        let flights = state.flights.remove(key).unwrap_or_default();
        drop(state);
        flights.iter().for_each(|flight| {
            flight.forget();
            flight.settle();
        });
        self.unlink(gone);
    }

    /// Removes one stored response.
    pub fn drop_one(&self, key: &Arc<str>, id: u64) {
        let gone = self.lock().remove(&(key.clone(), id));
        self.unlink(gone.into_iter().collect());
    }

    /// Marks a target whose responses serve only the client that requested them. For a while, requests for it do not
    /// wait for each other's fetch.
    pub fn is_solitary(&self, key: &Arc<str>, now: Millis) {
        self.lock().is_solitary(key, now);
    }
}

/// Methods that the disk tier calls, and those that read from it.
impl Cache {
    /// Records that a response is in a file. Returns the present head of the response, which may be newer than the
    /// file's. Returns `None` if the response is no longer stored, so that the file is useless.
    pub fn filed(&self, key: &Arc<str>, id: u64, file: FileId, bytes: u64, shape: StoredRanges) -> Option<Arc<Head>> {
        let mut gone = Vec::new();
        let mut state = self.lock();
        let place = (key.clone(), id);
        let filed = DiskFile { id: file, bytes, shape: Arc::new(shape) };
        let found = state.find(&place).map(|variant| {
            variant.writes = variant.writes.saturating_sub(1);
            (variant.used, variant.head.clone(), variant.file.replace(filed))
        });
        let head = found.map(|(used, head, before)| {
            state.filed.insert(used, place);
            state.on_disk += bytes;
            if let Some(before) = before {
                state.on_disk = state.on_disk.saturating_sub(before.bytes);
                gone.push(before.id);
            }
            self.shrink(&mut state, &mut gone);
            head
        });
        self.metrics.disk.set(state.on_disk as i64);
        drop(state);
        self.unlink(gone);
        head
    }

    /// Records that a write failed.
    pub fn unwritten(&self, key: &Arc<str>, id: u64) {
        if let Some(variant) = self.lock().find(&(key.clone(), id)) {
            variant.writes = variant.writes.saturating_sub(1);
            variant.written = variant.file.as_ref().map_or(0, |file| file.shape.stored_bytes());
        }
    }

    /// Adds a response that was found in a file. Returns false if the file is useless: the target was invalidated, a
    /// newer response is stored, or memory for heads is full.
    pub fn found(&self, key: &Arc<str>, head: &Arc<Head>, shape: StoredRanges, file: FileId, bytes: u64) -> bool {
        let mut gone = Vec::new();
        let mut state = self.lock();
        let like = state.like(key, &head.vary).map(|variant| (variant.id, variant.head.times.came));
        if like.is_some_and(|(_, came)| came >= head.times.came) || !state.is_valid(key) {
            return false;
        }
        if let Some((id, _)) = like {
            gone.extend(state.remove(&(key.clone(), id)));
        }
        let charge = self.room_for_head(&mut state, head.cost() + key.len(), &mut gone);
        let is_wanted = charge.is_some();
        if let Some(charge) = charge {
            let shape = Arc::new(shape);
            let filed = DiskFile { id: file, bytes, shape: shape.clone() };
            let (_, oldest) = state.insert(key, head.clone(), charge, shape, None, Some(filed));
            gone.extend(oldest);
            state.on_disk += bytes;
            self.shrink(&mut state, &mut gone);
        }
        self.metrics.disk.set(state.on_disk as i64);
        drop(state);
        self.unlink(gone);
        is_wanted
    }

    /// Records that all files have been read.
    pub fn has_looked(&self) {
        self.lock().ended = None;
    }

    fn shrink(&self, state: &mut State, gone: &mut Vec<FileId>) {
        while state.on_disk > self.settings.disk {
            let Some((_, place)) = state.filed.pop_first() else { break };
            self.metrics.evictions_disk.inc();
            gone.extend(state.unfile(&place));
        }
    }

    /// The content of a stored response, read from disk if it is not in memory.
    pub async fn content(&self, key: &Arc<str>, stored: &Stored) -> Loaded {
        if let Some(content) = &stored.content {
            return Loaded::Content(content.clone());
        }
        let (Some(disk), Some(file)) = (&self.disk, stored.file) else { return Loaded::Gone };
        let loaded = disk.load(file).await;
        match &loaded {
            Loaded::Content(content) => self.warmed(key, stored.id, file, content),
            Loaded::Busy => self.hit_limit("cache-load"),
            Loaded::Gone => self.lost(key, stored.id, file),
        }
        loaded
    }

    /// Records that a content was read back into memory.
    fn warmed(&self, key: &Arc<str>, id: u64, file: FileId, content: &Arc<Content>) {
        let mut state = self.lock();
        let place = (key.clone(), id);
        let cold = state.find(&place).filter(|variant| {
            // A later insertion may have stored more of the content meanwhile.
            variant.content.is_none() && variant.file.as_ref().is_some_and(|filed| filed.id == file)
        });
        let used = cold.map(|variant| {
            variant.content = Some(content.clone());
            variant.used
        });
        if let Some(used) = used {
            state.warm.insert(used, place);
        }
    }

    /// Records that a file is missing or damaged.
    fn lost(&self, key: &Arc<str>, id: u64, file: FileId) {
        let mut state = self.lock();
        let place = (key.clone(), id);
        let used = state.find(&place).filter(|variant| variant.file.as_ref().is_some_and(|filed| filed.id == file));
        let gone = used.map(|variant| variant.used).and_then(|used| {
            state.filed.remove(&used);
            state.unfile(&place)
        });
        drop(state);
        self.unlink(gone.into_iter().collect());
    }
}

fn same(ask: &CacheLookup, flight: &Flight, name: &http::HeaderName) -> bool {
    let all = |fields: &HeaderMap| fields.get_all(name).iter().cloned().collect::<Vec<_>>();
    all(&ask.fields) == all(&flight.fields)
}

/// Maximum time that a request waits for the head of another request's fetch.
pub const WAIT: Duration = Duration::from_secs(5);

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests;
