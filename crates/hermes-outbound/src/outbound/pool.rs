//! The connections of one worker to one endpoint.
//!
//! In: a connection spec (`ConnectSpec`). Out: an exclusive HTTP/1.1 connection, or a stream on a shared HTTP/2 or
//! HTTP/3 connection. The lessee drives an HTTP/1.1 connection. Nothing drives an idle one, so a close by the peer is
//! detected when the connection is leased again. A task of the worker drives each shared connection. The number of
//! connections of a pool, the number of waiting requests, and the idle time are limited. A pool belongs to one worker.
//! The pool key contains the ID of the upstream's state, so that changed upstreams and renewed identities use new
//! connections.

mod fallback;
mod h1;
mod h2;
pub mod h3;
pub mod idle;
mod queue;
mod reverse;
mod shared;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::dial_scope::DialScope;
use hermes_model::snapshot::UpstreamProtocol;
use hermes_net::Io;
use hermes_wire::capsule;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::fallback::QuicAvoidance;
pub use self::fallback::{HEAD_START, first_of};
pub use self::h1::H1Connection;
use self::h1::{handshake_h1, probe};
pub use self::h2::{ADDED_BYTES, ADDED_LINES, ERROR_RESETS, FRAME_BUDGET, MAX_FRAME, RESETS_REMEMBERED, SEND_BUFFER};
use self::idle::IdlePlace;
use self::queue::Open;
pub use self::queue::Permit;
pub use self::reverse::ReverseConnection;
pub use self::shared::{Lease, SharedConnection, SharedProtocol};
use super::Outbound;
use super::connect::{Destination, connect};
use crate::reverse::ReversePeer;
use crate::upstream::{ClientTls, InFlight};
use hermes_transport::error::Error;
use hermes_transport::runtime::fair_shares::{Bound, Owner, Share, Shares};
use hermes_transport::runtime::session::{Connection, SessionEntry};
use hermes_transport::stream::StreamLease;

/// The identity of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PoolKey {
    /// `UpstreamState::id`, or the pool ID of a terminating route.
    pub owner: u64,
    /// The label of the endpoint, or the name of the node for reverse connections.
    pub endpoint: Arc<str>,
}

/// The owner in the keys of pools of reverse connections. No upstream or route has this ID.
const REVERSE_POOL_OWNER: u64 = u64::MAX;

impl PoolKey {
    /// Returns the key for the pool of a node's reverse connections. All upstreams that name the node share this pool.
    pub fn of_node(node: &Arc<str>) -> Self {
        Self { owner: REVERSE_POOL_OWNER, endpoint: node.clone() }
    }

    /// Returns the name of the node if the pool is one of reverse connections, otherwise `None`.
    pub fn node(&self) -> Option<&Arc<str>> {
        (self.owner == REVERSE_POOL_OWNER).then_some(&self.endpoint)
    }
}

/// The reason why a lease failed.
pub struct Failed {
    pub error: Error,
    /// True if the failed dial was begun by another request, which reports the failure.
    pub was_others: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, was_others: false }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// A leased connection.
pub enum Leased {
    H1(Box<H1Connection>),
    Shared(Lease),
}

impl Leased {
    /// Returns the maximum length in bytes of an IP packet that the connection can send in one datagram.
    pub fn packet_capacity(&self) -> usize {
        match self {
            Leased::Shared(lease) => lease.connection.packet_capacity(),
            Leased::H1(_) => capsule::MAX_PACKET,
        }
    }
}

/// The guards of a tunnel with a dedicated connection: they count the tunnel and its connection until the tunnel ends.
pub struct TunnelPermit {
    _in_flight: Option<InFlight>,
    _permit: Permit,
}

impl TunnelPermit {
    pub fn new(in_flight: Option<InFlight>, permit: Permit) -> Self {
        Self { _in_flight: in_flight, _permit: permit }
    }
}

impl StreamLease for TunnelPermit {}

/// The guards of a tunnel on a shared connection: they count the tunnel and its stream until the tunnel ends.
pub struct TunnelLease {
    lease: Lease,
    _in_flight: Option<InFlight>,
}

impl TunnelLease {
    pub fn new(lease: Lease, in_flight: Option<InFlight>) -> Self {
        Self { lease, _in_flight: in_flight }
    }
}

