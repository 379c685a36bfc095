//! The datagrams of one flow, and the two ports between which they are relayed.
//!
//! In: two ports, each of which is a tunnel (RFC 9297), a connected socket, a flow of a listener, or a tunnel end at a
//! device. Out: datagrams, in order, several in one system call if possible. A full tunnel applies backpressure to the
//! source of the datagrams. There the kernel's socket buffer or a queue drops datagrams and counts them.

mod outgoing;
mod queue;
mod relay;
mod tunnel;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Kind;
use hermes_net::udp::UdpSocket;
use hermes_wire::{capsule, connect_ip};

pub use self::outgoing::Outgoing;
pub use self::queue::{Flow, FlowQueue};
pub use self::relay::{CLOSE_TIMEOUT, Opening, Reopened, relay};
use self::tunnel::Tunnel;
use crate::early_payload::EarlyReader;
use crate::runtime::WorkerContext;
use crate::runtime::session::SessionEntry;
use crate::stream::{ByteStream, Reset};

/// A capsule of another type than DATAGRAM.
#[derive(Debug)]
pub enum Other {
    /// A fragment of a capsule that is forwarded unparsed. `ends` is true for the last fragment of the capsule.
    Piece { bytes: Bytes, ends: bool },
    /// A complete capsule of a type that this node parses.
    Whole { kind: u64, payload: Bytes },
}

/// The maximum work of one poll before other tasks of the worker run. A packet is one unit of work; a capsule is one
/// unit plus one for each address entry. An ADDRESS_REQUEST is as much work as the whole limit: each of its addresses
/// may cause the release of a lease and a new route, which both wait for the kernel.
pub const MAX_WORK_PER_TURN: usize = 256;
/// The shortest entry of an address in a CONNECT-IP capsule, in bytes.
const ENTRY: usize = 7;

/// Returns the work that a capsule causes, in units of one packet.
fn work_of(kind: u64, payload: &[u8]) -> usize {
    if kind == connect_ip::ADDRESS_REQUEST { MAX_WORK_PER_TURN } else { 1 + payload.len() / ENTRY }
}

impl Other {
    /// Returns the work that this capsule causes, in units of one packet.
    pub fn work(&self) -> usize {
        match self {
            Other::Piece { .. } => 1,
            Other::Whole { kind, payload } => work_of(*kind, payload),
        }
    }

    fn len(&self) -> usize {
        match self {
            Other::Piece { bytes, .. } | Other::Whole { payload: bytes, .. } => bytes.len(),
        }
    }
}

/// Datagrams and capsules that one port has received and the other port of the flow sends.
#[derive(Debug, Default)]
pub struct Batch {
    pub datagrams: VecDeque<Bytes>,
    /// True if the datagrams are bare payload. Otherwise each of them begins with its context ID (RFC 9298, section 5).
    pub opened: bool,
    /// True if the packet filter of a device has already passed these packets, and the device had no room for all.
    pub judged: bool,
    /// Capsules that preceded the datagrams on the stream, and are sent before them. QUIC datagrams have no order
    /// relative to the stream.
    pub capsules: VecDeque<Other>,
}

impl Batch {
    fn len(&self) -> usize {
        self.datagrams.len() + self.capsules.len()
    }

    pub fn is_empty(&self) -> bool {
        self.datagrams.is_empty() && self.capsules.is_empty()
    }

    /// Removes the context IDs, unless the datagrams are bare payload already. The datagrams have context IDs if they
    /// were received for a tunnel, and the flow has since moved to another kind of port.
    fn open(&mut self, worker: &WorkerContext) {
        if !std::mem::replace(&mut self.opened, true) {
            let count = self.datagrams.len();
            self.datagrams =
                self.datagrams.drain(..).filter_map(|datagram| capsule::packet(datagram).ok().flatten()).collect();
            let dropped = count - self.datagrams.len();
            if dropped > 0 {
                worker.shared.metrics.dropped("unknown-context", dropped as u64);
            }
        }
    }
}

/// A port of a flow. It receives datagrams, and sends those that the other port of the flow has received.
pub enum Port {
    /// A tunnel on the stream of a request.
    Tunnel(Box<Tunnel>),
    /// A socket of this node, connected to one peer.
    Socket { socket: UdpSocket, peer: SocketAddr },
    /// A flow between a listener and one source address.
    Flow(Flow),
    /// The end of a CONNECT-IP tunnel at a TUN device.
    Device(Box<dyn DevicePort>),
}

