//! Prepares the move of a flow to another upstream port.
//!
//! In: the route that a flow should follow, and the addresses and routes that its downstream side signalled. Out: a
//! port that is open and ready for the flow, or the reason for a failure. A temporary failure is retried; a final one
//! means that the new upstream does not permit the flow. Never: the flow itself, which stays on its old port until the
//! new one is ready.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hermes_model::snapshot::Route;
use http::StatusCode;

use super::super::{Batch, Other, Port};
use super::CLOSE_TIMEOUT;
use super::replay::{AdvertisedState, Words, assigned};
use crate::error::{Error, Side};
use crate::runtime::WorkerContext;
use hermes_ip::mailbox::{BATCH, weight};

/// The first pause before a move is retried. Each further failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before a move is retried.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// An upstream port that a flow may move to.
pub struct Reopened {
    pub port: Port,
    /// True if the replayed capsules were already sent with the request that opened the port.
    pub told: bool,
}

/// A future that opens an upstream port.
pub type Opening = Pin<Box<dyn Future<Output = Result<Reopened, Error>>>>;
/// Opens an upstream port on a route. The bytes are encoded capsules that the new upstream must receive first.
pub(in crate::datagram) type Reopen<'a> = &'a dyn Fn(Arc<Route>, Bytes) -> Opening;

/// The reason why a flow cannot move.
pub(super) struct Failure {
    pub(super) reason: String,
    /// True if the new upstream forbids the flow. If a configuration change demands the move, the flow then ends.
    pub(super) is_final: bool,
}

impl Failure {
    fn for_now(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), is_final: false }
    }

    fn for_good(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), is_final: true }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let is_final = match &error {
            Error::Refused { status, .. } => is_refusal(*status),
            other => matches!(other.side(), Side::Policy | Side::Client),
        };
        Self { reason: error.to_string(), is_final }
    }
}

/// True if the response status means that the peer forbids the flow, and not that it failed temporarily.
fn is_refusal(status: StatusCode) -> bool {
    const PASSING: [StatusCode; 4] = [
        StatusCode::REQUEST_TIMEOUT,
        StatusCode::MISDIRECTED_REQUEST,
        StatusCode::TOO_EARLY,
        StatusCode::TOO_MANY_REQUESTS,
    ];
    status == StatusCode::NOT_IMPLEMENTED || (status.is_client_error() && !PASSING.contains(&status))
}

/// A move in progress.
pub(super) struct Moving {
    pub(super) route: Arc<Route>,
    stage: Stage,
    /// The capsules that were passed to the request which opens the port.
    words: Words,
    /// IDs of address requests that ask for any address again, because the new upstream refused the flow's address.
    for_any: Vec<u64>,
    pause: Duration,
}

enum Stage {
    Opening(Opening),
    Preparing(Box<Next>),
    /// Waits before the next attempt.
    Resting(Pin<Box<tokio::time::Sleep>>),
}

impl Moving {
    pub(super) fn begin(route: Arc<Route>, said: &AdvertisedState, reopen: Reopen<'_>) -> Self {
        let words = said.again(&[]);
        let stage = Stage::Opening(reopen(route.clone(), words.bytes()));
        Self { route, stage, words, for_any: Vec::new(), pause: FIRST_PAUSE }
    }

    fn open(&mut self, said: &AdvertisedState, reopen: Reopen<'_>) {
        self.words = said.again(&self.for_any);
        self.stage = Stage::Opening(reopen(self.route.clone(), self.words.bytes()));
    }

