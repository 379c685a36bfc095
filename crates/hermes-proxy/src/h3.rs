//! HTTP/3 of one connection, of either side (RFC 9114): what its streams share.
//!
//! In: a QUIC connection. Out: its control streams, the peer's settings, GOAWAY in both directions,
//! HTTP Datagrams, and field sections read and written. Never: a request; those are `listener::h3`'s and the pool's.

pub(crate) mod datagrams;
pub(crate) mod fields;
pub(crate) mod link;

pub(crate) use self::datagrams::{Datagrams, Given};
pub(crate) use self::link::{Link, Windows};
