//! Makes room for the journal on a full file system.
//!
//! In: segments, and their live entries. Out: fewer segments, not always the oldest first, because live entries move
//! elsewhere. Never: a loss of live entries, or of an end mark while an older segment has entries of the same exchange.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Weak;
use std::time::{Duration, Instant};

use hermes_net::lock::{allocate, available, open_own};

use super::super::journal_record::JournalRecord;
use super::{DISK_FULL_RETRY_INTERVAL, Files, Pending, Reader};

/// Sizes of the reserve file beside the segments, in bytes. Its space lets live entries move on a full file system. The
/// largest size that fits is used.
const RESERVES: [u64; 3] = [1 << 20, 256 << 10, 64 << 10];
const NAME: &str = "reserve";
/// Minimum of available space that is reported, in bytes, because no entry can move with less.
const LEAST: u64 = 256 << 10;
/// Available space, in bytes, below which the space is checked periodically.
const SCARCE_SPACE_BYTES: u64 = 1 << 30;
/// Interval of these checks, since other users of the file system may take or free space.
const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Whether the file system is full, or a quota is reached.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The last report of available space, and the segment at that time.
#[derive(Default)]
pub(super) struct Seen {
    last: Option<Option<u64>>,
    at: Option<Instant>,
    was_stuck: bool,
    there: u64,
}

impl Seen {
    /// Returns the interval of checks without a write. `None`: space is not scarce.
    pub(super) fn looks_again(&self) -> Option<Duration> {
        (self.there > 0 && self.there < SCARCE_SPACE_BYTES).then_some(SPACE_CHECK_INTERVAL)
    }
}

impl Pending {
    /// Whether to check again if a full disk has room. The interval limits these checks.
    pub(super) fn is_due(&self) -> bool {
        !self.is_stuck || self.looked.is_none_or(|looked| looked.elapsed() >= DISK_FULL_RETRY_INTERVAL)
    }
}

impl Files {
    /// Returns the number of bytes that custody may store: half of the free space and of the journal's own length, so
    /// that there is room to move live entries.
    fn there(&self) -> Option<u64> {
        let free = available(&self.directory).ok()?;
        let own: u64 = self.index.segments.iter().map(|segment| segment.length).sum();
        Some(((free + own) / 2).max(LEAST))
    }

    /// Handles a full disk. Returns whether to retry: first with small batches, in which ends and other entries without
    /// data go first, later only after room was made.
    pub(super) fn is_room_made(&mut self, pending: &mut Pending) -> bool {
        if !std::mem::replace(&mut pending.is_tight, true) {
            // The sort is stable, so that the entries of one stream keep their order.
            pending
                .notes
                .sort_by_key(|(_, note)| matches!(note, JournalRecord::Head { .. } | JournalRecord::Bytes { .. }));
            return true;
        }
        let is_made = pending.is_due() && self.squeeze();
        pending.is_tight &= !is_made;
        is_made
    }

    /// Reports the available space if it has changed: at each new segment, periodically, and while the disk is full.
    pub(super) fn report_space(&self, pending: &Pending, seen: &mut Seen, reader: &Weak<dyn Reader>) {
        let last = self.index.segments.back().map(|last| last.number);
        // A final check follows when the disk works again, because more space is available then.
        let was_stuck = std::mem::replace(&mut seen.was_stuck, pending.is_stuck);
        let is_old = seen.at.is_none_or(|at| at.elapsed() >= SPACE_CHECK_INTERVAL);
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

    /// Creates the reserve file, if it does not exist and there is room for it.
    pub(super) fn reserve(&mut self) {
        if self.has_reserve {
            return;
        }
        let path = self.directory.join(NAME);
        let mut options = OpenOptions::new();
        let opened = open_own(options.write(true).create(true).truncate(false).mode(0o600), &path);
        // Without a reserve, fewer entries can move, but nothing is lost.
        self.has_reserve = opened.is_ok_and(|file| RESERVES.iter().any(|bytes| allocate(&file, *bytes).is_ok()));
    }

    /// Moves the live entries of the segment with the fewest live bytes, and removes the segment. Returns whether that
    /// made room.
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
