//! The state of one client connection on its worker.
//!
//! In: events of the connection that the listener reports, such as the beginning and end of sessions. Out: the signal
//! to drain the connection or to close it at once, and its entry in the node's table of connections. Never: I/O on the
//! connection.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hermes_model::facts::Trust;
use hermes_model::limits::Limits;
use hermes_model::snapshot::{ClientAuth, Listener, Step};
use hermes_net::{Io, host};
use http::HeaderValue;

use super::QuicPath;
use crate::oneshot::Oneshot;
use crate::runtime::WorkerContext;
use crate::runtime::fair_shares::{Bound, Holder, Owner, Share};
use crate::runtime::sandbox::Reason;

/// The state of a client connection. It decides which timeout applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The TLS handshake, the PROXY header, or the bytes that distinguish HTTP/1.1 from HTTP/2 are incomplete.
    Handshake,
    /// The connection waits for a request.
    Idle,
    /// The first bytes of a request have arrived, and its head is incomplete.
    Head,
    /// The connection has this number of sessions.
    Busy(u32),
}

/// The reason why a connection drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// The connection was idle for too long, and closes now.
    Idle,
    /// The listener was removed, or the node shuts down. A request may be in flight to this node, and an immediate
    /// close would lose it. So the node answers it with `connection: close`, and closes after a grace period without a
    /// request.
    ListenerRemoved,
}

/// The grace period of a draining connection without a session. It exceeds a round trip, so that a request in flight
/// arrives. It also limits an incomplete handshake or request head.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// The lifetime of a client connection without a session while buffers shrink (see `overload`).
const SHRUNK_KEEP_ALIVE: Duration = Duration::from_secs(1);

/// The time after which a sent response counts as received, in milliseconds.
const SURELY_RECEIVED_AFTER: u64 = 400;

/// The state of a client connection.
pub struct Connection {
    /// The address of the TCP or QUIC peer. A QUIC client may migrate to another address.
    pub source: Cell<SocketAddr>,
    /// The path of a QUIC connection; empty for TCP.
    pub path: OnceCell<QuicPath>,
    pub listener: Arc<Listener>,
    /// The identity of the client; empty until the handshake has established it.
    pub trust: OnceCell<Trust>,
    /// The signal to drain: the connection finishes the requests in flight, accepts none after `DRAIN_GRACE`, and
    /// closes.
    pub drain: Oneshot<Drain>,
    /// The signal to close at once, with the reason.
    pub kill: Oneshot<&'static str>,
    key: Cell<usize>,
    stage: Cell<Stage>,
    since: Cell<u64>,
    /// The time at which draining began, in milliseconds of the node's clock; `None` if the connection does not drain.
    drain_requested_at: Cell<Option<u64>>,
    /// True for HTTP/2 and HTTP/3: the connection may have many sessions, and each stream has a task of its own.
    pub is_shared: Cell<bool>,
    /// True if bytes wait for the client and it reads nothing.
    pub is_blocked: Cell<bool>,
    /// The `alt-svc` value for the client (RFC 7838).
    pub alternative: OnceCell<HeaderValue>,
    /// True if upstream connections may be bound to this connection: see `H1Connection::bind`.
    pub has_bound: Cell<bool>,
    /// A hash of the client for which upstream connections are bound, as a request named it.
    pub bound_for: Cell<u64>,
    /// A hash of the replaced forwarding fields of the latest request: see `Request::claimed`.
    pub claimed: Cell<u64>,
    /// True if a proxy sends requests of many clients over this connection. No upstream connection is then bound to it.
    pub is_pooled: Cell<bool>,
    /// True if the connection stays open without requests, so that no idle timeout applies.
    pub is_kept: Cell<bool>,
    /// The number of reads from the connection.
    pub heard: Cell<u64>,
    /// The number of header lines in trailers and responses since the listener last reset it. They cost as much work as
    /// header lines of requests.
    pub lines: Cell<usize>,
    /// The key of the entry in the node's table of connections.
    entry: Cell<usize>,
    /// The key of the entry in its listener's table. `None`: the listener has no bound of its own.
    entry_of_listener: Cell<Option<usize>>,
    /// True if a client that half-closes the connection counts as gone at once.
    pub ends_half_closed: Cell<bool>,
    /// The socket of an HTTP/1.1 client; empty for other versions and for tunnels. While received bytes are unread, a
    /// read does not show that the client has closed the connection, so the sweep queries the socket.
    pub socket: RefCell<Weak<RefCell<Io>>>,
}

