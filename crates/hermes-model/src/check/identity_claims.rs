//! Checks users that a document gives to sessions against what the node's certificate proves.
//!
//! In: a snapshot, and the URIs of its certificate. Out: a warning for each user whom nodes behind this one have no reason
//! to believe. Never: an error: they may bind the user to this node themselves, which only their documents say.

use std::sync::Arc;

use super::report::Problem;
use crate::facts::Peer;
use crate::snapshot::{Action, Listener, ListenerProtocol, Route, Snapshot, Upstream};
use crate::trust::{peer, user_of};

/// So many users are looked at: each is held against all routes, and who has corrected these finds the next.
const MOST: usize = 100;

/// Warns of users that listeners set and that the certificate with these URIs does not prove.
pub fn unproven<'u>(snapshot: &Snapshot, uris: impl IntoIterator<Item = &'u str>) -> Vec<Problem> {
    let Ok(own) = peer(uris, &Arc::from("")) else { return Vec::new() };
    if own.standalone {
        return Vec::new();
    }
    let listeners = snapshot.listeners.iter().enumerate();
    let all = listeners.flat_map(|(index, listener)| {
        users(&format!("listeners[{index}]"), listener).into_iter().map(move |(path, user)| (listener, path, user))
    });
    let told = all.filter(|(_, _, user)| !own.users.contains(user)).take(MOST).filter_map(|(listener, path, user)| {
        let message = message(snapshot, &own, &user, forwarded(snapshot, listener, &user)?);
        Some(Problem { path: format!("{path}.set-headers.hermes-user"), message })
    });
    told.collect()
}

fn message(snapshot: &Snapshot, own: &Peer, user: &str, upstream: &Upstream) -> String {
    let becomes = if own.users.is_empty() { "takes the session for nobody's" } else { "refuses the session" };
    format!(
        "the certificate does not say that {user} is a user of this node, and the node behind (upstream {}) {becomes} unless \
         its document says so (users: {{{}: [{user}]}}); issue one with the URI spiffe://OVERLAY/user/{user} as well",
        upstream.name, snapshot.node
    )
}

/// The users that a listener gives to sessions, and where it is written.
fn users(at: &str, listener: &Listener) -> Vec<(String, Arc<str>)> {
    let captures = match &listener.protocol {
        ListenerProtocol::Tun(tun) => tun.captures.as_slice(),
        _ => &[],
    };
    let of_captures = captures
        .iter()
        .enumerate()
        .filter_map(|(index, capture)| Some((format!("{at}.capture[{index}]"), user_of(&capture.set_headers)?)));
    user_of(&listener.set_headers).map(|user| (at.to_owned(), user)).into_iter().chain(of_captures).collect()
}

/// The first upstream that may get sessions of this user of this listener, and judges them by our certificate.
fn forwarded<'s>(snapshot: &'s Snapshot, listener: &Listener, user: &str) -> Option<&'s Upstream> {
    let takes = |route: &Route| {
        let matcher = &route.matcher;
        (matcher.listeners.is_empty() || matcher.listeners.contains(&listener.name))
            && (matcher.users.is_empty() || matcher.users.iter().any(|pattern| pattern.matches(Some(user))))
            && listener.only_kind().is_none_or(|kind| route.serves(kind))
    };
    let upstreams = snapshot.routes.iter().filter(|route| takes(route)).filter_map(|route| match &route.action {
        Action::Upstream(upstream) => Some(&**upstream),
        _ => None,
    });
    upstreams.into_iter().find(|upstream| is_shown(upstream))
}

/// Whether a node there sees the certificate.
fn is_shown(upstream: &Upstream) -> bool {
    let by_tls =
        upstream.tls.as_ref().is_some_and(|tls| !tls.anonymous && tls.ca.is_none() && tls.server_name.is_none());
    let is_node = upstream.all().any(|endpoint| endpoint.node().is_some());
    (by_tls || is_node) && upstream.overlay != Some(false)
}
