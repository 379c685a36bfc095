//! Emulated links between network namespaces: slow, lossy, reordering, with outages.
//!
//! In: names of namespaces, and link conditions. Out: frames, delayed or dropped. For tests, measurements and demos; no
//! production traffic depends on it. A separate crate, because both the binary's demos and the test kit use it.

mod link;
mod road;
pub mod seldom;
pub mod turns;

pub use link::{Counters, End, Link};
pub use road::{Arrival, Conditions, Dropped, Road, Up};
