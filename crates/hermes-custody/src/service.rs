//! The shared handle of a node's custody: the engine, and the tasks that wait for it.
//!
//! In: bytes of clients and origins, records of channels, notices of durable entries. Out: bytes for readers, records
//! for channels, and wake-ups of tasks. The lock is held for one record or chunk, and never during I/O.
//!
//! This file serves sessions. The module `neighbours` serves channels, `stored` the journal, and `abandoned` clients
//! that disconnected; `state` contains everything under the lock.

mod abandoned;
mod neighbours;
mod state;
mod stored;

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::{Custody, Durable, Snapshot};
use hermes_wire::custody::{Direction, ExchangeId};
use tokio::time::Instant;

use self::state::{End, State, Storing};
pub use self::stored::RestoredExchange;
use super::engine::{Durability, Limits, Side};
use super::journal_record::JournalRecord;
use super::store::Job;

/// The reason why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The status for its client.
    pub status: u16,
    /// An explanation in words.
    pub reason: Arc<str>,
}

/// The custody of a node.
pub struct CustodyService {
    state: Mutex<State>,
    epoch: Instant,
    /// The account of exchanges without a route yet, and of those whose route has no `custody`.
    arrivals: Arc<str>,
    /// Addresses whose channels were refused, and whose refusal was logged.
    refused: Mutex<HashSet<IpAddr>>,
}

/// Maximum number of addresses in `refused`. Refusals of further addresses are not logged.
const MAX_REFUSED_ADDRESSES: usize = 64;

impl Default for CustodyService {
    fn default() -> Self {
        Self::new()
    }
}

