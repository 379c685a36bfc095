//! The turns of a worker's loop: what the loop tells the table of workers (paper 003, Section 5.1).
//!
//! In: the runtime that waits and continues, tasks that are woken and polled. Out: the worker's row of the table, the selection of
//! workers at the end of each turn, and counts of turns. Never: a choice of its own.
//!
//! A turn is everything between two waits for events. A busy loop never waits, so the tasks themselves report that it turns. The
//! runtime does not tell how many tasks wait to be polled. Each task is therefore wrapped: it counts from its wake until its poll.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use hermes_net::dispatch::{self, WorkerRow};
use hermes_net::host::usage;
use tokio::sync::Notify;

use super::Shared;
use super::sandbox::{self, Reason, Tag};
use super::workers::STANDSTILL;

/// Time after which a loop that does not wait selects workers again.
const SELECTION_INTERVAL: Duration = Duration::from_millis(5);
/// The upper bounds of the histograms: powers of two, up to 2^22, and above.
pub const CLASSES: usize = 24;

/// A histogram whose classes are powers of two. Its worker alone writes it.
#[derive(Debug, Default)]
pub struct Histogram {
    classes: [AtomicU64; CLASSES],
    sum: AtomicU64,
}

impl Histogram {
    fn observe(&self, value: u64) {
        let class = (u64::BITS - value.leading_zeros()) as usize;
        add(&self.classes[class.min(CLASSES - 1)], 1);
        add(&self.sum, value);
    }

