//! HTTP as its RFCs have it, through real nodes: tunnels, exchanges, upgrades, names, retries, balancing, timeouts.
//!
//! In: clients and origins that show every byte. Out: what each side saw. Nothing here waits for a time to pass,
//! except to see that something does *not* come.

mod balancing;
mod client_address;
mod connection_auth;
mod early_responses;
mod early_tunnel_data;
mod exchanges;
mod expect;
mod faults;
mod forward_proxy;
mod half_close;
mod headers;
mod https_origins;
mod interim;
mod ip_families;
mod lab;
mod lookalike_headers;
mod loops;
mod max_forwards;
mod odd_clients;
mod overlay_names;
mod parent_proxy;
mod pools;
mod retries;
mod schemes;
mod targets;
mod timeouts;
mod trailers;
mod tunnels;
mod upgrades;
mod websocket_origins;
