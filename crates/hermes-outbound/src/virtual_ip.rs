//! Virtual addresses of names ("fake IP"): the answers of a DNS listener, and the reverse lookup.
//!
//! In: names of the overlay, from DNS queries. Out: an address of a reserved prefix for each name, which stays the same
//! while it is used, and the name of an address, for sessions to that address. The preferred slot of a name is a keyed
//! hash of the name, with a secret of the node. So a name has the same address after a restart, unless another name
//! occupies its slot. An attacker cannot compute a name that receives the address of another name.
//!
//! The number of names is bounded: the least recently used one is evicted. Three kinds of names are never evicted:
//! names queried within the grace period, names of live sessions (which own the `Arc` from `name_of`), and names that
//! the document lists. A released address is assigned to another name as late as possible, because programs may cache
//! it beyond its TTL. All workers share one table. Its lock is taken only for lookups of such names and addresses.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hermes_model::snapshot::VirtualIpPools;
use hermes_net::keyed_hash::KeyedHash;

/// The TTL of a DNS answer, in seconds.
pub const TTL: u32 = 10;
/// The time for which a name retains its address after the last use, in milliseconds: twice the TTL, so that a client
/// can still connect after the TTL has expired.
pub const GRACE: u64 = 2 * TTL as u64 * 1000;
/// The number of references to a name from within the table.
const OWN: usize = 2;
/// The maximum number of slots of a prefix.
const MAX_SLOTS: u32 = 1 << 24;
/// The maximum number of released slots that are not assigned to other names yet.
const MAX_RELEASED_SLOTS: usize = 1 << 16;

/// The virtual addresses of one name; `None` for an IP version without a reserved prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
}

/// The virtual addresses of the reserved prefixes, and the names to which they are assigned.
#[derive(Debug)]
pub struct VirtualIpPool {
    reserved: VirtualIpPools,
    /// The number of slots. Slots are numbered from 1, because the first address of an IPv4 network is no host address.
    indexes: u32,
    keyed: KeyedHash,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// The slot number of each name.
    by_name: HashMap<Arc<str>, u32>,
    /// The assigned slots, by number.
    by_place: HashMap<u32, Slot>,
    /// The slot numbers in the order of their last use, the oldest first.
    by_use: BTreeMap<u64, u32>,
    /// The number of uses, which gives the next key of `by_use`.
    uses: u64,
    /// The names that the document lists. They are never evicted, and do not count towards the limit.
    fixed: HashSet<Arc<str>>,
    /// Released slots, with their previous names.
    resting: HashMap<u32, Arc<str>>,
    /// Released slots in the order of their release.
    let_go: VecDeque<u32>,
}

#[derive(Debug)]
struct Slot {
    name: Arc<str>,
    /// The key in `by_use`.
    turn: u64,
    /// The time of the last use, in milliseconds of the node's clock.
    used_at: u64,
}

impl VirtualIpPool {
    pub fn new(reserved: VirtualIpPools, keyed: KeyedHash) -> Self {
        let hosts = |bits: u8| 1u32.checked_shl(bits.into()).map_or(MAX_SLOTS, |all| (all - 2).min(MAX_SLOTS));
        let v4 = reserved.v4.map_or(MAX_SLOTS, |net| hosts(32 - net.prefix_len()));
        let v6 = reserved.v6.map_or(MAX_SLOTS, |net| hosts(128 - net.prefix_len()));
        Self { reserved, indexes: v4.min(v6), keyed, table: Mutex::default() }
    }

    pub fn reserved(&self) -> &VirtualIpPools {
        &self.reserved
    }

    /// Sets the names that the document lists, and assigns slots to them. If no slot is free, a name receives one at
    /// its first query, like any other name.
    pub fn fix(&self, names: HashSet<Arc<str>>) {
        let mut sorted: Vec<_> = names.iter().cloned().collect();
        sorted.sort_unstable();
        let mut table = self.lock();
        table.fixed = names;
        for name in sorted {
            if !table.by_name.contains_key(&*name) && table.by_place.len() < self.indexes as usize {
                let index = table.free_place(&name, self.first_place(&name), self.indexes);
                table.insert(index, &name);
                table.touch(index, 0);
            }
        }
    }

    /// Returns the virtual addresses of a name in canonical spelling, and assigns them if necessary. `most` is the
    /// maximum number of names, not counting those that the document lists. Returns `None` if that many names are in
    /// use. `now` is in milliseconds of the node's clock.
    pub fn addresses_of(&self, name: &str, most: usize, now: u64) -> Option<Addresses> {
        let mut table = self.lock();
        let index = match table.by_name.get(name) {
            Some(index) => *index,
            None => {
                let most = (most + table.fixed.len()).min(self.indexes as usize);
                table.make_room(most, self.indexes, now)?;
                let index = table.free_place(name, self.first_place(name), self.indexes);
                table.insert(index, name);
                index
            }
        };
        table.touch(index, now);
        Some(self.addresses(index))
    }

