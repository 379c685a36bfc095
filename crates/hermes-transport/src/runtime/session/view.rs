//! The description of a session in `/sessions`.
//!
//! In: a live session. Out: the fields that an operator may see. Never: query strings, header values and bodies, which
//! may contain secrets.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use super::{Phase, SessionEntry};

/// The description of a session in `/sessions`.
#[derive(Clone, Debug, Serialize)]
pub struct SessionView {
    /// The session's ID, which is unique in this process.
    pub id: u64,
    /// The name of the listener.
    pub listener: Arc<str>,
    /// `http`, `tcp`, `udp` or `ip`.
    pub kind: &'static str,
    /// The address of the client.
    pub source: SocketAddr,
    /// The authenticated user; `None` if the session has none.
    pub user: Option<Arc<str>>,
    /// The method of the request.
    pub method: String,
    /// The authority of the request.
    pub authority: String,
    /// The path of the request, without the query, which may contain secrets.
    pub path: String,
    /// The name of the route; `None` before the decision.
    pub route: Option<Arc<str>>,
    /// The name of the endpoint; `None` before one was chosen.
    pub endpoint: Option<Arc<str>>,
    /// `opening`, `open` or `blocked`.
    pub phase: &'static str,
    /// True if the session waits for custody, a rate limit or the like, so that no timeout of the route applies.
    pub waiting: bool,
    /// The number of bytes received from the client.
    pub received: u64,
    /// The number of bytes sent to the client.
    pub sent: u64,
    /// The age of the session in seconds.
    pub age: f64,
}

impl SessionView {
    pub(super) fn of(entry: &SessionEntry) -> Self {
        Self {
            id: entry.id,
            listener: entry.facts.listener.clone(),
            kind: entry.facts.kind.as_str(),
            source: entry.facts.source,
            user: entry.facts.user.clone(),
            method: entry.facts.method.to_string(),
            authority: entry.facts.authority.to_string(),
            path: entry.facts.path.path().to_owned(),
            route: entry.route.borrow().as_ref().map(|route| route.name.clone()),
            endpoint: entry.peer.borrow().clone(),
            phase: match entry.phase.get() {
                Phase::Opening => "opening",
                Phase::Open => "open",
                Phase::Blocked => "blocked",
            },
            waiting: entry.is_held.get(),
            received: entry.received.get(),
            sent: entry.sent.get(),
            age: entry.started.elapsed().as_secs_f64(),
        }
    }
}
