//! Tests that drive the `hermes` process over real sockets. Some also need root or a program of `make setup`.

#![allow(clippy::unwrap_used)]

mod admin;
mod architecture;
mod bytes;
mod cache;
mod cli;
mod content_race;
mod control;
mod dns;
mod docs;
mod drain;
mod fast_upstream;
mod fetch;
mod h3;
mod hostile;
mod http;
mod identity;
mod messages;
mod ndn;
mod ndn_content;
mod ndn_gateway;
mod ndn_reliability;
mod node_log;
mod overload;
mod pinning;
mod quic;
mod rate_limit;
mod relay;
mod relay_connect;
mod relay_cut_through;
mod relay_keys;
mod relay_pages;
mod relay_peers;
mod relay_tree;
mod reload;
mod rina;
mod socks;
mod takeover;
mod udp;
mod urgent;
