//! SOCKS 5 (RFC 1928) end to end: CONNECT and UDP ASSOCIATE through real nodes, by curl and by clients written by hand.
//!
//! In: greetings, requests and datagrams as programs send them, and as none should. Out: the same sessions as over
//! HTTP, with the name that the client gave; the reply that says what failed; a node that outlives every client.

mod associate;
mod connect;
mod hostile;
mod lab;
