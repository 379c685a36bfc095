//! The protocol with neighbours.
//!
//! In: records, and channels that open and close. Out: one record at a time: first control records, then
//! acknowledgements that let the neighbour forget bytes, then data, as much as the path takes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_wire::custody::{AckReason, Direction, ExchangeId, Record};

use super::super::OUTCOME_UNKNOWN;
use super::super::stream_state::{Next, Progress, StreamState};
use super::quota::Account;
use super::{CHUNK, Engine, Exchange, Output, PARTS, Side};

/// The oldest exchange gets one in this number of chunks. The exchange with the fewest bytes sent gets the others.
const FOR_THE_OLDEST: u32 = 8;
/// Separator between the name of a neighbour that connects to this node and the name of its connection.
pub const BY: &str = " by ";
/// Maximum custody time that a neighbour may request.
pub(crate) const MAX_CUSTODY_TIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum number of control records that wait for one neighbour. Further ones are dropped, and the neighbour asks
/// again.
const MAX_WAITING_RECORDS: usize = 4096;
/// Maximum number of ends that wait for the disk before the neighbour that reported them may forget them. Beyond this
/// number the node confirms an end at once.
const MAX_UNCONFIRMED_ENDS: usize = 16 << 10;

/// Returns the name of the neighbour that owns a connection, without the name of the connection.
pub(super) fn owner_of(peer: &Arc<str>) -> Arc<str> {
    peer.split_once(BY).map_or_else(|| peer.clone(), |(node, _)| Arc::from(node))
}

impl Engine {
    /// Handles a new channel to a neighbour: everything in flight over the previous channel is lost.
    pub(crate) fn opened(&mut self, peer: &Arc<str>) {
        let side = Side::Peer(peer.clone());
        let state = self.peers.entry(peer.clone()).or_default();
        state.is_open = true;
        (state.may_lapse, state.closed_since) = (false, None);
        state.is_quiet = false;
        state.trouble = None;
        state.pace.begin();
        // Records that are still needed are queued again below.
        state.words.clear();
        for id in state.ended.values() {
            let ended = self.ended.get(id).into_iter().flatten().filter(|ended| ended.peer == *peer);
            state.words.extend(ended.map(|ended| ended.record.clone()));
        }
        let with: Vec<_> = state.exchanges.iter().copied().collect();
        for id in with {
            let Some(exchange) = self.exchanges.get_mut(&id) else { continue };
            for part in PARTS {
                if exchange.sink(part) == Some(&side) {
                    exchange.half(part).rewind();
                }
                if exchange.source(part) == Some(&side) {
                    exchange.half(part).forget_acks();
                }
            }
            if exchange.from == side && exchange.request.have() == Progress::default() {
                // The neighbour may have lost the exchange before it sent any data. This node would never have bytes to
                // acknowledge, so it sends an empty acknowledgement.
                exchange.request.greet();
            }
            if exchange.to.as_ref() == Some(&side) {
                exchange.is_begun = false;
                // The neighbour may have lost its bytes of the request, or wait until this node confirms the exchange.
                // No other record would reveal that.
                if exchange.request.held() != Progress::default() {
                    exchange.response.greet();
                }
            }
            self.reindex(id);
        }
    }

    /// Handles a closed channel. Bytes read from disk for sending leave memory until the next channel.
    pub(crate) fn closed(&mut self, peer: &Arc<str>) {
        let Some(state) = self.peers.get_mut(peer) else { return };
        state.is_open = false;
        (state.may_lapse, state.closed_since) = (true, None);
        if state.is_idle() && state.through.is_empty() {
            self.peers.remove(peer);
            return;
        }
        let side = Side::Peer(peer.clone());
        let with: Vec<_> = state.exchanges.iter().copied().collect();
        for id in with {
            let Some(exchange) = self.exchanges.get_mut(&id) else { continue };
            let is_tight = self.accounts.get(&exchange.account).is_some_and(Account::is_tight);
            if is_tight && exchange.is_on_disk() {
                for part in PARTS.into_iter().filter(|part| exchange.sink(*part) == Some(&side)).collect::<Vec<_>>() {
                    exchange.half(part).rewind();
                    exchange.half(part).evict();
                }
            }
            self.reindex(id);
        }
    }