impl Connection {
    /// Records the identity of the client. Returns false, and counts the reached limit, if the table has no room for a
    /// connection of that client.
    pub fn is_of(&self, worker: &WorkerContext, trust: &Trust, source: SocketAddr) -> bool {
        let _ = self.trust.set(trust.clone());
        let owner = Owner::of_connection(trust, source.ip());
        if let (Some(entry), Some(bound)) = (self.entry_of_listener.get(), bound_of(&self.listener))
            && !worker.entries.pass_to(worker, entry, owner.clone(), bound)
        {
            return false;
        }
        worker.entries.pass_to(worker, self.entry.get(), owner, bound(worker, false))
    }

    /// Returns the listener of the same name in the running snapshot, or the original listener if it was removed.
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

    /// True if the connection was idle for so long that the client must have received all responses.
    pub fn is_long_idle(&self, worker: &WorkerContext) -> bool {
        self.stage.get() == Stage::Idle && worker.now() >= self.since.get() + SURELY_RECEIVED_AFTER
    }

    /// True if the client has half-closed the connection, even if received bytes are unread. The client may still wait
    /// for its response (RFC 9112, section 9.6).
    pub(super) fn is_half_closed(&self) -> bool {
        self.socket.borrow().upgrade().is_some_and(|io| io.borrow().is_closed_there())
    }

    /// Ready when the client has half-closed the connection, if that counts as gone. Only the task that reads the
    /// connection may call this, and only while it does not read: both register the same waker.
    pub fn poll_left(&self, cx: &mut Context<'_>) -> Poll<()> {
        let socket = self.ends_half_closed.get().then(|| self.socket.borrow().upgrade()).flatten();
        let Some(io) = socket else { return Poll::Pending };
        let io = io.borrow();
        match io.tcp().poll_read_ready(cx) {
            Poll::Ready(_) if io.is_closed_there() => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// True if the client has reset the connection, so that it can receive no response.
    pub(super) fn is_reset(&self) -> bool {
        self.socket.borrow().upgrade().is_some_and(|io| io.borrow().is_reset())
    }

    /// Returns the local address to which an HTTP/1.1 client connected. Returns `None` for other versions and for
    /// tunnels.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.socket.borrow().upgrade()?.borrow().tcp().local_addr().ok()
    }

    /// Drains the connection because its listener is removed or the node shuts down.
    pub fn start_drain(&self, worker: &WorkerContext) {
        self.request_drain(worker, Drain::ListenerRemoved);
    }

    /// Makes room for another connection of the client in the listener's table, if this one is idle and about to close. A connection in
    /// its handshake keeps its place, since it may be one of a flood.
    pub fn make_room(&self, worker: &WorkerContext) {
        if self.stage.get() == Stage::Idle
            && let Some(entry) = self.entry_of_listener.get()
        {
            worker.entries.owe(entry);
        }
    }

    fn request_drain(&self, worker: &WorkerContext, why: Drain) {
        self.drain_requested_at.set(self.drain_requested_at.get().or(Some(worker.now())));
        self.drain.set(why);
    }

    /// True if the connection is draining.
    pub(super) fn is_draining(&self) -> bool {
        self.drain_requested_at.get().is_some()
    }

    /// True if the connection is draining and the grace period has passed. A request that arrives later was sent after
    /// the client had received GOAWAY or `connection: close`. It is refused, because the client's trust may be
    /// outdated.
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
            Stage::Idle if worker.overload.takes(Step::Shrink) => {
                (limits.keep_alive.min(SHRUNK_KEEP_ALIVE), "overload")
            }
            Stage::Idle => (limits.keep_alive, "idle"),
            Stage::Busy(_) => return,
        };
        // A draining connection closes after a grace period in which requests in flight arrive.
        let (limit, since) = match self.drain_requested_at.get() {
            Some(drain_requested_at) => (limit.min(DRAIN_GRACE), self.since.get().max(drain_requested_at)),
            None => (limit, self.since.get()),
        };
        if Duration::from_millis(worker.now().saturating_sub(since)) < limit {
            return;
        }
        // An idle connection is first ended cleanly, by GOAWAY or a close between requests. If it is still open at the
        // next sweep, it is closed by force.
        match (stage, self.drain.get()) {
            (Stage::Idle, None) => return self.request_drain(worker, Drain::Idle),
            (_, None) => worker.shared.metrics.limit("slow-client"),
            (_, Some(_)) => {}
        }
        self.kill.set(reason);
    }

    /// Counts a session that begins on this connection.
    pub fn enter(&self, worker: &WorkerContext) {
        let sessions = match self.stage.get() {
            Stage::Busy(sessions) => sessions,
            _ => 0,
        };
        self.set_stage(worker, Stage::Busy(sessions + 1));
    }

    /// Counts a session that ends on this connection.
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
            "displaced: the bound of connections of the node or listener is reached, and this client has the most connections, or this one was idle",
        );
    }
}

