//! Limits the idle connections of a worker, across all pools.
//!
//! In: connections that become idle. Out: a guard for each, which counts the connection until it is used or closed, and
//! the connections to close if there are too many. Clients of a forward proxy choose endpoints, and each endpoint has
//! its own pool. Without this limit, clients would control the number of idle connections. Never: a connection, which
//! stays in its pool.

use std::cell::Cell;
use std::rc::Rc;

/// The divisor of the limit that gives the number of idle connections closed when the limit is reached. Closing one at
/// a time would search for the longest idle connection too often.
const CLOSED_SHARE: usize = 16;

/// Counts the idle connections of a worker.
#[derive(Default)]
pub struct Idle {
    count: Rc<Cell<usize>>,
    /// The sequence number of the connection that last became idle.
    turn: Cell<u64>,
}

/// The guard that counts an idle connection. Its sequence number `turn` is greater for a connection that became idle
/// later.
pub struct IdlePlace {
    count: Rc<Cell<usize>>,
    pub(super) turn: u64,
}

impl Idle {
    pub(super) fn enter(&self) -> IdlePlace {
        self.count.set(self.count.get() + 1);
        self.turn.set(self.turn.get() + 1);
        IdlePlace { count: self.count.clone(), turn: self.turn.get() }
    }

    /// True if the limit of idle connections is reached.
    pub fn is_full(&self, limit: usize) -> bool {
        self.count.get() >= limit
    }
}

impl Drop for IdlePlace {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
    }
}

/// Returns the greatest sequence number of the idle connections that must be closed, or `None` if there are no idle
/// connections. `turns` are the sequence numbers of all idle connections.
pub fn last_to_go(mut turns: Vec<u64>, limit: usize) -> Option<u64> {
    // A reload may have lowered the limit.
    let too_many = (turns.len() + 1).saturating_sub(limit);
    let go = too_many.max(limit / CLOSED_SHARE).min(turns.len());
    let last = go.checked_sub(1)?;
    Some(*turns.select_nth_unstable(last).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_a_share_at_a_time_and_never_less_than_one() {
        assert_eq!(last_to_go(vec![9, 4, 7], 3), Some(4));
        assert_eq!(last_to_go(vec![1], 1), Some(1));
        assert_eq!(last_to_go((1..=1024).rev().collect(), 1024), Some(64));
        assert_eq!(last_to_go((1..=1024).collect(), 100), Some(925), "a limit that was lowered");
        assert_eq!(last_to_go(Vec::new(), 4), None);
    }

    #[test]
    fn places_are_given_back() {
        let idle = Idle::default();
        let (one, other) = (idle.enter(), idle.enter());
        assert!(one.turn < other.turn && idle.is_full(2) && !idle.is_full(3));
        drop(one);
        assert!(!idle.is_full(2));
    }
}