    /// Ready when the flow may switch ports.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        downstream: &Port,
        said: &AdvertisedState,
        reopen: Reopen<'_>,
    ) -> Poll<Result<(), Failure>> {
        loop {
            match &mut self.stage {
                Stage::Resting(timer) => {
                    ready!(timer.as_mut().poll(cx));
                    self.for_any.clear();
                    self.open(said, reopen);
                }
                Stage::Opening(opening) => match ready!(opening.as_mut().poll(cx)) {
                    Ok(reopened) => self.prepare(reopened, downstream, said),
                    Err(error) => return Poll::Ready(Err(error.into())),
                },
                Stage::Preparing(next) => {
                    let arrived = ready!(next.poll(cx, worker));
                    // The client did not request a specific address, so the new upstream may assign another one. That
                    // takes a new tunnel, because a tunnel may use a request ID only once (RFC 9484, section 4.7.2).
                    next.refused.retain(|request| said.has_any(*request) && !self.for_any.contains(request));
                    if next.refused.is_empty() {
                        return Poll::Ready(arrived);
                    }
                    self.for_any.append(&mut next.refused);
                    self.open(said, reopen);
                }
            }
        }
    }

    fn prepare(&mut self, Reopened { mut port, told }: Reopened, downstream: &Port, said: &AdvertisedState) {
        port.set_sink(downstream);
        let within = self.route.timeout.connect;
        let timer = Box::pin(tokio::time::sleep(within));
        // Capsules that the client has sent since the request was written are sent on the new port.
        let known = if told { std::mem::take(&mut self.words) } else { Words::default() };
        let words = said.again(&self.for_any);
        self.stage = Stage::Preparing(Box::new(Next {
            port,
            said: words.beyond(&known).batch(),
            unanswered: words.requests(),
            words,
            refused: Vec::new(),
            is_assigned: false,
            is_open: false,
            heard: Batch::default(),
            within,
            timer,
        }));
    }

    /// Schedules a retry after a pause. Returns true after the first failure of this move.
    pub(super) fn rest(&mut self, worker: &WorkerContext) -> bool {
        let is_first = self.pause == FIRST_PAUSE;
        self.wait(worker, self.pause);
        self.pause = (2 * self.pause).min(LAST_PAUSE);
        is_first
    }

    /// Schedules the next attempt after this pause and a random delay.
    pub(super) fn wait(&mut self, worker: &WorkerContext, pause: Duration) {
        let jitter = Duration::from_millis(worker.random().1 % FIRST_PAUSE.as_millis() as u64);
        self.stage = Stage::Resting(Box::pin(tokio::time::sleep(pause + jitter)));
    }

    /// Returns the new route of the flow and its port, or `None` if the port is not open.
    pub(super) fn arrive(self) -> Option<(Arc<Route>, Next)> {
        let Stage::Preparing(next) = self.stage else { return None };
        Some((self.route, *next))
    }
}

/// The upstream port of a move, before it carries traffic.
pub(super) struct Next {
    pub(super) port: Port,
    /// All capsules that are replayed to this port.
    pub(super) words: Words,
    /// Replayed capsules that were not sent to this port yet.
    said: Batch,
    /// IDs of address requests that the peer has not answered. Until the answer, it would drop packets from the
    /// address.
    unanswered: Vec<u64>,
    /// IDs of address requests that the peer has refused.
    refused: Vec<u64>,
    /// True once the peer has assigned an address.
    is_assigned: bool,
    /// True once the port is ready for the flow.
    is_open: bool,
    /// Datagrams and capsules that the port received before the switch.
    pub(super) heard: Batch,
    /// The timeout for the assignment of addresses, and again for the switch after it.
    within: Duration,
    timer: Pin<Box<tokio::time::Sleep>>,
}

impl Next {
    fn poll(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) -> Poll<Result<(), Failure>> {
        if self.is_assigned && !self.is_open && self.timer.as_mut().poll(cx).is_ready() {
            // The peer has assigned some addresses and not answered the other requests. The flow moves without them.
            self.unanswered.clear();
        } else if self.timer.as_mut().poll(cx).is_ready() {
            // Without this failure, a client that never completes a capsule could stay on a route that is no longer its
            // own.
            let late = match self.is_open {
                true => Failure::for_good("an incomplete capsule prevents the move"),
                false => Failure::for_now("no address was assigned in time"),
            };
            return Poll::Ready(Err(late));
        }
        self.port.poll_carrier(cx);
        if let Poll::Ready(Err(error)) = self.port.poll_send(cx, worker, &mut self.said) {
            return Poll::Ready(Err(Failure::for_now(error.to_string())));
        }
        while !self.unanswered.is_empty() {
            let mut batch = Batch::default();
            match ready!(self.port.poll_receive(cx, worker, &mut batch)) {
                Ok(true) => {}
                Ok(false) => return Poll::Ready(Err(Failure::for_now("it was ended"))),
                Err(error) => return Poll::Ready(Err(Failure::for_now(error.to_string()))),
            }
            for address in assigned(&batch).flatten() {
                let is_given = !address.prefix.address().is_unspecified();
                self.is_assigned |= is_given;
                let is_ours = self.words.requests().contains(&address.request);
                if is_given && !is_ours {
                    // A peer that assigns addresses without a request need not answer the requests.
                    self.unanswered.clear();
                } else if is_ours && !is_given {
                    self.refused.push(address.request);
                }
                self.unanswered.retain(|request| *request != address.request);
            }
            if self.unanswered.is_empty() && !self.is_assigned {
                return Poll::Ready(Err(Failure::for_good("the new far end does not assign the address")));
            }
            if !self.keep(worker, batch) {
                return Poll::Ready(Err(Failure::for_now(
                    "the new far end sent too many capsules before it assigned an address",
                )));
            }
        }
        if !std::mem::replace(&mut self.is_open, true) {
            self.timer.as_mut().reset(tokio::time::Instant::now() + self.within);
            // Registers the waker.
            let _ = self.timer.as_mut().poll(cx);
        }
        Poll::Ready(Ok(()))
    }

