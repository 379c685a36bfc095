//! The signatures that a relay has accepted, until they are too old to count again.
//!
//! In: a signature with the time until which it counts. Out: whether it is new. Never: more than a bound of them; beyond
//! it, a new one is refused.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hermes_transport::error::Error;

/// Signatures that a relay remembers.
const MAX_SEEN: usize = 65_536;

/// The signatures that a relay has accepted, until they are too old to count again.
#[derive(Debug, Default)]
pub(crate) struct SeenSignatures(Mutex<HashMap<Vec<u8>, u64>>);

impl SeenSignatures {
    /// Remembers a signature. Returns false if it is known.
    pub(crate) fn add(&self, signature: Vec<u8>, until: u64, now: u64) -> Result<bool, Error> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= MAX_SEEN {
            seen.retain(|_, until| *until >= now);
        }
        if seen.len() >= MAX_SEEN {
            return Err(Error::Limit("signatures of this relay"));
        }
        Ok(seen.insert(signature, until).is_none())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_counts_once_and_few_are_remembered() {
        let seen = SeenSignatures::default();
        assert!(seen.add(vec![1], 100, 50).unwrap());
        assert!(!seen.add(vec![1], 100, 50).unwrap());
        for number in 1..MAX_SEEN {
            assert!(seen.add(number.to_be_bytes().to_vec(), 100, 50).unwrap());
        }
        assert!(seen.add(vec![2], 100, 50).is_err());
        // The old ones make room.
        assert!(seen.add(vec![2], 200, 101).unwrap());
    }
}
