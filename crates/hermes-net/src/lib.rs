//! The operating system interface of Hermes: sockets, TLS, QUIC, TUN devices, name resolution, and the handover of
//! sockets to another process.
//!
//! In: addresses, files, file descriptors. Out: listening and connected sockets, TLS configurations, verified
//! identities. Never: HTTP, routes, or a policy decision.

pub mod allocator;
pub mod backoff;
pub mod client_address;
pub mod dial;
pub mod directory;
pub mod dispatch;
pub mod fd_passing;
pub mod file;
pub mod host;
pub mod io;
pub mod keyed_hash;
pub mod lock;
mod netlink;
pub mod nfqueue;
mod nftables;
pub mod outage;
pub mod privilege;
pub mod quic;
pub mod resolve;
pub mod reuseport;
pub mod socket_mark;
pub mod splice;
pub mod tcp;
pub mod tls;
pub mod transparent;
pub mod tun;
pub mod udp;
pub mod unix;

pub use io::Io;
