//! The UDP flows of one socket, and the bounds on them.
//!
//! In: datagrams, each with the key that tells its flow (a source, or a target). Out: the queue of
//! that flow, new ones for whoever serves it. Flows of a listener are bounded, those of all its
//! sockets together; one that failed is not opened again for a second, whatever is sent.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::Trust;
use hermes_net::udp::UdpSocket;

use crate::datagram::FlowQueue;
use crate::shares::{Bound, Holder, Owner, Share, Shares};
use crate::worker::Worker;

/// A flow that failed is closed for so long (milliseconds).
const PENALTY: u64 = 1000;
/// Closed flows are forgotten so often (milliseconds).
const FORGET: u64 = 1000;

/// A flow is idle after its client was silent for this long (milliseconds).
const IDLE: u64 = 1000;

/// Takes an entry for a flow of a client. `None`, and counted, if the table has no room.
pub(super) fn take(worker: &Rc<Worker>, flows: &Arc<Shares>, trust: &Trust, client: IpAddr) -> Option<Share> {
    let bound = Bound { name: "udp-flows", limit: worker.generation().snapshot.limits.udp_flows, reserve: 0 };
    Share::take(worker, flows, Owner::of_connection(trust, client), bound)
}

impl Holder for FlowQueue {
    fn is_idle(&self, now: u64) -> bool {
        now >= self.heard_at() + IDLE
    }

    fn is_answered(&self) -> bool {
        FlowQueue::is_answered(self)
    }

    fn used_at(&self) -> u64 {
        self.heard_at()
    }

    fn is_ending(&self) -> bool {
        self.is_closed() || self.is_displaced()
    }

    fn displace(&self) {
        FlowQueue::displace(self);
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
    shares: Arc<Shares>,
    forgotten_at: u64,
    /// Flows that got something since they were woken last.
    touched: Vec<Rc<FlowQueue>>,
}

impl<K: Eq + Hash> FlowTable<K> {
    pub(super) fn new(worker: &Rc<Worker>, shares: Arc<Shares>) -> Self {
        Self { forgotten_at: worker.now(), worker: worker.clone(), known: HashMap::new(), shares, touched: Vec::new() }
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

    /// Begins a flow of a client with its first datagram. `None` if the table has no room.
    pub(super) fn begin(
        &mut self,
        key: K,
        (trust, client): (&Trust, IpAddr),
        socket: &Rc<UdpSocket>,
        datagram: Bytes,
    ) -> Option<(Rc<FlowQueue>, Share)> {
        let limit = self.worker.generation().snapshot.limits.udp_flows;
        // The table also has flows that ended a moment ago; it is bounded whatever clients do.
        let has_room = |known: &HashMap<K, Known>| known.len() < 2 * limit || known.contains_key(&key);
        if !has_room(&self.known) {
            // Only flows that failed have to be remembered.
            self.known.retain(|_, known| !(known.queue.is_closed() && known.queue.is_in_order()));
        }
        let has_room = has_room(&self.known);
        if !has_room {
            self.worker.shared.metrics.limit("udp-flows");
        }
        let Some(share) = has_room.then(|| take(&self.worker, &self.shares, trust, client)).flatten() else {
            self.worker.shared.metrics.dropped("udp-flows", 1);
            return None;
        };
        let queue = Rc::new(FlowQueue::new(socket.clone()));
        share.is_held_by(&queue);
        push(&self.worker, &queue, datagram, &mut self.touched);
        let closed_until = self.worker.now() + PENALTY;
        self.known.insert(key, Known { queue: queue.clone(), closed_until, parted: false });
        Some((queue, share))
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
