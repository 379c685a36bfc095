//! UDP flows: each source address is a flow. A flow becomes CONNECT-UDP to the listener's authority, or CONNECT-IP if
//! its datagrams carry IP packets.
//!
//! In: datagrams of all sources on one socket. Out: one task for each flow, fed through a bounded queue. A flow ends
//! when it is idle (the route's `timeout.idle`).

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hermes_model::authority::Authority;
use hermes_model::facts::{Kind, Trust};
use hermes_model::snapshot::{Listener, ListenerProtocol};
use hermes_net::udp::{self, ReceiveBuffer, UdpSocket};

use super::flow_table::{FlowState, FlowTable, push, unless_displaced};
use super::{Ending, ip, open};
use crate::ip::{Translation, Transport};
use crate::request::{Origin, from_flow};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::{CLOSE_TIMEOUT, Flow, FlowQueue, Port};
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::fair_shares::Share;
use hermes_transport::runtime::yield_to_network;

/// Rounds of detaching flows when a listener ends. Each round handles flows that began in the round before.
const PARTINGS: usize = 16;
/// Maximum number of receive calls that empty a socket buffer full of small datagrams.
const DRAIN_CALLS: usize = 4096;
/// Receive calls before other tasks run.
const ROUNDS: usize = 16;

/// The targets of the flows of a socket.
#[derive(Clone)]
pub(super) enum Targets {
    /// The target that the listener's document names.
    Document,
    /// The original target of each translated flow.
    Translated(Rc<RefCell<Translation>>),
}

impl Targets {
    /// The original source of a flow, and its target.
    fn of(&self, listener: &ListenerProtocol, source: SocketAddr) -> Option<(SocketAddr, Authority)> {
        match (self, listener) {
            (Targets::Document, ListenerProtocol::Udp { authority }) => Some((source, authority.clone())),
            (Targets::Document, _) => None,
            (Targets::Translated(translation), _) => {
                let flow = translation.borrow().flow_of(Transport::Udp, source)?;
                Some((flow.client, Authority::parse(&flow.target.to_string(), None).ok()?))
            }
        }
    }
}

struct Flows {
    worker: Rc<Worker>,
    socket: Rc<UdpSocket>,
    name: Arc<str>,
    targets: Targets,
    by_source: FlowTable<SocketAddr>,
    /// The listener is closing, so datagrams of unknown sources are dropped.
    closing: bool,
    /// The datagrams carry IP packets.
    carries_ip: bool,
}

