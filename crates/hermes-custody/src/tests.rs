//! Tests of engines in computed time, without a socket: one engine with two neighbours (`alone`, `room`, `restart`),
//! chains of engines (`chain`), and chains whose nodes are killed (`killed`).
//!
//! In: the limits of an account, or the number of a node or an exchange. Out: the engine, name or bytes that all tests
//! derive from them.

mod alone;
mod chain;
mod killed;
mod restart;
mod room;

use std::sync::Arc;

use bytes::Bytes;
use hermes_wire::custody::ExchangeId;

use super::engine::{Durability, Engine, Limits};

const LIMITS: Limits = Limits { exchanges: 1000, memory: 1 << 30, disk: 0, survives: Durability::Nothing };

fn account() -> Arc<str> {
    Arc::from("all")
}

fn name(node: usize) -> Arc<str> {
    Arc::from(format!("n{node}"))
}

fn engine(limits: Limits) -> Engine {
    let mut engine = Engine::new();
    engine.allow(&account(), limits);
    engine
}

/// The byte at this offset of an exchange's content.
fn byte_at(id: ExchangeId, at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ id.0[0]
}

fn content(id: ExchangeId, length: usize) -> Bytes {
    (0..length).map(|at| byte_at(id, at)).collect()
}
