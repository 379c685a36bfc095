//! The devices of a node, created before anything running changes, with their addresses and routes.
//!
//! In: snapshots. Out: a device for each name, and a queue of it for each worker. A device that the new document does
//! not name is removed once that document runs. Never: a packet.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use hermes_model::snapshot::{Action, Gateway, ListenerProtocol, Route, Snapshot};
use hermes_net::fd_passing::{LabelledFd, read_text, rewrite_text};
use hermes_net::tun::{self, IdleQueue, LARGEST_MTU, TunError};
use ipnet::IpNet;
use tokio::time::Instant;

use super::Node;
use crate::ip::{AddressLeases, Device, DeviceGuard, FAR_ENDS, Share};
use crate::listener::tun::with_far_ends;
use hermes_outbound::generation::BuildError;

/// A device, and its current settings.
pub(super) struct HeldDevice {
    device: Arc<Device>,
    addresses: HashSet<IpAddr>,
    /// Prefixes that listeners capture.
    captures: HashSet<IpNet>,
    /// Pools of client addresses.
    pools: HashSet<IpNet>,
    /// The number of captured prefixes that have a peer each.
    wanted: usize,
    hold: Arc<DeviceGuard>,
    /// The remaining steps of a handover, once the successor has the device.
    parting: Mutex<Option<Parting>>,
    /// The predecessor's list of its sessions, valid once it has handed over.
    told: Option<HandoverTables>,
}

struct Parting {
    /// This process's end of the queue to its remaining sessions.
    passage: IdleQueue,
    told: HandoverTables,
}

/// The owners of prefixes, and the substitute addresses.
struct HandoverTables {
    owners: OwnedFd,
    wishes: OwnedFd,
}

impl HandoverTables {
    fn write(&self, device: &Device) -> io::Result<()> {
        rewrite_text(&self.owners, &device.owners())?;
        rewrite_text(&self.wishes, &device.wishes())
    }

    fn read(&self, device: &Device) -> io::Result<()> {
        device.reserve(&read_text(&self.owners)?);
        device.keep_wishes(&read_text(&self.wishes)?);
        Ok(())
    }
}

/// A device that the document no longer names, while sessions use it.
pub(super) struct FormerDevice {
    device: Weak<Device>,
    /// The interface index.
    index: u32,
    hold: Weak<DeviceGuard>,
    addresses: HashSet<IpAddr>,
    captures: HashSet<IpNet>,
    pools: HashSet<IpNet>,
    nat: Option<Vec<IpNet>>,
}

/// The timeout for the removal of an unnamed device without sessions: it is removed when each worker has closed its
/// queue.
const GOING: Duration = Duration::from_secs(5);

/// The settings of a device in a document.
#[derive(Default)]
struct WantedDevice {
    /// The first path in the document that names it.
    path: String,
    addresses: HashSet<IpAddr>,
    captures: HashSet<IpNet>,
    /// Captured prefixes with a peer each.
    with_far_ends: HashSet<IpNet>,
    pools: HashSet<IpNet>,
    /// A route sends packets into it.
    is_gateway: bool,
    /// The source prefixes to masquerade with this host's address; `None`: none.
    nat: Option<Vec<IpNet>>,
}

/// The new devices, and each worker's queues of them.
type Made = (HashMap<Arc<str>, HeldDevice>, Vec<Vec<Share>>);

/// Suffixes of a device's handover labels. `BEFORE`: the queue through which the new process passes packets to sessions
/// that stay in its predecessor. All others: text files with the device's state.
const BEFORE: &str = " before";
const OWNERS: &str = " owners";
const WISHES: &str = " wishes";
const ADDRESSES: &str = " addresses";
const CAPTURES: &str = " captures";
const POOLS: &str = " pools";

const TUN: &str = "tun/";

fn label(device: &str) -> String {
    format!("{TUN}{device}")
}

fn wanted(snapshot: &Snapshot) -> HashMap<Arc<str>, WantedDevice> {
    let mut all: HashMap<Arc<str>, WantedDevice> = HashMap::new();
    let named = |path: String| move || WantedDevice { path, ..WantedDevice::default() };
    for (index, listener) in snapshot.listeners.iter().enumerate() {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
        let one = all.entry(tun.device.clone()).or_insert_with(named(format!("listeners[{index}].device")));
        one.addresses.extend(&tun.addresses);
        one.captures.extend(tun.captures.iter().map(|capture| capture.network));
        one.with_far_ends.extend(with_far_ends(snapshot, tun));
    }
    for (index, route) in snapshot.routes.iter().enumerate() {
        let Action::Device(gateway) = &route.action else { continue };
        let one = all.entry(gateway.device.clone()).or_insert_with(named(format!("routes[{index}].terminate.tun")));
        one.addresses.extend(&gateway.addresses);
        one.pools.extend(gateway.assign.iter().map(IpNet::trunc));
        one.is_gateway = true;
        if gateway.nat {
            one.nat.get_or_insert_default().extend(clients(route, gateway));
        }
    }
    all
}

