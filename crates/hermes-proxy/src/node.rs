//! A node: its workers, its sockets, its generations. The entry of this crate.
//!
//! In: checked snapshots, one after the other. Out: a running data plane. A snapshot is applied completely or not at
//! all: certificates are loaded, addresses bound and the log opened before the first worker sees it.

mod background;
mod devices;
mod dispatch;
mod orphaned_sockets;
mod redecide;
mod shutdown;
mod sockets;
mod view;
mod worker_loop;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use hermes_model::snapshot::Snapshot;
use hermes_net::fd_passing::{LabelledFd, read_text};
use hermes_net::quic::Group;
use hermes_net::transparent::Diversion;
use hermes_net::{host, tun, udp};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use self::background::Probers;
use self::devices::{FormerDevice, HeldDevice};
use self::dispatch::Dispatchers;
use self::orphaned_sockets::OrphanedSocket;
use self::sockets::{Socket, SocketKey, deal, steer_quic};
pub use self::view::NodeView;
use self::worker_loop::{Command, Start};
use crate::ip::{DeviceGuard, Share};
use crate::listener::relief::AcceptQueues;
use crate::listener::{ListeningSocket, Transport};
use crate::worker::Services;
use hermes_outbound::generation::{BuildError, Generation};
use hermes_outbound::reverse::channels::{Channels, Message};
use hermes_transport::metrics::ResultLabels;
use hermes_transport::runtime::Shared;
use hermes_transport::runtime::access_log::{self, LogWriter};

/// The capacity of a worker's command channel.
const COMMAND_QUEUE: usize = 64;
/// The poll interval for changes that no event signals.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The handover label of address leases without a session.
const RESTING_LEASES_LABEL: &str = "resting addresses";

struct WorkerHandle {
    commands: mpsc::Sender<Command>,
    /// Messages of other workers. The worker ends when it is told to, so the sender only keeps the channel open.
    messages: mpsc::Sender<Message>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Everything that a generation needs to run.
struct Prepared {
    opened: HashMap<SocketKey, Vec<Socket>>,
    made: HashMap<Arc<str>, HeldDevice>,
    /// The queues for each worker.
    queues: Vec<Vec<Share>>,
    for_worker: Vec<Vec<ListeningSocket>>,
    bound: HashMap<(Arc<str>, Transport), SocketKey>,
    /// Workers that broke, and get their listeners again.
    lost: Vec<usize>,
}

/// A running node.
pub struct Node {
    shared: Arc<Shared>,
    services: Arc<Services>,
    channels: Arc<Channels>,
    workers: Vec<WorkerHandle>,
    /// The log writer. Dropped after the workers: it then waits for the entries that they still write.
    log: LogWriter,
    current: Arc<ArcSwap<Generation>>,
    /// All listening sockets, kept here too so that they can be handed to another process.
    sockets: HashMap<SocketKey, Vec<Socket>>,
    /// Delivers packets to transparent sockets. Kept to the end, since sessions may outlive their listener and route.
    diversion: Option<Arc<Diversion>>,
    /// The socket of each listener in the running generation.
    bound: HashMap<(Arc<str>, Transport), SocketKey>,
    /// The way in which the kernel chooses among the sockets of each listener.
    dispatchers: Dispatchers,
    devices: HashMap<Arc<str>, HeldDevice>,
    /// Devices that the document no longer names.
    former: HashMap<Arc<str>, FormerDevice>,
    /// References to the devices of a node that shuts down.
    held: Vec<Arc<DeviceGuard>>,
    background: JoinSet<()>,
    /// Health checks in the background, by the upstream's ID.
    probers: HashMap<u64, Probers>,
    inherited: HashMap<String, Vec<OwnedFd>>,
    /// Listeners on UDP sockets that the predecessor still reads.
    held_back: HashSet<SocketKey>,
    /// Addresses of closed listeners, which live flows may still use.
    parted: HashSet<SocketKey>,
    /// The leases without a session: the predecessor's list, written at its handover, and this node's own for a
    /// successor.
    resting_before: Option<OwnedFd>,
    resting_here: Mutex<Option<OwnedFd>>,
    /// QUIC sockets of closed listeners, while connections on them live.
    lingering: Vec<(SocketKey, Weak<Group>)>,
    /// QUIC sockets of predecessors that have no listener here.
    orphans: Vec<OrphanedSocket>,
    /// The node no longer listens, whatever a document says.
    closed: bool,
    /// A predecessor still has the sockets, too.
    awaits_handover: bool,
}

/// The actual address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The listener's name.
    pub listener: Arc<str>,
    /// Protocol of the listener in the document, such as `http`.
    pub protocol: &'static str,
    /// Address or path of the socket, with the port that the system chose.
    pub address: BoundAddress,
}

