//! Max-min fairness of a bounded table: each owner's number of entries, and which owner yields to which.
//!
//! In: owners that take an entry or return one, and the table's bound. Out: whether an owner may have one more, and
//! whose entries it displaces. Pure: no clock, no lock, no entry.
//!
//! A full table takes from the owner that has most, as long as that leaves this owner no less than the newcomer has. An
//! entry that has to be displaced no longer counts for its owner, although closing it may take a moment: the owner owes
//! it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use hermes_model::facts::{Facts, Trust};
use hermes_net::client_address::network;

/// The holder of entries in a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// Authenticated. Only other authenticated owners displace its entries.
    pub is_peer: bool,
    client: Client,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Client {
    /// An address of IPv4, or a /64 of IPv6.
    Network(IpAddr),
    /// The address of a client that may still authenticate: unauthenticated clients at that address displace none of
    /// its entries.
    Unproven(IpAddr),
    Node(Arc<str>),
    User(Arc<str>),
}

impl Owner {
    /// A client that is known by its address alone.
    pub fn stranger(address: IpAddr) -> Self {
        Self { is_peer: false, client: Client::Network(network(address)) }
    }

    /// A client that may still authenticate.
    pub fn unproven(address: IpAddr) -> Self {
        Self { is_peer: false, client: Client::Unproven(network(address)) }
    }

    /// The client at the other end of a connection.
    pub fn of_connection(trust: &Trust, address: IpAddr) -> Self {
        let client = trust.peer().and_then(|peer| {
            let node = peer.node.clone().map(Client::Node);
            node.or_else(|| peer.users.first().cloned().map(Client::User))
        });
        let client = client.unwrap_or_else(|| Client::Network(network(address)));
        Self { is_peer: trust.is_believed(), client }
    }

    /// The client of a session: its user, the node that it came by, or its address. A session without a user, over a
    /// connection with a certificate of the overlay, belongs to the holder of the certificate. Users and addresses have
    /// no precedence.
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

/// The verdict on one more entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The table has room.
    Taken,
    /// Granted: another owner owes the table entries for it.
    Displacing,
    Full,
}

/// The entries of a table, by owner.
#[derive(Debug, Default)]
pub struct Ledger {
    owners: HashMap<Owner, Held>,
    /// All owners with entries, by `is_peer`, then by their number.
    ranks: BTreeSet<(bool, usize, Owner)>,
    total: usize,
    /// The entries of peers in `total`.
    peers: usize,
    /// Entries that are owed, and that no worker has chosen yet.
    unclaimed: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    entries: usize,
    /// Entries to be displaced, or ending.
    owed: usize,
    /// The owed entries that no worker has chosen yet.
    unclaimed: usize,
}

/// Entries are displaced in batches, one in this many at a time, since each choice looks at all of them.
const BATCH: usize = 128;
/// Entries that are owed and not chosen yet, as a fraction of the bound: beside those that are being closed, a table
/// exceeds its bound by no more.
const MAX_UNCLAIMED: usize = 8;

impl Ledger {
    /// Takes one more entry for an owner. `limit` is the bound; `reserve` entries of it are for peers.
    pub fn take(&mut self, owner: &Owner, limit: usize, reserve: usize) -> Verdict {
        let reserve = if owner.is_peer { 0 } else { reserve.saturating_sub(self.peers) };
        let mut verdict = Verdict::Taken;
        if self.total + reserve >= limit {
            let has = self.entries(owner);
            let Some((most, entries)) = self.largest(owner.is_peer) else { return Verdict::Full };
            if entries < has + 2 || self.unclaimed > limit / MAX_UNCLAIMED {
                return Verdict::Full;
            }
            let count = ((entries - has) / 2).clamp(1, (limit / BATCH).max(1));
            self.owe(&most, count, count);
            verdict = Verdict::Displacing;
        }
        self.change(owner, |held| held.entries += 1);
        verdict
    }

    /// Returns an entry of the owner that has ended by itself. It pays for one that is owed and not chosen yet.
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

    /// An entry that was chosen to be displaced has ended.
    pub fn is_paid(&mut self, owner: &Owner) {
        self.change(owner, |held| held.owed = held.owed.saturating_sub(1));
    }

    /// An entry of an owner was chosen to be displaced: there is room for another one.
    pub fn displace(&mut self, owner: &Owner) {
        self.owe(owner, self.entries(owner).min(1), 0);
    }

    /// Claims entries that an owner owes, with this many candidates to choose from. Returns the number to displace.
    pub fn claim(&mut self, owner: &Owner, candidates: usize) -> usize {
        let mut claimed = 0;
        self.change(owner, |held| {
            claimed = held.unclaimed.min(candidates);
            held.unclaimed -= claimed;
        });
        claimed
    }

    /// Owners that owe entries which no worker has chosen yet.
    pub fn debtors(&self) -> Vec<Owner> {
        self.owners.iter().filter(|(_, held)| held.unclaimed > 0).map(|(owner, _)| owner.clone()).collect()
    }

    /// The number of entries of an owner.
    pub fn entries(&self, owner: &Owner) -> usize {
        self.owners.get(owner).map_or(0, |held| held.entries)
    }

    /// The owner that has most, among those that may yield to a peer, or to an unauthenticated client.
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

    /// Changes the holdings of an owner, and all sums with them.
    fn change(&mut self, owner: &Owner, how: impl FnOnce(&mut Held)) {
        let held = self.owners.entry(owner.clone()).or_default();
        let before = *held;
        how(held);
        let now = *held;
        if now.entries == 0 && now.owed == 0 {
            self.owners.remove(owner);
        }
        self.unclaimed = self.unclaimed + now.unclaimed - before.unclaimed;
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
