//! Errors of TUN devices, and the remedy for each.
//!
//! In: errors of the kernel. Out: the cause as text, and a remedy. Never: a guess beyond the kernel's error.

use std::io;

use ipnet::IpNet;

/// The reason why a device, an address or a route is not available. `Display` is the cause; see [`TunError::remedy`].
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The name is not valid for a device.
    #[error("{name:?} is not a valid device name")]
    Name {
        /// The name.
        name: String,
    },
    /// Another device has the name.
    #[error("device {name} already exists and is not this node's")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The kernel's driver cannot be opened.
    #[error("cannot open {driver}: {source}", driver = super::DRIVER)]
    Driver {
        /// The cause.
        source: io::Error,
    },
    /// CAP_NET_ADMIN is missing.
    #[error("missing the privilege {wanted} (CAP_NET_ADMIN)")]
    Privilege {
        /// The operation that needs it.
        wanted: &'static str,
    },
    /// The kernel refuses an operation on a device that no other variant covers.
    #[error("cannot {doing} the device {device}: {source}")]
    Device {
        /// The name of the device.
        device: String,
        /// The operation.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refuses an address.
    #[error("cannot change address {address} of the device {device}: {source}")]
    Address {
        /// The name of the device.
        device: String,
        /// The address and its prefix.
        address: IpNet,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refuses the rules of a capture.
    #[error("cannot capture {prefix} with the device {device}: {source}")]
    Capture {
        /// The name of the device.
        device: String,
        /// The prefix to capture.
        prefix: IpNet,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel would drop the answers to this node's own packets.
    #[error("with {prefix} captured, the kernel would drop answers that {interface} receives (rp_filter is 1)")]
    ReversePath {
        /// The interface on which answers arrive.
        interface: String,
        /// The prefix to capture.
        prefix: IpNet,
    },
    /// The program nft cannot be run.
    #[error("cannot run nft, which source NAT needs: {source}")]
    NoNft {
        /// The cause.
        source: io::Error,
    },
    /// nft reports an error.
    #[error("nft rejects the source NAT of the device {device}: {reason}")]
    Nft {
        /// The name of the device.
        device: String,
        /// The error that nft printed.
        reason: String,
    },
    /// Another program's table has the name that the device's table needs.
    #[error("table inet {table} already exists and is not this program's")]
    TableTaken {
        /// The name of the table.
        table: String,
    },
    /// The kernel does not forward packets, and this process cannot change that.
    #[error("cannot switch on {setting}, which a gateway needs: {source}")]
    Forwarding {
        /// The name of the sysctl.
        setting: String,
        /// The cause.
        source: io::Error,
    },
    /// The kernel refuses a route.
    #[error("cannot change route {prefix} of the device {device}: {source}")]
    Route {
        /// The name of the device.
        device: String,
        /// The destination of the route.
        prefix: IpNet,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The remedy for operations that the kernel reserves for privileged processes.
const GIVE_PRIVILEGE: &str = "Run as root, or give the program the capability: `setcap cap_net_admin+ep HERMES`, \
     AmbientCapabilities=CAP_NET_ADMIN in systemd, `--cap-add NET_ADMIN` for a container";

impl TunError {
    /// Returns the remedy, for the operator of the node.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Name { .. } => "Choose a name of up to 15 letters, digits, `-`, `_` and `.`",
            Self::NameTaken { .. } => "Choose another name, or remove that device (`ip link del NAME`)",
            Self::Driver { source } if source.kind() == io::ErrorKind::PermissionDenied => {
                "Let the node's user open it (usually its mode is 0666)"
            }
            Self::Driver { .. } => {
                "Load the kernel's module (`modprobe tun`), or give a container `--device /dev/net/tun`"
            }
            Self::Privilege { .. } => GIVE_PRIVILEGE,
            Self::ReversePath { .. } => {
                "Use loose mode: `sysctl net.ipv4.conf.INTERFACE.rp_filter=2`; to keep it, set it in /etc/sysctl.d"
            }
            Self::NoNft { source } if source.kind() == io::ErrorKind::TimedOut => {
                "Find the program that keeps changing tables (`nft monitor`) or hangs (`ps -C nft,iptables`), and reload"
            }
            Self::NoNft { .. } => "Install nftables (the package `nftables`), or use a terminator that needs no NAT",
            Self::Nft { .. } => "Check that the kernel supports nftables with NAT, and that the node has CAP_NET_ADMIN",
            Self::TableTaken { .. } => {
                "Choose another name for the device, or remove that table (`nft delete table inet NAME`)"
            }
            Self::Forwarding { .. } => {
                "Set it outside the container, or let the node write to /proc/sys (root, not read-only)"
            }
            Self::Device { source, .. }
            | Self::Address { source, .. }
            | Self::Route { source, .. }
            | Self::Capture { source, .. } => of_kernel(source, self),
        }
    }
}

fn of_kernel(source: &io::Error, error: &TunError) -> &'static str {
    match (source.raw_os_error(), error) {
        (Some(libc::EPERM), _) => GIVE_PRIVILEGE,
        (Some(libc::EACCES | libc::EOPNOTSUPP | libc::EAFNOSUPPORT), TunError::Address { address, .. })
            if address.addr().is_ipv6() =>
        {
            "Switch IPv6 on (`sysctl net.ipv6.conf.default.disable_ipv6=0`), or leave its addresses out"
        }
        (Some(libc::EEXIST), TunError::Route { .. }) => {
            "Another route leads to the same prefix (`ip route`): remove it, or choose another prefix"
        }
        (Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT), TunError::Capture { .. }) => {
            "The kernel needs policy routing (CONFIG_IP_MULTIPLE_TABLES, CONFIG_IPV6_MULTIPLE_TABLES)"
        }
        (Some(libc::ENETDOWN), _) => "The device's link is down: `ip link set NAME up`",
        (Some(libc::EINVAL), TunError::Route { .. }) => "The source must be one of the device's own addresses",
        _ => "Check the kernel log (`dmesg`), and whether a container forbids the operation",
    }
}