/// Address or path of a listening socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoundAddress {
    /// Address, with the port that the system chose.
    Socket(SocketAddr),
    /// Path of a Unix socket.
    Unix(Arc<str>),
}

impl BoundAddress {
    /// `None` for a Unix socket.
    pub fn socket(&self) -> Option<SocketAddr> {
        match self {
            BoundAddress::Socket(address) => Some(*address),
            BoundAddress::Unix(_) => None,
        }
    }
}

impl std::fmt::Display for BoundAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BoundAddress::Socket(address) => address.fmt(f),
            BoundAddress::Unix(path) => path.fmt(f),
        }
    }
}

impl Node {
    /// Starts a node. `inherited` are the listening sockets of the predecessor; UDP sockets are not read before
    /// `read_inherited`.
    ///
    /// # Errors
    /// Every certificate that cannot be loaded and address that cannot be bound, with its path in the document.
    pub async fn start(snapshot: Arc<Snapshot>, inherited: Vec<LabelledFd>) -> Result<Self, Vec<BuildError>> {
        let fault =
            |path: &str, error: std::io::Error| vec![BuildError { path: path.to_owned(), reason: error.to_string() }];
        let count = snapshot.workers.unwrap_or_else(cores);
        let is_pinned = dispatch::pins(&snapshot, count);
        let shared = Arc::new(Shared::with_groups(count, dispatch::groups(&snapshot.dispatch, count)));
        let lost = shared.metrics.records_lost.clone();
        let log = LogWriter::start(snapshot.access_log.clone(), lost).map_err(|error| fault("access-log", error))?;
        let generation = Arc::new(Generation::build(snapshot, None)?);
        let (services, channels) = (Arc::<Services>::default(), Arc::<Channels>::default());
        let current = Arc::new(ArcSwap::new(generation.clone()));
        let mut workers = Vec::with_capacity(count);
        for number in 0..count {
            let start = |commands, messages| Start {
                number,
                is_pinned,
                shared: shared.clone(),
                services: services.clone(),
                channels: channels.clone(),
                current: current.clone(),
                log: log.sender(),
                commands,
                messages,
            };
            workers.push(start_worker(start).map_err(|error| fault("workers", error))?);
        }
        introduce(&workers, &shared, &channels);
        let is_successor = !inherited.is_empty();
        let mut by_label: HashMap<String, Vec<OwnedFd>> = HashMap::new();
        for handed in inherited {
            by_label.entry(handed.label).or_default().push(handed.fd);
        }
        let resting_before = by_label.remove(RESTING_LEASES_LABEL).and_then(|mut fds| fds.pop());
        let mut node = Self {
            shared,
            services,
            channels,
            log,
            workers,
            current,
            sockets: HashMap::new(),
            diversion: None,
            bound: HashMap::new(),
            dispatchers: Dispatchers::default(),
            devices: HashMap::new(),
            former: HashMap::new(),
            held: Vec::new(),
            background: JoinSet::new(),
            probers: HashMap::new(),
            inherited: by_label,
            held_back: HashSet::new(),
            parted: HashSet::new(),
            resting_before,
            resting_here: Mutex::default(),
            lingering: Vec::new(),
            orphans: Vec::new(),
            closed: false,
            awaits_handover: is_successor,
        };
        node.begin_custody(&generation.snapshot).map_err(|error| fault("state", error))?;
        node.run(generation).await?;
        node.await_captures().await;
        node.watch_addresses();
        node.background.spawn(async {
            let Err(error) = tun::reconcile().await;
            tracing::warn!(%error, "device reconciler stopped; only a reload restores removed routes and rules");
        });
        node.adopt_orphans();
        Ok(node)
    }

