//! Bytes of a stream on disk: restored after a restart, evicted from memory, and deleted.
//!
//! In: positions of written chunks, and bytes read back. Out: ranges to read, and ranges that are no longer needed.

use bytes::Bytes;

use super::{Chunk, Gap, Head, Progress, StreamState};

impl StreamState {
    /// Restores a head that replaced `theirs` bytes. [`StreamState::restore`] adds the chunks after it in ascending
    /// order. A chunk after a gap shows that the next node had acknowledged everything before it.
    pub(crate) fn restore_head(&mut self, theirs: u64, length: u64) {
        self.head = Head::Settled { length, theirs };
        self.restore(Progress { offset: 0, is_whole: false }, length);
    }

    /// Restores a written chunk after [`StreamState::restore_head`].
    pub(crate) fn restore(&mut self, at: Progress, length: u64) {
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
        self.have = Progress { offset: end.max(self.have.offset), is_whole: at.is_whole || self.have.is_whole };
        self.safe = self.have;
        self.sent = Progress { offset: self.base, is_whole: false };
        self.held = self.sent;
    }

    /// Prepares a restored stream. The next node may have received more than the journal has, so nothing is requested
    /// until it reports its offset. A local endpoint has received nothing more, so the rest is requested at once.
    pub(crate) fn resume(&mut self, is_next_here: bool) {
        self.is_behind = !is_next_here;
        if is_next_here {
            self.reset_gap();
        } else {
            self.gap = Gap::Closed;
        }
    }

    /// Returns the number of bytes on disk that the next node has acknowledged. If `is_read_again` is false,
    /// acknowledged bytes that are not written yet count, too.
    pub(crate) fn spare(&self, is_read_again: bool) -> u64 {
        self.may_go(is_read_again).saturating_sub(self.floor)
    }

    /// Returns the offset below which no byte is needed. Bytes that a local endpoint has read are needed until they are
    /// written, because only then may they be acknowledged to the previous node.
    fn may_go(&self, is_read_again: bool) -> u64 {
        if is_read_again { self.base.min(self.safe.offset) } else { self.base }
    }

    /// Returns the number of bytes that a deletion would save, with the overhead of the written chunks.
    pub(crate) fn costs(&self) -> u64 {
        self.spare(false) + self.pieces * 128
    }

    /// Marks unneeded bytes as deleted, and returns the offset below which they are.
    pub(crate) fn release_disk(&mut self, is_read_again: bool) -> u64 {
        let upto = self.may_go(is_read_again).max(self.floor);
        let (written, left) = (self.have.offset - self.floor, self.have.offset - upto);
        // The number is an estimate, because the lengths of the chunks are not known here.
        self.pieces = (self.pieces * left).div_ceil(written.max(1));
        self.floor = upto;
        self.floor
    }

    /// Whether the beginning of the stream was deleted, so that nobody can read it from the start.
    pub(crate) fn is_torn(&self) -> bool {
        self.floor > 0
    }

    /// Returns the number of written chunks on disk.
    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Restarts reading at offset zero for a local endpoint. Returns false if bytes that were read were deleted.
    pub(crate) fn reopen(&mut self, is_on_disk: bool) -> bool {
        if self.base > 0 {
            if !is_on_disk || self.is_torn() {
                return false;
            }
            self.kept.push_front(Chunk::Away(self.base));
            self.base = 0;
        }
        self.held = Progress::default();
        self.sent = Progress::default();
        true
    }

    /// Records a requested read.
    pub(crate) fn request_read(&mut self, length: u64) {
        self.loading = length;
    }

    /// Returns the length of the requested read, in bytes.
    pub(crate) fn loading(&self) -> u64 {
        self.loading
    }

    /// Puts bytes that were read from disk back into memory.
    pub(crate) fn load(&mut self, offset: u64, mut bytes: Bytes) {
        self.loading = 0;
        let mut begin = self.base;
        for index in 0..self.kept.len() {
            let end = begin + self.kept[index].len();
            if offset.max(self.base) < end {
                let Chunk::Away(length) = self.kept[index] else { return };
                // The next node may have acknowledged some of these bytes meanwhile.
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

    /// Evicts bytes from memory that are durable and not about to be sent.
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
