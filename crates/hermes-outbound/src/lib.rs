//! The sending side of the data plane: upstreams, connection pools, exchanges, and reverse connections.
//!
//! In: a request or a tunnel for an upstream, an origin or a node. Out: its response on a pooled connection. Layers,
//! from the lowest: `reverse` (nodes that dial in), `upstream` (endpoints with their health and load), `generation` (a
//! snapshot made ready to run), `outbound` (the connections of one worker).
//! `rate_limit` has the rates that services allow. Never: the choice of a route, or a
//! listener. The API is internal: it changes with the needs of the other crates of the data plane.

#![allow(missing_docs)] // Some fields and variants need no more description than their name.

pub mod generation;
pub mod outbound;
pub mod rate_limit;
pub mod reverse;
pub mod upstream;
pub mod virtual_ip;
