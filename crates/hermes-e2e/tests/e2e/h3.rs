//! HTTP/3: what only this version has, what hostile peers may send over it, and what other people's programs say to
//! it and hear from it.
//!
//! In: raw QUIC streams with any bytes on them; curl, aioquic and Envoy as they are. Out: the error codes that
//! RFC 9114 and RFC 9204 ask for, everything else served as before; requests and tunnels, byte by byte.

mod access_log;
mod alternatives;
mod early_data;
mod fallback;
mod floods;
mod hostile;
mod lab;
mod messages;
mod origins;
mod peers;
mod sizes;
mod streams;
mod unread_streams;
mod upstreams;
