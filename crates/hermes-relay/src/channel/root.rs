//! The root of a channel: which relay numbers the publications, and which relays keep a copy.
//!
//! In: positions of another relay, confirmations of copies, and the wish of a relay to become the root. Out: the epoch of the
//! channel, what another root lacks, and how many relays have a publication. Never: two publications with one identifier.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::watch;

use super::{Channel, ChannelState, HandOver, Member};
use crate::EventId;
use crate::limits::RelayLimits;
use crate::publication::{Content, FedPublication, Publication};
use crate::publishing::Copies;
use crate::queue::{Delivery, End};

impl Channel {
    /// A stand-by has the publications up to this one. `None`: it no longer keeps a copy.
    pub(crate) fn confirm(&self, number: u64, until: Option<EventId>, now: Duration) {
        let mut state = self.lock();
        let sequence = until.map(|until| state.lineage.sequence_of(until, state.epoch));
        let Some(member) = state.members.get_mut(&number) else { return };
        let had_copy = member.confirmed.is_some();
        member.confirmed = match sequence {
            None => None,
            Some(sequence) => member.confirmed.map(|before| before.max(sequence.unwrap_or_default())),
        };
        if had_copy && sequence.is_none() {
            state.copy_lost = Some(now);
        }
        self.report_copies(&state);
    }

    /// The confirmed copies, and their changes.
    pub(crate) fn copies(&self) -> watch::Receiver<Copies> {
        let state = self.lock();
        self.copies.get_or_init(|| watch::Sender::new(state.copies())).subscribe()
    }

    pub(super) fn report_copies(&self, state: &ChannelState) {
        if let Some(copies) = self.copies.get() {
            copies.send_if_modified(|before| std::mem::replace(before, state.copies()) != state.copies());
        }
    }

    /// Ends the subscriptions of stand-bys that have not confirmed this publication. Returns their number.
    pub(crate) fn end_stand_bys(&self, sequence: u64, now: Duration) -> u64 {
        let mut state = self.lock();
        let is_behind = |member: &&mut Member| member.confirmed.is_some_and(|confirmed| confirmed < sequence);
        let mut count = 0;
        for member in state.members.values_mut().filter(is_behind) {
            member.queue.end(End::Stalled);
            member.confirmed = None;
            count += 1;
        }
        if count > 0 {
            state.copy_lost = Some(now);
            self.report_copies(&state);
        }
        count
    }

    /// Numbers the publications from now on, after those that the channel has. `is_complete`: nothing is missing that
    /// another root has published. Returns false if it has been handed over meanwhile: `hand_overs` is their number before.
    pub(crate) fn lead(&self, epoch: u64, is_complete: bool, hand_overs: u64, now: Duration) -> bool {
        let mut state = self.lock();
        if state.hand_overs != hand_overs {
            return false;
        }
        if std::mem::take(&mut state.is_fed) {
            // The earlier root may still publish in its own epoch, so this relay always begins another one. It keeps the
            // publications that it has, even if later ones are missing.
            let ended = state.latest_id();
            state.lineage.end_at(ended, is_complete);
            state.epoch = epoch;
            state.forget_unknown_epochs();
            state.is_handed_over = false;
            self.tell(&mut state, EventId { epoch, ..ended }, is_complete.then_some(0), false, now);
        }
        true
    }

    /// Another relay is about to keep a copy.
    pub(crate) fn expect_copy(&self, now: Duration) {
        let mut state = self.lock();
        state.copy_lost = Some(now);
        self.report_copies(&state);
    }

    /// The times that another relay has become the root by asking this one.
    pub(crate) fn hand_overs(&self) -> u64 {
        self.lock().hand_overs
    }

    /// Ends the subscriptions of other relays, so that they subscribe at the new root.
    pub(crate) fn end_relays(&self) {
        let state = self.lock();
        state.members.values().filter(|member| member.is_node).for_each(|member| member.queue.end(End::Closed));
    }

