//! Trust: the user of a session, from the authenticated peer and the claim in the headers.
//!
//! In: the authentication of the connection, the lines of `hermes-user`, the users that this document binds to nodes.
//! Out: a user, no user, or a rejection.
//! Never: an unproven claim.
//!
//! | peer | no claim | claims a user
//!
//! ---|---|---
//!
//! anyone (no certificate) | no user | no user: the claim is removed
//!
//! a standalone node, or an address in the listener's `trust` | its one bound user, else none | that user
//!
//! a node or device with bound users | its one bound user, else none | that user if it is bound to the peer, else 403
//!
//! a node without bound users | no user | no user: the claim is removed and reported
//!
//! |A user is bound to a node by `spiffe://OVERLAY/user/NAME` in its certificate, or by `users` of the receiver's document, where `*` is any user. Forwarding is safe: a node forwards the user that *it* determined by these rules, never the header that it received. A dependent node has no role URI, so the next node accepts only users bound to it. If the dependent node trusted a false claim, the next hop still rejects it.

use std::fmt;
use std::sync::Arc;

use http::{HeaderName, HeaderValue, StatusCode};

use crate::facts::{Facts, Kind, Peer, Trust};
use crate::field_collision::{begins_alike, remove_colliding, remove_where};
use crate::snapshot::{Listener, Snapshot};

use crate::spiffe::is_user_name;
pub use crate::spiffe::{KEY, MAX_USER_BYTES, SpiffeId, SpiffeKind, own_overlay, parse_spiffe, peer};

/// The field that carries the user between nodes.
pub const HERMES_USER: HeaderName = HeaderName::from_static("hermes-user");

/// The field that carries the origin of an `ip` session without a user: `node/NAME` or `address/ADDRESS`. A node
/// overwrites it unless the peer may pass on assertions of others.
pub const HERMES_ORIGIN: HeaderName = HeaderName::from_static("hermes-origin");

/// The field in which a node tells how many subscribers it subscribes for. Only nodes that pass on assertions of others
/// may send it: a relay trusts them to have checked these subscribers.
pub const SUBSCRIBERS_BEHIND: HeaderName = HeaderName::from_static("hermes-subscribers-behind");

/// The field in which a node asks a peer to keep a copy of a channel, for this number of seconds, and to hand it over. Only
/// nodes that pass on assertions of others may send it.
pub const STAND_BY: HeaderName = HeaderName::from_static("hermes-stand-by");

/// The field in which a node that keeps a copy confirms what it has. See [`STAND_BY`].
pub const CONFIRMED: HeaderName = HeaderName::from_static("hermes-confirmed");

/// The name of the peer that asks another relay.
pub const PEER: HeaderName = HeaderName::from_static("hermes-peer");

/// The field in which a peer asks for the root of a channel, or moves it.
pub const LOCATE: HeaderName = HeaderName::from_static("hermes-locate");

/// The peer that was the root of a channel before it moved.
pub const ROOT_BEFORE: HeaderName = HeaderName::from_static("hermes-root-before");

/// The fields of relays that only nodes may send that pass on assertions of others.
const OF_PEERS: [HeaderName; 6] = [SUBSCRIBERS_BEHIND, STAND_BY, CONFIRMED, PEER, LOCATE, ROOT_BEFORE];

/// Prefix of the overlay's own fields.
const OVERLAY: &str = "hermes-";

/// The fields of relays. Any client may send them to any relay and gets them from it: they prove nothing about the client.
const OF_RELAYS: [HeaderName; 19] = [
    HeaderName::from_static("hermes-channel"),
    HeaderName::from_static("hermes-channels"),
    HeaderName::from_static("hermes-copies"),
    HeaderName::from_static("hermes-deliver"),
    HeaderName::from_static("hermes-delivered"),
    HeaderName::from_static("hermes-epochs"),
    HeaderName::from_static("hermes-event-id"),
    HeaderName::from_static("hermes-group"),
    HeaderName::from_static("hermes-heartbeat"),
    HeaderName::from_static("hermes-max-timeout"),
    HeaderName::from_static("hermes-missed"),
    HeaderName::from_static("hermes-move"),
    HeaderName::from_static("hermes-new"),
    HeaderName::from_static("hermes-relay"),
    HeaderName::from_static("hermes-root"),
    HeaderName::from_static("hermes-subscribe"),
    HeaderName::from_static("hermes-subscribers"),
    HeaderName::from_static("hermes-subscription"),
    HeaderName::from_static("hermes-timeout"),
];

