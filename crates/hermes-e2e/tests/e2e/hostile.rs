//! Attacks on real nodes over real sockets: what a malicious client, peer or origin may send, and what it must not
//! get for it.
//!
//! In: bytes and frames that no honest program sends, too much of everything, too little for too long. Out: a clear
//! refusal or a close; nothing smuggled to anybody; a node that has not panicked, serves the next one, and holds no
//! more memory than its limits say. Times are never asserted; limits are set low where one has to be waited for.

mod blame;
mod capsules;
mod crumbs;
mod custody_slots;
mod downgrade;
mod floods;
mod garbage;
mod head_memory;
mod heads;
mod lab;
mod memory;
mod origins;
mod pair;
mod shared;
mod shares;
mod slow;
mod smuggling;
mod unread;
