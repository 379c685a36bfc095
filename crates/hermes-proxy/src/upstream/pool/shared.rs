//! Connections to one endpoint that many share, of HTTP/2 or HTTP/3.
//!
//! In: a connection that was made. Out: places on it, one a stream. A task of the worker drives it to its
//! end; without places, and retired, it ends.

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
use crate::error::Error;
use crate::h3::Link;
use crate::h3::datagrams::packet_capacity;
use crate::h3::link::number;
use crate::live::Entry;
use crate::signal::Signal;
use crate::stream::h2::{Backlog, Window};
use crate::worker::Worker;

/// Streams that we open on an HTTP/3 connection. Its peer may allow fewer: QUIC says so as they are opened.
const H3_STREAMS: usize = 100;
/// Streams that have ended are allowed anew a round trip later; beyond that its peer is waited for so long until
/// another connection is dialled.
const LEAVE: Duration = Duration::from_millis(10);

/// A connection that many share.
pub(crate) struct SharedConnection {
    pub(crate) speaks: Speaks,
    pub(super) streams: Cell<usize>,
    closed: Cell<bool>,
    pub(super) idle_since: Cell<u64>,
    pub(super) idle: RefCell<Option<IdlePlace>>,
    /// Tells the driver to close once its streams are done.
    retiring: Signal<()>,
    /// Tells whoever keeps it that it is over, whatever is on it.
    over: Signal<()>,
    /// Its node keeps it: it is not ours to close for want of use.
    pub(super) is_kept: bool,
    /// Its peer has said GOAWAY, or there is a better one.
    is_going: Cell<bool>,
    /// Nothing was heard on it for too long: nothing new goes on it until something is.
    pub(super) is_silent: Cell<bool>,
}

/// What is spoken on it, and by whom.
pub(crate) enum Speaks {
    H2 {
        sender: ::h2::client::SendRequest<Bytes>,
        /// The peer takes extended CONNECT (RFC 8441).
        extended_connect: bool,
        window: Rc<Window>,
        backlog: Backlog,
    },
    H3(Rc<Link>),
}

impl SharedConnection {
    pub(super) fn new(speaks: Speaks, now: u64) -> Rc<Self> {
        Self::of(speaks, now, false)
    }

    /// One that its node keeps to us.
    pub(super) fn kept(speaks: Speaks, now: u64) -> Rc<Self> {
        Self::of(speaks, now, true)
    }

    fn of(speaks: Speaks, now: u64, is_kept: bool) -> Rc<Self> {
        Rc::new(Self {
            speaks,
            is_kept,
            is_going: Cell::new(false),
            is_silent: Cell::new(false),
            streams: Cell::new(0),
            closed: Cell::new(false),
            idle_since: Cell::new(now),
            idle: RefCell::default(),
            retiring: Signal::default(),
            over: Signal::default(),
        })
    }

    /// A further stream may begin on it.
    pub(super) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// So many further streams may begin on it.
    pub(super) fn room(&self) -> usize {
        let most = match &self.speaks {
            Speaks::H2 { sender, .. } => sender.current_max_send_streams(),
            Speaks::H3(_) => H3_STREAMS,
        };
        // What its peer takes is not known before its SETTINGS.
        let is_settled = match &self.speaks {
            Speaks::H2 { .. } => true,
            Speaks::H3(link) => link.settings().is_some(),
        };
        let takes_any = is_settled && !self.closed.get() && !self.is_silent.get();
        if takes_any { most.saturating_sub(self.streams.get()) } else { 0 }
    }

    /// Its peer has not said GOAWAY, as far as it was heard.
    pub(super) fn is_alive(&self) -> bool {
        let is_alive = match &self.speaks {
            Speaks::H2 { sender, .. } => {
                let mut cx = Context::from_waker(Waker::noop());
                !matches!(sender.clone().poll_ready(&mut cx), Poll::Ready(Err(_)))
            }
            Speaks::H3(link) => !link.is_going(),
        };
        if !is_alive {
            self.close();
        }
        is_alive
    }

    /// Its peer has said GOAWAY, its path is dark, or there is a better one: what lives long on it had better go elsewhere. Who keeps one to us
    /// dials another one itself.
    pub(crate) fn is_going(&self) -> bool {
        self.is_going.get() || (self.is_silent.get() && !self.is_kept)
    }

    /// Its path is dark, or no more. True where that is news. Flows on it hear of it.
    pub(super) fn set_dark(&self, worker: &Worker, is_dark: bool) -> bool {
        let is_news = self.is_silent.replace(is_dark) != is_dark;
        if is_news {
            worker.live.nudge_flows();
        }
        is_news
    }

