//! The data plane: listeners, sessions, services, upstreams.
//!
//! In: checked snapshots, and the traffic of applications and nodes. Out: the same traffic, forwarded by the snapshot's
//! routes. Data flows through `listener` -> `request` -> `session` -> `service` -> `upstream` or `stream` and `copy` ->
//! `record`. Programs that embed a node start at [`embed::Embedded`]. Never: reading document files; running as root,
//! except for ports and devices that require it.

pub mod admin;
pub mod assist;
mod body;
mod budget;
mod copy;
mod custody;
mod datagram;
mod early;
pub mod embed;
mod error;
mod filters;
mod generation;
mod guard;
mod h3;
mod headers;
mod ip;
mod listener;
mod live;
mod metrics;
mod names;
mod node;
mod pipe;
mod record;
mod request;
mod reverse;
mod seldom;
mod service;
mod session;
mod shares;
mod signal;
mod stream;
mod upgrade;
mod upstream;
mod worker;

pub use generation::{Certificate, Generation, Unready};
pub use ip::Packet;
pub use live::SessionView;
pub use node::{Bound, Node, NodeView};
