//! One worker: a thread with a runtime, listeners, sessions and connections of its own.
//!
//! In: commands of the node (apply, drain, list). Out: served sessions. Nothing of a worker is
//! shared with another, but for counters, health, the log and devices (`ip/`): nothing else here takes a lock
//! for traffic. Every task is in the worker's set and ends with it.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hermes_model::decide::{Decision, decide};
use hermes_model::facts::{Facts, Kind, Trust};
use hermes_model::snapshot::{AccessLog, Action, Listener, ListenerProtocol, OnChange, Route};
use hermes_model::trust::{HERMES_USER, Identity, identify, listener_user};
use hermes_net::quic::{self, Endpoint, Tasks};
use hermes_net::resolve::Resolver;
use hermes_net::tun::IdleQueue;
use hermes_net::udp::ReceiveBuffer;
use http::StatusCode;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::LocalOptions;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::budget::{Budget, Shares};
use crate::error::Error;
use crate::generation::Generation;
use crate::ip::{Devices, Given, Share};
use crate::listener::quic::Doors;
use crate::listener::tun::Captures;
use crate::listener::{Acceptor, Ending, ListeningSocket, Transport};
use crate::live::{Entry, Live, SessionView};
use crate::metrics::Metrics;
use crate::record::{LogSender, Records};
use crate::reverse::Presence;
use crate::reverse::arrival::{self, Arrived, Question};
use crate::reverse::uplink::{self, Uplinks};
use crate::seldom::Seldom;
use crate::upstream::pool::idle::{self, Idle};
use crate::upstream::pool::{Pool, PoolKey};

/// The sweep and the coarse clock tick so often.
const TICK: Duration = Duration::from_millis(100);
/// A reload decides so many live sessions again before traffic gets its turn: well under a millisecond.
const REDECIDE_SLICE: usize = 256;

/// What all workers of a node see.
pub(crate) struct Shared {
    /// How many of them there are.
    pub(crate) workers: usize,
    pub(crate) metrics: Metrics,
    pub(crate) no_route: Arc<str>,
    /// Tunnels under way, on all workers.
    tunnels: AtomicUsize,
    epoch: Instant,
    ids: AtomicU64,
    own_addresses: ArcSwap<HashSet<IpAddr>>,
    /// Changes with the machine's links, addresses and routes.
    pub(crate) network: watch::Sender<()>,
    /// Somebody has deleted a device.
    pub(crate) device_lost: Notify,
    /// Workers that pass packets on to the process before us.
    pub(crate) elders: AtomicUsize,
    /// All of them, by number: for what one of them accepted and another one is to have.
    others: OnceLock<Vec<mpsc::WeakSender<Command>>>,
    /// Failed handshakes, said now and then.
    pub(crate) handshakes: Seldom,
    /// Questions that nobody could be asked.
    pub(crate) unanswered: Seldom,
    /// Packets of those who are no peers.
    pub(crate) strangers: Seldom,
    /// Addresses that were asked for and are others'.
    pub(crate) refused_addresses: Seldom,
    /// What clients of devices were given.
    pub(crate) given: Arc<Given>,
    /// Who knows how many lines of the log were lost.
    pub(crate) lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// Of a node with so many workers.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers,
            others: OnceLock::new(),
            network: watch::Sender::new(()),
            device_lost: Notify::new(),
            elders: AtomicUsize::new(0),
            metrics: Metrics::default(),
            no_route: Arc::from("none"),
            tunnels: AtomicUsize::new(0),
            epoch: Instant::now(),
            ids: AtomicU64::new(1),
            own_addresses: ArcSwap::from_pointee(hermes_net::own::addresses()),
            handshakes: Seldom::default(),
            unanswered: Seldom::default(),
            strangers: Seldom::default(),
            refused_addresses: Seldom::default(),
            given: Arc::default(),
            lost_lines: OnceLock::new(),
        }
    }

    /// Takes a place among the node's tunnels; false where all `limit` are taken.
    pub(crate) fn enter_tunnel(&self, limit: usize) -> bool {
        let enter = |open: usize| (open < limit).then_some(open + 1);
        let entered = self.tunnels.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter);
        entered.inspect_err(|_| self.metrics.limit("tunnels")).is_ok()
    }

    /// Gives such a place back.
    pub(crate) fn leave_tunnel(&self) {
        self.tunnels.fetch_sub(1, Ordering::Relaxed);
    }

    /// Milliseconds since the node began.
    pub(crate) fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// This machine's addresses, as of a few seconds ago.
    pub(crate) fn own_addresses(&self) -> Arc<HashSet<IpAddr>> {
        self.own_addresses.load_full()
    }

    /// The workers that have started.
    pub(crate) fn meet(&self, workers: Vec<mpsc::WeakSender<Command>>) {
        // Once a node.
        let _ = self.others.set(workers);
    }

    /// Gives a connection to another worker; false where that is not to be had.
    pub(crate) fn pass_on(&self, worker: usize, arrived: Arrived) -> bool {
        let other = self.others.get().and_then(|all| all.get(worker)?.upgrade());
        other.is_some_and(|other| other.try_send(Command::Adopt(Box::new(arrived))).is_ok())
    }

    /// What a node that keeps connections to us answers to a GET.
    ///
    /// # Errors
    /// There is no answer, in words.
    pub(crate) async fn ask_node(&self, presence: &Arc<Presence>, path: &str) -> Result<StatusCode, String> {
        let gone = || "its connection is gone".to_owned();
        let worker = presence.latest().and_then(|worker| self.others.get()?.get(worker)?.upgrade()).ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let question = Question { presence: presence.clone(), path: path.to_owned(), reply };
        worker.send(Command::Ask(Box::new(question))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Looks at the interfaces again.
    pub(crate) fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::own::addresses()));
    }
}

