//! Decides live sessions again after a new generation.
//!
//! In: a worker that runs a new generation. Out: each session stays, is told to end, or gets a route to move to. A
//! session whose user is no longer trusted ends, whatever its route. A connection whose peer's key is revoked is closed
//! with all its sessions. Never: the move itself (`datagram/relay/migration.rs`).

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use hermes_model::decide::{Decision, decide};
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::snapshot::{Action, Listener, Route};
use hermes_model::trust::{HERMES_USER, Identity, REVOKED, identify, is_revoked, listener_user};
use http::StatusCode;

use crate::listener;
use crate::worker::Worker;
use hermes_outbound::generation::Generation;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// The number of sessions that a reload decides again before traffic gets its turn: well under a millisecond.
const SLICE: usize = 256;

/// Decides all sessions of a worker.
pub(super) async fn all(worker: Rc<Worker>) {
    let generation = worker.generation();
    // Connections first: closing one ends its sessions and stops further ones.
    for (_, connection) in worker.tables.connections.borrow().iter() {
        if let Some(Trust::Certified(peer)) = connection.trust.get()
            && is_revoked(peer, &generation.snapshot)
        {
            connection.kill.set(REVOKED);
        }
    }
    let entries: Vec<Rc<SessionEntry>> =
        worker.tables.sessions.borrow().iter().map(|(_, entry)| entry.clone()).collect();
    for slice in entries.chunks(SLICE) {
        for entry in slice {
            redecide_one(&generation, entry);
        }
        tokio::task::yield_now().await;
    }
}

fn redecide_one(generation: &Generation, entry: &SessionEntry) {
    let listener = generation.listener(&entry.facts.listener);
    // A session of a removed listener drains, whatever routes say about new sessions. IP tunnels do not drain, because
    // they last for days.
    if listener.is_none() && entry.facts.kind != Kind::Ip {
        return;
    }
    if !still_proves(generation, listener, &entry.facts, entry.accepted_from()) {
        entry.end.set(Error::Reconfigured("the user is no longer bound to the node that named it".to_owned()));
        return;
    }
    match decide(&entry.facts, &generation.snapshot) {
        Decision::Deny(deny) => entry.end.set(Error::Reconfigured(deny.reason.to_string())),
        Decision::Act(route) => {
            // The networks of a route for a name are checked when the session is opened.
            let may_reach = |other: &Route| {
                entry.facts.announced_network.is_none() || other.matcher.networks == route.matcher.networks
            };
            let leads_as = |other: &Route| match (&other.action, &route.action) {
                (Action::Upstream(before), Action::Upstream(now)) => before.is_compatible_with(now),
                (before, now) => before == now,
            };
            let same = |other: &Arc<Route>| leads_as(other) && other.rewrite == route.rewrite && may_reach(other);
            if entry.route.borrow().as_ref().is_none_or(same) {
                // A move that is no longer wanted is cancelled.
                entry.moved.take();
            } else if let Some(status) = refusal(&route, entry.facts.kind) {
                entry.end.set(Error::Reconfigured(format!("route {} now responds with {status}", route.name)));
            } else if route.moves_sessions(entry.facts.kind) {
                let under_way = entry.moved.borrow().as_ref().is_some_and(same);
                if !under_way {
                    entry.moved.replace(Some(route));
                }
            }
            entry.end.nudge();
        }
    }
}

/// The status by which a route refuses sessions of this kind. Any response refuses a tunnel; an HTTP exchange is
/// refused by a client error only, and may finish under a 503.
fn refusal(route: &Route, kind: Kind) -> Option<StatusCode> {
    match &route.action {
        Action::Respond(answer) if kind != Kind::Http || answer.status.is_client_error() => Some(answer.status),
        _ => None,
    }
}

/// True if the session's user would be trusted today. A removed listener asserts no user.
fn still_proves(generation: &Generation, listener: Option<&Arc<Listener>>, facts: &Facts, from: SocketAddr) -> bool {
    let is_trusted = |listener: &Arc<Listener>| listener::trust_by_address(listener, from) == Trust::Address;
    if facts.trust == Trust::Address && !listener.is_some_and(is_trusted) {
        return facts.user.is_none();
    }
    let today = match (listener.and_then(|listener| listener_user(listener)), &facts.trust) {
        (Some(user), _) => Some(user),
        // The listener asserted the user, and no longer does.
        (None, Trust::Anonymous) => None,
        (None, trust) => match identify(trust, facts.headers.get_all(HERMES_USER), &generation.snapshot) {
            Identity::User { user, .. } => user,
            Identity::Refuse(_) => return false,
        },
    };
    today == facts.user
}
