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
use hermes_controller::ca::Ca;
use hermes_controller::ca::{Seal, SealError};
use hermes_controller::client::{self, PORT};
use hermes_controller::controller::{ApplyError, Controller};
use hermes_controller::server;
use hermes_controller::store::{Credentials, Etcd, Sqlite, Store, StoreError};
use hermes_model::document::Bind;
use hermes_net::outage::{FailureCounts, OutageLog};
use hermes_net::tls::{CertifiedKey, Roots};

use crate::log::Log;
use crate::operator::{self, Operator};
use crate::signals::Signals;

/// Pause between two attempts to reach the store.
const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Run a controller, which stores the overlay's documents and sends each node its configuration.
///
/// The first start creates the overlay's CA and an operator's file. With that file, `hermes apply` and similar commands
/// may change everything. Nodes keep running while the controller is stopped.
#[derive(Debug, Parser)]
pub(super) struct Run {
    #[command(flatten)]
    place: Place,
    /// Listen for nodes and operators at ADDRESS:PORT, localhost:PORT, or :PORT for all IPv4 addresses
    #[arg(long, value_name = "ADDR", default_value_t = Bind(SocketAddr::from(([127, 0, 0, 1], PORT))))]
    listen: Bind,
    /// Serve `/healthz` and `/metrics` without TLS at this address [default: none]. Clients learn the number and status
    /// of nodes. `/healthz` is also public at --listen, over TLS
    #[arg(long, value_name = "ADDR")]
    admin: Option<Bind>,
    /// Add this name or address to the controller's certificate, if nodes reach it by another one than --listen. May be
    /// repeated
    #[arg(long = "name", value_name = "HOST")]
    names: Vec<String>,
    /// Encrypt the CA's key in the store and in backups with this file of 32 random bytes. The file is created if it
    /// does not exist, and an unencrypted store is encrypted from then on. Each controller of the overlay needs the
    /// file. Store it apart from backups: without it the key is lost
    #[arg(long, env = "HERMES_SEAL_FILE", value_name = "FILE")]
    seal_file: Option<PathBuf>,
    /// Set the log filter of standard error: error, warn, info, debug, or a filter
    #[arg(long, env = "HERMES_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
}

/// The controller's directory and store.
#[derive(Debug, Args)]
pub(super) struct Place {
    /// Store the database, the operator's file and the audit log in this directory. It is created if it does not exist
    #[arg(long, value_name = "DIR", default_value = "hermes-controller")]
    pub(super) data: PathBuf,
    /// Store the overlay's state in `sqlite`, a file in --data, or in etcd, which several controllers share. With
    /// --seal-file the CA's key is encrypted. Without it, anyone who reads the store controls the overlay
    #[arg(long, value_name = "sqlite|etcds://HOST:PORT", default_value = "sqlite")]
    store: String,
    /// Verify the members of etcds:// with these CA certificates (PEM) [default: the system's]. `etcd://` is plaintext:
    /// use it on loopback or an isolated network only
    #[arg(long, value_name = "FILE")]
    store_ca: Option<PathBuf>,
    /// Present this client certificate to members of etcds:// (PEM)
    #[arg(long, value_name = "FILE", requires = "store_key")]
    store_cert: Option<PathBuf>,
    /// Read the private key of the client certificate from this file (PEM)
    #[arg(long, value_name = "FILE", requires = "store_cert")]
    store_key: Option<PathBuf>,
}

impl Place {
    /// Opens the store.
    ///
    /// # Errors
    /// The store is invalid, or another controller uses it.
    pub(super) fn store(&self) -> anyhow::Result<Arc<dyn Store>> {
        Ok(match &*self.store {
            "sqlite" => Arc::new(Sqlite::open(&self.data)?),
            url => Arc::new(Etcd::new(url, self.credentials()?).map_err(anyhow::Error::msg)?),
        })
    }

