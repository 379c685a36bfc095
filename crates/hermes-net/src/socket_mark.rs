//! The packet mark (SO_MARK) of Hermes's own sockets. Packets with this mark are never captured by a TUN device of
//! Hermes.
//!
//! In: each socket that Hermes opens, before it sends. Out: the same socket, marked if the process may (CAP_NET_ADMIN,
//! or CAP_NET_RAW from Linux 5.17 on). Failures are ignored: without the privilege this process creates no capturing
//! device, and the socket works without a mark.

use std::sync::atomic::{AtomicBool, Ordering};

use socket2::SockRef;

/// The mark of every Hermes process on a machine: "HERM" in ASCII. All processes use the same mark, since two that
/// captured each other's packets would create a loop.
pub const MARK: u32 = 0x4845_524d;

/// Set after the kernel has refused the mark once, since it would refuse it for every later socket, too.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Marks a socket, whether or not a device captures packets yet: a later configuration may begin a capture, which
/// existing connections must survive.
pub(crate) fn apply(socket: SockRef<'_>) {
    if !REFUSED.load(Ordering::Relaxed) && socket.set_mark(MARK).is_err() {
        REFUSED.store(true, Ordering::Relaxed);
    }
}
