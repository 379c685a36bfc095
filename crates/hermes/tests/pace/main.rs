//! Rate limits of services, kept by a real node for real clients: `pace`.

#![allow(clippy::unwrap_used)]

mod clients;
mod lab;
mod refusals;
