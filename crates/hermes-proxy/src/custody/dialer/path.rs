//! Outage detection for a TCP connection.
//!
//! In: the kernel's acknowledgement counters. Out: whether sent bytes were lost. Never: bytes of its own.

use hermes_net::tcp::AckMonitor;
use tokio::time::Instant;

use super::{BEACON, OUTAGE_AFTER, OUTAGE_ROUND_TRIPS};

/// A watched connection.
pub(crate) struct Path {
    acks: AckMonitor,
    /// The time since which bytes are unacknowledged, and the acknowledged offset at that time.
    owed: Option<(Instant, u64)>,
}

impl Path {
    pub(crate) fn new(acks: AckMonitor) -> Self {
        Self { acks, owed: None }
    }

    /// Returns two flags: the outage is so long that the bytes under way count as lost; bytes are unacknowledged.
    pub(crate) fn state(&mut self) -> (bool, bool) {
        let Ok(seen) = self.acks.state() else { return (true, true) };
        if seen.owed_for.is_none() {
            self.owed = None;
            return (false, false);
        }
        let now = Instant::now();
        let since = match self.owed {
            Some((since, acknowledged)) if acknowledged == seen.acknowledged => since,
            _ => {
                self.owed = Some((now, seen.acknowledged));
                now
            }
        };
        (now - since >= OUTAGE_AFTER.max(OUTAGE_ROUND_TRIPS * seen.rtt), true)
    }

    /// Ready when the path is down.
    pub(crate) async fn darkness(&mut self) {
        let mut look = tokio::time::interval(BEACON);
        while !self.state().0 {
            look.tick().await;
        }
    }
}
