//! Rate-limited logging, for events that a remote peer can trigger, or conditions that persist.
//!
//! In: each event. Out: whether to log the event now, and the number of events that were suppressed since the last log
//! line. So an operator sees the event, and a flood does not fill the disk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The default interval between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Limits the rate of one log message, over all workers of the node.
pub struct LogThrottle {
    /// The minimum interval between two log lines, in milliseconds.
    apart: u64,
    /// The time of the next allowed line, in milliseconds of the node's clock.
    next: AtomicU64,
    /// The number of events that were suppressed since the last log line.
    quiet: AtomicU64,
}

impl Default for LogThrottle {
    fn default() -> Self {
        Self::every(LOG_INTERVAL)
    }
}

impl LogThrottle {
    /// Creates a throttle with this minimum interval between two log lines.
    pub fn every(apart: Duration) -> Self {
        Self { apart: apart.as_millis() as u64, next: AtomicU64::new(0), quiet: AtomicU64::new(0) }
    }

    /// Records an event at `now`, in milliseconds of the node's clock. Returns `Some` with the number of suppressed
    /// events if the caller should log this one, and `None` if this one is suppressed.
    pub fn happened(&self, now: u64) -> Option<u64> {
        let due = |next| (now >= next).then_some(now + self.apart);
        if self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).is_err() {
            self.quiet.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.quiet.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_second_and_with_what_was_not_said() {
        let seldom = LogThrottle::default();
        let said: Vec<_> = [0, 1, 999, 1000, 1001, 2500].map(|now| seldom.happened(now)).into();
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
