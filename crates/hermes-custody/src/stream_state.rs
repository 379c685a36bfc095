//! A direction of an exchange: a byte stream that arrives from one side, is stored, and is forwarded to the other.
//!
//! In: bytes at an offset, the offset that is durable, the offset that the next node has acknowledged. Out: bytes to
//! write, acknowledgements, bytes to send. The stream retains exactly the bytes that the next node has not
//! acknowledged: in memory, or as a range on disk. Never: the identity of the exchange or of its sides.
//!
//! A node may replace the head that the previous node sent (`Via`, headers that a route rewrites). The bytes after the
//! head are the same. Offsets of stored, sent and written bytes count in this node's stream. Only acknowledgements to
//! the previous node, and its data, count in the previous node's stream.

mod disk;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use bytes::Bytes;
use hermes_wire::custody::AckReason;
use hermes_wire::varint;

/// Chunks of at most `MERGE_BELOW_BYTES` bytes are merged once there are more than `MERGE_ABOVE_CHUNKS` chunks, because
/// each chunk costs more than its bytes.
const MERGE_ABOVE_CHUNKS: usize = 8;
const MERGE_BELOW_BYTES: usize = 4 << 10;

/// Maximum length of the data in one record, in bytes.
pub(crate) const RECORD: u64 = 16 << 10;

/// The progress of one direction of an exchange.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes from the beginning of the stream.
    pub offset: u64,
    /// Whether the stream ends at this offset.
    pub is_whole: bool,
}

/// Bytes that the next node has not acknowledged.
#[derive(Debug)]
enum Chunk {
    Here(Bytes),
    /// A range of this length that is only on disk.
    Away(u64),
}

impl Chunk {
    fn len(&self) -> u64 {
        match self {
            Chunk::Here(bytes) => bytes.len() as u64,
            Chunk::Away(length) => *length,
        }
    }
}

/// The head at the beginning of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Head {
    /// The head is being read; its replacement is not known yet.
    Awaited,
    /// A head of `length` bytes replaces `theirs` bytes of the previous node's stream.
    Settled { length: u64, theirs: u64 },
}

/// The last acknowledgement that was sent to the previous node over the present channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AckState {
    /// No acknowledgement was sent.
    Unsent,
    /// An acknowledgement is due, even of zero bytes. It shows the previous node that this node knows the exchange.
    Due,
    /// The last acknowledgement, as an offset in the previous node's stream.
    Sent(Progress),
}

/// The recovery of bytes that were dropped on arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gap {
    /// No bytes are missing.
    Closed,
    /// Bytes arrived without room for them, or after bytes that were dropped. The previous node must send them again.
    Lost,
    /// Like `Lost`, and the previous node was informed that there is no room.
    Refused,
    /// The previous node was asked to send again from this offset.
    Requested(u64),
}

impl Gap {
    fn is_open(self) -> bool {
        matches!(self, Self::Lost | Self::Refused)
    }

    /// Records that bytes were lost. If the previous node was informed of a refusal, that still counts.
    fn open(&mut self) {
        if !self.is_open() {
            *self = Self::Lost;
        }
    }
}

/// The next item to send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Bytes at an offset. An empty chunk marks the end of the stream.
    Bytes { offset: u64, bytes: Bytes, is_last: bool },
    /// A range on disk, which must be read first.
    Away { offset: u64, length: u64 },
}

/// The state of one direction of an exchange.
#[derive(Debug)]
pub(crate) struct StreamState {
    /// Bytes that the next node has not acknowledged, from `base` on.
    kept: VecDeque<Chunk>,
    base: u64,
    in_memory: u64,
    head: Head,
    /// Bytes received.
    have: Progress,
    /// Bytes that are durable.
    safe: Progress,
    /// The last acknowledgement over the present channel.
    ack: AckState,
    gap: Gap,
    /// The next node may have received more bytes than this process has, and has not reported its offset yet.
    is_behind: bool,
    /// Until this offset is durable, only durable bytes are sent, so that a restarted node does not send a different
    /// head.
    first: u64,
    /// Stored bytes from this offset on are still on disk.
    floor: u64,
    /// Number of written chunks on disk, from `floor` on.
    pieces: u64,
    /// Bytes sent over the present channel.
    sent: Progress,
    /// Bytes that the next node has acknowledged.
    held: Progress,
    /// The next node has no room, and will report when it has room again.
    waits: bool,
    /// Length of the requested read from disk, in bytes. 0: no read is pending.
    loading: u64,
}

