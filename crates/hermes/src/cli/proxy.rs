//! `hermes proxy`: runs a node.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Runs a node from a document.
///
/// SIGHUP, or a change of the document or of a certificate that it names, reloads it. SIGTERM and
/// SIGINT drain it: no new connection, what runs may finish within the document's `drain`.
#[derive(Debug, Parser)]
pub(super) struct Proxy {
    /// The node document (YAML).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// A Unix socket through which a successor takes the running listeners over. A process that
    /// already listens there is the one that is taken over from.
    #[arg(long, value_name = "SOCKET")]
    takeover: Option<PathBuf>,
    /// What is logged on standard error: error, warn, info, debug, or a filter such as
    /// `info,hermes_proxy=debug`.
    #[arg(long, env = "HERMES_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
}

impl Proxy {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        crate::run::proxy(&self.config, self.takeover.as_deref(), &self.log)?;
        Ok(ExitCode::SUCCESS)
    }
}
