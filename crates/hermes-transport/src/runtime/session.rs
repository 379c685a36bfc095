//! The live sessions and client connections of a worker.
//!
//! In: a session or connection that begins. Out: `/sessions`, the access-log entry of an ended session, and the sweep.
//! The sweep is the only place that ends idle, stuck and unfinished sessions: one tick a worker instead of a timer a
//! request. A session holds its facts and its route, never the snapshot.

mod connection;
mod head_memory;
mod quic_path;
mod view;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use hermes_model::facts::{Facts, Kind};
use hermes_model::field_collision::remove_named;
use hermes_model::snapshot::Route;
use hermes_wire::traceparent::Traceparent;
use http::HeaderMap;
use slab::Slab;

pub use self::connection::{Connection, ConnectionGuard, Drain, Stage};
use self::head_memory::Charge;
pub use self::quic_path::QuicPath;
pub use self::view::SessionView;
use super::WorkerContext;
use crate::error::Error;
use crate::headers;
use crate::oneshot::Oneshot;
use crate::runtime::fair_shares::{Bound, Holder, Owner, Share};
use crate::runtime::receive_budget::{self, Inboxes};

/// The state of a session; decides which timeout applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Decided, connecting, or waiting for the response head: the progress timeout applies.
    Opening,
    /// Open in both directions: the idle timeout applies.
    Open,
    /// Bytes wait for a reader that reads nothing: the progress timeout applies.
    Blocked,
}

/// The bytes that a client sent before the reader of its capsules was ready.
#[derive(Debug)]
pub struct Prefetched {
    /// Already forwarded, in complete capsules.
    pub sent: Bytes,
    /// Received after that, and not forwarded.
    pub held: Bytes,
}

/// How far a request may have come; decides whether it may be sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// No byte of it has left this node.
    NothingSent,
    /// A later node reported that no byte of it has reached the origin.
    ReportedUnsent,
    /// Bytes of it may have reached the origin. No later report changes that: an earlier attempt may have sent them.
    MaybeSent,
}

/// A session, from acceptance to its access-log entry.
pub struct SessionEntry {
    pub id: u64,
    pub facts: Rc<Facts>,
    pub route: RefCell<Option<Arc<Route>>>,
    pub status: Cell<u16>,
    pub tries: Cell<u32>,
    /// The endpoint, as shown to operators.
    pub peer: RefCell<Option<Arc<str>>>,
    /// Set by the sweep or a reload; the task that works for the session sees it and stops.
    pub end: Oneshot<Error>,
    /// A changed route that this session should move to; `None` again once it has moved, or must not move.
    pub moved: RefCell<Option<Arc<Route>>>,
    /// Bytes that the client sent before its capsules were read.
    pub prefetched: Cell<Option<Prefetched>>,
    pub trace: Traceparent,
    connection: Option<Rc<Connection>>,
    /// The share of the node's limit of tunnels.
    tunnel: Cell<Option<Share>>,
    /// The session waits for nodes that hold its bytes in custody: the custody deadline applies instead of a timeout.
    is_held: Cell<bool>,
    /// The requester has a timeout of its own.
    is_watched: Cell<bool>,
    /// How far the request may have come.
    pub delivery: Cell<Delivery>,
    /// The attempt at an endpoint was abandoned because the endpoint was silent.
    pub is_starved: Cell<bool>,
    /// The idle timeout, if the route sets none.
    idle: Cell<Option<Duration>>,
    key: Cell<usize>,
    started: Instant,
    started_at: SystemTime,
    received: Cell<u64>,
    sent: Cell<u64>,
    touched: Cell<u64>,
    phase: Cell<Phase>,
    error: RefCell<Option<Error>>,
    charge: Charge,
}

impl SessionEntry {
    fn new(worker: &WorkerContext, facts: Rc<Facts>, connection: Option<Rc<Connection>>, trace: Traceparent) -> Self {
        Self {
            id: worker.next_id(),
            facts,
            route: RefCell::new(None),
            status: Cell::new(0),
            tries: Cell::new(0),
            peer: RefCell::new(None),
            end: Oneshot::default(),
            moved: RefCell::new(None),
            prefetched: Cell::default(),
            trace,
            connection,
            tunnel: Cell::new(None),
            is_held: Cell::new(false),
            is_watched: Cell::new(false),
            delivery: Cell::new(Delivery::NothingSent),
            is_starved: Cell::new(false),
            idle: Cell::new(None),
            key: Cell::new(0),
            started: Instant::now(),
            started_at: SystemTime::now(),
            received: Cell::new(0),
            sent: Cell::new(0),
            touched: Cell::new(worker.now()),
            phase: Cell::new(Phase::Opening),
            error: RefCell::new(None),
            charge: Charge::default(),
        }
    }

