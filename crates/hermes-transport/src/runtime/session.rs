//! The live sessions and client connections of a worker.
//!
//! In: a session or connection that begins. Out: `/sessions`, the access-log entry of an ended session, and the sweep.
//! Only the sweep ends idle and stalled sessions, so that a worker needs one tick instead of a timer for each request.
//! A session references its facts and its route, never the snapshot.

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
use hermes_model::snapshot::{ListenerProtocol, Route};
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

/// The state of a session. It decides which timeout applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No response head was received yet. The progress timeout applies.
    Opening,
    /// The response body or the tunnel is being transferred. The idle timeout applies.
    Open,
    /// Bytes wait for a receiver that reads nothing. The progress timeout applies.
    Blocked,
}

/// The bytes that were read from a client before its tunnel was open.
#[derive(Debug)]
pub struct Prefetched {
    /// The bytes that were already forwarded. They consist of complete capsules.
    pub sent: Bytes,
    /// The bytes after `sent`, which were not forwarded.
    pub held: Bytes,
}

/// Whether bytes of a request may have reached the origin. This decides whether the request may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// This node has sent no byte of the request.
    NothingSent,
    /// A later node reported that no byte of the request has reached the origin.
    ReportedUnsent,
    /// Bytes of the request may have reached the origin. No report about a further attempt changes that, because an
    /// earlier attempt may have sent them.
    MaybeSent,
}

/// The state of a session, from acceptance to its access-log entry.
pub struct SessionEntry {
    pub id: u64,
    pub facts: Rc<Facts>,
    pub route: RefCell<Option<Arc<Route>>>,
    pub status: Cell<u16>,
    pub tries: Cell<u32>,
    /// The name of the endpoint, for the access log and `/sessions`.
    pub peer: RefCell<Option<Arc<str>>>,
    /// The signal to end the session, with the reason. The sweep or a reload sets it; the session's task awaits it.
    pub end: Oneshot<Error>,
    /// The route to which a configuration change moves this session. `None` if the session should stay on its route.
    pub moved: RefCell<Option<Arc<Route>>>,
    /// Bytes that were read from the client before its tunnel was open.
    pub prefetched: Cell<Option<Prefetched>>,
    pub trace: Traceparent,
    connection: Option<Rc<Connection>>,
    /// The session's entry in the node's table of tunnels; `None` if the session is no tunnel.
    tunnel: Cell<Option<Share>>,
    /// True while the session waits for something other than its peer, such as custody, a rate limit, or the same
    /// object that the cache fetches for another client. No timeout of the route applies then.
    is_held: Cell<bool>,
    /// True while a filter or service applies its own timeout instead of those of the route.
    is_watched: Cell<bool>,
    /// Whether bytes of the request may have reached the origin.
    pub delivery: Cell<Delivery>,
    /// True if the last attempt was abandoned because the endpoint was silent.
    pub is_starved: Cell<bool>,
    /// The idle timeout for a route that sets none; `None` means the default of the session's kind.
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

    /// Returns the state for work that continues after this session. It is in no table and writes no access-log entry.
    /// It is charged for unread bytes like a session.
    pub fn detached(&self, worker: &WorkerContext) -> Rc<Self> {
        Rc::new(Self::new(worker, self.facts.clone(), None, self.trace))
    }

    /// Returns the state for a request of the node itself. It is in no table and writes no access-log entry.
    pub fn unlisted(worker: &WorkerContext, facts: Rc<Facts>, trace: Traceparent) -> Rc<Self> {
        Rc::new(Self::new(worker, facts, None, trace))
    }

    /// Returns the address from which the client's connection was accepted, without regard to a PROXY header. For a
    /// flow, returns the source address.
    pub fn accepted_from(&self) -> SocketAddr {
        self.connection.as_ref().map_or(self.facts.source, |connection| connection.source.get())
    }

