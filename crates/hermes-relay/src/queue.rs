//! The queue of a subscriber: its next deliveries, in order.
//!
//! In: deliveries of the channels of a subscription, from any thread. Out: one delivery after the other, or the reason why
//! the subscription ends. Publishers that wait for room are woken when there is some. Never: more than the limits, but for
//! one publication of each channel that others filled meanwhile.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::Publication;

/// The next thing for a subscriber.
#[derive(Clone, Debug)]
pub enum Delivery {
    /// A publication.
    Publication(Arc<Publication>),
    /// Publications of a channel that this subscriber does not get.
    Gap {
        /// The name of the channel.
        channel: Arc<str>,
        /// Their number; `None` if nobody knows it.
        missed: Option<u64>,
    },
}

/// The reason why a subscription ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The timeout has passed without a refresh.
    #[error("the subscription expired")]
    Expired,
    /// It read nothing while a reliable publication waited for it.
    #[error("the subscriber read nothing while a reliable publication waited")]
    Stalled,
    /// The relay does not serve the channel any longer.
    #[error("the relay no longer serves the channel")]
    Closed,
}

/// The bounds of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(crate) publications: usize,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct SubscriberQueue {
    limits: QueueLimits,
    state: Mutex<QueueState>,
}

#[derive(Debug)]
struct QueueState {
    waiting: VecDeque<Queued>,
    bytes: u64,
    /// Publications that were dropped since the last one that was queued, by channel.
    dropped: Vec<(Arc<str>, u64)>,
    /// The time at which a reliable publication first found no room, since the last delivery was taken.
    blocking_since: Option<Duration>,
    deadline: Duration,
    end: Option<End>,
    reader: Option<Waker>,
    publishers: Vec<Waker>,
}

/// The reason why a publisher need not wait for a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// There is room, or the subscription has ended.
    Changed,
    /// The subscription has ended now, because its client took nothing for too long.
    Stalled,
}

/// The outcome of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    Queued,
    Dropped,
    /// The subscription has ended.
    Ended,
}

/// A delivery in a queue.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) delivery: Delivery,
    /// Only this subscriber of its group has the publication.
    pub(crate) is_for_one: bool,
}