impl StreamLease for TunnelLease {
    fn is_leaving(&self) -> bool {
        self.lease.connection.is_going()
    }
}

/// The failure of the last dial that several requests shared.
struct DialFailure {
    /// The number of the dial in this pool.
    number: u64,
    error: Error,
    /// True if the request that began the dial no longer exists, so that the first waiter must report the failure.
    is_untold: Cell<bool>,
}

/// The connections to one endpoint.
#[derive(Default)]
pub struct Pool {
    #[allow(clippy::vec_box)] // A lease moves the box instead of the 700 bytes in it.
    idle: RefCell<Vec<Box<H1Connection>>>,
    shared: RefCell<Vec<Rc<SharedConnection>>>,
    open: Rc<Open>,
    /// The table of sessions that wait for a connection.
    pending: Arc<Shares>,
    /// True while a dial is in progress for whose outcome all requests wait.
    dialing_for_all: Cell<bool>,
    /// True if ALPN selected HTTP/1.1 at the last dial, so that each request dials for itself.
    settles_on_h1: Cell<bool>,
    dial_failure: RefCell<Option<DialFailure>>,
    /// The number of completed shared dials.
    dials: Cell<u64>,
    /// True if the pool was removed from the worker's map. A new connection then serves only the requests that wait for
    /// it.
    retired: Cell<bool>,
    avoids_quic: QuicAvoidance,
}

/// The requirements of a request on its connection.
pub struct ConnectSpec<'a> {
    pub destination: Destination<'a>,
    pub protocol: UpstreamProtocol,
    /// The timeout for opening a connection.
    pub connect_within: Duration,
    /// True if the connection must be new, for a second attempt after a reused connection has failed.
    pub fresh: bool,
    /// The node that is reached over reverse connections. `None` if the endpoint is dialled.
    pub node: Option<&'a Arc<ReversePeer>>,
    /// The client's connection, to which upstream connections may be bound; `None` if none may be.
    pub client: Option<&'a Rc<Connection>>,
    /// The session that waits for a connection. `None` if the node itself requests the connection.
    pub session: Option<&'a Rc<SessionEntry>>,
}

impl ConnectSpec<'_> {
    /// Returns an owned copy, for a dial that may outlive its request. Its connection may serve any request, so the
    /// copy has no PROXY header, client or session.
    fn to_owned_spec(&self) -> OwnedConnectSpec {
        let to = &self.destination;
        OwnedConnectSpec {
            host: to.host.to_owned(),
            port: to.port,
            label: to.label.clone(),
            reach: to.reach,
            guarded: to.guarded,
            tls: to.tls.cloned(),
            congestion: to.congestion.map(Arc::from),
            protocol: self.protocol,
            connect_within: self.connect_within,
        }
    }
}

/// An owned connection spec without a session: see [`ConnectSpec::to_owned_spec`].
struct OwnedConnectSpec {
    host: String,
    port: u16,
    label: Arc<str>,
    reach: Option<DialScope>,
    guarded: bool,
    tls: Option<ClientTls>,
    congestion: Option<Arc<str>>,
    protocol: UpstreamProtocol,
    connect_within: Duration,
}

impl OwnedConnectSpec {
    fn spec(&self) -> ConnectSpec<'_> {
        let Self { host, port, label, reach, guarded, tls, .. } = self;
        let (port, reach, guarded, tls) = (*port, *reach, *guarded, tls.as_ref());
        let congestion = self.congestion.as_deref();
        let (proxy_source, source, urgent) = (None, None, false);
        ConnectSpec {
            destination: Destination {
                host,
                port,
                label,
                reach,
                guarded,
                tls,
                proxy_source,
                source,
                congestion,
                urgent,
            },
            protocol: self.protocol,
            connect_within: self.connect_within,
            fresh: false,
            node: None,
            client: None,
            session: None,
        }
    }
}

impl Pool {
    fn wake_one(&self) {
        self.open.wake_one();
    }

