//! Overload: which steps a worker takes when memory, file descriptors or time run short.
//!
//! In: how much of each the node uses, read at each tick. Out: the steps in force, which listeners, sessions and buffers ask for. Never:
//! a wait for others; each worker follows the signals by itself.
//!
//! A step begins as soon as its signal reaches the step's share of the limit. It ends after the signal has been clearly below for a
//! while, so that it does not begin and end with each session.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hermes_model::snapshot::{Importance, Overload, Step};
use hermes_net::allocator;
use hermes_net::host::usage::{self, MemoryBound};
use http::HeaderMap;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{Shared, WorkerContext};
use crate::metrics::OverloadLabels;

/// The least time between two readings, in milliseconds of the node's clock.
const READING_INTERVAL: u64 = 100;
/// A step ends below this share of its beginning, in percent.
const EASED: u64 = 90;
/// The time for which the signal must stay below, in milliseconds.
const EASED_FOR: u64 = 1000;
/// The number of ticks whose least delay counts: a queue that empties in between is no overload.
const DELAYS: usize = 10;

/// How long a worker's work must wait too long before the worker parts with connections, and the time until it does so again. Both in
/// milliseconds.
const PARTS_AFTER: u64 = 3000;
const PARTS_EVERY: u64 = 1000;
/// The divisor that yields the connections with which it parts.
const PARTED_SHARE: usize = 20;

/// The time between two returns of free memory, in milliseconds.
const RETURN_INTERVAL: u64 = 1000;

/// The signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    Memory,
    Descriptors,
    Delay,
}

impl Signal {
    const ALL: [Signal; 3] = [Signal::Memory, Signal::Descriptors, Signal::Delay];

    fn as_str(self) -> &'static str {
        match self {
            Signal::Memory => "memory",
            Signal::Descriptors => "descriptors",
            Signal::Delay => "delay",
        }
    }
}

/// The memory and the descriptors of the process, as last read by any worker.
#[derive(Debug)]
pub struct Usage {
    read_at: AtomicU64,
    /// Memory of the process. Counts if the document has a limit.
    own_memory: AtomicU64,
    /// Used memory where the system limits it, and that limit.
    memory: AtomicU64,
    memory_limit: AtomicU64,
    descriptors: AtomicU64,
    /// The place of the system's limit. `None`: it does not tell.
    memory_bound: Option<MemoryBound>,
    /// The limit of the system. `None`: it does not tell.
    descriptor_limit: Option<u64>,
}

impl Default for Usage {
    fn default() -> Self {
        Self {
            read_at: AtomicU64::new(0),
            own_memory: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            memory_limit: AtomicU64::new(0),
            descriptors: AtomicU64::new(0),
            memory_bound: MemoryBound::find(),
            descriptor_limit: usage::descriptor_limit(),
        }
    }
}

impl Usage {
    /// Reads again, unless another worker has just done so.
    fn read(&self, now: u64) {
        let before = self.read_at.load(Ordering::Relaxed);
        let is_due = now >= before + READING_INTERVAL;
        if !is_due || self.read_at.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        // A read fails when descriptors run short. The last value stays then.
        if let Some(memory) = usage::own_memory() {
            self.own_memory.store(memory, Ordering::Relaxed);
        }
        if let Some(memory) = self.memory_bound.as_ref().and_then(MemoryBound::read) {
            self.memory.store(memory.used, Ordering::Relaxed);
            self.memory_limit.store(memory.limit, Ordering::Relaxed);
        }
        if let Some(descriptors) = usage::descriptors() {
            self.descriptors.store(descriptors, Ordering::Relaxed);
        }
    }

    /// The used part of the limit in percent. `own_limit`: that of the document.
    fn memory_percent(&self, own_limit: Option<u64>) -> u64 {
        match own_limit {
            Some(limit) => percent(self.own_memory.load(Ordering::Relaxed), Some(limit)),
            None => percent(self.memory.load(Ordering::Relaxed), Some(self.memory_limit.load(Ordering::Relaxed))),
        }
    }
}

/// The steps of one signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ladder {
    taken: [bool; Step::ALL.len()],
    /// Since when the signal has been clearly below each step that is taken.
    eased_at: [Option<u64>; Step::ALL.len()],
}

