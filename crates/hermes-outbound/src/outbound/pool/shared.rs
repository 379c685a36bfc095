//! Shared connections to one endpoint, over HTTP/2 or HTTP/3.
//!
//! In: an open connection. Out: leases, one for each stream. A task of the worker drives the connection until it ends.
//! A retired connection accepts no further stream, and ends with its last one.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use hermes_net::quic;
use hermes_wire::capsule;
use hermes_wire::h3::Code;

use super::Pool;
use super::idle::IdlePlace;
use super::queue::Turn;
use crate::outbound::Outbound;
use hermes_transport::error::Error;
use hermes_transport::h3::Link;
use hermes_transport::h3::connection::number;
use hermes_transport::h3::datagrams::packet_capacity;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::h2::{Backlog, Window};

/// The maximum number of streams on an HTTP/3 connection. The peer may permit fewer; opening a stream then waits.
const H3_STREAMS: usize = 100;
/// The time, in addition to two round trips, for which a request waits for the peer to permit another stream before it
/// dials. A peer sends MAX_STREAMS (RFC 9000, section 19.11) when other streams have ended.
const STREAM_GRANT_WAIT: Duration = Duration::from_millis(10);

/// A connection with streams of many requests.
pub struct SharedConnection {
    pub speaks: SharedProtocol,
    /// The number of leased streams.
    pub(super) streams: Cell<usize>,
    /// True if no further stream may open.
    closed: Cell<bool>,
    /// The time since which no stream is leased, in milliseconds of the worker's clock.
    pub(super) idle_since: Cell<u64>,
    pub(super) idle: RefCell<Option<IdlePlace>>,
    /// The signal to the driver to close the connection when its last stream has ended.
    retiring: Oneshot<()>,
    /// The signal to end a reverse connection at once, with all of its streams.
    over: Oneshot<()>,
    /// True for a reverse connection. The pool does not close it when it is idle.
    pub(super) is_kept: bool,
    /// True if the peer has sent GOAWAY, or a better connection exists.
    is_going: Cell<bool>,
    /// True if the peer has acknowledged or sent nothing for too long. No stream opens until it does so again.
    pub(super) is_silent: Cell<bool>,
}

/// The protocol on the connection, with its state.
pub enum SharedProtocol {
    H2 {
        sender: ::h2::client::SendRequest<Bytes>,
        /// True if the peer supports extended CONNECT (RFC 8441).
        extended_connect: bool,
        window: Rc<Window>,
        backlog: Backlog,
    },
    H3(Rc<Link>),
}

impl SharedConnection {
    pub(super) fn new(speaks: SharedProtocol, now: u64) -> Rc<Self> {
        Self::of(speaks, now, false)
    }

    /// Returns the state of a reverse connection.
    pub(super) fn kept(speaks: SharedProtocol, now: u64) -> Rc<Self> {
        Self::of(speaks, now, true)
    }

    fn of(speaks: SharedProtocol, now: u64, is_kept: bool) -> Rc<Self> {
        Rc::new(Self {
            speaks,
            is_kept,
            is_going: Cell::new(false),
            is_silent: Cell::new(false),
            streams: Cell::new(0),
            closed: Cell::new(false),
            idle_since: Cell::new(now),
            idle: RefCell::default(),
            retiring: Oneshot::default(),
            over: Oneshot::default(),
        })
    }

    /// True if another stream may open.
    pub(super) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Returns the number of further streams that may open now.
    pub(super) fn room(&self) -> usize {
        let most = match &self.speaks {
            SharedProtocol::H2 { sender, .. } => sender.current_max_send_streams(),
            SharedProtocol::H3(_) => H3_STREAMS,
        };
        // The peer's limits are unknown until its SETTINGS arrive.
        let is_settled = match &self.speaks {
            SharedProtocol::H2 { .. } => true,
            SharedProtocol::H3(link) => link.settings().is_some(),
        };
        let takes_any = is_settled && !self.closed.get() && !self.is_silent.get();
        if takes_any { most.saturating_sub(self.streams.get()) } else { 0 }
    }

