//! A client's connection, as its worker knows it.
//!
//! In: what its listener sees of it: bytes, sessions that come and go. Out: the word to finish, or to close now, to who
//! serves it; its place among the node's connections. Never: its bytes.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::limits::Limits;
use hermes_model::snapshot::{ClientAuth, Listener};
use hermes_net::{Io, host};
use http::HeaderValue;

use super::Path;
use crate::shares::{Bound, Holder, Owner, Share};
use crate::signal::Signal;
use crate::worker::Worker;

/// Where a client connection stands; decides which time limit holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// TLS, a PROXY header, or the first bytes that tell h1 from h2.
    Handshake,
    /// Between requests.
    Idle,
    /// The first bytes of a request came, its head is not whole.
    Head,
    /// So many sessions are on it.
    Busy(u32),
}

/// Why a connection shall take no further request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drain {
    /// It was silent for long: close it now.
    Silent,
    /// Its listener goes. A request may be on its way to us, and would be lost if we closed at
    /// once: answer it, say `close` with it, and close only after a while without any.
    Parting,
}

/// From the word that a connection ends to its end, where nothing runs on it: a round trip on a bad day.
/// Also for a client that has connected and has not said all that it has to say.
const FAREWELL: Duration = Duration::from_secs(2);

/// A response that was sent this long ago counts as arrived (milliseconds).
const LONG_IDLE: u64 = 400;

/// One client connection.
pub(crate) struct Connection {
    /// Where the client is, as far as is known.
    pub(crate) source: Cell<SocketAddr>,
    /// Over QUIC, where the client may move.
    pub(crate) path: OnceCell<Path>,
    pub(crate) listener: Arc<Listener>,
    /// How far it is believed, once that is known.
    pub(crate) trust: OnceCell<Trust>,
    /// Told to finish: no further request.
    pub(crate) drain: Signal<Drain>,
    /// Told to close now.
    pub(crate) kill: Signal<&'static str>,
    key: Cell<usize>,
    stage: Cell<Stage>,
    since: Cell<u64>,
    /// When it was told to finish.
    told: Cell<Option<u64>>,
    /// HTTP/2 or HTTP/3: many sessions, each of which ends by itself, and frames that begin no request.
    pub(crate) is_shared: Cell<bool>,
    /// The client takes nothing of what waits for it.
    pub(crate) is_blocked: Cell<bool>,
    /// Where else its client finds the origins that it finds here (RFC 7838).
    pub(crate) alternative: OnceCell<HeaderValue>,
    /// Upstream connections may be bound to it: see [`H1Connection::bind`](crate::upstream::pool::H1Connection::bind).
    pub(crate) has_bound: Cell<bool>,
    /// The client that the upstream connections are bound for, as its request named it.
    pub(crate) bound_for: Cell<u64>,
    /// A hash of the claims of the latest request: see [`Request::claimed`](crate::request::Request::claimed).
    pub(crate) claimed: Cell<u64>,
    /// A proxy sends requests of many clients over it: nothing is bound to it.
    pub(crate) is_pooled: Cell<bool>,
    /// It is kept for what may come over it: to be idle is no reason to close it.
    pub(crate) is_kept: Cell<bool>,
    /// Counts up with all that is read from it.
    pub(crate) heard: Cell<u64>,
    /// Lines of trailers and of responses since the last turn, which cost as much work as lines of requests.
    pub(crate) lines: Cell<usize>,
    /// Its entry among the node's connections.
    entry: Cell<usize>,
    /// A client that half-closes counts as gone at once.
    pub(crate) ends_half_closed: Cell<bool>,
    /// Of HTTP/1.1, until it is a tunnel: what has not been read hides that its client has closed it.
    pub(crate) socket: RefCell<Weak<RefCell<Io>>>,
}

impl Connection {
    /// Records the identity of the client. False, and counted, if the table has no room for a connection of that
    /// client.
    pub(crate) fn is_of(&self, worker: &Worker, trust: &Trust, source: SocketAddr) -> bool {
        let _ = self.trust.set(trust.clone());
        let owner = Owner::of_connection(trust, source.ip());
        worker.entries.pass_to(worker, self.entry.get(), owner, bound(worker, false))
    }

