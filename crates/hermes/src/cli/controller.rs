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
use hermes_net::outage::{Attempts, OutageLog};
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
    /// Where it listens for nodes and operators: ADDRESS:PORT, localhost:PORT, or :PORT for all addresses of IPv4.
    #[arg(long, value_name = "ADDR", default_value_t = Bind(SocketAddr::from(([127, 0, 0, 1], PORT))))]
    listen: Bind,
    /// Where it answers to `/healthz` and `/metrics` without TLS. Whoever reaches that learns how many nodes there are and how
    /// they fare. With TLS, `/healthz` is at --listen for anybody.
    #[arg(long, value_name = "ADDR")]
    admin: Option<Bind>,
    /// Names and addresses by which it is reached, where they are others than that of --listen; for its certificate.
    #[arg(long = "name", value_name = "HOST")]
    names: Vec<String>,
    /// What the authority's key is encrypted with in the store, and in backups: a file of 32 random bytes, which is made where it is
    /// not there. A store without is encrypted from then on. Keep it elsewhere than backups, and give it to each controller of
    /// the overlay: without it the key is lost.
    #[arg(long, env = "HERMES_SEAL_FILE", value_name = "FILE")]
    seal_file: Option<PathBuf>,
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
    /// Where the overlay's state is: `sqlite`, a file in --data; or etcd, which several controllers share. Of it the authority's
    /// key alone is encrypted there, and that with --seal-file: else whoever reads the store is the operator.
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

    /// Does what needs the store. One that several controllers share may come later than they do, after a power cut: it is waited for.
    async fn patiently<T>(&self, work: impl AsyncFn() -> Result<T, ApplyError>) -> Result<T, ApplyError> {
        let mut outage = OutageLog::default();
        loop {
            match work().await {
                Err(error @ ApplyError::Store(StoreError::Unable(..))) if self.store != "sqlite" => {
                    if let Some(Attempts { count, elapsed }) = outage.failed(&self.store, &error.to_string()) {
                        tracing::warn!(again_in = ?AGAIN, attempts = count, since = ?elapsed, "no overlay yet: {error}");
                    }
                    tokio::time::sleep(AGAIN).await;
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
        hermes_net::own::raise_descriptor_limit(1 << 20);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(self.serve())?;
        Ok(ExitCode::SUCCESS)
    }

    /// Reads the store, and makes the authority where there is none.
    async fn start(&self, store: Arc<dyn Store>) -> Result<Controller, ApplyError> {
        let controller = Controller::start(store).await?;
        let operator = self.place.data.join(operator::FILE);
        if controller.view().state.authority.is_none() && operator.exists() {
            // Nodes would believe nothing of what this controller makes now.
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

    /// What the key in the store is, or is to be, sealed with.
    fn seal(&self, controller: &Controller) -> Result<Option<Seal>, SealError> {
        let Some(file) = &self.seal_file else { return Ok(None) };
        if let Some(seal) = Seal::read(file)? {
            return Ok(Some(seal));
        }
        if controller.view().state.authorities().any(Ca::is_sealed) {
            let why = "it is not there, and the authority's key in the store is sealed; bring the file with which it was, from where \
                       the controller ran before, or from another controller of this overlay";
            return Err(SealError::File { file: file.clone(), why: why.to_owned() });
        }
        let seal = Seal::create(file)?;
        tracing::info!(file = %file.display(), "a new seal; without it the authority's key is lost");
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

/// The signal that ends it.
async fn end(signals: &mut Signals) -> &'static str {
    loop {
        match signals.next().await {
            // There is nothing to be read again.
            "SIGHUP" | "SIGUSR1" => {}
            name => return name,
        }
    }
}