/// The guard of a client connection. Dropping it removes the connection from the table.
pub struct ConnectionGuard {
    worker: Rc<WorkerContext>,
    pub connection: Rc<Connection>,
    _share: Share,
    _share_of_listener: Option<Share>,
}

/// The divisor of `limits.connections` that gives the number of connections reserved for authenticated clients. The
/// reserve applies if any listener can authenticate clients.
const PEERS: usize = 8;

/// Returns the bound of the node's table of connections. A client that may still authenticate may use the reserve.
fn bound(worker: &WorkerContext, may_authenticate: bool) -> Bound {
    let snapshot = worker.snapshot();
    // At most half of the file descriptors, because each client may need a connection to an upstream.
    let limit = snapshot.limits.connections.min(host::descriptors() / 2).max(1);
    let has_peers = !may_authenticate && snapshot.authenticates();
    Bound { name: "connections", limit, reserve: if has_peers { limit / PEERS } else { 0 }, bounds_closing: true }
}

/// Returns the bound of a listener's own table of connections.
fn bound_of(listener: &Listener) -> Option<Bound> {
    let limit = listener.connections?;
    Some(Bound { name: "listener-connections", limit, reserve: 0, bounds_closing: true })
}

impl ConnectionGuard {
    /// Takes an entry in the node's table of connections for an accepted connection, and one in its listener's table. [`Connection::is_of`] changes the
    /// owner when the client's identity is known. Returns `None` if the table has no room.
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
        let share_of_listener = match bound_of(&listener).zip(worker.connections_of(&listener.name)) {
            Some((bound, table)) => {
                // A full table displaces others, so that it may well take this one.
                if table.count() >= bound.limit {
                    let confined = shared.status.sandbox.found_full(&shared.status.table, &listener.name, shared.now());
                    if confined.is_some() {
                        // Idle connections make room for those that come to the sandbox.
                        worker.follow_sandbox();
                        shared.ask_others_to_displace(worker.number);
                    }
                    shared.report_confined(confined, Reason::Full);
                }
                Some(Share::take(worker, &table, owner.clone(), bound)?)
            }
            None => None,
        };
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
            entry_of_listener: Cell::new(share_of_listener.as_ref().map(Share::key)),
            ends_half_closed: Cell::new(false),
            socket: RefCell::default(),
        });
        [Some(&share), share_of_listener.as_ref()]
            .into_iter()
            .flatten()
            .for_each(|share| share.is_held_by(&connection));
        connection.key.set(worker.tables.connections.borrow_mut().insert(connection.clone()));
        worker.tell_load();
        if worker.is_draining() {
            connection.start_drain(worker);
        }
        Some(Self { worker: worker.clone(), connection, _share: share, _share_of_listener: share_of_listener })
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connection.watch_path(&self.worker);
        self.worker.tables.connections.borrow_mut().remove(self.connection.key.get());
        self.worker.shared.metrics.connections_open.dec();
        self.worker.tell_load();
    }
}
