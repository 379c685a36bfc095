//! Something that strangers can cause, or that lasts, said once in a while.
//!
//! In: each time it happens. Out: whether to say it now, and how often it was kept quiet since. So an
//! operator hears of it, and nobody fills the disk with it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Between two times that it is said, if nothing else is asked for.
const APART: Duration = Duration::from_secs(1);

/// Of the whole node, for all workers.
pub(crate) struct Seldom {
    /// Milliseconds between two times that it is said.
    apart: u64,
    /// Not before this time, in milliseconds of the node's clock.
    next: AtomicU64,
    quiet: AtomicU64,
}

impl Default for Seldom {
    fn default() -> Self {
        Self::every(APART)
    }
}

impl Seldom {
    /// Said as often at most.
    pub(crate) fn every(apart: Duration) -> Self {
        Self { apart: apart.as_millis() as u64, next: AtomicU64::new(0), quiet: AtomicU64::new(0) }
    }

    /// It happened. To be said now, where there is a number: how often it was not said since.
    pub(crate) fn happened(&self, now: u64) -> Option<u64> {
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
        let seldom = Seldom::default();
        let said: Vec<_> = [0, 1, 999, 1000, 1001, 2500].map(|now| seldom.happened(now)).into();
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
