//! Leases of prefixes to clients, over all devices of the node, because devices share the machine's routes.
//!
//! In: prefixes that sessions take and return. Out: whether a session may have a prefix. No lease overlaps one of
//! another owner. The prefixes of a broken session stay reserved for a while, including those of the previous process.
//! Each owner has a maximum number of prefixes. Never: a prefix that a listener captures, since those belong to a
//! device.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hermes_model::snapshot::Gateway;
use hermes_wire::ip;
use ipnet::IpNet;

use crate::address_owner::Owner;
use crate::table::Table;

/// Maximum number of prefixes of one owner, however many sessions share them. The limit prevents one owner from
/// exhausting a pool.
const MAX_OWNED: usize = 128;

/// The leases of the node. They are consulted when sessions begin and end, never for a packet.
#[derive(Debug, Default)]
pub struct AddressLeases {
    holdings: Mutex<Holdings>,
    /// Searches by device and pool. This lock is taken before any lock that a search needs.
    searches: Mutex<HashMap<(Arc<str>, IpNet), Search>>,
}

#[derive(Debug, Default)]
struct Holdings {
    table: Table<Holding>,
    /// Reserved prefixes without a session, by the end of the reservation.
    resting: BTreeSet<(Instant, IpNet)>,
    shares: HashMap<Owner, Share>,
    /// Owners with reserved prefixes, by the number of these.
    ranks: BTreeSet<(usize, Owner)>,
    /// Addresses that became free since the last search.
    freed: VecDeque<IpNet>,
}

/// The prefixes of one owner, and those of them that are reserved.
#[derive(Debug, Default)]
struct Share {
    prefixes: usize,
    resting: BTreeSet<(Instant, IpNet)>,
    /// Prefixes that the owner received instead of the requested prefixes, by request.
    instead: HashMap<AddressRequest, IpNet>,
}

/// A request: the requested prefix, and the network to which its packets go (`None`: any).
pub type AddressRequest = (IpNet, Option<IpNet>);

/// A prefix that sessions of one owner have, or for which the owner has a reservation.
#[derive(Debug)]
struct Holding {
    owner: Owner,
    sessions: usize,
    /// Whether the last session broke off, so that its prefix will be reserved.
    is_broken: bool,
    until: Option<Instant>,
    /// The request, if this prefix was assigned instead of the requested one.
    wish: Option<AddressRequest>,
}

/// Duration of a reservation after a session breaks off. Connections to the prefix survive that long, and their packets
/// reach no other owner.
const RELEASE_HOLD: Duration = Duration::from_secs(60);
/// Maximum number of reserved prefixes of all owners. Beyond it, the oldest reservations end at once.
const MAX_RESTING: usize = 4096;

impl AddressLeases {
    fn lock(&self) -> MutexGuard<'_, Holdings> {
        self.holdings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn searches(&self) -> MutexGuard<'_, HashMap<(Arc<str>, IpNet), Search>> {
        self.searches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leases a prefix for one more session of this owner. Returns false if an overlapping prefix belongs to another
    /// owner, or if the owner has the maximum number of prefixes.
    pub fn take(&self, prefix: IpNet, owner: &Owner) -> bool {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        holdings.take(prefix, owner)
    }

    /// Records that the session with this prefix broke off, so that [`AddressLeases::give_back`] reserves the prefix:
    /// its owner may connect again.
    pub fn breaks(&self, prefix: IpNet) {
        if let Some(holding) = self.lock().table.get_mut(prefix) {
            holding.is_broken = true;
        }
    }

    /// Records that this prefix was assigned instead of a requested one, so that the same request receives it again.
    pub fn give_instead(&self, prefix: IpNet, wish: AddressRequest) {
        let mut holdings = self.lock();
        let Some(holding) = holdings.table.get_mut(prefix) else { return };
        holding.wish = Some(wish);
        let owner = holding.owner.clone();
        holdings.share(&owner).instead.insert(wish, prefix);
    }

    /// Returns the prefix that was assigned to the owner instead of the requested one. `None`: no other prefix was
    /// assigned.
    pub fn instead(&self, owner: &Owner, wish: AddressRequest) -> Option<IpNet> {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        holdings.shares.get(owner)?.instead.get(&wish).copied()
    }

    /// Restores an assignment of the previous process (see [`AddressLeases::give_instead`]), and reserves the prefix
    /// for its owner.
    pub fn keep_instead(&self, prefix: IpNet, owner: &Owner, wish: AddressRequest) {
        if self.take(prefix, owner) {
            self.give_instead(prefix, wish);
            self.breaks(prefix);
            self.give_back(prefix);
        }
    }

    /// Returns the request for which this prefix was assigned instead of the requested one. `None`: the prefix was
    /// requested.
    pub fn wish(&self, prefix: IpNet) -> Option<AddressRequest> {
        self.lock().table.get(prefix)?.wish
    }

