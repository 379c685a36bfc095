//! What all workers of a node see of its custody: the engine, and who waits for what.
//!
//! In: what clients and origins bring, what channels hear, what is safe. Out: bytes for those who wait for them, records
//! for channels, and whose task goes on. A lock is held for a record or a chunk, and never over I/O.
//!
//! Here is what sessions ask of it; `neighbours` is for channels, `stored` for the journal, `left` for clients that are
//! gone, and `state` is what is behind the lock.

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
use hermes_wire::custody::{ExchangeId, Part};
use tokio::time::Instant;

use self::state::{End, State, Storing};
pub use self::stored::Resumed;
use super::engine::{Limits, Side, Survives};
use super::journal::Note;
use super::store::Job;

/// Why an exchange came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What its client gets.
    pub status: u16,
    /// For people.
    pub reason: Arc<str>,
}

/// The exchanges of a node.
pub struct Office {
    state: Mutex<State>,
    epoch: Instant,
    /// What arrives is counted here until its route is known, and beyond where that has no `custody`.
    arrivals: Arc<str>,
    /// Whom this node has refused a channel.
    refused: Mutex<HashSet<IpAddr>>,
}

/// So many of those are remembered; of further ones nothing is said.
const MOST_REFUSED: usize = 64;

impl Default for Office {
    fn default() -> Self {
        Self::new()
    }
}

impl Office {
    /// Creates the service without an exchange; it stores in memory until [`Office::will_store`].
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State::new()),
            epoch: Instant::now(),
            arrivals: Arc::from(""),
            refused: Mutex::default(),
        }
    }

    /// What may be held from now on.
    pub fn follow(&self, snapshot: &Snapshot) {
        let limits = &snapshot.limits;
        self.act(|state, _| {
            let is_stored = !matches!(state.store, Storing::Memory);
            let survives = |disk: u64, durable: Durable| match durable {
                _ if !is_stored || disk == 0 => Survives::Nothing,
                Durable::Process => Survives::Process,
                Durable::Fsync => Survives::Power,
            };
            let (memory, exchanges) = (limits.custody_memory as u64, limits.custody_exchanges);
            let durable = snapshot.routes.iter().filter_map(|route| route.custody).map(|custody| custody.durable);
            // What arrives for other routes is as safe as the safest of them.
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

    /// Who comes from there gets no channel. True where that is to be said: once of each, and of so many.
    pub fn refuses(&self, who: IpAddr) -> bool {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.len() < MOST_REFUSED && refused.insert(who)
    }

    /// On which account it is.
    pub fn account(&self, id: ExchangeId) -> Option<Arc<str>> {
        self.lock().engine.account(id).cloned()
    }

    /// Bytes of the head that this node gave a half.
    pub fn head_length(&self, id: ExchangeId, part: Part) -> Option<u64> {
        self.lock().engine.head_length(id, part)
    }

    /// Takes custody of an exchange.
    ///
    /// # Errors
    /// There are as many as may be.
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
                return Err("another process of this node has its journal of custody, or nobody can read it");
            }
            if begin(state).is_err() {
                state.leave_for_good(account);
                begin(state)?;
            }
            state.ends.insert(id, End::default());
            let survives = state.engine.survives(id);
            if let Some(asked) = asked.filter(|_| survives != Survives::Nothing) {
                // Behind what the engine says of it, which is told first.
                state.settle(now);
                let note = Note::Asked { bytes: asked.clone() };
                state.store.ask(Job::Keep { id, note, is_synced: survives == Survives::Power });
            }
            Ok(())
        })
    }

    /// An exchange that has arrived ends here.
    pub fn take_in(&self, id: ExchangeId, is_tunnel: bool) {
        self.act(|state, _| state.engine.take_in(id, &self.arrivals, is_tunnel));
    }

    /// Ready when an exchange that has arrived goes on: when there is room for it on its route's account.
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

    /// The head of its response, as this node has it.
    pub fn settle_response(&self, id: ExchangeId, theirs: u64, head: Bytes) {
        self.act(|state, _| state.engine.settle(id, Part::Response, theirs, head));
    }

    /// The next bytes of a head that is awaited.
    pub fn poll_head(&self, cx: &Context<'_>, id: ExchangeId, part: Part) -> Poll<Result<Bytes, Failure>> {
        let mut state = self.lock();
        if let Some(bytes) = state.ends.get_mut(&id).and_then(|end| end.heads[part.index()].pop_front()) {
            return Poll::Ready(Ok(bytes));
        }
        state.wait(cx, id, part)
    }

    /// A head that was awaited is known: what comes behind it stays where it is.
    pub fn has_head(&self, id: ExchangeId, part: Part) {
        if let Some(end) = self.lock().ends.get_mut(&id) {
            (end.heads[part.index()], end.has_head[part.index()]) = (VecDeque::new(), true);
        }
    }

    /// The next bytes for who is here, at most so many; and whether they are the last.
    pub fn poll_read(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        part: Part,
        most: usize,
    ) -> Poll<Result<(Bytes, bool), Failure>> {
        self.act(|state, _| match state.engine.read(id, part, most) {
            Some(read) => Poll::Ready(Ok(read)),
            None => state.wait(cx, id, part),
        })
    }

    /// Brings bytes of who is here.
    pub fn poll_append(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        part: Part,
        bytes: &Bytes,
        is_last: bool,
    ) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            let appended = state.engine.append(id, part, bytes.clone(), is_last);
            state.unless_refused(cx, id, None, appended)
        })
    }

    /// Ready when it is over, in whatever way.
    pub fn poll_over(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        let mut state = self.lock();
        match state.ends.get(&id) {
            Some(End { failure: Some(failure), .. }) => return Poll::Ready(Err(failure.clone())),
            Some(end) if end.is_over => return Poll::Ready(Ok(())),
            _ => {}
        }
        state.wait(cx, id, Part::Response).map(|_: Result<(), _>| Ok(()))
    }

    /// It comes to nothing, by who is here.
    pub fn fail(&self, id: ExchangeId, status: u16, reason: &str) {
        self.act(|state, _| state.engine.fail(id, status, reason));
    }

    /// It goes on from here, and nobody here answers it.
    pub fn is_led(&self, id: ExchangeId) -> bool {
        let state = self.lock();
        state.engine.have(id, Part::Request).is_some() && state.engine.is_led(id)
    }

    /// Nobody here has part in it any more.
    pub fn part(&self, id: ExchangeId) {
        self.lock().ends.remove(&id);
    }

    /// Ends what has had its time.
    pub fn expire(&self) {
        self.act(|state, now| state.engine.expire(now));
    }

    /// How long ago it came.
    pub fn age(&self, id: ExchangeId) -> Option<Duration> {
        self.act(|state, now| state.engine.age(now, id))
    }

    /// Exchanges that are held, and their bytes in memory and on disk.
    pub fn held(&self) -> (usize, u64, u64) {
        let state = self.lock();
        let (memory, disk) = state.engine.kept();
        (state.engine.len(), memory, disk)
    }

    /// The number of exchanges of neighbours that found no slot, since the last call.
    pub fn take_refused(&self) -> u64 {
        self.lock().engine.take_refused()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panicked with it has ended its session; the engine is whole between calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something, and what follows from it.
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
