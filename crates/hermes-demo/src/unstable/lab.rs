//! The network of the unstable case: four machines in a row, three links between them, a web server on the last.
//!
//! In: root, TUN devices, and the conditions of each link. Out: namespaces with a common clock of the links; the bytes
//! that each link carried; a plaintext and a TLS server, both with the content of [`content`](crate::content). Dropping
//! the value removes the network. The machines forward IP packets, so that the server can be reached directly as well.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hermes_lab::{Conditions, Link, turns};
use tokio::task::JoinSet;

use crate::machine_row::{MachineRow, RowNetwork};
use crate::namespace::Namespace;
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
const NETWORK: RowNetwork = RowNetwork(72);

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
    NETWORK.ends(link)
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
        let names: Vec<String> = (0..NODES).map(|node| format!("n{}", node + 1)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let row = MachineRow::new(PREFIX, number, NETWORK, &names, |link| Some(conditions(link)))?;
        let MachineRow { links, places, epoch } = row;
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
