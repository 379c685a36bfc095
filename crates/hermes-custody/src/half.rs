//! One direction of an exchange: bytes that come from one side, are held, and go to the other.
//!
//! In: bytes at an offset, what of them is safe, what the next one holds. Out: bytes to be written, to be told of, to be
//! sent. Holds what the next one does not, and nothing else: in memory, or as a place that is on disk. Never: which
//! exchange it is, or who is on either side.
//!
//! A node may have another head than the one before gave it (`Via`, what a route rewrites). Behind the head the bytes are
//! the same: what is held, sent and written counts from the beginning of our string, and only what is said to the one
//! before, and by it, from the beginning of its own.

mod disk;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use bytes::Bytes;
use hermes_wire::custody::Behind;
use hermes_wire::varint;

/// Of more chunks than these, those that are not longer are put together: each of them costs more than its bytes.
const FEW: usize = 8;
const SMALL: usize = 4 << 10;

/// A record carries so many bytes.
pub(crate) const RECORD: u64 = 16 << 10;

/// The progress of one direction of an exchange.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Upto {
    /// Bytes received so far.
    pub offset: u64,
    /// The last byte is among them.
    pub is_whole: bool,
}

/// Bytes that the next one does not hold.
#[derive(Debug)]
enum Chunk {
    Here(Bytes),
    /// So many of them are on disk alone.
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

/// What stands at the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Head {
    /// It is being read: what will stand there is not known yet.
    Awaited,
    /// So many bytes of ours, where the one before had so many of its own.
    Settled { length: u64, theirs: u64 },
}

/// What may be sent next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// These bytes, which stand there. An empty chunk says that the end is there.
    Bytes { offset: u64, bytes: Bytes, is_last: bool },
    /// What stands there is on disk, so many bytes of it.
    Away { offset: u64, length: u64 },
}

/// One direction of an exchange.
#[derive(Debug)]
pub(crate) struct Half {
    /// What the next one does not hold yet, from `base` on.
    kept: VecDeque<Chunk>,
    base: u64,
    in_memory: u64,
    head: Head,
    /// What has come.
    have: Upto,
    /// What of it survives us.
    safe: Upto,
    /// What the one before has heard of that, over the channel that is there; in its count.
    told: Option<Upto>,
    /// It is to hear even that there is nothing: who knows of no such exchange says so.
    greets: bool,
    /// Bytes came for which there was no room, or behind such: they are to be sent again.
    lacks: bool,
    /// The one before knows that.
    told_no_room: bool,
    /// From where that was asked for last.
    asked_again: Option<u64>,
    /// The next one may hold more of it than there is here, and has not said so to this process.
    is_behind: bool,
    /// Before so much is safe nothing goes out that is not: who begins anew behind us must find the same head.
    first: u64,
    /// From there on it is on disk still.
    floor: u64,
    /// Pieces that it is written in, from there on.
    pieces: u64,
    /// What went out over the channel that is there.
    sent: Upto,
    /// What the next one holds.
    held: Upto,
    /// It has no room for more, and will say when it has.
    waits: bool,
    /// So many bytes that are on disk were asked for.
    loading: u64,
}

impl Default for Half {
    /// Its bytes are passed on as they come.
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
    /// One whose head is read first, by [`Half::settle`].
    pub(crate) fn awaiting_head() -> Self {
        Self { head: Head::Awaited, ..Self::default() }
    }

    /// Bytes of a head of ours.
    pub(crate) fn head_length(&self) -> u64 {
        match self.head {
            Head::Awaited => 0,
            Head::Settled { length, .. } => length,
        }
    }

    /// Whether its head is not known yet.
    pub(crate) fn awaits_head(&self) -> bool {
        self.head == Head::Awaited
    }

