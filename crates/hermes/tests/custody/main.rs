//! Custody, hop by hop, over links that are never all up at one instant.
#![allow(clippy::unwrap_used)]

mod clients;
mod hard;
mod kills;
mod turns;

use hermes_testkit::{
    link::Conditions,
    unstable::{Between, Chain},
};

/// A chain of nodes of this build.
async fn chain(links: usize, protocol: &'static str, conditions: impl Fn(usize) -> Conditions) -> Chain {
    Chain::start(env!("CARGO_BIN_EXE_hermes").as_ref(), links, Between::custody(protocol), conditions).await.unwrap()
}