/// What the node tells a worker.
pub(crate) enum Command {
    /// Run this generation, with these sockets for its new listeners.
    Apply { generation: Arc<Generation>, sockets: Vec<ListeningSocket>, devices: Vec<Share>, done: oneshot::Sender<()> },
    /// Have this connection, which a node keeps to us and another worker accepted.
    Adopt(Box<Arrived>),
    /// Ask a node whose connection this worker has.
    Ask(Box<Question>),
    /// List sessions, at most so many.
    Sessions { most: usize, reply: oneshot::Sender<Vec<SessionView>> },
    /// Accept no more, let what runs finish. `handed` listeners live on in another process, and devices, whose packets
    /// for sessions here come by passages.
    Drain { handed: bool, passages: Vec<(Arc<str>, IdleQueue)>, done: oneshot::Sender<()> },
    /// End now.
    Stop,
}

/// The generation, counted by this worker alone: requests of two workers would fight for the
/// cache line of one atomic count.
#[allow(clippy::redundant_allocation)] // See above.
pub(crate) type Current = Rc<Arc<Generation>>;

/// A worker's state, for its tasks.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) live: Live,
    pub(crate) records: Records,
    pub(crate) resolver: Resolver,
    pub(crate) udp_buffer: RefCell<ReceiveBuffer>,
    /// Where a run of datagrams is put together for one send.
    pub(crate) udp_run: RefCell<Vec<u8>>,
    generation: RefCell<Current>,
    pools: RefCell<HashMap<PoolKey, Rc<Pool>>>,
    /// Of all pools.
    pub(crate) idle: Idle,
    tasks: RefCell<JoinSet<()>>,
    /// QUIC's own.
    pub(crate) quic: Tasks,
    pub(crate) quic_doors: RefCell<Doors>,
    /// Handshakes of clients that are under way.
    pub(crate) quic_handshakes: Cell<usize>,
    quic_clients: RefCell<[Option<Endpoint>; 2]>,
    /// When they were told that the network changed.
    moved_at: Cell<u64>,
    /// Which of the node's workers it is.
    pub(crate) number: usize,
    pub(crate) devices: Devices,
    /// Answers to packets.
    answers: Budget,
    /// Questions to other servers that are under way, by who asks.
    pub(crate) dns_clients: Shares,
    rng: RefCell<SmallRng>,
    clock: Cell<u64>,
    draining: Cell<bool>,
    /// Connections that this node keeps to others.
    pub(crate) uplinks: Uplinks,
    /// The next of a block of ids: workers take them in blocks.
    ids: Cell<(u64, u64)>,
}