    /// True if the client's connection is draining.
    pub fn is_draining(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.is_draining())
    }

    /// Counts bytes of the client's body or tunnel, and records progress.
    pub fn add_received(&self, worker: &WorkerContext, bytes: usize) {
        self.received.set(self.received.get() + bytes as u64);
        self.touched.set(worker.now());
    }

    /// Counts bytes that were sent to the client, and records progress.
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

    /// Sets whether the session waits for something other than its peer, so that no timeout of the route applies.
    pub fn set_held(&self, is_held: bool) {
        self.is_held.set(is_held);
    }

    /// Returns the client's connection if all requests on it are from one client, otherwise `None`. A proxy or node may
    /// send requests of many clients over one HTTP/2 or HTTP/3 connection, or one after another over HTTP/1.1.
    pub fn client_connection(&self) -> Option<&Rc<Connection>> {
        let is_of_many = |connection: &Rc<Connection>| {
            connection.is_pooled.get()
                || connection.is_shared.get()
                    && (self.facts.trust.is_believed() || headers::is_forwarded(&self.facts.headers))
        };
        self.connection.as_ref().filter(|connection| !is_of_many(connection))
    }

    /// Returns the connection of [`Self::client_connection`] if upstream connections are bound to it, otherwise `None`.
    /// If they are bound for another client than this request names, a proxy sends requests of many clients over the
    /// connection. The bound upstream connections then serve no further request.
    pub fn binding_connection(&self) -> Option<&Rc<Connection>> {
        let connection = self.connection.as_ref().filter(|connection| connection.has_bound.get())?;
        if !connection.is_shared.get() && connection.bound_for.get() != self.named_client(connection) {
            connection.is_pooled.set(true);
        }
        self.client_connection()
    }

    /// Records that an upstream connection is bound to the client's connection, and returns the latter. Returns `None`
    /// if the client's connection may be used for several clients.
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

    /// Returns the connect timeout of the route.
    pub fn connect_within(&self) -> Duration {
        self.route.borrow().as_ref().map(|route| route.timeout).unwrap_or_default().connect
    }

    /// Returns the time of the last byte or other progress, in milliseconds of the node's clock.
    pub fn touched_at(&self) -> u64 {
        self.touched.get()
    }

    /// Returns the time since the last byte or other progress, in milliseconds.
    pub fn silence(&self, worker: &WorkerContext) -> u64 {
        worker.now().saturating_sub(self.touched.get())
    }

    /// Removes request trailers whose names the listener or the route sets or removes in heads.
    pub fn strip_request_trailers(&self, worker: &WorkerContext, trailers: &mut HeaderMap) {
        if let Some(listener) = worker.snapshot().listener(&self.facts.listener) {
            listener.set_headers.iter().for_each(|(name, _)| remove_named(trailers, name));
        }
        if let Some(rewrite) = self.route.borrow().as_ref().and_then(|route| route.rewrite.as_ref()) {
            rewrite.headers.strip_trailers(trailers);
        }
    }

    /// Removes response trailers whose names the route sets or removes in heads.
    pub fn strip_response_trailers(&self, trailers: &mut HeaderMap) {
        if let Some(rewrite) = self.route.borrow().as_ref().and_then(|route| route.rewrite.as_ref()) {
            rewrite.response.strip_trailers(trailers);
        }
    }

    /// Stores the error with which the session failed, for the access log. Later errors are ignored, because they are
    /// consequences of the first one.
    pub fn fail(&self, error: &Error) {
        self.error.borrow_mut().get_or_insert_with(|| error.clone());
    }

    /// Returns the error with which the session failed, or `None`.
    pub fn failure(&self) -> Option<Error> {
        self.error.borrow().clone()
    }

    /// Ends the session even if its task does not notice the signal, because the HTTP/1.1 client reads nothing: the
    /// client's connection is closed. An HTTP/2 or HTTP/3 stream has a task of its own, which notices the signal, so
    /// its connection stays open for other streams.
    pub fn end_for_good(&self, error: Error) {
        self.end.set(error);
        if let Some(connection) = self.connection.as_ref().filter(|connection| !connection.is_shared.get()) {
            connection.kill.set("a session on this connection made no progress");
        }
    }

    /// True if the client counts as gone: it has reset the connection, or has half-closed it and was silent for the
    /// progress timeout. Over HTTP/1.1, a client that closes the connection looks the same as one that half-closes it.
    /// If `ends_half_closed` is set, a half-close counts at once.
    fn is_left(&self, silent: Duration) -> bool {
        // An open tunnel detects the end of its client itself.
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

    /// Returns the phase, taking the state of the connection into account. Only the connection knows that an HTTP/1.1
    /// client reads nothing, because the body is then not polled.
    fn phase(&self) -> Phase {
        let held_up = |connection: &Rc<Connection>| !connection.is_shared.get() && connection.is_blocked.get();
        match self.phase.get() {
            Phase::Open if self.connection.as_ref().is_some_and(held_up) => Phase::Blocked,
            phase => phase,
        }
    }

    fn limit(&self) -> Duration {
        // A client that reads nothing of a response is subject to the progress timeout even while the session waits.
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

/// A session never counts as idle. So an owner that has most entries is refused a new one, and does not lose an old
/// one.
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
        self.end_for_good(Error::Limit("a table is full, and this client has the most entries"));
    }
}

/// Marks a session as waiting for something other than its peer, such as a rate limit. No timeout of the route applies
/// until the guard is dropped.
pub struct WaitGuard<'e> {
    entry: &'e SessionEntry,
    /// The value of `is_held` before this guard.
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

/// Marks a session to which a filter or service applies its own timeout instead of those of the route, until the guard
/// is dropped.
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

/// The guard of a session. Dropping it ends the session and writes the access-log entry.
pub struct Session {
    pub worker: Rc<WorkerContext>,
    pub entry: Rc<SessionEntry>,
}

