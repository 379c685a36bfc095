//! The desired state of a device, and its restoration. Addresses and routes disappear when somebody sets the link down,
//! and do not return when the link is up again. Any program may flush tables and rules, and a failed successor process
//! may have changed them.
//!
//! In: the settings that the kernel has accepted. Out: missing settings, set again; and the removal of other settings
//! that carry our protocol number. Never: a change of settings that belong to other programs.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::rule::RuleMessage;

use super::{Device, Inner, Route, TunError, capture, nat, route};
use crate::netlink::{self, Change};

/// The devices of this process by interface index: a route may move from one of them to another.
static REGISTRY: Mutex<BTreeMap<u32, Weak<Inner>>> = Mutex::new(BTreeMap::new());

/// A setting of a device, in the order in which the kernel accepts them: routes need their source addresses, and
/// rules refer to tables of routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Setting {
    Address(IpNet),
    /// A low-priority route of the main table for addresses without another route.
    Pool(IpNet),
    /// A route, by its table and prefix.
    Route(u32, IpNet),
    /// A rule, by its family (is it IPv4?) and its priority; a device has one of each.
    Rule(bool, u32),
    /// Source NAT.
    Nat,
}

impl Setting {
    fn is_of_sessions(self) -> bool {
        matches!(self, Setting::Route(route::MAIN, _))
    }
}

/// The settings of a device that the kernel has accepted.
#[derive(Debug, Default)]
pub(super) struct DesiredState {
    pub(super) addresses: HashSet<IpNet>,
    /// Routes by table and prefix.
    pub(super) routes: HashMap<(u32, IpNet), Route>,
    /// Prefixes that the device receives if no other route matches.
    pub(super) pools: HashSet<IpNet>,
    /// Rules by family and priority.
    pub(super) rules: HashMap<(bool, u32), RuleMessage>,
    /// The source addresses whose packets leave with this machine's address. `None`: no source NAT.
    pub(super) nat: Option<Vec<IpNet>>,
    /// Whether somebody has set the device's link down.
    pub(super) is_down: bool,
}

impl DesiredState {
    pub(super) fn has(&self, item: Setting) -> bool {
        match item {
            Setting::Address(address) => self.addresses.contains(&address),
            Setting::Pool(prefix) => self.pools.contains(&prefix),
            Setting::Route(table, prefix) => self.routes.contains_key(&(table, prefix)),
            Setting::Rule(is_v4, priority) => self.rules.contains_key(&(is_v4, priority)),
            Setting::Nat => self.nat.is_some(),
        }
    }
}

pub(super) fn registry() -> MutexGuard<'static, BTreeMap<u32, Weak<Inner>>> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores addresses, routes, rules and NAT that other programs removed from the devices of this process. Existing
/// settings stay as they are.
pub fn restore() {
    // A device that is down is restored when it comes up.
    for device in devices(|_| true).iter().filter(|device| !device.desired().is_down) {
        if let Err(error) = device.restore(&mut device.items()) {
            tracing::warn!(device = device.name(), %error, "cannot restore all settings of a device. {}", error.remedy());
        }
    }
}

/// Returns the devices of this process that still exist, and whose interface index `is_it` accepts.
pub(super) fn devices(is_it: impl Fn(u32) -> bool) -> Vec<Device> {
    let found: Vec<Device> = {
        let own = registry();
        let of = own.iter().filter(|(index, _)| is_it(**index)).filter_map(|(_, inner)| inner.upgrade());
        of.map(|inner| Device { inner }).collect()
    };
    found.into_iter().filter(Device::is_there).collect()
}

/// Evaluates the attempt to add a setting. Returns false if the setting existed already.
fn was_missing(added: Result<(), TunError>) -> Result<bool, TunError> {
    match added {
        Err(TunError::Address { source, .. } | TunError::Route { source, .. })
            if source.kind() == io::ErrorKind::AlreadyExists =>
        {
            Ok(false)
        }
        added => added.map(|()| true),
    }
}

