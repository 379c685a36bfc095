//! What all workers of a node see of its custody: the engine, and who waits for what.
//!
//! In: what clients and origins bring, what channels hear, what is safe. Out: bytes for those who wait for them, records
//! for channels, and whose task goes on. A lock is held for a record or a chunk, and never over I/O.

mod state;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::{Custody, Durable, Snapshot};
use hermes_wire::custody::{ExchangeId, Part, Record};
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::state::{End, State, Storing};
use super::engine::{Appended, Limits, Side, Survives};
use super::half::Upto;
use super::journal::Note;
use super::store::{Job, Reader, Safe, Store};

/// Responses that are kept for clients that are gone.
const MOST_LEFT: usize = 256;

/// Why an exchange came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What its client gets.
    pub(crate) status: u16,
    /// For people.
    pub(crate) reason: Arc<str>,
}

/// The exchanges of a node.
pub(crate) struct Office {
    state: Mutex<State>,
    epoch: Instant,
    /// What arrives is counted here until its route is known, and beyond where that has no `custody`.
    arrivals: Arc<str>,
}

/// An exchange of before this process, for who looks at it.
pub(crate) struct Resumed {
    /// It ends here.
    pub(crate) is_for_here: bool,
    /// It goes on, and the head of its response was not there yet.
    pub(crate) awaits_head: bool,
    /// Its request may have gone to an origin.
    pub(crate) is_intended: bool,
    /// How far its response had come.
    pub(crate) response: Upto,
}

