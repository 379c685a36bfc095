//! Packets on their way to a session, from whichever worker read them.
//!
//! In: batches of packets. Out: the same, to the session's task. Bounded in bytes: the oldest make room for
//! what comes. The lock is held for a batch, and nearly always nobody else wants it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// Datagrams that one turn takes from a port before it sends them on.
pub const BATCH: usize = 256;
/// The overhead of a queued packet, in bytes: empty packets are not free.
pub const PACKET_OVERHEAD: usize = 64;

/// Packets for one session.
#[derive(Debug, Default)]
pub struct Mailbox(Mutex<Letters>);

#[derive(Debug, Default)]
struct Letters {
    packets: VecDeque<Bytes>,
    bytes: usize,
    waker: Option<Waker>,
    is_closed: bool,
}

impl Mailbox {
    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a batch in, and tells the session. Returns how many of the oldest were dropped for it.
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

    /// Its session takes nothing more. Returns what nobody has taken.
    pub fn close(&self) -> VecDeque<Bytes> {
        let mut letters = self.letters();
        letters.is_closed = true;
        letters.bytes = 0;
        std::mem::take(&mut letters.packets)
    }

    /// Whether its session is over.
    pub fn is_closed(&self) -> bool {
        self.letters().is_closed
    }

    /// Nothing will come any more: its session hears of it when it has taken what there is.
    pub fn finish(&self) {
        let mut letters = self.letters();
        letters.is_closed = true;
        let waker = letters.waker.take();
        drop(letters);
        waker.inspect(Waker::wake_by_ref);
    }

    /// Waits for that, and takes nothing.
    pub fn poll_finished(&self, cx: &Context<'_>) -> Poll<()> {
        let mut letters = self.letters();
        if letters.is_closed {
            return Poll::Ready(());
        }
        letters.wake_later(cx);
        Poll::Pending
    }

    /// Takes a batch, into an empty one. False where none will come any more.
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

impl Letters {
    fn wake_later(&mut self, cx: &Context<'_>) {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
    }
}

/// The bytes that a queued datagram is charged for.
pub fn weight(datagram: &Bytes) -> usize {
    datagram.len() + PACKET_OVERHEAD
}
