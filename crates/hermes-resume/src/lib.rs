//! Downloads that resume where they broke off (RFC 9110, sections 13 and 14; RFC 9530).
//!
//! In: heads of responses. Out: whether a response continues the interrupted representation, the fields that request
//! the rest, its digests, and the wait before the next attempt. Never: a request or a clock. The proxy resumes for
//! clients that cannot (`hermes-proxy`), and `hermes fetch` for its user.

pub mod backoff;
pub mod digest;
pub mod response;
pub mod resume;