/// The end of a CONNECT-IP tunnel at a TUN device of this node. [`Port`] forwards its functions to this trait.
pub trait DevicePort {
    /// Returns the name of the device if the device was deleted, otherwise `None`.
    fn lost_device(&self) -> Option<Arc<str>>;
    /// Returns the length in bytes of the longest IP packet that the device and the networks after it forward.
    fn capacity(&self) -> usize;
    /// Sets the length in bytes of the longest IP packet that the tunnel forwards.
    fn set_mtu(&mut self, capacity: usize);
    /// Follows changes of the device's routes, without waiting.
    fn poll_routes(&mut self, cx: &mut Context<'_>);
    /// Receives at least one packet into the (empty) batch. Returns false if the tunnel ended.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>>;
    /// Sends the batch. Ready when it is empty.
    fn poll_send(&mut self, cx: &mut Context<'_>, worker: &WorkerContext, batch: &mut Batch) -> Poll<io::Result<()>>;
    /// Ends the tunnel.
    fn close(&mut self, worker: &WorkerContext);
}

impl EarlyReader for Port {
    fn bind(&self, session: &Rc<SessionEntry>) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.bind(session);
        }
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        let Port::Flow(flow) = self else { return Poll::Pending };
        let mut batch = VecDeque::new();
        if !ready!(flow.queue.poll_take(cx, &mut batch)) {
            return Poll::Ready(Ok(None));
        }
        let payload = batch.iter().map(Bytes::len).sum();
        Poll::Ready(Ok(Some((capsules(&mut BytesMut::new(), &mut batch), payload))))
    }

    fn has_whole_capsules(&self) -> bool {
        true
    }
}

impl Port {
    /// Returns a port for a tunnel on a byte stream.
    pub fn tunnel(stream: ByteStream, kind: Kind) -> Self {
        Port::Tunnel(Box::new(Tunnel::new(stream, kind)))
    }

    /// Returns a port for a tunnel that this node opened to its upstream.
    pub fn far_tunnel(stream: ByteStream, kind: Kind) -> Self {
        let mut tunnel = Tunnel::new(stream, kind);
        tunnel.has_said_less();
        Port::Tunnel(Box::new(tunnel))
    }