    /// An entry for work that outlives the session which began it. The entry is in no table, writes no access-log
    /// entry, and ends if too many bytes of it remain unread.
    pub fn detached(&self, worker: &WorkerContext) -> Rc<Self> {
        Rc::new(Self::new(worker, self.facts.clone(), None, self.trace))
    }

    /// The address that connected, whatever a PROXY header says. For a flow, both are the same.
    pub fn accepted_from(&self) -> SocketAddr {
        self.connection.as_ref().map_or(self.facts.source, |connection| connection.source.get())
    }

    /// True if the client's connection was told to drain.
    pub fn is_draining(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.is_draining())
    }

    /// Counts bytes from the client, of its body or tunnel.
    pub fn add_received(&self, worker: &WorkerContext, bytes: usize) {
        self.received.set(self.received.get() + bytes as u64);
        self.touched.set(worker.now());
    }

    /// Counts bytes to the client.
    pub fn add_sent(&self, worker: &WorkerContext, bytes: usize) {
        self.sent.set(self.sent.get() + bytes as u64);
        self.touched.set(worker.now());
    }

    /// Records progress other than bytes of a body.
    pub fn touch(&self, worker: &WorkerContext) {
        self.touched.set(worker.now());
    }

    pub fn set_phase(&self, worker: &WorkerContext, phase: Phase) {
        if self.phase.replace(phase) != phase {
            self.touched.set(worker.now());
        }
    }

    /// True if bytes of the request may have reached the origin.
    pub fn may_be_sent(&self) -> bool {
        self.delivery.get() == Delivery::MaybeSent
    }

    /// Records a later node's report that no byte of the request has reached the origin.
    pub fn reported_unsent(&self) {
        if !self.may_be_sent() {
            self.delivery.set(Delivery::ReportedUnsent);
        }
    }

    /// Sets the idle timeout for a route that sets none.
    pub fn set_idle(&self, idle: Duration) {
        self.idle.set(Some(idle));
    }

    /// Sets whether the session waits for bytes in custody, or for room there.
    pub fn set_held(&self, is_held: bool) {
        self.is_held.set(is_held);
    }

    /// The client's connection, if all its requests are from one client. A proxy, and so a node, may send requests of
    /// many clients over one connection of HTTP/2 or HTTP/3, or one after the other over HTTP/1.1.
    pub fn client_connection(&self) -> Option<&Rc<Connection>> {
        let is_of_many = |connection: &Rc<Connection>| {
            connection.is_pooled.get()
                || connection.is_shared.get()
                    && (self.facts.trust.is_believed() || headers::is_forwarded(&self.facts.headers))
        };
        self.connection.as_ref().filter(|connection| !is_of_many(connection))
    }

    /// Returns that connection if upstream connections are bound to it. If they are bound for another client than the
    /// request names, a proxy pools the connection: from then on the bound connections serve no request.
    pub fn binding_connection(&self) -> Option<&Rc<Connection>> {
        let connection = self.connection.as_ref().filter(|connection| connection.has_bound.get())?;
        if !connection.is_shared.get() && connection.bound_for.get() != self.named_client(connection) {
            connection.is_pooled.set(true);
        }
        self.client_connection()
    }

    /// Marks the client's connection as one to which an upstream connection is bound.
    pub fn bind_to_client(&self) -> Option<&Rc<Connection>> {
        let connection = self.client_connection()?;
        connection.has_bound.set(true);
        connection.bound_for.set(self.named_client(connection));
        Some(connection)
    }

    fn named_client(&self, connection: &Connection) -> u64 {
        headers::named_client(self.facts.user.as_deref(), &self.facts.headers) ^ connection.claimed.get()
    }

    /// Closes the client's connection and all sessions on it.
    pub fn close_connection(&self, reason: &'static str) {
        if let Some(connection) = &self.connection {
            connection.kill.set(reason);
        }
    }

    /// The connect timeout of the route.
    pub fn connect_within(&self) -> Duration {
        self.route.borrow().as_ref().map(|route| route.timeout).unwrap_or_default().connect
    }

    /// The time of the last byte or other progress, in milliseconds of the node's clock.
    pub fn touched_at(&self) -> u64 {
        self.touched.get()
    }

    /// Milliseconds without a byte.
    pub fn silence(&self, worker: &WorkerContext) -> u64 {
        worker.now().saturating_sub(self.touched.get())
    }

    /// Removes request trailers that the listener or the route sets or removes in heads.
    pub fn strip_request_trailers(&self, worker: &WorkerContext, trailers: &mut HeaderMap) {
        if let Some(listener) = worker.snapshot().listener(&self.facts.listener) {
            listener.set_headers.iter().for_each(|(name, _)| remove_named(trailers, name));
        }
        if let Some(rewrite) = self.route.borrow().as_ref().and_then(|route| route.rewrite.as_ref()) {
            rewrite.headers.strip_trailers(trailers);
        }
    }

    /// Removes response trailers that the route sets or removes in heads.
    pub fn strip_response_trailers(&self, trailers: &mut HeaderMap) {
        if let Some(rewrite) = self.route.borrow().as_ref().and_then(|route| route.rewrite.as_ref()) {
            rewrite.response.strip_trailers(trailers);
        }
    }

    /// Stores the reason of a failure for the access log. The first reason is the cause; later ones are its
    /// consequences.
    pub fn fail(&self, error: &Error) {
        self.error.borrow_mut().get_or_insert_with(|| error.clone());
    }

    /// The stored reason of the failure.
    pub fn failure(&self) -> Option<Error> {
        self.error.borrow().clone()
    }

    /// Ends the session even if no task acts for it, because it hangs in a client connection that reads nothing. A
    /// stream of HTTP/2 or HTTP/3 has a task of its own, so its connection stays open for the others.
    pub fn end_for_good(&self, error: Error) {
        self.end.set(error);
        if let Some(connection) = self.connection.as_ref().filter(|connection| !connection.is_shared.get()) {
            connection.kill.set("a session on this connection made no progress");
        }
    }

    /// True if the client can no longer receive a response, or has half-closed and was then silent for the progress
    /// timeout. Over HTTP/1.1, a half-close looks the same as a departure. For a request in custody, a half-close
    /// counts as a departure at once: the client finds its response when it returns. The same holds once a request is
    /// being retried.
    fn is_left(&self, silent: Duration) -> bool {
        // An open tunnel ends by its own rules.
        let is_asked = self.facts.kind == Kind::Http || self.phase() == Phase::Opening;
        let Some(connection) = self.connection.as_ref().filter(|_| is_asked) else { return false };
        let is_waited_for = silent < self.progress() && !connection.ends_half_closed.get();
        connection.is_reset() || (!is_waited_for && connection.is_half_closed())
    }

    /// Sets whether an HTTP/1.1 client that half-closes counts as gone at once.
    pub fn set_ends_half_closed(&self, ends: bool) {
        if let Some(connection) = &self.connection {
            connection.ends_half_closed.set(ends);
        }
    }

    fn progress(&self) -> Duration {
        self.route.borrow().as_ref().map_or(Duration::from_secs(60), |route| route.timeout.progress)
    }

    /// The phase, with the state of the connection. A body over HTTP/1.1 is not polled while its client takes nothing;
    /// only the connection knows that.
    fn phase(&self) -> Phase {
        let held_up = |connection: &Rc<Connection>| !connection.is_shared.get() && connection.is_blocked.get();
        match self.phase.get() {
            Phase::Open if self.connection.as_ref().is_some_and(held_up) => Phase::Blocked,
            phase => phase,
        }
    }

    fn limit(&self) -> Duration {
        // A client that takes nothing of a response is subject to the progress timeout even then.
        let is_reader_s = self.facts.kind == Kind::Http && self.phase() == Phase::Blocked;
        if (self.is_held.get() || self.is_watched.get()) && !is_reader_s {
            return Duration::MAX;
        }
        match self.phase() {
            Phase::Opening | Phase::Blocked => self.progress(),
            Phase::Open => {
                let timeouts = self.route.borrow().as_ref().map(|route| route.timeout).unwrap_or_default();
                timeouts.idle.or(self.idle.get()).unwrap_or_else(|| timeouts.idle_of(self.facts.kind))
            }
        }
    }
}