impl Device {
    /// Locks the desired state. Hold the lock while the kernel's state changes, so that removed settings are not
    /// restored.
    pub(super) fn desired(&self) -> MutexGuard<'_, DesiredState> {
        self.inner.desired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All settings of the device.
    pub(super) fn items(&self) -> BTreeSet<Setting> {
        let desired = self.desired();
        let addresses = desired.addresses.iter().map(|address| Setting::Address(*address));
        let pools = desired.pools.iter().map(|prefix| Setting::Pool(*prefix));
        let routes = desired.routes.keys().map(|(table, prefix)| Setting::Route(*table, *prefix));
        let rules = desired.rules.keys().map(|(is_v4, priority)| Setting::Rule(*is_v4, *priority));
        let nat = desired.nat.iter().map(|_| Setting::Nat);
        addresses.chain(pools).chain(routes).chain(rules).chain(nat).collect()
    }

    /// Restores these settings as far as this process owns them. Continues after an error and returns the first one;
    /// the settings that failed stay in `items`. Returns false if no setting was missing.
    pub(super) fn restore(&self, items: &mut BTreeSet<Setting>) -> Result<bool, TunError> {
        // The list may be long, and sessions begin and end meanwhile, so each setting is checked and restored on its
        // own.
        let (mut was_missing, mut fault) = (false, None);
        items.retain(|item| match self.restore_setting(*item) {
            Ok(was) => {
                was_missing |= was;
                false
            }
            Err(error) => {
                fault.get_or_insert(error);
                true
            }
        });
        fault.map_or(Ok(was_missing), Err)
    }

    /// Whether this process owns a setting. Without ownership of the device it owns only the routes of its sessions.
    pub(super) fn may_have(&self, item: Setting) -> bool {
        item.is_of_sessions() || self.is_ours()
    }

    /// Restores one setting. Returns false if it was not missing.
    fn restore_setting(&self, item: Setting) -> Result<bool, TunError> {
        if item == Setting::Nat {
            return self.restore_nat();
        }
        let desired = self.desired();
        if !desired.has(item) || !self.may_have(item) {
            return Ok(false);
        }
        match item {
            Setting::Address(address) => was_missing(self.put_address(address, Change::Add)),
            Setting::Pool(prefix) => was_missing(self.put_pool(prefix, Change::Add)),
            Setting::Route(table, prefix) => match desired.routes.get(&(table, prefix)) {
                Some(route) => match was_missing(self.add(table, prefix, *route)) {
                    // Only the device uses this table: another program's route in it is replaced.
                    Ok(false) if !item.is_of_sessions() && !self.has_route(table, prefix, *route)? => {
                        self.replace(table, prefix, *route).map(|()| true)
                    }
                    // An existing route was not missing (a session released it, and the next one set it), or it now
                    // leads to another of our devices or to another program's.
                    done => done,
                },
                None => Ok(false),
            },
            Setting::Rule(is_v4, priority) => match desired.rules.get(&(is_v4, priority)) {
                Some(rule) => self.put_rule(rule).map_err(|source| TunError::Device {
                    device: self.name().to_owned(),
                    doing: "add a rule for",
                    source,
                }),
                None => Ok(false),
            },
            Setting::Nat => Ok(false),
        }
    }

    fn has_route(&self, table: u32, prefix: IpNet, wanted: Route) -> Result<bool, TunError> {
        let routes = route::routes_of(self.index(), table);
        let routes = routes.map_err(|source| TunError::Route { device: self.name().to_owned(), prefix, source })?;
        Ok(routes.get(&Setting::Route(table, prefix)) == Some(&wanted))
    }

    /// Runs `change`, which sets up source NAT for these addresses, or removes it (`None`). Records the new desired
    /// state.
    ///
    /// # Errors
    /// The errors of `change`; the desired state is unchanged then.
    pub(crate) fn change_nat(
        &self,
        addresses: Option<&[IpNet]>,
        change: impl FnOnce() -> Result<(), TunError>,
    ) -> Result<(), TunError> {
        let _changing = self.inner.nat.lock().unwrap_or_else(PoisonError::into_inner);
        change()?;
        self.desired().nat = addresses.map(<[IpNet]>::to_vec);
        Ok(())
    }

