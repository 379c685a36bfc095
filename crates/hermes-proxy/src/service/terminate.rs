//! Opens a tunnel here: from now on its payload is TCP, UDP or IP to somebody outside of the
//! overlay.
//!
//! In: a session that a route terminates. Out: a connected stream or socket.
//! Never: an address that the route does not reach; each one is judged after DNS answered.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Facts;
use hermes_model::snapshot::{Gateway, ListenerProtocol, Route, Target, Terminate};
use hermes_net::host;
use hermes_net::udp::{self, UdpSocket};
use hermes_wire::connect_ip::{self, Scope};
use http::StatusCode;
use http::uri::Scheme;
use ipnet::IpNet;
use tokio::time::Instant;

use crate::datagram::Port;
use crate::error::Error;
use crate::generation::Generation;
use crate::ip::{End, FAR_ENDS, LocalDevice, Owner};
use crate::live::Entry;
use crate::stream::ByteStream;
use crate::upstream::ClientTls;
use crate::upstream::connect::{Destination, addresses, connect, guard};
use crate::worker::Worker;

/// Where a terminating route goes for this session.
pub(crate) struct Place {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
    pub(crate) label: Arc<str>,
    /// The request named it.
    pub(crate) named: bool,
    /// TLS towards the origin, for a request for `https`.
    tls: Option<ClientTls>,
}

impl Place {
    /// Where to connect to, as the route allows. `source` where a PROXY header is wanted.
    pub(crate) fn destination(&self, terminate: &Terminate, source: Option<SocketAddr>) -> Destination<'_> {
        Destination {
            host: &self.host,
            port: self.port,
            label: &self.label,
            reach: self.named.then_some(terminate.reach),
            guarded: terminate.guard,
            tls: self.tls.as_ref(),
            proxy_source: source,
            urgent: false,
        }
    }
}

/// Where a terminating route goes.
///
/// # Errors
/// The request names no port.
pub(crate) fn place(terminate: &Terminate, facts: &Facts, route: &Route) -> Result<Place, Error> {
    match &terminate.target {
        Target::Fixed(target) => Ok(Place {
            host: target.host.clone(),
            port: target.port,
            label: label(&route.name, &target.host, target.port),
            named: false,
            tls: None,
        }),
        Target::Authority => {
            let port =
                facts.authority.port().ok_or_else(|| Error::Malformed("the authority has no port".to_owned()))?;
            let host: Arc<str> = Arc::from(facts.authority.host());
            Ok(Place { label: label(&route.name, &host, port), host, port, named: true, tls: None })
        }
    }
}

/// As [`place`], for a request of this scheme. A request for `https` reaches its origin over TLS, which verifies the
/// origin's name.
///
/// # Errors
/// As [`place`], or there are no CA certificates to verify the origin by.
pub(crate) fn origin(
    generation: &Generation,
    terminate: &Terminate,
    facts: &Facts,
    route: &Route,
    scheme: &Scheme,
) -> Result<Place, Error> {
    let place = place(terminate, facts, route)?;
    if !terminate.speaks_tls() || *scheme != Scheme::HTTPS {
        return Ok(place);
    }
    // Connections are pooled by label, so that TLS and plaintext connections are never mixed.
    let label: Arc<str> = Arc::from(place.label.replacen('/', "/https://", 1));
    let tls = generation
        .origin_tls(terminate, &place.host)
        .map_err(|reason| Error::Connect { peer: label.clone(), source: Arc::new(io::Error::other(reason)) })?;
    Ok(Place { label, tls: Some(tls), ..place })
}

fn label(route: &str, host: &str, port: u16) -> Arc<str> {
    if host.contains(':') {
        Arc::from(format!("{route}/[{host}]:{port}"))
    } else {
        Arc::from(format!("{route}/{host}:{port}"))
    }
}

/// A TCP connection for a `tcp` session.
///
/// # Errors
/// No address, none in reach, no connection.
pub(crate) async fn tcp(
    worker: &Worker,
    entry: &Entry,
    terminate: &Terminate,
    route: &Route,
) -> Result<ByteStream, Error> {
    let place = place(terminate, &entry.facts, route)?;
    *entry.peer.borrow_mut() = Some(place.label.clone());
    let destination = place.destination(terminate, terminate.proxy_protocol.then_some(entry.facts.source));
    let io = connect(worker, &destination, route.timeout.connect).await?;
    Ok(ByteStream::io(io, Bytes::new()))
}

