//! The owner of an address on a device.
//!
//! In: the attributes of a session, or the text form that another process wrote. Out: an owner, and its text form.
//! Never: its permissions.

use std::fmt;
use std::sync::Arc;

use hermes_model::facts::Facts;
use hermes_model::trust::HERMES_ORIGIN;

/// The owner of an address; no other owner can take it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// A user, on any connection.
    User(Arc<str>),
    /// The origin of a session without a user, as [`settle`](hermes_model::trust::settle) has proven it.
    Origin(Arc<str>),
    /// A listener of this node.
    Listener(Arc<str>),
}

impl Owner {
    /// Whether the owner is not a listener.
    pub fn is_client(&self) -> bool {
        !matches!(self, Owner::Listener(_))
    }

    /// Returns the owner of a session.
    pub fn of(facts: &Facts) -> Self {
        if let Some(user) = &facts.user {
            return Owner::User(user.clone());
        }
        let origin = facts.headers.get(HERMES_ORIGIN).and_then(|origin| origin.to_str().ok());
        Owner::Origin(origin.map_or_else(|| Arc::from(facts.source.ip().to_string()), Arc::from))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::User(name) => write!(f, "user {name}"),
            Owner::Origin(origin) => write!(f, "origin {origin}"),
            Owner::Listener(name) => write!(f, "listener {name}"),
        }
    }
}

impl Owner {
    /// Parses the text form of an owner. `None`: the text is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, name) = text.split_once(' ')?;
        Some(match kind {
            "user" => Owner::User(Arc::from(name)),
            "origin" => Owner::Origin(Arc::from(name)),
            "listener" => Owner::Listener(Arc::from(name)),
            _ => return None,
        })
    }
}
