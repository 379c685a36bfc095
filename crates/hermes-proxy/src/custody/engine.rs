//! The exchanges that a node has in custody, and who is to get what of them next.
//!
//! In: bytes of local clients and origins, records of neighbours, what is safe by now, channels that come and go, time.
//! Out: records for each neighbour when it may have one, bytes for those who are here, what is to be written, and what has
//! come to nothing. Pure: no I/O, no clock, no chance. Bounded by what its limits say.
//!
//! Each exchange has a side that it came from and one that it goes to; its request goes the one way, its response the
//! other. Where the next one holds a half, it is its own: this node forgets it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part, Record};

use super::half::{Half, Upto};
use super::pace::Pace;

/// Bytes in one record: small ones behind a large one wait for so much.
const CHUNK: usize = 16 << 10;
/// Of so many chunks one is the oldest exchange's, whoever else is ahead.
const FOR_THE_OLDEST: u32 = 8;

/// One side of an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// A client or an origin of this node.
    Here,
    /// A neighbour, by its name.
    Peer(Arc<str>),
}

/// What is to be done by others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// A neighbour has begun an exchange that was not known: where it goes is to be said by [`Engine::lead`].
    Begun { id: ExchangeId, left: Duration },
    /// These bytes are to be made safe, and [`Engine::is_safe`] told of it.
    Write { id: ExchangeId, part: Part, offset: u64, bytes: Bytes, is_last: bool },
    /// For who is here.
    Deliver { id: ExchangeId, part: Part, bytes: Bytes, is_last: bool },
    /// It has come to nothing: its client is to be told.
    Failed { id: ExchangeId, status: u16, reason: String },
    /// There is nothing left to be done for it.
    Forget { id: ExchangeId },
}

/// What one node may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Exchanges at once.
    pub(crate) exchanges: usize,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
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
    /// The next one has heard of it, over the channel that is there.
    is_begun: bool,
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
        part == Part::Request && self.response.have().is_whole
    }

    /// Where it comes from.
    fn source(&self, part: Part) -> Option<&Side> {
        match part {
            Part::Request => Some(&self.from),
            Part::Response => self.to.as_ref(),
        }
    }
}

const PARTS: [Part; 2] = [Part::Request, Part::Response];

/// A neighbour.
#[derive(Debug, Default)]
struct Peer {
    is_open: bool,
    pace: Pace,
    /// What is not about bytes, to be said first.
    words: VecDeque<Record>,
    /// Chunks since the oldest exchange had its turn.
    turns: u32,
}

