//! A value that one task sets and another task of the same worker awaits.
//!
//! The sweep uses it to end a session or a connection. One waker is enough, because only one future at a time acts for
//! a session. The value never crosses threads.

use std::cell::{Cell, RefCell};
use std::task::{Context, Poll, Waker};

/// A value that can be set once. Setting it wakes the task that polled last. [`Oneshot::nudge`] wakes that task without
/// a value.
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
    /// Sets the value and wakes the waiting task. A value that is already set is retained, because the first reason to
    /// end a session is the cause.
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

    /// Returns the value, or `None` if it is not set.
    pub fn get(&self) -> Option<T> {
        if !self.is_set.get() {
            return None;
        }
        self.value.borrow().clone()
    }

    /// Ready with the value once it is set. Registers the polling task.
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
