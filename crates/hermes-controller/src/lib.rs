//! The control plane of an overlay: compiles the documents of operators and providers, and serves each node its own.
//!
//! In: overlay documents. Out: their faults, or a document for each node.
//! Never: traffic.
//!
//! The modules form layers, from the bottom: document, catalog, state and compile, rollout, controller, push, api,
//! server.

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
