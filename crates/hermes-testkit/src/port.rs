//! Addresses for programs that must know their port before they listen.
//!
//! In: an address of this host. Out: a port on it that is free over TCP and UDP, and that no other test gets. Never: a
//! port of the kernel's range for outgoing connections, where another test's socket may appear at any time.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// The ports that tests use: below 20000, where those of the guides and of `hermes demo` begin, which other tests run at
/// the same time. Linux assigns ports from 32768 on by itself.
const FIRST_PORT: u32 = 12_000;
const PORT_COUNT: u32 = 8_000;

/// A socket for each port of this process. Its name is an entry that all processes of the machine see.
static RESERVATIONS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// Reserves a port for the rest of this process.
///
/// # Panics
/// All ports are in use.
pub fn reserve(host: impl ToString) -> SocketAddr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let host: IpAddr = host.to_string().parse().expect("an IP address");
    for _ in 0..PORT_COUNT {
        // Processes begin at different ports, so that few reservations fail.
        let number = std::process::id().wrapping_mul(7919).wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(FIRST_PORT + number % PORT_COUNT).expect("below 65536");
        let name = UnixAddress::from_abstract_name(format!("hermes-test-port-{port}")).expect("short");
        let Ok(reservation) = UnixListener::bind_addr(&name) else { continue };
        // A listener on all addresses of the host is in the way as well.
        let everywhere: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        let is_free = |host| TcpListener::bind((host, port)).is_ok() && UdpSocket::bind((host, port)).is_ok();
        if is_free(host) && is_free(everywhere) {
            RESERVATIONS.lock().expect("no test panics here").push(reservation);
            return SocketAddr::new(host, port);
        }
    }
    panic!("no free port of {host} between {FIRST_PORT} and {}", FIRST_PORT + PORT_COUNT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_used() {
        let addresses: Vec<_> = (0..50).map(|_| reserve("127.0.0.1")).collect();
        let distinct: std::collections::BTreeSet<_> = addresses.iter().collect();
        assert_eq!(distinct.len(), 50);
        let listeners: Vec<_> = addresses.iter().map(|address| TcpListener::bind(address).expect("free")).collect();
        assert!(!addresses.contains(&reserve("127.0.0.1")));
        drop(listeners);
    }
}
