//! Named Data Networking (NDN) formats, as pure functions and small state machines (sans I/O).
//!
//! In: bytes that another crate has read, keys, and the current time. Out: parsed names, packets, certificates and link
//! frames, or bytes for that crate to write. The formats are those of the NDN Packet Format Specification 0.3, the NDN
//! certificate format 2 and NDNLPv2. No code here opens a socket, reads a clock or spawns a task. A parser never panics
//! on any input, and never recurses.

#![forbid(unsafe_code)]

pub mod certificate;
pub mod lp;
pub mod name;
pub mod packet;
pub mod signature;
pub mod tlv;

pub use certificate::Certificate;
pub use lp::LpPacket;
pub use name::{Component, Name};
pub use packet::{Data, DataBuilder, Interest, InterestBuilder, Packet};
pub use signature::{KeyLocator, SignatureInfo, SigningKey, VerifyingKey};
