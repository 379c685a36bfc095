//! Where the journal of custody is: segments in a directory, written by a thread of its own.
//!
//! In: entries, in their order, and places that are to be read again. Out: what is safe by now, and bytes. Entries that
//! come together are written together; of what has passed by before its turn came nothing is written. Segments go from the
//! oldest on, when nothing in them is held any more; where one exchange keeps an old one, what is held in it is written anew.
//! Where the file system is full they go in any order (`space`).
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
use hermes_wire::custody::{ExchangeId, Part};
use tokio::sync::oneshot;

use self::index::Index;
pub(super) use self::index::{Held, HeldHalf};
use self::queue::Queue;
use self::reserve::Seen;
pub(super) use self::reserve::is_full;
use super::half::{RECORD, Upto};
use super::journal::{self, Note};

/// A segment is closed when it is so long.
const SEGMENT: u64 = 16 << 20;
/// What is whole and not longer is passed on before it is safe.
const SMALL: usize = RECORD as usize;
/// An entry without bytes has about so many.
const FEW: usize = 64;
/// So many bytes are written at once.
const BATCH: usize = 1 << 20;
/// Beyond twice what is held, the journal may be so much longer.
const SLACK: u64 = 4 * SEGMENT;
/// A disk that takes nothing is tried again after so long.
const AGAIN: Duration = Duration::from_millis(200);

/// What the thread is asked for.
#[derive(Debug)]
pub(super) enum Job {
    /// To be made safe.
    Keep { id: ExchangeId, note: Note, is_synced: bool },
    /// Up to there nobody needs what is safe of it, but for its head and its end.
    Release { id: ExchangeId, part: Part, upto: u64 },
    /// To be read.
    Read { id: ExchangeId, part: Part, offset: u64, length: u64, back: Option<oneshot::Sender<Option<Bytes>>> },
}

/// Who hears of it.
pub(super) trait Reader: Send + Sync {
    /// These are safe, in this order.
    fn are_safe(&self, safe: Vec<Safe>);
    /// What was to be read; `None` where it cannot be.
    fn is_read(&self, id: ExchangeId, part: Part, offset: u64, bytes: Option<Bytes>);
    /// The disk takes nothing, for this reason; or it does again.
    fn is_stuck(&self, why: Option<&io::Error>);
    /// So many bytes may be held there, by what its file system has.
    fn is_there(&self, bytes: u64);
}

/// What is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Safe {
    /// So much of a string.
    Upto { id: ExchangeId, part: Part, upto: Upto },
    /// That its request goes out.
    Intent(ExchangeId),
    /// That it is over: none of it is found again.
    Over(ExchangeId),
}

/// The journal of a node.
pub(super) struct Store {
    jobs: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the journal in a directory, which is made if it is not there. Nobody else may have it.
    ///
    /// # Errors
    /// It cannot be made or read, or another process has it (`WouldBlock`).
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
            // It stays as it is, and is found to be damaged the next time too.
            tracing::error!(%error, "what a damaged journal of custody makes doubtful cannot be written");
        }
        files.reserve();
        let gone = files.index.gone();
        Ok(Opened { files, held, gone })
    }

    /// For who asks it for nothing: it is safe where it was put.
    pub(super) fn ask(&self, job: Job) {
        self.jobs.ask(job);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.jobs.end();
        // Its own thread may be the last that knows its office.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// A journal that was read, and that nobody writes yet.
pub(super) struct Opened {
    files: Files,
    /// What it answers for.
    pub(super) held: Vec<(ExchangeId, Held)>,
    /// What has come to nothing, and must not be done again.
    pub(super) gone: Vec<(ExchangeId, Note)>,
}

impl Opened {
    /// Writes it from now on.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn start(self, reader: Weak<dyn Reader>) -> io::Result<Store> {
        let (mut files, jobs) = (self.files, Arc::new(Queue::new()));
        let todo = jobs.clone();
        let named = std::thread::Builder::new().name("custody".to_owned());
        let thread = named.spawn(move || files.run(&todo, &reader))?;
        Ok(Store { jobs, thread: Some(thread) })
    }

    /// Does what its thread would with these.
    #[cfg(test)]
    pub(super) fn turn(&mut self, jobs: Vec<Job>, reader: &Weak<dyn Reader>) {
        self.files.turn(jobs, &mut Pending::default(), &mut Seen::default(), reader);
    }
}

