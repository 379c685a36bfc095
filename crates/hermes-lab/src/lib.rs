//! Links that a lab puts between network namespaces: slow, lossy, out of order, mostly dark.
//!
//! In: namespaces by name, and conditions. Out: frames, or none. For tests, measurements and demos; nothing that carries
//! anybody's traffic depends on it. A crate of its own since both the binary's demos and the test kit stand on it.

mod link;
mod road;
pub mod seldom;
pub mod turns;

pub use link::{Counters, End, Link};
pub use road::{Arrival, Conditions, Dropped, Road, Up};
