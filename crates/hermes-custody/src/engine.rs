//! The state machine of custody: the exchanges that a node stores, and which bytes each side receives next.
//!
//! In: bytes of local clients and origins, records of neighbours, offsets that became durable, channels that open and
//! close, time. Out: records for each neighbour, bytes for local readers, entries for the journal, failures. Pure: no
//! I/O, no clock, no randomness. Accounts bound what the engine stores. The cost of one record does not grow with the
//! number of exchanges.
//!
//! Each exchange comes from one side and goes to another. Its request flows from the first side to the second, and its
//! response back. Once the next node has acknowledged bytes, that node is responsible for them, and this node forgets
//! them.

mod completion;
mod disk;
mod exchange;
mod index;
mod local;
mod neighbour;
mod quota;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId, Record};

pub(crate) use self::exchange::{Appended, Durability, Entry, Limits, Output, RestoredStream, Side};
use self::exchange::{Exchange, PARTS};
use self::index::{Indexed, Peer};
use self::local::HeldUp;
pub use self::neighbour::BY;
pub(crate) use self::neighbour::MAX_CUSTODY_TIME;
use self::quota::Account;
use super::stream_state::{Progress, RECORD, StreamState};

/// Length of the data in one record, in bytes. Small exchanges wait for at most this much data of a large exchange.
const CHUNK: usize = RECORD as usize;

/// The exchanges of a node.
#[derive(Debug)]
pub(crate) struct Engine {
    exchanges: HashMap<ExchangeId, Exchange>,
    /// Ended exchanges, and the neighbours that must be informed of the end. The engine repeats the record to a
    /// neighbour that has not confirmed it, until the deadline.
    ended: HashMap<ExchangeId, Vec<Ended>>,
    accounts: HashMap<Arc<str>, Account>,
    peers: HashMap<Arc<str>, Peer>,
    /// Deadlines of exchanges and of entries in `ended`.
    deadlines: BTreeSet<(Duration, ExchangeId)>,
    /// Local producers that are waiting, because they are far ahead of what their path accepts.
    held_up: BTreeMap<(ExchangeId, Direction), HeldUp>,
    /// Neighbours that may forget an exchange once its end is in the journal. If a neighbour forgot it earlier, it
    /// would accept the exchange as new when this node, restarted, offers it again.
    farewells: HashMap<ExchangeId, Arc<str>>,
    /// Disk space available to each account, in bytes, whatever its own limit is.
    disk_there: u64,
    is_stuck: bool,
    out: VecDeque<Output>,
    next: u64,
    /// The number of exchanges of neighbours that found no free slot since [`Engine::take_refused`].
    refused: u64,
}

/// An exchange that has ended on this node, but perhaps not on a neighbour.
#[derive(Debug)]
struct Ended {
    peer: Arc<str>,
    record: Record,
    until: Duration,
    /// The exchange may have been executed and must not run again, even if the neighbour has confirmed its end.
    is_order: bool,
    /// Sequence number in the order of ending.
    number: u64,
}

impl Engine {
    pub(crate) fn new() -> Self {
        Self {
            exchanges: HashMap::new(),
            ended: HashMap::new(),
            accounts: HashMap::new(),
            peers: HashMap::new(),
            deadlines: BTreeSet::new(),
            held_up: BTreeMap::new(),
            farewells: HashMap::new(),
            disk_there: u64::MAX,
            is_stuck: false,
            out: VecDeque::new(),
            next: 0,
            refused: 0,
        }
    }

    /// Returns the number of exchanges of neighbours that found no free slot since the last call.
    pub(crate) fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Sets the limits of an account. Bytes that it already stores stay, even above the new limits.
    pub(crate) fn allow(&mut self, account: &Arc<str>, limits: Limits) {
        let state = self.accounts.entry(account.clone()).or_default();
        (state.limits, state.disk_there, state.is_stuck) = (limits, self.disk_there, self.is_stuck);
        self.tell_room(account);
    }

