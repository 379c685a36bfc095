//! Engines in time that is computed, without a socket: one with two neighbours (`alone`, `room`,
//! `restart`), and chains of them (`chain`), of whose nodes some are killed (`killed`).
//!
//! In: what an account may hold, or the number of a node or an exchange. Out: the engine, name and bytes that both have
//! for it.

mod alone;
mod chain;
mod killed;
mod restart;
mod room;

use std::sync::Arc;

use bytes::Bytes;
use hermes_wire::custody::ExchangeId;

use super::engine::{Engine, Limits, Survives};

const LIMITS: Limits = Limits { exchanges: 1000, memory: 1 << 30, disk: 0, survives: Survives::Nothing };

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

/// The byte at this place of what is said in this exchange.
fn byte_at(id: ExchangeId, at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ id.0[0]
}

fn content(id: ExchangeId, length: usize) -> Bytes {
    (0..length).map(|at| byte_at(id, at)).collect()
}
