//! Data packets by name. The least recently used go first.
//!
//! In: packets that may be used, Interests, and the time. Out: a packet that answers an Interest. The bytes are bounded.
//! Never: a packet that nobody has judged, since everybody gets it under its name.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use crate::name::Name;
use crate::packet::{Data, Interest};

/// Bytes of state for each packet, apart from its own.
const OVERHEAD: usize = 400;
/// Packets that one Interest with a prefix may look at.
const MAX_PREFIX_CANDIDATES: usize = 64;

/// Stored packets.
pub(crate) struct DataStore {
    max_bytes: usize,
    bytes: usize,
    uses: u64,
    /// The order of encoded names keeps all names with one prefix together.
    packets: BTreeMap<Name, Stored>,
    /// The names by their last use.
    order: BTreeMap<u64, Name>,
}

struct Stored {
    data: Data,
    fresh_until: Duration,
    /// The end of the period in which its signature counts. `None`: it has no end.
    valid_until: Option<Duration>,
    used: u64,
}

impl DataStore {
    /// An empty store for this many bytes.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, bytes: 0, uses: 0, packets: BTreeMap::new(), order: BTreeMap::new() }
    }

    /// Stores a packet. It replaces one with the same name. From `valid_until` on, it answers no Interest.
    pub(crate) fn put(&mut self, data: &Data, now: Duration, valid_until: Option<Duration>) {
        self.remove(&data.name);
        // The packet may be a slice of a buffer that is much larger.
        let Ok(data) = Data::decode(Bytes::copy_from_slice(&data.packet)) else { return };
        self.uses += 1;
        self.bytes += cost(&data);
        let fresh_until = now.saturating_add(data.freshness.unwrap_or_default());
        self.order.insert(self.uses, data.name.clone());
        self.packets.insert(data.name.clone(), Stored { data, fresh_until, valid_until, used: self.uses });
        while self.bytes > self.max_bytes
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.remove(&oldest);
        }
    }

    /// Returns a packet that answers an Interest.
    pub(crate) fn find(&mut self, interest: &Interest, now: Duration) -> Option<Data> {
        let wanted = &interest.name;
        let answers = |stored: &Stored| {
            let is_fresh = !interest.must_be_fresh || now < stored.fresh_until;
            is_fresh && stored.valid_until.is_none_or(|end| now < end) && stored.data.answers(interest)
        };
        let name = if wanted.has_implicit_digest() {
            let name = wanted.parent();
            self.packets.get(&name).is_some_and(answers).then_some(name)?
        } else if interest.can_be_prefix {
            let from = self.packets.range(wanted.clone()..).take_while(|(name, _)| wanted.is_prefix_of(name));
            let answers =
                |stored: &Stored| answers(stored) && stored.data.content_prefixes().any(|name| name == *wanted);
            from.take(MAX_PREFIX_CANDIDATES).find(|(_, stored)| answers(stored))?.0.clone()
        } else {
            self.packets.get(wanted).is_some_and(answers).then(|| wanted.clone())?
        };
        self.uses += 1;
        let stored = self.packets.get_mut(&name)?;
        self.order.remove(&std::mem::replace(&mut stored.used, self.uses));
        self.order.insert(self.uses, name);
        Some(stored.data.clone())
    }

    fn remove(&mut self, name: &Name) {
        if let Some(stored) = self.packets.remove(name) {
            self.order.remove(&stored.used);
            self.bytes -= cost(&stored.data);
        }
    }
}

fn cost(data: &Data) -> usize {
    data.packet.len() + OVERHEAD
}

#[cfg(test)]
mod tests;