/// Result of identity verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// This user, or no user. The caller replaces `hermes-user` in the headers by exactly this.
    User {
        /// The user, if any.
        user: Option<Arc<str>>,
        /// A claim that was rejected and removed. Worth logging if the peer has a certificate.
        dropped: Option<HeaderValue>,
    },
    /// The session is rejected.
    Refuse(Refusal),
}

/// Reason for rejecting a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A node claims a user that is not bound to it.
    NotBound {
        /// The node, or the first user of a certificate without a node.
        node: Arc<str>,
        /// The claimed user.
        user: Arc<str>,
    },
    /// The peer's key is revoked.
    Revoked,
    /// Several claims that differ.
    Conflict,
    /// The claim is not a user name.
    Illegal,
}

impl Refusal {
    /// 403 for a claim that is not proven, 400 for one that cannot be parsed.
    pub fn status(&self) -> StatusCode {
        match self {
            Refusal::NotBound { .. } | Refusal::Revoked => StatusCode::FORBIDDEN,
            Refusal::Conflict | Refusal::Illegal => StatusCode::BAD_REQUEST,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotBound { node, user } => write!(
                f,
                "node {node} claims to be user {user}, who is not bound to it; bind the user in the node's \
                 certificate (URI .../user/{user}) or in this node's document (users: {{{node}: [{user}]}})"
            ),
            Refusal::Revoked => f.write_str(REVOKED),
            Refusal::Conflict => f.write_str("conflicting hermes-user headers; send one"),
            Refusal::Illegal => write!(
                f,
                "invalid user name in hermes-user; send 1 to {MAX_USER_BYTES} visible ASCII characters without commas and quotes"
            ),
        }
    }
}

/// Message for a peer whose key is revoked.
pub const REVOKED: &str =
    "its key is revoked: the node was removed from the overlay, or enrolled again with another key";

/// True if the peer's key is revoked.
pub fn is_revoked(peer: &Peer, snapshot: &Snapshot) -> bool {
    peer.key.as_ref().is_some_and(|key| snapshot.revoked.contains(key))
}

/// Verifies the claim of a session. `claimed` are the `hermes-user` lines as the client sent them, before the listener
/// sets its own headers; see [`listener_user`] for those.
pub fn identify<'a>(
    trust: &Trust,
    claimed: impl IntoIterator<Item = &'a HeaderValue>,
    snapshot: &Snapshot,
) -> Identity {
    if matches!(trust, Trust::Certified(peer) if is_revoked(peer, snapshot)) {
        return Identity::Refuse(Refusal::Revoked);
    }
    let mut lines = claimed.into_iter();
    let claim = lines.next();
    // No claim of an anonymous client counts, so its syntax does not matter.
    let Some(bindings) = Bindings::of(trust, snapshot) else {
        return Identity::User { user: None, dropped: claim.cloned() };
    };
    let Some(value) = claim else {
        return Identity::User { user: bindings.only_user().cloned(), dropped: None };
    };
    if lines.any(|line| line != value) {
        return Identity::Refuse(Refusal::Conflict);
    }
    match value.to_str().ok().filter(|name| is_user_name(name)) {
        Some(user) => bindings.verify(user, value),
        None => Identity::Refuse(Refusal::Illegal),
    }
}

/// The user that a listener's `set-headers` assign to each session; it overrides the result of [`identify`].
pub fn listener_user(listener: &Listener) -> Option<Arc<str>> {
    user_of(&listener.set_headers)
}

/// The user that any `set-headers` assign.
pub fn user_of(set_headers: &[(HeaderName, HeaderValue)]) -> Option<Arc<str>> {
    let (_, value) = set_headers.iter().rev().find(|(name, _)| *name == HERMES_USER)?;
    value.to_str().ok().map(Arc::from)
}