    /// Records the reason why there is no channel to a neighbour.
    pub(crate) fn is_troubled(&mut self, peer: &str, why: &str) {
        if let Some(state) = self.peers.get_mut(peer).filter(|state| state.trouble.as_deref() != Some(why)) {
            state.trouble = Some(Arc::from(why));
        }
    }

    /// Whether a channel to this neighbour is wanted, to send something or to receive it.
    pub(crate) fn wants(&self, peer: &str) -> bool {
        self.peers.get(peer).is_some_and(|peer| !peer.is_idle())
    }

    /// Returns the number of exchanges in which this neighbour takes part.
    pub(crate) fn waiting(&self, peer: &str) -> usize {
        self.peers.get(peer).map_or(0, |peer| peer.exchanges.len())
    }

    /// Handles a record of a neighbour. An exchange that it begins uses the quota of `account` until it is assigned.
    pub(crate) fn receive(&mut self, now: Duration, peer: &Arc<str>, record: Record, account: &Arc<str>) {
        let side = Side::Peer(peer.clone());
        if let Record::Begin { id, .. } | Record::Data { id, .. } | Record::Held { id, .. } = record {
            self.vouch(id, &side);
        }
        match record {
            Record::Begin { id, left } => self.hear_begin(now, peer, id, Duration::from_millis(left), account),
            Record::Data { id, part, offset, is_last, bytes } => {
                self.hear_data(now, peer, (id, part), offset, bytes, is_last);
            }
            Record::Held { id, part, upto, is_whole, behind } => {
                let goes_to = |exchange: &&mut Exchange| exchange.sink(part) == Some(&side);
                let Some(exchange) = self.exchanges.get_mut(&id).filter(goes_to) else {
                    return self.unknown(peer, id);
                };
                // A killed process may have sent more bytes than the journal has. If a local origin produced them, the
                // origin is asked again, so only an acknowledgement of the complete response counts.
                let may_have_lost = exchange.is_restored && (is_whole || exchange.source(part) != Some(&Side::Here));
                let is_silent =
                    part == Direction::Request && !exchange.is_begun && exchange.request.held() == Progress::default();
                let half = exchange.half(part);
                let before = half.held().offset;
                if half.awaits_head() && upto == 0 && !is_whole {
                    // The neighbour acknowledges nothing of a direction that this node has not begun to send.
                    return;
                }
                if half.awaits_head() || (!may_have_lost && upto > half.have().offset) {
                    return self.fail(id, 502, &format!("{peer} acknowledged more bytes than were sent"));
                }
                if behind == AckReason::Again && half.has_gone(upto, is_whole) {
                    // The disk was full. The neighbour acknowledged bytes that its origin or client had read, but did
                    // not store all of them.
                    let reason =
                        format!("{OUTCOME_UNKNOWN}: {peer} was restarted and has lost bytes that it had acknowledged");
                    return self.fail(id, 502, &reason);
                }
                half.set_held(Progress { offset: upto, is_whole });
                let more = half.held().offset - before;
                match behind {
                    AckReason::Taken => {}
                    AckReason::NoRoom => half.wait(),
                    AckReason::Again => half.rewind(),
                }
                let pace = &mut self.peers.entry(peer.clone()).or_default().pace;
                if more > 0 {
                    pace.held(now, more);
                }
                if behind != AckReason::Taken {
                    // Data in flight will never be acknowledged.
                    pace.begin();
                }
                if more > 0 {
                    self.renew(now, id);
                }
                if is_silent
                    && let Some(exchange) = self.exchanges.get_mut(&id)
                    && exchange.request.held() != Progress::default()
                {
                    // The neighbour sent a record first, and may wait until this node confirms the exchange. This node
                    // may have nothing else to send.
                    exchange.response.greet();
                }
                self.reindex(id);
                self.end_if_over(id);
            }
            Record::Gone { id, status, reason } => self.hear_gone(peer, id, status, reason),
            Record::Done { id } => {
                self.has_heard(id, peer);
                let Some(exchange) = self.exchanges.get_mut(&id) else { return };
                if exchange.to.as_ref() == Some(&side) && exchange.response.have().is_whole {
                    self.go_on_alone(id, &side);
                } else if exchange.to.as_ref() == Some(&side) {
                    self.fail(id, 502, &format!("{peer} has lost the exchange"));
                } else if exchange.from == side {
                    let reason = format!("the previous node {peer} no longer has the exchange");
                    self.end(id, &side, Record::Gone { id, status: 502, reason });
                }
            }
        }
    }

