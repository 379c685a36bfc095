//! Checks for open proxies, and for addresses that are bound twice.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use super::report::Report;
use crate::document::Document;
use crate::matcher::Matcher;
use crate::pattern::ValuePattern;
use crate::snapshot::{Action, ClientAuth, Listener, ListenerProtocol, PortKind, Route};
use crate::trust::{HERMES_USER, listener_user};

/// Reports addresses bound twice. TCP and UDP may bind the same one. Port 0 is a different port each time.
pub(super) fn binds(head: &Document, listeners: &[(usize, Arc<Listener>)], report: &mut Report) {
    let mut bound: HashMap<(PortKind, SocketAddr), String> = HashMap::new();
    if let Some(admin) = head.admin.filter(|admin| admin.0.port() != 0) {
        bound.insert((PortKind::Tcp, admin.0), "admin".to_owned());
    }
    let mut paths: HashMap<&Path, String> = HashMap::new();
    for (at, listener) in listeners {
        if let Some(path) = listener.unix.as_deref() {
            let owner = format!("listeners[{at}] ({})", listener.name);
            if let Some(first) = paths.insert(path, owner) {
                let message = format!("{} is already bound by {first}; use another path", path.display());
                report.problem(format!("listeners[{at}].unix"), message);
            }
        }
        let Some(bind) = listener.bind.filter(|bind| bind.port() != 0) else { continue };
        if let Some(owner) = listener.ports().iter().find_map(|kind| bound.get(&(*kind, bind))) {
            report.problem(
                format!("listeners[{at}].bind"),
                format!("{bind} is already bound by {owner}; use another port or address"),
            );
            continue;
        }
        for kind in listener.ports() {
            bound.insert((*kind, bind), format!("listeners[{at}] ({})", listener.name));
        }
    }
}

/// Reports open proxies: a listener that admits any client, and a route that dials any target that a request names.
pub(super) fn open_proxies(listeners: &[(usize, Arc<Listener>)], routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let open: Vec<&Listener> = listeners
        .iter()
        .filter(|(at, listener)| is_open(listener) && !report.is_broken(&format!("listeners[{at}]")))
        .map(|(_, listener)| &**listener)
        .collect();
    for (at, route) in routes {
        if !route.lets_client_choose_target() {
            continue;
        }
        let reaching: Vec<&Listener> =
            open.iter().copied().filter(|listener| admits(&route.matcher, listener)).collect();
        let remedy = reaching.first().map_or("", |listener| match listener.protocol {
            ListenerProtocol::Rina(_) => "add dif-key",
            ListenerProtocol::Transparent(_) => "remove http",
            _ => "add tls: {client: required}",
        });
        let reaching: Vec<String> = reaching.into_iter().map(place).collect();
        let is_device = matches!(route.action, Action::Device(_));
        if !reaching.is_empty() {
            report.problem(
                format!("routes[{at}].terminate"),
                format!(
                    "open proxy: it {} for every client of listener {}; \
                     {remedy} there, or add user, listener or {} to the match",
                    if is_device { "forwards packets anywhere" } else { "dials any target" },
                    reaching.join(", "),
                    if is_device { "a network" } else { "a fixed authority" }
                ),
            );
        }
    }
}

/// The listener's name, and where it accepts.
fn place(listener: &Listener) -> String {
    match listener.bind {
        Some(bind) => format!("{} ({bind})", listener.name),
        None => format!("{} (intercepted requests)", listener.name),
    }
}

/// True if any client from elsewhere may request anything. At `tcp` and `udp` listeners the document names the target.
/// If a listener trusts addresses, `decide` denies all others.
fn is_open(listener: &Listener) -> bool {
    let authenticates = listener.tls.as_ref().is_some_and(|tls| tls.client == ClientAuth::Required);
    let trusts = !listener.trust.is_empty() && listener.trust.iter().all(|net| net.prefix_len() > 0);
    // A dialling listener authenticates the peer that it dials.
    let is_reachable = listener.bind.is_some_and(|bind| !bind.ip().to_canonical().is_loopback());
    let lets_choose = match &listener.protocol {
        ListenerProtocol::Http | ListenerProtocol::Socks5 => is_reachable,
        ListenerProtocol::Rina(membership) => is_reachable && membership.key.is_none(),
        ListenerProtocol::Transparent(transparent) => transparent.http,
        _ => false,
    };
    lets_choose && !authenticates && !trusts
}

/// True if an anonymous session of this listener may match.
fn admits(matcher: &Matcher, listener: &Listener) -> bool {
    let by_listener = matcher.listeners.is_empty() || matcher.listeners.contains(&listener.name);
    let wants_user = !matcher.users.is_empty()
        || matcher.headers.iter().any(|(name, values)| *name == HERMES_USER && !values.is_empty());
    by_listener && (!wants_user || accepts_assigned_user(matcher, listener))
}

/// True if the match accepts the user that the listener assigns to everybody, which proves nothing.
fn accepts_assigned_user(matcher: &Matcher, listener: &Listener) -> bool {
    let Some(user) = listener_user(listener) else { return false };
    let by_user = matcher.users.is_empty() || matcher.users.iter().any(|pattern| pattern.matches(Some(&user)));
    let by_header =
        matcher.headers.iter().filter(|(name, _)| *name == HERMES_USER).all(|(_, values)| {
            values.iter().any(|value| ValuePattern::parse(&user).is_ok_and(|user| value.covers(&user)))
        });
    by_user && by_header
}
