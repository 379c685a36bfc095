//! The exchanges that a node has in custody, and who is to get what of them next.
//!
//! In: bytes of local clients and origins, records of neighbours, what is safe by now, channels that come and go, time.
//! Out: records for each neighbour when it may have one, bytes for those who are here, what is to be written, and what has
//! come to nothing. Pure: no I/O, no clock, no chance. Bounded by what its accounts say; what it does for a record does
//! not grow with the exchanges that it has.
//!
//! Each exchange has a side that it came from and one that it goes to; its request goes the one way, its response the
//! other. Where the next one holds a half, it is its own: this node forgets it.

mod index;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part, Record};

use self::index::{Account, Indexed, Peer};
use super::half::{Half, Next, Upto};

/// Bytes in one record: small ones behind a large one wait for so much.
const CHUNK: usize = 16 << 10;
/// Bytes that are read from disk at once.
const LOAD: u64 = 256 << 10;
/// Of so many chunks one is the oldest exchange's, whoever else is ahead.
const FOR_THE_OLDEST: u32 = 8;
/// No neighbour asks for longer custody.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Answers that wait for one neighbour. What finds no room it asks for again.
const MOST_WORDS: usize = 4096;

/// One side of an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// A client or an origin of this node.
    Here,
    /// A neighbour, by its name.
    Peer(Arc<str>),
}

impl Side {
    fn peer(&self) -> Option<&Arc<str>> {
        match self {
            Side::Here => None,
            Side::Peer(peer) => Some(peer),
        }
    }
}

/// What is to be known again after this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// There is an exchange.
    Begin { from: Side, account: Arc<str>, deadline: Duration },
    /// It goes there.
    Lead { to: Side, account: Arc<str>, is_tunnel: bool },
    /// Its string begins with this head, where the one before had so many bytes of its own.
    Head { part: Part, theirs: u64, head: Bytes },
    /// Its string goes on there.
    Bytes { part: Part, offset: u64, bytes: Bytes, is_last: bool },
    /// It is over.
    Forget,
}

/// A half as it was before this process.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// Its head: bytes of theirs, and of ours.
    pub(crate) head: Option<(u64, u64)>,
    /// Where pieces stand, and how long they are, from its beginning to its end. All are safe.
    pub(crate) pieces: Vec<(Upto, u64)>,
}

impl Former {
    fn half(self, awaits_head: bool) -> Half {
        let mut half = if awaits_head && self.head.is_none() { Half::awaiting_head() } else { Half::default() };
        if let Some((theirs, length)) = self.head {
            half.restore_head(theirs, length);
        }
        self.pieces.into_iter().for_each(|(at, length)| half.restore(at, length));
        half
    }
}

/// What is to be done by others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// A neighbour has begun an exchange that was not known: where it goes is to be said by [`Engine::lead`].
    Begun { id: ExchangeId, peer: Arc<str> },
    /// These bytes of a half whose head is awaited came next: [`Engine::settle`] ends that.
    Head { id: ExchangeId, part: Part, bytes: Bytes },
    /// This is to be made safe, in this order. Of heads and bytes [`Engine::is_safe`] is to be told.
    Keep { id: ExchangeId, entry: Entry, is_synced: bool },
    /// What stands there is to be read again, for [`Engine::load`].
    Read { id: ExchangeId, part: Part, offset: u64, length: u64 },
    /// There is something for who is here: [`Engine::read`].
    Ready { id: ExchangeId, part: Part },
    /// There is something for this neighbour: a channel, and [`Engine::next_record`].
    Stir(Arc<str>),
    /// Who was refused by [`Engine::append`] may try again.
    Room,
    /// It has come to nothing: its client is to be told.
    Failed { id: ExchangeId, status: u16, reason: String },
    /// There is nothing left to be done for it.
    Forget { id: ExchangeId },
}

