//! The table of all workers of a process: the latest status of each, and the workers that the scheduler selected.
//!
//! In: stamps of the workers. Out: their status for the scheduler, and the selection for the kernel, which reads the same memory.
//! Each worker writes its own row alone, without locks. Times are of CLOCK_MONOTONIC in nanoseconds, as the kernel's. Never: a
//! decision.

use std::io;
use std::os::fd::AsFd as _;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::Mode;
use super::bpf::SharedMap;
use super::scheduler::{Parameters, Selection, Status, select};

/// The most workers of a group: those that a selection of 64 bits has room for.
pub const MAX_WORKERS: usize = 64;
/// The most workers of a group that counts as small.
const FEW_WORKERS: usize = 8;

/// Offsets of the fields that the program reads, in bytes.
pub(super) mod offset {
    pub(in super::super) const SELECTED: i16 = 0;
    pub(in super::super) const HUNG_AFTER: i16 = 8;
    pub(in super::super) const MODE: i16 = 16;
    pub(in super::super) const COUNTER: i16 = 24;
    pub(in super::super) const WORKERS: i16 = 32;
    pub(in super::super) const ALL: i16 = 40;
    pub(in super::super) const IDLE: i16 = 72;
    pub(in super::super) const SANDBOX: i16 = 80;
    pub(in super::super) const CONFINED: i16 = 88;
    /// Rows follow each other from here on. These offsets are within a row.
    pub(in super::super) const FIRST_ROW: i16 = 128;
    pub(in super::super) const ROW_SHIFT: i32 = 6;
    pub(in super::super) const TURNED: i16 = 0;
    pub(in super::super) const PARKED: i16 = 8;
}

/// A cache line of its own, so that workers do not slow each other down.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Row {
    turned: AtomicU64,
    parked: AtomicU64,
    /// Wakes of tasks by the worker's own thread. It alone writes here and to `ended`, which takes no atomic addition.
    woken_here: AtomicU64,
    /// Wakes of tasks by other threads.
    woken_elsewhere: AtomicU64,
    /// Wakes of both kinds whose task was polled or has ended.
    ended: AtomicU64,
    connections: AtomicU64,
    sessions: AtomicU64,
}

/// A group of workers.
#[repr(C, align(64))]
#[derive(Debug)]
struct Memory {
    selected: AtomicU64,
    hung_after: AtomicU64,
    mode: AtomicU64,
    /// The round of `Mode::RoundRobin`.
    counter: AtomicU64,
    workers: AtomicU64,
    /// One bit for each worker.
    all: AtomicU64,
    /// The weight and the offsets of the parameters, as the bits of an `f64`.
    session_weight: AtomicU64,
    connections_offset: AtomicU64,
    pending_offset: AtomicU64,
    /// Workers that wait for events, and to which no connection was given since. The kernel takes bits away.
    idle: AtomicU64,
    /// The workers that the kernel directs connections of confined listeners to, and no others.
    sandbox: AtomicU64,
    /// One bit for each program whose listener is confined to the sandbox.
    confined: AtomicU64,
    rows: [Row; MAX_WORKERS],
}

impl Memory {
    fn new() -> Self {
        Self {
            selected: AtomicU64::default(),
            hung_after: AtomicU64::default(),
            mode: AtomicU64::default(),
            counter: AtomicU64::default(),
            workers: AtomicU64::default(),
            all: AtomicU64::default(),
            session_weight: AtomicU64::default(),
            connections_offset: AtomicU64::default(),
            pending_offset: AtomicU64::default(),
            idle: AtomicU64::default(),
            sandbox: AtomicU64::default(),
            confined: AtomicU64::default(),
            rows: std::array::from_fn(|_| Row::default()),
        }
    }
}

impl Memory {
    fn parameters(&self) -> Parameters {
        Parameters {
            hung_after: Duration::from_nanos(self.hung_after.load(Relaxed)),
            session_weight: f64::from_bits(self.session_weight.load(Relaxed)),
            connections_offset: f64::from_bits(self.connections_offset.load(Relaxed)),
            pending_offset: f64::from_bits(self.pending_offset.load(Relaxed)),
        }
    }

    fn publish(&self, selection: &Selection) {
        // All workers of the group write here: one that changes nothing leaves the cache line to the others.
        if self.selected.load(Relaxed) != selection.workers {
            self.selected.store(selection.workers, Relaxed);
        }
    }
}

impl Row {
    fn status(&self) -> Status {
        Status {
            turned: Duration::from_nanos(self.turned.load(Relaxed)),
            is_parked: self.parked.load(Relaxed) != 0,
            pending: self.pending(),
            connections: self.connections.load(Relaxed),
            sessions: self.sessions.load(Relaxed),
        }
    }
}

