//! A direction of an exchange: a byte stream that arrives from one side, is stored, and goes to the other.
//!
//! In: bytes at an offset, the offset that is durable, the offset that the next node has acknowledged. Out: bytes to
//! write, acknowledgements, bytes to send. The stream keeps exactly the bytes that the next node has not acknowledged:
//! in memory, or as a range on disk. Never: the identity of the exchange or of its sides.
//!
//! A node may replace the head that the previous node sent (`Via`, headers that a route rewrites). The bytes after the
//! head are the same. Offsets of stored, sent and written bytes count in this node's stream. Only acknowledgements to
//! the previous node, and its data, count in the previous node's stream.

mod disk;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use bytes::Bytes;
use hermes_wire::custody::Behind;
use hermes_wire::varint;

/// Chunks of at most `SMALL` bytes are merged once there are more than `FEW` chunks, because each chunk costs more than
/// its bytes.
const FEW: usize = 8;
const SMALL: usize = 4 << 10;

/// Maximum data of one record.
pub(crate) const RECORD: u64 = 16 << 10;

/// The progress of one direction of an exchange.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Upto {
    /// Bytes received so far.
    pub offset: u64,
    /// The last byte is among them.
    pub is_whole: bool,
}

/// Bytes that the next node has not acknowledged.
#[derive(Debug)]
enum Chunk {
    Here(Bytes),
    /// A range of this length that is on disk alone.
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
pub(crate) struct Half {
    /// Bytes that the next node has not acknowledged, from `base` on.
    kept: VecDeque<Chunk>,
    base: u64,
    in_memory: u64,
    head: Head,
    /// Bytes received.
    have: Upto,
    /// Bytes that are durable.
    safe: Upto,
    /// The last acknowledgement sent over the present channel, in the previous node's count.
    told: Option<Upto>,
    /// An acknowledgement must be sent even if it acknowledges nothing: the previous node learns from it whether the
    /// exchange is known.
    greets: bool,
    /// Bytes arrived without room for them, or after such bytes; the previous node must send them again.
    lacks: bool,
    /// The previous node has heard that there is no room.
    told_no_room: bool,
    /// The offset of the last request to send again.
    asked_again: Option<u64>,
    /// The next node may hold more than this process has, and has not reported its offset yet.
    is_behind: bool,
    /// Until this offset is durable, only durable bytes are sent. If this node restarts, it must not send another head.
    first: u64,
    /// Stored bytes from this offset on are still on disk.
    floor: u64,
    /// Number of pieces on disk, from `floor` on.
    pieces: u64,
    /// Bytes sent over the present channel.
    sent: Upto,
    /// Bytes that the next node has acknowledged.
    held: Upto,
    /// The next node has no room, and will report when it has.
    waits: bool,
    /// Length of the requested read from disk.
    loading: u64,
}

impl Default for Half {
    /// A stream whose bytes pass unchanged.
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            base: 0,
            in_memory: 0,
            head: Head::Settled { length: 0, theirs: 0 },
            have: Upto::default(),
            safe: Upto::default(),
            told: None,
            greets: false,
            lacks: false,
            told_no_room: false,
            asked_again: None,
            is_behind: false,
            first: 0,
            floor: 0,
            pieces: 0,
            sent: Upto::default(),
            held: Upto::default(),
            waits: false,
            loading: 0,
        }
    }
}

impl Half {
    /// Creates a stream whose head is replaced later, by [`Half::settle`].
    pub(crate) fn awaiting_head() -> Self {
        Self { head: Head::Awaited, ..Self::default() }
    }

