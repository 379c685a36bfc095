//! One direction of an exchange: bytes that come from one side, are held, and go to the other.
//!
//! In: bytes at an offset, what of them is safe, what the next one holds. Out: bytes to be written, to be told of, to be
//! sent. Holds what the next one does not, and nothing else. Never: which exchange it is, or who is on either side.

use std::collections::VecDeque;

use bytes::Bytes;

/// How far a string of bytes has come: so many of them, and whether its end is known to be there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Upto {
    pub(crate) offset: u64,
    pub(crate) is_whole: bool,
}

/// One direction of an exchange.
#[derive(Debug, Default)]
pub(crate) struct Half {
    /// What the next one does not hold yet, from `base` on.
    kept: VecDeque<Bytes>,
    base: u64,
    /// What has come.
    have: Upto,
    /// What of it survives us.
    safe: Upto,
    /// What the one before has heard of that, over the channel that is there.
    told: Option<Upto>,
    /// Bytes came for which there was no room, or behind such: they are to be sent again.
    lacks: bool,
    /// From where that was asked for last.
    asked_again: Option<u64>,
    /// What went out over the channel that is there.
    sent: Upto,
    /// What the next one holds.
    held: Upto,
}

impl Half {
    /// Bytes have come that stand there. Those that are new, and where they begin; `None`: there is a gap before them,
    /// or there is nothing new.
    pub(crate) fn take(&mut self, offset: u64, mut bytes: Bytes, is_last: bool) -> Option<(u64, Bytes)> {
        if self.have.is_whole {
            return None;
        }
        let Some(known) = self.have.offset.checked_sub(offset) else {
            // What is under way behind those that were lost comes too; it is asked for once.
            self.lacks |= self.asked_again != Some(self.have.offset);
            return None;
        };
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        if known > bytes.len() || (known == bytes.len() && !is_last) {
            return None;
        }
        let new = bytes.split_off(known);
        let at = self.have.offset;
        self.have = Upto { offset: at + new.len() as u64, is_whole: is_last };
        if !new.is_empty() {
            self.kept.push_back(new.clone());
        }
        Some((at, new))
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

    /// What the one before is to be told, if it has not heard that yet; and whether it is to send again what comes behind
    /// that, for which there is room by now.
    pub(crate) fn news(&mut self, has_room: bool) -> Option<(Upto, bool)> {
        // What the next one holds is safe too.
        let safe = if self.held.offset > self.safe.offset || self.held.is_whole { self.held } else { self.safe };
        if self.lacks && has_room && safe.offset == self.have.offset {
            self.lacks = false;
            self.asked_again = Some(self.have.offset);
            self.told = Some(safe);
            return Some((safe, true));
        }
        // Who knows of none of it is told nothing new by that.
        let told = self.told.unwrap_or_default();
        if safe == told {
            return None;
        }
        self.told = Some(safe);
        Some((safe, false))
    }

    /// The next one holds so much. What that is no longer needed here; what it has not is sent again.
    pub(crate) fn set_held(&mut self, upto: Upto) {
        // Who has lost what it answered for cannot be helped.
        if upto.offset < self.held.offset || self.held.is_whole {
            return;
        }
        if upto.offset > self.have.offset {
            // We have lost what the next one got of us before, and nobody needs it any more.
            self.have.offset = upto.offset;
            self.have.is_whole |= upto.is_whole;
            self.sent = Upto { offset: upto.offset, is_whole: false };
            self.kept.clear();
            self.base = upto.offset;
        }
        self.held = Upto { is_whole: upto.is_whole && self.have.is_whole && upto.offset == self.have.offset, ..upto };
        if self.sent.offset < upto.offset || self.held.is_whole {
            self.sent = self.held;
        }
        while let Some(first) = self.kept.front_mut() {
            let ahead = self.held.offset - self.base;
            if ahead >= first.len() as u64 {
                self.base += first.len() as u64;
                self.kept.pop_front();
            } else {
                // A part of a chunk keeps all of it.
                let _ = first.split_to(ahead as usize);
                self.base += ahead;
                break;
            }
        }
    }

    /// The next one says that it is where it was: what is under way behind that was lost.
    pub(crate) fn rewind(&mut self) {
        self.sent = self.held;
    }

    /// There is another channel to the one before.
    pub(crate) fn forget_told(&mut self) {
        self.told = None;
    }

    /// The next bytes for the next one, at most so many. An empty chunk says that the end is there.
    pub(crate) fn send(&mut self, most: usize) -> Option<(u64, Bytes, bool)> {
        let at = self.sent.offset;
        let mut before = at - self.base;
        for chunk in &self.kept {
            if before >= chunk.len() as u64 {
                before -= chunk.len() as u64;
                continue;
            }
            let start = before as usize;
            let bytes = chunk.slice(start..chunk.len().min(start + most));
            self.sent.offset += bytes.len() as u64;
            let is_last = self.have.is_whole && self.sent.offset == self.have.offset;
            self.sent.is_whole = is_last;
            return Some((at, bytes, is_last));
        }
        let has_end = self.have.is_whole && !self.sent.is_whole;
        has_end.then(|| {
            self.sent.is_whole = true;
            (at, Bytes::new(), true)
        })
    }

    /// There is something to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent.offset < self.have.offset || (self.have.is_whole && !self.sent.is_whole)
    }

