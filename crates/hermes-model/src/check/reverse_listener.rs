//! Checks the two ends of connections that a node keeps since nobody can dial it.
//!
//! In: listeners that dial, and upstreams that name nodes. Out: what makes such a connection
//! impossible: it is authenticated by both certificates, and carries many sessions.

use std::sync::Arc;

use super::context::{Names, unresolved};
use super::report::Report;
use crate::snapshot::{ClientAuth, Listener, ListenerProtocol, Upstream, UpstreamProtocol};

/// What a listener dials is an upstream of this document at which this node shows who it is, and
/// which proves to be a node.
pub(super) fn dials(listeners: &[(usize, Arc<Listener>)], names: &Names<'_>, report: &mut Report) {
    for (at, listener) in listeners {
        let Some(name) = &listener.dial else { continue };
        let at = format!("listeners[{at}].dial");
        match names.upstreams.get(&**name) {
            Some(upstream) => {
                if let Some(why) = misfit(upstream) {
                    report.problem(at, format!("upstream {name} {why}"));
                }
            }
            None if names.upstream_names.iter().any(|known| **known == **name) => {}
            None => report.problem(at, unresolved("upstream", name, names.upstream_names)),
        }
    }
}

/// Why no connection can be kept to an upstream, and what to write.
fn misfit(upstream: &Upstream) -> Option<&'static str> {
    if !matches!(upstream.protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3) {
        return Some("has another protocol, and connections are kept over h2 or h3; write one of these there");
    }
    if upstream.all().any(|endpoint| endpoint.node().is_some()) {
        return Some("names a node that dials itself; write the HOST:PORT at which it listens there");
    }
    if !upstream.backup.is_empty() {
        return Some("has backup, and connections are kept to all endpoints at all times; leave that out there");
    }
    match &upstream.tls {
        None => Some("has no tls, and a connection is kept by both ends' certificates; add tls: {} there"),
        Some(tls) if tls.anonymous => Some("hides who this node is (tls.anonymous); leave that out there"),
        Some(tls) if tls.ca.is_some() || tls.server_name.is_some() => {
            Some("is no node of this overlay (tls.ca, tls.server-name); leave these out there, and name it by tls.node")
        }
        Some(_) => None,
    }
}

/// A node that keeps a connection to this one needs a listener that asks for its certificate.
/// `are_all`: every listener of the document could be read.
pub(super) fn kept(
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
                "nodes keep their connections to an http listener that asks for their certificates, and there is \
                 none; add tls: {client: required} to one",
            );
        }
    }
}