/// Returns the clients whose packets are masqueraded. Without a pool, these are all clients. IPv6 clients are included
/// only if the route concerns IPv6, because the host would forward IPv6 from then on.
fn clients(route: &Route, gateway: &Gateway) -> Vec<IpNet> {
    if !gateway.assign.is_empty() {
        return gateway.assign.clone();
    }
    let mut addresses = gateway.addresses.iter().copied().chain(gateway.dnat);
    let has_v6 = addresses.any(|own| own.is_ipv6()) || route.matcher.networks.iter().any(|net| net.addr().is_ipv6());
    let mut any = vec![IpNet::new_assert(IpAddr::from([0; 4]), 0)];
    any.extend(has_v6.then(|| IpNet::new_assert(IpAddr::from([0; 16]), 0)));
    any
}

impl Node {
    /// Waits until old devices without sessions are removed that this document names again: the kernel allows one
    /// device of a name. Returns references to those that still have sessions.
    pub(super) async fn await_going(&self, snapshot: &Snapshot) -> Vec<Arc<DeviceGuard>> {
        let deadline = Instant::now() + GOING;
        let mut kept = Vec::new();
        let mut network = self.shared.network.subscribe();
        for name in wanted(snapshot).keys() {
            let Some(former) = self.former.get(name).filter(|_| !self.devices.contains_key(name)) else { continue };
            if let Some(hold) = former.hold.upgrade() {
                kept.push(hold);
                continue;
            }
            if tun::is_there(name, former.index) {
                tracing::info!(device = %name, "waiting until the previous device is deleted");
            }
            while tun::is_there(name, former.index) {
                if !matches!(tokio::time::timeout_at(deadline, network.changed()).await, Ok(Ok(()))) {
                    break;
                }
            }
        }
        kept
    }

    /// Creates missing devices, and adds missing addresses and routes to all. On failure, `undo_devices` restores the
    /// running ones.
    pub(super) fn open_devices(&mut self, snapshot: &Snapshot) -> Result<Made, Vec<BuildError>> {
        let mut made = HashMap::new();
        let mut shares: Vec<Vec<Share>> = self.workers.iter().map(|_| Vec::new()).collect();
        let all = wanted(snapshot);
        let fault = |wanted: &WantedDevice, error: TunError| {
            vec![BuildError { path: wanted.path.clone(), reason: format!("{error}. {}", error.remedy()) }]
        };
        for (name, wanted) in &all {
            match self.devices.get(name) {
                Some(held) if held.is_there() => continue,
                // The device was deleted. Its rules are removed before new ones of its name are added.
                Some(lost) => log_failure(lost.device.set_nat(None)),
                None => {}
            }
            let held = if let Some(queues) = self.inherited.remove(&label(name)) {
                adopt(name, queues, &mut self.inherited, &self.services.given, &mut shares)
            } else {
                let former = self.former.get(name).and_then(FormerDevice::revive);
                former.map_or_else(|| create(name, &self.services.given, &mut shares), Ok)
            };
            made.insert(name.clone(), held.map_err(|error| fault(wanted, error))?);
        }
        for (name, wanted) in &all {
            let Some(held) = made.get_mut(name).or_else(|| self.devices.get_mut(name)) else { continue };
            if let Err(error) = held.equip(wanted) {
                self.undo_revived(made);
                return Err(fault(wanted, error));
            }
        }
        self.take_unwanted(&mut made, &mut shares);
        Ok((made, shares))
    }

    /// Removes all traces of a rejected document: devices get back the settings of the running one.
    pub(super) fn undo_devices(&mut self) {
        let mut wanted = wanted(&self.current.load().snapshot);
        let is_here = |held: &HeldDevice| held.device.net().is_ours() && held.is_there();
        for (name, held) in self.devices.iter_mut().filter(|(_, held)| is_here(held)) {
            held.trim(&wanted.remove(name).unwrap_or_default());
        }
    }

