//! Checks whether the kernel's reverse path filter (`rp_filter`) would drop answers to our own sockets.
//!
//! In: a prefix to capture. Out: an error if answers to marked packets would be dropped. In strict mode, the kernel
//! expects an answer on the interface by which an unmarked packet would leave, and that is the capturing device. Never:
//! a changed setting.

use std::collections::HashSet;
use std::fs;

use ipnet::IpNet;

use super::TunError;

/// Captures of prefixes up to this length cover the public Internet, and so the addresses of our own peers.
const HALF_OF_ALL: u8 = 1;
const STRICT: u32 = 1;

/// Checks whether the kernel would drop the answers to this process's own packets, once `device` captures a prefix.
/// (IPv6 has no such setting.)
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

/// Interfaces with an IPv4 address, on which an answer may arrive.
fn interfaces() -> HashSet<String> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return HashSet::new() };
    let has_v4 = |address: &nix::sys::socket::SockaddrStorage| address.as_sockaddr_in().is_some();
    all.filter(|one| one.address.as_ref().is_some_and(has_v4))
        .filter(|one| !one.flags.contains(nix::net::if_::InterfaceFlags::IFF_LOOPBACK))
        .map(|one| one.interface_name)
        .collect()
}

/// Whether strict mode applies. The kernel uses the higher of both settings, and loose (2) is higher than strict (1).
fn is_strict(interface: &str) -> bool {
    let setting = |of: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).unwrap_or_default();
        text.trim().parse::<u32>().unwrap_or_default()
    };
    setting("all").max(setting(interface)) == STRICT
}