/// Errors about packets that a worker answers with in a second; each of its sessions has far fewer.
const ANSWERS: u32 = 2000;
/// Several of our connections notice one change of the network: milliseconds within which it is the same.
const MOVES_APART: u64 = 20;
/// Ids that a worker takes at once.
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
            dns_clients: Shares::default(),
            rng: RefCell::new(SmallRng::from_os_rng()),
            draining: Cell::new(false),
            uplinks: Uplinks::default(),
            ids: Cell::new((0, 0)),
        }
    }

    /// Milliseconds of the node's clock, as of the last tick: for what is compared with seconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.get()
    }

    /// What runs now. Hold it for one decision, not for a session.
    pub(crate) fn generation(&self) -> Current {
        self.generation.borrow().clone()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// The name that an address stands for, where a DNS listener gave it to one. Whoever holds it keeps
    /// that address from any other name: a session does, in its authority.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<Arc<str>> {
        self.generation().name_tables().iter().find_map(|table| table.name_of(address, self.now()))
    }

    /// Random numbers, not for secrets.
    pub(crate) fn random(&self) -> (u128, u64) {
        let mut rng = self.rng.borrow_mut();
        (rng.random(), rng.random())
    }

    /// A number for a session, unique in the process.
    pub(crate) fn next_id(&self) -> u64 {
        let (mut next, mut end) = self.ids.get();
        if next == end {
            next = self.shared.ids.fetch_add(ID_BLOCK, Ordering::Relaxed);
            end = next + ID_BLOCK;
        }
        self.ids.set((next + 1, end));
        next
    }

    /// The endpoint for HTTP/3 connections of our own.
    ///
    /// # Errors
    /// No socket is to be had.
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

    /// Whether a packet may be answered with an error now; nobody is answered without end (RFC 1812, 4.3.2.8).
    pub(crate) fn takes_answer(&self) -> bool {
        self.answers.takes(self.now(), ANSWERS)
    }

    /// The machine's network has changed: connections of ours over QUIC say so to their peers, once for all of them.
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

    /// Closes the connections to upstreams that were idle for longest, where one more would be too many.
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
        self.records.flush(self);
        self.quic_doors.borrow().iter().filter_map(Weak::upgrade).for_each(|door| door.tell(self));
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

/// What runs on a worker for each listener.
type Acceptors = HashMap<(Arc<str>, Transport), Vec<Acceptor>>;

/// Decides live sessions again after a swap: each stays, ends or moves.
async fn redecide(worker: Rc<Worker>) {
    let generation = worker.generation();
    let entries: Vec<Rc<Entry>> = worker.live.sessions.borrow().iter().map(|(_, entry)| entry.clone()).collect();
    for slice in entries.chunks(REDECIDE_SLICE) {
        for entry in slice {
            redecide_one(&generation, entry);
        }
        tokio::task::yield_now().await;
    }
}

fn redecide_one(generation: &Generation, entry: &Entry) {
    let listener = generation.listener(&entry.facts.listener);
    // Its listener is gone: it drains, whatever the routes say of new ones. A link would for days.
    if listener.is_none() && entry.facts.kind != Kind::Ip {
        return;
    }
    if !still_proves(generation, listener, &entry.facts, entry.accepted_from()) {
        entry.end.set(Error::Reconfigured("its user is no longer bound to the node that asserted it".to_owned()));
        return;
    }
    match decide(&entry.facts, &generation.snapshot) {
        Decision::Deny(deny) => entry.end.set(Error::Reconfigured(deny.reason.to_string())),
        Decision::Act(route) => {
            // Of a session for a name the route's networks are looked at where it is opened.
            let may_reach =
                |other: &Route| entry.facts.told.is_none() || other.matcher.networks == route.matcher.networks;
            let same =
                |other: &Arc<Route>| other.action == route.action && other.rewrite == route.rewrite && may_reach(other);
            if entry.route.borrow().as_ref().is_none_or(same) {
                // A move that has begun and is not wanted any more ends.
                entry.moved.take();
            } else if let Some(status) = refusal(&route, entry.facts.kind) {
                entry.end.set(Error::Reconfigured(format!("route {} answers {status} now", route.name)));
            } else if moves(entry.facts.kind, &route) {
                let under_way = entry.moved.borrow().as_ref().is_some_and(same);
                if !under_way {
                    entry.moved.replace(Some(route));
                }
            }
            entry.end.nudge();
        }
    }
}

