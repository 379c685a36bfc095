//! Custody, hop by hop, over links that are never all up at one instant.
#![allow(clippy::unwrap_used)]

mod kills;
mod lab;
mod turns;
