//! A queue of datagrams for a task of the same worker.
//!
//! In: datagrams, from the task that reads a shared socket or connection. Out: the same datagrams, in batches. The
//! queue is bounded in bytes. A new datagram displaces the oldest ones, because receivers of live media want the
//! newest.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hermes_ip::mailbox::{BATCH, weight};

/// The queue of datagrams for one task.
#[derive(Default)]
pub struct Inbox {
    datagrams: RefCell<VecDeque<Bytes>>,
    bytes: Cell<usize>,
    /// The number of bytes in all queues that share a limit with this one.
    total: Rc<Cell<usize>>,
    waker: Cell<Option<Waker>>,
}

impl Inbox {
    /// Creates a queue that shares a limit with others. `total` is the number of bytes in all of these queues.
    pub fn among(total: &Rc<Cell<usize>>) -> Self {
        Self { datagrams: RefCell::default(), bytes: Cell::new(0), total: total.clone(), waker: Cell::new(None) }
    }

    /// Returns the number of queued bytes, including a fixed overhead for each datagram.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    fn set_bytes(&self, bytes: usize) {
        self.total.set(self.total.get() + bytes - self.bytes.replace(bytes));
    }

    /// Queues a datagram. If the queue then exceeds `most` bytes, the oldest datagrams are dropped, and their number is
    /// returned. Does not wake the task: see [`Self::wake`].
    pub fn push(&self, datagram: Bytes, most: usize) -> u64 {
        let mut datagrams = self.datagrams.borrow_mut();
        let mut bytes = self.bytes.get() + weight(&datagram);
        let mut dropped = 0;
        while bytes > most
            && let Some(oldest) = datagrams.pop_front()
        {
            bytes -= weight(&oldest);
            dropped += 1;
        }
        datagrams.push_back(datagram);
        self.set_bytes(bytes);
        dropped
    }

    /// Wakes the task that waits for datagrams.
    pub fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Registers the task to be woken for the next datagram.
    pub fn watch(&self, cx: &Context<'_>) {
        self.waker.set(Some(cx.waker().clone()));
    }

    /// Moves queued datagrams into an empty batch. Pending if the queue is empty.
    pub fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        let mut datagrams = self.datagrams.borrow_mut();
        if datagrams.is_empty() {
            self.watch(cx);
            return Poll::Pending;
        }
        if datagrams.len() <= BATCH {
            std::mem::swap(&mut *datagrams, batch);
            self.set_bytes(0);
        } else {
            batch.extend(datagrams.drain(..BATCH));
            self.set_bytes(self.bytes.get() - batch.iter().map(weight).sum::<usize>());
        }
        Poll::Ready(())
    }

    /// Returns the number of queued datagrams.
    pub fn count(&self) -> usize {
        self.datagrams.borrow().len()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.set_bytes(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_with_one_bound_know_what_waits_in_all_of_them() {
        let total = Rc::default();
        let (one, other) = (Inbox::among(&total), Inbox::among(&total));
        let datagram = || Bytes::from_static(&[7; 36]);
        let mut dropped = 0;
        for _ in 0..3 {
            dropped += one.push(datagram(), 250) + other.push(datagram(), 1000);
        }
        assert_eq!(dropped, 1, "the oldest of the one that was full");
        assert_eq!((one.bytes(), other.bytes(), total.get()), (200, 300, 500));
        let mut batch = VecDeque::new();
        assert!(other.poll_take(&Context::from_waker(Waker::noop()), &mut batch).is_ready());
        assert_eq!((batch.len(), total.get()), (3, 200));
        drop(one);
        assert_eq!(total.get(), 0);
    }
}