    /// Releases a prefix of one session. After the last session, the prefix is free, or reserved if that session broke
    /// off.
    pub fn give_back(&self, prefix: IpNet) {
        let mut holdings = self.lock();
        let Some(holding) = holdings.table.get_mut(prefix) else { return };
        holding.sessions = holding.sessions.saturating_sub(1);
        let is_broken = std::mem::take(&mut holding.is_broken);
        if holding.sessions > 0 {
            return;
        }
        if is_broken {
            holdings.rest(prefix, Instant::now() + RELEASE_HOLD);
        } else {
            holdings.remove(prefix);
        }
    }

    /// Serializes the reservations for another process: one line each, with the remaining milliseconds, prefix and
    /// owner.
    pub fn resting(&self) -> String {
        let mut holdings = self.lock();
        let now = Instant::now();
        holdings.forget(now);
        let owner = |prefix: &IpNet| holdings.table.get(*prefix).map(|holding| &holding.owner);
        let resting = holdings.resting.iter().filter_map(|one| Some((one, owner(&one.1)?)));
        resting.map(|((until, prefix), owner)| format!("{} {prefix} {owner}\n", (*until - now).as_millis())).collect()
    }

    /// Restores the reservations that the previous process serialized with [`AddressLeases::resting`].
    pub fn go_on_resting(&self, resting: &str) {
        let read = |line: &str| {
            let (left, rest) = line.split_once(' ')?;
            let (prefix, owner) = rest.split_once(' ')?;
            Some((prefix.parse().ok()?, Owner::parse(owner)?, Duration::from_millis(left.parse().ok()?)))
        };
        let now = Instant::now();
        for (prefix, owner, left) in resting.lines().filter_map(read) {
            self.lock().rest_anew(prefix, &owner, now + left.min(RELEASE_HOLD));
        }
    }

    /// Returns the widest leased or reserved prefix that contains this address.
    pub fn around(&self, address: IpAddr) -> Option<IpNet> {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        holdings.table.around(address)
    }

    /// Whether sessions of this owner have the maximum number of prefixes. Reserved prefixes do not count.
    pub fn is_full(&self, owner: &Owner) -> bool {
        self.lock().shares.get(owner).is_some_and(|share| share.prefixes - share.resting.len() >= MAX_OWNED)
    }

    /// Finds a free address in a device's pools, or else a reserved one: the owner's own, or one of the owner with the
    /// most reservations. `taken` returns the prefix that contains an address, if the address is not free. Repeated
    /// searches do not examine an address again for a second after it was found taken, unless it was released.
    pub fn find_free(
        &self,
        device: &Arc<str>,
        pools: &[IpNet],
        owner: &Owner,
        now: u64,
        taken: impl Fn(IpAddr) -> Option<IpNet>,
    ) -> Option<IpNet> {
        let mut searches = self.searches();
        let freed = {
            let mut holdings = self.lock();
            holdings.forget(Instant::now());
            std::mem::take(&mut holdings.freed)
        };
        for prefix in freed {
            searches.values_mut().for_each(|search| search.hear_of_free(prefix));
        }
        let key = |pool: &IpNet| (device.clone(), *pool);
        for pool in pools {
            let found = searches.entry(key(pool)).or_insert_with(|| Search::of(*pool)).find(now, &taken);
            if found.is_some() {
                return found;
            }
        }
        if pools.iter().all(|pool| searches.get(&key(pool)).is_some_and(|search| search.is_spent)) {
            return None;
        }
        let is_one = |net: IpNet| net.prefix_len() == net.max_prefix_len();
        let fits = |net: IpNet| is_one(net) && pools.iter().any(|pool| pool.contains(&net));
        let is_searched = |pool: &IpNet| searches.get(&key(pool)).is_some_and(|search| search.next.is_none());
        let rested = {
            let mut holdings = self.lock();
            let own = holdings.free_first(owner, fits);
            // Reservations are honoured as long as another address may be free.
            let rested = own.or_else(|| {
                let is_all_taken = pools.iter().all(is_searched);
                is_all_taken.then(|| holdings.free_of_most_resting(fits)).flatten()
            });
            // This address is the result, so the next search must not find it again as a freed one.
            holdings.freed.retain(|net| Some(*net) != rested);
            rested
        };
        if rested.is_none() && pools.iter().all(is_searched) {
            for pool in pools {
                searches.entry(key(pool)).or_insert_with(|| Search::of(*pool)).is_spent = true;
            }
        }
        rested
    }
}

