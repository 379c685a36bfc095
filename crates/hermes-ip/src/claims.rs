//! The holds of sessions on a prefix of a device.
//!
//! In: a session, with whom it is, and a packet's source. Out: whether it gets the prefix, and which session a packet
//! is for. Never: which prefixes there are; that is the device's.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::mailbox::Mailbox;
use crate::owner::Owner;

/// Sessions that may hold one prefix.
const MOST_CLAIMS: usize = 256;

/// A session's hold on a prefix.
#[derive(Debug)]
pub struct Claim {
    /// The owner of the session.
    pub owner: Owner,
    /// Where packets for the session go.
    pub mailbox: Arc<Mailbox>,
    /// The number of the session at the device.
    pub number: u64,
    /// The prefixes of the session.
    pub scope: Scope,
}

/// With whom a session is; `None`: with anybody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// As its client knows them.
    pub asked: Option<IpNet>,
    /// As they are behind the device.
    pub here: Option<IpNet>,
}

impl Scope {
    fn width(&self) -> u8 {
        self.here.map_or(0, |scope| scope.prefix_len())
    }

    fn takes(&self, from: IpAddr) -> bool {
        self.here.is_none_or(|scope| scope.contains(&from))
    }

    /// What comes from the same machine is for the one or the other, and the machine's address does not say for which.
    fn crosses(&self, other: &Self) -> bool {
        let meets = self.here.zip(other.here).is_none_or(|(one, two)| one.contains(&two) || two.contains(&one));
        let is_mapped = |scope: &Self| scope.asked != scope.here;
        self.asked != other.asked && meets && (is_mapped(self) || is_mapped(other))
    }
}

/// Why a session does not get a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is another's, or as much as one may have.
    Others,
    /// Another session of the same owner has it, and answers for the two could not be told apart.
    Crosses,
}

/// All holds on one prefix.
#[derive(Debug, Default)]
pub struct Claims {
    /// Of one owner: a device has a session for each of the networks that it captures, all of them with its one
    /// address.
    /// The narrower ones come first, of equal ones the newer.
    pub sessions: Vec<Claim>,
    /// A listener captures it. What is for it is for no wider one, though there be no session just now.
    pub is_captured: bool,
}

impl Claims {
    /// Whether this owner may not have it.
    pub fn is_anothers(&self, owner: &Owner) -> bool {
        self.is_captured && owner.is_client() || self.sessions.iter().any(|claim| claim.owner != *owner)
    }

    /// One more session has it. One that `may_cross` gets it though another one's scope crosses its own.
    ///
    /// # Errors
    /// `Refused`: why it does not.
    pub fn enter(&mut self, claim: Claim, may_cross: bool) -> Result<(), Refused> {
        if self.sessions.len() >= MOST_CLAIMS || self.is_anothers(&claim.owner) {
            return Err(Refused::Others);
        }
        if !may_cross && self.sessions.iter().any(|other| other.scope.crosses(&claim.scope)) {
            return Err(Refused::Crosses);
        }
        let at = self.sessions.partition_point(|other| other.scope.width() > claim.scope.width());
        self.sessions.insert(at, claim);
        Ok(())
    }

    /// Whose a packet from there is. Routers speak from elsewhere, to whichever session is newest, where all of them
    /// are here.
    pub fn holder(&self, from: IpAddr, are_all: bool) -> Option<&Claim> {
        let newest = || self.sessions.iter().filter(|_| are_all).max_by_key(|claim| claim.number);
        self.sessions.iter().find(|claim| claim.scope.takes(from)).or_else(newest)
    }
}
