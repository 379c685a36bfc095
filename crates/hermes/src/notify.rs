//! The word with the service manager that started this process (sd_notify).
//!
//! In: `NOTIFY_SOCKET`, where systemd set it. Out: datagrams that say what this process is at.
//! Never: an error. Who has no service manager, or one that does not listen, serves all the same.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// It serves, or does all that can be done without a document.
pub(crate) fn ready() {
    tell("READY=1");
}

/// It drains, and ends.
pub(crate) fn stopping() {
    tell("STOPPING=1");
}

fn tell(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(std::path::Path::new(std::ffi::OsStr::from_bytes(path))),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::debug!("the service manager is not told {state}: {error}");
    }
}
