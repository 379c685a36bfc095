//! The state under the custody service's lock.
//!
//! In: actions of the engine. Out: wakers, journal entries, and failures of exchanges.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId, Record};

use super::super::OUTCOME_UNKNOWN;
use super::super::engine::{Appended, Durability, Engine, Entry, MAX_CUSTODY_TIME, Output, RestoredStream, Side};
use super::super::journal_record::{Intent, JournalRecord};
use super::super::store::{Job, Store, StoredExchange, StoredStream};
use super::Failure;
use super::abandoned::MAX_ABANDONED_RESPONSES;

/// The state of the custody service.
pub(super) struct State {
    pub(super) engine: Engine,
    /// Local endpoints by exchange.
    pub(super) ends: HashMap<ExchangeId, End>,
    pub(super) lines: HashMap<Arc<str>, Line>,
    /// The number of the last channel, counted over all neighbours.
    pub(super) channels: u64,
    /// Wakers of tasks that were refused for lack of room.
    pub(super) crowd: HashMap<ExchangeId, Waker>,
    /// Exchanges that neighbours began and that no task has routed yet.
    pub(super) begun: VecDeque<(ExchangeId, Arc<str>)>,
    /// Wakers to wake once the lock is free.
    pub(super) woken: Vec<Waker>,
    pub(super) store: Storing,
    /// Restored exchanges by the neighbour that began them; they resume when that neighbour reconnects.
    pub(super) resumed: HashMap<Arc<str>, Vec<ExchangeId>>,
    /// Exchanges whose request was sent, or may have been sent, to an origin that must not receive it twice.
    pub(super) intended: HashMap<ExchangeId, Intent>,
    /// Time of the last log message about a failing disk, and whether the recovery must be logged.
    pub(super) trouble: Option<Duration>,
    pub(super) is_troubled: bool,
    /// Exchanges whose client has disconnected, each with the client's request, the oldest first.
    pub(super) left: VecDeque<(Bytes, ExchangeId)>,
}

/// The destination of journal entries.
pub(super) enum Storing {
    /// Only memory: entries count as durable for the life of the process.
    Memory,
    /// A journal that another process has still locked. Jobs wait until it is unlocked, and no neighbour is served.
    Awaited(Vec<Job>),
    Journal(Store),
    /// No destination: another process uses the journal.
    Over,
}

impl Storing {
    pub(super) fn submit(&mut self, job: Job) {
        match self {
            Storing::Memory | Storing::Over => {}
            Storing::Awaited(jobs) => {
                // Unwritten entries of an ended exchange are discarded.
                if let Job::Keep { id, note: JournalRecord::Forget, .. } = &job {
                    jobs.retain(|job| !matches!(job, Job::Keep { id: other, .. } if other == id));
                }
                jobs.push(job);
            }
            Storing::Journal(store) => store.submit(job),
        }
    }
}

/// Whether the request is complete. The rest of an incomplete request never arrives once its client has disconnected.
fn is_asked_whole(engine: &Engine, id: ExchangeId) -> bool {
    engine.have(id, Direction::Request).is_some_and(|request| request.is_whole)
}

/// Returns the number of milliseconds since 1970.
pub(super) fn date() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn millis(period: Duration) -> u64 {
    u64::try_from(period.as_millis()).unwrap_or(u64::MAX)
}

/// A local endpoint of an exchange.
#[derive(Default)]
pub(super) struct End {
    /// Received bytes of the awaited heads of request and response, and whether these heads are complete.
    pub(super) heads: [VecDeque<Bytes>; 2],
    pub(super) has_head: [bool; 2],
    pub(super) readers: [Option<Waker>; 2],
    /// Whether the intent to send the request is durable.
    pub(super) is_intended: bool,
    pub(super) failure: Option<Failure>,
    pub(super) is_over: bool,
}

/// The connection to a neighbour.
#[derive(Default)]
pub(super) struct Line {
    /// The number of the latest channel, the only one that counts.
    pub(super) channel: u64,
    /// Waker of the task that serves the channel.
    pub(super) carrier: Option<Waker>,
    /// Waker of the task that dials a channel when one is wanted.
    pub(super) keeper: Option<Waker>,
}

impl End {
    pub(super) fn wake(&mut self, part: Direction, woken: &mut Vec<Waker>) {
        woken.extend(self.readers[part.index()].take());
    }
}

