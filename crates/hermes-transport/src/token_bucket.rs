//! Limits the number of events in each second, for all clients of one worker or for one session.
//!
//! In: an event. Out: whether the event is within the limit. Never: a wait.

use std::cell::Cell;

/// The number of events that were permitted in the current second.
#[derive(Default)]
pub struct TokenBucket {
    second: Cell<u64>,
    spent: Cell<u32>,
}

impl TokenBucket {
    /// Counts an event at `now`, in milliseconds. Returns false if `most` events were already permitted in this second.
    pub fn takes(&self, now: u64, most: u32) -> bool {
        let second = now / 1000;
        if self.second.replace(second) != second {
            self.spent.set(0);
        }
        let is_left = self.spent.get() < most;
        if is_left {
            self.spent.set(self.spent.get() + 1);
        }
        is_left
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_so_much_and_the_next_as_much_again() {
        let budget = TokenBucket::default();
        let takes = |now| (0..5).filter(|_| budget.takes(now, 3)).count();
        assert_eq!([takes(0), takes(999), takes(1000), takes(5000)], [3, 0, 3, 3]);
    }
}
