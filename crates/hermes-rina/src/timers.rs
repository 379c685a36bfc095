//! The queue of deadlines: one entry for each flow or neighbour.
//!
//! In: deadlines. Out: those that have passed. Never: a clock.
//!
//! A deadline that moves to a later time leaves its entry in place; when the entry expires, the owner schedules the next
//! one. A PDU therefore changes the queue only if it brings an earlier deadline.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

/// The owner of a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The flow in this slot.
    Flow(u16),
    /// The neighbour at this address.
    Neighbour(SocketAddr),
}

/// All deadlines.
#[derive(Debug, Default)]
pub(crate) struct Timers(BTreeSet<(Duration, Timer)>);

impl Timers {
    /// Schedules a deadline unless an earlier one is scheduled. `scheduled` belongs to the owner.
    pub(crate) fn schedule(&mut self, timer: Timer, at: Option<Duration>, scheduled: &mut Option<Duration>) {
        let Some(at) = at.filter(|at| scheduled.is_none_or(|old| *at < old)) else { return };
        self.cancel(timer, scheduled);
        self.0.insert((at, timer));
        *scheduled = Some(at);
    }

    pub(crate) fn cancel(&mut self, timer: Timer, scheduled: &mut Option<Duration>) {
        if let Some(old) = scheduled.take() {
            self.0.remove(&(old, timer));
        }
    }

    pub(crate) fn next(&self) -> Option<Duration> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes and returns a deadline that has passed. The owner must clear its `scheduled`.
    pub(crate) fn pop(&mut self, now: Duration) -> Option<Timer> {
        if self.next()? > now {
            return None;
        }
        self.0.pop_first().map(|(_, timer)| timer)
    }
}
