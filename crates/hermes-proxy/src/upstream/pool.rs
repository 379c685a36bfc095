//! Connections to one endpoint, of one worker.
//!
//! In: a wish for a connection. Out: an h1 connection of one's own, or a place on a shared h2 one.
//! h1 connections are driven by whoever holds them and by nobody while they are idle: what the
//! peer did meanwhile is seen when the next one takes them. h2 connections are driven by a task of
//! the worker. Bounded: connections a pool, requests that wait, age of idle ones.
//! Never: shared between workers; a pool's key names the upstream's state, so that changed
//! upstreams and renewed identities begin with fresh connections.

pub(crate) mod idle;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::UpstreamProtocol;
use hermes_net::Io;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::idle::IdlePlace;
use super::connect::{Destination, connect};
use super::metered::{Meter, Metered};
use crate::body::Attempt;
use crate::error::Error;
use crate::listener::h1::HYPER_HEADERS;
use crate::stream::h2::Window;
use crate::worker::Worker;

/// What a pool is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    /// `UpstreamState::id`, or a terminating route's id.
    pub(crate) owner: u64,
    /// Endpoint, as in labels.
    pub(crate) endpoint: Arc<str>,
}

/// An h1 connection: hyper's two halves, held together.
pub(crate) struct H1Connection {
    pub(crate) sender: http1::SendRequest<Attempt>,
    connection: http1::Connection<TokioIo<Metered>, Attempt>,
    meter: Meter,
    /// The connection future is over: it must not be polled again.
    pub(crate) finished: bool,
    pub(crate) reused: bool,
    idle_since: u64,
    idle: Option<IdlePlace>,
    permit: Permit,
}

impl H1Connection {
    /// Moves the connection on. An error is the connection's.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), hyper::Error> {
        if self.finished {
            return Ok(());
        }
        match self.connection.poll_without_shutdown(cx) {
            Poll::Ready(result) => {
                self.finished = true;
                result
            }
            Poll::Pending => Ok(()),
        }
    }

    /// What is read of it.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Can it take another request?
    pub(crate) fn is_reusable(&self) -> bool {
        !self.finished && self.sender.is_ready()
    }

    /// The bare connection after `101` or a CONNECT's 2xx, with what was read beyond it, and its
    /// place in the pool.
    pub(crate) async fn into_io(mut self: Box<Self>) -> (Io, Bytes, Permit) {
        // hyper lets go of the connection once it has seen that it is no longer its own.
        std::future::poll_fn(|cx| {
            let _ = self.poll(cx);
            if self.finished { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let Self { connection, permit, .. } = *self;
        let parts = connection.into_parts();
        (parts.io.into_inner().into_inner(), parts.read_buf, permit)
    }
}

/// An h2 connection, shared.
pub(crate) struct H2Connection {
    pub(crate) sender: h2::client::SendRequest<Bytes>,
    streams: Cell<usize>,
    closed: Cell<bool>,
    idle_since: Cell<u64>,
    idle: RefCell<Option<IdlePlace>>,
    /// The peer takes extended CONNECT (RFC 8441).
    pub(crate) extended_connect: bool,
    pub(crate) window: Rc<Window>,
    /// Tells the driver to close once its streams are done.
    retire: crate::signal::Signal<()>,
}

impl H2Connection {
    fn has_room(&self) -> bool {
        !self.closed.get() && self.streams.get() < self.sender.current_max_send_streams()
    }

    /// It takes no further stream.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// No further stream on it.
    pub(crate) fn close(&self) {
        self.closed.set(true);
    }
}

/// A place on an h2 connection: one stream.
pub(crate) struct H2Lease {
    pub(crate) connection: Rc<H2Connection>,
    pool: Rc<Pool>,
    worker: Rc<Worker>,
    pub(crate) reused: bool,
}

impl H2Lease {
    fn take(connection: &Rc<H2Connection>, pool: &Rc<Pool>, worker: &Rc<Worker>, reused: bool) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        connection.idle.take();
        Self { connection: connection.clone(), pool: pool.clone(), worker: worker.clone(), reused }
    }
}

impl Drop for H2Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.streams.set(connection.streams.get() - 1);
        connection.idle_since.set(self.worker.now());
        if connection.streams.get() == 0 {
            if connection.closed.get() {
                // Wakes the driver of a retired connection: this was its last stream.
                connection.retire.set(());
            } else {
                self.worker.make_room_for_idle();
                connection.idle.replace(Some(self.worker.idle.enter()));
            }
        }
        self.pool.wake_one();
    }
}