    /// Restores the settings of devices that a rejected document would have named again.
    fn undo_revived(&self, made: HashMap<Arc<str>, HeldDevice>) {
        for (name, mut held) in made {
            let former = self.former.get(&name).filter(|former| former.is_of(&held.device));
            if let Some(former) = former.filter(|_| held.is_there()) {
                held.trim(&former.wanted());
            }
        }
    }

    /// Adopts devices of the predecessor that this document does not name. They are removed cleanly once this process
    /// owns them.
    fn take_unwanted(&mut self, made: &mut HashMap<Arc<str>, HeldDevice>, shares: &mut [Vec<Share>]) {
        let named = |label: &String| label.strip_prefix(TUN).filter(|name| !name.contains(' ')).map(Arc::<str>::from);
        let left: Vec<Arc<str>> = self.inherited.keys().filter_map(named).collect();
        for name in left {
            let queues = self.inherited.remove(&label(&name)).unwrap_or_default();
            match adopt(&name, queues, &mut self.inherited, &self.services.given, shares) {
                Ok(held) => drop(made.insert(name, held)),
                Err(error) => tracing::warn!(%error, "{}", error.remedy()),
            }
        }
    }

    /// Makes the devices of this document current. Returns references to the others, held until no worker runs the old
    /// document.
    pub(super) fn keep_devices(
        &mut self,
        made: HashMap<Arc<str>, HeldDevice>,
        snapshot: &Snapshot,
    ) -> Vec<Arc<DeviceGuard>> {
        let is_left =
            |name: &str, former: &FormerDevice| former.hold.strong_count() > 0 || tun::is_there(name, former.index);
        self.former.retain(|name, former| is_left(name, former) && !made.contains_key(name));
        self.devices.extend(made);
        let mut wanted = wanted(snapshot);
        let mut holds = Vec::new();
        self.devices.retain(|name, held| {
            if !held.device.net().is_ours() {
                // Sessions of the predecessor still need it, even if this document does not name it.
                return true;
            }
            let Some(wanted) = wanted.remove(name) else {
                self.former.insert(name.clone(), held.former());
                holds.push(held.hold.clone());
                return false;
            };
            held.trim(&wanted);
            true
        });
        // Other programs may have flushed tables and rules.
        tun::restore();
        holds
    }

    /// Releases the devices of a node that shuts down; each is removed with its last worker.
    pub(super) fn leave_devices(&mut self) {
        self.held.extend(self.devices.drain().map(|(_, held)| held.hold));
    }
}

impl Node {
    /// Waits until the captured prefixes of inherited devices have peers here.
    pub(super) async fn await_captures(&self) {
        let taken = self.devices.values().filter(|held| !held.device.net().is_ours());
        let deadline = Instant::now() + FAR_ENDS;
        for held in taken {
            let mut answered = held.device.answered.subscribe();
            let all = answered.wait_for(|count| *count >= held.wanted);
            if tokio::time::timeout_at(deadline, all).await.is_err() {
                tracing::warn!(device = %held.device.name, "device taken over before all captured prefixes have a tunnel");
            }
        }
    }

    /// Takes ownership of inherited devices, which the predecessor no longer reads. False if there are none.
    pub(super) fn read_devices(&mut self) -> bool {
        let mut taken = self.devices.values().filter(|held| !held.device.net().is_ours()).peekable();
        let has_some = taken.peek().is_some();
        for held in taken {
            if let Some(Err(error)) = held.told.as_ref().map(|told| told.read(&held.device)) {
                tracing::warn!(device = %held.device.name, %error, "the owners of assigned addresses are unknown");
            }
            held.device.net().own();
            held.device.reads.send_replace(true);
        }
        has_some
    }

    /// Undoes a failed takeover's changes to the devices.
    pub(super) fn take_devices_back(&self) {
        for held in self.devices.values().filter(|held| held.is_there()) {
            drop(held.parting.lock().unwrap_or_else(PoisonError::into_inner).take());
            log_failure(held.device.roll_back());
        }
    }

