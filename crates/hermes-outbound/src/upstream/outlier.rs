//! Passive health checking (outlier detection): consecutive failures eject an endpoint for a while.
//!
//! In: the outcomes of sessions, with their times. Out: whether the endpoint is ejected. Failures during an ejection
//! are ignored, because those sessions began before it. All times are in milliseconds of the node's clock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hermes_model::snapshot::Outlier;

/// The maximum ejection time, as a multiple of `ejection_time`. Each ejection lasts twice as long as the previous one,
/// up to this maximum. After the maximum time without an ejection, the next one has the first length again.
const MAX_EJECTION_FACTOR: u32 = 10;

/// The failure state of one endpoint, shared by all workers.
#[derive(Default)]
pub struct Passive {
    /// The number of consecutive failures.
    failures: AtomicU32,
    /// The number of ejections, which determines the length of the next one.
    rests: AtomicU32,
    /// The time at which the last ejection ends; 0 if there was none.
    resting_until: AtomicU64,
}

impl Passive {
    /// True if the endpoint is ejected.
    pub fn rests(&self, now: u64) -> bool {
        self.resting_until.load(Ordering::Relaxed) > now
    }

    pub fn succeeded(&self) {
        // The load before the store avoids contention between workers, because every session calls this function.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Resets the failures and ends an ejection, because an active health check has succeeded again.
    pub fn recovered(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.rests.store(0, Ordering::Relaxed);
        self.resting_until.store(0, Ordering::Relaxed);
    }

    /// Records a failure. Returns true if it ejects the endpoint.
    pub fn failed(&self, outlier: &Outlier, now: u64) -> bool {
        let until = self.resting_until.load(Ordering::Relaxed);
        if outlier.failures == 0 || until > now {
            return false;
        }
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 < outlier.failures {
            return false;
        }
        let longest = millis(outlier.ejection_time.saturating_mul(MAX_EJECTION_FACTOR));
        let rests = if now - until < longest { self.rests.load(Ordering::Relaxed) } else { 0 };
        let rest =
            millis(outlier.ejection_time.saturating_mul(1 << rests.min(MAX_EJECTION_FACTOR.ilog2() + 1))).min(longest);
        // If several workers reach the threshold at the same time, only one of them may begin the ejection. Otherwise
        // its length would double at once.
        let begun =
            self.resting_until.compare_exchange(until, now + rest, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if begun {
            self.rests.store(rests + 1, Ordering::Relaxed);
            self.failures.store(0, Ordering::Relaxed);
        }
        begun
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTLIER: Outlier = Outlier { failures: 3, ejection_time: Duration::from_secs(1) };

    /// Records failures at `now` until the endpoint is ejected. Returns the length of the ejection in milliseconds.
    fn rest_from(passive: &Passive, now: u64) -> u64 {
        assert!(!passive.rests(now));
        assert!(!passive.failed(&OUTLIER, now) && !passive.failed(&OUTLIER, now));
        assert!(passive.failed(&OUTLIER, now), "the third in a row");
        (0..).find(|after| !passive.rests(now + after)).unwrap_or_default()
    }

    #[test]
    fn only_failures_in_a_row_count() {
        let passive = Passive::default();
        for _ in 0..5 {
            assert!(!passive.failed(&OUTLIER, 0) && !passive.failed(&OUTLIER, 0));
            passive.succeeded();
        }
        assert_eq!(rest_from(&passive, 0), 1_000);
    }

    #[test]
    fn what_fails_during_a_rest_prolongs_nothing_and_counts_for_nothing() {
        let passive = Passive::default();
        assert_eq!(rest_from(&passive, 5), 1_000);
        for _ in 0..20 {
            assert!(!passive.failed(&OUTLIER, 1_004));
        }
        assert!(!passive.rests(1_005), "it is over when it was to be");
        assert_eq!(rest_from(&passive, 1_005), 2_000, "it is the second rest, after three failures of its own");
    }

    #[test]
    fn rests_double_up_to_ten_times_the_first() {
        let passive = Passive::default();
        let mut now = 0;
        let rests = [(); 6].map(|()| {
            let rest = rest_from(&passive, now);
            now += rest;
            // A success in between, such as a trial request, does not reset the doubling.
            passive.succeeded();
            rest
        });
        assert_eq!(rests, [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]);
    }

    #[test]
    fn rests_are_forgotten_after_a_time_without() {
        let passive = Passive::default();
        assert_eq!(rest_from(&passive, 0), 1_000);
        assert_eq!(rest_from(&passive, 10_999), 2_000, "one millisecond less than ten seconds well");
        assert_eq!(rest_from(&passive, 12_999 + 10_000), 1_000);
    }

    #[test]
    fn no_failures_is_off() {
        let passive = Passive::default();
        let off = Outlier { failures: 0, ..OUTLIER };
        assert!((0..100).all(|now| !passive.failed(&off, now)) && !passive.rests(100));
    }
}
