//! A worker: a thread with a runtime, listeners, sessions and connections of its own.
//!
//! In: commands of the node (apply, drain, list). Out: served sessions. Workers share only counters, health, the log
//! and devices (`ip/`), so only devices take a lock for traffic. Every task belongs to the worker's set, and ends with
//! it.

mod redecide;
mod shared;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use hermes_model::snapshot::{AccessLog, Listener, ListenerProtocol};
use hermes_net::quic::{self, Endpoint, Tasks};
use hermes_net::resolve::Resolver;
use hermes_net::tun::IdleQueue;
use hermes_net::udp::ReceiveBuffer;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::LocalOptions;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

pub(crate) use self::redecide::moves;
pub(crate) use self::shared::Shared;
use crate::budget::Budget;
use crate::custody::keeper::{self, Keepers};
use crate::generation::Generation;
use crate::ip::{Devices, Share};
use crate::listener::quic::Doors;
use crate::listener::tun::Captures;
use crate::listener::{Acceptor, Ending, ListeningSocket, Transport};
use crate::live::{Live, SessionView};
use crate::record::{LogSender, Records};
use crate::reverse::arrival::{self, Arrived, Question};
use crate::reverse::uplink::{self, Uplinks};
use crate::shares::{Entries, Shares};
use crate::upstream::pool::idle::{self, Idle};
use crate::upstream::pool::{Pool, PoolKey};

/// The interval of the sweep and of the coarse clock.
const TICK: Duration = Duration::from_millis(100);

/// A command of the node to a worker.
pub(crate) enum Command {
    /// Runs this generation, with these sockets for its new listeners.
    Apply { generation: Arc<Generation>, sockets: Vec<ListeningSocket>, devices: Vec<Share>, done: oneshot::Sender<()> },
    /// Takes over a reverse connection that another worker accepted.
    Adopt(Box<Arrived>),
    /// Queries a node through its reverse connection on this worker.
    Ask(Box<Question>),
    /// Displaces entries that clients of this worker owe to those of others.
    Displace,
    /// Lists sessions, up to `most`.
    Sessions { most: usize, reply: oneshot::Sender<Vec<SessionView>> },
    /// Stops accepting. With `handed`, listeners and devices continue in a successor process, and packets for sessions
    /// here come through `passages`.
    Close { handed: bool, passages: Vec<(Arc<str>, IdleQueue)>, done: oneshot::Sender<()> },
    /// Drains: clients are told to go elsewhere.
    Drain { done: oneshot::Sender<()> },
    /// Ends now.
    Stop,
}

/// The generation, with a reference count of this worker alone. Requests on two workers would contend for the cache
/// line of a shared atomic count.
#[allow(clippy::redundant_allocation)] // See above.
pub(crate) type Current = Rc<Arc<Generation>>;

/// A worker's state, for its tasks.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) live: Live,
    pub(crate) records: Records,
    pub(crate) resolver: Resolver,
    pub(crate) udp_buffer: RefCell<ReceiveBuffer>,
    /// The buffer in which a run of datagrams is assembled for one send.
    pub(crate) udp_run: RefCell<Vec<u8>>,
    generation: RefCell<Current>,
    pools: RefCell<HashMap<PoolKey, Rc<Pool>, foldhash::fast::RandomState>>,
    /// Idle connections of all pools.
    pub(crate) idle: Idle,
    tasks: RefCell<JoinSet<()>>,
    /// The tasks of QUIC.
    pub(crate) quic: Tasks,
    pub(crate) quic_doors: RefCell<Doors>,
    /// Pending handshakes of clients.
    pub(crate) quic_handshakes: Cell<usize>,
    quic_clients: RefCell<[Option<Endpoint>; 2]>,
    /// The time at which they were last told of a network change.
    moved_at: Cell<u64>,
    /// The worker's number in the node.
    pub(crate) number: usize,
    pub(crate) devices: Devices,
    /// The rate limit of ICMP errors.
    answers: Budget,
    /// The worker's entries in tables that are shared among clients.
    pub(crate) entries: Entries,
    rng: RefCell<SmallRng>,
    clock: Cell<u64>,
    draining: Cell<bool>,
    /// Requests of routes with `retrieve` that wait for a retry.
    pub(crate) retrievals: Arc<Shares>,
    /// Reverse connections that this node dials.
    pub(crate) uplinks: Uplinks,
    /// Custody channels that this node dials.
    pub(crate) keepers: Keepers,
    /// The next session ID and the end of the worker's block.
    ids: Cell<(u64, u64)>,
}

