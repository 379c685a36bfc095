//! Connections to one endpoint that many share, of HTTP/2 or HTTP/3.
//!
//! In: a connection that was made. Out: places on it, one a stream. A task of the worker drives it to its
//! end; without places, and retired, it ends.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hermes_wire::capsule;

use super::Pool;
use super::idle::IdlePlace;
use crate::h3::Link;
use crate::h3::datagrams::packet_capacity;
use crate::signal::Signal;
use crate::stream::h2::{Backlog, Window};
use crate::worker::Worker;

/// Streams that we open on an HTTP/3 connection; QUIC does not say before how many its peer allows.
const H3_STREAMS: usize = 100;

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
            is_silent: Cell::new(false),
            streams: Cell::new(0),
            closed: Cell::new(false),
            idle_since: Cell::new(now),
            idle: RefCell::default(),
            retiring: Signal::default(),
            over: Signal::default(),
        })
    }

    fn has_room(&self) -> bool {
        let most = match &self.speaks {
            Speaks::H2 { sender, .. } => sender.current_max_send_streams(),
            Speaks::H3(_) => H3_STREAMS,
        };
        // What its peer takes is not known before its SETTINGS.
        let is_settled = match &self.speaks {
            Speaks::H2 { .. } => true,
            Speaks::H3(link) => link.settings().is_some(),
        };
        is_settled && !self.closed.get() && !self.is_silent.get() && self.streams.get() < most
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
    pub(super) fn end(&self) {
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
    /// When it was taken, in milliseconds of the worker's clock, and what was heard on the connection then.
    since: u64,
    heard: u64,
}

/// A stream that lasted so long, in milliseconds, and nothing was heard on its connection meanwhile: the
/// peer may be gone, or what lies between has forgotten the connection. No further stream is lost on it.
const SILENT: u64 = 1000;

impl Lease {
    pub(super) fn take(connection: &Rc<SharedConnection>, pool: &Rc<Pool>, worker: &Rc<Worker>, reused: bool) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        connection.idle.take();
        let (since, heard) = (worker.now(), connection.heard());
        Self { connection: connection.clone(), pool: pool.clone(), worker: worker.clone(), reused, since, heard }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.streams.set(connection.streams.get() - 1);
        let was_silent = || self.worker.now() >= self.since + SILENT && connection.heard() == self.heard;
        if !connection.is_kept && was_silent() {
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

impl Pool {
    /// A free place on a shared connection.
    pub(super) fn place(self: &Rc<Self>, worker: &Rc<Worker>, reused: bool) -> Option<Lease> {
        let shared = self.shared.borrow();
        let connection = shared.iter().find(|connection| connection.has_room() && connection.is_alive())?;
        Some(Lease::take(connection, self, worker, reused))
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
        self.shared.borrow_mut().push(shared.clone());
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
