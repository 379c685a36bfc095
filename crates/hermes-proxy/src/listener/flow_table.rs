//! The table of UDP flows of one socket, with its limits.
//!
//! In: datagrams, each with the key of its flow (a source or a target). Out: the queue of that flow; a new flow is
//! handed to the task that serves it. The number of flows is limited for a listener as a whole, across its sockets.
//! After a failure, datagrams of the flow are dropped for a second.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::facts::Trust;
use hermes_net::udp::UdpSocket;

use crate::worker::Worker;
use hermes_transport::datagram::FlowQueue;
use hermes_transport::runtime::fair_shares::{Bound, Owner, Share, Shares};

/// Datagrams of a failed flow are dropped for this time (milliseconds).
const PENALTY: u64 = 1000;
/// Interval at which closed flows are removed (milliseconds).
const FORGET: u64 = 1000;

/// A pass over the table repeats within a tick only if it removes more than one flow for each this many of the limit.
const WORTHWHILE: usize = 8;

/// Takes an entry for a flow of a client. `None`, with a metric, if the table is full.
pub(super) fn take(worker: &Rc<Worker>, flows: &Arc<Shares>, trust: &Trust, client: IpAddr) -> Option<Share> {
    let bound = Bound {
        name: "udp-flows",
        limit: worker.generation().snapshot.limits.udp_flows,
        reserve: 0,
        bounds_closing: false,
    };
    Share::take(worker, flows, Owner::of_connection(trust, client), bound)
}

/// Waits until the session of a flow opens. `None` if the flow is displaced meanwhile.
pub(super) async fn unless_displaced<T>(queue: &FlowQueue, opening: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = queue.wait_displaced() => None,
        opened = opening => Some(opened),
    }
}

/// A flow in the table, live or recently closed.
pub(super) struct FlowState {
    pub(super) queue: Rc<FlowQueue>,
    /// The end of the penalty after a failure: until then, datagrams are dropped.
    closed_until: u64,
    /// The flow has a dedicated socket.
    pub(super) parted: bool,
}

/// The flows of one socket.
pub(super) struct FlowTable<K> {
    worker: Rc<Worker>,
    pub(super) known: HashMap<K, FlowState>,
    /// The live flows of the listener, on all workers.
    shares: Arc<Shares>,
    forgotten_at: u64,
    pruned_in_vain_at: Option<u64>,
    /// Flows that received a datagram since the last wake-up.
    touched: Vec<Rc<FlowQueue>>,
}

impl<K: Eq + Hash> FlowTable<K> {
    pub(super) fn new(worker: &Rc<Worker>, shares: Arc<Shares>) -> Self {
        Self {
            forgotten_at: worker.now(),
            pruned_in_vain_at: None,
            worker: worker.clone(),
            known: HashMap::new(),
            shares,
            touched: Vec::new(),
        }
    }

    /// Queues a datagram of a known flow, or drops it. Returns the datagram if its flow would be new.
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

    /// Begins a flow of a client with its first datagram. `None` if the table is full.
    pub(super) fn begin(
        &mut self,
        key: K,
        (trust, client): (&Trust, IpAddr),
        socket: &Rc<UdpSocket>,
        datagram: Bytes,
    ) -> Option<(Rc<FlowQueue>, Share)> {
        let limit = self.worker.generation().snapshot.limits.udp_flows;
        // The table also holds recently closed flows, so it has its own limit.
        let has_room = |known: &HashMap<K, FlowState>| known.len() < 2 * limit || known.contains_key(&key);
        if !has_room(&self.known) {
            prune(&mut self.known, &mut self.pruned_in_vain_at, self.worker.now(), limit);
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
        self.known.insert(key, FlowState { queue: queue.clone(), closed_until, parted: false });
        Some((queue, share))
    }

    /// Wakes the flows that received a datagram.
    pub(super) fn wake(&mut self) {
        self.touched.drain(..).for_each(|queue| queue.inbox.wake());
    }

    /// Removes flows that closed a while ago.
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

/// Removes flows that ended gracefully or were displaced; only failed flows must be remembered. A pass that removes few
/// flows is not repeated before the next tick, whatever clients send.
fn prune<K: Eq + Hash>(known: &mut HashMap<K, FlowState>, in_vain_at: &mut Option<u64>, now: u64, limit: usize) {
    if *in_vain_at == Some(now) {
        return;
    }
    let before = known.len();
    known.retain(|_, known| !(known.queue.is_displaced() || known.queue.is_closed() && known.queue.is_in_order()));
    if before - known.len() <= limit / WORTHWHILE {
        *in_vain_at = Some(now);
    }
}

/// Queues a datagram and records the flow to wake.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_table_of_failed_flows_is_looked_through_once_a_tick() {
        const LIMIT: usize = 32;
        let socket = UdpSocket::from_std(hermes_net::udp::bind(([127, 0, 0, 1], 0).into()).unwrap()).unwrap();
        let socket = Rc::new(socket);
        let begin = |known: &mut HashMap<usize, FlowState>, number: usize| {
            let queue = Rc::new(FlowQueue::new(socket.clone()));
            known.insert(number, FlowState { queue: queue.clone(), closed_until: 0, parted: false });
            queue
        };
        let (mut known, mut in_vain_at) = (HashMap::new(), None);
        for number in 0..2 * LIMIT {
            begin(&mut known, number).close();
        }
        let (one, live) = (begin(&mut known, 100), begin(&mut known, 101));
        prune(&mut known, &mut in_vain_at, 7, LIMIT);
        one.close_in_order();
        prune(&mut known, &mut in_vain_at, 7, LIMIT);
        assert_eq!(known.len(), 2 * LIMIT + 2, "a second pass in this tick");
        prune(&mut known, &mut in_vain_at, 8, LIMIT);
        assert_eq!(known.len(), 2 * LIMIT + 1);
        // A pass that removes many flows may repeat at once.
        for round in 1..3 {
            (0..LIMIT).for_each(|number| begin(&mut known, round * 1000 + number).displace());
            prune(&mut known, &mut in_vain_at, 9, LIMIT);
            assert_eq!(known.len(), 2 * LIMIT + 1, "round {round}");
        }
        assert!(known.contains_key(&101) && !live.is_closed(), "a live flow stays");
    }
}