    /// Leases an idle or new connection, or a stream on a shared one, for one request.
    ///
    /// # Errors
    /// No connection could be opened, or too many requests wait already.
    pub async fn lease(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) -> Result<Leased, Failed> {
        match spec.protocol {
            _ if spec.node.is_some() => Ok(Box::pin(self.lease_kept(worker, spec)).await?),
            UpstreamProtocol::H2 | UpstreamProtocol::H3 => self.lease_shared(worker, spec).await,
            UpstreamProtocol::Auto => Box::pin(self.lease_either(worker, spec)).await,
            UpstreamProtocol::H1 | UpstreamProtocol::Tcp => Ok(self.lease_h1(worker, spec).await?),
        }
    }

    /// Waits until the pool may have one more connection, and returns a permit for it. The caller opens the connection.
    ///
    /// # Errors
    /// Too many requests wait already.
    pub async fn permit(&self, worker: &Rc<Outbound>, session: Option<&Rc<SessionEntry>>) -> Result<Permit, Error> {
        let mut had_turn = false;
        loop {
            if !self.comes_after(worker, had_turn) && !self.is_full(worker) {
                return Ok(Permit::take(&self.open));
            }
            self.wait(worker, session, had_turn).await?;
            had_turn = true;
        }
    }

    /// Waits until a connection is free or may be dialled. If too many sessions wait, one session of the client with
    /// the most waiting sessions is ended. `had_turn` is true if the caller has already waited without success.
    async fn wait(
        &self,
        worker: &Rc<Outbound>,
        session: Option<&Rc<SessionEntry>>,
        had_turn: bool,
    ) -> Result<(), Error> {
        if had_turn && !self.idle.borrow().is_empty() {
            // This request cannot use the idle connection, but another waiter may be able to.
            self.open.waiting.pass_on();
        }
        let limit = worker.snapshot().limits.upstream_pending;
        let too_many = || Error::Limit("requests that wait for an upstream connection");
        let share = session.and_then(|session| {
            let bound = Bound { name: "upstream-pending", limit, reserve: 0, bounds_closing: false };
            let share = Share::take(worker, &self.pending, Owner::of_session(&session.facts), bound)?;
            share.is_held_by(session);
            Some(share)
        });
        // A session that has already had a turn may wait again, even if the table now refuses it an entry.
        if session.is_some() && share.is_none() && !had_turn {
            return Err(too_many());
        }
        // A displaced session leaves the queue a moment later, so the queue may contain more sessions than the table.
        let Some(mut waiter) = self.open.waiting.join(2 * limit, had_turn) else {
            worker.shared.metrics.limit("upstream-pending");
            return Err(too_many());
        };
        waiter.turn().await;
        Ok(())
    }

    /// True if the pool has reached its limit of connections. Before that, closes one idle connection that is bound to
    /// a client, if there is one, and returns false.
    fn is_full(&self, worker: &Outbound) -> bool {
        let most = worker.snapshot().limits.upstream_connections;
        self.open.count.get() >= most && !self.close_bound(worker)
    }

    /// True if a newcomer must queue, because the waiters that have a turn need all free connections and streams.
    fn comes_after(&self, worker: &Outbound, had_turn: bool) -> bool {
        let most = worker.snapshot().limits.upstream_connections;
        let free = || {
            let free = self.idle.borrow().len() + most.saturating_sub(self.open.count.get());
            // The sum saturates, because an HTTP/2 peer may set no limit of streams.
            self.shared.borrow().iter().fold(free, |free, connection| free.saturating_add(connection.room()))
        };
        !had_turn && self.open.waiting.has_all(free)
    }

    /// True if this request must not dial, because a shared dial is in progress or the limit of connections is reached.
    ///
    /// # Errors
    /// A shared dial failed while this request waited for its outcome.
    fn is_for_others(&self, worker: &Outbound, dials_seen: u64, had_turn: bool) -> Result<bool, Failed> {
        if let Some(failure) = &*self.dial_failure.borrow()
            && failure.number > dials_seen
        {
            if had_turn {
                // A request that arrived after that dial may be next in the queue, and may dial again.
                self.open.wake_one();
            }
            return Err(Failed { error: failure.error.clone(), was_others: !failure.is_untold.take() });
        }
        Ok(self.dialing_for_all.get() || self.is_full(worker))
    }

