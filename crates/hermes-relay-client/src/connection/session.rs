//! An end of a connection, without its network: two streams, and when to send which frame.
//!
//! In: bytes of the application, frames of the other end, outcomes of publications, and the time. Out: frames to publish,
//! bytes for the application, and the reason of a failure. A session never reads a clock.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::{EndId, Frame};
use super::incoming::{Incoming, Violation};
use super::outgoing::{Chunk, FIRST_LIMIT, Outgoing};

/// The wait for more to acknowledge.
const ACKNOWLEDGE_DELAY: Duration = Duration::from_millis(20);
/// The pause before a limit for which the other end may wait is told once more.
const MIN_LIMIT_PAUSE: Duration = Duration::from_secs(1);
/// The time between two frames of an end that has nothing to say, and the silence after which the other end counts as gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(25);
const MAX_SILENCE: Duration = Duration::from_secs(90);
/// The time between two attempts to open or to accept a connection, and the time for all of them.
const OPEN_INTERVAL: Duration = Duration::from_secs(3);
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// The wait for the other end's word that it has everything, too. It may be changing its network.
const LINGER: Duration = MAX_SILENCE;

/// The reason why a connection failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    #[error("no answer within {} s; look whether a listener runs at this URL, with the same secret", OPEN_TIMEOUT.as_secs())]
    NoAnswer,
    #[error("the caller did not confirm the connection within {} s", OPEN_TIMEOUT.as_secs())]
    NotConfirmed,
    #[error("the other end was silent for {} s", MAX_SILENCE.as_secs())]
    Silent,
    #[error("the other end ended the connection: {0}")]
    Reset(String),
    #[error("the other end breaks the protocol: {0}")]
    Violation(#[from] Violation),
}

/// An end of a connection.
#[derive(Debug)]
pub(super) struct Session {
    own: EndId,
    /// The URLs at which this end receives.
    receive: Vec<String>,
    /// `None` until the listener accepts.
    peer: Option<EndId>,
    /// The other end has sent a frame to this one, so that it knows `own` and `receive`.
    is_known_to_peer: bool,
    incoming: Incoming,
    outgoing: Outgoing,
    /// When an acknowledgement is due, and what the latest one said.
    acknowledge_at: Option<Instant>,
    acknowledged_to: u64,
    advertised_limit: u64,
    /// The other end may wait at this byte for the latest limit, which it may not have got.
    blocked_at: Option<u64>,
    limit_pause: Duration,
    began_at: Instant,
    /// `None` before the first frame.
    sent_at: Option<Instant>,
    heard_at: Instant,
    /// The application has taken everything, the end included.
    is_delivered: bool,
    is_closed_sent: bool,
    is_peer_closed: bool,
    /// When everything was sent, acknowledged, received and delivered.
    complete_at: Option<Instant>,
}

impl Session {
    /// The end that opens a connection. A window below [`FIRST_LIMIT`] counts as that.
    pub(super) fn call(window: usize, now: Instant) -> Self {
        let window = window.max(FIRST_LIMIT as usize);
        Self {
            own: EndId::random(),
            receive: Vec::new(),
            peer: None,
            is_known_to_peer: false,
            incoming: Incoming::new(window as u64),
            outgoing: Outgoing::new(window),
            acknowledge_at: None,
            acknowledged_to: 0,
            advertised_limit: 0,
            blocked_at: None,
            limit_pause: MIN_LIMIT_PAUSE,
            began_at: now,
            sent_at: None,
            heard_at: now,
            is_delivered: false,
            is_closed_sent: false,
            is_peer_closed: false,
            complete_at: None,
        }
    }

    /// The end that accepts the connection of this caller. [`Self::receive`] gets the frame that opened it.
    pub(super) fn accept(caller: EndId, window: usize, now: Instant) -> Self {
        Self { peer: Some(caller), acknowledge_at: Some(now), ..Self::call(window, now) }
    }

    /// This end receives at these URLs, so that it may begin.
    pub(super) fn begin(&mut self, receive: Vec<String>, now: Instant) {
        (self.receive, self.began_at, self.heard_at) = (receive, now, now);
    }

    pub(super) fn own(&self) -> &EndId {
        &self.own
    }

    /// The other end. `None` until it is known.
    pub(super) fn peer(&self) -> Option<&EndId> {
        self.peer.as_ref()
    }

