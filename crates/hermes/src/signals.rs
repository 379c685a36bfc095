//! The signals that a process of ours obeys.
//!
//! In: SIGHUP, SIGUSR1, SIGTERM, SIGINT. Out: the name of each, in its turn. Never: what to do about it.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// Those that a process of ours obeys.
pub(crate) struct Signals {
    hangup: tokio::signal::unix::Signal,
    user1: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Obeys them from now on.
    ///
    /// # Errors
    /// The runtime has no signals.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be received");
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            user1: listen(SignalKind::user_defined1())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// The name of one that has come already and says to end. Others wait for their turn.
    pub(crate) async fn told_to_end(&mut self) -> Option<&'static str> {
        // The runtime hears of it when nothing else is to be done.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Some("SIGTERM"),
            _ = self.interrupt.recv() => Some("SIGINT"),
            () = std::future::ready(()) => None,
        }
    }

    /// The name of the next one.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.hangup.recv() => "SIGHUP",
            _ = self.user1.recv() => "SIGUSR1",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
