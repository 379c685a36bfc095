//! UDP by name, end to end through real nodes: flows of listeners, CONNECT-UDP (RFC 9298) in each of its forms, the
//! ways that it fails.
//!
//! In: sockets and capsules written by hand, origins that tell who spoke to them. Out: each datagram where it belongs,
//! once, or its loss in the metrics. What reloads do to flows is in `reload`, what a takeover does in
//! `takeover`, random transfers are in `bytes`.

mod authorities;
mod capsules;
mod failures;
mod flows;
mod handshakes;
mod lab;
mod malformed;
mod names;
mod queue;
mod sources;
