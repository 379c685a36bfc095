//! Tests that drive controller processes and also compute in this process what must come of it.
//!
//! All other process tests are in the package `hermes-e2e`, which does not depend on this crate.

#![allow(clippy::unwrap_used)]

mod random;
mod slow;
