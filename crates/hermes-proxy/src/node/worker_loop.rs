//! The loop of a worker: a thread with a runtime, listeners, sessions and connections of its own.
//!
//! In: commands of the node (apply, drain, list), and messages of other workers. Out: served sessions. The loop owns
//! what accepts or dials on its own: acceptors, captures, dialers. Never: a session; tasks of the worker serve those.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arc_swap::ArcSwap;
use hermes_model::snapshot::{Listener, ListenerProtocol, Step};
use hermes_net::host::cores;
use hermes_net::tun::IdleQueue;
use tokio::runtime::LocalOptions;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::redecide;
use crate::custody::dialer::ChannelDialers;
use crate::ip::Share;
use crate::listener::quic::QuicAcceptors;
use crate::listener::relief::{AcceptQueues, Found, Relief};
use crate::listener::reverse_dialer::ReverseDialers;
use crate::listener::tun::Captures;
use crate::listener::{Acceptor, Ending, ListeningSocket, Transport};
use crate::worker::{Services, Worker};
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::{Outbound, reverse_acceptor};
use hermes_outbound::reverse::channels::{Channels, Message};
use hermes_transport::runtime::access_log::LogSender;
use hermes_transport::runtime::session::SessionView;
use hermes_transport::runtime::turns::{Turns, reported};
use hermes_transport::runtime::{Shared, WorkerContext};

/// The interval of the sweep and of the coarse clock.
const TICK: Duration = Duration::from_millis(100);
/// The pause before a worker that broke begins anew.
const PAUSE_AFTER_BREAK: Duration = Duration::from_millis(100);
/// The number of tasks polled before network events are read. A turn of a busy tunnel takes a millisecond.
const TASKS_PER_TURN: u32 = 16;

/// A command of the node to a worker.
pub(super) enum Command {
    /// Runs this generation, with these sockets for its new listeners.
    Apply {
        generation: Arc<Generation>,
        sockets: Vec<ListeningSocket>,
        /// The TCP sockets of all workers.
        queues: Arc<[AcceptQueues]>,
        devices: Vec<Share>,
        done: oneshot::Sender<()>,
    },
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
    /// Panics, for a test.
    #[cfg(test)]
    Break,
}

/// The parts that a worker starts with.
pub(super) struct Start {
    pub(super) number: usize,
    /// True if the worker stays on one core.
    pub(super) is_pinned: bool,
    pub(super) shared: Arc<Shared>,
    pub(super) services: Arc<Services>,
    pub(super) channels: Arc<Channels>,
    pub(super) current: Arc<ArcSwap<Generation>>,
    pub(super) log: LogSender,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) messages: mpsc::Receiver<Message>,
}

/// Runs a worker until it is told to stop. Called on a thread of its own. A panic ends all connections of the worker, but a panic of
/// a task ends only that task. The worker then begins anew, and the node gives it its listeners.
pub(super) fn run(mut start: Start) -> std::io::Result<()> {
    let end = End::default();
    let mut has_broken = false;
    loop {
        match std::panic::catch_unwind(AssertUnwindSafe(|| run_once(&mut start, &end))) {
            Ok(Err(error)) if has_broken => {
                tracing::error!(worker = start.number, %error, "a worker cannot begin anew")
            }
            Ok(ended) => return ended,
            // The panic hook has reported where it happened.
            Err(_) if end.is_stopped.get() => return Ok(()),
            Err(_) => {
                has_broken = true;
                tracing::error!(worker = start.number, "a worker broke, with its connections; it begins anew");
                start.shared.metrics.worker_breaks.inc();
                start.shared.lose_worker(start.number);
            }
        }
        #[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
        std::thread::sleep(PAUSE_AFTER_BREAK);
    }
}

/// The commands that a worker must remember when it begins anew.
#[derive(Default)]
struct End {
    is_closed: Cell<bool>,
    is_stopped: Cell<bool>,
}

