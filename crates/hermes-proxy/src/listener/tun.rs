//! The packets of a device: each captured prefix becomes a CONNECT-IP session (RFC 9484).
//!
//! In: the captures of the document, each on one worker. Out: a tunnel that opens at once, and reopens with exponential
//! back-off whenever it ends. Packets meanwhile are dropped, never routed another way, and the log reports the reason
//! (`outage`). In a prefix of virtual addresses for names, each address has its own session (`names`).

mod name_connections;
mod name_packets;
mod outage;

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::snapshot::{Capture, CarryNames, Listener, ListenerProtocol, Snapshot, Tun};
use ipnet::IpNet;

use self::outage::{Lost, Outage, SETTLED};
use super::Ending;
use crate::ip::{End, Link, Owner};
use crate::request::{Origin, from_capture};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::{CLOSE_TIMEOUT, Port};
use hermes_transport::oneshot::Oneshot;

/// The first back-off before a tunnel reopens; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The maximum back-off.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// The captures of one worker.
#[derive(Default)]
pub(crate) struct Captures(HashMap<(Arc<str>, IpNet), Running>);

/// A captured prefix and the meaning of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    network: IpNet,
    /// The addresses are virtual addresses for names.
    is_names: bool,
}

struct Running {
    taken: Taken,
    listener: Arc<Listener>,
    ending: Rc<Oneshot<Ending>>,
}

impl Captures {
    /// Starts and stops this worker's share of the captures in the document. Captures of devices in `made` restart,
    /// since those devices were created again.
    pub(crate) fn follow(&mut self, worker: &Rc<Worker>, made: &HashSet<Arc<str>>) {
        let generation = worker.generation();
        let (mine, all) = (worker.number, worker.shared.workers.max(1));
        let reserved = reserved(&generation.snapshot);
        let mut wanted = HashMap::new();
        for listener in &generation.snapshot.listeners {
            let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
            let taken = taken(tun, &reserved).into_iter();
            let share = taken.filter(|taken| worker_of(&listener.name, taken.network, all) == mine);
            wanted.extend(share.map(|taken| ((listener.name.clone(), taken.network), (listener.clone(), taken))));
        }
        self.0.retain(|place, running| {
            let stays = wanted.contains_key(place);
            if !stays {
                running.ending.set(Ending::Close);
            }
            stays
        });
        for (place, (listener, taken)) in wanted {
            let is_made = matches!(&listener.protocol, ListenerProtocol::Tun(tun) if made.contains(&tun.device));
            let same = |running: &Running| {
                let is_alike = if taken.is_names && carries_flows(&listener) {
                    serves_alike(&running.listener, &listener)
                } else {
                    asks_alike(&running.listener, &listener, place.1)
                };
                !is_made && running.taken == taken && is_alike
            };
            if self.0.get(&place).is_some_and(same) {
                continue;
            }
            // The old capture continues until the new one is open and takes over its packets.
            let ending: Rc<Oneshot<Ending>> = Rc::default();
            let running = Running { taken, listener: listener.clone(), ending: ending.clone() };
            let before = self.0.insert(place, running).map(|running| running.ending);
            if taken.is_names && carries_flows(&listener) {
                worker.spawn(name_connections::capture(worker.clone(), listener, taken.network, ending, before));
            } else if taken.is_names {
                worker.spawn(name_packets::capture(worker.clone(), listener, taken.network, ending, before));
            } else {
                worker.spawn(capture(worker.clone(), listener, taken.network, ending, before));
            }
        }
    }

    /// Leaves the captures to another process, which has its own. Packets in transit to this process are still
    /// delivered.
    pub(crate) fn leave(&mut self, worker: &Rc<Worker>) {
        for (_, running) in self.0.drain() {
            worker.spawn(async move {
                tokio::time::sleep(CLOSE_TIMEOUT).await;
                running.ending.set(Ending::HandOver);
            });
        }
    }

    /// Ends all captures.
    pub(crate) fn end(&mut self) {
        self.0.drain().for_each(|(_, running)| running.ending.set(Ending::Close));
    }
}

