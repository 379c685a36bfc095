//! Opens connections: name resolution, TCP, PROXY header and TLS, within the route's timeout.
//!
//! In: a destination. Out: a connected `Io`. Each address is checked after DNS resolution, and exactly the checked
//! addresses are dialled, so a second DNS answer cannot bypass the check (DNS rebinding).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hermes_model::dial_scope::DialScope;
use hermes_net::dial::{self, Addresses};
use hermes_net::{Io, host, tcp, tls, transparent};
use hermes_wire::proxy_protocol;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::outbound::Outbound;
use crate::upstream::ClientTls;
use hermes_transport::error::{Error, NO_CONNECTION};
use hermes_transport::metrics::EndpointLabels;

/// The target of a connection.
pub struct Destination<'a> {
    pub host: &'a str,
    pub port: u16,
    /// The label for logs and metrics: the name of the upstream and of the endpoint.
    pub label: &'a Arc<str>,
    /// The permitted address ranges if a request named the host. `None` if the node document named it: all addresses
    /// are then permitted.
    pub reach: Option<DialScope>,
    /// True if the addresses are checked by the dial guard, because a client may have chosen the target.
    pub guarded: bool,
    pub tls: Option<&'a ClientTls>,
    /// The source address in the PROXY header; `None` if no PROXY header is sent.
    pub proxy_source: Option<SocketAddr>,
    /// The source address of the connection; `None` if it is this node's.
    pub source: Option<SocketAddr>,
    /// The congestion control of the connection; `None` if it is the kernel's default.
    pub congestion: Option<&'a str>,
    /// True if further attempts start in parallel while the first SYN is unanswered. The retransmission of a lost SYN
    /// would take a second (RFC 6298, section 2).
    pub urgent: bool,
}

/// The interval of attempts to use the address and port of a client that an earlier connection still uses.
const TUPLE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The number of parallel connection attempts for each address of an urgent destination.
const CANDIDATES: usize = 3;

/// Resolves a host, and returns its addresses if the route permits all of them.
///
/// # Errors
/// The host has no address, or at least one address that is not permitted. A single such address rejects the whole DNS
/// answer, so that an attacker cannot pass the check by mixing addresses.
pub async fn addresses(worker: &Outbound, host: &str, reach: Option<DialScope>) -> Result<Addresses, Error> {
    let addresses = worker.resolver.resolve(host).await.map_err(|error| Error::Resolve(error.to_string()))?;
    let Some(reach) = reach else { return Ok(addresses) };
    let own = worker.shared.own_addresses();
    permitted(host, addresses, move |address| reach.forbids(address, &|ip| own.contains(&ip)))
}

/// Returns the addresses if none of them is forbidden. A DNS answer that arrives later is checked in the same way: if
/// it contains a forbidden address, all of its addresses are dropped.
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

/// Checks the addresses that a guarded route is about to dial.
///
/// # Errors
/// An address belongs to this node, a controller or a metadata service. No address is used then.
pub async fn guard(worker: &Outbound, (host, port): (&str, u16), addresses: Addresses) -> Result<Addresses, Error> {
    let controllers = worker.shared.guard.controllers(&worker.resolver, port).await;
    let (shared, own) = (worker.shared.clone(), worker.shared.own_addresses());
    let forbids = move |address| shared.guard.forbids((address, port).into(), &controllers, &|ip| own.contains(&ip));
    permitted(host, addresses, forbids)
}

/// Opens a connection within the timeout `within`, and counts the attempt.
///
/// # Errors
/// The host did not resolve, an address is not permitted, or no connection could be opened in time.
pub async fn connect(worker: &Outbound, to: &Destination<'_>, within: Duration) -> Result<Io, Error> {
    let connected = match tokio::time::timeout(within, connect_slowly(worker, to)).await {
        Ok(result) => result,
        Err(_) => Err(Error::ConnectTimeout { peer: to.label.clone(), missing: NO_CONNECTION, after: within }),
    };
    count(worker, to, connected.is_ok());
    connected
}

/// Counts a connection attempt in the metrics of its endpoint.
pub fn count(worker: &Outbound, to: &Destination<'_>, is_connected: bool) {
    let (upstream, endpoint) = to.label.split_once('/').unwrap_or((to.label, ""));
    let metrics = &worker.shared.metrics;
    // Names that clients choose never become metric labels.
    if to.reach.is_none() {
        let labels = EndpointLabels { upstream: Arc::from(upstream), endpoint: Arc::from(endpoint) };
        let family = if is_connected { &metrics.upstream_connects } else { &metrics.upstream_connect_failures };
        family.get_or_create(&labels).inc();
    }
}

async fn connect_slowly(worker: &Outbound, to: &Destination<'_>) -> Result<Io, Error> {
    let fault = |source: io::Error| Error::no_connection(&worker.shared.metrics, to.label, source);
    let mut addresses = addresses(worker, to.host, to.reach).await?;
    if to.guarded {
        addresses = guard(worker, (to.host, to.port), addresses).await?;
    }
    if to.urgent {
        addresses = addresses.map(|found| found.repeat(CANDIDATES));
    }
    let mut tcp = match to.source {
        Some(source) => connect_from(&addresses, source, to.port).await,
        None => dial::connect_session(&addresses, to.port).await,
    }
    .map_err(fault)?;
    tcp::set_congestion(&tcp, to.congestion);
    if let Some(source) = to.proxy_source {
        let destination = tcp.peer_addr().map_err(fault)?;
        tcp.write_all(&proxy_protocol::encode(source, destination)).await.map_err(fault)?;
    }
    match to.tls {
        Some(tls) => tls::connect(tls.config.clone(), &tls.name, tcp).await.map_err(fault),
        None => Ok(Io::Plain(tcp)),
    }
}

/// Connects to the first address, with the address and port of a client. There is no race: a second connection would
/// need the same address and port.
async fn connect_from(addresses: &Addresses, source: SocketAddr, port: u16) -> io::Result<TcpStream> {
    let is_like = |address: &&IpAddr| address.is_ipv4() == source.is_ipv4();
    let Some(address) = addresses.now().iter().find(is_like) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the client has an address of another IP version"));
    };
    loop {
        match transparent::connect_from(source, (*address, port).into(), host::spare).await {
            // An earlier connection of the same client to the same server is not yet closed. No event tells its end. The
            // caller's timeout ends the attempts, and a client whose SYN is held then sends it again.
            Err(error) if matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse) => {
                tokio::time::sleep(TUPLE_POLL_INTERVAL).await;
            }
            connected => return connected,
        }
    }
}
