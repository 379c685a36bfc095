//! What a device was given: its addresses and routes go when somebody takes its link down, and do not come back with it;
//! and anybody may flush tables and rules, or be a successor that adds to them and fails.
//!
//! In: what the kernel has accepted. Out: the same once more, each thing that is asked for; and nothing else that is in
//! our name. Never: what is somebody else's; that stays as it is.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::rule::RuleMessage;

use super::{Device, Inner, Route, TunError, capture, nat, route};
use crate::netlink::{self, Change};

/// The devices of this process, by the kernel's numbers: a route may go from one of them to another.
static OWN: Mutex<BTreeMap<u32, Weak<Inner>>> = Mutex::new(BTreeMap::new());

/// One thing of a device, in the order in which the kernel takes them: routes have addresses as their sources, and rules
/// lead to routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Item {
    Address(IpNet),
    /// Of the main table, where no other route is.
    Pool(IpNet),
    /// By its table.
    Route(u32, IpNet),
    /// By its family (is it IPv4?) and its priority, of which a device has one each.
    Rule(bool, u32),
    /// Source NAT.
    Nat,
}

impl Item {
    fn is_of_sessions(self) -> bool {
        matches!(self, Item::Route(route::MAIN, _))
    }
}

/// What the kernel has accepted for a device.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) addresses: HashSet<IpNet>,
    /// By table.
    pub(super) routes: HashMap<(u32, IpNet), Route>,
    /// Prefixes that it takes in where no other route does.
    pub(super) pools: HashSet<IpNet>,
    /// By family and priority.
    pub(super) rules: HashMap<(bool, u32), RuleMessage>,
    /// Whose packets leave with this machine's address.
    pub(super) nat: Option<Vec<IpNet>>,
    /// Somebody has taken its link down.
    pub(super) is_down: bool,
}

impl Kept {
    pub(super) fn has(&self, item: Item) -> bool {
        match item {
            Item::Address(address) => self.addresses.contains(&address),
            Item::Pool(prefix) => self.pools.contains(&prefix),
            Item::Route(table, prefix) => self.routes.contains_key(&(table, prefix)),
            Item::Rule(is_v4, priority) => self.rules.contains_key(&(is_v4, priority)),
            Item::Nat => self.nat.is_some(),
        }
    }
}

pub(super) fn own() -> MutexGuard<'static, BTreeMap<u32, Weak<Inner>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices of this process have again what somebody took from them: addresses, routes, rules and NAT. What is there
/// stays as it is.
pub fn restore() {
    // What is down gets it when it is up.
    for device in devices(|_| true).iter().filter(|device| !device.kept().is_down) {
        if let Err(error) = device.restore(&mut device.items()) {
            tracing::warn!(device = device.name(), %error, "not all that it had is there. {}", error.remedy());
        }
    }
}

/// Those that nobody has deleted.
pub(super) fn devices(is_it: impl Fn(u32) -> bool) -> Vec<Device> {
    let found: Vec<Device> = {
        let own = own();
        let of = own.iter().filter(|(index, _)| is_it(**index)).filter_map(|(_, inner)| inner.upgrade());
        of.map(|inner| Device { inner }).collect()
    };
    found.into_iter().filter(Device::is_there).collect()
}

