//! A tunnel of datagrams: capsules on a stream (RFC 9297, section 3), and QUIC datagrams if the connection supports
//! them.
//!
//! In: a request's byte stream. Out: its datagrams, as bare payload for a socket or device, or unchanged for another
//! tunnel. A datagram that is too long for a QUIC packet is sent as a capsule: the stream is slower, but loses nothing.
//! Never: the meaning of a payload.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Kind;
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder};
use hermes_wire::{connect_ip, ip};

use super::{Batch, Other, work_of};
use crate::h3::{Datagrams, SendOutcome};
use crate::runtime::session::SessionEntry;
use crate::runtime::{WorkerContext, yield_to_network};
use crate::stream::h2::GATHER;
use crate::stream::{ByteStream, Reset};
use hermes_ip::mailbox::BATCH;

/// The maximum number of bytes that are read from the stream before they are forwarded. The last chunk may exceed it.
const MAX_READ_BYTES_PER_TURN: usize = 256 << 10;
/// The maximum number of capsules that one poll decodes, including dropped ones. A capsule that this node parses counts
/// as its work (`work_of`).
const MAX_CAPSULES_PER_TURN: usize = 4 * BATCH;
/// The encoded context ID 0, which precedes the payload in a datagram (RFC 9298, section 5; RFC 9484, section 6).
const CONTEXT: &[u8] = &[0];
/// The types of CONNECT-IP capsules that every node on the path parses.
const OF_IP: &[u64] = &[
    connect_ip::ADDRESS_ASSIGN,
    connect_ip::ADDRESS_REQUEST,
    connect_ip::ROUTE_ADVERTISEMENT,
    connect_ip::MTU,
    connect_ip::LEAVING,
];

/// A tunnel of datagrams.
pub struct Tunnel {
    stream: ByteStream,
    datagrams: Option<Datagrams>,
    kind: Kind,
    /// True if received datagrams lose their context ID, because a socket or device sends them.
    opens: bool,
    decoder: CapsuleDecoder,
    /// Encoded capsules that the stream has not accepted yet.
    out: Bytes,
    /// True if written bytes may still be in the buffer of TLS.
    flushing: bool,
    room: BytesMut,
    /// A capsule that followed datagrams on the stream. It begins the next batch, because a batch sends its capsules
    /// before its datagrams.
    behind: Option<Other>,
    /// The end or the failure of the stream, which is reported once all data before it was received.
    ended: Option<io::Result<()>>,
    /// The number of QUIC datagrams that are still accepted after the end. Without this limit, a peer that keeps
    /// sending would hide the end.
    takes: usize,
    /// Datagrams that are too long for a QUIC packet, and are sent on the stream.
    large: VecDeque<Bytes>,
    /// True if a part of a capsule was sent whose rest is still to be sent.
    is_within: bool,
    /// True if a part of a capsule was received whose rest is still to come.
    is_heard_within: bool,
    /// The buffer for received QUIC datagrams before they are parsed.
    came: VecDeque<Bytes>,
    /// Encoded capsules that this node itself generates.
    own: BytesMut,
    /// The length in bytes of the longest IP packet that the peer announced to forward.
    told: usize,
    /// The packet length in bytes that this node last announced to the peer.
    said: usize,
    /// True if the peer has announced its shutdown.
    is_leaving: bool,
    /// True if this node has announced its shutdown to the peer.
    has_said_leaving: bool,
}

