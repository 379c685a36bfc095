//! A value that one task sets and one other task awaits, on the same worker.
//!
//! The sweep tells a session or a connection to end this way. One waker is enough, because at any moment one future
//! acts for a session. Never crosses threads.

use std::cell::{Cell, RefCell};
use std::task::{Context, Poll, Waker};

/// A value that is set once and wakes the last poller. A nudge wakes it without a value.
pub struct Oneshot<T> {
    value: RefCell<Option<T>>,
    is_set: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl<T> Default for Oneshot<T> {
    fn default() -> Self {
        Self { value: RefCell::new(None), is_set: Cell::new(false), waker: RefCell::new(None) }
    }
}

impl<T: Clone> Oneshot<T> {
    /// Sets the value unless one is set, because the first reason is the cause, and wakes the task.
    pub fn set(&self, value: T) {
        if !self.is_set.replace(true) {
            *self.value.borrow_mut() = Some(value);
        }
        self.nudge();
    }

    /// Wakes the waiting task without a value, because other state that it checks has changed.
    pub fn nudge(&self) {
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The value, if set.
    pub fn get(&self) -> Option<T> {
        if !self.is_set.get() {
            return None;
        }
        self.value.borrow().clone()
    }

    /// Waits for the value.
    pub fn poll(&self, cx: &Context<'_>) -> Poll<T> {
        if let Some(value) = self.get() {
            return Poll::Ready(value);
        }
        let mut waker = self.waker.borrow_mut();
        match &mut *waker {
            Some(known) if known.will_wake(cx.waker()) => {}
            slot => *slot = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Waits for the value.
    pub async fn wait(&self) -> T {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }
}
