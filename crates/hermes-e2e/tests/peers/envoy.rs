//! Envoy 1.40 as a neighbour: before a node, behind a node, and between two, for everything that both speak.
//!
//! In: real clients, real origins, Envoy's own binary. Out: every byte, every trailer, both identities. What cannot be
//! had together is listed in `docs/reference/interoperability.md`, and shown here to be so.

mod between_nodes;
mod config;
mod downstream;
mod http3;
mod identities;
mod lab;
mod streams;
mod upstream;