    /// Returns the next action for the caller. `None`: there is nothing to do.
    pub(crate) fn output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Returns the number of stored bytes in memory, and of those on disk.
    pub(crate) fn kept(&self) -> (u64, u64) {
        self.accounts.values().fold((0, 0), |(memory, disk), one| (memory + one.memory, disk + one.disk))
    }

    /// Returns the number of exchanges.
    pub(crate) fn len(&self) -> usize {
        self.exchanges.len()
    }

    fn keep(&mut self, id: ExchangeId, entry: Entry) {
        let survives = self.survives(id);
        self.out.push_back(Output::Keep { id, entry, survives });
    }

    /// Returns which failures the acknowledged bytes of this exchange survive.
    pub(crate) fn survives(&self, id: ExchangeId) -> Durability {
        self.exchanges.get(&id).map(|exchange| exchange.survives).unwrap_or_default()
    }

    /// Returns the time since the exchange arrived. The result is meaningless for a tunnel, whose deadline moves.
    pub(crate) fn age(&self, now: Duration, id: ExchangeId) -> Option<Duration> {
        let exchange = self.exchanges.get(&id)?;
        Some((now + exchange.life).saturating_sub(exchange.deadline))
    }

    /// Returns the account whose quota the exchange uses.
    pub(crate) fn account(&self, id: ExchangeId) -> Option<&Arc<str>> {
        self.exchanges.get(&id).map(|exchange| &exchange.account)
    }

    /// Returns how much of one direction was received.
    pub(crate) fn have(&self, id: ExchangeId, part: Direction) -> Option<Progress> {
        self.half(id, part).map(StreamState::have)
    }

    /// Whether the beginning of a direction was deleted, so that nobody can read it from the start.
    pub(crate) fn is_torn(&self, id: ExchangeId, part: Direction) -> bool {
        self.half(id, part).is_some_and(StreamState::is_torn)
    }

    /// Returns the length, in bytes, of the head that this node wrote for a direction.
    pub(crate) fn head_length(&self, id: ExchangeId, part: Direction) -> Option<u64> {
        self.half(id, part).map(StreamState::head_length)
    }

    fn half(&self, id: ExchangeId, part: Direction) -> Option<&StreamState> {
        self.exchanges.get(&id).map(|exchange| exchange.half_of(part))
    }

    /// Whether the response waits for the head that this node writes.
    pub(crate) fn awaits_head(&self, id: ExchangeId) -> bool {
        self.exchanges.get(&id).is_some_and(|exchange| exchange.response.awaits_head())
    }

    /// Whether the exchange is forwarded to another node.
    pub(crate) fn is_led(&self, id: ExchangeId) -> bool {
        self.exchanges.get(&id).is_some_and(|exchange| matches!(exchange.to, Some(Side::Peer(_))))
    }

    /// Whether the exchange ends at this node.
    pub(crate) fn is_for_here(&self, id: ExchangeId) -> bool {
        self.exchanges.get(&id).is_some_and(|exchange| exchange.to == Some(Side::Here))
    }

