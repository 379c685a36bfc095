//! The data plane: listeners, sessions, services, upstreams.
//!
//! In: checked snapshots, and the traffic of applications and nodes. Out: the same traffic, forwarded by the snapshot's
//! routes. Data flows through `listener` -> `request` -> `session` -> `service` -> `upstream` or `stream` and `copy` ->
//! `record`. Programs that embed a node start at [`embed::Embedded`]. Never: reading document files; running as root,
//! except for ports and devices that require it.

pub mod admin;
pub mod assist;
mod body;
mod body_writer;
mod custody;
mod datagram;
mod dial_guard;
mod early;
pub mod embed;
mod error;
mod filters;
mod generation;
mod h3;
mod headers;
mod ip;
mod listener;
mod log_throttle;
mod metrics;
mod node;
mod oneshot;
mod outbound;
mod rate_limit;
mod request;
mod reverse;
mod runtime;
mod service;
mod session;
mod stream;
mod stream_error;
mod token_bucket;
mod tunnel_copy;
mod upgrade;
mod upstream;
mod virtual_ip;
mod worker;

pub use generation::{Certificate, Generation, Unready};
pub use ip::Packet;
pub use node::{Bound, Node, NodeView};
pub use runtime::session::SessionView;