/// What one account may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Exchanges at once.
    pub(crate) exchanges: usize,
    /// Bytes of all of them in memory.
    pub(crate) memory: u64,
    /// And on disk. Zero: nothing is written, and what is safe is what is in memory.
    pub(crate) disk: u64,
    /// What is safe survives a loss of power.
    pub(crate) is_synced: bool,
}

/// What [`Engine::append`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    Taken,
    /// There is no room: [`Output::Room`] tells when it is to be tried again.
    Full,
    /// There is no such exchange any more.
    Gone,
}

#[derive(Debug)]
struct Exchange {
    /// In the order in which they came.
    number: u64,
    from: Side,
    /// `None`: it is not known yet, or it has no more part in it.
    to: Option<Side>,
    request: Half,
    response: Half,
    deadline: Duration,
    account: Arc<str>,
    /// Both its halves have to come to their end, whichever is first; and it has its time anew with each step.
    is_tunnel: bool,
    /// The time that it was given.
    life: Duration,
    /// The next one has heard of it, over the channel that is there.
    is_begun: bool,
    /// How its halves stand in the indexes, in the order of `PARTS`.
    indexed: [Indexed; 2],
}

impl Exchange {
    fn half(&mut self, part: Part) -> &mut Half {
        match part {
            Part::Request => &mut self.request,
            Part::Response => &mut self.response,
        }
    }

    /// Where a half goes.
    fn sink(&self, part: Part) -> Option<&Side> {
        match part {
            Part::Request => self.to.as_ref(),
            Part::Response => Some(&self.from),
        }
    }

    /// It is the request of a response that is here: the next one may have forgotten both, and must not do it again.
    fn is_answered(&self, part: Part) -> bool {
        part == Part::Request && self.response.have().is_whole && !self.is_tunnel
    }

    /// Where it comes from.
    fn source(&self, part: Part) -> Option<&Side> {
        match part {
            Part::Request => Some(&self.from),
            Part::Response => self.to.as_ref(),
        }
    }

    fn is_with(&self, side: &Side) -> bool {
        self.from == *side || self.to.as_ref() == Some(side)
    }
}

const PARTS: [Part; 2] = [Part::Request, Part::Response];

/// The exchanges of a node.
#[derive(Debug)]
pub(crate) struct Engine {
    exchanges: HashMap<ExchangeId, Exchange>,
    /// What has ended, and whom it was with: who has not heard of it is told again, until its time is over.
    ended: HashMap<ExchangeId, Vec<Ended>>,
    accounts: HashMap<Arc<str>, Account>,
    peers: HashMap<Arc<str>, Peer>,
    /// Of exchanges, and of what has ended.
    deadlines: BTreeSet<(Duration, ExchangeId)>,
    out: VecDeque<Output>,
    next: u64,
}

/// An exchange that is over here, and perhaps not for a neighbour.
#[derive(Debug)]
struct Ended {
    peer: Arc<str>,
    record: Record,
    until: Duration,
}

impl Engine {
    pub(crate) fn new() -> Self {
        Self {
            exchanges: HashMap::new(),
            ended: HashMap::new(),
            accounts: HashMap::new(),
            peers: HashMap::new(),
            deadlines: BTreeSet::new(),
            out: VecDeque::new(),
            next: 0,
        }
    }

    /// What an account may hold from now on. What it holds already it may keep.
    pub(crate) fn allow(&mut self, account: &Arc<str>, limits: Limits) {
        self.accounts.entry(account.clone()).or_default().limits = limits;
    }

    /// What is to be done next.
    pub(crate) fn output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Bytes that are held: in memory, and on disk.
    pub(crate) fn kept(&self) -> (u64, u64) {
        self.accounts.values().fold((0, 0), |(memory, disk), one| (memory + one.memory, disk + one.disk))
    }

    /// Exchanges that are held.
    pub(crate) fn len(&self) -> usize {
        self.exchanges.len()
    }