/// Of a thing that was to be added: false where there was one like it.
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
    /// Held while the kernel changes: what is restored must not be what was just removed.
    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        self.inner.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that it was given.
    pub(super) fn items(&self) -> BTreeSet<Item> {
        let kept = self.kept();
        let addresses = kept.addresses.iter().map(|address| Item::Address(*address));
        let pools = kept.pools.iter().map(|prefix| Item::Pool(*prefix));
        let routes = kept.routes.keys().map(|(table, prefix)| Item::Route(*table, *prefix));
        let rules = kept.rules.keys().map(|(is_v4, priority)| Item::Rule(*is_v4, *priority));
        let nat = kept.nat.iter().map(|_| Item::Nat);
        addresses.chain(pools).chain(routes).chain(rules).chain(nat).collect()
    }

    /// Gives it these once more, as far as they are its own. Goes on where something fails, and returns the first error:
    /// what failed is left in `items`. False where nothing of them was missing.
    pub(super) fn restore(&self, items: &mut BTreeSet<Item>) -> Result<bool, TunError> {
        // There may be many, and sessions begin and end meanwhile: each is looked at by itself.
        let (mut was_missing, mut fault) = (false, None);
        items.retain(|item| match self.put_back(*item) {
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

    /// Who does not own the device has its sessions' routes alone.
    pub(super) fn may_have(&self, item: Item) -> bool {
        item.is_of_sessions() || self.is_ours()
    }

    /// False where it was not missing.
    fn put_back(&self, item: Item) -> Result<bool, TunError> {
        if item == Item::Nat {
            return self.put_nat_back();
        }
        let kept = self.kept();
        if !kept.has(item) || !self.may_have(item) {
            return Ok(false);
        }
        match item {
            Item::Address(address) => was_missing(self.put_address(address, Change::Add)),
            Item::Pool(prefix) => was_missing(self.put_pool(prefix, Change::Add)),
            Item::Route(table, prefix) => match kept.routes.get(&(table, prefix)) {
                Some(route) => match was_missing(self.add(table, prefix, *route)) {
                    // The table is the device's alone: what has taken its place goes.
                    Ok(false) if !item.is_of_sessions() && !self.has_route(table, prefix, *route)? => {
                        self.replace(table, prefix, *route).map(|()| true)
                    }
                    // Where there is one it was not gone (a session gave it back, and the next one has it), or leads
                    // elsewhere by now: to another device of ours, or by somebody's will.
                    done => done,
                },
                None => Ok(false),
            },
            Item::Rule(is_v4, priority) => match kept.rules.get(&(is_v4, priority)) {
                Some(rule) => self.put_rule(rule).map_err(|source| TunError::Device {
                    device: self.name().to_owned(),
                    doing: "making a rule for",
                    source,
                }),
                None => Ok(false),
            },
            Item::Nat => Ok(false),
        }
    }

    fn has_route(&self, table: u32, prefix: IpNet, wanted: Route) -> Result<bool, TunError> {
        let routes = route::routes_of(self.index(), table);
        let routes = routes.map_err(|source| TunError::Route { device: self.name().to_owned(), prefix, source })?;
        Ok(routes.get(&Item::Route(table, prefix)) == Some(&wanted))
    }

    /// Changes its source NAT to that of these addresses, or to none.
    ///
    /// # Errors
    /// Those of `change`: it is as it was then.
    pub(crate) fn change_nat(
        &self,
        addresses: Option<&[IpNet]>,
        change: impl FnOnce() -> Result<(), TunError>,
    ) -> Result<(), TunError> {
        let _changing = self.inner.nat.lock().unwrap_or_else(PoisonError::into_inner);
        change()?;
        self.kept().nat = addresses.map(<[IpNet]>::to_vec);
        Ok(())
    }

    fn put_nat_back(&self) -> Result<bool, TunError> {
        let _changing = self.inner.nat.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.kept().nat.clone().filter(|_| self.may_have(Item::Nat));
        wanted.map_or(Ok(false), |addresses| nat::put_back(self, &addresses))
    }

    /// Forgets a route of [`Device::set_route`], which stays where it is: another process has the device, and knows
    /// whether anybody needs it.
    pub fn forget_route(&self, prefix: IpNet) {
        self.kept().routes.remove(&(route::MAIN, prefix.trunc()));
    }

    /// Takes away addresses, routes and rules of the device that are in our name, and that this process has not set; those
    /// that another one has changed are as they were. What processes left behind that were killed, or failed. (Kernels
    /// before Linux 5.18 do not say whose an address is: there it stays.)
    ///
    /// # Errors
    /// `TunError`: what is there is not told, or cannot be removed.
    pub fn sweep(&self) -> Result<(), TunError> {
        let fault = |source| TunError::Device { device: self.name().to_owned(), doing: "sweeping", source };
        // Nothing is captured, led here or let go meanwhile.
        let (_captures, kept) = (self.captures(), self.kept());
        let mut rules = capture::rules_of(self.index());
        rules.retain(|item, _| !kept.has(*item));
        // First what leads to routes.
        rules.into_iter().rev().for_each(|(_, rule)| capture::remove(rule));
        for (item, route) in route::routes_of(self.index(), route::EVERY).map_err(fault)? {
            match item {
                item if !kept.has(item) => self.remove_found(item)?,
                Item::Route(table, prefix) => match kept.routes.get(&(table, prefix)) {
                    Some(wanted) if *wanted != route => self.replace(table, prefix, *wanted)?,
                    _ => {}
                },
                _ => {}
            }
        }
        let addresses = route::addresses_of(self.index()).map_err(fault)?;
        let mut others = addresses.into_iter().filter(|address| !kept.addresses.contains(address));
        others.try_for_each(|address| self.take_address(address))
    }

    fn remove_found(&self, item: Item) -> Result<(), TunError> {
        match item {
            Item::Pool(prefix) => self.remove(route::last(self.index(), prefix), prefix),
            Item::Route(table, prefix) => {
                self.remove(route::message(self.index(), table, prefix, Route::default()), prefix)
            }
            Item::Address(_) | Item::Rule(..) | Item::Nat => Ok(()),
        }
    }

    /// Another process was to have it, and does not get it: what that one added goes, and what it changed is as it was.
    ///
    /// # Errors
    /// `TunError`: the first thing that cannot be undone. All else is.
    pub fn take_back(&self) -> Result<(), TunError> {
        self.sweep().and(self.restore(&mut self.items()).map(drop))
    }

    /// False where it is there.
    fn put_rule(&self, rule: &RuleMessage) -> io::Result<bool> {
        match netlink::change(RouteNetlinkMessage::NewRule(rule.clone()), Change::Add) {
            // It names the device's own table: this process made it, or the one that had the device before us.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            done => done.map(|()| true),
        }
    }

    pub(super) fn add_rule(&self, rule: RuleMessage) -> io::Result<()> {
        let mut kept = self.kept();
        self.put_rule(&rule)?;
        kept.rules.extend(capture::key(&rule).map(|key| (key, rule)));
        Ok(())
    }

    pub(super) fn remove_rule(&self, rule: RuleMessage) {
        let mut kept = self.kept();
        capture::key(&rule).inspect(|key| drop(kept.rules.remove(key)));
        capture::remove(rule);
    }
}
