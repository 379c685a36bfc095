//! `hermes proxy`: runs a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use hermes_controller::client::ControllerAddr;
use hermes_controller::token::Ticket;

use crate::agent::Home;
use crate::run::Source;

/// Runs a node from a document, or under a controller.
///
/// SIGHUP, or a change of the document or of a certificate that it names, reloads it. SIGTERM and
/// SIGINT drain it: no new connection, what runs may finish within the document's `drain`.
#[derive(Debug, Parser)]
#[command(override_usage = "hermes proxy --config <FILE> [OPTIONS]\n       \
                            hermes proxy --controller <URL> --state <DIR> [--token-file <FILE>] [OPTIONS]")]
pub(super) struct Proxy {
    /// The node document (YAML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The controller that gives this node its identity and its document. What it gave last is kept in --state, and the node
    /// runs from that while the controller is away. Of several, which share one store, any will do.
    #[arg(long, value_name = "URL", requires = "state", conflicts_with = "config", value_delimiter = ',')]
    controller: Vec<ControllerAddr>,
    /// Leave to enrol, the first time: from `hermes token create`.
    #[arg(long, env = "HERMES_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
    /// A file with the token, or - for standard input. It may be gone where the node has enrolled.
    #[arg(long, value_name = "FILE", requires = "controller", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// The directory of this node's key, certificate and document.
    #[arg(long, value_name = "DIR", requires = "controller")]
    state: Option<PathBuf>,
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

/// The usage error without a configuration.
const NOTHING_TO_RUN: &str = "missing configuration: run a document with --config FILE, or run under a controller with \
                              --controller URL --state DIR";

impl Proxy {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let source = match (&self.config, &self.stray, &*self.controller, &self.state) {
            (_, None, [_, ..], Some(state)) => Source::Controller {
                places: self.controller.clone(),
                state: state.clone(),
                ticket: ticket(self.token.as_deref(), self.token_file.as_deref(), state)?,
            },
            (Some(config), None, ..) => Source::File(config.clone()),
            (_, Some(stray), ..) => usage(stray),
            (None, None, ..) => super::misuse("proxy", ErrorKind::MissingRequiredArgument, NOTHING_TO_RUN),
        };
        crate::run::proxy(source, self.takeover.as_deref(), &self.log)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The token, from wherever it is. Who has enrolled needs none: its file may be gone.
pub(super) fn ticket(token: Option<&str>, file: Option<&Path>, state: &Path) -> anyhow::Result<Option<Ticket>> {
    let text = match (token, file) {
        (Some(token), _) => Some(token.to_owned()),
        (None, Some(file)) if file == Path::new("-") => Some(std::io::read_to_string(std::io::stdin())?),
        (None, Some(file)) if !file.exists() && Home::at(state).is_enrolled() => None,
        (None, Some(file)) => Some(crate::document::text(file)?),
        (None, None) => None,
    };
    text.map(|text| text.parse().map_err(anyhow::Error::msg)).transpose()
}

fn usage(stray: &Path) -> ! {
    let text = format!("a node has one document, and it is named by an option: write --config {}", stray.display());
    super::misuse("proxy", ErrorKind::UnknownArgument, &text)
}
