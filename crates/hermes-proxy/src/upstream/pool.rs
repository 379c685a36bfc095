//! Connections to one endpoint, of one worker.
//!
//! In: a wish for a connection. Out: an h1 connection of one's own, or a place on a shared one of h2 or h3.
//! h1 connections are driven by whoever holds them and by nobody while they are idle: what the
//! peer did meanwhile is seen when the next one takes them. Shared ones are driven by a task of
//! the worker each. Bounded: connections a pool, requests that wait, age of idle ones.
//! Never: shared between workers; a pool's key names the upstream's state, so that changed
//! upstreams and renewed identities begin with fresh connections.

mod fallback;
mod h1;
mod h2;
pub(crate) mod h3;
pub(crate) mod idle;
mod kept;
mod queue;
mod shared;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::reach::Reach;
use hermes_model::snapshot::UpstreamProtocol;
use hermes_net::Io;
use hermes_wire::capsule;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::fallback::Avoids;
pub(crate) use self::fallback::{HEAD_START, first_of};
pub(crate) use self::h1::H1Connection;
use self::h1::{handshake_h1, probe};
pub(crate) use self::h2::{
    ADDED_BYTES, ADDED_LINES, ERROR_RESETS, FRAME_BUDGET, MAX_FRAME, RESETS_REMEMBERED, SEND_BUFFER,
};
use self::idle::IdlePlace;
pub(crate) use self::kept::Kept;
use self::queue::Open;
pub(crate) use self::queue::Permit;
pub(crate) use self::shared::{Lease, SharedConnection, Speaks};
use super::ClientTls;
use super::connect::{Destination, connect};
use crate::error::Error;
use crate::live::{Connection, Entry};
use crate::reverse::Presence;
use crate::shares::{Bound, Owner, Share, Shares};
use crate::worker::Worker;

/// What a pool is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    /// `UpstreamState::id`, or a terminating route's id.
    pub(crate) owner: u64,
    /// Endpoint, as in labels.
    pub(crate) endpoint: Arc<str>,
}

/// The owner of connections that nodes keep to us: no upstream has this number.
const NODES: u64 = u64::MAX;

impl PoolKey {
    /// The connections that this node keeps to us, whichever upstreams name it.
    pub(crate) fn of_node(node: &Arc<str>) -> Self {
        Self { owner: NODES, endpoint: node.clone() }
    }

    /// The node that keeps them, where one does.
    pub(crate) fn node(&self) -> Option<&Arc<str>> {
        (self.owner == NODES).then_some(&self.endpoint)
    }
}

/// Why a pool gives none.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// It was somebody else's dial that failed: whoever dialled tells of it.
    pub(crate) was_others: bool,
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

/// What a pool gives.
pub(crate) enum Leased {
    H1(Box<H1Connection>),
    Shared(Lease),
}

impl Leased {
    /// The longest IP packet that goes over it in a piece.
    pub(crate) fn packet_capacity(&self) -> usize {
        match self {
            Leased::Shared(lease) => lease.connection.packet_capacity(),
            Leased::H1(_) => capsule::MAX_PACKET,
        }
    }
}

/// How the last dial for all failed.
struct DialFailure {
    /// Which of the dials it was.
    number: u64,
    error: Error,
    /// Whoever dialled is gone: the first of the others tells of it.
    is_untold: Cell<bool>,
}

/// Connections to one endpoint.
pub(crate) struct Pool {
    #[allow(clippy::vec_box)] // Leased and given back as a box: 700 bytes are moved once.
    idle: RefCell<Vec<Box<H1Connection>>>,
    shared: RefCell<Vec<Rc<SharedConnection>>>,
    open: Rc<Open>,
    /// Sessions that wait for a connection, by client.
    pending: Arc<Shares>,
    /// A dial is under way whose outcome others wait for.
    dialing_for_all: Cell<bool>,
    /// ALPN settled on HTTP/1.1 last time: nobody waits for the dials of others.
    settles_on_h1: Cell<bool>,
    dial_failure: RefCell<Option<DialFailure>>,
    dials: Cell<u64>,
    /// Nobody sweeps it any more: what is made for those who still wait is for them alone.
    retired: Cell<bool>,
    avoids_quic: Avoids,
}