impl End {
    pub(super) fn wait<T>(&mut self, cx: &Context<'_>, part: Direction) -> Poll<Result<T, Failure>> {
        if let Some(failure) = &self.failure {
            return Poll::Ready(Err(failure.clone()));
        }
        if self.is_over {
            return Poll::Ready(Err(Failure { status: 502, reason: Arc::from("the exchange has ended") }));
        }
        self.readers[part.index()] = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            engine: Engine::new(),
            ends: HashMap::new(),
            lines: HashMap::new(),
            channels: 0,
            crowd: HashMap::new(),
            begun: VecDeque::new(),
            woken: Vec::new(),
            store: Storing::Memory,
            resumed: HashMap::new(),
            intended: HashMap::new(),
            trouble: None,
            is_troubled: false,
            left: VecDeque::new(),
        }
    }

    pub(super) fn is_last(&self, peer: &Arc<str>, channel: u64) -> bool {
        self.lines.get(peer).is_some_and(|line| line.channel == channel)
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.store, Storing::Memory | Storing::Journal(_))
    }

    pub(super) fn failure(&self, id: ExchangeId) -> Failure {
        let known = self.ends.get(&id).and_then(|end| end.failure.clone());
        known.unwrap_or_else(|| Failure { status: 502, reason: Arc::from("the exchange has ended") })
    }

    /// Restores a failed exchange that must not run again. It stays known as long as its neighbour may begin it again.
    pub(super) fn restore_end(&mut self, now: Duration, id: ExchangeId, note: JournalRecord) {
        let JournalRecord::Gone { peer, status, reason, deadline } = note else { return };
        // If the clock was set back, the end must not be retained forever.
        let left = Duration::from_millis(deadline.saturating_sub(date())).min(MAX_CUSTODY_TIME);
        let record = Record::Gone { id, status, reason: reason.to_string() };
        self.engine.restore_end(id, peer, record, now + left);
    }

    /// Restores an exchange from the journal.
    pub(super) fn restore(&mut self, now: Duration, id: ExchangeId, held: StoredExchange) {
        let StoredExchange { from, to, account, deadline, life, intent, is_tunnel, asked, halves } = held;
        // If the clock was set back, the deadline must not be later.
        let left = Duration::from_millis(deadline.saturating_sub(date()).min(life));
        let Some(to) = to.filter(|_| !left.is_zero()) else { return self.engine.discard(id) };
        let peer = match &from {
            Side::Peer(peer) => Some(peer.clone()),
            Side::Here => None,
        };
        // A tunnel with a local endpoint cannot continue, because its socket was closed.
        let ends_here = is_tunnel && (from == Side::Here || to == Side::Here);
        let former = |StoredStream { head, pieces }| RestoredStream { head, pieces };
        let (sides, time) = ((from, to), (now, left, Duration::from_millis(life)));
        let is_for_here = sides.1 == Side::Here;
        self.engine.restore(id, sides, time, &account, is_tunnel, halves.map(former));
        if let Some(intent) = intent {
            self.engine.intend(id);
            self.intended.insert(id, intent);
        }
        // Deleted bytes of a request cannot be sent to its origin again.
        let is_lost = is_for_here
            && self.engine.is_torn(id, Direction::Request)
            && !self.engine.have(id, Direction::Response).is_some_and(|response| response.is_whole);
        match peer {
            Some(_) if ends_here => self.engine.fail(id, 502, "the node at the far end of the tunnel was restarted"),
            Some(_) if is_lost => {
                let unknown = if intent.is_some() { format!("{OUTCOME_UNKNOWN}: ") } else { String::new() };
                let reason = "the last node was restarted, and its journal has only a part of the request";
                self.engine.fail(id, 502, &format!("{unknown}{reason}"));
            }
            Some(peer) => self.resumed.entry(peer).or_default().push(id),
            None => {
                match asked.filter(|_| self.left.len() < MAX_ABANDONED_RESPONSES && is_asked_whole(&self.engine, id)) {
                    Some(asked) => self.left.push_back((asked, id)),
                    None => self.engine.fail(id, 499, "the client was connected to a process that has exited"),
                }
            }
        }
    }

    /// Carries out the actions of the engine.
    pub(super) fn settle(&mut self, now: Duration) {
        while let Some(output) = self.engine.output() {
            match output {
                Output::Begun { id, peer } => {
                    self.ends.entry(id).or_default();
                    self.begun.push_back((id, peer));
                }
                Output::Head { id, part, bytes } => {
                    let end = self.ends.entry(id).or_default();
                    if !end.has_head[part.index()] {
                        end.heads[part.index()].push_back(bytes);
                        end.wake(part, &mut self.woken);
                    }
                }
                Output::Keep { id, entry, survives } => self.keep(now, id, entry, survives),
                Output::Read { id, part, offset, length } => {
                    self.store.submit(Job::Read { id, part, offset, length, back: None });
                }
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
                Output::Release { id, part, upto } => self.store.submit(Job::Release { id, part, upto }),
                Output::Scarce(account) => self.leave_for_good(&account),
                Output::Room => self.woken.extend(self.crowd.drain().map(|(_, waker)| waker)),
                Output::Onward { id } => self.woken.extend(self.crowd.remove(&id)),
                Output::Failed { id, status, reason } => {
                    self.end(id, Some(Failure { status, reason: Arc::from(reason) }));
                }
                Output::Forget { id } => {
                    self.intended.remove(&id);
                    self.forget_resumed(id);
                    self.left.retain(|(_, left)| *left != id);
                    self.end(id, None);
                }
            }
        }
    }

    pub(super) fn keep(&mut self, now: Duration, id: ExchangeId, entry: Entry, survives: Durability) {
        let note = match entry {
            Entry::Begin { from, account, deadline, life } => {
                let deadline = date().saturating_add(millis(deadline.saturating_sub(now)));
                JournalRecord::Begin { from, account, deadline, life: millis(life) }
            }
            Entry::Lead { to, account, is_tunnel } => JournalRecord::Lead { to, account, is_tunnel },
            Entry::Head { part, theirs, head } => JournalRecord::Head { part, theirs, bytes: head },
            Entry::Bytes { part, offset, bytes, is_last } => JournalRecord::Bytes { part, offset, is_last, bytes },
            Entry::Gone { peer, status, reason, until } => {
                let deadline = date().saturating_add(millis(until.saturating_sub(now)));
                JournalRecord::Gone { peer, status, reason: Arc::from(reason), deadline }
            }
            Entry::Forget => JournalRecord::Forget,
        };
        // The end of an exchange always goes to the store, which ignores it if nothing of the exchange was written.
        if survives != Durability::Nothing || note == JournalRecord::Forget {
            return self.store.submit(Job::Keep { id, note, is_synced: survives == Durability::Power });
        }
        // Without a journal, bytes are durable for the life of the process.
        match note {
            JournalRecord::Head { part, bytes, .. } => self.engine.is_safe(id, part, bytes.len() as u64, false),
            JournalRecord::Bytes { part, offset, bytes, is_last } => {
                self.engine.is_safe(id, part, offset + bytes.len() as u64, is_last);
            }
            _ => {}
        }
    }

    /// Registers a refused caller that waits. `account` is the account without room (`None`: that of the exchange).
    pub(super) fn unless_refused(
        &mut self,
        cx: &Context<'_>,
        id: ExchangeId,
        account: Option<&Arc<str>>,
        appended: Appended,
    ) -> Poll<Result<(), Failure>> {
        match appended {
            Appended::Taken => Poll::Ready(Ok(())),
            Appended::Full | Appended::Ahead => {
                // A waiting caller takes precedence over disconnected clients.
                let account = account.or_else(|| self.engine.account(id)).filter(|_| appended == Appended::Full);
                if let Some(account) = account.cloned() {
                    self.leave_for_good(&account);
                }
                self.crowd.insert(id, cx.waker().clone());
                Poll::Pending
            }
            Appended::Gone => Poll::Ready(Err(self.failure(id))),
        }
    }

    /// Registers a task that waits for progress of an existing exchange.
    pub(super) fn wait<T>(&mut self, cx: &Context<'_>, id: ExchangeId, part: Direction) -> Poll<Result<T, Failure>> {
        if !self.ends.contains_key(&id) && self.engine.have(id, part).is_none() {
            return Poll::Ready(Err(self.failure(id)));
        }
        self.ends.entry(id).or_default().wait(cx, part)
    }

    /// Drops a restored exchange that ended before its neighbour reconnected.
    fn forget_resumed(&mut self, id: ExchangeId) {
        let is_unseen = self.resumed.values_mut().any(|ids| {
            let place = ids.iter().position(|one| *one == id);
            place.map(|place| ids.swap_remove(place)).is_some()
        });
        if is_unseen {
            self.ends.remove(&id);
        }
    }

    pub(super) fn end(&mut self, id: ExchangeId, failure: Option<Failure>) {
        self.woken.extend(self.crowd.remove(&id));
        let Some(end) = self.ends.get_mut(&id) else { return };
        end.failure = end.failure.take().or(failure);
        end.is_over = true;
        for reader in &mut end.readers {
            self.woken.extend(reader.take());
        }
    }
}
