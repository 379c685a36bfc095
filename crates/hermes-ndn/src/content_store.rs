//! Content that is stored, and the Interests that wait for more.
//!
//! In: responses, Interests, and the time. Out: the versions that may answer an Interest, or that the content must be
//! requested. Equal content keeps its version. Bytes, waiting Interests and requests are bounded. Never: a request.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::Name;
use crate::publish::{PublishedContent, asks_for_newest};

/// The scope of the content, and its name. Clients of one scope share what is stored.
pub type ContentKey = (Arc<str>, Name);

/// The bounds of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    /// Bytes of content. Each content counts with `overhead` more.
    pub bytes: usize,
    /// Bytes of state for each content, apart from its own.
    pub overhead: usize,
    /// Interests that wait.
    pub waiting: usize,
    /// Contents that are requested at the same time.
    pub requests: usize,
    /// Bytes that are being received, and not stored yet.
    pub receiving: usize,
}

/// Stored content, the least recently used first to go. `W` is what the caller keeps of an Interest that waits.
pub struct ContentStore<W> {
    limits: StoreLimits,
    stored: HashMap<ContentKey, Stored>,
    /// The keys of `stored` by their last use.
    order: BTreeMap<u64, ContentKey>,
    bytes: usize,
    uses: u64,
    received: usize,
    generation: u64,
    waiting: HashMap<ContentKey, Vec<W>>,
    waiters: usize,
}

struct Stored {
    newest: Rc<PublishedContent>,
    /// The version before, for consumers that are in the middle of it.
    previous: Option<Rc<PublishedContent>>,
    /// The end of the freshness of the newest version, on the worker's clock in milliseconds.
    fresh_until: u64,
    used: u64,
}

/// The result of a search for the content of an Interest.
pub enum Found {
    /// Versions that may answer, the newest first, and the time that the answer is fresh.
    Versions(Vec<Rc<PublishedContent>>, Duration),
    /// Nothing; the content must be requested.
    Nothing,
}

impl Stored {
    fn cost(&self, overhead: usize) -> usize {
        let all = std::iter::once(&self.newest).chain(&self.previous);
        all.map(|content| content.bytes().len() + overhead).sum()
    }
}

impl<W> ContentStore<W> {
    /// An empty store.
    pub fn new(limits: StoreLimits) -> Self {
        Self {
            limits,
            stored: HashMap::new(),
            order: BTreeMap::new(),
            bytes: 0,
            uses: 0,
            received: 0,
            generation: 0,
            waiting: HashMap::new(),
            waiters: 0,
        }
    }

    /// Sets the generation of the configuration. If it has changed, all content is removed, because the new generation
    /// may deny it. Interests that wait keep waiting.
    pub fn set_generation(&mut self, generation: u64) {
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.stored.clear();
            self.order.clear();
            self.bytes = 0;
        }
    }

    /// Counts bytes that are being received. Returns false, and counts none, if there is no room for them.
    pub fn reserve(&mut self, count: usize) -> bool {
        let has_room = self.received + count <= self.limits.receiving;
        self.received += if has_room { count } else { 0 };
        has_room
    }

    /// Ends the count of bytes whose body has arrived or broken off.
    pub fn release(&mut self, count: usize) {
        self.received -= count;
    }

    /// Returns what may answer an Interest of this name. `now` is in milliseconds of any clock.
    pub fn find(&mut self, key: &ContentKey, interest: &Name, now: u64) -> Found {
        let Some(stored) = self.stored.get_mut(key) else { return Found::Nothing };
        let left = Duration::from_millis(stored.fresh_until.saturating_sub(now));
        let versions: Vec<_> = std::iter::once(&stored.newest).chain(&stored.previous).cloned().collect();
        let version = |content: &Rc<PublishedContent>| content.is_version_of(interest);
        let is_known = if asks_for_newest(interest) { !left.is_zero() } else { versions.iter().any(version) };
        // While the newest version is fresh, no request can yield another one.
        if !is_known && left.is_zero() {
            return Found::Nothing;
        }
        self.order.remove(&stored.used);
        self.uses += 1;
        stored.used = self.uses;
        self.order.insert(stored.used, key.clone());
        let versions = if asks_for_newest(interest) { versions[..1].to_vec() } else { versions };
        Found::Versions(versions, left)
    }

    /// Stores content as the newest version. Equal content keeps its version; other content gets `version`, or the next
    /// number if that is not newer. `None` if the name is too long.
    pub fn put(
        &mut self,
        key: ContentKey,
        version: u64,
        bytes: Bytes,
        freshness: Duration,
        now: u64,
    ) -> Option<Rc<PublishedContent>> {
        let fresh_until = now.saturating_add(u64::try_from(freshness.as_millis()).unwrap_or(u64::MAX));
        let before = self.take(&key);
        let (newest, previous) = match before {
            Some(before) if *before.newest.bytes() == bytes => (before.newest, before.previous),
            before => {
                let before = before.map(|before| before.newest);
                let version = version.max(before.as_ref().map_or(0, |before| before.version() + 1));
                (Rc::new(PublishedContent::new(key.1.clone(), version, bytes)?), before)
            }
        };
        self.uses += 1;
        let mut stored = Stored { newest: newest.clone(), previous, fresh_until, used: self.uses };
        // Otherwise the newest version would go, too, and each Interest would request it again.
        if stored.cost(self.limits.overhead) > self.limits.bytes {
            stored.previous = None;
        }
        self.bytes += stored.cost(self.limits.overhead);
        self.order.insert(self.uses, key.clone());
        self.stored.insert(key, stored);
        while self.bytes > self.limits.bytes
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            let oldest = oldest.clone();
            self.take(&oldest);
        }
        Some(newest)
    }

    fn take(&mut self, key: &ContentKey) -> Option<Stored> {
        let stored = self.stored.remove(key)?;
        self.order.remove(&stored.used);
        self.bytes -= stored.cost(self.limits.overhead);
        Some(stored)
    }

    /// Adds an Interest that waits. Returns whether it is the first for its content, so that the caller must request it.
    ///
    /// # Errors
    /// There is no room; the waiter comes back.
    pub fn wait(&mut self, key: &ContentKey, waiter: W) -> Result<bool, W> {
        let is_first = !self.waiting.contains_key(key);
        if self.waiters >= self.limits.waiting || is_first && self.waiting.len() >= self.limits.requests {
            return Err(waiter);
        }
        self.waiters += 1;
        self.waiting.entry(key.clone()).or_default().push(waiter);
        Ok(is_first)
    }

    /// Removes all Interests that wait for this content.
    pub fn take_waiters(&mut self, key: &ContentKey) -> Vec<W> {
        let waiters = self.waiting.remove(key).unwrap_or_default();
        self.waiters -= waiters.len();
        waiters
    }
}

#[cfg(test)]
mod tests;
