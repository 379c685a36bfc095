//! Downloads that resume where they broke off (RFC 9110, sections 13 and 14; RFC 9530).
//!
//! In: heads of responses. Out: whether a response is the rest of the representation that broke off, which fields ask for
//! that rest, its digests, and how long to wait before the next try.
//! Never: a request or a clock. `hermes-proxy` resumes for clients that cannot, `hermes fetch` for its user.

pub mod backoff;
pub mod digest;
pub mod response;
pub mod resume;
