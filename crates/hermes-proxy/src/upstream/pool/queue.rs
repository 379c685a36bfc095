//! Who waits for a connection of a pool, and how many it has.
//!
//! In: those who come in vain, and connections as they are made. Out: turns, in the order of coming, and
//! permits that count a connection while it lives. Who gives up passes his turn on.
//! Never: a connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::oneshot;

/// Counts connections of a pool and those who wait for one.
#[derive(Default)]
pub(super) struct Open {
    pub(super) count: Cell<usize>,
    /// For a connection or for leave to dial one. Bounded by `upstream_pending`.
    pub(super) waiting: Queue,
    /// Dialling, but content with a connection that comes free before. As many as dial.
    pub(super) dialing: Queue,
}

impl Open {
    /// A connection may be dialled, or stands idle.
    pub(super) fn wake_one(&self) {
        let _ = self.waiting.wake_one();
    }

    /// A connection stands idle.
    pub(super) fn wake_for_idle(&self) {
        let _ = self.waiting.wake_one() || self.dialing.wake_one();
    }

    pub(super) fn wake_all(&self) {
        while self.waiting.wake_one() {}
    }
}

/// Those who wait for something, in their order.
#[derive(Default)]
pub(super) struct Queue(RefCell<VecDeque<oneshot::Sender<()>>>);

impl Queue {
    /// `None` where too many wait already. Who had a turn, and nothing came of it, is the next again.
    pub(super) fn join(&self, most: usize, had_turn: bool) -> Option<Waiter<'_>> {
        let mut waiting = self.0.borrow_mut();
        if waiting.len() >= most {
            // Those who gave up hold no places.
            waiting.retain(|waiter| !waiter.is_closed());
        }
        let (sender, turn) = oneshot::channel();
        (waiting.len() < most).then(|| {
            if had_turn {
                waiting.push_front(sender);
            } else {
                waiting.push_back(sender);
            }
            Waiter { queue: self, turn }
        })
    }

    pub(super) fn has_any(&self) -> bool {
        self.0.borrow().iter().any(|waiter| !waiter.is_closed())
    }

    /// False where nobody waits.
    fn wake_one(&self) -> bool {
        // Those who gave up meanwhile are passed over.
        while let Some(waiter) = self.0.borrow_mut().pop_front() {
            if waiter.send(()).is_ok() {
                return true;
            }
        }
        false
    }
}

/// A place in a queue. Its turn passes on where its owner gives up.
pub(super) struct Waiter<'a> {
    queue: &'a Queue,
    turn: oneshot::Receiver<()>,
}

impl Waiter<'_> {
    pub(super) async fn turn(&mut self) {
        let _ = (&mut self.turn).await;
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.turn.try_recv().is_ok() {
            let _ = self.queue.wake_one();
        }
    }
}

/// One open connection of a pool.
pub(crate) struct Permit(Rc<Open>);

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
        // Its turn comes, and it is gone.
        assert!(queue.wake_one());
        drop(second);
        assert!(has_turn(&mut newcomer) && !queue.has_any());
    }
}