    /// Hands the devices over. Returns, for each worker, the queues through which the successor forwards packets for
    /// sessions here, and receives packets for its own.
    pub(super) fn part_with_devices(&mut self) -> Vec<Vec<(Arc<str>, IdleQueue)>> {
        let mut passages: Vec<Vec<_>> = self.workers.iter().map(|_| Vec::new()).collect();
        for (name, held) in &mut self.devices {
            held.device.net().disown();
            let parting = held.parting.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            let Some(Parting { passage, told }) = parting else { continue };
            if let Err(error) = told.write(&held.device) {
                tracing::warn!(device = %name, %error, "cannot send the owners of assigned addresses to the successor");
            }
            for share in &mut passages {
                match passage.try_clone() {
                    Ok(passage) => share.push((name.clone(), passage)),
                    Err(error) => tracing::warn!(device = %name, %error, "packets between two processes may be lost"),
                }
            }
        }
        passages
    }
}

impl FormerDevice {
    fn is_of(&self, device: &Arc<Device>) -> bool {
        std::ptr::eq(self.device.as_ptr(), Arc::as_ptr(device))
    }

    /// The settings from the last document that named it.
    fn wanted(&self) -> WantedDevice {
        let Self { addresses, captures, pools, nat, .. } = self;
        let (addresses, captures, pools, nat) = (addresses.clone(), captures.clone(), pools.clone(), nat.clone());
        WantedDevice { addresses, captures, pools, nat, ..WantedDevice::default() }
    }

    /// Returns the device for a document that names it again, because the kernel allows one device of a name. `None` if
    /// the device was removed.
    fn revive(&self) -> Option<HeldDevice> {
        // The reference keeps its queues open on each worker.
        let hold = self.hold.upgrade()?;
        let device = self.device.upgrade().filter(|device| device.net().is_there())?;
        let Self { addresses, captures, pools, .. } = self;
        let (addresses, captures, pools) = (addresses.clone(), captures.clone(), pools.clone());
        Some(HeldDevice { addresses, captures, pools, ..HeldDevice::of(device, hold) })
    }
}

fn create(name: &Arc<str>, given: &Arc<AddressLeases>, shares: &mut [Vec<Share>]) -> Result<HeldDevice, TunError> {
    let (net, idle) = tun::Device::create(name, shares.len(), LARGEST_MTU)?;
    HeldDevice::new(Device::new(name.clone(), net, given.clone()), idle, &[], shares)
}

/// Adopts a device of the predecessor, with its state.
fn adopt(
    name: &Arc<str>,
    queues: Vec<OwnedFd>,
    inherited: &mut HashMap<String, Vec<OwnedFd>>,
    given: &Arc<AddressLeases>,
    shares: &mut [Vec<Share>],
) -> Result<HeldDevice, TunError> {
    let mut take = |what: &str| inherited.remove(&format!("{}{what}", label(name))).unwrap_or_default();
    let before: Vec<IdleQueue> = take(BEFORE).into_iter().map(IdleQueue::from_pair).collect();
    let told = take(OWNERS).pop().zip(take(WISHES).pop()).map(|(owners, wishes)| HandoverTables { owners, wishes });
    let mut text = |what: &str| take(what).pop().and_then(|fd| read_text(&fd).ok()).unwrap_or_default();
    let (net, idle) = tun::Device::adopt(name, queues, shares.len())?;
    let device = Device::new(name.clone(), net, given.clone());
    let mut held = HeldDevice::new(device, idle, &before, shares)?;
    held.told = told;
    held.addresses = text(ADDRESSES).lines().filter_map(|line| line.parse().ok()).collect();
    held.captures = text(CAPTURES).lines().filter_map(|line| line.parse().ok()).collect();
    for pool in text(POOLS).lines().filter_map(|line| line.parse().ok()) {
        held.device.net().add_pool(pool)?;
        held.pools.insert(pool);
    }
    for prefix in &held.captures {
        held.device.capture(*prefix)?;
    }
    Ok(held)
}

impl HeldDevice {
    /// Creates the state of a device, and distributes its queues.
    fn new(
        device: Arc<Device>,
        idle: Vec<IdleQueue>,
        before: &[IdleQueue],
        shares: &mut [Vec<Share>],
    ) -> Result<Self, TunError> {
        let fault = |source| TunError::Device { device: device.name.to_string(), doing: "share a queue of", source };
        let mut idle = idle.into_iter();
        let mut dealt: Vec<Share> = Vec::new();
        let mut queues = Vec::new();
        for queue in idle.by_ref().take(shares.len()) {
            queues.push(queue.try_clone().map_err(fault)?);
            let before = before.first().map(IdleQueue::try_clone).transpose().map_err(fault)?;
            dealt.push(Share { device: device.clone(), queue, more: Vec::new(), before });
        }
        // A predecessor with more workers has more queues. Each needs a reader.
        for (number, queue) in idle.enumerate() {
            queues.push(queue.try_clone().map_err(fault)?);
            let worker = number % dealt.len();
            dealt[worker].more.push(queue);
        }
        shares.iter_mut().zip(dealt).for_each(|(share, dealt)| share.push(dealt));
        let hold = device.held(queues);
        Ok(Self::of(device, hold))
    }

