//! How a process takes the listeners of another over, as seen from both.
//!
//! In: a Unix socket's path. The new process connects there, gets the listening sockets, starts,
//! and says that it is ready; only then the old one stops to accept, and says so in turn. Before that word
//! nothing is the new one's: where it hears another one, or none, it ends, and the old process is as it was, unless that
//! has died. Between processes of one user only.

use std::io::{ErrorKind, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hermes_net::handover::{self, Handed};
use nix::sys::socket::{MsgFlags, send};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How long one side waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);
/// What tests have in its place, in milliseconds. What is released does not read it.
#[cfg(debug_assertions)]
const PATIENCE_OF_TESTS: &str = "HERMES_TEST_TAKEOVER_PATIENCE";
/// How long a caller may think about his first words.
const GREETING: Duration = Duration::from_secs(5);
/// Callers that may think at a time.
const CALLERS: usize = 8;
const HELLO: &[u8; 17] = b"hermes takeover 1";
const READY: &[u8; 5] = b"ready";
const PARTED: &[u8; 6] = b"parted";
/// In the place of that, and shorter: a successor of an older version waits for six bytes.
const REFUSED: &[u8; 2] = b"no";
/// How long a process may take to die once its sockets are closed.
const DYING: Duration = Duration::from_secs(2);
/// A process that has just been taken over from hangs up, and its successor answers at the same path.
const TRIES: usize = 3;

fn patience() -> Duration {
    #[cfg(debug_assertions)]
    if let Some(given) = std::env::var(PATIENCE_OF_TESTS).ok().and_then(|given| given.parse().ok()) {
        return Duration::from_millis(given);
    }
    PATIENCE
}

/// The link to the process that is taken over from. Unless that lets go only the end of this process ends it: that
/// one then undoes what we did to its devices, and our workers must do no more of it.
pub(crate) struct Predecessor {
    link: ManuallyDrop<UnixStream>,
    /// `None`: the kernel does not tell of its end.
    process: Option<handover::Process>,
}

/// The same, which has let go. It listens at the socket's path until this is dropped.
pub(crate) struct Parted(#[allow(dead_code, reason = "its end says enough")] UnixStream);

/// Takes the sockets of a process that listens at `path`; `None` where none does.
///
/// # Errors
/// Somebody listens there and does not do as expected.
pub(crate) fn take(path: &Path) -> anyhow::Result<Option<(Vec<Handed>, Predecessor)>> {
    let mut tries = 0;
    loop {
        tries += 1;
        let Some(stream) = connect(path)? else { return Ok(None) };
        let process = handover::Process::of_peer(&stream).ok();
        match ask(&stream) {
            Ok(sockets) => {
                tracing::info!(sockets = sockets.len(), "taking over from a running process");
                return Ok(Some((sockets, Predecessor { link: ManuallyDrop::new(stream), process })));
            }
            Err(error) if tries < TRIES && is_end(&error) => {}
            Err(error) => return Err(error).context("the running process did not hand its listeners over"),
        }
    }
}

/// A stream to whoever listens there, of our user.
fn connect(path: &Path) -> anyhow::Result<Option<UnixStream>> {
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot connect to {}", path.display())),
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    ensure!(handover::peer_uid(&stream)? == handover::own_uid(), "{} belongs to another user", path.display());
    Ok(Some(stream))
}

fn ask(mut stream: &UnixStream) -> std::io::Result<Vec<Handed>> {
    stream.write_all(HELLO)?;
    handover::receive(stream)
}

fn is_end(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

impl Predecessor {
    /// Tells it that its listeners are served, and waits until it has stopped to read them: from then on they are ours.
    ///
    /// # Errors
    /// It has not, and may go on with them: this process has to end.
    pub(crate) async fn ready(self) -> anyhow::Result<Parted> {
        let link = self.link.try_clone()?;
        tokio::task::spawn_blocking(move || let_go(&link, self.process.as_ref())).await??;
        Ok(Parted(ManuallyDrop::into_inner(self.link)))
    }
}

fn let_go(mut link: &UnixStream, process: Option<&handover::Process>) -> anyhow::Result<()> {
    // Where nobody reads this there may be a word for us all the same.
    let _ = link.write_all(READY);
    let mut said = Vec::new();
    let read = link.take(PARTED.len() as u64).read_to_end(&mut said);
    let why = match (said.as_slice(), read) {
        (said, _) if said == PARTED => return Ok(()),
        (said, _) if said == REFUSED => {
            "it waited too long for this one, or was told to end meanwhile (its log says which)".to_owned()
        }
        (_, Err(error)) if !is_end(&error) => {
            // Where it goes on just now it must not take us for one that waits.
            let _ = link.write_all(READY);
            format!("it does not answer ({error})")
        }
        _ if process.is_some_and(|process| process.ends_within(DYING)) => {
            tracing::warn!("the running process died before it let go: this one goes on in its place");
            return Ok(());
        }
        _ => "it has hung up without a word".to_owned(),
    };
    bail!(
        "the running process did not let go of its listeners and devices: {why}. Nothing was taken over: start this one again"
    )
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

/// A process that wants our listeners, or has them.
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
        if let Some(temporary) = &self.temporary {
            std::fs::rename(temporary, &self.path)
                .with_context(|| format!("cannot listen at {}", self.path.display()))?;
        }
        self.temporary = None;
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
    timeout(GREETING, stream.read_exact(&mut hello)).await.context("it said nothing")??;
    ensure!(hello == *HELLO, "it is no successor");
    Ok(Successor(stream.into_std()?))
}

impl Successor {
    /// Sends the sockets and waits until they are served. Where that fails, or is dropped half way, it is to be refused.
    pub(crate) async fn hand_over(&mut self, sockets: std::io::Result<Vec<Handed>>) -> anyhow::Result<()> {
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
        // Where this process stood still it may have waited in vain.
        let more = stream.try_read(&mut ready);
        let waits = matches!(more, Err(error) if error.kind() == ErrorKind::WouldBlock);
        ensure!(waits, "the successor was ready, and has ended");
        Ok(())
    }

    /// Tells it that nothing is its own. Returns when it has ended, until which it may do more to what it was given.
    pub(crate) fn refuse(self) -> impl Future<Output = ()> {
        // Where there is no room for that it has not read what it was given, and finds the end behind it.
        let _ = send(self.0.as_raw_fd(), REFUSED, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        ended(self.0)
    }

    /// Tells it that nothing is read here any more. Returns when it listens at our path: who calls there meanwhile waits,
    /// and is sent to it then.
    pub(crate) async fn parted(mut self, successors: Option<Successors>) {
        if let Err(error) = self.0.write_all(PARTED) {
            tracing::warn!(%error, "the successor is gone");
        }
        ended(self.0).await;
        drop(successors);
    }
}

fn send_all(stream: &UnixStream, sockets: &[Handed]) -> anyhow::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(handover::send(stream, sockets)?)
}

/// Waits until the other end is closed.
async fn ended(stream: UnixStream) {
    let nonblocking = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
    if let Ok(mut stream) = nonblocking {
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
}
