//! The epochs of a channel whose root has moved from one relay to another.
//!
//! In: the epochs, each with the position at which the next one goes on. Out: a position of an earlier epoch as one of the
//! current epoch. The new root counts on from the position of the earlier one, and takes an epoch of its own, so that no
//! identifier stands for two publications if both are alive. Never: an epoch of another line of roots.

use std::collections::VecDeque;

use crate::EventId;

/// The earlier epochs that are known.
pub const MAX_EPOCHS: usize = 32;

/// The end of an epoch.
#[derive(Clone, Copy, Debug)]
struct End {
    position: EventId,
    /// Nothing is missing between it and the next epoch.
    is_complete: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Lineage(VecDeque<End>);

impl Lineage {
    /// The epoch of this position ends there; another one goes on.
    pub(crate) fn end_at(&mut self, position: EventId, is_complete: bool) {
        if self.0.len() == MAX_EPOCHS {
            self.0.pop_front();
        }
        self.0.push_back(End { position, is_complete });
    }

    /// The ends of the epochs before the current one, oldest first, as far back as nothing is missing.
    pub(crate) fn ends(&self) -> impl Iterator<Item = EventId> {
        let from = self.0.iter().rposition(|end| !end.is_complete).map_or(0, |hole| hole + 1);
        self.0.iter().skip(from).map(|end| end.position)
    }

    /// Learns the epochs before the current one, from a relay that knows them.
    pub(crate) fn learn(&mut self, ends: &[EventId], epoch: u64) {
        let Some(current) = ends.iter().position(|end| end.epoch == epoch) else { return };
        let ends = &ends[..current];
        let Some(first) = ends.first() else { return };
        // The other relay may have begun later.
        let older = self.0.iter().position(|end| end.position.epoch == first.epoch).unwrap_or_default();
        self.0.truncate(older);
        self.0.extend(ends.iter().map(|position| End { position: *position, is_complete: true }));
        self.0.drain(..self.0.len().saturating_sub(MAX_EPOCHS));
    }

    /// Whether this epoch is one of the earlier ones.
    pub(crate) fn knows(&self, epoch: u64) -> bool {
        self.0.iter().any(|end| end.position.epoch == epoch)
    }

    /// The positions at which later epochs go on, for a subscriber that knows the epoch of a position; and whether nothing is
    /// missing there.
    pub(crate) fn changes_after(&self, position: EventId, latest: EventId) -> Vec<(EventId, bool)> {
        if position.epoch == latest.epoch {
            return Vec::new();
        }
        let ends = || self.0.iter().skip_while(|end| end.position.epoch != position.epoch);
        let epochs = ends().skip(1).map(|end| end.position.epoch).chain([latest.epoch]);
        let change = |(end, epoch): (&End, u64)| (EventId { epoch, ..end.position }, end.is_complete);
        ends().zip(epochs).map(change).collect()
    }

    /// An epoch before all others ends at this position. Returns false if there are too many.
    pub(crate) fn begin_at(&mut self, position: EventId) -> bool {
        if self.knows(position.epoch) {
            return true;
        }
        let has_room = self.0.len() < MAX_EPOCHS;
        if has_room {
            self.0.push_front(End { position, is_complete: true });
        }
        has_room
    }

    /// The number of publications of the channel up to a position of a client, as the current epoch counts them. `None`: the
    /// epoch is unknown.
    pub(crate) fn sequence_of(&self, position: EventId, epoch: u64) -> Option<u64> {
        if position.epoch == epoch {
            return Some(position.sequence);
        }
        // An earlier root may have published more than the next one has got.
        let end = self.0.iter().rev().find(|end| end.position.epoch == position.epoch)?;
        Some(position.sequence.min(end.position.sequence))
    }

    /// Forgets all epochs, since the current one does not continue them.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
