//! Custody: a node stores an exchange and is responsible for it until the next node has acknowledged it.
//!
//! In: requests and responses that sessions store, and the records that neighbours send about exchanges. Out: bytes for
//! the sessions that wait for them, records for neighbours, and a journal that survives a restart.
//! Never: a socket, or a decision where an exchange goes; `hermes-proxy` has the channels between neighbours.
//!
//! An *exchange* is a request and its response. A *neighbour* is an adjacent node, and a *channel* is the connection
//! that carries its records. An *account* is a storage quota, usually that of a route. Bytes are *durable* once they
//! survive the failures that the route names. An *order* is an exchange whose request its origin must not receive
//! twice.
//!
//! The module `engine` contains the exchanges and is pure. `service` is the handle that all workers share.
//! `store` writes the journal. `send_window` limits the bytes in flight on a channel. `contact_plan` predicts when
//! a link is up again. `channel_wait` decides what the log has of a neighbour without a channel.

pub mod channel_wait;
pub mod contact_plan;
mod engine;
mod journal_record;
mod send_window;
pub mod service;
mod store;
mod stream_state;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;

pub use engine::BY;
pub use journal_record::Intent;
pub use stream_state::Progress;

/// The prefix of a failure's reason if it is unknown whether the origin has processed the request.
pub const OUTCOME_UNKNOWN: &str = "outcome unknown";
/// The prefix of a failure's reason if the deadline passed while the node had no channel to the next node.
pub const NO_CHANNEL: &str = "custody deadline exceeded; no channel was open";
