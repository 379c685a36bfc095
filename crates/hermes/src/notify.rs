//! Notifies the service manager that started this process (sd_notify).
//!
//! In: `NOTIFY_SOCKET`, if systemd has set it. Out: datagrams with the state of this process. A missing or silent
//! service manager is no error: the process serves regardless.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Reports that the process serves, or waits for its first document.
pub(crate) fn ready() {
    notify("READY=1");
}

/// Reports that the process drains and will exit.
pub(crate) fn stopping() {
    notify("STOPPING=1");
}

fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(std::path::Path::new(std::ffi::OsStr::from_bytes(path))),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::debug!("cannot send {state} to the service manager: {error}");
    }
}
