//! The state of one client connection on its worker.
//!
//! In: its progress as the listener reports it: bytes, sessions that begin and end. Out: the signal to drain or to
//! close at once; its share of the node's connections. Never: its bytes.

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

use super::QuicPath;
use crate::oneshot::Oneshot;
use crate::runtime::WorkerContext;
use crate::runtime::fair_shares::{Bound, Holder, Owner, Share};

/// The state of a client connection; decides which timeout applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// TLS, a PROXY header, or the first bytes that distinguish HTTP/1.1 from HTTP/2.
    Handshake,
    /// Between requests.
    Idle,
    /// The first bytes of a request came; its head is incomplete.
    Head,
    /// The number of sessions on it.
    Busy(u32),
}

/// The reason why a connection takes no further request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// Idle for too long: close it now.
    Idle,
    /// The listener is removed. A request may be in flight to this node, and an immediate close would lose it. So the
    /// node answers it with `connection: close`, and closes only after a while without a request.
    ListenerRemoved,
}

/// The grace period of a draining connection without a session: a generous round trip. The same period holds for a
/// client whose handshake or request head is incomplete.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// A response that was sent this long ago counts as received (milliseconds).
const SURELY_RECEIVED_AFTER: u64 = 400;

/// A client connection.
pub struct Connection {
    /// The client's address, as far as it is known.
    pub source: Cell<SocketAddr>,
    /// The QUIC path, over which the client may migrate.
    pub path: OnceCell<QuicPath>,
    pub listener: Arc<Listener>,
    /// The trust in the client, once it is known.
    pub trust: OnceCell<Trust>,
    /// The signal to drain: finish the requests in flight, accept no new ones after `DRAIN_GRACE`, then close.
    pub drain: Oneshot<Drain>,
    /// The signal to close now.
    pub kill: Oneshot<&'static str>,
    key: Cell<usize>,
    stage: Cell<Stage>,
    since: Cell<u64>,
    /// The time of the signal to drain.
    drain_requested_at: Cell<Option<u64>>,
    /// HTTP/2 or HTTP/3: many sessions, each of which ends by itself, and frames that begin no request.
    pub is_shared: Cell<bool>,
    /// The client reads nothing of the bytes that wait for it.
    pub is_blocked: Cell<bool>,
    /// The `alt-svc` value for the client (RFC 7838).
    pub alternative: OnceCell<HeaderValue>,
    /// Upstream connections may be bound to it: see `H1Connection::bind`.
    pub has_bound: Cell<bool>,
    /// The client that the upstream connections are bound for, as its request named it.
    pub bound_for: Cell<u64>,
    /// A hash of the claims of the latest request: see `Request::claimed`.
    pub claimed: Cell<u64>,
    /// A proxy sends requests of many clients over it: no upstream connection is bound to it.
    pub is_pooled: Cell<bool>,
    /// The connection stays open for requests that may come over it: no idle timeout.
    pub is_kept: Cell<bool>,
    /// The number of reads from the connection.
    pub heard: Cell<u64>,
    /// Lines of trailers and responses since the last turn. They cost as much work as lines of requests.
    pub lines: Cell<usize>,
    /// The key in the node's table of connections.
    entry: Cell<usize>,
    /// A client that half-closes counts as gone at once.
    pub ends_half_closed: Cell<bool>,
    /// The socket of an HTTP/1.1 client, until the connection is a tunnel. Unread bytes hide that the client closed it,
    /// so the sweep asks the socket.
    pub socket: RefCell<Weak<RefCell<Io>>>,
}

impl Connection {
    /// Records the identity of the client. False, and counted, if the table has no room for a connection of that
    /// client.
    pub fn is_of(&self, worker: &WorkerContext, trust: &Trust, source: SocketAddr) -> bool {
        let _ = self.trust.set(trust.clone());
        let owner = Owner::of_connection(trust, source.ip());
        worker.entries.pass_to(worker, self.entry.get(), owner, bound(worker, false))
    }

    /// The listener in the running document; the old one if that document no longer has it.
    pub fn current_listener(&self, worker: &WorkerContext) -> Arc<Listener> {
        worker.snapshot().listener(&self.listener.name).unwrap_or(&self.listener).clone()
    }

    pub fn stage(&self) -> Stage {
        self.stage.get()
    }

    pub fn set_stage(&self, worker: &WorkerContext, stage: Stage) {
        self.stage.set(stage);
        self.since.set(worker.now());
    }

    /// True if the connection was idle for so long that the client has received all that was sent.
    pub fn is_long_idle(&self, worker: &WorkerContext) -> bool {
        self.stage.get() == Stage::Idle && worker.now() >= self.since.get() + SURELY_RECEIVED_AFTER
    }

    /// True if the client has half-closed, although unread bytes may remain. It may still wait for its response (RFC
    /// 9112, section 9.6).
    pub(super) fn is_half_closed(&self) -> bool {
        self.socket.borrow().upgrade().is_some_and(|io| io.borrow().is_closed_there())
    }

