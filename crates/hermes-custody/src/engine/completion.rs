//! How exchanges come to their end, and who has to hear of it.
//!
//! In: exchanges that are through, that have come to nothing, or have had their time. Out: what their clients are told; what
//! neighbours are told, again and again until they have heard it or its time is over too.

use std::sync::Arc;
use std::time::Duration;

use hermes_wire::custody::{Behind, ExchangeId, Part, Record};

use super::super::NO_CHANNEL;
use super::super::half::Upto;
use super::{Ended, Engine, Entry, Exchange, Output, Side, Survives};

/// Ends that one neighbour is told of again. Of older ones it hears only that they are over.
const MOST_ENDED: usize = 16 << 10;

/// The lifetime of an exchange that was only begun, while its neighbour has no channel.
const EMPTY_FOR: Duration = Duration::from_secs(10);

impl Engine {
    /// Its client or its origin, who is here, has given up, or it cannot be led anywhere.
    pub(crate) fn fail(&mut self, id: ExchangeId, status: u16, reason: &str) {
        // Neighbours know no other: what was answered as something else is no answer here.
        let status = if (400..600).contains(&status) { status } else { 502 };
        self.end(id, &Side::Here, Record::Gone { id, status, reason: reason.to_owned() });
    }

    /// It has come to nothing, as `by` says: the other side is told.
    pub(super) fn end(&mut self, id: ExchangeId, by: &Side, record: Record) {
        let exchange = self.exchanges.get(&id);
        let order = exchange.and_then(Exchange::order);
        // Where nothing more is written of it, what was before it was led anywhere is to go.
        let is_on_disk = exchange.is_some_and(Exchange::is_on_disk);
        let entry = match (&order, &record) {
            (Some((peer, until)), Record::Gone { status, reason, .. }) if is_on_disk => {
                Entry::Gone { peer: peer.clone(), status: *status, reason: reason.clone(), until: *until }
            }
            _ => Entry::Forget,
        };
        let Some(mut exchange) = self.remove(id, entry) else { return };
        if !exchange.is_known {
            // Whom it would have gone to has never heard of it.
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
                    self.say(&peer, record.clone());
                    let is_order = order.as_ref().is_some_and(|(from, _)| *from == peer);
                    self.remember_ended(id, peer, record.clone(), exchange.deadline, is_order);
                }
                // It has said so itself, and may begin it anew: it may have been killed before it had written anything.
                Side::Peer(peer) if order.as_ref().is_some_and(|(from, _)| *from == peer) => {
                    self.remember_ended(id, peer.clone(), record.clone(), exchange.deadline, true);
                    self.has_heard(id, &peer);
                }
                Side::Peer(_) => {}
            }
        }
        self.out.push_back(Output::Forget { id });
    }

    /// Where whoever it came from has all of its response, nothing is left to be done. A neighbour that it went to still
    /// waits to hear that the response is held.
    pub(super) fn end_if_over(&mut self, id: ExchangeId) {
        let is_over =
            |exchange: &Exchange| exchange.response.is_over() && (!exchange.is_tunnel || exchange.request.is_over());
        if !self.exchanges.get(&id).is_some_and(is_over) {
            return;
        }
        let Some(mut exchange) = self.remove(id, Entry::Forget) else { return };
        if let Some(Side::Peer(peer)) = exchange.to.take() {
            // What we held last, in its count.
            exchange.response.forget_told();
            let upto = exchange.response.news(false, false).map_or(0, |(said, _)| said.offset);
            let record = Record::Held { id, part: Part::Response, upto, is_whole: true, behind: Behind::Taken };
            self.say(&peer, record.clone());
            self.remember_ended(id, peer, record, exchange.deadline, false);
        }
        if let Side::Peer(peer) = exchange.from {
            self.say(&peer, Record::Done { id });
            if exchange.is_tunnel {
                // Who is restarted before it has heard that would begin it anew, and it would be dialled twice.
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
        let oldest = if known.len() > MOST_ENDED { known.first_key_value().map(|(_, id)| *id) } else { None };
        self.deadlines.insert((until, id));
        self.ended.entry(id).or_default().push(Ended { peer: peer.clone(), record, until, is_order, number });
        if let Some(oldest) = oldest {
            self.forget_ended(oldest, &peer);
        }
    }

    /// This neighbour has heard of it. An order is known for its time nevertheless: who says so may know nothing of it, and
    /// be asked for it again.
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

    /// It is to be known no more.
    pub(super) fn forget_ended(&mut self, id: ExchangeId, peer: &Arc<str>) {
        let Some(all) = self.ended.get_mut(&id) else { return };
        let Some(place) = all.iter().position(|ended| ended.peer == *peer) else { return };
        let ended = all.swap_remove(place);
        if ended.is_order {
            self.out.push_back(Output::Keep { id, entry: Entry::Forget, survives: Survives::Nothing });
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

    /// Takes an exchange out of all that knows it.
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
        // Who waits for that forgets it for good. All others know of the end, or say it again.
        let is_waited_for = self.farewells.contains_key(&id) || entry != Entry::Forget;
        let survives = if is_waited_for { exchange.survives } else { Survives::Nothing };
        self.out.push_back(Output::Keep { id, entry, survives });
        Some(exchange)
    }

    /// Ends that this neighbour has not heard of.
    #[cfg(test)]
    pub(crate) fn ended_of(&self, peer: &str) -> usize {
        self.peers.get(peer).map_or(0, |peer| peer.ended.len())
    }

    /// When time alone changes something next.
    #[cfg(test)]
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Why it has not come further in its time.
    fn why_late(&self, id: ExchangeId) -> String {
        let next = self.exchanges.get(&id).and_then(|exchange| exchange.to.as_ref()?.peer());
        let trouble = next.and_then(|peer| Some((peer, self.peers.get(peer)?.trouble.as_ref()?)));
        match trouble {
            Some((peer, why)) => format!("{NO_CHANNEL} to {peer}: {why}"),
            None => "its time is over, and no path was there for long enough".to_owned(),
        }
    }

    /// Forgets exchanges that neighbours without a channel have only begun: a neighbour begins them again with its next
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
                    |one: &Exchange| one.from == side && one.to.is_none() && one.request.have() == Upto::default();
                if self.exchanges.get(&id).is_some_and(is_empty) && self.remove(id, Entry::Forget).is_some() {
                    self.out.push_back(Output::Forget { id });
                }
            }
        }
    }

    /// Ends what has had its time, and what has been waited for long enough.
    pub(crate) fn expire(&mut self, now: Duration) {
        self.let_on_late(now);
        self.forget_empty(now);
        // What was freed since, and was not worth a look by itself.
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
            // Who has not heard of it by now knows its deadline as well as we do.
            for ended in self.ended.remove(&id).into_iter().flatten() {
                self.deadlines.remove(&(ended.until, id));
                if ended.is_order {
                    self.out.push_back(Output::Keep { id, entry: Entry::Forget, survives: Survives::Nothing });
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
