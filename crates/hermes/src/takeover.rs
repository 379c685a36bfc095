//! The takeover protocol: a new process takes the listening sockets of a running one. This file has both sides.
//!
//! In: the path of a Unix socket. The successor connects to it, receives the listening sockets, starts, and sends
//! `ready`. Only then the predecessor stops accepting and answers `parted`. Until the successor has read `parted`, it
//! owns nothing. If it reads another answer or none, it ends, and the predecessor continues unchanged unless it has
//! died. Both processes must belong to the same user.

use std::io::{ErrorKind, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hermes_net::fd_passing::{self, LabelledFd};
use hermes_net::unix::listen_privately;
use nix::sys::socket::{MsgFlags, send};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The time that one side waits for an answer of the other.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Overrides `ANSWER_TIMEOUT` in tests, in milliseconds. Release builds do not read it.
#[cfg(debug_assertions)]
const ANSWER_TIMEOUT_OF_TESTS: &str = "HERMES_TEST_TAKEOVER_PATIENCE";
/// A caller must send its greeting within this time.
const GREETING: Duration = Duration::from_secs(5);
/// The maximum number of callers that have connected and not yet sent their greeting.
const CALLERS: usize = 8;
const HELLO: &[u8; 17] = b"hermes takeover 1";
const READY: &[u8; 5] = b"ready";
const PARTED: &[u8; 6] = b"parted";
/// Sent instead of `PARTED`. The shorter length matters: a successor of an older version waits for six bytes.
const REFUSED: &[u8; 2] = b"no";
/// The time within which a process must exit once its sockets are closed.
const DYING: Duration = Duration::from_secs(2);
/// The number of attempts. A process that was itself just taken over closes the connection, and its successor then
/// answers at the same path.
const MAX_ATTEMPTS: usize = 3;

fn patience() -> Duration {
    #[cfg(debug_assertions)]
    if let Some(given) = std::env::var(ANSWER_TIMEOUT_OF_TESTS).ok().and_then(|given| given.parse().ok()) {
        return Duration::from_millis(given);
    }
    ANSWER_TIMEOUT
}

/// The connection to the predecessor. It closes only when the predecessor has let go, or when this process exits. The
/// predecessor takes its end as the exit and undoes our changes to its devices. Our workers must then make no more of
/// them.
pub(crate) struct Predecessor {
    link: ManuallyDrop<UnixStream>,
    /// `None`: the kernel does not report its exit.
    process: Option<fd_passing::ProcessHandle>,
}

/// A predecessor that has let go. It listens at the socket's path until this is dropped.
pub(crate) struct Parted(#[allow(dead_code, reason = "its end says enough")] UnixStream);

/// Takes the sockets of the process that listens at `path`. Returns `None` if no process listens there.
///
/// # Errors
/// A process listens there, but does not follow the protocol.
pub(crate) fn take(path: &Path) -> anyhow::Result<Option<(Vec<LabelledFd>, Predecessor)>> {
    let mut tries = 0;
    loop {
        tries += 1;
        let Some(stream) = connect(path)? else { return Ok(None) };
        let process = fd_passing::ProcessHandle::of_peer(&stream).ok();
        match request_listeners(&stream) {
            Ok(sockets) => {
                tracing::info!(sockets = sockets.len(), "taking over from a running process");
                return Ok(Some((sockets, Predecessor { link: ManuallyDrop::new(stream), process })));
            }
            Err(error) if tries < MAX_ATTEMPTS && is_end(&error) => {}
            Err(error) => return Err(error).context("the running process did not hand its listeners over"),
        }
    }
}

/// Connects to the process that listens at `path`, which must belong to this user.
fn connect(path: &Path) -> anyhow::Result<Option<UnixStream>> {
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot connect to {}", path.display())),
    };
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    ensure!(fd_passing::peer_uid(&stream)? == fd_passing::own_uid(), "{} belongs to another user", path.display());
    Ok(Some(stream))
}

fn request_listeners(mut stream: &UnixStream) -> std::io::Result<Vec<LabelledFd>> {
    stream.write_all(HELLO)?;
    fd_passing::receive(stream)
}

fn is_end(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

impl Predecessor {
    /// Reports that the listeners are served here, and waits until the predecessor has stopped reading them.
    ///
    /// # Errors
    /// The predecessor did not confirm, and may continue to serve the listeners: this process has to end.
    pub(crate) async fn ready(self) -> anyhow::Result<Parted> {
        let link = self.link.try_clone()?;
        tokio::task::spawn_blocking(move || release_predecessor(&link, self.process.as_ref())).await??;
        Ok(Parted(ManuallyDrop::into_inner(self.link)))
    }
}

fn release_predecessor(mut link: &UnixStream, process: Option<&fd_passing::ProcessHandle>) -> anyhow::Result<()> {
    // If the predecessor no longer reads, the write fails, but its answer may already be in the receive buffer.
    let _ = link.write_all(READY);
    let mut said = Vec::new();
    let read = link.take(PARTED.len() as u64).read_to_end(&mut said);
    let why = match (said.as_slice(), read) {
        (said, _) if said == PARTED => return Ok(()),
        (said, _) if said == REFUSED => "it timed out, or was stopped meanwhile (see its log)".to_owned(),
        (_, Err(error)) if !is_end(&error) => {
            // The predecessor may resume at this moment. The extra byte tells it that this process no longer waits.
            let _ = link.write_all(READY);
            format!("no response ({error})")
        }
        _ if process.is_some_and(|process| process.ends_within(DYING)) => {
            tracing::warn!("the running process died before it handed over; this process continues alone");
            return Ok(());
        }
        _ => "it closed the connection without a response".to_owned(),
    };
    bail!(
        "the running process did not release its listeners and devices: {why}. Nothing was taken over; start this process again"
    )
}

/// The socket where successors connect.
pub(crate) struct Successors {
    listener: UnixListener,
    path: PathBuf,
    /// The path of the socket until it is published, because a predecessor may still listen at `path`.
    temporary: Option<PathBuf>,
    /// Callers that have connected and not yet sent their greeting.
    callers: JoinSet<anyhow::Result<Successor>>,
}

/// A process that asks for our listeners, or has received them.
pub(crate) struct Successor(UnixStream);

impl Successors {
    /// Binds a temporary path beside `path`, where another process may still listen.
    pub(crate) fn bind(path: &Path) -> anyhow::Result<Self> {
        let mut temporary = PathBuf::from(path).into_os_string();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = std::fs::remove_file(&temporary);
        let listener = listen_privately(&temporary)
            .and_then(UnixListener::from_std)
            .with_context(|| format!("cannot listen at {}", temporary.display()))?;
        let (path, temporary) = (path.to_owned(), Some(temporary));
        Ok(Self { listener, path, temporary, callers: JoinSet::new() })
    }

    /// Moves the socket to `path` and so replaces the one of the predecessor.
    pub(crate) fn publish(mut self) -> anyhow::Result<Self> {
        if let Some(temporary) = &self.temporary {
            std::fs::rename(temporary, &self.path)
                .with_context(|| format!("cannot listen at {}", self.path.display()))?;
        }
        self.temporary = None;
        Ok(self)
    }

    /// Waits for the next successor, or forever if there is no socket. Cancel-safe.
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
                    Err(error) => tracing::error!(%error, "cannot read from a takeover caller"),
                },
            }
        }
    }
}