impl CustodyService {
    /// Creates the service without an exchange; it stores in memory until [`CustodyService::will_store`].
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State::new()),
            epoch: Instant::now(),
            arrivals: Arc::from(""),
            refused: Mutex::default(),
        }
    }

    /// Applies the limits of a new configuration.
    pub fn follow(&self, snapshot: &Snapshot) {
        let limits = &snapshot.limits;
        self.act(|state, _| {
            let is_stored = !matches!(state.store, Storing::Memory);
            let survives = |disk: u64, durable: Durable| match durable {
                _ if !is_stored || disk == 0 => Durability::Nothing,
                Durable::Process => Durability::Process,
                Durable::Fsync => Durability::Power,
            };
            let (memory, exchanges) = (limits.custody_memory as u64, limits.custody_exchanges);
            let durable = snapshot.routes.iter().filter_map(|route| route.custody).map(|custody| custody.durable);
            // Exchanges for other routes are as durable as the most durable route.
            let safest =
                if durable.into_iter().any(|one| one == Durable::Fsync) { Durable::Fsync } else { Durable::Process };
            let disk = limits.custody_disk as u64;
            let own = Limits { exchanges, memory, disk, survives: survives(disk, safest) };
            state.engine.allow(&self.arrivals, own);
            for route in &snapshot.routes {
                if let Some(custody) = &route.custody {
                    let Custody { memory, disk, durable, .. } = custody;
                    let limits =
                        Limits { exchanges, memory: *memory, disk: *disk, survives: survives(*disk, *durable) };
                    state.engine.allow(&route.name, limits);
                }
            }
        });
    }

    /// Records a refused channel from this address. Returns true if the refusal should be logged: once for each
    /// address, up to a maximum of addresses.
    pub fn refuses(&self, who: IpAddr) -> bool {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.len() < MAX_REFUSED_ADDRESSES && refused.insert(who)
    }

    /// Returns the account whose quota the exchange uses. `None`: the exchange does not exist.
    pub fn account(&self, id: ExchangeId) -> Option<Arc<str>> {
        self.lock().engine.account(id).cloned()
    }

    /// Returns the length, in bytes, of the head that this node wrote for a direction. `None`: the exchange does not
    /// exist.
    pub fn head_length(&self, id: ExchangeId, part: Direction) -> Option<u64> {
        self.lock().engine.head_length(id, part)
    }

    /// Takes custody of an exchange that a local client begins.
    ///
    /// # Errors
    ///
    /// The account has its maximum number of exchanges, or the journal is not available.
    pub fn begin(
        &self,
        id: ExchangeId,
        to: &Arc<str>,
        left: Duration,
        (account, owner): (&Arc<str>, &Arc<str>),
        is_tunnel: bool,
        asked: Option<&Bytes>,
    ) -> Result<(), &'static str> {
        self.act(|state, now| {
            let begin = |state: &mut State| {
                state.engine.begin(now, id, Side::Peer(to.clone()), left, (account, owner), is_tunnel)
            };
            if matches!(state.store, Storing::Over) {
                return Err("the custody journal is in use by another process of this node, or unreadable");
            }
            if begin(state).is_err() {
                state.leave_for_good(account);
                begin(state)?;
            }
            state.ends.insert(id, End::default());
            let survives = state.engine.survives(id);
            if let Some(asked) = asked.filter(|_| survives != Durability::Nothing) {
                // The entry must follow the engine's own entries of this exchange.
                state.settle(now);
                let note = JournalRecord::Asked { bytes: asked.clone() };
                state.store.submit(Job::Keep { id, note, is_synced: survives == Durability::Power });
            }
            Ok(())
        })
    }

    /// Assigns an exchange that a neighbour began to this node: a local endpoint reads its request.
    pub fn accept_local(&self, id: ExchangeId, is_tunnel: bool) {
        self.act(|state, _| state.engine.accept_local(id, &self.arrivals, is_tunnel));
    }

    /// Forwards an exchange that a neighbour began to the next node. Ready once the account of its route has room for
    /// it.
    pub fn poll_lead(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        (to, is_tunnel): (&Arc<str>, bool),
        account: &Arc<str>,
        theirs: u64,
        head: &Bytes,
    ) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            let to = (Side::Peer(to.clone()), is_tunnel);
            let led = state.engine.lead(id, to, account, theirs, head.clone());
            state.unless_refused(cx, id, Some(account), led)
        })
    }

    /// Sets the head of the response that this node writes: `head` replaces the first `theirs` bytes.
    pub fn settle_response(&self, id: ExchangeId, theirs: u64, head: Bytes) {
        self.act(|state, _| state.engine.settle(id, Direction::Response, theirs, head));
    }

    /// Returns the next received bytes of a direction, until the caller reports by [`CustodyService::has_head`] that
    /// the head is complete.
    pub fn poll_head(&self, cx: &Context<'_>, id: ExchangeId, part: Direction) -> Poll<Result<Bytes, Failure>> {
        let mut state = self.lock();
        if let Some(bytes) = state.ends.get_mut(&id).and_then(|end| end.heads[part.index()].pop_front()) {
            return Poll::Ready(Ok(bytes));
        }
        state.wait(cx, id, part)
    }

    /// Ends the reading of a head. Bytes after the head stay in the engine.
    pub fn has_head(&self, id: ExchangeId, part: Direction) {
        if let Some(end) = self.lock().ends.get_mut(&id) {
            (end.heads[part.index()], end.has_head[part.index()]) = (VecDeque::new(), true);
        }
    }

    /// Returns up to `most` bytes for a local reader, and whether they are the last of the stream.
    pub fn poll_read(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        part: Direction,
        most: usize,
    ) -> Poll<Result<(Bytes, bool), Failure>> {
        self.act(|state, _| match state.engine.read(id, part, most) {
            Some(read) => Poll::Ready(Ok(read)),
            None => state.wait(cx, id, part),
        })
    }

    /// Accepts bytes of a local producer.
    pub fn poll_append(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        part: Direction,
        bytes: &Bytes,
        is_last: bool,
    ) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            let appended = state.engine.append(id, part, bytes.clone(), is_last);
            state.unless_refused(cx, id, None, appended)
        })
    }

    /// Ready when the exchange has ended or failed.
    pub fn poll_over(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        let mut state = self.lock();
        match state.ends.get(&id) {
            Some(End { failure: Some(failure), .. }) => return Poll::Ready(Err(failure.clone())),
            Some(end) if end.is_over => return Poll::Ready(Ok(())),
            _ => {}
        }
        state.wait(cx, id, Direction::Response).map(|_: Result<(), _>| Ok(()))
    }

    /// Ends an exchange with a failure on behalf of its local endpoint.
    pub fn fail(&self, id: ExchangeId, status: u16, reason: &str) {
        self.act(|state, _| state.engine.fail(id, status, reason));
    }

    /// Whether the exchange exists and is forwarded to another node.
    pub fn is_led(&self, id: ExchangeId) -> bool {
        let state = self.lock();
        state.engine.have(id, Direction::Request).is_some() && state.engine.is_led(id)
    }

    /// Detaches the local endpoint from the exchange.
    pub fn detach(&self, id: ExchangeId) {
        self.lock().ends.remove(&id);
    }

    /// Ends exchanges whose deadline has passed, and waits that have taken too long.
    pub fn expire(&self) {
        self.act(|state, now| state.engine.expire(now));
    }

    /// Returns the time since the exchange arrived. `None`: the exchange does not exist.
    pub fn age(&self, id: ExchangeId) -> Option<Duration> {
        self.act(|state, now| state.engine.age(now, id))
    }

    /// Returns the number of exchanges, and their bytes in memory and on disk.
    pub fn held(&self) -> (usize, u64, u64) {
        let state = self.lock();
        let (memory, disk) = state.engine.kept();
        (state.engine.len(), memory, disk)
    }

    /// Returns the number of exchanges of neighbours that found no free slot since the last call.
    pub fn take_refused(&self) -> u64 {
        self.lock().engine.take_refused()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A task that panicked with the lock has ended its session; the engine is consistent between calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a function under the lock, then the actions that the engine returns.
    fn act<R>(&self, does: impl FnOnce(&mut State, Duration) -> R) -> R {
        let now = self.epoch.elapsed();
        let (result, woken) = {
            let mut state = self.lock();
            let result = does(&mut state, now);
            state.settle(now);
            (result, std::mem::take(&mut state.woken))
        };
        woken.into_iter().for_each(Waker::wake);
        result
    }
}
