//! A RINA-like DIF over UDP.
#![allow(dead_code)]

mod auth;
mod config;
mod counters;
mod cubic;
pub mod message;
mod range_set;
mod receiver;
mod rtt;
mod timers;
mod event;
mod flow;
mod neighbour;
mod send_buffer;
mod sender;
