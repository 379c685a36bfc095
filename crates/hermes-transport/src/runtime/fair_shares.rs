//! Fair shares of bounded tables: one mechanism for connections, tunnels, flows and DNS queries.
//!
//! In: entries, each with its owner, and with a holder that can be displaced. Out: whether an owner may have one more
//! entry. A full table displaces entries of the owner with the most entries, the longest idle first. The [`Ledger`]
//! chooses that owner for all workers, and each worker displaces its own entries. If the ledger frees nothing, idle
//! entries of this worker are displaced: those of the same owner, or those of any owner if the newcomer has none. The
//! ledger is locked briefly when an entry begins and when it ends, but not for the traffic of a connection or flow.

mod ledger;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slab::Slab;

pub use self::ledger::{Ledger, Owner, Verdict};
use super::WorkerContext;

/// The connection, flow or session that occupies an entry of a bounded table. Displacing the holder frees the entry.
pub trait Holder {
    /// True if the holder has no request or byte in flight, so that a newcomer of the same owner may displace it. `now`
    /// is in milliseconds of the node's clock.
    fn is_idle(&self, now: u64) -> bool;
    /// False if the client's address may be forged, because the client has not sent again after an answer. Such holders
    /// are displaced before all others.
    fn is_answered(&self) -> bool {
        true
    }
    /// Returns the time of the last use, in milliseconds of the node's clock.
    fn used_at(&self) -> u64;
    /// True if the holder is ending already.
    fn is_ending(&self) -> bool;
    /// Ends the holder now.
    fn displace(&self);
}

/// A bounded table that all workers share: the number of entries of each owner.
#[derive(Debug, Default)]
pub struct Shares {
    ledger: Mutex<Ledger>,
    /// True if some owner must lose entries, and no worker has chosen them yet.
    has_debtors: AtomicBool,
}

impl Shares {
    /// The number of entries.
    pub fn count(&self) -> usize {
        self.ledger().total()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The tables of a listener, on all workers.
#[derive(Clone, Debug, Default)]
pub struct ListenerShares {
    /// Live flows (UDP or SOCKS listener), or pending queries (DNS listener).
    pub flows: Arc<Shares>,
    /// Its client connections, if their number is limited.
    pub connections: Arc<Shares>,
}

/// The maximum number of entries in a table.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// The name of the limit, for metrics.
    pub name: &'static str,
    pub limit: usize,
    /// The number of entries, out of `limit`, that are reserved for authenticated owners.
    pub reserve: usize,
    /// True if the table bounds displaced entries that are being closed, because each holds a file descriptor.
    pub bounds_closing: bool,
}

/// The entries of one worker, in all tables.
#[derive(Default)]
pub struct Entries {
    all: RefCell<Slab<Entry>>,
    begun: Cell<u64>,
    /// Tables in which a search since the last tick found no idle entry of this owner, or, with `None`, of any owner.
    /// The same search is not repeated before the next tick, so that a flood of newcomers costs one search.
    unyielding: RefCell<Vec<(Arc<Shares>, Option<Owner>)>>,
}

struct Entry {
    /// The entry's number in the order in which entries of this worker began.
    number: u64,
    shares: Arc<Shares>,
    owner: Owner,
    /// True if the entry's holder was displaced and is ending. The ledger no longer counts the entry for its owner.
    is_owed: bool,
    holder: Option<Weak<dyn Holder>>,
}

/// An entry that may be displaced, with the properties that decide the order.
struct Candidate {
    holder: Rc<dyn Holder>,
    key: usize,
    number: u64,
    is_busy: bool,
    is_answered: bool,
}

/// The divisor of a table's limit that gives the number of idle entries displaced at once. Each search examines all
/// entries, so displacing one entry at a time would cost too much.
const BATCH: usize = 128;
/// The divisor of a worker's entries in a table that gives the number of entries for clients whose address may be
/// forged. If there are more such clients, they displace one another, and not the idle entries of clients that were
/// answered.
const UNANSWERED: usize = 8;
/// The maximum number of entries in `unyielding` for unauthenticated clients, and again for authenticated ones. Beyond
/// it, no search runs for that kind of client until the next tick. A flood of the one kind leaves the other its
/// searches.
const MAX_UNYIELDING: usize = 16;

/// An owner's entry in a table. Dropping it returns the entry to the table.
pub struct Share {
    worker: Rc<WorkerContext>,
    key: usize,
}

impl Share {
    /// Takes an entry for this owner. Returns `None`, and counts the reached limit, if the table has no room.
    pub fn take(worker: &Rc<WorkerContext>, shares: &Arc<Shares>, owner: Owner, bound: Bound) -> Option<Self> {
        worker.entries.make_room(worker, shares, &owner, bound).then(|| {
            let number = worker.entries.begun.get();
            worker.entries.begun.set(number + 1);
            let entry = Entry { number, shares: shares.clone(), owner, is_owed: false, holder: None };
            Self { worker: worker.clone(), key: worker.entries.all.borrow_mut().insert(entry) }
        })
    }