/// What a pool gives.
pub(crate) enum Leased {
    H1(Box<H1Connection>),
    H2(H2Lease),
}

/// Connections to one endpoint.
pub(crate) struct Pool {
    #[allow(clippy::vec_box)] // Leased and given back as a box: 700 bytes are moved once.
    idle: RefCell<Vec<Box<H1Connection>>>,
    shared: RefCell<Vec<Rc<H2Connection>>>,
    open: Rc<Open>,
    /// A dial is under way whose outcome others wait for.
    dialing_for_all: Cell<bool>,
    /// ALPN settled on HTTP/1.1 last time: nobody waits for the dials of others.
    settles_on_h1: Cell<bool>,
    dial_failure: RefCell<Option<(u64, Error)>>,
    dials: Cell<u64>,
    /// Nobody sweeps it any more: what is made for those who still wait is for them alone.
    retired: Cell<bool>,
}

/// Counts connections of a pool and those who wait for one.
#[derive(Default)]
struct Open {
    count: Cell<usize>,
    /// For a connection or for leave to dial one. Bounded by `upstream_pending`.
    waiting: Queue,
    /// Dialling, but content with a connection that comes free before. As many as dial.
    dialing: Queue,
}

impl Open {
    /// A connection may be dialled, or stands idle.
    fn wake_one(&self) {
        let _ = self.waiting.wake_one();
    }

    /// A connection stands idle.
    fn wake_for_idle(&self) {
        let _ = self.waiting.wake_one() || self.dialing.wake_one();
    }

    fn wake_all(&self) {
        while self.waiting.wake_one() {}
    }
}

/// Those who wait for something, in their order.
#[derive(Default)]
struct Queue(RefCell<VecDeque<oneshot::Sender<()>>>);

impl Queue {
    /// `None` where too many wait already.
    fn join(&self, most: usize) -> Option<Waiter<'_>> {
        let mut waiting = self.0.borrow_mut();
        if waiting.len() >= most {
            // Those who gave up hold no places.
            waiting.retain(|waiter| !waiter.is_closed());
        }
        let (sender, turn) = oneshot::channel();
        (waiting.len() < most).then(|| {
            waiting.push_back(sender);
            Waiter { queue: self, turn }
        })
    }

    fn has_any(&self) -> bool {
        self.0.borrow().iter().any(|waiter| !waiter.is_closed())
    }

    /// False where nobody waits.
    fn wake_one(&self) -> bool {
        // Those who gave up meanwhile are passed over.
        while let Some(waiter) = self.0.borrow_mut().pop_front() {
            if waiter.send(()).is_ok() {
                return true;
            }
        }
        false
    }
}

/// A place in a queue. Its turn passes on where its owner gives up.
struct Waiter<'a> {
    queue: &'a Queue,
    turn: oneshot::Receiver<()>,
}

impl Waiter<'_> {
    async fn turn(&mut self) {
        let _ = (&mut self.turn).await;
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.turn.try_recv().is_ok() {
            let _ = self.queue.wake_one();
        }
    }
}

/// One open connection of a pool.
pub(crate) struct Permit(Rc<Open>);

impl Permit {
    fn take(open: &Rc<Open>) -> Self {
        open.count.set(open.count.get() + 1);
        Self(open.clone())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.wake_one();
    }
}

/// What a request wants of a pool.
pub(crate) struct Wish<'a> {
    pub(crate) destination: Destination<'a>,
    pub(crate) protocol: UpstreamProtocol,
    pub(crate) connect_within: Duration,
    /// A connection that was never used: for a second try after a stale one.
    pub(crate) fresh: bool,
}

impl Pool {
    pub(crate) fn new() -> Self {
        Self {
            idle: RefCell::default(),
            shared: RefCell::default(),
            open: Rc::default(),
            dialing_for_all: Cell::new(false),
            settles_on_h1: Cell::new(false),
            dial_failure: RefCell::default(),
            dials: Cell::new(0),
            retired: Cell::new(false),
        }
    }

    fn wake_one(&self) {
        self.open.wake_one();
    }

    /// A connection for one request.
    ///
    /// # Errors
    /// None could be made, or too many requests wait already.
    pub(crate) async fn lease(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        match wish.protocol {
            UpstreamProtocol::H2 => self.lease_h2(worker, wish).await,
            UpstreamProtocol::Auto => Box::pin(self.lease_either(worker, wish)).await,
            UpstreamProtocol::H1 | UpstreamProtocol::Tcp => self.lease_h1(worker, wish).await,
        }
    }

