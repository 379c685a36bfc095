//! Transport of bytes in the data plane: the context of a worker's tasks, bodies, streams, and datagrams.
//!
//! In: sockets, and streams of HTTP/2 and HTTP/3. Out: the same bytes in both directions, under flow control and within
//! the limits of the node document. Layers, from the lowest: `error`, `headers`, `metrics`; `runtime` (clock, tasks,
//! sessions, tables); `h3` and `stream`; `body` and `datagram`. Never: the choice of a route or an endpoint. The API is
//! internal: it changes with the needs of the other crates of the data plane.

#![allow(missing_docs)] // Some fields and variants need no more description than their name.

pub mod body;
pub mod body_writer;
pub mod datagram;
pub mod dial_guard;
pub mod early_payload;
pub mod error;
pub mod h3;
pub mod headers;
pub mod lingering_close;
pub mod log_throttle;
pub mod max_forwards;
pub mod metrics;
pub mod oneshot;
pub mod pinned;
pub mod runtime;
pub mod stream;
pub mod stream_error;
pub mod token_bucket;
pub mod tunnel_copy;
