//! TUN devices, which receive and send IP packets of this machine, with their addresses and routes.
//!
//! In: a name, addresses, prefixes. Out: a device that is up, and queues of whole packets, one for each worker. All of
//! it ends with the process: a device exists as long as its queues, its addresses and routes as long as the device.
//! Rules that outlive a killed process are removed at the next start. Never: the purpose of a packet, or its sender's
//! rights.
//!
//! Implemented here, because no existing crate refuses a name that was just taken, moves packets without copying each,
//! or sets an MTU and a source address for each route.

mod capture;
mod checksum;
mod desired;
mod error;
mod gro_merge;
mod gso_split;
pub mod nat;
mod offload;
mod queue;
mod reconcile;
mod reverse_path;
mod route;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::RouteMessage;
use nix::errno::Errno;

pub use desired::restore;
pub use error::TunError;
pub use queue::{IdleQueue, Queue, QueueResult, ReceiveBuffer};
pub use reconcile::reconcile;
pub use reverse_path::check as check_reverse_path;
pub use route::Route;

use self::desired::DesiredState;
use crate::netlink::{self, Change};

/// The device file that creates TUN devices.
pub const DRIVER: &str = "/dev/net/tun";
/// The MTU of a device, in bytes. Its routes have their own MTU, so the device itself does not limit packets.
pub const LARGEST_MTU: u32 = 65_535;
/// linux/capability.h: CAP_NET_ADMIN, as a bit.
const CAP_NET_ADMIN: u64 = 1 << 12;
/// The kernel's limit for queues of one device (linux/drivers/net/tun.c: MAX_TAP_QUEUES).
const MAX_QUEUES: usize = 256;

/// A TUN device of this process. The device lives as long as its queues; this value only refers to it.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    index: u32,
    captures: Mutex<Captures>,
    desired: Mutex<DesiredState>,
    /// Locked while the source NAT changes. A change runs nft, and other changes do not wait for it, because they lock
    /// only `desired`. Lock order: `nat` before `desired`.
    nat: Mutex<()>,
    /// Whether this process owns the device and removes its settings at the end. Otherwise another process does.
    is_ours: AtomicBool,
}

/// The captures of a device.
#[derive(Debug, Default)]
struct Captures {
    prefixes: HashSet<IpNet>,
    lengths: capture::PrefixLengths,
}

impl Drop for Inner {
    fn drop(&mut self) {
        desired::registry().remove(&self.index);
        // Routes and addresses end with the device; rules must be removed.
        if self.is_ours.load(Ordering::Acquire) {
            capture::remove_rules_of(self.index);
        }
    }
}

impl Device {
    /// Creates a device without addresses and brings it up. With several queues the kernel distributes flows over them.
    /// It delivers a flow's packets to the queue that sent the flow's last packet; the queue may change later.
    ///
    /// # Errors
    /// `TunError`: no driver, no privilege, or a name that is taken.
    pub fn create(name: &str, queues: usize, mtu: u32) -> Result<(Self, Vec<IdleQueue>), TunError> {
        let is_name = matches!(name.len(), 1..libc::IFNAMSIZ)
            && !name.starts_with('.')
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !is_name {
            return Err(TunError::Name { name: name.to_owned() });
        }
        capture::remove_stale_rules();
        let mut made = vec![open_queue(name, true, true)?];
        // The name is ours now: further opens attach queues to this device.
        for _ in 1..queues.min(MAX_QUEUES) {
            made.push(open_queue(name, true, false)?);
        }
        while made.len() < queues {
            // Further workers share a queue with another worker.
            let fault = |source| TunError::Device { device: name.to_owned(), doing: "share a queue of", source };
            made.push(made[made.len() - MAX_QUEUES].try_clone().map_err(fault)?);
        }
        let this = Self::named(name, true)?;
        let fault = |source| TunError::Device { device: name.to_owned(), doing: "bring up", source };
        bring_up(this.index(), mtu).map_err(fault)?;
        Ok((this, made))
    }