impl Default for StreamState {
    /// Creates a stream whose bytes are forwarded unchanged.
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            base: 0,
            in_memory: 0,
            head: Head::Settled { length: 0, theirs: 0 },
            have: Progress::default(),
            safe: Progress::default(),
            ack: AckState::Unsent,
            gap: Gap::Closed,
            is_behind: false,
            first: 0,
            floor: 0,
            pieces: 0,
            sent: Progress::default(),
            held: Progress::default(),
            waits: false,
            loading: 0,
        }
    }
}

impl StreamState {
    /// Creates a stream whose head is replaced later, by [`StreamState::settle`].
    pub(crate) fn awaiting_head() -> Self {
        Self { head: Head::Awaited, ..Self::default() }
    }

    /// Returns the length of the head that this node wrote, in bytes.
    pub(crate) fn head_length(&self) -> u64 {
        match self.head {
            Head::Awaited => 0,
            Head::Settled { length, .. } => length,
        }
    }

    /// Whether the head is not known yet.
    pub(crate) fn awaits_head(&self) -> bool {
        self.head == Head::Awaited
    }

    /// Accepts bytes at an offset in the previous node's count. Returns the new bytes and their offset; `None` if there
    /// is a gap before them, or if nothing is new.
    pub(crate) fn take(&mut self, offset: u64, mut bytes: Bytes, is_last: bool) -> Option<(u64, Bytes)> {
        if self.have.is_whole {
            return None;
        }
        let mut offset = offset;
        if let Head::Settled { length, theirs } = self.head {
            if let Some(of_head) = theirs.checked_sub(offset).filter(|of_head| *of_head > 0) {
                let of_head = usize::try_from(of_head).unwrap_or(usize::MAX);
                if of_head > bytes.len() {
                    return None;
                }
                bytes = bytes.split_off(of_head);
                offset = theirs;
            }
            offset = offset - theirs + length;
        }
        let Some(known) = self.have.offset.checked_sub(offset) else {
            // Bytes in flight after the lost ones arrive as well; they are requested only once.
            if !self.is_behind && self.gap != Gap::Requested(self.have.offset) {
                self.gap.open();
            }
            return None;
        };
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        if known > bytes.len() || (known == bytes.len() && !is_last) {
            return None;
        }
        let new = bytes.split_off(known);
        let at = self.have.offset;
        self.have = Progress { offset: at + new.len() as u64, is_whole: is_last };
        self.pieces += 1;
        self.keep(new.clone());
        Some((at, new))
    }

    fn keep(&mut self, mut bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        self.in_memory += bytes.len() as u64;
        if bytes.len() <= MERGE_BELOW_BYTES {
            // A slice of a large buffer would keep the whole buffer alive.
            bytes = Bytes::copy_from_slice(&bytes);
        }
        // Merging chunks of similar size copies each byte only a few times.
        while self.kept.len() >= MERGE_ABOVE_CHUNKS
            && let Some(Chunk::Here(last)) = self.kept.back()
            && last.len() <= 2 * bytes.len()
            && last.len() + bytes.len() <= MERGE_BELOW_BYTES
        {
            bytes = [&last[..], &bytes].concat().into();
            self.kept.pop_back();
        }
        self.kept.push_back(Chunk::Here(bytes));
    }

    /// Replaces the first `theirs` bytes by this head. Returns the bytes after the head, which must be written after
    /// it.
    pub(crate) fn settle(&mut self, theirs: u64, head: Bytes) -> Vec<Bytes> {
        let mut behind = Vec::new();
        let mut left = theirs;
        for chunk in self.kept.drain(..) {
            let Chunk::Here(mut bytes) = chunk else { continue };
            let of_head = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let _ = bytes.split_to(of_head);
            left -= of_head as u64;
            if !bytes.is_empty() {
                behind.push(bytes);
            }
        }
        let length = head.len() as u64;
        self.head = Head::Settled { length, theirs };
        self.in_memory = 0;
        self.pieces = 1 + behind.len() as u64;
        self.have.offset = self.have.offset - theirs + length;
        self.first = length;
        self.keep(head);
        behind.iter().for_each(|bytes| self.keep(bytes.clone()));
        behind
    }

    /// Sends only durable bytes from now on, so that a restarted node knows every byte that it sent.
    pub(crate) fn send_durable_only(&mut self) {
        self.first = u64::MAX;
    }

    /// Records that bytes up to this offset are durable.
    pub(crate) fn set_safe(&mut self, upto: Progress) {
        if upto.offset >= self.safe.offset && upto.offset <= self.have.offset {
            self.safe = Progress { is_whole: upto.is_whole && self.have == upto, ..upto };
        }
    }

