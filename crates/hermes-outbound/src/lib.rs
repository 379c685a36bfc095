//! The sending side of the data plane: upstreams, connection pools, exchanges, and reverse connections.
//!
//! In: a request or a tunnel for an upstream, an origin or a node. Out: its response on a pooled connection. Layers, each
//! above the ones before it: `reverse` (nodes that dial in), `upstream` (endpoints with their health and load),
//! `generation` (a document made ready to run), `outbound` (the connections of one worker). Never: the choice of a
//! route, or a listener. Only the crates of the data plane use it, and it promises nothing to others.

#![allow(missing_docs)] // Fields and variants whose name says all.

pub mod generation;
pub mod outbound;
pub mod reverse;
pub mod upstream;
pub mod virtual_ip;