/// The exchanges of a node.
#[derive(Debug)]
pub(crate) struct Engine {
    limits: Limits,
    exchanges: BTreeMap<ExchangeId, Exchange>,
    /// What has ended, and whom it was with: who has not heard of it is told again, until its time is over.
    ended: BTreeMap<ExchangeId, Ended>,
    peers: HashMap<Arc<str>, Peer>,
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
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            exchanges: BTreeMap::new(),
            ended: BTreeMap::new(),
            peers: HashMap::new(),
            out: VecDeque::new(),
            next: 0,
        }
    }

    /// What is to be done next.
    pub(crate) fn output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Bytes that are held.
    pub(crate) fn kept(&self) -> u64 {
        self.exchanges.values().map(|exchange| exchange.request.kept() + exchange.response.kept()).sum()
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
    ) -> Result<(), &'static str> {
        self.add(id, Side::Here, Some(to), now + left)
    }

    fn add(&mut self, id: ExchangeId, from: Side, to: Option<Side>, deadline: Duration) -> Result<(), &'static str> {
        if self.exchanges.len() >= self.limits.exchanges {
            return Err("this node holds as many exchanges as it may");
        }
        let number = self.next;
        self.next += 1;
        let (request, response) = (Half::default(), Half::default());
        let exchange = Exchange { number, from, to, request, response, deadline, is_begun: false };
        self.exchanges.insert(id, exchange);
        Ok(())
    }

    /// An exchange that a neighbour began goes there.
    pub(crate) fn lead(&mut self, id: ExchangeId, to: Side) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.to = Some(to);
            self.deliver(id, Part::Request);
        }
    }

    /// Bytes of a client or an origin that is here. False where the exchange is over, or there is no room: then they are
    /// to be brought again.
    pub(crate) fn append(&mut self, id: ExchangeId, part: Part, bytes: Bytes, is_last: bool) -> bool {
        if self.kept() + bytes.len() as u64 > self.limits.bytes {
            return false;
        }
        let Some(exchange) = self.exchanges.get_mut(&id) else { return false };
        let at = exchange.half(part).have().offset;
        self.take(id, part, at, bytes, is_last);
        true
    }

    fn take(&mut self, id: ExchangeId, part: Part, offset: u64, bytes: Bytes, is_last: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if let Some((offset, bytes)) = exchange.half(part).take(offset, bytes, is_last) {
            self.out.push_back(Output::Write { id, part, offset, bytes, is_last });
            self.deliver(id, part);
        }
    }

    /// Hands over what is for who is here.
    fn deliver(&mut self, id: ExchangeId, part: Part) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        if exchange.sink(part) != Some(&Side::Here) {
            return;
        }
        while let Some((_, bytes, is_last)) = exchange.half(part).send(usize::MAX) {
            self.out.push_back(Output::Deliver { id, part, bytes, is_last });
        }
    }

    /// Who is here has taken so much of what was delivered.
    pub(crate) fn delivered(&mut self, id: ExchangeId, part: Part, offset: u64, is_whole: bool) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.half(part).set_held(Upto { offset, is_whole });
            self.end_if_over(id);
        }
    }

    /// So much of a half survives this process.
    pub(crate) fn is_safe(&mut self, id: ExchangeId, part: Part, offset: u64, is_whole: bool) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.half(part).set_safe(Upto { offset, is_whole });
        }
    }

    /// A channel to a neighbour is there: what was under way over the one before is lost.
    pub(crate) fn opened(&mut self, peer: &Arc<str>) {
        let state = self.peers.entry(peer.clone()).or_default();
        state.is_open = true;
        state.pace.begin();
        // Said again where it still has to be.
        state.words.clear();
        state.words.extend(self.ended.values().filter(|ended| ended.peer == *peer).map(|ended| ended.record.clone()));
        let side = Side::Peer(peer.clone());
        for exchange in self.exchanges.values_mut() {
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
        }
    }

    /// It is gone.
    pub(crate) fn closed(&mut self, peer: &Arc<str>) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.is_open = false;
        }
    }

    /// Something is to be said to this neighbour: a channel is wanted.
    pub(crate) fn wants(&self, peer: &Arc<str>) -> bool {
        let side = Side::Peer(peer.clone());
        let is_party = |exchange: &Exchange| exchange.from == side || exchange.to.as_ref() == Some(&side);
        self.exchanges.values().any(is_party) || self.ended.values().any(|ended| ended.peer == *peer)
    }

    /// A neighbour says something.
    pub(crate) fn hear(&mut self, now: Duration, peer: &Arc<str>, record: Record) {
        let side = Side::Peer(peer.clone());
        match record {
            Record::Begin { id, left } => {
                if self.exchanges.contains_key(&id) || self.ended.contains_key(&id) {
                    return;
                }
                let left = Duration::from_millis(left);
                match self.add(id, side, None, now + left) {
                    Ok(()) => self.out.push_back(Output::Begun { id, left }),
                    Err(reason) => self.say(peer, Record::Gone { id, status: 503, reason: reason.to_owned() }),
                }
            }
            Record::Data { id, part, offset, is_last, bytes } => {
                let comes_from = |exchange: &Exchange| exchange.source(part) == Some(&side);
                if !self.exchanges.get(&id).is_some_and(comes_from) {
                    self.unknown(peer, id);
                } else if self.kept() + bytes.len() as u64 <= self.limits.bytes {
                    self.take(id, part, offset, bytes, is_last);
                } else if let Some(exchange) = self.exchanges.get_mut(&id) {
                    exchange.half(part).refuse();
                }
            }
            Record::Held { id, part, upto, is_whole, again } => {
                let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.sink(part) == Some(&side))
                else {
                    return self.unknown(peer, id);
                };
                let is_from_here = exchange.source(part) == Some(&Side::Here);
                let half = exchange.half(part);
                let before = half.held().offset;
                if is_from_here && upto > half.have().offset {
                    return self.fail(id, 502, &format!("{peer} holds more of it than there was"));
                }
                half.set_held(Upto { offset: upto, is_whole });
                if again {
                    half.rewind();
                }
                let more = half.held().offset - before;
                if more > 0
                    && let Some(peer) = self.peers.get_mut(peer)
                {
                    peer.pace.held(now, more);
                }
                self.end_if_over(id);
            }
            Record::Gone { id, status, reason } => {
                self.say(peer, Record::Done { id });
                let Some(exchange) = self.exchanges.get(&id) else { return };
                if exchange.from == side || exchange.to.as_ref() == Some(&side) {
                    self.end(id, &side, Record::Gone { id, status, reason });
                }
            }
            Record::Done { id } => {
                if self.ended.get(&id).is_some_and(|ended| ended.peer == *peer) {
                    self.ended.remove(&id);
                }
                let Some(exchange) = self.exchanges.get_mut(&id) else { return };
                if exchange.to.as_ref() == Some(&side) && exchange.response.have().is_whole {
                    exchange.to = None;
                } else if exchange.to.as_ref() == Some(&side) {
                    self.fail(id, 502, &format!("{peer} has lost it"));
                } else if exchange.from == side {
                    let reason = format!("{peer}, where it came from, no longer knows it");
                    self.end(id, &side, Record::Gone { id, status: 502, reason });
                }
            }
        }
    }

    /// A neighbour speaks of an exchange that is over here, or never was.
    fn unknown(&mut self, peer: &Arc<str>, id: ExchangeId) {
        let again = self.ended.get(&id).filter(|ended| ended.peer == *peer).map(|ended| ended.record.clone());
        self.say(peer, again.unwrap_or(Record::Done { id }));
    }

    fn say(&mut self, peer: &Arc<str>, record: Record) {
        let words = &mut self.peers.entry(peer.clone()).or_default().words;
        if !words.contains(&record) {
            words.push_back(record);
        }
    }

    /// Its client or its origin, who is here, has given up, or it cannot be led anywhere.
    pub(crate) fn fail(&mut self, id: ExchangeId, status: u16, reason: &str) {
        self.end(id, &Side::Here, Record::Gone { id, status, reason: reason.to_owned() });
    }

    /// It has come to nothing, as `by` says: the other side is told.
    fn end(&mut self, id: ExchangeId, by: &Side, record: Record) {
        let Some(exchange) = self.exchanges.remove(&id) else { return };
        for side in [Some(exchange.from), exchange.to].into_iter().flatten() {
            match side {
                Side::Here => {
                    if let Record::Gone { status, reason, .. } = &record {
                        self.out.push_back(Output::Failed { id, status: *status, reason: reason.clone() });
                    }
                }
                Side::Peer(peer) if *by != Side::Peer(peer.clone()) => {
                    self.say(&peer, record.clone());
                    self.ended.insert(id, Ended { peer, record: record.clone(), until: exchange.deadline });
                }
                Side::Peer(_) => {}
            }
        }
        self.out.push_back(Output::Forget { id });
    }

    /// Where whoever it came from has all of its response, nothing is left to be done. A neighbour that it went to still
    /// waits to hear that the response is held.
    fn end_if_over(&mut self, id: ExchangeId) {
        let is_over = |exchange: &&Exchange| exchange.response.is_over();
        let Some(exchange) = self.exchanges.get(&id).filter(is_over) else { return };
        let (upto, deadline) = (exchange.response.held().offset, exchange.deadline);
        if let Some(Side::Peer(peer)) = exchange.to.clone() {
            let record = Record::Held { id, part: Part::Response, upto, is_whole: true, again: false };
            self.say(&peer, record.clone());
            self.ended.insert(id, Ended { peer, record, until: deadline });
        }
        if let Some(Side::Peer(peer)) = self.exchanges.remove(&id).map(|exchange| exchange.from) {
            self.say(&peer, Record::Done { id });
        }
        self.out.push_back(Output::Forget { id });
    }

    /// What this neighbour is to hear next, if it may hear anything now.
    pub(crate) fn next_record(&mut self, now: Duration, peer: &Arc<str>) -> Option<Record> {
        let side = Side::Peer(peer.clone());
        // With a quarter to spare, or who is told to send again would be refused again.
        let has_room = self.kept() <= self.limits.bytes / 4 * 3;
        let state = self.peers.get_mut(peer).filter(|state| state.is_open)?;
        if let Some(record) = state.words.pop_front() {
            return Some(record);
        }
        // What it may forget by now; it waits for that with its window.
        for (id, exchange) in &mut self.exchanges {
            for part in PARTS {
                if exchange.source(part) == Some(&side)
                    && let Some((Upto { offset, is_whole }, again)) = exchange.half(part).news(has_room)
                {
                    return Some(Record::Held { id: *id, part, upto: offset, is_whole, again });
                }
            }
        }
        let goes_there = |exchange: &Exchange, part| exchange.sink(part) == Some(&side);
        let of_all = self.exchanges.iter_mut().flat_map(|(id, exchange)| PARTS.map(|part| (*id, part, &*exchange)));
        let mut in_flight = 0;
        // By what is to be the least.
        type First = Option<(u64, ExchangeId, Part)>;
        let (mut least, mut oldest): (First, First) = (None, None);
        for (id, part, exchange) in of_all.filter(|(_, part, exchange)| goes_there(exchange, *part)) {
            let half = if part == Part::Request { &exchange.request } else { &exchange.response };
            in_flight += half.in_flight();
            if half.has_unsent() && !exchange.is_answered(part) {
                // Who has had least comes first: what is small is over soon, and what is large shares the rest.
                least = least.min_some((half.sent(), id, part));
                oldest = oldest.min_some((exchange.number, id, part));
            }
        }
        let is_turn = state.turns + 1 >= FOR_THE_OLDEST;
        let (_, id, part) = if is_turn { oldest } else { least }?;
        let exchange = self.exchanges.get_mut(&id)?;
        let is_news = part == Part::Request && exchange.request.held() == Upto::default();
        if is_news && !std::mem::replace(&mut exchange.is_begun, true) {
            let left = exchange.deadline.saturating_sub(now);
            return Some(Record::Begin { id, left: u64::try_from(left.as_millis()).unwrap_or(u64::MAX >> 2) });
        }
        if in_flight >= state.pace.window() {
            return None;
        }
        let (offset, bytes, is_last) = exchange.half(part).send(CHUNK)?;
        state.turns = if is_turn { 0 } else { state.turns + 1 };
        state.pace.sent(now, bytes.len() as u64);
        Some(Record::Data { id, part, offset, is_last, bytes })
    }

    /// When time alone changes something next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let exchanges = self.exchanges.values().map(|exchange| exchange.deadline);
        exchanges.chain(self.ended.values().map(|ended| ended.until)).min()
    }

    /// Ends what has had its time.
    pub(crate) fn expire(&mut self, now: Duration) {
        let late = |exchange: &Exchange| exchange.deadline <= now;
        let over: Vec<_> = self.exchanges.iter().filter(|(_, one)| late(one)).map(|(id, _)| *id).collect();
        for id in over {
            self.fail(id, 504, "its time is over, and no path was there for long enough");
        }
        self.ended.retain(|_, ended| ended.until > now);
    }
}

/// The lesser of two, of which one may not be there.
trait Least<T> {
    fn min_some(self, other: T) -> Self;
}

impl<T: Ord> Least<T> for Option<T>
where
    T: Copy,
{
    fn min_some(self, other: T) -> Self {
        Some(self.map_or(other, |own| own.min(other)))
    }
}
