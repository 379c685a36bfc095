//! The queue of a subscriber: its next deliveries, in order.
//!
//! In: deliveries of the channels of a subscription, from any thread. Out: one delivery after the other, or the reason why
//! the subscription ends. Publishers that wait for room are woken when there is some. Never: more than the limits, but for
//! one publication of each channel that others filled meanwhile.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::{EventId, Publication};

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
        /// The position after the gap.
        until: EventId,
    },
}

/// The reason why a subscription ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The timeout has passed without a refresh.
    #[error("the subscription expired")]
    Expired,
    /// It read nothing while a reliable publication waited for it, or while the relay had no memory left.
    #[error("the subscriber read nothing while others waited for it")]
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
    /// The limit of publications.
    most: usize,
    waiting: VecDeque<Queued>,
    bytes: u64,
    /// Publications that were dropped since the last one that was queued.
    dropped: Vec<Dropped>,
    /// The time at which a reliable publication first found no room, since the last delivery was taken.
    blocking_since: Option<Duration>,
    /// The time at which the reader took a delivery, until it asks for the next one.
    read_since: Option<Duration>,
    /// A reliable publication waits for this queue. Realtime ones must not take the room before it.
    is_reserved: bool,
    deadline: Duration,
    end: Option<End>,
    reader: Option<Waker>,
    publishers: Vec<Waker>,
}

/// Publications of a channel for which a queue had no room.
#[derive(Debug)]
struct Dropped {
    channel: Arc<str>,
    count: u64,
    latest: EventId,
}

/// The reason why a publisher need not wait for a queue.
#[derive(Debug)]
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
    /// The time at which it was queued.
    pub(crate) at: Duration,
}