/// The worker of a prefix. The choice depends on nothing else in the document, so a change elsewhere moves no session.
fn worker_of(listener: &str, network: IpNet, workers: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    (listener, network).hash(&mut hasher);
    (hasher.finish() % workers as u64) as usize
}

fn carries_flows(listener: &Listener) -> bool {
    matches!(&listener.protocol, ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows)
}

/// True if both listeners serve connections to names at the same sockets. The rest of the document applies to each new
/// connection.
fn serves_alike(one: &Listener, other: &Listener) -> bool {
    let parts = |listener: &Listener| match &listener.protocol {
        ListenerProtocol::Tun(tun) => Some((tun.device.clone(), tun.addresses.clone(), tun.carry_names)),
        _ => None,
    };
    parts(one) == parts(other)
}

/// True if both listeners would send the same request for the session of this prefix.
fn asks_alike(one: &Listener, other: &Listener, network: IpNet) -> bool {
    let parts = |listener: &Listener| match &listener.protocol {
        ListenerProtocol::Tun(tun) => {
            Some((tun.device.clone(), tun.addresses.clone(), of(tun, network).cloned(), tun.carry_names))
        }
        _ => None,
    };
    one.set_headers == other.set_headers && parts(one) == parts(other)
}

/// The captured prefixes of a device that have a single far end each.
pub(crate) fn with_far_ends<'t>(snapshot: &Snapshot, tun: &'t Tun) -> impl Iterator<Item = IpNet> + use<'t> {
    let reserved = reserved(snapshot);
    let is_names = move |network: &IpNet| reserved.iter().any(|reserved| reserved.contains(network));
    tun.captures.iter().map(|capture| capture.network).filter(move |network| !is_names(network))
}

/// The prefixes of virtual addresses for names.
fn reserved(snapshot: &Snapshot) -> Vec<IpNet> {
    let dns = snapshot.listeners.iter().filter_map(|listener| match &listener.protocol {
        ListenerProtocol::Dns(dns) => Some(dns.addresses),
        _ => None,
    });
    dns.flat_map(|reserved| [reserved.v4.map(IpNet::from), reserved.v6.map(IpNet::from)]).flatten().collect()
}

/// The captures of a listener. A reserved prefix inside a wider capture is captured separately, since virtual addresses
/// mean nothing at the far end of the wider one.
fn taken(tun: &Tun, reserved: &[IpNet]) -> Vec<Taken> {
    let mut all: Vec<Taken> = Vec::new();
    for capture in &tun.captures {
        let is_names = reserved.iter().any(|reserved| reserved.contains(&capture.network));
        let own = Taken { network: capture.network, is_names };
        let within = reserved.iter().filter(|reserved| capture.network.contains(*reserved));
        let within = within.map(|reserved| Taken { network: *reserved, is_names: true });
        for taken in std::iter::once(own).chain(within) {
            if !all.contains(&taken) {
                all.push(taken);
            }
        }
    }
    all
}

/// The most specific capture in the document that contains this prefix.
fn of(tun: &Tun, network: IpNet) -> Option<&Capture> {
    let around = tun.captures.iter().filter(|capture| capture.network.contains(&network));
    around.max_by_key(|capture| capture.network.prefix_len())
}

async fn capture(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    network: IpNet,
    ending: Rc<Oneshot<Ending>>,
    before: Option<Rc<Oneshot<Ending>>>,
) {
    let (mut pause, outage) = (FIRST_PAUSE, Outage::default());
    loop {
        let began = worker.now();
        tokio::select! {
            biased;
            _ = ending.wait() => break,
            lost = serve(&worker, &listener, network, &before, &outage) => {
                if let Some(lost) = lost {
                    outage.goes_on(&worker, &listener, &network, &lost);
                }
            }
        }
        let lasted = Duration::from_millis(worker.now().saturating_sub(began));
        if lasted > LAST_PAUSE {
            pause = FIRST_PAUSE;
        }
        let jitter = Duration::from_millis(worker.random().1 % FIRST_PAUSE.as_millis() as u64);
        tokio::select! {
            biased;
            _ = ending.wait() => break,
            () = tokio::time::sleep(pause + jitter) => {}
        }
        pause = (2 * pause).min(LAST_PAUSE);
    }
    before.inspect(|before| before.set(Ending::Close));
}

