//! Max-min fairness of a bounded table: each owner's number of entries, and which owner yields to which.
//!
//! In: owners that take an entry or return one, and the table's bound. Out: whether an owner may have one more entry,
//! and whose entries it displaces. The ledger only counts: it has no clock, no lock and no reference to the entries.
//!
//! A full table displaces entries of the owner with the most entries, as long as that owner retains no fewer than the
//! newcomer has. An entry that must be displaced no longer counts for its owner, although closing it takes a moment.
//! Until it is closed, the owner owes it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use hermes_model::facts::{Facts, Trust};
use hermes_net::client_address::network;

/// The client to which entries of a table are counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// True if the owner is authenticated. Only other authenticated owners displace its entries.
    pub is_peer: bool,
    client: Client,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Client {
    /// A client that is known only by its IPv4 address or its IPv6 /64.
    Network(IpAddr),
    /// The address of a client that may still authenticate. It differs from `Network`, so that unauthenticated clients
    /// at the same address do not displace the entry.
    Unproven(IpAddr),
    Node(Arc<str>),
    User(Arc<str>),
}

impl Owner {
    /// Returns the owner for a client that is known only by its address.
    pub fn stranger(address: IpAddr) -> Self {
        Self { is_peer: false, client: Client::Network(network(address)) }
    }

    /// Returns the owner for a client that may still authenticate.
    pub fn unproven(address: IpAddr) -> Self {
        Self { is_peer: false, client: Client::Unproven(network(address)) }
    }

    /// Returns the owner for the peer of a connection: its node, its first user, or its address.
    pub fn of_connection(trust: &Trust, address: IpAddr) -> Self {
        let client = trust.peer().and_then(|peer| {
            let node = peer.node.clone().map(Client::Node);
            node.or_else(|| peer.users.first().cloned().map(Client::User))
        });
        let client = client.unwrap_or_else(|| Client::Network(network(address)));
        Self { is_peer: trust.is_believed(), client }
    }

    /// Returns the owner for a session: its user, the certified peer of its connection, or its address. Only a
    /// certified peer without a user counts as authenticated.
    pub fn of_session(facts: &Facts) -> Self {
        let Self { client, .. } = Self::of_connection(&facts.trust, facts.source.ip());
        match &facts.user {
            Some(user) => Self { is_peer: false, client: Client::User(user.clone()) },
            None => Self { is_peer: facts.trust.peer().is_some(), client },
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.client {
            Client::Network(address) | Client::Unproven(address) => write!(f, "address {address}"),
            Client::Node(name) => write!(f, "node {name}"),
            Client::User(name) => write!(f, "user {name}"),
        }
    }
}

/// The answer to a request for one more entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The entry is granted, because the table has room.
    Taken,
    /// The entry is granted. Another owner must lose entries for it.
    Displacing,
    /// The entry is refused.
    Full,
}

/// The number of entries of each owner of a table.
#[derive(Debug, Default)]
pub struct Ledger {
    owners: HashMap<Owner, Held>,
    /// All owners with entries: `is_peer`, the number of entries, and the owner, in this order.
    ranks: BTreeSet<(bool, usize, Owner)>,
    total: usize,
    /// The number of entries in `total` that belong to authenticated owners.
    peers: usize,
    /// The number of owed entries: those that no worker has chosen yet, and those that are being closed.
    owed: usize,
    /// The number of owed entries that no worker has chosen yet.
    unclaimed: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    entries: usize,
    /// The number of entries that must be displaced or are ending. They are not in `entries`.
    owed: usize,
    /// The number of entries in `owed` that no worker has chosen yet.
    unclaimed: usize,
}

/// The divisor of a table's limit that gives the maximum number of entries displaced at once. Each choice examines all
/// entries, so displacing one entry at a time would cost too much.
const BATCH: usize = 128;
/// The divisor of a table's limit that gives the maximum number of owed entries that no worker has chosen yet. A table
/// exceeds its limit by at most this number, plus the entries that are being closed.
const MAX_UNCLAIMED: usize = 8;
/// The divisor of a table's limit that gives the maximum number of owed entries where it is bounded. A client that
/// reconnects faster than its connections close then does not use up the descriptors. An owner with entries may cause
/// half of them, so that such a client leaves room for clients without any.
const MAX_OWED: usize = 4;
/// The minimum that applies instead to small tables.
const MIN_OWED: usize = 32;

