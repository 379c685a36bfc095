//! How a process takes the listeners of another over, as seen from both.
//!
//! In: a Unix socket's path. The new process connects there, gets the listening sockets, starts,
//! and says that it is ready; only then the old one stops to accept, and says so in turn. Whatever
//! fails before that leaves the old process as it was. Between processes of one user only.

use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use hermes_net::handover::{self, Handed};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixListener;
use tokio::task::JoinSet;

/// How long one side waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a caller may think about his first words.
const GREETING: Duration = Duration::from_secs(5);
/// Callers that may think at a time.
const CALLERS: usize = 8;
const HELLO: &[u8; 17] = b"hermes takeover 1";
const READY: &[u8; 5] = b"ready";
const PARTED: &[u8; 6] = b"parted";

/// The link to the process that is taken over from. Unless we become ready only the end of this process ends it: that
/// one then undoes what we did to its devices, and our workers must do no more of it.
pub(crate) struct Predecessor(ManuallyDrop<UnixStream>);

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
    Ok(Some((sockets, Predecessor(ManuallyDrop::new(stream)))))
}

impl Predecessor {
    /// Tells it that its listeners are served, and waits until it has stopped to read them.
    pub(crate) async fn ready(self) {
        let mut link = ManuallyDrop::into_inner(self.0);
        let told = tokio::task::spawn_blocking(move || {
            link.write_all(READY)?;
            let mut parted = [0; PARTED.len()];
            link.read_exact(&mut parted)
        });
        if let Ok(Err(error)) = told.await {
            // We serve its listeners all the same; nobody else does now.
            tracing::warn!(%error, "the process that was taken over from is gone");
        }
    }
}

/// Where successors call.
pub(crate) struct Successors {
    listener: UnixListener,
    path: PathBuf,
    /// Until it is published: where it can be bound while a predecessor still listens at `path`.
    temporary: Option<PathBuf>,
    /// Those who called and have not said what they want.
    callers: JoinSet<anyhow::Result<Successor>>,
}

/// A process that wants our listeners.
pub(crate) struct Successor(UnixStream);

impl Successors {
    /// Prepares to listen at `path`, where another process may listen still.
    pub(crate) fn bind(path: &Path) -> anyhow::Result<Self> {
        let mut temporary = PathBuf::from(path).into_os_string();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = std::fs::remove_file(&temporary);
        let listener =
            UnixListener::bind(&temporary).with_context(|| format!("cannot listen at {}", temporary.display()))?;
        let (path, temporary) = (path.to_owned(), Some(temporary));
        let this = Self { listener, path, temporary, callers: JoinSet::new() };
        if let Some(temporary) = &this.temporary {
            std::fs::set_permissions(temporary, std::fs::Permissions::from_mode(0o600))?;
        }
        Ok(this)
    }

    /// Listens at the path, in the place of whoever listened there before.
    pub(crate) fn publish(mut self) -> anyhow::Result<Self> {
        if let Some(temporary) = self.temporary.take() {
            std::fs::rename(temporary, &self.path)
                .with_context(|| format!("cannot listen at {}", self.path.display()))?;
        }
        Ok(self)
    }

    /// The next successor; for ever without a path to call at. May be dropped and called again.
    pub(crate) async fn next(this: &mut Option<Self>) -> Successor {
        let Some(this) = this else { return std::future::pending().await };
        loop {
            tokio::select! {
                accepted = this.listener.accept(), if this.callers.len() < CALLERS => match accepted {
                    Ok((stream, _)) => drop(this.callers.spawn(greet(stream))),
                    Err(error) => {
                        tracing::warn!(%error, "a takeover could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                Some(called) = this.callers.join_next() => match called {
                    Ok(Ok(successor)) => return successor,
                    Ok(Err(error)) => tracing::warn!("a caller was sent away: {error:#}"),
                    Err(error) => tracing::error!(%error, "a caller could not be heard"),
                },
            }
        }
    }
}

impl Drop for Successors {
    fn drop(&mut self) {
        // Never published: the path is somebody else's.
        if let Some(temporary) = &self.temporary {
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Lets a caller say who he is.
async fn greet(mut stream: tokio::net::UnixStream) -> anyhow::Result<Successor> {
    let uid = stream.peer_cred()?.uid();
    ensure!(uid == handover::own_uid(), "user {uid} asked for the listeners, which is not ours");
    let mut hello = [0; HELLO.len()];
    tokio::time::timeout(GREETING, stream.read_exact(&mut hello)).await.context("it said nothing")??;
    ensure!(hello == *HELLO, "it is no successor");
    Ok(Successor(stream.into_std()?))
}

impl Successor {
    /// Sends the sockets and waits until they are served. Dropped half way it tells the successor.
    pub(crate) async fn hand_over(self, sockets: std::io::Result<Vec<Handed>>) -> anyhow::Result<HandedOver> {
        let sockets = sockets.context("the listeners cannot be duplicated")?;
        let link = HandedOver(self.0.try_clone()?);
        tokio::task::spawn_blocking(move || self.talk(&sockets)).await??;
        Ok(link)
    }

    fn talk(mut self, sockets: &[Handed]) -> anyhow::Result<()> {
        self.0.set_nonblocking(false)?;
        self.0.set_read_timeout(Some(PATIENCE))?;
        self.0.set_write_timeout(Some(PATIENCE))?;
        handover::send(&self.0, sockets)?;
        let mut ready = [0; READY.len()];
        self.0.read_exact(&mut ready).context("the successor did not become ready")?;
        ensure!(ready == *READY, "the successor did not become ready");
        Ok(())
    }
}

/// The link to a successor that serves the listeners. Its drop ends the talk, wherever it is.
pub(crate) struct HandedOver(UnixStream);

impl HandedOver {
    /// Tells the successor that nothing is read here any more.
    pub(crate) fn parted(mut self) {
        if let Err(error) = self.0.write_all(PARTED) {
            tracing::warn!(%error, "the successor is gone");
        }
    }
}

impl Drop for HandedOver {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}
