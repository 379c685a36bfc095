//! Adaptive rate limiting towards an upstream: requests that it would refuse wait in a fair queue instead.
//!
//! In: requests and responses, with the time of each. Out: the request to send now, and the time of the next one.
//! Never: a clock, a task, or a lock: the caller has these.
//!
//! The module [`estimator`] finds the rate that a service allows, [`headers`] reads limits from responses
//! (`Retry-After`, `RateLimit`), and [`fair_queue`] orders the requests of many clients.

pub mod estimator;
pub mod fair_queue;
pub mod headers;
#[cfg(test)]
mod simulation;
