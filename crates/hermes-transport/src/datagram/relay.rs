//! Relays the datagrams of a flow in both directions, and moves the flow to another upstream port.
//!
//! In: two ports and their session. Out: datagrams in order. If one port ends, the relay ends the other. It buffers at
//! most one batch in each direction.

mod migration;
mod replay;

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Kind;
use hermes_model::snapshot::Route;

use self::migration::Reopen;
use self::migration::{Failure, Moving, Old};
pub use self::migration::{Opening, Reopened};
use self::replay::AdvertisedState;
use super::tunnel::of_ip;
use super::{Batch, MAX_WORK_PER_TURN, Other, Port};
use crate::error::Error;
use crate::runtime::session::{Phase, Prefetched, Session};
use crate::runtime::yield_to_network;
use crate::stream::Reset;

/// The maximum number of rounds in one poll before other tasks of the worker run.
const MAX_ROUNDS_PER_TURN: usize = 16;
/// The time for which an old port is still read after a move, and the timeout for a peer to end its side of a flow.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// The minimum time between moves that no configuration change demands, in milliseconds.
const MOVES_APART: u64 = 1000;
/// The maximum number of old ports that a flow still reads. One more drops the oldest.
const MAX_OLD: usize = 8;

/// The number of datagrams and capsules in a batch, and their total length.
struct Load {
    count: usize,
    bytes: usize,
}

impl Load {
    /// Returns the work that a received batch causes, in units of one packet.
    fn work(batch: &Batch) -> usize {
        batch.datagrams.len() + batch.capsules.iter().map(Other::work).sum::<usize>()
    }

    fn of(batch: &Batch) -> Self {
        let bytes = batch.datagrams.iter().map(Bytes::len).chain(batch.capsules.iter().map(Other::len));
        Self { count: batch.len(), bytes: bytes.sum() }
    }

    /// Returns the number of bytes by which the batch shrank. Returns `None` if no datagram or capsule was removed: a
    /// removed empty datagram is progress although it has no bytes.
    fn taken(&self, batch: &Batch) -> Option<usize> {
        let left = Self::of(batch);
        (left.count < self.count).then(|| self.bytes - left.bytes)
    }
}

/// A flow that is being relayed.
struct Relay<'a> {
    session: &'a Session,
    downstream: Port,
    upstream: Port,
    /// The upstream ports before each move, the most recent last.
    old: Vec<Old>,
    /// The move in progress.
    moving: Option<Moving>,
    /// The time of the last move, in milliseconds of the worker's clock.
    moved_at: Option<u64>,
    /// The name of the current upstream peer, for logs and `/sessions`.
    peer: Option<Arc<str>>,
    reopen: Reopen<'a>,
    up: Batch,
    down: Batch,
    /// The work that the current poll has received, in units of one packet.
    work: usize,
    /// True if the downstream port has received a part of a capsule whose rest is still to come.
    is_within: bool,
    /// The addresses and routes that the downstream peer signalled. They are replayed to a new upstream.
    said: AdvertisedState,
    /// The reasons with which the downstream and the upstream stream are reset if the flow fails.
    resets: [Reset; 2],
}

/// True if the error reports a malformed message of the peer.
fn is_malformed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Relays datagrams until one port ends. Stores a failure for the access log.
pub async fn relay(downstream: Port, upstream: Port, session: &Session, reopen: Reopen<'_>) {
    session.entry.set_phase(&session.worker, Phase::Open);
    let mut relay = Relay {
        session,
        downstream,
        upstream,
        old: Vec::new(),
        moving: None,
        moved_at: None,
        peer: session.entry.peer.borrow().clone(),
        reopen,
        up: Batch::default(),
        down: Batch::default(),
        work: 0,
        is_within: false,
        said: AdvertisedState::default(),
        resets: [Reset::Connect; 2],
    };
    relay.join();
    if let Some(Prefetched { sent, held }) = session.entry.prefetched.take() {
        for (kind, payload) in of_ip(sent) {
            relay.said.add(kind, &payload);
        }
        relay.downstream.push(held);
    }
    let failed = std::future::poll_fn(|cx| relay.poll(cx)).await;
    // If a port's device was deleted, the port ended or failed for that reason.
    let lost = [&relay.downstream, &relay.upstream].into_iter().find_map(Port::lost_device);
    if let Some(device) = lost {
        session.entry.fail(&Error::DeviceGone { device });
    }
    match failed {
        // Most flows end by their idle timeout. They are closed cleanly, because a peer logs a stream that is dropped
        // without an end as a failure.
        None | Some(Error::Idle(_)) => {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, std::future::poll_fn(|cx| relay.poll_close(cx))).await;
        }
        Some(error) => {
            relay.downstream.abort(relay.resets[0]);
            relay.upstream.abort(relay.resets[1]);
            session.entry.fail(&error);
        }
    }
}