impl Row {
    fn pending(&self) -> u64 {
        // The end first. A wake that comes between two of these loads is one too many, and never one too few.
        let ended = self.ended.load(Relaxed);
        let woken = self.woken_here.load(Relaxed).wrapping_add(self.woken_elsewhere.load(Relaxed));
        // The end of a wake by another thread may be counted before that thread counts the wake.
        u64::try_from(woken.wrapping_sub(ended).cast_signed()).unwrap_or_default()
    }
}

/// Adds to a number that one thread alone writes, which takes no atomic addition.
fn add(number: &AtomicU64) {
    number.store(number.load(Relaxed).wrapping_add(1), Relaxed);
}

/// How workers form groups. A connection is hashed to a group; its worker is one of that group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Number of workers in a group. The last one may have fewer.
    pub size: usize,
    /// The destination decides on the group, and not the addresses of both sides: connections to one service share few workers, and
    /// their caches (paper 003, Figure A6).
    pub by_destination: bool,
}

impl Groups {
    /// Divides workers into as few groups as possible, of about the same size.
    pub fn of(workers: usize) -> Self {
        Self { by_destination: false, ..Self::divide(workers, MAX_WORKERS) }
    }

    /// Divides workers into groups of at most `size`, to which destinations are hashed.
    pub fn by_destination(workers: usize, size: usize) -> Self {
        Self { by_destination: true, ..Self::divide(workers, size.clamp(1, MAX_WORKERS)) }
    }

    fn divide(workers: usize, most: usize) -> Self {
        let count = workers.max(1).div_ceil(most);
        Self { count, size: workers.max(1).div_ceil(count), by_destination: false }
    }
}

/// The table. With privileges, the kernel reads it too.
pub struct Table {
    memory: Place,
    groups: Groups,
    workers: usize,
}

enum Place {
    Private(Box<[Memory]>),
    Shared(SharedMap),
}

impl Table {
    /// Makes a table that only this process reads.
    pub fn private(workers: usize, groups: Groups) -> Self {
        let memory = std::iter::repeat_with(Memory::new).take(groups.count).collect();
        Self { memory: Place::Private(memory), groups, workers }.prepared()
    }

    /// Makes a table that programs in the kernel read.
    ///
    /// # Errors
    /// The process has no CAP_BPF, or the kernel is older than Linux 5.5.
    pub fn shared(workers: usize, groups: Groups) -> io::Result<Self> {
        let map = SharedMap::new(size_of::<Memory>(), groups.count)?;
        Ok(Self { memory: Place::Shared(map), groups, workers }.prepared())
    }

    fn prepared(self) -> Self {
        for (number, group) in self.memory().iter().enumerate() {
            let workers = self.workers.saturating_sub(number * self.groups.size).clamp(1, self.groups.size);
            group.workers.store(workers as u64, Relaxed);
            group.all.store(u64::MAX >> (MAX_WORKERS - workers), Relaxed);
        }
        self.set_parameters(&Parameters::default());
        self
    }

    #[allow(unsafe_code)]
    fn memory(&self) -> &[Memory] {
        match &self.memory {
            Place::Private(memory) => memory,
            // SAFETY: the map has this many elements as large as `Memory`, begins at a page, and lives as long as `self`. It consists of
            // atomics alone, for which all bytes are valid, and the kernel writes two of them by atomic operations.
            Place::Shared(map) => unsafe {
                std::slice::from_raw_parts(map.memory().cast::<Memory>().as_ptr(), self.groups.count)
            },
        }
    }

