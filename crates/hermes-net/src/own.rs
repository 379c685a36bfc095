//! Which addresses are this machine's own.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Every address of every interface. Empty where the system does not say.
pub fn addresses() -> HashSet<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else {
        return HashSet::new();
    };
    interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            if let Some(v4) = address.as_sockaddr_in() {
                return Some(IpAddr::V4(Ipv4Addr::from(v4.ip())));
            }
            address.as_sockaddr_in6().map(|v6| IpAddr::V6(Ipv6Addr::from(v6.ip())))
        })
        .collect()
}