    /// Ready when the client has half-closed and counts as gone by that. Only for the task that reads the connection,
    /// while it reads nothing: the wait registers as a read.
    pub fn poll_left(&self, cx: &mut Context<'_>) -> Poll<()> {
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
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.socket.borrow().upgrade()?.borrow().tcp().local_addr().ok()
    }

    /// Drains the connection because its listener is removed.
    pub fn start_drain(&self, worker: &WorkerContext) {
        self.request_drain(worker, Drain::ListenerRemoved);
    }

    fn request_drain(&self, worker: &WorkerContext, why: Drain) {
        self.drain_requested_at.set(self.drain_requested_at.get().or(Some(worker.now())));
        self.drain.set(why);
    }

    /// True if the connection was told to drain.
    pub(super) fn is_draining(&self) -> bool {
        self.drain_requested_at.get().is_some()
    }

    /// True if the connection was told to drain and the grace period has passed. Requests sent before the signal have
    /// arrived by then. A new request comes from a client that ignores the signal, and its trust may be outdated.
    pub fn takes_no_more(&self, worker: &WorkerContext) -> bool {
        self.drain_requested_at
            .get()
            .is_some_and(|drain_requested_at| worker.now() >= drain_requested_at + DRAIN_GRACE.as_millis() as u64)
    }

    /// Drains or closes a connection that exceeded a timeout.
    pub(super) fn sweep(&self, worker: &WorkerContext, limits: &Limits) {
        let stage = self.stage.get();
        let (limit, reason) = match stage {
            Stage::Handshake => (limits.tls_timeout, "handshake took too long"),
            Stage::Head => (limits.header_timeout, "request head took too long"),
            Stage::Idle if self.is_kept.get() && self.drain_requested_at.get().is_none() => return,
            Stage::Idle => (limits.keep_alive, "idle"),
            Stage::Busy(_) => return,
        };
        // A draining connection gets a grace period: requests in flight arrive before the end.
        let (limit, since) = match self.drain_requested_at.get() {
            Some(drain_requested_at) => (limit.min(DRAIN_GRACE), self.since.get().max(drain_requested_at)),
            None => (limit, self.since.get()),
        };
        if Duration::from_millis(worker.now().saturating_sub(since)) < limit {
            return;
        }
        // First a clean end (GOAWAY, or a close between requests); at the next sweep a forced one.
        match (stage, self.drain.get()) {
            (Stage::Idle, None) => return self.request_drain(worker, Drain::Idle),
            (_, None) => worker.shared.metrics.limit("slow-client"),
            (_, Some(_)) => {}
        }
        self.kill.set(reason);
    }

    /// Counts a session that begins.
    pub fn enter(&self, worker: &WorkerContext) {
        let sessions = match self.stage.get() {
            Stage::Busy(sessions) => sessions,
            _ => 0,
        };
        self.set_stage(worker, Stage::Busy(sessions + 1));
    }

    /// Counts a session that ends.
    pub fn leave(&self, worker: &WorkerContext) {
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
        self.kill.set(
            "displaced: limits.connections reached, and this client has the most connections, or this one was idle",
        );
    }
}

/// A connection's guard: dropping it removes the connection from the table.
pub struct ConnectionGuard {
    worker: Rc<WorkerContext>,
    pub connection: Rc<Connection>,
    _share: Share,
}

/// The share of connections, one in this many, that is reserved for authenticated clients if any listener can
/// authenticate clients.
const PEERS: usize = 8;

/// The bound of the node's connections. A client that may still authenticate may use the reserve.
fn bound(worker: &WorkerContext, may_authenticate: bool) -> Bound {
    let snapshot = worker.snapshot();
    // Half of the descriptors, because each client may need a connection to an upstream.
    let limit = snapshot.limits.connections.min(host::descriptors() / 2).max(1);
    let has_peers = !may_authenticate && snapshot.authenticates();
    Bound { name: "connections", limit, reserve: if has_peers { limit / PEERS } else { 0 } }
}

impl ConnectionGuard {
    /// Takes an entry among the node's connections, for a client whose identity is provisional. `None` if the table has
    /// no room.
    pub fn take(
        worker: &Rc<WorkerContext>,
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
            drain: Oneshot::default(),
            kill: Oneshot::default(),
            key: Cell::new(0),
            stage: Cell::new(Stage::Handshake),
            since: Cell::new(worker.now()),
            drain_requested_at: Cell::new(None),
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
        connection.key.set(worker.tables.connections.borrow_mut().insert(connection.clone()));
        if worker.is_draining() {
            connection.start_drain(worker);
        }
        Some(Self { worker: worker.clone(), connection, _share: share })
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connection.watch_path(&self.worker);
        self.worker.tables.connections.borrow_mut().remove(self.connection.key.get());
        self.worker.shared.metrics.connections_open.dec();
    }
}
