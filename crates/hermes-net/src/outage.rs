//! Rate-limited logging of an outage, that is, of an operation that fails repeatedly until it succeeds.
//!
//! In: each failure, with its reason, and each success. Out: whether to log the failure, with the number of attempts so
//! far. The first failure of each target and reason is logged. Repeated ones are logged after one minute, then two,
//! four, up to an hour.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

/// The first and the longest pause between two log lines about one outage.
const LOG_INTERVALS: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// Maximum number of pairs of target and reason that are remembered in an outage. Further pairs are not logged at once.
const MAX_REASONS: usize = 64;

/// Limits the log lines about one operation. Contains `None` while the operation works.
#[derive(Debug, Default)]
pub struct OutageLog(Option<Outage>);

#[derive(Debug)]
struct Outage {
    since: Instant,
    attempts: u64,
    pause: Duration,
    due: Instant,
    /// Pairs of target and reason that were logged. Several targets fail in turn, and one may fail for alternating
    /// reasons.
    reasons: BTreeSet<(String, String)>,
}

/// The numbers for a log line about an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureCounts {
    /// Failed attempts since the outage began, including the current one.
    pub count: u64,
    /// The time since the first failed attempt, in whole seconds.
    pub elapsed: Duration,
}

impl OutageLog {
    /// Records a failed attempt at this target. The caller logs the failure if the result is `Some`.
    pub fn failed(&mut self, target: &str, reason: &str) -> Option<FailureCounts> {
        let now = Instant::now();
        let (first, longest) = LOG_INTERVALS;
        let outage = self.0.get_or_insert_with(|| Outage {
            since: now,
            attempts: 0,
            pause: first,
            due: now + first,
            reasons: BTreeSet::new(),
        });
        outage.attempts += 1;
        let has_room = outage.reasons.len() < MAX_REASONS;
        let is_new = has_room && outage.reasons.insert((target.to_owned(), reason.to_owned()));
        if !is_new {
            if now < outage.due {
                return None;
            }
            outage.pause = (outage.pause * 2).min(longest);
            outage.due = now + outage.pause;
        }
        Some(FailureCounts { count: outage.attempts, elapsed: Duration::from_secs((now - outage.since).as_secs()) })
    }

    /// Records a success, so that the next failure begins another outage.
    pub fn recovered(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_logged_once_and_then_at_growing_intervals() {
        let mut log = OutageLog::default();
        let mut logged = Vec::new();
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(1000) {
            for target in ["one", "two"] {
                if let Some(FailureCounts { count, elapsed }) = log.failed(target, "no answer") {
                    logged.push((count, elapsed.as_secs()));
                }
            }
            tokio::time::advance(Duration::from_secs(5)).await;
        }
        assert_eq!(logged, [(1, 0), (2, 0), (25, 60), (73, 180), (169, 420), (361, 900)]);
        // A new reason is logged, and so is the next outage.
        assert_eq!(log.failed("one", "refused").map(|attempts| attempts.count), Some(401));
        assert_eq!((log.failed("one", "no answer"), log.failed("one", "refused")), (None, None), "reasons alternate");
        log.recovered();
        assert_eq!(log.failed("one", "refused").map(|attempts| attempts.count), Some(1));
    }
}