    /// Takes over the queues of another process's device, which is up. That process owns its settings until
    /// [`Device::own`]. Returns at least `queues` queues: if the device cannot have more of them, the first one is
    /// shared. If there are more, all must be read: the kernel discards the packets of a queue that is detached.
    ///
    /// # Errors
    /// `TunError`: the device was removed, or a descriptor is not a queue.
    pub fn adopt(name: &str, descriptors: Vec<OwnedFd>, queues: usize) -> Result<(Self, Vec<IdleQueue>), TunError> {
        let fault = |source| TunError::Device { device: name.to_owned(), doing: "take over", source };
        let this = Self::named(name, false)?;
        let adopted = descriptors.into_iter().map(|descriptor| with_offload(File::from(descriptor), name));
        let mut taken = adopted.collect::<Result<Vec<_>, _>>()?;
        while taken.len() < queues {
            let more = match open_queue(name, true, false) {
                Ok(more) => more,
                Err(_) => {
                    taken.first().ok_or_else(|| fault(io::ErrorKind::NotFound.into()))?.try_clone().map_err(fault)?
                }
            };
            taken.push(more);
        }
        Ok((this, taken))
    }

    /// Whether the device still exists.
    pub fn is_there(&self) -> bool {
        is_there(self.name(), self.index())
    }

    fn named(name: &str, is_ours: bool) -> Result<Self, TunError> {
        let fault = |source| TunError::Device { device: name.to_owned(), doing: "find", source };
        let index = nix::net::if_::if_nametoindex(name).map_err(io::Error::from).map_err(fault)?;
        let (captures, desired, nat) = Default::default();
        let inner = Inner { name: name.to_owned(), index, captures, desired, nat, is_ours: AtomicBool::new(is_ours) };
        let inner = Arc::new(inner);
        desired::registry().insert(index, Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// Takes ownership of the device: from now on, the device's settings end with this process.
    pub fn own(&self) {
        self.inner.is_ours.store(true, Ordering::Release);
    }

    /// Gives up ownership to another process: the device's settings stay when this process ends.
    pub fn disown(&self) {
        self.inner.is_ours.store(false, Ordering::Release);
    }

    /// Whether this process owns the device's settings.
    pub fn is_ours(&self) -> bool {
        self.inner.is_ours.load(Ordering::Acquire)
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The interface index.
    pub fn index(&self) -> u32 {
        self.inner.index
    }

    /// Adds an address; the rest of its prefix is then routed to the device, too. An existing address stays.
    ///
    /// # Errors
    /// `TunError`: the address family is disabled, or the address is not valid.
    pub fn add_address(&self, address: IpNet) -> Result<(), TunError> {
        let mut desired = self.desired();
        self.put_address(address, Change::Set)?;
        desired.addresses.insert(address);
        Ok(())
    }

    fn put_address(&self, address: IpNet, change: Change) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::NewAddress(route::address(self.index(), address));
        let changed = netlink::change(message, change);
        changed.map_err(|source| TunError::Address { device: self.name().to_owned(), address, source })
    }

    /// Removes an address, and with it the routes with this source address. A missing address is not an error.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn remove_address(&self, address: IpNet) -> Result<(), TunError> {
        let mut desired = self.desired();
        desired.addresses.remove(&address);
        self.take_address(address)
    }

    fn take_address(&self, address: IpNet) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::DelAddress(route::address(self.index(), address));
        match netlink::change(message, Change::Existing) {
            Err(source) if source.raw_os_error() != Some(libc::EADDRNOTAVAIL) => {
                Err(TunError::Address { device: self.name().to_owned(), address, source })
            }
            _ => Ok(()),
        }
    }

    /// Routes a prefix into the device in the main table. Replaces an existing route of this device, or of another
    /// device of this process.
    ///
    /// # Errors
    /// `TunError`: the prefix has a route of another program.
    pub fn set_route(&self, prefix: IpNet, route: Route) -> Result<(), TunError> {
        self.set_in(route::MAIN, prefix, route)
    }

