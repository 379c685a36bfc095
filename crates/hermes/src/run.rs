//! The life cycle of a node's process: read the document, build, listen, follow changes, drain.
//!
//! In: the path of a document, or a controller. Out: a running node, until a signal or a takeover ends it. A document
//! that cannot be run is rejected with the reasons and changes nothing.

mod admin;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hermes_controller::client::ControllerAddr;
use hermes_controller::token::EnrolmentToken;
use hermes_model::{Checked, Snapshot};
use hermes_net::backoff::Backoff;
use hermes_net::fd_passing::LabelledFd;
use hermes_proxy::{Bound, Node};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::admin::Admin;
use crate::agent::{Agent, Instruction, StateDir, Wanted, history};
use crate::document;
use crate::log::Log;
use crate::signals::Signals;
use crate::takeover::{self, Successor, Successors};
use crate::watch::Watch;

/// After a takeover the old process keeps its live sessions for at most this long.
const AFTER_TAKEOVER: Duration = Duration::from_secs(3600);
/// The longest wait for the successor to listen at our path before this process exits.
const FAREWELL: Duration = Duration::from_secs(5);
/// The number of file descriptors to request, up to the hard limit.
const DESCRIPTORS: u64 = 1 << 20;
/// The time until all workers have dropped the previous generation. Its memory is then returned to the system.
const MEMORY_RETURN_DELAY: Duration = Duration::from_secs(1);
const ADMIN_LABEL: &str = "admin";
/// The admin socket in the directory of a node under a controller, whether or not its document has an `admin`.
pub(crate) const ADMIN_SOCKET: &str = "admin.sock";

/// The reason why a node's process ends.
enum End {
    Signal(&'static str),
    TakenOver(Successor),
}

/// The source of a node's document.
pub(crate) enum Source {
    /// A file, which is watched for changes.
    File(PathBuf),
    /// A controller provides the document. The node keeps the last good one.
    Controller {
        /// The controllers' addresses; all serve the same overlay.
        places: Vec<ControllerAddr>,
        /// The node's directory.
        state: PathBuf,
        /// An enrolment token.
        ticket: Option<EnrolmentToken>,
    },
}

/// Runs a node until a signal or a takeover ends it.
///
/// # Errors
/// The document cannot be read or run, or no controller provides one.
pub(crate) fn proxy(source: Source, takeover: Option<&Path>, log: &str) -> anyhow::Result<()> {
    let log = Log::start(log)?;
    // Huge pages would double the memory of an idle node, and no measurement showed them to be faster here. A kernel
    // without them fails this call, which does no harm.
    let _ = nix::sys::prctl::set_thp_disable(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match source {
            Source::File(config) => run(&config, &config, None, takeover, &log).await,
            Source::Controller { places, state, ticket } => {
                let home = StateDir::open(&state)?;
                let controllers = places.iter().map(ControllerAddr::host_and_port).collect();
                let agent = Agent::start(places, &home, ticket).await?;
                // The agent delivers documents, so the certificate is the only file to watch.
                run(&home.document(), &home.certificate(), Some((agent, controllers)), takeover, &log).await
            }
        }
    })
}

/// Waits for a document that can be read, unless one is stored already. Its instruction is answered once it runs.
async fn first_document(agent: &mut Agent, config: &Path) -> anyhow::Result<Option<Instruction>> {
    if std::fs::metadata(config).is_ok_and(|file| file.len() > 0) {
        return Ok(None);
    }
    tracing::info!("waiting for the first document");
    crate::notify::ready();
    while let Some(instruction) = agent.next().await {
        let document = match &instruction.wanted {
            Wanted::Document(document) => document.clone(),
            // The identity is read when the first document runs.
            Wanted::Identity => {
                instruction.answer(Ok(()));
                continue;
            }
            Wanted::Nothing => {
                tracing::warn!("this node is not part of the overlay; waiting until it is added");
                instruction.answer(Ok(()));
                continue;
            }
        };
        match read_document(config, &document) {
            Ok(_) => {
                // Rename makes the write atomic: a node killed meanwhile could never start again from a partial
                // document.
                let new = config.with_extension("first");
                let written = std::fs::write(&new, &document).and_then(|()| std::fs::rename(&new, config));
                written.with_context(|| format!("cannot write {}", config.display()))?;
                return Ok(Some(instruction));
            }
            Err(error) => {
                tracing::error!("the first document cannot be run: {error:#}");
                instruction.answer(Err(format!("{error:#}")));
            }
        }
    }
    anyhow::bail!("no document available")
}

