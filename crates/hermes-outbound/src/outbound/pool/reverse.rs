//! The pool of a node's reverse connections.
//!
//! In: a connection that the node has dialled, and on which it serves requests. Out: leases, as on any shared
//! connection. If this worker has no connection of the node, requests wait: briefly if the last connection has just
//! closed, and up to their timeout if another worker has one. The newest connection is used first, because the failure
//! of an older one may not have been detected yet. Never: a dial.

use std::cell::Cell;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use hermes_model::snapshot::Listener;
use hermes_net::tcp::AckMonitor;
use hermes_net::{Io, quic};
use http::{Request, Response, StatusCode, Uri};
use tokio::time::Instant;

use super::h2::{begin_h2, drive_h2};
use super::h3::{drive_h3, settings, windows};
use super::queue::Permit;
use super::shared::{Lease, SharedConnection, SharedProtocol};
use super::{ConnectSpec, Leased, Pool};
use crate::outbound::Outbound;
use crate::outbound::client_stream::{Head, send_request};
use crate::reverse::{ACCEPTOR_PROBE_INTERVAL, ConnectionSlot, Keepalive, Liveness, Probe, ReversePeer};
use hermes_transport::error::{Error, NO_CONNECTION, NO_SETTINGS};
use hermes_transport::h3::Link;
use hermes_transport::metrics::ListenerLabels;
use hermes_transport::stream::StreamError;

/// The maximum number of connections of one node on a worker. One more retires the oldest. A node has several
/// connections if it reconnects, or dials several addresses of this node.
const MAX_CONNECTIONS_PER_NODE: usize = 4;
/// The maximum number of retired connections of one node, which end with their last request. One more ends the oldest
/// at once, so that a node that dials repeatedly cannot occupy all connections.
const MAX_RETIRED_CONNECTIONS: usize = 8;
/// The timeout of a request that this node itself sends to a node, which should answer it immediately.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The future that drives a connection until it ends.
pub(super) type Driven = Pin<Box<dyn Future<Output = ()>>>;

/// A reverse connection in the pool. Dropping this value closes the connection and removes it from the pool.
pub struct ReverseConnection {
    worker: Rc<Outbound>,
    pool: Rc<Pool>,
    shared: Rc<SharedConnection>,
    pub reverse_peer: Arc<ReversePeer>,
    labels: ListenerLabels,
    /// True while the connection accepts requests, and is counted for the node as such.
    is_usable: Cell<bool>,
    _permit: Permit,
}

impl ReverseConnection {
    fn begin(
        worker: &Rc<Outbound>,
        pool: &Rc<Pool>,
        reverse_peer: &Arc<ReversePeer>,
        listener: &Listener,
        shared: Rc<SharedConnection>,
        permit: Permit,
    ) -> Self {
        let labels = ListenerLabels { listener: listener.name.clone() };
        worker.shared.metrics.reverse_connections.get_or_create(&labels).inc();
        let mut all = pool.shared.borrow_mut();
        all.insert(0, shared.clone());
        for (slot, old) in all.iter().enumerate().skip(MAX_CONNECTIONS_PER_NODE) {
            if slot < MAX_CONNECTIONS_PER_NODE + MAX_RETIRED_CONNECTIONS {
                old.retire();
            } else if !old.is_over() {
                old.end();
                worker.shared.metrics.limit("reverse-connections");
            }
        }
        drop(all);
        let kept = Self {
            worker: worker.clone(),
            pool: pool.clone(),
            shared,
            reverse_peer: reverse_peer.clone(),
            labels,
            is_usable: Cell::new(false),
            _permit: permit,
        };
        kept.set_usable(true);
        kept
    }

    /// Accepts no further requests on the connection, and ends it with its last request.
    pub fn retire(&self) {
        self.shared.retire();
        self.set_usable(false);
    }

    /// Sends a request that this node itself makes, and waits for its response.
    ///
    /// # Errors
    /// The stream or its connection failed, or no response arrived in time.
    pub async fn call(&self, request: Request<()>) -> Result<Response<()>, Error> {
        let lease = Lease::take(&self.shared, &self.pool, &self.worker, false);
        let answer = tokio::time::timeout(CALL_TIMEOUT, answer_of(&self.worker, &lease, request)).await;
        let peer = self.reverse_peer.node.clone();
        match answer {
            Ok(answer) => answer.map_err(|error| broken(peer, &error)),
            Err(_) => {
                let reason = format!("the peer did not respond to a call within {CALL_TIMEOUT:?}");
                Err(Error::Broken { peer, reason, unprocessed: false })
            }
        }
    }