/// The progress of a search for free addresses in a pool.
#[derive(Clone, Debug)]
struct Search {
    pool: IpNet,
    /// The first and the last address that a host may have.
    hosts: (u128, u128),
    /// The first address that was not examined yet; `None` if all were.
    next: Option<u128>,
    /// Addresses that were released after the search had examined them.
    freed: VecDeque<IpAddr>,
    /// The time at which these results expire, in milliseconds of the node's clock. They expire because listeners and
    /// configurations take and release addresses, too.
    until: u64,
    /// Number of addresses that may still be examined before `until`.
    looks: usize,
    /// Whether the search found neither a free nor a reserved address in the pool.
    is_spent: bool,
}

/// Milliseconds until taken addresses are examined again.
const SEARCH_INTERVAL: u64 = 1000;
/// Maximum number of addresses, or of prefixes with several addresses, that are examined in [`SEARCH_INTERVAL`]. Each
/// examination takes less than a microsecond.
const MAX_EXAMINED_ADDRESSES: usize = 65_536;
/// Maximum number of released addresses that are remembered. The next full search finds further ones.
const MAX_FREED: usize = 1024;

impl Search {
    fn of(pool: IpNet) -> Self {
        let (first, last) = (bits(pool.network()), bits(pool.broadcast()));
        // The first address of a network is not assigned, nor is the last one of an IPv4 network (RFC 4291, section
        // 2.6.1; RFC 1122, section 3.2.1.3).
        let hosts = match last - first {
            0 | 1 => (first, last),
            _ => (first + 1, last - u128::from(pool.addr().is_ipv4())),
        };
        Self { pool, hosts, next: Some(hosts.0), freed: VecDeque::new(), until: 0, looks: 0, is_spent: false }
    }

    fn find(&mut self, now: u64, taken: impl Fn(IpAddr) -> Option<IpNet>) -> Option<IpNet> {
        if now >= self.until {
            self.until = now + SEARCH_INTERVAL;
            self.looks = MAX_EXAMINED_ADDRESSES;
            self.is_spent = false;
            self.next = self.next.or(Some(self.hosts.0));
        }
        while let Some(address) = self.freed.pop_front() {
            if taken(address).is_none() {
                return Some(address.into());
            }
        }
        while let Some(next) = self.next.filter(|_| self.looks > 0) {
            self.looks -= 1;
            let address = of_bits(next, self.pool);
            let around = taken(address);
            let last = around.map_or(next, |around| bits(around.broadcast()).max(next));
            self.next = last.checked_add(1).filter(|next| *next <= self.hosts.1);
            if around.is_none() {
                return Some(address.into());
            }
        }
        None
    }