/// Returns an error for a malformed message of the peer. It resets the stream (RFC 9297, section 3.3).
fn malformed(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Returns type and payload of each complete capsule in these bytes whose type is in [`OF_IP`].
pub(super) fn of_ip(bytes: Bytes) -> Vec<(u64, Bytes)> {
    let mut decoder = CapsuleDecoder::new(capsule::MAX_HTTP_DATAGRAM).keeping(OF_IP, connect_ip::MAX_CAPSULE);
    decoder.push(bytes);
    let mut found = Vec::new();
    while let Ok(Some(capsule)) = decoder.next() {
        if let Capsule::Kept { kind, payload } = capsule {
            found.push((kind, payload));
        }
    }
    found
}

impl Tunnel {
    pub fn new(mut stream: ByteStream, kind: Kind) -> Self {
        let decoder = CapsuleDecoder::new(capsule::MAX_HTTP_DATAGRAM).passing();
        let is_ip = kind == Kind::Ip;
        Self {
            datagrams: stream.take_datagrams(),
            stream,
            kind,
            opens: false,
            decoder: if is_ip { decoder.keeping(OF_IP, connect_ip::MAX_CAPSULE) } else { decoder },
            out: Bytes::new(),
            flushing: false,
            room: BytesMut::new(),
            behind: None,
            ended: None,
            takes: usize::MAX,
            large: VecDeque::new(),
            is_within: false,
            is_heard_within: false,
            came: VecDeque::new(),
            own: BytesMut::new(),
            told: capsule::MAX_PACKET,
            said: capsule::MAX_PACKET,
            is_leaving: false,
            has_said_leaving: false,
        }
    }

    /// Sets whether received datagrams lose their context ID, because a socket or device sends them.
    pub(super) fn set_opens(&mut self, opens: bool) {
        self.opens = opens;
    }

    /// Returns the length in bytes of the longest IP packet that fits a QUIC datagram on this hop and on those after
    /// it.
    pub(super) fn capacity(&self) -> usize {
        let own = self.datagrams.as_ref().and_then(Datagrams::most);
        own.map_or(capsule::MAX_PACKET, |most| most.saturating_sub(CONTEXT.len())).min(self.told)
    }

    /// Sets the maximum packet length in bytes that the peer announced.
    pub(super) fn set_told(&mut self, told: usize) {
        self.told = told.clamp(ip::MIN_MTU_V4, capsule::MAX_PACKET);
    }

    /// Makes the next call of [`Self::announce`] send its length even if that length has not changed. The request
    /// announced a length before QUIC had probed the MTU of this hop.
    pub(super) fn has_said_less(&mut self) {
        self.said = 0;
    }

    /// Announces to the peer how many bytes its packets may have, unless the announced length is the same already.
    pub(super) fn announce(&mut self, capacity: usize) {
        if std::mem::replace(&mut self.said, capacity) != capacity {
            self.send_capsule(connect_ip::MTU, &connect_ip::mtu_payload(capacity));
        }
    }

    /// Passes bytes to the decoder that were already read from the stream.
    pub(super) fn push(&mut self, ahead: Bytes) {
        self.decoder.push(ahead);
    }

    pub(super) fn is_within(&self) -> bool {
        self.is_within
    }

    /// Queues a capsule of this node. It is sent before all datagrams and forwarded capsules, but not inside one.
    pub(super) fn send_capsule(&mut self, kind: u64, payload: &[u8]) {
        capsule::put(&mut self.own, kind, payload);
    }

    /// Sends the capsules that this node itself generates, as far as possible. A later `poll_send` reports an error.
    pub(super) fn poll_own(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) {
        if !self.own.is_empty() {
            let _ = self.poll_send(cx, worker, &mut Batch::default());
        }
    }

    pub(super) fn bind(&self, session: &Rc<SessionEntry>) {
        self.stream.bind(session);
    }

    /// True if this tunnel has accepted datagrams or capsules that it could not send yet.
    pub(super) fn holds_unsent(&self) -> bool {
        let waits = self.datagrams.as_ref().is_some_and(Datagrams::holds_unsent);
        // This node's own capsules wait until the capsule that is being forwarded is complete. They do not count here:
        // the rest of that capsule would otherwise never be received.
        let own = !self.own.is_empty() && !self.is_within;
        self.flushing || !self.out.is_empty() || !self.large.is_empty() || own || waits
    }

    /// True if the peer drains.
    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving || self.stream.is_leaving()
    }

    /// Announces this node's shutdown to the peer, once. On a shared connection, GOAWAY does so instead.
    pub(super) fn say_leaving(&mut self) {
        if !self.stream.is_shared() && !std::mem::replace(&mut self.has_said_leaving, true) {
            self.send_capsule(connect_ip::LEAVING, &[]);
        }
    }

    pub(super) fn poll_carrier(&mut self, cx: &mut Context<'_>) {
        let _ = self.stream.poll_carrier(cx);
    }

    pub(super) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_finish(cx)
    }

    pub(super) fn poll_close(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) -> Poll<()> {
        match ready!(self.poll_send(cx, worker, &mut Batch::default())) {
            Ok(()) => self.stream.poll_close(cx),
            Err(_) => Poll::Ready(()),
        }
    }

    pub(super) fn abort(&mut self, reset: Reset) {
        self.stream.abort_as(reset);
    }

    /// Receives datagrams and capsules into the (empty) batch. Returns false if the peer has ended the tunnel.
    pub(super) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>> {
        batch.opened = self.opens;
        if let Some(datagrams) = self.datagrams.as_ref().filter(|_| self.takes > 0) {
            let mut came = std::mem::take(&mut self.came);
            if datagrams.poll_take(cx, &mut came).is_ready() {
                if self.ended.is_some() {
                    self.takes = self.takes.saturating_sub(came.len());
                }
                let opened = came.drain(..).try_for_each(|datagram| self.open(worker, datagram, batch));
                if let Err(error) = opened {
                    self.end(Err(error));
                }
                if batch.is_empty() {
                    // All received datagrams were dropped. No waker is registered for the next ones.
                    yield_to_network(cx);
                }
            }
            self.came = came;
        }
        match self.poll_stream(cx, worker, batch) {
            Poll::Ready(Ok(false)) | Poll::Pending if !batch.is_empty() => Poll::Ready(Ok(true)),
            other => other,
        }
    }

    /// Records the end of the stream. Queued QUIC datagrams are still forwarded, unless the stream failed.
    fn end(&mut self, how: io::Result<()>) {
        let waiting = || self.datagrams.as_ref().map_or(0, Datagrams::waiting);
        self.takes = if how.is_ok() { waiting() } else { 0 };
        self.ended.get_or_insert(how);
    }

    /// Receives from the stream. Data before the end, or before a malformed capsule, is forwarded first.
    fn poll_stream(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>> {
        if self.ended.is_none() {
            let read = self.poll_capsules(cx, worker, batch);
            if batch.is_empty() {
                return read.map_ok(|()| false);
            }
            if let Poll::Ready(ended) = read {
                self.end(ended);
            }
        }
        if batch.is_empty() {
            return Poll::Ready(self.ended.take().transpose().map(|_| false));
        }
        Poll::Ready(Ok(true))
    }

    /// Reads all available frames, because forwarding them together costs less. Ready at the end of the stream. Pending
    /// with an empty batch if the stream has no data yet.
    fn poll_capsules(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<()>> {
        let (mut read, mut taken) = (0, 0);
        batch.capsules.extend(self.behind.take());
        loop {
            while batch.len() < BATCH && taken < MAX_CAPSULES_PER_TURN && self.behind.is_none() {
                let Some(capsule) = self.decoder.next().map_err(malformed)? else { break };
                taken += match &capsule {
                    Capsule::Kept { kind, payload } => work_of(*kind, payload),
                    _ => 1,
                };
                let was_leaving = self.is_leaving;
                self.take_capsule(worker, capsule, batch)?;
                if self.is_leaving && !was_leaving {
                    // The relay checks for a shutdown before it receives, so it must be polled again.
                    cx.waker().wake_by_ref();
                }
            }
            if self.behind.is_some()
                || batch.len() >= BATCH
                || taken >= MAX_CAPSULES_PER_TURN
                || read >= MAX_READ_BYTES_PER_TURN
            {
                if batch.is_empty() {
                    // All data was consumed here, and the stream may have more: no waker is registered.
                    yield_to_network(cx);
                }
                return Poll::Pending;
            }
            let Some(chunk) = ready!(self.stream.poll_read(cx))? else {
                return Poll::Ready(self.decoder.finish().map_err(malformed));
            };
            // Small chunks are copied, because each of them would keep its whole read buffer alive.
            let is_kept = read == 0 || chunk.len() >= GATHER;
            read += chunk.len();
            self.decoder.push(if is_kept { chunk } else { Bytes::copy_from_slice(&chunk) });
        }
    }

    fn take_capsule(&mut self, worker: &WorkerContext, capsule: Capsule, batch: &mut Batch) -> io::Result<()> {
        match capsule {
            Capsule::Datagram(datagram) => self.open(worker, datagram, batch)?,
            Capsule::Piece(bytes) => {
                let ends = self.decoder.is_between();
                self.put_capsule(Other::Piece { bytes, ends }, batch);
            }
            Capsule::Kept { kind: connect_ip::MTU, payload } => {
                self.set_told(connect_ip::parse_mtu(&payload).map_err(malformed)?);
            }
            Capsule::Kept { kind: connect_ip::LEAVING, .. } => self.is_leaving = true,
            Capsule::Kept { kind, payload } => self.put_capsule(Other::Whole { kind, payload }, batch),
            Capsule::Unknown { .. } => {}
        }
        Ok(())
    }

    fn put_capsule(&mut self, capsule: Other, batch: &mut Batch) {
        // A fragment that continues a capsule joins the batch even after datagrams. An incomplete capsule would
        // otherwise block the stream for datagrams that are too long for a QUIC packet.
        let is_within = matches!(capsule, Other::Piece { ends: false, .. });
        let goes_on = std::mem::replace(&mut self.is_heard_within, is_within);
        if goes_on || batch.datagrams.is_empty() {
            batch.capsules.push_back(capsule);
        } else {
            self.behind = Some(capsule);
        }
    }

    fn open(&self, worker: &WorkerContext, datagram: Bytes, batch: &mut Batch) -> io::Result<()> {
        if !self.opens {
            batch.datagrams.push_back(datagram);
            return Ok(());
        }
        let opened = if self.kind == Kind::Ip { capsule::packet(datagram) } else { capsule::udp_payload(datagram) };
        match opened.map_err(malformed)? {
            Some(payload) => batch.datagrams.push_back(payload),
            None => worker.shared.metrics.dropped("unknown-context", 1),
        }
        Ok(())
    }

    /// Sends the batch. Ready when all datagrams and capsules are sent.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<()>> {
        loop {
            let written = self.poll_write(cx)?;
            let sent = self.poll_packets(cx, batch)?;
            ready!(written);
            if !self.fill(worker, batch) {
                return sent.map(Ok);
            }
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.out.is_empty() {
            ready!(self.stream.poll_write(cx, &mut self.out))?;
            self.flushing = true;
        }
        if self.flushing {
            ready!(self.stream.poll_flush(cx))?;
            self.flushing = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Sends the datagrams of the batch as QUIC datagrams. Moves those that are too long to `large`.
    fn poll_packets(&mut self, cx: &mut Context<'_>, batch: &mut Batch) -> Poll<io::Result<()>> {
        let Some(datagrams) = &mut self.datagrams else { return Poll::Ready(Ok(())) };
        let context = if batch.opened { CONTEXT } else { &[] };
        while let Some(payload) = batch.datagrams.front() {
            let given = ready!(datagrams.poll_send(cx, context, payload))?;
            let payload = batch.datagrams.pop_front();
            if given == SendOutcome::TooLarge {
                self.large.extend(payload);
            }
        }
        datagrams.poll_flush(cx)
    }

    /// Encodes capsules, and datagrams that are not sent as QUIC datagrams, into `out`: one DATA frame, one write.
    /// Returns false if there are none.
    fn fill(&mut self, worker: &WorkerContext, batch: &mut Batch) -> bool {
        let room = &mut self.room;
        if !self.is_within {
            room.extend_from_slice(&self.own.split());
        }
        for other in batch.capsules.drain(..) {
            match other {
                Other::Piece { bytes, ends } => {
                    room.extend_from_slice(&bytes);
                    self.is_within = !ends;
                }
                Other::Whole { kind, payload } => capsule::put(room, kind, &payload),
            }
        }
        let waiting = if self.datagrams.is_some() { &mut self.large } else { &mut batch.datagrams };
        if self.is_within && !waiting.is_empty() {
            // An incomplete capsule blocks the stream. These datagrams were received as QUIC datagrams, and are dropped
            // because nothing bounds the wait for the rest of the capsule.
            worker.shared.metrics.dropped("capsule-unfinished", waiting.len() as u64);
            waiting.clear();
        }
        room.reserve(waiting.iter().map(|datagram| datagram.len() + capsule::MAX_DATAGRAM_OVERHEAD).sum());
        for datagram in waiting.drain(..) {
            if batch.opened {
                capsule::put_datagram(room, &datagram);
            } else {
                capsule::put(room, capsule::DATAGRAM, &datagram);
            }
        }
        self.out = room.split().freeze();
        !self.out.is_empty()
    }
}
