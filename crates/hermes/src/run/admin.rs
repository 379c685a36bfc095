//! The admin endpoint of the process: over TCP at the address in the document, and over a Unix socket in the state directory.
//!
//! In: documents that change the address, and the state of the process. Out: a served endpoint. A new address is bound
//! before any part of its document is applied. Never: the content of a response; `hermes_proxy::admin` has it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hermes_net::fd_passing::LabelledFd;
use hermes_net::unix::listen_privately;
use hermes_proxy::{Node, admin};
use tokio::task::JoinSet;

/// The admin endpoint and its address.
pub(super) struct Admin {
    /// The address in the document; its port may be 0, so that the system chooses one.
    address: Option<SocketAddr>,
    pub(super) socket: Option<std::net::TcpListener>,
    ready: admin::Readiness,
    /// The process drains: it is not ready, whatever a document says.
    is_leaving: bool,
    task: JoinSet<()>,
    /// Serves the endpoint on a Unix socket.
    local: JoinSet<()>,
    /// The successor serves the endpoint, whatever a document says.
    stopped: bool,
}

/// The change that a document makes to the admin endpoint.
pub(super) enum AdminChange {
    Stay,
    Close,
    To(AdminSocket),
}

/// A bound socket for the admin endpoint. Nothing about serving it can fail any more.
pub(super) struct AdminSocket {
    address: SocketAddr,
    /// A duplicate for a successor.
    kept: std::net::TcpListener,
    listener: tokio::net::TcpListener,
}

impl AdminSocket {
    /// Uses the predecessor's socket if it has this address, or binds a new one.
    fn bind(address: SocketAddr, inherited: Option<LabelledFd>) -> anyhow::Result<Self> {
        let inherited = inherited.map(|handed| std::net::TcpListener::from(handed.fd));
        let bound = || {
            let kept = match inherited.filter(|socket| socket.local_addr().ok() == Some(address)) {
                Some(socket) => socket,
                None => {
                    if address.port() != 0 {
                        hermes_net::tcp::probe_unused(address)?;
                    }
                    hermes_net::tcp::listen(address)?
                }
            };
            kept.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(kept.try_clone()?)?;
            std::io::Result::Ok(Self { address, kept, listener })
        };
        bound().map_err(|error| {
            let remedy = hermes_net::host::bind_remedy(&error);
            anyhow::anyhow!("admin: listening on {address} over TCP: {error}. {remedy}")
        })
    }
}

impl Admin {
    pub(super) fn new() -> Self {
        let (ready, task) = (Arc::new(AtomicBool::new(true)), JoinSet::new());
        Self { address: None, socket: None, ready, is_leaving: false, task, local: JoinSet::new(), stopped: false }
    }

    /// Serves the endpoint on a Unix socket, and replaces a previous one.
    pub(super) fn listen_locally(&mut self, path: &Path, node: &Node) {
        // A rename replaces the socket of a previous process, so that callers find one at every moment.
        let temporary = path.with_extension(format!("sock.{}", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        let bound = listen_privately(&temporary).and_then(|listener| {
            std::fs::rename(&temporary, path)?;
            tokio::net::UnixListener::from_std(listener)
        });
        match bound {
            Ok(listener) => _ = self.local.spawn(admin::serve_local(listener, node.view(), self.ready.clone())),
            Err(error) => {
                let _ = std::fs::remove_file(&temporary);
                tracing::warn!(socket = %path.display(), "cannot listen for `hermes health --state`: {error}");
            }
        }
    }

    /// Marks the process as draining.
    pub(super) fn leave(&mut self) {
        self.is_leaving = true;
        self.ready.store(false, Ordering::Release);
    }

    /// Does everything that can fail, before any part of the document is applied.
    pub(super) fn prepare(
        &self,
        address: Option<SocketAddr>,
        inherited: Option<LabelledFd>,
    ) -> anyhow::Result<AdminChange> {
        match address {
            same if same == self.address || self.stopped => Ok(AdminChange::Stay),
            None => Ok(AdminChange::Close),
            Some(address) => AdminSocket::bind(address, inherited).map(AdminChange::To),
        }
    }

    /// Moves the endpoint to the address in the document.
    pub(super) fn follow(&mut self, to: AdminChange, node: &Node) {
        self.ready.store(!(self.is_leaving || node.view().is_draining()), Ordering::Release);
        if matches!(to, AdminChange::Stay) {
            return;
        }
        self.task.abort_all();
        (self.address, self.socket) = (None, None);
        if let AdminChange::To(AdminSocket { address, kept, listener }) = to {
            // The system may have chosen the port, so the log names it.
            let bound = kept.local_addr().unwrap_or(address);
            tracing::info!(address = %bound, "admin endpoint");
            self.task.spawn(admin::serve(listener, node.view(), self.ready.clone()));
            (self.address, self.socket) = (Some(address), Some(kept));
        }
    }

    pub(super) async fn stop(&mut self) {
        self.stopped = true;
        self.task.shutdown().await;
        self.local.shutdown().await;
        self.socket = None;
    }
}
