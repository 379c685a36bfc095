//! Adaptive rate limiting towards an upstream: requests that it would refuse wait in a fair queue instead.
//!
//! In: requests and responses, with the time of each. Out: which request may go now, and when the next one may.
//! Never: a clock, a task, or a lock: the caller has these.
//!
//! [`estimator`] finds the rate that a service allows, [`headers`] reads what responses say of it (`Retry-After`,
//! `RateLimit`), [`fair_queue`] orders the requests of many clients.

pub mod estimator;
pub mod fair_queue;
pub mod headers;
#[cfg(test)]
mod simulation;
