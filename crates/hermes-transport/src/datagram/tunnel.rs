//! A tunnel of datagrams: capsules on a stream (RFC 9297, section 3), and QUIC datagrams if its connection has them.
//!
//! In: a request's byte stream. Out: its datagrams, as bare payload for an end of the flow, or unchanged for another
//! tunnel. A datagram that fits no packet is sent as a capsule: the stream is slower, but loses nothing. Never: the
//! meaning of a payload.

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

/// The limit of bytes that one turn reads from the stream before it forwards them; one chunk may exceed it.
const MAX_READ_BYTES_PER_TURN: usize = 256 << 10;
/// The limit of capsules in a turn, dropped ones included; capsules of known types count with their work.
const MAX_CAPSULES_PER_TURN: usize = 4 * BATCH;
/// The context ID before a bare payload.
const CONTEXT: &[u8] = &[0];
/// The capsules that nodes on the path parse, and that are replayed after a move.
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
    /// Received datagrams go to an end of the flow.
    opens: bool,
    decoder: CapsuleDecoder,
    /// Bytes that the stream has not taken yet.
    out: Bytes,
    /// TLS may still hold back written bytes.
    flushing: bool,
    room: BytesMut,
    /// A capsule that followed the datagrams of a batch, which sends its capsules first; it begins the next batch.
    behind: Option<Other>,
    /// The end of the stream, reported once everything before it is taken.
    ended: Option<io::Result<()>>,
    /// The number of QUIC datagrams that are still accepted after the end. Without this limit, a peer that keeps
    /// sending would hide the end.
    takes: usize,
    /// Datagrams that fit no packet; they go on the stream.
    large: VecDeque<Bytes>,
    /// The last sent bytes are a fragment of a capsule.
    is_within: bool,
    /// The last received bytes are a fragment of a capsule.
    is_heard_within: bool,
    /// A batch of QUIC datagrams, before they are parsed.
    came: VecDeque<Bytes>,
    /// Complete capsules that this node generates.
    own: BytesMut,
    /// The longest packet that the peer can forward, as it announced.
    told: usize,
    /// The packet length that was last announced to the peer.
    said: usize,
    /// The peer has announced its shutdown. `has_said_leaving`: this node has announced its own.
    is_leaving: bool,
    has_said_leaving: bool,
}

/// An error for a malformed message of the peer, which resets the stream (RFC 9297, section 3.3).
fn malformed(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Finds the capsules about addresses and routes in these bytes.
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

    /// Sets whether received datagrams go to an end of the flow.
    pub(super) fn set_opens(&mut self, opens: bool) {
        self.opens = opens;
    }

    /// The longest IP packet that avoids the stream here and on the path after it.
    pub(super) fn capacity(&self) -> usize {
        let own = self.datagrams.as_ref().and_then(Datagrams::most);
        own.map_or(capsule::MAX_PACKET, |most| most.saturating_sub(CONTEXT.len())).min(self.told)
    }

    /// Sets the packet length that the peer announced.
    pub(super) fn set_told(&mut self, told: usize) {
        self.told = told.clamp(ip::MIN_MTU_V4, capsule::MAX_PACKET);
    }

    /// Forces an announcement. The request described its hop before QUIC had probed it, and the peer knows its own end
    /// of the hop. So the length of the path after this node is announced again, even if it is the same.
    pub(super) fn has_said_less(&mut self) {
        self.said = 0;
    }

    /// Announces to the peer how long its packets may be.
    pub(super) fn announce(&mut self, capacity: usize) {
        if std::mem::replace(&mut self.said, capacity) != capacity {
            self.send_capsule(connect_ip::MTU, &connect_ip::mtu_payload(capacity));
        }
    }

    /// Continues with bytes that were already read from its stream.
    pub(super) fn push(&mut self, ahead: Bytes) {
        self.decoder.push(ahead);
    }

    pub(super) fn is_within(&self) -> bool {
        self.is_within
    }

    /// Queues a capsule before anything else.
    pub(super) fn send_capsule(&mut self, kind: u64, payload: &[u8]) {
        capsule::put(&mut self.own, kind, payload);
    }

    /// Sends this node's own capsules, as far as possible. A later send reports an error.
    pub(super) fn poll_own(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) {
        if !self.own.is_empty() {
            let _ = self.poll_send(cx, worker, &mut Batch::default());
        }
    }

    pub(super) fn bind(&self, session: &Rc<SessionEntry>) {
        self.stream.bind(session);
    }

    /// True if it accepted datagrams that it could not send yet.
    pub(super) fn holds_unsent(&self) -> bool {
        let waits = self.datagrams.as_ref().is_some_and(Datagrams::holds_unsent);
        // Own capsules wait for the end of a forwarded capsule, whose rest must be received first.
        let own = !self.own.is_empty() && !self.is_within;
        self.flushing || !self.out.is_empty() || !self.large.is_empty() || own || waits
    }

    /// True if its peer drains.
    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving || self.stream.is_leaving()
    }

    /// Announces this node's shutdown to the peer. Shared connections send GOAWAY instead.
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

    /// Receives into the (empty) batch. False if the peer has ended the tunnel.
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
                    // All datagrams of the batch were dropped: nothing would wake the task for the next ones.
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

    /// Notes the end. Queued datagrams are forwarded first, unless the stream is malformed.
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
    /// with an empty batch: nothing to forward has come yet.
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
                    // The reaction to a shutdown comes earlier in a turn, so another turn is needed.
                    cx.waker().wake_by_ref();
                }
            }
            if self.behind.is_some()
                || batch.len() >= BATCH
                || taken >= MAX_CAPSULES_PER_TURN
                || read >= MAX_READ_BYTES_PER_TURN
            {
                if batch.is_empty() {
                    // All of it was consumed here, and more may follow.
                    yield_to_network(cx);
                }
                return Poll::Pending;
            }
            let Some(chunk) = ready!(self.stream.poll_read(cx))? else {
                return Poll::Ready(self.decoder.finish().map_err(malformed));
            };
            // Copied: a small chunk would keep its whole read buffer alive.
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
        // A continued capsule goes along even beside QUIC datagrams, which would otherwise find the stream blocked by
        // it.
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

    /// Sends the batch. Ready when all of it is sent.
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

    /// Sends everything that fits QUIC datagrams.
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

    /// Encodes the rest for the stream: one chunk, one DATA frame, one write. False if nothing is left.
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
            // These datagrams came outside the stream, which an incomplete capsule blocks.
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