    /// Records that bytes arrived for which there was no room.
    pub(crate) fn refuse(&mut self) {
        self.gap.open();
    }

    /// Whether refused bytes must be requested again once there is room.
    pub(crate) fn has_gap(&self) -> bool {
        self.gap.is_open()
    }

    /// Returns the next acknowledgement for the previous node, and whether that node must send the following bytes
    /// again. `None`: the previous node has received it. `is_read_again`: bytes that were read may be read again after
    /// a restart, so that only durable bytes count as stored.
    pub(crate) fn news(&mut self, has_room: bool, is_read_again: bool) -> Option<(Progress, AckReason)> {
        let (acknowledged, reason) = self.next_ack(has_room, is_read_again)?;
        match reason {
            AckReason::NoRoom => self.gap = Gap::Refused,
            AckReason::Again => self.gap = Gap::Requested(self.have.offset),
            AckReason::Taken => {}
        }
        self.ack = AckState::Sent(acknowledged);
        Some((acknowledged, reason))
    }

    /// Whether [`StreamState::news`] would return an acknowledgement.
    pub(crate) fn has_news(&self, has_room: bool, is_read_again: bool) -> bool {
        self.next_ack(has_room, is_read_again).is_some()
    }

    fn next_ack(&self, has_room: bool, is_read_again: bool) -> Option<(Progress, AckReason)> {
        let Head::Settled { length, theirs } = self.head else {
            // A refused sender begins again at offset zero.
            let reason = match (self.gap, has_room) {
                (Gap::Lost | Gap::Refused, true) => AckReason::Again,
                (Gap::Lost, false) => AckReason::NoRoom,
                _ => AckReason::Taken,
            };
            let is_due = self.ack == AckState::Due || reason != AckReason::Taken;
            return is_due.then_some((Progress::default(), reason));
        };
        // Bytes that the next node has acknowledged count as durable.
        let is_held = !is_read_again && (self.held.offset > self.safe.offset || self.held.is_whole);
        let safe = if is_held { self.held } else { self.safe };
        // An offset that no record can encode, from a faulty neighbour, is not passed on.
        let offset = safe.offset.checked_sub(length).map_or(0, |behind| theirs.saturating_add(behind).min(varint::MAX));
        let acknowledged = Progress { offset, is_whole: safe.is_whole };
        if self.gap.is_open() && has_room && safe.offset == self.have.offset && !self.is_behind {
            return Some((acknowledged, AckReason::Again));
        }
        if self.gap == Gap::Lost && !has_room {
            // The previous node must not count the lost bytes as in flight.
            return Some((acknowledged, AckReason::NoRoom));
        }
        let is_due = match self.ack {
            AckState::Due => true,
            // An acknowledgement of zero bytes is not sent.
            AckState::Unsent => acknowledged != Progress::default(),
            AckState::Sent(last) => acknowledged != last,
        };
        is_due.then_some((acknowledged, AckReason::Taken))
    }

    /// Handles an acknowledgement: acknowledged bytes are dropped here, all others may be sent again.
    pub(crate) fn set_held(&mut self, upto: Progress) {
        if std::mem::take(&mut self.is_behind) {
            // Bytes after a gap were dropped meanwhile.
            self.reset_gap();
        }
        if upto.offset < self.held.offset || self.held.is_whole {
            return;
        }
        if upto.offset > self.have.offset {
            // This node lost bytes that the next node received earlier. They are no longer needed.
            self.have.offset = upto.offset;
            self.have.is_whole |= upto.is_whole;
            self.sent = Progress { offset: upto.offset, is_whole: false };
            self.safe.offset = upto.offset;
            self.kept.clear();
            self.in_memory = 0;
            self.base = upto.offset;
            // Bytes after the gap were dropped, and their sender does not know that.
            self.reset_gap();
        }
        self.held =
            Progress { is_whole: upto.is_whole && self.have.is_whole && upto.offset == self.have.offset, ..upto };
        if self.sent.offset < upto.offset || self.held.is_whole {
            self.sent = self.held;
        }
        self.release();
    }

    /// Opens the gap, unless all bytes have arrived.
    fn reset_gap(&mut self) {
        if self.have.is_whole {
            self.gap = Gap::Closed;
        } else {
            self.gap.open();
        }
    }

