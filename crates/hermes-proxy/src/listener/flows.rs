//! The UDP flows of one socket, and the bounds on them.
//!
//! In: datagrams, each with the key that tells its flow (a source, or a target). Out: the queue of
//! that flow, new ones for whoever serves it. Flows of a listener are bounded, those of all its
//! sockets together; one that failed is not opened again for a second, whatever is sent.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use hermes_net::udp::UdpSocket;

use crate::datagram::FlowQueue;
use crate::worker::Worker;

/// A flow that failed is closed for so long (milliseconds).
const PENALTY: u64 = 1000;
/// Closed flows are forgotten so often (milliseconds).
const FORGET: u64 = 1000;

/// A place among the flows or questions of a listener, given back when it is dropped.
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// `None`, and counted, where the listener has as many flows as it may.
    pub(super) fn take(worker: &Worker, count: &Arc<AtomicUsize>) -> Option<Self> {
        let limit = worker.generation().snapshot.limits.udp_flows;
        Self::take_of(worker, count, limit, "udp-flows")
    }

    /// `None`, and counted by that name, where `limit` are taken.
    pub(super) fn take_of(worker: &Worker, count: &Arc<AtomicUsize>, limit: usize, name: &'static str) -> Option<Self> {
        let place = Self(count.clone());
        let taken = count.fetch_add(1, Ordering::Relaxed) < limit;
        if !taken {
            worker.shared.metrics.limit(name);
        }
        taken.then_some(place)
    }

    /// What it counts in.
    pub(super) fn count(&self) -> Arc<AtomicUsize> {
        self.0.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A flow that is known, live or closed a moment ago.
pub(super) struct Known {
    pub(super) queue: Rc<FlowQueue>,
    /// Set once its task ended badly: until then datagrams are dropped.
    closed_until: u64,
    /// It has a socket of its own.
    pub(super) parted: bool,
}

/// The flows of one socket.
pub(super) struct FlowTable<K> {
    worker: Rc<Worker>,
    pub(super) known: HashMap<K, Known>,
    /// Live ones of the listener, of all workers.
    count: Arc<AtomicUsize>,
    forgotten_at: u64,
    /// Flows that got something since they were woken last.
    touched: Vec<Rc<FlowQueue>>,
}

impl<K: Eq + Hash> FlowTable<K> {
    pub(super) fn new(worker: &Rc<Worker>, count: Arc<AtomicUsize>) -> Self {
        Self { forgotten_at: worker.now(), worker: worker.clone(), known: HashMap::new(), count, touched: Vec::new() }
    }

    /// Queues a datagram of a flow that is known, or drops it. Gives it back where its flow would be new.
    pub(super) fn offer<Q: Eq + Hash + ?Sized>(&mut self, key: &Q, datagram: Bytes) -> Option<Bytes>
    where
        K: Borrow<Q>,
    {
        let Some(known) = self.known.get(key) else { return Some(datagram) };
        if !known.queue.is_closed() {
            push(&self.worker, &known.queue, datagram, &mut self.touched);
            return None;
        }
        if known.closed_until > self.worker.now() && !known.queue.is_in_order() {
            self.worker.shared.metrics.dropped("flow-failed", 1);
            return None;
        }
        Some(datagram)
    }

    /// A new flow, with its first datagram; `None` where there is no room for one more.
    pub(super) fn begin(&mut self, key: K, socket: &Rc<UdpSocket>, datagram: Bytes) -> Option<(Rc<FlowQueue>, Place)> {
        let limit = self.worker.generation().snapshot.limits.udp_flows;
        // The table also has flows that ended a moment ago; it is bounded whatever clients do.
        let has_room = self.known.len() < 2 * limit || self.known.contains_key(&key);
        if !has_room {
            self.worker.shared.metrics.limit("udp-flows");
        }
        let Some(place) = has_room.then(|| Place::take(&self.worker, &self.count)).flatten() else {
            self.worker.shared.metrics.dropped("udp-flows", 1);
            return None;
        };
        let queue = Rc::new(FlowQueue::new(socket.clone()));
        push(&self.worker, &queue, datagram, &mut self.touched);
        let closed_until = self.worker.now() + PENALTY;
        self.known.insert(key, Known { queue: queue.clone(), closed_until, parted: false });
        Some((queue, place))
    }

    /// Tells the flows that got something.
    pub(super) fn wake(&mut self) {
        self.touched.drain(..).for_each(|queue| queue.inbox.wake());
    }

    /// Forgets flows that closed a while ago.
    pub(super) fn forget_closed(&mut self) {
        let now = self.worker.now();
        if now.saturating_sub(self.forgotten_at) < FORGET {
            return;
        }
        self.forgotten_at = now;
        self.known.retain(|_, known| {
            if !known.queue.is_closed() {
                known.closed_until = now + PENALTY;
            }
            !known.queue.is_closed() || known.closed_until > now
        });
    }
}

/// Queues a datagram, and notes whom to wake.
pub(super) fn push(worker: &Worker, queue: &Rc<FlowQueue>, datagram: Bytes, touched: &mut Vec<Rc<FlowQueue>>) {
    queue.heard(worker.now());
    let dropped = queue.inbox.push(datagram, worker.generation().snapshot.limits.datagram_queue);
    if dropped > 0 {
        worker.shared.metrics.dropped("queue-full", dropped);
    }
    if !touched.last().is_some_and(|last| Rc::ptr_eq(last, queue)) {
        touched.push(queue.clone());
    }
}