impl Ledger {
    /// Takes one more entry for an owner. `limit` is the bound of the table, of which `reserve` entries are for
    /// authenticated owners.
    pub fn take(&mut self, owner: &Owner, limit: usize, reserve: usize) -> Verdict {
        if self.take_free(owner, limit, reserve) == Verdict::Taken {
            return Verdict::Taken;
        }
        let has = self.entries(owner);
        let Some((most, entries)) = self.largest(owner.is_peer) else { return Verdict::Full };
        if entries < has + 2 || self.unclaimed > limit / MAX_UNCLAIMED {
            return Verdict::Full;
        }
        let count = ((entries - has) / 2).clamp(1, (limit / BATCH).max(1));
        self.owe(&most, count, count);
        self.change(owner, |held| held.entries += 1);
        Verdict::Displacing
    }

    /// Takes one more entry for an owner if the table has room, and displaces none.
    pub fn take_free(&mut self, owner: &Owner, limit: usize, reserve: usize) -> Verdict {
        let reserve = if owner.is_peer { 0 } else { reserve.saturating_sub(self.peers) };
        if self.total + reserve >= limit {
            return Verdict::Full;
        }
        self.change(owner, |held| held.entries += 1);
        Verdict::Taken
    }

    /// Whether the table may displace one more entry for an owner, or must wait until displaced entries are closed.
    pub fn may_displace(&self, owner: &Owner, limit: usize) -> bool {
        let most = (limit / MAX_OWED).max(MIN_OWED);
        self.owed < if self.entries(owner) == 0 { most } else { most / 2 }
    }

    /// Returns an entry that ended without being displaced. If its owner owes an entry that no worker has chosen yet,
    /// the returned one settles that debt.
    pub fn give_back(&mut self, owner: &Owner) {
        self.change(owner, |held| {
            if held.unclaimed > 0 {
                held.unclaimed -= 1;
                held.owed -= 1;
            } else {
                held.entries = held.entries.saturating_sub(1);
            }
        });
    }

    /// Records that a displaced entry of this owner has ended.
    pub fn is_paid(&mut self, owner: &Owner) {
        self.change(owner, |held| held.owed = held.owed.saturating_sub(1));
    }

    /// Records that a worker has displaced an entry of this owner. The table then has room for another entry.
    pub fn displace(&mut self, owner: &Owner) {
        self.owe(owner, self.entries(owner).min(1), 0);
    }

    /// Assigns owed entries of an owner to a worker that has this many candidates. Returns the number of entries that
    /// the worker must displace.
    pub fn claim(&mut self, owner: &Owner, candidates: usize) -> usize {
        let mut claimed = 0;
        self.change(owner, |held| {
            claimed = held.unclaimed.min(candidates);
            held.unclaimed -= claimed;
        });
        claimed
    }

    /// Returns the owners that owe entries which no worker has chosen yet.
    pub fn debtors(&self) -> Vec<Owner> {
        self.owners.iter().filter(|(_, held)| held.unclaimed > 0).map(|(owner, _)| owner.clone()).collect()
    }

    /// Returns the number of all entries.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of entries of an owner, without owed ones.
    pub fn entries(&self, owner: &Owner) -> usize {
        self.owners.get(owner).map_or(0, |held| held.entries)
    }

    /// Returns the owner with the most entries, and their number. With `to_peer`, authenticated owners are included;
    /// otherwise only unauthenticated ones are considered.
    fn largest(&self, to_peer: bool) -> Option<(Owner, usize)> {
        let (mut all, mut strangers) = (self.ranks.iter(), self.ranks.iter().filter(|(is_peer, ..)| !is_peer));
        let of = |(_, entries, owner): &(bool, usize, Owner)| (owner.clone(), *entries);
        let stranger = strangers.next_back().map(of);
        let peer = all.next_back().filter(|(is_peer, ..)| *is_peer && to_peer).map(of);
        stranger.into_iter().chain(peer).max_by_key(|(_, entries)| *entries)
    }

    fn owe(&mut self, owner: &Owner, count: usize, unclaimed: usize) {
        self.change(owner, |held| {
            held.entries -= count;
            held.owed += count;
            held.unclaimed += unclaimed;
        });
    }

    /// Changes the counts of an owner, and updates all sums.
    fn change(&mut self, owner: &Owner, how: impl FnOnce(&mut Held)) {
        let held = self.owners.entry(owner.clone()).or_default();
        let before = *held;
        how(held);
        let now = *held;
        if now.entries == 0 && now.owed == 0 {
            self.owners.remove(owner);
        }
        self.unclaimed = self.unclaimed + now.unclaimed - before.unclaimed;
        self.owed = self.owed + now.owed - before.owed;
        if now.entries == before.entries {
            return;
        }
        if before.entries > 0 {
            self.ranks.remove(&(owner.is_peer, before.entries, owner.clone()));
        }
        if now.entries > 0 {
            self.ranks.insert((owner.is_peer, now.entries, owner.clone()));
        }
        self.total = self.total + now.entries - before.entries;
        if owner.is_peer {
            self.peers = self.peers + now.entries - before.entries;
        }
    }
}

#[cfg(test)]
mod tests;
