//! Emulated links between network namespaces: slow, lossy, reordering, with outages.
//!
//! In: names of namespaces, and link conditions. Out: frames, delayed or dropped. For tests, measurements and demos; no
//! production traffic depends on it. A separate crate, because both the binary's demos and the test kit use it.

mod link;
mod netem;
pub mod random_outages;
pub mod turns;

pub use link::{Counters, End, Link};
pub use netem::{Arrival, Conditions, Dropped, LinkEmulator, Up};
