//! The queue of a pool, and its count of open connections.
//!
//! In: sessions that found no connection, and connections as they open. Out: turns in the order of arrival, and permits
//! that count a connection for its lifetime. A waiter that gives up passes its turn on. Never: a connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::oneshot;

/// Counts the connections of a pool and the sessions that wait for one.
#[derive(Default)]
pub(super) struct Open {
    pub(super) count: Cell<usize>,
    /// Waiters for a connection or for permission to dial. Limited by `upstream_pending`.
    pub(super) waiting: Queue,
    /// Sessions that dial, but would accept a connection that becomes free first. At most one for each dial.
    pub(super) dialing: Queue,
}

impl Open {
    /// A connection may be dialled, or is idle.
    pub(super) fn wake_one(&self) {
        let _ = self.waiting.wake_one();
    }

    /// A connection is idle.
    pub(super) fn wake_for_idle(&self) {
        let _ = self.waiting.wake_one() || self.dialing.wake_one();
    }

    pub(super) fn wake_all(&self) {
        while self.waiting.wake_one() {}
    }
}

/// Waiters in their order.
#[derive(Default)]
pub(super) struct Queue {
    waiting: RefCell<VecDeque<Waiting>>,
    /// Turns that their owners have not used yet.
    turns: Cell<usize>,
}

struct Waiting {
    turn: oneshot::Sender<()>,
    had_turn: bool,
}

impl Queue {
    /// Joins the queue. `None` if too many wait. A waiter whose turn was in vain goes to the front.
    pub(super) fn join(&self, most: usize, had_turn: bool) -> Option<Waiter<'_>> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= most {
            // Waiters that gave up do not count.
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

    /// True if the waiters with a turn claim all free capacity, so that a newcomer must queue.
    pub(super) fn has_all(&self, free: impl FnOnce() -> usize) -> bool {
        self.turns.get() > 0 && self.turns.get() >= free()
    }

    /// Passes on what a waiter left unused, to the first waiter that had no turn yet. Others would pass it back and
    /// forth.
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

    /// Wakes the first waiter. False if nobody waits.
    fn wake_one(&self) -> bool {
        // Skips waiters that gave up.
        loop {
            let Some(waiter) = self.waiting.borrow_mut().pop_front() else { return false };
            if self.hand_turn(waiter) {
                return true;
            }
        }
    }
}

/// A position in a queue. If its owner gives up, its turn passes on.
pub(super) struct Waiter<'a> {
    queue: &'a Queue,
    turn: oneshot::Receiver<()>,
    has_turn: bool,
}

impl Waiter<'_> {
    /// Waits for the turn. The owner must act on it at once, before other tasks run.
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

/// A turn whose owner awaits something else before it acts. Its drop passes the turn on.
pub(super) struct Turn<'a>(&'a Open);

impl<'a> Turn<'a> {
    /// Wraps the caller's turn.
    pub(super) fn of(open: &'a Open) -> Self {
        Self(open)
    }

    /// Keeps the turn: its owner acts on it now.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.wake_one();
    }
}

/// Counts one open connection of a pool.
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
