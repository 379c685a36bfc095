//! Wire formats of Hermes, as pure functions and small state machines (sans I/O).
//!
//! In: bytes that another crate has read. Out: parsed values, or bytes for that crate to write. No code here opens a
//! socket, reads a clock, draws a random number or spawns a task, so every parser can be tested by tables and fuzzed. A
//! parser never panics on any input, and never uses more memory than its documentation states.

#![forbid(unsafe_code)]

pub mod binary_http;
pub mod capsule;
pub mod connect_ip;
pub mod connect_udp;
pub mod custody;
pub mod dns;
pub mod h3;
pub mod ip;
pub mod proxy_protocol;
pub mod request_target;
pub mod socks5;
pub mod traceparent;
pub mod varint;
