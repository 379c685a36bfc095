//! The budget of a service: what it lets through in which time, as its answers have shown.
//!
//! In: requests that want to go, those that went, and refusals with what they say; the time is given. Out: who goes when.
//! Pure. Until a first refusal it only notes when requests went.
//!
//! The model is a rate. It is measured at a refusal: what the service took in the window before, where the window is what it
//! says itself (`Retry-After`, a policy), else a second. Requests then go one after the other, a little slower than that:
//! such a flow fits a window that is fixed, one that slides, and a bucket. Now and then, where more would go, a higher rate is
//! probed; a probe that is refused costs what the service asks to wait, so that failed probes become rare.

use std::collections::VecDeque;
use std::time::Duration;

use crate::fair_queue::{Client, Pushed, Queue, Ticket};
use crate::headers::Hint;

/// Of the rate that was measured: so that no more than the limit falls into any window, in spite of jitter.
const MARGIN: f64 = 0.985;
/// A slot may be used so much later than it was due without being lost. Less than the margin leaves of a second.
const LATENESS: Duration = Duration::from_millis(10);
/// And so much later where others wait and the last second has room: a machine that is busy does not lose all that it was
/// late with.
const CAUGHT_UP: Duration = Duration::from_millis(200);
/// A window that nothing is said of.
const WINDOW: Duration = Duration::from_secs(1);
/// Nor is one longer, or shorter, than this.
const LONGEST: Duration = Duration::from_secs(60);
/// After a refusal at a rate that had been measured, without a probe: the limit has come down, or others share it.
const DECREASE: f64 = 0.93;
/// Unless it took as much as this of the rate before, and has not refused so for as long as that.
const ENOUGH: f64 = 0.9;
const SELDOM: Duration = Duration::from_secs(10);
/// The second time.
const MORE_MARGIN: f64 = 0.98;
/// How much higher a probe is.
const PROBE: f64 = 1.25;
/// And in the beginning: what was taken in one burst may be far less than what is taken all the time. Where it was, the
/// rate is searched for by halves as soon as such a probe fails; where the first of them fails at once, it was not.
const FIRST_PROBE: f64 = 2.0;
/// The search is over.
const FOUND: f64 = 1.15;
/// The least that is made of what a service states.
const LEAST_OF_STATED: f64 = 0.5;
/// What is given back of that with each interval that passes.
const GIVEN_BACK: f64 = 1.05;
/// Until the next probe, after one that failed; doubles.
const INTERVAL: Duration = Duration::from_secs(60);
const LONGEST_INTERVAL: Duration = Duration::from_secs(600);
/// What the service takes in the long run, its own waits included, it has not taken less of for being refused once.
const LONG_RUN: Duration = Duration::from_secs(10);
/// A refusal that does not say when to come again: the first wait, which doubles while nothing passes.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// A limit that nobody had to wait for in so long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Requests whose times are kept. Of more, the window is the time that they span.
const NOTED: usize = 8192;
/// The lowest rate a second: one request a minute.
const SLOWEST: f64 = 1.0 / 60.0;

/// What becomes of a request that wants to go.
#[derive(Debug, PartialEq, Eq)]
pub enum Entered {
    /// It goes now.
    Goes,
    /// It waits in the queue.
    Waits,
    /// It waits, and another one does so no more.
    InPlaceOf(Ticket),
    /// Too many wait.
    Full,
}

/// What is known of a service, and who waits for it.
#[derive(Debug)]
pub struct Budget {
    limit: Option<Limit>,
    /// When requests went that were not refused, as far as is known.
    went: VecDeque<Duration>,
    queue: Queue,
}

#[derive(Debug)]
struct Limit {
    /// Requests a second.
    rate: f64,
    /// When the next one may go.
    due: Duration,
    /// Nobody goes before.
    closed_until: Duration,
    /// The last refusal; those of requests that went before it are the same one.
    refused_at: Duration,
    /// The window before it of which the rate has still to be measured: once all answers had time to come.
    unmeasured: Option<Duration>,
    /// Refusals with nothing between that passed.
    in_row: u32,
    /// The rate that was there before a probe.
    proven: f64,
    is_probing: bool,
    probe_at: Duration,
    interval: Duration,
    /// How much higher the next probe is.
    step: f64,
    /// A probe of the search has gone well.
    has_grown: bool,
    /// The rate that the service says itself.
    stated: Option<f64>,
    /// What is made of that: where it refuses in spite of it there is more that it does not say.
    share: f64,
    /// When it was last refused without a probe.
    refused_before: Option<Duration>,
    /// How often in short succession, beside the first time.
    chances: u32,
    /// When somebody waited last.
    waited_at: Duration,
}

impl Budget {
    /// Creates an estimator without a limit, for at most `most` requests that wait.
    pub fn new(most: usize) -> Self {
        Self { limit: None, went: VecDeque::new(), queue: Queue::new(most) }
    }

    /// As the document says now.
    pub fn bound(&mut self, most: usize) {
        self.queue.bound(most);
    }