impl Ladder {
    /// Follows a signal. `percent` is its share of the limit.
    fn follow(&mut self, percent: u64, steps: [u16; Step::ALL.len()], now: u64) {
        for ((taken, eased_at), begins) in self.taken.iter_mut().zip(&mut self.eased_at).zip(steps.map(u64::from)) {
            let is_eased = percent * 100 < begins * EASED;
            let since = is_eased.then(|| eased_at.unwrap_or(now));
            *eased_at = since;
            *taken = percent >= begins || (*taken && since.is_none_or(|since| now < since + EASED_FOR));
        }
    }
}

/// The overload of one worker.
pub struct WorkerOverload {
    shared: Arc<Shared>,
    /// The number of the worker.
    worker: usize,
    ladders: RefCell<[Ladder; Signal::ALL.len()]>,
    taken: Cell<[bool; Step::ALL.len()]>,
    delay: Rc<Delay>,
    /// When the worker returns free memory again, in milliseconds of the node's clock.
    returns_at: Cell<u64>,
    /// When the worker parts with connections. `None` while its work does not wait too long.
    parts_at: Cell<Option<u64>>,
    /// Signals that the steps have changed.
    changed: Notify,
}

impl WorkerOverload {
    pub(super) fn new(shared: Arc<Shared>, worker: usize) -> Self {
        Self {
            shared,
            worker,
            ladders: RefCell::default(),
            taken: Cell::default(),
            delay: Rc::default(),
            returns_at: Cell::default(),
            parts_at: Cell::default(),
            changed: Notify::new(),
        }
    }

    /// True while the step is in force.
    pub fn takes(&self, step: Step) -> bool {
        self.taken.get()[step as usize]
    }

    /// Returns half of a bound of buffers while they shrink, or else all of it.
    pub fn bound(&self, bytes: usize) -> usize {
        if self.takes(Step::Shrink) { bytes / 2 } else { bytes }
    }

    /// True if a session of a route of this importance, with these header fields, is refused now.
    pub fn refuses(&self, importance: Importance, headers: &HeaderMap) -> bool {
        match importance {
            Importance::High => false,
            Importance::Normal if self.takes(Step::Refuse) => true,
            Importance::Normal => self.takes(Step::Shed) && is_background(headers),
            Importance::Low => self.takes(Step::Shed) || self.takes(Step::Refuse),
        }
    }

    /// Waits until the step is in force, or until it is not.
    pub async fn until(&self, step: Step, is_taken: bool) {
        while self.takes(step) != is_taken {
            self.changed.notified().await;
        }
    }

