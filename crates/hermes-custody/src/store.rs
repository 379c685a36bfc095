//! Storage of the custody journal: segment files in a directory, written by a dedicated thread.
//!
//! In: entries in order, and ranges to read. Out: notices of durable entries, and bytes. Entries that arrive together
//! are written together. An entry that becomes obsolete before its turn is not written at all. The store deletes
//! segments without live entries, the oldest first. If an old segment has few live entries, they are written again at
//! the end of the journal. If the file system is full, the store may delete any segment (`reserve`).
//!
//! Never: a write on a worker's thread.

mod index;
mod queue;
mod recovery;
mod reserve;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use hermes_net::lock::{Lock, make_own_directory};
use hermes_wire::custody::{Direction, ExchangeId};
use tokio::sync::oneshot;

use self::index::Index;
pub(super) use self::index::{StoredExchange, StoredStream};
use self::queue::Queue;
use self::reserve::Seen;
pub(super) use self::reserve::is_full;
use super::journal_record::{self, JournalRecord};
use super::stream_state::{Progress, RECORD};

/// Length at which a segment is closed, in bytes.
const SEGMENT: u64 = 16 << 20;
/// A complete stream of at most this length, in bytes, is sent before it is durable.
const SMALL: usize = RECORD as usize;
/// Estimated length of an entry without data, in bytes.
const FEW: usize = 64;
/// Maximum length of one batch, in bytes.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// Length, in bytes, that the journal may have beyond twice its live bytes.
const SLACK: u64 = 4 * SEGMENT;
/// Interval of retries while the disk is full.
const DISK_FULL_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A request to the journal's thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Write an entry.
    Keep { id: ExchangeId, note: JournalRecord, is_synced: bool },
    /// Delete stored bytes below this offset, except the head and the end of the stream.
    Release { id: ExchangeId, part: Direction, upto: u64 },
    /// Read stored bytes.
    Read { id: ExchangeId, part: Direction, offset: u64, length: u64, back: Option<oneshot::Sender<Option<Bytes>>> },
}

/// The receiver of the thread's reports.
pub(super) trait Reader: Send + Sync {
    /// Reports entries that became durable, in the order of the journal.
    fn are_safe(&self, safe: Vec<Safe>);
    /// Delivers bytes of a read; `None` if the read failed.
    fn is_read(&self, id: ExchangeId, part: Direction, offset: u64, bytes: Option<Bytes>);
    /// Reports that the disk fails with this error. `None`: it works again.
    fn is_stuck(&self, why: Option<&io::Error>);
    /// Reports for how many bytes in custody the file system has room.
    fn is_there(&self, bytes: u64);
}

/// A durable entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Safe {
    /// The stream is durable up to this offset.
    Upto { id: ExchangeId, part: Direction, upto: Progress },
    /// The intent to send the request is durable.
    Intent(ExchangeId),
    /// The end of the exchange is durable: a restart does not find it.
    Over(ExchangeId),
}

/// The journal of a node.
pub(super) struct Store {
    jobs: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the journal in a directory, and creates the directory if it does not exist. Locks the directory against
    /// other processes.
    ///
    /// # Errors
    ///
    /// The directory cannot be created or read, or another process holds its lock (`WouldBlock`).
    pub(super) fn open(directory: &Path) -> io::Result<Opened> {
        make_own_directory(directory)?;
        let lock = Lock::take(&directory.join("lock"))?;
        let mut files = Files {
            directory: directory.to_owned(),
            index: Index::default(),
            out: BytesMut::new(),
            has_reserve: false,
            _lock: lock,
        };
        let damaged = files.read_all()?;
        let mut held = files.index.held();
        if !damaged.is_empty()
            && let Err(error) = files.doubt(&mut held, &damaged)
        {
            // The segments stay unchanged, so that the next start detects the damage again.
            tracing::error!(%error, "cannot record the exchanges that a damaged custody journal affects");
        }
        files.reserve();
        let gone = files.index.gone();
        Ok(Opened { files, held, gone })
    }

