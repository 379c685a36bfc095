//! Written entries are found after a restart, whatever happened to the files meanwhile.

use std::sync::Mutex;

use super::*;
use crate::engine::Side;
use crate::journal_record::Intent;

/// Records all reports of the store.
#[derive(Default)]
struct Told {
    safe: Mutex<Vec<Safe>>,
    read: Mutex<Vec<Option<Bytes>>>,
}

impl Told {
    /// Waits until `count` entries are durable. Entries that nobody waits for may stay unwritten.
    fn until(&self, count: usize) {
        let began = Instant::now();
        while self.safe.lock().unwrap().len() < count {
            assert!(began.elapsed() < Duration::from_secs(60), "{count} are not safe");
            std::thread::yield_now();
        }
    }
}

impl Reader for Told {
    fn are_safe(&self, safe: Vec<Safe>) {
        self.safe.lock().unwrap().extend(safe.into_iter().filter(|one| !matches!(one, Safe::Over(_))));
    }

    fn is_read(&self, _: ExchangeId, _: Direction, _: u64, bytes: Option<Bytes>) {
        self.read.lock().unwrap().push(bytes);
    }

    fn is_stuck(&self, why: Option<&io::Error>) {
        panic!("{why:?}");
    }

    fn is_there(&self, _: u64) {}
}

fn id(number: u8) -> ExchangeId {
    ExchangeId([number; 16])
}

fn begin(number: u8) -> [(ExchangeId, JournalRecord); 2] {
    let (from, account) = (Side::Peer(Arc::from("before")), Arc::<str>::from("route"));
    let to = Side::Here;
    let begin = JournalRecord::Begin { from, account: account.clone(), deadline: 7, life: 9 };
    [(id(number), begin), (id(number), JournalRecord::Lead { to, account, is_tunnel: false })]
}

fn bytes(number: u8, offset: u64, bytes: Vec<u8>) -> (ExchangeId, JournalRecord) {
    (id(number), JournalRecord::Bytes { part: Direction::Request, offset, is_last: false, bytes: bytes.into() })
}

fn start(directory: &Path) -> (Store, Arc<Told>) {
    let told = Arc::<Told>::default();
    let reader: Arc<dyn Reader> = told.clone();
    (Store::open(directory).unwrap().start(Arc::downgrade(&reader)).unwrap(), told)
}

/// Writes these entries and closes the store. Returns its reports.
fn write(directory: &Path, notes: impl IntoIterator<Item = (ExchangeId, JournalRecord)>) -> Arc<Told> {
    let (store, told) = start(directory);
    for (id, note) in notes {
        store.submit(Job::Keep { id, note, is_synced: false });
    }
    drop(store);
    told
}

/// The exchanges in the journal: number of each, and the pieces of its request.
fn held(directory: &Path) -> Vec<(u8, Vec<(u64, u64)>)> {
    let mut held = Store::open(directory).unwrap().held;
    held.sort_by_key(|(id, _)| *id);
    let pieces = |held: StoredExchange| held.halves[0].pieces.iter().map(|(at, length)| (at.offset, *length)).collect();
    held.into_iter().map(|(id, held)| (id.0[0], pieces(held))).collect()
}

/// Total length of all segments.
fn size(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let segments = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "log"));
    segments.map(|entry| entry.metadata().unwrap().len()).sum()
}

