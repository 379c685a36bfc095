//! The ends of exchanges, and the neighbours that must be informed of them.
//!
//! In: exchanges that completed, failed or reached their deadline. Out: failures for local clients, and records for
//! neighbours, repeated until the neighbour confirms the end or the deadline passes.

use std::sync::Arc;
use std::time::Duration;

use hermes_wire::custody::{AckReason, Direction, ExchangeId, Record};

use super::super::NO_CHANNEL;
use super::super::stream_state::Progress;
use super::{Durability, Ended, Engine, Entry, Exchange, Output, Side};

/// Maximum number of ends that this node repeats to one neighbour. For an older end, the neighbour receives only
/// [`Record::Done`].
const MAX_ENDED: usize = 16 << 10;

/// Lifetime of an exchange that was begun without data, while its neighbour has no channel.
const EMPTY_FOR: Duration = Duration::from_secs(10);

impl Engine {
    /// Ends an exchange because its local client or origin gave up, or because it cannot be forwarded.
    pub(crate) fn fail(&mut self, id: ExchangeId, status: u16, reason: &str) {
        // Neighbours expect an error status; any other answer becomes 502.
        let status = if (400..600).contains(&status) { status } else { 502 };
        self.end(id, &Side::Here, Record::Gone { id, status, reason: reason.to_owned() });
    }

    /// Ends an exchange with a failure reported by `by`, and reports the failure to the other side.
    pub(super) fn end(&mut self, id: ExchangeId, by: &Side, record: Record) {
        let exchange = self.exchanges.get(&id);
        let order = exchange.and_then(Exchange::order);
        // The journal may hold entries from before the exchange was assigned, although nothing more is written. They
        // must be deleted.
        let is_on_disk = exchange.is_some_and(Exchange::is_on_disk);
        let entry = match (&order, &record) {
            (Some((peer, until)), Record::Gone { status, reason, .. }) if is_on_disk => {
                Entry::Gone { peer: peer.clone(), status: *status, reason: reason.clone(), until: *until }
            }
            _ => Entry::Forget,
        };
        let Some(mut exchange) = self.remove(id, entry) else { return };
        if !exchange.is_known {
            // No record of the exchange was sent to the next node, so its end is not sent either.
            exchange.to = exchange.to.filter(|to| *to == Side::Here);
        }
        for side in [Some(exchange.from), exchange.to].into_iter().flatten() {
            match side {
                Side::Here => {
                    if let Record::Gone { status, reason, .. } = &record {
                        self.out.push_back(Output::Failed { id, status: *status, reason: reason.clone() });
                    }
                }
                Side::Peer(peer) if *by != Side::Peer(peer.clone()) => {
                    self.queue_record(&peer, record.clone());
                    let is_order = order.as_ref().is_some_and(|(from, _)| *from == peer);
                    self.remember_ended(id, peer, record.clone(), exchange.deadline, is_order);
                }
                // The neighbour reported the failure itself. It may begin the exchange again, if it was killed before
                // it wrote the end.
                Side::Peer(peer) if order.as_ref().is_some_and(|(from, _)| *from == peer) => {
                    self.remember_ended(id, peer.clone(), record.clone(), exchange.deadline, true);
                    self.has_heard(id, &peer);
                }
                Side::Peer(_) => {}
            }
        }
        self.out.push_back(Output::Forget { id });
    }

    /// Completes an exchange whose previous side has the full response. A next node still waits for the acknowledgement
    /// of the response.
    pub(super) fn end_if_over(&mut self, id: ExchangeId) {
        let is_over =
            |exchange: &Exchange| exchange.response.is_over() && (!exchange.is_tunnel || exchange.request.is_over());
        if !self.exchanges.get(&id).is_some_and(is_over) {
            return;
        }
        let Some(mut exchange) = self.remove(id, Entry::Forget) else { return };
        if let Some(Side::Peer(peer)) = exchange.to.take() {
            // The acknowledgement contains the final offset in the next node's count.
            exchange.response.forget_acks();
            let upto = exchange.response.news(false, false).map_or(0, |(said, _)| said.offset);
            let record = Record::Held { id, part: Direction::Response, upto, is_whole: true, behind: AckReason::Taken };
            self.queue_record(&peer, record.clone());
            self.remember_ended(id, peer, record, exchange.deadline, false);
        }
        if let Side::Peer(peer) = exchange.from {
            self.queue_record(&peer, Record::Done { id });
            if exchange.is_tunnel {
                // A neighbour that restarts before it has received the end would begin the tunnel again, and the node
                // would dial twice.
                self.remember_ended(id, peer, Record::Done { id }, exchange.deadline, false);
            }
        }
        self.out.push_back(Output::Forget { id });
    }

    pub(super) fn remember_ended(
        &mut self,
        id: ExchangeId,
        peer: Arc<str>,
        record: Record,
        until: Duration,
        is_order: bool,
    ) {
        self.forget_ended(id, &peer);
        let number = self.next;
        self.next += 1;
        let state = self.peers.entry(peer.clone()).or_default();
        let known = if matches!(record, Record::Done { .. }) { &mut state.through } else { &mut state.ended };
        known.insert(number, id);
        let oldest = if known.len() > MAX_ENDED { known.first_key_value().map(|(_, id)| *id) } else { None };
        self.deadlines.insert((until, id));
        self.ended.entry(id).or_default().push(Ended { peer: peer.clone(), record, until, is_order, number });
        if let Some(oldest) = oldest {
            self.forget_ended(oldest, &peer);
        }
    }

