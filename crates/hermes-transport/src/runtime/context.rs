//! The state that all tasks of one worker share.
//!
//! In: the ticks of the worker's loop, and the document of each new generation. Out: time, random numbers, IDs, tasks,
//! buffers, and the worker's tables. Workers share only counters, health, the log and devices, so only devices take a
//! lock for traffic. Every task belongs to the worker's task set, and ends with the worker.

use std::cell::{Cell, Ref, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;

use hermes_model::snapshot::{AccessLog, Listener, Snapshot};
use hermes_net::quic::EndpointTasks;
use hermes_net::resolve::Resolver;
use hermes_net::udp::ReceiveBuffer;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::Shared;
use super::access_log::{LogSender, Records};
use super::fair_shares::{Entries, ListenerShares, Shares};
use super::overload::WorkerOverload;
use super::sandbox::{SandboxView, Tag};
use super::session::SessionTables;
use super::turns::{Counted, Turns};
use crate::token_bucket::TokenBucket;

/// The maximum number of ICMP errors that a worker sends in a second. Each session has a much lower limit.
const MAX_ICMP_ERRORS_PER_SECOND: u32 = 2000;
/// The number of session IDs that a worker reserves at a time.
const ID_BLOCK: u64 = 1024;

/// The running snapshot. The outer `Rc` has a reference count that only this worker changes: workers would contend for
/// the cache line of the inner, atomic count.
#[allow(clippy::redundant_allocation)] // The comment above gives the reason.
type CurrentSnapshot = Rc<Arc<Snapshot>>;

/// The state that all tasks of one worker share.
pub struct WorkerContext {
    pub shared: Arc<Shared>,
    /// The worker's number in the node.
    pub number: usize,
    pub tables: SessionTables,
    pub overload: WorkerOverload,
    pub records: Records,
    pub resolver: Resolver,
    pub udp_buffer: RefCell<ReceiveBuffer>,
    /// The buffer in which several datagrams are assembled for one system call.
    pub udp_run: RefCell<Vec<u8>>,
    /// The worker's tasks that drive QUIC endpoints.
    pub quic: EndpointTasks,
    /// The worker's entries in the bounded tables, such as connections and tunnels.
    pub entries: Entries,
    snapshot: RefCell<CurrentSnapshot>,
    /// The tables of all listeners in the snapshot.
    listener_shares: RefCell<HashMap<Arc<str>, ListenerShares>>,
    /// The sandbox after its latest change.
    sandbox: RefCell<SandboxView>,
    /// The change of the sandbox that this worker has followed.
    followed: Cell<u64>,
    tasks: RefCell<JoinSet<()>>,
    turns: Arc<Turns>,
    icmp_errors: TokenBucket,
    rng: RefCell<SmallRng>,
    clock: Cell<u64>,
    draining: Cell<bool>,
    /// The next session ID, and the first ID after the worker's reserved ones.
    ids: Cell<(u64, u64)>,
}

impl WorkerContext {
    pub fn new(turns: Arc<Turns>, shared: Arc<Shared>, snapshot: Arc<Snapshot>, log: LogSender) -> Self {
        let records = Records::new(snapshot.node.clone(), log);
        records.set_enabled(snapshot.access_log != AccessLog::Off);
        Self {
            clock: Cell::new(shared.now()),
            overload: WorkerOverload::new(shared.clone(), turns.worker()),
            shared,
            number: turns.worker(),
            tables: SessionTables::default(),
            records,
            resolver: Resolver::from_system(),
            udp_buffer: RefCell::default(),
            udp_run: RefCell::default(),
            quic: EndpointTasks::watched({
                let turns = turns.clone();
                move || turns.polled(Tag::default())
            }),
            entries: Entries::default(),
            snapshot: RefCell::new(Rc::new(snapshot)),
            listener_shares: RefCell::default(),
            sandbox: RefCell::default(),
            followed: Cell::default(),
            tasks: RefCell::default(),
            turns,
            icmp_errors: TokenBucket::default(),
            rng: RefCell::new(SmallRng::from_os_rng()),
            draining: Cell::new(false),
            ids: Cell::new((0, 0)),
        }
    }

    /// Returns the time of the last tick in milliseconds of the node's clock, which is precise enough for timeouts of
    /// seconds.
    pub fn now(&self) -> u64 {
        self.clock.get()
    }

    /// Returns the running snapshot. Callers should keep it for one decision, not for a session: it would stay in
    /// memory after a reload.
    pub fn snapshot(&self) -> CurrentSnapshot {
        self.snapshot.borrow().clone()
    }

    /// Replaces the running snapshot. `listener_shares` are the tables of its listeners.
    pub fn set_snapshot(&self, snapshot: Arc<Snapshot>, listener_shares: HashMap<Arc<str>, ListenerShares>) {
        self.records.set_enabled(snapshot.access_log != AccessLog::Off);
        self.records.forget_handles();
        self.snapshot.replace(Rc::new(snapshot));
        self.listener_shares.replace(listener_shares);
    }

    /// Calls `act` with each table of each listener.
    pub fn each_listener_shares(&self, act: impl FnMut(&Arc<Shares>)) {
        self.listener_shares.borrow().values().flat_map(|of| [&of.flows, &of.connections]).for_each(act);
    }

    /// The table of a listener's connections.
    pub fn connections_of(&self, listener: &str) -> Option<Arc<Shares>> {
        self.listener_shares.borrow().get(listener).map(|of| of.connections.clone())
    }

    fn sandbox(&self) -> Ref<'_, SandboxView> {
        let sandbox = &self.shared.status.sandbox;
        if self.sandbox.borrow().changes != sandbox.changes() {
            self.sandbox.replace(sandbox.view());
        }
        self.sandbox.borrow()
    }

    /// True if the listener is confined to other workers than this one.
    pub fn is_confined_elsewhere(&self, listener: &str) -> bool {
        self.sandbox().is_confined(listener) && !self.shared.status.table.is_sandbox(self.number)
    }

    /// True if new connections of the listener are for this worker. A worker of the sandbox serves confined listeners, and any other
    /// worker serves all others.
    pub fn serves(&self, listener: &str) -> bool {
        self.sandbox().is_confined(listener) == self.shared.status.table.is_sandbox(self.number)
    }

    /// Has clients of listeners that this worker does not serve connect again.
    pub fn follow_sandbox(&self) {
        let changes = self.shared.status.sandbox.changes();
        if self.followed.replace(changes) == changes {
            return;
        }
        let snapshot = self.snapshot();
        let is_misplaced = |name: &&Arc<str>| self.sandbox().can_confine(name) && !self.serves(name);
        let names: Vec<_> = snapshot.listeners.iter().map(|listener| &listener.name).filter(is_misplaced).collect();
        names.into_iter().for_each(|name| self.tables.part_with_listener(self, name));
    }

    pub fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Makes new connections drain as soon as they are accepted, because the node shuts down.
    pub fn begin_draining(&self) {
        self.draining.set(true);
    }

    /// Returns two random numbers that must not be used as secrets.
    pub fn random(&self) -> (u128, u64) {
        let mut rng = self.rng.borrow_mut();
        (rng.random(), rng.random())
    }

    /// Returns a session ID that is unique in the process.
    pub fn next_id(&self) -> u64 {
        let (mut next, mut end) = self.ids.get();
        if next == end {
            next = self.shared.take_ids(ID_BLOCK);
            end = next + ID_BLOCK;
        }
        self.ids.set((next + 1, end));
        next
    }

    /// True if an ICMP error may be sent now. Counts the error. The rate is limited (RFC 1812, section 4.3.2.8).
    pub fn may_send_icmp_error(&self) -> bool {
        self.icmp_errors.takes(self.now(), MAX_ICMP_ERRORS_PER_SECOND)
    }

    /// Waits until this worker has nothing to do while another one stands still.
    pub async fn others_stand_still(&self) {
        self.turns.others_stand_still().await;
    }

    /// Nothing waits at workers that stand still: this one may wait for events until its next turn.
    pub fn found_nothing(&self) {
        self.turns.found_nothing();
    }

    /// Tells the table of workers how many connections and sessions this worker has.
    pub fn tell_load(&self) {
        let (connections, sessions) = (self.tables.connections.borrow().len(), self.tables.sessions.borrow().len());
        self.turns.row().set_load(connections as u64, sessions as u64);
    }

    /// Spawns a task. It is aborted when the worker ends.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) -> AbortHandle {
        self.tasks.borrow_mut().spawn_local(Counted::new(self.turns.clone(), Tag::default(), task))
    }

    /// Spawns the task of a connection of this listener, which answers for the time that the task takes.
    pub fn spawn_for(&self, listener: &Listener, task: impl Future<Output = ()> + 'static) -> AbortHandle {
        let tag = self.sandbox().tag(&listener.name);
        self.tasks.borrow_mut().spawn_local(Counted::new(self.turns.clone(), tag, task))
    }

    /// Advances the clock, follows the signals of overload, ends sessions and connections that exceeded a timeout, and
    /// flushes the access log. `due`: when this tick should have been.
    pub fn tick(&self, due: Instant) {
        self.clock.set(self.shared.now());
        self.overload.tick(self, due);
        self.tables.sweep(self);
        self.entries.tick(self);
        self.follow_sandbox();
        self.turns.tick();
        self.records.flush(self);
    }

    /// True while any task of the worker runs.
    pub fn has_tasks(&self) -> bool {
        !self.tasks.borrow().is_empty()
    }

    /// Waits until one task ends, and removes it from the set.
    pub async fn reap(&self) {
        std::future::poll_fn(|cx| self.tasks.borrow_mut().poll_join_next(cx)).await;
    }

    /// Ends every session and aborts every task. Sessions write their access-log entries when their tasks drop them.
    pub async fn end(&self) {
        self.tables.end_all();
        let mut tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        tasks.shutdown().await;
        self.records.flush(self);
    }
}

/// Schedules another poll of the current task after all other tasks and pending network events. `wake_by_ref` would
/// schedule the poll before the network events.
pub fn yield_to_network(cx: &mut Context<'_>) {
    // The first poll of `yield_now` schedules the task. Dropping the future does not undo this.
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}
