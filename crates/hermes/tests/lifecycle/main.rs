//! The life of nodes: installed, placed somewhere, drained, and taken away.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "other tests have it whole")]
#[path = "../control/bed.rs"]
mod bed;
mod drain;
mod install;
mod kubernetes;
mod place;
