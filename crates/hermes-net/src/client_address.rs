//! Maps a client's address to the key under which per-client limits count it.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the key of a client for shared limits: an IPv4 address itself, or the /64 prefix of an IPv6 address, because
/// one host may use any address of its /64.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}