    /// Sets hosts and ports of the node's controllers, which no guarded route dials.
    pub fn controlled_by(&self, controllers: Vec<(String, u16)>) {
        self.shared.guard.controlled_by(controllers);
    }

    /// Sets the source of the count of lost log lines, for the metrics.
    pub fn count_lost_lines(&self, lost: impl Fn() -> usize + Send + Sync + 'static) {
        // Set only once, because a process has one log.
        let _ = self.shared.lost_lines.set(Box::new(lost));
    }

    /// Starts to read the UDP sockets of the predecessor, which has stopped reading. Earlier, this node would have
    /// taken datagrams of its live flows. TCP needs no such wait: either process may accept a connection.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub async fn read_inherited(&mut self) -> Result<(), Vec<BuildError>> {
        self.read_orphans();
        self.part_with_inherited();
        if let Some(resting) = self.resting_before.take().and_then(|fd| read_text(&fd).ok()) {
            self.services.given.go_on_resting(&resting);
        }
        self.awaits_handover = false;
        let held_back = std::mem::take(&mut self.held_back);
        let has_devices = self.read_devices();
        if held_back.is_empty() && !has_devices {
            self.dispatch(&self.current.load_full());
            return Ok(());
        }
        for group in held_back.iter().filter_map(|key| self.sockets.get(key)?.first()?.group()) {
            steer_quic(group);
        }
        self.run(self.current.load_full()).await
    }

    /// Waits until a device of this node was deleted or a worker broke: see [`Node::restore`].
    pub async fn something_lost(&self) {
        self.shared.something_lost.notified().await;
    }

    /// Creates deleted devices again, and gives workers that broke their listeners.
    ///
    /// # Errors
    /// The devices that could not be created. Everything else continues.
    pub async fn restore(&mut self) -> Result<(), Vec<BuildError>> {
        self.run(self.current.load_full()).await
    }

    /// Applies another snapshot. Live sessions that it permits continue. A closed node opens no listener for it, and
    /// only applies it to its remaining sessions.
    ///
    /// # Errors
    /// The files that cannot be loaded and addresses that cannot be bound. Nothing has changed then.
    pub async fn apply(&mut self, snapshot: Arc<Snapshot>) -> Result<u64, Vec<BuildError>> {
        let result = self.apply_or_refuse(snapshot).await;
        let label = if result.is_ok() { "applied" } else { "refused" };
        self.shared.metrics.reloads.get_or_create(&ResultLabels { result: label }).inc();
        result
    }

    /// Reopens the access log, because its file may have been rotated.
    pub fn reopen_log(&self) {
        self.log.reopen(self.generation().snapshot.access_log.clone());
    }

    /// Counts a document that failed `check`.
    pub fn refused(&self) {
        self.shared.metrics.reloads.get_or_create(&ResultLabels { result: "refused" }).inc();
    }

    async fn apply_or_refuse(&mut self, snapshot: Arc<Snapshot>) -> Result<u64, Vec<BuildError>> {
        let previous = self.current.load_full();
        access_log::probe(&snapshot.access_log)
            .map_err(|error| vec![BuildError { path: "access-log".to_owned(), reason: error.to_string() }])?;
        let workers = snapshot.workers.unwrap_or_else(cores);
        if workers != self.workers.len() {
            tracing::warn!(
                running = self.workers.len(),
                document = workers,
                "`workers` changes with the next start or takeover only"
            );
        }
        let (former, dispatch) = (&previous.snapshot.dispatch, &snapshot.dispatch);
        if (former.pin, former.locality) != (dispatch.pin, dispatch.locality) {
            tracing::warn!("`dispatch.pin` and `dispatch.locality` change with the next start or takeover only");
        }
        let generation = Arc::new(Generation::build(snapshot, Some(&previous))?);
        let (number, log) = (generation.number, generation.snapshot.access_log.clone());
        self.run(generation).await?;
        self.log.reopen(log);
        Ok(number)
    }

    /// Binds new sockets, tells the workers, and closes old sockets.
    async fn run(&mut self, generation: Arc<Generation>) -> Result<(), Vec<BuildError>> {
        let _kept = if self.closed { Vec::new() } else { self.await_going(&generation.snapshot).await };
        // Set before new listeners bind, and again with their actual addresses.
        self.guard_addresses(&generation);
        let prepared = self.prepare(&generation).inspect_err(|_| self.undo_devices())?;
        let Prepared { opened, made, queues, for_worker, bound, lost } = prepared;
        self.shared.found_workers(&lost);
        // No step after this can fail.
        self.services.custody.follow(&generation.snapshot);
        self.services.relays.follow(&generation.snapshot);
        self.services.caches.follow(&generation.snapshot, &|route| self.shared.metrics.cache(route));
        let former = self.keep_devices(made, &generation.snapshot);
        self.sockets.extend(opened);
        self.sockets.values_mut().flatten().for_each(Socket::keep);
        self.part_with_orphans();
        self.bound = bound;
        self.part_with_unused();
        self.follow_captures(&generation.snapshot);
        self.dispatch(&generation);
        self.current.store(generation.clone());
        self.guard_addresses(&generation);
        self.shared.metrics.generation.set(generation.number as i64);
        let accept_queues = self.accept_queues();
        let (mut sockets, mut queues) = (for_worker.into_iter(), queues.into_iter());
        let apply = |done| {
            let (sockets, devices) = (sockets.next().unwrap_or_default(), queues.next().unwrap_or_default());
            Command::Apply { generation: generation.clone(), sockets, queues: accept_queues.clone(), devices, done }
        };
        self.all_do(apply).await;
        drop(former);
        self.watch_health(&generation);
        self.tell_certificates(&generation);
        Ok(())
    }

    /// Tells the guard of targets the addresses of this node.
    fn guard_addresses(&self, generation: &Generation) {
        let addresses = self.addresses().into_iter().filter_map(|bound| bound.address.socket());
        self.shared.guard.listen(&generation.snapshot, addresses);
    }

    /// Performs every step that can fail.
    fn prepare(&mut self, generation: &Generation) -> Result<Prepared, Vec<BuildError>> {
        let listeners: &[_] = if self.closed { &[] } else { &generation.snapshot.listeners };
        udp::keep_in_kernel(generation.snapshot.limits.udp_buffer);
        let opened = if self.closed { HashMap::new() } else { self.open_sockets(&generation.snapshot)? };
        let mut for_worker: Vec<Vec<ListeningSocket>> = self.workers.iter().map(|_| Vec::new()).collect();
        let mut bound = HashMap::new();
        let lost = self.shared.lost_workers();
        let dispatch = generation.snapshot.dispatch.mode;
        let keys = listeners.iter().flat_map(|one| SocketKey::all_of(one, dispatch).map(move |key| (one, key)));
        for (listener, key) in keys {
            if self.held_back.contains(&key) {
                continue;
            }
            let place = (listener.name.clone(), key.transport);
            let is_new = self.bound.get(&place) != Some(&key);
            let sockets = self.sockets.get(&key).or_else(|| opened.get(&key)).map(Vec::as_slice);
            deal(sockets.unwrap_or_default(), &listener.name, key.transport, &mut for_worker, |worker| {
                is_new || lost.contains(&worker)
            })?;
            bound.insert(place, key);
        }
        // Devices come last: this step undoes its own changes on failure, and no later one could undo them.
        let (made, queues) = if self.closed { Default::default() } else { self.open_devices(&generation.snapshot)? };
        Ok(Prepared { opened, made, queues, for_worker, bound, lost })
    }

    /// Has the kernel choose workers as the document says. While a predecessor dispatches to the same sockets, nothing changes.
    fn dispatch(&mut self, generation: &Generation) {
        let (dispatch, workers) = (&generation.snapshot.dispatch, &self.shared.status);
        if self.awaits_handover {
            workers.sandbox.know(generation.snapshot.listeners.iter().map(|listener| listener.name.clone()));
        } else if !self.closed {
            self.dispatchers.follow(dispatch, workers, &self.bound, &self.sockets, &self.held_back);
        }
    }

    /// The TCP sockets of all listeners.
    fn accept_queues(&self) -> Arc<[AcceptQueues]> {
        let tcp = self.bound.iter().filter(|((_, transport), _)| *transport == Transport::Tcp);
        tcp.filter_map(|((listener, _), key)| {
            let sockets = self.sockets.get(key)?.iter().filter_map(Socket::tcp).map(Arc::downgrade).collect();
            Some(AcceptQueues { listener: listener.clone(), sockets })
        })
        .collect()
    }

    /// The actual addresses of the listeners.
    pub fn addresses(&self) -> Vec<Bound> {
        let generation = self.current.load();
        let mut all: Vec<Bound> = self
            .bound
            .iter()
            .filter(|((_, transport), _)| !matches!(transport, Transport::Quic | Transport::SharedTcp))
            .filter_map(|((name, _), key)| {
                let address = match key.path() {
                    Some(path) => BoundAddress::Unix(path.clone()),
                    None => BoundAddress::Socket(self.sockets.get(key)?.first()?.local_addr().ok()?),
                };
                let protocol = generation.listener(name)?.protocol.as_str();
                Some(Bound { listener: name.clone(), protocol, address })
            })
            .collect();
        all.sort_by(|one, other| one.listener.cmp(&other.listener));
        all
    }

    /// Waits until every worker has executed a command.
    async fn all_do(&self, mut told: impl FnMut(oneshot::Sender<()>) -> Command) {
        let mut waits = Vec::new();
        for worker in &self.workers {
            let (done, wait) = oneshot::channel();
            if worker.commands.send(told(done)).await.is_ok() {
                waits.push(wait);
            }
        }
        for wait in waits {
            let _ = wait.await;
        }
    }

    /// The view for the admin endpoint.
    pub fn view(&self) -> NodeView {
        NodeView {
            shared: self.shared.clone(),
            services: self.services.clone(),
            current: self.current.clone(),
            workers: self.workers.iter().map(|worker| worker.commands.clone()).collect(),
        }
    }

    /// The running generation.
    pub fn generation(&self) -> Arc<Generation> {
        self.current.load_full()
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn start_worker(
    start: impl FnOnce(mpsc::Receiver<Command>, mpsc::Receiver<Message>) -> Start,
) -> std::io::Result<WorkerHandle> {
    let (commands, command_receiver) = mpsc::channel(COMMAND_QUEUE);
    let (messages, message_receiver) = mpsc::channel(COMMAND_QUEUE);
    let start = start(command_receiver, message_receiver);
    let thread = std::thread::Builder::new().name(format!("worker-{}", start.number)).spawn(move || {
        if start.current.load().snapshot.identity.is_some() {
            hermes_net::tls::warm_up();
        }
        if start.is_pinned
            && let Err(error) = host::cores::pin(start.number)
        {
            tracing::warn!(worker = start.number, %error, "a worker has no core of its own");
        }
        if let Err(error) = worker_loop::run(start) {
            tracing::error!(%error, "a worker could not start");
        }
    })?;
    Ok(WorkerHandle { commands, messages, thread: Some(thread) })
}

/// Tells each worker how to reach the others.
fn introduce(workers: &[WorkerHandle], shared: &Shared, channels: &Channels) {
    channels.set(workers.iter().map(|worker| worker.messages.downgrade()).collect());
    let others: Vec<_> = workers.iter().map(|worker| worker.commands.downgrade()).collect();
    shared.displace_by(move |asking| {
        let others = others.iter().enumerate().filter(|(number, _)| *number != asking);
        for other in others.filter_map(|(_, other)| other.upgrade()) {
            let _ = other.try_send(Command::Displace);
        }
    });
}

#[cfg(test)]
mod tests;
