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

use super::bpf::SharedMap;
use super::scheduler::{Selection, Status};

/// The most workers of a table: those that a selection of 64 bits has room for.
pub const MAX_WORKERS: usize = 64;

/// Offsets of the fields that the program reads, in bytes.
pub(super) mod offset {
    pub(in super::super) const SELECTED: i16 = 0;
    pub(in super::super) const HUNG_AFTER: i16 = 8;
    pub(in super::super) const MODE: i16 = 16;
    pub(in super::super) const COUNTER: i16 = 24;
    pub(in super::super) const WORKERS: i16 = 32;
    /// Rows follow each other from here on. These offsets are within a row.
    pub(in super::super) const FIRST_ROW: i16 = 64;
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
    pending: AtomicU64,
    connections: AtomicU64,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Memory {
    selected: AtomicU64,
    hung_after: AtomicU64,
    mode: AtomicU64,
    /// The round of `Mode::RoundRobin`.
    counter: AtomicU64,
    workers: AtomicU64,
    rows: [Row; MAX_WORKERS],
}

impl Memory {
    fn new() -> Self {
        let rows = std::array::from_fn(|_| Row::default());
        let zero = AtomicU64::default;
        Self { selected: zero(), hung_after: zero(), mode: zero(), counter: zero(), workers: zero(), rows }
    }
}

/// The table. With privileges, the kernel reads it too.
pub struct Table {
    memory: Place,
}

enum Place {
    Private(Box<Memory>),
    Shared(SharedMap),
}

impl Table {
    /// Makes a table that only this process reads.
    pub fn private(workers: usize) -> Self {
        Self { memory: Place::Private(Box::new(Memory::new())) }.with_workers(workers)
    }

    /// Makes a table that programs in the kernel read.
    ///
    /// # Errors
    /// The process has no CAP_BPF, or the kernel is older than Linux 5.5.
    pub fn shared(workers: usize) -> io::Result<Self> {
        Ok(Self { memory: Place::Shared(SharedMap::new(size_of::<Memory>())?) }.with_workers(workers))
    }

    fn with_workers(self, workers: usize) -> Self {
        self.memory().workers.store(workers.min(MAX_WORKERS) as u64, Relaxed);
        self
    }

    #[allow(unsafe_code)]
    fn memory(&self) -> &Memory {
        match &self.memory {
            Place::Private(memory) => memory,
            // SAFETY: the map is as large as `Memory`, begins at a page, and lives as long as `self`. It consists of atomics alone, for
            // which all bytes are valid, and the kernel writes one of them by an atomic addition.
            Place::Shared(map) => unsafe { map.memory().cast::<Memory>().as_ref() },
        }
    }

    /// The map for a program. `None`: the kernel does not read this table.
    pub(super) fn map(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Place::Private(_) => None,
            Place::Shared(map) => Some(map.as_fd()),
        }
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        usize::try_from(self.memory().workers.load(Relaxed)).unwrap_or_default().min(MAX_WORKERS)
    }

    /// The row of a worker, which it alone writes.
    pub fn row(&self, worker: usize) -> WorkerRow<'_> {
        WorkerRow { row: &self.memory().rows[worker % MAX_WORKERS] }
    }

    /// The status of each worker.
    pub fn statuses(&self, into: &mut Vec<Status>) {
        into.clear();
        into.extend(self.memory().rows[..self.workers()].iter().map(|row| Status {
            turned: Duration::from_nanos(row.turned.load(Relaxed)),
            is_parked: row.parked.load(Relaxed) != 0,
            pending: row.pending.load(Relaxed),
            connections: row.connections.load(Relaxed),
        }));
    }

    /// Tells the kernel which workers get new connections, and when a worker counts as hung.
    pub fn publish(&self, selection: &Selection, hung_after: Duration) {
        let memory = self.memory();
        memory.hung_after.store(nanoseconds(hung_after), Relaxed);
        memory.selected.store(selection.workers, Relaxed);
    }

    /// The published selection, one bit for each worker.
    pub fn selected(&self) -> u64 {
        self.memory().selected.load(Relaxed)
    }

    /// Sets how the kernel chooses.
    pub fn set_mode(&self, mode: super::Mode) {
        self.memory().mode.store(mode as u64, Relaxed);
    }
}

/// The row of one worker, which it alone writes.
#[derive(Clone, Copy, Debug)]
pub struct WorkerRow<'t> {
    row: &'t Row,
}

impl WorkerRow<'_> {
    /// The loop turns.
    pub fn turn(&self, now: Duration) {
        self.row.turned.store(nanoseconds(now), Relaxed);
    }

    /// The loop waits for events from now on.
    pub fn park(&self) {
        self.row.parked.store(1, Relaxed);
    }

    /// The loop has got events.
    pub fn unpark(&self, now: Duration) {
        // The turn first: a reader between the two must not take the worker for hung.
        self.turn(now);
        self.row.parked.store(0, Relaxed);
    }

    /// Sets the number of tasks that are woken and not yet polled.
    pub fn set_pending(&self, count: u64) {
        self.row.pending.store(count, Relaxed);
    }

    /// Sets the number of open connections.
    pub fn set_connections(&self, count: u64) {
        self.row.connections.store(count, Relaxed);
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
    fn the_program_reads_where_the_workers_write() {
        for (field, offset) in [
            (offset_of!(Memory, selected), offset::SELECTED),
            (offset_of!(Memory, hung_after), offset::HUNG_AFTER),
            (offset_of!(Memory, mode), offset::MODE),
            (offset_of!(Memory, counter), offset::COUNTER),
            (offset_of!(Memory, workers), offset::WORKERS),
            (offset_of!(Memory, rows), offset::FIRST_ROW),
            (offset_of!(Row, turned), offset::TURNED),
            (offset_of!(Row, parked), offset::PARKED),
        ] {
            assert_eq!(i16::try_from(field), Ok(offset));
        }
        assert_eq!(size_of::<Row>(), 1 << offset::ROW_SHIFT);
    }
}