    /// Bytes under way.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.offset - self.held.offset
    }

    /// Bytes kept here.
    pub(crate) fn kept(&self) -> u64 {
        self.have.offset - self.base
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

#[cfg(test)]
mod tests {
    use super::*;

    fn upto(offset: u64, is_whole: bool) -> Upto {
        Upto { offset, is_whole }
    }

    fn bytes(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn what_comes_twice_is_taken_once_and_behind_a_gap_nothing() {
        let mut half = Half::default();
        assert_eq!(half.take(0, bytes("hello"), false), Some((0, bytes("hello"))));
        assert_eq!(half.take(0, bytes("hello"), false), None);
        assert_eq!(half.take(7, bytes("x"), false), None);
        assert_eq!(half.take(3, bytes("lo, you"), false), Some((5, bytes(", you"))));
        assert_eq!(half.take(10, bytes(""), true), Some((10, bytes(""))));
        assert_eq!(half.take(10, bytes("more"), true), None);
        assert_eq!(half.have(), upto(10, true));
    }

    #[test]
    fn nothing_is_told_before_it_is_safe() {
        let mut half = Half::default();
        half.take(0, bytes("hello"), true);
        assert_eq!(half.news(true), None);
        half.set_safe(upto(3, false));
        assert_eq!(half.news(true), Some((upto(3, false), false)));
        half.set_safe(upto(5, true));
        assert_eq!(half.news(true), Some((upto(5, true), false)));
        assert_eq!(half.news(true), None);
        half.forget_told();
        assert_eq!(half.news(true), Some((upto(5, true), false)));
        // Or by the next one's custody.
        let mut half = Half::default();
        half.take(0, bytes("hello"), true);
        half.send(100);
        half.set_held(upto(5, true));
        assert_eq!(half.news(true), Some((upto(5, true), false)));
    }

    #[test]
    fn it_is_sent_in_pieces_and_again_from_where_the_next_one_holds_it() {
        let mut half = Half::default();
        half.take(0, bytes("hello"), false);
        half.take(5, bytes("world"), true);
        assert_eq!(half.send(3), Some((0, bytes("hel"), false)));
        assert_eq!(half.send(100), Some((3, bytes("lo"), false)));
        assert_eq!(half.send(100), Some((5, bytes("world"), true)));
        assert_eq!((half.send(100), half.in_flight()), (None, 10));
        half.set_held(upto(4, false));
        assert_eq!((half.in_flight(), half.kept()), (6, 6));
        half.rewind();
        assert_eq!(half.send(100), Some((4, bytes("o"), false)));
        assert_eq!(half.send(100), Some((5, bytes("world"), true)));
        // Older words than the last.
        half.set_held(upto(1, false));
        assert_eq!(half.held(), upto(4, false));
        half.set_held(upto(10, true));
        assert!(half.is_over() && half.kept() == 0 && !half.has_unsent());
    }

    #[test]
    fn what_the_next_one_holds_need_not_come_again() {
        let mut half = Half::default();
        half.take(0, bytes("hel"), false);
        half.set_held(upto(5, false));
        assert_eq!((half.kept(), half.have(), half.news(true)), (0, upto(5, false), Some((upto(5, false), false))));
        assert_eq!(half.take(5, bytes("!"), true), Some((5, bytes("!"))));
        assert_eq!(half.send(9), Some((5, bytes("!"), true)));
    }

    #[test]
    fn what_there_was_no_room_for_is_asked_for_once_there_is() {
        let mut half = Half::default();
        half.take(0, bytes("hel"), false);
        half.set_safe(upto(3, false));
        half.refuse();
        assert_eq!(half.take(5, bytes("!"), true), None);
        assert_eq!(half.news(false), Some((upto(3, false), false)));
        assert_eq!(half.news(false), None);
        assert_eq!(half.news(true), Some((upto(3, false), true)));
        // More that was under way.
        assert_eq!(half.take(5, bytes("!"), true), None);
        assert_eq!(half.news(true), None);
        assert_eq!(half.take(3, bytes("lo!"), true), Some((3, bytes("lo!"))));
    }

    #[test]
    fn an_end_that_comes_alone_is_sent_alone() {
        let mut half = Half::default();
        half.take(0, bytes("x"), false);
        assert_eq!(half.send(9), Some((0, bytes("x"), false)));
        half.take(1, bytes(""), true);
        assert_eq!(half.send(9), Some((1, bytes(""), true)));
        assert_eq!(half.send(9), None);
        half.set_held(upto(1, false));
        half.rewind();
        assert_eq!(half.send(9), Some((1, bytes(""), true)));
    }
}
