//! Transport of bytes in the data plane: the context of a worker's tasks, bodies, streams, and datagrams.
//!
//! In: sockets, and streams of HTTP/2 and HTTP/3. Out: the same bytes in both directions, under flow control and within
//! the bounds of the document. Layers, each above the ones before it: `error`, `headers`, `metrics`; `runtime` (clock,
//! tasks, sessions, tables); `h3` and `stream`; `body` and `datagram`. Never: the choice of a route or an endpoint.
//! Only the crates of the data plane use it: its items follow their needs, and promise nothing to others.

#![allow(missing_docs)] // Fields and variants whose name says all.

pub mod body;
pub mod body_writer;
pub mod datagram;
pub mod dial_guard;
pub mod early_payload;
pub mod error;
pub mod h3;
pub mod headers;
pub mod log_throttle;
pub mod metrics;
pub mod oneshot;
pub mod runtime;
pub mod stream;
pub mod stream_error;
pub mod token_bucket;
pub mod tunnel_copy;
