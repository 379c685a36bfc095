//! Custody: a node answers for an exchange until the next node does.
//!
//! In: requests of routes that ask for it, and what neighbours say of exchanges that they hold. Out: the same requests and
//! responses, byte for byte, over paths that never exist from end to end at one instant.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod chain;
pub(crate) mod engine;
mod half;
mod pace;