impl SubscriberQueue {
    pub(crate) fn new(limits: QueueLimits, deadline: Duration) -> Self {
        let state = QueueState {
            most: limits.publications,
            waiting: VecDeque::new(),
            bytes: 0,
            dropped: Vec::new(),
            blocking_since: None,
            read_since: None,
            is_reserved: false,
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

    /// Queues a delivery without regard to the limits. Returns false if the subscription has ended.
    pub(crate) fn push(&self, delivery: Delivery, at: Duration) -> bool {
        let reader = {
            let mut state = self.lock();
            if state.is_over(at) {
                return false;
            }
            state.report_dropped(at);
            match delivery {
                Delivery::Gap { channel, missed, until } => state.push_gap(channel, missed, until, at),
                delivery => state.push(Queued { delivery, at }),
            }
            state.is_reserved = false;
            state.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
        true
    }

    /// Queues a realtime publication, or drops it if there is no room.
    pub(crate) fn offer(&self, publication: &Arc<Publication>, id: EventId, now: Duration) -> Offered {
        let reader = {
            let mut state = self.lock();
            if state.is_over(now) {
                return Offered::Ended;
            }
            if state.is_reserved || !state.has_room(self.limits, publication.bytes()) {
                state.drop_one(&publication.channel, id);
                return Offered::Dropped;
            }
            state.report_dropped(now);
            state.push(Queued { delivery: Delivery::Publication(publication.clone()), at: now });
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

    /// Wakes `publisher` when a delivery is taken, and returns the time at which it should look again. `None`: the publisher
    /// waits for another queue, too, which wakes it.
    ///
    /// # Errors
    /// It need not wait.
    pub(crate) fn wait_for_room(
        &self,
        bytes: u64,
        publisher: Option<&Waker>,
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
        state.is_reserved = true;
        if let Some(publisher) = publisher
            && !state.publishers.iter().any(|waiting| waiting.will_wake(publisher))
        {
            state.publishers.push(publisher.clone());
        }
        // Nobody is woken when the subscription expires.
        Ok(until.min(state.deadline))
    }

    /// Takes the next delivery.
    ///
    /// # Errors
    /// The subscription has ended. Nothing was left, unless it stalled.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>, now: Duration) -> Poll<Result<Delivery, End>> {
        let (next, publishers) = {
            let mut state = self.lock();
            state.read_since = None;
            if now >= state.deadline {
                state.end.get_or_insert(End::Expired);
            }
            if state.end == Some(End::Stalled) {
                return Poll::Ready(Err(End::Stalled));
            }
            if state.waiting.is_empty() {
                // No publication follows so far, and the subscriber must not take the gap for silence.
                state.report_dropped(now);
            }
            match (state.take(), state.end) {
                // Deliveries that were queued before the end are delivered.
                (Some(next), _) => {
                    state.read_since = Some(now);
                    (next, std::mem::take(&mut state.publishers))
                }
                (None, Some(end)) => return Poll::Ready(Err(end)),
                (None, None) => {
                    state.reader = Some(cx.waker().clone());
                    return Poll::Pending;
                }
            }
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

    /// Frees the queue of a subscription that has stalled. Returns the publications that were for it alone. `None`: it has not
    /// stalled, or nothing is left.
    pub(crate) fn take_stalled(&self) -> Option<Vec<Arc<Publication>>> {
        let has_left = {
            let state = self.lock();
            state.end == Some(End::Stalled) && !state.waiting.is_empty()
        };
        has_left.then(|| self.take_untaken())
    }

    /// Ends the subscription of a client that has left, and frees its queue. Returns the publications that were for it alone.
    pub(crate) fn close(&self) -> Vec<Arc<Publication>> {
        self.end(End::Closed);
        self.take_untaken()
    }

    fn take_untaken(&self) -> Vec<Arc<Publication>> {
        let waiting = {
            let mut state = self.lock();
            state.bytes = 0;
            state.dropped.clear();
            std::mem::take(&mut state.waiting)
        };
        let for_one = |queued: Queued| match queued.delivery {
            Delivery::Publication(publication) if publication.id.is_none() => Some(publication),
            _ => None,
        };
        waiting.into_iter().filter_map(for_one).collect()
    }

    /// The time for which the next delivery has waited, or for which the client has been reading the one before. `None`: nothing
    /// waits.
    pub(crate) fn waited(&self, now: Duration) -> Option<Duration> {
        let state = self.lock();
        let oldest = state.waiting.front().map(|next| next.at).into_iter().chain(state.read_since).min();
        oldest.map(|at| now.saturating_sub(at))
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
        // The publisher that waited may have left.
        self.is_reserved &= !self.waiting.is_empty();
        Some(next)
    }

    fn drop_one(&mut self, channel: &Arc<str>, id: EventId) {
        match self.dropped.iter_mut().find(|dropped| dropped.channel == *channel) {
            Some(dropped) => {
                dropped.count += 1;
                dropped.latest = id;
            }
            None => self.dropped.push(Dropped { channel: channel.clone(), count: 1, latest: id }),
        }
    }

    /// Queues the gaps that publications left for which there was no room.
    fn report_dropped(&mut self, at: Duration) {
        for Dropped { channel, count, latest } in std::mem::take(&mut self.dropped) {
            self.push_gap(channel, Some(count), latest, at);
        }
    }

    /// Queues a gap, or extends the one that waits last, so that a client that reads nothing does not collect them. A change
    /// of the root (`missed` is 0) is told by itself: a relaying node has to know each epoch. A client that reads nothing
    /// collects no more of them than its queue has room for.
    fn push_gap(&mut self, channel: Arc<str>, missed: Option<u64>, until: EventId, at: Duration) {
        let has_room = self.waiting.len() < self.most;
        if let Some(Queued { delivery: Delivery::Gap { channel: last, missed: earlier, until: end }, .. }) =
            self.waiting.back_mut()
            && *last == channel
            && (!has_room || missed != Some(0) && *earlier != Some(0))
        {
            *earlier = earlier.zip(missed).map(|(earlier, missed)| earlier.saturating_add(missed));
            *end = until;
        } else {
            self.waiting.push_back(Queued { delivery: Delivery::Gap { channel, missed, until }, at });
        }
    }
}