    /// There is a better one: nothing new on it, and what can move goes elsewhere.
    pub(super) fn leave(&self, worker: &Worker) {
        self.retire();
        if !self.is_going.replace(true) {
            worker.live.nudge_flows();
        }
    }

    /// For who drives it, with all that was read: flows on it hear of GOAWAY when it has come.
    pub(super) fn look_for_goaway(&self, worker: &Worker) {
        let has_come = || match &self.speaks {
            Speaks::H2 { window, .. } => window.ends().is_going(),
            Speaks::H3(link) => link.is_going(),
        };
        if !self.is_going.get() && has_come() {
            self.is_going.set(true);
            worker.live.nudge_flows();
        }
    }

    /// The peer takes extended CONNECT (RFC 8441, RFC 9220).
    pub(crate) fn takes_extended_connect(&self) -> bool {
        match &self.speaks {
            Speaks::H2 { extended_connect, .. } => *extended_connect,
            Speaks::H3(link) => link.settings().is_some_and(|settings| settings.extended_connect),
        }
    }

    /// Its tunnels may have datagrams beside their streams.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.is_h3()
    }

    /// The longest IP packet that goes over it in a piece.
    pub(super) fn packet_capacity(&self) -> usize {
        match &self.speaks {
            Speaks::H2 { .. } => capsule::MAX_PACKET,
            Speaks::H3(link) => packet_capacity(link),
        }
    }

    /// Counts up with whatever is heard on it.
    pub(crate) fn heard(&self) -> u64 {
        match &self.speaks {
            Speaks::H2 { window, .. } => window.ends().reads(),
            Speaks::H3(link) => link.connection.stats().udp_rx.datagrams,
        }
    }

    /// It is of HTTP/3.
    pub(super) fn is_h3(&self) -> bool {
        matches!(self.speaks, Speaks::H3(_))
    }

    /// No stream is on it.
    pub(super) fn is_unused(&self) -> bool {
        self.streams.get() == 0
    }

    /// Its node keeps it to us.
    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// It takes no further stream.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// No further stream on it.
    pub(crate) fn close(&self) {
        self.closed.set(true);
    }

    /// No further stream on it, and it ends with its last.
    pub(crate) fn retire(&self) {
        self.close();
        self.retiring.set(());
    }

    /// It ends now, and all that is on it.
    pub(crate) fn end(&self) {
        self.close();
        self.over.set(());
    }

    /// It was told so.
    pub(super) fn is_over(&self) -> bool {
        self.over.get().is_some()
    }

    /// Waits until it is told so.
    pub(super) async fn ended(&self) {
        self.over.wait().await;
    }

    /// Ready where it is retired and empty. While streams are left they wake the driver, since they end there.
    pub(crate) fn poll_done(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.streams.get() == 0 { self.retiring.poll(cx) } else { Poll::Pending }
    }
}

/// A place on a shared connection: one stream.
pub(crate) struct Lease {
    pub(crate) connection: Rc<SharedConnection>,
    pool: Rc<Pool>,
    worker: Rc<Worker>,
    pub(crate) reused: bool,
    /// Of HTTP/3, where it was opened already.
    stream: Cell<Option<Box<Opened>>>,
    /// When it was taken, in milliseconds of the worker's clock, and what was heard on the connection then.
    since: u64,
    heard: u64,
}

/// A stream of QUIC on which nothing was said yet.
pub(crate) type Opened = (quic::SendStream, quic::RecvStream);

/// A stream that lasted so long, in milliseconds, and nothing was heard on its connection meanwhile: the
/// peer may be gone, or what lies between has forgotten the connection. No further stream is lost on it.
const SILENT: u64 = 1000;

impl Lease {
    pub(super) fn take(connection: &Rc<SharedConnection>, pool: &Rc<Pool>, worker: &Rc<Worker>, reused: bool) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        connection.idle.take();
        let (since, heard) = (worker.now(), connection.heard());
        let (connection, pool, worker) = (connection.clone(), pool.clone(), worker.clone());
        Self { connection, pool, worker, reused, stream: Cell::new(None), since, heard }
    }

    /// As [`Self::take`], where its peer allows one more by now.
    fn take_allowed(
        connection: &Rc<SharedConnection>,
        pool: &Rc<Pool>,
        worker: &Rc<Worker>,
        reused: bool,
    ) -> Option<Self> {
        let stream = match &connection.speaks {
            Speaks::H2 { .. } => None,
            Speaks::H3(link) => Some(Box::new(link.connection.open_bi().now_or_never()?.ok()?)),
        };
        let lease = Self::take(connection, pool, worker, reused);
        lease.stream.set(stream);
        Some(lease)
    }

    /// A stream on its connection, which is of HTTP/3.
    ///
    /// # Errors
    /// The connection is over.
    pub(crate) async fn open(&self, link: &Link) -> Result<Opened, quic::ConnectionError> {
        match self.stream.take() {
            Some(stream) => Ok(*stream),
            None => link.connection.open_bi().await,
        }
    }
}

