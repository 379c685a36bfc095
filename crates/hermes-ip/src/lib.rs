//! IP sessions (CONNECT-IP, RFC 9484), without a device or a socket.
//!
//! In: packets, and the addresses that sessions ask for. Out: which session a packet belongs to, whether it may pass, and
//! which addresses a session holds.
//! Never: I/O. `hermes-proxy` reads and writes the devices and the tunnels.
//!
//! [`leases`] assigns addresses to owners, [`claims`] holds what sessions of a device claim, [`table`] finds the session
//! of a packet, [`packet_filter`] judges packets, [`mailbox`] queues them for a session. [`address_translation`] is 1:1 NAT
//! (RFC 3022), [`flow_translation`] turns packets of TCP and UDP flows into packets for local sockets.

pub mod address_translation;
pub mod claims;
pub mod flow_translation;
pub mod leases;
pub mod mailbox;
pub mod owner;
pub mod packet_filter;
pub mod table;
