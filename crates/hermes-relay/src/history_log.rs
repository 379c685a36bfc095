//! The order in which all histories of a relay got their publications.
//!
//! In: publications that a channel remembers. Out: the oldest of all channels, when memory is short. Never: a publication
//! itself; entries are identifiers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::EventId;
use crate::channel::Channel;

/// The number of entries below which outdated ones are not searched for.
const MIN_COMPACTED: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct HistoryLog {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// Channels and publications. Histories drop publications by themselves, so entries may be outdated.
    oldest_first: VecDeque<(Weak<Channel>, EventId)>,
    /// The number of entries at which outdated ones are removed next.
    compact_at: usize,
}

impl HistoryLog {
    /// Adds the latest publication of a history. The caller holds no lock of a channel.
    pub(crate) fn push(&self, channel: &Arc<Channel>, id: EventId) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.oldest_first.push_back((Arc::downgrade(channel), id));
        if entries.oldest_first.len() >= entries.compact_at.max(MIN_COMPACTED) {
            let is_current = |entry: &(Weak<Channel>, EventId)| {
                let (channel, id) = entry;
                channel.upgrade().is_some_and(|channel| channel.remembers(*id))
            };
            entries.oldest_first.retain(is_current);
            // So that the search costs a constant time for each publication.
            entries.compact_at = 2 * entries.oldest_first.len();
        }
    }

    /// Removes the oldest publication from its history. Returns false if all histories are empty.
    pub(crate) fn forget_oldest(&self) -> bool {
        let oldest = self.entries.lock().unwrap_or_else(PoisonError::into_inner).oldest_first.pop_front();
        let Some((channel, id)) = oldest else { return false };
        if let Some(channel) = channel.upgrade() {
            channel.forget(id);
        }
        true
    }
}
