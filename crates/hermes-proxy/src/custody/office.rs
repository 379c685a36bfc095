//! What all workers of a node see of its custody: the engine, and who waits for what.
//!
//! In: what clients and origins bring, what channels hear, what is safe. Out: bytes for those who wait for them, records
//! for channels, and whose task goes on. A lock is held for a record or a chunk, and never over I/O.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::Snapshot;
use hermes_wire::custody::{ExchangeId, Part, Record};
use tokio::time::Instant;

use super::engine::{Appended, Engine, Entry, Limits, Output, Side};

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

struct State {
    engine: Engine,
    /// Who is here and has part in an exchange.
    ends: HashMap<ExchangeId, End>,
    lines: HashMap<Arc<str>, Line>,
    /// Who was refused for want of room.
    crowd: Vec<Waker>,
    /// Exchanges that neighbours began, and nobody has looked at yet.
    begun: VecDeque<(ExchangeId, Arc<str>)>,
    /// To be woken once the lock is free.
    woken: Vec<Waker>,
}

/// Somebody's part in an exchange.
#[derive(Default)]
struct End {
    /// Bytes of heads that are awaited, in the order of the parts.
    heads: [VecDeque<Bytes>; 2],
    readers: [Option<Waker>; 2],
    failure: Option<Failure>,
    is_over: bool,
}

/// The way to a neighbour.
#[derive(Default)]
struct Line {
    /// Counts its channels: the last one holds.
    channel: u64,
    /// Whoever carries it.
    carrier: Option<Waker>,
    /// Whoever makes a channel when one is wanted.
    keeper: Option<Waker>,
}

fn place(part: Part) -> usize {
    usize::from(part == Part::Response)
}

impl End {
    fn wake(&mut self, part: Part, woken: &mut Vec<Waker>) {
        woken.extend(self.readers[place(part)].take());
    }
}

impl Office {
    pub(crate) fn new() -> Self {
        let state = State {
            engine: Engine::new(),
            ends: HashMap::new(),
            lines: HashMap::new(),
            crowd: Vec::new(),
            begun: VecDeque::new(),
            woken: Vec::new(),
        };
        Self { state: Mutex::new(state), epoch: Instant::now(), arrivals: Arc::from("") }
    }

