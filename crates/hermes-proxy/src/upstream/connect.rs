//! New connections: names to addresses, TCP, PROXY header, TLS, within the route's time.
//!
//! In: where to, and who asks. Out: a connected `Io`. Every address is judged after it was
//! resolved and exactly the judged ones are dialled: DNS cannot answer differently in between.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hermes_model::reach::Reach;
use hermes_net::dial::{self, Addresses};
use hermes_net::{Io, tls};
use hermes_wire::proxy_protocol;
use tokio::io::AsyncWriteExt;

use super::ClientTls;
use crate::error::{Error, NO_CONNECTION};
use crate::metrics::EndpointLabels;
use crate::worker::Worker;

/// Where to connect to.
pub(crate) struct Destination<'a> {
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    /// For people, logs and metrics.
    pub(crate) label: &'a Arc<str>,
    /// Set where a request named the host: which addresses it may mean.
    pub(crate) reach: Option<Reach>,
    /// Somebody other than the node's operator named the target.
    pub(crate) guarded: bool,
    pub(crate) tls: Option<&'a ClientTls>,
    /// Begin with a PROXY header for this source.
    pub(crate) proxy_source: Option<SocketAddr>,
    /// A first packet of TCP that is lost is not waited for, which takes a second (RFC 6298, section 2): where no answer
    /// comes, others go beside it.
    pub(crate) urgent: bool,
}

/// Where it is urgent, an address is tried so often before the second is over.
const CANDIDATES: usize = 3;

/// The addresses of a host that this route may go to.
///
/// # Errors
/// No address, or one that is out of reach: then none is used, since an attacker who mixes good
/// and bad addresses in one answer shall not choose by luck.
pub(crate) async fn addresses(worker: &Worker, host: &str, reach: Option<Reach>) -> Result<Addresses, Error> {
    let addresses = worker.resolver.resolve(host).await.map_err(|error| Error::Resolve(error.to_string()))?;
    let Some(reach) = reach else { return Ok(addresses) };
    let own = worker.shared.own_addresses();
    permitted(host, addresses, move |address| reach.forbids(address, &|ip| own.contains(&ip)))
}

/// All of these addresses, or none: one forbidden address refuses its whole answer, also one that arrives late.
fn permitted(
    host: &str,
    addresses: Addresses,
    forbids: impl Fn(IpAddr) -> Option<&'static str> + Send + 'static,
) -> Result<Addresses, Error> {
    if let Some(why) = addresses.now().iter().find_map(|address| forbids(*address)) {
        return Err(Error::Unreachable { host: host.to_owned(), why });
    }
    Ok(addresses
        .map(move |found| if found.iter().any(|address| forbids(*address).is_some()) { Vec::new() } else { found }))
}

/// Checks addresses that a guarded route is about to dial.
///
/// # Errors
/// One of them belongs to the node, a controller or a metadata service: then none is used.
pub(crate) async fn guard(
    worker: &Worker,
    (host, port): (&str, u16),
    addresses: Addresses,
) -> Result<Addresses, Error> {
    let controllers = worker.shared.guard.controllers(&worker.resolver, port).await;
    let (shared, own) = (worker.shared.clone(), worker.shared.own_addresses());
    let forbids = move |address| shared.guard.forbids((address, port).into(), &controllers, &|ip| own.contains(&ip));
    permitted(host, addresses, forbids)
}

/// Connects.
///
/// # Errors
/// Which endpoint could not be reached, and why.
pub(crate) async fn connect(worker: &Worker, to: &Destination<'_>, within: Duration) -> Result<Io, Error> {
    let connected = match tokio::time::timeout(within, connect_slowly(worker, to)).await {
        Ok(result) => result,
        Err(_) => Err(Error::ConnectTimeout { peer: to.label.clone(), missing: NO_CONNECTION, after: within }),
    };
    count(worker, to, connected.is_ok());
    connected
}

/// Counts an attempt.
pub(crate) fn count(worker: &Worker, to: &Destination<'_>, is_connected: bool) {
    let (upstream, endpoint) = to.label.split_once('/').unwrap_or((to.label, ""));
    let metrics = &worker.shared.metrics;
    // Names that clients choose never become labels.
    if to.reach.is_none() {
        let labels = EndpointLabels { upstream: Arc::from(upstream), endpoint: Arc::from(endpoint) };
        let family = if is_connected { &metrics.upstream_connects } else { &metrics.upstream_connect_failures };
        family.get_or_create(&labels).inc();
    }
}

async fn connect_slowly(worker: &Worker, to: &Destination<'_>) -> Result<Io, Error> {
    let fault = |source: io::Error| Error::no_connection(&worker.shared.metrics, to.label, source);
    let mut addresses = addresses(worker, to.host, to.reach).await?;
    if to.guarded {
        addresses = guard(worker, (to.host, to.port), addresses).await?;
    }
    if to.urgent {
        addresses = addresses.map(|found| found.repeat(CANDIDATES));
    }
    let mut tcp = dial::connect_session(&addresses, to.port).await.map_err(fault)?;
    if let Some(source) = to.proxy_source {
        let destination = tcp.peer_addr().map_err(fault)?;
        tcp.write_all(&proxy_protocol::encode(source, destination)).await.map_err(fault)?;
    }
    match to.tls {
        Some(tls) => tls::connect(tls.config.clone(), &tls.name, tcp).await.map_err(fault),
        None => Ok(Io::Plain(tcp)),
    }
}