    /// Returns the name to which a virtual address is assigned, or `None`. As long as a clone of the returned `Arc`
    /// exists, the address stays assigned. `now` is in milliseconds of the node's clock.
    pub fn name_of(&self, address: IpAddr, now: u64) -> Option<Arc<str>> {
        let index = self.index(address)?;
        let mut table = self.lock();
        let name = table.by_place.get(&index)?.name.clone();
        table.touch(index, now);
        Some(name)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // After a panic while the lock was held, the table is still usable: at most one entry is inconsistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the preferred slot of a name.
    fn first_place(&self, name: &str) -> u32 {
        1 + (self.keyed.hash(name) % u64::from(self.indexes)) as u32
    }

    fn addresses(&self, index: u32) -> Addresses {
        Addresses {
            v4: self.reserved.v4.map(|net| Ipv4Addr::from(u32::from(net.network()) + index)),
            v6: self.reserved.v6.map(|net| Ipv6Addr::from(u128::from(net.network()) + u128::from(index))),
        }
    }

    fn index(&self, address: IpAddr) -> Option<u32> {
        if !self.reserved.contains(address) {
            return None;
        }
        match address.to_canonical() {
            IpAddr::V4(v4) => self.reserved.v4.map(|net| u32::from(v4) - u32::from(net.network())),
            IpAddr::V6(v6) => {
                self.reserved.v6.and_then(|net| (u128::from(v6) - u128::from(net.network())).try_into().ok())
            }
        }
    }
}

impl Table {
    /// Evicts the least recently used name if the table has `most` names. Returns `None` if all of them are in use.
    fn make_room(&mut self, most: usize, indexes: u32, now: u64) -> Option<()> {
        // A name in use becomes the most recently used one, so that each name is checked once.
        for _ in 0..=self.by_place.len() {
            if self.by_place.len() < most {
                return Some(());
            }
            let (_, index) = self.by_use.pop_first()?;
            let slot = self.by_place.get(&index)?;
            let turn = slot.turn;
            if self.fixed.contains(&slot.name) {
                self.touch(index, now);
                continue;
            }
            if slot.used_at + GRACE > now {
                // All other names were used later, so they are within the grace period too.
                self.by_use.insert(turn, index);
                return None;
            }
            if Arc::strong_count(&slot.name) > OWN {
                self.touch(index, now);
            } else if let Some(slot) = self.by_place.remove(&index) {
                self.by_name.remove(&slot.name);
                self.rest(index, slot.name, (indexes as usize).saturating_sub(most) / 2);
            }
        }
        None
    }

    /// Reserves a released slot for its previous name until `most` further slots were released. Meanwhile, enough other
    /// slots are free.
    fn rest(&mut self, index: u32, name: Arc<str>, most: usize) {
        self.resting.insert(index, name);
        self.let_go.push_back(index);
        while self.let_go.len() > most.min(MAX_RELEASED_SLOTS)
            && let Some(first) = self.let_go.pop_front()
        {
            self.resting.remove(&first);
        }
    }

    /// Returns the number of the first slot, searched from `from` on, that is free and not reserved for another name.
    /// If all free slots are reserved, returns the one that was released first. The caller ensures that a slot is free.
    fn free_place(&mut self, name: &str, from: u32, indexes: u32) -> u32 {
        let mut index = from;
        for _ in 0..indexes {
            let is_others = self.resting.get(&index).is_some_and(|before| **before != *name);
            if !self.by_place.contains_key(&index) && !is_others {
                self.wake(index);
                return index;
            }
            index = index % indexes + 1;
        }
        self.let_go.front().copied().inspect(|first| self.wake(*first)).unwrap_or(from)
    }

    /// Removes a slot from the released ones, because it is assigned again.
    fn wake(&mut self, index: u32) {
        if self.resting.remove(&index).is_some() {
            self.let_go.retain(|other| *other != index);
        }
    }

    fn insert(&mut self, index: u32, name: &str) {
        let name: Arc<str> = Arc::from(name);
        self.by_name.insert(name.clone(), index);
        self.by_place.insert(index, Slot { name, turn: u64::MAX, used_at: 0 });
    }