    /// Queues a job. The thread reports the result.
    pub(super) fn submit(&self, job: Job) {
        self.jobs.submit(job);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.jobs.end();
        // The journal's own thread may drop the last reference to its service; it must not join itself.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// A journal that was read, before its thread starts.
pub(super) struct Opened {
    files: Files,
    /// Live exchanges in the journal.
    pub(super) held: Vec<(ExchangeId, StoredExchange)>,
    /// Failed exchanges that must not run again.
    pub(super) gone: Vec<(ExchangeId, JournalRecord)>,
}

impl Opened {
    /// Starts the thread that writes the journal.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub(super) fn start(self, reader: Weak<dyn Reader>) -> io::Result<Store> {
        let (mut files, jobs) = (self.files, Arc::new(Queue::new()));
        let todo = jobs.clone();
        let named = std::thread::Builder::new().name("custody".to_owned());
        let thread = named.spawn(move || files.run(&todo, &reader))?;
        Ok(Store { jobs, thread: Some(thread) })
    }

    /// Runs one turn of the thread with these jobs.
    #[cfg(test)]
    pub(super) fn turn(&mut self, jobs: Vec<Job>, reader: &Weak<dyn Reader>) {
        self.files.turn(jobs, &mut Pending::default(), &mut Seen::default(), reader);
    }
}

/// A segment file.
pub(super) struct Segment {
    number: u64,
    path: PathBuf,
    file: Arc<File>,
    length: u64,
    /// Whether the directory entry of the file survives a loss of power.
    is_named: bool,
}

/// Entries that wait to be written.
#[derive(Default)]
struct Pending {
    notes: Vec<(ExchangeId, JournalRecord)>,
    /// Entries that became obsolete before they were written, because the next node has acknowledged their bytes. They
    /// are reported as durable.
    passed: Vec<Safe>,
    is_synced: bool,
    /// The disk rejected a write; `looked` is the time of the last check.
    is_stuck: bool,
    looked: Option<Instant>,
    /// The disk rejected a batch, so that further batches are small.
    is_tight: bool,
    /// Whether some entries became obsolete.
    has_released: bool,
}

fn size(note: &JournalRecord) -> usize {
    match note {
        JournalRecord::Head { bytes, .. } | JournalRecord::Bytes { bytes, .. } | JournalRecord::Asked { bytes } => {
            bytes.len()
        }
        _ => 0,
    }
}

/// The state of the journal's thread.
struct Files {
    directory: PathBuf,
    index: Index,
    /// Buffer of the next batch.
    out: BytesMut,
    /// Whether the reserve file exists, which provides room to move entries.
    has_reserve: bool,
    _lock: Lock,
}

/// An entry in the present batch.
struct Put {
    id: ExchangeId,
    note: JournalRecord,
    at: u64,
    length: u64,
}

impl Files {
    fn run(&mut self, todo: &Queue, reader: &Weak<dyn Reader>) {
        let mut pending = Pending::default();
        let mut seen = Seen::default();
        // While the disk is full, the thread retries, and serves reads meanwhile.
        while let Some(jobs) =
            todo.take(if pending.is_stuck { Some(DISK_FULL_RETRY_INTERVAL) } else { seen.looks_again() })
        {
            self.turn(jobs, &mut pending, &mut seen, reader);
            if pending.is_stuck && todo.is_over() {
                break;
            }
        }
    }

    fn turn(&mut self, jobs: Vec<Job>, pending: &mut Pending, seen: &mut Seen, reader: &Weak<dyn Reader>) {
        let mut reads = Vec::new();
        for job in jobs {
            match job {
                Job::Keep { id, note, is_synced } => self.take(pending, id, note, is_synced),
                Job::Release { id, part, upto } => self.release(pending, id, part, upto),
                read @ Job::Read { .. } => reads.push(read),
            }
        }
        self.write(pending, reader);
        self.report_space(pending, seen, reader);
        reads.into_iter().for_each(|job| self.read(job, reader));
    }

    /// Queues an entry. The end of an exchange discards its unwritten entries. If nothing of the exchange was written,
    /// its end is not written either.
    fn take(&mut self, pending: &mut Pending, id: ExchangeId, note: JournalRecord, is_synced: bool) {
        if note == JournalRecord::Forget {
            pending.notes.retain(|(other, _)| *other != id);
            if !self.index.has(id) {
                return pending.passed.push(Safe::Over(id));
            }
            self.index.forget(id);
        }
        if matches!(note, JournalRecord::Gone { .. }) {
            pending.notes.retain(|(other, _)| *other != id);
        }
        pending.is_synced |= is_synced;
        pending.notes.push((id, note));
    }