fn run_once(start: &mut Start, end: &End) -> std::io::Result<()> {
    let Start { number, shared, services, channels, current, log, commands, messages, .. } = start;
    let turns = Turns::new(shared.clone(), *number);
    let (at_end, at_begin) = (turns.clone(), turns.clone());
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // Threads for blocking work must not compete with the worker for its core.
    runtime.enable_all().event_interval(TASKS_PER_TURN).on_thread_start(cores::unpin);
    runtime.on_thread_park(move || at_end.end()).on_thread_unpark(move || at_begin.begin());
    let runtime = runtime.build_local(LocalOptions::default())?;
    runtime.block_on(reported(turns.clone(), async {
        let generation = current.load_full();
        let context = Rc::new(WorkerContext::new(turns, shared.clone(), generation.snapshot.clone(), log.clone()));
        let outbound = Rc::new(Outbound::new(context, generation, channels.clone()));
        let worker = Rc::new(Worker::new(outbound, services.clone()));
        if end.is_closed.get() {
            worker.begin_draining();
        }
        WorkerLoop::new(&worker, end).serve(commands, messages).await;
        // Tasks first: sessions may still use connections.
        WorkerContext::end(&worker).await;
        Outbound::end(&worker).await;
    }));
    Ok(())
}

/// The acceptors and dialers of a worker.
struct WorkerLoop<'w> {
    worker: &'w Rc<Worker>,
    end: &'w End,
    /// The acceptors of each listener.
    acceptors: HashMap<(Arc<str>, Transport), Vec<Acceptor>>,
    /// The TCP sockets of all workers.
    queues: Arc<[AcceptQueues]>,
    relief: Relief,
    captures: Captures,
    quic_acceptors: QuicAcceptors,
    /// Reverse connections that this node dials.
    reverse_dialers: ReverseDialers,
    /// Custody channels that this node dials.
    channel_dialers: ChannelDialers,
}

impl<'w> WorkerLoop<'w> {
    fn new(worker: &'w Rc<Worker>, end: &'w End) -> Self {
        Self {
            worker,
            end,
            acceptors: HashMap::new(),
            queues: Arc::default(),
            relief: Relief::default(),
            captures: Captures::default(),
            quic_acceptors: QuicAcceptors::default(),
            reverse_dialers: ReverseDialers::default(),
            channel_dialers: ChannelDialers::default(),
        }
    }

