//! TUN devices of the product, in namespaces: what they carry, what they capture, and what they release.
#![allow(clippy::unwrap_used)]

mod captures;
mod devices;
mod gateways;
mod lab;
mod watch;
