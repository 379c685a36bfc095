//! Rate limits of services, kept for all clients of the node together.
//!
//! In: requests of routes with `pace`, and what their services answer. Out: the same requests, when the service has room for
//! them: what it refused waits, and tries again in its turn, instead of each client by itself. Costs a note of the time until
//! a service refuses for the first time.
//!
//! `budget` knows when who may go, and is pure; `hint` reads what responses say of a limit; `queue` is fair; `forward` is how
//! sessions come by. Here is where workers meet: a budget a route, behind a lock that nobody holds while waiting.

mod budget;
pub(crate) mod forward;
pub(crate) mod hint;
mod queue;
#[cfg(test)]
mod simulation;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use self::budget::{Budget, Entered};
use self::hint::Hint;
use self::queue::{Client, Ticket};
use crate::worker::Worker;

/// The budgets of a node, by route.
#[derive(Default)]
pub(crate) struct Paces(Mutex<HashMap<Arc<str>, Arc<Pacer>>>);

/// The budget of a route, as all workers have it.
pub(crate) struct Pacer {
    epoch: Instant,
    state: Mutex<State>,
}

struct State {
    budget: Budget,
    /// Who hears when it may go.
    waiting: HashMap<Ticket, oneshot::Sender<Duration>>,
    last: Ticket,
    /// Some worker releases who may go.
    is_driven: bool,
}

/// Why a request may not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Too many wait already.
    Full,
    /// Its time is over.
    Late,
}

impl Paces {
    /// That of a route. A document that names it no more, and then again, finds what was known.
    fn of(&self, route: &Arc<str>, most: usize) -> Arc<Pacer> {
        let mut paces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pacer) = paces.get(route) {
            return pacer.clone();
        }
        let pacer = Arc::new(Pacer::new(most));
        paces.insert(route.clone(), pacer.clone());
        pacer
    }
}

impl Pacer {
    fn new(most: usize) -> Self {
        let state = State { budget: Budget::new(most), waiting: HashMap::new(), last: 0, is_driven: false };
        Self { epoch: Instant::now(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock, so that times of one go up as they are noted.
    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// When the request goes, which is now unless the service has refused others.
    async fn admit(
        self: &Arc<Self>,
        worker: &Rc<Worker>,
        client: &Client,
        again: bool,
        most: usize,
        until: Instant,
    ) -> Result<Admitted, Denied> {
        let (ticket, released) = {
            let mut state = self.lock();
            state.budget.bound(most);
            state.last += 1;
            let (now, ticket) = (self.now(), state.last);
            match state.budget.enter(now, client, ticket, again) {
                Entered::Goes => return Ok(Admitted { went_at: now, has_waited: false }),
                Entered::Full => return Err(Denied::Full),
                // Without its sender it hears that it is out.
                Entered::InPlaceOf(other) => drop(state.waiting.remove(&other)),
                Entered::Waits => {}
            }
            let (sender, released) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            (ticket, released)
        };
        let _place = Place { pacer: self, client, ticket };
        self.drive(worker);
        match tokio::time::timeout_at(until, released).await {
            Ok(Ok(went_at)) => Ok(Admitted { went_at, has_waited: true }),
            Ok(Err(_)) => Err(Denied::Full),
            Err(_) => Err(Denied::Late),
        }
    }

    fn passed(&self, went_at: Duration, hint: impl FnOnce() -> Hint) {
        self.lock().budget.passed(went_at, hint);
    }

    fn refused(&self, went_at: Duration, hint: &Hint) {
        let mut state = self.lock();
        let now = self.now();
        state.budget.refused(now, went_at, hint);
    }

    /// The rate a second that its service allows, where that is known.
    fn rate(&self) -> Option<f64> {
        self.lock().budget.rate()
    }

    /// Sees to it that somebody releases who may go, as long as anybody waits.
    fn drive(self: &Arc<Self>, worker: &Worker) {
        if std::mem::replace(&mut self.lock().is_driven, true) {
            return;
        }
        let driving = Driving(self.clone());
        worker.spawn(async move {
            while let Some(at) = driving.0.release() {
                tokio::time::sleep_until(driving.0.epoch + at).await;
            }
        });
    }

    /// Lets go who may; when to look again, or `None` where nobody waits, and the driver is one no more.
    fn release(&self) -> Option<Duration> {
        let mut state = self.lock();
        loop {
            let now = self.now();
            let Some(ticket) = state.budget.release(now) else { break };
            // Who left meanwhile has a slot that nobody uses: less than the service allows.
            let waiting = state.waiting.remove(&ticket);
            let _ = waiting.map(|waiting| waiting.send(now));
        }
        let next = state.budget.next_at();
        state.is_driven = next.is_some();
        next
    }
}

/// A request that may go.
struct Admitted {
    went_at: Duration,
    has_waited: bool,
}

/// A place in the queue, left however the wait ends.
struct Place<'p> {
    pacer: &'p Pacer,
    client: &'p Client,
    ticket: Ticket,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.pacer.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.budget.leave(self.client, self.ticket);
        }
    }
}

/// The task that releases. Its worker may end it while requests of others wait: whoever comes next finds the place free.
struct Driving(Arc<Pacer>);

impl Drop for Driving {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if state.budget.next_at().is_some() {
            state.is_driven = false;
        }
    }
}