/// What a request wants of a pool.
pub(crate) struct Wish<'a> {
    pub(crate) destination: Destination<'a>,
    pub(crate) protocol: UpstreamProtocol,
    pub(crate) connect_within: Duration,
    /// A connection that was never used: for a second try after a stale one.
    pub(crate) fresh: bool,
    /// The node that keeps connections to us, where that is the endpoint.
    pub(crate) node: Option<&'a Arc<Presence>>,
    /// The client's connection, which upstream connections may be bound to.
    pub(crate) client: Option<&'a Rc<Connection>>,
    /// The session that may have to wait for a connection. `None`: the node itself asks.
    pub(crate) session: Option<&'a Rc<Entry>>,
}

impl Wish<'_> {
    /// For a dial that may outlive the request which began it. What is made by it is nobody's own: it begins with no
    /// PROXY header, and may have been used before it is leased.
    fn standing(&self) -> Standing {
        let to = &self.destination;
        Standing {
            host: to.host.to_owned(),
            port: to.port,
            label: to.label.clone(),
            reach: to.reach,
            guarded: to.guarded,
            tls: to.tls.cloned(),
            protocol: self.protocol,
            connect_within: self.connect_within,
        }
    }
}

/// A wish that is nobody's: see [`Wish::standing`].
struct Standing {
    host: String,
    port: u16,
    label: Arc<str>,
    reach: Option<Reach>,
    guarded: bool,
    tls: Option<ClientTls>,
    protocol: UpstreamProtocol,
    connect_within: Duration,
}