    /// Repeats work that needs the store until the store is reachable. A shared store may start later than its
    /// controllers, for example after a power failure.
    async fn patiently<T>(&self, work: impl AsyncFn() -> Result<T, ApplyError>) -> Result<T, ApplyError> {
        let mut outage = OutageLog::default();
        loop {
            match work().await {
                Err(error @ ApplyError::Store(StoreError::Unable(..))) if self.store != "sqlite" => {
                    if let Some(FailureCounts { count, elapsed }) = outage.failed(&self.store, &error.to_string()) {
                        tracing::warn!(again_in = ?STORE_RETRY_DELAY, attempts = count, since = ?elapsed, "no overlay yet: {error}");
                    }
                    tokio::time::sleep(STORE_RETRY_DELAY).await;
                }
                done => return done,
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
        hermes_net::host::raise_descriptor_limit(1 << 20);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(self.serve())?;
        Ok(ExitCode::SUCCESS)
    }

    /// Reads the store, and creates the CA if it has none.
    async fn start(&self, store: Arc<dyn Store>) -> Result<Controller, ApplyError> {
        let controller = Controller::start(store).await?;
        let operator = self.place.data.join(operator::FILE);
        if controller.view().state.authority.is_none() && operator.exists() {
            // Nodes would reject everything that this controller issues now.
            return Err(ApplyError::Denied(format!(
                "the store has no overlay, and {} is of one; `hermes restore` puts a backup of that into the store. To begin \
                 another overlay take the file away",
                operator.display()
            )));
        }
        controller.unlock(self.seal(&controller).map_err(|error| ApplyError::Denied(error.to_string()))?).await?;
        controller.authority().await?;
        Ok(controller)
    }

    /// Returns the key that seals the CA's key in the store, if any.
    fn seal(&self, controller: &Controller) -> Result<Option<Seal>, SealError> {
        let Some(file) = &self.seal_file else { return Ok(None) };
        if let Some(seal) = Seal::read(file)? {
            return Ok(Some(seal));
        }
        if controller.view().state.authorities().any(Ca::is_sealed) {
            let why = "file not found, and the CA's key in the store is sealed with it; copy the file from where the \
                       controller ran before, or from another controller of this overlay";
            return Err(SealError::File { file: file.clone(), why: why.to_owned() });
        }
        let seal = Seal::create(file)?;
        tracing::info!(file = %file.display(), "new seal file; keep a copy, because the CA's key is lost without it");
        Ok(Some(seal))
    }

    async fn serve(self) -> anyhow::Result<()> {
        let data = &self.place.data;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data);
        made.with_context(|| format!("--data {} cannot be made", data.display()))?;
        let mut signals = Signals::new()?;
        let store = self.place.store()?;
        let controller = tokio::select! {
            started = self.place.patiently(async || self.start(store.clone()).await) => Arc::new(started?),
            name = end(&mut signals) => {
                tracing::info!(signal = name, "stopped");
                return Ok(());
            }
        };
        let audit = Arc::new(Audit::open(data).context("the audit log")?);
        let socket = tokio::net::TcpListener::bind(self.listen.0).await;
        let socket = socket.with_context(|| format!("--listen {}: cannot listen there", self.listen))?;
        let address = socket.local_addr()?;
        let admin = match self.admin {
            Some(admin) => Some(
                tokio::net::TcpListener::bind(admin.0)
                    .await
                    .with_context(|| format!("--admin {admin}: cannot listen there"))?,
            ),
            None => None,
        };
        let host = self.names.first().cloned().unwrap_or_else(|| match address.ip() {
            any if any.is_unspecified() => "localhost".to_owned(),
            ip => ip.to_string(),
        });
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let place: client::ControllerAddr =
            format!("https://{host}:{}", address.port()).parse().map_err(anyhow::Error::msg)?;
        if !self.names.is_empty() {
            controller.announce(place.to_string());
        }
        let operator = data.join(operator::FILE);
        if Operator::is_due(&operator, &controller) {
            let made = async || Operator::issue(&controller).await;
            let issued = tokio::select! {
                issued = self.place.patiently(made) => issued?,
                name = end(&mut signals) => {
                    tracing::info!(signal = name, "stopped");
                    return Ok(());
                }
            };
            issued.create(&place, &operator)?;
            tracing::info!(file = %operator.display(), "an operator's file: `hermes apply --operator FILE -f DOCUMENTS`");
        }
        let mut hosts = self.names.clone();
        hosts.extend(["localhost".to_owned(), address.ip().to_string()]);
        tracing::info!(controller = %place, revision = controller.view().state.revision, "running");
        crate::notify::ready();
        let following = controller.clone();
        tokio::select! {
            served = server::serve(controller, audit, (socket, admin), hosts) => served?,
            () = following.follow() => {}
            name = end(&mut signals) => tracing::info!(signal = name, "stopped"),
        }
        Ok(())
    }
}

/// Waits for the signal that ends the controller.
async fn end(signals: &mut Signals) -> &'static str {
    loop {
        match signals.next().await {
            // A controller has no file to reload.
            "SIGHUP" | "SIGUSR1" => {}
            name => return name,
        }
    }
}