    /// Discards unwritten entries that are no longer needed, so that a disk slower than the path has less to write.
    fn release(&mut self, pending: &mut Pending, id: ExchangeId, part: Direction, upto: u64) {
        let before = pending.notes.len();
        for (other, note) in &mut pending.notes {
            // Only the end of the stream remains of a final chunk. A stream of one record stays complete, because the
            // next node may request it again.
            if let JournalRecord::Bytes { part: of, offset, is_last: true, bytes } = note
                && *offset > 0
                && (*other, *of, *offset + bytes.len() as u64) == (id, part, upto)
            {
                (*offset, *bytes) = (upto, Bytes::new());
            }
        }
        pending.notes.retain(|(other, note)| {
            let is_before = matches!(note, JournalRecord::Bytes { part: of, offset, is_last: false, bytes }
                if *of == part && offset + bytes.len() as u64 <= upto);
            *other != id || !is_before
        });
        if pending.notes.len() < before {
            pending.passed.push(Safe::Upto { id, part, upto: Progress { offset: upto, is_whole: false } });
        }
        self.index.release(id, part, upto);
        pending.has_released = true;
    }

    fn read(&self, job: Job, reader: &Weak<dyn Reader>) {
        let Job::Read { id, part, offset, length, back } = job else { return };
        let bytes = self.index.read(id, part, offset, length);
        // An error for an exchange that has ended meanwhile is irrelevant.
        if let Err(error) = &bytes
            && self.index.has(id)
        {
            tracing::error!(%id, %error, "cannot read the stored bytes of an exchange in custody");
        }
        match back {
            // The caller may have stopped waiting.
            Some(back) => drop(back.send(bytes.ok())),
            None => drop(reader.upgrade().inspect(|reader| reader.is_read(id, part, offset, bytes.ok()))),
        }
    }

    /// Writes queued entries. They are reported as durable only once the disk has accepted them.
    fn write(&mut self, pending: &mut Pending, reader: &Weak<dyn Reader>) {
        let reader = reader.upgrade();
        let tell = |safe: Vec<Safe>| {
            if let Some(reader) = reader.as_ref().filter(|_| !safe.is_empty()) {
                reader.are_safe(safe);
            }
        };
        tell(std::mem::take(&mut pending.passed));
        let is_idle = pending.notes.is_empty() && !std::mem::take(&mut pending.has_released);
        while !pending.notes.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            let most = if pending.is_tight { SMALL } else { MAX_BATCH_BYTES };
            while count < pending.notes.len() && bytes < most {
                bytes += FEW + size(&pending.notes[count].1);
                count += 1;
            }
            if let Err(error) = self.append(&pending.notes[..count], pending.is_synced) {
                if is_full(&error) && self.is_room_made(pending) {
                    continue;
                }
                // Exchanges that end meanwhile may make room.
                pending.is_stuck = true;
                if pending.is_due() {
                    pending.looked = Some(Instant::now());
                    reader.as_ref().inspect(|reader| reader.is_stuck(Some(&error)));
                }
                break;
            }
            if std::mem::take(&mut pending.is_stuck) {
                reader.as_ref().inspect(|reader| reader.is_stuck(None));
            }
            let rest = pending.notes.split_off(count);
            let written = std::mem::replace(&mut pending.notes, rest);
            tell(written.iter().filter_map(|(id, note)| safe(*id, note)).collect());
        }
        if pending.notes.is_empty() {
            (pending.is_synced, pending.is_tight) = (false, false);
            // The entries that the disk rejected have become obsolete.
            if std::mem::take(&mut pending.is_stuck) {
                reader.as_ref().inspect(|reader| reader.is_stuck(None));
            }
        }
        if !is_idle {
            self.tidy();
            if !pending.is_stuck {
                self.reserve();
            }
        }
    }