/// The limit of ICMP errors of a worker in a second; each session has a much lower one.
const ANSWERS: u32 = 2000;
/// The time within which notices of a network change count as one, in milliseconds. Several connections notice each
/// change.
const MOVES_APART: u64 = 20;
/// The size of a block of session IDs.
const ID_BLOCK: u64 = 1024;

impl Worker {
    fn new(number: usize, shared: Arc<Shared>, generation: Arc<Generation>, log: LogSender) -> Self {
        let records = Records::new(generation.snapshot.node.clone(), log);
        records.set_enabled(generation.snapshot.access_log != AccessLog::Off);
        Self {
            clock: Cell::new(shared.now()),
            shared,
            live: Live::default(),
            records,
            resolver: Resolver::from_system(),
            udp_buffer: RefCell::default(),
            udp_run: RefCell::default(),
            generation: RefCell::new(Rc::new(generation)),
            pools: RefCell::default(),
            idle: Idle::default(),
            tasks: RefCell::default(),
            quic: Tasks::default(),
            quic_doors: RefCell::default(),
            quic_handshakes: Cell::default(),
            quic_clients: RefCell::default(),
            moved_at: Cell::new(0),
            number,
            devices: Devices::default(),
            answers: Budget::default(),
            entries: Entries::default(),
            retrievals: Arc::default(),
            rng: RefCell::new(SmallRng::from_os_rng()),
            draining: Cell::new(false),
            uplinks: Uplinks::default(),
            keepers: Keepers::default(),
            ids: Cell::new((0, 0)),
        }
    }

