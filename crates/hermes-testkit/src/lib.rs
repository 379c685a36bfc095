//! The test kit of Hermes for tests and measurements: real origins, real clients, real processes.
//!
//! In: addresses, sizes and counts. Out: running servers, measured exchanges, namespaces and links that end when
//! they are dropped. Peers are never mocked: every origin listens on a socket and every client opens one.
//! Not published; nothing of the product depends on it.

pub mod binary;
pub mod ca;
pub mod control;
pub mod dial;
pub mod dns;
pub mod envoy;
pub mod error;
pub mod flow;
pub mod frames;
pub mod generation_log;
pub mod h2spec;
pub mod h3;
pub mod ip;
pub mod limits;
pub mod link;
pub mod listener_client;
pub mod load;
pub mod multiplex;
pub mod ndnts;
pub mod netns;
pub mod origin;
pub mod overlay;
pub mod poll;
pub mod port;
pub mod process;
pub mod proxy_header;
pub mod python;
pub mod raw_http1;
pub mod relay;
pub mod rina;
pub mod skip;
pub mod sshd;
pub mod tls;
pub mod tool;
pub mod traffic;
pub mod transfer;
pub mod tunnel;
pub mod unstable;
pub mod varint;
pub mod work;

pub use error::{Error, Result};
pub use hermes_pattern as pattern;