    fn keep(&mut self, id: ExchangeId, entry: Entry) {
        let is_synced = self.is_synced(id);
        self.out.push_back(Output::Keep { id, entry, is_synced });
    }

    /// Whether what is safe of it survives a loss of power.
    pub(crate) fn is_synced(&self, id: ExchangeId) -> bool {
        let account = self.exchanges.get(&id).and_then(|exchange| self.accounts.get(&exchange.account));
        account.is_some_and(|account| account.limits.is_synced)
    }

    /// On which account it is.
    pub(crate) fn account(&self, id: ExchangeId) -> Option<&Arc<str>> {
        self.exchanges.get(&id).map(|exchange| &exchange.account)
    }

    /// How far a half has come.
    pub(crate) fn have(&self, id: ExchangeId, part: Part) -> Option<Upto> {
        let exchange = self.exchanges.get(&id)?;
        let half = if part == Part::Request { &exchange.request } else { &exchange.response };
        Some(half.have())
    }

    /// Whether its response waits for a head of ours.
    pub(crate) fn awaits_head(&self, id: ExchangeId) -> bool {
        self.exchanges.get(&id).is_some_and(|exchange| exchange.response.awaits_head())
    }

    /// Whether it ends here.
    pub(crate) fn is_for_here(&self, id: ExchangeId) -> bool {
        self.exchanges.get(&id).is_some_and(|exchange| exchange.to == Some(Side::Here))
    }

