//! The signatures that this node has accepted, until they are too old to count again.
//!
//! In: a signature with its client, its time and the time until which it counts. Out: whether it counts. Never: a signature
//! of the time before this process, whose signatures nobody remembers; or more signatures of a client, or of all, than a
//! bound.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Signatures that a node remembers, and those of one client.
const MAX_SEEN: usize = 1 << 18;
const MAX_OF_CLIENT: usize = 1 << 14;

/// The reason why a signature does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotTaken {
    #[error("the signature has been used")]
    Used,
    #[error("the signature is older than this process, which cannot know whether it has been used")]
    BeforeStart,
    #[error("too many signatures are remembered")]
    TooMany,
}

/// The accepted signatures.
#[derive(Debug)]
pub(crate) struct SeenSignatures {
    /// The start of this process in seconds since 1970.
    began: u64,
    state: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// By the second until which they count, each with its client.
    by_end: BTreeMap<u64, HashMap<Vec<u8>, Arc<str>>>,
    count: usize,
    by_client: HashMap<Arc<str>, usize>,
}

impl Default for SeenSignatures {
    fn default() -> Self {
        Self::since(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
    }
}

impl SeenSignatures {
    fn since(began: u64) -> Self {
        Self { began, state: Mutex::default() }
    }

    /// Remembers a signature.
    ///
    /// # Errors
    /// It does not count.
    pub(crate) fn add(
        &self,
        signature: Vec<u8>,
        created: u64,
        until: u64,
        client: &Arc<str>,
        now: u64,
    ) -> Result<(), NotTaken> {
        if created < self.began {
            return Err(NotTaken::BeforeStart);
        }
        let mut seen = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        seen.forget_before(now);
        if seen.by_end.get(&until).is_some_and(|same_end| same_end.contains_key(&signature)) {
            return Err(NotTaken::Used);
        }
        let of_client = seen.by_client.get(client).copied().unwrap_or_default();
        if seen.count >= MAX_SEEN || of_client >= MAX_OF_CLIENT {
            return Err(NotTaken::TooMany);
        }
        seen.count += 1;
        *seen.by_client.entry(client.clone()).or_default() += 1;
        seen.by_end.entry(until).or_default().insert(signature, client.clone());
        Ok(())
    }
}

impl Seen {
    fn forget_before(&mut self, now: u64) {
        while let Some(first) = self.by_end.first_entry().filter(|first| *first.key() < now) {
            for client in first.remove().into_values() {
                self.count -= 1;
                if let Some(count) = self.by_client.get_mut(&client) {
                    *count -= 1;
                    if *count == 0 {
                        self.by_client.remove(&client);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_counts_once_and_a_client_has_not_all_the_room() {
        let seen = SeenSignatures::since(40);
        let (one, other) = (Arc::from("one"), Arc::from("other"));
        let add = |number: usize, client, now| seen.add(number.to_be_bytes().to_vec(), 45, 100, client, now);
        assert_eq!(seen.add(vec![1], 39, 100, &one, 50), Err(NotTaken::BeforeStart));
        assert_eq!(add(0, &one, 50), Ok(()));
        assert_eq!(add(0, &other, 50), Err(NotTaken::Used));
        assert!((1..MAX_OF_CLIENT).all(|number| add(number, &one, 50).is_ok()));
        assert_eq!(add(MAX_OF_CLIENT, &one, 50), Err(NotTaken::TooMany));
        assert_eq!(add(MAX_OF_CLIENT, &other, 50), Ok(()));
        // The old ones make room.
        assert_eq!(add(MAX_OF_CLIENT + 1, &one, 100), Err(NotTaken::TooMany));
        assert_eq!(seen.add(vec![1], 102, 162, &one, 101), Ok(()));
        assert_eq!(seen.state.lock().map(|seen| (seen.count, seen.by_client.len())).ok(), Some((1, 1)));
    }
}
