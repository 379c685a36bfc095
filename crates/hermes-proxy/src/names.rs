//! Addresses that stand for names: what a DNS listener answers, and the way back.
//!
//! In: names of the overlay, from whoever asks DNS for them. Out: an address of a reserved prefix for
//! each, the same for as long as it is used; and the name of an address, for sessions to it. A name's
//! place follows from the name, so that it has the same address after a restart, where no other
//! name has it by then. Bounded: the least recently used go first, but never one that was asked for a
//! moment ago or that a live session is for: whoever holds the name that `name_of` gave holds its place.
//! Of the whole node: the lock is held for a look into a table, by those alone who use such addresses.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hermes_model::snapshot::Reserved;

/// Seconds that an answer may be kept.
pub(crate) const TTL: u32 = 10;
/// A name keeps its address for so long after it was used last (milliseconds): an answer's time, and
/// as much again for whoever asked and has not begun yet.
pub(crate) const GRACE: u64 = 2 * TTL as u64 * 1000;
/// References that the table itself has to a name.
const OWN: usize = 2;
/// No more places than this are used of a prefix.
const MOST_PLACES: u32 = 1 << 24;

/// The addresses of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) v4: Option<Ipv4Addr>,
    pub(crate) v6: Option<Ipv6Addr>,
}

/// The names of a reserved prefix.
#[derive(Debug)]
pub(crate) struct NameTable {
    reserved: Reserved,
    /// Places are 1 to this: the first and the last address of an IPv4 network are not a host's.
    places: u32,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<Arc<str>, u32>,
    by_place: HashMap<u32, Slot>,
    /// Places by their last use, oldest first.
    by_use: BTreeMap<u64, u32>,
    uses: u64,
}

#[derive(Debug)]
struct Slot {
    name: Arc<str>,
    /// Its key in `by_use`.
    turn: u64,
    used_at: u64,
}

impl NameTable {
    pub(crate) fn new(reserved: Reserved) -> Self {
        let hosts = |bits: u8| 1u32.checked_shl(bits.into()).map_or(MOST_PLACES, |all| (all - 2).min(MOST_PLACES));
        let v4 = reserved.v4.map_or(MOST_PLACES, |net| hosts(32 - net.prefix_len()));
        let v6 = reserved.v6.map_or(MOST_PLACES, |net| hosts(128 - net.prefix_len()));
        Self { reserved, places: v4.min(v6), table: Mutex::default() }
    }

    pub(crate) fn reserved(&self) -> &Reserved {
        &self.reserved
    }

    /// The addresses of a name, which is in its one spelling. `None` where all of `most` places are taken
    /// by names that are in use.
    pub(crate) fn addresses_of(&self, name: &str, most: usize, now: u64) -> Option<Addresses> {
        let mut table = self.lock();
        let place = match table.by_name.get(name) {
            Some(place) => *place,
            None => {
                table.make_room(most.min(self.places as usize), now)?;
                let place = table.free_place(first_place(name, self.places), self.places);
                table.insert(place, name);
                place
            }
        };
        table.touch(place, now);
        Some(self.addresses(place))
    }

    /// The name that an address stands for. Holding it keeps it there.
    pub(crate) fn name_of(&self, address: IpAddr, now: u64) -> Option<Arc<str>> {
        let place = self.place(address)?;
        let mut table = self.lock();
        let name = table.by_place.get(&place)?.name.clone();
        table.touch(place, now);
        Some(name)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Whoever panicked with it left a table that is whole at each step but the last.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn addresses(&self, place: u32) -> Addresses {
        Addresses {
            v4: self.reserved.v4.map(|net| Ipv4Addr::from(u32::from(net.network()) + place)),
            v6: self.reserved.v6.map(|net| Ipv6Addr::from(u128::from(net.network()) + u128::from(place))),
        }
    }

    fn place(&self, address: IpAddr) -> Option<u32> {
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

/// Where a name is looked for first: FNV-1a, the same in every process.
fn first_place(name: &str, places: u32) -> u32 {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    // The upper half depends on all bytes.
    1 + ((hash >> 32) % u64::from(places)) as u32
}

impl Table {
    /// Lets the name go that was used least recently, where there are as many as there may be.
    fn make_room(&mut self, most: usize, now: u64) -> Option<()> {
        // Those that are in use move to the end, so that each is looked at once a round.
        for _ in 0..=self.by_place.len() {
            if self.by_place.len() < most {
                return Some(());
            }
            let (_, place) = self.by_use.pop_first()?;
            let slot = self.by_place.get(&place)?;
            let turn = slot.turn;
            if slot.used_at + GRACE > now {
                // All others were used later.
                self.by_use.insert(turn, place);
                return None;
            }
            if Arc::strong_count(&slot.name) > OWN {
                self.touch(place, now);
            } else if let Some(slot) = self.by_place.remove(&place) {
                self.by_name.remove(&slot.name);
            }
        }
        None
    }

    /// The next place from this one on that nobody has. There is one.
    fn free_place(&self, from: u32, places: u32) -> u32 {
        let mut place = from;
        while self.by_place.contains_key(&place) {
            place = place % places + 1;
        }
        place
    }

    fn insert(&mut self, place: u32, name: &str) {
        let name: Arc<str> = Arc::from(name);
        self.by_name.insert(name.clone(), place);
        self.by_place.insert(place, Slot { name, turn: u64::MAX, used_at: 0 });
    }

    fn touch(&mut self, place: u32, now: u64) {
        let Some(slot) = self.by_place.get_mut(&place) else { return };
        self.by_use.remove(&slot.turn);
        self.uses += 1;
        (slot.turn, slot.used_at) = (self.uses, now);
        self.by_use.insert(self.uses, place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(v4: &str, v6: Option<&str>) -> NameTable {
        NameTable::new(Reserved { v4: v4.parse().ok(), v6: v6.and_then(|text| text.parse().ok()) })
    }

    fn v4(table: &NameTable, name: &str, now: u64) -> Option<IpAddr> {
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
        // Two places, since the other two are no host's.
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
}
