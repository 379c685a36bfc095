//! Room for the journal where its file system has none left.
//!
//! In: segments, and what in them is of use. Out: segments that are gone, whichever they were, since that stands elsewhere.
//! Never: a loss of what is of use, or of what says that an exchange is over while an older segment has entries of it.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Weak;
use std::time::{Duration, Instant};

use hermes_net::lock::{allocate, available, open_own};

use super::super::journal::Note;
use super::{AGAIN, Files, Pending, Reader};

/// Held beside the segments, so that there is room to move what is of use where there is none to write: as much of it as is
/// to be had.
const RESERVES: [u64; 3] = [1 << 20, 256 << 10, 64 << 10];
const NAME: &str = "reserve";
/// With less nothing moves at all.
const LEAST: u64 = 256 << 10;
/// With less it is looked at from time to time.
const SCARCE: u64 = 1 << 30;
/// What others have in the file system may have become less, or more.
const SEEN_AGAIN: Duration = Duration::from_secs(10);

/// The file system has no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// What was told last of the room that there is, and in which segment.
#[derive(Default)]
pub(super) struct Seen {
    last: Option<Option<u64>>,
    at: Option<Instant>,
    was_stuck: bool,
    there: u64,
}

impl Seen {
    /// After so long it is to be looked at again, though there is nothing to write: where there was little room.
    pub(super) fn looks_again(&self) -> Option<Duration> {
        (self.there > 0 && self.there < SCARCE).then_some(SEEN_AGAIN)
    }
}

impl Pending {
    /// It is not looked at oftener whether a full disk has room.
    pub(super) fn is_due(&self) -> bool {
        !self.is_stuck || self.looked.is_none_or(|looked| looked.elapsed() >= AGAIN)
    }
}

impl Files {
    /// Bytes that may be held: what is free, and what the journal has, so that there is room to move what is of use.
    fn there(&self) -> Option<u64> {
        let free = available(&self.directory).ok()?;
        let own: u64 = self.index.segments.iter().map(|segment| segment.length).sum();
        Some(((free + own) / 2).max(LEAST))
    }

    /// Where there is no room for a batch. Whether it is to be tried again: what says that something is over, or what it
    /// is, goes first, and a few at a time; or there is room by now.
    pub(super) fn is_room_made(&mut self, pending: &mut Pending) -> bool {
        if !std::mem::replace(&mut pending.is_tight, true) {
            // Of one string the order stays as it is.
            pending.notes.sort_by_key(|(_, note)| matches!(note, Note::Head { .. } | Note::Bytes { .. }));
            return true;
        }
        let is_made = pending.is_due() && self.squeeze();
        pending.is_tight &= !is_made;
        is_made
    }

    /// Tells how much there is, where that has changed: a segment further, or when there is none.
    pub(super) fn look(&self, pending: &Pending, seen: &mut Seen, reader: &Weak<dyn Reader>) {
        let last = self.index.segments.back().map(|last| last.number);
        // Once more when it goes on: then there is the more.
        let was_stuck = std::mem::replace(&mut seen.was_stuck, pending.is_stuck);
        let is_old = seen.at.is_none_or(|at| at.elapsed() >= SEEN_AGAIN);
        if !pending.is_stuck && !was_stuck && !is_old && seen.last == Some(last) {
            return;
        }
        seen.at = Some(Instant::now());
        let Some(there) = self.there() else { return };
        seen.last = Some(last);
        if there.abs_diff(seen.there) > seen.there / 8 {
            seen.there = there;
            reader.upgrade().inspect(|reader| reader.is_there(there));
        }
    }

    /// Holds room, if it is not held yet and there is any.
    pub(super) fn reserve(&mut self) {
        if self.has_reserve {
            return;
        }
        let path = self.directory.join(NAME);
        let mut options = OpenOptions::new();
        let opened = open_own(options.write(true).create(true).truncate(false).mode(0o600), &path);
        // Without it less can be moved, and nothing is lost.
        self.has_reserve = opened.is_ok_and(|file| RESERVES.iter().any(|bytes| allocate(&file, *bytes).is_ok()));
    }

    /// Moves what is of use out of the segment that is of least, and removes it. Whether that made room.
    pub(super) fn squeeze(&mut self) -> bool {
        let Some(number) = self.index.least() else { return false };
        let _ = fs::remove_file(self.directory.join(NAME));
        self.has_reserve = false;
        let is_last = self.index.segments.back().is_some_and(|last| last.number == number);
        let is_moved = (!is_last || self.roll().is_ok()) && self.move_on(number).is_ok();
        let has_room = is_moved && self.remove(number);
        self.reserve();
        has_room
    }
}
