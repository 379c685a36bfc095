//! The mark of Hermes's own sockets, by which no device of Hermes ever captures their packets.
//!
//! In: each socket that is made here, before it sends. Out: the same, marked, where this process may (CAP_NET_ADMIN,
//! or CAP_NET_RAW from Linux 5.17 on). Never: the reason for a failure: without the privilege this process makes no
//! device that captures, and the socket works as any.

use std::sync::atomic::{AtomicBool, Ordering};

use socket2::SockRef;

/// What the sockets of every Hermes process on a machine carry (SO_MARK): "HERM". One for all, since two that
/// captured each other's packets would send them round for ever.
pub const MARK: u32 = 0x4845_524d;

/// The kernel refused once: it always will.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Marks a socket. Every one, whether or not anything is captured yet: a connection that is there already must
/// outlive a capture that a new document begins.
pub(crate) fn apply(socket: SockRef<'_>) {
    if !REFUSED.load(Ordering::Relaxed) && socket.set_mark(MARK).is_err() {
        REFUSED.store(true, Ordering::Relaxed);
    }
}
