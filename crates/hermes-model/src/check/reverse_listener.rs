//! Checks both ends of reverse connections, which a node opens because it cannot be dialled.
//!
//! In: listeners with `dial`, and upstreams with nodes. Out: the settings that make such a connection impossible. It
//! must be authenticated by both certificates, and carry several sessions.

use std::sync::Arc;

use super::context::{Names, unresolved};
use super::report::Report;
use crate::snapshot::{ClientAuth, Listener, ListenerProtocol, Upstream, UpstreamProtocol};

/// Checks the upstream of a listener with `dial`: it must be in the document, this node must authenticate there, and
/// the endpoint must be an authenticated node.
pub(super) fn dials(listeners: &[(usize, Arc<Listener>)], names: &Names<'_>, report: &mut Report) {
    for (at, listener) in listeners {
        let Some(name) = &listener.dial else { continue };
        let at = format!("listeners[{at}].dial");
        match names.upstreams.get(&**name) {
            Some(upstream) => {
                if let Some(why) = unsupported(upstream) {
                    report.problem(at, format!("upstream {name} {why}"));
                }
            }
            None if names.upstream_names.iter().any(|known| **known == **name) => {}
            None => report.problem(at, unresolved("upstream", name, names.upstream_names)),
        }
    }
}

/// The reason why reverse connections to an upstream are impossible, with its remedy.
fn unsupported(upstream: &Upstream) -> Option<&'static str> {
    if !matches!(upstream.protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3) {
        return Some("must have protocol h2 or h3, which reverse connections require");
    }
    if upstream.all().any(|endpoint| endpoint.node().is_some()) {
        return Some("has a node that cannot be dialled; use the HOST:PORT of its listener there");
    }
    if !upstream.backup.is_empty() {
        return Some("has backup, but reverse connections are open to all endpoints at all times; remove backup there");
    }
    match &upstream.tls {
        None => Some("has no tls, which reverse connections require to authenticate both nodes; add tls: {} there"),
        Some(tls) if tls.anonymous => Some("hides this node's identity (tls.anonymous); remove that key there"),
        Some(tls) if tls.ca.is_some() || tls.server_name.is_some() => {
            Some("is not a node of this overlay (tls.ca, tls.server-name); remove these keys there, and add tls.node")
        }
        Some(_) => None,
    }
}

/// A node can only open a reverse connection to a listener that requests its certificate. `are_all`: every listener of
/// the document is valid.
pub(super) fn accepting(
    listeners: &[(usize, Arc<Listener>)],
    upstreams: &[(usize, Arc<Upstream>)],
    are_all: bool,
    report: &mut Report,
) {
    let asks = |listener: &Listener| {
        listener.protocol == ListenerProtocol::Http
            && listener.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None)
    };
    if !are_all || listeners.iter().any(|(_, listener)| asks(listener)) {
        return;
    }
    for (at, upstream) in upstreams {
        if upstream.all().any(|endpoint| endpoint.node().is_some()) {
            report.problem(
                format!("upstreams[{at}]"),
                "missing http listener that requests certificates, which reverse connections require; \
                 add tls: {client: required} to one",
            );
        }
    }
}