/// A session is never idle: its owner is refused a new entry rather than losing an old one.
impl Holder for SessionEntry {
    fn is_idle(&self, _: u64) -> bool {
        false
    }

    fn used_at(&self) -> u64 {
        self.touched.get()
    }

    fn is_ending(&self) -> bool {
        self.end.get().is_some()
    }

    fn displace(&self) {
        self.end_for_good(Error::Limit("entries of a full table, of which its client has more than others"));
    }
}

/// Marks a session as waiting for something other than its peer, until dropped.
pub struct WaitGuard<'e> {
    entry: &'e SessionEntry,
    /// The value before this guard.
    was: bool,
}

impl<'e> WaitGuard<'e> {
    pub fn begin(entry: &'e SessionEntry) -> Self {
        Self { entry, was: entry.is_held.replace(true) }
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.entry.is_held.set(self.was);
    }
}

/// Marks a session whose silence is checked by a filter instead of the sweep, until dropped.
pub struct OwnTimeoutGuard<'e>(&'e SessionEntry);

impl<'e> OwnTimeoutGuard<'e> {
    pub fn begin(entry: &'e SessionEntry) -> Self {
        entry.is_watched.set(true);
        Self(entry)
    }
}

impl Drop for OwnTimeoutGuard<'_> {
    fn drop(&mut self) {
        self.0.is_watched.set(false);
    }
}