/// Receives for all flows of a listener until it ends.
pub(super) async fn receive_all(
    worker: Rc<Worker>,
    socket: UdpSocket,
    name: Arc<str>,
    ending: Rc<Oneshot<Ending>>,
    targets: Targets,
) {
    let shares = worker.generation().listening(&name).map(|state| state.shares.flows.clone()).unwrap_or_default();
    let by_source = FlowTable::new(&worker, shares);
    let socket = Rc::new(socket);
    let mut flows = Flows { worker, socket, name, targets, by_source, closing: false, carries_ip: false };
    let how = std::future::poll_fn(|cx| {
        if let Poll::Ready(how) = ending.poll(cx) {
            return Poll::Ready(how);
        }
        for _ in 0..ROUNDS {
            match flows.poll_receive(cx) {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
        yield_to_network(cx);
        Poll::Pending
    })
    .await;
    flows.end(how);
}

impl Flows {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let socket = self.socket.clone();
        let received = self.receive(|buffer, each| socket.poll_receive(cx, buffer, each));
        if let Poll::Ready(Err(error)) = &received {
            tracing::debug!(listener = %self.name, %error, "a UDP listener could not receive");
        }
        if received.is_ready() {
            self.by_source.forget_closed();
        }
        received.map(|_| ())
    }

    /// Reads once; true if no datagram was waiting.
    fn is_drained(&mut self) -> bool {
        let socket = self.socket.clone();
        // A direct read, since the runtime may not have reported the latest datagrams yet.
        self.receive(|buffer, each| socket.receive_now(buffer, each)).is_err()
    }

    fn receive<T>(&mut self, call: impl FnOnce(&mut ReceiveBuffer, &mut dyn FnMut(SocketAddr, Bytes)) -> T) -> T {
        let worker = self.worker.clone();
        let result = {
            let mut buffer = worker.udp_buffer.borrow_mut();
            call(&mut buffer, &mut |source, datagram| self.deliver(source, datagram))
        };
        self.by_source.wake();
        result
    }

    fn deliver(&mut self, source: SocketAddr, datagram: Bytes) {
        let Some(datagram) = self.by_source.offer(&source, datagram) else { return };
        if self.closing {
            self.worker.shared.metrics.dropped("listener-removed", 1);
            return;
        }
        let generation = self.worker.generation();
        let Some(listener) = generation.listener(&self.name) else { return };
        self.carries_ip = matches!(listener.protocol, ListenerProtocol::Ip(_));
        if !ip::admits(&self.worker, listener, source) {
            return;
        }
        let client = (&trust_of(listener, source.ip()), source.ip());
        let begun = self.by_source.begin(source, client, &self.socket, datagram);
        let Some((queue, share)) = begun else { return };
        let (worker, name, targets) = (self.worker.clone(), self.name.clone(), self.targets.clone());
        self.worker.spawn(serve(worker, name, targets, Flow::new(queue, source), share));
    }

    /// Ends the listener. Live flows continue, each on a dedicated connected socket that the kernel prefers for its
    /// source. Datagrams of live flows therefore never reach the next owner of the listener's address, and the live
    /// flows do not block that address.
    fn end(&mut self, how: Ending) {
        if self.carries_ip || matches!(self.targets, Targets::Translated(_)) {
            return self.leave_to_others(how);
        }
        self.closing = how == Ending::Close;
        let Ok(local) = self.socket.local_addr() else { return };
        // Datagrams that arrived before a flow had a socket of its own wait in the listener's socket. Reading them may
        // begin new flows, so the loop repeats until no flow is without a socket.
        for _ in 0..PARTINGS {
            let apart = |known: &FlowState| known.parted || known.queue.is_closed();
            let joint: Vec<SocketAddr> =
                self.by_source.known.iter().filter(|(_, known)| !apart(known)).map(|(source, _)| *source).collect();
            if joint.is_empty() && self.is_drained() {
                return;
            }
            for source in joint {
                self.part_flow(how, local, source);
            }
            // A single source that never stops sending could exceed this limit.
            let _ = (0..DRAIN_CALLS).find(|_| self.is_drained());
        }
    }

    /// Hands over flows that cannot be detached. An IP link lasts for days, and the next process can open its own: it
    /// receives the packets at once, and responses use the old link until the far end knows the new one. Flows to names
    /// begin again in the next process.
    fn leave_to_others(&self, how: Ending) {
        for queue in self.by_source.known.values().map(|known| known.queue.clone()) {
            match how {
                Ending::Close => queue.finish(),
                Ending::HandOver => drop(self.worker.spawn(async move {
                    tokio::time::sleep(CLOSE_TIMEOUT).await;
                    queue.finish();
                })),
            }
        }
    }

    fn part_flow(&mut self, how: Ending, local: SocketAddr, source: SocketAddr) {
        let Some(known) = self.by_source.known.get_mut(&source) else { return };
        known.parted = true;
        let own = match how {
            Ending::Close => udp::remain_for_peer(local, source),
            Ending::HandOver => udp::listen_for_peer(local, source),
        };
        match own.and_then(UdpSocket::from_std).map(Rc::new) {
            Ok(own) => {
                known.queue.replace_socket(own.clone());
                self.worker.spawn(feed(self.worker.clone(), own, source, known.queue.clone()));
            }
            Err(error) => tracing::warn!(%source, %error, "UDP flow closed: its listener was removed"),
        }
    }
}

/// Feeds a detached flow from its own socket until it ends.
pub(super) async fn feed(worker: Rc<Worker>, socket: Rc<UdpSocket>, peer: SocketAddr, queue: Rc<FlowQueue>) {
    std::future::poll_fn(|cx| {
        for _ in 0..ROUNDS {
            if queue.poll_closed(cx).is_ready() {
                return Poll::Ready(());
            }
            let mut buffer = worker.udp_buffer.borrow_mut();
            let mut touched = Vec::new();
            let received = socket.poll_receive(cx, &mut buffer, |source, datagram| {
                // Datagrams of other sources can arrive between `bind` and `connect`.
                if source == peer {
                    push(&worker, &queue, datagram, &mut touched);
                } else {
                    worker.shared.metrics.dropped("draining", 1);
                }
            });
            match received {
                Poll::Ready(Ok(_) | Err(_)) => queue.inbox.wake(),
                Poll::Pending => return Poll::Pending,
            }
        }
        yield_to_network(cx);
        Poll::Pending
    })
    .await;
}

/// The trust in datagrams from this address.
fn trust_of(listener: &Listener, source: IpAddr) -> Trust {
    let is_trusted = listener.trust.iter().any(|prefix| prefix.contains(&source));
    if is_trusted { Trust::Address } else { Trust::Anonymous }
}

async fn serve(worker: Rc<Worker>, name: Arc<str>, targets: Targets, flow: Flow, share: Share) {
    let queue = flow.queue.clone();
    serve_flow(&worker, &name, &targets, flow).await;
    queue.close();
    drop(share);
}

async fn serve_flow(worker: &Rc<Worker>, name: &Arc<str>, targets: &Targets, flow: Flow) {
    let Some(listener) = worker.generation().listener(name).cloned() else { return };
    if let ListenerProtocol::Ip(carried) = &listener.protocol {
        return ip::serve(worker, &listener, carried, flow).await;
    }
    let Some((source, authority)) = targets.of(&listener.protocol, flow.peer) else { return };
    let trust = trust_of(&listener, flow.peer.ip());
    let origin = Origin { worker, listener: &listener, source, trust: &trust, secure: false };
    let queue = flow.queue.clone();
    let mut near = Port::Flow(flow);
    let request = from_flow(&origin, Kind::Udp, &authority, "");
    let opened = unless_displaced(&queue, open(worker, None, &mut near, request)).await;
    if let Some(SessionOutcome::Tunnel(tunnel)) = opened {
        session::relay(DownstreamEnd::Datagrams(near), *tunnel).await;
    }
}
