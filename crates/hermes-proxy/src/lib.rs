//! The data plane: listeners, sessions, services, upstreams.
//!
//! In: checked snapshots and the traffic of applications and nodes. Out: the same traffic, where
//! the snapshot's routes send it. The way of the data is `listener` -> `request` -> `session` ->
//! `service` -> `upstream` or `stream` and `copy` -> `record`.
//! Programs that want a node within themselves begin at [`embed::Embedded`].
//! Never: reads files of documents, or runs as root for anything but ports and devices that ask for it.

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