    /// True unless the connection has ended or the driver has read a GOAWAY of the peer. Otherwise closes the
    /// connection for further streams.
    pub(super) fn is_alive(&self) -> bool {
        let is_alive = match &self.speaks {
            SharedProtocol::H2 { sender, .. } => {
                let mut cx = Context::from_waker(Waker::noop());
                !matches!(sender.clone().poll_ready(&mut cx), Poll::Ready(Err(_)))
            }
            SharedProtocol::H3(link) => !link.is_going(),
        };
        if !is_alive {
            self.close();
        }
        is_alive
    }

    /// True if long-lived flows should move to another connection: the peer sent GOAWAY, the path is dark, or a better
    /// connection exists. The peer of a reverse connection dials a replacement itself.
    pub fn is_going(&self) -> bool {
        self.is_going.get() || (self.is_silent.get() && !self.is_kept)
    }

    /// Records whether the path is dark, that is, whether data stays unacknowledged for too long. If this has changed,
    /// wakes the flows on the connection and returns true.
    pub(super) fn set_dark(&self, worker: &Outbound, is_dark: bool) -> bool {
        let is_news = self.is_silent.replace(is_dark) != is_dark;
        if is_news {
            worker.tables.nudge_flows();
        }
        is_news
    }

    /// Retires the connection because a better one exists. Flows that can move to it are woken.
    pub(super) fn leave(&self, worker: &Outbound) {
        self.retire();
        if !self.is_going.replace(true) {
            worker.tables.nudge_flows();
        }
    }

    /// Wakes the flows on the connection if a GOAWAY has arrived. The driver calls this after it has read all input.
    pub(super) fn look_for_goaway(&self, worker: &Outbound) {
        let has_come = || match &self.speaks {
            SharedProtocol::H2 { window, .. } => window.ends().is_going(),
            SharedProtocol::H3(link) => link.is_going(),
        };
        if !self.is_going.get() && has_come() {
            self.is_going.set(true);
            worker.tables.nudge_flows();
        }
    }

    /// True if the peer supports extended CONNECT (RFC 8441, RFC 9220).
    pub fn takes_extended_connect(&self) -> bool {
        match &self.speaks {
            SharedProtocol::H2 { extended_connect, .. } => *extended_connect,
            SharedProtocol::H3(link) => link.settings().is_some_and(|settings| settings.extended_connect),
        }
    }

    /// True if tunnels on this connection may use HTTP datagrams in addition to their streams.
    pub fn has_datagrams(&self) -> bool {
        self.is_h3()
    }

    /// Returns the maximum length in bytes of an IP packet that the connection can send in one datagram.
    pub(super) fn packet_capacity(&self) -> usize {
        match &self.speaks {
            SharedProtocol::H2 { .. } => capsule::MAX_PACKET,
            SharedProtocol::H3(link) => packet_capacity(link),
        }
    }

    /// Returns a counter that increases whenever the connection receives bytes.
    pub fn heard(&self) -> u64 {
        match &self.speaks {
            SharedProtocol::H2 { window, .. } => window.ends().reads(),
            SharedProtocol::H3(link) => link.connection.stats().udp_rx.datagrams,
        }
    }

    /// True for HTTP/3.
    pub(super) fn is_h3(&self) -> bool {
        matches!(self.speaks, SharedProtocol::H3(_))
    }

    /// True if no stream is open.
    pub(super) fn is_unused(&self) -> bool {
        self.streams.get() == 0
    }

    /// True for a reverse connection.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// True if no further stream may open.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Lets no further stream open on the connection.
    pub fn close(&self) {
        self.closed.set(true);
    }

    /// Lets no further stream open on the connection, and ends it with its last stream.
    pub fn retire(&self) {
        self.close();
        self.retiring.set(());
    }

    /// Ends a reverse connection at once, with all of its streams.
    pub fn end(&self) {
        self.close();
        self.over.set(());
    }

    /// True if [`Self::end`] was called.
    pub(super) fn is_over(&self) -> bool {
        self.over.get().is_some()
    }

    /// Waits until [`Self::end`] is called.
    pub(super) async fn ended(&self) {
        self.over.wait().await;
    }

    /// Ready if the connection is retired and has no streams. The end of its last stream wakes the driver.
    pub fn poll_done(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.streams.get() == 0 { self.retiring.poll(cx) } else { Poll::Pending }
    }
}

