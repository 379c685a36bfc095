//! Which addresses count as one client.

use std::net::{IpAddr, Ipv6Addr};

/// The address that stands for a client where clients share a resource: an IPv4 address, or a /64 of IPv6, since one
/// host has many addresses there.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}
