//! IP from device to device: what a machine sends into a tunnel comes out of another one, whatever carries it.
//!
//! In: namespaces in a row, each with a node, joined by links of an MTU of 1,500 bytes; real programs at both ends
//! (ping, iperf3, the resolver of the C library), or clients written here by hand. Out: what the programs say, and
//! what the nodes count. Needs root; says so loudly where it is not.

mod assist;
mod captures;
mod carried;
mod crossing;
mod far;
mod flows;
mod gateways;
mod interop;
mod line;
mod moves;
mod mtu;
mod names;
mod passing;
mod pings;
mod restored;
mod rights;
mod rules;
mod successors;
mod takeover;
mod told;
mod traffic;
mod transcripts;
