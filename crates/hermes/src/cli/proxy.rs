//! `hermes proxy`: runs a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use hermes_controller::client::ControllerAddr;
use hermes_controller::token::EnrolmentToken;

use crate::agent::StateDir;
use crate::run::Source;

/// Run a node from a document, or under a controller.
///
/// SIGHUP reloads the document, and so does a change of the document or of a certificate that it names. SIGTERM and
/// SIGINT drain the node: it accepts no connection, and live sessions may finish within the document's `drain`.
#[derive(Debug, Parser)]
#[command(override_usage = "hermes proxy --config <FILE> [OPTIONS]\n       \
                            hermes proxy --controller <URL> --state <DIR> [--token-file <FILE>] [OPTIONS]")]
pub(super) struct Proxy {
    /// Run this node document (YAML)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Get the identity and document from this controller. The node runs from --state while the controller is
    /// unreachable. Repeat or separate by commas for controllers that share a store
    #[arg(long, value_name = "URL", requires = "state", conflicts_with = "config", value_delimiter = ',')]
    controller: Vec<ControllerAddr>,
    /// Enrol with this token of `hermes token create`; needed once
    #[arg(long, env = "HERMES_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
    /// Read the token from this file, or - for standard input. The file is not needed after enrolment
    #[arg(long, value_name = "FILE", requires = "controller", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// Store the node's key, certificate and document in this directory
    #[arg(long, value_name = "DIR", requires = "controller")]
    state: Option<PathBuf>,
    /// Catches the positional files that `check` accepts, to report them. A second document would have no meaning.
    #[arg(hide = true)]
    stray: Option<PathBuf>,
    /// Hand listeners to a successor through this Unix socket. If another process listens there, take over its
    /// listeners first
    #[arg(long, value_name = "SOCKET")]
    takeover: Option<PathBuf>,
    /// Set the log filter of standard error: error, warn, info, debug, or a filter such as `info,hermes_proxy=debug`
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

/// Returns the token, wherever it is. An enrolled node needs none, and its file may be deleted.
pub(super) fn ticket(token: Option<&str>, file: Option<&Path>, state: &Path) -> anyhow::Result<Option<EnrolmentToken>> {
    let text = match (token, file) {
        (Some(token), _) => Some(token.to_owned()),
        (None, Some(file)) if file == Path::new("-") => Some(std::io::read_to_string(std::io::stdin())?),
        (None, Some(file)) if !file.exists() && StateDir::at(state).is_enrolled() => None,
        (None, Some(file)) => Some(crate::document::text(file)?),
        (None, None) => None,
    };
    text.map(|text| text.parse().map_err(anyhow::Error::msg)).transpose()
}

fn usage(stray: &Path) -> ! {
    let text = format!("unexpected argument; name the document with --config {}", stray.display());
    super::misuse("proxy", ErrorKind::UnknownArgument, &text)
}