impl SubscriberQueue {
    pub(crate) fn new(limits: QueueLimits, deadline: Duration) -> Self {
        let state = QueueState {
            waiting: VecDeque::new(),
            bytes: 0,
            dropped: Vec::new(),
            blocking_since: None,
            deadline,
            end: None,
            reader: None,
            publishers: Vec::new(),
        };
        Self { limits, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a delivery without regard to the limits.
    pub(crate) fn push(&self, queued: Queued) {
        let reader = {
            let mut state = self.lock();
            if state.end.is_some() {
                return;
            }
            state.report_dropped();
            state.push(queued);
            state.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
    }

    /// Queues a realtime publication, or drops it if there is no room.
    pub(crate) fn offer(&self, publication: &Arc<Publication>, now: Duration) -> Offered {
        let reader = {
            let mut state = self.lock();
            if state.is_over(now) {
                return Offered::Ended;
            }
            if !state.has_room(self.limits, publication.bytes()) {
                state.drop_one(&publication.channel);
                return Offered::Dropped;
            }
            state.report_dropped();
            state.push(Queued { delivery: Delivery::Publication(publication.clone()), is_for_one: false });
            state.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
        Offered::Queued
    }

    /// The number of publications that still fit, if one of this length does. `None`: the subscription has ended.
    pub(crate) fn room(&self, bytes: u64, now: Duration) -> Option<usize> {
        let state = self.lock();
        if state.is_over(now) {
            return None;
        }
        let has_room = state.has_room(self.limits, bytes);
        Some(if has_room { self.limits.publications.saturating_sub(state.waiting.len()).max(1) } else { 0 })
    }

    /// Wakes `publisher` when a delivery is taken, and returns the time at which it should look again.
    ///
    /// # Errors
    /// It need not wait.
    pub(crate) fn wait_for_room(
        &self,
        bytes: u64,
        publisher: &Waker,
        now: Duration,
        stall: Duration,
    ) -> Result<Duration, Room> {
        let mut state = self.lock();
        // The reader may have taken something since the publisher looked.
        if state.is_over(now) || state.has_room(self.limits, bytes) {
            return Err(Room::Changed);
        }
        let until = *state.blocking_since.get_or_insert(now) + stall;
        if now >= until {
            drop(state);
            self.end(End::Stalled);
            return Err(Room::Stalled);
        }
        if !state.publishers.iter().any(|waiting| waiting.will_wake(publisher)) {
            state.publishers.push(publisher.clone());
        }
        // Nobody is woken when the subscription expires.
        Ok(until.min(state.deadline))
    }

    /// Takes the next delivery.
    ///
    /// # Errors
    /// The subscription has ended. After [`End::Expired`], nothing was left.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>, now: Duration) -> Poll<Result<Delivery, End>> {
        let (next, publishers) = {
            let mut state = self.lock();
            if now >= state.deadline {
                state.end.get_or_insert(End::Expired);
            }
            // Publications before the timeout are delivered.
            if let Some(end) = state.end.filter(|end| *end != End::Expired || state.waiting.is_empty()) {
                return Poll::Ready(Err(end));
            }
            let Some(next) = state.take() else {
                state.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            (next, std::mem::take(&mut state.publishers))
        };
        publishers.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(next.delivery))
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.lock().deadline
    }

    /// Sets another deadline. Returns false if the subscription has ended.
    pub(crate) fn extend(&self, deadline: Duration, now: Duration) -> bool {
        let reader = {
            let mut state = self.lock();
            if state.is_over(now) {
                return false;
            }
            state.deadline = deadline;
            state.reader.take()
        };
        // The reader waits for the earlier deadline.
        reader.into_iter().for_each(Waker::wake);
        true
    }

    /// Ends the subscription. Later deliveries are dropped.
    pub(crate) fn end(&self, end: End) {
        let wakers = {
            let mut state = self.lock();
            state.end.get_or_insert(end);
            let mut wakers = std::mem::take(&mut state.publishers);
            wakers.extend(state.reader.take());
            wakers
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends the subscription, and returns the publications that no other member of its group has.
    pub(crate) fn close(&self) -> Vec<Arc<Publication>> {
        self.end(End::Closed);
        let mut state = self.lock();
        state.bytes = 0;
        let for_one = |queued: Queued| match queued.delivery {
            Delivery::Publication(publication) if queued.is_for_one => Some(publication),
            _ => None,
        };
        std::mem::take(&mut state.waiting).into_iter().filter_map(for_one).collect()
    }
}

impl QueueState {
    fn is_over(&self, now: Duration) -> bool {
        self.end.is_some() || now >= self.deadline
    }

    fn has_room(&self, limits: QueueLimits, bytes: u64) -> bool {
        // A publication that is longer than the limit has room in an empty queue.
        self.waiting.is_empty()
            || (self.waiting.len() < limits.publications && self.bytes.saturating_add(bytes) <= limits.bytes)
    }

    fn push(&mut self, queued: Queued) {
        if let Delivery::Publication(publication) = &queued.delivery {
            self.bytes += publication.bytes();
        }
        self.waiting.push_back(queued);
    }

    fn take(&mut self) -> Option<Queued> {
        let next = self.waiting.pop_front()?;
        if let Delivery::Publication(publication) = &next.delivery {
            self.bytes -= publication.bytes();
        }
        self.blocking_since = None;
        Some(next)
    }

    fn drop_one(&mut self, channel: &Arc<str>) {
        match self.dropped.iter_mut().find(|(name, _)| name == channel) {
            Some((_, count)) => *count += 1,
            None => self.dropped.push((channel.clone(), 1)),
        }
    }

    /// Queues the gaps before the next publication.
    fn report_dropped(&mut self) {
        for (channel, missed) in std::mem::take(&mut self.dropped) {
            let delivery = Delivery::Gap { channel, missed: Some(missed) };
            self.waiting.push_back(Queued { delivery, is_for_one: false });
        }
    }
}
