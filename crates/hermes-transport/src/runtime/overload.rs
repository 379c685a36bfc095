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
use hermes_net::host::usage;
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

/// What the process uses of its host, as last read by any worker.
#[derive(Debug)]
pub struct Usage {
    read_at: AtomicU64,
    memory: AtomicU64,
    descriptors: AtomicU64,
    /// What the system allows. `None`: it does not tell.
    memory_limit: Option<u64>,
    descriptor_limit: Option<u64>,
}

impl Default for Usage {
    fn default() -> Self {
        Self {
            read_at: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            descriptors: AtomicU64::new(0),
            memory_limit: usage::memory_limit(),
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
        self.memory.store(usage::memory().unwrap_or_default(), Ordering::Relaxed);
        self.descriptors.store(usage::descriptors().unwrap_or_default(), Ordering::Relaxed);
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
    /// Follows a signal that is at so many percent of its limit.
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
    ladders: RefCell<[Ladder; Signal::ALL.len()]>,
    taken: Cell<[bool; Step::ALL.len()]>,
    delay: Rc<Delay>,
    /// Signals that the steps have changed.
    changed: Notify,
}

impl WorkerOverload {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            ladders: RefCell::default(),
            taken: Cell::default(),
            delay: Rc::default(),
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
        let (of_memory, of_descriptors) =
            (memory.limit.or(usage.memory_limit), descriptors.limit.or(usage.descriptor_limit));
        let percents = [
            percent(usage.memory.load(Ordering::Relaxed), of_memory),
            percent(usage.descriptors.load(Ordering::Relaxed), of_descriptors),
            percent(micros(delay), limit.limit.map(micros)),
        ];
        let steps = [memory.steps, descriptors.steps, limit.steps];
        let before = *self.ladders.borrow();
        for ((ladder, percent), steps) in self.ladders.borrow_mut().iter_mut().zip(percents).zip(steps) {
            ladder.follow(percent, steps, now);
        }
        if *self.ladders.borrow() == before {
            return;
        }
        for ((signal, before), percent) in Signal::ALL.into_iter().zip(before).zip(percents) {
            // Of the signals that all workers share, one worker tells.
            if worker.number == 0 || signal == Signal::Delay {
                self.tell(signal, before, percent, worker.number);
            }
            self.count(signal, before);
        }
        self.combine();
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
        self.changed.notify_waiters();
    }
}

impl Drop for WorkerOverload {
    fn drop(&mut self) {
        let before = self.ladders.take();
        Signal::ALL.into_iter().zip(before).for_each(|(signal, before)| self.count(signal, before));
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
        let overload = WorkerOverload::new(Arc::new(Shared::new(1)));
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
        assert!(usage.memory.load(Ordering::Relaxed) > 1 << 20);
        assert!(percent(usage.memory.load(Ordering::Relaxed), usage.memory_limit) < 100);
        let descriptors = percent(usage.descriptors.load(Ordering::Relaxed), usage.descriptor_limit);
        assert!(descriptors < 100, "{descriptors}");
        assert_eq!(percent(5, None), 0);
    }
}
