//! The publications that a subscriber lacks when it resumes at a relay whose channel another relay feeds.
//!
//! In: the position of the subscriber, that of the channel, and what the feeding relay delivers after the first one. Out:
//! for each delivery, whether the subscriber gets it, too. Never: a publication twice, or a hole that is not told.

use crate::EventId;

/// The publications between the position of a subscriber and the one that its channel had when it joined.
#[derive(Clone, Copy, Debug)]
pub struct BackfillRange {
    position: EventId,
    until: EventId,
}

/// The decision about a publication of the feeding relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackfillStep {
    /// The subscriber gets it.
    Deliver,
    /// The subscriber has it.
    Skip,
    /// It does not continue what the subscriber has, so the subscriber learns of a gap instead.
    Gap(MissedRange),
}

/// A gap: the number of publications that the subscriber misses, if it is known, and the position after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedRange {
    /// `None`: unknown.
    pub missed: Option<u64>,
    /// The position of the subscriber from now on.
    pub until: EventId,
}

impl BackfillRange {
    /// The publications after `position`, up to and with `until`.
    pub fn new(position: EventId, until: EventId) -> Self {
        Self { position, until }
    }

    /// The position of the subscriber.
    pub fn position(&self) -> EventId {
        self.position
    }

    /// Whether the subscriber has what the channel had when it joined.
    pub fn is_filled(&self) -> bool {
        self.position == self.until
    }

    /// The feeding relay delivers what comes after this position.
    pub fn begin_at(&mut self, position: EventId) {
        if self.position == EventId::OLDEST {
            self.position = position;
        }
    }

    /// The feeding relay delivers a publication.
    pub fn publication(&mut self, id: EventId) -> BackfillStep {
        let is_same_epoch = id.epoch == self.position.epoch;
        if is_same_epoch && id.sequence <= self.position.sequence {
            return BackfillStep::Skip;
        }
        // Publications after `until` arrive by the channel.
        if !is_same_epoch || id.sequence > self.until.sequence {
            return BackfillStep::Gap(self.give_up());
        }
        self.position = id;
        BackfillStep::Deliver
    }

    /// The feeding relay tells a gap. Returns the one that the subscriber is told.
    pub fn gap(&mut self, missed: Option<u64>, until: EventId) -> MissedRange {
        // An epoch that is not that of the channel is on the way to it, unless something is missing there.
        let leads_there = match until.epoch == self.until.epoch {
            true => until.sequence <= self.until.sequence,
            false => until.sequence <= self.until.sequence && missed == Some(0),
        };
        if leads_there { self.miss(missed, until) } else { self.give_up() }
    }

    /// The feeding relay has no more. Returns the gap that the subscriber is told.
    pub fn give_up(&mut self) -> MissedRange {
        self.miss(None, self.until)
    }

    fn miss(&mut self, missed: Option<u64>, until: EventId) -> MissedRange {
        // Within an epoch, the number is known.
        let is_same_epoch = self.position.epoch == until.epoch;
        let count = is_same_epoch.then(|| until.sequence.saturating_sub(self.position.sequence));
        self.position = until;
        MissedRange { missed: count.or(missed), until }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(epoch: u64, sequence: u64) -> EventId {
        EventId { epoch, sequence }
    }

    #[test]
    fn a_subscriber_follows_the_epochs_of_the_roots() {
        // It has more of the first epoch than the second root had got.
        let mut range = BackfillRange::new(id(1, 16), id(3, 7));
        assert_eq!(range.gap(Some(0), id(2, 6)), MissedRange { missed: Some(0), until: id(2, 6) });
        assert_eq!(range.publication(id(2, 7)), BackfillStep::Deliver);
        assert!(!range.is_filled());
        assert_eq!(range.gap(Some(0), id(3, 7)), MissedRange { missed: Some(0), until: id(3, 7) });
        assert!(range.is_filled());
    }

    #[test]
    fn what_the_channel_delivers_is_not_delivered_twice() {
        let mut range = BackfillRange::new(id(9, 1), id(9, 2));
        assert_eq!(range.publication(id(9, 1)), BackfillStep::Skip);
        assert_eq!(range.publication(id(9, 2)), BackfillStep::Deliver);
        // The earlier root continues in its epoch. Epochs are random numbers, so either may be larger.
        for epoch in [1, 9] {
            let mut range = BackfillRange::new(id(epoch, 1), id(5, 2));
            assert_eq!(range.publication(id(epoch, 2)), BackfillStep::Deliver);
            let gap = MissedRange { missed: None, until: id(5, 2) };
            assert_eq!(range.publication(id(epoch, 3)), BackfillStep::Gap(gap));
            assert!(range.is_filled());
        }
    }

    #[test]
    fn what_the_feeding_relay_lacks_is_told() {
        let mut range = BackfillRange::new(id(1, 2), id(1, 9));
        assert_eq!(range.gap(Some(3), id(1, 5)), MissedRange { missed: Some(3), until: id(1, 5) });
        assert_eq!(range.gap(None, id(2, 3)), MissedRange { missed: Some(4), until: id(1, 9) });
    }
}
