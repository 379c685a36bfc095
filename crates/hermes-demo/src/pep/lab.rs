//! The network of the case: client, two routers and a server in a row.
//!
//! In: root, TUN devices, and the conditions of each link; none for cables. Out: namespaces, and a web server on each
//! port of the server, which tells the address of its client. Dropping the value removes the network.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hermes_lab::Conditions;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::way::Way;
use crate::machine_row::{MachineRow, RowNetwork};
use crate::namespace::Namespace;
use crate::origins;

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-pep-";
/// Links in a row.
const LINKS: usize = 3;
const NETWORK: RowNetwork = RowNetwork(73);
/// A port of the server at which nobody listens.
pub(super) const CLOSED: u16 = 7999;

/// Client, ingress, egress and server.
#[derive(Debug)]
pub(super) struct Lab {
    _origins: JoinSet<()>,
    row: MachineRow,
}

/// The address of the server.
pub(super) fn server(port: u16) -> SocketAddr {
    (NETWORK.ends(LINKS - 1)[1], port).into()
}

/// The address of the ingress for the client.
pub(super) fn ingress(port: u16) -> SocketAddr {
    (NETWORK.ends(0)[1], port).into()
}

/// The address of the egress for the ingress.
pub(super) fn egress(port: u16) -> SocketAddr {
    (NETWORK.ends(1)[1], port).into()
}

impl Lab {
    /// Creates the network. `number` distinguishes the labs of one process.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(super) fn new(number: usize, conditions: Option<[Conditions; LINKS]>) -> anyhow::Result<Self> {
        let names = ["client", "ingress", "egress", "server"];
        let of_link = |link: usize| conditions.as_ref().and_then(|all| all.get(link).cloned());
        let row = MachineRow::new(PREFIX, number, NETWORK, &names, of_link)?;
        let mut origins = JoinSet::new();
        for way in Way::ALL.into_iter().filter(|way| *way != Way::Haproxy) {
            let listener = row.places[LINKS].listen((Ipv4Addr::UNSPECIFIED, way.port()).into())?;
            origins.spawn(origins::accept(listener, |stream: TcpStream| {
                let peer: Arc<str> = stream.peer_addr().map_or_else(|_| "".into(), |peer| peer.to_string().into());
                origins::serve_http(stream, peer)
            }));
        }
        Ok(Self { _origins: origins, row })
    }

    pub(super) fn client(&self) -> &Namespace {
        &self.row.places[0]
    }

    pub(super) fn ingress(&self) -> &Namespace {
        &self.row.places[1]
    }

    pub(super) fn egress(&self) -> &Namespace {
        &self.row.places[2]
    }
}
