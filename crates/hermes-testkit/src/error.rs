//! The one error type of the testkit: what was tried, and what stood in the way.
//!
//! In: failures of the operating system, of programs that were started, of certificate making. Out: one sentence
//! that names the thing and, where there is one, the remedy. Failures of *measured requests* are not errors: they
//! are counted (see [`crate::load`]).

use std::{io, path::PathBuf, process::ExitStatus, time::Duration};

/// Result of the testkit.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a piece of a test bed could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused; `what` says what was tried.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the path or address.
        what: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A certificate or key could not be made.
    #[error("certificate of {subject}: {source}")]
    Certificate {
        /// Whose certificate.
        subject: String,
        /// The reason.
        #[source]
        source: rcgen::Error,
    },
    /// A TLS configuration was refused.
    #[error("TLS configuration: {0}")]
    Tls(String),
    /// A program that is needed is not on this machine.
    #[error("{program} is not here: {remedy}")]
    Missing {
        /// The program.
        program: String,
        /// What to do about it.
        remedy: String,
    },
    /// A command that should have succeeded did not.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it printed on standard error.
        output: String,
    },
    /// A program did not come up in time.
    #[error("{program} did not listen on {what} within {waited:?}; see {log}", log = log.display())]
    NotReady {
        /// The program.
        program: String,
        /// The port that stayed closed.
        what: String,
        /// How long it was waited for.
        waited: Duration,
        /// Where its output went.
        log: PathBuf,
    },
    /// A program ended when it should have been running.
    #[error("{program} ended early ({status}); its last words: {words}")]
    Died {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The end of its log.
        words: String,
    },
}

impl Error {
    /// Wraps a system error with what was tried.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl From<nix::Error> for Error {
    fn from(source: nix::Error) -> Self {
        Self::Io { what: "system call".into(), source: source.into() }
    }
}
