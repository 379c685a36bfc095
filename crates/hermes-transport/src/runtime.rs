//! The base of every task of a worker: clock, random numbers, tasks, metrics, the document, and the tables of its
//! sessions and connections.
//!
//! In: sessions that begin and end, bytes that are counted, entries of bounded tables. Out: the context that all layers
//! above use, the access log, the sweep that ends idle sessions. Never: I/O on a connection, or a decision about a
//! request.

pub mod access_log;
mod context;
pub mod fair_shares;
pub mod overload;
pub mod receive_budget;
pub mod sandbox;
pub mod session;
mod shared;
pub mod turns;
pub mod workers;

pub use self::context::{WorkerContext, yield_to_network};
pub use self::shared::Shared;
