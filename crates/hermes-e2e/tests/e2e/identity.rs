//! Who is believed, and for what: mutual TLS between nodes, users bound to devices, claims refused at the first hop.
//!
//! In: certificates of right and wrong CAs, honest and false claims. Out: who the far end takes a session for, or a
//! refusal that says why. Nothing of a refused session reaches anybody.

mod claims;
mod end_to_end_tls;
mod handshakes;
mod lab;