/// Verifies the identity claim of a session and sets the listener's headers. Afterwards `facts` hold the user and the
/// headers for the decision. Returns a removed claim, as [`identify`] does.
///
/// # Errors
/// The session is rejected; the facts are unchanged.
pub fn settle(facts: &mut Facts, listener: &Listener, snapshot: &Snapshot) -> Result<Option<HeaderValue>, Refusal> {
    let (user, dropped) = match identify(&facts.trust, facts.headers.get_all(HERMES_USER), snapshot) {
        Identity::User { user, dropped } => (user, dropped),
        Identity::Refuse(refusal) => return Err(refusal),
    };
    if facts.trust.is_believed() {
        facts.headers.remove(HERMES_USER);
    } else {
        // These fields belong to the overlay, and this peer does not.
        remove_where(&mut facts.headers, is_claim);
    }
    if !facts.trust.is_proxy() {
        for name in OF_PEERS {
            facts.headers.remove(name);
        }
    }
    if facts.kind == Kind::Ip {
        settle_origin(facts);
    }
    if let Some(value) = user.as_deref().and_then(|user| HeaderValue::from_str(user).ok()) {
        facts.headers.insert(HERMES_USER, value);
    }
    for (name, value) in &listener.set_headers {
        remove_colliding(&mut facts.headers, name);
        facts.headers.insert(name.clone(), value.clone());
    }
    // The listener's user is proven, since the operator configured it.
    facts.user = listener_user(listener).or(user);
    Ok(dropped)
}

/// True for the overlay's own fields, and for fields that an origin cannot tell from them (`hermes_user`).
pub fn is_overlay(name: &HeaderName) -> bool {
    begins_alike(name.as_str(), OVERLAY)
}

/// True for the overlay's own fields that only its nodes may send: all but those of relays.
pub fn is_claim(name: &HeaderName) -> bool {
    is_overlay(name) && !OF_RELAYS.contains(name)
}

/// Sets the proven origin of the session. Leases of addresses belong to users; sessions without a user are identified
/// by their origin.
fn settle_origin(facts: &mut Facts) {
    let address = || format!("address/{}", facts.source.ip().to_canonical());
    let node = |peer: &Peer| peer.node.as_ref().map_or_else(address, |node| format!("node/{node}"));
    let origin = match &facts.trust {
        Trust::Certified(peer) if !peer.standalone => node(peer),
        Trust::Certified(_) | Trust::Address if facts.headers.contains_key(HERMES_ORIGIN) => return,
        Trust::Certified(peer) => node(peer),
        Trust::Address | Trust::Anonymous => address(),
    };
    if let Ok(value) = HeaderValue::from_str(&origin) {
        facts.headers.insert(HERMES_ORIGIN, value);
    }
}

/// The users bound to an authenticated peer.
struct Bindings<'a> {
    peer: Option<&'a Peer>,
    from_document: &'a [Arc<str>],
    /// Accept any claim.
    standalone: bool,
}

impl<'a> Bindings<'a> {
    /// Returns `None` for an anonymous connection.
    fn of(trust: &'a Trust, snapshot: &'a Snapshot) -> Option<Self> {
        match trust {
            Trust::Anonymous => None,
            Trust::Address => Some(Self { peer: None, from_document: &[], standalone: true }),
            Trust::Certified(peer) => {
                let bound = peer.node.as_ref().and_then(|node| snapshot.users.get(node));
                let from_document = bound.map_or(&[][..], Vec::as_slice);
                Some(Self { peer: Some(peer), from_document, standalone: peer.standalone })
            }
        }
    }

    fn users(&self) -> impl Iterator<Item = &'a Arc<str>> {
        let peer = self.peer;
        peer.into_iter().flat_map(|peer| &peer.users).chain(self.from_document)
    }

    /// The bound user, if there is exactly one; `*` does not count.
    fn only_user(&self) -> Option<&'a Arc<str>> {
        let mut users = self.users();
        let first = users.next().filter(|user| ***user != *"*")?;
        users.all(|user| user == first).then_some(first)
    }

    fn verify(&self, user: &str, value: &HeaderValue) -> Identity {
        let mut bound = self.users().peekable();
        if bound.peek().is_none() && !self.standalone {
            return Identity::User { user: None, dropped: Some(value.clone()) };
        }
        if self.standalone || bound.any(|name| **name == *user || **name == *"*") {
            return Identity::User { user: Some(Arc::from(user)), dropped: None };
        }
        let node = self.peer.and_then(|peer| peer.node.as_ref().or(peer.users.first()));
        Identity::Refuse(Refusal::NotBound { node: node.cloned().unwrap_or_default(), user: Arc::from(user) })
    }
}

#[cfg(test)]
mod tests;
