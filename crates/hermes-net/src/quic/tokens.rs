//! Replay protection for address validation tokens (RFC 9000, section 8.1.3): each token works once.
//!
//! In: the nonces of used tokens. Out: whether a token was used before. Memory is bounded: beyond the bound the oldest
//! nonces are forgotten, and all tokens that were issued in their time are refused.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use quinn::{TokenLog, TokenReuseError};

/// Nonces in each of the two generations; the older one is dropped when the younger is full.
const GENERATION_SIZE: usize = 8192;

/// The log of used tokens.
pub(super) struct UsedTokens(Mutex<Used>);

struct Used {
    younger: HashSet<u128>,
    older: HashSet<u128>,
    /// Start of the younger and of the older generation. A token's time of issue has whole seconds, so a few valid
    /// tokens are refused.
    since: [SystemTime; 2],
}

impl UsedTokens {
    pub(super) fn new() -> Self {
        // Tokens of earlier processes are invalid, because they were encrypted with another key. So no nonce is
        // forgotten yet.
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
        if self.younger.len() >= GENERATION_SIZE {
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
        for nonce in 1..3 * GENERATION_SIZE as u128 {
            // One token per second, each issued a second before.
            let now = nonce as u64 + 2;
            assert!(used.take(nonce, at(now - 1), at(now)).is_ok(), "{nonce}");
            assert!(used.take(nonce, at(now - 1), at(now)).is_err(), "{nonce} again");
            assert!(used.take(0, at(1), at(now)).is_err(), "the first, after {nonce}");
        }
        assert!(used.younger.len() + used.older.len() <= 2 * GENERATION_SIZE);
    }
}