    /// Sets the entry's holder. From now on, the holder may be displaced when the table is full.
    pub fn is_held_by<H: Holder + 'static>(&self, holder: &Rc<H>) {
        if let Some(entry) = self.worker.entries.all.borrow_mut().get_mut(self.key) {
            let holder: Weak<H> = Rc::downgrade(holder);
            entry.holder = Some(holder);
        }
    }

    /// Returns the key for [`Entries::pass_to`].
    pub fn key(&self) -> usize {
        self.key
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(entry) = self.worker.entries.all.borrow_mut().try_remove(self.key) {
            let mut ledger = entry.shares.ledger();
            if entry.is_owed { ledger.is_paid(&entry.owner) } else { ledger.give_back(&entry.owner) }
        }
    }
}

impl Entries {
    /// Changes the owner of an entry when the client's identity becomes known. Returns false if the entry was
    /// displaced, or if the table has no room for that owner; the latter is counted as a reached limit.
    pub fn pass_to(&self, worker: &WorkerContext, key: usize, owner: Owner, bound: Bound) -> bool {
        let known = |entry: &Entry| (entry.shares.clone(), entry.owner.clone());
        let Some((shares, former)) = self.all.borrow().get(key).filter(|entry| !entry.is_owed).map(known) else {
            return false;
        };
        if former == owner {
            return true;
        }
        shares.ledger().give_back(&former);
        // Without a holder, the entry cannot be displaced while it belongs to neither owner.
        let holder = self.all.borrow_mut().get_mut(key).and_then(|entry| entry.holder.take());
        if !self.make_room(worker, &shares, &owner, bound) {
            // The ledger no longer counts the entry, so dropping its `Share` must not return it again.
            self.all.borrow_mut().remove(key);
            return false;
        }
        if let Some(entry) = self.all.borrow_mut().get_mut(key) {
            (entry.owner, entry.holder) = (owner, holder);
        }
        true
    }

    /// No longer counts an entry whose holder is about to end.
    pub fn owe(&self, key: usize) {
        if let Some(entry) = self.all.borrow_mut().get_mut(key).filter(|entry| !entry.is_owed) {
            entry.is_owed = true;
            entry.shares.ledger().displace(&entry.owner);
        }
    }

    fn make_room(&self, worker: &WorkerContext, shares: &Arc<Shares>, owner: &Owner, bound: Bound) -> bool {
        let take = || shares.ledger().take(owner, bound.limit, bound.reserve);
        let may_displace = !bound.bounds_closing || shares.ledger().may_displace(owner, bound.limit);
        let mut verdict =
            if may_displace { take() } else { shares.ledger().take_free(owner, bound.limit, bound.reserve) };
        if verdict == Verdict::Taken {
            return true;
        }
        worker.shared.metrics.limit(bound.name);
        if !may_displace {
            return false;
        }
        if verdict == Verdict::Full && self.displace_idle(worker.now(), shares, owner, bound.limit) {
            verdict = take();
        }
        if verdict == Verdict::Displacing {
            let is_new = !shares.has_debtors.swap(true, Ordering::AcqRel);
            self.pay(worker.now(), shares);
            if is_new && shares.has_debtors.load(Ordering::Acquire) {
                worker.shared.ask_others_to_displace(worker.number);
            }
        }
        verdict != Verdict::Full
    }

    /// Displaces entries of this worker whose owners must lose entries of the table.
    fn pay(&self, now: u64, shares: &Arc<Shares>) {
        if !shares.has_debtors.load(Ordering::Acquire) {
            return;
        }
        let debtors = shares.ledger().debtors();
        // All debtors are served by one pass over the entries.
        let mut of_debtors: HashMap<Owner, Vec<Candidate>> = debtors.into_iter().map(|owner| (owner, vec![])).collect();
        for candidate in self.candidates(now, shares, |owner| of_debtors.contains_key(owner)) {
            let all = self.all.borrow();
            if let Some(its) = all.get(candidate.key).and_then(|entry| of_debtors.get_mut(&entry.owner)) {
                its.push(candidate);
            }
        }
        for (debtor, candidates) in of_debtors {
            let count = shares.ledger().claim(&debtor, candidates.len());
            self.displace(candidates, count);
        }
        let ledger = shares.ledger();
        if ledger.debtors().is_empty() {
            // The ledger stays locked here, because another worker sets this flag after it has added a debtor.
            shares.has_debtors.store(false, Ordering::Release);
        }
    }

