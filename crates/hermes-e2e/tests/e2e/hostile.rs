//! Attacks on real nodes over real sockets: what a malicious client, peer or origin may send, and what it must not
//! get for it.
//!
//! In: bytes and frames that no honest program sends, too much of everything, too little for too long. Out: a clear
//! refusal or a close; nothing smuggled to anybody; a node that has not panicked, serves the next one, and holds no
//! more memory than its limits say. Times are never asserted; limits are set low where one has to be waited for.

mod aborted_requests;
mod capsules;
mod client_limits;
mod custody_slots;
mod downgrade;
mod floods;
mod garbage;
mod head_memory;
mod heads;
mod lab;
mod memory;
mod node_pair;
mod origins;
mod shared_connection;
mod slow_clients;
mod smuggling;
mod tiny_frames;
mod unread_data;
