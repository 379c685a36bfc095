//! Custody: a node answers for an exchange until the next node does.
//!
//! In: requests of routes that ask for it, and what neighbours say of exchanges that they hold. Out: the same requests and
//! responses, byte for byte behind their heads, over paths that never exist from end to end at one instant.
//!
//! `engine` has the exchanges, and is pure; `office` is where workers meet it; `forward` and `channel` are how sessions go
//! in and out; `keeper` has the channels to whom this node dials.

mod again;
mod arrived;
pub(crate) mod channel;
mod contact;
mod engine;
pub(crate) mod forward;
mod half;
mod journal;
pub(crate) mod keeper;
mod link;
mod message;
mod office;
mod pace;
mod store;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests;
mod tunnel;

/// What a reason begins with where nobody knows whether an origin has done what it was asked.
pub(crate) const OUTCOME_UNKNOWN: &str = "outcome unknown";
/// And where it had its time while its node knew why nobody took it.
pub(crate) const NO_CHANNEL: &str = "its time is over, and there was no channel";

pub(crate) use message::CustodyBody;
pub(crate) use office::{Failure, Office};
pub(crate) use tunnel::CustodyStream;
