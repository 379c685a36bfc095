//! Machines in a row, each a namespace, with a link between neighbours.
//!
//! In: root, the name of each machine, and the conditions of each link; `None` is a cable. Out: namespaces with routes
//! to all links, and the links' counters. Connections use CUBIC, whatever the default of this machine is. Dropping the
//! value removes the network.

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use hermes_lab::{Conditions, End, Link};

use crate::namespace::{CONGESTION_CONTROL, Namespace, feed};

/// Device names, by the direction of their link.
const DEVICES: [&str; 2] = ["to-client", "to-server"];

/// The network of a row: the second byte of its addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowNetwork(pub(crate) u8);

impl RowNetwork {
    /// The addresses of a link's ends, the client's side first.
    pub(crate) const fn ends(self, link: usize) -> [Ipv4Addr; 2] {
        [Ipv4Addr::new(10, self.0, link as u8, 1), Ipv4Addr::new(10, self.0, link as u8, 2)]
    }

    fn prefix(self, link: usize) -> String {
        format!("10.{}.{link}.0/24", self.0)
    }
}

/// The machines, from the client's to the server's.
#[derive(Debug)]
pub(crate) struct MachineRow {
    /// The emulated links, in their order; cables are not among them.
    pub(crate) links: Vec<Link>,
    pub(crate) places: Vec<Namespace>,
    pub(crate) epoch: Instant,
}

impl MachineRow {
    /// Creates the network. `number` distinguishes the rows of one process.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(crate) fn new(
        prefix: &str,
        number: usize,
        network: RowNetwork,
        names: &[&str],
        conditions: impl Fn(usize) -> Option<Conditions>,
    ) -> anyhow::Result<Self> {
        let own = |at: usize| if at == 0 { network.ends(0)[0] } else { network.ends(at - 1)[1] };
        let places = names.iter().enumerate().map(|(at, name)| Namespace::new(prefix, number, name, own(at)));
        let places = places.collect::<anyhow::Result<Vec<_>>>()?;
        let epoch = Instant::now();
        let mut links = Vec::new();
        for (at, pair) in places.windows(2).enumerate() {
            let [near, far] = pair else { continue };
            match conditions(at) {
                Some(conditions) => links.push(join(network, at, near, far, conditions, epoch)?),
                None => lay_cable(network, at, near, far)?,
            }
        }
        for (at, place) in places.iter().enumerate() {
            for link in (0..places.len() - 1).filter(|link| *link + 1 != at && *link != at) {
                let via = if link < at { network.ends(at - 1)[0] } else { network.ends(at)[1] };
                let prefix = network.prefix(link);
                place.ip(&format!("route add {prefix} via {via} congctl {CONGESTION_CONTROL}\n"))?;
            }
            place.forward()?;
        }
        Ok(Self { links, places, epoch })
    }
}

fn lay_cable(network: RowNetwork, link: usize, near: &Namespace, far: &Namespace) -> anyhow::Result<()> {
    let [to_client, to_server] = DEVICES;
    let mut ip = Command::new("ip");
    ip.args(["link", "add", to_server, "netns", near.name(), "type", "veth", "peer", "name", to_client]);
    feed(ip.args(["netns", far.name()]), "")?;
    let [of_near, of_far] = network.ends(link);
    configure(network, link, near, to_server, of_near)?;
    configure(network, link, far, to_client, of_far)
}

/// Creates a link. Its ends have static neighbour entries: neighbour discovery fails while a link is down.
fn join(
    network: RowNetwork,
    link: usize,
    near: &Namespace,
    far: &Namespace,
    conditions: Conditions,
    epoch: Instant,
) -> anyhow::Result<Link> {
    let [to_client, to_server] = DEVICES;
    let pair = [End { namespace: near.name(), device: to_server }, End { namespace: far.name(), device: to_client }];
    let laid = Link::new(pair, [conditions.clone(), conditions], epoch).context("a link between two namespaces")?;
    let [of_near, of_far] = network.ends(link);
    let [ethernet_of_near, ethernet_of_far] = laid.ethernet();
    let sides =
        [(near, to_server, [of_near, of_far], ethernet_of_far), (far, to_client, [of_far, of_near], ethernet_of_near)];
    for (place, device, [own, other], ethernet) in sides {
        configure(network, link, place, device, own)?;
        place.ip(&format!("neigh replace {other} lladdr {ethernet} dev {device} nud permanent\n"))?;
    }
    Ok(laid)
}

fn configure(network: RowNetwork, link: usize, place: &Namespace, device: &str, own: Ipv4Addr) -> anyhow::Result<()> {
    let prefix = network.prefix(link);
    place.ip(&format!(
        "addr add {own}/24 dev {device}\nlink set {device} up\n\
         route replace {prefix} dev {device} src {own} congctl {CONGESTION_CONTROL}\n"
    ))
}
