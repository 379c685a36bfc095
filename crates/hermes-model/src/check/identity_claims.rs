//! Checks users that a document assigns to sessions against the users that the node's certificate proves.
//!
//! In: a snapshot, and the URIs of its certificate. Out: a warning for each user that the next nodes would not accept.
//! Never: an error. The next nodes may bind the user to this node in their own documents.

use std::sync::Arc;

use super::report::Problem;
use crate::facts::Peer;
use crate::snapshot::{Listener, ListenerProtocol, Route, Snapshot, Upstream};
use crate::trust::{peer, user_of};

/// Maximum number of users to check; each is compared with all routes.
const MAX_USERS: usize = 100;

/// Warns about users that listeners assign and that the certificate with these URIs does not prove.
pub fn unproven<'u>(snapshot: &Snapshot, uris: impl IntoIterator<Item = &'u str>) -> Vec<Problem> {
    let Ok(own) = peer(uris, &Arc::from("")) else { return Vec::new() };
    if own.standalone {
        return Vec::new();
    }
    let listeners = snapshot.listeners.iter().enumerate();
    let all = listeners.flat_map(|(index, listener)| {
        users(&format!("listeners[{index}]"), listener).into_iter().map(move |(path, user)| (listener, path, user))
    });
    let problems =
        all.filter(|(_, _, user)| !own.users.contains(user)).take(MAX_USERS).filter_map(|(listener, path, user)| {
            let message = message(snapshot, &own, &user, receiving_upstream(snapshot, listener, &user)?);
            Some(Problem { path: format!("{path}.set-headers.hermes-user"), message })
        });
    problems.collect()
}

fn message(snapshot: &Snapshot, own: &Peer, user: &str, upstream: &Upstream) -> String {
    let result = if own.users.is_empty() { "removes the user" } else { "rejects the session" };
    format!(
        "the certificate does not bind user {user} to this node, so the next node (upstream {}) {result} unless its \
         document does (users: {{{}: [{user}]}}); issue a certificate with the URI spiffe://OVERLAY/user/{user}",
        upstream.name, snapshot.node
    )
}

/// The users that a listener assigns to sessions, with the paths of these settings.
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

/// The first upstream that may receive this user's sessions of this listener, and verifies this node's certificate.
fn receiving_upstream<'s>(snapshot: &'s Snapshot, listener: &Listener, user: &str) -> Option<&'s Upstream> {
    let takes = |route: &Route| {
        let matcher = &route.matcher;
        (matcher.listeners.is_empty() || matcher.listeners.contains(&listener.name))
            && (matcher.users.is_empty() || matcher.users.iter().any(|pattern| pattern.matches(Some(user))))
            && listener.only_kind().is_none_or(|kind| route.serves(kind))
    };
    let upstreams = snapshot.routes.iter().filter(|route| takes(route)).flat_map(|route| route.action.upstreams());
    upstreams.map(|upstream| &**upstream).find(|upstream| presents_certificate(upstream))
}

/// True if the next node sees the certificate.
fn presents_certificate(upstream: &Upstream) -> bool {
    let by_tls =
        upstream.tls.as_ref().is_some_and(|tls| !tls.anonymous && tls.ca.is_none() && tls.server_name.is_none());
    let is_node = upstream.all().any(|endpoint| endpoint.node().is_some());
    (by_tls || is_node) && upstream.overlay != Some(false)
}