    /// Monitors whether the node is reachable over this connection. Returns when it is not, or when the connection
    /// ends.
    pub async fn listen(&self, mut keepalive: Keepalive, source: IpAddr, slot: &ConnectionSlot) {
        let mut newer = self.reverse_peer.newer();
        loop {
            let beat = std::future::poll_fn(|cx| {
                let beat = keepalive.poll(cx, self.shared.heard());
                self.shared.is_silent.set(beat != Liveness::Alive);
                if !self.shared.is_alive() {
                    // The node accepts no further request on this connection, so it ends with its last request.
                    self.shared.retire();
                }
                if self.shared.is_closed() {
                    slot.give_way();
                }
                self.set_usable(beat == Liveness::Alive && !self.shared.is_closed());
                if beat == Liveness::Dead { Poll::Ready(()) } else { Poll::Pending }
            });
            tokio::select! {
                () = beat => return,
                () = self.shared.ended() => return,
                // `changed` cannot fail, because this value references the sender.
                _ = newer.changed() => {
                    let from = newer.borrow_and_update().1;
                    // A node may have an IPv4 and an IPv6 address at once.
                    let is_elsewhere = |from: IpAddr| from.is_ipv4() == source.is_ipv4() && from != source;
                    keepalive.doubt(from.is_some_and(is_elsewhere));
                }
            }
        }
    }

    fn set_usable(&self, is_usable: bool) {
        match (self.is_usable.replace(is_usable), is_usable) {
            (false, true) => self.reverse_peer.came(),
            (true, false) => self.reverse_peer.went(self.worker.shared.now()),
            _ => return,
        }
        // Waiting requests look for a stream again, and compute again how long they may wait.
        self.pool.open.wake_all();
    }
}

impl Drop for ReverseConnection {
    fn drop(&mut self) {
        self.shared.close();
        self.pool.shared.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.shared));
        self.set_usable(false);
        self.worker.shared.metrics.reverse_connections.get_or_create(&self.labels).dec();
    }
}

fn broken(peer: Arc<str>, error: &StreamError) -> Error {
    Error::Broken { peer, reason: error.to_string(), unprocessed: false }
}

/// Sends a request without a body, and returns its final response head.
async fn answer_of(worker: &Rc<Outbound>, lease: &Lease, request: Request<()>) -> Result<Response<()>, StreamError> {
    let (mut answer, _stream) = send_request(worker, lease, request, true).await?;
    std::future::poll_fn(|cx| {
        loop {
            match ready!(answer.poll(cx))? {
                Head::Interim(_) => {}
                Head::Final(response) => return Poll::Ready(Ok(response.map(drop))),
            }
        }
    })
    .await
}

impl Pool {
    /// Sends a GET request that this node itself makes over a reverse connection, and returns the status.
    ///
    /// # Errors
    /// This worker has no connection from the node, or no response arrived.
    pub async fn get(self: &Rc<Self>, worker: &Rc<Outbound>, node: &str, path: &str) -> Result<StatusCode, Error> {
        let absent = || Error::NotConnected { node: Arc::from(node) };
        let slot = match self.lease_existing(worker, true) {
            Some(lease) => Some(lease),
            None => tokio::time::timeout(CALL_TIMEOUT, self.leave(worker)).await.ok().flatten(),
        };
        let lease = slot.ok_or_else(absent)?;
        let uri = Uri::builder().scheme("https").authority(node).path_and_query(path).build();
        let request =
            uri.and_then(|uri| Request::get(uri).body(())).map_err(|error| Error::Malformed(error.to_string()))?;
        let answer = answer_of(worker, &lease, request).await;
        answer.map(|answer| answer.status()).map_err(|error| broken(Arc::from(node), &error))
    }

