//! Estimates the rate that a service allows, from its responses.
//!
//! In: requests to send, requests that were sent, refusals with their headers; callers pass the time. Out: the order
//! and time of each request. Pure. Until the first refusal it only records when requests were sent.
//!
//! The model is a rate. A refusal triggers a measurement: the number of requests that the service accepted in the
//! window before. The window is the one that the service states (`Retry-After`, a policy), or else a second. Requests
//! are then spaced evenly, slightly below that rate. Even spacing satisfies fixed windows, sliding windows and token
//! buckets alike. If there is more demand, a higher rate is probed now and then. A failed probe costs the wait that the
//! service demands, so that failed probes become rare.

use std::collections::VecDeque;
use std::time::Duration;

use crate::fair_queue::{Client, Enqueued, Queue, Ticket};
use crate::headers::RateHeaders;

/// Fraction of the measured rate that is used. The rest keeps jitter from exceeding the limit in any window.
const MARGIN: f64 = 0.985;
/// Maximum delay after which a slot can still be used. The value is below the part of a second that `MARGIN` leaves
/// free.
const LATENESS: Duration = Duration::from_millis(10);
/// The same while others wait and the last second has room, so that a busy machine does not lose all slots that it was
/// late for.
const CAUGHT_UP: Duration = Duration::from_millis(200);
/// The window if the service states none; shorter ones are extended to it.
const WINDOW: Duration = Duration::from_secs(1);
/// Maximum window, and maximum wait that a service can demand.
const MAX_WINDOW: Duration = Duration::from_secs(60);
/// Decrease after a refusal at a measured rate without a probe: the limit has fallen, or other clients share it.
const DECREASE: f64 = 0.93;
/// Exceptions to the decrease: the service accepted this fraction of the rate before, and has refused no such request
/// for `RARE_REFUSAL_INTERVAL`.
const ENOUGH: f64 = 0.9;
const RARE_REFUSAL_INTERVAL: Duration = Duration::from_secs(10);
/// Decrease after the second refusal of this kind.
const MORE_MARGIN: f64 = 0.98;
/// Increase of a probe.
const PROBE: f64 = 1.25;
/// Increase of the first probes, because a burst may be far below the sustained rate. If such probes succeed, the rate
/// is bisected once one fails. If the very first one fails, there is nothing to search for.
const FIRST_PROBE: f64 = 2.0;
/// Step below which the bisection ends.
const FOUND: f64 = 1.15;
/// Minimum fraction of a stated rate that is used.
const LEAST_OF_STATED: f64 = 0.5;
/// Increase of that fraction after each interval.
const GIVEN_BACK: f64 = 1.05;
/// Interval until the next probe, after one that failed; it doubles.
const FIRST_PROBE_INTERVAL: Duration = Duration::from_secs(60);
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(600);
/// Window of the long-term rate, including the service's own waits. A single refusal does not lower the estimate below
/// it.
const LONG_RUN: Duration = Duration::from_secs(10);
/// First wait after a refusal without `Retry-After`; it doubles while no request passes.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Time after which a limit is forgotten if no request had to wait for it.
const LIMIT_LIFETIME: Duration = Duration::from_secs(60);
/// Number of send times that are kept. With more requests, the window shrinks to the time that these span.
const MAX_SEND_TIMES: usize = 8192;
/// Minimum rate: one request a minute.
const MIN_RATE: f64 = 1.0 / 60.0;

/// The outcome for a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request is sent now.
    Goes,
    /// The request waits in the queue.
    Waits,
    /// The request waits instead of this one, which is removed from the queue.
    InPlaceOf(Ticket),
    /// The queue is full.
    Full,
}

/// The estimated limit of a service, and the queue for it.
#[derive(Debug)]
pub struct RateEstimator {
    limit: Option<Limit>,
    /// Send times of requests that were not refused, as far as is known.
    went: VecDeque<Duration>,
    queue: Queue,
}

