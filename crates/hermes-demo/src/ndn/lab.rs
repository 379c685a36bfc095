//! The network of the case: a device, two standalone proxies and a machine with four replicas, in a row.
//!
//! In: root and TUN devices. Out: namespaces; the device's link has 10 Mbit/s, as the paper's, the others are cables.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use hermes_lab::Conditions;

use crate::machine_row::{MachineRow, RowNetwork};
use crate::namespace::Namespace;

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-ndn-";
const NETWORK: RowNetwork = RowNetwork(74);
/// The rate of the device's link in bits per second.
pub(super) const RATE: u64 = 10_000_000;
/// Its delay in one direction, and the size of its queue: a pipeline of segments fits.
const ONE_WAY: Duration = Duration::from_micros(500);
const QUEUE: Duration = Duration::from_millis(250);
/// Two users, each with two namespaces.
pub(super) const REPLICAS: usize = 4;
/// The port of the first producer; the others follow.
const PRODUCER: u16 = 6363;
/// The port of the forwarder before the first producer, if there is one.
const FORWARDER: u16 = 6463;
/// The port of the first forwarder on the device; the others follow.
const DEVICE_FORWARDER: u16 = 7101;
/// The port of the first replica's node; the others follow.
const OVERLAY: u16 = 9443;

/// The four machines.
#[derive(Debug)]
pub(super) struct Lab {
    row: MachineRow,
}

/// The address at which a producer serves consumers without an overlay.
pub(super) fn producer(replica: usize) -> SocketAddr {
    (NETWORK.ends(2)[1], PRODUCER + replica as u16).into()
}

/// The address of the forwarder before the first producer.
pub(super) fn forwarder() -> SocketAddr {
    (NETWORK.ends(2)[1], FORWARDER).into()
}

/// The address of the forwarder on the device before one of the ways.
pub(super) fn device_forwarder(way: usize) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, DEVICE_FORWARDER + way as u16).into()
}

/// The address at which the node before it reaches a standalone proxy (0 or 1).
pub(super) fn proxy(number: usize) -> SocketAddr {
    (NETWORK.ends(number)[1], OVERLAY).into()
}

/// The address at which the last proxy reaches a replica's node.
pub(super) fn replica(number: usize) -> SocketAddr {
    (NETWORK.ends(2)[1], OVERLAY + number as u16).into()
}

/// The address at which a user's programs reach the node of the device.
pub(super) fn device(user: usize) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 7001 + user as u16).into()
}

impl Lab {
    /// Creates the network.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(super) fn new() -> anyhow::Result<Self> {
        let slow = Conditions { rate: Some(RATE), one_way: ONE_WAY, queue: QUEUE, ..Conditions::default() };
        let names = ["device", "proxy1", "proxy2", "server"];
        let row = MachineRow::new(PREFIX, 0, NETWORK, &names, |link| (link == 0).then(|| slow.clone()))?;
        Ok(Self { row })
    }

    pub(super) fn device(&self) -> &Namespace {
        &self.row.places[0]
    }

    pub(super) fn proxy(&self, number: usize) -> &Namespace {
        &self.row.places[1 + number]
    }

    pub(super) fn server(&self) -> &Namespace {
        &self.row.places[3]
    }
}
