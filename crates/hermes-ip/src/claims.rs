//! The sessions that claim a prefix of a device.
//!
//! In: a session, its scope, and the source of a packet. Out: whether the session gets the prefix, and the session for
//! a packet. Never: the set of prefixes, which the device keeps.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::address_owner::Owner;
use crate::mailbox::Mailbox;

/// Maximum number of sessions that claim one prefix.
const MAX_CLAIMS: usize = 256;

/// The claim of a session on a prefix.
#[derive(Debug)]
pub struct Claim {
    /// The owner of the session.
    pub owner: Owner,
    /// The queue of packets for the session.
    pub mailbox: Arc<Mailbox>,
    /// The number of the session at the device. Newer sessions have higher numbers.
    pub number: u64,
    /// The networks with which the session exchanges packets.
    pub scope: Scope,
}

/// The network with which a session exchanges packets. `None` in a field: all networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The network by the addresses that the client uses.
    pub asked: Option<IpNet>,
    /// The network by its addresses behind the device, after translation.
    pub here: Option<IpNet>,
}

impl Scope {
    fn width(&self) -> u8 {
        self.here.map_or(0, |scope| scope.prefix_len())
    }

    fn takes(&self, from: IpAddr) -> bool {
        self.here.is_none_or(|scope| scope.contains(&from))
    }

    /// Whether packets from one machine may belong to either of two sessions, and the machine's address does not
    /// determine which session.
    fn crosses(&self, other: &Self) -> bool {
        let meets = self.here.zip(other.here).is_none_or(|(one, two)| one.contains(&two) || two.contains(&one));
        let is_mapped = |scope: &Self| scope.asked != scope.here;
        self.asked != other.asked && meets && (is_mapped(self) || is_mapped(other))
    }
}

/// The reason why a claim is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// The prefix belongs to another owner, or has the maximum number of sessions.
    Others,
    /// Another session of the same owner has the prefix, and packets for the two sessions could not be distinguished.
    Crosses,
}

/// All claims on one prefix.
#[derive(Debug, Default)]
pub struct Claims {
    /// Claims of one owner. A device has a session for each network that it captures, all with the device's single
    /// address. Claims with a narrower scope come first; among claims with equally wide scopes, those of newer
    /// sessions.
    pub sessions: Vec<Claim>,
    /// Whether a listener captures the prefix. If so, packets for the prefix never match a wider prefix, even if no
    /// session exists at the moment.
    pub is_captured: bool,
}

impl Claims {
    /// Whether the prefix is not available to this owner.
    pub fn is_anothers(&self, owner: &Owner) -> bool {
        self.is_captured && owner.is_client() || self.sessions.iter().any(|claim| claim.owner != *owner)
    }

    /// Adds a claim. `may_cross`: accept the claim even if its scope crosses that of another claim.
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

    /// Returns the claim whose session receives a packet from this address. Routers send from addresses outside all
    /// scopes. Their packets go to the newest session, if all sessions of the owner are in this process (`are_all`).
    pub fn holder(&self, from: IpAddr, are_all: bool) -> Option<&Claim> {
        let newest = || self.sessions.iter().filter(|_| are_all).max_by_key(|claim| claim.number);
        self.sessions.iter().find(|claim| claim.scope.takes(from)).or_else(newest)
    }
}
