//! A RINA-like DIF over UDP.
#![allow(dead_code)]

mod auth;
mod cubic;
pub mod message;
mod range_set;
mod rtt;
mod send_buffer;