    /// Lets another relay number the publications. Returns those that it lacks, if it has those up to `after`.
    pub(crate) fn hand_over(&self, after: EventId) -> HandOver {
        let mut state = self.lock();
        // The other relay cannot get what is still to arrive here.
        for publication in &state.history {
            if let Content::Arriving(content) = &publication.content.body {
                content.abort();
            }
        }
        state.is_fed = true;
        state.hand_overs += 1;
        state.is_handed_over = true;
        self.report_copies(&state);
        let (missed, mut lacking) = (state.missed(after), Vec::new());
        let start = if missed == Some(0) { after } else { state.before_history() };
        if missed != Some(0) {
            lacking.push(Delivery::Gap { channel: self.name.clone(), missed, until: start });
        }
        let known = state.lineage.sequence_of(after, state.epoch).unwrap_or_default();
        self.replay(&state, start, known, |delivery| lacking.push(delivery));
        HandOver { lacking, epochs: state.epochs() }
    }

    /// Whether nobody subscribes, and what it keeps is older than `age`.
    pub(crate) fn is_idle(&self, now: Duration, age: Duration) -> bool {
        let state = self.lock();
        state.subscribers == 0 && (state.history.is_empty() || now.saturating_sub(state.used) >= age)
    }

    /// Whether no publication is realtime, so that a stand-by has all whose publishers have a response.
    pub(crate) fn is_reliable(&self) -> bool {
        !self.lock().has_realtime
    }

    /// Whether this relay numbers the publications.
    pub(crate) fn leads(&self) -> bool {
        !self.lock().is_fed
    }

    /// The position after the latest publication.
    pub(crate) fn position(&self) -> EventId {
        self.lock().latest_id()
    }

    /// Continues after a position of the relay that feeds this channel. Subscribers learn of what they miss.
    pub(crate) fn continue_after(&self, missed: Option<u64>, until: EventId, now: Duration) {
        self.enter_epoch(&mut self.lock(), until, missed, now);
    }

    fn enter_epoch(&self, state: &mut ChannelState, until: EventId, missed: Option<u64>, now: Duration) {
        let is_same_epoch = state.epoch == until.epoch;
        if missed == Some(0) && is_same_epoch {
            return;
        }
        if missed == Some(0) && !is_same_epoch {
            state.forget_after(until.sequence);
            state.lineage.end_at(EventId { sequence: until.sequence, epoch: state.epoch }, true);
        } else {
            // A history has no holes.
            state.history.clear();
            state.history_bytes = 0;
            if !is_same_epoch {
                state.lineage.clear();
            }
        }
        (state.epoch, state.latest) = (until.epoch, until.sequence);
        state.forget_unknown_epochs();
        self.tell(state, until, missed, is_same_epoch, now);
    }

    /// Tells the subscribers what they miss up to the position of the channel.
    fn tell(&self, state: &mut ChannelState, until: EventId, missed: Option<u64>, is_same_epoch: bool, now: Duration) {
        for member in state.members.values_mut() {
            if let Some(missed) = member.misses(missed, until, is_same_epoch) {
                member.queue.push(Delivery::Gap { channel: self.name.clone(), missed, until }, now);
            }
        }
    }

    /// The position before the oldest publication of the history.
    pub(crate) fn before_history(&self) -> EventId {
        self.lock().before_history()
    }

    /// Adds older publications to the history, in their order, if the latest of them comes right before it.
    pub(crate) fn prepend(&self, older: Vec<FedPublication>, limits: &RelayLimits, memory: &Arc<AtomicU64>) {
        let mut state = self.lock();
        for FedPublication { content, id, is_reliable } in older.into_iter().rev() {
            let before = state.before_history();
            let Some(id) = id.filter(|id| id.sequence == before.sequence) else { return };
            let publication = Arc::new(Publication::new(self.name.clone(), Some(id), content, is_reliable, memory));
            let bytes = state.history_bytes + publication.bytes();
            if state.history.len() >= limits.history || bytes > limits.history_bytes {
                return;
            }
            if id.epoch != before.epoch && !state.lineage.begin_at(id) {
                return;
            }
            state.has_realtime |= !is_reliable;
            state.history_bytes = bytes;
            state.history.push_front(publication);
        }
    }

    /// Learns earlier epochs from the relay that feeds the channel.
    pub(crate) fn learn(&self, epochs: &[EventId]) {
        let mut state = self.lock();
        let epoch = state.epoch;
        state.lineage.learn(epochs, epoch);
        state.forget_unknown_epochs();
    }
}