    fn touch(&mut self, index: u32, now: u64) {
        let Some(slot) = self.by_place.get_mut(&index) else { return };
        self.by_use.remove(&slot.turn);
        self.uses += 1;
        (slot.turn, slot.used_at) = (self.uses, now);
        self.by_use.insert(self.uses, index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(v4: &str, v6: Option<&str>) -> VirtualIpPool {
        let reserved = VirtualIpPools { v4: v4.parse().ok(), v6: v6.and_then(|text| text.parse().ok()) };
        VirtualIpPool::new(reserved, KeyedHash::from_secret(b"of the node", "names"))
    }

    fn v4(table: &VirtualIpPool, name: &str, now: u64) -> Option<IpAddr> {
        table.addresses_of(name, 1000, now)?.v4.map(IpAddr::from)
    }

    #[test]
    fn a_name_has_one_address_of_each_prefix_and_back() {
        let table = table("198.18.0.0/16", Some("fd00::/64"));
        for number in 0..500 {
            let name = format!("host-{number}.corp");
            let found = table.addresses_of(&name, 1000, 0);
            assert_eq!(table.addresses_of(&name, 1000, 0), found);
            let Some(Addresses { v4: Some(v4), v6: Some(v6) }) = found else { panic!("{found:?}") };
            assert!(!["198.18.0.0", "198.18.255.255"].contains(&&*v4.to_string()));
            for address in [v4.into(), v6.into(), v4.to_ipv6_mapped().into()] {
                assert_eq!(table.name_of(address, 0).as_deref(), Some(&*name));
            }
        }
        for stranger in ["198.18.0.0", "198.19.0.1", "fd00::", "fd00::ffff:0:0:1", "::1"] {
            assert_eq!(table.name_of(stranger.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 0), None);
        }
    }

    #[test]
    fn a_name_has_the_same_address_after_a_restart() {
        let (before, after) = (table("198.18.0.0/16", None), table("198.18.0.0/16", None));
        assert!(v4(&after, "other", 0).is_some());
        assert_eq!(v4(&before, "video", 0), v4(&after, "video", 0));
    }

    #[test]
    fn the_least_recently_used_goes_and_never_one_in_use() {
        // The prefix has two slots, because its first and last address are no host addresses.
        let table = table("198.18.0.0/30", None);
        let (first, second) = (v4(&table, "first", 0), v4(&table, "second", 1));
        assert!(first.is_some() && second.is_some() && first != second);
        assert_eq!(v4(&table, "third", GRACE - 1), None, "both may be kept by somebody's cache");
        let held = table.name_of(first.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 2);
        assert_eq!(v4(&table, "third", 10 * GRACE), second, "`second` was used before");
        assert_eq!(v4(&table, "fourth", 20 * GRACE), second, "`first` is held");
        assert_eq!(v4(&table, "first", 20 * GRACE), first);
        drop(held);
        assert!(v4(&table, "fifth", 40 * GRACE).is_some() && v4(&table, "sixth", 40 * GRACE).is_some());
        assert_eq!(v4(&table, "first", 40 * GRACE), None);
    }

    #[test]
    fn no_more_names_than_allowed() {
        let table = table("198.18.0.0/16", None);
        let given = (0..100).filter(|number| table.addresses_of(&number.to_string(), 10, 0).is_some()).count();
        assert_eq!(given, 10);
    }

    #[test]
    fn another_node_s_places_are_others() {
        let reserved = VirtualIpPools { v4: "198.18.0.0/16".parse().ok(), v6: None };
        let index =
            |secret: &[u8]| VirtualIpPool::new(reserved, KeyedHash::from_secret(secret, "names")).first_place("video");
        assert_eq!(index(b"one"), index(b"one"));
        assert_ne!(index(b"one"), index(b"other"));
    }

    #[test]
    fn what_the_document_spells_out_is_let_go_for_nobody() {
        let table = table("198.18.0.0/24", None);
        table.fix(["video", "db"].map(Arc::from).into());
        let before = v4(&table, "video", 0);
        let limit = |name: &str, now| table.addresses_of(name, 10, now);
        for number in 0..500u64 {
            assert!(limit(&format!("{number}.corp"), number * GRACE).is_some());
        }
        assert_eq!((v4(&table, "video", 500 * GRACE), table.lock().by_place.len()), (before, 12));
        // Once the document no longer lists the name, it is evicted like any other.
        table.fix(HashSet::new());
        for number in 600..700u64 {
            assert!(limit(&format!("{number}.corp"), number * GRACE).is_some());
        }
        assert!(!table.lock().by_name.contains_key("video"));
    }

    #[test]
    fn an_address_that_was_given_up_is_another_name_s_last_and_its_own_again_before() {
        let table = table("198.18.0.0/24", None);
        let of = |name: &str, now| table.addresses_of(name, 10, now).and_then(|found| found.v4);
        let bank = of("bank.corp", 0);
        for number in 1..=100u64 {
            assert_ne!(of(&format!("{number}.corp"), number * GRACE), bank);
        }
        assert!(!table.lock().by_name.contains_key("bank.corp"));
        assert_eq!(of("bank.corp", 200 * GRACE), bank);
        for number in 300..1000u64 {
            of(&format!("{number}.corp"), number * GRACE);
        }
        let table = table.lock();
        let rests = (table.resting.len(), table.let_go.len());
        assert_eq!(rests, (122, 122), "(254 - 10) / 2");
    }
}