    /// Permits new searches, and displaces entries for newcomers of other workers. Called at each tick.
    pub fn tick(&self, worker: &WorkerContext) {
        self.unyielding.borrow_mut().clear();
        self.displace_for_others(worker);
    }

    /// Displaces entries of this worker in all tables, if newcomers of other workers need them.
    pub fn displace_for_others(&self, worker: &WorkerContext) {
        let now = worker.now();
        self.pay(now, &worker.shared.connections);
        self.pay(now, &worker.shared.tunnels);
        worker.each_listener_shares(|shares| self.pay(now, shares));
    }

    /// Displaces idle entries of this worker for a newcomer. Returns false if there are none.
    fn displace_idle(&self, now: u64, shares: &Arc<Shares>, newcomer: &Owner, limit: usize) -> bool {
        let has_none = shares.ledger().entries(newcomer) == 0;
        let whose = (!has_none || newcomer.is_peer).then(|| newcomer.clone());
        let mut unyielding = self.unyielding.borrow_mut();
        let is_known = |known: &(Arc<Shares>, Option<Owner>)| Arc::ptr_eq(&known.0, shares) && known.1 == whose;
        let is_of_peer = |known: &(_, Option<Owner>)| known.1.as_ref().is_some_and(|owner| owner.is_peer);
        let known_alike = unyielding.iter().filter(|known| is_of_peer(known) == newcomer.is_peer).count();
        if known_alike >= MAX_UNYIELDING || unyielding.iter().any(is_known) {
            return false;
        }
        let may_go = |owner: &Owner| owner == newcomer || has_none && (newcomer.is_peer || !owner.is_peer);
        let mut candidates = self.candidates(now, shares, may_go);
        let room_of_unanswered = candidates.len() / UNANSWERED;
        // A busy entry of the newcomer itself is never displaced, because it may be about to be answered. A busy entry
        // of another owner is displaced if its address may be forged.
        candidates.retain(|candidate| !candidate.is_busy || has_none && !candidate.is_answered);
        let unanswered = candidates.iter().filter(|candidate| !candidate.is_answered).count();
        if unanswered > room_of_unanswered {
            candidates.retain(|candidate| !candidate.is_answered);
        }
        if candidates.is_empty() {
            unyielding.push((shares.clone(), whose));
            return false;
        }
        let count = (limit / BATCH).clamp(1, candidates.len());
        for owner in self.displace(candidates, count) {
            shares.ledger().displace(&owner);
        }
        true
    }

    /// Returns the entries of a table whose owners satisfy `fits`, except those that are ending.
    fn candidates(&self, now: u64, shares: &Arc<Shares>, fits: impl Fn(&Owner) -> bool) -> Vec<Candidate> {
        let all = self.all.borrow();
        let of_table = all.iter().filter(|(_, entry)| Arc::ptr_eq(&entry.shares, shares) && !entry.is_owed);
        let fitting = of_table.filter(|(_, entry)| fits(&entry.owner));
        let candidates = fitting.filter_map(|(key, entry)| {
            let holder = entry.holder.as_ref()?.upgrade().filter(|holder| !holder.is_ending())?;
            let is_busy = !holder.is_idle(now);
            let is_answered = holder.is_answered();
            Some(Candidate { holder, key, number: entry.number, is_busy, is_answered })
        });
        candidates.collect()
    }

    /// Displaces `count` of the candidates and returns their owners. Clients that were not answered come first, then
    /// idle ones, and among these the longest idle.
    fn displace(&self, mut candidates: Vec<Candidate>, count: usize) -> Vec<Owner> {
        let key = |candidate: &Candidate| {
            (candidate.is_answered, candidate.is_busy, candidate.holder.used_at(), candidate.number)
        };
        if count > 0 && count < candidates.len() {
            candidates.select_nth_unstable_by_key(count - 1, key);
        }
        candidates.truncate(count);
        let mut all = self.all.borrow_mut();
        let mut owners = Vec::with_capacity(count);
        for Candidate { holder, key, .. } in candidates {
            if let Some(entry) = all.get_mut(key) {
                entry.is_owed = true;
                owners.push(entry.owner.clone());
            }
            holder.displace();
        }
        owners
    }
}

#[cfg(test)]
mod tests;
