//! The life of a node's process: read, build, listen, follow changes, drain.
//!
//! In: the path of a document. Out: a running node, until a signal or a successor ends it.
//! A document that cannot be run is refused with its reasons and changes nothing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use hermes_model::Snapshot;
use hermes_net::handover::Handed;
use hermes_proxy::{Node, admin};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::document;
use crate::handover::{self, Successors};
use crate::watch::Watch;

/// After a takeover the old process stays for its live tunnels, but not for ever.
const AFTER_TAKEOVER: Duration = Duration::from_secs(3600);
/// Descriptors that a node asks for, up to the hard limit.
const DESCRIPTORS: u64 = 1 << 20;
const ADMIN_LABEL: &str = "admin";

/// Why a node's process ends.
enum End {
    Signal(&'static str),
    TakenOver,
}

/// Runs a node until it is told to end.
///
/// # Errors
/// The document cannot be read or run.
pub(crate) fn proxy(config: &Path, takeover: Option<&Path>, log: &str) -> anyhow::Result<()> {
    start_log(log)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(config, takeover))
}

fn start_log(filter: &str) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(filter).context("--log is no filter; try info or debug")?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
    Ok(())
}

async fn run(config: &Path, takeover: Option<&Path>) -> anyhow::Result<()> {
    let limit = hermes_net::own::raise_descriptor_limit(DESCRIPTORS);
    // Before the document is read: a change in between must not be missed.
    let mut watch = Watch::new(config)?;
    let snapshot = load(config)?;
    if limit < (snapshot.limits.connections as u64) * 2 {
        tracing::warn!(
            descriptors = limit,
            connections = snapshot.limits.connections,
            "fewer descriptors than `limits.connections` may need; raise `ulimit -n`"
        );
    }
    let mut signals = Signals::new()?;
    let predecessor = takeover.map(handover::take).transpose()?.flatten();
    let (mut inherited, predecessor) = predecessor.map_or((Vec::new(), None), |(sockets, link)| (sockets, Some(link)));
    let admin_fd =
        inherited.iter().position(|handed| handed.label == ADMIN_LABEL).map(|index| inherited.swap_remove(index));
    let mut node = Node::start(snapshot.clone(), inherited).await.map_err(|faults| refused(config, &faults))?;
    for bound in node.addresses() {
        tracing::info!(listener = %bound.listener, address = %bound.address, protocol = bound.protocol, "listening");
    }
    let mut admin = Admin::start(&snapshot, &node, admin_fd)?;
    let mut successors = takeover.map(Successors::listen).transpose()?;
    if let Some(link) = predecessor {
        link.ready()?;
    }
    watch.follow(node.generation().files());
    tracing::info!(node = %snapshot.node, pid = std::process::id(), "running");
    let end = loop {
        tokio::select! {
            name = signals.next() => match name {
                "SIGHUP" => reload(config, &mut node, &mut watch, &mut admin).await,
                name => break End::Signal(name),
            },
            () = watch.changed() => reload(config, &mut node, &mut watch, &mut admin).await,
            link = Successors::next(&mut successors) => match link.hand_over(&sockets_of(&node, &admin)).await {
                Ok(()) => break End::TakenOver,
                Err(error) => tracing::error!(%error, "a takeover failed; this process goes on"),
            },
        }
    };
    finish(node, admin, end).await;
    Ok(())
}

fn load(config: &Path) -> anyhow::Result<Arc<Snapshot>> {
    match document::read(config)? {
        Ok(checked) => {
            for warning in &checked.warnings {
                tracing::warn!("{warning}");
            }
            Ok(Arc::new(checked.snapshot))
        }
        Err(problems) => Err(refused(config, &problems)),
    }
}

fn refused<T: std::fmt::Display>(config: &Path, problems: &[T]) -> anyhow::Error {
    let lines: Vec<String> = problems.iter().map(|problem| format!("\n  {problem}")).collect();
    anyhow::anyhow!("{} cannot be run:{}", config.display(), lines.concat())
}