    async fn lease_h1(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        loop {
            // With a PROXY header a connection belongs to one source: it is never shared.
            if !wish.fresh
                && wish.destination.proxy_source.is_none()
                && let Some(connection) = self.take_idle()
            {
                return Ok(Leased::H1(connection));
            }
            let limits = &worker.generation().snapshot.limits;
            if self.open.count.get() < limits.upstream_connections {
                return self.dial_or_idle(worker, wish).await;
            }
            self.wait(worker, limits.upstream_pending).await?;
        }
    }

    /// Dials, unless a connection comes free before that is done. In a burst the first are served
    /// before the last dials get through, where the origin's accept queue is short. A dial that lost
    /// goes on by itself and is there for the next: the pool grows to what is asked of it.
    async fn dial_or_idle(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let permit = Permit::take(&self.open);
        if wish.fresh || wish.destination.proxy_source.is_some() {
            return Ok(Leased::H1(Box::pin(dial_h1(worker, wish, permit)).await?));
        }
        let mut dial = Box::pin(self.dial_for_all(worker, wish, permit));
        while let Some(mut free) = self.open.dialing.join(self.open.count.get()) {
            tokio::select! {
                biased;
                dialled = &mut dial => return dialled.map(Leased::H1),
                () = free.turn() => {
                    if let Some(connection) = self.take_idle() {
                        let (owner, pool) = (worker.clone(), self.clone());
                        worker.spawn(async move {
                            // hyper says that it takes a request once it was polled.
                            if let Ok(mut connection) = dial.await
                                && probe(&mut connection)
                            {
                                pool.give_back(&owner, connection, true);
                            }
                        });
                        return Ok(Leased::H1(connection));
                    }
                }
            }
        }
        dial.await.map(Leased::H1)
    }

    /// A dial that may outlive the request that began it.
    fn dial_for_all(
        &self,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> impl Future<Output = Result<Box<H1Connection>, Error>> + 'static {
        let (worker, host, label) = (worker.clone(), wish.destination.host.to_owned(), wish.destination.label.clone());
        let (port, reach, within) = (wish.destination.port, wish.destination.reach, wish.connect_within);
        let (protocol, tls) = (wish.protocol, wish.destination.tls.cloned());
        async move {
            let destination =
                Destination { host: &host, port, label: &label, reach, tls: tls.as_ref(), proxy_source: None };
            dial_h1(&worker, &Wish { destination, protocol, connect_within: within, fresh: false }, permit).await
        }
    }

    /// Leave for a connection that is made elsewhere, and is nobody else's.
    ///
    /// # Errors
    /// Too many wait for one already.
    pub(crate) async fn permit(&self, worker: &Worker) -> Result<Permit, Error> {
        loop {
            let limits = &worker.generation().snapshot.limits;
            if self.open.count.get() < limits.upstream_connections {
                return Ok(Permit::take(&self.open));
            }
            self.wait(worker, limits.upstream_pending).await?;
        }
    }

    async fn wait(&self, worker: &Worker, most: usize) -> Result<(), Error> {
        let Some(mut waiter) = self.open.waiting.join(most) else {
            worker.shared.metrics.limit("upstream-pending");
            return Err(Error::Limit("requests that wait for an upstream connection"));
        };
        waiter.turn().await;
        Ok(())
    }

    fn take_idle(&self) -> Option<Box<H1Connection>> {
        loop {
            let mut connection = self.idle.borrow_mut().pop()?;
            if probe(&mut connection) {
                connection.reused = true;
                connection.idle = None;
                return Some(connection);
            }
        }
    }

    /// Gives an h1 connection back, if it can take another request.
    pub(crate) fn give_back(&self, worker: &Worker, mut connection: Box<H1Connection>, shareable: bool) {
        if shareable && !self.retired.get() && connection.is_reusable() {
            worker.make_room_for_idle();
            connection.idle_since = worker.now();
            connection.idle = Some(worker.idle.enter());
            self.idle.borrow_mut().push(connection);
            self.open.wake_for_idle();
        }
    }

    async fn lease_h2(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let dials_seen = self.dials.get();
        loop {
            if let Some(lease) = self.place(worker, true) {
                return Ok(Leased::H2(lease));
            }
            if self.waits_for_others(worker, dials_seen).await? {
                continue;
            }
            let (permit, dialing) = (Permit::take(&self.open), Dialing::begin(self));
            let result = Box::pin(self.dial_h2(worker, wish, permit)).await;
            dialing.end(&result);
            return Ok(Leased::H2(H2Lease::take(&result?, self, worker, false)));
        }
    }