    /// The count of each class. Class `n` has the values below 2^n that no class before it has; the last one has all others.
    pub fn counts(&self) -> [u64; CLASSES] {
        std::array::from_fn(|class| self.classes[class].load(Ordering::Relaxed))
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// The sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}

/// Adds to a number that this thread alone writes, which takes no atomic addition.
fn add(number: &AtomicU64, value: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

/// The counters of a worker's turns.
#[derive(Debug, Default)]
pub struct TurnCounts {
    /// Polled tasks of each turn.
    pub events: Histogram,
    /// Microseconds of each turn.
    pub micros: Histogram,
    /// Runs of the scheduler.
    pub selections: AtomicU64,
}

/// The next number for `Turns`.
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The number of this thread's `Turns`. 0: its loop has not turned, or there is none.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// The turns of one worker.
pub struct Turns {
    /// Different for each `Turns` of this process.
    number: u64,
    shared: Arc<Shared>,
    worker: usize,
    /// Polls since the turn began.
    polls: AtomicU64,
    /// Nanoseconds of the table's clock.
    began: AtomicU64,
    selected: AtomicU64,
    /// The listener of the task that is being polled.
    polled: AtomicU32,
    /// Another worker stood still when this one had nothing to do.
    others_stand_still: Notify,
    /// Nanoseconds that the thread has waited for a core, and the table's clock, when last asked.
    waited: AtomicU64,
    asked: AtomicU64,
    /// The last search in the accept queues of other workers found nothing. Reset at the end of each turn.
    found_nothing: AtomicBool,
}

impl Turns {
    /// Starts the first turn of a worker.
    pub fn new(shared: Arc<Shared>, worker: usize) -> Arc<Self> {
        let zero = AtomicU64::default;
        let this = Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            shared,
            worker,
            polls: zero(),
            began: zero(),
            selected: zero(),
            polled: AtomicU32::new(0),
            waited: zero(),
            asked: zero(),
            others_stand_still: Notify::new(),
            found_nothing: AtomicBool::new(false),
        };
        this.begin();
        Arc::new(this)
    }

    /// The number of the worker.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// The worker's row of the table.
    pub fn row(&self) -> WorkerRow<'_> {
        self.shared.status.table.row(self.worker)
    }

    /// The loop has got events. Called by its thread.
    pub fn begin(&self) {
        OWN.set(self.number);
        let now = now();
        self.row().unpark(now);
        self.began.store(nanoseconds(now), Ordering::Relaxed);
        self.polls.store(0, Ordering::Relaxed);
    }

    /// True if this thread runs the loop.
    fn is_here(&self) -> bool {
        OWN.get() == self.number
    }

    /// The loop is going to wait for events. Called by its thread.
    pub fn end(&self) {
        let now = now();
        let counts = &self.shared.status.turns[self.worker];
        self.look_at_task(now, Tag::default());
        counts.events.observe(self.polls.load(Ordering::Relaxed));
        counts.micros.observe(nanoseconds(now).saturating_sub(self.began.load(Ordering::Relaxed)) / 1000);
        self.row().park();
        self.select(now);
        if !self.shared.status.relieves.load(Ordering::Relaxed) {
            return;
        }
        // A task that is woken here runs before the loop waits.
        let has_looked = self.found_nothing.swap(false, Ordering::Relaxed);
        if !has_looked && self.shared.status.standing(self.worker, now).next().is_some() {
            self.others_stand_still.notify_one();
        }
    }

    /// Waits until this worker has nothing to do while another one stands still.
    pub async fn others_stand_still(&self) {
        self.others_stand_still.notified().await;
    }

    /// This worker may wait for events although another one stands still. It looks again after its next turn.
    pub fn found_nothing(&self) {
        self.found_nothing.store(true, Ordering::Relaxed);
    }

    /// A task of this listener is about to be polled.
    pub(super) fn polled(&self, tag: Tag) {
        let polls = self.polls.load(Ordering::Relaxed) + 1;
        self.polls.store(polls, Ordering::Relaxed);
        if polls == 1 {
            // The turn has just begun, at a time that is known.
            self.polled.store(tag.0, Ordering::Relaxed);
            return;
        }
        let now = now();
        self.look_at_task(now, tag);
        self.row().turn(now);
        if nanoseconds(now).saturating_sub(self.looked()) >= nanoseconds(SELECTION_INTERVAL) {
            self.select(now);
        }
    }

    /// Called ten times a second. A later look divides the waits for a core since this tick among all time since then.
    pub(super) fn tick(&self) {
        if self.shared.status.sandbox.is_on() {
            self.waited_share(now());
        }
    }

    /// The share of the time since the last call in which this thread waited for a core.
    fn waited_share(&self, now: Duration) -> f64 {
        let Some(waited) = usage::waited_for_core() else { return 0.0 };
        let before = self.waited.swap(nanoseconds(waited), Ordering::Relaxed);
        let asked = self.asked.swap(nanoseconds(now), Ordering::Relaxed);
        let (waited, passed) = (nanoseconds(waited).saturating_sub(before), nanoseconds(now).saturating_sub(asked));
        if passed == 0 { 0.0 } else { (waited as f64 / passed as f64).min(1.0) }
    }

    /// Ends the time of the task that was polled last, and begins that of the next one.
    fn look_at_task(&self, now: Duration, next: Tag) {
        let last = Tag(self.polled.load(Ordering::Relaxed));
        if last != next {
            self.polled.store(next.0, Ordering::Relaxed);
        }
        if last == Tag::default() {
            return;
        }
        let time = now.saturating_sub(self.row().turned());
        if time >= sandbox::HELD_UP {
            // Time in which the thread did not get a core is not the listener's.
            let time = time.mul_f64(1.0 - self.waited_share(now));
            if time < sandbox::HELD_UP {
                return;
            }
            let status = &self.shared.status;
            let confined = status.sandbox.held_up(&status.table, last, time, self.shared.now());
            self.shared.report_confined(confined, Reason::HeldUp);
        }
    }

    /// The time of the last selection or of the beginning of this turn, whichever is later.
    fn looked(&self) -> u64 {
        self.selected.load(Ordering::Relaxed).max(self.began.load(Ordering::Relaxed))
    }

    /// Reports that all workers outside the sandbox stood still. The first of them to go on is the one that can tell.
    fn look_back(&self, now: Duration) {
        if self.shared.status.table.is_sandbox(self.worker) {
            return;
        }
        let stood_still = nanoseconds(now).saturating_sub(self.looked()) >= nanoseconds(STANDSTILL);
        if !stood_still || !self.shared.status.stand_still(Some(self.worker)) {
            return;
        }
        self.shared.metrics.standstills.inc();
        if let Some(more) = self.shared.standstills.happened(self.shared.now()) {
            tracing::warn!(more, "all workers stood still for a second or more; `/workers` shows their turns");
        }
    }

    fn select(&self, now: Duration) {
        self.look_back(now);
        self.selected.store(nanoseconds(now), Ordering::Relaxed);
        add(&self.shared.status.turns[self.worker].selections, 1);
        self.shared.status.table.schedule(self.worker, now);
    }
}

/// A future of no listener, which reports each poll.
pub async fn reported<F: Future>(turns: Arc<Turns>, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|cx| {
        turns.polled(Tag::default());
        future.as_mut().poll(cx)
    })
    .await
}

