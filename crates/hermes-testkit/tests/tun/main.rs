//! Tests of TUN devices in namespaces: packets, captures and their end.
#![allow(clippy::unwrap_used)]

mod captures;
mod devices;
mod gateways;
mod lab;
mod watch;
