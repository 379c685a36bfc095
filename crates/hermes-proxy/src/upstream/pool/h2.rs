//! HTTP/2 connections to an endpoint.
//!
//! In: a wish. Out: a connection that has begun, and is driven.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::select;
use hermes_model::snapshot::UpstreamProtocol;
use hermes_net::Io;
use hermes_net::tcp::Acks;
use tokio::time::{Instant, MissedTickBehavior};

use super::fallback::{ANSWERS, DARK, LOOK};
use super::queue::Permit;
use super::shared::{SharedConnection, Speaks};
use super::{Pool, Standing, Wish};
use crate::error::{Error, NO_SETTINGS};
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

impl Pool {
    pub(super) async fn dial_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        let deadline = Instant::now() + wish.connect_within;
        let io = connect(worker, &wish.destination, wish.connect_within).await?;
        self.adopt_h2(worker, wish, io, permit, deadline).await
    }

    /// Speaks h2 on a new connection and hands it to a task of the worker. `deadline` is the dial's.
    pub(super) async fn adopt_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        wish: &Wish<'_>,
        io: Io,
        permit: Permit,
        deadline: Instant,
    ) -> Result<Rc<SharedConnection>, Error> {
        let acks = Acks::of(io.tcp());
        let begun = begin_h2(worker, wish.destination.label, io, deadline, wish.connect_within).await?;
        let shared = SharedConnection::new(begun.speaks, worker.now());
        let drive = drive_h2(worker.clone(), begun.connection, shared.clone(), begun.window);
        let (pool, here, watched, standing) = (self.clone(), worker.clone(), shared.clone(), wish.standing());
        self.share(worker, &shared, permit, async move {
            match acks {
                Ok(acks) => _ = select(pin!(drive), pin!(pool.watch_h2(&here, &watched, acks, &standing))).await,
                Err(error) => {
                    tracing::debug!(peer = %standing.label, %error, "whether its path is dark will not be seen");
                    drive.await;
                }
            }
        });
        Ok(shared)
    }

    /// Watches whether what is to be sent on a connection is acknowledged. Where it is not, nothing new goes on it, and
    /// flows that can move look for another one; what cannot waits for the kernel, which tries for a quarter of an hour,
    /// or as long as a peer that has closed its window says so. While it is in use in HTTP/3's place, and its path is
    /// good, that is tried again too: flows that last ask for no other connection. Does not end.
    async fn watch_h2(
        self: &Rc<Self>,
        worker: &Rc<Worker>,
        shared: &SharedConnection,
        acks: Acks,
        standing: &Standing,
    ) -> Infallible {
        let peer = &*standing.label;
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut silent, mut acknowledged) = (Duration::ZERO, 0);
        loop {
            look.tick().await;
            let is_dark = shared.is_silent.get();
            if shared.is_unused() {
                silent = Duration::ZERO;
                if is_dark {
                    shared.retire();
                }
                continue;
            }
            if standing.protocol == UpstreamProtocol::H3 && !shared.is_going() && !self.retired.get() {
                self.try_quic_again(worker, &standing.wish());
            }
            let Ok(seen) = acks.look() else { continue };
            // Since the look before: what was sent a moment ago is owed no answer yet.
            let is_owed = seen.waiting_for.is_some_and(|silence| silence >= LOOK);
            // A window that stays closed is confirmed now and then: nothing of what waits has gone by that.
            let is_stuck = is_dark && seen.waiting_for.is_some() && seen.acknowledged == acknowledged;
            silent = if is_owed || is_stuck { silent + LOOK } else { Duration::ZERO };
            acknowledged = seen.acknowledged;
            if shared.set_dark(worker, silent >= DARK.max(ANSWERS * seen.rtt)) {
                if is_dark {
                    // It has room again, and perhaps no other one comes.
                    self.open.wake_all();
                    tracing::info!(peer, "what is sent over HTTP/2 is acknowledged again");
                } else {
                    tracing::warn!(
                        peer,
                        "what is sent over HTTP/2 is not acknowledged: flows that can move look for another connection; \
                         see whether the peer, and the way to it, is there"
                    );
                }
            }
        }
    }
}

/// A connection that has begun, and that nobody drives yet.
pub(super) struct Begun {
    pub(super) connection: Connection,
    pub(super) speaks: Speaks,
    pub(super) window: Rc<Window>,
}

pub(super) type Connection = h2::client::Connection<Scanned, Bytes>;

/// Speaks h2, and waits for the peer's SETTINGS until `deadline`, which is `within` from the beginning.
pub(super) async fn begin_h2(
    worker: &Worker,
    peer: &Arc<str>,
    io: Io,
    deadline: Instant,
    within: Duration,
) -> Result<Begun, Error> {
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
        .map_err(|_| Error::ConnectTimeout { peer: peer.clone(), missing: NO_SETTINGS, after: within })?
        .map_err(|error| broken(format!("HTTP/2 did not begin: {error}")))?;
    let extended_connect = sender.is_extended_connect_protocol_enabled();
    let speaks = Speaks::H2 { extended_connect, sender, window: window.clone(), backlog: Backlog::default() };
    Ok(Begun { connection, speaks, window })
}

/// Drives an h2 connection until it ends.
pub(super) async fn drive_h2(
    worker: Rc<Worker>,
    mut connection: Connection,
    shared: Rc<SharedConnection>,
    window: Rc<Window>,
) {
    let mut widened_to = window.base();
    let result = std::future::poll_fn(|cx| {
        let target = window.poll_target(cx);
        if std::mem::replace(&mut widened_to, target) != target {
            connection.set_target_window_size(target);
        }
        if shared.poll_done(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        let polled = Pin::new(&mut connection).poll(cx);
        shared.look_for_goaway(&worker);
        polled
    })
    .await;
    if let Err(error) = result {
        tracing::debug!(%error, "an upstream h2 connection ended");
    }
}
