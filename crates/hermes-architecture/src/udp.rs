//! UDP sockets of terminating routes.
//!
//! In: a `udp` session and its route. Out: a socket that is connected to the target. Never: a datagram.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hermes_model::snapshot::{Route, Terminate};
use hermes_net::udp::{self, UdpSocket};
use hermes_net::{host, transparent};
use hermes_outbound::outbound::Outbound;
use hermes_outbound::outbound::connect::{addresses, guard};
use hermes_transport::datagram::Port;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

use crate::dial_target::{client, place};

/// Opens a UDP socket for a `udp` session.
///
/// # Errors
/// No address, no address within `reach`, or no socket.
pub async fn udp(worker: &Outbound, entry: &SessionEntry, terminate: &Terminate, route: &Route) -> Result<Port, Error> {
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
