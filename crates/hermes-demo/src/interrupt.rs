//! Signals that end a demo.
//!
//! In: SIGINT, SIGTERM, SIGHUP. Out: the first of them. Listening replaces the default action, which ends the process
//! without cleanup.

use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals, listened for.
pub(crate) struct Interrupt {
    signals: [(Signal, u8); 3],
}

impl Interrupt {
    /// Listens from now on.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let of = |kind: SignalKind| -> anyhow::Result<(Signal, u8)> {
            let number = u8::try_from(kind.as_raw_value()).unwrap_or_default();
            Ok((signal(kind).context("signals cannot be received")?, number))
        };
        Ok(Self { signals: [of(SignalKind::interrupt())?, of(SignalKind::terminate())?, of(SignalKind::hangup())?] })
    }

    /// Waits for a signal. Returns the exit status that shells expect of a process ended by it.
    pub(crate) async fn next(&mut self) -> ExitCode {
        let [(interrupt, a), (terminate, b), (hangup, c)] = &mut self.signals;
        let number = tokio::select! {
            _ = interrupt.recv() => *a,
            _ = terminate.recv() => *b,
            _ = hangup.recv() => *c,
        };
        ExitCode::from(128 + number)
    }
}