    fn release(&mut self) {
        while let Some(first) = self.kept.front_mut() {
            let ahead = self.held.offset - self.base;
            if ahead == 0 {
                break;
            }
            if ahead < first.len() {
                match first {
                    // The slice still retains the whole chunk.
                    Chunk::Here(bytes) => {
                        let _ = bytes.split_to(ahead as usize);
                        self.in_memory -= ahead;
                    }
                    Chunk::Away(length) => *length -= ahead,
                }
                self.base += ahead;
                break;
            }
            self.base += first.len();
            if let Some(Chunk::Here(bytes)) = self.kept.pop_front() {
                self.in_memory -= bytes.len() as u64;
            }
        }
    }

    /// Whether the next node requests bytes that it had acknowledged and that this node has dropped.
    pub(crate) fn has_gone(&self, upto: u64, is_whole: bool) -> bool {
        upto < self.held.offset || (self.held.is_whole && !is_whole)
    }

    /// Handles a request to send again from the acknowledged offset: the bytes in flight after it were lost.
    pub(crate) fn rewind(&mut self) {
        (self.sent, self.waits) = (self.held, false);
    }

    /// Handles a refusal: the next node has no room for the bytes in flight, and will report when it has room again.
    pub(crate) fn wait(&mut self) {
        (self.sent, self.waits) = (self.held, true);
    }

    /// Prepares for a new channel to the previous node, over which acknowledgements are sent again.
    pub(crate) fn forget_acks(&mut self) {
        if matches!(self.ack, AckState::Sent(_)) {
            self.ack = AckState::Unsent;
        }
        if self.gap == Gap::Refused {
            self.gap = Gap::Lost;
        }
    }

    /// Works like [`StreamState::forget_acks`], and makes an acknowledgement due in any case.
    pub(crate) fn greet(&mut self) {
        self.forget_acks();
        self.ack = AckState::Due;
    }

    /// Returns the next item for the next node, with at most `most` bytes. `None`: nothing may be sent.
    pub(crate) fn send(&mut self, most: usize) -> Option<Next> {
        if !self.is_sendable() {
            return None;
        }
        let limit = self.limit();
        let at = self.sent.offset;
        let mut before = at - self.base;
        for chunk in &self.kept {
            if before >= chunk.len() {
                before -= chunk.len();
                continue;
            }
            let chunk = match chunk {
                Chunk::Here(chunk) => chunk,
                Chunk::Away(length) => {
                    return Some(Next::Away { offset: at, length: length - before });
                }
            };
            let start = before as usize;
            let most = most.min(usize::try_from(limit.offset.saturating_sub(at)).unwrap_or(usize::MAX));
            let bytes = chunk.slice(start..chunk.len().min(start.saturating_add(most)));
            self.sent.offset += bytes.len() as u64;
            let is_last = limit.is_whole && self.sent.offset == limit.offset;
            self.sent.is_whole = is_last;
            return Some(Next::Bytes { offset: at, bytes, is_last });
        }
        self.sent.is_whole = true;
        Some(Next::Bytes { offset: at, bytes: Bytes::new(), is_last: true })
    }

    /// Whether something may be sent.
    pub(crate) fn is_sendable(&self) -> bool {
        let limit = self.limit();
        let is_there = self.sent.offset < limit.offset || (limit.is_whole && !self.sent.is_whole);
        !self.awaits_head() && self.loading == 0 && !self.waits && is_there
    }

    /// Returns the offset up to which bytes may be sent.
    fn limit(&self) -> Progress {
        // A stream of one record arrives completely or not at all. The next node cannot receive a part of it that would
        // differ after a restart.
        let is_one = self.have.is_whole && self.base == 0 && self.kept.len() == 1 && self.have.offset <= RECORD;
        if self.safe.offset < self.first && !is_one { self.safe } else { self.have }
    }

    /// Returns the number of bytes in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.offset - self.held.offset
    }

    /// Returns the number of bytes stored, in memory or on disk.
    pub(crate) fn kept(&self) -> u64 {
        self.have.offset - self.base
    }

    /// Returns the number of bytes in memory. Unwritten bytes count even if the next node has acknowledged them,
    /// because they wait for the disk.
    pub(crate) fn in_memory(&self, is_written: bool) -> u64 {
        let unwritten = if is_written { self.base.saturating_sub(self.safe.offset) } else { 0 };
        self.in_memory + unwritten
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.offset
    }

    pub(crate) fn have(&self) -> Progress {
        self.have
    }

    pub(crate) fn held(&self) -> Progress {
        self.held
    }

    /// Whether the next node has acknowledged the whole stream.
    pub(crate) fn is_over(&self) -> bool {
        self.held.is_whole
    }
}