/// A lease of one stream on a shared connection.
pub struct Lease {
    pub connection: Rc<SharedConnection>,
    pool: Rc<Pool>,
    worker: Rc<Outbound>,
    /// True if the lease was taken on a connection that existed in the pool, not on one that was opened for it.
    pub reused: bool,
    /// The HTTP/3 stream, if it is already open and still unused.
    stream: Cell<Option<Box<Opened>>>,
    /// The time at which the lease began, in milliseconds of the worker's clock.
    since: u64,
    /// The value of [`SharedConnection::heard`] when the lease began.
    heard: u64,
}

/// A QUIC stream on which nothing was sent yet.
pub(super) type Opened = (quic::SendStream, quic::RecvStream);

/// The minimum duration of a stream in milliseconds, after which a connection that received nothing meanwhile counts as
/// broken. No further stream opens on it then.
const MIN_SILENT_STREAM_MS: u64 = 1000;

impl Lease {
    pub(super) fn take(
        connection: &Rc<SharedConnection>,
        pool: &Rc<Pool>,
        worker: &Rc<Outbound>,
        reused: bool,
    ) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        connection.idle.take();
        let (since, heard) = (worker.now(), connection.heard());
        let (connection, pool, worker) = (connection.clone(), pool.clone(), worker.clone());
        Self { connection, pool, worker, reused, stream: Cell::new(None), since, heard }
    }

    /// Leases a stream as [`Self::take`] does, if the peer permits another stream now. Otherwise returns `None`.
    fn take_allowed(
        connection: &Rc<SharedConnection>,
        pool: &Rc<Pool>,
        worker: &Rc<Outbound>,
        reused: bool,
    ) -> Option<Self> {
        let stream = match &connection.speaks {
            SharedProtocol::H2 { .. } => None,
            SharedProtocol::H3(link) => Some(Box::new(link.connection.open_bi().now_or_never()?.ok()?)),
        };
        let lease = Self::take(connection, pool, worker, reused);
        lease.stream.set(stream);
        Some(lease)
    }

    /// Returns the stream of this lease, and opens it if it is not open yet. `link` is the HTTP/3 state of the
    /// connection.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn open(&self, link: &Link) -> Result<Opened, quic::ConnectionError> {
        match self.stream.take() {
            Some(stream) => Ok(*stream),
            None => link.connection.open_bi().await,
        }
    }
}

/// Resets a stream on which nothing was sent. Without the reset, the peer would receive an incomplete request.
fn cancel((send, recv): &mut Opened) {
    let _ = send.reset(number(Code::RequestCancelled));
    let _ = recv.stop(number(Code::RequestCancelled));
}

impl Drop for Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        let unused = self.stream.take();
        // The peer need not send anything on an unused stream, so silence then proves nothing.
        let is_owed = unused.is_none();
        if let Some(mut stream) = unused {
            cancel(&mut stream);
        }
        connection.streams.set(connection.streams.get() - 1);
        let was_silent = || self.worker.now() >= self.since + MIN_SILENT_STREAM_MS && connection.heard() == self.heard;
        if is_owed && !connection.is_kept && was_silent() {
            connection.close();
        }
        connection.idle_since.set(self.worker.now());
        if connection.streams.get() == 0 {
            if connection.closed.get() {
                // The closed connection has no stream left, so its driver is woken to end it.
                connection.retire();
            } else if !connection.is_kept {
                self.worker.make_room_for_idle();
                connection.idle.replace(Some(self.worker.idle.enter()));
            }
        }
        self.pool.wake_one();
    }
}

/// Opens a stream on an HTTP/3 connection as soon as the peer permits one. Never returns for HTTP/2.
async fn open_on(connection: &Rc<SharedConnection>) -> (&Rc<SharedConnection>, Result<Opened, quic::ConnectionError>) {
    match &connection.speaks {
        SharedProtocol::H3(link) => (connection, link.connection.open_bi().await),
        SharedProtocol::H2 { .. } => std::future::pending().await,
    }
}

