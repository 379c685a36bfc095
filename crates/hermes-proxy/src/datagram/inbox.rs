//! Datagrams that wait for a task of the same worker.
//!
//! In: datagrams, from whoever reads a socket that many share. Out: the same, in batches. Bounded in
//! bytes: the oldest make room for what comes, since of a live stream the newest are wanted.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// Datagrams that one turn takes from a port before it sends them on.
pub(crate) const BATCH: usize = 256;
/// What a datagram that waits costs beside its bytes: empty ones are not free.
pub(crate) const PLACE: usize = 64;

/// What a datagram costs that waits.
pub(crate) fn weight(datagram: &Bytes) -> usize {
    datagram.len() + PLACE
}

/// Datagrams on their way to one task.
#[derive(Default)]
pub(crate) struct Inbox {
    datagrams: RefCell<VecDeque<Bytes>>,
    bytes: Cell<usize>,
    waker: Cell<Option<Waker>>,
}

impl Inbox {
    /// Queues a datagram; the oldest make room for it. Returns how many of them were dropped.
    pub(crate) fn push(&self, datagram: Bytes, most: usize) -> u64 {
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
        self.bytes.set(bytes);
        dropped
    }

    /// Tells the task that something came.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Takes a batch, into an empty one.
    pub(crate) fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        let mut datagrams = self.datagrams.borrow_mut();
        if datagrams.is_empty() {
            self.waker.set(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        if datagrams.len() <= BATCH {
            std::mem::swap(&mut *datagrams, batch);
            self.bytes.set(0);
        } else {
            batch.extend(datagrams.drain(..BATCH));
            self.bytes.set(self.bytes.get() - batch.iter().map(weight).sum::<usize>());
        }
        Poll::Ready(())
    }
}
