//! Job queue of the journal's thread.
//!
//! In: jobs, and the maximum delay of each. Out: all queued jobs at once, in order. A job wakes the thread only if the
//! thread would check the queue too late. Entries that nobody waits for stay queued until something else is written.
//! Most small exchanges end before that, so that none of their entries is written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::journal_record::JournalRecord;
use super::{Job, SMALL};

/// Minimum interval between writes of bulk data. A write is immediate if the last one was longer ago.
const MIN_WRITE_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum delay of jobs that nobody waits for.
const MAX_FLUSH_DELAY: Duration = Duration::from_millis(10);
/// Number of queued bytes at which jobs are due at once.
const MANY: usize = 256 << 10;
/// Idle time after which the thread stops polling and must be woken.
const RESTS: Duration = Duration::from_secs(1);

/// The urgency of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FlushUrgency {
    Whenever,
    Soon,
    Now,
}

impl FlushUrgency {
    fn of(job: &Job) -> Self {
        match job {
            Job::Release { .. } => FlushUrgency::Whenever,
            Job::Read { .. } => FlushUrgency::Now,
            Job::Keep { note, .. } => match note {
                JournalRecord::Begin { .. }
                | JournalRecord::Lead { .. }
                | JournalRecord::Asked { .. }
                | JournalRecord::Gone { .. }
                | JournalRecord::Forget => FlushUrgency::Whenever,
                // A head is sent once it is durable. A local endpoint's head is empty, and nobody waits for it.
                JournalRecord::Head { bytes, .. } if bytes.is_empty() => FlushUrgency::Whenever,
                JournalRecord::Intent(_) | JournalRecord::Head { .. } => FlushUrgency::Now,
                // A small complete stream is sent without waiting. The beginning and the end of a longer one wait to be
                // durable.
                JournalRecord::Bytes { offset: 0, is_last: true, bytes, .. } if bytes.len() <= SMALL => {
                    FlushUrgency::Whenever
                }
                JournalRecord::Bytes { offset: 0, .. } | JournalRecord::Bytes { is_last: true, .. } => {
                    FlushUrgency::Now
                }
                JournalRecord::Bytes { .. } => FlushUrgency::Soon,
            },
        }
    }
}

fn size(job: &Job) -> usize {
    match job {
        Job::Keep { note, .. } => super::size(note),
        _ => 0,
    }
}

/// The time at which the thread checks the queue next.
#[derive(Debug, Clone, Copy)]
enum Sleep {
    /// The thread is working, and checks the queue when it is done.
    Busy,
    Until(Instant),
    /// The thread sleeps until it is woken.
    Deep,
}

#[derive(Debug)]
struct Inner {
    jobs: Vec<Job>,
    bytes: usize,
    /// Arrival of the first queued job.
    since: Instant,
    haste: FlushUrgency,
    /// Last time at which the thread took jobs.
    taken: Instant,
    sleep: Sleep,
    is_over: bool,
}

impl Inner {
    /// Returns the time at which the queued jobs are due. `None`: the queue is empty.
    fn due(&self, now: Instant) -> Option<Instant> {
        if self.jobs.is_empty() {
            return None;
        }
        Some(match self.haste {
            FlushUrgency::Now => now,
            _ if self.bytes >= MANY || self.is_over => now,
            FlushUrgency::Soon => now.max(self.taken + MIN_WRITE_INTERVAL),
            FlushUrgency::Whenever => self.since + MAX_FLUSH_DELAY,
        })
    }
}

/// The job queue of the journal's thread.
#[derive(Debug)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    bell: Condvar,
}

