//! How a process takes the listeners of another over, as seen from both.
//!
//! In: a Unix socket's path. The new process connects there, gets the listening sockets, starts,
//! and says that it is ready; only then the old one stops to accept. Whatever fails before that
//! leaves the old process as it was. Between processes of one user only.

use std::io::{Read, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use hermes_net::handover::{self, Handed};

/// How long one side waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);
const HELLO: &[u8; 17] = b"hermes takeover 1";
const READY: &[u8; 5] = b"ready";

/// The link to the process that is taken over from.
pub(crate) struct Predecessor(UnixStream);

/// Takes the sockets of a process that listens at `path`; `None` where none does.
///
/// # Errors
/// Somebody listens there and does not do as expected.
pub(crate) fn take(path: &Path) -> anyhow::Result<Option<(Vec<Handed>, Predecessor)>> {
    let mut stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot connect to {}", path.display())),
    };
    let patient = || -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))
    };
    patient()?;
    ensure!(handover::peer_uid(&stream)? == handover::own_uid(), "{} belongs to another user", path.display());
    stream.write_all(HELLO)?;
    let sockets = handover::receive(&stream).context("the running process did not hand its listeners over")?;
    tracing::info!(sockets = sockets.len(), "taking over from a running process");
    Ok(Some((sockets, Predecessor(stream))))
}

impl Predecessor {
    /// Tells it that its listeners are served.
    pub(crate) fn ready(mut self) -> anyhow::Result<()> {
        self.0.write_all(READY).context("the process that was taken over from is gone")
    }
}

/// Where successors call.
pub(crate) struct Successors {
    listener: tokio::net::UnixListener,
}

/// A process that wants our listeners.
pub(crate) struct Successor(UnixStream);

impl Successors {
    /// Listens at `path`, in the place of whoever listened there before.
    pub(crate) fn listen(path: &Path) -> anyhow::Result<Self> {
        let mut temporary = PathBuf::from(path).into_os_string();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = std::fs::remove_file(&temporary);
        let listener = tokio::net::UnixListener::bind(&temporary)
            .with_context(|| format!("cannot listen at {}", temporary.display()))?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&temporary, path).with_context(|| format!("cannot listen at {}", path.display()))?;
        Ok(Self { listener })
    }

    /// The next successor; for ever without a path to call at.
    pub(crate) async fn next(this: &mut Option<Self>) -> Successor {
        let Some(this) = this else { return std::future::pending().await };
        loop {
            match this.listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => return Successor(stream),
                Err(error) => {
                    tracing::warn!(%error, "a takeover could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Successor {
    /// Sends the sockets and waits until they are served.
    pub(crate) async fn hand_over(self, sockets: &[(String, RawFd)]) -> anyhow::Result<()> {
        let sockets = sockets.to_vec();
        tokio::task::spawn_blocking(move || self.talk(&sockets)).await?
    }

    fn talk(mut self, sockets: &[(String, RawFd)]) -> anyhow::Result<()> {
        self.0.set_nonblocking(false)?;
        self.0.set_read_timeout(Some(PATIENCE))?;
        self.0.set_write_timeout(Some(PATIENCE))?;
        ensure!(handover::peer_uid(&self.0)? == handover::own_uid(), "another user asked for the listeners");
        let mut hello = [0; HELLO.len()];
        self.0.read_exact(&mut hello)?;
        ensure!(hello == *HELLO, "whoever called is no successor");
        handover::send(&self.0, sockets)?;
        let mut ready = [0; READY.len()];
        self.0.read_exact(&mut ready).context("the successor did not become ready")?;
        ensure!(ready == *READY, "the successor did not become ready");
        Ok(())
    }
}
