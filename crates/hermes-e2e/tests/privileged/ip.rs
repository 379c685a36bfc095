//! IP from device to device: what a machine sends into a tunnel comes out of another one, whatever carries it.
//!
//! In: namespaces in a row, each with a node, joined by links of an MTU of 1,500 bytes; real programs at both ends
//! (ping, iperf3, the resolver of the C library), or clients written here by hand. Out: what the programs say, and
//! what the nodes count. Needs root; says so loudly where it is not.

mod address_replay;
mod allowed_targets;
mod captures;
mod detached_device;
mod device_repair;
mod flows;
mod gateways;
mod interop;
mod ip_listener;
mod migration;
mod mtu;
mod names;
mod node_chain;
mod packet_filter;
mod pings;
mod scripted_gateway;
mod session_handover;
mod shared_destination;
mod takeover;
mod traffic;
mod transcripts;
mod unknown_capsules;