    /// Takes custody of an exchange that a local client begins.
    ///
    /// # Errors
    ///
    /// The account has its maximum number of exchanges.
    pub(crate) fn begin(
        &mut self,
        now: Duration,
        id: ExchangeId,
        to: Side,
        left: Duration,
        (account, owner): (&Arc<str>, &Arc<str>),
        is_tunnel: bool,
    ) -> Result<(), &'static str> {
        self.add(id, Side::Here, StreamState::default(), (now, left), account, owner)?;
        self.go(id, to, account, is_tunnel);
        Ok(())
    }

    /// Adds an exchange.
    ///
    /// # Errors
    ///
    /// The account has its maximum number of exchanges.
    fn add(
        &mut self,
        id: ExchangeId,
        from: Side,
        request: StreamState,
        (now, left): (Duration, Duration),
        account: &Arc<str>,
        owner: &Arc<str>,
    ) -> Result<(), &'static str> {
        let state = self.accounts.entry(account.clone()).or_default();
        if !state.takes_exchange(owner) {
            return Err("limit of exchanges in custody reached for this node, neighbour or user");
        }
        self.insert(id, from.clone(), request, (now, left), account, owner);
        let entry = Entry::Begin { from, account: account.clone(), deadline: now + left, life: left };
        self.keep(id, entry);
        Ok(())
    }

    fn insert(
        &mut self,
        id: ExchangeId,
        from: Side,
        request: StreamState,
        (now, left): (Duration, Duration),
        account: &Arc<str>,
        owner: &Arc<str>,
    ) {
        let state = self.accounts.entry(account.clone()).or_default();
        state.add_exchange(owner);
        let survives = state.limits.survives;
        let number = self.next;
        self.next += 1;
        self.enter(id, &from);
        let deadline = now + left;
        self.deadlines.insert((deadline, id));
        let exchange = Exchange {
            number,
            from,
            to: None,
            request,
            response: StreamState::default(),
            deadline,
            account: account.clone(),
            owner: owner.clone(),
            is_tunnel: false,
            life: left,
            is_begun: false,
            is_known: false,
            is_restored: false,
            is_vouched: true,
            is_intended: false,
            survives,
            is_refused: false,
            indexed: <[Indexed; 2]>::default(),
        };
        self.exchanges.insert(id, exchange);
    }

    /// Restores an exchange from the journal, even if that exceeds the present limits. The request continues to the
    /// side that it was assigned to.
    pub(crate) fn restore(
        &mut self,
        id: ExchangeId,
        (from, to): (Side, Side),
        (now, left, life): (Duration, Duration, Duration),
        account: &Arc<str>,
        is_tunnel: bool,
        [request, response]: [RestoredStream; 2],
    ) {
        // If both sides are neighbours, this node writes a response head of its own.
        let has_head = matches!((&from, &to), (Side::Peer(_), Side::Peer(_)));
        let is_vouched = from == Side::Here;
        let owner = from.peer().map_or_else(|| Arc::from(""), neighbour::owner_of);
        self.insert(id, from, request.half(false), (now, left), account, &owner);
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.response = response.half(has_head);
            exchange.to = Some(to.clone());
            (exchange.is_tunnel, exchange.life) = (is_tunnel, life);
            (exchange.is_restored, exchange.is_vouched) = (true, is_vouched);
            if exchange.survives == Durability::Nothing {
                exchange.survives = Durability::Process;
            }
            exchange.is_known = true;
            for part in PARTS {
                let comes = matches!(exchange.source(part), Some(Side::Peer(_))) && !exchange.is_answered(part);
                let is_next_here = exchange.sink(part) == Some(&Side::Here);
                if comes {
                    exchange.half(part).resume(is_next_here);
                }
            }
        }
        self.enter(id, &to);
        self.reindex(id);
    }

    /// Marks an exchange whose request goes, or may have gone, to an origin that must not receive it twice.
    pub(crate) fn intend(&mut self, id: ExchangeId) {
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.is_intended = true;
        }
    }

    /// Restores the failed end of an exchange that must not run again.
    pub(crate) fn restore_end(&mut self, id: ExchangeId, peer: Arc<str>, record: Record, until: Duration) {
        self.remember_ended(id, peer, record, until, true);
    }

    /// Deletes an exchange from the journal instead of restoring it.
    pub(crate) fn discard(&mut self, id: ExchangeId) {
        self.keep(id, Entry::Forget);
    }

    /// Records that a neighbour takes part in an exchange.
    fn enter(&mut self, id: ExchangeId, side: &Side) {
        let Some(name) = side.peer() else { return };
        let peer = self.peers.entry(name.clone()).or_default();
        peer.exchanges.insert(id);
        // A neighbour needs a channel from its first exchange on.
        if peer.exchanges.len() == 1 {
            self.out.push_back(Output::Stir(name.clone()));
        }
    }

    /// Reverts [`Engine::enter`].
    fn leave(&mut self, id: ExchangeId, side: &Side) {
        if let Some(peer) = side.peer().and_then(|name| self.peers.get_mut(name)) {
            peer.exchanges.remove(&id);
        }
    }

    fn go(&mut self, id: ExchangeId, to: Side, account: &Arc<str>, is_tunnel: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else { return };
        exchange.to = Some(to.clone());
        exchange.is_tunnel = is_tunnel;
        if exchange.account != *account {
            exchange.survives = self.accounts.get(account).map(|its| its.limits.survives).unwrap_or_default();
            let before = std::mem::replace(&mut exchange.account, account.clone());
            quota::move_account(&mut self.accounts, exchange, &before);
            if let Some(old) = self.accounts.get_mut(&before) {
                old.lacking.remove(&id);
            }
            self.tell_room(&before);
        }
        let entry = Entry::Lead { to: to.clone(), account: account.clone(), is_tunnel };
        self.keep(id, entry);
        self.enter(id, &to);
    }

    /// Assigns an exchange that a neighbour began to this node: a local endpoint reads its request as it arrived.
    pub(crate) fn accept_local(&mut self, id: ExchangeId, account: &Arc<str>, is_tunnel: bool) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else { return };
        let had = exchange.request.have();
        self.go(id, Side::Here, account, is_tunnel);
        self.settle_as(id, Direction::Request, 0, Bytes::new(), had.is_whole);
    }

    /// Forwards an exchange that a neighbour began. `head` replaces the first `theirs` bytes of the request. The
    /// response waits for its own head in the same way. If the route's account has no room for the bytes that arrived
    /// meanwhile, the exchange stays unassigned.
    pub(crate) fn lead(
        &mut self,
        id: ExchangeId,
        (to, is_tunnel): (Side, bool),
        account: &Arc<str>,
        theirs: u64,
        head: Bytes,
    ) -> Appended {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.to.is_none()) else {
            return Appended::Gone;
        };
        let bytes = usize::try_from(exchange.request.kept()).unwrap_or(usize::MAX);
        if exchange.account != *account {
            // The request has at most `EARLY` bytes by now, and each route has room for those.
            let Some(its) = self.accounts.get_mut(account).filter(|its| its.takes_exchange(&exchange.owner)) else {
                self.fail(id, 503, "limit of exchanges in custody reached for this route");
                return Appended::Gone;
            };
            if !its.takes_at_all(bytes) {
                its.has_refused = true;
                return Appended::Full;
            }
        }
        exchange.response = StreamState::awaiting_head();
        self.go(id, to, account, is_tunnel);
        self.settle(id, Direction::Request, theirs, head);
        Appended::Taken
    }

    /// Sets the head of a direction: `head` replaces the first `theirs` bytes.
    pub(crate) fn settle(&mut self, id: ExchangeId, part: Direction, theirs: u64, head: Bytes) {
        let Some(exchange) = self.exchanges.get_mut(&id) else { return };
        let is_whole = exchange.half(part).have().is_whole;
        self.settle_as(id, part, theirs, head, is_whole);
    }

    fn settle_as(&mut self, id: ExchangeId, part: Direction, theirs: u64, head: Bytes, is_whole: bool) {
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

    fn take(&mut self, id: ExchangeId, part: Direction, offset: u64, bytes: Bytes, is_last: bool) {
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
        self.make_room(id);
    }

    /// Extends the deadline of a tunnel when it makes progress. Small extensions are skipped, because updating the
    /// deadline at each step costs too much.
    fn renew(&mut self, now: Duration, id: ExchangeId) {
        let Some(exchange) = self.exchanges.get_mut(&id).filter(|exchange| exchange.is_tunnel) else { return };
        let deadline = now + exchange.life;
        if deadline - exchange.deadline.min(deadline) > exchange.life / 8 {
            self.deadlines.remove(&(exchange.deadline, id));
            self.deadlines.insert((deadline, id));
            exchange.deadline = deadline;
        }
    }
}