/// A session's guard: dropping it ends the session.
pub struct Session {
    pub worker: Rc<WorkerContext>,
    pub entry: Rc<SessionEntry>,
}

impl Session {
    /// Begins a session. `connection` is the client's; the sweep closes it if the session hangs in it.
    pub fn begin(
        worker: &Rc<WorkerContext>,
        facts: Rc<Facts>,
        connection: Option<Rc<Connection>>,
        trace: Traceparent,
    ) -> Self {
        let entry = Rc::new(SessionEntry::new(worker, facts, connection, trace));
        entry.key.set(worker.tables.sessions.borrow_mut().insert(entry.clone()));
        worker.shared.metrics.sessions_open.inc();
        if let Some(connection) = &entry.connection {
            connection.enter(worker);
        }
        entry.hold_request(worker);
        worker.tables.bound_request_memory(worker);
        Self { worker: worker.clone(), entry }
    }

    /// Takes a share of the node's limit of tunnels, for as long as the session lasts; false if none is left.
    pub fn take_tunnel(&self, limit: usize) -> bool {
        let bound = Bound { name: "tunnels", limit, reserve: 0 };
        let owner = Owner::of_session(&self.entry.facts);
        let Some(share) = Share::take(&self.worker, &self.worker.shared.tunnels, owner, bound) else { return false };
        share.is_held_by(&self.entry);
        self.entry.tunnel.set(Some(share));
        true
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let entry = &self.entry;
        self.worker.tables.sessions.borrow_mut().remove(entry.key.get());
        entry.release_all(&self.worker.tables);
        self.worker.shared.metrics.sessions_open.dec();
        if let Some(connection) = &entry.connection {
            connection.leave(&self.worker);
        }
        drop(entry.tunnel.take());
        // The reason for which the session was told to end takes precedence over the generic error below, but not over
        // an error that was recorded earlier.
        if let Some(error) = entry.end.get() {
            entry.error.borrow_mut().get_or_insert(error);
        }
        if entry.status.get() == 0 && entry.error.borrow().is_none() {
            entry.fail(&Error::ClientGone("before the response".to_owned()));
        }
        let route = entry.route.borrow();
        let error = entry.error.borrow();
        self.worker.records.end(
            &self.worker,
            &Record {
                time: entry.started_at,
                id: entry.id,
                facts: &entry.facts,
                route: route.as_deref(),
                peer: entry.peer.borrow().as_deref(),
                status: entry.status.get(),
                tries: entry.tries.get(),
                received: entry.received.get(),
                sent: entry.sent.get(),
                duration: entry.started.elapsed(),
                error: error.as_ref(),
                trace: entry.trace,
            },
        );
    }
}

