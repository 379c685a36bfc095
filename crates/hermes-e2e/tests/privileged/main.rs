//! Tests that drive the `hermes` process inside network namespaces. Without root they are skipped.

#![allow(clippy::unwrap_used)]

mod behind_nat;
mod dial_scope;
mod ip;
mod relay_mobility;
mod transparent;
mod worker_endurance;
mod workers;
