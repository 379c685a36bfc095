//! UDP flows: every source address is one, and becomes CONNECT-UDP to the listener's authority.
//!
//! In: datagrams of all sources on one socket. Out: a task a flow, fed through a bounded queue.
//! Flows a listener are bounded; one that failed is not opened again for a second, whatever its
//! source sends. A flow ends by silence (the route's `timeout.idle`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use hermes_model::facts::{Kind, Trust};
use hermes_model::snapshot::ListenerProtocol;
use hermes_net::udp::{self, UdpSocket};

use super::Ending;
use crate::datagram::{Flow, FlowQueue, Port};
use crate::request::{Origin, from_flow};
use crate::session::{self, Near, Served};
use crate::signal::Signal;
use crate::worker::Worker;

/// A flow that failed is closed to its source for so long (milliseconds).
const PENALTY: u64 = 1000;
/// Closed flows are forgotten so often (milliseconds).
const FORGET: u64 = 1000;

struct Flows {
    worker: Rc<Worker>,
    socket: Rc<UdpSocket>,
    name: Arc<str>,
    by_source: HashMap<SocketAddr, Known>,
    forgotten_at: u64,
}

struct Known {
    queue: Rc<FlowQueue>,
    /// Set once its task ended badly: until then datagrams are dropped.
    closed_until: u64,
}

/// Receives for all flows of a listener, until it closes.
pub(crate) async fn receive_all(worker: Rc<Worker>, socket: UdpSocket, name: Arc<str>, ending: Rc<Signal<Ending>>) {
    let mut flows =
        Flows { forgotten_at: worker.now(), worker, socket: Rc::new(socket), name, by_source: HashMap::new() };
    let how = std::future::poll_fn(|cx| {
        if let Poll::Ready(how) = ending.poll(cx) {
            return Poll::Ready(how);
        }
        // A few rounds, then other tasks get their turn.
        for _ in 0..16 {
            match flows.poll_receive(cx) {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    flows.part(how).await;
}

impl Flows {
    fn poll_receive(&mut self, cx: &mut std::task::Context<'_>) -> Poll<()> {
        let socket = self.socket.clone();
        let worker = self.worker.clone();
        let mut touched: Vec<Rc<FlowQueue>> = Vec::new();
        let received = {
            let mut buffer = worker.udp_buffer.borrow_mut();
            socket.poll_receive(cx, &mut buffer, |source, datagram| self.deliver(source, datagram, &mut touched))
        };
        for queue in touched {
            queue.wake();
        }
        match received {
            Poll::Ready(Ok(_)) => {}
            Poll::Ready(Err(error)) => {
                tracing::debug!(listener = %self.name, %error, "a UDP listener could not receive")
            }
            Poll::Pending => return Poll::Pending,
        }
        self.forget_closed();
        Poll::Ready(())
    }

    fn deliver(&mut self, source: SocketAddr, datagram: Bytes, touched: &mut Vec<Rc<FlowQueue>>) {
        let now = self.worker.now();
        if let Some(known) = self.by_source.get_mut(&source) {
            if !known.queue.closed.get() {
                push(&self.worker, &known.queue, datagram, touched);
                return;
            }
            if known.closed_until > now {
                self.worker.shared.metrics.dropped("flow-failed", 1);
                return;
            }
        }
        let generation = self.worker.generation();
        let limit = generation.snapshot.limits.udp_flows;
        if self.by_source.len() >= limit && !self.by_source.contains_key(&source) {
            self.worker.shared.metrics.limit("udp-flows");
            self.worker.shared.metrics.dropped("udp-flows", 1);
            return;
        }
        let queue = Rc::new(FlowQueue::default());
        push(&self.worker, &queue, datagram, touched);
        let flow = Flow { queue: queue.clone(), socket: self.socket.clone(), peer: source };
        self.by_source.insert(source, Known { queue, closed_until: now + PENALTY });
        self.worker.spawn(serve(self.worker.clone(), self.name.clone(), flow));
    }

    fn forget_closed(&mut self) {
        let now = self.worker.now();
        if now.saturating_sub(self.forgotten_at) < FORGET {
            return;
        }
        self.forgotten_at = now;
        self.by_source.retain(|_, known| {
            if !known.queue.closed.get() {
                known.closed_until = now + PENALTY;
            }
            !known.queue.closed.get() || known.closed_until > now
        });
    }

    /// The listener ends. Live flows go on, each on a socket of its own that the kernel prefers for
    /// its source: nothing that is sent to them reaches whoever has the listener now.
    async fn part(mut self, how: Ending) {
        if how == Ending::Close {
            self.by_source.clear();
            return;
        }
        let Ok(local) = self.socket.local_addr() else { return };
        for (source, known) in self.by_source.drain().filter(|(_, known)| !known.queue.closed.get()) {
            match udp::listen_for_peer(local, source).and_then(UdpSocket::from_std) {
                Ok(socket) => self.worker.spawn(feed(self.worker.clone(), socket, known.queue)),
                Err(error) => tracing::warn!(%source, %error, "a UDP flow could not be kept over the handover"),
            }
        }
    }
}

fn push(worker: &Worker, queue: &Rc<FlowQueue>, datagram: Bytes, touched: &mut Vec<Rc<FlowQueue>>) {
    if !queue.push(datagram, worker.generation().snapshot.limits.datagram_queue) {
        worker.shared.metrics.dropped("queue-full", 1);
        return;
    }
    if !touched.last().is_some_and(|last| Rc::ptr_eq(last, queue)) {
        touched.push(queue.clone());
    }
}

/// Feeds one flow from its own socket, until it ends.
async fn feed(worker: Rc<Worker>, socket: UdpSocket, queue: Rc<FlowQueue>) {
    std::future::poll_fn(|cx| {
        loop {
            if queue.closed.get() {
                return Poll::Ready(());
            }
            let mut buffer = worker.udp_buffer.borrow_mut();
            let mut touched = Vec::new();
            match socket.poll_receive(cx, &mut buffer, |_, datagram| push(&worker, &queue, datagram, &mut touched)) {
                Poll::Ready(Ok(_) | Err(_)) => queue.wake(),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
}

async fn serve(worker: Rc<Worker>, name: Arc<str>, flow: Flow) {
    let queue = flow.queue.clone();
    serve_flow(&worker, &name, flow).await;
    queue.closed.set(true);
}

async fn serve_flow(worker: &Rc<Worker>, name: &Arc<str>, flow: Flow) {
    let Some(listener) = worker.generation().listener(name).cloned() else { return };
    let ListenerProtocol::Udp { authority } = &listener.protocol else { return };
    let trusted = listener.trust.iter().any(|prefix| prefix.contains(&flow.peer.ip()));
    let trust = if trusted { Trust::Address } else { Trust::Anonymous };
    let origin = Origin { worker, listener: &listener, source: flow.peer, trust: &trust, secure: false };
    let served = match from_flow(&origin, Kind::Udp, authority) {
        Ok(request) => session::serve(worker, request).await,
        Err(rejected) => Served::Response(session::reject(worker, *rejected)),
    };
    if let Served::Tunnel(tunnel) = served {
        session::relay(Near::Datagrams(Port::Flow(flow)), *tunnel).await;
    }
}