/// The end of an `ip` session at a device.
///
/// # Errors
/// The device is not there in time, or the session asks for what the route has not, or for a name that
/// leads nowhere.
pub(crate) async fn device(worker: &Worker, entry: &Entry, gateway: &Gateway, route: &Route) -> Result<Port, Error> {
    let facts = &entry.facts;
    *entry.peer.borrow_mut() = Some(Arc::from(format!("{}/{}", route.name, gateway.device)));
    let within = route.timeout.connect + FAR_ENDS;
    let late = |missing| Error::ConnectTimeout { peer: gateway.device.clone(), missing, after: within };
    let by = Instant::now() + within;
    let local = worker.devices.get_by(&gateway.device, by).await;
    let local = local.ok_or_else(|| late("open on this worker: somebody deleted it, or its queue cannot be read"))?;
    // While we take over, it is not sooner ours than what we capture has far ends. One that has its far end here is not
    // to wait for itself.
    if !*local.device.reads.borrow()
        && let Some(captured) = capturing(worker, &facts.listener)
    {
        captured.device.answered.send_modify(|count| *count += 1);
    }
    if !local.device.is_read_by(by).await {
        return Err(late("come from the process before this one"));
    }
    if !local.device.net().is_ours() {
        // Another process gives its addresses now.
        return Err(Error::Draining);
    }
    let owner = Owner::of(facts);
    let network = facts.network.or(facts.told);
    let (network, inner) = match connect_ip::parse_path(facts.path.path()) {
        Ok(Some(Scope { target: connect_ip::Target::Name(name), .. })) => {
            named(worker, &name, network, gateway, route).await?
        }
        _ => (network, gateway.inner),
    };
    let by = (&route.name, gateway);
    let end = End::giving(&local, owner, by, network, inner, facts.protocol).map_err(Error::Malformed)?;
    Ok(Port::Device(Box::new(end)))
}

/// The device whose packets a listener takes; `None`: it is of another kind.
fn capturing(worker: &Worker, listener: &str) -> Option<Rc<LocalDevice>> {
    match &worker.generation().listener(listener)?.protocol {
        ListenerProtocol::Tun(tun) => worker.devices.get(&tun.device),
        _ => None,
    }
}

/// The scope of a session for a name (RFC 9484, section 4.6), which its client is told as a route, and the machine that
/// gets its packets, where that has another address. A node that captures packets for the name has told which address
/// they have; of anybody else's the scope is the machine's own.
async fn named(
    worker: &Worker,
    name: &str,
    told: Option<IpNet>,
    gateway: &Gateway,
    route: &Route,
) -> Result<(Option<IpNet>, Option<IpAddr>), Error> {
    let machine = match gateway.inner {
        Some(inner) => inner,
        None => resolved(worker, name, told, route).await?,
    };
    let networks = &route.matcher.networks;
    if gateway.inner.is_none() && !networks.is_empty() && !networks.iter().any(|network| network.contains(&machine)) {
        // Whoever told the address could let any name into a route that is for some networks.
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

/// The first of a name's addresses, of the version that packets for it have.
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

/// A UDP socket for a `udp` session.
///
/// # Errors
/// No address, none in reach, no socket.
pub(crate) async fn udp(worker: &Worker, entry: &Entry, terminate: &Terminate, route: &Route) -> Result<Port, Error> {
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
    let connected = match first_socket(found.now(), place.port) {
        Ok(port) => Ok(port),
        // None of them has a route from here; the other family may have one (RFC 8305).
        Err(error) => {
            let late = tokio::time::timeout(within, found.late()).await.unwrap_or_default();
            if late.is_empty() { Err(error) } else { first_socket(&late, place.port) }
        }
    };
    connected.map_err(|source| Error::no_connection(worker, &place.label, source))
}

/// A socket that is connected to the first of these addresses that has a route.
fn first_socket(addresses: &[IpAddr], port: u16) -> io::Result<Port> {
    let mut last = io::Error::other("no address");
    for address in addresses {
        let socket = udp::connect((*address, port).into()).and_then(|socket| host::spare(&socket).map(|()| socket));
        // Who answers as the kernel has it: 0.0.0.0 is the loopback's address.
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