    /// The rate a second that it has found; `None` where there is no limit.
    pub fn rate(&self) -> Option<f64> {
        self.limit.as_ref().map(|limit| limit.rate).filter(|rate| rate.is_finite())
    }

    /// A request wants to go; one that was refused, again.
    pub fn enter(&mut self, now: Duration, client: &Client, ticket: Ticket, is_again: bool) -> Entered {
        if self.limit.as_ref().is_some_and(|limit| limit.is_forgotten(now)) && self.queue.is_empty() {
            self.limit = None;
        }
        if self.queue.is_empty() && self.take_slot(now, LATENESS) {
            return Entered::Goes;
        }
        if let Some(limit) = &mut self.limit {
            limit.waited_at = now;
        }
        match self.queue.push(client, ticket, is_again) {
            Pushed::Waits => Entered::Waits,
            Pushed::InPlaceOf(other) => Entered::InPlaceOf(other),
            Pushed::Full => Entered::Full,
        }
    }

    /// It waits no more.
    pub fn leave(&mut self, client: &Client, ticket: Ticket) {
        self.queue.leave(client, ticket);
    }

    /// The next one that goes now.
    pub fn release(&mut self, now: Duration) -> Option<Ticket> {
        if self.queue.is_empty() || !self.take_slot(now, CAUGHT_UP) {
            return None;
        }
        let ticket = self.queue.pop();
        let is_wanted = !self.queue.is_empty();
        if let Some(limit) = &mut self.limit {
            limit.waited_at = now;
            limit.probe(now, is_wanted);
        }
        ticket
    }

    /// When there may be somebody to release; `None` where nobody waits.
    pub fn next_at(&self) -> Option<Duration> {
        let limit = self.limit.as_ref();
        (!self.queue.is_empty()).then(|| limit.map_or(Duration::ZERO, |limit| limit.due.max(limit.closed_until)))
    }

    /// A request that went then was refused.
    pub fn refused(&mut self, now: Duration, went_at: Duration, hint: &Hint) {
        if let Ok(at) = self.went.binary_search(&went_at) {
            self.went.remove(at);
        }
        let limit = self.limit.get_or_insert_with(|| Limit::new(now));
        limit.state(hint);
        let is_same = limit.in_row > 0 && went_at <= limit.refused_at;
        if !is_same {
            limit.refused(now, hint);
        }
        let wait = hint.after.unwrap_or_else(|| if is_same { Duration::ZERO } else { limit.wait() });
        // Nobody's word closes it for longer: then one goes and sees.
        limit.closed_until = limit.closed_until.max(now.saturating_add(wait.min(LONGEST)));
    }

    /// A request that went then passed.
    pub fn passed(&mut self, went_at: Duration, hint: impl FnOnce() -> Hint) {
        let Some(limit) = &mut self.limit else { return };
        if went_at > limit.refused_at {
            limit.in_row = 0;
        }
        limit.state(&hint());
    }

    /// True where a request may go now, and does.
    fn take_slot(&mut self, now: Duration, lateness: Duration) -> bool {
        if let Some(limit) = &mut self.limit {
            if now < limit.closed_until || now < limit.due {
                return false;
            }
            if let Some(window) = limit.unmeasured.take() {
                limit.measure(now, window, &self.went);
            }
            // Opened just now, or late: the slots since then are still there, as far as the last second has room.
            limit.due = limit.due.max(limit.closed_until).max(now.saturating_sub(lateness));
            if now.saturating_sub(limit.due) > LATENESS {
                let in_a_second = rate_before(&self.went, now, WINDOW.div_f64(MARGIN)) / MARGIN;
                if in_a_second + 0.5 > limit.rate / MARGIN {
                    limit.due = now.saturating_sub(LATENESS);
                }
            }
            limit.due += Duration::from_secs_f64(limit.rate.recip());
        }
        if self.went.len() >= NOTED {
            self.went.pop_front();
        }
        // Times are those of one clock; in its order the search for them is short.
        let last = self.went.back().copied().unwrap_or_default();
        self.went.push_back(now.max(last));
        true
    }
}

impl Limit {
    fn new(now: Duration) -> Self {
        Self {
            rate: f64::INFINITY,
            due: Duration::ZERO,
            closed_until: now,
            refused_at: Duration::ZERO,
            unmeasured: None,
            in_row: 0,
            proven: 0.0,
            is_probing: false,
            probe_at: Duration::MAX,
            interval: INTERVAL,
            step: FIRST_PROBE,
            has_grown: false,
            stated: None,
            share: 1.0,
            refused_before: None,
            chances: 0,
            waited_at: now,
        }
    }

    fn is_forgotten(&self, now: Duration) -> bool {
        now > self.closed_until && now.saturating_sub(self.waited_at.max(self.refused_at)) > FORGOTTEN
    }

    /// What the service says of itself needs no measure.
    fn state(&mut self, hint: &Hint) {
        if let Some((count, window)) = hint.quota {
            self.stated = Some(count / window.as_secs_f64());
            self.apply_stated();
        }
    }

