//! The epochs of a channel whose root has moved from one relay to another.
//!
//! In: the epochs, each with the position at which the next one goes on. Out: a position of an earlier epoch as one of the
//! current epoch. The new root counts on from the position of the earlier one, and takes an epoch of its own, so that no
//! identifier stands for two publications if both are alive. Never: an epoch whose publications the channel may lack.

use std::collections::VecDeque;

use crate::EventId;

/// The earlier epochs that are known.
const MAX_EPOCHS: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct Lineage(VecDeque<EventId>);

impl Lineage {
    /// The epoch of this position ends there; another one goes on.
    pub(crate) fn end_at(&mut self, position: EventId) {
        if self.0.len() == MAX_EPOCHS {
            self.0.pop_front();
        }
        self.0.push_back(position);
    }

    /// The positions at which later epochs go on, for a relay that knows the epoch of a position.
    pub(crate) fn changes_after(&self, position: EventId, latest: EventId) -> Vec<EventId> {
        if position.epoch == latest.epoch {
            return Vec::new();
        }
        let ends = || self.0.iter().skip_while(|end| end.epoch != position.epoch);
        let epochs = ends().skip(1).map(|end| end.epoch).chain([latest.epoch]);
        ends().zip(epochs).map(|(end, epoch)| EventId { epoch, sequence: end.sequence }).collect()
    }

    /// The ends of the epochs before the current one, oldest first.
    pub(crate) fn ends(&self) -> impl Iterator<Item = EventId> {
        self.0.iter().copied()
    }

    /// Learns the epochs before the current one, from a relay that knows them.
    pub(crate) fn learn(&mut self, ends: &[EventId], epoch: u64) {
        if let Some(current) = ends.iter().position(|end| end.epoch == epoch) {
            self.0 = ends[..current].iter().copied().collect();
        }
    }

    /// An epoch before all others ends at this position.
    pub(crate) fn begin_at(&mut self, position: EventId) {
        if self.0.len() < MAX_EPOCHS && self.0.iter().all(|end| end.epoch != position.epoch) {
            self.0.push_front(position);
        }
    }

    /// The number of publications of the channel up to a position of a client, as the current epoch counts them. `None`: the
    /// epoch is unknown.
    pub(crate) fn sequence_of(&self, position: EventId, epoch: u64) -> Option<u64> {
        if position.epoch == epoch {
            return Some(position.sequence);
        }
        // What an earlier root published after that, nobody has confirmed to its publisher.
        let end = self.0.iter().rev().find(|end| end.epoch == position.epoch)?;
        Some(position.sequence.min(end.sequence))
    }

    /// Forgets all epochs, since the current one does not continue them.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