    fn append(&mut self, notes: &[(ExchangeId, JournalRecord)], is_synced: bool) -> io::Result<()> {
        let is_full = self.index.segments.back().is_none_or(|segment| segment.length >= SEGMENT);
        if is_full {
            self.roll()?;
        }
        let Some(segment) = self.index.segments.back_mut() else { return Ok(()) };
        let out = &mut self.out;
        out.clear();
        let mut put = Vec::with_capacity(notes.len());
        for (id, note) in notes {
            let begin = out.len() as u64;
            let at = segment.length + begin + journal_record::put(*id, note, out) as u64;
            put.push(Put { id: *id, note: note.clone(), at, length: out.len() as u64 - begin });
        }
        let written = segment.file.write_all_at(out, segment.length);
        let synced = written.and_then(|()| {
            if !is_synced {
                return Ok(());
            }
            segment.file.sync_data()?;
            if !std::mem::replace(&mut segment.is_named, true) {
                File::open(&self.directory)?.sync_all()?;
            }
            Ok(())
        });
        if let Err(error) = synced {
            // The next batch overwrites the bytes after the end; a restart must not read them.
            let _ = segment.file.set_len(segment.length);
            return Err(error);
        }
        segment.length += out.len() as u64;
        let number = segment.number;
        for Put { id, note, at, length } in put {
            self.index.add(id, &note, number, at, length);
        }
        Ok(())
    }

    /// Starts a new segment.
    fn roll(&mut self) -> io::Result<()> {
        let number = self.index.segments.back().map_or(0, |segment| segment.number + 1);
        let segment = self.segment(number, true)?;
        self.index.segments.push_back(segment);
        Ok(())
    }

    /// Removes a segment without live entries. Returns false if the removal fails. Then the end marks of its exchanges
    /// must stay as well.
    fn remove(&mut self, number: u64) -> bool {
        let Some(place) = self.index.segments.iter().position(|segment| segment.number == number) else { return false };
        let path = &self.index.segments[place].path;
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove a segment of the custody journal");
            return false;
        }
        self.index.segments.remove(place);
        true
    }

    /// Removes obsolete segments, the oldest first, so that an exchange's end mark outlives its other entries.
    fn tidy(&mut self) {
        while self.index.segments.len() > 1
            && let Some(oldest) = self.index.segments.front()
        {
            let number = oldest.number;
            if self.index.live(number) > 0 {
                let all: u64 = self.index.segments.iter().map(|segment| segment.length).sum();
                let is_long = all > 2 * self.index.live_in_all() + SLACK;
                // Live entries of the oldest segment move to the end.
                if !is_long || self.move_on(number).is_err() {
                    return;
                }
            }
            if !self.remove(number) {
                return;
            }
        }
        if self.index.live_in_all() == 0
            && let Some(last) = self.index.segments.back_mut()
            && last.length > 0
            && last.file.set_len(0).is_ok()
        {
            last.length = 0;
            self.index.over.clear();
        }
    }

    /// Writes the live entries of a segment again.
    fn move_on(&mut self, number: u64) -> io::Result<()> {
        let moving = self.index.moving(number)?;
        let ids: Vec<_> = moving.iter().map(|(id, _)| *id).collect();
        let notes: Vec<_> =
            moving.into_iter().flat_map(|(id, notes)| notes.into_iter().map(move |note| (id, note))).collect();
        // The index drops the old copy only after the write: on a full disk, the entries stay where they are.
        self.append(&notes, true)?;
        ids.into_iter().for_each(|id| self.index.forget_in(id, number));
        Ok(())
    }
}

fn safe(id: ExchangeId, note: &JournalRecord) -> Option<Safe> {
    match note {
        JournalRecord::Head { part, bytes, .. } => {
            let upto = Progress { offset: bytes.len() as u64, is_whole: false };
            Some(Safe::Upto { id, part: *part, upto })
        }
        JournalRecord::Bytes { part, offset, is_last, bytes } => {
            let upto = Progress { offset: offset + bytes.len() as u64, is_whole: *is_last };
            Some(Safe::Upto { id, part: *part, upto })
        }
        JournalRecord::Intent(_) => Some(Safe::Intent(id)),
        JournalRecord::Gone { .. } | JournalRecord::Forget => Some(Safe::Over(id)),
        JournalRecord::Begin { .. } | JournalRecord::Lead { .. } | JournalRecord::Asked { .. } => None,
    }
}
