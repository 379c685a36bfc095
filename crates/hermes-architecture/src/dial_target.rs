//! The target of a terminating route: the host and port that the document or the request names.
//!
//! In: a route and the facts of a session. Out: the target, with the restrictions of the route and the client's own
//! address. Never: a connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hermes_model::facts::Facts;
use hermes_model::snapshot::{Route, Target, Terminate};
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::connect::Destination;
use hermes_outbound::upstream::ClientTls;
use hermes_transport::error::Error;
use hermes_transport::headers;
use http::uri::Scheme;

/// The target of a terminating route for this session.
pub struct DialTarget {
    /// Name or IP address, without brackets.
    pub host: Arc<str>,
    /// Port.
    pub port: u16,
    /// The route and the target, for logs, metrics and pools.
    pub label: Arc<str>,
    /// The request named the target, not the document.
    pub(crate) named: bool,
    /// TLS to the origin, for a request with scheme `https`.
    tls: Option<ClientTls>,
}

impl DialTarget {
    /// The dial target, with the restrictions of the route. `source` is set if a PROXY header is sent.
    pub fn destination<'a>(&'a self, terminate: &'a Terminate, source: Option<SocketAddr>) -> Destination<'a> {
        Destination {
            host: &self.host,
            port: self.port,
            label: &self.label,
            reach: self.named.then_some(terminate.reach),
            guarded: terminate.guard,
            tls: self.tls.as_ref(),
            proxy_source: source,
            source: None,
            congestion: terminate.congestion.as_deref(),
            urgent: false,
        }
    }
}

/// The target of a terminating route.
///
/// # Errors
/// The request names no port.
pub fn place(terminate: &Terminate, facts: &Facts, route: &Route) -> Result<DialTarget, Error> {
    match &terminate.target {
        Target::Fixed(target) => Ok(DialTarget {
            host: target.host.clone(),
            port: target.port,
            label: label(&route.name, &target.host, target.port),
            named: false,
            tls: None,
        }),
        Target::Authority | Target::Original => {
            if terminate.target == Target::Original && facts.authority.host().parse::<IpAddr>().is_err() {
                let reason = "the authority is no IP address; `original` is the address that a client dialled";
                return Err(Error::Malformed(reason.to_owned()));
            }
            let port =
                facts.authority.port().ok_or_else(|| Error::Malformed("the authority has no port".to_owned()))?;
            let host: Arc<str> = Arc::from(facts.authority.host());
            Ok(DialTarget { label: label(&route.name, &host, port), host, port, named: true, tls: None })
        }
    }
}

/// Like [`place`], for a request with this scheme. A request for `https` reaches its origin over TLS, which verifies
/// the origin's name.
///
/// # Errors
/// Errors of [`place`], or no CA certificates are available to verify the origin.
pub fn origin(
    generation: &Generation,
    terminate: &Terminate,
    facts: &Facts,
    route: &Route,
    scheme: &Scheme,
) -> Result<DialTarget, Error> {
    let place = place(terminate, facts, route)?;
    if !terminate.speaks_tls() || *scheme != Scheme::HTTPS {
        return Ok(place);
    }
    // Connections are pooled by label, so that TLS and plaintext connections are never mixed.
    let label: Arc<str> = Arc::from(place.label.replacen('/', "/https://", 1));
    let tls = generation
        .origin_tls(terminate, &place.host)
        .map_err(|reason| Error::Connect { peer: label.clone(), source: Arc::new(io::Error::other(reason)) })?;
    Ok(DialTarget { label, tls: Some(tls), ..place })
}

fn label(route: &str, host: &str, port: u16) -> Arc<str> {
    if host.contains(':') {
        Arc::from(format!("{route}/[{host}]:{port}"))
    } else {
        Arc::from(format!("{route}/{host}:{port}"))
    }
}

/// The address and port of the client, as the node that intercepted its connection reported them.
pub(crate) fn client(facts: &Facts) -> SocketAddr {
    let reported = facts.headers.get(headers::SOURCE).and_then(|value| value.to_str().ok()?.parse().ok());
    reported.unwrap_or(facts.source)
}
