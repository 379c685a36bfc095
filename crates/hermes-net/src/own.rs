//! What this machine gives us: its addresses, where it would send from, and how many descriptors.

pub mod watch;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::ifaddrs::InterfaceAddress;
use nix::net::if_::InterfaceFlags;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

/// Every address of every interface. Empty where the system does not say.
pub fn addresses() -> HashSet<IpAddr> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    interfaces.filter_map(|interface| address_of(&interface)).collect()
}

/// Whether this machine can be spoken to at an address: an interface has it, and is connected to something.
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

/// The address that packets to `remote` leave from now. Nothing is sent.
///
/// # Errors
/// No route leads there.
pub fn source_towards(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr =
        if remote.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let probe = UdpSocket::bind(any)?;
    // As what will be sent: no device of ours captures it.
    crate::mark::apply(SockRef::from(&probe));
    probe.connect(remote)?;
    Ok(probe.local_addr()?.ip())
}

/// What to do where an address cannot be listened on.
pub fn bind_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "Stop whoever uses the address (`ss -lntup` tells who), or choose another",
        io::ErrorKind::PermissionDenied => {
            "Choose a port from 1024 on, run as root, or give the program the capability for the lower ones: \
             `setcap cap_net_bind_service+ep HERMES`, AmbientCapabilities=CAP_NET_BIND_SERVICE in systemd, \
             `--cap-add NET_BIND_SERVICE` for a container"
        }
        io::ErrorKind::AddrNotAvailable => "Choose an address that this machine has (`ip addr` tells them)",
        _ => "Choose another address",
    }
}

/// Of all descriptors this part is for those who come to us and for the node itself, and so many at most: who has us open
/// sockets without end takes nothing from them.
const KEPT: u64 = 8;
const MOST_KEPT: u64 = 1024;

/// That a session may have this socket. It was just opened: the kernel gives the lowest number that is free, which
/// tells how many there are.
///
/// # Errors
/// As where the kernel had no descriptor left (see [`is_lack`]).
pub fn spare(socket: &impl AsRawFd) -> io::Result<()> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    if u64::from(socket.as_raw_fd().unsigned_abs()) < limit - (limit / KEPT).min(MOST_KEPT) {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EMFILE))
}

/// The maximum number of file descriptors of this process.
pub fn descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// Whether it says that there are no descriptors left, of the process or of the machine.
pub fn is_lack(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// True if the text of an error tells of a lack of descriptors or memory, which is transient.
pub fn tells_of_lack(text: &str) -> bool {
    // The standard library writes system errors in this form.
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM].iter().any(|code| text.contains(&format!("(os error {code})")))
}

/// Raises the soft limit of open files towards `wanted`, up to the hard one. Returns what it is now.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    let target = wanted.min(hard).max(soft);
    match setrlimit(Resource::RLIMIT_NOFILE, target, hard) {
        Ok(()) => target,
        Err(_) => soft,
    }
}
