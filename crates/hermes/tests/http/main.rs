//! HTTP as its RFCs have it, through real nodes: tunnels, exchanges, upgrades, names, retries, balancing, timeouts.
//!
//! In: clients and origins that show every byte. Out: what each side saw. Nothing here waits for a time to pass,
//! except to see that something does *not* come.
#![allow(clippy::unwrap_used)]

mod balancing;
mod bound;
mod early;
mod exchanges;
mod expect;
mod faults;
mod forward_proxy;
mod headers;
mod https_origins;
mod interim;
mod lab;
mod loops;
mod max_forwards;
mod names;
mod network;
mod parent_proxy;
mod pools;
mod retries;
mod timeouts;
mod trailers;
mod tunnels;
mod upgrades;
mod websocket_origins;
