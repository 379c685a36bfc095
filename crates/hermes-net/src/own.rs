//! What this machine gives us: its addresses, and how many descriptors.

pub mod watch;

use std::collections::HashSet;
use std::net::IpAddr;

/// Every address of every interface. Empty where the system does not say.
pub fn addresses() -> HashSet<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else {
        return HashSet::new();
    };
    interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            if let Some(v4) = address.as_sockaddr_in() {
                return Some(IpAddr::V4(v4.ip()));
            }
            address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()))
        })
        .collect()
}

/// Raises the soft limit of open files towards `wanted`, up to the hard one. Returns what it is now.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    let target = wanted.min(hard).max(soft);
    match setrlimit(Resource::RLIMIT_NOFILE, target, hard) {
        Ok(()) => target,
        Err(_) => soft,
    }
}
