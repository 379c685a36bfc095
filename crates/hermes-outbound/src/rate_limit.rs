//! Rate limits of services, shared by all clients of the node.
//!
//! In: requests of routes with `upstream-rate-limit`, and the responses of their services. Out: the same requests, as soon as the
//! service has capacity. A rejected request queues and is sent again. Until a service rejects a request for the first
//! time, a request only records the time.
//!
//! `hermes-rate-limit` decides which request is released. This file keeps one budget for each route and upstream. All
//! workers share it, behind a lock that is never held while waiting. A task on one of the workers releases the
//! requests. If its worker ends the task while other requests wait, the first of these starts a new one.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hermes_rate_limit::estimator::{Admission, RateEstimator};
use hermes_rate_limit::fair_queue::{Client, Ticket};
use hermes_rate_limit::headers::RateHeaders;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use hermes_transport::runtime::WorkerContext;

/// The budgets of a node, by route and upstream: a rate measured at one service says nothing about another.
#[derive(Default)]
pub struct RateLimiters(Mutex<HashMap<Service, Arc<RateLimiter>>>);

/// A route and its upstream.
type Service = (Arc<str>, Arc<str>);

/// The budget of a service, shared by all workers.
pub struct RateLimiter {
    epoch: Instant,
    state: Mutex<State>,
    /// Notified when the releasing task ended while requests wait.
    left_alone: Notify,
}

struct State {
    budget: RateEstimator,
    /// The receivers of releases, by ticket.
    waiting: HashMap<Ticket, oneshot::Sender<Duration>>,
    last: Ticket,
    /// True while some worker runs the releasing task.
    is_driven: bool,
}

/// The reason why a request may not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The queue is full.
    Full,
    /// The deadline has passed.
    Late,
}

impl RateLimiters {
    /// The budget of a route and upstream. It survives while the document does not name the route.
    pub fn of(&self, route: &Arc<str>, upstream: &Arc<str>, most: usize) -> Arc<RateLimiter> {
        let mut rate_limiters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (route.clone(), upstream.clone());
        rate_limiters.entry(key).or_insert_with(|| Arc::new(RateLimiter::new(most))).clone()
    }
}

impl RateLimiter {
    fn new(most: usize) -> Self {
        let state = State { budget: RateEstimator::new(most), waiting: HashMap::new(), last: 0, is_driven: false };
        Self { epoch: Instant::now(), state: Mutex::new(state), left_alone: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time since the epoch. It must be read under the lock, so that recorded times increase.
    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Waits until the request may be sent: immediately, unless the service has rejected others.
    pub async fn admit(
        self: &Arc<Self>,
        worker: &Rc<WorkerContext>,
        client: &Client,
        again: bool,
        most: usize,
        until: Instant,
    ) -> Result<Admitted, Denied> {
        let (ticket, mut released) = {
            let mut state = self.lock();
            state.budget.bound(most);
            state.last += 1;
            let (now, ticket) = (self.now(), state.last);
            match state.budget.enter(now, client, ticket, again) {
                Admission::Goes => return Ok(Admitted { went_at: now, has_waited: false }),
                Admission::Full => return Err(Denied::Full),
                // The removed sender tells the displaced request that it has lost its slot.
                Admission::InPlaceOf(other) => drop(state.waiting.remove(&other)),
                Admission::Waits => {}
            }
            let (sender, released) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            (ticket, released)
        };
        let _slot = QueueSlot { limiter: self, client, ticket };
        loop {
            let left_alone = self.left_alone.notified();
            if let Some(driver) = self.driver() {
                worker.spawn(driver);
            }
            tokio::select! {
                biased;
                released = &mut released => {
                    return released.map(|went_at| Admitted { went_at, has_waited: true }).map_err(|_| Denied::Full);
                }
                () = tokio::time::sleep_until(until) => return Err(Denied::Late),
                () = left_alone => {}
            }
        }
    }

    pub fn passed(&self, went_at: Duration, hint: impl FnOnce() -> RateHeaders) {
        self.lock().budget.passed(went_at, hint);
    }

    pub fn refused(&self, went_at: Duration, hint: &RateHeaders) {
        let mut state = self.lock();
        let now = self.now();
        state.budget.refused(now, went_at, hint);
    }

    /// The requests per second that the service allows, if known.
    pub fn rate(&self) -> Option<f64> {
        self.lock().budget.rate()
    }

    /// Creates the releasing task. `None` if one exists already.
    fn driver(self: &Arc<Self>) -> Option<impl Future<Output = ()> + use<>> {
        if std::mem::replace(&mut self.lock().is_driven, true) {
            return None;
        }
        Some(Driving { limiter: self.clone(), is_done: false }.run())
    }

    /// Releases all due requests. Returns the time of the next release; `None` if no request waits, which ends the
    /// task.
    fn release(&self) -> Option<Duration> {
        let mut state = self.lock();
        loop {
            let now = self.now();
            let Some(ticket) = state.budget.release(now) else { break };
            // If a client left meanwhile, its slot stays unused, which is within the allowed rate.
            let waiting = state.waiting.remove(&ticket);
            let _ = waiting.map(|waiting| waiting.send(now));
        }
        let next = state.budget.next_at();
        state.is_driven = next.is_some();
        next
    }
}

/// A request that may be sent.
pub struct Admitted {
    pub went_at: Duration,
    pub has_waited: bool,
}

/// A queue slot, released however the wait ends.
struct QueueSlot<'p> {
    limiter: &'p RateLimiter,
    client: &'p Client,
    ticket: Ticket,
}

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        let mut state = self.limiter.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.budget.leave(self.client, self.ticket);
        }
    }
}

/// The releasing task. If its worker ends it while other requests wait, one of those starts a new task.
struct Driving {
    limiter: Arc<RateLimiter>,
    is_done: bool,
}

impl Driving {
    async fn run(mut self) {
        while let Some(at) = self.limiter.release() {
            tokio::time::sleep_until(self.limiter.epoch + at).await;
        }
        // Another task may have started since the last release.
        self.is_done = true;
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        if !self.is_done {
            self.limiter.lock().is_driven = false;
            // All waiting requests are notified: a single one might be leaving at that moment.
            self.limiter.left_alone.notify_waiters();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn another_upstream_has_a_budget_of_its_own() {
        let (rate_limiters, route) = (RateLimiters::default(), Arc::from("route"));
        let of = |upstream: &str| rate_limiters.of(&route, &Arc::from(upstream), 1);
        assert!(Arc::ptr_eq(&of("a"), &of("a")));
        assert!(!Arc::ptr_eq(&of("a"), &of("b")));
    }

    #[tokio::test]
    async fn who_waits_takes_the_place_of_a_driver_that_is_gone() {
        let limiter = Arc::new(RateLimiter::new(10));
        let client = Client::of(None, "192.0.2.1".parse().unwrap());
        {
            let mut state = limiter.lock();
            state.budget.refused(limiter.now(), Duration::ZERO, &RateHeaders::default());
            assert_eq!(state.budget.enter(limiter.now(), &client, 1, false), Admission::Waits);
        }
        let driver = limiter.driver().unwrap();
        assert!(limiter.driver().is_none());
        let mut left_alone = Box::pin(limiter.left_alone.notified());
        assert!(!left_alone.as_mut().enable());
        drop(driver);
        left_alone.await;
        assert!(limiter.driver().is_some());
    }
}