pin_project_lite::pin_project! {
    /// A task of the worker, which counts as pending from its wake until its poll.
    pub(super) struct Counted<F> {
        #[pin]
        task: F,
        wakes: Arc<Wakes>,
        waker: Waker,
        tag: Tag,
    }

    impl<F> PinnedDrop for Counted<F> {
        fn drop(this: Pin<&mut Self>) {
            this.wakes.end();
        }
    }
}

impl<F> Counted<F> {
    /// Wraps a task that is about to be spawned, which wakes it. `tag`: its listener.
    pub(super) fn new(turns: Arc<Turns>, tag: Tag, task: F) -> Self {
        let wakes = Arc::new(Wakes { turns, here: asleep(), elsewhere: asleep(), task: OnceLock::new() });
        wakes.count();
        Self { task, waker: wakes.clone().into(), wakes, tag }
    }
}

impl<F: Future<Output = ()>> Future for Counted<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        this.wakes.task.get_or_init(|| cx.waker().clone());
        this.wakes.poll();
        this.wakes.turns.polled(*this.tag);
        this.task.poll(&mut Context::from_waker(this.waker))
    }
}

/// The states of a task for `Wakes`.
const ASLEEP: u8 = 0;
const WOKEN: u8 = 1;
const ENDED: u8 = 2;

fn asleep() -> AtomicU8 {
    AtomicU8::new(ASLEEP)
}

/// The wakes of a task. Others may hold wakers of a task that has ended: those count no more.
struct Wakes {
    turns: Arc<Turns>,
    /// Whether the worker's own thread has woken it. That thread alone writes here, so it needs no atomic exchange.
    here: AtomicU8,
    /// Whether another thread has woken it.
    elsewhere: AtomicU8,
    /// The waker of the runtime, which is the same for the whole life of a spawned task. Empty before the first poll.
    task: OnceLock<Waker>,
}

impl Wakes {
    /// Counts a wake, unless the task is woken already.
    fn count(&self) {
        let (here, elsewhere) = (self.here.load(Ordering::Relaxed), self.elsewhere.load(Ordering::Relaxed));
        if (here, elsewhere) != (ASLEEP, ASLEEP) {
            return;
        }
        if self.turns.is_here() {
            self.here.store(WOKEN, Ordering::Relaxed);
            self.turns.row().woken_here();
        } else if self.elsewhere.compare_exchange(ASLEEP, WOKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.turns.row().woken_elsewhere();
        }
    }

    /// The task is about to be polled. Called by the worker's own thread, as `end`.
    fn poll(&self) {
        if self.here.load(Ordering::Relaxed) == WOKEN {
            self.here.store(ASLEEP, Ordering::Relaxed);
            self.turns.row().end_pending();
        }
        // No other thread changes `WOKEN`, so a load and a store are enough.
        if self.elsewhere.load(Ordering::Relaxed) == WOKEN {
            self.elsewhere.store(ASLEEP, Ordering::Relaxed);
            self.turns.row().end_pending();
        }
    }

    fn end(&self) {
        let here = self.here.swap(ENDED, Ordering::Relaxed);
        let elsewhere = self.elsewhere.swap(ENDED, Ordering::Relaxed);
        [here, elsewhere].into_iter().filter(|state| *state == WOKEN).for_each(|_| self.turns.row().end_pending());
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.count();
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
    }
}

