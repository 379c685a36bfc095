//! What a device was given: its addresses and routes go when somebody takes its link down, and do not come back with it;
//! and anybody may flush tables and rules.
//!
//! In: what the kernel has accepted, and what happens to links. Out: the same once more when a device's is up again, or
//! when it is asked for. Never: what is there; that stays as it is.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;

use super::{Device, Inner, Route, TunError, capture, route};
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
    for device in devices(|index| interface.is_none_or(|interface| interface == index)) {
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

/// The devices of this process have again what somebody took from them: addresses, routes and rules. What is there
/// stays as it is.
pub fn restore() {
    // What is down gets it when it is up.
    for device in devices(|_| true).iter().filter(|device| !device.kept().is_down) {
        if let Err(error) = device.restore() {
            tracing::warn!(device = device.name(), %error, "not all that it had is there. {}", error.remedy());
        }
    }
}

/// Those that nobody has deleted.
fn devices(is_it: impl Fn(u32) -> bool) -> Vec<Device> {
    let found: Vec<Device> = {
        let own = own();
        let of = own.iter().filter(|(index, _)| is_it(**index)).filter_map(|(_, inner)| inner.upgrade());
        of.map(|inner| Device { inner }).collect()
    };
    found.into_iter().filter(Device::is_there).collect()
}

impl Device {
    /// Held while the kernel changes: what is restored must not be what was just removed.
    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        self.inner.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it what it had and has not. Goes on where something fails, and returns the first error.
    fn restore(&self) -> Result<(), TunError> {
        let is_ours = self.is_ours();
        let mut result = Ok(());
        let mut note = |done: Result<(), TunError>| {
            if result.is_ok() {
                result = done;
            }
        };
        // Routes have addresses as their sources. Who does not own the device has its sessions' routes alone.
        let routes: Vec<(u32, IpNet)> = {
            let kept = self.kept();
            kept.addresses.iter().filter(|_| is_ours).for_each(|address| note(self.put_address(*address)));
            kept.pools.iter().filter(|_| is_ours).for_each(|pool| note(self.put_pool(*pool)));
            kept.routes.keys().copied().collect()
        };
        for (table, prefix) in routes.into_iter().filter(|(table, _)| is_ours || *table == route::MAIN) {
            // There may be many, and sessions begin and end meanwhile.
            let kept = self.kept();
            if let Some(route) = kept.routes.get(&(table, prefix)) {
                note(self.put_back(table, prefix, *route));
            }
        }
        if is_ours {
            // They lead to routes that are there by now.
            note(self.put_rules_back());
        }
        result
    }

    fn put_rules_back(&self) -> Result<(), TunError> {
        let captures = self.captures();
        let fault = |source| TunError::Device { device: self.name().to_owned(), doing: "making a rule for", source };
        captures.lengths.keys().try_for_each(|length| capture::add_pair(self.table(), *length)).map_err(fault)
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
