//! Whose an address is that a device leads packets to.
//!
//! In: what is known of a session, or what another process wrote. Out: an owner, and its words. Never: what it may have.

use std::fmt;
use std::sync::Arc;

use hermes_model::facts::Facts;
use hermes_model::trust::HERMES_ORIGIN;

/// Whose an address is. Nobody else can take it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// A user, whichever way the session comes.
    User(Arc<str>),
    /// Without a user: where the session began, as `settle` has proven it.
    Origin(Arc<str>),
    /// A listener of our own.
    Listener(Arc<str>),
}

impl Owner {
    /// It is not a listener of our own.
    pub fn is_client(&self) -> bool {
        !matches!(self, Owner::Listener(_))
    }

    /// Whose session it is.
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
    /// As it is written for another process.
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