    /// Records that this neighbour was informed of the end. The end of an order is retained until its deadline, because
    /// the neighbour may have forgotten the order and receive it again.
    pub(super) fn has_heard(&mut self, id: ExchangeId, peer: &Arc<str>) {
        let all = self.ended.get(&id).into_iter().flatten();
        let Some(number) = all.filter(|one| one.peer == *peer && one.is_order).map(|one| one.number).next() else {
            return self.forget_ended(id, peer);
        };
        if let Some(state) = self.peers.get_mut(peer)
            && state.ended.remove(&number).is_some()
        {
            state.through.insert(number, id);
        }
    }

    /// Forgets an end for this neighbour.
    pub(super) fn forget_ended(&mut self, id: ExchangeId, peer: &Arc<str>) {
        let Some(all) = self.ended.get_mut(&id) else { return };
        let Some(place) = all.iter().position(|ended| ended.peer == *peer) else { return };
        let ended = all.swap_remove(place);
        if ended.is_order {
            self.out.push_back(Output::Keep { id, entry: Entry::Forget, survives: Durability::Nothing });
        }
        if !all.iter().any(|other| other.until == ended.until) {
            self.deadlines.remove(&(ended.until, id));
        }
        if all.is_empty() {
            self.ended.remove(&id);
        }
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.forget(ended.number);
        }
    }

    /// Removes an exchange from all tables and indexes.
    pub(super) fn remove(&mut self, id: ExchangeId, entry: Entry) -> Option<Exchange> {
        self.unindex(id);
        let exchange = self.exchanges.remove(&id)?;
        self.deadlines.remove(&(exchange.deadline, id));
        self.leave(id, &exchange.from);
        if let Some(to) = &exchange.to {
            self.leave(id, to);
        }
        if let Some(account) = self.accounts.get_mut(&exchange.account) {
            account.remove_exchange(&exchange.owner);
        }
        // Durable deletion is needed only if a neighbour waits for it. In all other cases the neighbours were informed
        // of the end, or report it again.
        let is_waited_for = self.farewells.contains_key(&id) || entry != Entry::Forget;
        let survives = if is_waited_for { exchange.survives } else { Durability::Nothing };
        self.out.push_back(Output::Keep { id, entry, survives });
        Some(exchange)
    }

    /// Returns the number of ends that this neighbour has not confirmed.
    #[cfg(test)]
    pub(crate) fn ended_of(&self, peer: &str) -> usize {
        self.peers.get(peer).map_or(0, |peer| peer.ended.len())
    }

    /// Returns the next time at which [`Engine::expire`] has work.
    #[cfg(test)]
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Returns the reason of a failure at the deadline.
    fn why_late(&self, id: ExchangeId) -> String {
        let next = self.exchanges.get(&id).and_then(|exchange| exchange.to.as_ref()?.peer());
        let trouble = next.and_then(|peer| Some((peer, self.peers.get(peer)?.trouble.as_ref()?)));
        match trouble {
            Some((peer, why)) => format!("{NO_CHANNEL} to {peer}: {why}"),
            None => "custody deadline exceeded; no path was up for long enough".to_owned(),
        }
    }

    /// Forgets exchanges without data whose neighbour has no channel. The neighbour begins them again on its next
    /// channel.
    fn forget_empty(&mut self, now: Duration) {
        let mut lapsed = Vec::new();
        for (name, peer) in self.peers.iter_mut().filter(|(_, peer)| peer.may_lapse) {
            let since = *peer.closed_since.get_or_insert(now);
            if now >= since + EMPTY_FOR {
                (peer.may_lapse, peer.closed_since) = (false, None);
                lapsed.push((Side::Peer(name.clone()), peer.exchanges.iter().copied().collect::<Vec<_>>()));
            }
        }
        for (side, exchanges) in lapsed {
            for id in exchanges {
                let is_empty =
                    |one: &Exchange| one.from == side && one.to.is_none() && one.request.have() == Progress::default();
                if self.exchanges.get(&id).is_some_and(is_empty) && self.remove(id, Entry::Forget).is_some() {
                    self.out.push_back(Output::Forget { id });
                }
            }
        }
    }

    /// Ends exchanges whose deadline has passed, and waits that have taken too long.
    pub(crate) fn expire(&mut self, now: Duration) {
        self.let_on_late(now);
        self.forget_empty(now);
        // Reports room that became free in amounts too small to be reported at once.
        let freed = self.accounts.iter_mut().filter_map(|(name, account)| account.is_freed(true).then(|| name.clone()));
        let freed: Vec<_> = freed.collect();
        freed.iter().for_each(|account| self.tell_room(account));
        while let Some((at, id)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            if self.exchanges.contains_key(&id) {
                let reason = self.why_late(id);
                self.fail(id, 504, &reason);
            }
            // A neighbour that has not confirmed the end by now ends the exchange at the same deadline.
            for ended in self.ended.remove(&id).into_iter().flatten() {
                self.deadlines.remove(&(ended.until, id));
                if ended.is_order {
                    self.out.push_back(Output::Keep { id, entry: Entry::Forget, survives: Durability::Nothing });
                }
                if let Some(peer) = self.peers.get_mut(&ended.peer) {
                    peer.forget(ended.number);
                    if !peer.is_open && peer.is_idle() && peer.through.is_empty() {
                        self.peers.remove(&ended.peer);
                    }
                }
            }
        }
    }
}