    /// The task by whose delay the worker knows how long ready work waits.
    pub fn probe(&self) -> impl Future<Output = ()> + 'static {
        let delay = self.delay.clone();
        async move {
            loop {
                delay.asks.notified().await;
                delay.answer();
            }
        }
    }

    /// Follows all signals. `due`: when this tick should have been.
    pub fn tick(&self, worker: &WorkerContext, due: Instant) {
        let (now, settings) = (worker.shared.now(), worker.snapshot().overload);
        let usage = &self.shared.usage;
        usage.read(now);
        let delay = self.delay.ask(due);
        self.shared.status.delays[worker.number].store(micros(delay), Ordering::Relaxed);
        let Overload { memory, descriptors, delay: limit } = settings;
        let percents = [
            usage.memory_percent(memory.limit),
            percent(usage.descriptors.load(Ordering::Relaxed), descriptors.limit.or(usage.descriptor_limit)),
            percent(micros(delay), limit.limit.map(micros)),
        ];
        if self.parts(percents[Signal::Delay as usize], micros(delay), worker.number, now) {
            worker.tables.part_with_some(worker, PARTED_SHARE);
        }
        let steps = [memory.steps, descriptors.steps, limit.steps];
        let before = *self.ladders.borrow();
        for ((ladder, percent), steps) in self.ladders.borrow_mut().iter_mut().zip(percents).zip(steps) {
            ladder.follow(percent, steps, now);
        }
        self.return_memory(now);
        if *self.ladders.borrow() == before {
            return;
        }
        for ((signal, before), percent) in Signal::ALL.into_iter().zip(before).zip(percents) {
            // One worker writes about the signals that all workers share.
            if worker.number == 0 || signal == Signal::Delay {
                self.tell(signal, before, percent, worker.number);
            }
            self.count(signal, before);
        }
        self.combine();
    }

    /// Returns free memory to the system while that is short. The allocator keeps it otherwise, and the step would last.
    fn return_memory(&self, now: u64) {
        let is_short = self.ladders.borrow()[Signal::Memory as usize].taken.contains(&true);
        if is_short && now >= self.returns_at.get() {
            self.returns_at.set(now + RETURN_INTERVAL);
            allocator::return_free();
        }
    }

    /// True if the worker parts with some of its connections now: its work has waited too long for a while, and less than half as
    /// long elsewhere. Their clients connect again, to another worker if connections are directed.
    fn parts(&self, percent: u64, delay: u64, worker: usize, now: u64) -> bool {
        if percent < 100 {
            self.parts_at.set(None);
            return false;
        }
        let due = self.parts_at.get().unwrap_or(now + PARTS_AFTER);
        self.parts_at.set(Some(due));
        if now < due {
            return false;
        }
        self.parts_at.set(Some(now + PARTS_EVERY));
        let (hung, delays) = (self.shared.status.hung(), &self.shared.status.delays);
        let table = &self.shared.status.table;
        // A client of the sandbox would come back there, and no other client comes there.
        let is_alike = |other: usize| other != worker && table.is_sandbox(other) == table.is_sandbox(worker);
        let others = delays.iter().enumerate().filter(|(other, _)| is_alike(*other) && !hung.contains(other));
        others.map(|(_, delay)| delay.load(Ordering::Relaxed)).min().is_some_and(|least| 2 * least <= delay)
    }

    /// Writes a log line for each step that began or ended.
    fn tell(&self, signal: Signal, before: Ladder, percent: u64, worker: usize) {
        let after = self.ladders.borrow()[signal as usize];
        let (signal, steps) = (signal.as_str(), Step::ALL.map(Step::as_str));
        for ((was, is), step) in before.taken.into_iter().zip(after.taken).zip(steps) {
            match (was, is) {
                (false, true) => tracing::warn!(signal, percent, step, worker, "overload: a step begins"),
                (true, false) => tracing::info!(signal, percent, step, worker, "overload: a step ends"),
                _ => {}
            }
        }
    }

    /// Counts this worker among those that take each step.
    fn count(&self, signal: Signal, before: Ladder) {
        let after = self.ladders.borrow()[signal as usize];
        for ((was, is), step) in before.taken.into_iter().zip(after.taken).zip(Step::ALL) {
            let labels = OverloadLabels { signal: signal.as_str(), step: step.as_str() };
            self.shared.metrics.overload.get_or_create(&labels).inc_by(i64::from(is) - i64::from(was));
        }
    }

    fn combine(&self) {
        let ladders = self.ladders.borrow();
        self.taken.set(std::array::from_fn(|step| ladders.iter().any(|ladder| ladder.taken[step])));
        drop(ladders);
        self.shared.status.stopped[self.worker].store(self.takes(Step::Stop), Ordering::Relaxed);
        self.changed.notify_waiters();
    }
}

impl Drop for WorkerOverload {
    fn drop(&mut self) {
        let before = self.ladders.take();
        Signal::ALL.into_iter().zip(before).for_each(|(signal, before)| self.count(signal, before));
        self.combine();
    }
}

/// How long a task of the worker waits until it runs.
#[derive(Default)]
struct Delay {
    asks: Notify,
    /// When the task should run. `None` once it has.
    asked: Cell<Option<Instant>>,
    answer: Cell<Duration>,
    latest: RefCell<VecDeque<Duration>>,
}

impl Delay {
    fn answer(&self) {
        if let Some(asked) = self.asked.take() {
            self.answer.set(asked.elapsed());
        }
    }