    fn hear_data(
        &mut self,
        now: Duration,
        peer: &Arc<str>,
        (id, part): (ExchangeId, Direction),
        offset: u64,
        bytes: Bytes,
        is_last: bool,
    ) {
        let side = Side::Peer(peer.clone());
        let comes_from = |exchange: &&mut Exchange| exchange.source(part) == Some(&side);
        let Some(exchange) = self.exchanges.get_mut(&id).filter(comes_from) else {
            return self.unknown(peer, id);
        };
        let used = exchange.indexed[part.index()];
        let account = self.accounts.get(&exchange.account).filter(|_| !exchange.is_early(part, bytes.len()));
        if account.is_some_and(|account| account.takes(bytes.len(), part, &used)) {
            self.take(id, part, offset, bytes, is_last);
            self.renew(now, id);
        } else {
            if !exchange.half(part).has_gap() {
                self.out.push_back(Output::Scarce(exchange.account.clone()));
            }
            exchange.half(part).refuse();
            self.reindex(id);
        }
    }

    fn hear_gone(&mut self, peer: &Arc<str>, id: ExchangeId, status: u16, reason: String) {
        let side = Side::Peer(peer.clone());
        let Some(exchange) = self.exchanges.get(&id).filter(|exchange| exchange.is_with(&side)) else {
            // The neighbour repeats the end over another channel while the first report still waits for the disk.
            if self.farewells.get(&id) != Some(peer) {
                self.queue_record(peer, Record::Done { id });
            }
            return;
        };
        if exchange.is_on_disk() && exchange.from != side && self.farewells.len() < MAX_UNCONFIRMED_ENDS {
            self.farewells.insert(id, peer.clone());
        } else {
            self.queue_record(peer, Record::Done { id });
        }
        let Some(exchange) = self.exchanges.get(&id) else { return };
        if exchange.to.as_ref() == Some(&side) && exchange.is_answered(Direction::Request) {
            // The response is complete, so a later failure at the neighbour is irrelevant.
            return self.go_on_alone(id, &side);
        }
        let (is_first, until) = (exchange.from == side && !exchange.is_intended, exchange.deadline);
        self.end(id, &side, Record::Gone { id, status, reason });
        if is_first {
            // The neighbour may be killed before it has written the end, and would begin the exchange again.
            self.remember_ended(id, peer.clone(), Record::Done { id }, until, false);
        }
    }

    /// Confirms an exchange, because its previous side has sent a record about it.
    fn vouch(&mut self, id: ExchangeId, side: &Side) {
        if let Some(exchange) = self.exchanges.get_mut(&id).filter(|one| !one.is_vouched && one.from == *side) {
            exchange.is_vouched = true;
            self.reindex(id);
        }
    }