/// The data of an access-log entry.
pub struct Record<'a> {
    pub time: SystemTime,
    pub id: u64,
    pub facts: &'a Facts,
    pub route: Option<&'a Route>,
    pub peer: Option<&'a str>,
    pub status: u16,
    pub tries: u32,
    pub received: u64,
    pub sent: u64,
    pub duration: Duration,
    pub error: Option<&'a Error>,
    pub trace: Traceparent,
}

/// The tables of a worker.
#[derive(Default)]
pub struct SessionTables {
    pub sessions: RefCell<Slab<Rc<SessionEntry>>>,
    pub connections: RefCell<Slab<Rc<Connection>>>,
    pub inboxes: Inboxes,
    /// Bytes that sessions hold in addition to bodies.
    request_memory: Cell<u64>,
    /// The limit of these bytes; 0 until it is read from the running document.
    request_limit: Cell<u64>,
    /// The time of the last look at the QUIC paths.
    watched: Cell<u64>,
}

/// The interval between two looks at the QUIC paths, in milliseconds.
const QUIC_PATH_POLL_INTERVAL: u64 = 1000;
/// The sweep checks whether the client has left once a session was silent for this long.
const CLIENT_GONE_CHECK_AFTER: Duration = Duration::from_millis(300);

impl SessionTables {
    /// Ends sessions and connections that exceeded a timeout. Called a few times a second.
    pub fn sweep(&self, worker: &WorkerContext) {
        receive_budget::sweep(worker);
        self.request_limit.set(0);
        self.bound_request_memory(worker);
        let now = worker.now();
        for (_, entry) in self.sessions.borrow().iter() {
            let limit = entry.limit();
            let silent = Duration::from_millis(now.saturating_sub(entry.touched.get()));
            if silent >= CLIENT_GONE_CHECK_AFTER && entry.is_left(silent) {
                let gone = "the client closed the connection before the response";
                entry.fail(&Error::ClientGone(gone.to_owned()));
                // All requests on the connection end with it, as after a failed read.
                entry.close_connection(gone);
            }
            if silent < limit {
                continue;
            }
            let error = if entry.phase() == Phase::Open { Error::Idle(limit) } else { Error::NoProgress(limit) };
            if silent > limit.saturating_add(Duration::from_secs(1)) {
                entry.end_for_good(error);
            } else {
                entry.end.set(error);
            }
        }
        let snapshot = worker.snapshot();
        let limits = &snapshot.limits;
        let is_watch = now >= self.watched.get() + QUIC_PATH_POLL_INTERVAL;
        if is_watch {
            self.watched.set(now);
        }
        for (_, connection) in self.connections.borrow().iter() {
            if is_watch {
                connection.watch_path(worker);
            }
            connection.sweep(worker, limits);
        }
    }

    /// Drains every connection.
    pub fn drain(&self, worker: &WorkerContext) {
        for (_, connection) in self.connections.borrow().iter() {
            connection.start_drain(worker);
        }
        self.nudge_flows();
    }

    /// Drains the connections of one listener.
    pub fn drain_listener(&self, worker: &WorkerContext, name: &str) {
        for (_, connection) in self.connections.borrow().iter().filter(|(_, c)| &*c.listener.name == name) {
            connection.start_drain(worker);
        }
        self.nudge_flows();
    }

    /// Ends the sessions of a listener that now opens its sessions differently.
    pub fn end_sessions_of(&self, listener: &str) {
        for (_, entry) in self.sessions.borrow().iter().filter(|(_, entry)| &*entry.facts.listener == listener) {
            entry.end.set(Error::Reconfigured("the listener was replaced".to_owned()));
        }
    }

    /// Wakes all flows after a change that they check.
    pub fn nudge_flows(&self) {
        let sessions = self.sessions.borrow();
        let flows = sessions.iter().filter(|(_, entry)| entry.facts.kind.is_datagrams());
        flows.for_each(|(_, entry)| entry.end.nudge());
    }

    /// Ends every session because the node stops.
    pub fn end_all(&self) {
        for (_, entry) in self.sessions.borrow().iter() {
            entry.end.set(Error::Draining);
        }
    }

    /// Copies the table for `/sessions`.
    pub fn list(&self, most: usize) -> Vec<SessionView> {
        self.sessions.borrow().iter().take(most).map(|(_, entry)| SessionView::of(entry)).collect()
    }
}
