//! The queue of requests that wait for a connection of a pool, and the number of its open connections.
//!
//! In: requests that found no connection, and connections as they open. Out: turns in the order of arrival, and permits
//! that count a connection for its lifetime. A turn entitles a request to look for a connection again. If a waiting
//! request is dropped, its turn passes to the next one. Never: a connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::oneshot;

/// The number of open connections of a pool, and the requests that wait for one.
#[derive(Default)]
pub(super) struct Open {
    /// The number of open connections and of dials in progress.
    pub(super) count: Cell<usize>,
    /// The requests that wait for a connection or for permission to dial. `limits.upstream-pending` bounds their
    /// number.
    pub(super) waiting: Queue,
    /// The requests that dial, and would use a connection that becomes free first. There is at most one for each dial.
    pub(super) dialing: Queue,
}

impl Open {
    /// Wakes the next waiting request, because a connection has become idle or another one may be dialled.
    pub(super) fn wake_one(&self) {
        let _ = self.waiting.wake_one();
    }

    /// Wakes the next waiting request, or a request that dials, because a connection has become idle.
    pub(super) fn wake_for_idle(&self) {
        let _ = self.waiting.wake_one() || self.dialing.wake_one();
    }

    pub(super) fn wake_all(&self) {
        while self.waiting.wake_one() {}
    }
}

/// A queue of waiting requests.
#[derive(Default)]
pub(super) struct Queue {
    waiting: RefCell<VecDeque<Waiting>>,
    /// The number of requests that were given a turn and have not acted on it yet.
    turns: Cell<usize>,
}

struct Waiting {
    turn: oneshot::Sender<()>,
    had_turn: bool,
}

impl Queue {
    /// Adds a request to the queue. A request that has already had a turn without success (`had_turn`) is added at the
    /// front. Returns `None` if `most` requests wait already.
    pub(super) fn join(&self, most: usize, had_turn: bool) -> Option<Waiter<'_>> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= most {
            // Requests that were dropped do not count.
            waiting.retain(|waiter| !waiter.turn.is_closed());
        }
        let (sender, turn) = oneshot::channel();
        (waiting.len() < most).then(|| {
            let one = Waiting { turn: sender, had_turn };
            if had_turn {
                waiting.push_front(one);
            } else {
                waiting.push_back(one);
            }
            Waiter { queue: self, turn, has_turn: false }
        })
    }

    /// True if a newcomer must queue, because at least as many requests have a turn as connections and streams are
    /// free.
    pub(super) fn has_all(&self, free: impl FnOnce() -> usize) -> bool {
        self.turns.get() > 0 && self.turns.get() >= free()
    }

    /// Gives a turn to the first request that has had none yet, because the caller could not use an idle connection.
    /// Requests that have had a turn are skipped, because they would pass the turn to each other forever.
    pub(super) fn pass_on(&self) {
        let next = |waiting: &VecDeque<Waiting>| waiting.iter().position(|waiter| !waiter.had_turn);
        loop {
            let mut waiting = self.waiting.borrow_mut();
            let Some(waiter) = next(&waiting).and_then(|at| waiting.remove(at)) else { return };
            drop(waiting);
            if self.hand_turn(waiter) {
                return;
            }
        }
    }

    fn hand_turn(&self, waiter: Waiting) -> bool {
        let is_given = waiter.turn.send(()).is_ok();
        self.turns.set(self.turns.get() + usize::from(is_given));
        is_given
    }

    pub(super) fn has_any(&self) -> bool {
        self.waiting.borrow().iter().any(|waiter| !waiter.turn.is_closed())
    }

    /// Gives a turn to the first waiting request. Returns false if no request waits.
    fn wake_one(&self) -> bool {
        // Requests that were dropped are skipped.
        loop {
            let Some(waiter) = self.waiting.borrow_mut().pop_front() else { return false };
            if self.hand_turn(waiter) {
                return true;
            }
        }
    }
}

/// The position of a request in a queue. If the request is dropped with an unused turn, the next request receives the
/// turn.
pub(super) struct Waiter<'a> {
    queue: &'a Queue,
    turn: oneshot::Receiver<()>,
    has_turn: bool,
}

impl Waiter<'_> {
    /// Waits for the turn. The request must act on it at once, before other tasks run.
    pub(super) async fn turn(&mut self) {
        self.has_turn = (&mut self.turn).await.is_ok();
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let gives_up = !self.has_turn && self.turn.try_recv().is_ok();
        self.queue.turns.set(self.queue.turns.get() - usize::from(self.has_turn || gives_up));
        if gives_up {
            let _ = self.queue.wake_one();
        }
    }
}

/// The turn of a request that awaits something else before it acts. Dropping this value passes the turn to the next
/// request.
pub(super) struct Turn<'a>(&'a Open);

impl<'a> Turn<'a> {
    /// Wraps the turn that the caller was given.
    pub(super) fn of(open: &'a Open) -> Self {
        Self(open)
    }

    /// Consumes the turn without passing it on, because the request acts on it now.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.wake_one();
    }
}

/// The guard that counts an open connection, or a dial in progress, in its pool.
pub struct Permit(Rc<Open>);

impl Permit {
    pub(super) fn take(open: &Rc<Open>) -> Self {
        open.count.set(open.count.get() + 1);
        Self(open.clone())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.wake_one();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn who_had_a_turn_in_vain_is_the_next_again_and_who_gives_up_passes_his_on() {
        let queue = Queue::default();
        let has_turn = |waiter: &mut Waiter<'_>| waiter.turn().now_or_never().is_some();
        let [mut first, mut second] = [false, false].map(|had_turn| queue.join(3, had_turn).unwrap());
        assert!(queue.wake_one() && has_turn(&mut first) && !has_turn(&mut second));
        let mut again = queue.join(3, true).unwrap();
        let mut newcomer = queue.join(3, false).unwrap();
        assert!(queue.join(3, true).is_none() && queue.join(3, false).is_none());
        assert!(queue.wake_one() && has_turn(&mut again) && !has_turn(&mut second) && !has_turn(&mut newcomer));
        // The second waiter gets the turn and is dropped.
        assert!(queue.wake_one());
        drop(second);
        assert!(has_turn(&mut newcomer) && !queue.has_any());
        // Three waiters have a turn and have not acted yet.
        assert!(queue.has_all(|| 3) && !queue.has_all(|| 4));
        drop((first, again, newcomer));
        assert!(!queue.has_all(|| 0));
    }

    #[test]
    fn a_turn_whose_owner_gives_up_while_it_waits_is_the_next_ones() {
        let open = Open::default();
        let has_turn = |waiter: &mut Waiter<'_>| waiter.turn().now_or_never().is_some();
        let [mut first, mut second] = [false, false].map(|had_turn| open.waiting.join(3, had_turn).unwrap());
        open.wake_one();
        assert!(has_turn(&mut first));
        drop(first);
        Turn::of(&open).keep();
        assert!(!has_turn(&mut second));
        drop(Turn::of(&open));
        assert!(has_turn(&mut second));
    }

    #[test]
    fn what_is_left_is_for_who_had_no_turn() {
        let queue = Queue::default();
        let has_turn = |waiter: &mut Waiter<'_>| waiter.turn().now_or_never().is_some();
        let [mut first, mut second] = [true, false].map(|had_turn| queue.join(3, had_turn).unwrap());
        queue.pass_on();
        queue.pass_on();
        assert!(has_turn(&mut second) && !has_turn(&mut first));
    }
}