async fn run(
    config: &Path,
    followed: &Path,
    agent: Option<(Agent, Vec<(String, u16)>)>,
    takeover: Option<&Path>,
    log: &Log,
) -> anyhow::Result<()> {
    let limit = hermes_net::host::raise_descriptor_limit(DESCRIPTORS);
    // The watch starts before the document is read, so that no change in between is missed.
    let mut watch = Watch::new(followed)?;
    let (mut agent, controllers) = agent.unzip();
    let mut first = match &mut agent {
        Some(agent) => first_document(agent, config).await?,
        None => None,
    };
    let mut snapshot = load(config, &watch)?;
    if limit < (snapshot.limits.connections as u64) * 2 {
        tracing::warn!(
            descriptors = limit,
            connections = limit / 2,
            "fewer descriptors than `limits.connections` needs; accepting fewer connections. Raise `ulimit -n`"
        );
    }
    let mut signals = Signals::new()?;
    let mut restoration = Restoration::default();
    let (mut node, mut admin, mut successors) = loop {
        match (start(config, takeover, &snapshot, &mut signals, &mut restoration).await, first.take(), &mut agent) {
            (Ok(begun), first, _) => {
                if let Some(first) = first {
                    first.answer(Ok(()));
                }
                break begun;
            }
            // The controller receives the error, and may have a better document.
            (Err(error), Some(refused), Some(agent)) if takeover.is_none() => {
                tracing::error!("the first document cannot be run: {error:#}");
                std::fs::remove_file(config)?;
                refused.answer(Err(format!("{error:#}")));
                first = first_document(agent, config).await?;
                snapshot = load(config, &watch)?;
            }
            (Err(error), ..) => return Err(error),
        }
    };
    node.count_lost_lines(log.lost());
    node.controlled_by(controllers.unwrap_or_default());
    if let Some(agent) = &agent {
        agent.observe(node.view());
        admin.listen_locally(&config.with_file_name(ADMIN_SOCKET), &node);
    }
    watch.follow(node.generation().files());
    tracing::info!(node = %snapshot.node, pid = std::process::id(), "running");
    crate::notify::ready();
    let mut retry = ReloadRetry::new();
    // Successors that were refused, until they have ended.
    let mut refused = JoinSet::new();
    let end = loop {
        tokio::select! {
            name = signals.next() => match name {
                "SIGHUP" => {
                    // The log is reopened even if the document cannot be applied.
                    node.reopen_log();
                    retry.follow(&reloaded(config, &mut node, &mut watch, &mut admin).await);
                }
                "SIGUSR1" => node.reopen_log(),
                name => break End::Signal(name),
            },
            () = watch.changed() => retry.follow(&reloaded(config, &mut node, &mut watch, &mut admin).await),
            () = retry.due() => retry.follow(&reloaded(config, &mut node, &mut watch, &mut admin).await),
            Some(instruction) = next(&mut agent) => obey(instruction, config, &mut node, &mut watch, &mut admin).await,
            () = restoration.due(&node) => restoration.restore(config, &mut node).await,
            link = Successors::next(&mut successors) => {
                if let Some(end) = hand_over(link, &node, &admin, &mut signals, &mut refused).await {
                    break end;
                }
            }
            // Undoes changes that a refused successor made after its refusal.
            Some(_) = refused.join_next() => node.roll_back(),
        }
    };
    finish(config, node, admin, end, successors, &mut signals, &mut watch).await;
    Ok(())
}

