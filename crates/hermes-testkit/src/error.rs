//! The error type of the testkit: the operation, and the cause of its failure.
//!
//! In: failures of the operating system, of started programs, of certificate creation. Out: one sentence with the
//! object and, if there is one, the remedy. Failures of *measured requests* are not errors: they are counted (see
//! [`crate::load`]).

use std::{io, path::PathBuf, process::ExitStatus, time::Duration};

/// The result type of the testkit.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a part of a test environment is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused; `what` is the operation.
    #[error("{what}: {source}")]
    Io {
        /// The operation, with the path or address.
        what: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A certificate or key could not be created.
    #[error("certificate of {subject}: {source}")]
    Certificate {
        /// The subject of the certificate.
        subject: String,
        /// The reason.
        #[source]
        source: rcgen::Error,
    },
    /// A TLS configuration was refused.
    #[error("TLS configuration: {0}")]
    Tls(String),
    /// A required program is not installed.
    #[error("{program} is not installed: {remedy}")]
    Missing {
        /// The program.
        program: String,
        /// The remedy.
        remedy: String,
    },
    /// A command failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The text that it printed on standard error.
        output: String,
    },
    /// A program did not start in time.
    #[error("{program} did not listen on {what} within {waited:?}; see {log}", log = log.display())]
    NotReady {
        /// The program.
        program: String,
        /// The port that stayed closed.
        what: String,
        /// The timeout.
        waited: Duration,
        /// The path of its log.
        log: PathBuf,
    },
    /// A program ended unexpectedly.
    #[error("{program} ended early ({status}); its last words: {words}")]
    Died {
        /// The program.
        program: String,
        /// The exit status.
        status: ExitStatus,
        /// The end of its log.
        words: String,
    },
}

impl Error {
    /// Wraps a system error with the operation.
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
