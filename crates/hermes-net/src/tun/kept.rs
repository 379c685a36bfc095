//! What a device was given: its addresses and routes go when somebody takes its link down, and do not come back with it.
//!
//! In: what the kernel has accepted, and what happens to links. Out: the same once more when a device's is up again.
//! Never: rules; they stay.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;

use super::{Device, Inner, Route, TunError, route};
use crate::netlink::{self, Change};
use crate::own::watch;

/// The devices of this process, by the kernel's numbers: a route may go from one of them to another.
static OWN: Mutex<BTreeMap<u32, Weak<Inner>>> = Mutex::new(BTreeMap::new());

/// What the kernel has accepted for a device.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) addresses: HashSet<IpNet>,
    /// By table.
    pub(super) routes: HashMap<(u32, IpNet), Route>,
    /// Prefixes that it takes in where no other route does.
    pub(super) pools: HashSet<IpNet>,
    /// Somebody has taken its link down.
    is_down: bool,
}

pub(super) fn own() -> MutexGuard<'static, BTreeMap<u32, Weak<Inner>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What happens to a link, perhaps of a device of this process: it has again what it had, once that is up.
pub fn follow(change: &watch::Change) {
    let (interface, is_up) = match change {
        watch::Change::Link { interface, is_up } => (Some(*interface), *is_up),
        // Up as far as is known.
        watch::Change::Much => (None, true),
        watch::Change::Address { .. } | watch::Change::DefaultRoute { .. } => return,
    };
    let is_it = |index: &u32| interface.is_none_or(|interface| interface == *index);
    let devices: Vec<Device> = {
        let own = own();
        let of = own.iter().filter(|(index, _)| is_it(index)).filter_map(|(_, inner)| inner.upgrade());
        of.map(|inner| Device { inner }).collect()
    };
    for device in devices.iter().filter(|device| device.is_there()) {
        let name = device.name();
        if !is_up {
            device.kept().is_down = true;
            tracing::warn!(
                device = name,
                "somebody has taken its link down: what it captures goes other ways until it \
                           is up (`ip link set NAME up`)"
            );
            continue;
        }
        let was_down = std::mem::take(&mut device.kept().is_down);
        // Whoever made it has taken it up, too.
        if interface.is_some() && !was_down {
            continue;
        }
        match device.restore() {
            Ok(()) if was_down => {
                tracing::info!(device = name, "its link is up: its addresses and routes are there again");
            }
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(device = name, %error, "its link is up, but not all of its routes are there again. {}",
                               error.remedy());
            }
        }
    }
}

impl Device {
    /// Held while the kernel changes: what is restored must not be what was just removed.
    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        self.inner.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it what it had and has not. Goes on where something fails, and returns the first error.
    fn restore(&self) -> Result<(), TunError> {
        let kept = self.kept();
        // Routes have addresses as their sources. Who does not own the device has its sessions' routes alone.
        let (is_ours, of_sessions) = (self.is_ours(), |table: u32| table == route::MAIN);
        let addresses = kept.addresses.iter().filter(|_| is_ours).map(|address| self.put_address(*address));
        let pools = kept.pools.iter().filter(|_| is_ours).map(|pool| self.put_pool(*pool));
        let routes = kept.routes.iter().filter(|((table, _), _)| is_ours || of_sessions(*table));
        let routes = routes.map(|((table, prefix), route)| self.put_back(*table, *prefix, *route));
        addresses.chain(pools).chain(routes).filter_map(Result::err).reduce(|first, _| first).map_or(Ok(()), Err)
    }

    fn put_back(&self, table: u32, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let message = RouteNetlinkMessage::NewRoute(route::message(self.index(), table, prefix, route));
        match netlink::change(message, Change::Add) {
            Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
                Err(TunError::Route { device: self.name().to_owned(), prefix, source })
            }
            // It was not gone, or leads elsewhere by now: to another device of ours, or by somebody's will.
            _ => Ok(()),
        }
    }
}
