//! The base of every task of a worker: clock, random numbers, tasks, metrics, the document, and the tables of its
//! sessions and connections.
//!
//! In: sessions that begin and end, bytes that are counted, entries of bounded tables. Out: the context that all layers
//! above pass around, the access log, the sweep of idle sessions. Never: a byte on the wire, or a decision about a
//! request.

pub mod access_log;
mod context;
pub mod fair_shares;
pub mod receive_budget;
pub mod session;
mod shared;

pub use self::context::{WorkerContext, yield_to_network};
pub use self::shared::Shared;