    /// Detaches the next node from an exchange whose complete response is stored on this node.
    fn go_on_alone(&mut self, id: ExchangeId, next: &Side) {
        self.unindex(id);
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            exchange.to = None;
            // A node that has forgotten the exchange had received its whole request.
            let have = exchange.request.have();
            exchange.request.set_held(have);
        }
        self.leave(id, next);
        self.reindex(id);
        self.end_if_over(id);
    }

    pub(super) fn hear_begin(
        &mut self,
        now: Duration,
        peer: &Arc<str>,
        id: ExchangeId,
        left: Duration,
        account: &Arc<str>,
    ) {
        let side = Side::Peer(peer.clone());
        if let Some(exchange) = self.exchanges.get_mut(&id) {
            if exchange.from == side {
                // The neighbour may have forgotten the acknowledgements.
                exchange.request.forget_acks();
                return self.reindex(id);
            }
            let reason = "routing loop: the exchange returned to a node that already has it".to_owned();
            return self.queue_record(peer, Record::Gone { id, status: 508, reason });
        }
        if self.ended_for(id, peer).is_some() {
            return self.unknown(peer, id);
        }
        match self.add(
            id,
            side,
            StreamState::awaiting_head(),
            (now, left.min(MAX_CUSTODY_TIME)),
            account,
            &owner_of(peer),
        ) {
            Ok(()) => self.out.push_back(Output::Begun { id, peer: peer.clone() }),
            Err(reason) => {
                self.refused += 1;
                self.queue_record(peer, Record::Gone { id, status: 503, reason: reason.to_owned() });
            }
        }
    }

    /// Returns the record that reports an ended exchange to this neighbour.
    pub(super) fn ended_for(&self, id: ExchangeId, peer: &Arc<str>) -> Option<&Record> {
        self.ended.get(&id)?.iter().find(|ended| ended.peer == *peer).map(|ended| &ended.record)
    }

    /// Answers a neighbour's record about an exchange that has ended or never existed on this node.
    pub(super) fn unknown(&mut self, peer: &Arc<str>, id: ExchangeId) {
        let again = self.ended_for(id, peer).cloned();
        self.queue_record(peer, again.unwrap_or(Record::Done { id }));
    }

    pub(super) fn queue_record(&mut self, peer: &Arc<str>, record: Record) {
        let state = self.peers.entry(peer.clone()).or_default();
        if state.words.len() < MAX_WAITING_RECORDS {
            state.words.push_back(record);
            state.stir(peer, &mut self.out);
        }
    }

    /// Returns the next record for this neighbour, if one may be sent now. `window` limits the bytes in flight, if the
    /// link's capacity is known.
    pub(crate) fn next_record(&mut self, now: Duration, peer: &Arc<str>, window: Option<u64>) -> Option<Record> {
        loop {
            let state = self.peers.get_mut(peer).filter(|state| state.is_open)?;
            if let Some(record) = state.words.pop_front() {
                return Some(record);
            }
            // Acknowledgements come first, because the neighbour's window waits for them.
            if let Some((id, part)) = state.news.first().copied() {
                let exchange = self.exchanges.get_mut(&id)?;
                let account = self.accounts.get(&exchange.account);
                let used = exchange.indexed[part.index()];
                let is_stuck = account.is_some_and(|account| account.is_stuck);
                let has_room = !exchange.is_early(part, CHUNK)
                    && account.is_some_and(|account| account.has_room(part, &used, &used));
                let is_read_again = exchange.is_on_disk() && exchange.is_read_again(part) && !is_stuck;
                let news = exchange.half(part).news(has_room, is_read_again);
                self.reindex(id);
                match news {
                    Some((Progress { offset, is_whole }, behind)) => {
                        return Some(Record::Held { id, part, upto: offset, is_whole, behind });
                    }
                    None => continue,
                }
            }
            // The exchange with the fewest bytes sent goes first: small exchanges finish soon, and large exchanges
            // share the remaining capacity.
            let is_turn = state.turns + 1 >= FOR_THE_OLDEST;
            let first = if is_turn { &state.oldest } else { &state.least }.first().copied();
            let Some((_, id, part)) = first else {
                state.is_quiet = true;
                return None;
            };
            let exchange = self.exchanges.get_mut(&id)?;
            // If a response has begun, the next node knew the exchange and must not begin it again.
            if part == Direction::Request && !exchange.is_there() {
                (exchange.is_begun, exchange.is_known) = (true, true);
                let left = exchange.deadline.saturating_sub(now);
                // From now on, acknowledgements of the response may be sent to the neighbour.
                self.reindex(id);
                return Some(Record::Begin { id, left: u64::try_from(left.as_millis()).unwrap_or(u64::MAX >> 2) });
            }
            if state.in_flight + state.loading >= window.unwrap_or_else(|| state.pace.window()) {
                state.is_quiet = true;
                return None;
            }
            let next = exchange.half(part).send(CHUNK);
            state.turns = if is_turn { 0 } else { state.turns + 1 };
            let record = match next {
                Some(Next::Bytes { offset, bytes, is_last }) => {
                    if state.in_flight == 0 {
                        // No bytes are in flight, so samples of data that was never acknowledged are dropped.
                        state.pace.begin();
                    }
                    state.pace.sent(now, bytes.len() as u64);
                    Some(Record::Data { id, part, offset, is_last, bytes })
                }
                Some(Next::Away { offset, length }) => {
                    self.have_read(id, part, offset, length);
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
}
