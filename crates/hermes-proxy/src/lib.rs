//! The data plane: listeners, sessions, services, upstreams.
//!
//! In: checked snapshots, and the traffic of applications and nodes. Out: the same traffic, forwarded by the snapshot's
//! routes. Data flows through `listener` -> `request` -> `session` -> `service` -> `upstream` or `stream` and `copy` ->
//! `record`. Programs that embed a node start at [`embed::Embedded`]. Never: reading document files; running as root,
//! except for ports and devices that require it.

pub mod admin;
mod custody;
pub mod detached_device;
pub mod embed;
mod filters;
mod ip;
mod listener;
mod node;
mod request;
mod service;
mod session;
mod upgrade;
mod worker;

pub use hermes_outbound::generation::{BuildError, Certificate, Generation};
pub use hermes_transport::runtime::session::SessionView;
pub use ip::Packet;
pub use node::{Bound, BoundAddress, Node, NodeView};