    /// Milliseconds of the node's clock at the last tick; precise enough for timeouts of seconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.get()
    }

    /// The running generation. Hold it for one decision, not for a session.
    pub(crate) fn generation(&self) -> Current {
        self.generation.borrow().clone()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// The name behind a virtual address, if a DNS listener assigned it. Holding the name reserves the address for it;
    /// a session does so in its authority.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<Arc<str>> {
        self.generation().name_tables().iter().find_map(|table| table.name_of(address, self.now()))
    }

    /// Random numbers, not for secrets.
    pub(crate) fn random(&self) -> (u128, u64) {
        let mut rng = self.rng.borrow_mut();
        (rng.random(), rng.random())
    }

    /// A session ID, unique in the process.
    pub(crate) fn next_id(&self) -> u64 {
        let (mut next, mut end) = self.ids.get();
        if next == end {
            next = self.shared.take_ids(ID_BLOCK);
            end = next + ID_BLOCK;
        }
        self.ids.set((next + 1, end));
        next
    }

    /// The endpoint for outgoing HTTP/3 connections.
    ///
    /// # Errors
    /// No socket can be opened.
    pub(crate) fn quic_client(&self, is_v4: bool) -> std::io::Result<Endpoint> {
        let mut clients = self.quic_clients.borrow_mut();
        let client = &mut clients[usize::from(is_v4)];
        match client {
            Some(endpoint) => Ok(endpoint.clone()),
            None => {
                let largest = self.generation().snapshot.limits.quic_largest_mtu;
                Ok(client.insert(quic::client_endpoint(is_v4, largest, &self.quic)?).clone())
            }
        }
    }

    /// True if an ICMP error may be sent now; their rate is limited (RFC 1812, section 4.3.2.8).
    pub(crate) fn takes_answer(&self) -> bool {
        self.answers.takes(self.now(), ANSWERS)
    }

    /// Migrates outgoing QUIC connections after a network change, once for all of them.
    pub(crate) fn move_quic_clients(&self) {
        let now = self.shared.now();
        if now < self.moved_at.replace(now) + MOVES_APART {
            return;
        }
        for client in self.quic_clients.borrow().iter().flatten() {
            if let Err(error) = quic::move_client(client) {
                tracing::warn!(%error, "connections over QUIC do not follow a change of the network at once");
            }
        }
    }

    /// Runs a task that ends with the worker at the latest.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) -> AbortHandle {
        self.tasks.borrow_mut().spawn_local(task)
    }

    /// The pool of an endpoint.
    pub(crate) fn pool(&self, key: PoolKey) -> Rc<Pool> {
        self.pools.borrow_mut().entry(key).or_insert_with(|| Rc::new(Pool::new())).clone()
    }

    /// Closes the upstream connections that were idle for longest, if the limit is reached.
    pub(crate) fn make_room_for_idle(&self) {
        let limit = self.generation().snapshot.limits.upstream_idle_connections;
        if !self.idle.is_full(limit) {
            return;
        }
        let pools = self.pools.borrow();
        let mut turns = Vec::new();
        pools.values().for_each(|pool| pool.idle_turns(&mut turns));
        let closed =
            idle::last_to_go(turns, limit).map_or(0, |last| pools.values().map(|pool| pool.close_idle(last)).sum());
        for _ in 0..closed {
            self.shared.metrics.limit("upstream-idle-connections");
        }
    }

    fn tick(&self) {
        self.clock.set(self.shared.now());
        self.live.sweep(self);
        self.entries.tick(self);
        self.records.flush(self);
        self.quic_doors.borrow().iter().filter_map(Weak::upgrade).for_each(|door| door.tell(self));
        if self.number == 0 {
            self.shared.custody.expire();
        }
        let idle = self.generation().snapshot.limits.upstream_idle;
        self.pools.borrow_mut().retain(|_, pool| !pool.sweep(self, idle));
    }

    fn retire_pools(&self) {
        let generation = self.generation();
        let owners = generation.owners();
        self.pools.borrow_mut().retain(|key, pool| {
            let kept = match key.node() {
                Some(node) => generation.node(node).is_some(),
                None => owners.contains(&key.owner),
            };
            if !kept {
                pool.retire();
            }
            kept
        });
    }

    async fn reap(&self) {
        std::future::poll_fn(|cx| self.tasks.borrow_mut().poll_join_next(cx)).await;
    }
}

/// The acceptors of each listener on a worker.
type Acceptors = HashMap<(Arc<str>, Transport), Vec<Acceptor>>;

/// The number of tasks polled before network events are read. A turn of a busy tunnel takes a millisecond.
const TASKS: u32 = 16;

/// Schedules another poll of the task after network events and all other tasks; `wake_by_ref` would poll it before
/// them.
pub(crate) fn go_on_later(cx: &mut Context<'_>) {
    // The first poll of `yield_now` schedules that; dropping the future undoes nothing.
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}

/// Runs a worker until it is told to stop. Called on a thread of its own.
pub(crate) fn run(
    number: usize,
    shared: Arc<Shared>,
    generation: Arc<Generation>,
    log: LogSender,
    commands: mpsc::Receiver<Command>,
) -> std::io::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().event_interval(TASKS).build_local(LocalOptions::default())?;
    runtime.block_on(async {
        let worker = Rc::new(Worker::new(number, shared, generation, log));
        serve_commands(&worker, commands).await;
        worker.live.end_all();
        // Ends every task; sessions write their access-log entries when dropped.
        let mut tasks = std::mem::take(&mut *worker.tasks.borrow_mut());
        tasks.shutdown().await;
        worker.records.flush(&worker);
        // Dropping the handles closes the connections, so that peers need not wait for an idle timeout.
        worker.pools.borrow_mut().clear();
        worker.quic_clients.take();
        worker.quic.finish().await;
    });
    Ok(())
}