/// Opens the tunnel once and relays until it ends. Returns the reason if it must be reported.
async fn serve(
    worker: &Rc<Worker>,
    listener: &Arc<Listener>,
    network: IpNet,
    before: &Option<Rc<Oneshot<Ending>>>,
    outage: &Outage,
) -> Option<Lost> {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return None };
    let (local, capture) = (worker.devices.get(&tun.device)?, of(tun, network)?);
    let source = SocketAddr::new(source_for(tun, network), 0);
    let origin = Origin { worker, listener, source, trust: &Trust::Anonymous, secure: false };
    let served = match from_capture(&origin, network, None, &capture.set_headers) {
        Ok(request) => {
            let protocol = request.facts.protocol;
            (session::serve(worker, request).await, protocol)
        }
        Err(rejected) => (SessionOutcome::Response(session::reject(worker, *rejected)), None),
    };
    let (tunnel, protocol) = match served {
        (SessionOutcome::Tunnel(tunnel), protocol) => (tunnel, protocol),
        (SessionOutcome::Response(response), _) => return Lost::answered(&response),
    };
    let owner = Owner::Listener(listener.name.clone());
    let addresses = tun.addresses.iter().copied().map(IpNet::from);
    let entry = tunnel.session.entry.clone();
    let end = match End::asking(Link::device(&local), &owner, network, addresses, protocol) {
        Ok(end) => end.answered_by(&entry),
        Err(reason) => {
            tracing::error!(listener = %listener.name, reason, "a capture is not served");
            return None;
        }
    };
    before.as_ref().inspect(|before| before.set(Ending::Close));
    let mut relayed = pin!(session::relay(DownstreamEnd::Datagrams(Port::Device(Box::new(end))), *tunnel));
    if outage.lasts() {
        if tokio::time::timeout(SETTLED, &mut relayed).await.is_ok() {
            return Lost::over(&entry);
        }
        outage.ends(listener, &network, None);
    } else {
        tracing::info!(listener = %listener.name, %network, "packets are captured");
    }
    relayed.await;
    Lost::over(&entry)
}

fn source_for(tun: &Tun, network: IpNet) -> IpAddr {
    let fits = |address: &&IpAddr| address.is_ipv4() == network.addr().is_ipv4();
    tun.addresses.iter().find(fits).copied().unwrap_or(IpAddr::from([0; 4]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn all_taken(captures: &[&str], reserved: &[&str]) -> Vec<(String, bool)> {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        let captures = nets(captures).into_iter().map(|network| Capture { network, set_headers: Vec::new() }).collect();
        let device = Arc::from("hermes0");
        let tun = Tun { device, addresses: Vec::new(), captures, carry_names: CarryNames::default() };
        taken(&tun, &nets(reserved)).into_iter().map(|taken| (taken.network.to_string(), taken.is_names)).collect()
    }

    #[test]
    fn what_stands_for_names_is_taken_name_by_name() {
        let all = |pairs: &[(&str, bool)]| {
            pairs.iter().map(|(net, is_names)| ((*net).to_owned(), *is_names)).collect::<Vec<_>>()
        };
        let reserved = ["198.18.0.0/16", "fd00::/64"];
        assert_eq!(all_taken(&["10.0.0.0/8"], &reserved), all(&[("10.0.0.0/8", false)]));
        assert_eq!(all_taken(&["198.18.0.0/16"], &reserved), all(&[("198.18.0.0/16", true)]));
        assert_eq!(all_taken(&["198.18.7.0/24"], &reserved), all(&[("198.18.7.0/24", true)]));
        let wide = all(&[("0.0.0.0/0", false), ("198.18.0.0/16", true)]);
        assert_eq!(all_taken(&["0.0.0.0/0"], &reserved), wide);
        assert_eq!(all_taken(&["0.0.0.0/0", "198.18.0.0/16"], &reserved), wide);
        assert_eq!(all_taken(&["::/0"], &reserved), all(&[("::/0", false), ("fd00::/64", true)]));
    }
}