impl Session {
    /// Begins a session. `connection` is the client's connection, or `None` for a session without one, such as a UDP
    /// flow.
    pub fn begin(
        worker: &Rc<WorkerContext>,
        facts: Rc<Facts>,
        connection: Option<Rc<Connection>>,
        trace: Traceparent,
    ) -> Self {
        let entry = Rc::new(SessionEntry::new(worker, facts, connection, trace));
        entry.key.set(worker.tables.sessions.borrow_mut().insert(entry.clone()));
        worker.shared.metrics.sessions_open.inc();
        worker.tell_load();
        if let Some(connection) = &entry.connection {
            connection.enter(worker);
        }
        entry.hold_request(worker);
        worker.tables.bound_request_memory(worker);
        Self { worker: worker.clone(), entry }
    }

    /// Takes an entry in the node's table of tunnels, for as long as the session lasts. Returns false if the table has
    /// no room.
    pub fn take_tunnel(&self, limit: usize) -> bool {
        let bound = Bound { name: "tunnels", limit, reserve: 0, bounds_closing: false };
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
        self.worker.tell_load();
        if let Some(connection) = &entry.connection {
            connection.leave(&self.worker);
        }
        drop(entry.tunnel.take());
        // The reason of the signal to end takes precedence over the generic error below, but not over an error that was
        // stored earlier.
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

/// The tables of a worker's live sessions, connections and streams.
#[derive(Default)]
pub struct SessionTables {
    pub sessions: RefCell<Slab<Rc<SessionEntry>>>,
    pub connections: RefCell<Slab<Rc<Connection>>>,
    pub inboxes: Inboxes,
    /// The number of bytes that are charged to sessions for heads and fixed costs.
    request_memory: Cell<u64>,
    /// The limit of `request_memory`; 0 until it is read from the running snapshot.
    request_limit: Cell<u64>,
    /// The time at which the QUIC paths were last read, in milliseconds of the node's clock.
    watched: Cell<u64>,
}

/// The interval at which the QUIC paths are read, in milliseconds.
const QUIC_PATH_POLL_INTERVAL: u64 = 1000;
/// The time of silence after which the sweep checks whether the client of a session is gone.
const CLIENT_GONE_CHECK_AFTER: Duration = Duration::from_millis(300);

impl SessionTables {
    /// Ends sessions and connections that exceeded a timeout or a memory limit. Called several times a second.
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

    /// Drains every client connection.
    pub fn drain(&self, worker: &WorkerContext) {
        for (_, connection) in self.connections.borrow().iter() {
            connection.start_drain(worker);
        }
        self.nudge_flows();
    }

    /// Drains a share of the connections of HTTP clients, at least one of them, chosen at random. Others could not go elsewhere. `of` is the divisor of the share.
    pub fn part_with_some(&self, worker: &WorkerContext, of: usize) {
        let connections = self.connections.borrow();
        let can_go = |connection: &Connection| {
            connection.listener.protocol == ListenerProtocol::Http
                && !connection.is_draining()
                && !connection.is_kept.get()
        };
        let open: Vec<_> = connections.iter().map(|(_, connection)| connection).filter(|one| can_go(one)).collect();
        let first = usize::try_from(worker.random().1).unwrap_or_default() % open.len().max(1);
        for connection in open.iter().cycle().skip(first).take(open.len().div_ceil(of)) {
            worker.shared.metrics.connections_parted.inc();
            connection.start_drain(worker);
        }
    }

    /// Drains the connections of one listener.
    pub fn drain_listener(&self, worker: &WorkerContext, name: &str) {
        for (_, connection) in self.connections.borrow().iter().filter(|(_, c)| &*c.listener.name == name) {
            connection.start_drain(worker);
        }
        self.nudge_flows();
    }

    /// Has the clients of a listener connect again, since other workers serve it from now on.
    pub fn part_with_listener(&self, worker: &WorkerContext, name: &str) {
        for (_, connection) in self.connections.borrow().iter().filter(|(_, c)| &*c.listener.name == name) {
            connection.make_room(worker);
        }
        self.drain_listener(worker, name);
    }

    /// Ends the sessions of a listener that was replaced and opens its sessions differently.
    pub fn end_sessions_of(&self, listener: &str) {
        for (_, entry) in self.sessions.borrow().iter().filter(|(_, entry)| &*entry.facts.listener == listener) {
            entry.end.set(Error::Reconfigured("the listener was replaced".to_owned()));
        }
    }

    /// Wakes the tasks of all UDP and IP sessions, after a change that they check for.
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

    /// Returns the views of at most `most` sessions, for `/sessions`.
    pub fn list(&self, most: usize) -> Vec<SessionView> {
        self.sessions.borrow().iter().take(most).map(|(_, entry)| SessionView::of(entry)).collect()
    }
}