#[test]
fn what_is_written_is_held_and_what_is_over_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let head = JournalRecord::Head { part: Direction::Request, theirs: 3, bytes: Bytes::from_static(b"head") };
    let mut notes: Vec<_> = begin(1).into_iter().chain([(id(1), head), bytes(1, 4, vec![1; 10])]).collect();
    notes.extend(begin(2));
    notes.extend([
        bytes(2, 0, vec![2; 5]),
        (id(2), JournalRecord::Forget),
        bytes(1, 14, vec![3; 5]),
        (id(1), JournalRecord::Intent(Intent::Certain)),
    ]);
    // The first exchange lacks its next side, and the second one its head: nothing of them was acknowledged.
    notes.push(begin(3)[0].clone());
    let to = Side::Peer(Arc::from("next"));
    let lead = JournalRecord::Lead { to, account: Arc::from("route"), is_tunnel: false };
    notes.extend([begin(4)[0].clone(), (id(4), lead), bytes(4, 0, vec![4; 9])]);
    let told = write(directory.path(), notes);
    let upto = |offset| Safe::Upto { id: id(1), part: Direction::Request, upto: Progress { offset, is_whole: false } };
    let of_the_first =
        |safe: &&Safe| **safe == Safe::Intent(id(1)) || matches!(safe, Safe::Upto { id: one, .. } if *one == id(1));
    let safe: Vec<_> = told.safe.lock().unwrap().iter().filter(of_the_first).copied().collect();
    assert_eq!(safe, [upto(4), upto(14), upto(19), Safe::Intent(id(1))]);
    let opened = Store::open(directory.path()).unwrap();
    let [(found, held)] = &opened.held[..] else { panic!("{:?}", opened.held) };
    assert_eq!((*found, held.deadline, held.life, held.intent), (id(1), 7, 9, Some(Intent::Certain)));
    assert_eq!((&held.from, &held.to), (&Side::Peer(Arc::from("before")), &Some(Side::Here)));
    assert_eq!(held.halves[0].head, Some((3, 4)));
    assert_eq!(
        opened.files.index.read(id(1), Direction::Request, 2, 15).unwrap(),
        [&b"ad"[..], &[1; 10], &[3; 3]].concat()
    );
    assert!(opened.files.index.read(id(1), Direction::Request, 18, 2).is_err(), "beyond its end");
    assert!(Store::open(directory.path()).is_err(), "somebody has it");
}

#[test]
fn what_was_not_written_whole_is_not_there_and_what_follows_is() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), begin(1).into_iter().chain([bytes(1, 0, vec![1; 1000]), bytes(1, 1000, vec![2; 1000])]));
    let file = directory.path().join(format!("{:012}.log", 0));
    let whole = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(whole - 1).unwrap();
    assert_eq!(held(directory.path()), [(1, vec![(0, 1000)])]);
    write(directory.path(), [bytes(1, 1000, vec![4; 7])]);
    assert_eq!(held(directory.path()), [(1, vec![(0, 1000), (1000, 7)])]);
    // The file system had allocated more room before the power failed.
    let written = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(written + 4096).unwrap();
    assert_eq!(held(directory.path()), [(1, vec![(0, 1000), (1000, 7)])]);
    assert_eq!(Store::open(directory.path()).unwrap().held[0].1.intent, None);
    // A flipped bit.
    let mut damaged = fs::read(&file).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    fs::write(&file, damaged).unwrap();
    let intent = || Store::open(directory.path()).unwrap().held[0].1.intent;
    assert_eq!([intent(), intent()], [Some(Intent::Possible); 2], "it is not known, nor will be");
    assert_eq!(held(directory.path()), [(1, vec![(0, 1000)])]);
}

#[test]
fn when_nothing_is_held_nothing_is_there() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), begin(1).into_iter().chain([bytes(1, 0, vec![1; 1000])]));
    assert!(size(directory.path()) > 1000);
    write(directory.path(), [(id(1), JournalRecord::Forget)]);
    assert_eq!(size(directory.path()), 0);
    // An exchange that begins and ends before the next write is never written.
    write(directory.path(), begin(2).into_iter().chain([bytes(2, 0, vec![1; 1000]), (id(2), JournalRecord::Forget)]));
    assert_eq!((size(directory.path()), held(directory.path())), (0, vec![]));
}