    /// The other end has answered this one.
    pub(super) fn is_known_to_peer(&self) -> bool {
        self.is_known_to_peer
    }

    /// When this end began.
    pub(super) fn began_at(&self) -> Instant {
        self.began_at
    }

    /// When the other end was last heard.
    pub(super) fn heard_at(&self) -> Instant {
        self.heard_at
    }

    pub(super) fn incoming(&mut self) -> &mut Incoming {
        &mut self.incoming
    }

    pub(super) fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    /// The next bytes for the application.
    pub(super) fn take(&mut self, now: Instant) -> Option<Bytes> {
        let data = self.incoming.take()?;
        // The other end may wait for the room.
        if self.incoming.limit() >= self.advertised_limit + self.incoming.window() / 4 {
            self.acknowledge_by(now);
        }
        Some(data)
    }

    /// Takes a frame of the other end.
    pub(super) fn receive(&mut self, frame: &Frame, now: Instant) -> Result<(), Failure> {
        if let Some(reason) = &frame.reset {
            // The other end failed after all was sent and received, or stopped waiting for this one.
            self.is_peer_closed |= self.is_transferred();
            return if self.is_transferred() { Ok(()) } else { Err(Failure::Reset(reason.clone())) };
        }
        let is_answer = self.peer.is_none();
        if is_answer {
            // The frames of an end that this one does not know yet say who it is.
            let Some(from) = &frame.from else { return Ok(()) };
            self.peer = Some(from.clone());
        }
        self.heard_at = now;
        self.is_known_to_peer |= frame.to.is_some();
        self.is_peer_closed |= frame.closed;
        if let Some(acknowledgement) = &frame.acknowledged {
            self.outgoing.acknowledge(acknowledgement, now)?;
        }
        if is_answer {
            // The answered call may have been one before the bytes were there.
            self.outgoing.repeat_first_chunk();
        }
        if let Some(offset) = frame.offset {
            let is_next = self.incoming.receive(offset, &frame.data, frame.end)?;
            let is_much = self.incoming.next() >= self.acknowledged_to + self.incoming.window() / 4;
            let is_urgent = !is_next || frame.end || is_much;
            self.acknowledge_by(if is_urgent { now } else { now + ACKNOWLEDGE_DELAY });
        } else if frame.from.is_some() {
            self.acknowledge_by(now);
        }
        Ok(())
    }