/// Without a clock, the time stands still: then no worker ever counts as hung.
fn now() -> Duration {
    dispatch::now().unwrap_or_default()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use hermes_net::dispatch::scheduler::Parameters;

    fn pending(turns: &Turns) -> u64 {
        turns.shared.status.table.statuses().next().unwrap().pending
    }

    fn poll(task: Pin<&mut impl Future<Output = ()>>) -> bool {
        task.poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    #[test]
    fn a_task_is_pending_from_its_wake_until_its_poll_or_its_end() {
        let turns = Turns::new(Arc::new(Shared::new(1)), 0);
        let seen: Arc<OnceLock<Waker>> = Arc::default();
        let task = {
            let seen = seen.clone();
            std::future::poll_fn(move |cx| {
                seen.get_or_init(|| cx.waker().clone());
                Poll::<()>::Pending
            })
        };
        let mut task = Box::pin(Counted::new(turns.clone(), Tag::default(), task));
        assert_eq!(pending(&turns), 1, "the runtime polls a spawned task");
        assert!(poll(task.as_mut()));
        assert_eq!(pending(&turns), 0);
        let waker = seen.get().unwrap().clone();
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert_eq!(pending(&turns), 1, "two wakes, one poll");
        assert!(poll(task.as_mut()));
        std::thread::scope(|threads| threads.spawn(|| waker.wake_by_ref()).join().unwrap());
        assert_eq!(pending(&turns), 1, "another thread woke it");
        waker.wake_by_ref();
        assert_eq!(pending(&turns), 1, "it is woken already");
        assert!(poll(task.as_mut()));
        assert_eq!(pending(&turns), 0);
        waker.wake_by_ref();
        assert_eq!(pending(&turns), 1);
        drop(task);
        assert_eq!(pending(&turns), 0);
        waker.wake();
        assert_eq!(pending(&turns), 0, "nobody polls a task that has ended");
    }

    #[test]
    fn a_turn_counts_its_polls_and_selects_workers() {
        let turns = Turns::new(Arc::new(Shared::new(2)), 1);
        (0..9).for_each(|_| turns.polled(Tag::default()));
        turns.end();
        let counts = &turns.shared.status.turns[1];
        assert_eq!((counts.events.count(), counts.events.sum()), (1, 9));
        assert!(counts.selections.load(Ordering::Relaxed) >= 1);
        assert!(turns.shared.status.table.is_selected(1));
        assert_eq!(turns.shared.status.view()[1].state, "waiting");
        let patient = Parameters { hung_after: Duration::from_secs(60), ..Parameters::default() };
        turns.shared.status.table.set_parameters(&patient);
        turns.begin();
        assert_eq!(turns.shared.status.view()[1].state, "turning");
    }

    #[test]
    fn the_first_worker_that_goes_on_tells_that_all_stood_still() {
        let shared = Arc::new(Shared::new(2));
        let (first, second) = (Turns::new(shared.clone(), 0), Turns::new(shared.clone(), 1));
        let later = now() + STANDSTILL;
        first.end();
        second.look_back(later);
        assert_eq!(shared.metrics.standstills.get(), 0, "the first one waits, and can serve");
        assert!(!shared.status.stand_still(None));
        // It last turned long ago.
        first.row().unpark(Duration::ZERO);
        second.look_back(later);
        assert_eq!(shared.metrics.standstills.get(), 1);
        second.look_back(now());
        assert_eq!(shared.metrics.standstills.get(), 1, "the second one turns");
    }

    #[test]
    fn a_histogram_has_classes_of_powers_of_two() {
        let histogram = Histogram::default();
        [0, 1, 2, 3, 4, u64::MAX].into_iter().for_each(|value| histogram.observe(value));
        let counts = histogram.counts();
        assert_eq!((&counts[..4], counts[CLASSES - 1]), (&[1, 1, 2, 1][..], 1));
        assert_eq!(histogram.count(), 6);
    }
}
