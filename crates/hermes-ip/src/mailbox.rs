//! The packet queue of a session; any worker may add to it.
//!
//! In: batches of packets. Out: the same packets, to the session's task. The queue is limited in bytes; the oldest
//! packets are dropped for new ones. The lock is held for one batch, and is almost always uncontended.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// Maximum number of datagrams that a task takes from a port in one turn, before it forwards them.
pub const BATCH: usize = 256;
/// Overhead of a queued packet in bytes, so that empty packets count as well.
pub const PACKET_OVERHEAD: usize = 64;

/// The queue of one session.
#[derive(Debug, Default)]
pub struct Mailbox(Mutex<PacketQueue>);

#[derive(Debug, Default)]
struct PacketQueue {
    packets: VecDeque<Bytes>,
    bytes: usize,
    waker: Option<Waker>,
    is_closed: bool,
}

impl Mailbox {
    fn letters(&self) -> MutexGuard<'_, PacketQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a batch and wakes the session. Drops the oldest packets if the queue exceeds `most` bytes, and returns
    /// their number.
    pub fn post(&self, packets: &mut Vec<Bytes>, most: usize) -> u64 {
        let mut letters = self.letters();
        for packet in packets.drain(..) {
            letters.bytes += weight(&packet);
            letters.packets.push_back(packet);
        }
        let mut dropped = 0;
        while letters.bytes > most
            && let Some(oldest) = letters.packets.pop_front()
        {
            letters.bytes -= weight(&oldest);
            dropped += 1;
        }
        let waker = letters.waker.take();
        drop(letters);
        waker.inspect(Waker::wake_by_ref);
        dropped
    }

    /// Closes the queue, because its session accepts no more packets. Returns the unread packets.
    pub fn close(&self) -> VecDeque<Bytes> {
        let mut letters = self.letters();
        letters.is_closed = true;
        letters.bytes = 0;
        std::mem::take(&mut letters.packets)
    }

    /// Whether the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.letters().is_closed
    }

    /// Closes the queue for new packets. The session detects that after it has read the queued packets.
    pub fn finish(&self) {
        let mut letters = self.letters();
        letters.is_closed = true;
        let waker = letters.waker.take();
        drop(letters);
        waker.inspect(Waker::wake_by_ref);
    }

    /// Polls until the queue is closed, without reading packets.
    pub fn poll_finished(&self, cx: &Context<'_>) -> Poll<()> {
        let mut letters = self.letters();
        if letters.is_closed {
            return Poll::Ready(());
        }
        letters.wake_later(cx);
        Poll::Pending
    }

    /// Moves queued packets into an empty batch. Returns false if the queue is closed and empty.
    pub fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<bool> {
        let mut letters = self.letters();
        if letters.packets.is_empty() {
            if letters.is_closed {
                return Poll::Ready(false);
            }
            letters.wake_later(cx);
            return Poll::Pending;
        }
        if letters.packets.len() <= BATCH {
            std::mem::swap(&mut letters.packets, batch);
            letters.bytes = 0;
        } else {
            batch.extend(letters.packets.drain(..BATCH));
            letters.bytes -= batch.iter().map(weight).sum::<usize>();
        }
        Poll::Ready(true)
    }
}

impl PacketQueue {
    fn wake_later(&mut self, cx: &Context<'_>) {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
    }
}

/// Returns the number of bytes that a queued datagram counts against the queue's limit.
pub fn weight(datagram: &Bytes) -> usize {
    datagram.len() + PACKET_OVERHEAD
}