/// Applies the document as it is now, or says why not and goes on with the old one.
async fn reload(config: &Path, node: &mut Node, watch: &mut Watch, admin: &mut Admin) {
    let started = std::time::Instant::now();
    let snapshot = match load(config) {
        Ok(snapshot) => snapshot,
        Err(error) => {
            node.refused();
            tracing::error!("{error:#}; the running configuration stays");
            return;
        }
    };
    match node.apply(snapshot.clone()).await {
        Ok(generation) => {
            watch.follow(node.generation().files());
            if let Err(error) = admin.follow(&snapshot, node) {
                tracing::error!("{error:#}; the admin endpoint stays where it is");
            }
            tracing::info!(generation, took = ?started.elapsed(), "applied");
        }
        Err(faults) => tracing::error!("{:#}; the running configuration stays", refused(config, &faults)),
    }
}

fn sockets_of(node: &Node, admin: &Admin) -> Vec<(String, std::os::fd::RawFd)> {
    let mut sockets = node.handover();
    sockets
        .extend(admin.socket.as_ref().map(|socket| (ADMIN_LABEL.to_owned(), std::os::fd::AsRawFd::as_raw_fd(socket))));
    sockets
}

async fn finish(node: Node, admin: Admin, end: End) {
    let generation = node.generation();
    let (within, handed) = match end {
        End::Signal(name) => {
            tracing::info!(signal = name, within = ?generation.snapshot.drain, "draining");
            (generation.snapshot.drain, false)
        }
        End::TakenOver => {
            tracing::info!("another process has the listeners; finishing what runs");
            (AFTER_TAKEOVER, true)
        }
    };
    admin.ready.store(false, Ordering::Release);
    let mut admin = admin;
    if handed {
        // The successor answers there now.
        admin.stop().await;
    }
    let left = node.drain(within, handed).await;
    admin.stop().await;
    if left > 0 {
        tracing::warn!(sessions = left, "ended before they were done: the drain time is over");
    }
    tracing::info!("stopped");
}

/// The admin endpoint and where it listens.
struct Admin {
    address: Option<std::net::SocketAddr>,
    socket: Option<std::net::TcpListener>,
    ready: admin::Readiness,
    task: JoinSet<()>,
}

impl Admin {
    fn start(snapshot: &Snapshot, node: &Node, inherited: Option<Handed>) -> anyhow::Result<Self> {
        let mut this =
            Self { address: None, socket: None, ready: Arc::new(AtomicBool::new(true)), task: JoinSet::new() };
        let socket = inherited.map(|handed| std::net::TcpListener::from(handed.fd));
        let fits = |socket: &std::net::TcpListener| socket.local_addr().ok() == snapshot.admin;
        match socket.filter(fits) {
            Some(socket) => this.serve(snapshot.admin, socket, node)?,
            None => this.follow(snapshot, node)?,
        }
        Ok(this)
    }

    /// Listens where the document says.
    fn follow(&mut self, snapshot: &Snapshot, node: &Node) -> anyhow::Result<()> {
        if snapshot.admin == self.address {
            return Ok(());
        }
        match snapshot.admin {
            None => {
                self.task.abort_all();
                (self.address, self.socket) = (None, None);
                Ok(())
            }
            Some(address) => {
                let socket =
                    hermes_net::tcp::listen(address).with_context(|| format!("admin: {address} cannot be bound"))?;
                self.task.abort_all();
                self.serve(Some(address), socket, node)
            }
        }
    }

    fn serve(
        &mut self,
        address: Option<std::net::SocketAddr>,
        socket: std::net::TcpListener,
        node: &Node,
    ) -> anyhow::Result<()> {
        socket.set_nonblocking(true)?;
        let shared = socket.try_clone()?;
        tracing::info!(address = %socket.local_addr()?, "admin endpoint");
        self.task.spawn(admin::serve(tokio::net::TcpListener::from_std(shared)?, node.view(), self.ready.clone()));
        (self.address, self.socket) = (address, Some(socket));
        Ok(())
    }

    async fn stop(&mut self) {
        self.task.shutdown().await;
        self.socket = None;
    }
}

struct Signals {
    hangup: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be received");
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.hangup.recv() => "SIGHUP",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
