//! The network of the case: client, two routers and a server in a row.
//!
//! In: root, TUN devices, and the conditions of each link; none for cables. Out: namespaces, and a web server on each
//! port of the server, which tells the address of its client. Dropping the value removes the network.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use hermes_lab::{Conditions, End, Link};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::way::Way;
use crate::namespace::{CONGESTION_CONTROL, Namespace, feed};
use crate::origins;

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-pep-";
/// Links in a row.
const LINKS: usize = 3;
/// A port of the server at which nobody listens.
pub(super) const CLOSED: u16 = 7999;

/// Client, ingress, egress and server.
#[derive(Debug)]
pub(super) struct Lab {
    _origins: JoinSet<()>,
    _links: Vec<Link>,
    places: Vec<Namespace>,
}

/// The addresses of a link's ends, the client's side first.
fn ends(link: usize) -> [Ipv4Addr; 2] {
    [1, 2].map(|end| Ipv4Addr::new(10, 73, link as u8, end))
}

/// The address of the server.
pub(super) fn server(port: u16) -> SocketAddr {
    (ends(LINKS - 1)[1], port).into()
}

/// The address of the ingress for the client.
pub(super) fn ingress(port: u16) -> SocketAddr {
    (ends(0)[1], port).into()
}

/// The address of the egress for the ingress.
pub(super) fn egress(port: u16) -> SocketAddr {
    (ends(1)[1], port).into()
}

impl Lab {
    /// Creates the network. `number` distinguishes the labs of one process.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(super) fn new(number: usize, conditions: Option<[Conditions; LINKS]>) -> anyhow::Result<Self> {
        let names = ["client", "ingress", "egress", "server"];
        let own = |place: usize| if place == 0 { ends(0)[0] } else { ends(place - 1)[1] };
        let places = names.iter().enumerate().map(|(at, name)| Namespace::new(PREFIX, number, name, own(at)));
        let places = places.collect::<anyhow::Result<Vec<_>>>()?;
        let epoch = Instant::now();
        let mut links = Vec::new();
        for (at, pair) in places.windows(2).enumerate() {
            let [near, far] = pair else { continue };
            match conditions.as_ref().and_then(|all| all.get(at)) {
                Some(conditions) => links.push(join(at, near, far, conditions.clone(), epoch)?),
                None => cable(at, near, far)?,
            }
        }
        for (at, place) in places.iter().enumerate() {
            for link in (0..LINKS).filter(|link| *link + 1 != at && *link != at) {
                let via = if link < at { ends(at - 1)[0] } else { ends(at)[1] };
                place.ip(&format!("route add 10.73.{link}.0/24 via {via} congctl {CONGESTION_CONTROL}\n"))?;
            }
            place.forward()?;
        }
        let mut origins = JoinSet::new();
        let serving = Way::ALL.iter().filter(|way| **way != Way::Haproxy);
        for way in serving {
            let listener = places[LINKS].listen((Ipv4Addr::UNSPECIFIED, way.port()).into())?;
            origins.spawn(origins::accept(listener, |stream: TcpStream| {
                let peer: Arc<str> = stream.peer_addr().map_or_else(|_| "".into(), |peer| peer.to_string().into());
                origins::serve_http(stream, peer)
            }));
        }
        Ok(Self { _origins: origins, _links: links, places })
    }

    pub(super) fn client(&self) -> &Namespace {
        &self.places[0]
    }

    pub(super) fn ingress(&self) -> &Namespace {
        &self.places[1]
    }

    pub(super) fn egress(&self) -> &Namespace {
        &self.places[2]
    }
}

const DEVICES: [&str; 2] = ["to-client", "to-server"];

fn cable(link: usize, near: &Namespace, far: &Namespace) -> anyhow::Result<()> {
    let [to_client, to_server] = DEVICES;
    let mut ip = std::process::Command::new("ip");
    ip.args(["link", "add", to_server, "netns", near.name(), "type", "veth", "peer", "name", to_client]);
    feed(ip.args(["netns", far.name()]), "")?;
    let [of_near, of_far] = ends(link);
    for (place, device, own) in [(near, to_server, of_near), (far, to_client, of_far)] {
        place.ip(&format!(
            "addr add {own}/24 dev {device}\nlink set {device} up\n\
             route replace 10.73.{link}.0/24 dev {device} src {own} congctl {CONGESTION_CONTROL}\n"
        ))?;
    }
    Ok(())
}

/// Creates a link. Its ends have static neighbour entries, so that no request for an address is lost.
fn join(
    link: usize,
    near: &Namespace,
    far: &Namespace,
    conditions: Conditions,
    epoch: Instant,
) -> anyhow::Result<Link> {
    let [to_client, to_server] = DEVICES;
    let pair = [End { namespace: near.name(), device: to_server }, End { namespace: far.name(), device: to_client }];
    let laid = Link::new(pair, [conditions.clone(), conditions], epoch).context("a link between two namespaces")?;
    let [of_near, of_far] = ends(link);
    let [ethernet_of_near, ethernet_of_far] = laid.ethernet();
    let sides =
        [(near, to_server, [of_near, of_far], ethernet_of_far), (far, to_client, [of_far, of_near], ethernet_of_near)];
    for (place, device, [own, other], ethernet) in sides {
        place.ip(&format!(
            "addr add {own}/24 dev {device}\nlink set {device} up\n\
             route replace 10.73.{link}.0/24 dev {device} src {own} congctl {CONGESTION_CONTROL}\n\
             neigh replace {other} lladdr {ethernet} dev {device} nud permanent\n"
        ))?;
    }
    Ok(laid)
}
