//! Checks what a node offers to whom: addresses bound twice, and open proxies.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use super::report::Report;
use crate::document::Document;
use crate::matcher::Matcher;
use crate::pattern::ValuePattern;
use crate::snapshot::{Action, ClientAuth, Listener, ListenerProtocol, PortKind, Route};
use crate::trust::{HERMES_USER, listener_user};

/// An address can be bound once for TCP and once for UDP. Port 0 is another port each time.
pub(super) fn binds(head: &Document, listeners: &[(usize, Arc<Listener>)], report: &mut Report) {
    let mut bound: HashMap<(PortKind, SocketAddr), String> = HashMap::new();
    if let Some(admin) = head.admin.filter(|admin| admin.0.port() != 0) {
        bound.insert((PortKind::Tcp, admin.0), "admin".to_owned());
    }
    for (at, listener) in listeners {
        let Some(bind) = listener.bind.filter(|bind| bind.port() != 0) else { continue };
        if let Some(owner) = listener.ports().iter().find_map(|kind| bound.get(&(*kind, bind))) {
            report.problem(
                format!("listeners[{at}].bind"),
                format!("{bind} is bound by {owner} already; write another port or address"),
            );
            continue;
        }
        for kind in listener.ports() {
            bound.insert((*kind, bind), format!("listeners[{at}] ({})", listener.name));
        }
    }
}

/// A listener that lets anyone from elsewhere in must not lead to a route that dials whatever
/// the request names.
pub(super) fn open_proxies(listeners: &[(usize, Arc<Listener>)], routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let open: Vec<&Listener> = listeners
        .iter()
        .filter(|(at, listener)| is_open(listener) && !report.is_broken(&format!("listeners[{at}]")))
        .map(|(_, listener)| &**listener)
        .collect();
    for (at, route) in routes {
        if !route.goes_where_it_is_asked() {
            continue;
        }
        let reaching: Vec<String> = open
            .iter()
            .filter(|listener| admits(&route.matcher, listener))
            .filter_map(|listener| Some(format!("{} ({})", listener.name, listener.bind?)))
            .collect();
        let is_device = matches!(route.action, Action::Device(_));
        if !reaching.is_empty() {
            report.problem(
                format!("routes[{at}].terminate"),
                format!(
                    "this is an open proxy: it {}, for anyone who reaches listener {}; \
                     write tls: {{client: required}} there, or add user, listener or {} to the match",
                    if is_device { "lets packets go anywhere" } else { "dials what the request names" },
                    reaching.join(", "),
                    if is_device { "a network" } else { "a fixed authority" }
                ),
            );
        }
    }
}

/// Anyone from elsewhere may ask for anything. At `tcp` and `udp` listeners the document names
/// the target. Where a listener trusts addresses, `decide` turns all the others away.
fn is_open(listener: &Listener) -> bool {
    let authenticates = listener.tls.as_ref().is_some_and(|tls| tls.client == ClientAuth::Required);
    let trusts = !listener.trust.is_empty() && listener.trust.iter().all(|net| net.prefix_len() > 0);
    matches!(listener.protocol, ListenerProtocol::Http | ListenerProtocol::Socks5)
        // One that dials has authenticated whom it dialled.
        && listener.bind.is_some_and(|bind| !bind.ip().to_canonical().is_loopback())
        && !authenticates
        && !trusts
}

/// Whether an anonymous session of this listener may match.
fn admits(matcher: &Matcher, listener: &Listener) -> bool {
    let by_listener = matcher.listeners.is_empty() || matcher.listeners.contains(&listener.name);
    let wants_user = !matcher.users.is_empty()
        || matcher.headers.iter().any(|(name, values)| *name == HERMES_USER && !values.is_empty());
    by_listener && (!wants_user || given_user_fits(matcher, listener))
}

/// A user that the listener gives to everybody proves nothing.
fn given_user_fits(matcher: &Matcher, listener: &Listener) -> bool {
    let Some(user) = listener_user(listener) else { return false };
    let by_user = matcher.users.is_empty() || matcher.users.iter().any(|pattern| pattern.matches(Some(&user)));
    let by_header =
        matcher.headers.iter().filter(|(name, _)| *name == HERMES_USER).all(|(_, values)| {
            values.iter().any(|value| ValuePattern::parse(&user).is_ok_and(|user| value.covers(&user)))
        });
    by_user && by_header
}
