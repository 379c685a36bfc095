//! Shares of bounded tables: one mechanism for connections, tunnels, flows and DNS queries.
//!
//! In: entries, each with its owner, and with a holder that can be displaced. Out: whether an owner may have one more.
//! A full table displaces entries of the owner that has most, the longest idle first (`runtime/fair_shares/ledger.rs` decides, for
//! all workers; each worker displaces its own). If that frees nothing, idle entries of this worker are displaced: those
//! of the same owner, or anybody's for an owner that has none. One short lock when an entry begins and when it ends;
//! never a lock for the bytes that pass through it.

mod ledger;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slab::Slab;

pub use self::ledger::{Ledger, Owner, Verdict};
use super::WorkerContext;

/// The holder of an entry, which can be displaced.
pub trait Holder {
    /// True if no request or byte is in flight: a newcomer of the same owner may displace it.
    fn is_idle(&self, now: u64) -> bool;
    /// False if the client's address may be forged: it has not sent again after an answer. Such entries are displaced
    /// before all others.
    fn is_answered(&self) -> bool {
        true
    }
    /// The time of its last use, in milliseconds of the node's clock.
    fn used_at(&self) -> u64;
    /// True if it is ending already.
    fn is_ending(&self) -> bool;
    /// Ends it now.
    fn displace(&self);
}

/// The owners of one table's entries, on all workers.
#[derive(Debug, Default)]
pub struct Shares {
    ledger: Mutex<Ledger>,
    /// True if some owner owes entries that no worker has chosen yet.
    has_debtors: AtomicBool,
}

impl Shares {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bound of a table.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// The name of the limit.
    pub name: &'static str,
    pub limit: usize,
    /// The entries of the limit that are reserved for peers.
    pub reserve: usize,
}

/// The entries of one worker, in all tables.
#[derive(Default)]
pub struct Entries {
    all: RefCell<Slab<Entry>>,
    begun: Cell<u64>,
    /// Tables in which an owner, or (`None`) anybody, had no idle entry since the last tick, so that a flood searches
    /// them once.
    unyielding: RefCell<Vec<(Arc<Shares>, Option<Owner>)>>,
}

struct Entry {
    /// A number in the order in which entries began.
    number: u64,
    shares: Arc<Shares>,
    owner: Owner,
    /// True if the entry was displaced and is ending.
    is_owed: bool,
    holder: Option<Weak<dyn Holder>>,
}

/// An entry that can be displaced.
struct Candidate {
    holder: Rc<dyn Holder>,
    key: usize,
    number: u64,
    is_busy: bool,
    is_answered: bool,
}

/// Idle entries are displaced in batches, one in this many at a time, since each choice looks at all of them.
const BATCH: usize = 128;
/// The share of a worker's entries in a table, one in this many, for clients whose address may be forged. Beyond it,
/// these displace one another and not the idle entries of clients that were answered.
const UNANSWERED: usize = 8;
/// The limit of `unyielding`, for unauthenticated clients and for peers each, so that a flood of the former leaves
/// peers their searches. Beyond it, no search runs for more of them until the next tick.
const MAX_UNYIELDING: usize = 16;

/// An entry of a table. Dropping it returns the entry.
pub struct Share {
    worker: Rc<WorkerContext>,
    key: usize,
}

impl Share {
    /// Takes an entry for this owner. `None`, and counted, if the table has no room.
    pub fn take(worker: &Rc<WorkerContext>, shares: &Arc<Shares>, owner: Owner, bound: Bound) -> Option<Self> {
        worker.entries.make_room(worker, shares, &owner, bound).then(|| {
            let number = worker.entries.begun.get();
            worker.entries.begun.set(number + 1);
            let entry = Entry { number, shares: shares.clone(), owner, is_owed: false, holder: None };
            Self { worker: worker.clone(), key: worker.entries.all.borrow_mut().insert(entry) }
        })
    }

    /// Sets the entry's holder. From now on, a full table may displace it.
    pub fn is_held_by<H: Holder + 'static>(&self, holder: &Rc<H>) {
        if let Some(entry) = self.worker.entries.all.borrow_mut().get_mut(self.key) {
            let holder: Weak<H> = Rc::downgrade(holder);
            entry.holder = Some(holder);
        }
    }

    /// The key for [`Entries::pass_to`].
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
    /// Passes an entry to its real owner. False, and counted, if the table has no room for that owner.
    pub fn pass_to(&self, worker: &WorkerContext, key: usize, owner: Owner, bound: Bound) -> bool {
        let known = |entry: &Entry| (entry.shares.clone(), entry.owner.clone());
        let Some((shares, former)) = self.all.borrow().get(key).filter(|entry| !entry.is_owed).map(known) else {
            return false;
        };
        if former == owner {
            return true;
        }
        shares.ledger().give_back(&former);
        // Without a holder, no worker can displace it while it belongs to neither owner.
        let holder = self.all.borrow_mut().get_mut(key).and_then(|entry| entry.holder.take());
        if !self.make_room(worker, &shares, &owner, bound) {
            // Dropping the entry must return nothing.
            self.all.borrow_mut().remove(key);
            return false;
        }
        if let Some(entry) = self.all.borrow_mut().get_mut(key) {
            (entry.owner, entry.holder) = (owner, holder);
        }
        true
    }

    fn make_room(&self, worker: &WorkerContext, shares: &Arc<Shares>, owner: &Owner, bound: Bound) -> bool {
        let take = || shares.ledger().take(owner, bound.limit, bound.reserve);
        let mut verdict = take();
        if verdict == Verdict::Taken {
            return true;
        }
        worker.shared.metrics.limit(bound.name);
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

    /// Displaces this worker's part of the entries that owners of a table owe.
    fn pay(&self, now: u64, shares: &Arc<Shares>) {
        if !shares.has_debtors.load(Ordering::Acquire) {
            return;
        }
        let debtors = shares.ledger().debtors();
        // A single pass over all entries, however many debtors there are.
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
            // Under the lock: another worker sets it after it has added a debtor.
            shares.has_debtors.store(false, Ordering::Release);
        }
    }

    /// Called at each tick.
    pub fn tick(&self, worker: &WorkerContext) {
        self.unyielding.borrow_mut().clear();
        self.displace_for_others(worker);
    }

    /// Displaces what is owed to clients of other workers.
    pub fn displace_for_others(&self, worker: &WorkerContext) {
        let now = worker.now();
        self.pay(now, &worker.shared.connections);
        self.pay(now, &worker.shared.tunnels);
        worker.each_listener_shares(|shares| self.pay(now, shares));
    }

    /// Displaces idle entries for a newcomer. False if there are none.
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
        // An owner's own entries may be about to be answered; those of others may be forged.
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

    /// Entries of a table whose owners fit, without those that are ending.
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

    /// Displaces `count` of these: those that were not answered first, then the idle ones, the longest idle before
    /// others. Returns their owners.
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
