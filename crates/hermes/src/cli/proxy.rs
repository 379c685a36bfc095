//! `hermes proxy`: runs a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Runs a node from a document.
///
/// SIGHUP, or a change of the document or of a certificate that it names, reloads it. SIGTERM and
/// SIGINT drain it: no new connection, what runs may finish within the document's `drain`.
#[derive(Debug, Parser)]
pub(super) struct Proxy {
    /// The node document (YAML).
    #[arg(long, value_name = "FILE", required_unless_present = "stray")]
    config: Option<PathBuf>,
    /// Where `check` has its files: told of, and not taken, since a second one would have no meaning.
    #[arg(hide = true)]
    stray: Option<PathBuf>,
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
        let config = match (&self.config, &self.stray) {
            (Some(config), None) => config,
            (_, stray) => usage(stray.as_deref().unwrap_or(Path::new("FILE"))),
        };
        crate::run::proxy(config, self.takeover.as_deref(), &self.log)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn usage(stray: &Path) -> ! {
    let text = format!("a node has one document, and it is named by an option: write --config {}", stray.display());
    super::misuse("proxy", ErrorKind::UnknownArgument, &text)
}
