//! Properties of this host: its addresses, the source address of a route, and the limit of file descriptors.

pub mod cores;
pub mod usage;
pub mod watch;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::ifaddrs::InterfaceAddress;
use nix::net::if_::InterfaceFlags;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

/// Returns the addresses of all interfaces, or an empty set if the system call fails.
pub fn addresses() -> HashSet<IpAddr> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    interfaces.filter_map(|interface| address_of(&interface)).collect()
}

/// Whether an interface that is up and running has this address.
pub fn is_at(address: IpAddr) -> bool {
    let connected = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let mut interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    interfaces.any(|interface| interface.flags.contains(connected) && address_of(&interface) == Some(address))
}

fn address_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let address = interface.address.as_ref()?;
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(IpAddr::V4(v4.ip()));
    }
    address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()))
}

/// Returns the source address that the kernel selects for packets to `remote`. Sends no packet.
///
/// # Errors
/// The host has no route to `remote`.
pub fn source_towards(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr =
        if remote.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let probe = UdpSocket::bind(any)?;
    // Packets of the later connection carry the mark, so the kernel must select the route of marked packets here, too.
    crate::socket_mark::apply(SockRef::from(&probe));
    probe.connect(remote)?;
    Ok(probe.local_addr()?.ip())
}

/// Returns the advice for an operator whose address cannot be bound.
pub fn bind_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "Stop the process that uses the address (`ss -lntup` shows it), or choose another",
        io::ErrorKind::PermissionDenied => {
            "Choose a port from 1024 on, run as root, or give the program the capability for lower ports: \
             `setcap cap_net_bind_service+ep HERMES`, AmbientCapabilities=CAP_NET_BIND_SERVICE in systemd, \
             `--cap-add NET_BIND_SERVICE` for a container"
        }
        io::ErrorKind::AddrNotAvailable => "Choose an address that this machine has (`ip addr` lists them)",
        _ => "Choose another address",
    }
}

/// The divisor that yields the number of reserved file descriptors, limited by [`MAX_RESERVED`]. They are reserved for
/// incoming connections and for the node itself, so that a client that makes the node open sockets cannot use up all.
const RESERVED_SHARE: u64 = 8;
const MAX_RESERVED: u64 = 1024;

/// Checks that this new socket does not use a reserved descriptor, so that a session may keep it. The kernel assigns
/// the lowest free number, so the number shows how many descriptors are in use.
///
/// # Errors
/// `EMFILE`, as if the process had no descriptor left (see [`is_lack`]).
pub fn spare(socket: &impl AsRawFd) -> io::Result<()> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    if u64::from(socket.as_raw_fd().unsigned_abs()) < limit - (limit / RESERVED_SHARE).min(MAX_RESERVED) {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EMFILE))
}

/// Returns the maximum number of file descriptors of this process.
pub fn descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// Whether the process or the system has no file descriptor left.
pub fn is_lack(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Whether the text of an error reports a lack of file descriptors or memory, which is transient.
pub fn tells_of_lack(text: &str) -> bool {
    // The standard library writes system errors in this form.
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM].iter().any(|code| text.contains(&format!("(os error {code})")))
}

/// Raises the soft limit of open files towards `wanted`, up to the hard limit. Returns the soft limit that applies now,
/// or 0 if the kernel does not report the limits.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    let target = wanted.min(hard).max(soft);
    match setrlimit(Resource::RLIMIT_NOFILE, target, hard) {
        Ok(()) => target,
        Err(_) => soft,
    }
}