    /// Takes custody of an exchange that began here.
    ///
    /// # Errors
    /// There are as many as may be.
    pub(crate) fn begin(
        &mut self,
        now: Duration,
        id: ExchangeId,
        to: Side,
        left: Duration,
        account: &Arc<str>,
        is_tunnel: bool,
    ) -> Result<(), &'static str> {
        self.add(id, Side::Here, Half::default(), (now, left), account)?;
        self.go(id, to, account, is_tunnel);
        Ok(())
    }

    fn add(
        &mut self,
        id: ExchangeId,
        from: Side,
        request: Half,
        (now, left): (Duration, Duration),
        account: &Arc<str>,
    ) -> Result<(), &'static str> {
        self.insert(id, from.clone(), request, (now, left), account)?;
        let entry = Entry::Begin { from, account: account.clone(), deadline: now + left };
        self.keep(id, entry);
        Ok(())
    }

    fn insert(
        &mut self,
        id: ExchangeId,
        from: Side,
        request: Half,
        (now, left): (Duration, Duration),
        account: &Arc<str>,
    ) -> Result<(), &'static str> {
        let state = self.accounts.entry(account.clone()).or_default();
        if state.exchanges >= state.limits.exchanges || self.ended.len() >= 2 * state.limits.exchanges {
            return Err("this node holds as many exchanges as it may");
        }
        state.exchanges += 1;
        let number = self.next;
        self.next += 1;
        self.count(&from, true);
        let deadline = now + left;
        self.deadlines.insert((deadline, id));
        let exchange = Exchange {
            number,
            from,
            to: None,
            request,
            response: Half::default(),
            deadline,
            account: account.clone(),
            is_tunnel: false,
            life: left,
            is_begun: false,
            indexed: <[Indexed; 2]>::default(),
        };
        self.exchanges.insert(id, exchange);
        Ok(())
    }

    /// What was held before this process is held again. Its request goes on where it was led to.
    ///
    /// # Errors
    /// There are as many as may be.
    pub(crate) fn restore(
        &mut self,
        id: ExchangeId,
        (from, to): (Side, Side),
        (now, left): (Duration, Duration),
        account: &Arc<str>,
        is_tunnel: bool,
        [request, response]: [Former; 2],
    ) -> Result<(), &'static str> {
        // What the next one sends for who is not here has a head of ours.
        let has_head = matches!((&from, &to), (Side::Peer(_), Side::Peer(_)));
        self.insert(id, from, request.half(false), (now, left), account)?;
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.response = response.half(has_head);
            exchange.to = Some(to.clone());
            exchange.is_tunnel = is_tunnel;
        }
        self.count(&to, true);
        self.reindex(id);
        Ok(())
    }

    /// It is not held again, and not to be found once more.
    pub(crate) fn discard(&mut self, id: ExchangeId) {
        self.keep(id, Entry::Forget);
    }

    /// Counts an exchange with a neighbour.
    fn count(&mut self, side: &Side, is_more: bool) {
        let Some(name) = side.peer() else { return };
        let peer = self.peers.entry(name.clone()).or_default();
        if is_more {
            peer.exchanges += 1;
            // A channel is wanted, where none was.
            if peer.exchanges == 1 {
                self.out.push_back(Output::Stir(name.clone()));
            }
        } else {
            peer.exchanges -= 1;
        }
    }

    fn go(&mut self, id: ExchangeId, to: Side, account: &Arc<str>, is_tunnel: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else { return };
        exchange.to = Some(to.clone());
        exchange.is_tunnel = is_tunnel;
        if exchange.account != *account {
            let before = std::mem::replace(&mut exchange.account, account.clone());
            index::move_account(&mut self.accounts, exchange, &before);
        }
        let entry = Entry::Lead { to: to.clone(), account: account.clone(), is_tunnel };
        self.keep(id, entry);
        self.count(&to, true);
    }

    /// An exchange that a neighbour began ends here: its request is read as it came.
    pub(crate) fn take_in(&mut self, id: ExchangeId, account: &Arc<str>, is_tunnel: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else { return };
        let had = exchange.request.have();
        self.go(id, Side::Here, account, is_tunnel);
        self.settle_as(id, Part::Request, 0, Bytes::new(), had.is_whole);
    }

    /// An exchange that a neighbour began goes on, with this head in the place of so many bytes of its request. So does
    /// its response, once its head is known.
    pub(crate) fn lead(
        &mut self,
        id: ExchangeId,
        (to, is_tunnel): (Side, bool),
        account: &Arc<str>,
        theirs: u64,
        head: Bytes,
    ) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else { return };
        exchange.response = Half::awaiting_head();
        self.go(id, to, account, is_tunnel);
        self.settle(id, Part::Request, theirs, head);
    }

    /// The head of a half is known: this one stands where the one before had so many bytes.
    pub(crate) fn settle(&mut self, id: ExchangeId, part: Part, theirs: u64, head: Bytes) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let is_whole = exchange.half(part).have().is_whole;
        self.settle_as(id, part, theirs, head, is_whole);
    }

    fn settle_as(&mut self, id: ExchangeId, part: Part, theirs: u64, head: Bytes, is_whole: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let half = exchange.half(part);
        if !half.awaits_head() || half.have().offset < theirs {
            return;
        }
        let behind = half.settle(theirs, head.clone());
        let mut offset = head.len() as u64;
        self.keep(id, Entry::Head { part, theirs, head });
        let count = behind.len();
        for (number, bytes) in behind.into_iter().enumerate() {
            let is_last = is_whole && number + 1 == count;
            let length = bytes.len() as u64;
            self.keep(id, Entry::Bytes { part, offset, bytes, is_last });
            offset += length;
        }
        if is_whole && count == 0 {
            let entry = Entry::Bytes { part, offset, bytes: Bytes::new(), is_last: true };
            self.keep(id, entry);
        }
        self.reindex(id);
    }

    /// Bytes of a client or an origin that is here. What is not taken is to be brought again.
    pub(crate) fn append(&mut self, id: ExchangeId, part: Part, bytes: Bytes, is_last: bool) -> Appended {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return Appended::Gone };
        if exchange.source(part) != Some(&Side::Here) {
            return Appended::Gone;
        }
        let at = exchange.half(part).have().offset;
        if let Some(account) = self.accounts.get_mut(&exchange.account)
            && !account.takes(bytes.len())
        {
            account.has_refused = true;
            return Appended::Full;
        }
        // Who begins anew behind us, after us, must not find another head.
        if at == 0 && part == Part::Response {
            exchange.response.send_after(bytes.len() as u64);
        }
        self.take(id, part, at, bytes, is_last);
        Appended::Taken
    }

    fn take(&mut self, id: ExchangeId, part: Part, offset: u64, bytes: Bytes, is_last: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let half = exchange.half(part);
        let awaits_head = half.awaits_head();
        if let Some((offset, bytes)) = half.take(offset, bytes, is_last) {
            if awaits_head {
                self.out.push_back(Output::Head { id, part, bytes });
            } else {
                self.keep(id, Entry::Bytes { part, offset, bytes, is_last });
            }
        }
        self.reindex(id);
    }

    /// A tunnel has its time anew with each step; not at each of them, which would cost more than it is worth.
    fn renew(&mut self, now: Duration, id: ExchangeId) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.is_tunnel) else { return };
        let deadline = now + exchange.life;
        if deadline - exchange.deadline.min(deadline) > exchange.life / 8 {
            self.deadlines.remove(&(exchange.deadline, id));
            self.deadlines.insert((deadline, id));
            exchange.deadline = deadline;
        }
    }

    /// The next bytes for who is here, at most so many; `None` where there are none yet.
    pub(crate) fn read(&mut self, id: ExchangeId, part: Part, most: usize) -> Option<(Bytes, bool)> {
        let exchange = self.exchanges.get_mut(&id).filter(|exchange| exchange.sink(part) == Some(&Side::Here))?;
        let half = exchange.half(part);
        let read = match half.send(most) {
            Some(Next::Bytes { offset, bytes, is_last }) => {
                half.set_held(Upto { offset: offset + bytes.len() as u64, is_whole: is_last });
                Some((bytes, is_last))
            }
            Some(Next::Away { offset, length }) => {
                self.out.push_back(Output::Read { id, part, offset, length: length.min(LOAD) });
                None
            }
            None => None,
        };
        if read.is_none() {
            exchange.indexed[index::of(part)].is_ready_told = false;
        }
        self.reindex(id);
        self.end_if_over(id);
        read
    }

    /// So much of a half survives this process.
    pub(crate) fn is_safe(&mut self, id: ExchangeId, part: Part, offset: u64, is_whole: bool) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
            let half = exchange.half(part);
            half.set_safe(Upto { offset, is_whole });
            if is_tight {
                half.evict();
            }
            self.reindex(id);
        }
    }

    /// What was to be read.
    pub(crate) fn load(&mut self, id: ExchangeId, part: Part, offset: u64, bytes: Bytes) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.half(part).load(offset, bytes);
            self.reindex(id);
        }
    }

    /// A channel to a neighbour is there: what was under way over the one before is lost.
    pub(crate) fn opened(&mut self, peer: &Arc<str>) {
        let side = Side::Peer(peer.clone());
        let state = self.peers.entry(peer.clone()).or_default();
        state.is_open = true;
        state.is_quiet = false;
        state.pace.begin();
        // Said again where it still has to be.
        state.words.clear();
        let ended = self.ended.values().flatten().filter(|ended| ended.peer == *peer);
        state.words.extend(ended.map(|ended| ended.record.clone()));
        let with: Vec<_> =
            self.exchanges.iter().filter(|(_, exchange)| exchange.is_with(&side)).map(|(id, _)| *id).collect();
        for id in with {
            let Some(exchange) = self.exchanges.get_mut(&id) else { continue };
            for part in PARTS {
                if exchange.sink(part) == Some(&side) {
                    exchange.half(part).rewind();
                }
                if exchange.source(part) == Some(&side) {
                    exchange.half(part).forget_told();
                }
            }
            if exchange.to.as_ref() == Some(&side) {
                exchange.is_begun = false;
            }
            self.reindex(id);
        }
    }

    /// It is gone.
    pub(crate) fn closed(&mut self, peer: &Arc<str>) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.is_open = false;
        }
    }

    /// Something is to be said to this neighbour, or heard of it: a channel is wanted.
    pub(crate) fn wants(&self, peer: &str) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.exchanges > 0 || peer.ended > 0)
    }

    /// A neighbour says something. What it begins is counted on this account until it is led anywhere.
    pub(crate) fn hear(&mut self, now: Duration, peer: &Arc<str>, record: Record, account: &Arc<str>) {
        let side = Side::Peer(peer.clone());
        match record {
            Record::Begin { id, left } => self.hear_begin(now, peer, id, Duration::from_millis(left), account),
            Record::Data { id, part, offset, is_last, bytes } => {
                let comes_from = |exchange: &&mut Exchange| exchange.source(part) == Some(&side);
                let Some(exchange) = self.exchanges.get_mut(&id).filter(comes_from) else {
                    return self.unknown(peer, id);
                };
                if self.accounts.get(&exchange.account).is_some_and(|account| account.takes(bytes.len())) {
                    self.take(id, part, offset, bytes, is_last);
                    self.renew(now, id);
                } else {
                    exchange.half(part).refuse();
                    self.reindex(id);
                }
            }
            Record::Held { id, part, upto, is_whole, again } => {
                let goes_to = |exchange: &&mut Exchange| exchange.sink(part) == Some(&side);
                let Some(exchange) = self.exchanges.get_mut(&id).filter(goes_to) else {
                    return self.unknown(peer, id);
                };
                let is_from_here = exchange.source(part) == Some(&Side::Here);
                let half = exchange.half(part);
                let before = half.held().offset;
                if half.awaits_head() || (is_from_here && upto > half.have().offset) {
                    return self.fail(id, 502, &format!("{peer} holds more of it than there was"));
                }
                half.set_held(Upto { offset: upto, is_whole });
                if again {
                    half.rewind();
                }
                let more = half.held().offset - before;
                if more > 0 {
                    self.peers.entry(peer.clone()).or_default().pace.held(now, more);
                    self.renew(now, id);
                }
                self.reindex(id);
                self.end_if_over(id);
            }
            Record::Gone { id, status, reason } => {
                self.say(peer, Record::Done { id });
                if self.exchanges.get(&id).is_some_and(|exchange| exchange.is_with(&side)) {
                    self.end(id, &side, Record::Gone { id, status, reason });
                }
            }
            Record::Done { id } => {
                self.forget_ended(id, peer);
                let Some(exchange) = self.exchanges.get_mut(&id) else { return };
                if exchange.to.as_ref() == Some(&side) && exchange.response.have().is_whole {
                    self.unindex(id);
                    if let Some(exchange) = self.exchanges.get_mut(&id) {
                        exchange.to = None;
                        // Whoever has forgotten it had all of it.
                        let have = exchange.request.have();
                        exchange.request.set_held(have);
                    }
                    self.count(&side, false);
                    self.reindex(id);
                    self.end_if_over(id);
                } else if exchange.to.as_ref() == Some(&side) {
                    self.fail(id, 502, &format!("{peer} has lost it"));
                } else if exchange.from == side {
                    let reason = format!("{peer}, where it came from, no longer knows it");
                    self.end(id, &side, Record::Gone { id, status: 502, reason });
                }
            }
        }
    }

    fn hear_begin(&mut self, now: Duration, peer: &Arc<str>, id: ExchangeId, left: Duration, account: &Arc<str>) {
        let side = Side::Peer(peer.clone());
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            if exchange.from == side {
                // It may have forgotten what it heard.
                exchange.request.forget_told();
                return self.reindex(id);
            }
            let reason = "it came to a node that has it already: its routes lead in a circle".to_owned();
            return self.say(peer, Record::Gone { id, status: 508, reason });
        }
        if self.ended_for(id, peer).is_some() {
            return self.unknown(peer, id);
        }
        match self.add(id, side, Half::awaiting_head(), (now, left.min(LONGEST)), account) {
            Ok(()) => self.out.push_back(Output::Begun { id, peer: peer.clone() }),
            Err(reason) => self.say(peer, Record::Gone { id, status: 503, reason: reason.to_owned() }),
        }
    }

    /// What this neighbour is to hear of an exchange that is over.
    fn ended_for(&self, id: ExchangeId, peer: &Arc<str>) -> Option<&Record> {
        self.ended.get(&id)?.iter().find(|ended| ended.peer == *peer).map(|ended| &ended.record)
    }

    /// A neighbour speaks of an exchange that is over here, or never was.
    fn unknown(&mut self, peer: &Arc<str>, id: ExchangeId) {
        let again = self.ended_for(id, peer).cloned();
        self.say(peer, again.unwrap_or(Record::Done { id }));
    }

    fn say(&mut self, peer: &Arc<str>, record: Record) {
        let state = self.peers.entry(peer.clone()).or_default();
        if state.words.len() < MOST_WORDS {
            state.words.push_back(record);
            state.stir(peer, &mut self.out);
        }
    }

    /// Its client or its origin, who is here, has given up, or it cannot be led anywhere.
    pub(crate) fn fail(&mut self, id: ExchangeId, status: u16, reason: &str) {
        self.end(id, &Side::Here, Record::Gone { id, status, reason: reason.to_owned() });
    }

    /// It has come to nothing, as `by` says: the other side is told.
    fn end(&mut self, id: ExchangeId, by: &Side, record: Record) {
        let Some(exchange) = self.remove(id) else { return };
        for side in [Some(exchange.from), exchange.to].into_iter().flatten() {
            match side {
                Side::Here => {
                    if let Record::Gone { status, reason, .. } = &record {
                        self.out.push_back(Output::Failed { id, status: *status, reason: reason.clone() });
                    }
                }
                Side::Peer(peer) if *by != Side::Peer(peer.clone()) => {
                    self.say(&peer, record.clone());
                    self.remember_ended(id, peer, record.clone(), exchange.deadline);
                }
                Side::Peer(_) => {}
            }
        }
        self.out.push_back(Output::Forget { id });
    }

    /// Where whoever it came from has all of its response, nothing is left to be done. A neighbour that it went to still
    /// waits to hear that the response is held.
    fn end_if_over(&mut self, id: ExchangeId) {
        let is_over =
            |exchange: &Exchange| exchange.response.is_over() && (!exchange.is_tunnel || exchange.request.is_over());
        if !self.exchanges.get(&id).is_some_and(is_over) {
            return;
        }
        let Some(mut exchange) = self.remove(id) else { return };
        if let Some(Side::Peer(peer)) = exchange.to.take() {
            // What we held last, in its count.
            exchange.response.forget_told();
            let upto = exchange.response.news(false).map_or(0, |(said, _)| said.offset);
            let record = Record::Held { id, part: Part::Response, upto, is_whole: true, again: false };
            self.say(&peer, record.clone());
            self.remember_ended(id, peer, record, exchange.deadline);
        }
        if let Side::Peer(peer) = exchange.from {
            self.say(&peer, Record::Done { id });
        }
        self.out.push_back(Output::Forget { id });
    }

    fn remember_ended(&mut self, id: ExchangeId, peer: Arc<str>, record: Record, until: Duration) {
        self.forget_ended(id, &peer);
        self.peers.entry(peer.clone()).or_default().ended += 1;
        self.deadlines.insert((until, id));
        self.ended.entry(id).or_default().push(Ended { peer, record, until });
    }

    /// This neighbour has heard of it.
    fn forget_ended(&mut self, id: ExchangeId, peer: &Arc<str>) {
        let Some(all) = self.ended.get_mut(&id) else { return };
        let Some(place) = all.iter().position(|ended| ended.peer == *peer) else { return };
        let ended = all.swap_remove(place);
        if !all.iter().any(|other| other.until == ended.until) {
            self.deadlines.remove(&(ended.until, id));
        }
        if all.is_empty() {
            self.ended.remove(&id);
        }
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.ended -= 1;
        }
    }

    /// Takes an exchange out of all that knows it.
    fn remove(&mut self, id: ExchangeId) -> Option<Exchange> {
        self.unindex(id);
        let exchange = self.exchanges.remove(&id)?;
        self.deadlines.remove(&(exchange.deadline, id));
        self.count(&exchange.from, false);
        if let Some(to) = &exchange.to {
            self.count(to, false);
        }
        if let Some(account) = self.accounts.get_mut(&exchange.account) {
            account.exchanges -= 1;
        }
        self.keep(id, Entry::Forget);
        Some(exchange)
    }

    /// What this neighbour is to hear next, if it may hear anything now.
    pub(crate) fn next_record(&mut self, now: Duration, peer: &Arc<str>) -> Option<Record> {
        loop {
            let state = self.peers.get_mut(peer).filter(|state| state.is_open)?;
            if let Some(record) = state.words.pop_front() {
                return Some(record);
            }
            // What it may forget by now; it waits for that with its window.
            if let Some((id, part)) = state.news.first().copied() {
                let exchange = self.exchanges.get_mut(&id)?;
                let has_room = self.accounts.get(&exchange.account).is_some_and(Account::has_room);
                let news = exchange.half(part).news(has_room);
                self.reindex(id);
                match news {
                    Some((Upto { offset, is_whole }, again)) => {
                        return Some(Record::Held { id, part, upto: offset, is_whole, again });
                    }
                    None => continue,
                }
            }
            // Who has had least comes first: what is small is over soon, and what is large shares the rest.
            let is_turn = state.turns + 1 >= FOR_THE_OLDEST;
            let first = if is_turn { &state.oldest } else { &state.least }.first().copied();
            let Some((_, id, part)) = first else {
                state.is_quiet = true;
                return None;
            };
            let exchange = self.exchanges.get_mut(&id)?;
            let is_news = part == Part::Request && exchange.request.held() == Upto::default();
            if is_news && !std::mem::replace(&mut exchange.is_begun, true) {
                let left = exchange.deadline.saturating_sub(now);
                return Some(Record::Begin { id, left: u64::try_from(left.as_millis()).unwrap_or(u64::MAX >> 2) });
            }
            if state.in_flight >= state.pace.window() {
                state.is_quiet = true;
                return None;
            }
            let next = exchange.half(part).send(CHUNK);
            state.turns = if is_turn { 0 } else { state.turns + 1 };
            let record = match next {
                Some(Next::Bytes { offset, bytes, is_last }) => {
                    state.pace.sent(now, bytes.len() as u64);
                    Some(Record::Data { id, part, offset, is_last, bytes })
                }
                Some(Next::Away { offset, length }) => {
                    self.out.push_back(Output::Read { id, part, offset, length: length.min(LOAD) });
                    None
                }
                None => None,
            };
            self.reindex(id);
            if record.is_some() {
                return record;
            }
        }
    }

    /// When time alone changes something next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Ends what has had its time.
    pub(crate) fn expire(&mut self, now: Duration) {
        while let Some((at, id)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            if self.exchanges.contains_key(&id) {
                self.fail(id, 504, "its time is over, and no path was there for long enough");
            }
            // Who has not heard of it by now knows its deadline as well as we do.
            for ended in self.ended.remove(&id).into_iter().flatten() {
                self.deadlines.remove(&(ended.until, id));
                if let Some(peer) = self.peers.get_mut(&ended.peer) {
                    peer.ended -= 1;
                }
            }
        }
    }
}