impl Queue {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let inner = Inner {
            jobs: Vec::new(),
            bytes: 0,
            since: now,
            haste: FlushUrgency::Whenever,
            taken: now,
            sleep: Sleep::Deep,
            is_over: false,
        };
        Self { inner: Mutex::new(inner), bell: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn submit(&self, job: Job) {
        let now = Instant::now();
        let mut inner = self.lock();
        if inner.jobs.is_empty() {
            (inner.since, inner.haste) = (now, FlushUrgency::Whenever);
        }
        inner.haste = inner.haste.max(FlushUrgency::of(&job));
        inner.bytes += size(&job);
        inner.jobs.push(job);
        let is_late = match inner.sleep {
            Sleep::Busy => false,
            Sleep::Until(at) => inner.due(now).is_some_and(|due| due < at),
            Sleep::Deep => true,
        };
        if is_late {
            // The first wake-up is enough; later jobs need none.
            inner.sleep = Sleep::Busy;
            drop(inner);
            self.bell.notify_one();
        }
    }

    /// Ends the queue. No further jobs arrive.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.bell.notify_one();
    }

    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// Waits for due jobs, or until `most` has passed. Returns `None` at the end of the queue.
    pub(super) fn take(&self, most: Option<Duration>) -> Option<Vec<Job>> {
        let began = Instant::now();
        let mut inner = self.lock();
        loop {
            let now = Instant::now();
            let due = inner.due(now);
            let is_late = most.is_some_and(|most| now >= began + most);
            if due.is_some_and(|due| due <= now) || is_late {
                (inner.sleep, inner.bytes, inner.taken) = (Sleep::Busy, 0, now);
                return Some(std::mem::take(&mut inner.jobs));
            }
            if inner.is_over {
                return None;
            }
            let look = [due, most.map(|most| began + most)].into_iter().flatten().min();
            let is_awake = || now < inner.taken + RESTS;
            match look.or_else(|| is_awake().then(|| now + MAX_FLUSH_DELAY)) {
                Some(at) => {
                    inner.sleep = Sleep::Until(at);
                    let waited = self.bell.wait_timeout(inner, at - now);
                    inner = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => {
                    inner.sleep = Sleep::Deep;
                    inner = self.bell.wait(inner).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytes::Bytes;
    use hermes_wire::custody::{Direction, ExchangeId};

    use super::*;
    use crate::journal_record::Intent;

    fn keep(note: JournalRecord) -> Job {
        Job::Keep { id: ExchangeId([1; 16]), note, is_synced: false }
    }

    fn bytes(offset: u64, length: usize, is_last: bool) -> Job {
        let bytes = Bytes::from(vec![0; length]);
        keep(JournalRecord::Bytes { part: Direction::Response, offset, is_last, bytes })
    }

    #[test]
    fn what_somebody_waits_for_is_taken_at_once() {
        for job in [
            keep(JournalRecord::Intent(Intent::Certain)),
            bytes(0, 1, false),
            bytes(100, 0, true),
            bytes(0, SMALL + 1, true),
        ] {
            assert_eq!(FlushUrgency::of(&job), FlushUrgency::Now);
        }
        assert_eq!(FlushUrgency::of(&bytes(100, 100, false)), FlushUrgency::Soon);
        for job in [keep(JournalRecord::Forget), bytes(0, SMALL, true)] {
            assert_eq!(FlushUrgency::of(&job), FlushUrgency::Whenever);
        }
    }

    #[test]
    fn what_may_wait_is_taken_with_what_may_not() {
        let queue = Queue::new();
        let now = Instant::now();
        queue.submit(keep(JournalRecord::Forget));
        assert!(queue.lock().due(now).unwrap() > now);
        queue.submit(bytes(100, 100, false));
        assert!(queue.lock().due(now).unwrap() <= now + MIN_WRITE_INTERVAL);
        queue.submit(bytes(200, MANY, false));
        assert_eq!(queue.lock().due(now), Some(now));
        assert_eq!(queue.take(None).unwrap().len(), 3);
        assert_eq!(queue.lock().due(now), None);
    }

    #[test]
    fn what_may_wait_is_taken_by_itself_and_all_at_the_end() {
        let queue = Queue::new();
        queue.submit(keep(JournalRecord::Forget));
        assert_eq!(queue.take(None).unwrap().len(), 1);
        assert!(
            queue.take(Some(Duration::from_millis(1))).unwrap().is_empty(),
            "a disk that takes nothing is tried again"
        );
        queue.submit(keep(JournalRecord::Forget));
        queue.end();
        assert_eq!(queue.take(None).map(|jobs| jobs.len()), Some(1));
        assert!(queue.take(None).is_none());
    }

    #[test]
    fn who_sleeps_is_woken() {
        let queue = Queue::new();
        // The thread marks itself as asleep.
        queue.lock().sleep = Sleep::Busy;
        queue.lock().taken = Instant::now().checked_sub(2 * RESTS).unwrap();
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| queue.take(None).unwrap().len());
            while !matches!(queue.lock().sleep, Sleep::Deep) {
                std::thread::yield_now();
            }
            queue.submit(keep(JournalRecord::Forget));
            assert_eq!(taken.join().unwrap(), 1);
        });
    }
}