/// One file of it.
pub(super) struct Segment {
    number: u64,
    path: PathBuf,
    file: Arc<File>,
    length: u64,
    /// That it is there survives a loss of power.
    is_named: bool,
}

/// What is to be written.
#[derive(Default)]
struct Pending {
    notes: Vec<(ExchangeId, Note)>,
    /// What need not be written any more, since the next one holds it: to be told of as safe.
    passed: Vec<Safe>,
    is_synced: bool,
    /// The disk took it not, and when that was looked at last.
    is_stuck: bool,
    looked: Option<Instant>,
    /// It took no batch: what is small may find room.
    is_tight: bool,
    /// Something is no longer of use.
    has_released: bool,
}

fn size(note: &Note) -> usize {
    match note {
        Note::Head { bytes, .. } | Note::Bytes { bytes, .. } | Note::Asked { bytes } => bytes.len(),
        _ => 0,
    }
}

/// The thread's own.
struct Files {
    directory: PathBuf,
    index: Index,
    /// What is written next is put together here.
    out: BytesMut,
    /// Room is held for what is to be moved.
    has_reserve: bool,
    _lock: Lock,
}

/// An entry that was put into the batch.
struct Put {
    id: ExchangeId,
    note: Note,
    at: u64,
    length: u64,
}

impl Files {
    fn run(&mut self, todo: &Queue, reader: &Weak<dyn Reader>) {
        let mut pending = Pending::default();
        let mut seen = Seen::default();
        // A disk that takes nothing is tried again, and meanwhile read.
        while let Some(jobs) = todo.take(if pending.is_stuck { Some(AGAIN) } else { seen.looks_again() }) {
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
        self.look(pending, seen, reader);
        reads.into_iter().for_each(|job| self.read(job, reader));
    }

    /// Puts a note to those that wait. Of what is over nothing has to be written that was not yet; and where nothing was, not
    /// even that it is over.
    fn take(&mut self, pending: &mut Pending, id: ExchangeId, note: Note, is_synced: bool) {
        if note == Note::Forget {
            pending.notes.retain(|(other, _)| *other != id);
            if !self.index.has(id) {
                return pending.passed.push(Safe::Over(id));
            }
            self.index.forget(id);
        }
        if matches!(note, Note::Gone { .. }) {
            pending.notes.retain(|(other, _)| *other != id);
        }
        pending.is_synced |= is_synced;
        pending.notes.push((id, note));
    }

    /// What was not written yet has not to be: a disk that is slower than the path has the less to do.
    fn release(&mut self, pending: &mut Pending, id: ExchangeId, part: Part, upto: u64) {
        let before = pending.notes.len();
        for (other, note) in &mut pending.notes {
            // Of its end no more than that it is there; what is one record may be asked for again.
            if let Note::Bytes { part: of, offset, is_last: true, bytes } = note
                && *offset > 0
                && (*other, *of, *offset + bytes.len() as u64) == (id, part, upto)
            {
                (*offset, *bytes) = (upto, Bytes::new());
            }
        }
        pending.notes.retain(|(other, note)| {
            let is_before = matches!(note, Note::Bytes { part: of, offset, is_last: false, bytes }
                if *of == part && offset + bytes.len() as u64 <= upto);
            *other != id || !is_before
        });
        if pending.notes.len() < before {
            pending.passed.push(Safe::Upto { id, part, upto: Upto { offset: upto, is_whole: false } });
        }
        self.index.release(id, part, upto);
        pending.has_released = true;
    }

    fn read(&self, job: Job, reader: &Weak<dyn Reader>) {
        let Job::Read { id, part, offset, length, back } = job else { return };
        let bytes = self.index.read(id, part, offset, length);
        // Of what has ended meanwhile nobody needs it.
        if let Err(error) = &bytes
            && self.index.has(id)
        {
            tracing::error!(%id, %error, "what is in custody cannot be read again");
        }
        match back {
            // Who asked may have gone.
            Some(back) => drop(back.send(bytes.ok())),
            None => drop(reader.upgrade().inspect(|reader| reader.is_read(id, part, offset, bytes.ok()))),
        }
    }

    /// Writes what waits, if the disk takes it: nobody hears that it is safe before.
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
            let most = if pending.is_tight { SMALL } else { BATCH };
            while count < pending.notes.len() && bytes < most {
                bytes += FEW + size(&pending.notes[count].1);
                count += 1;
            }
            if let Err(error) = self.append(&pending.notes[..count], pending.is_synced) {
                if is_full(&error) && self.is_room_made(pending) {
                    continue;
                }
                // What is over meanwhile may make room.
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
            // What it did not take is over.
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

    fn append(&mut self, notes: &[(ExchangeId, Note)], is_synced: bool) -> io::Result<()> {
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
            let at = segment.length + begin + journal::put(*id, note, out) as u64;
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
            // What stands behind the end is written over; a restart must not read it.
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

    /// Goes on in another segment.
    fn roll(&mut self) -> io::Result<()> {
        let number = self.index.segments.back().map_or(0, |segment| segment.number + 1);
        let segment = self.segment(number, true)?;
        self.index.segments.push_back(segment);
        Ok(())
    }

    /// Removes a segment that nothing is held in. False where it cannot be: what says that something in it is over has to
    /// stay as long.
    fn remove(&mut self, number: u64) -> bool {
        let Some(place) = self.index.segments.iter().position(|segment| segment.number == number) else { return false };
        let path = &self.index.segments[place].path;
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "a segment of custody's journal is not removed");
            return false;
        }
        self.index.segments.remove(place);
        true
    }

    /// Removes what nobody needs any more. What says of an exchange that it is over goes after all else of it.
    fn tidy(&mut self) {
        while self.index.segments.len() > 1
            && let Some(oldest) = self.index.segments.front()
        {
            let number = oldest.number;
            if self.index.live(number) > 0 {
                let all: u64 = self.index.segments.iter().map(|segment| segment.length).sum();
                let is_long = all > 2 * self.index.live_in_all() + SLACK;
                // What is held in it goes to the end.
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

    /// Writes anew what is held in a segment.
    fn move_on(&mut self, number: u64) -> io::Result<()> {
        let moving = self.index.moving(number)?;
        let ids: Vec<_> = moving.iter().map(|(id, _)| *id).collect();
        let notes: Vec<_> =
            moving.into_iter().flat_map(|(id, notes)| notes.into_iter().map(move |note| (id, note))).collect();
        // First there, then no more here: on a disk that is full it stays where it is.
        self.append(&notes, true)?;
        ids.into_iter().for_each(|id| self.index.forget_in(id, number));
        Ok(())
    }
}

fn safe(id: ExchangeId, note: &Note) -> Option<Safe> {
    match note {
        Note::Head { part, bytes, .. } => {
            let upto = Upto { offset: bytes.len() as u64, is_whole: false };
            Some(Safe::Upto { id, part: *part, upto })
        }
        Note::Bytes { part, offset, is_last, bytes } => {
            let upto = Upto { offset: offset + bytes.len() as u64, is_whole: *is_last };
            Some(Safe::Upto { id, part: *part, upto })
        }
        Note::Intent(_) => Some(Safe::Intent(id)),
        Note::Gone { .. } | Note::Forget => Some(Safe::Over(id)),
        Note::Begin { .. } | Note::Lead { .. } | Note::Asked { .. } => None,
    }
}
