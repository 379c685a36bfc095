//! `hermes envoy`: the identity of an Envoy, and its bootstrap file.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use hermes_controller::client::ControllerAddr;
use hermes_controller::compile::envoy;
use hermes_model::document::Bind;

use crate::agent::{StateDir, enrolled, keep_identity};
use crate::log::Log;
use crate::signals::Signals;

/// The name of Envoy's bootstrap file in the state directory.
const BOOTSTRAP: &str = "envoy.json";

/// Run an Envoy on this machine as a node whose document contains `runs: envoy`.
///
/// Enrols the node, writes DIR/envoy.json and renews the certificate, which Envoy reloads. Start Envoy separately as
/// the same user: `envoy -c DIR/envoy.json`. Each may be restarted without the other.
#[derive(Debug, Parser)]
pub(super) struct Envoy {
    /// Configure Envoy from this controller. Repeat or separate by commas for controllers that share a store
    #[arg(long, value_name = "URL", required = true, value_delimiter = ',')]
    controller: Vec<ControllerAddr>,
    /// Enrol with this token of `hermes token create`; needed once
    #[arg(long, env = "HERMES_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
    /// Read the token from this file, or - for standard input
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// Store the node's key, its certificate and Envoy's configuration in this directory
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Listen at this address for Envoy's admin endpoint [default: none]. Its clients can stop Envoy
    #[arg(long, value_name = "ADDR")]
    admin: Option<Bind>,
    /// Set the log filter of standard error: error, warn, info, debug, or a filter
    #[arg(long, env = "HERMES_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
}

impl Envoy {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let _log = Log::start(&self.log)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.accompany())?;
        Ok(ExitCode::SUCCESS)
    }

    async fn accompany(self) -> anyhow::Result<()> {
        let mut signals = Signals::new()?;
        let home = StateDir::open(&self.state)?;
        let ticket = super::proxy::ticket(self.token.as_deref(), self.token_file.as_deref(), &self.state)?;
        enrolled(&self.controller, &home, ticket).await?;
        let bootstrap = self.write(&home)?;
        tracing::info!("ready: envoy -c {}", bootstrap.display());
        tokio::select! {
            () = keep_identity(&self.controller, &home) => {}
            () = async {
                // Envoy's identity has no file to reload.
                while matches!(signals.next().await, "SIGHUP" | "SIGUSR1") {}
            } => tracing::info!("stopped"),
        }
        Ok(())
    }

    /// Writes the files that Envoy reads. The bootstrap file comes last.
    fn write(&self, home: &StateDir) -> anyhow::Result<PathBuf> {
        let absolute = |path: &Path| path.canonicalize().with_context(|| format!("--state {}", path.display()));
        let directory = absolute(&self.state)?;
        let directory = directory.to_str().context("--state: Envoy takes no path that is not UTF-8")?;
        for (file, content) in envoy::secrets(directory) {
            home.keep(&home.path(file), &serde_json::to_vec_pretty(&content)?)?;
        }
        // The certificate identifies the Envoy, whatever name the Envoy uses.
        let uris = home.identity()?.0.uris();
        let node = uris.iter().find_map(|uri| uri.split_once("/node/")).map_or("node", |(_, node)| node);
        let bootstrap = envoy::bootstrap(node, &self.controller, directory, self.admin.map(|admin| admin.0));
        let path = home.path(BOOTSTRAP);
        home.keep(&path, &serde_json::to_vec_pretty(&bootstrap)?)?;
        absolute(&path)
    }
}