/// Starts a node. Everything that can fail comes before it serves the first session, so that a successor that must
/// give up has taken nothing from its predecessor.
async fn start(
    config: &Path,
    takeover: Option<&Path>,
    snapshot: &Arc<Snapshot>,
    signals: &mut Signals,
    restoration: &mut Restoration,
) -> anyhow::Result<(Node, Admin, Option<Successors>)> {
    let successors = takeover.map(Successors::bind).transpose()?;
    let predecessor = takeover.map(takeover::take).transpose()?.flatten();
    let nobody = takeover.filter(|_| predecessor.is_none()).map(nobody_there);
    let (mut inherited, predecessor) = predecessor.map_or((Vec::new(), None), |(sockets, link)| (sockets, Some(link)));
    let admin_fd =
        inherited.iter().position(|handed| handed.label == ADMIN_LABEL).map(|index| inherited.swap_remove(index));
    let mut admin = Admin::new();
    let alone = |error: anyhow::Error| match &nobody {
        Some(nobody) => anyhow::anyhow!("{error:#}\n  {nobody}"),
        None => error,
    };
    let prepared = admin.prepare(snapshot.admin, admin_fd).map_err(alone)?;
    let started = Node::start(snapshot.clone(), inherited).await;
    let mut node = started.map_err(|faults| alone(refused(config, &faults)))?;
    admin.follow(prepared, &node);
    let successors = match predecessor {
        None => successors.map(Successors::publish).transpose()?,
        Some(link) => {
            // A process that was told to end must not take over. After `ready` it would be too late to stop.
            let let_go = match signals.told_to_end().await {
                Some(name) => Err(anyhow::anyhow!("{name} before the takeover; the running process continues")),
                None => link.ready().await,
            };
            let _parted = match let_go {
                Ok(parted) => parted,
                Err(error) => {
                    admin.stop().await;
                    node.end().await;
                    return Err(error);
                }
            };
            // From here on only this process owns the sockets, so it continues despite any failure.
            if let Err(faults) = node.read_inherited().await {
                tracing::error!("not all sockets of the takeover are served yet: {:#}", refused(config, &faults));
                restoration.is_wanted = true;
            }
            let published = successors.map(Successors::publish).transpose();
            published.inspect_err(|error| tracing::error!("takeover disabled: {error:#}")).unwrap_or(None)
        }
    };
    tell_addresses(&node, &[]);
    Ok((node, admin, successors))
}

/// A further cause to report when a process with `--takeover` finds no predecessor and cannot start.
fn nobody_there(socket: &Path) -> String {
    let socket = socket.display();
    format!(
        "--takeover {socket}: no process listens there, so nothing was taken over. If an older process of this node runs, it was \
         started without this option, or with another path. Stop it first (SIGTERM); its sessions end with it. A process \
         that is started with this option can be taken over later"
    )
}

/// Logs the addresses that are new, and those that are closed.
fn tell_addresses(node: &Node, known: &[Bound]) {
    let now = node.addresses();
    for Bound { listener, address, protocol } in now.iter().filter(|bound| !known.contains(bound)) {
        tracing::info!(%listener, %address, protocol, "listening");
    }
    for Bound { listener, address, protocol } in known.iter().filter(|bound| !now.contains(bound)) {
        tracing::info!(%listener, %address, protocol, "closed: listens here no more");
    }
}

/// Hands the sockets to a successor. Signals are handled meanwhile; changes of the document wait.
async fn hand_over(
    mut successor: Successor,
    node: &Node,
    admin: &Admin,
    signals: &mut Signals,
    refused: &mut JoinSet<()>,
) -> Option<End> {
    let given = {
        let mut giving = std::pin::pin!(successor.hand_over(sockets_of(node, admin)));
        loop {
            tokio::select! {
                given = &mut giving => break Ok(given),
                name = signals.next() => match name {
                    "SIGHUP" => tracing::warn!("not reloading the document during a takeover"),
                    "SIGUSR1" => node.reopen_log(),
                    name => break Err(name),
                },
            }
        }
    };
    match given {
        Ok(Ok(())) => Some(End::TakenOver(successor)),
        Ok(Err(error)) => {
            tracing::error!("takeover failed; this process continues: {error:#}");
            refused.spawn(successor.refuse());
            node.roll_back();
            None
        }
        Err(name) => {
            // The successor receives the refusal; this process does not wait for its exit.
            drop(successor.refuse());
            Some(End::Signal(name))
        }
    }
}

/// Waits for the controller's next instruction, or forever without a controller.
async fn next(agent: &mut Option<Agent>) -> Option<Instruction> {
    match agent {
        Some(agent) => agent.next().await,
        None => std::future::pending().await,
    }
}