    /// Changes a route of [`Device::set_route`] without a check of its owner, which would list all routes.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn change_route(&self, prefix: IpNet, route: Route) -> Result<(), TunError> {
        self.replace_in(route::MAIN, prefix, route)
    }

    /// Removes a route of [`Device::set_route`]. A missing route is not an error.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn remove_route(&self, prefix: IpNet) -> Result<(), TunError> {
        self.remove_from(route::MAIN, prefix)?;
        // The kernel cannot remove only the route without a metric: if that was missing, it removed the pool's route.
        let is_pool = self.desired().pools.contains(&prefix.trunc());
        if is_pool { self.add_pool(prefix) } else { Ok(()) }
    }

    /// Adds a low-priority route of a prefix into the device, for addresses that have no other route. Otherwise their
    /// packets would take the default route.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn add_pool(&self, prefix: IpNet) -> Result<(), TunError> {
        let (prefix, mut desired) = (prefix.trunc(), self.desired());
        self.put_pool(prefix, Change::Set)?;
        desired.pools.insert(prefix);
        Ok(())
    }

    fn put_pool(&self, prefix: IpNet, change: Change) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::NewRoute(route::pool_route(self.index(), prefix));
        let fault = |source| TunError::Route { device: self.name().to_owned(), prefix, source };
        netlink::change(message, change).map_err(fault)
    }

    /// Removes the route of [`Device::add_pool`]. A missing route is not an error.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn remove_pool(&self, prefix: IpNet) -> Result<(), TunError> {
        let (prefix, mut desired) = (prefix.trunc(), self.desired());
        desired.pools.remove(&prefix);
        self.remove(route::pool_route(self.index(), prefix), prefix)
    }

    /// Whether the main table routes an address to a device of another process, or another device's pool contains it.
    /// The default route does not count. True if the kernel refuses the query.
    pub fn leads_elsewhere(&self, address: IpAddr) -> bool {
        route::leads_elsewhere(self.index(), address).unwrap_or(true)
    }

    fn set_in(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let mut desired = self.desired();
        self.put_route(table, prefix, route)?;
        desired.routes.insert((table, prefix.trunc()), route);
        Ok(())
    }

    fn put_route(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        match self.add(table, prefix, route) {
            Err(TunError::Route { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
                let fault = |source| TunError::Route { device: self.name().to_owned(), prefix, source };
                // Only our own route may be replaced; the kernel does not check the owner.
                let whose = route::device_of(table, prefix).map_err(fault)?;
                if !whose.is_some_and(|device| desired::registry().contains_key(&device)) {
                    return Err(fault(source));
                }
                self.replace(table, prefix, route)
            }
            other => other,
        }
    }

    fn add(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::NewRoute(route::message(self.index(), table, prefix, route));
        let fault = |source| TunError::Route { device: self.name().to_owned(), prefix, source };
        netlink::change(message, Change::Add).map_err(fault)
    }

    fn replace_in(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let mut desired = self.desired();
        self.replace(table, prefix, route)?;
        desired.routes.insert((table, prefix.trunc()), route);
        Ok(())
    }

    fn replace(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::NewRoute(route::message(self.index(), table, prefix, route));
        let fault = |source| TunError::Route { device: self.name().to_owned(), prefix, source };
        netlink::change(message, Change::Set).map_err(fault)
    }

    fn remove_from(&self, table: u32, prefix: IpNet) -> Result<(), TunError> {
        let mut desired = self.desired();
        desired.routes.remove(&(table, prefix.trunc()));
        self.remove(route::message(self.index(), table, prefix, Route::default()), prefix)
    }

    fn remove(&self, message: RouteMessage, prefix: IpNet) -> Result<(), TunError> {
        match netlink::change(RouteNetlinkMessage::DelRoute(message), Change::Existing) {
            Err(source) if source.raw_os_error() != Some(libc::ESRCH) => {
                Err(TunError::Route { device: self.name().to_owned(), prefix, source })
            }
            _ => Ok(()),
        }
    }
}

