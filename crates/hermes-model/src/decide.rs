//! The decision: a pure function from request attributes and a snapshot to a route or a denial.
//!
//! In: facts and a snapshot. Out: the route that acts, or a denial with its reason.
//! Never: health, load or time. The same facts and snapshot always give the same decision.

use std::fmt;
use std::sync::Arc;

use http::StatusCode;

use crate::authority::Authority;
use crate::facts::{Facts, Kind, Trust};
use crate::path::{PathError, readings};
use crate::snapshot::{ListenerProtocol, Route, Snapshot};
use crate::via::{MAX_HOPS, trail};

/// Result of a decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// The session is denied.
    Deny(Deny),
    /// This route acts. Its action supports the session's kind.
    Act(Arc<Route>),
}

/// A denial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deny {
    /// Status sent to the client.
    pub status: StatusCode,
    /// Reason for logs and `hermes explain`.
    pub reason: DenyReason,
}

/// Reason for a denial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DenyReason {
    /// Loop: `Via` names this node already.
    Loop {
        /// The name of this node.
        node: Arc<str>,
        /// The previous hop, by the last entry of `Via`.
        previous: String,
    },
    /// Too many hops.
    TooManyHops {
        /// The name of this node.
        node: Arc<str>,
        /// The previous hop, by the last entry of `Via`.
        previous: String,
        /// Number of entries in `Via`.
        hops: usize,
    },
    /// The path has a dot segment.
    DotSegment,
    /// The path has a `%` that begins no escape.
    Escape,
    /// Origins interpret the path differently, and the readings match different routes.
    AmbiguousPath,
    /// No route matches.
    NoRoute {
        /// Kind of the session.
        kind: Kind,
        /// Target of the session.
        authority: Authority,
    },
    /// The first matching route does not support this kind.
    WrongKind {
        /// Name of the route.
        route: Arc<str>,
        /// Kind of the session.
        kind: Kind,
    },
    /// The first matching route would be an open proxy for this client.
    OpenProxy {
        /// Name of the route.
        route: Arc<str>,
    },
}

impl fmt::Display for DenyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DenyReason::Loop { node, previous } => {
                write!(f, "loop: {} sent back to {node} a request that {node} had forwarded", some_node(previous))
            }
            DenyReason::TooManyHops { node, previous, hops } => write!(
                f,
                "too many hops: {hops} before {node}, the last one {}; more than {MAX_HOPS} is treated as a loop",
                some_node(previous)
            ),
            DenyReason::DotSegment => f.write_str("the path has a . or .. segment; send the resolved path"),
            DenyReason::Escape => {
                f.write_str("the path has a % without two hexadecimal digits; escape a literal % as %25")
            }
            DenyReason::AmbiguousPath => f.write_str(
                "ambiguous path: empty segments, escaped slashes or parameters after `;` match different routes; \
                 send single, unescaped slashes and no parameters",
            ),
            DenyReason::NoRoute { kind, authority } => write!(f, "no route for {kind} to {authority}"),
            DenyReason::WrongKind { route, kind } => {
                write!(f, "route {route} matches first, but does not support {kind}")
            }
            DenyReason::OpenProxy { route } => write!(
                f,
                "route {route} dials the target of the request, but only for clients on this machine or with a \
                 certificate, a trusted address or a user"
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
    if name.is_empty() { "an unnamed node" } else { name }
}

/// Decides a session. Loops and ambiguous paths are denied. The first matching route acts if it supports the session's
/// kind.
pub fn decide(facts: &Facts, snapshot: &Snapshot) -> Decision {
    match first_route(facts, snapshot) {
        Ok(route) => Decision::Act(Arc::clone(route)),
        Err((status, reason)) => Decision::Deny(Deny { status, reason }),
    }
}

type Rejection = (StatusCode, DenyReason);

fn first_route<'s>(facts: &Facts, snapshot: &'s Snapshot) -> Result<&'s Arc<Route>, Rejection> {
    reject_loops(facts, snapshot)?;
    let readings = readings(facts.path.path()).map_err(|error| match error {
        PathError::DotSegment => (StatusCode::BAD_REQUEST, DenyReason::DotSegment),
        PathError::Escape => (StatusCode::BAD_REQUEST, DenyReason::Escape),
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
    check_match(route, facts, snapshot).map(|()| route)
}

/// Detects loops by `Via` (RFC 9110, 7.6.3); status 508 is defined by RFC 5842.
fn reject_loops(facts: &Facts, snapshot: &Snapshot) -> Result<(), Rejection> {
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

/// Checks the first match. A failure never falls through to the next route: a route that denies must be reliable.
fn check_match(route: &Route, facts: &Facts, snapshot: &Snapshot) -> Result<(), Rejection> {
    if !route.action.carries(facts.kind) {
        let reason = DenyReason::WrongKind { route: Arc::clone(&route.name), kind: facts.kind };
        return Err((StatusCode::FORBIDDEN, reason));
    }
    if is_open_proxy(route, facts, snapshot) {
        return Err((StatusCode::FORBIDDEN, DenyReason::OpenProxy { route: Arc::clone(&route.name) }));
    }
    Ok(())
}

/// True if the route would serve any client from elsewhere. `check` rejects most such documents. It accepts those with
/// a `trust` list, because only a session shows whether its client is on that list.
fn is_open_proxy(route: &Route, facts: &Facts, snapshot: &Snapshot) -> bool {
    facts.trust == Trust::Anonymous
        && facts.user.is_none()
        && !facts.source.ip().to_canonical().is_loopback()
        && route.lets_client_choose_target()
        && !has_fixed_target(facts, snapshot)
}

/// True if the listener's document names the target, so that its clients cannot choose one. Nor does a client whose
/// connection was intercepted: its packets went to that target anyway.
fn has_fixed_target(facts: &Facts, snapshot: &Snapshot) -> bool {
    let listener = snapshot.listeners.iter().find(|listener| listener.name == facts.listener);
    listener.is_some_and(|listener| {
        match &listener.protocol {
            ListenerProtocol::Tcp { .. } | ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_) => true,
            // Requests of HTTP name hosts of their own.
            ListenerProtocol::Transparent(transparent) => !transparent.http,
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests;
