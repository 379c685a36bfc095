//! A flow under way: datagrams from one port to the other and back, and moves to another far port.
//!
//! In: two ports and the session that they belong to. Out: datagrams in order, the end of either
//! port passed on as it came. Holds one batch a direction.

mod moving;
mod said;

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::facts::Kind;
use hermes_model::snapshot::Route;

use self::moving::{Failure, Moving, Old};
pub(crate) use self::moving::{Opening, Reopen, Reopened};
use self::said::Said;
use super::tunnel::of_ip;
use super::{Batch, MOST_WORK, Other, Port};
use crate::early::Ahead;
use crate::error::Error;
use crate::live::{Phase, Session};
use crate::stream::Reset;
use crate::worker::{go_on_later, moves};

/// Rounds before other tasks of the worker get their turn.
const TURNS: usize = 16;
/// After a move the old port is heard for so long; and so long a peer may take to end its side.
pub(crate) const QUIET: Duration = Duration::from_secs(2);
/// Milliseconds from a move to the next one that the document does not ask for.
const MOVES_APART: u64 = 1000;
/// Ports of earlier moves that a flow still hears; with more moves in that time the first is dropped.
const MAX_OLD: usize = 8;

/// How much a batch holds.
struct Load {
    count: usize,
    bytes: usize,
}

impl Load {
    /// How much is to be done for a batch that came.
    fn work(batch: &Batch) -> usize {
        batch.datagrams.len() + batch.capsules.iter().map(Other::work).sum::<usize>()
    }

    fn of(batch: &Batch) -> Self {
        let bytes = batch.datagrams.iter().map(Bytes::len).chain(batch.capsules.iter().map(Other::len));
        Self { count: batch.len(), bytes: bytes.sum() }
    }

    /// The bytes that are gone from it; `None` where nothing is, which is no progress. Empty
    /// datagrams are.
    fn taken(&self, batch: &Batch) -> Option<usize> {
        let left = Self::of(batch);
        (left.count < self.count).then(|| self.bytes - left.bytes)
    }
}

/// A flow under way.
struct Relay<'a> {
    session: &'a Session,
    near: Port,
    far: Port,
    /// The ports before moves, the latest last.
    old: Vec<Old>,
    /// Where the flow moves to.
    moving: Option<Moving>,
    /// When it has moved last, in milliseconds of the worker's clock.
    moved_at: Option<u64>,
    /// The far end that it has, as people know it.
    peer: Option<Arc<str>>,
    reopen: Reopen<'a>,
    up: Batch,
    down: Batch,
    /// What was done in this turn.
    work: usize,
    /// What was received last of the near side is a part of a capsule whose rest is to come.
    is_within: bool,
    /// What the near side has said of addresses and routes: another far end is told the same.
    said: Said,
    /// As what the near and the far stream are broken off, should something go wrong.
    resets: [Reset; 2],
}

/// What came breaks the rules of its protocol.
fn is_malformed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Relays until one end is over. The session's record gets what went wrong.
pub(crate) async fn relay(near: Port, far: Port, session: &Session, reopen: Reopen<'_>) {
    session.entry.set_phase(&session.worker, Phase::Open);
    let mut relay = Relay {
        session,
        near,
        far,
        old: Vec::new(),
        moving: None,
        moved_at: None,
        peer: session.entry.peer.borrow().clone(),
        reopen,
        up: Batch::default(),
        down: Batch::default(),
        work: 0,
        is_within: false,
        said: Said::default(),
        resets: [Reset::Connect; 2],
    };
    relay.join();
    if let Some(Ahead { sent, held }) = session.entry.ahead.take() {
        for (kind, payload) in of_ip(sent) {
            relay.said.add(kind, &payload);
        }
        relay.near.push(held);
    }
    let failed = std::future::poll_fn(|cx| relay.poll(cx)).await;
    // An end of ours is over, or failed, where its device is gone.
    let lost = [&relay.near, &relay.far].into_iter().find_map(Port::lost_device);
    if let Some(device) = lost {
        session.entry.fail(&Error::DeviceGone { device });
    }
    match failed {
        // Silence is how most flows end. A stream that is merely dropped is a failure to the other
        // side, which then would have to report one for each of them.
        None | Some(Error::Idle(_)) => {
            let _ = tokio::time::timeout(QUIET, std::future::poll_fn(|cx| relay.poll_close(cx))).await;
        }
        Some(error) => {
            relay.near.abort(relay.resets[0]);
            relay.far.abort(relay.resets[1]);
            session.entry.fail(&error);
        }
    }
}

