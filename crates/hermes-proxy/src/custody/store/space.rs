//! Room for the journal where its file system has none left.
//!
//! In: segments, and what in them is of use. Out: segments that are gone, whichever they were, since that stands elsewhere.
//! Never: a loss of what is of use, or of what says that an exchange is over while an older segment has entries of it.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;

use hermes_net::lock::{allocate, open_own};

use super::Files;

/// Held beside the segments, so that there is room to move what is of use where there is none to write: as much of it as is
/// to be had.
const RESERVES: [u64; 3] = [1 << 20, 256 << 10, 64 << 10];
const NAME: &str = "reserve";

/// The file system has no room.
pub(in crate::custody) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Files {
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