#[derive(Debug)]
struct Limit {
    /// Requests a second.
    rate: f64,
    /// The time of the next free slot.
    due: Duration,
    /// No request is sent before this time.
    closed_until: Duration,
    /// The last refusal. Refusals of requests that were sent before it belong to it.
    refused_at: Duration,
    /// The window before it, if the rate has not been measured yet. The measurement waits until all responses had time
    /// to arrive.
    unmeasured: Option<Duration>,
    /// Refusals in a row without a request that passed.
    in_row: u32,
    /// The rate before the probe.
    proven: f64,
    is_probing: bool,
    probe_at: Duration,
    interval: Duration,
    /// Increase of the next probe.
    step: f64,
    /// A probe of the first search has succeeded.
    has_grown: bool,
    /// The rate that the service states.
    stated: Option<f64>,
    /// The fraction of it that is used. A service that refuses nevertheless has a further limit that it does not state.
    share: f64,
    /// Time of the last refusal without a probe.
    refused_before: Option<Duration>,
    /// Number of such refusals in short succession, after the first one.
    chances: u32,
    /// The last time that a request waited.
    waited_at: Duration,
}

impl RateEstimator {
    /// Creates an estimator without a limit, for at most `most` requests that wait.
    pub fn new(most: usize) -> Self {
        Self { limit: None, went: VecDeque::new(), queue: Queue::new(most) }
    }

    /// Changes the number of requests that may wait.
    pub fn bound(&mut self, most: usize) {
        self.queue.bound(most);
    }

    /// The estimated rate a second; `None` without a limit.
    pub fn rate(&self) -> Option<f64> {
        self.limit.as_ref().map(|limit| limit.rate).filter(|rate| rate.is_finite())
    }

    /// Registers a request. `is_again`: it was refused before.
    pub fn enter(&mut self, now: Duration, client: &Client, ticket: Ticket, is_again: bool) -> Admission {
        if self.limit.as_ref().is_some_and(|limit| limit.is_forgotten(now)) && self.queue.is_empty() {
            self.limit = None;
        }
        if self.queue.is_empty() && self.take_slot(now, LATENESS) {
            return Admission::Goes;
        }
        if let Some(limit) = &mut self.limit {
            limit.waited_at = now;
        }
        match self.queue.push(client, ticket, is_again) {
            Enqueued::Waits => Admission::Waits,
            Enqueued::InPlaceOf(other) => Admission::InPlaceOf(other),
            Enqueued::Full => Admission::Full,
        }
    }

    /// Removes a request from the queue.
    pub fn leave(&mut self, client: &Client, ticket: Ticket) {
        self.queue.leave(client, ticket);
    }

    /// The next request to send now.
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

    /// The time of the next call of [`RateEstimator::release`]; `None` if no request waits.
    pub fn next_at(&self) -> Option<Duration> {
        let limit = self.limit.as_ref();
        (!self.queue.is_empty()).then(|| limit.map_or(Duration::ZERO, |limit| limit.due.max(limit.closed_until)))
    }

    /// Records the refusal of a request that was sent at `went_at`.
    pub fn refused(&mut self, now: Duration, went_at: Duration, hint: &RateHeaders) {
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
        // No service can close the limit for longer; after that time a request tests it.
        limit.closed_until = limit.closed_until.max(now.saturating_add(wait.min(MAX_WINDOW)));
    }

    /// Records the success of a request that was sent at `went_at`.
    pub fn passed(&mut self, went_at: Duration, hint: impl FnOnce() -> RateHeaders) {
        let Some(limit) = &mut self.limit else { return };
        if went_at > limit.refused_at {
            limit.in_row = 0;
        }
        limit.state(&hint());
    }

    /// Takes a slot. Returns false if no request may be sent now.
    fn take_slot(&mut self, now: Duration, lateness: Duration) -> bool {
        if let Some(limit) = &mut self.limit {
            if now < limit.closed_until || now < limit.due {
                return false;
            }
            if let Some(window) = limit.unmeasured.take() {
                limit.measure(now, window, &self.went);
            }
            // After an opening, or a delay, the slots since then still exist, as far as the last second has room.
            limit.due = limit.due.max(limit.closed_until).max(now.saturating_sub(lateness));
            if now.saturating_sub(limit.due) > LATENESS {
                let in_a_second = rate_before(&self.went, now, WINDOW.div_f64(MARGIN)) / MARGIN;
                if in_a_second + 0.5 > limit.rate / MARGIN {
                    limit.due = now.saturating_sub(LATENESS);
                }
            }
            limit.due += Duration::from_secs_f64(limit.rate.recip());
        }
        if self.went.len() >= MAX_SEND_TIMES {
            self.went.pop_front();
        }
        // The deque must stay sorted for the binary search.
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
            interval: FIRST_PROBE_INTERVAL,
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
        now > self.closed_until && now.saturating_sub(self.waited_at.max(self.refused_at)) > LIMIT_LIFETIME
    }

