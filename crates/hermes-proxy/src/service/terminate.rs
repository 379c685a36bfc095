//! Terminates a tunnel: beyond this node, its payload is TCP, UDP or IP to a host outside the overlay.
//!
//! In: a session that a route terminates. Out: a connected stream or socket. Never: a connection to an address outside
//! the route's `reach`; each address is checked after DNS resolution.

pub(crate) mod face;
pub(crate) mod gateway;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_model::snapshot::{Gateway, ListenerProtocol, Route, Target, Terminate};
use hermes_net::udp::{self, UdpSocket};
use hermes_net::{host, transparent};
use hermes_wire::connect_ip::{self, Scope};
use http::StatusCode;
use http::uri::Scheme;
use ipnet::IpNet;
use tokio::time::Instant;

use crate::ip::{End, FAR_ENDS, LocalDevice, Owner};
use crate::worker::Worker;
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::connect::{Destination, addresses, connect, guard};
use hermes_outbound::upstream::ClientTls;
use hermes_transport::datagram::Port;
use hermes_transport::error::Error;
use hermes_transport::headers;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::ByteStream;

/// The target of a terminating route for this session.
pub(crate) struct DialTarget {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
    pub(crate) label: Arc<str>,
    /// The request named the target, not the document.
    pub(crate) named: bool,
    /// TLS to the origin, for a request with scheme `https`.
    tls: Option<ClientTls>,
}

