//! Tokens by which clients show once more that they have their address (RFC 9000, section 8.1.3), each good once.
//!
//! In: the tokens that are used. Out: whether one was used before. Never: more of them in memory than a bound;
//! beyond it the oldest are forgotten, and with them all tokens that were given out while they were remembered.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use quinn::{TokenLog, TokenReuseError};

/// Of each of the two halves: the older one goes when the younger is full.
const HALF: usize = 8192;

/// The tokens that were used.
pub(super) struct UsedTokens(Mutex<Used>);

struct Used {
    younger: HashSet<u128>,
    older: HashSet<u128>,
    /// When the younger half began, and the older. Tokens know whole seconds, so that some are refused for nothing.
    since: [SystemTime; 2],
}

impl UsedTokens {
    pub(super) fn new() -> Self {
        // Tokens of anybody before us are sealed with another key: nothing is forgotten yet.
        let since = [SystemTime::UNIX_EPOCH; 2];
        Self(Mutex::new(Used { younger: HashSet::new(), older: HashSet::new(), since }))
    }
}

impl TokenLog for UsedTokens {
    fn check_and_insert(&self, nonce: u128, issued: SystemTime, _: Duration) -> Result<(), TokenReuseError> {
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        used.take(nonce, issued, SystemTime::now())
    }
}

impl Used {
    fn take(&mut self, nonce: u128, issued: SystemTime, now: SystemTime) -> Result<(), TokenReuseError> {
        if issued < self.since[1] || self.older.contains(&nonce) || self.younger.contains(&nonce) {
            return Err(TokenReuseError);
        }
        if self.younger.len() >= HALF {
            self.older = std::mem::take(&mut self.younger);
            self.since = [now, self.since[0]];
        }
        self.younger.insert(nonce);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_once_however_many_others_are_used() {
        let began = SystemTime::UNIX_EPOCH;
        let mut used = Used { younger: HashSet::new(), older: HashSet::new(), since: [began, began] };
        let at = |second: u64| began + Duration::from_secs(second);
        assert!(used.take(0, at(1), at(2)).is_ok());
        for nonce in 1..3 * HALF as u128 {
            // One a second, each given out a second before.
            let now = nonce as u64 + 2;
            assert!(used.take(nonce, at(now - 1), at(now)).is_ok(), "{nonce}");
            assert!(used.take(nonce, at(now - 1), at(now)).is_err(), "{nonce} again");
            assert!(used.take(0, at(1), at(now)).is_err(), "the first, after {nonce}");
        }
        assert!(used.younger.len() + used.older.len() <= 2 * HALF);
    }
}