    fn hear_of_free(&mut self, prefix: IpNet) {
        let address = bits(prefix.network()).max(self.hosts.0);
        if !self.pool.contains(&prefix) && !prefix.contains(&self.pool) {
            return;
        }
        self.is_spent = false;
        // The search will still examine addresses from `next` on.
        if self.next.is_none_or(|next| address < next) && address <= self.hosts.1 && self.freed.len() < MAX_FREED {
            self.freed.push_back(of_bits(address, self.pool));
        }
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Converts bits to an address of the pool's IP version.
fn of_bits(bits: u128, pool: IpNet) -> IpAddr {
    match pool {
        IpNet::V4(_) => Ipv4Addr::from_bits(bits as u32).into(),
        IpNet::V6(_) => Ipv6Addr::from_bits(bits).into(),
    }
}

impl Holdings {
    /// Leases a prefix for one more session of the owner, if that is possible.
    fn take(&mut self, prefix: IpNet, owner: &Owner) -> bool {
        if self.table.overlapping(prefix).any(|holding| holding.owner != *owner) {
            return false;
        }
        if let Some(holding) = self.table.get_mut(prefix) {
            holding.sessions += 1;
            self.set_rest(prefix, None);
            return true;
        }
        if self.share(owner).prefixes >= MAX_OWNED {
            // The owner's own reservations end first.
            self.free_first(owner, |_| true);
        }
        let share = self.share(owner);
        if share.prefixes >= MAX_OWNED {
            return false;
        }
        share.prefixes += 1;
        let holding = Holding { owner: owner.clone(), sessions: 1, is_broken: false, until: None, wish: None };
        self.table.insert(prefix, holding);
        true
    }

    fn share(&mut self, owner: &Owner) -> &mut Share {
        self.shares.entry(owner.clone()).or_default()
    }

    /// Frees a prefix.
    fn remove(&mut self, prefix: IpNet) {
        if self.freed.len() < MAX_FREED {
            self.freed.push_back(prefix);
        }
        self.set_rest(prefix, None);
        let Some(Holding { owner, wish, .. }) = self.table.remove(prefix) else { return };
        let share = self.share(&owner);
        if let Some(wish) = wish {
            share.instead.remove(&wish);
        }
        share.prefixes -= 1;
        if share.prefixes == 0 {
            self.shares.remove(&owner);
        }
    }

    /// Reserves a prefix for its owner.
    fn rest(&mut self, prefix: IpNet, until: Instant) {
        self.set_rest(prefix, Some(until));
        if self.resting.len() > MAX_RESTING {
            self.end_first_rest();
        }
    }

    /// Changes the end of a reservation, and updates all sets. `None` ends the reservation.
    fn set_rest(&mut self, prefix: IpNet, until: Option<Instant>) {
        let Some(holding) = self.table.get_mut(prefix).filter(|holding| holding.until != until) else { return };
        let before = std::mem::replace(&mut holding.until, until);
        let owner = holding.owner.clone();
        let its = &mut self.shares.entry(owner.clone()).or_default().resting;
        let had = its.len();
        if let Some(before) = before {
            its.remove(&(before, prefix));
            self.resting.remove(&(before, prefix));
        }
        if let Some(until) = until {
            its.insert((until, prefix));
            self.resting.insert((until, prefix));
        }
        let has = its.len();
        self.ranks.remove(&(had, owner.clone()));
        if has > 0 {
            self.ranks.insert((has, owner));
        }
    }

    /// Reserves a prefix that is not leased in this process.
    fn rest_anew(&mut self, prefix: IpNet, owner: &Owner, until: Instant) {
        if self.table.overlapping(prefix).next().is_none() && self.take(prefix, owner) {
            if let Some(holding) = self.table.get_mut(prefix) {
                holding.sessions = 0;
            }
            self.rest(prefix, until);
        }
    }

    /// Frees prefixes whose reservation has expired.
    fn forget(&mut self, now: Instant) {
        while self.resting.first().is_some_and(|(until, _)| *until <= now) {
            self.end_first_rest();
        }
    }

    fn end_first_rest(&mut self) {
        if let Some((_, prefix)) = self.resting.pop_first() {
            self.remove(prefix);
        }
    }

    /// Frees the oldest reservation of the owner for which `fits` is true, and returns its prefix.
    fn free_first(&mut self, owner: &Owner, fits: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        let its = &self.shares.get(owner)?.resting;
        let prefix = its.iter().map(|(_, prefix)| *prefix).find(|prefix| fits(*prefix))?;
        self.remove(prefix);
        Some(prefix)
    }

    /// Frees the oldest reservation for which `fits` is true, of the owner with the most reservations. Returns its
    /// prefix.
    fn free_of_most_resting(&mut self, fits: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        // Owners whose reservations are all in other pools are skipped.
        let its = |(_, owner): &(usize, Owner)| {
            let its = &self.shares.get(owner)?.resting;
            its.iter().map(|(_, prefix)| *prefix).find(|prefix| fits(*prefix))
        };
        let prefix = self.ranks.iter().rev().find_map(its)?;
        self.remove(prefix);
        Some(prefix)
    }
}

/// Whether the configuration lets clients have this network: it is in a pool, or private if there are no pools.
pub fn gives(gateway: &Gateway, net: IpNet) -> bool {
    withheld(gateway, net).is_none()
}

/// Returns the reason why the configuration does not let clients have this network, with a remedy. `None`: it lets
/// them.
pub fn withheld(gateway: &Gateway, net: IpNet) -> Option<&'static str> {
    let address = net.addr();
    // If clients may have networks, a client could lease a whole pool with one request.
    let is_one = net.prefix_len() == net.max_prefix_len();
    let is_pooled = gateway.assign.iter().any(|pool| pool.contains(&net));
    if !ip::is_one_host(address) || address.is_loopback() {
        Some("it is not the address of a host; give the client's device another address")
    } else if gateway.addresses.iter().any(|own| net.contains(own)) {
        Some("it is the gateway's own address (`terminate.address`); give the client's device another address")
    } else if !is_one && !gateway.assign_networks {
        Some("it is a network, and the route assigns addresses only; request addresses or set `assign-networks: true`")
    } else if !gateway.assign.is_empty() && !is_pooled {
        Some("the route's `assign` does not contain it; add it there, or give the client's device an address of those")
    } else if gateway.assign.is_empty() && !is_private(address) {
        Some("it is not private, and the route has no `assign`; write an `assign` that contains it")
    } else {
        None
    }
}

/// Private networks (RFC 1918, RFC 6598, RFC 4193).
const PRIVATE: [(IpAddr, u8); 5] = [
    (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 0)), 8),
    (IpAddr::V4(Ipv4Addr::new(172, 16, 0, 0)), 12),
    (IpAddr::V4(Ipv4Addr::new(192, 168, 0, 0)), 16),
    (IpAddr::V4(Ipv4Addr::new(100, 64, 0, 0)), 10),
    (IpAddr::V6(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0)), 7),
];

fn is_private(address: IpAddr) -> bool {
    PRIVATE.iter().any(|(start, length)| IpNet::new(*start, *length).is_ok_and(|net| net.contains(&address)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
