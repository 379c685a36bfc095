//! The control plane of an overlay: what its operator writes, and what each node gets of it.
//!
//! In: overlay documents. Out: every problem that they have, or a document for each node.
//! Never: traffic.

pub mod api;
pub mod audit;
pub mod ca;
pub mod catalog;
pub mod client;
pub mod compile;
pub mod control;
pub mod controller;
pub mod digest;
pub mod document;
mod grpc;
mod metrics;
pub mod node_status;
pub mod push;
pub mod rollout;
pub mod server;
pub mod state;
pub mod store;
pub mod token;
pub mod trust;