#[test]
fn an_old_exchange_does_not_keep_all_that_came_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let piece = 1 << 20;
    let (store, told) = start(directory.path());
    let keep = |(id, note)| store.submit(Job::Keep { id, note, is_synced: false });
    begin(1).into_iter().chain([bytes(1, 0, vec![1; 1000])]).for_each(keep);
    // Two hundred megabytes that are written and released.
    for number in 2..22 {
        let pieces = (0..10).map(|at| bytes(number, at * piece as u64, vec![number; piece]));
        begin(number).into_iter().chain(pieces).for_each(keep);
        told.until(1 + 10 * (usize::from(number) - 1));
        keep((id(number), JournalRecord::Forget));
    }
    drop(store);
    assert!(size(directory.path()) <= SLACK + 3 * SEGMENT, "{}", size(directory.path()));
    let opened = Store::open(directory.path()).unwrap();
    assert_eq!(opened.held.len(), 1);
    assert_eq!(opened.files.index.read(id(1), Direction::Request, 0, 1000).unwrap(), vec![1; 1000]);
    assert!(opened.files.index.segments.front().unwrap().number > 0, "the first segment is gone");
}

/// A slow disk does not write entries that became obsolete before their turn.
#[test]
fn what_has_passed_before_it_was_written_never_is() {
    let directory = tempfile::tempdir().unwrap();
    let told = Arc::<Told>::default();
    let reader: Arc<dyn Reader> = told.clone();
    let mut files = Store::open(directory.path()).unwrap().files;
    let jobs = Queue::new();
    let keep = |(id, note)| jobs.submit(Job::Keep { id, note, is_synced: false });
    begin(1).into_iter().chain((0..100).map(|at| bytes(1, at << 20, vec![1; 1 << 20]))).for_each(keep);
    jobs.submit(Job::Release { id: id(1), part: Direction::Request, upto: 97 << 20 });
    jobs.end();
    files.run(&jobs, &Arc::downgrade(&reader));
    drop(files);
    let upto = |mib: u64| Safe::Upto {
        id: id(1),
        part: Direction::Request,
        upto: Progress { offset: mib << 20, is_whole: false },
    };
    assert_eq!(*told.safe.lock().unwrap(), [97, 98, 99, 100].map(upto));
    assert_eq!(held(directory.path()), [(1, (97..100).map(|at| (at << 20, 1 << 20)).collect())]);
    assert!(size(directory.path()) < 4 << 20);
}

/// A long transfer passes beside an exchange that stays.
#[test]
fn what_has_passed_makes_room() {
    let directory = tempfile::tempdir().unwrap();
    let (store, told) = start(directory.path());
    let piece = 1 << 20;
    let keep = |(id, note)| store.submit(Job::Keep { id, note, is_synced: false });
    begin(1).into_iter().chain((0..16).map(|at| bytes(1, at * piece, vec![1; 1 << 20]))).for_each(keep);
    let head = JournalRecord::Head { part: Direction::Request, theirs: 3, bytes: Bytes::from_static(b"head") };
    begin(2).into_iter().chain([(id(2), head)]).for_each(keep);
    for at in 0..300 {
        keep(bytes(2, 4 + at * piece, vec![2; 1 << 20]));
        store.submit(Job::Release { id: id(2), part: Direction::Request, upto: 4 + at * piece });
        told.until(18 + at as usize);
    }
    drop(store);
    assert!(size(directory.path()) <= SLACK + 5 * SEGMENT, "{}", size(directory.path()));
    let opened = Store::open(directory.path()).unwrap();
    let read = |number, offset, length| opened.files.index.read(id(number), Direction::Request, offset, length);
    assert_eq!(read(2, 0, 4).unwrap(), &b"head"[..]);
    assert_eq!(read(2, 4 + 299 * piece, 9).unwrap(), vec![2; 9]);
    assert_eq!(read(1, 15 * piece, 9).unwrap(), vec![1; 9]);
    assert!(read(2, 4, 9).is_err(), "it has passed");
}

