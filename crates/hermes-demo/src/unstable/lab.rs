//! The network of the unstable case: four machines in a row, three links between them, a web server on the last.
//!
//! In: root, TUN devices, and the conditions of each link. Out: namespaces with a common clock of the links; the bytes
//! that each link carried; a plaintext and a TLS server, both with the content of [`content`](crate::content). Dropping
//! the value removes the network. The machines forward IP packets, so that the server can be reached directly as well.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use hermes_lab::{Conditions, End, Link, turns};
use tokio::task::JoinSet;

use crate::namespace::{CONGESTION_CONTROL, Namespace};
use crate::origins::{self, ServerTls};

/// The prefix of every namespace's name; the demo's pid follows, which identifies leftovers.
pub(super) const PREFIX: &str = "hermes-unstable-";
/// Links in a row.
pub(super) const LINKS: usize = 3;
/// Nodes: the first is the client's, the last the server's.
pub(super) const NODES: usize = LINKS + 1;
/// The port of the plaintext web server, on all addresses of its machine.
pub(super) const WEB: u16 = 8081;
/// The port of the TLS server, on its loopback.
pub(super) const SECURE: u16 = 8443;
/// The server's name, for clients and in its certificate.
pub(super) const NAME: &str = "UNSTABLE";
/// Device names, by the direction of their link.
const DEVICES: [&str; 2] = ["to-client", "to-server"];

/// Four machines in a row.
#[derive(Debug)]
pub(super) struct Lab {
    _origins: JoinSet<()>,
    links: Vec<Link>,
    /// The machines, from the client's to the server's.
    pub(super) places: Vec<Namespace>,
    epoch: Instant,
}

/// The addresses of a link's ends, the client's side first.
pub(super) fn ends(link: usize) -> [Ipv4Addr; 2] {
    [1, 2].map(|end| Ipv4Addr::new(10, 72, link as u8, end))
}

/// The length of a cycle, in which every link is up once.
pub(super) fn round() -> Duration {
    turns::SLOT * LINKS as u32
}

impl Lab {
    /// Creates the network. `number` distinguishes the labs of one process.
    ///
    /// # Errors
    /// Returns iproute2's error, or the reason why no TUN device is available.
    pub(super) fn new(number: usize, tls: ServerTls, conditions: impl Fn(usize) -> Conditions) -> anyhow::Result<Self> {
        let own = |node: usize| if node == 0 { ends(0)[0] } else { ends(node - 1)[1] };
        let places = (0..NODES).map(|node| Namespace::new(PREFIX, number, &format!("n{}", node + 1), own(node)));
        let places = places.collect::<anyhow::Result<Vec<_>>>()?;
        let epoch = Instant::now();
        let links = (0..LINKS).map(|link| join(link, &places[link], &places[link + 1], conditions(link), epoch));
        let links = links.collect::<anyhow::Result<Vec<_>>>()?;
        for (node, place) in places.iter().enumerate() {
            forward(node, place)?;
        }
        let mut origins = JoinSet::new();
        let server = &places[NODES - 1];
        let web = server.listen((Ipv4Addr::UNSPECIFIED, WEB).into())?;
        let secure = server.listen((Ipv4Addr::LOCALHOST, SECURE).into())?;
        origins.spawn(origins::accept(web, |stream| origins::serve_http(stream, NAME)));
        origins.spawn(origins::accept(secure, move |stream| origins::serve_https(stream, tls.clone(), NAME)));
        Ok(Self { _origins: origins, links, places, epoch })
    }

    /// Waits until the links reach this position in their cycle.
    pub(super) async fn wait_for(&self, phase: Duration) {
        let round = round().as_nanos();
        let left = (phase.as_nanos() + round - self.epoch.elapsed().as_nanos() % round) % round;
        tokio::time::sleep(Duration::from_nanos(left as u64)).await;
    }

    /// The position in the links' cycle at that time, in seconds.
    pub(super) fn phase(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.epoch).as_secs_f64().rem_euclid(round().as_secs_f64())
    }

    /// Bytes of frames that each link has delivered towards the client.
    pub(super) fn carried(&self) -> [u64; LINKS] {
        let mut carried = [0; LINKS];
        for (bytes, link) in carried.iter_mut().zip(&self.links) {
            *bytes = link.counters()[1].bytes.load(Ordering::Relaxed);
        }
        carried
    }

    /// The server's address for direct requests.
    pub(super) fn server(&self) -> SocketAddr {
        (self.places[NODES - 1].address, WEB).into()
    }
}

/// Creates a link. Its ends have static neighbour entries: neighbour discovery would fail while the link is down.
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
    let addresses = ends(link);
    let [of_near, of_far] = laid.ethernet();
    let sides = [(near, to_server, addresses, of_far), (far, to_client, [addresses[1], addresses[0]], of_near)];
    for (place, device, [own, other], ethernet) in sides {
        place.ip(&format!(
            "addr add {own}/24 dev {device}\nlink set {device} up\n\
             route replace 10.72.{link}.0/24 dev {device} src {own} congctl {CONGESTION_CONTROL}\n\
             neigh replace {other} lladdr {ethernet} dev {device} nud permanent\n"
        ))?;
    }
    Ok(laid)
}

/// Adds routes to the links that are not attached to a machine, and enables IP forwarding.
fn forward(node: usize, place: &Namespace) -> anyhow::Result<()> {
    for link in (0..LINKS).filter(|link| *link + 1 != node && *link != node) {
        let via = if link < node { ends(node - 1)[0] } else { ends(node)[1] };
        place.ip(&format!("route add 10.72.{link}.0/24 via {via} congctl {CONGESTION_CONTROL}\n"))?;
    }
    place.forward()
}