/// Applies a document from the controller. On failure it answers with the reason, and the previous document keeps
/// running.
async fn obey(instruction: Instruction, config: &Path, node: &mut Node, watch: &mut Watch, admin: &mut Admin) {
    let document = match &instruction.wanted {
        Wanted::Identity => {
            // This reload covers all changes up to now, so their notifications must not trigger another one.
            watch.read_files();
            return instruction.answer(reloaded(config, node, watch, admin).await);
        }
        Wanted::Document(document) => document.clone(),
        // A node that no longer belongs to the overlay serves nobody, and waits.
        Wanted::Nothing => format!("{{\"node\": \"{}\"}}", node.generation().snapshot.node).into(),
    };
    let started = std::time::Instant::now();
    let before = node.addresses();
    let snapshot = read_document(config, &document);
    let applied = match &snapshot {
        Ok(snapshot) => apply(config, snapshot, node, admin).await,
        Err(error) => {
            node.refused();
            Err(anyhow::anyhow!("{error:#}"))
        }
    };
    match applied {
        Ok(generation) => {
            watch.follow(node.generation().files());
            tell_addresses(node, &before);
            tracing::info!(generation, revision = instruction.revision, took = ?started.elapsed(), "applied");
            instruction.answer(Ok(()));
        }
        Err(error) => {
            tracing::error!(revision = instruction.revision, "the running configuration stays: {error:#}");
            instruction.answer(Err(format!("{error:#}")));
        }
    }
}

/// Checks a document that is about to be stored as `config`.
fn read_document(config: &Path, document: &[u8]) -> anyhow::Result<Arc<Snapshot>> {
    // Revoked keys stay revoked, even if the controller has forgotten them.
    let document = history::with_revoked(config, document)?;
    settled(config, document::check_json(config, &document))
}

fn load(config: &Path, watch: &Watch) -> anyhow::Result<Arc<Snapshot>> {
    if !watch.is_of(config) {
        // A controller has compiled the document, so hints for its author would be useless here.
        let document = std::fs::read(config).with_context(|| format!("cannot read {}", config.display()))?;
        return read_document(config, &document);
    }
    settled(config, document::read_at_once(config)?)
}

fn settled<T: std::fmt::Display>(config: &Path, checked: Result<Checked, Vec<T>>) -> anyhow::Result<Arc<Snapshot>> {
    // Parsing a large document needs several times the memory of its snapshot.
    #[expect(clippy::disallowed_methods, reason = "ends by itself after a second and changes nothing")]
    tokio::spawn(async {
        tokio::time::sleep(MEMORY_RETURN_DELAY).await;
        hermes_net::allocator::return_free();
    });
    match checked {
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

/// Applies the current document. On failure the error is logged and the previous one keeps running.
async fn reload(config: &Path, node: &mut Node, watch: &mut Watch, admin: &mut Admin) {
    // The callee has logged the error.
    let _ = reloaded(config, node, watch, admin).await;
}

/// The same as `reload`, but returns the error as well.
async fn reloaded(config: &Path, node: &mut Node, watch: &mut Watch, admin: &mut Admin) -> Result<(), String> {
    let started = std::time::Instant::now();
    let snapshot = match load(config, watch) {
        Ok(snapshot) => snapshot,
        Err(error) => {
            node.refused();
            tracing::error!("the running configuration stays: {error:#}");
            return Err(format!("{error:#}"));
        }
    };
    let before = node.addresses();
    match apply(config, &snapshot, node, admin).await {
        Ok(generation) => {
            watch.follow(node.generation().files());
            tell_addresses(node, &before);
            tracing::info!(generation, took = ?started.elapsed(), "applied");
            Ok(())
        }
        Err(error) => {
            // Files that were missing or inconsistent may still change, so they are watched as well.
            let named = document::files(&snapshot);
            let running = node.generation();
            watch.follow(running.files().chain(named.iter().map(|(_, file)| *file)));
            tracing::error!("the running configuration stays: {error:#}");
            Err(format!("{error:#}"))
        }
    }
}

/// Retries a reload that failed because descriptors or memory were exhausted, since no other event would trigger it
/// again.
struct ReloadRetry {
    is_wanted: bool,
    pace: Backoff,
}

impl ReloadRetry {
    fn new() -> Self {
        Self { is_wanted: false, pace: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)) }
    }

    /// Waits until a retry is due.
    async fn due(&self) {
        if !self.is_wanted {
            std::future::pending().await
        }
        self.pace.due().await;
    }

    /// Schedules a retry if the reload failed for want of resources.
    fn follow(&mut self, outcome: &Result<(), String>) {
        self.is_wanted = outcome.as_ref().is_err_and(|reason| hermes_net::host::tells_of_lack(reason));
        if self.is_wanted {
            let pause = self.pace.begin();
            tracing::warn!(again_in = ?pause, "the reload failed for want of resources; retrying");
        }
    }
}

