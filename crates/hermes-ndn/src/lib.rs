//! Named Data Networking (NDN) without I/O.
//!
//! In: bytes of packets. Out: names, Interests, Data, signatures that verify, and frames of the link protocol. Sources:
//! the NDN packet format 0.3, NDNLPv2, and the naming conventions of revision 3. Never: a socket, or a clock.

pub mod content_store;
mod data_store;
pub mod fetch;
pub mod forwarder;
pub mod framing;
pub mod lp;
pub mod name;
mod nonce;
pub mod packet;
pub mod publish;
mod rtt;
pub mod signature;
pub mod tlv;
pub mod trust;

pub use name::{Component, Name};
pub use packet::{Data, Interest, Packet};
pub use tlv::NdnError;

/// The longest frame in bytes on a stream: a packet with the fields of NDNLPv2.
pub const MAX_FRAME: usize = MAX_PACKET + 256;
/// The longest packet in bytes that forwarders accept (`NDN_MAX_PACKET_SIZE` of ndn-cxx).
pub const MAX_PACKET: usize = 8800;