impl Drop for Successors {
    fn drop(&mut self) {
        // An unpublished socket leaves `path` alone: it belongs to another process.
        if let Some(temporary) = &self.temporary {
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Reads the greeting of a caller and checks its user.
async fn greet(mut stream: tokio::net::UnixStream) -> anyhow::Result<Successor> {
    let uid = stream.peer_cred()?.uid();
    ensure!(uid == fd_passing::own_uid(), "takeover requested by another user (uid {uid})");
    let mut hello = [0; HELLO.len()];
    timeout(GREETING, stream.read_exact(&mut hello)).await.context("no greeting")??;
    ensure!(hello == *HELLO, "unknown greeting");
    Ok(Successor(stream.into_std()?))
}

impl Successor {
    /// Sends the sockets and waits until they are served. If this fails or is cancelled, the caller must refuse the
    /// successor.
    pub(crate) async fn hand_over(&mut self, sockets: std::io::Result<Vec<LabelledFd>>) -> anyhow::Result<()> {
        let sockets = sockets.context("the listeners cannot be duplicated")?;
        let stream = self.0.try_clone()?;
        tokio::task::spawn_blocking(move || send_all(&stream, &sockets)).await??;
        self.0.set_nonblocking(true)?;
        let mut stream = tokio::net::UnixStream::from_std(self.0.try_clone()?)?;
        let mut ready = [0; READY.len()];
        let within = patience();
        let read = timeout(within, stream.read_exact(&mut ready)).await;
        let read = read.with_context(|| format!("the successor did not become ready within {within:?}"))?;
        read.context("the successor did not become ready")?;
        ensure!(ready == *READY, "the successor did not become ready");
        // This process may have been suspended for so long that the successor has given up: a further byte or the end
        // shows it.
        let more = stream.try_read(&mut ready);
        let waits = matches!(more, Err(error) if error.kind() == ErrorKind::WouldBlock);
        ensure!(waits, "the successor was ready, and has ended");
        Ok(())
    }

    /// Tells the successor that it owns nothing. Returns when it has exited; until then it may still change what it
    /// was given.
    pub(crate) fn refuse(self) -> impl Future<Output = ()> {
        // If the send buffer is full, the successor has not read the sockets yet, and finds the end of the stream
        // after them.
        let _ = send(self.0.as_raw_fd(), REFUSED, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        ended(self.0)
    }

    /// Tells the successor that this process no longer reads the sockets. Returns when the successor listens at our
    /// path. Callers that connect meanwhile wait, and then connect to the successor.
    pub(crate) async fn finish(mut self, successors: Option<Successors>) {
        if let Err(error) = self.0.write_all(PARTED) {
            tracing::warn!(%error, "the successor has exited");
        }
        ended(self.0).await;
        drop(successors);
    }
}

fn send_all(stream: &UnixStream, sockets: &[LabelledFd]) -> anyhow::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(fd_passing::send(stream, sockets)?)
}

/// Waits until the other end is closed.
async fn ended(stream: UnixStream) {
    let nonblocking = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
    if let Ok(mut stream) = nonblocking {
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
}
