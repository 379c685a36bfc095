//! The segments of a journal, as they are found or made.
//!
//! In: a directory. Out: its entries in the index, and whether all of them could be read. What stands behind something that
//! cannot be is left out: nobody knows where its records begin.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};

use super::super::journal;
use super::{Files, Segment};

impl Files {
    /// What is there is in the index from now on. Whether something of it is damaged.
    pub(super) fn read_all(&mut self) -> io::Result<bool> {
        let mut numbers: Vec<u64> = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            numbers.extend(name.to_str().and_then(|name| name.strip_suffix(".log")?.parse::<u64>().ok()));
        }
        numbers.sort_unstable();
        let (last, mut is_damaged) = (numbers.last().copied(), false);
        for number in numbers {
            let mut segment = self.segment(number, false)?;
            let mut bytes = Vec::new();
            (&*segment.file).read_to_end(&mut bytes)?;
            let whole = bytes.len() as u64;
            let mut rest = Bytes::from(bytes);
            while let Some(found) = journal::first(&rest) {
                let at = segment.length + found.at as u64;
                self.index.add(found.id, &found.note, number, at, found.length as u64);
                segment.length += found.length as u64;
                rest.advance(found.length);
            }
            if segment.length < whole {
                // A process that is killed as it writes leaves a beginning at the end of the last one; a loss of power, room
                // that nothing was written to.
                let is_unfinished = journal::is_unfinished(&rest) || rest.iter().all(|byte| *byte == 0);
                let is_cut = Some(number) == last && is_unfinished;
                let (path, left_out) = (segment.path.display(), whole - segment.length);
                if is_cut {
                    tracing::warn!(%path, left_out, "a journal of custody ended within a record");
                } else {
                    is_damaged = true;
                    tracing::error!(%path, left_out, "a journal of custody is damaged: look at the disk; what followed is left out");
                }
                segment.file.set_len(segment.length)?;
            }
            self.index.segments.push_back(segment);
        }
        self.tidy();
        Ok(is_damaged)
    }

    pub(super) fn segment(&self, number: u64, is_new: bool) -> io::Result<Segment> {
        let path = self.directory.join(format!("{number:012}.log"));
        let file = OpenOptions::new().read(true).write(true).create_new(is_new).mode(0o600).open(&path)?;
        Ok(Segment { number, path, file: Arc::new(file), length: 0, is_named: !is_new })
    }
}
