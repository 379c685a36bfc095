//! The state of one HTTP/3 connection (RFC 9114), as client or server, that its streams share.
//!
//! In: a QUIC connection. Out: its control streams, the peer's settings, GOAWAY in both directions, HTTP datagrams, and
//! field sections, decoded and encoded. Never: a request; `listener::h3` and the pool handle those.

pub(crate) mod datagrams;
pub(crate) mod fields;
mod inbox;
pub(crate) mod link;

pub(crate) use self::datagrams::{Datagrams, Given};
pub(crate) use self::inbox::Inbox;
pub(crate) use self::link::{Link, Windows};