    /// Waits, where another one dials for all, or there are as many connections as may be. True
    /// after that: it is to be looked anew for one.
    async fn waits_for_others(&self, worker: &Rc<Worker>, dials_seen: u64) -> Result<bool, Error> {
        // Somebody else's dial failed while we waited for it: it would have been ours.
        if let Some((number, error)) = &*self.dial_failure.borrow()
            && *number > dials_seen
        {
            return Err(error.clone());
        }
        let limits = &worker.generation().snapshot.limits;
        let waits = self.dialing_for_all.get() || self.open.count.get() >= limits.upstream_connections;
        if waits {
            self.wait(worker, limits.upstream_pending).await?;
        }
        Ok(waits)
    }

    /// A free place on a shared connection.
    fn place(self: &Rc<Self>, worker: &Rc<Worker>, reused: bool) -> Option<H2Lease> {
        let shared = self.shared.borrow();
        let connection = shared.iter().find(|connection| connection.has_room())?;
        Some(H2Lease::take(connection, self, worker, reused))
    }

    async fn dial_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> Result<Rc<H2Connection>, Error> {
        let deadline = Instant::now() + wish.connect_within;
        let io = connect(worker, &wish.destination, wish.connect_within).await?;
        self.adopt_h2(worker, wish, io, permit, deadline).await
    }

    /// As ALPN settles it. The first dial is for all, since it may become a connection for all.
    async fn lease_either(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
        let dials_seen = self.dials.get();
        loop {
            if let Some(lease) = self.place(worker, true) {
                return Ok(Leased::H2(lease));
            }
            if !wish.fresh
                && let Some(connection) = self.take_idle()
            {
                return Ok(Leased::H1(connection));
            }
            if self.waits_for_others(worker, dials_seen).await? {
                continue;
            }
            let permit = Permit::take(&self.open);
            if self.settles_on_h1.get() {
                return self.dial_either(worker, wish, permit).await;
            }
            let dialing = Dialing::begin(self);
            let result = self.dial_either(worker, wish, permit).await;
            dialing.end(&result);
            return result;
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
            return Ok(Leased::H2(H2Lease::take(&connection, self, worker, false)));
        }
        Ok(Leased::H1(Box::new(handshake_h1(worker, wish, io, permit).await?)))
    }

    /// Speaks h2 on a new connection and hands it to a task of the worker. `deadline` is the dial's:
    /// a connection that says no SETTINGS is as good as none.
    async fn adopt_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        io: Io,
        permit: Permit,
        deadline: Instant,
    ) -> Result<Rc<H2Connection>, Error> {
        let peer = wish.destination.label.clone();
        let broken = |reason: String| Error::Broken { peer: peer.clone(), reason, unprocessed: true };
        let limits = &worker.generation().snapshot.limits;
        let handshake = h2::client::Builder::new()
            .initial_window_size(limits.stream_window)
            .initial_connection_window_size(limits.connection_window)
            .max_frame_size(MAX_FRAME)
            .max_header_list_size(limits.header_bytes as u32)
            .max_send_buffer_size(SEND_BUFFER)
            // None until the peer's SETTINGS came: that is how their arrival is seen.
            .initial_max_send_streams(0)
            .enable_push(false)
            .handshake::<_, Bytes>(io);
        let ready = async {
            let (sender, mut connection) = handshake.await?;
            std::future::poll_fn(|cx| {
                if let Poll::Ready(result) = Pin::new(&mut connection).poll(cx) {
                    return Poll::Ready(result.and(Err(h2::Reason::NO_ERROR.into())));
                }
                if sender.current_max_send_streams() > 0 { Poll::Ready(Ok(())) } else { Poll::Pending }
            })
            .await?;
            Ok::<_, h2::Error>((sender, connection))
        };
        let (sender, connection) = tokio::time::timeout_at(deadline, ready)
            .await
            .map_err(|_| Error::ConnectTimeout { peer: peer.clone(), after: wish.connect_within })?
            .map_err(|error| broken(format!("HTTP/2 did not begin: {error}")))?;
        let shared = Rc::new(H2Connection {
            extended_connect: sender.is_extended_connect_protocol_enabled(),
            sender,
            window: Window::new(limits.connection_window),
            streams: Cell::new(0),
            closed: Cell::new(false),
            idle_since: Cell::new(worker.now()),
            idle: RefCell::default(),
            retire: crate::signal::Signal::default(),
        });
        if self.retired.get() {
            shared.retire.set(());
        }
        self.shared.borrow_mut().push(shared.clone());
        worker.spawn(drive_h2(connection, shared.clone(), self.clone(), permit));
        Ok(shared)
    }

    /// Drops what is closed, and what was idle for too long. True where nothing is left.
    pub(crate) fn sweep(&self, now: u64, idle_limit: Duration) -> bool {
        let expired = |since: u64| Duration::from_millis(now.saturating_sub(since)) >= idle_limit;
        let mut idle = std::mem::take(&mut *self.idle.borrow_mut());
        idle.retain_mut(|connection| !expired(connection.idle_since) && probe(connection));
        self.idle.borrow_mut().append(&mut idle);
        for connection in self.shared.borrow().iter() {
            if connection.streams.get() == 0 && expired(connection.idle_since.get()) {
                connection.close();
                connection.retire.set(());
            }
        }
        // Who dials would come back to a pool that nobody knows.
        self.open.count.get() == 0 && !self.open.waiting.has_any()
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
                connection.close();
                connection.retire.set(());
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
            connection.close();
            connection.retire.set(());
        }
    }
}

