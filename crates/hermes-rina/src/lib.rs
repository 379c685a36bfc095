//! A RINA-like DIF over UDP, without I/O: two or more nodes ("IPC processes") allocate flows by application name.
//!
//! In: datagrams, commands of the application, time as a duration since any fixed moment. Out: datagrams, events,
//! bytes. Never: a socket, a clock, entropy or a task of its own. The engine is [`Dif`].
//!
//! The protocol interoperates only with itself. It has the structure of RINA: enrolment and flow allocation by CDAP-like
//! management PDUs, and data transfer by EFCP, which consists of DTP (data) and DTCP (acknowledgements and credit). It
//! uses neither the encodings nor the object model of other implementations. The module [`message`] documents the PDUs.
//!
//! Management PDUs are authenticated with a key that the members of the DIF share. Data PDUs are neither encrypted nor
//! authenticated: random CEP-ids and sequence numbers protect them from senders that cannot read the path. A path that
//! others can read needs IPsec, or TLS inside the flow.
//!
//! ```
//! use std::time::Duration;
//! use bytes::{Bytes, BytesMut};
//! use hermes_rina::{Config, Dif, Event, FlowRequest};
//!
//! let peer = "192.0.2.1:4000".parse()?;
//! let mut dif = Dif::new(Config::new("backbone"), &[7; 32])?;
//! let now = Duration::ZERO;
//! let request = FlowRequest::to("web", "10.0.0.1:40000>10.0.1.2:80");
//! let flow = dif.allocate(now, peer, request)?;
//! dif.write(now, flow, &mut Bytes::from_static(b"sent when the peer accepts"))?;
//! // The loop of the caller: send, wait for a datagram or for `next_timeout`, process it, handle events.
//! let mut out = BytesMut::new();
//! while let Some(transmit) = dif.poll_transmit(now, &mut out, 64) {
//!     assert_eq!((transmit.peer, transmit.len), (peer, out.len()));
//!     out.clear();
//! }
//! assert!(dif.poll_event().is_none() && dif.next_timeout().is_some());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod auth;
mod config;
mod counters;
mod cubic;
mod dif;
mod event;
mod flow;
pub mod message;
mod neighbour;
mod range_set;
mod receiver;
mod rtt;
mod send_buffer;
mod sender;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;
mod timers;

pub use config::{Config, ConfigError, Limits, MAX_FLOWS, MAX_MTU, MIN_MTU, Timing};
pub use counters::Counters;
pub use dif::Dif;
pub use event::{Event, FlowError, FlowId, FlowRequest, PathState, Read, Transmit, Usage};
pub use message::{AppName, Qos, Reason};
