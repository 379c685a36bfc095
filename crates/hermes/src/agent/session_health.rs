//! The health of a node, as its sessions show it.
//!
//! In: the counts of ended and failed sessions, once a second. Out: the reason why the node is unhealthy, for its reports.
//! The controller rolls a change back if it makes a node unhealthy.

use std::collections::VecDeque;

/// A node is unhealthy if at least this many sessions failed within the window...
const MIN_FAILED: u64 = 5;
/// ...and at least one in this many of those that ended.
const FAILED_SHARE: u64 = 10;
/// The window, in seconds.
const WINDOW_SECONDS: usize = 10;

/// The health of a node, by its sessions.
#[derive(Default)]
pub(super) struct SessionHealth {
    /// Cumulative counts of ended and failed sessions, one entry a second, the newest last.
    counts: VecDeque<(u64, u64)>,
    /// The reason why the node is unhealthy; empty if it is healthy.
    pub(super) unhealthy: String,
}

impl SessionHealth {
    /// Adds the counts of one second. Returns true if the health has changed.
    pub(super) fn tick(&mut self, (ended, failed): (u64, u64)) -> bool {
        self.counts.push_back((ended, failed));
        if self.counts.len() > WINDOW_SECONDS + 1 {
            self.counts.pop_front();
        }
        let (before, failed_before) = self.counts.front().copied().unwrap_or_default();
        let (ended, failed) = (ended.saturating_sub(before), failed.saturating_sub(failed_before));
        let is_unhealthy = failed >= MIN_FAILED && failed * FAILED_SHARE >= ended;
        let was_unhealthy = !self.unhealthy.is_empty();
        if is_unhealthy {
            let seconds = self.counts.len() - 1;
            self.unhealthy =
                format!("{failed} of {ended} sessions failed in {seconds} s, for a server's or this node's fault");
        } else {
            self.unhealthy.clear();
        }
        is_unhealthy != was_unhealthy
    }
}
