//! Opens and creates the segments of a journal.
//!
//! In: a directory. Out: its entries in the index, and the segments that could not be read completely. Entries after a
//! damaged record are left out, because the start of the next record is unknown.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use hermes_net::lock::open_own;
use hermes_wire::custody::ExchangeId;

use super::super::engine::Side;
use super::super::journal_record::{self, Intent, JournalRecord};
use super::{Files, Segment, StoredExchange};

impl Files {
    /// Reads all segments into the index. Returns the damaged segments, which stay unchanged.
    pub(super) fn read_all(&mut self) -> io::Result<Vec<u64>> {
        let mut numbers: Vec<u64> = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            numbers.extend(name.to_str().and_then(|name| name.strip_suffix(".log")?.parse::<u64>().ok()));
        }
        numbers.sort_unstable();
        let (last, mut damaged) = (numbers.last().copied(), Vec::new());
        for number in numbers {
            let mut segment = self.segment(number, false)?;
            let mut bytes = Vec::new();
            (&*segment.file).read_to_end(&mut bytes)?;
            let whole = bytes.len() as u64;
            let mut rest = Bytes::from(bytes);
            while let Some(found) = journal_record::first(&rest) {
                let at = segment.length + found.at as u64;
                self.index.add(found.id, &found.note, number, at, found.length as u64);
                segment.length += found.length as u64;
                rest.advance(found.length);
            }
            if segment.length < whole {
                // A killed process leaves an incomplete record at the end of the last segment; a loss of power leaves
                // zeros.
                let is_unfinished = journal_record::is_unfinished(&rest) || rest.iter().all(|byte| *byte == 0);
                let is_cut = Some(number) == last && is_unfinished;
                let (path, left_out) = (segment.path.display(), whole - segment.length);
                if is_cut {
                    tracing::warn!(%path, left_out, "the custody journal ended within a record");
                    segment.file.set_len(segment.length)?;
                } else {
                    damaged.push(number);
                    tracing::error!(%path, left_out, "the custody journal is damaged, and its records after the damage are lost; check the disk");
                }
            }
            self.index.segments.push_back(segment);
        }
        self.tidy();
        Ok(damaged)
    }

    /// Records that the requests of all exchanges that end at this node may have been sent, because the damaged bytes
    /// may have contained their intents. The journal counts as sound only after these records are written.
    pub(super) fn doubt(&mut self, held: &mut [(ExchangeId, StoredExchange)], damaged: &[u64]) -> io::Result<()> {
        let doubtful = held.iter_mut().filter(|(_, held)| held.to == Some(Side::Here) && held.intent.is_none());
        let notes = doubtful.map(|(id, held)| {
            held.intent = Some(Intent::Possible);
            (*id, JournalRecord::Intent(Intent::Possible))
        });
        let notes: Vec<_> = notes.collect();
        // Entries after a damaged record would not be found, so the records go to a new segment.
        self.roll()?;
        self.append(&notes, true)?;
        for segment in self.index.segments.iter().filter(|segment| damaged.contains(&segment.number)) {
            segment.file.set_len(segment.length)?;
        }
        Ok(())
    }

    pub(super) fn segment(&self, number: u64, is_new: bool) -> io::Result<Segment> {
        let path = self.directory.join(format!("{number:012}.log"));
        let mut options = OpenOptions::new();
        let file = open_own(options.read(true).write(true).create_new(is_new).mode(0o600), &path)?;
        Ok(Segment { number, path, file: Arc::new(file), length: 0, is_named: !is_new })
    }
}