    /// A device without any settings.
    fn of(device: Arc<Device>, hold: Arc<DeviceGuard>) -> Self {
        let (addresses, captures, pools) = Default::default();
        Self { device, addresses, captures, pools, wanted: 0, hold, parting: Mutex::default(), told: None }
    }

    /// True if the device exists.
    pub(super) fn is_there(&self) -> bool {
        self.device.net().is_there()
    }

    fn former(&self) -> FormerDevice {
        let Self { device, addresses, captures, pools, .. } = self;
        let (addresses, captures, pools) = (addresses.clone(), captures.clone(), pools.clone());
        let (nat, hold, index) = (device.nat(), Arc::downgrade(&self.hold), device.net().index());
        FormerDevice { device: Arc::downgrade(device), index, hold, addresses, captures, pools, nat }
    }

    /// Adds the device to a handover: its queues, the queue back to sessions here, and its settings.
    pub(super) fn hand_over(&self, all: &mut Vec<LabelledFd>) -> io::Result<()> {
        let label = label(&self.device.name);
        for queue in &self.hold.queues {
            all.push(LabelledFd { label: label.clone(), fd: queue.try_clone()?.into_fd() });
        }
        let (passage, theirs) = IdleQueue::pair()?;
        all.push(LabelledFd { label: format!("{label}{BEFORE}"), fd: theirs.into_fd() });
        let lines = |items: Vec<String>| items.join("\n");
        let addresses = lines(self.addresses.iter().map(ToString::to_string).collect());
        let captures = lines(self.captures.iter().map(ToString::to_string).collect());
        let pools = lines(self.pools.iter().map(ToString::to_string).collect());
        for (what, text) in [(ADDRESSES, addresses), (CAPTURES, captures), (POOLS, pools)] {
            all.push(LabelledFd::text(format!("{label}{what}"), &text)?);
        }
        // Both lists are written once their content is final.
        let mut later = |what: &str| {
            let text = LabelledFd::text(format!("{label}{what}"), "")?;
            let fd = text.fd.try_clone()?;
            all.push(text);
            io::Result::Ok(fd)
        };
        let told = HandoverTables { owners: later(OWNERS)?, wishes: later(WISHES)? };
        *self.parting.lock().unwrap_or_else(PoisonError::into_inner) = Some(Parting { passage, told });
        Ok(())
    }

    /// Adds missing settings and leaves existing ones. The change that affects other programs most comes last.
    fn equip(&mut self, wanted: &WantedDevice) -> Result<(), TunError> {
        let net = self.device.net();
        for address in &wanted.addresses {
            net.add_address((*address).into())?;
            self.addresses.insert(*address);
        }
        for pool in &wanted.pools {
            net.add_pool(*pool)?;
            self.pools.insert(*pool);
        }
        self.wanted = wanted.with_far_ends.len();
        if wanted.is_gateway {
            net.exempt()?;
        }
        if wanted.nat.is_some() {
            self.device.set_nat(wanted.nat.as_ref())?;
        }
        // An existing route has the MTU of its tunnel.
        for prefix in wanted.captures.difference(&self.captures.clone()) {
            self.device.capture(*prefix)?;
            self.captures.insert(*prefix);
        }
        Ok(())
    }

    /// Removes settings that the document does not want.
    fn trim(&mut self, wanted: &WantedDevice) {
        let device = &self.device;
        for address in self.addresses.extract_if(|address| !wanted.addresses.contains(address)) {
            log_failure(device.net().remove_address(address.into()));
        }
        for prefix in self.captures.extract_if(|prefix| !wanted.captures.contains(prefix)) {
            log_failure(device.release_capture(prefix));
        }
        for pool in self.pools.extract_if(|pool| !wanted.pools.contains(pool)) {
            log_failure(device.net().remove_pool(pool));
        }
        if device.nat() != wanted.nat {
            log_failure(device.set_nat(wanted.nat.as_ref()));
        }
    }
}

fn log_failure(result: Result<(), TunError>) {
    if let Err(error) = result {
        tracing::warn!(%error, "{}", error.remedy());
    }
}
