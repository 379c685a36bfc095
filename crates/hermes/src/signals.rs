//! Receives the signals that a Hermes process obeys.
//!
//! In: SIGHUP, SIGUSR1, SIGTERM, SIGINT. Out: the name of each signal, one at a time. The caller decides how to react.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// Streams of the signals that a Hermes process obeys.
pub(crate) struct Signals {
    hangup: tokio::signal::unix::Signal,
    user1: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// The runtime cannot receive signals.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be received");
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            user1: listen(SignalKind::user_defined1())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// Returns the name of a pending SIGTERM or SIGINT without waiting. Other signals stay queued.
    pub(crate) async fn told_to_end(&mut self) -> Option<&'static str> {
        // The runtime polls its signal driver only when no task is ready.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Some("SIGTERM"),
            _ = self.interrupt.recv() => Some("SIGINT"),
            () = std::future::ready(()) => None,
        }
    }

    /// Waits for the next signal and returns its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.hangup.recv() => "SIGHUP",
            _ = self.user1.recv() => "SIGUSR1",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