impl Pool {
    /// Leases a stream on an existing connection. Returns `None` if no connection permits another stream now.
    pub(super) fn lease_existing(self: &Rc<Self>, worker: &Rc<Outbound>, reused: bool) -> Option<Lease> {
        let shared = self.shared.borrow();
        let mut fit = shared.iter().filter(|connection| connection.has_room() && connection.is_alive());
        fit.find_map(|connection| Lease::take_allowed(connection, self, worker, reused))
    }

    /// Waits until the peer of any HTTP/3 connection permits another stream, and leases that stream. Returns `None` at
    /// once if the pool has no HTTP/3 connection below this node's own limit. The wait does not count as a use of a
    /// connection.
    pub(super) async fn leave(self: &Rc<Self>, worker: &Rc<Outbound>) -> Option<Lease> {
        let full = self.full();
        let mut opening: FuturesUnordered<_> = full.iter().map(open_on).collect();
        while let Some((connection, opened)) = opening.next().await {
            match opened {
                Ok(stream) if !connection.is_closed() => {
                    let lease = Lease::take(connection, self, worker, true);
                    lease.stream.set(Some(Box::new(stream)));
                    return Some(lease);
                }
                Ok(mut stream) => cancel(&mut stream),
                // The connection has ended, which its driver may not have noticed yet.
                Err(_) => connection.close(),
            }
        }
        None
    }

    /// Returns the HTTP/3 connections that are below this node's own limit of streams.
    fn full(&self) -> Vec<Rc<SharedConnection>> {
        let shared = self.shared.borrow();
        shared.iter().filter(|one| one.is_h3() && one.has_room() && one.is_alive()).cloned().collect()
    }

    /// Waits as [`Self::leave`] does, for two round trips and [`STREAM_GRANT_WAIT`]. A MAX_STREAMS frame in transit
    /// arrives within this time. Returns `None` if none arrived.
    pub(super) async fn leave_soon(self: &Rc<Self>, worker: &Rc<Outbound>, had_turn: bool) -> Option<Lease> {
        let rtts = self.full().into_iter().filter_map(|full| match &full.speaks {
            SharedProtocol::H3(link) => Some(link.connection.rtt()),
            SharedProtocol::H2 { .. } => None,
        });
        let within = 2 * rtts.max()? + STREAM_GRANT_WAIT;
        // The turn passes to the next request if this wait is dropped, or if it ends with a stream and so needs no
        // turn.
        let turn = had_turn.then(|| Turn::of(&self.open));
        let lease = tokio::time::timeout(within, self.leave(worker)).await.ok().flatten();
        if let Some(turn) = turn
            && lease.is_none()
        {
            turn.keep();
        }
        lease
    }

    /// Waits for a turn in the queue or for a stream that a peer permits, whichever is first. Returns `None` for a
    /// turn. Both are needed: a turn is given as soon as a local stream ends, while the peer permits another stream a
    /// round trip later.
    ///
    /// # Errors
    /// Too many requests wait already.
    pub(super) async fn turn_or_leave(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        session: Option<&Rc<SessionEntry>>,
        had_turn: bool,
    ) -> Result<Option<Lease>, Error> {
        tokio::select! {
            biased;
            turn = self.wait(worker, session, had_turn) => turn.map(|()| None),
            Some(lease) = self.leave(worker) => Ok(Some(lease)),
        }
    }

    /// Adds a shared connection to the pool, and spawns the task that drives it. `permit` counts the connection until
    /// it ends.
    pub(super) fn share(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        shared: &Rc<SharedConnection>,
        permit: super::Permit,
        drive: impl Future<Output = ()> + 'static,
    ) {
        if self.retired.get() {
            shared.retire();
        }
        {
            // HTTP/3 connections precede HTTP/2 ones, so that HTTP/2 is only used if no HTTP/3 connection permits a
            // stream.
            let mut all = self.shared.borrow_mut();
            let behind = if shared.is_h3() { all.iter().take_while(|other| other.is_h3()).count() } else { all.len() };
            all.insert(behind, shared.clone());
        }
        let (pool, shared) = (self.clone(), shared.clone());
        worker.spawn(async move {
            drive.await;
            shared.close();
            pool.shared.borrow_mut().retain(|other| !Rc::ptr_eq(other, &shared));
            drop(permit);
            pool.open.wake_all();
        });
    }
}