    fn acknowledge_by(&mut self, at: Instant) {
        self.acknowledge_at = Some(self.acknowledge_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// The next frame to publish. One without `to` opens the connection.
    pub(super) fn next_frame(&mut self, now: Instant) -> Option<Frame> {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if self.peer.is_none() {
            if !is_due(Some(self.open_at())) {
                return None;
            }
            self.outgoing.repeat_first_chunk();
            let chunk = self.outgoing.next_chunk();
            return Some(self.frame(chunk, now));
        }
        self.outgoing.repeat_lost(now);
        let chunk = self.outgoing.next_chunk();
        self.note_completion(now);
        let is_close_due = self.complete_at.is_some() && !self.is_closed_sent;
        if chunk.is_none() && !is_due(self.acknowledge_at) && !is_due(Some(self.keepalive_at())) && !is_close_due {
            return None;
        }
        Some(self.frame(chunk, now))
    }

    fn frame(&mut self, chunk: Option<Chunk>, now: Instant) -> Frame {
        let acknowledged = self.incoming.acknowledgement();
        self.acknowledge_at = self.note_advertised(acknowledged.before, acknowledged.limit).map(|pause| now + pause);
        self.sent_at = Some(now);
        self.is_closed_sent |= self.complete_at.is_some();
        let (offset, end) =
            (chunk.as_ref().map(|chunk| chunk.offset), chunk.as_ref().is_some_and(|chunk| chunk.is_end));
        Frame {
            to: self.peer.clone(),
            from: (!self.is_known_to_peer).then(|| self.own.clone()),
            receive: if self.is_known_to_peer { Vec::new() } else { self.receive.clone() },
            offset,
            end,
            acknowledged: Some(acknowledged),
            closed: self.complete_at.is_some(),
            reset: None,
            data: chunk.map(|chunk| chunk.data).unwrap_or_default(),
        }
    }

    /// Notes what the other end is told. Returns the pause before it is told once more, if it may wait for that.
    fn note_advertised(&mut self, before: u64, limit: u64) -> Option<Duration> {
        if before > 0 && before == self.advertised_limit && limit > before {
            self.blocked_at = Some(before);
            self.limit_pause = MIN_LIMIT_PAUSE;
        }
        (self.acknowledged_to, self.advertised_limit) = (before, limit);
        if self.blocked_at != Some(before) || self.incoming.is_whole() {
            self.blocked_at = None;
            return None;
        }
        let pause = self.limit_pause;
        self.limit_pause = (pause * 2).min(KEEPALIVE_INTERVAL);
        Some(pause)
    }

    /// A relay has accepted this frame, after this time.
    pub(super) fn published(&mut self, frame: &Frame, took: Duration, now: Instant) {
        if let Some(offset) = frame.offset {
            self.outgoing.published(offset, took, now);
        }
    }

    /// A relay refuses publications of this size. `false`: they cannot be any smaller.
    pub(super) fn too_large(&mut self, frame: &Frame) -> bool {
        if frame.to.is_none() {
            self.sent_at = None;
        }
        frame.offset.is_some_and(|offset| self.outgoing.too_large(offset, frame.data.len()))
    }

    /// A publication of this frame failed, or nobody knows.
    pub(super) fn failed(&mut self, frame: &Frame, now: Instant) {
        if let Some(offset) = frame.offset.filter(|_| frame.to.is_some()) {
            self.outgoing.failed(offset);
        }
        if frame.closed && !self.is_peer_closed {
            self.is_closed_sent = false;
        }
        self.acknowledge_by(now);
    }

    /// The application has taken everything, and the end of the stream.
    pub(super) fn delivered(&mut self) {
        self.is_delivered = true;
    }

    fn open_at(&self) -> Instant {
        self.sent_at.map_or(self.began_at, |sent| sent + OPEN_INTERVAL)
    }

    fn keepalive_at(&self) -> Instant {
        let interval = if self.is_known_to_peer { KEEPALIVE_INTERVAL } else { OPEN_INTERVAL };
        self.sent_at.unwrap_or(self.began_at) + interval
    }

    fn note_completion(&mut self, now: Instant) {
        if self.outgoing.is_done() && self.is_delivered {
            self.complete_at.get_or_insert(now);
        }
    }

    /// Both ends have received everything.
    pub(super) fn is_transferred(&self) -> bool {
        self.outgoing.is_done() && self.incoming.is_whole()
    }

    /// The application has everything, too.
    pub(super) fn is_complete(&self) -> bool {
        self.complete_at.is_some()
    }

    /// Both streams have ended, and the other end knows.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        self.note_completion(now);
        self.complete_at.is_some() && self.is_peer_closed && self.is_closed_sent
    }

    /// Both streams have ended, and the other end has had the time to learn it.
    pub(super) fn has_lingered(&self, now: Instant) -> bool {
        self.complete_at.is_some_and(|complete| now >= complete + LINGER)
    }

    /// Fails if the other end has been silent for too long.
    pub(super) fn check(&self, now: Instant) -> Result<(), Failure> {
        if self.is_transferred() {
            // The application takes its time.
            return Ok(());
        }
        match (self.is_known_to_peer, &self.peer) {
            (false, None) if now >= self.began_at + OPEN_TIMEOUT => Err(Failure::NoAnswer),
            (false, Some(_)) if now >= self.began_at + OPEN_TIMEOUT => Err(Failure::NotConfirmed),
            (true, _) if now >= self.heard_at + MAX_SILENCE => Err(Failure::Silent),
            _ => Ok(()),
        }
    }

    /// The next time at which [`Self::next_frame`], [`Self::has_lingered`] or [`Self::check`] may say something new.
    pub(super) fn deadline(&self) -> Instant {
        let next = if self.peer.is_none() { self.open_at() } else { self.keepalive_at() };
        let gone = if self.is_known_to_peer { self.heard_at + MAX_SILENCE } else { self.began_at + OPEN_TIMEOUT };
        let others = [
            self.acknowledge_at.filter(|_| self.peer.is_some()),
            self.outgoing.deadline().filter(|_| self.peer.is_some()),
            self.complete_at.map(|complete| complete + LINGER),
            Some(gone).filter(|_| !self.is_transferred()),
        ];
        others.into_iter().flatten().fold(next, Instant::min)
    }
}

#[cfg(test)]
mod simulation;