/// What an h1 connection reads ahead.
const READ_BUFFER: usize = 64 << 10;
/// DATA frames up to this size are taken: a tunnel's bytes in fewer frames.
pub(crate) const MAX_FRAME: u32 = 256 << 10;
/// What h2 buffers for a stream beyond the peer's window.
pub(crate) const SEND_BUFFER: usize = 512 << 10;

/// Others wait while one dials; whatever becomes of it, also if it is dropped, they go on.
struct Dialing<'a>(&'a Pool);

impl<'a> Dialing<'a> {
    fn begin(pool: &'a Pool) -> Self {
        pool.dialing_for_all.set(true);
        Self(pool)
    }

    fn end<T>(self, result: &Result<T, Error>) {
        self.0.dials.set(self.0.dials.get() + 1);
        *self.0.dial_failure.borrow_mut() = result.as_ref().err().map(|error| (self.0.dials.get(), error.clone()));
    }
}

impl Drop for Dialing<'_> {
    fn drop(&mut self) {
        self.0.dialing_for_all.set(false);
        self.0.open.wake_all();
    }
}

/// Drives an h2 connection until it ends.
async fn drive_h2(
    mut connection: h2::client::Connection<Io, Bytes>,
    shared: Rc<H2Connection>,
    pool: Rc<Pool>,
    permit: Permit,
) {
    let mut widened_to = shared.window.base();
    let result = std::future::poll_fn(|cx| {
        let target = shared.window.poll_target(cx);
        if std::mem::replace(&mut widened_to, target) != target {
            connection.set_target_window_size(target);
        }
        // Retired and empty: end it. While streams are left they wake us, since they end here.
        if shared.streams.get() == 0 && shared.retire.poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut connection).poll(cx)
    })
    .await;
    if let Err(error) = result {
        tracing::debug!(%error, "an upstream h2 connection ended");
    }
    shared.close();
    pool.shared.borrow_mut().retain(|other| !Rc::ptr_eq(other, &shared));
    drop(permit);
    pool.open.wake_all();
}

async fn dial_h1(worker: &Rc<Worker>, wish: &Wish<'_>, permit: Permit) -> Result<Box<H1Connection>, Error> {
    let io = connect(worker, &wish.destination, wish.connect_within).await?;
    Ok(Box::new(handshake_h1(worker, wish, io, permit).await?))
}

async fn handshake_h1(worker: &Worker, wish: &Wish<'_>, io: Io, permit: Permit) -> Result<H1Connection, Error> {
    let limits = &worker.generation().snapshot.limits;
    let mut builder = http1::Builder::new();
    builder.max_buf_size(limits.header_bytes.max(READ_BUFFER)).max_header_size(limits.header_bytes);
    if limits.header_count != HYPER_HEADERS {
        builder.max_headers(limits.header_count);
    }
    let (metered, meter) = Metered::new(io);
    let (sender, connection) = builder.handshake(TokioIo::new(metered)).await.map_err(|error| Error::Broken {
        peer: wish.destination.label.clone(),
        reason: error.to_string(),
        unprocessed: true,
    })?;
    Ok(H1Connection { sender, connection, meter, finished: false, reused: false, idle_since: 0, idle: None, permit })
}

/// Is an idle connection still open? Looks at what the peer did while nobody did.
fn probe(connection: &mut H1Connection) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    connection.poll(&mut cx).is_ok() && connection.is_reusable()
}