/// Byte streams stay where they are; flows may move, and links do: one lives for days.
pub(crate) fn moves(kind: Kind, route: &Route) -> bool {
    match kind {
        Kind::Ip => true,
        Kind::Udp => route.on_change == OnChange::Move,
        Kind::Http | Kind::Tcp => false,
    }
}

/// The status by which a route refuses sessions of this kind: a tunnel is refused by any answer, an
/// exchange by one that blames the client. (Where it is to be 503 now, what runs may finish.)
fn refusal(route: &Route, kind: Kind) -> Option<StatusCode> {
    match &route.action {
        Action::Respond(answer) if kind != Kind::Http || answer.status.is_client_error() => Some(answer.status),
        _ => None,
    }
}

/// Would the session's user be believed today? What a listener said that is gone nobody says any more.
fn still_proves(generation: &Generation, listener: Option<&Arc<Listener>>, facts: &Facts, from: SocketAddr) -> bool {
    let is_trusted = listener.is_some_and(|listener| crate::listener::contains(&listener.trust, from));
    if facts.trust == Trust::Address && !is_trusted {
        return facts.user.is_none();
    }
    let today = match (listener.and_then(|listener| listener_user(listener)), &facts.trust) {
        (Some(user), _) => Some(user),
        // The listener said who it was, and says so no more.
        (None, Trust::Anonymous) => None,
        (None, trust) => match identify(trust, facts.headers.get_all(HERMES_USER), &generation.snapshot) {
            Identity::User { user, .. } => user,
            Identity::Refuse(_) => return false,
        },
    };
    today == facts.user
}

/// Runs a worker until it is told to stop. Called on a thread of its own.
pub(crate) fn run(
    number: usize,
    shared: Arc<Shared>,
    generation: Arc<Generation>,
    log: LogSender,
    commands: mpsc::Receiver<Command>,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    runtime.block_on(async {
        let worker = Rc::new(Worker::new(number, shared, generation, log));
        serve_commands(&worker, commands).await;
        worker.live.end_all();
        // Ends every task; sessions write their records as they go.
        let mut tasks = std::mem::take(&mut *worker.tasks.borrow_mut());
        tasks.shutdown().await;
        worker.records.flush(&worker);
        // Handles are gone, or go now, and with them the connections: peers hear of it, and need not wait for silence.
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
                    worker.devices.end_others(&worker.generation().snapshot);
                    let _ = done.send(());
                }
                Some(Command::Adopt(arrived)) => arrival::adopt(worker, *arrived),
                Some(Command::Ask(question)) => arrival::ask(worker, *question),
                Some(Command::Sessions { most, reply }) => drop(reply.send(worker.live.list(most))),
                Some(Command::Drain { handed, passages, done }) => {
                    worker.draining.set(true);
                    worker.uplinks.stop_all();
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
        // What a connection was believed for when it was accepted may not hold any more.
        let differs = |old: &Arc<Listener>| {
            !old.admits_like(listener) || previous.client_roots(old) != generation.client_roots(listener)
        };
        if previous.listener(&listener.name).is_some_and(differs) {
            worker.live.drain_listener(worker, &listener.name);
        }
        // A peer's session is the listener's own, and would be asked for in another way now.
        let is_other =
            |old: &Arc<Listener>| old.protocol != listener.protocol || old.set_headers != listener.set_headers;
        let carries = |old: &Arc<Listener>| matches!(old.protocol, ListenerProtocol::Ip(_));
        if previous.listener(&listener.name).is_some_and(|old| carries(old) && is_other(old)) {
            worker.live.end_sessions_of(&listener.name);
        }
    }
    // New ones first: a listener that moves serves at both places for a moment, never at none.
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
    worker.spawn(redecide(worker.clone()));
}