    /// Starts HTTP/2 on a reverse connection within the timeout, and adds it to the pool. Returns the entry in the
    /// pool, the future that drives the connection, and its keepalive.
    ///
    /// # Errors
    /// The HTTP/2 handshake failed, or the node sent no SETTINGS in time.
    pub async fn keep_h2(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        reverse_peer: &Arc<ReversePeer>,
        listener: &Listener,
        io: Io,
        within: Duration,
    ) -> Result<(ReverseConnection, Driven, Keepalive), Error> {
        // The permit is taken before the first await, because the sweep removes pools without connections.
        let permit = Permit::take(&self.open);
        let acks = AckMonitor::of(io.tcp()).ok();
        let mut begun = begin_h2(worker, &reverse_peer.node, io, Instant::now() + within, within).await?;
        let keepalive = Keepalive::new(begun.connection.ping_pong().map(Probe::Ping), acks, ACCEPTOR_PROBE_INTERVAL);
        let shared = SharedConnection::kept(begun.speaks, worker.now());
        let drive = drive_h2(worker.clone(), begun.connection, shared.clone(), begun.window);
        Ok((ReverseConnection::begin(worker, self, reverse_peer, listener, shared, permit), Box::pin(drive), keepalive))
    }

    /// Starts HTTP/3 on a reverse connection, as [`Self::keep_h2`] does for HTTP/2.
    ///
    /// # Errors
    /// The connection failed, or the node sent no SETTINGS in time.
    pub async fn keep_h3(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        reverse_peer: &Arc<ReversePeer>,
        listener: &Listener,
        quic: quic::Connection,
        within: Duration,
    ) -> Result<(ReverseConnection, Driven, Keepalive), Error> {
        let permit = Permit::take(&self.open);
        let link = Link::new(quic, false, windows(worker));
        let shared = SharedConnection::kept(SharedProtocol::H3(link.clone()), worker.now());
        let (here, ours) = (worker.clone(), settings(worker));
        let (driven_link, driven) = (link.clone(), shared.clone());
        let mut drive: Driven = Box::pin(async move { drive_h3(&here, &driven_link, &driven, ours).await });
        // The peer's SETTINGS must have arrived before a tunnel is requested.
        let settled = async {
            tokio::select! {
                () = &mut drive => None,
                settled = link.settled() => settled,
            }
        };
        let late = |_| Error::ConnectTimeout { peer: reverse_peer.node.clone(), missing: NO_SETTINGS, after: within };
        if tokio::time::timeout(within, settled).await.map_err(late)?.is_none() {
            let reason = "HTTP/3 handshake failed".to_owned();
            return Err(Error::Broken { peer: reverse_peer.node.clone(), reason, unprocessed: true });
        }
        Ok((
            ReverseConnection::begin(worker, self, reverse_peer, listener, shared, permit),
            drive,
            Keepalive::new(None, None, ACCEPTOR_PROBE_INTERVAL),
        ))
    }

    /// Leases a stream on a reverse connection of the node in `spec`.
    pub(super) async fn lease_kept(
        self: &Rc<Self>,
        worker: &Rc<Outbound>,
        spec: &ConnectSpec<'_>,
    ) -> Result<Leased, Error> {
        let Some(reverse_peer) = spec.node else { return Err(Error::Internal("a node without a name".to_owned())) };
        let absent = || Error::NotConnected { node: reverse_peer.node.clone() };
        let (began, mut had_turn) = (Instant::now(), false);
        loop {
            // The lease is marked as reused, so that a request that fails on it may be sent on another connection.
            if let Some(lease) = self.lease_existing(worker, true) {
                return Ok(Leased::Shared(lease));
            }
            let left = spec.connect_within.saturating_sub(began.elapsed());
            let patience = reverse_peer.patience(worker.shared.now()).ok_or_else(absent)?.min(left);
            match tokio::time::timeout(patience, self.turn_or_leave(worker, spec.session, had_turn)).await {
                Ok(Ok(Some(lease))) => return Ok(Leased::Shared(lease)),
                Ok(waited) => {
                    waited?;
                    had_turn = true;
                }
                Err(_) if !reverse_peer.is_here() => return Err(absent()),
                Err(_) => {
                    let peer = spec.destination.label.clone();
                    return Err(Error::ConnectTimeout { peer, missing: NO_CONNECTION, after: spec.connect_within });
                }
            }
        }
    }
}