    /// Wakes the task, and returns the least delay of the latest ticks.
    fn ask(&self, due: Instant) -> Duration {
        let delay = self.asked.get().map_or(self.answer.get(), |asked| asked.elapsed());
        let mut latest = self.latest.borrow_mut();
        if latest.len() == DELAYS {
            latest.pop_front();
        }
        latest.push_back(delay);
        if self.asked.get().is_none() {
            self.asked.set(Some(due));
            self.asks.notify_one();
        }
        if latest.len() < DELAYS {
            return Duration::ZERO;
        }
        latest.iter().min().copied().unwrap_or_default()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Without a limit, the signal is silent.
fn percent(used: u64, limit: Option<u64>) -> u64 {
    limit.filter(|limit| *limit > 0).map_or(0, |limit| used.saturating_mul(100) / limit)
}

/// True if the client gave the request a lower urgency than the default, 3 (RFC 9218, section 4.1). A higher one is worth nothing
/// here, since every client could claim it.
fn is_background(headers: &HeaderMap) -> bool {
    let urgency = |part: &str| part.trim().strip_prefix("u=").and_then(|urgency| urgency.parse::<u8>().ok());
    let mut values = headers.get_all("priority").iter().filter_map(|value| value.to_str().ok());
    values.any(|value| value.split(',').filter_map(urgency).any(|urgency| urgency > 3))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STEPS: [u16; 4] = [80, 90, 95, 98];

    #[test]
    fn a_step_begins_at_once_and_ends_after_a_while_below() {
        let mut ladder = Ladder::default();
        ladder.follow(79, STEPS, 0);
        assert_eq!(ladder.taken, [false; 4]);
        ladder.follow(96, STEPS, 100);
        assert_eq!(ladder.taken, [true, true, true, false]);
        // 86 is above 90 percent of 95, and 85 is below.
        ladder.follow(86, STEPS, 200);
        ladder.follow(86, STEPS, 5000);
        assert_eq!(ladder.taken, [true, true, true, false]);
        ladder.follow(85, STEPS, 5100);
        ladder.follow(85, STEPS, 6000);
        assert_eq!(ladder.taken, [true, true, true, false], "900 ms");
        ladder.follow(86, STEPS, 6050);
        ladder.follow(85, STEPS, 6100);
        ladder.follow(85, STEPS, 7000);
        assert_eq!(ladder.taken, [true, true, true, false], "it began anew");
        ladder.follow(85, STEPS, 7100);
        assert_eq!(ladder.taken, [true, true, false, false]);
        ladder.follow(0, STEPS, 8000);
        ladder.follow(0, STEPS, 9000);
        assert_eq!(ladder.taken, [false; 4]);
    }

    #[test]
    fn importance_and_urgency_decide_who_is_refused() {
        let overload = WorkerOverload::new(Arc::new(Shared::new(1)), 0);
        let headers = |priority: &str| HeaderMap::from_iter([("priority".parse().unwrap(), priority.parse().unwrap())]);
        let (none, background, urgent) = (HeaderMap::new(), headers("i, u=5"), headers("u=0"));
        let refused = |importance| [&none, &background, &urgent].map(|headers| overload.refuses(importance, headers));
        assert_eq!(refused(Importance::Low), [false; 3]);
        overload.taken.set([true, true, false, false]);
        assert_eq!(refused(Importance::Low), [true; 3]);
        assert_eq!(refused(Importance::Normal), [false, true, false]);
        overload.taken.set([true, true, true, false]);
        assert_eq!(refused(Importance::Normal), [true; 3]);
        assert_eq!(refused(Importance::High), [false; 3]);
    }

    #[test]
    fn a_slow_worker_parts_with_connections_while_others_are_faster() {
        let overload = WorkerOverload::new(Arc::new(Shared::new(2)), 0);
        (0..2).for_each(|worker| overload.shared.status.table.row(worker).park());
        let parts = |percent, now| overload.parts(percent, 900, 0, now);
        assert!(!parts(100, 0) && !parts(100, 2900) && parts(100, 3000), "after three seconds");
        assert!(!parts(100, 3900) && parts(100, 4000), "and each second");
        overload.shared.status.delays[1].store(451, Ordering::Relaxed);
        assert!(!parts(100, 5000), "the other one is about as slow");
        overload.shared.status.delays[1].store(450, Ordering::Relaxed);
        assert!(!parts(99, 6000) && !parts(100, 7000), "it was fast enough in between");
        assert!(parts(100, 10_000));
    }

    #[tokio::test(start_paused = true)]
    async fn the_delay_is_the_least_of_a_second() {
        let delay = Delay::default();
        for _ in 0..DELAYS - 1 {
            assert_eq!(delay.ask(Instant::now()), Duration::ZERO, "too few ticks to tell");
            tokio::time::advance(Duration::from_millis(700)).await;
            delay.answer();
        }
        delay.ask(Instant::now());
        tokio::time::advance(Duration::from_millis(300)).await;
        assert_eq!(delay.ask(Instant::now()), Duration::from_millis(300), "the task has not run yet");
        delay.answer();
        assert_eq!(delay.ask(Instant::now()), Duration::from_millis(300));
    }

    #[test]
    fn the_system_tells_what_this_process_uses() {
        let usage = Usage::default();
        usage.read(READING_INTERVAL);
        assert!(usage.memory_percent(Some(1 << 20)) > 100, "a megabyte is little");
        assert!(usage.memory_percent(None) < 100);
        let descriptors = percent(usage.descriptors.load(Ordering::Relaxed), usage.descriptor_limit);
        assert!(descriptors < 100, "{descriptors}");
        assert_eq!(percent(5, None), 0);
    }
}