impl DialTarget {
    /// The dial target, with the restrictions of the route. `source` is set if a PROXY header is sent.
    pub(crate) fn destination<'a>(&'a self, terminate: &'a Terminate, source: Option<SocketAddr>) -> Destination<'a> {
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
pub(crate) fn place(terminate: &Terminate, facts: &Facts, route: &Route) -> Result<DialTarget, Error> {
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
pub(crate) fn origin(
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

/// Opens a TCP connection for a `tcp` session.
///
/// # Errors
/// No address, no address within `reach`, or no connection.
pub(crate) async fn tcp(
    worker: &Worker,
    entry: &SessionEntry,
    terminate: &Terminate,
    route: &Route,
) -> Result<ByteStream, Error> {
    let place = place(terminate, &entry.facts, route)?;
    *entry.peer.borrow_mut() = Some(place.label.clone());
    let destination = Destination {
        source: terminate.from_client.then(|| client(&entry.facts)),
        ..place.destination(terminate, terminate.proxy_protocol.then_some(entry.facts.source))
    };
    let io = connect(worker, &destination, route.timeout.connect).await?;
    Ok(ByteStream::io(io, Bytes::new()))
}

/// The address and port of the client, as the node that intercepted its connection reported them.
fn client(facts: &Facts) -> SocketAddr {
    let reported = facts.headers.get(headers::SOURCE).and_then(|value| value.to_str().ok()?.parse().ok());
    reported.unwrap_or(facts.source)
}

/// The end of an `ip` session at a device.
///
/// # Errors
/// The device is not ready in time, the session requests a scope that the route does not allow, or its name does not
/// resolve.
pub(crate) async fn device(
    worker: &Worker,
    entry: &SessionEntry,
    gateway: &Gateway,
    route: &Route,
) -> Result<Port, Error> {
    let facts = &entry.facts;
    *entry.peer.borrow_mut() = Some(Arc::from(format!("{}/{}", route.name, gateway.device)));
    let within = route.timeout.connect + FAR_ENDS;
    let late = |missing| Error::ConnectTimeout { peer: gateway.device.clone(), missing, after: within };
    let by = Instant::now() + within;
    let local = worker.devices.get_by(&gateway.device, by).await;
    let local =
        local.ok_or_else(|| late("open on this worker: another program deleted it, or its queue is unreadable"))?;
    // During a takeover, this process receives the device only after the far ends of its captures are open. A capture
    // whose far end is this device counts as open, since it would wait for itself.
    if !*local.device.reads.borrow()
        && let Some(captured) = capturing(worker, &facts.listener)
    {
        captured.device.answered.send_modify(|count| *count += 1);
    }
    if !local.device.is_read_by(by).await {
        return Err(late("come from the process before this one"));
    }
    if !local.device.net().is_ours() {
        // The next process assigns the addresses now.
        return Err(Error::Draining);
    }
    let owner = Owner::of(facts);
    let network = facts.network.or(facts.announced_network);
    let (network, inner) = match connect_ip::parse_path(facts.path.path()) {
        Ok(Some(Scope { target: connect_ip::Target::Name(name), .. })) => {
            named(worker, &name, network, gateway, route).await?
        }
        _ => (network, gateway.dnat),
    };
    let by = (&route.name, gateway);
    let end = End::giving(&local, owner, by, network, inner, facts.protocol).map_err(Error::Malformed)?;
    Ok(Port::Device(Box::new(end)))
}

/// The device that a listener captures from; `None` for other listeners.
fn capturing(worker: &Worker, listener: &str) -> Option<Rc<LocalDevice>> {
    match &worker.generation().listener(listener)?.protocol {
        ListenerProtocol::Tun(tun) => worker.devices.get(&tun.device),
        _ => None,
    }
}

/// The scope of a session to a name (RFC 9484, section 4.6), and the machine that receives its packets if that address
/// differs. The client learns the scope as a route. A node that captured packets for the name reported their address,
/// which becomes the scope; otherwise the machine's own address does.
async fn named(
    worker: &Worker,
    name: &str,
    told: Option<IpNet>,
    gateway: &Gateway,
    route: &Route,
) -> Result<(Option<IpNet>, Option<IpAddr>), Error> {
    let machine = match gateway.dnat {
        Some(inner) => inner,
        None => resolved(worker, name, told, route).await?,
    };
    let networks = &route.matcher.networks;
    if gateway.dnat.is_none() && !networks.is_empty() && !networks.iter().any(|network| network.contains(&machine)) {
        // Without this check, a client could use a route for any name by choosing the reported address.
        return Err(Error::Denied {
            status: StatusCode::FORBIDDEN,
            reason: format!("{name} leads to {machine}, and route {} is not for that", route.name),
            label: "destination_ip_prohibited",
        });
    }
    match told {
        Some(told) => Ok((Some(told), Some(machine))),
        None => Ok((Some(machine.into()), None)),
    }
}

/// The first address of a name in the IP version of the packets.
async fn resolved(worker: &Worker, name: &str, told: Option<IpNet>, route: &Route) -> Result<IpAddr, Error> {
    let within = route.timeout.connect;
    let found = tokio::time::timeout(within, addresses(worker, name, None)).await;
    let found = found.map_err(|_| Error::ConnectTimeout {
        peer: Arc::from(name),
        missing: "get an address",
        after: within,
    })??;
    let fits = |address: &IpAddr| told.is_none_or(|told| told.addr().is_ipv4() == address.is_ipv4());
    if let Some(machine) = found.now().iter().copied().find(fits) {
        return Ok(machine);
    }
    let late = tokio::time::timeout(within, found.late()).await.unwrap_or_default();
    let version = told.map_or("", |told| if told.addr().is_ipv4() { "v4" } else { "v6" });
    late.into_iter().find(fits).ok_or_else(|| Error::Resolve(format!("{name} has no IP{version} address")))
}

/// Opens a UDP socket for a `udp` session.
///
/// # Errors
/// No address, no address within `reach`, or no socket.
pub(crate) async fn udp(
    worker: &Worker,
    entry: &SessionEntry,
    terminate: &Terminate,
    route: &Route,
) -> Result<Port, Error> {
    let place = place(terminate, &entry.facts, route)?;
    *entry.peer.borrow_mut() = Some(place.label.clone());
    let within: Duration = route.timeout.connect;
    let found = tokio::time::timeout(within, addresses(worker, &place.host, place.named.then_some(terminate.reach)));
    let late = || Error::ConnectTimeout { peer: place.label.clone(), missing: "get an address", after: within };
    let mut found = found.await.map_err(|_| late())??;
    if terminate.guard {
        let guarded = tokio::time::timeout(within, guard(worker, (&*place.host, place.port), found));
        found = guarded.await.map_err(|_| late())??;
    }
    let source = terminate.from_client.then(|| client(&entry.facts));
    let connected = match first_socket(found.now(), place.port, source) {
        Ok(port) => Ok(port),
        // No address of this family has a route from here; the other family may have one (RFC 8305).
        Err(error) => {
            let late = tokio::time::timeout(within, found.late()).await.unwrap_or_default();
            if late.is_empty() { Err(error) } else { first_socket(&late, place.port, source) }
        }
    };
    connected.map_err(|source| Error::no_connection(&worker.shared.metrics, &place.label, source))
}

/// A socket connected to the first of these addresses that has a route, with the address `source` if there is one.
fn first_socket(addresses: &[IpAddr], port: u16, source: Option<SocketAddr>) -> io::Result<Port> {
    let mut last = io::Error::other("no address");
    for address in addresses {
        let to = SocketAddr::new(*address, port);
        let socket = match source {
            Some(source) => transparent::udp_from(source, to),
            None => udp::connect(to),
        };
        let socket = socket.and_then(|socket| host::spare(&socket).map(|()| socket));
        // The peer as the kernel resolved it: 0.0.0.0 is the loopback address.
        let connected = socket.and_then(|socket| {
            let peer = socket.peer_addr()?;
            Ok(Port::Socket { socket: UdpSocket::from_std(socket)?, peer })
        });
        match connected {
            Ok(port) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last)
}