    /// Length of the head that this node wrote.
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
            self.lacks |= !self.is_behind && self.asked_again != Some(self.have.offset);
            return None;
        };
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        if known > bytes.len() || (known == bytes.len() && !is_last) {
            return None;
        }
        let new = bytes.split_off(known);
        let at = self.have.offset;
        self.have = Upto { offset: at + new.len() as u64, is_whole: is_last };
        self.pieces += 1;
        self.keep(new.clone());
        Some((at, new))
    }

    fn keep(&mut self, mut bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        self.in_memory += bytes.len() as u64;
        if bytes.len() <= SMALL {
            // A slice of a large buffer would keep the whole buffer alive.
            bytes = Bytes::copy_from_slice(&bytes);
        }
        // Merging chunks of similar size copies each byte only a few times.
        while self.kept.len() >= FEW
            && let Some(Chunk::Here(last)) = self.kept.back()
            && last.len() <= 2 * bytes.len()
            && last.len() + bytes.len() <= SMALL
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
    pub(crate) fn send_what_is_safe(&mut self) {
        self.first = u64::MAX;
    }

    /// Records that bytes up to this offset are durable.
    pub(crate) fn set_safe(&mut self, upto: Upto) {
        if upto.offset >= self.safe.offset && upto.offset <= self.have.offset {
            self.safe = Upto { is_whole: upto.is_whole && self.have == upto, ..upto };
        }
    }

    /// Records that bytes arrived for which there was no room.
    pub(crate) fn refuse(&mut self) {
        self.lacks = true;
        self.asked_again = None;
    }

    /// Whether refused bytes must be requested again once there is room.
    pub(crate) fn is_lacking(&self) -> bool {
        self.lacks
    }

    /// Returns the next acknowledgement for the previous node, if it has not heard it yet, and whether the node must
    /// send the following bytes again. `is_read_again`: bytes that were read may be read again after a restart, so that
    /// only durable bytes count as stored.
    pub(crate) fn news(&mut self, has_room: bool, is_read_again: bool) -> Option<(Upto, Behind)> {
        let (said, behind) = self.to_say(has_room, is_read_again)?;
        self.told_no_room |= behind == Behind::NoRoom;
        if behind == Behind::Again {
            (self.lacks, self.told_no_room) = (false, false);
            self.asked_again = Some(self.have.offset);
        }
        self.told = Some(said);
        self.greets = false;
        Some((said, behind))
    }

    /// Whether [`Half::news`] would return an acknowledgement.
    pub(crate) fn has_news(&self, has_room: bool, is_read_again: bool) -> bool {
        self.to_say(has_room, is_read_again).is_some()
    }

    fn to_say(&self, has_room: bool, is_read_again: bool) -> Option<(Upto, Behind)> {
        let Head::Settled { length, theirs } = self.head else {
            // A refused sender begins again at offset zero.
            let behind = match (self.lacks, has_room) {
                (true, true) => Behind::Again,
                (true, false) if !self.told_no_room => Behind::NoRoom,
                _ => Behind::Taken,
            };
            return (self.greets || behind != Behind::Taken).then_some((Upto::default(), behind));
        };
        // Bytes that the next node has acknowledged count as durable.
        let is_held = !is_read_again && (self.held.offset > self.safe.offset || self.held.is_whole);
        let safe = if is_held { self.held } else { self.safe };
        // An impossible offset from a neighbour is not passed on.
        let offset = safe.offset.checked_sub(length).map_or(0, |behind| theirs.saturating_add(behind).min(varint::MAX));
        let said = Upto { offset, is_whole: safe.is_whole };
        if self.lacks && has_room && safe.offset == self.have.offset && !self.is_behind {
            return Some((said, Behind::Again));
        }
        if self.lacks && !has_room && !self.told_no_room {
            // The previous node must not count the lost bytes as in flight.
            return Some((said, Behind::NoRoom));
        }
        // An acknowledgement of nothing is no news.
        (self.greets || said != self.told.unwrap_or_default()).then_some((said, Behind::Taken))
    }

    /// Handles an acknowledgement: acknowledged bytes are dropped here, all others may be sent again.
    pub(crate) fn set_held(&mut self, upto: Upto) {
        if std::mem::take(&mut self.is_behind) {
            // Bytes after a gap were dropped meanwhile.
            self.lacks = !self.have.is_whole;
        }
        if upto.offset < self.held.offset || self.held.is_whole {
            return;
        }
        if upto.offset > self.have.offset {
            // This node lost bytes that the next node received earlier; nobody needs them any longer.
            self.have.offset = upto.offset;
            self.have.is_whole |= upto.is_whole;
            self.sent = Upto { offset: upto.offset, is_whole: false };
            self.safe.offset = upto.offset;
            self.kept.clear();
            self.in_memory = 0;
            self.base = upto.offset;
            // Bytes after the gap were dropped, and their sender does not know that.
            (self.lacks, self.asked_again) = (!self.have.is_whole, None);
        }
        self.held = Upto { is_whole: upto.is_whole && self.have.is_whole && upto.offset == self.have.offset, ..upto };
        if self.sent.offset < upto.offset || self.held.is_whole {
            self.sent = self.held;
        }
        self.release();
    }

    fn release(&mut self) {
        while let Some(first) = self.kept.front_mut() {
            let ahead = self.held.offset - self.base;
            if ahead == 0 {
                break;
            }
            if ahead < first.len() {
                match first {
                    // A slice keeps the whole chunk alive.
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

    /// Whether the next node asks for bytes that it had acknowledged and this node has dropped.
    pub(crate) fn has_gone(&self, upto: u64, is_whole: bool) -> bool {
        upto < self.held.offset || (self.held.is_whole && !is_whole)
    }

    /// Handles a request to send again from the acknowledged offset: the bytes in flight after it were lost.
    pub(crate) fn rewind(&mut self) {
        (self.sent, self.waits) = (self.held, false);
    }

    /// Handles a refusal: the next node has no room for the bytes in flight, and will report when it has.
    pub(crate) fn wait(&mut self) {
        (self.sent, self.waits) = (self.held, true);
    }

    /// Prepares for a new channel to the previous node.
    pub(crate) fn forget_told(&mut self) {
        (self.told, self.told_no_room) = (None, false);
    }

    /// Like [`Half::forget_told`], and sends an acknowledgement in any case.
    pub(crate) fn greet(&mut self) {
        self.forget_told();
        self.greets = true;
    }

    /// The next bytes for the next node, at most `most`.
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

    /// The offset up to which bytes may be sent.
    fn limit(&self) -> Upto {
        // A stream of one record arrives completely or not at all. The next node cannot receive a part of it that would
        // differ after a restart.
        let is_one = self.have.is_whole && self.base == 0 && self.kept.len() == 1 && self.have.offset <= RECORD;
        if self.safe.offset < self.first && !is_one { self.safe } else { self.have }
    }

    /// Bytes in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.offset - self.held.offset
    }

    /// Bytes stored, in memory or on disk.
    pub(crate) fn kept(&self) -> u64 {
        self.have.offset - self.base
    }

    /// Bytes in memory. Unwritten bytes count even if the next node has acknowledged them, because they wait for the
    /// disk.
    pub(crate) fn in_memory(&self, is_written: bool) -> u64 {
        let unwritten = if is_written { self.base.saturating_sub(self.safe.offset) } else { 0 };
        self.in_memory + unwritten
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.offset
    }

    pub(crate) fn have(&self) -> Upto {
        self.have
    }

    pub(crate) fn held(&self) -> Upto {
        self.held
    }

    /// Whether the next node has acknowledged the whole stream.
    pub(crate) fn is_over(&self) -> bool {
        self.held.is_whole
    }
}