impl Relay<'_> {
    /// Each port knows where what it receives goes.
    fn join(&mut self) {
        self.near.set_sink(&self.far);
        self.far.set_sink(&self.near);
    }

    /// Each side hears how long the packets that it sends may be, and what else we have to say.
    fn poll_own(&mut self, cx: &mut Context<'_>) {
        if self.session.entry.facts.kind == Kind::Ip {
            self.near.announce(self.far.capacity());
            self.far.announce(self.near.capacity());
            if self.session.entry.is_told_to_go() {
                self.near.say_leaving();
            }
        }
        self.near.poll_own(cx, &self.session.worker);
        self.far.poll_own(cx, &self.session.worker);
    }

    /// Ready with `None` at the flow's orderly end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Error>> {
        if let Poll::Ready(error) = self.session.entry.end.poll(cx) {
            return Poll::Ready(Some(error));
        }
        self.work = 0;
        for _ in 0..TURNS {
            if self.work >= MOST_WORK {
                break;
            }
            if let Poll::Ready(error) = self.poll_move(cx) {
                return Poll::Ready(Some(error));
            }
            self.near.poll_carrier(cx);
            self.far.poll_carrier(cx);
            let up = self.poll_up(cx);
            let down = self.poll_down(cx);
            self.poll_own(cx);
            let blocked =
                !self.up.is_empty() || !self.down.is_empty() || self.far.holds_unsent() || self.near.holds_unsent();
            self.session.entry.set_phase(&self.session.worker, if blocked { Phase::Blocked } else { Phase::Open });
            match (up, down) {
                (Poll::Ready(Ok(true)), Poll::Ready(Ok(true)) | Poll::Pending)
                | (Poll::Pending, Poll::Ready(Ok(true))) => {}
                (Poll::Pending, Poll::Pending) => return Poll::Pending,
                (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => return Poll::Ready(Some(error)),
                (Poll::Ready(Ok(false)), _) | (_, Poll::Ready(Ok(false))) => return Poll::Ready(None),
            }
        }
        go_on_later(cx);
        Poll::Pending
    }

    /// Ready when every port has ended, or the session is told to stop at once.
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.session.entry.end.poll(cx), Poll::Ready(error) if !matches!(error, Error::Idle(_))) {
            return Poll::Ready(());
        }
        let worker = &self.session.worker;
        let mut open = self.near.poll_close(cx, worker).is_pending() | self.far.poll_close(cx, worker).is_pending();
        for old in &mut self.old {
            open |= old.port.poll_close(cx, worker).is_pending();
        }
        if open { Poll::Pending } else { Poll::Ready(()) }
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        if self.up.is_empty() && !self.far.holds_unsent() {
            match ready!(self.near.poll_receive(cx, worker, &mut self.up)) {
                Ok(true) => {}
                Ok(false) => return Poll::Ready(Ok(false)),
                // An end of ours has waited for the far one in vain.
                Err(error) if matches!(self.near, Port::Device(_)) => {
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
        let sent = self.far.poll_send(cx, worker, &mut self.up);
        if let Some(bytes) = before.taken(&self.up) {
            self.session.entry.add_received(worker, bytes);
        }
        match ready!(sent) {
            Ok(()) => Poll::Ready(Ok(true)),
            // What a device cannot read is the near side's.
            Err(error) if is_malformed(&error) => Poll::Ready(Err(self.near_error(&error))),
            Err(error) => Poll::Ready(Err(self.far_error(&error))),
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        if self.down.is_empty() && !self.near.holds_unsent() {
            self.poll_old(cx);
        }
        if self.down.is_empty() && !self.near.holds_unsent() {
            match ready!(self.far.poll_receive(cx, worker, &mut self.down)) {
                Ok(true) => {}
                Ok(false) => return Poll::Ready(Ok(false)),
                Err(error) => return Poll::Ready(Err(self.far_error(&error))),
            }
            self.said.hear(&self.down);
            self.work += Load::work(&self.down);
        }
        let before = Load::of(&self.down);
        let sent = self.near.poll_send(cx, worker, &mut self.down);
        if let Some(bytes) = before.taken(&self.down) {
            self.session.entry.add_sent(worker, bytes);
        }
        match ready!(sent) {
            Ok(()) => Poll::Ready(Ok(true)),
            Err(error) if is_malformed(&error) => Poll::Ready(Err(self.far_error(&error))),
            Err(error) => Poll::Ready(Err(self.near_error(&error))),
        }
    }

    /// What the old port still brings after a move.
    fn poll_old(&mut self, cx: &mut Context<'_>) {
        let worker = &self.session.worker;
        let down = &mut self.down;
        // One at a time: what two bring may not be of one kind.
        self.old.retain_mut(|old| !down.is_empty() || old.poll(cx, worker, down));
        // What an old one says of addresses and routes is no longer true. Behind it there may be more.
        if !down.capsules.is_empty() {
            down.capsules.clear();
            cx.waker().wake_by_ref();
        }
    }

    /// Make before break: the flow stays on its old port until the new one is open and ready for it. Ready where it may
    /// be neither here nor there.
    fn poll_move(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let wanted = self.wanted();
        let under_way = self.moving.as_ref().map(|moving| &moving.route);
        if wanted.as_ref().map(Arc::as_ptr) != under_way.map(Arc::as_ptr) {
            // What was not wanted any more, before it was open, is dropped.
            self.session.entry.peer.replace(self.peer.clone());
            self.moving = wanted.map(|route| Moving::begin(route, &self.said, self.reopen));
            let next = self.moved_at.map_or(0, |at| at + MOVES_APART);
            let early = Duration::from_millis(next.saturating_sub(self.session.worker.now()));
            let is_same_way = self.session.entry.moved.borrow().is_none();
            if let Some(moving) = self.moving.as_mut().filter(|_| is_same_way && !early.is_zero()) {
                // Peers that go as soon as they are there would have us run from one to the next.
                moving.wait(&self.session.worker, early);
            }
        }
        loop {
            let Some(moving) = &mut self.moving else { return Poll::Pending };
            match ready!(moving.poll(cx, &self.session.worker, &self.near, &self.said, self.reopen)) {
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

    /// By which route the flow is to go on elsewhere: by another one, or by its own where its far end is about to go.
    fn wanted(&self) -> Option<Arc<Route>> {
        if matches!(self.near, Port::Device(_)) && self.session.worker.is_draining() {
            // Another process has the device, and sessions that are newer. This one hears out what is under way: were it
            // the newest again, it would get what is theirs, and end with it.
            return None;
        }
        let entry = &self.session.entry;
        let moved = entry.moved.borrow().clone();
        let again = || entry.route.borrow().clone().filter(|route| moves(entry.facts.kind, route));
        moved.or_else(|| if self.far.is_leaving() { again() } else { None })
    }

    /// Whether another port may take over: capsules of the old one that are not whole yet come first, and those to it;
    /// so does what its device has judged.
    fn is_between(&self) -> bool {
        !self.near.is_within() && !self.is_within && self.down.is_empty() && !self.up.judged
    }

    fn switch(&mut self) {
        let Some((route, next)) = self.moving.take().and_then(Moving::arrive) else { return };
        // What was said since, and what the old one has not taken of it.
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
        let port = std::mem::replace(&mut self.far, next.port);
        self.said.hear(&next.heard);
        self.down = next.heard;
        if self.old.len() == MAX_OLD {
            self.old.remove(0);
        }
        self.old.push(Old::new(port));
        self.join();
    }

    /// Of another far end connections may notice, and whoever looks for a packet has to know. `is_led`: by the document.
    fn tell_move(&self, route: &Route, from: &str, is_led: bool) {
        let facts = &self.session.entry.facts;
        let network = facts.network.map_or_else(|| facts.authority.to_string(), |network| network.to_string());
        tracing::info!(
            listener = %facts.listener, %network, user = %facts.user.as_deref().unwrap_or_default(), route = %route.name, %from,
            to = %self.peer.as_deref().unwrap_or_default(),
            reason = %if is_led { "the document leads it there" } else { "its far end goes, or is better reached another way" },
            "a session has moved"
        );
    }

    /// The flow stays where it is for a while, unless the document leads it elsewhere, where it may not be.
    fn stay(&mut self, failure: Failure) -> Result<(), Error> {
        let entry = &self.session.entry;
        entry.peer.replace(self.peer.clone());
        let Some(moving) = &mut self.moving else { return Ok(()) };
        // Where it is by its own route it may stay.
        if failure.is_final && entry.moved.borrow().is_some() {
            let route = &moving.route.name;
            return Err(Error::Reconfigured(format!("it would go by route {route} now: {}", failure.reason)));
        }
        if moving.rest(&self.session.worker) {
            let (reason, route) = (&failure.reason, &moving.route.name);
            tracing::warn!(reason, %route, "a flow could not move; it stays where it is, and tries again");
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