impl Office {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::new()), epoch: Instant::now(), arrivals: Arc::from("") }
    }

    /// What may be held from now on.
    pub(crate) fn follow(&self, snapshot: &Snapshot) {
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

    /// What is held from now on is written to a journal in this directory, once it is free.
    pub(crate) fn will_store(&self) {
        self.act(|state, _| state.store = Storing::Awaited(Vec::new()));
    }

    /// Goes on with what the journal in this directory answers for, and writes it.
    ///
    /// # Errors
    /// It cannot be had: `WouldBlock`, where another process has it.
    pub(crate) fn store_in(self: &Arc<Self>, directory: &Path) -> io::Result<()> {
        let opened = Store::open(directory)?;
        let reader: Arc<dyn Reader> = self.clone();
        self.act(|state, now| {
            let mut opened = opened;
            let held = std::mem::take(&mut opened.held);
            let store = opened.start(Arc::downgrade(&reader))?;
            if let Storing::Awaited(jobs) = std::mem::replace(&mut state.store, Storing::Journal(store)) {
                jobs.into_iter().for_each(|job| state.store.ask(job));
            }
            if !held.is_empty() {
                tracing::info!(exchanges = held.len(), "custody goes on with what was held before");
            }
            held.into_iter().for_each(|(id, held)| state.restore(now, id, held));
            // Whoever dials has waited for that.
            state.woken.extend(state.lines.values_mut().filter_map(|line| line.keeper.take()));
            Ok(())
        })
    }

    /// Another process may have what is held: nobody is heard here any more, and whoever waits here hears that.
    pub(crate) fn stop(&self) {
        let store = self.act(|state, _| {
            for line in state.lines.values_mut() {
                line.channel = 0;
                state.woken.extend(line.carrier.take());
            }
            let gone =
                Failure { status: 503, reason: Arc::from("this node is being replaced by another process of it") };
            for end in state.ends.values_mut() {
                end.failure.get_or_insert_with(|| gone.clone());
                state.woken.extend(end.readers.iter_mut().filter_map(Option::take));
            }
            state.wake_crowd(|_| true);
            std::mem::replace(&mut state.store, Storing::Over)
        });
        // Waits for what is under way; not under the lock, which its thread needs.
        drop(store);
    }

    /// Its journal cannot be had: nothing is taken into custody.
    pub(crate) fn give_up(&self) {
        self.act(|state, _| state.store = Storing::Over);
    }

    /// Neighbours are heard, and dialled.
    pub(crate) fn is_ready(&self) -> bool {
        self.lock().is_ready()
    }

    /// What is to be known of an exchange of before this process.
    pub(crate) fn resumed(&self, id: ExchangeId) -> Option<Resumed> {
        let state = self.lock();
        Some(Resumed {
            is_for_here: state.engine.is_for_here(id),
            awaits_head: state.engine.awaits_head(id),
            is_intended: state.intended.contains(&id),
            response: state.engine.have(id, Part::Response)?,
        })
    }

    /// On which account it is.
    pub(crate) fn account(&self, id: ExchangeId) -> Option<Arc<str>> {
        self.lock().engine.account(id).cloned()
    }

    /// Bytes of the head that this node gave a half.
    pub(crate) fn head_length(&self, id: ExchangeId, part: Part) -> Option<u64> {
        self.lock().engine.head_length(id, part)
    }

    /// Reads again what is safe of a half. `None`: it is not to be had.
    pub(crate) async fn read_back(&self, id: ExchangeId, part: Part, offset: u64, length: u64) -> Option<Bytes> {
        let (back, answer) = oneshot::channel();
        self.lock().store.ask(Job::Read { id, part, offset, length, back: Some(back) });
        answer.await.ok().flatten()
    }

    /// Ready when it is safe to know that the request goes to an origin that must not have it twice.
    pub(crate) fn poll_intent(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        self.act(|state, _| {
            let survives = state.engine.survives(id);
            if survives == Survives::Nothing || state.ends.get(&id).is_some_and(|end| end.is_intended) {
                return Poll::Ready(Ok(()));
            }
            if state.intended.insert(id) {
                state.store.ask(Job::Keep { id, note: Note::Intent, is_synced: survives == Survives::Power });
            }
            state.wait(cx, id, Part::Response)
        })
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

    /// Takes custody of an exchange.
    ///
    /// # Errors
    /// There are as many as may be.
    pub(crate) fn begin(
        &self,
        id: ExchangeId,
        to: &Arc<str>,
        left: Duration,
        account: &Arc<str>,
        is_tunnel: bool,
        asked: Option<&Bytes>,
    ) -> Result<(), &'static str> {
        self.act(|state, now| {
            let begin =
                |state: &mut State| state.engine.begin(now, id, Side::Peer(to.clone()), left, account, is_tunnel);
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
    pub(crate) fn take_in(&self, id: ExchangeId, is_tunnel: bool) {
        self.act(|state, _| state.engine.take_in(id, &self.arrivals, is_tunnel));
    }

    /// An exchange that has arrived goes on.
    pub(crate) fn lead(
        &self,
        id: ExchangeId,
        (to, is_tunnel): (&Arc<str>, bool),
        account: &Arc<str>,
        theirs: u64,
        head: Bytes,
    ) {
        self.act(|state, _| state.engine.lead(id, (Side::Peer(to.clone()), is_tunnel), account, theirs, head));
    }

    /// The head of its response, as this node has it.
    pub(crate) fn settle_response(&self, id: ExchangeId, theirs: u64, head: Bytes) {
        self.act(|state, _| state.engine.settle(id, Part::Response, theirs, head));
    }

    /// The next bytes of a head that is awaited.
    pub(crate) fn poll_head(&self, cx: &Context<'_>, id: ExchangeId, part: Part) -> Poll<Result<Bytes, Failure>> {
        let mut state = self.lock();
        if let Some(bytes) = state.ends.get_mut(&id).and_then(|end| end.heads[part.index()].pop_front()) {
            return Poll::Ready(Ok(bytes));
        }
        state.wait(cx, id, part)
    }

    /// The next bytes for who is here, at most so many; and whether they are the last.
    pub(crate) fn poll_read(
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
    pub(crate) fn poll_append(
        &self,
        cx: &Context<'_>,
        id: ExchangeId,
        part: Part,
        bytes: &Bytes,
        is_last: bool,
    ) -> Poll<Result<(), Failure>> {
        self.act(|state, _| match state.engine.append(id, part, bytes.clone(), is_last) {
            Appended::Taken => Poll::Ready(Ok(())),
            Appended::Full => {
                // Who waits comes before who is gone.
                if let Some(account) = state.engine.account(id).cloned() {
                    state.leave_for_good(&account);
                }
                if !state.crowd.iter().any(|(other, waker)| *other == id && waker.will_wake(cx.waker())) {
                    state.crowd.push((id, cx.waker().clone()));
                }
                Poll::Pending
            }
            Appended::Gone => Poll::Ready(Err(state.failure(id))),
        })
    }

    /// Ready when it is over, in whatever way.
    pub(crate) fn poll_over(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        let mut state = self.lock();
        match state.ends.get(&id) {
            Some(End { failure: Some(failure), .. }) => return Poll::Ready(Err(failure.clone())),
            Some(end) if end.is_over => return Poll::Ready(Ok(())),
            _ => {}
        }
        state.wait(cx, id, Part::Response).map(|_: Result<(), _>| Ok(()))
    }

    /// It comes to nothing, by who is here.
    pub(crate) fn fail(&self, id: ExchangeId, status: u16, reason: &str) {
        self.act(|state, _| state.engine.fail(id, status, reason));
    }

    /// Its client is gone, and may come back and ask the same. Until its deadline it goes on.
    pub(crate) fn leave(&self, id: ExchangeId, asked: Bytes) {
        self.act(|state, _| {
            state.ends.remove(&id);
            match state.engine.have(id, Part::Request) {
                Some(request) if request.is_whole => state.left.push_back((asked, id)),
                // Nobody brings the rest of it.
                Some(_) => state.engine.fail(id, 499, "its client is gone"),
                None => {}
            }
            if state.left.len() > MOST_LEFT
                && let Some((_, oldest)) = state.left.pop_front()
            {
                state.engine.fail(oldest, 499, "its client is gone");
            }
        });
    }

    /// An exchange whose client is gone and that had asked this: it is the caller's from now on, who reads its response
    /// from the beginning.
    pub(crate) fn join(&self, asked: &Bytes) -> Option<ExchangeId> {
        self.act(|state, _| {
            if matches!(state.store, Storing::Over) {
                return None;
            }
            let place = state.left.iter().position(|(other, _)| other == asked)?;
            let (_, id) = state.left.remove(place)?;
            if !state.engine.reopen(id) {
                state.engine.fail(id, 499, "its client is gone");
                return None;
            }
            state.ends.insert(id, End::default());
            Some(id)
        })
    }

    /// It goes on from here, and nobody here answers it.
    pub(crate) fn is_led(&self, id: ExchangeId) -> bool {
        let state = self.lock();
        state.engine.have(id, Part::Request).is_some() && state.engine.is_led(id)
    }

    /// Nobody here has part in it any more.
    pub(crate) fn part(&self, id: ExchangeId) {
        self.lock().ends.remove(&id);
    }

    /// A channel to a neighbour begins; the one before is over. Its number, and exchanges of before this process that
    /// the neighbour began, for the caller to look at.
    pub(crate) fn open(&self, peer: &Arc<str>) -> (u64, Vec<ExchangeId>) {
        self.act(|state, _| {
            state.channels += 1;
            let number = state.channels;
            let line = state.lines.entry(peer.clone()).or_default();
            line.channel = number;
            state.woken.extend(line.carrier.take());
            state.engine.opened(peer);
            (number, state.resumed.remove(peer).unwrap_or_default())
        })
    }

    /// A channel is over.
    pub(crate) fn close(&self, peer: &Arc<str>, channel: u64) {
        self.act(|state, _| {
            if state.is_last(peer, channel) {
                state.engine.closed(peer);
                // Whom nobody dials is known by a name of its own choice.
                state.lines.retain(|name, line| name != peer || line.keeper.is_some());
            }
        });
    }

    /// A neighbour says this. The exchanges that it began with it are the caller's to look at.
    pub(crate) fn hear(&self, peer: &Arc<str>, channel: u64, record: Record) -> Vec<ExchangeId> {
        let begun = self.act(|state, now| {
            if state.is_last(peer, channel) {
                state.engine.hear(now, peer, record, &self.arrivals);
            }
            state.settle(now);
            std::mem::take(&mut state.begun)
        });
        begun.into_iter().map(|(id, _)| id).collect()
    }

    /// What a neighbour is to hear next; `None` where another channel has taken its place. `window`: so much may be under
    /// way to it, where that is known better than by what it says to hold.
    pub(crate) fn poll_record(
        &self,
        cx: &Context<'_>,
        peer: &Arc<str>,
        channel: u64,
        window: Option<u64>,
    ) -> Poll<Option<Record>> {
        self.act(|state, now| {
            if !state.is_last(peer, channel) {
                return Poll::Ready(None);
            }
            match state.engine.next_record(now, peer, window) {
                Some(record) => Poll::Ready(Some(record)),
                None => {
                    if let Some(line) = state.lines.get_mut(peer) {
                        line.carrier = Some(cx.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
    }

    /// Whether a channel to this neighbour is wanted now.
    pub(crate) fn is_wanted(&self, peer: &Arc<str>) -> bool {
        self.lock().engine.wants(peer)
    }

    /// Ready when a channel to this neighbour is wanted.
    pub(crate) fn poll_wanted(&self, cx: &Context<'_>, peer: &Arc<str>) -> Poll<()> {
        let mut state = self.lock();
        if state.engine.wants(peer) && state.is_ready() {
            return Poll::Ready(());
        }
        state.lines.entry(peer.clone()).or_default().keeper = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Ends what has had its time.
    pub(crate) fn expire(&self) {
        self.act(|state, now| state.engine.expire(now));
    }

    /// Exchanges that are held, and their bytes in memory and on disk.
    pub(crate) fn held(&self) -> (usize, u64, u64) {
        let state = self.lock();
        let (memory, disk) = state.engine.kept();
        (state.engine.len(), memory, disk)
    }
}

impl Reader for Office {
    fn are_safe(&self, safe: Vec<Safe>) {
        self.act(|state, _| {
            for safe in safe {
                match safe {
                    Safe::Upto { id, part, upto } => state.engine.is_safe(id, part, upto.offset, upto.is_whole),
                    Safe::Intent(id) => {
                        if let Some(end) = state.ends.get_mut(&id) {
                            end.is_intended = true;
                            end.wake(Part::Response, &mut state.woken);
                        }
                    }
                }
            }
        });
    }

    fn is_read(&self, id: ExchangeId, part: Part, offset: u64, bytes: Option<Bytes>) {
        self.act(|state, _| match bytes {
            Some(bytes) => state.engine.load(id, part, offset, bytes),
            None => state.engine.is_unreadable(id, part, offset),
        });
    }

    fn is_stuck(&self, why: Option<&io::Error>) {
        let mut state = self.lock();
        match why {
            Some(error) if state.trouble.is_none() => {
                tracing::error!(%error, "the journal of custody cannot be written; trying again");
                state.trouble = Some(Arc::from(error.to_string()));
            }
            Some(_) => {}
            None => {
                state.trouble = None;
                tracing::info!("the journal of custody is written again");
            }
        }
    }
}
