//! IP sessions (CONNECT-IP, RFC 9484), without a device or a socket.
//!
//! In: packets, and the addresses that sessions request. Out: the session of a packet, whether the packet passes, and
//! the addresses that a session has. Never: I/O. The proxy (`hermes-proxy`) reads and writes devices and tunnels.
//!
//! The module [`leases`] assigns addresses to owners, [`claims`] records the prefixes that sessions of a device claim,
//! and [`table`] finds the session of a packet. [`packet_filter`] accepts or drops packets, and [`mailbox`] queues them
//! for a session. [`address_translation`] is 1:1 NAT (RFC 3022), and [`flow_translation`] turns packets of TCP and UDP
//! flows into packets for local sockets.

pub mod address_owner;
pub mod address_translation;
pub mod claims;
pub mod flow_translation;
pub mod leases;
pub mod mailbox;
pub mod packet_filter;
pub mod table;