/// Nothing came of it. An end in order would be half a request.
fn cancel((send, recv): &mut Opened) {
    let _ = send.reset(number(Code::RequestCancelled));
    let _ = recv.stop(number(Code::RequestCancelled));
}

impl Drop for Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        let unused = self.stream.take();
        // Who asked nothing is owed no answer.
        let is_owed = unused.is_none();
        if let Some(mut stream) = unused {
            cancel(&mut stream);
        }
        connection.streams.set(connection.streams.get() - 1);
        let was_silent = || self.worker.now() >= self.since + SILENT && connection.heard() == self.heard;
        if is_owed && !connection.is_kept && was_silent() {
            connection.close();
        }
        connection.idle_since.set(self.worker.now());
        if connection.streams.get() == 0 {
            if connection.closed.get() {
                // Wakes the driver of a retired connection: this was its last stream.
                connection.retire();
            } else if !connection.is_kept {
                self.worker.make_room_for_idle();
                connection.idle.replace(Some(self.worker.idle.enter()));
            }
        }
        self.pool.wake_one();
    }
}

/// Opens a stream as soon as its peer allows one.
async fn open_on(connection: &Rc<SharedConnection>) -> (&Rc<SharedConnection>, Result<Opened, quic::ConnectionError>) {
    match &connection.speaks {
        Speaks::H3(link) => (connection, link.connection.open_bi().await),
        Speaks::H2 { .. } => std::future::pending().await,
    }
}

impl Pool {
    /// A free place on a shared connection.
    pub(super) fn place(self: &Rc<Self>, worker: &Rc<Worker>, reused: bool) -> Option<Lease> {
        let shared = self.shared.borrow();
        let mut fit = shared.iter().filter(|connection| connection.has_room() && connection.is_alive());
        fit.find_map(|connection| Lease::take_allowed(connection, self, worker, reused))
    }

    /// A place on the first connection of HTTP/3 whose peer allows one more stream, where none does now. At once `None`
    /// where there is no such connection. Nothing is held meanwhile: who waits keeps no connection in use.
    pub(super) async fn leave(self: &Rc<Self>, worker: &Rc<Worker>) -> Option<Lease> {
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
                // Its driver may not have heard of it yet, and nobody is to look at it again.
                Err(_) => connection.close(),
            }
        }
        None
    }

    /// Connections of HTTP/3 that may have further streams, as far as it is for us to say.
    fn full(&self) -> Vec<Rc<SharedConnection>> {
        let shared = self.shared.borrow();
        shared.iter().filter(|one| one.is_h3() && one.has_room() && one.is_alive()).cloned().collect()
    }

    /// As [`Self::leave`], for as long as leave takes that is under way.
    pub(super) async fn leave_soon(self: &Rc<Self>, worker: &Rc<Worker>, had_turn: bool) -> Option<Lease> {
        let rtts = self.full().into_iter().filter_map(|full| match &full.speaks {
            Speaks::H3(link) => Some(link.connection.rtt()),
            Speaks::H2 { .. } => None,
        });
        let within = 2 * rtts.max()? + LEAVE;
        // Who is gone meanwhile has done nothing with its turn, and who gets leave needs none.
        let turn = had_turn.then(|| Turn::of(&self.open));
        let lease = tokio::time::timeout(within, self.leave(worker)).await.ok().flatten();
        if let Some(turn) = turn
            && lease.is_none()
        {
            turn.keep();
        }
        lease
    }

    /// Waits for a turn to look for a place anew, or for leave to open a stream, whichever comes first: both are needed,
    /// since a stream that ends here gives a turn at once, and its peer's leave comes a round trip later.
    ///
    /// # Errors
    /// Too many wait already.
    pub(super) async fn turn_or_leave(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        session: Option<&Rc<Entry>>,
        had_turn: bool,
    ) -> Result<Option<Lease>, Error> {
        tokio::select! {
            biased;
            turn = self.wait(worker, session, had_turn) => turn.map(|()| None),
            Some(lease) = self.leave(worker) => Ok(Some(lease)),
        }
    }

    /// A new connection for all, and the task that drives it; `permit` is its own until it ends.
    pub(super) fn share(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        shared: &Rc<SharedConnection>,
        permit: super::Permit,
        drive: impl Future<Output = ()> + 'static,
    ) {
        if self.retired.get() {
            shared.retire();
        }
        {
            // Those of HTTP/3 come first: whoever wishes for it has HTTP/2 only where there is nothing else.
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