/// Restores devices that were deleted, and serves what could not be served before: at once, then with backoff.
struct Restoration {
    /// A device was deleted or could not be created, or an inherited socket is not served yet.
    is_wanted: bool,
    pace: Backoff,
}

impl Default for Restoration {
    fn default() -> Self {
        Self { is_wanted: false, pace: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)) }
    }
}

impl Restoration {
    /// Waits until a restoration is due. Cancel-safe.
    async fn due(&mut self, node: &Node) {
        if !self.is_wanted {
            node.something_lost().await;
            // The node reports each loss once, so it is noted here.
            self.is_wanted = true;
        }
        self.pace.due().await;
    }

    async fn restore(&mut self, config: &Path, node: &mut Node) {
        let pause = self.pace.begin();
        self.is_wanted = match node.restore().await {
            Ok(()) => {
                tracing::info!("deleted devices and broken workers are restored");
                false
            }
            Err(faults) => {
                let reason = refused(config, &faults);
                tracing::error!(again_in = ?pause, "cannot recreate a device: {reason:#}");
                true
            }
        };
    }
}

/// Applies a document and its admin endpoint, both or neither.
async fn apply(config: &Path, snapshot: &Arc<Snapshot>, node: &mut Node, admin: &mut Admin) -> anyhow::Result<u64> {
    let prepared = admin.prepare(snapshot.admin, None).inspect_err(|_| node.refused());
    let prepared = prepared.map_err(|error| refused(config, &[format!("{error:#}")]))?;
    let generation = node.apply(snapshot.clone()).await.map_err(|faults| refused(config, &faults))?;
    admin.follow(prepared, node);
    Ok(generation)
}

fn sockets_of(node: &Node, admin: &Admin) -> std::io::Result<Vec<LabelledFd>> {
    let mut sockets = node.handover()?;
    if let Some(socket) = &admin.socket {
        sockets.push(LabelledFd { label: ADMIN_LABEL.to_owned(), fd: socket.try_clone()?.into() });
    }
    Ok(sockets)
}

/// Drains the node. Changes of the document still apply: sessions that it now forbids end. A further signal shortens
/// the wait: after a takeover first to `drain`, otherwise to zero.
async fn finish(
    config: &Path,
    mut node: Node,
    mut admin: Admin,
    end: End,
    successors: Option<Successors>,
    signals: &mut Signals,
    watch: &mut Watch,
) {
    let drain = node.generation().snapshot.drain;
    let handed = matches!(end, End::TakenOver(_));
    let mut shortened = match &end {
        End::Signal(name) => {
            tracing::info!(signal = name, within = ?drain, "draining");
            vec![Duration::ZERO]
        }
        End::TakenOver(_) => {
            tracing::info!("another process has the listeners; finishing what runs");
            vec![Duration::ZERO, drain]
        }
    };
    admin.leave();
    if !handed {
        // Not after a takeover: the service manager's stop timeout would end the sessions early.
        crate::notify::stopping();
    }
    if handed {
        // The successor now serves the admin endpoint.
        admin.stop().await;
    }
    node.close(handed).await;
    // Without a takeover, callers must not wait for this process to exit.
    let successors = successors.filter(|_| handed);
    let mut parting = JoinSet::new();
    if let End::TakenOver(successor) = end {
        parting.spawn(successor.finish(successors));
    }
    let mut deadline = Instant::now() + if handed { AFTER_TAKEOVER } else { drain };
    loop {
        tokio::select! {
            () = node.emptied() => break,
            () = tokio::time::sleep_until(deadline) => break,
            () = watch.changed() => reload(config, &mut node, watch, &mut admin).await,
            name = signals.next() => match name {
                "SIGHUP" => {
                    node.reopen_log();
                    reload(config, &mut node, watch, &mut admin).await;
                }
                "SIGUSR1" => node.reopen_log(),
                name => {
                    let within = shortened.pop().unwrap_or_default();
                    tracing::info!(signal = name, ?within, "draining");
                    deadline = deadline.min(Instant::now() + within);
                }
            },
        }
    }
    let left = node.end().await;
    admin.stop().await;
    let _ = tokio::time::timeout(FAREWELL, parting.join_next()).await;
    if left > 0 {
        tracing::warn!(sessions = left, "drain timeout; closed active sessions");
    }
    tracing::info!("stopped");
}