async fn serve_commands(worker: &Rc<Worker>, mut commands: mpsc::Receiver<Command>) {
    let mut acceptors: Acceptors = HashMap::new();
    let mut captures = Captures::default();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Apply { generation, sockets, devices, done }) => {
                    let made = devices.iter().map(|share| share.device.name.clone()).collect();
                    worker.devices.begin(worker, devices);
                    apply(worker, &mut acceptors, generation, sockets).await;
                    captures.follow(worker, &made);
                    let _ = done.send(());
                }
                Some(Command::Adopt(arrived)) => arrival::adopt(worker, *arrived),
                Some(Command::Ask(question)) => arrival::ask(worker, *question),
                Some(Command::Displace) => worker.entries.displace_for_others(worker),
                Some(Command::Sessions { most, reply }) => drop(reply.send(worker.live.list(most))),
                Some(Command::Close { handed, passages, done }) => {
                    worker.draining.set(true);
                    worker.uplinks.stop_all();
                    if handed {
                        worker.keepers.stop_all();
                    }
                    let how = if handed { Ending::HandOver } else { Ending::Close };
                    for acceptor in acceptors.drain().flat_map(|(_, list)| list) {
                        acceptor.end(how).await;
                    }
                    if handed {
                        worker.devices.part(worker, passages);
                        captures.leave(worker);
                    } else {
                        captures.end();
                    }
                    let _ = done.send(());
                }
                Some(Command::Drain { done }) => {
                    worker.live.drain(worker);
                    let _ = done.send(());
                }
                Some(Command::Stop) | None => return,
            },
            _ = tick.tick() => worker.tick(),
            () = worker.reap(), if !worker.tasks.borrow().is_empty() => {}
        }
    }
}

async fn apply(
    worker: &Rc<Worker>,
    acceptors: &mut Acceptors,
    generation: Arc<Generation>,
    sockets: Vec<ListeningSocket>,
) {
    worker.records.set_enabled(generation.snapshot.access_log != AccessLog::Off);
    worker.records.forget_handles();
    let previous = worker.generation.replace(Rc::new(generation.clone()));
    for listener in &generation.snapshot.listeners {
        // The trust of a connection at its acceptance may be outdated.
        let differs = |old: &Arc<Listener>| {
            !old.admits_like(listener) || previous.client_roots(old) != generation.client_roots(listener)
        };
        if previous.listener(&listener.name).is_some_and(differs) {
            worker.live.drain_listener(worker, &listener.name);
        }
        // A peer's session is opened by the listener itself, and would be opened differently now.
        let is_other =
            |old: &Arc<Listener>| old.protocol != listener.protocol || old.set_headers != listener.set_headers;
        let carries = |old: &Arc<Listener>| matches!(old.protocol, ListenerProtocol::Ip(_));
        if previous.listener(&listener.name).is_some_and(|old| carries(old) && is_other(old)) {
            worker.live.end_sessions_of(&listener.name);
        }
    }
    // New acceptors first: a listener that moves serves both addresses for a moment, never none.
    let mut replaced = Vec::new();
    let named: HashSet<_> = sockets.iter().map(ListeningSocket::place).collect();
    for place in named {
        replaced.extend(acceptors.remove(&place).into_iter().flatten());
    }
    for socket in sockets {
        let place = socket.place();
        match Acceptor::start(worker, socket) {
            Ok(acceptor) => acceptors.entry(place).or_default().push(acceptor),
            Err(error) => tracing::error!(listener = %place.0, %error, "a listener could not start on this worker"),
        }
    }
    let is_gone = |(name, transport): &(Arc<str>, Transport)| {
        generation.listener(name).is_none_or(|listener| !Transport::all_of(listener).contains(transport))
    };
    let gone: Vec<_> = acceptors.keys().filter(|place| is_gone(place)).cloned().collect();
    for place in gone {
        replaced.extend(acceptors.remove(&place).into_iter().flatten());
        worker.live.drain_listener(worker, &place.0);
    }
    replaced.into_iter().for_each(Acceptor::close);
    worker.retire_pools();
    uplink::follow(worker);
    keeper::follow(worker);
    worker.spawn(redecide::all(worker.clone()));
}