impl Relay<'_> {
    /// Sets each port as the one that sends what the other port receives.
    fn join(&mut self) {
        self.downstream.set_sink(&self.upstream);
        self.upstream.set_sink(&self.downstream);
    }

    /// Announces to each side how long its packets may be, and sends the capsules that this node itself generates.
    fn poll_own(&mut self, cx: &mut Context<'_>) {
        if self.session.entry.facts.kind == Kind::Ip {
            self.downstream.announce(self.upstream.capacity());
            self.upstream.announce(self.downstream.capacity());
            if self.session.entry.is_draining() {
                self.downstream.say_leaving();
            }
        }
        self.downstream.poll_own(cx, &self.session.worker);
        self.upstream.poll_own(cx, &self.session.worker);
    }

    /// Drives the flow. Ready with `None` when the flow ends cleanly, and with the error when it fails.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Error>> {
        if let Poll::Ready(error) = self.session.entry.end.poll(cx) {
            return Poll::Ready(Some(error));
        }
        self.work = 0;
        for _ in 0..MAX_ROUNDS_PER_TURN {
            if self.work >= MAX_WORK_PER_TURN {
                break;
            }
            if let Poll::Ready(error) = self.poll_move(cx) {
                return Poll::Ready(Some(error));
            }
            self.downstream.poll_carrier(cx);
            self.upstream.poll_carrier(cx);
            let up = self.poll_up(cx);
            let down = self.poll_down(cx);
            self.poll_own(cx);
            let blocked = !self.up.is_empty()
                || !self.down.is_empty()
                || self.upstream.holds_unsent()
                || self.downstream.holds_unsent();
            self.session.entry.set_phase(&self.session.worker, if blocked { Phase::Blocked } else { Phase::Open });
            match (up, down) {
                (Poll::Ready(Ok(true)), Poll::Ready(Ok(true)) | Poll::Pending)
                | (Poll::Pending, Poll::Ready(Ok(true))) => {}
                (Poll::Pending, Poll::Pending) => return Poll::Pending,
                (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => return Poll::Ready(Some(error)),
                (Poll::Ready(Ok(false)), _) | (_, Poll::Ready(Ok(false))) => return Poll::Ready(None),
            }
        }
        yield_to_network(cx);
        Poll::Pending
    }

    /// Closes all ports. Ready when each of them has ended, or the session was ended for another reason than idleness.
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.session.entry.end.poll(cx), Poll::Ready(error) if !matches!(error, Error::Idle(_))) {
            return Poll::Ready(());
        }
        let worker = &self.session.worker;
        let mut open =
            self.downstream.poll_close(cx, worker).is_pending() | self.upstream.poll_close(cx, worker).is_pending();
        for old in &mut self.old {
            open |= old.port.poll_close(cx, worker).is_pending();
        }
        if open { Poll::Pending } else { Poll::Ready(()) }
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        if self.up.is_empty() && !self.upstream.holds_unsent() {
            match ready!(self.downstream.poll_receive(cx, worker, &mut self.up)) {
                Ok(true) => {}
                Ok(false) => return Poll::Ready(Ok(false)),
                // A device port fails to receive only if the upstream peer did not answer it in time.
                Err(error) if matches!(self.downstream, Port::Device(_)) => {
                    return Poll::Ready(Err(self.far_error(&error)));
                }
                Err(error) => return Poll::Ready(Err(self.near_error(&error))),
            }
            self.said.note(&self.up, worker);
            self.work += Load::work(&self.up);
            if let Some(last) = self.up.capsules.back() {
                self.is_within = matches!(last, Other::Piece { ends: false, .. });
            }
        }
        let before = Load::of(&self.up);
        let sent = self.upstream.poll_send(cx, worker, &mut self.up);
        if let Some(bytes) = before.taken(&self.up) {
            self.session.entry.add_received(worker, bytes);
        }
        match ready!(sent) {
            Ok(()) => Poll::Ready(Ok(true)),
            // The upstream port rejects a malformed capsule or datagram, which the downstream peer has sent.
            Err(error) if is_malformed(&error) => Poll::Ready(Err(self.near_error(&error))),
            Err(error) => Poll::Ready(Err(self.far_error(&error))),
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        if self.down.is_empty() && !self.downstream.holds_unsent() {
            self.poll_old(cx);
        }
        if self.down.is_empty() && !self.downstream.holds_unsent() {
            match ready!(self.upstream.poll_receive(cx, worker, &mut self.down)) {
                Ok(true) => {}
                Ok(false) => return Poll::Ready(Ok(false)),
                Err(error) => return Poll::Ready(Err(self.far_error(&error))),
            }
            self.said.record_answers(&self.down);
            self.work += Load::work(&self.down);
        }
        let before = Load::of(&self.down);
        let sent = self.downstream.poll_send(cx, worker, &mut self.down);
        if let Some(bytes) = before.taken(&self.down) {
            self.session.entry.add_sent(worker, bytes);
        }
        match ready!(sent) {
            Ok(()) => Poll::Ready(Ok(true)),
            Err(error) if is_malformed(&error) => Poll::Ready(Err(self.far_error(&error))),
            Err(error) => Poll::Ready(Err(self.near_error(&error))),
        }
    }

    /// Receives what old ports still deliver after a move.
    fn poll_old(&mut self, cx: &mut Context<'_>) {
        let worker = &self.session.worker;
        let down = &mut self.down;
        // Only one port is read into a batch, because `opened` applies to all datagrams of the batch.
        self.old.retain_mut(|old| !down.is_empty() || old.poll(cx, worker, down));
        // Addresses and routes from an old port are outdated. More may follow them, so the task runs again.
        if !down.capsules.is_empty() {
            down.capsules.clear();
            cx.waker().wake_by_ref();
        }
    }

    /// Moves the flow, make before break: the flow stays on its old port until the new one is open and ready. Ready
    /// with an error only if the flow may use neither port.
    fn poll_move(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let wanted = self.wanted();
        let under_way = self.moving.as_ref().map(|moving| &moving.route);
        if wanted.as_ref().map(Arc::as_ptr) != under_way.map(Arc::as_ptr) {
            // A move to a route that is no longer wanted is cancelled before it completes.
            self.session.entry.peer.replace(self.peer.clone());
            self.moving = wanted.map(|route| Moving::begin(route, &self.said, self.reopen));
            let next = self.moved_at.map_or(0, |at| at + MOVES_APART);
            let early = Duration::from_millis(next.saturating_sub(self.session.worker.now()));
            let is_same_way = self.session.entry.moved.borrow().is_none();
            if let Some(moving) = self.moving.as_mut().filter(|_| is_same_way && !early.is_zero()) {
                // Without this wait, peers that drain right after they accept the flow would make it move all the time.
                moving.wait(&self.session.worker, early);
            }
        }
        loop {
            let Some(moving) = &mut self.moving else { return Poll::Pending };
            match ready!(moving.poll(cx, &self.session.worker, &self.downstream, &self.said, self.reopen)) {
                Ok(()) if self.is_between() => self.switch(),
                Ok(()) => return Poll::Pending,
                Err(failure) => {
                    if let Err(error) = self.stay(failure) {
                        return Poll::Ready(error);
                    }
                }
            }
        }
    }

    /// Returns the route to which the flow should move: a changed one, or the current one if the upstream peer drains.
    /// Returns `None` if the flow should stay.
    fn wanted(&self) -> Option<Arc<Route>> {
        if matches!(self.downstream, Port::Device(_)) && self.session.worker.is_draining() {
            // A successor process uses the device and has newer sessions. A move would make this session the newest
            // again: it would receive the traffic of the successor's sessions, and drop it when this process exits.
            return None;
        }
        let entry = &self.session.entry;
        let moved = entry.moved.borrow().clone();
        let again = || entry.route.borrow().clone().filter(|route| route.moves_sessions(entry.facts.kind));
        moved.or_else(|| if self.upstream.is_leaving() { again() } else { None })
    }

    /// True if the flow may switch ports now. Before that, incomplete capsules in both directions must be completed,
    /// and packets that the filter of the old device has passed must be sent.
    fn is_between(&self) -> bool {
        !self.downstream.is_within() && !self.is_within && self.down.is_empty() && !self.up.judged
    }

    fn switch(&mut self) {
        let Some((route, next)) = self.moving.take().and_then(Moving::arrive) else { return };
        // Sends capsules that arrived from downstream since the replay, and those that the old port has not accepted.
        self.up.capsules.retain(|other| !self.said.holds(other));
        let mut missed = self.said.again(&[]).beyond(&next.words).batch().capsules;
        missed.append(&mut self.up.capsules);
        self.up.capsules = missed;
        let entry = &self.session.entry;
        let is_led = entry.moved.take().is_some();
        self.moved_at = Some(self.session.worker.now());
        let from = std::mem::replace(&mut self.peer, entry.peer.borrow().clone());
        if entry.facts.kind == Kind::Ip {
            self.tell_move(&route, from.as_deref().unwrap_or_default(), is_led);
        }
        *entry.route.borrow_mut() = Some(route);
        let port = std::mem::replace(&mut self.upstream, next.port);
        self.said.record_answers(&next.heard);
        self.down = next.heard;
        if self.old.len() == MAX_OLD {
            self.old.remove(0);
        }
        self.old.push(Old::new(port));
        self.join();
    }

    /// Logs a move, because it changes the path of the packets. `is_led` is true if a configuration change caused it.
    fn tell_move(&self, route: &Route, from: &str, is_led: bool) {
        let facts = &self.session.entry.facts;
        let network = facts.network.map_or_else(|| facts.authority.to_string(), |network| network.to_string());
        tracing::info!(
            listener = %facts.listener, %network, user = %facts.user.as_deref().unwrap_or_default(), route = %route.name, %from,
            to = %self.peer.as_deref().unwrap_or_default(),
            reason = %if is_led { "the document changed its route" } else { "its far end is shutting down, or another path is better" },
            "a session has moved"
        );
    }

    /// Postpones the move after a failure. Returns an error, which ends the flow, if a configuration change demands the
    /// move and the new upstream forbids the flow.
    fn stay(&mut self, failure: Failure) -> Result<(), Error> {
        let entry = &self.session.entry;
        entry.peer.replace(self.peer.clone());
        let Some(moving) = &mut self.moving else { return Ok(()) };
        // If no configuration change demands the move, the current route still permits the flow.
        if failure.is_final && entry.moved.borrow().is_some() {
            let route = &moving.route.name;
            return Err(Error::Reconfigured(format!("route {route} matches now: {}", failure.reason)));
        }
        if moving.rest(&self.session.worker) {
            let (reason, route) = (&failure.reason, &moving.route.name);
            tracing::warn!(reason, %route, "cannot move a flow; it stays on its tunnel and retries");
        }
        Ok(())
    }

    fn near_error(&mut self, error: &io::Error) -> Error {
        if is_malformed(error) {
            self.resets[0] = Reset::Malformed;
        }
        Error::ClientGone(error.to_string())
    }

    fn far_error(&mut self, error: &io::Error) -> Error {
        if is_malformed(error) {
            self.resets[1] = Reset::Malformed;
        }
        Error::Broken {
            peer: self.session.entry.peer.borrow().clone().unwrap_or_else(|| "the far end".into()),
            reason: error.to_string(),
            unprocessed: false,
        }
    }
}