    /// Bytes have come that stand there, in the count of whoever sent them. Those that are new, and where they begin;
    /// `None`: there is a gap before them, or there is nothing new.
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
            // What is under way behind those that were lost comes too; it is asked for once.
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
            // Part of a large buffer would keep all of it.
            bytes = Bytes::copy_from_slice(&bytes);
        }
        // Like with like, so that no byte is copied often.
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

    /// Where the one before had so many bytes of a head, this one stands. What came behind is returned: it is to be
    /// written, behind the head.
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

    /// Nothing is sent that is not safe: of what goes out once, all is known after a restart too.
    pub(crate) fn send_what_is_safe(&mut self) {
        self.first = u64::MAX;
    }

    /// So much of it survives us.
    pub(crate) fn set_safe(&mut self, upto: Upto) {
        if upto.offset >= self.safe.offset && upto.offset <= self.have.offset {
            self.safe = Upto { is_whole: upto.is_whole && self.have == upto, ..upto };
        }
    }

    /// Bytes came for which there is no room.
    pub(crate) fn refuse(&mut self) {
        self.lacks = true;
        self.asked_again = None;
    }

    /// What was refused is to be asked for, once there is room.
    pub(crate) fn is_lacking(&self) -> bool {
        self.lacks
    }

    /// What the one before is to be told, if it has not heard that yet; and whether it is to send again what comes behind
    /// that, for which there is room by now. `is_read_again`: what was read of it may have to be read after a restart too,
    /// so that nobody but the disk holds it.
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

    /// Whether [`Half::news`] has any.
    pub(crate) fn has_news(&self, has_room: bool, is_read_again: bool) -> bool {
        self.to_say(has_room, is_read_again).is_some()
    }

    fn to_say(&self, has_room: bool, is_read_again: bool) -> Option<(Upto, Behind)> {
        let Head::Settled { length, theirs } = self.head else {
            // Whoever was refused begins anew.
            let behind = match (self.lacks, has_room) {
                (true, true) => Behind::Again,
                (true, false) if !self.told_no_room => Behind::NoRoom,
                _ => Behind::Taken,
            };
            return (self.greets || behind != Behind::Taken).then_some((Upto::default(), behind));
        };
        // What the next one holds is safe too.
        let is_held = !is_read_again && (self.held.offset > self.safe.offset || self.held.is_whole);
        let safe = if is_held { self.held } else { self.safe };
        // Whoever says that it holds more than there can be is not passed on.
        let offset = safe.offset.checked_sub(length).map_or(0, |behind| theirs.saturating_add(behind).min(varint::MAX));
        let said = Upto { offset, is_whole: safe.is_whole };
        if self.lacks && has_room && safe.offset == self.have.offset && !self.is_behind {
            return Some((said, Behind::Again));
        }
        if self.lacks && !has_room && !self.told_no_room {
            // What was lost is not to be waited for as if it were under way.
            return Some((said, Behind::NoRoom));
        }
        // Who knows of none of it is told nothing new by that.
        (self.greets || said != self.told.unwrap_or_default()).then_some((said, Behind::Taken))
    }

    /// The next one holds so much. What that is no longer needed here; what it has not is sent again.
    pub(crate) fn set_held(&mut self, upto: Upto) {
        if std::mem::take(&mut self.is_behind) {
            // What came behind a gap meanwhile was dropped.
            self.lacks = !self.have.is_whole;
        }
        if upto.offset < self.held.offset || self.held.is_whole {
            return;
        }
        if upto.offset > self.have.offset {
            // We have lost what the next one got of us before, and nobody needs it any more.
            self.have.offset = upto.offset;
            self.have.is_whole |= upto.is_whole;
            self.sent = Upto { offset: upto.offset, is_whole: false };
            self.safe.offset = upto.offset;
            self.kept.clear();
            self.in_memory = 0;
            self.base = upto.offset;
            // What came behind the gap was dropped, and whoever sent it does not know that.
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
                    // A part of a chunk keeps all of it.
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

    /// The next one asks for what it has let us forget.
    pub(crate) fn has_gone(&self, upto: u64, is_whole: bool) -> bool {
        upto < self.held.offset || (self.held.is_whole && !is_whole)
    }

    /// The next one says that it is where it was: what is under way behind that was lost.
    pub(crate) fn rewind(&mut self) {
        (self.sent, self.waits) = (self.held, false);
    }

    /// The next one has no room for what is under way behind that, and will say when it has.
    pub(crate) fn wait(&mut self) {
        (self.sent, self.waits) = (self.held, true);
    }

    /// There is another channel to the one before.
    pub(crate) fn forget_told(&mut self) {
        (self.told, self.told_no_room) = (None, false);
    }

    /// The same, and it hears of it in any case.
    pub(crate) fn greet(&mut self) {
        self.forget_told();
        self.greets = true;
    }

    /// The next bytes for the next one, at most so many.
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

    /// There is something that may be sent.
    pub(crate) fn is_sendable(&self) -> bool {
        let limit = self.limit();
        let is_there = self.sent.offset < limit.offset || (limit.is_whole && !self.sent.is_whole);
        !self.awaits_head() && self.loading == 0 && !self.waits && is_there
    }

    /// What may be sent.
    fn limit(&self) -> Upto {
        // What is one record is there as a whole or not at all: nobody can have a part of it that would differ later.
        let is_one = self.have.is_whole && self.base == 0 && self.kept.len() == 1 && self.have.offset <= RECORD;
        if self.safe.offset < self.first && !is_one { self.safe } else { self.have }
    }

    /// Bytes under way.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.offset - self.held.offset
    }

    /// Bytes kept here, wherever.
    pub(crate) fn kept(&self) -> u64 {
        self.have.offset - self.base
    }

    /// Bytes in memory. Where they are written, those that are not yet are, though the next one may hold them.
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

    /// All of it is the next one's.
    pub(crate) fn is_over(&self) -> bool {
        self.held.is_whole
    }
}