    /// Prepends bytes that were already read from the stream of this port.
    fn push(&mut self, ahead: Bytes) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.push(ahead);
        }
    }

    /// Sets the maximum length in bytes of an IP packet that the peer of this tunnel can forward; `None` has no effect.
    pub fn carrying(mut self, told: Option<usize>) -> Self {
        if let (Port::Tunnel(tunnel), Some(told)) = (&mut self, told) {
            tunnel.set_told(told);
        }
        self
    }

    /// Sets the port that sends what this port receives. It decides whether this port removes context IDs.
    fn set_sink(&mut self, sink: &Port) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.set_opens(!matches!(sink, Port::Tunnel(_)));
        }
    }

    /// Returns the name of this port's device if the device was deleted, otherwise `None`.
    fn lost_device(&self) -> Option<Arc<str>> {
        match self {
            Port::Device(end) => end.lost_device(),
            Port::Tunnel(_) | Port::Socket { .. } | Port::Flow(_) => None,
        }
    }

    /// Returns the length in bytes of the longest IP packet that this port and the path after it forward.
    fn capacity(&self) -> usize {
        match self {
            Port::Tunnel(tunnel) => tunnel.capacity(),
            Port::Device(end) => end.capacity(),
            Port::Socket { .. } | Port::Flow(_) => capsule::MAX_PACKET,
        }
    }

    /// Announces to the sender of IP packets how many bytes a packet may have.
    fn announce(&mut self, capacity: usize) {
        match self {
            Port::Tunnel(tunnel) => tunnel.announce(capacity),
            Port::Device(end) => end.set_mtu(capacity),
            Port::Socket { .. } | Port::Flow(_) => {}
        }
    }

    /// True if this port has sent a part of a capsule whose rest is still to be sent.
    fn is_within(&self) -> bool {
        matches!(self, Port::Tunnel(tunnel) if tunnel.is_within())
    }

    /// Sends the capsules that this node itself has generated, or follows changes of the device's routes. Never waits.
    fn poll_own(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_own(cx, worker),
            Port::Device(end) => end.poll_routes(cx),
            Port::Socket { .. } | Port::Flow(_) => {}
        }
    }

    /// Receives at least one datagram or capsule into the (empty) batch. Returns false if the flow ended.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        batch: &mut Batch,
    ) -> Poll<io::Result<bool>> {
        let Batch { datagrams, opened, .. } = batch;
        *opened = true;
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_receive(cx, worker, batch),
            Port::Flow(flow) => flow.queue.poll_take(cx, datagrams).map(Ok),
            Port::Device(end) => end.poll_receive(cx, worker, batch),
            Port::Socket { socket, peer } => loop {
                let mut buffer = worker.udp_buffer.borrow_mut();
                let mut strangers = 0;
                let received = socket.poll_receive(cx, &mut buffer, |source, datagram| {
                    // The kernel filters the source once the socket is connected. Between `bind` and `connect`, any
                    // source can send to the port, also a peer of the port's previous socket.
                    if (source.ip(), source.port()) == (peer.ip(), peer.port()) {
                        datagrams.push_back(datagram);
                    } else {
                        strangers += 1;
                    }
                });
                if strangers > 0 {
                    worker.shared.metrics.dropped("not-the-target", strangers);
                }
                match ready!(received) {
                    Ok(_) if datagrams.is_empty() => {}
                    Ok(_) => return Poll::Ready(Ok(true)),
                    // The peer or a router has answered an earlier datagram with an ICMP error. UDP guarantees no
                    // delivery, so the flow continues.
                    Err(error) if is_icmp(&error) => worker.shared.metrics.dropped("icmp", 1),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            },
        }
    }

    /// Sends the batch. Ready when the batch is empty. Capsules are dropped unless the port is a tunnel or a device.
    fn poll_send(&mut self, cx: &mut Context<'_>, worker: &WorkerContext, batch: &mut Batch) -> Poll<io::Result<()>> {
        if let Port::Tunnel(tunnel) = self {
            return tunnel.poll_send(cx, worker, batch);
        }
        batch.open(worker);
        if let Port::Device(end) = self {
            return end.poll_send(cx, worker, batch);
        }
        batch.capsules.clear();
        let datagrams = &mut batch.datagrams;
        match self {
            Port::Tunnel(_) | Port::Device(_) => Poll::Ready(Ok(())),
            Port::Socket { socket, peer } => outgoing::poll_send_for(worker, socket, *peer, cx, datagrams),
            Port::Flow(flow) => flow.poll_send(cx, worker, datagrams),
        }
    }

    /// True if this port has accepted datagrams that it could not send yet.
    fn holds_unsent(&self) -> bool {
        match self {
            Port::Tunnel(tunnel) => tunnel.holds_unsent(),
            Port::Flow(flow) => !flow.out.is_empty(),
            Port::Socket { .. } | Port::Device(_) => false,
        }
    }

    /// Announces to the peer that this node shuts down.
    fn say_leaving(&mut self) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.say_leaving();
        }
    }

    /// True if the peer has announced its shutdown. A successor may already accept tunnels.
    fn is_leaving(&self) -> bool {
        matches!(self, Port::Tunnel(tunnel) if tunnel.is_leaving())
    }

    /// Drives the underlying connection, unless another task does. `poll_receive` and `poll_send` report its errors.
    fn poll_carrier(&mut self, cx: &mut Context<'_>) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.poll_carrier(cx);
        }
    }

    /// Ends the stream of a tunnel cleanly, with END_STREAM or its equivalent. Has no effect on other ports.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_finish(cx),
            Port::Socket { .. } | Port::Flow(_) | Port::Device(_) => Poll::Ready(Ok(())),
        }
    }

    /// Ends the port cleanly, and discards what the peer still sends until the peer ends the stream too.
    fn poll_close(&mut self, cx: &mut Context<'_>, worker: &WorkerContext) -> Poll<()> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_close(cx, worker),
            Port::Socket { .. } => Poll::Ready(()),
            Port::Device(end) => {
                end.close(worker);
                Poll::Ready(())
            }
            // Later datagrams of the same source begin a new flow.
            Port::Flow(flow) => {
                flow.queue.close_in_order();
                Poll::Ready(())
            }
        }
    }

    fn abort(&mut self, reset: Reset) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.abort(reset);
        }
    }
}

fn is_icmp(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}

/// Encodes all datagrams of the batch as capsules in one chunk, which needs only one DATA frame and one write.
fn capsules(room: &mut BytesMut, batch: &mut VecDeque<Bytes>) -> Bytes {
    room.reserve(batch.iter().map(|datagram| datagram.len() + capsule::MAX_DATAGRAM_OVERHEAD).sum());
    for datagram in batch.drain(..) {
        capsule::put_datagram(room, &datagram);
    }
    room.split().freeze()
}
