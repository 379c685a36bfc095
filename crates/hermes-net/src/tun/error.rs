//! What may be missing for layer 3, and what to do about it.
//!
//! In: the kernel's refusals. Out: the cause in words, and a remedy. Never: a guess without the kernel's word.

use std::io;

use ipnet::IpNet;

/// Why a device, an address or a route is not to be had. `Display` is the cause; see [`TunError::remedy`].
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// A name that no device can have.
    #[error("{name:?} is no name of a device")]
    Name {
        /// The name.
        name: String,
    },
    /// Somebody has a device of the name.
    #[error("there is a device {name} already, which is not this node's")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The kernel's driver cannot be opened.
    #[error("{driver} cannot be opened: {source}", driver = super::DRIVER)]
    Driver {
        /// Why.
        source: io::Error,
    },
    /// CAP_NET_ADMIN is missing.
    #[error("the privilege {wanted} is missing (CAP_NET_ADMIN)")]
    Privilege {
        /// What it is wanted for.
        wanted: &'static str,
    },
    /// The kernel refuses something else about a device.
    #[error("{doing} the device {device}: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What was tried.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refuses an address.
    #[error("the address {address} of the device {device}: {source}")]
    Address {
        /// The device's name.
        device: String,
        /// The address, and its prefix.
        address: IpNet,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refuses the rules of a capture.
    #[error("the capture of {prefix} by the device {device}: {source}")]
    Capture {
        /// The device's name.
        device: String,
        /// What was to be captured.
        prefix: IpNet,
        /// What the kernel said.
        source: io::Error,
    },
    /// The answers to this node's own packets would be dropped.
    #[error("with {prefix} captured the kernel would drop what {interface} receives for this node (rp_filter is 1)")]
    ReversePath {
        /// Where answers come from.
        interface: String,
        /// What was to be captured.
        prefix: IpNet,
    },
    /// nft cannot be run.
    #[error("nft, which source NAT needs, cannot be run: {source}")]
    NoNft {
        /// Why.
        source: io::Error,
    },
    /// nft refuses.
    #[error("nft refuses the source NAT of the device {device}: {reason}")]
    Nft {
        /// The device's name.
        device: String,
        /// What it said.
        reason: String,
    },
    /// Somebody has a table of the name that a device's has.
    #[error("there is a table inet {table} already, which is not this program's")]
    TableTaken {
        /// Its name.
        table: String,
    },
    /// The kernel does not forward packets, and cannot be told to.
    #[error("{setting}, which a gateway needs, cannot be switched on: {source}")]
    Forwarding {
        /// The setting.
        setting: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel refuses a route.
    #[error("the route {prefix} into the device {device}: {source}")]
    Route {
        /// The device's name.
        device: String,
        /// Where it leads.
        prefix: IpNet,
        /// What the kernel said.
        source: io::Error,
    },
}

/// For whatever the kernel keeps for the privileged.
const GIVE_PRIVILEGE: &str = "Run as root, or give the program the capability: `setcap cap_net_admin+ep HERMES`, \
     AmbientCapabilities=CAP_NET_ADMIN in systemd, `--cap-add NET_ADMIN` for a container";

impl TunError {
    /// What whoever runs the node can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Name { .. } => "Choose one of up to 15 letters, digits, `-`, `_` and `.`",
            Self::NameTaken { .. } => "Choose another name, or remove that device (`ip link del NAME`)",
            Self::Driver { source } if source.kind() == io::ErrorKind::PermissionDenied => {
                "Let the node's user open it (it is usually for everyone: mode 0666)"
            }
            Self::Driver { .. } => {
                "Load the kernel's module (`modprobe tun`), or give a container `--device /dev/net/tun`"
            }
            Self::Privilege { .. } => GIVE_PRIVILEGE,
            Self::ReversePath { .. } => {
                "Have it checked loosely: `sysctl net.ipv4.conf.INTERFACE.rp_filter=2`, for good in /etc/sysctl.d"
            }
            Self::NoNft { source } if source.kind() == io::ErrorKind::TimedOut => {
                "See what changes tables all the time (`nft monitor`), or has not ended (`ps -C nft,iptables`), and reload"
            }
            Self::NoNft { .. } => "Install nftables (the package `nftables`), or use a terminator that needs no NAT",
            Self::Nft { .. } => "See that the kernel has nftables with NAT, and that the node has CAP_NET_ADMIN",
            Self::TableTaken { .. } => {
                "Choose another name for the device, or remove that table (`nft delete table inet NAME`)"
            }
            Self::Forwarding { .. } => {
                "Set it outside of the container, or let the node write to /proc/sys (root, not read-only)"
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
        (Some(libc::ENETDOWN), _) => "Somebody has taken the device's link down: `ip link set NAME up`",
        (Some(libc::EINVAL), TunError::Route { .. }) => "Its source must be one of the device's own addresses",
        _ => "See what the kernel says (`dmesg`), and whether a container forbids it",
    }
}
