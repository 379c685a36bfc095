//! `hermes controller`: runs a controller.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Parser};
use hermes_controller::audit::Audit;
use hermes_controller::client::{self, PORT};
use hermes_controller::controller::{Controller, Refused};
use hermes_controller::server;
use hermes_controller::store::{Credentials, Etcd, Sqlite, Store, StoreError};
use hermes_net::tls::{CertifiedKey, Roots};

use crate::log::Log;
use crate::operator::{self, Operator};
use crate::signals::Signals;

/// A store that is away is asked again after this.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs a controller: keeps an overlay's documents, and gives each node what it is to run.
///
/// The first time it makes the overlay's certificate authority, and an operator's file, with which `hermes apply` and the like
/// may change everything. It can be stopped and started at any time; nodes go on meanwhile.
#[derive(Debug, Parser)]
pub(super) struct Run {
    #[command(flatten)]
    place: Place,
    /// Where it listens for nodes and operators.
    #[arg(long, value_name = "ADDR", default_value_t = SocketAddr::from(([127, 0, 0, 1], PORT)))]
    listen: SocketAddr,
    /// Names and addresses by which it is reached, where they are others than that of --listen; for its certificate.
    #[arg(long = "name", value_name = "HOST")]
    names: Vec<String>,
    /// What is logged on standard error.
    #[arg(long, env = "HERMES_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
}

/// Where a controller has what is its own.
#[derive(Debug, Args)]
pub(super) struct Place {
    /// The controller's directory: the store, the operator's file, and the audit log. It is made where it is not there.
    #[arg(long, value_name = "DIR", default_value = "hermes-controller")]
    pub(super) data: PathBuf,
    /// Where the overlay's state is: `sqlite`, a file in --data; or etcd, which several controllers share. Nothing of it is
    /// encrypted there, the authority's key included: whoever reads the store is the operator.
    #[arg(long, value_name = "sqlite|etcds://HOST:PORT", default_value = "sqlite")]
    store: String,
    /// Of etcds://: a file with the certificates of who vouches for its members (PEM). Whom this machine trusts where it is
    /// left out. `etcd://` is spoken to in the clear: for loopback, or a network where nobody else is.
    #[arg(long, value_name = "FILE")]
    store_ca: Option<PathBuf>,
    /// Of etcds://: the certificate that this controller shows to members that ask for one (PEM).
    #[arg(long, value_name = "FILE", requires = "store_key")]
    store_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "store_cert")]
    store_key: Option<PathBuf>,
}

impl Place {
    /// Opens the store.
    ///
    /// # Errors
    /// It is none, or another controller has it.
    pub(super) fn store(&self) -> anyhow::Result<Arc<dyn Store>> {
        Ok(match &*self.store {
            "sqlite" => Arc::new(Sqlite::open(&self.data)?),
            url => Arc::new(Etcd::new(url, self.credentials()?).map_err(anyhow::Error::msg)?),
        })
    }

    /// Reads the store, and makes the authority where there is none. A store that several controllers share may come later than they do, after a power cut: it is waited for.
    async fn start(&self, store: Arc<dyn Store>) -> Result<Controller, Refused> {
        loop {
            let started = async {
                let controller = Controller::start(store.clone()).await?;
                controller.authority().await?;
                Ok(controller)
            };
            match started.await {
                Err(error @ Refused::Store(StoreError::Unable(..))) if self.store != "sqlite" => {
                    tracing::warn!(again_in = ?AGAIN, "no overlay yet: {error}");
                    tokio::time::sleep(AGAIN).await;
                }
                started => return started,
            }
        }
    }

    fn credentials(&self) -> anyhow::Result<Credentials> {
        let roots = self.store_ca.as_deref().map(Roots::load).transpose().context("--store-ca")?;
        let own = self.store_cert.as_deref().zip(self.store_key.as_deref());
        let own =
            own.map(|(cert, key)| CertifiedKey::load(cert, key)).transpose().context("--store-cert, --store-key")?;
        Ok(Credentials { roots, own })
    }
}

impl Run {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let _log = Log::start(&self.log)?;
        hermes_net::own::raise_descriptor_limit(1 << 20);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(self.serve())?;
        Ok(ExitCode::SUCCESS)
    }

    async fn serve(self) -> anyhow::Result<()> {
        let data = &self.place.data;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data);
        made.with_context(|| format!("--data {} cannot be made", data.display()))?;
        let mut signals = Signals::new()?;
        let store = self.place.store()?;
        let controller = tokio::select! {
            started = self.place.start(store) => Arc::new(started?),
            name = end(&mut signals) => {
                tracing::info!(signal = name, "stopped");
                return Ok(());
            }
        };
        let audit = Arc::new(Audit::open(data).context("the audit log")?);
        let socket = tokio::net::TcpListener::bind(self.listen).await;
        let socket = socket.with_context(|| format!("--listen {}: cannot listen there", self.listen))?;
        let address = socket.local_addr()?;
        let host = self.names.first().cloned().unwrap_or_else(|| match address.ip() {
            any if any.is_unspecified() => "localhost".to_owned(),
            ip => ip.to_string(),
        });
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let place: client::Place = format!("https://{host}:{}", address.port()).parse().map_err(anyhow::Error::msg)?;
        let operator = data.join(operator::FILE);
        if !operator.exists() {
            Operator::create(&controller, &place, &operator)?;
            tracing::info!(file = %operator.display(), "an operator's file: `hermes apply --operator FILE -f DOCUMENTS`");
        }
        let mut hosts = self.names.clone();
        hosts.extend(["localhost".to_owned(), address.ip().to_string()]);
        tracing::info!(controller = %place, revision = controller.known().state.revision, "running");
        crate::notify::ready();
        let following = controller.clone();
        tokio::select! {
            served = server::serve(controller, audit, socket, hosts) => served?,
            () = following.follow() => {}
            name = end(&mut signals) => tracing::info!(signal = name, "stopped"),
        }
        Ok(())
    }
}

/// The signal that ends it.
async fn end(signals: &mut Signals) -> &'static str {
    loop {
        match signals.next().await {
            // There is nothing to be read again.
            "SIGHUP" => {}
            name => return name,
        }
    }
}