    async fn serve(&mut self, commands: &mut mpsc::Receiver<Command>, messages: &mut mpsc::Receiver<Message>) {
        let worker = self.worker;
        worker.spawn(worker.overload.probe());
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Stop) | None => {
                        self.end.is_stopped.set(true);
                        return;
                    }
                    Some(command) => self.act(command).await,
                },
                Some(message) = messages.recv() => match message {
                    Message::Adopt(accepted) => reverse_acceptor::adopt(worker, *accepted),
                    Message::Query(query) => reverse_acceptor::query(worker, *query),
                },
                due = tick.tick() => self.tick(due),
                () = worker.others_stand_still() => if self.relieve() == Found::Nothing {
                    worker.found_nothing();
                },
                () = worker.reap(), if worker.has_tasks() => {}
            }
        }
    }

    async fn act(&mut self, command: Command) {
        let worker = self.worker;
        match command {
            Command::Apply { generation, sockets, queues, devices, done } => {
                self.queues = queues;
                let made = devices.iter().map(|share| share.device.name.clone()).collect();
                worker.devices.begin(worker, devices);
                self.apply(generation, sockets);
                self.captures.follow(worker, &made);
                let _ = done.send(());
            }
            Command::Displace => {
                worker.follow_sandbox();
                worker.entries.displace_for_others(worker);
            }
            Command::Sessions { most, reply } => drop(reply.send(worker.tables.list(most))),
            Command::Close { handed, passages, done } => {
                self.end.is_closed.set(true);
                self.close(handed, passages).await;
                let _ = done.send(());
            }
            Command::Drain { done } => {
                worker.tables.drain(worker);
                let _ = done.send(());
            }
            Command::Stop => {}
            #[cfg(test)]
            Command::Break => panic!("a test breaks this worker"),
        }
    }

    fn tick(&self, due: Instant) {
        let worker = self.worker;
        WorkerContext::tick(worker, due);
        self.quic_acceptors.report_metrics(worker);
        if worker.number == 0 {
            worker.shared.release_confined();
            worker.services.custody.expire();
            worker.services.relays.sweep(&worker.shared.metrics);
        }
        worker.sweep_pools();
        let _ = self.relieve();
    }

    fn relieve(&self) -> Found {
        let worker = self.worker;
        let relieves = worker.shared.status.relieves.load(Ordering::Relaxed);
        let accepts = !worker.is_draining() && !worker.overload.takes(Step::Stop);
        if relieves && accepts { self.relief.relieve(worker, &self.queues) } else { Found::Nothing }
    }

    async fn close(&mut self, handed: bool, passages: Vec<(Arc<str>, IdleQueue)>) {
        let worker = self.worker;
        worker.begin_draining();
        self.queues = Arc::default();
        worker.services.relays.close();
        self.reverse_dialers.stop_all();
        if handed {
            self.channel_dialers.stop_all();
        }
        let how = if handed { Ending::HandOver } else { Ending::Close };
        for acceptor in self.acceptors.drain().flat_map(|(_, list)| list) {
            acceptor.end(how).await;
        }
        if handed {
            worker.devices.stop_reading(worker, passages);
            self.captures.leave(worker);
        } else {
            self.captures.end();
        }
    }

    fn apply(&mut self, generation: Arc<Generation>, sockets: Vec<ListeningSocket>) {
        let worker = self.worker;
        let previous = worker.set_generation(&generation);
        for listener in &generation.snapshot.listeners {
            // The trust of a connection at its acceptance may be outdated.
            let differs = |old: &Arc<Listener>| {
                !old.admits_like(listener) || previous.client_roots(old) != generation.client_roots(listener)
            };
            if previous.listener(&listener.name).is_some_and(differs) {
                worker.tables.drain_listener(worker, &listener.name);
            }
            // A peer's session is opened by the listener itself, and would be opened differently now.
            let is_other =
                |old: &Arc<Listener>| old.protocol != listener.protocol || old.set_headers != listener.set_headers;
            let carries = |old: &Arc<Listener>| matches!(old.protocol, ListenerProtocol::Ip(_));
            if previous.listener(&listener.name).is_some_and(|old| carries(old) && is_other(old)) {
                worker.tables.end_sessions_of(&listener.name);
            }
        }
        self.replace_acceptors(&generation, sockets);
        worker.retire_pools();
        self.reverse_dialers.follow(worker);
        self.channel_dialers.follow(worker);
        worker.spawn(redecide::all(worker.clone()));
    }

    /// Starts acceptors on new sockets, and closes those of removed or moved listeners.
    fn replace_acceptors(&mut self, generation: &Generation, sockets: Vec<ListeningSocket>) {
        // New acceptors first: a listener that moves serves both addresses for a moment, never none.
        let (worker, acceptors) = (self.worker, &mut self.acceptors);
        let mut replaced = Vec::new();
        let named: HashSet<_> = sockets.iter().map(ListeningSocket::place).collect();
        for place in named {
            replaced.extend(acceptors.remove(&place).into_iter().flatten());
        }
        for socket in sockets {
            let place = socket.place();
            match Acceptor::start(worker, &mut self.quic_acceptors, socket) {
                Ok(acceptor) => acceptors.entry(place).or_default().push(acceptor),
                Err(error) => tracing::error!(listener = %place.0, %error, "a listener could not start on this worker"),
            }
        }
        let is_gone = |(name, transport): &(Arc<str>, Transport)| {
            let dispatch = generation.snapshot.dispatch.mode;
            let has = |listener: &Arc<Listener>| Transport::all_of(listener, dispatch).any(|other| other == *transport);
            !generation.listener(name).is_some_and(has)
        };
        let gone: Vec<_> = acceptors.keys().filter(|place| is_gone(place)).cloned().collect();
        for place in gone {
            replaced.extend(acceptors.remove(&place).into_iter().flatten());
            // The listener stays if only the mode of dispatching has changed.
            if place.1 != Transport::SharedTcp {
                worker.tables.drain_listener(worker, &place.0);
            }
        }
        replaced.into_iter().for_each(Acceptor::close);
    }
}
