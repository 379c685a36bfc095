//! A routing table: values by prefix, with longest-prefix match.
//!
//! In: prefixes. Out: the value for an address. A lookup costs one hash for each prefix length in the table.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;

/// Values by prefix.
#[derive(Debug)]
pub struct Table<T> {
    entries: HashMap<IpNet, T>,
    /// Number of entries of each prefix length, the longest first, for IPv4 and for IPv6.
    lengths: [Vec<(u8, usize)>; 2],
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { entries: HashMap::new(), lengths: Default::default() }
    }
}

impl<T> Table<T> {
    /// Returns the value of exactly this prefix.
    pub fn get(&self, prefix: IpNet) -> Option<&T> {
        self.entries.get(&prefix)
    }

    /// All entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&IpNet, &T)> {
        self.entries.iter()
    }

    /// Mutable access to the value of exactly this prefix.
    pub fn get_mut(&mut self, prefix: IpNet) -> Option<&mut T> {
        self.entries.get_mut(&prefix)
    }

    /// Returns the value of a prefix. Inserts the default value if the prefix is missing.
    pub fn get_or_default(&mut self, prefix: IpNet) -> &mut T
    where
        T: Default,
    {
        if !self.entries.contains_key(&prefix) {
            self.insert(prefix, T::default());
        }
        self.entries.entry(prefix).or_default()
    }

    /// Inserts a value. Returns the previous one.
    pub fn insert(&mut self, prefix: IpNet, value: T) -> Option<T> {
        let before = self.entries.insert(prefix, value);
        if before.is_none() {
            let lengths = &mut self.lengths[family(prefix.addr())];
            match lengths.iter_mut().find(|(length, _)| *length == prefix.prefix_len()) {
                Some((_, count)) => *count += 1,
                None => {
                    lengths.push((prefix.prefix_len(), 1));
                    lengths.sort_unstable_by(|one, other| other.cmp(one));
                }
            }
        }
        before
    }

    /// Removes the value of exactly this prefix.
    pub fn remove(&mut self, prefix: IpNet) -> Option<T> {
        let value = self.entries.remove(&prefix)?;
        let lengths = &mut self.lengths[family(prefix.addr())];
        if let Some(at) = lengths.iter().position(|(length, _)| *length == prefix.prefix_len()) {
            lengths[at].1 -= 1;
            if lengths[at].1 == 0 {
                lengths.remove(at);
            }
        }
        Some(value)
    }

    /// Returns the values of all prefixes that overlap this one.
    pub fn overlapping(&self, prefix: IpNet) -> impl Iterator<Item = &T> {
        let around =
            self.lengths[family(prefix.addr())].iter().filter(move |(length, _)| *length <= prefix.prefix_len());
        let around = around.filter_map(move |(length, _)| IpNet::new(prefix.addr(), *length).ok());
        let is_whole = prefix.prefix_len() == prefix.max_prefix_len();
        // A single address contains no other prefix, which spares a scan of all entries.
        let within = (!is_whole).then_some(&self.entries).into_iter().flatten();
        let within = within.filter(move |(other, _)| prefix.contains(*other) && **other != prefix);
        around.filter_map(|net| self.entries.get(&net.trunc())).chain(within.map(|(_, value)| value))
    }

    /// Returns the widest prefix that contains this address.
    pub fn around(&self, address: IpAddr) -> Option<IpNet> {
        self.lengths[family(address)].iter().rev().find_map(|(length, _)| {
            let prefix = IpNet::new(address, *length).ok()?.trunc();
            self.entries.contains_key(&prefix).then_some(prefix)
        })
    }

    /// Returns the value of the longest prefix that contains this address.
    pub fn find(&self, address: IpAddr) -> Option<&T> {
        self.lengths[family(address)].iter().find_map(|(length, _)| {
            let prefix = IpNet::new(address, *length).ok()?.trunc();
            self.entries.get(&prefix)
        })
    }
}

fn family(address: IpAddr) -> usize {
    usize::from(address.is_ipv6())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_counts_and_what_is_gone_does_not() {
        let mut table = Table::default();
        for prefix in ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "2001:db8::/32"] {
            assert!(table.insert(prefix.parse().unwrap(), prefix).is_none());
        }
        let find = |table: &Table<&'static str>, address: &str| table.find(address.parse().unwrap()).copied();
        assert_eq!(find(&table, "10.1.2.3"), Some("10.1.2.3/32"));
        assert_eq!(find(&table, "10.1.2.4"), Some("10.1.0.0/16"));
        assert_eq!(find(&table, "10.2.0.1"), Some("10.0.0.0/8"));
        assert_eq!(find(&table, "192.0.2.1"), Some("0.0.0.0/0"));
        assert_eq!(find(&table, "2001:db8::1"), Some("2001:db8::/32"));
        assert_eq!(find(&table, "2001:db9::1"), None);
        let around = |address: &str| table.around(address.parse().unwrap()).map(|prefix| prefix.to_string());
        assert_eq!(around("10.1.2.3").as_deref(), Some("0.0.0.0/0"));
        assert_eq!((around("2001:db8::1").as_deref(), around("2001:db9::1")), (Some("2001:db8::/32"), None));
        let overlapping = |prefix: &str| {
            let mut found: Vec<_> = table.overlapping(prefix.parse().unwrap()).copied().collect();
            found.sort_unstable();
            found
        };
        assert_eq!(overlapping("10.1.0.0/16"), ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32"]);
        assert_eq!(overlapping("10.1.2.0/24"), ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32"]);
        assert_eq!(overlapping("10.1.2.4/32"), ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16"]);
        assert_eq!(overlapping("2001:db8:1::/48"), ["2001:db8::/32"]);
        assert_eq!(overlapping("2001:db9::/32"), Vec::<&str>::new());
        assert_eq!(table.remove("10.1.2.3/32".parse().unwrap()), Some("10.1.2.3/32"));
        assert_eq!(find(&table, "10.1.2.3"), Some("10.1.0.0/16"));
        assert_eq!(table.insert("10.1.0.0/16".parse().unwrap(), "again"), Some("10.1.0.0/16"));
        assert_eq!(find(&table, "10.1.2.3"), Some("again"));
    }
}