    /// Waits for and returns a stream on an existing connection. Returns `None` if the caller should dial.
    async fn lease_or_dial(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        session: Option<&Rc<SessionEntry>>,
        dials_seen: u64,
    ) -> Result<Option<Lease>, Failed> {
        let mut had_turn = false;
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, session, had_turn).await?;
                had_turn = true;
            }
            if let Some(lease) = self.lease_existing(worker, true) {
                return Ok(Some(lease));
            }
            if !self.is_for_others(worker, dials_seen, had_turn)?
                && let Some(lease) = Box::pin(self.leave_soon(worker, had_turn)).await
            {
                return Ok(Some(lease));
            }
            // The state may have changed during the wait.
            if !self.is_for_others(worker, dials_seen, had_turn)? {
                return Ok(None);
            }
            if let Some(lease) = Box::pin(self.turn_or_leave(worker, session, had_turn)).await? {
                return Ok(Some(lease));
            }
            had_turn = true;
        }
    }

    /// Leases a stream on a shared connection. If the pool has no such connection, one request dials for all that wait.
    async fn lease_shared(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) -> Result<Leased, Failed> {
        if let Some(lease) = self.lease_or_dial(worker, spec.session, self.dials.get()).await? {
            if spec.protocol == UpstreamProtocol::H3 && !lease.connection.is_h3() {
                self.try_quic_again(worker, spec);
            }
            return Ok(Leased::Shared(lease));
        }
        Ok(self.dial_for_all(worker, spec).await?)
    }

    /// Dials in a task of the worker, and waits for the outcome. If this request gives up, the dial continues for the
    /// others. It continues even without waiters, up to the timeout of this spec. Otherwise each request that waits for
    /// less time than the dial takes would start a new dial, and none would receive a connection. The number of such
    /// dials is small: each pool has at most one, and only the document defines endpoints with shared connections.
    async fn dial_for_all(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) -> Result<Leased, Error> {
        let (permit, dialing) = (Permit::take(&self.open), Dialing::begin(self));
        let (tell, outcome) = oneshot::channel();
        let (pool, here, owned_spec) = (self.clone(), worker.clone(), spec.to_owned_spec());
        worker.spawn(async move {
            let spec = owned_spec.spec();
            let result = match spec.protocol {
                UpstreamProtocol::Auto => pool.dial_either(&here, &spec, permit).await,
                UpstreamProtocol::H3 => {
                    pool.dial_h3_or_h2(&here, &spec, permit).await.map(|made| pool.first(&made, &here))
                }
                _ => pool.dial_h2(&here, &spec, permit).await.map(|made| pool.first(&made, &here)),
            };
            let failure = result.as_ref().err().cloned();
            // The result contains a lease of a stream, so that other waiters cannot take that stream first. If the
            // receiver no longer exists, the lease is dropped.
            let left = tell.send(result).err();
            dialing.end(failure, left.is_some());
            if let Some(Ok(Leased::H1(mut connection))) = left
                && probe(&mut connection)
            {
                pool.give_back(&here, connection, true);
            }
        });
        // The sender is dropped without a result only if the worker ends.
        outcome.await.unwrap_or(Err(Error::Draining))
    }

    /// Leases the first stream on a new connection.
    fn first(self: &Rc<Self>, made: &Rc<SharedConnection>, worker: &Rc<Outbound>) -> Leased {
        Leased::Shared(Lease::take(made, self, worker, false))
    }

    /// Leases a connection whose HTTP version is selected by ALPN. The first dial is made for all waiting requests,
    /// because ALPN may select HTTP/2.
    async fn lease_either(self: &Rc<Self>, worker: &Rc<Outbound>, spec: &ConnectSpec<'_>) -> Result<Leased, Failed> {
        let (dials_seen, mut had_turn) = (self.dials.get(), false);
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, spec.session, had_turn).await?;
                had_turn = true;
            }
            if let Some(lease) = self.lease_existing(worker, true) {
                return Ok(Leased::Shared(lease));
            }
            if !spec.fresh
                && let Some(connection) = self.take_idle(spec.client)
            {
                return Ok(Leased::H1(connection));
            }
            if self.is_for_others(worker, dials_seen, had_turn)? {
                self.wait(worker, spec.session, had_turn).await?;
                had_turn = true;
                continue;
            }
            if self.settles_on_h1.get() {
                return Ok(self.dial_either(worker, spec, Permit::take(&self.open)).await?);
            }
            return Ok(self.dial_for_all(worker, spec).await?);
        }
    }

    async fn dial_either(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        permit: Permit,
    ) -> Result<Leased, Error> {
        let deadline = Instant::now() + spec.connect_within;
        let io = connect(worker, &spec.destination, spec.connect_within).await?;
        let is_h2 = io.alpn() == Some(b"h2");
        self.settles_on_h1.set(!is_h2);
        if is_h2 {
            let connection = self.adopt_h2(worker, spec, io, permit, deadline).await?;
            return Ok(self.first(&connection, worker));
        }
        Ok(Leased::H1(Box::new(handshake_h1(worker, spec, io, permit).await?)))
    }

    /// Starts HTTP/2 on a connection that the caller has opened, adds it to the pool, and leases a stream on it.
    ///
    /// # Errors
    /// The HTTP/2 handshake failed, or the peer sent no SETTINGS before `deadline`.
    pub async fn adopt(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        io: Io,
        deadline: Instant,
    ) -> Result<Lease, Error> {
        let connection = self.adopt_h2(worker, spec, io, Permit::take(&self.open), deadline).await?;
        Ok(Lease::take(&connection, self, worker, false))
    }

    /// Drops closed connections and those that were idle for too long. Returns true if the pool can be removed.
    pub fn sweep(&self, worker: &Outbound, idle_limit: Duration) -> bool {
        let now = worker.now();
        let expired = |since: u64| Duration::from_millis(now.saturating_sub(since)) >= idle_limit;
        let mut idle = std::mem::take(&mut *self.idle.borrow_mut());
        idle.retain_mut(|connection| !expired(connection.idle_since) && !connection.is_orphaned() && probe(connection));
        self.idle.borrow_mut().append(&mut idle);
        for connection in self.shared.borrow().iter() {
            if !connection.is_kept && connection.streams.get() == 0 && expired(connection.idle_since.get()) {
                connection.retire();
            }
        }
        // A pool is not removed while a request dials, because the new connection would return to a removed pool. Nor
        // is it removed while its record of QUIC failures is relevant.
        self.open.count.get() == 0 && !self.open.waiting.has_any() && !self.avoids_quic.counts(worker.now())
    }

    /// Appends the sequence numbers of this pool's idle connections.
    pub fn idle_turns(&self, turns: &mut Vec<u64>) {
        let of = |place: Option<&IdlePlace>| place.map(|place| place.turn);
        turns.extend(self.idle.borrow().iter().filter_map(|connection| of(connection.idle.as_ref())));
        turns.extend(self.shared.borrow().iter().filter_map(|connection| of(connection.idle.borrow().as_ref())));
    }

    /// Closes the idle connections with a sequence number of at most `last`, and returns how many were closed.
    pub fn close_idle(&self, last: u64) -> usize {
        let goes = |place: Option<&IdlePlace>| place.is_some_and(|place| place.turn <= last);
        let going: Vec<_> =
            self.idle.borrow_mut().extract_if(.., |connection| goes(connection.idle.as_ref())).collect();
        let mut closed = going.len();
        for connection in self.shared.borrow().iter() {
            if goes(connection.idle.borrow().as_ref()) {
                connection.idle.take();
                connection.retire();
                closed += 1;
            }
        }
        closed
    }

    /// Closes idle connections, and lets others finish their requests. Called when the upstream, route or node was
    /// removed.
    pub fn retire(&self) {
        self.retired.set(true);
        self.idle.borrow_mut().clear();
        for connection in self.shared.borrow().iter() {
            connection.retire();
        }
    }
}

/// The guard of a shared dial. When it is dropped, the waiting requests are woken.
struct Dialing(Rc<Pool>);

impl Dialing {
    fn begin(pool: &Rc<Pool>) -> Self {
        pool.dialing_for_all.set(true);
        Self(pool.clone())
    }

    fn end(self, failure: Option<Error>, is_untold: bool) {
        let number = self.0.dials.get() + 1;
        self.0.dials.set(number);
        let failure = failure.map(|error| DialFailure { number, error, is_untold: Cell::new(is_untold) });
        *self.0.dial_failure.borrow_mut() = failure;
    }
}

impl Drop for Dialing {
    fn drop(&mut self) {
        self.0.dialing_for_all.set(false);
        self.0.open.wake_all();
    }
}