    /// The map for a program. `None`: the kernel does not read this table.
    pub(super) fn map(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Place::Private(_) => None,
            Place::Shared(map) => Some(map.as_fd()),
        }
    }

    /// How the workers form groups.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// The group of a worker, and the worker's number within it.
    fn group_of(&self, worker: usize) -> (&Memory, usize) {
        if let [group] = self.memory() {
            // Without a division: this is asked at each turn.
            return (group, worker);
        }
        let number = (worker / self.groups.size).min(self.groups.count - 1);
        (&self.memory()[number], worker % self.groups.size)
    }

    /// The row of a worker.
    pub fn row(&self, worker: usize) -> WorkerRow<'_> {
        let (group, number) = self.group_of(worker);
        WorkerRow { row: &group.rows[number], group, bit: 1 << number }
    }

    /// The status of each worker.
    pub fn statuses(&self) -> impl Iterator<Item = Status> {
        self.memory().iter().flat_map(|group| group.rows[..self.groups.size].iter().map(Row::status)).take(self.workers)
    }

    /// Sets how workers are selected from now on.
    pub fn set_parameters(&self, parameters: &Parameters) {
        for group in self.memory() {
            group.hung_after.store(nanoseconds(parameters.hung_after), Relaxed);
            group.session_weight.store(parameters.session_weight.to_bits(), Relaxed);
            group.connections_offset.store(parameters.connections_offset.to_bits(), Relaxed);
            group.pending_offset.store(parameters.pending_offset.to_bits(), Relaxed);
        }
    }

    /// How workers are selected.
    pub fn parameters(&self) -> Parameters {
        self.memory()[0].parameters()
    }

    /// Reserves the last workers of each group for confined listeners. One worker at least stays for the others.
    pub fn set_sandbox(&self, count: u16) {
        for group in self.memory() {
            let all = group.all.load(Relaxed);
            let ordinary = all.count_ones().saturating_sub(count.into()).max(1);
            group.sandbox.store(all & u64::MAX.checked_shl(ordinary).unwrap_or_default(), Relaxed);
        }
    }

    /// True if only confined listeners use the worker.
    pub fn is_sandbox(&self, worker: usize) -> bool {
        let (group, number) = self.group_of(worker);
        group.sandbox.load(Relaxed) >> number & 1 == 1
    }

    /// True if each group has workers of the sandbox.
    pub fn has_sandbox(&self) -> bool {
        self.memory().iter().all(|group| group.sandbox.load(Relaxed) != 0)
    }

    /// The programs whose listeners are confined.
    pub fn confined(&self) -> u64 {
        self.memory()[0].confined.load(Relaxed)
    }

    /// The status of each other worker of the same group, with its number.
    pub fn neighbours(&self, worker: usize) -> impl Iterator<Item = (usize, Status)> {
        let (group, number) = self.group_of(worker);
        let count = usize::try_from(group.workers.load(Relaxed)).unwrap_or_default().min(MAX_WORKERS);
        let first = worker - number;
        let others = group.rows[..count].iter().enumerate().filter(move |(other, _)| *other != number);
        others.map(move |(other, row)| (first + other, row.status()))
    }

    /// Confines the listeners of these programs, one bit for each, to the sandbox, and all others to the other workers.
    pub fn confine(&self, programs: u64) {
        self.memory().iter().for_each(|group| group.confined.store(programs, Relaxed));
    }

    /// Selects workers in the group of this one by their status, and publishes the selection.
    pub fn schedule(&self, worker: usize, now: Duration) {
        let (group, _) = self.group_of(worker);
        let count = usize::try_from(group.workers.load(Relaxed)).unwrap_or_default().min(MAX_WORKERS);
        // Most groups are small, and this runs at each turn.
        if count <= FEW_WORKERS {
            Self::schedule_group::<FEW_WORKERS>(group, count, now);
        } else {
            Self::schedule_group::<MAX_WORKERS>(group, count, now);
        }
    }

    /// Selects workers in a group of at most `MAX`.
    fn schedule_group<const MAX: usize>(group: &Memory, count: usize, now: Duration) {
        let mut statuses = [Status::default(); MAX];
        for (place, row) in statuses.iter_mut().zip(&group.rows[..count]) {
            *place = row.status();
        }
        // The sandbox is measured by itself: its workers have other listeners.
        let sandbox = group.sandbox.load(Relaxed);
        let ordinary = if sandbox == 0 { count } else { (sandbox.trailing_zeros() as usize).min(count) };
        let parameters = group.parameters();
        let mut selection = select(&statuses[..ordinary], now, &parameters);
        if ordinary < count {
            selection.add(&select(&statuses[ordinary..count], now, &parameters), ordinary);
        }
        group.publish(&selection);
    }

    /// Tells the kernel which workers of the first group get new connections.
    #[cfg(test)]
    pub(super) fn publish(&self, selection: &Selection) {
        self.memory()[0].publish(selection);
    }

    /// True if the worker gets new connections.
    pub fn is_selected(&self, worker: usize) -> bool {
        let (group, number) = self.group_of(worker);
        group.selected.load(Relaxed) >> number & 1 == 1
    }

    /// Sets how the kernel chooses.
    pub fn set_mode(&self, mode: Mode) {
        self.memory().iter().for_each(|group| group.mode.store(mode as u64, Relaxed));
    }

    /// How the kernel chooses, if it reads this table.
    pub fn mode(&self) -> Mode {
        let mode = self.memory()[0].mode.load(Relaxed);
        let others = [Mode::Directed, Mode::RoundRobin, Mode::First];
        others.into_iter().find(|other| *other as u64 == mode).unwrap_or_default()
    }
}

/// The row of one worker. It alone writes there, except that other threads may wake its tasks. It also keeps its bit among those of
/// idle workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerRow<'t> {
    row: &'t Row,
    group: &'t Memory,
    /// The worker's bit in the words of its group.
    bit: u64,
}

