//! Whose each prefix is that clients were given, on all devices of the node: they share the machine's routes.
//!
//! In: prefixes, as sessions take them and give them back. Out: whether one may have it. Nothing overlaps what is
//! another's. Never: a prefix that a listener captures; those are a device's own.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;

use super::device::Owner;
use super::table::Table;

/// Of the whole node. Taken where sessions begin and end, never for a packet.
#[derive(Debug, Default)]
pub(crate) struct Given(Mutex<Table<Holding>>);

/// A prefix that sessions of one owner have.
#[derive(Debug)]
struct Holding {
    owner: Owner,
    sessions: usize,
}

impl Given {
    fn table(&self) -> MutexGuard<'_, Table<Holding>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more session of this owner has it. False: a part of it, or more than it, is another's.
    pub(super) fn take(&self, prefix: IpNet, owner: &Owner) -> bool {
        let mut table = self.table();
        if table.overlapping(prefix).any(|holding| holding.owner != *owner) {
            return false;
        }
        match table.get_mut(prefix) {
            Some(holding) => holding.sessions += 1,
            None => drop(table.insert(prefix, Holding { owner: owner.clone(), sessions: 1 })),
        }
        true
    }

    /// One less has it.
    pub(super) fn give_back(&self, prefix: IpNet) {
        let mut table = self.table();
        let Some(holding) = table.get_mut(prefix) else { return };
        holding.sessions -= 1;
        if holding.sessions == 0 {
            table.remove(prefix);
        }
    }

    /// Whether nobody has it, a part of it or more than it.
    pub(super) fn is_free(&self, prefix: IpNet) -> bool {
        self.table().overlapping(prefix).next().is_none()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_what_is_given_is_given_to_another_until_its_last_session_is_over() {
        let given = Given::default();
        let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let (network, one) = (net("10.20.0.16/28"), net("10.20.0.17/32"));
        // A session that moves has it on two devices for a while.
        assert!(given.take(network, &alice) && given.take(network, &alice) && given.take(one, &alice));
        given.give_back(one);
        for part in [one, network, net("10.20.0.0/24")] {
            assert!(!given.take(part, &bob) && !given.is_free(part), "{part}");
        }
        assert!(given.take(net("10.20.0.1/32"), &bob));
        given.give_back(network);
        assert!(!given.take(one, &bob));
        given.give_back(network);
        assert!(given.is_free(one) && given.take(one, &bob));
    }
}
