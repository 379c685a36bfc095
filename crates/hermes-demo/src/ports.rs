//! Unused ports of loopback.
//!
//! In: a count. Out: that many ports, each free for TCP and UDP a moment ago. They lie below the kernel's ephemeral
//! range, so that no outgoing connection takes one before its node listens there.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use anyhow::ensure;
use rand::Rng;

const FIRST: u16 = 20_000;
/// The kernel's own range begins at 32,768.
const LAST: u16 = 32_000;

/// The address on loopback of a port.
pub(crate) fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Chooses ports from a random start, since demos may run side by side.
///
/// # Errors
/// Too few are free.
pub(crate) fn free<const COUNT: usize>() -> anyhow::Result<[u16; COUNT]> {
    let start = rand::rng().random_range(FIRST..LAST);
    let mut candidates = (start..LAST).chain(FIRST..start).filter(|port| is_free(*port));
    let mut chosen = [0; COUNT];
    for port in &mut chosen {
        *port = candidates.next().unwrap_or_default();
    }
    ensure!(!chosen.contains(&0), "127.0.0.1 has fewer than {COUNT} free ports between {FIRST} and {LAST}");
    Ok(chosen)
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(loopback(port)).is_ok() && UdpSocket::bind(loopback(port)).is_ok()
}
