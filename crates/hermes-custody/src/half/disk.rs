//! What of a half is on disk: as it was before this process, what need not be in memory, and what need not be there.
//!
//! In: where pieces stand, what was read again. Out: what is to be read, and what nobody needs any more.

use bytes::Bytes;

use super::{Chunk, Half, Head, Upto};

impl Half {
    /// As it was before this process: a head in the place of so many bytes of the one before, and what followed, all of it
    /// on disk. Entries come in their order; one behind a gap says that the next one had all before.
    pub(crate) fn restore_head(&mut self, theirs: u64, length: u64) {
        self.head = Head::Settled { length, theirs };
        self.restore(Upto { offset: 0, is_whole: false }, length);
    }

    /// See [`Half::restore_head`].
    pub(crate) fn restore(&mut self, at: Upto, length: u64) {
        if at.offset > self.have.offset {
            self.kept.clear();
            (self.base, self.floor) = (at.offset, at.offset);
        }
        self.pieces += 1;
        let end = at.offset + length;
        let new = end.saturating_sub(self.have.offset.max(self.base));
        match self.kept.back_mut() {
            Some(Chunk::Away(before)) => *before += new,
            _ if new > 0 => self.kept.push_back(Chunk::Away(new)),
            _ => {}
        }
        self.have = Upto { offset: end.max(self.have.offset), is_whole: at.is_whole || self.have.is_whole };
        self.safe = self.have;
        self.sent = Upto { offset: self.base, is_whole: false };
        self.held = self.sent;
    }

    /// That much was found after a restart. A next node may hold more: before it has said how much, nobody is asked for what
    /// follows. Who is here has nothing that is not found, and asks for the rest at once.
    pub(crate) fn resume(&mut self, is_next_here: bool) {
        self.is_behind = !is_next_here;
        self.lacks = is_next_here && !self.have.is_whole;
    }

    /// Bytes that the next one holds, and that are on disk nevertheless; or are to be, where `is_read_again` is false.
    pub(crate) fn spare(&self, is_read_again: bool) -> u64 {
        self.may_go(is_read_again).saturating_sub(self.floor)
    }

    /// Up to there none of it is needed. What was read here is no more than that before it is written: the one before must
    /// not be told that it is held.
    fn may_go(&self, is_read_again: bool) -> u64 {
        if is_read_again { self.base.min(self.safe.offset) } else { self.base }
    }

    /// What it would save to let them go: bytes, and what pieces cost beside.
    pub(crate) fn costs(&self) -> u64 {
        self.spare(false) + self.pieces * 128
    }

    /// They are not on disk any more, up to where that says.
    pub(crate) fn let_go(&mut self, is_read_again: bool) -> u64 {
        let upto = self.may_go(is_read_again).max(self.floor);
        let (written, left) = (self.have.offset - self.floor, self.have.offset - upto);
        // About as many as there are: their lengths are not known here.
        self.pieces = (self.pieces * left).div_ceil(written.max(1));
        self.floor = upto;
        self.floor
    }

    /// What came before is gone, and nobody can be given it from its beginning.
    pub(crate) fn is_torn(&self) -> bool {
        self.floor > 0
    }

    /// Pieces that it is written in.
    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Who is here begins to read it anew, where what was read is on disk or was not let go. False where it is gone.
    pub(crate) fn reopen(&mut self, is_on_disk: bool) -> bool {
        if self.base > 0 {
            if !is_on_disk || self.is_torn() {
                return false;
            }
            self.kept.push_front(Chunk::Away(self.base));
            self.base = 0;
        }
        self.held = Upto::default();
        self.sent = Upto::default();
        true
    }

    /// So many bytes that are away were asked for.
    pub(crate) fn ask(&mut self, length: u64) {
        self.loading = length;
    }

    /// Bytes that were asked for.
    pub(crate) fn loading(&self) -> u64 {
        self.loading
    }

    /// What was away stands there again.
    pub(crate) fn load(&mut self, offset: u64, mut bytes: Bytes) {
        self.loading = 0;
        let mut begin = self.base;
        for index in 0..self.kept.len() {
            let end = begin + self.kept[index].len();
            if offset.max(self.base) < end {
                let Chunk::Away(length) = self.kept[index] else { return };
                // Some of it may be the next one's meanwhile.
                let over = usize::try_from(begin.saturating_sub(offset)).unwrap_or(usize::MAX).min(bytes.len());
                let mut bytes = bytes.split_off(over);
                let before = offset.saturating_sub(begin);
                bytes.truncate(usize::try_from(length - before).unwrap_or(usize::MAX));
                let behind = length - before - bytes.len() as u64;
                self.in_memory += bytes.len() as u64;
                let put = [Chunk::Away(before), Chunk::Here(bytes), Chunk::Away(behind)];
                self.kept.remove(index);
                for chunk in put.into_iter().rev().filter(|chunk| chunk.len() > 0) {
                    self.kept.insert(index, chunk);
                }
                return;
            }
            begin = end;
        }
    }

    /// What is safe, and not about to be sent, need not be in memory.
    pub(crate) fn evict(&mut self) {
        let mut end = self.base + self.kept.iter().map(Chunk::len).sum::<u64>();
        let mut away = 0;
        let mut index = self.kept.len();
        while index > 0 {
            let begin = end - self.kept[index - 1].len();
            if begin < self.sent.offset {
                break;
            }
            let is_safe = end <= self.safe.offset;
            if let (Chunk::Here(bytes), true) = (&self.kept[index - 1], is_safe) {
                self.in_memory -= bytes.len() as u64;
                self.kept[index - 1] = Chunk::Away(end - begin);
            }
            if let Chunk::Away(length) = self.kept[index - 1] {
                if away > 0 {
                    self.kept.remove(index);
                    self.kept[index - 1] = Chunk::Away(length + away);
                }
                away += length;
            } else {
                away = 0;
            }
            end = begin;
            index -= 1;
        }
    }
}