    /// What may be held from now on.
    pub(crate) fn follow(&self, snapshot: &Snapshot) {
        let limits = &snapshot.limits;
        self.act(|state, _| {
            let (memory, exchanges) = (limits.custody_memory as u64, limits.custody_exchanges);
            state.engine.allow(&self.arrivals, Limits { exchanges, memory, disk: 0 });
            for route in &snapshot.routes {
                if let Some(custody) = &route.custody {
                    let limits = Limits { exchanges, memory: custody.memory, disk: 0 };
                    state.engine.allow(&route.name, limits);
                }
            }
        });
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
            state.settle();
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
    ) -> Result<(), &'static str> {
        self.act(|state, now| {
            state.engine.begin(now, id, Side::Peer(to.clone()), left, account)?;
            state.ends.insert(id, End::default());
            Ok(())
        })
    }

    /// An exchange that has arrived ends here.
    pub(crate) fn take_in(&self, id: ExchangeId) {
        self.act(|state, _| state.engine.take_in(id, &self.arrivals));
    }

    /// An exchange that has arrived goes on.
    pub(crate) fn lead(&self, id: ExchangeId, to: &Arc<str>, account: &Arc<str>, theirs: u64, head: Bytes) {
        self.act(|state, _| state.engine.lead(id, Side::Peer(to.clone()), account, theirs, head));
    }

    /// The head of its response, as this node has it.
    pub(crate) fn settle_response(&self, id: ExchangeId, theirs: u64, head: Bytes) {
        self.act(|state, _| state.engine.settle(id, Part::Response, theirs, head));
    }

    /// The next bytes of a head that is awaited.
    pub(crate) fn poll_head(&self, cx: &Context<'_>, id: ExchangeId, part: Part) -> Poll<Result<Bytes, Failure>> {
        let mut state = self.lock();
        let end = state.ends.entry(id).or_default();
        match end.heads[place(part)].pop_front() {
            Some(bytes) => Poll::Ready(Ok(bytes)),
            None => end.wait(cx, part),
        }
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
            None => state.ends.entry(id).or_default().wait(cx, part),
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
                state.crowd.push(cx.waker().clone());
                Poll::Pending
            }
            Appended::Gone => Poll::Ready(Err(state.failure(id))),
        })
    }

    /// Ready when it is over, in whatever way.
    pub(crate) fn poll_over(&self, cx: &Context<'_>, id: ExchangeId) -> Poll<Result<(), Failure>> {
        let mut state = self.lock();
        let end = state.ends.entry(id).or_default();
        match &end.failure {
            Some(failure) => Poll::Ready(Err(failure.clone())),
            None if end.is_over => Poll::Ready(Ok(())),
            None => end.wait(cx, Part::Response).map(|_: Result<(), _>| Ok(())),
        }
    }

    /// It comes to nothing, by who is here.
    pub(crate) fn fail(&self, id: ExchangeId, status: u16, reason: &str) {
        self.act(|state, _| state.engine.fail(id, status, reason));
    }

    /// Nobody here has part in it any more.
    pub(crate) fn part(&self, id: ExchangeId) {
        self.lock().ends.remove(&id);
    }

    /// A channel to a neighbour begins; the one before is over. Its number.
    pub(crate) fn open(&self, peer: &Arc<str>) -> u64 {
        self.act(|state, _| {
            let line = state.lines.entry(peer.clone()).or_default();
            line.channel += 1;
            state.woken.extend(line.carrier.take());
            let number = line.channel;
            state.engine.opened(peer);
            number
        })
    }

    /// A channel is over.
    pub(crate) fn close(&self, peer: &Arc<str>, channel: u64) {
        self.act(|state, _| {
            if state.is_last(peer, channel) {
                state.engine.closed(peer);
            }
        });
    }

    /// A neighbour says this. The exchanges that it began with it are the caller's to look at.
    pub(crate) fn hear(&self, peer: &Arc<str>, channel: u64, record: Record) -> Vec<ExchangeId> {
        let begun = self.act(|state, now| {
            if state.is_last(peer, channel) {
                state.engine.hear(now, peer, record, &self.arrivals);
            }
            state.settle();
            std::mem::take(&mut state.begun)
        });
        begun.into_iter().map(|(id, _)| id).collect()
    }

    /// What a neighbour is to hear next; `None` where another channel has taken its place.
    pub(crate) fn poll_record(&self, cx: &Context<'_>, peer: &Arc<str>, channel: u64) -> Poll<Option<Record>> {
        self.act(|state, now| {
            if !state.is_last(peer, channel) {
                return Poll::Ready(None);
            }
            match state.engine.next_record(now, peer) {
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
        if state.engine.wants(peer) {
            return Poll::Ready(());
        }
        state.lines.entry(peer.clone()).or_default().keeper = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Ends what has had its time.
    pub(crate) fn expire(&self) {
        self.act(|state, now| state.engine.expire(now));
    }
}

impl End {
    fn wait<T>(&mut self, cx: &Context<'_>, part: Part) -> Poll<Result<T, Failure>> {
        if let Some(failure) = &self.failure {
            return Poll::Ready(Err(failure.clone()));
        }
        if self.is_over {
            return Poll::Ready(Err(Failure { status: 502, reason: Arc::from("it is over") }));
        }
        self.readers[place(part)] = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl State {
    fn is_last(&self, peer: &Arc<str>, channel: u64) -> bool {
        self.lines.get(peer).is_some_and(|line| line.channel == channel)
    }

    fn failure(&self, id: ExchangeId) -> Failure {
        let known = self.ends.get(&id).and_then(|end| end.failure.clone());
        known.unwrap_or_else(|| Failure { status: 502, reason: Arc::from("it is over") })
    }

    /// Does what the engine says.
    fn settle(&mut self) {
        while let Some(output) = self.engine.output() {
            match output {
                Output::Begun { id, peer } => self.begun.push_back((id, peer)),
                Output::Head { id, part, bytes } => {
                    let end = self.ends.entry(id).or_default();
                    end.heads[place(part)].push_back(bytes);
                    end.wake(part, &mut self.woken);
                }
                // In memory alone: what is here is safe as long as the process is.
                Output::Keep { id, entry: Entry::Head { part, head, .. } } => {
                    self.engine.is_safe(id, part, head.len() as u64, false);
                }
                Output::Keep { id, entry: Entry::Bytes { part, offset, bytes, is_last } } => {
                    self.engine.is_safe(id, part, offset + bytes.len() as u64, is_last);
                }
                Output::Keep { .. } | Output::Read { .. } => {}
                Output::Ready { id, part } => {
                    if let Some(end) = self.ends.get_mut(&id) {
                        end.wake(part, &mut self.woken);
                    }
                }
                Output::Stir(peer) => {
                    if let Some(line) = self.lines.get_mut(&peer) {
                        self.woken.extend(line.carrier.take());
                        self.woken.extend(line.keeper.take());
                    }
                }
                Output::Room => self.woken.append(&mut self.crowd),
                Output::Failed { id, status, reason } => {
                    self.end(id, Some(Failure { status, reason: Arc::from(reason) }));
                }
                Output::Forget { id } => self.end(id, None),
            }
        }
    }

    fn end(&mut self, id: ExchangeId, failure: Option<Failure>) {
        let Some(end) = self.ends.get_mut(&id) else { return };
        end.failure = end.failure.take().or(failure);
        end.is_over = true;
        for reader in &mut end.readers {
            self.woken.extend(reader.take());
        }
    }
}
