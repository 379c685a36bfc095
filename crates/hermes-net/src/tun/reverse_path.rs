//! Whether the kernel would drop what returns to our own sockets (`rp_filter`).
//!
//! In: what is to be captured. Out: an error where the answers to marked packets would be dropped: the kernel, asked
//! strictly, wants an answer from where an unmarked packet would go, which is the device. Never: a changed setting.

use std::collections::HashSet;
use std::fs;

use ipnet::IpNet;

use super::TunError;

/// Captures up to this length are meant for the whole Internet, and so for where our own peers are.
const HALF_OF_ALL: u8 = 1;
const STRICT: u32 = 1;

/// Would the kernel drop the answers to this process's own packets, once `device` captures a prefix? (IPv6 has no such
/// setting.)
///
/// # Errors
/// `TunError::ReversePath`, with the interface.
pub fn check(device: &str, prefix: IpNet) -> Result<(), TunError> {
    if prefix.addr().is_ipv6() || prefix.prefix_len() > HALF_OF_ALL {
        return Ok(());
    }
    match interfaces().into_iter().find(|interface| interface != device && is_strict(interface)) {
        Some(interface) => Err(TunError::ReversePath { interface, prefix }),
        None => Ok(()),
    }
}

/// Those with an address of IPv4 over which an answer may come.
fn interfaces() -> HashSet<String> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return HashSet::new() };
    let has_v4 = |address: &nix::sys::socket::SockaddrStorage| address.as_sockaddr_in().is_some();
    all.filter(|one| one.address.as_ref().is_some_and(has_v4))
        .filter(|one| !one.flags.contains(nix::net::if_::InterfaceFlags::IFF_LOOPBACK))
        .map(|one| one.interface_name)
        .collect()
}

/// The higher of both settings counts, and loose (2) is higher than strict.
fn is_strict(interface: &str) -> bool {
    let setting = |of: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).unwrap_or_default();
        text.trim().parse::<u32>().unwrap_or_default()
    };
    setting("all").max(setting(interface)) == STRICT
}