impl Standing {
    fn wish(&self) -> Wish<'_> {
        let Self { host, port, label, reach, guarded, tls, .. } = self;
        let (port, reach, guarded, tls) = (*port, *reach, *guarded, tls.as_ref());
        Wish {
            destination: Destination { host, port, label, reach, guarded, tls, proxy_source: None, urgent: false },
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
    pub(crate) fn new() -> Self {
        Self {
            idle: RefCell::default(),
            shared: RefCell::default(),
            open: Rc::default(),
            pending: Arc::default(),
            dialing_for_all: Cell::new(false),
            settles_on_h1: Cell::new(false),
            dial_failure: RefCell::default(),
            dials: Cell::new(0),
            retired: Cell::new(false),
            avoids_quic: Avoids::default(),
        }
    }

    fn wake_one(&self) {
        self.open.wake_one();
    }

    /// A connection for one request.
    ///
    /// # Errors
    /// None could be made, or too many requests wait already.
    pub(crate) async fn lease(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Failed> {
        match wish.protocol {
            _ if wish.node.is_some() => Ok(Box::pin(self.lease_kept(worker, wish)).await?),
            UpstreamProtocol::H2 | UpstreamProtocol::H3 => self.lease_shared(worker, wish).await,
            UpstreamProtocol::Auto => Box::pin(self.lease_either(worker, wish)).await,
            UpstreamProtocol::H1 | UpstreamProtocol::Tcp => Ok(self.lease_h1(worker, wish).await?),
        }
    }

    /// Leave for a connection that is made elsewhere, and is nobody else's.
    ///
    /// # Errors
    /// Too many wait for one already.
    pub(crate) async fn permit(&self, worker: &Rc<Worker>, session: Option<&Rc<Entry>>) -> Result<Permit, Error> {
        let mut had_turn = false;
        loop {
            if !self.comes_after(worker, had_turn) && !self.is_full(worker) {
                return Ok(Permit::take(&self.open));
            }
            self.wait(worker, session, had_turn).await?;
            had_turn = true;
        }
    }

    /// Waits for a connection, or until one may be dialled. If too many wait already, the client that has most of them
    /// loses one.
    async fn wait(&self, worker: &Rc<Worker>, session: Option<&Rc<Entry>>, had_turn: bool) -> Result<(), Error> {
        if had_turn && !self.idle.borrow().is_empty() {
            // It may be of use to others.
            self.open.waiting.pass_on();
        }
        let limit = worker.generation().snapshot.limits.upstream_pending;
        let too_many = || Error::Limit("requests that wait for an upstream connection");
        let share = session.and_then(|session| {
            let bound = Bound { name: "upstream-pending", limit, reserve: 0 };
            let share = Share::take(worker, &self.pending, Owner::of_session(&session.facts), bound)?;
            share.is_held_by(session);
            Some(share)
        });
        // A session that had its turn in vain keeps its place, whatever its share is by now.
        if session.is_some() && share.is_none() && !had_turn {
            return Err(too_many());
        }
        // A session that was displaced leaves the queue a moment later.
        let Some(mut waiter) = self.open.waiting.join(2 * limit, had_turn) else {
            worker.shared.metrics.limit("upstream-pending");
            return Err(too_many());
        };
        waiter.turn().await;
        Ok(())
    }

    /// True if the pool has as many connections as it may, and no idle bound one that this call could close.
    fn is_full(&self, worker: &Worker) -> bool {
        let most = worker.generation().snapshot.limits.upstream_connections;
        self.open.count.get() >= most && !self.close_bound(worker)
    }

    /// All that is free, or may be dialled, is for those who have a turn: a newcomer waits behind them.
    fn comes_after(&self, worker: &Worker, had_turn: bool) -> bool {
        let most = worker.generation().snapshot.limits.upstream_connections;
        let free = || {
            let free = self.idle.borrow().len() + most.saturating_sub(self.open.count.get());
            // A peer of HTTP/2 may set no bound at all.
            self.shared.borrow().iter().fold(free, |free, connection| free.saturating_add(connection.room()))
        };
        !had_turn && self.open.waiting.has_all(free)
    }

    /// Another one dials for all, or there are as many connections as may be: nobody else dials now.
    ///
    /// # Errors
    /// Somebody else's dial failed while we waited for it: it would have been ours.
    fn is_for_others(&self, worker: &Worker, dials_seen: u64, had_turn: bool) -> Result<bool, Failed> {
        if let Some(failure) = &*self.dial_failure.borrow()
            && failure.number > dials_seen
        {
            if had_turn {
                // Who came after that dial may have joined behind us.
                self.open.wake_one();
            }
            return Err(Failed { error: failure.error.clone(), was_others: !failure.is_untold.take() });
        }
        Ok(self.dialing_for_all.get() || self.is_full(worker))
    }

    /// A place on a connection that is there, or `None` where one is to be dialled.
    async fn place_or_dial(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        session: Option<&Rc<Entry>>,
        dials_seen: u64,
    ) -> Result<Option<Lease>, Failed> {
        let mut had_turn = false;
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, session, had_turn).await?;
                had_turn = true;
            }
            if let Some(lease) = self.place(worker, true) {
                return Ok(Some(lease));
            }
            if !self.is_for_others(worker, dials_seen, had_turn)?
                && let Some(lease) = Box::pin(self.leave_soon(worker, had_turn)).await
            {
                return Ok(Some(lease));
            }
            // It may be another one's by now.
            if !self.is_for_others(worker, dials_seen, had_turn)? {
                return Ok(None);
            }
            if let Some(lease) = Box::pin(self.turn_or_leave(worker, session, had_turn)).await? {
                return Ok(Some(lease));
            }
            had_turn = true;
        }
    }

    /// A place on a connection for all. One dials for all who wait.
    async fn lease_shared(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Failed> {
        if let Some(lease) = self.place_or_dial(worker, wish.session, self.dials.get()).await? {
            if wish.protocol == UpstreamProtocol::H3 && !lease.connection.is_h3() {
                self.try_quic_again(worker, wish);
            }
            return Ok(Leased::Shared(lease));
        }
        Ok(self.dial_for_all(worker, wish).await?)
    }

    /// Dials by a task of the worker. Who began it waits for its outcome as others do, and may give up sooner: then the
    /// dial is theirs. Where nobody waits any more it goes on too, for as long as this wish allows: what it makes is
    /// there for the next one, who would else begin anew, and never get through where flows wait for less than the
    /// endpoint takes. Nor are there ever many: a pool has one at a time, and endpoints whose connections are shared
    /// are the document's.
    async fn dial_for_all(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let (permit, dialing) = (Permit::take(&self.open), Dialing::begin(self));
        let (tell, outcome) = oneshot::channel();
        let (pool, here, standing) = (self.clone(), worker.clone(), wish.standing());
        worker.spawn(async move {
            let wish = standing.wish();
            let result = match wish.protocol {
                UpstreamProtocol::Auto => pool.dial_either(&here, &wish, permit).await,
                UpstreamProtocol::H3 => {
                    pool.dial_h3_or_h2(&here, &wish, permit).await.map(|made| pool.first(&made, &here))
                }
                _ => pool.dial_h2(&here, &wish, permit).await.map(|made| pool.first(&made, &here)),
            };
            let failure = result.as_ref().err().cloned();
            // Its place is taken before others are woken, and given up where nobody is there to have it.
            let left = tell.send(result).err();
            dialing.end(failure, left.is_some());
            if let Some(Ok(Leased::H1(mut connection))) = left
                && probe(&mut connection)
            {
                pool.give_back(&here, connection, true);
            }
        });
        // Tasks end only with their worker.
        outcome.await.unwrap_or(Err(Error::Draining))
    }

    /// The first place on a new connection.
    fn first(self: &Rc<Self>, made: &Rc<SharedConnection>, worker: &Rc<Worker>) -> Leased {
        Leased::Shared(Lease::take(made, self, worker, false))
    }

    /// As ALPN settles it. The first dial is for all, since it may become a connection for all.
    async fn lease_either(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Failed> {
        let (dials_seen, mut had_turn) = (self.dials.get(), false);
        loop {
            if self.comes_after(worker, had_turn) {
                self.wait(worker, wish.session, had_turn).await?;
                had_turn = true;
            }
            if let Some(lease) = self.place(worker, true) {
                return Ok(Leased::Shared(lease));
            }
            if !wish.fresh
                && let Some(connection) = self.take_idle(wish.client)
            {
                return Ok(Leased::H1(connection));
            }
            if self.is_for_others(worker, dials_seen, had_turn)? {
                self.wait(worker, wish.session, had_turn).await?;
                had_turn = true;
                continue;
            }
            if self.settles_on_h1.get() {
                return Ok(self.dial_either(worker, wish, Permit::take(&self.open)).await?);
            }
            return Ok(self.dial_for_all(worker, wish).await?);
        }
    }

    async fn dial_either(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> Result<Leased, Error> {
        let deadline = Instant::now() + wish.connect_within;
        let io = connect(worker, &wish.destination, wish.connect_within).await?;
        let is_h2 = io.alpn() == Some(b"h2");
        self.settles_on_h1.set(!is_h2);
        if is_h2 {
            let connection = self.adopt_h2(worker, wish, io, permit, deadline).await?;
            return Ok(self.first(&connection, worker));
        }
        Ok(Leased::H1(Box::new(handshake_h1(worker, wish, io, permit).await?)))
    }

    /// Speaks HTTP/2 on a connection that was made elsewhere. A place on it.
    ///
    /// # Errors
    /// As of a dial.
    pub(crate) async fn adopt(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        io: Io,
        deadline: Instant,
    ) -> Result<Lease, Error> {
        let connection = self.adopt_h2(worker, wish, io, Permit::take(&self.open), deadline).await?;
        Ok(Lease::take(&connection, self, worker, false))
    }

    /// Drops what is closed, and what was idle for too long. True where nothing is left.
    pub(crate) fn sweep(&self, worker: &Worker, idle_limit: Duration) -> bool {
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
        // Who dials would come back to a pool that nobody knows; and what it has learnt of QUIC is still of use.
        self.open.count.get() == 0 && !self.open.waiting.has_any() && !self.avoids_quic.counts(worker.now())
    }

    /// Adds the turns of its idle connections.
    pub(crate) fn idle_turns(&self, turns: &mut Vec<u64>) {
        let of = |place: Option<&IdlePlace>| place.map(|place| place.turn);
        turns.extend(self.idle.borrow().iter().filter_map(|connection| of(connection.idle.as_ref())));
        turns.extend(self.shared.borrow().iter().filter_map(|connection| of(connection.idle.borrow().as_ref())));
    }

    /// Closes its idle connections of this turn and before. How many those were.
    pub(crate) fn close_idle(&self, last: u64) -> usize {
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

    /// The upstream is gone from the document: close what is idle, let the rest finish.
    pub(crate) fn retire(&self) {
        self.retired.set(true);
        self.idle.borrow_mut().clear();
        for connection in self.shared.borrow().iter() {
            connection.retire();
        }
    }
}

/// Others wait while one dials; whatever becomes of it, also if it is dropped, they go on.
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
