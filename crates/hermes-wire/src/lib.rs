//! The wire formats of Hermes, as pure functions and small state machines.
//!
//! In: bytes that some other crate has read. Out: parsed values, or bytes for that crate to
//! write. Nothing here opens a socket, reads a clock, draws a random number or spawns a task,
//! so that every parser can be tested by tables and fuzzed as it stands. A parser never
//! panics, whatever it is given, and never holds more memory than its documentation states.

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
