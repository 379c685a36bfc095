//! The one decision: what becomes of a session.
//!
//! In: facts and a snapshot. Out: a denial with its reason, or the route that acts.
//! Never: looks at health, load or time. The same facts and snapshot give the same decision.

use std::fmt;
use std::sync::Arc;

use http::StatusCode;

use crate::authority::Authority;
use crate::facts::{Facts, Kind, Trust};
use crate::path::{Unreadable, readings};
use crate::snapshot::{ListenerProtocol, Route, Snapshot};
use crate::via::{MAX_HOPS, trail};

/// What becomes of a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// It ends here.
    Deny(Deny),
    /// This route acts. Its action serves the session's kind.
    Act(Arc<Route>),
}

/// Why a session ends here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deny {
    /// What the client is told.
    pub status: StatusCode,
    /// What people are told.
    pub reason: DenyReason,
}

/// The reason of a denial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DenyReason {
    /// It came through this node before.
    Loop {
        /// This node.
        node: Arc<str>,
        /// Who sent it here, by the last entry of `Via`.
        previous: String,
    },
    /// It came through too many nodes.
    TooManyHops {
        /// This node.
        node: Arc<str>,
        /// Who sent it here, by the last entry of `Via`.
        previous: String,
        /// How many entries `Via` has.
        hops: usize,
    },
    /// The path has a dot segment.
    DotSegment,
    /// The path has a `%` that begins no escape.
    Escape,
    /// The path means different things to different origins, and routes differ on it.
    AmbiguousPath,
    /// No route matches.
    NoRoute {
        /// What it carries.
        kind: Kind,
        /// Whom it is for.
        authority: Authority,
    },
    /// The first match cannot carry this kind.
    WrongKind {
        /// Its name.
        route: Arc<str>,
        /// What the session carries.
        kind: Kind,
    },
    /// The first match would dial whatever an unknown client from elsewhere names.
    OpenProxy {
        /// Its name.
        route: Arc<str>,
    },
}

impl fmt::Display for DenyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DenyReason::Loop { node, previous } => write!(
                f,
                "a loop: {} sent to {node} what came through {node} before",
                some_node(previous)
            ),
            DenyReason::TooManyHops { node, previous, hops } => write!(
                f,
                "{hops} nodes passed it on, the last of them {}, before {node}; more than {MAX_HOPS} is a loop",
                some_node(previous)
            ),
            DenyReason::DotSegment => f.write_str("the path has a . or .. segment; send the resolved path"),
            DenyReason::Escape => f.write_str("the path has a % without two hexadecimal digits behind it; send %25"),
            DenyReason::AmbiguousPath => f.write_str(
                "the path has empty segments, escaped slashes or parameters behind `;`, and routes differ on what it means; \
                 send single, unescaped slashes and no parameters",
            ),
            DenyReason::NoRoute { kind, authority } => write!(f, "no route for {kind} to {authority}"),
            DenyReason::WrongKind { route, kind } => write!(f, "route {route} matches first, and cannot carry {kind}"),
            DenyReason::OpenProxy { route } => write!(
                f,
                "route {route} dials what the request names, for clients on this machine or with a certificate, \
                 a believed address or a user only"
            ),
        }
    }
}

impl fmt::Display for Deny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.as_u16(), self.reason)
    }
}

fn some_node(name: &str) -> &str {
    if name.is_empty() { "a node without a name" } else { name }
}

/// Decides a session: loops end, doubtful paths are refused, and the first route that matches
/// acts, if it can carry the session's kind.
pub fn decide(facts: &Facts, snapshot: &Snapshot) -> Decision {
    match first_route(facts, snapshot) {
        Ok(route) => Decision::Act(Arc::clone(route)),
        Err((status, reason)) => Decision::Deny(Deny { status, reason }),
    }
}

type Refused = (StatusCode, DenyReason);

fn first_route<'s>(facts: &Facts, snapshot: &'s Snapshot) -> Result<&'s Arc<Route>, Refused> {
    end_loops(facts, snapshot)?;
    let readings = readings(facts.path.path()).map_err(|unreadable| match unreadable {
        Unreadable::DotSegment => (StatusCode::BAD_REQUEST, DenyReason::DotSegment),
        Unreadable::Escape => (StatusCode::BAD_REQUEST, DenyReason::Escape),
    })?;
    let find = |path: &str| snapshot.index.first_match(&snapshot.routes, facts, path);
    let found = find(&readings.plain);
    if readings.others.iter().any(|other| find(other) != found) {
        return Err((StatusCode::BAD_REQUEST, DenyReason::AmbiguousPath));
    }
    let Some(route) = found.and_then(|at| snapshot.routes.get(at)) else {
        let reason = DenyReason::NoRoute { kind: facts.kind, authority: facts.authority.clone() };
        return Err((StatusCode::NOT_FOUND, reason));
    };
    fit(route, facts, snapshot).map(|()| route)
}

/// RFC 9110, 7.6.3, has `Via` for this; 508 is RFC 5842's.
fn end_loops(facts: &Facts, snapshot: &Snapshot) -> Result<(), Refused> {
    let trail = trail(&facts.headers, &snapshot.node);
    if !trail.own && trail.hops <= MAX_HOPS {
        return Ok(());
    }
    let (node, previous) = (Arc::clone(&snapshot.node), trail.last.to_owned());
    let reason = if trail.own {
        DenyReason::Loop { node, previous }
    } else {
        DenyReason::TooManyHops { node, previous, hops: trail.hops }
    };
    Err((StatusCode::LOOP_DETECTED, reason))
}

/// The last word on the first match. It does not fall through to the next route: whoever denies
/// by an early route must be able to rely on it.
fn fit(route: &Route, facts: &Facts, snapshot: &Snapshot) -> Result<(), Refused> {
    if !route.action.carries(facts.kind) {
        let reason = DenyReason::WrongKind { route: Arc::clone(&route.name), kind: facts.kind };
        return Err((StatusCode::FORBIDDEN, reason));
    }
    if is_open_proxy(route, facts, snapshot) {
        return Err((StatusCode::FORBIDDEN, DenyReason::OpenProxy { route: Arc::clone(&route.name) }));
    }
    Ok(())
}

/// `check` refuses documents that invite this; a listener with `trust` passes there, since it is
/// known only here whether the client is one of those.
fn is_open_proxy(route: &Route, facts: &Facts, snapshot: &Snapshot) -> bool {
    facts.trust == Trust::Anonymous
        && facts.user.is_none()
        && !facts.source.ip().to_canonical().is_loopback()
        && route.goes_where_it_is_asked()
        && !is_for_what_the_document_says(facts, snapshot)
}

/// Clients of these listeners name nothing.
fn is_for_what_the_document_says(facts: &Facts, snapshot: &Snapshot) -> bool {
    let listener = snapshot.listeners.iter().find(|listener| listener.name == facts.listener);
    listener.is_some_and(|listener| {
        matches!(
            listener.protocol,
            ListenerProtocol::Tcp { .. } | ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_)
        )
    })
}

#[cfg(test)]
mod tests;
