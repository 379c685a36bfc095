//! An HTTP cache (RFC 9111): what routes with `cache:` store of their responses.
//!
//! In: the head of a request as it would go to the origin, and the responses that come from there. Out: whether a stored
//! response may be used, its bytes, and who else waits for the same fetch.
//! Never: a socket, a session, or a response for one user to another one. `hermes-proxy` asks the origin.
//!
//! [`lookup`], [`head`], [`key`], [`range`], [`conditional`], [`directives`] and [`content`] are pure. [`store`] holds the
//! responses of a route in memory, [`store::disk`] keeps them over a restart, [`flight`] shares a fetch among clients, and
//! [`registry`] has the cache of each route.

pub mod conditional;
pub mod content;
pub mod directives;
pub mod error;
pub mod flight;
pub mod head;
pub mod key;
pub mod lookup;
pub mod metrics;
pub mod range;
pub mod registry;
pub mod store;
