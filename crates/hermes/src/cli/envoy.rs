//! `hermes envoy`: an Envoy's identity, and the file with which it starts as a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use hermes_controller::client::ControllerAddr;
use hermes_controller::compile::envoy;
use hermes_model::document::Bind;

use crate::agent::{Home, enrolled, keep_identity};
use crate::log::Log;
use crate::signals::Signals;

/// What Envoy is started with, in the directory.
const BOOTSTRAP: &str = "envoy.json";

/// Makes an Envoy on this machine a node of the overlay, whose document says `runs: envoy`.
///
/// Enrols it, writes DIR/envoy.json, and then keeps its certificate renewed, which Envoy takes over by itself. Start Envoy
/// beside it, as the same user: `envoy -c DIR/envoy.json`. Either may be stopped and started without the other.
#[derive(Debug, Parser)]
pub(super) struct Envoy {
    /// The controller, by which Envoy is configured. Of several, which share one store, any will do.
    #[arg(long, value_name = "URL", required = true, value_delimiter = ',')]
    controller: Vec<ControllerAddr>,
    /// Leave to enrol, the first time: from `hermes token create`.
    #[arg(long, env = "HERMES_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
    /// A file with the token, or - for standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// The directory of the node's key and certificate, and of Envoy's file.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Where Envoy's own admin endpoint listens: whoever reaches it may stop Envoy. By default there is none.
    #[arg(long, value_name = "ADDR")]
    admin: Option<Bind>,
    /// What is logged on standard error.
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
        let home = Home::open(&self.state)?;
        let ticket = super::proxy::ticket(self.token.as_deref(), self.token_file.as_deref(), &self.state)?;
        enrolled(&self.controller, &home, ticket).await?;
        let bootstrap = self.write(&home)?;
        tracing::info!("ready: envoy -c {}", bootstrap.display());
        tokio::select! {
            () = keep_identity(&self.controller, &home) => {}
            () = async {
                // There is nothing to be read again.
                while matches!(signals.next().await, "SIGHUP" | "SIGUSR1") {}
            } => tracing::info!("stopped"),
        }
        Ok(())
    }

    /// What Envoy reads. The file that it is started with comes last.
    fn write(&self, home: &Home) -> anyhow::Result<PathBuf> {
        let absolute = |path: &Path| path.canonicalize().with_context(|| format!("--state {}", path.display()));
        let directory = absolute(&self.state)?;
        let directory = directory.to_str().context("--state: Envoy takes no path that is not UTF-8")?;
        for (file, content) in envoy::secrets(directory) {
            home.keep(&home.path(file), &serde_json::to_vec_pretty(&content)?)?;
        }
        // Whatever Envoy calls itself, it is known by its certificate.
        let uris = home.identity()?.0.uris();
        let node = uris.iter().find_map(|uri| uri.split_once("/node/")).map_or("node", |(_, node)| node);
        let bootstrap = envoy::bootstrap(node, &self.controller, directory, self.admin.map(|admin| admin.0));
        let path = home.path(BOOTSTRAP);
        home.keep(&path, &serde_json::to_vec_pretty(&bootstrap)?)?;
        absolute(&path)
    }
}