    /// The listener as the running document has it; as it was when it is gone from there.
    pub(crate) fn current_listener(&self, worker: &Worker) -> Arc<Listener> {
        worker.generation().listener(&self.listener.name).unwrap_or(&self.listener).clone()
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage.get()
    }

    pub(crate) fn set_stage(&self, worker: &Worker, stage: Stage) {
        self.stage.set(stage);
        self.since.set(worker.now());
    }

    /// True if the connection was idle for so long that the client has received all that was sent.
    pub(crate) fn is_long_idle(&self, worker: &Worker) -> bool {
        self.stage.get() == Stage::Idle && worker.now() >= self.since.get() + LONG_IDLE
    }

    /// True if the client has half-closed, although unread bytes may remain. It may still wait for its response (RFC
    /// 9112, section 9.6).
    pub(super) fn is_half_closed(&self) -> bool {
        self.socket.borrow().upgrade().is_some_and(|io| io.borrow().is_closed_there())
    }

    /// Ready when the client has half-closed and counts as gone by that. Only for the task that reads the connection,
    /// while it reads nothing: the wait registers as a read.
    pub(crate) fn poll_left(&self, cx: &mut Context<'_>) -> Poll<()> {
        let socket = self.ends_half_closed.get().then(|| self.socket.borrow().upgrade()).flatten();
        let Some(io) = socket else { return Poll::Pending };
        let io = io.borrow();
        match io.tcp().poll_read_ready(cx) {
            Poll::Ready(_) if io.is_closed_there() => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// True if the client has reset the connection: no response reaches it any more.
    pub(super) fn is_reset(&self) -> bool {
        self.socket.borrow().upgrade().is_some_and(|io| io.borrow().is_reset())
    }

    /// The address that an HTTP/1.1 client connected to.
    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        self.socket.borrow().upgrade()?.borrow().tcp().local_addr().ok()
    }

    /// Tells it to finish since its listener goes.
    pub(crate) fn part(&self, worker: &Worker) {
        self.tell(worker, Drain::Parting);
    }

    fn tell(&self, worker: &Worker, why: Drain) {
        self.told.set(self.told.get().or(Some(worker.now())));
        self.drain.set(why);
    }

    /// It was told to finish.
    pub(super) fn is_told_to_go(&self) -> bool {
        self.told.get().is_some()
    }

    /// It was told to finish, and all that was on its way to us then has arrived: what begins now was sent
    /// by a client that does not listen, and what it was believed for when it came may not hold any more.
    pub(crate) fn takes_no_more(&self, worker: &Worker) -> bool {
        self.told.get().is_some_and(|told| worker.now() >= told + FAREWELL.as_millis() as u64)
    }

    /// Tells it to finish, or to close, where it is over its time.
    pub(super) fn sweep(&self, worker: &Worker, limits: &Limits) {
        let stage = self.stage.get();
        let (limit, reason) = match stage {
            Stage::Handshake => (limits.tls_timeout, "handshake took too long"),
            Stage::Head => (limits.header_timeout, "request head took too long"),
            Stage::Idle if self.is_kept.get() && self.told.get().is_none() => return,
            Stage::Idle => (limits.keep_alive, "idle"),
            Stage::Busy(_) => return,
        };
        // Told to go in order, it has a little time for that: what is on its way to us arrives before the end.
        let (limit, since) = match self.told.get() {
            Some(told) => (limit.min(FAREWELL), self.since.get().max(told)),
            None => (limit, self.since.get()),
        };
        if Duration::from_millis(worker.now().saturating_sub(since)) < limit {
            return;
        }
        // A clean end first (GOAWAY, or close between requests); by force at the next sweep.
        match (stage, self.drain.get()) {
            (Stage::Idle, None) => return self.tell(worker, Drain::Silent),
            (_, None) => worker.shared.metrics.limit("slow-client"),
            (_, Some(_)) => {}
        }
        self.kill.set(reason);
    }

    /// One more session is on it.
    pub(crate) fn enter(&self, worker: &Worker) {
        let sessions = match self.stage.get() {
            Stage::Busy(sessions) => sessions,
            _ => 0,
        };
        self.set_stage(worker, Stage::Busy(sessions + 1));
    }

    /// One session less.
    pub(crate) fn leave(&self, worker: &Worker) {
        match self.stage.get() {
            Stage::Busy(sessions) if sessions > 1 => self.set_stage(worker, Stage::Busy(sessions - 1)),
            _ => self.set_stage(worker, Stage::Idle),
        }
    }
}

impl Holder for Connection {
    fn is_idle(&self, _: u64) -> bool {
        !matches!(self.stage.get(), Stage::Busy(_)) && !self.is_kept.get()
    }

