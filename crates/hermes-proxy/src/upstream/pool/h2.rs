//! HTTP/2 connections to one endpoint, shared by all who want one.
//!
//! In: a wish. Out: a place on a connection, for one stream. One dials for all who wait, and a task of the
//! worker drives each connection to its end.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hermes_net::Io;
use tokio::time::Instant;

use super::idle::IdlePlace;
use super::queue::Permit;
use super::{Dialing, Leased, Pool, Wish};
use crate::error::Error;
use crate::signal::Signal;
use crate::stream::h2::{Backlog, Scanned, Window};
use crate::upstream::connect::connect;
use crate::worker::Worker;

/// DATA frames up to this size are taken: a tunnel's bytes in fewer frames.
pub(crate) const MAX_FRAME: u32 = 256 << 10;
/// Small frames that h2 keeps unread, at 256 bytes each: what may come between two sweeps, which take
/// them out of it. h2 would allow half the window, and ends connections at that.
pub(crate) const FRAME_BUDGET: usize = 32 << 20;
/// Streams that we reset and h2 remembers, for a second: frames that were under way to those are no
/// errors. Clients break off as they like, and none of them may end a connection for all the others.
pub(crate) const RESETS_REMEMBERED: usize = 4096;
/// Errors of a peer that carries everybody's streams, such as frames for streams that are forgotten. Each
/// costs memory until its answer is read.
pub(crate) const ERROR_RESETS: usize = 65_536;
/// Nodes add lines to a head: what they may pass on to us is larger than what they take.
pub(crate) const ADDED_BYTES: u32 = 4 << 10;
pub(crate) const ADDED_LINES: usize = 8;
/// What h2 buffers for a stream beyond the peer's window.
pub(crate) const SEND_BUFFER: usize = 512 << 10;

/// An h2 connection, shared.
pub(crate) struct H2Connection {
    pub(crate) sender: h2::client::SendRequest<Bytes>,
    pub(super) streams: Cell<usize>,
    closed: Cell<bool>,
    pub(super) idle_since: Cell<u64>,
    pub(super) idle: RefCell<Option<IdlePlace>>,
    /// The peer takes extended CONNECT (RFC 8441).
    pub(crate) extended_connect: bool,
    pub(crate) window: Rc<Window>,
    pub(crate) backlog: Backlog,
    /// Tells the driver to close once its streams are done.
    retiring: Signal<()>,
}

impl H2Connection {
    fn has_room(&self) -> bool {
        !self.closed.get() && self.streams.get() < self.sender.current_max_send_streams()
    }

    /// Its peer has not said GOAWAY, as far as it was heard.
    fn is_alive(&self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        let is_alive = !matches!(self.sender.clone().poll_ready(&mut cx), Poll::Ready(Err(_)));
        if !is_alive {
            self.close();
        }
        is_alive
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
    pub(super) fn retire(&self) {
        self.close();
        self.retiring.set(());
    }
}

/// A place on an h2 connection: one stream.
pub(crate) struct H2Lease {
    pub(crate) connection: Rc<H2Connection>,
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

impl H2Lease {
    pub(super) fn take(connection: &Rc<H2Connection>, pool: &Rc<Pool>, worker: &Rc<Worker>, reused: bool) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        connection.idle.take();
        let (since, heard) = (worker.now(), connection.window.ends().reads());
        Self { connection: connection.clone(), pool: pool.clone(), worker: worker.clone(), reused, since, heard }
    }
}

impl Drop for H2Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.streams.set(connection.streams.get() - 1);
        if connection.window.ends().reads() == self.heard && self.worker.now() >= self.since + SILENT {
            connection.close();
        }
        connection.idle_since.set(self.worker.now());
        if connection.streams.get() == 0 {
            if connection.closed.get() {
                // Wakes the driver of a retired connection: this was its last stream.
                connection.retire();
            } else {
                self.worker.make_room_for_idle();
                connection.idle.replace(Some(self.worker.idle.enter()));
            }
        }
        self.pool.wake_one();
    }
}

impl Pool {
    pub(super) async fn lease_h2(self: &Rc<Self>, worker: &Rc<Worker>, wish: &Wish<'_>) -> Result<Leased, Error> {
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

    /// A free place on a shared connection.
    pub(super) fn place(self: &Rc<Self>, worker: &Rc<Worker>, reused: bool) -> Option<H2Lease> {
        let shared = self.shared.borrow();
        let connection = shared.iter().find(|connection| connection.has_room() && connection.is_alive())?;
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

    /// Speaks h2 on a new connection and hands it to a task of the worker. `deadline` is the dial's:
    /// a connection that says no SETTINGS is as good as none.
    pub(super) async fn adopt_h2(
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
        let window = Window::new(limits.connection_window);
        let handshake = h2::client::Builder::new()
            .initial_window_size(limits.stream_window)
            .initial_connection_window_size(limits.connection_window)
            .max_frame_size(MAX_FRAME)
            .max_header_list_size(limits.header_bytes as u32 + ADDED_BYTES)
            .max_local_error_reset_streams(Some(ERROR_RESETS))
            .max_concurrent_reset_streams(RESETS_REMEMBERED)
            .max_send_buffer_size(SEND_BUFFER)
            .data_frame_budget(FRAME_BUDGET)
            // None until the peer's SETTINGS came: that is how their arrival is seen.
            .initial_max_send_streams(0)
            .enable_push(false)
            .handshake::<_, Bytes>(Scanned::new(io, window.ends()));
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
            window,
            backlog: Backlog::default(),
            streams: Cell::new(0),
            closed: Cell::new(false),
            idle_since: Cell::new(worker.now()),
            idle: RefCell::default(),
            retiring: Signal::default(),
        });
        if self.retired.get() {
            shared.retire();
        }
        self.shared.borrow_mut().push(shared.clone());
        worker.spawn(drive_h2(connection, shared.clone(), self.clone(), permit));
        Ok(shared)
    }
}

/// Drives an h2 connection until it ends.
async fn drive_h2(
    mut connection: h2::client::Connection<Scanned, Bytes>,
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
        if shared.streams.get() == 0 && shared.retiring.poll(cx).is_ready() {
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
