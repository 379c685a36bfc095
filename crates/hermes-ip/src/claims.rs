//! The sessions that claim a prefix of a device.
//!
//! In: a session, its scope, and the source of a packet. Out: whether the session gets the prefix, and the session for
//! a packet. Never: the set of prefixes, which the device has.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::address_owner::Owner;
use crate::mailbox::Mailbox;

/// Maximum sessions with one prefix.
const MAX_CLAIMS: usize = 256;

/// The claim of a session on a prefix.
#[derive(Debug)]
pub struct Claim {
    /// The owner of the session.
    pub owner: Owner,
    /// The queue of packets for the session.
    pub mailbox: Arc<Mailbox>,
    /// The number of the session at the device.
    pub number: u64,
    /// The prefixes of the session.
    pub scope: Scope,
}

/// The networks that a session talks to; `None` stands for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The network as the client knows it.
    pub asked: Option<IpNet>,
    /// The network as it is behind the device, after translation.
    pub here: Option<IpNet>,
}

impl Scope {
    fn width(&self) -> u8 {
        self.here.map_or(0, |scope| scope.prefix_len())
    }

    fn takes(&self, from: IpAddr) -> bool {
        self.here.is_none_or(|scope| scope.contains(&from))
    }

    /// Whether packets from the same machine may belong to either session, and its address does not tell which.
    fn crosses(&self, other: &Self) -> bool {
        let meets = self.here.zip(other.here).is_none_or(|(one, two)| one.contains(&two) || two.contains(&one));
        let is_mapped = |scope: &Self| scope.asked != scope.here;
        self.asked != other.asked && meets && (is_mapped(self) || is_mapped(other))
    }
}

/// The reason why a session does not get a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// The prefix belongs to another owner, or has its maximum of sessions.
    Others,
    /// Another session of the same owner has it, and packets for the two could not be told apart.
    Crosses,
}

/// All claims on one prefix.
#[derive(Debug, Default)]
pub struct Claims {
    /// Claims of one owner. A device has a session for each network that it captures, all of them with its single
    /// address. Narrower scopes come first; among equal ones, newer sessions.
    pub sessions: Vec<Claim>,
    /// A listener captures the prefix. Its packets never match a wider prefix, even if no session exists at the moment.
    pub is_captured: bool,
}

impl Claims {
    /// Whether the prefix is not available to this owner.
    pub fn is_anothers(&self, owner: &Owner) -> bool {
        self.is_captured && owner.is_client() || self.sessions.iter().any(|claim| claim.owner != *owner)
    }

    /// Adds a claim. `may_cross`: the claim is accepted even if its scope crosses that of another one.
    ///
    /// # Errors
    ///
    /// The reason for the rejection.
    pub fn enter(&mut self, claim: Claim, may_cross: bool) -> Result<(), ClaimError> {
        if self.sessions.len() >= MAX_CLAIMS || self.is_anothers(&claim.owner) {
            return Err(ClaimError::Others);
        }
        if !may_cross && self.sessions.iter().any(|other| other.scope.crosses(&claim.scope)) {
            return Err(ClaimError::Crosses);
        }
        let at = self.sessions.partition_point(|other| other.scope.width() > claim.scope.width());
        self.sessions.insert(at, claim);
        Ok(())
    }

    /// The session for a packet from this address. Routers send from other addresses; their packets go to the newest
    /// session, if all sessions of the owner are in this process (`are_all`).
    pub fn holder(&self, from: IpAddr, are_all: bool) -> Option<&Claim> {
        let newest = || self.sessions.iter().filter(|_| are_all).max_by_key(|claim| claim.number);
        self.sessions.iter().find(|claim| claim.scope.takes(from)).or_else(newest)
    }
}