    fn used_at(&self) -> u64 {
        self.since.get()
    }

    fn is_ending(&self) -> bool {
        self.kill.get().is_some()
    }

    fn displace(&self) {
        self.kill.set("displaced: limits.connections is reached, and its client has most of them, or it was idle");
    }
}

/// A connection's guard: its drop takes it off the table.
pub(crate) struct ConnectionGuard {
    worker: Rc<Worker>,
    pub(crate) connection: Rc<Connection>,
    _share: Share,
}

/// One connection in this many is reserved for authenticated clients, if any listener knows them.
const PEERS: usize = 8;

/// The bound of the node's connections. A client that may still authenticate may use the reserve.
fn bound(worker: &Worker, may_authenticate: bool) -> Bound {
    let generation = worker.generation();
    // Half of the descriptors: each client may need a connection to an upstream.
    let limit = generation.snapshot.limits.connections.min(host::descriptors() / 2).max(1);
    let has_peers = !may_authenticate && generation.authenticates();
    Bound { name: "connections", limit, reserve: if has_peers { limit / PEERS } else { 0 } }
}

impl ConnectionGuard {
    /// Takes an entry among the node's connections, for a client whose identity is provisional. `None` if the table has
    /// no room.
    pub(crate) fn take(
        worker: &Rc<Worker>,
        listener: Arc<Listener>,
        source: SocketAddr,
        trust: &Trust,
    ) -> Option<Self> {
        let shared = &worker.shared;
        let asks = listener.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None);
        let may_authenticate = asks && *trust == Trust::Anonymous;
        let owner =
            if may_authenticate { Owner::unproven(source.ip()) } else { Owner::of_connection(trust, source.ip()) };
        let share = Share::take(worker, &shared.connections, owner, bound(worker, may_authenticate))?;
        shared.metrics.connections_open.inc();
        let connection = Rc::new(Connection {
            source: Cell::new(source),
            path: OnceCell::new(),
            listener,
            trust: OnceCell::new(),
            drain: Signal::default(),
            kill: Signal::default(),
            key: Cell::new(0),
            stage: Cell::new(Stage::Handshake),
            since: Cell::new(worker.now()),
            told: Cell::new(None),
            is_shared: Cell::new(false),
            is_blocked: Cell::new(false),
            alternative: OnceCell::new(),
            has_bound: Cell::new(false),
            bound_for: Cell::new(0),
            claimed: Cell::new(0),
            is_pooled: Cell::new(false),
            is_kept: Cell::new(false),
            heard: Cell::new(0),
            lines: Cell::new(0),
            entry: Cell::new(share.key()),
            ends_half_closed: Cell::new(false),
            socket: RefCell::default(),
        });
        share.is_held_by(&connection);
        connection.key.set(worker.live.connections.borrow_mut().insert(connection.clone()));
        if worker.is_draining() {
            connection.part(worker);
        }
        Some(Self { worker: worker.clone(), connection, _share: share })
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connection.watch_path(&self.worker);
        self.worker.live.connections.borrow_mut().remove(self.connection.key.get());
        self.worker.shared.metrics.connections_open.dec();
    }
}
