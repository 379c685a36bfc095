//! Trust: whose session it is, given who brought it and what the headers claim.
//!
//! In: how far the connection is believed, the lines of `hermes-user`, the users that this
//! document binds to nodes. Out: a user, nobody, or a refusal.
//! Never: believes a claim because it was made.
//!
//! | who brought it | claims nobody | claims a user |
//! |---|---|---|
//! | anyone (no certificate) | nobody | nobody: the claim is removed |
//! | a standalone node, or an address in the listener's `trust` | its one bound user, else nobody | that user |
//! | a node or device with bound users | its one bound user, else nobody | that user if it is bound to it, else 403 |
//! | a node without bound users | nobody | nobody: the claim is removed and reported |
//!
//! Users are bound to a node by `spiffe://OVERLAY/user/NAME` in its certificate, or by `users` of
//! the receiver's document; `*` there is any user. Why passing on is safe: a node forwards the
//! user that *it* came to by these rules, never the header that it got. A dependent node has no
//! role URI, so the next node believes it only for users bound to it: whatever others asserted to
//! a dependent node is refused one hop on, even if the dependent node believed it.

use std::fmt;
use std::sync::Arc;

use http::{HeaderName, HeaderValue, StatusCode};

use crate::facts::{Facts, Kind, Peer, Trust};
use crate::field_collision::{begins_alike, remove_colliding, remove_where};
use crate::snapshot::{Listener, Snapshot};

use crate::spiffe::is_user_name;
pub use crate::spiffe::{KEY, MAX_USER, SpiffeId, SpiffeKind, own_overlay, parse_spiffe, peer};

/// The header that carries the user between nodes.
pub const HERMES_USER: HeaderName = HeaderName::from_static("hermes-user");

/// The header that says where an `ip` session without a user began: `node/NAME`, or `address/ADDRESS`. Whoever
/// takes it from somebody who may not pass on what others asserted writes it anew.
pub const HERMES_ORIGIN: HeaderName = HeaderName::from_static("hermes-origin");

/// What the overlay's own fields begin with.
const OVERLAY: &str = "hermes-";

/// Whose session it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// This user, or nobody. The caller removes `hermes-user` from the headers and sets it anew
    /// to exactly this.
    User {
        /// The user, if any.
        user: Option<Arc<str>>,
        /// A claim that was not believed and is dropped: worth a line in the log where the peer
        /// has a certificate.
        dropped: Option<HeaderValue>,
    },
    /// The session ends here.
    Refuse(Refusal),
}

/// Why a claim of identity ends a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A node claims a user that is not bound to it.
    NotBound {
        /// The node, or the first user of a certificate that names no node.
        node: Arc<str>,
        /// Whom it claimed to be.
        user: Arc<str>,
    },
    /// The peer's key is among those that are not believed any more.
    Revoked,
    /// Several claims that differ.
    Conflict,
    /// A claim that is no user name.
    Illegal,
}

impl Refusal {
    /// 403 for a claim that is not believed, 400 for one that cannot be understood.
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
            Refusal::Conflict => f.write_str("several hermes-user headers that differ; send one"),
            Refusal::Illegal => write!(
                f,
                "hermes-user holds no user name; send 1 to {MAX_USER} visible ASCII characters without commas and quotes"
            ),
        }
    }
}

/// What is said to somebody whose key is revoked.
pub const REVOKED: &str =
    "its key is revoked: the node was taken out of the overlay, or has enrolled anew with another key";

/// Whether the key of this peer is believed no more.
pub fn is_revoked(peer: &Peer, snapshot: &Snapshot) -> bool {
    peer.key.as_ref().is_some_and(|key| snapshot.revoked.contains(key))
}

/// Judges what the headers claim. `claimed` are the lines of `hermes-user` as the client sent
/// them, before the listener's own headers are set; see [`listener_user`] for those.
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
    // Nobody is believed: what exactly an anonymous client wrote does not matter.
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
        Some(user) => bindings.judge(user, value),
        None => Identity::Refuse(Refusal::Illegal),
    }
}

/// The user that a listener gives to each of its sessions by `set-headers`, over what
/// [`identify`] came to.
pub fn listener_user(listener: &Listener) -> Option<Arc<str>> {
    user_of(&listener.set_headers)
}

/// The same of any headers that a document sets.
pub fn user_of(set_headers: &[(HeaderName, HeaderValue)]) -> Option<Arc<str>> {
    let (_, value) = set_headers.iter().rev().find(|(name, _)| *name == HERMES_USER)?;
    value.to_str().ok().map(Arc::from)
}

/// Judges the identity that a session's headers claim, and sets the listener's headers over them:
/// afterwards `facts` hold the user and the headers that the session is decided by. Returns a claim
/// that was dropped, as [`identify`] does.
///
/// # Errors
/// The claim ends the session; the facts are as they came.
pub fn settle(facts: &mut Facts, listener: &Listener, snapshot: &Snapshot) -> Result<Option<HeaderValue>, Refusal> {
    let (user, dropped) = match identify(&facts.trust, facts.headers.get_all(HERMES_USER), snapshot) {
        Identity::User { user, dropped } => (user, dropped),
        Identity::Refuse(refusal) => return Err(refusal),
    };
    if facts.trust.is_believed() {
        facts.headers.remove(HERMES_USER);
    } else {
        // They are the overlay's, and whoever writes them here is not of it.
        remove_where(&mut facts.headers, is_overlay);
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
    // What the operator wrote for this listener is proven by that.
    facts.user = listener_user(listener).or(user);
    Ok(dropped)
}

/// True for the overlay's own fields, and for those that an origin cannot tell from them (`hermes_user`).
pub fn is_overlay(name: &HeaderName) -> bool {
    begins_alike(name.as_str(), OVERLAY)
}

/// Where the session began, as far as that is proven: addresses are given to users, and where there is none to this.
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

/// What is known of the users of a believed connection.
struct Bindings<'a> {
    peer: Option<&'a Peer>,
    from_document: &'a [Arc<str>],
    /// Believed for any claim.
    standalone: bool,
}

impl<'a> Bindings<'a> {
    /// `None` for an anonymous connection.
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

    /// The one user bound to the peer, if there is exactly one; `*` is not one.
    fn only_user(&self) -> Option<&'a Arc<str>> {
        let mut users = self.users();
        let first = users.next().filter(|user| ***user != *"*")?;
        users.all(|user| user == first).then_some(first)
    }

    fn judge(&self, user: &str, value: &HeaderValue) -> Identity {
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
