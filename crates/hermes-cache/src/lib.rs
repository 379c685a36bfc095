//! An HTTP cache (RFC 9111): it stores responses for routes with `cache:`.
//!
//! In: the head of a request as it would go to the origin, and the responses that come from there. Out: whether a
//! stored response may be used, its bytes, and the clients that wait for the same fetch. Never: a socket, a session, or
//! a response for one user sent to another user. The caller, `hermes-proxy`, sends requests to the origin.
//!
//! A *target* is a URI, in a private cache together with its user. A *variant* is one of its stored responses, selected
//! by the fields of `Vary`. A *run* is a stored range without gaps. A *flight* is a fetch that several clients share.
//!
//! The modules [`lookup`], [`head`], [`key`], [`range`], [`conditional`], [`directives`] and [`content`] are pure.
//! [`store`] has the responses of a route in memory, and [`store::disk`] stores them across restarts. [`flight`] shares
//! a fetch among clients. [`registry`] has the cache of each route.

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