/// Whether the device `name` has this interface index. After its removal, another device may have the name.
pub fn is_there(name: &str, index: u32) -> bool {
    match nix::net::if_::if_nametoindex(name) {
        Ok(now) => now == index,
        // Any other error, for example a lack of file descriptors, does not mean that the device is missing.
        Err(error) => !matches!(error, Errno::ENXIO | Errno::ENODEV),
    }
}

/// Checks that the driver exists and that this process may open it.
///
/// # Errors
/// `TunError::Driver`.
pub fn check_driver() -> Result<(), TunError> {
    let opened = OpenOptions::new().read(true).write(true).open(DRIVER);
    opened.map(drop).map_err(|source| TunError::Driver { source })
}

/// Checks that no device has this name.
///
/// # Errors
/// `TunError::NameTaken`.
pub fn check_name(name: &str) -> Result<(), TunError> {
    match nix::net::if_::if_nametoindex(name) {
        Ok(_) => Err(TunError::NameTaken { name: name.to_owned() }),
        Err(_) => Ok(()),
    }
}

/// Checks that this process may create devices, addresses, routes and rules.
///
/// # Errors
/// `TunError::Privilege`.
pub fn check_privilege() -> Result<(), TunError> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or_default();
    if bits & CAP_NET_ADMIN == 0 {
        return Err(TunError::Privilege { wanted: "to create TUN devices, addresses and routes" });
    }
    Ok(())
}

fn open_queue(name: &str, several: bool, is_first: bool) -> Result<IdleQueue, TunError> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DRIVER);
    let file = opened.map_err(|source| TunError::Driver { source })?;
    let mut flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    if is_first {
        flags |= libc::IFF_TUN_EXCL;
    }
    attach(&file, name, flags).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY | libc::EINVAL) => TunError::NameTaken { name: name.to_owned() },
        Some(libc::EPERM) => TunError::Privilege { wanted: "to create a TUN device" },
        _ => TunError::Device { device: name.to_owned(), doing: "create", source },
    })?;
    with_offload(file, name)
}

/// Requests all kinds of GSO packets that the kernel supports. Idempotent.
fn with_offload(file: File, name: &str) -> Result<IdleQueue, TunError> {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let with_udp = set_offload(&file, tcp | libc::TUN_F_USO4 | libc::TUN_F_USO6).is_ok();
    if !with_udp {
        let fault = |source| TunError::Device { device: name.to_owned(), doing: "enable TSO on", source };
        set_offload(&file, tcp).map_err(fault)?;
    }
    Ok(IdleQueue::new(OwnedFd::from(file), with_udp))
}

#[allow(unsafe_code)] // nix and socket2 have no calls for TUN.
fn attach(file: &File, name: &str, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: a C structure of numbers, an array and a union of these, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    // The kernel reads these 16 bits as unsigned.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open for the life of `file`, and the kernel reads and writes one `ifreq`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code)] // nix and socket2 have no calls for TUN.
fn set_offload(file: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: the descriptor is open for the life of `file`; the argument is a number.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn bring_up(index: u32, mtu: u32) -> io::Result<()> {
    let set = |attributes: Vec<LinkAttribute>, flags| {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = flags;
        message.header.change_mask = flags;
        message.attributes = attributes;
        netlink::change(RouteNetlinkMessage::SetLink(message), Change::Existing)
    };
    // The device must not have a kernel-generated address, whose router solicitations would be the first packets. A
    // kernel without IPv6 rejects this setting.
    let no_address = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let _ = set(vec![LinkAttribute::AfSpecUnspec(vec![no_address])], LinkFlags::empty());
    set(vec![LinkAttribute::Mtu(mtu)], LinkFlags::Up)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
