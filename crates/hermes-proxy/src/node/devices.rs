//! The devices of a node: made before anything running is touched, with their addresses and routes.
//!
//! In: snapshots. Out: a device for each name, and a queue of it for each worker. What a new document does not
//! name any more goes when it runs. Never: a packet.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use hermes_model::snapshot::{Action, ListenerProtocol, Snapshot};
use hermes_net::nat::{self, Masquerade};
use hermes_net::tun::{self, IdleQueue, LARGEST_MTU, Route, TunError};
use ipnet::IpNet;

use super::Node;
use crate::generation::Unready;
use crate::ip::Device;

/// A device, and what it was given.
pub(super) struct HeldDevice {
    device: Arc<Device>,
    addresses: HashSet<IpAddr>,
    /// Prefixes that listeners take.
    captures: HashSet<IpNet>,
    /// What leaves by it has this machine's address, as long as this lives.
    nat: Option<(Vec<IpNet>, Masquerade)>,
}

/// What a document wants of a device.
#[derive(Default)]
struct Wanted {
    /// Where the document names it first.
    path: String,
    addresses: HashSet<IpAddr>,
    captures: HashSet<IpNet>,
    /// A route gives packets to it.
    is_gateway: bool,
    /// Whose packets leave with this machine's address; `None`: nobody's.
    nat: Option<Vec<IpNet>>,
}

/// New devices, and for each worker its queues of them.
type Made = (HashMap<Arc<str>, HeldDevice>, Vec<Vec<(Arc<Device>, IdleQueue)>>);

fn wanted(snapshot: &Snapshot) -> HashMap<Arc<str>, Wanted> {
    let mut all: HashMap<Arc<str>, Wanted> = HashMap::new();
    let named = |path: String| move || Wanted { path, ..Wanted::default() };
    for (index, listener) in snapshot.listeners.iter().enumerate() {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
        let one = all.entry(tun.device.clone()).or_insert_with(named(format!("listeners[{index}].device")));
        one.addresses.extend(&tun.addresses);
        one.captures.extend(tun.captures.iter().map(|capture| capture.network));
    }
    for (index, route) in snapshot.routes.iter().enumerate() {
        let Action::Device(gateway) = &route.action else { continue };
        let one = all.entry(gateway.device.clone()).or_insert_with(named(format!("routes[{index}].terminate.tun")));
        one.addresses.extend(&gateway.addresses);
        one.is_gateway = true;
        if gateway.nat {
            let all = || [IpAddr::from([0; 4]), IpAddr::from([0; 16])].map(|any| IpNet::new_assert(any, 0)).to_vec();
            let clients = if gateway.assign.is_empty() { all() } else { gateway.assign.clone() };
            one.nat.get_or_insert_default().extend(clients);
        }
    }
    all
}

impl Node {
    /// Makes devices that are not there yet, and gives all of them the addresses and routes that they lack.
    pub(super) fn open_devices(&mut self, snapshot: &Snapshot) -> Result<Made, Vec<Unready>> {
        let mut made = HashMap::new();
        let mut queues: Vec<Vec<(Arc<Device>, IdleQueue)>> = self.workers.iter().map(|_| Vec::new()).collect();
        for (name, wanted) in wanted(snapshot) {
            let fault = |error: TunError| {
                vec![Unready { path: wanted.path.clone(), reason: format!("{error}. {}", error.remedy()) }]
            };
            let held = match self.devices.entry(name.clone()) {
                Entry::Occupied(held) => held.into_mut(),
                Entry::Vacant(_) => {
                    let (net, idle) = tun::Device::create(&name, queues.len(), LARGEST_MTU).map_err(fault)?;
                    let device = Device::new(name.clone(), net);
                    for (mine, queue) in queues.iter_mut().zip(idle) {
                        mine.push((device.clone(), queue));
                    }
                    made.entry(name).or_insert_with(|| HeldDevice::new(device))
                }
            };
            held.equip(&wanted).map_err(fault)?;
        }
        Ok((made, queues))
    }

    /// From now on the devices are those of this document.
    pub(super) fn keep_devices(&mut self, made: HashMap<Arc<str>, HeldDevice>, snapshot: &Snapshot) {
        self.devices.extend(made);
        let mut wanted = wanted(snapshot);
        self.devices.retain(|name, held| {
            let Some(wanted) = wanted.remove(name) else { return false };
            for address in held.addresses.difference(&wanted.addresses) {
                tell(held.device.net().remove_address((*address).into()));
            }
            for prefix in held.captures.difference(&wanted.captures) {
                tell(held.device.net().release(*prefix));
            }
            held.addresses = wanted.addresses;
            held.captures = wanted.captures;
            if wanted.nat.is_none() {
                held.nat = None;
            }
            true
        });
    }
}

impl HeldDevice {
    fn new(device: Arc<Device>) -> Self {
        Self { device, addresses: HashSet::new(), captures: HashSet::new(), nat: None }
    }

    /// Gives it what it lacks. What is there already stays as it is; what a refused document brought goes with
    /// the next one.
    fn equip(&mut self, wanted: &Wanted) -> Result<(), TunError> {
        let net = self.device.net();
        for address in &wanted.addresses {
            net.add_address((*address).into())?;
            self.addresses.insert(*address);
        }
        for prefix in &wanted.captures {
            net.capture(*prefix, Route::default())?;
            self.captures.insert(*prefix);
        }
        if wanted.is_gateway {
            net.exempt()?;
        }
        let running = self.nat.as_ref().map(|(clients, _)| clients);
        if let Some(clients) = wanted.nat.as_ref().filter(|clients| running != Some(clients)) {
            // The old one first: the two have one name.
            self.nat = None;
            self.nat = Some((clients.clone(), nat::masquerade(net, clients)?));
        }
        Ok(())
    }
}

fn tell(result: Result<(), TunError>) {
    if let Err(error) = result {
        tracing::warn!(%error, "{}", error.remedy());
    }
}