    fn restore_nat(&self) -> Result<bool, TunError> {
        let _changing = self.inner.nat.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.desired().nat.clone().filter(|_| self.may_have(Setting::Nat));
        wanted.map_or(Ok(false), |addresses| nat::restore_rules(self, &addresses))
    }

    /// Forgets a route of [`Device::set_route`] without removing it. Another process owns the device, and decides
    /// whether the route is needed.
    pub fn forget_route(&self, prefix: IpNet) {
        self.desired().routes.remove(&(route::MAIN, prefix.trunc()));
    }

    /// Removes addresses, routes and rules of the device that carry our protocol number but were not set by this
    /// process, and restores changed ones. They come from processes that were killed or failed. (Before Linux 5.18 the
    /// kernel does not record the protocol of an address; addresses then stay.)
    ///
    /// # Errors
    /// `TunError`: the kernel cannot list a setting or remove it.
    pub fn sweep(&self) -> Result<(), TunError> {
        let fault = |source| TunError::Device { device: self.name().to_owned(), doing: "clean up", source };
        // Both locks: no capture, route or release may change meanwhile.
        let (_captures, desired) = (self.captures(), self.desired());
        let mut rules = capture::rules_of(self.index());
        rules.retain(|item, _| !desired.has(*item));
        // Rules first, because they refer to routes.
        rules.into_iter().rev().for_each(|(_, rule)| capture::remove(rule));
        for (item, route) in route::routes_of(self.index(), route::ALL_TABLES).map_err(fault)? {
            match item {
                item if !desired.has(item) => self.remove_found(item)?,
                Setting::Route(table, prefix) => match desired.routes.get(&(table, prefix)) {
                    Some(wanted) if *wanted != route => self.replace(table, prefix, *wanted)?,
                    _ => {}
                },
                _ => {}
            }
        }
        let addresses = route::addresses_of(self.index()).map_err(fault)?;
        let mut others = addresses.into_iter().filter(|address| !desired.addresses.contains(address));
        others.try_for_each(|address| self.take_address(address))
    }

    fn remove_found(&self, item: Setting) -> Result<(), TunError> {
        match item {
            Setting::Pool(prefix) => self.remove(route::pool_route(self.index(), prefix), prefix),
            Setting::Route(table, prefix) => {
                self.remove(route::message(self.index(), table, prefix, Route::default()), prefix)
            }
            Setting::Address(_) | Setting::Rule(..) | Setting::Nat => Ok(()),
        }
    }

    /// Restores the state after a failed takeover: removes what the successor added, and restores what it changed.
    ///
    /// # Errors
    /// `TunError`: the first setting that cannot be restored; all others are.
    pub fn roll_back(&self) -> Result<(), TunError> {
        self.sweep().and(self.restore(&mut self.items()).map(drop))
    }

    /// Adds a rule. Returns false if it exists.
    fn put_rule(&self, rule: &RuleMessage) -> io::Result<bool> {
        match netlink::change(RouteNetlinkMessage::NewRule(rule.clone()), Change::Add) {
            // The rule selects the device's own table, so this process or the device's previous owner created it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            done => done.map(|()| true),
        }
    }

    pub(super) fn add_rule(&self, rule: RuleMessage) -> io::Result<()> {
        let mut desired = self.desired();
        self.put_rule(&rule)?;
        desired.rules.extend(capture::key(&rule).map(|key| (key, rule)));
        Ok(())
    }

    pub(super) fn remove_rule(&self, rule: RuleMessage) {
        let mut desired = self.desired();
        capture::key(&rule).inspect(|key| drop(desired.rules.remove(key)));
        capture::remove(rule);
    }
}