    /// A stated rate needs no measurement.
    fn state(&mut self, hint: &RateHeaders) {
        if let Some((count, window)) = hint.quota {
            self.stated = Some(count / window.as_secs_f64());
            self.apply_stated();
        }
    }

    fn apply_stated(&mut self) {
        if let Some(stated) = self.stated {
            self.rate = (MARGIN * self.share * stated).max(MIN_RATE);
        }
    }

    fn refused(&mut self, now: Duration, hint: &RateHeaders) {
        // A refusal right after a wait means that the wait was too short, and says nothing about the rate.
        if self.in_row == 0 {
            self.unmeasured = Some(hint.after.unwrap_or(WINDOW).clamp(WINDOW, MAX_WINDOW));
        }
        self.in_row += 1;
        self.refused_at = now;
        self.waited_at = now;
    }

    /// The wait without `Retry-After`; it doubles, because the window may be long.
    fn wait(&self) -> Duration {
        let first = FIRST_WAIT.min(Duration::from_secs_f64(self.rate.max(MIN_RATE).recip()).max(FIRST_WAIT / 2));
        first.saturating_mul(1 << self.in_row.saturating_sub(1).min(16)).min(MAX_WAIT)
    }

    /// Measures the rate from the requests that were sent in the window before the refusal.
    fn measure(&mut self, now: Duration, window: Duration, went: &VecDeque<Duration>) {
        if self.stated.is_some() {
            // The first refusal, which stated the rate, does not contradict it.
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
            self.interval = (self.interval * 2).min(MAX_PROBE_INTERVAL);
            return;
        }
        // If no request passed, the estimate begins with one request in the demanded wait.
        let measured = MARGIN * rate_before(went, self.refused_at, window).max(window.as_secs_f64().recip());
        let is_first = self.rate.is_infinite();
        // If the service accepted as many requests as before, a single refusal is chance. A second one means that the
        // margin is too small for this network; further ones are not chance.
        if !is_first && measured >= ENOUGH * self.rate {
            let is_seldom = self.refused_before.is_none_or(|before| now > before + RARE_REFUSAL_INTERVAL);
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
        self.rate = measured.min(self.rate * DECREASE).max(long.min(self.rate)).max(MIN_RATE);
        // A burst says little about the sustained rate, so a probe follows at once.
        self.probe_at = now + if is_first { self.trial() } else { self.interval };
    }

    /// The duration of a probe, long enough for a refusal to arrive.
    fn trial(&self) -> Duration {
        // A smaller step takes longer to become visible in a window.
        let (requests, least) = if self.step > PROBE { (3.0, 1.2) } else { (10.0, 2.0) };
        Duration::from_secs_f64((requests / self.rate).clamp(least, 30.0))
    }

    /// Raises the rate if there is demand and the last probe succeeded.
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
            // A probe without demand shows nothing.
            if self.is_probing {
                (self.rate, self.is_probing) = (self.proven, false);
            }
            self.probe_at = now + self.trial();
            return;
        }
        if self.is_probing {
            (self.interval, self.has_grown) = (FIRST_PROBE_INTERVAL, true);
        }
        (self.proven, self.is_probing) = (self.rate, true);
        self.rate *= self.step;
        self.probe_at = now + self.trial();
    }
}

/// The rate of requests in the window that ends at `end`.
fn rate_before(went: &VecDeque<Duration>, end: Duration, window: Duration) -> f64 {
    let begin = end.saturating_sub(window);
    let from = if window >= end { 0 } else { went.partition_point(|at| *at <= begin) };
    let to = went.partition_point(|at| *at <= end);
    // If earlier send times were dropped, the window is the time that is left.
    let oldest = went.front().copied().unwrap_or_default();
    let span = if went.len() >= MAX_SEND_TIMES && oldest > begin { end.saturating_sub(oldest) } else { window };
    (to - from) as f64 / span.as_secs_f64().max(1e-3)
}
