//! HTTP/2 connections to an endpoint.
//!
//! In: a connection spec. Out: a connection that a task of the worker drives and monitors.

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
use hermes_net::tcp::AckMonitor;
use tokio::time::{Instant, MissedTickBehavior};

use super::fallback::{DARK_AFTER, DARK_ROUND_TRIPS, PATH_CHECK_INTERVAL};
use super::queue::Permit;
use super::shared::{SharedConnection, SharedProtocol};
use super::{ConnectSpec, OwnedConnectSpec, Pool};
use crate::outbound::Outbound;
use crate::outbound::connect::connect;
use hermes_transport::error::{Error, NO_SETTINGS};
use hermes_transport::stream::h2::{Backlog, Scanned, Window};

/// The maximum size in bytes of a received DATA frame. Large frames transfer the bytes of a tunnel at a lower cost.
pub const MAX_FRAME: u32 = 256 << 10;
/// The budget for small unread frames in h2, each of which costs 256 bytes. If it is exceeded, h2 ends the connection.
/// The sweep moves unread frames out of h2, so the budget must suffice for the time between two sweeps. h2's default is
/// half the window.
pub const FRAME_BUDGET: usize = 32 << 20;
/// The number of streams reset by this node that h2 records for a second, so that frames in transit to them are no
/// errors. Clients may cancel many requests, and none of them may thereby end a connection that others share.
pub const RESETS_REMEMBERED: usize = 4096;
/// The maximum number of stream errors of a peer, such as frames for streams that h2 no longer records. It is high
/// because one connection has the streams of many users. Each error occupies memory until the peer reads the reset.
pub const ERROR_RESETS: usize = 65_536;
/// The number of bytes that nodes may add to a head. A head from another node may exceed this node's limit by this
/// number.
pub const ADDED_BYTES: u32 = 4 << 10;
/// The number of header lines that nodes may add to a head, as for [`ADDED_BYTES`].
pub const ADDED_LINES: usize = 8;
/// The maximum number of bytes that h2 buffers for a stream beyond the peer's window.
pub const SEND_BUFFER: usize = 512 << 10;

impl Pool {
    pub(super) async fn dial_h2(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        permit: Permit,
    ) -> Result<Rc<SharedConnection>, Error> {
        let deadline = Instant::now() + spec.connect_within;
        let io = connect(worker, &spec.destination, spec.connect_within).await?;
        self.adopt_h2(worker, spec, io, permit, deadline).await
    }

    /// Starts HTTP/2 on a new connection before `deadline`, and spawns a task that drives it.
    pub(super) async fn adopt_h2(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
        io: Io,
        permit: Permit,
        deadline: Instant,
    ) -> Result<Rc<SharedConnection>, Error> {
        let acks = AckMonitor::of(io.tcp());
        let begun = begin_h2(worker, spec.destination.label, io, deadline, spec.connect_within).await?;
        let shared = SharedConnection::new(begun.speaks, worker.now());
        let drive = drive_h2(worker.clone(), begun.connection, shared.clone(), begun.window);
        let (pool, here, watched, standing) = (self.clone(), worker.clone(), shared.clone(), spec.to_owned_spec());
        self.share(worker, &shared, permit, async move {
            match acks {
                Ok(acks) => _ = select(pin!(drive), pin!(pool.watch_h2(&here, &watched, acks, &standing))).await,
                Err(error) => {
                    tracing::debug!(peer = %standing.label, %error, "cannot watch acknowledgements; an outage of the path will not be detected");
                    drive.await;
                }
            }
        });
        Ok(shared)
    }

    /// Monitors whether the peer acknowledges the bytes that were sent on a connection. If it does not, no new stream
    /// opens on the connection, and flows that can move do so. Other streams wait for the kernel, which retransmits for
    /// a quarter of an hour, or probes for as long as the peer's TCP window is closed. While the connection replaces
    /// HTTP/3 and its path works, QUIC is also dialled again, because long-lived flows request no other connection.
    /// Never returns.
    async fn watch_h2(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        shared: &SharedConnection,
        acks: AckMonitor,
        standing: &OwnedConnectSpec,
    ) -> Infallible {
        let peer = &*standing.label;
        let mut look = tokio::time::interval(PATH_CHECK_INTERVAL);
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
                self.try_quic_again(worker, &standing.spec());
            }
            let Ok(seen) = acks.state() else { continue };
            // Data sent after the previous check is not overdue yet.
            let is_owed = seen.waiting_for.is_some_and(|silence| silence >= PATH_CHECK_INTERVAL);
            // A peer with a closed TCP window answers probes, but acknowledges none of the waiting data.
            let is_stuck = is_dark && seen.waiting_for.is_some() && seen.acknowledged == acknowledged;
            silent = if is_owed || is_stuck { silent + PATH_CHECK_INTERVAL } else { Duration::ZERO };
            acknowledged = seen.acknowledged;
            if shared.set_dark(worker, silent >= DARK_AFTER.max(DARK_ROUND_TRIPS * seen.rtt)) {
                if is_dark {
                    // The connection accepts streams again, so waiting requests need not wait for another connection.
                    self.open.wake_all();
                    tracing::info!(peer, "HTTP/2 connection acknowledges data again");
                } else {
                    tracing::warn!(
                        peer,
                        "HTTP/2 connection acknowledges no data; movable flows use another connection. Check the peer and the path to it"
                    );
                }
            }
        }
    }
}

/// A connection whose HTTP/2 handshake is complete, and which no task drives yet.
pub(super) struct Begun {
    pub(super) connection: Connection,
    pub(super) speaks: SharedProtocol,
    pub(super) window: Rc<Window>,
}

pub(super) type Connection = h2::client::Connection<Scanned, Bytes>;

/// Starts HTTP/2, and waits for the peer's SETTINGS until `deadline`. `within` is the timeout that the error states.
pub(super) async fn begin_h2(
    worker: &Outbound,
    peer: &Arc<str>,
    io: Io,
    deadline: Instant,
    within: Duration,
) -> Result<Begun, Error> {
    let broken = |reason: String| Error::Broken { peer: peer.clone(), reason, unprocessed: true };
    let limits = &worker.snapshot().limits;
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
        // The limit of streams is zero until the peer's SETTINGS arrive, so that `ready` can detect their arrival.
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
        .map_err(|error| broken(format!("HTTP/2 handshake failed: {error}")))?;
    let extended_connect = sender.is_extended_connect_protocol_enabled();
    let speaks = SharedProtocol::H2 { extended_connect, sender, window: window.clone(), backlog: Backlog::default() };
    Ok(Begun { connection, speaks, window })
}

/// Drives an HTTP/2 connection until it ends.
pub(super) async fn drive_h2(
    worker: Rc<Outbound>,
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
