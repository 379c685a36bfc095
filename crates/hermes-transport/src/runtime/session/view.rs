//! The view of a session in `/sessions`.
//!
//! In: a live session. Out: the fields that an operator may see. Never: queries, header values and bodies, which may be
//! secret.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use super::{Phase, SessionEntry};

/// A session in `/sessions`.
#[derive(Clone, Debug, Serialize)]
pub struct SessionView {
    /// Unique in this process.
    pub id: u64,
    /// Listener.
    pub listener: Arc<str>,
    /// `http`, `tcp`, `udp` or `ip`.
    pub kind: &'static str,
    /// Address of the client.
    pub source: SocketAddr,
    /// The authenticated user.
    pub user: Option<Arc<str>>,
    /// Method.
    pub method: String,
    /// Authority.
    pub authority: String,
    /// Path, without the query, which may hold secrets.
    pub path: String,
    /// Route.
    pub route: Option<Arc<str>>,
    /// Endpoint.
    pub endpoint: Option<Arc<str>>,
    /// `opening`, `open` or `blocked`.
    pub phase: &'static str,
    /// True if the session waits for bytes in custody, or for its turn: no timeout applies.
    pub waiting: bool,
    /// Bytes from the client.
    pub received: u64,
    /// Bytes to the client.
    pub sent: u64,
    /// Age in seconds.
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