/// A full file system loses the segments with the fewest live entries, wherever they are, and ended exchanges stay
/// ended.
#[test]
fn where_there_is_no_room_what_is_of_use_moves_together() {
    let directory = tempfile::tempdir().unwrap();
    let mut files = Store::open(directory.path()).unwrap().files;
    let piece = 1 << 20;
    let put = |files: &mut Files, notes: &[(ExchangeId, JournalRecord)]| files.append(notes, false).unwrap();
    let fill = |files: &mut Files, number: u8, from: u64| {
        (from..from + 16)
            .for_each(|at| files.append(&[bytes(number, at * piece, vec![number; 1 << 20])], false).unwrap());
    };
    // Live entries are in the first and the third segment. The ended exchange has its end mark in the second one, and
    // its beginning in the first.
    [1, 2, 3].map(begin).iter().for_each(|notes| put(&mut files, notes));
    put(&mut files, &[bytes(2, 0, vec![2; 1000])]);
    fill(&mut files, 1, 0);
    put(&mut files, &[(id(2), JournalRecord::Forget), bytes(1, 16 * piece, vec![1; 1000])]);
    fill(&mut files, 3, 0);
    fill(&mut files, 1, 17);
    fill(&mut files, 3, 16);
    files.index.release(id(3), Direction::Request, 31 * piece);
    assert_eq!(files.index.segments.len(), 4);
    assert_eq!([files.squeeze(), files.squeeze(), files.squeeze()], [true, true, false], "two are of little use");
    let left: Vec<_> = files.index.segments.iter().map(|segment| segment.number).collect();
    assert_eq!(left, [0, 2, 4]);
    assert!(size(directory.path()) < 35 * piece, "{}", size(directory.path()));
    drop(files);
    assert_eq!(
        held(directory.path()).iter().map(|(number, _)| *number).collect::<Vec<_>>(),
        [1, 3],
        "the second is over"
    );
    let opened = Store::open(directory.path()).unwrap();
    let read = |number, offset, length| opened.files.index.read(id(number), Direction::Request, offset, length);
    assert_eq!(read(1, 16 * piece, 1000).unwrap(), vec![1; 1000]);
    assert_eq!(read(3, 31 * piece, 9).unwrap(), vec![3; 9]);
    assert!(read(3, 30 * piece, 9).is_err(), "it has passed");
}

/// A failed order leaves only its failure, wherever that entry moves, until it is forgotten.
#[test]
fn what_came_to_nothing_is_known_until_it_is_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let gone = |number| {
        let (peer, reason) = (Arc::from("n1"), Arc::from("so it is"));
        (id(number), JournalRecord::Gone { peer, status: 502, reason, deadline: 7 })
    };
    let found = || {
        let mut gone = Store::open(directory.path()).unwrap().gone;
        gone.sort_by_key(|(id, _)| *id);
        gone
    };
    write(directory.path(), begin(1).into_iter().chain([bytes(1, 0, vec![5; 100]), gone(1), gone(2)]));
    assert_eq!((held(directory.path()), found()), (vec![], vec![gone(1), gone(2)]));
    // Many other exchanges follow.
    for number in 3..40 {
        write(directory.path(), begin(number).into_iter().chain([bytes(number, 0, vec![5; 1 << 20])]));
        write(directory.path(), [(id(number), JournalRecord::Forget)]);
    }
    assert_eq!(found(), [gone(1), gone(2)]);
    write(directory.path(), [(id(1), JournalRecord::Forget)]);
    assert_eq!(found(), [gone(2)]);
    write(directory.path(), [(id(2), JournalRecord::Forget)]);
    assert_eq!(found(), []);
}

/// Another user of the machine may have placed a symbolic link there, or may try to read.
#[test]
fn segments_are_the_nodes_own_and_no_link_stands_for_one() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let room = tempfile::tempdir().unwrap();
    let (directory, foreign) = (room.path().join("custody"), room.path().join("foreign"));
    write(&directory, begin(1));
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    let segments = || fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let segment = segments().find(|path| path.extension().is_some_and(|end| end == "log")).unwrap();
    fs::rename(&segment, &foreign).unwrap();
    let before = fs::read(&foreign).unwrap();
    symlink(&foreign, &segment).unwrap();
    assert!(Store::open(&directory).is_err());
    assert_eq!(fs::read(&foreign).unwrap(), before);
}
