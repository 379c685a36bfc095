//! The state that all streams of one HTTP/3 connection (RFC 9114) share, at the client and at the server.
//!
//! In: a QUIC connection. Out: its control streams, the peer's settings, GOAWAY in both directions, HTTP datagrams, and
//! field sections, decoded and encoded. Never: a request; `listener::h3` and the pool handle those.

pub mod connection;
pub mod datagrams;
pub mod fields;
mod inbox;

pub use self::connection::{Link, Windows};
pub use self::datagrams::{Datagrams, SendOutcome};
pub use self::inbox::Inbox;