    fn apply_stated(&mut self) {
        if let Some(stated) = self.stated {
            self.rate = (MARGIN * self.share * stated).max(SLOWEST);
        }
    }

    fn refused(&mut self, now: Duration, hint: &Hint) {
        // What was refused right after a wait says that the wait was too short, and nothing of the rate.
        if self.in_row == 0 {
            self.unmeasured = Some(hint.after.unwrap_or(WINDOW).clamp(WINDOW, LONGEST));
        }
        self.in_row += 1;
        self.refused_at = now;
        self.waited_at = now;
    }

    /// Where nothing is said: longer each time, as the window may be long.
    fn wait(&self) -> Duration {
        let first = FIRST_WAIT.min(Duration::from_secs_f64(self.rate.max(SLOWEST).recip()).max(FIRST_WAIT / 2));
        first.saturating_mul(1 << self.in_row.saturating_sub(1).min(16)).min(LONGEST_WAIT)
    }

    /// The rate, from what went in the window before the refusal.
    fn measure(&mut self, now: Duration, window: Duration, went: &VecDeque<Duration>) {
        if self.stated.is_some() {
            // The first refusal, after which it was stated, says nothing against it.
            if self.probe_at < Duration::MAX {
                self.share = (self.share * DECREASE).max(LEAST_OF_STATED);
                self.apply_stated();
            }
            self.probe_at = now + self.interval;
            return;
        }
        if self.is_probing {
            (self.rate, self.is_probing) = (self.proven, false);
            if self.has_grown && self.step.sqrt() > FOUND {
                self.step = self.step.sqrt();
                self.probe_at = now + self.trial();
                return;
            }
            (self.step, self.has_grown) = (PROBE, false);
            self.probe_at = now + self.interval;
            self.interval = (self.interval * 2).min(LONGEST_INTERVAL);
            return;
        }
        // Where nothing went that was not refused, one in the time that it asks for is a beginning.
        let measured = MARGIN * rate_before(went, self.refused_at, window).max(window.as_secs_f64().recip());
        let is_first = self.rate.is_infinite();
        // Where the service took as much as ever, one request too many came by chance. Twice, and the margin is too small
        // for this network; more often is no chance.
        if !is_first && measured >= ENOUGH * self.rate {
            let is_seldom = self.refused_before.is_none_or(|before| now > before + SELDOM);
            self.chances = if is_seldom { 0 } else { self.chances + 1 };
            self.refused_before = Some(now);
            if self.chances < 2 {
                self.rate = if self.chances == 0 { self.rate } else { self.rate * MORE_MARGIN };
                self.probe_at = self.probe_at.max(now + self.trial());
                return;
            }
        }
        let long = if went.front().is_some_and(|first| *first + LONG_RUN <= self.refused_at) {
            MARGIN * rate_before(went, self.refused_at, LONG_RUN)
        } else {
            0.0
        };
        self.rate = measured.min(self.rate * DECREASE).max(long.min(self.rate)).max(SLOWEST);
        // What was taken in one burst says little of what is taken all the time: that is probed at once.
        self.probe_at = now + if is_first { self.trial() } else { self.interval };
    }

    /// Long enough for a refusal to come.
    fn trial(&self) -> Duration {
        // A smaller step takes longer to show in a window.
        let (requests, least) = if self.step > PROBE { (3.0, 1.2) } else { (10.0, 2.0) };
        Duration::from_secs_f64((requests / self.rate).clamp(least, 30.0))
    }

    /// Tries more, where more is wanted and the last try went well.
    fn probe(&mut self, now: Duration, is_wanted: bool) {
        if now < self.probe_at {
            return;
        }
        if self.stated.is_some() {
            self.share = (self.share * GIVEN_BACK).min(1.0);
            self.apply_stated();
            self.probe_at = now + self.interval;
            return;
        }
        if !is_wanted {
            // Nothing can be learnt.
            if self.is_probing {
                (self.rate, self.is_probing) = (self.proven, false);
            }
            self.probe_at = now + self.trial();
            return;
        }
        if self.is_probing {
            (self.interval, self.has_grown) = (INTERVAL, true);
        }
        (self.proven, self.is_probing) = (self.rate, true);
        self.rate *= self.step;
        self.probe_at = now + self.trial();
    }
}

/// How many a second went in the window that ends then.
fn rate_before(went: &VecDeque<Duration>, end: Duration, window: Duration) -> f64 {
    let begin = end.saturating_sub(window);
    let from = if window >= end { 0 } else { went.partition_point(|at| *at <= begin) };
    let to = went.partition_point(|at| *at <= end);
    // Where earlier ones were forgotten the window is what is left.
    let oldest = went.front().copied().unwrap_or_default();
    let span = if went.len() >= NOTED && oldest > begin { end.saturating_sub(oldest) } else { window };
    (to - from) as f64 / span.as_secs_f64().max(1e-3)
}