impl WorkerRow<'_> {
    /// The loop turns.
    pub fn turn(&self, now: Duration) {
        self.row.turned.store(nanoseconds(now), Relaxed);
    }

    /// The time of the latest turn.
    pub fn turned(&self) -> Duration {
        Duration::from_nanos(self.row.turned.load(Relaxed))
    }

    /// The loop waits for events from now on.
    pub fn park(&self) {
        self.row.parked.store(1, Relaxed);
        // All workers of the group write this word, so other modes leave it alone.
        if self.group.mode.load(Relaxed) == Mode::Directed as u64 {
            self.group.idle.fetch_or(self.bit, Relaxed);
        }
    }

    /// The loop has got events.
    pub fn unpark(&self, now: Duration) {
        // The turn first: a reader between the two must not take the worker for hung.
        self.turn(now);
        self.row.parked.store(0, Relaxed);
        if self.group.idle.load(Relaxed) & self.bit != 0 {
            self.group.idle.fetch_and(!self.bit, Relaxed);
        }
    }

    /// A task is woken by the worker's own thread.
    pub fn woken_here(&self) {
        add(&self.row.woken_here);
    }

    /// A task is woken by another thread.
    pub fn woken_elsewhere(&self) {
        self.row.woken_elsewhere.fetch_add(1, Relaxed);
    }

    /// A woken task is polled, or has ended: the worker's own thread does both.
    pub fn end_pending(&self) {
        add(&self.row.ended);
    }

    /// Sets the numbers of open connections and sessions.
    pub fn set_load(&self, connections: u64, sessions: u64) {
        self.row.connections.store(connections, Relaxed);
        self.row.sessions.store(sessions, Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    // Enough for centuries.
    u64::try_from(time.as_nanos()).unwrap_or(i64::MAX.cast_unsigned())
}

/// The time on the clock of the table.
///
/// # Errors
/// The system has no such clock.
pub fn now() -> io::Result<Duration> {
    Ok(nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn groups_have_about_the_same_size() {
        for (workers, most, count, size) in
            [(1, 64, 1, 1), (64, 64, 1, 64), (65, 64, 2, 33), (1024, 64, 16, 64), (6, 4, 2, 3)]
        {
            assert_eq!(Groups::divide(workers, most), Groups { count, size, by_destination: false }, "{workers}");
        }
        let table = Table::private(65, Groups::of(65));
        table.row(64).set_load(7, 0);
        assert_eq!(table.statuses().count(), 65);
        assert_eq!(table.statuses().last().map(|last| last.connections), Some(7));
        table.schedule(64, Duration::ZERO);
        assert!(table.is_selected(33) && !table.is_selected(64) && !table.is_selected(0));
    }

    #[test]
    fn workers_of_the_sandbox_are_compared_with_each_other() {
        let table = Table::private(4, Groups::of(4));
        let load = |loads: [u64; 4]| {
            loads.into_iter().enumerate().for_each(|(worker, load)| table.row(worker).set_load(load, 0));
            (0..4).for_each(|worker| table.row(worker).park());
            table.schedule(0, Duration::ZERO);
            (0..4).map(|worker| table.is_selected(worker)).collect::<Vec<_>>()
        };
        assert_eq!(load([100, 100, 0, 0]), [false, false, true, true]);
        table.set_sandbox(2);
        assert_eq!(load([100, 100, 0, 0]), [true; 4], "the empty ones are no measure for the others");
        assert_eq!(load([100, 0, 0, 100]), [false, true, true, false]);
        for (count, sandbox) in [(0, [false; 4]), (1, [false, false, false, true]), (9, [false, true, true, true])] {
            table.set_sandbox(count);
            assert_eq!([0, 1, 2, 3].map(|worker| table.is_sandbox(worker)), sandbox, "{count}");
        }
    }

    #[test]
    fn the_program_reads_where_the_workers_write() {
        for (field, offset) in [
            (offset_of!(Memory, selected), offset::SELECTED),
            (offset_of!(Memory, hung_after), offset::HUNG_AFTER),
            (offset_of!(Memory, mode), offset::MODE),
            (offset_of!(Memory, counter), offset::COUNTER),
            (offset_of!(Memory, workers), offset::WORKERS),
            (offset_of!(Memory, all), offset::ALL),
            (offset_of!(Memory, idle), offset::IDLE),
            (offset_of!(Memory, sandbox), offset::SANDBOX),
            (offset_of!(Memory, confined), offset::CONFINED),
            (offset_of!(Memory, rows), offset::FIRST_ROW),
            (offset_of!(Row, turned), offset::TURNED),
            (offset_of!(Row, parked), offset::PARKED),
        ] {
            assert_eq!(i16::try_from(field), Ok(offset));
        }
        assert_eq!(size_of::<Row>(), 1 << offset::ROW_SHIFT);
    }
}