    /// Buffers what the new port receives before the switch. If both ports lead to the same peer, that peer sends
    /// packets to the new port as soon as it has assigned the address. Returns false if the capsules exceed the limit.
    fn keep(&mut self, worker: &WorkerContext, mut batch: Batch) -> bool {
        let heard = &mut self.heard;
        heard.opened = batch.opened;
        heard.capsules.append(&mut batch.capsules);
        heard.datagrams.append(&mut batch.datagrams);
        let most = worker.snapshot().limits.datagram_queue;
        let mut bytes: usize = heard.datagrams.iter().map(weight).sum();
        while bytes > most
            && let Some(oldest) = heard.datagrams.pop_front()
        {
            bytes -= weight(&oldest);
            worker.shared.metrics.dropped("queue-full", 1);
        }
        let said: usize = heard.capsules.iter().map(Other::len).sum();
        said <= most && heard.capsules.len() <= BATCH
    }
}

/// An upstream port from which a flow has moved. It is read for [`CLOSE_TIMEOUT`], then ended cleanly and read until
/// the peer has ended it too. A stream that is dropped without an end would count as a failure at the peer.
pub(super) struct Old {
    pub(super) port: Port,
    timer: Pin<Box<tokio::time::Sleep>>,
    finishing: bool,
}

impl Old {
    pub(super) fn new(port: Port) -> Self {
        Self { port, timer: Box::pin(tokio::time::sleep(CLOSE_TIMEOUT)), finishing: false }
    }

    /// Receives what the peer still sends. Returns false once the peer has ended the port, or the timeout has passed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, worker: &WorkerContext, batch: &mut Batch) -> bool {
        let _ = self.port.poll_send(cx, worker, &mut Batch::default());
        self.port.poll_carrier(cx);
        let received = self.port.poll_receive(cx, worker, batch);
        let open = matches!(received, Poll::Pending | Poll::Ready(Ok(true)));
        while open && self.timer.as_mut().poll(cx).is_ready() {
            if std::mem::replace(&mut self.finishing, true) {
                return false;
            }
            self.timer.as_mut().reset(tokio::time::Instant::now() + CLOSE_TIMEOUT);
            let _ = self.port.poll_finish(cx);
        }
        open
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::NO_CONNECTION;

    #[test]
    fn a_refusal_is_for_good_and_a_failure_for_now() {
        let refused =
            |status: u16| Error::Refused { peer: Arc::from("far"), status: StatusCode::from_u16(status).unwrap() };
        let unsuitable = Error::Unsuitable { route: Arc::from("web"), kind: "ip" };
        for error in [refused(403), refused(404), refused(407), refused(501), unsuitable] {
            let failure = Failure::from(error);
            assert!(failure.is_final, "{}", failure.reason);
        }
        let after = Duration::from_secs(1);
        let late = Error::ConnectTimeout { peer: Arc::from("far"), missing: NO_CONNECTION, after };
        let gone = Error::NotConnected { node: Arc::from("far") };
        for error in [refused(429), refused(425), refused(502), refused(503), late, gone, Error::Limit("tunnels")] {
            let failure = Failure::from(error);
            assert!(!failure.is_final, "{}", failure.reason);
        }
    }
}
