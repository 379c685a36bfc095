//! The datagrams of one flow, and the two ends that they move between.
//!
//! In: two ports: a tunnel (RFC 9297), a connected socket, or a flow of a listener. Out: datagrams, in
//! order, one by one in count though many at a time in system calls. A full tunnel holds back its source:
//! a socket's kernel buffer, or a queue, where the oldest make room for what comes, and are counted.

mod inbox;
mod queue;
mod relay;
mod tunnel;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_model::facts::Kind;
use hermes_net::udp::{MAX_PAYLOAD, UdpSocket};
use hermes_wire::capsule;

pub(crate) use self::inbox::{BATCH, Inbox, weight};
pub(crate) use self::queue::{Flow, FlowQueue};
pub(crate) use self::relay::{Opening, QUIET, Reopened, relay};
use self::tunnel::Tunnel;
use crate::early::Source;
use crate::ip::End;
use crate::live::Entry;
use crate::stream::{ByteStream, Reset};
use crate::worker::Worker;

/// A capsule that is no datagram.
#[derive(Debug)]
pub(crate) enum Other {
    /// A part of one that is passed on as it came; `ends`: the capsule is whole with it.
    Piece { bytes: Bytes, ends: bool },
    /// One that is understood somewhere.
    Whole { kind: u64, payload: Bytes },
}

impl Other {
    fn len(&self) -> usize {
        match self {
            Other::Piece { bytes, .. } | Other::Whole { payload: bytes, .. } => bytes.len(),
        }
    }
}

/// What moves from one port to the other in a turn.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) datagrams: VecDeque<Bytes>,
    /// The datagrams are what the flow carries; else each has its context in front (RFC 9297, 2.1).
    pub(crate) opened: bool,
    /// A device has judged them already, and could not take them at once.
    pub(crate) judged: bool,
    pub(crate) capsules: VecDeque<Other>,
}

impl Batch {
    fn len(&self) -> usize {
        self.datagrams.len() + self.capsules.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.datagrams.is_empty() && self.capsules.is_empty()
    }

    /// What came for another tunnel, and goes to an end of the flow after a move.
    fn open(&mut self, worker: &Worker) {
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

/// One end of a flow.
pub(crate) enum Port {
    /// A request's stream.
    Tunnel(Box<Tunnel>),
    /// A socket of our own towards one peer.
    Socket { socket: UdpSocket, peer: SocketAddr },
    /// One source of a listener.
    Flow(Flow),
    /// An end of CONNECT-IP at a device.
    Device(Box<End>),
}

impl Source for Port {
    fn bind(&self, session: &Rc<Entry>) {
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
    /// A tunnel on a byte stream.
    pub(crate) fn tunnel(stream: ByteStream, kind: Kind) -> Self {
        Port::Tunnel(Box::new(Tunnel::new(stream, kind)))
    }

    /// What was read of its stream before comes first.
    fn push(&mut self, ahead: Bytes) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.push(ahead);
        }
    }

    /// With what is known already of the packets that go further.
    pub(crate) fn carrying(mut self, told: Option<usize>) -> Self {
        if let (Port::Tunnel(tunnel), Some(told)) = (&mut self, told) {
            tunnel.set_told(told);
        }
        self
    }

    /// What is received here goes to that port.
    fn set_sink(&mut self, sink: &Port) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.set_opens(!matches!(sink, Port::Tunnel(_)));
        }
    }

    /// The longest IP packet that goes through here, and further.
    fn capacity(&self) -> usize {
        match self {
            Port::Tunnel(tunnel) => tunnel.capacity(),
            _ => capsule::MAX_PACKET,
        }
    }

    /// Tells whoever sends IP packets to us how long they may be.
    fn announce(&mut self, capacity: usize) {
        match self {
            Port::Tunnel(tunnel) => tunnel.announce(capacity),
            Port::Device(end) => end.set_mtu(capacity),
            Port::Socket { .. } | Port::Flow(_) => {}
        }
    }

    /// What was sent last is a part of a capsule whose rest is to come.
    fn is_within(&self) -> bool {
        matches!(self, Port::Tunnel(tunnel) if tunnel.is_within())
    }

    /// Sends what is of our own making, and waits for nothing else.
    fn poll_own(&mut self, cx: &mut Context<'_>, worker: &Worker) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.poll_own(cx, worker);
        }
    }

    /// Receives at least one datagram into the (empty) batch. False where the flow ended.
    fn poll_receive(&mut self, cx: &mut Context<'_>, worker: &Worker, batch: &mut Batch) -> Poll<io::Result<bool>> {
        let Batch { datagrams, opened, .. } = batch;
        *opened = true;
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_receive(cx, worker, batch),
            Port::Flow(flow) => flow.queue.poll_take(cx, datagrams).map(Ok),
            Port::Device(end) => end.poll_receive(cx, worker, batch).map(|()| Ok(true)),
            Port::Socket { socket, .. } => loop {
                let mut buffer = worker.udp_buffer.borrow_mut();
                match ready!(socket.poll_receive(cx, &mut buffer, |_, datagram| datagrams.push_back(datagram))) {
                    Ok(0) => {}
                    Ok(_) => return Poll::Ready(Ok(true)),
                    // An ICMP message about an earlier datagram. UDP promises nothing: go on.
                    Err(error) if is_icmp(&error) => worker.shared.metrics.dropped("icmp", 1),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            },
        }
    }

    /// Sends the batch. Ready when it is empty.
    fn poll_send(&mut self, cx: &mut Context<'_>, worker: &Worker, batch: &mut Batch) -> Poll<io::Result<()>> {
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
            Port::Socket { socket, peer } => poll_send_socket(socket, *peer, cx, worker, datagrams),
            Port::Flow(flow) => {
                let (socket, peer) = (flow.queue.socket.borrow().clone(), flow.peer);
                ready!(poll_send_socket(&socket, peer, cx, worker, &mut flow.out))?;
                poll_send_socket(&socket, peer, cx, worker, flow.dress(datagrams))
            }
        }
    }

    /// It took datagrams that it could not send yet.
    fn holds_unsent(&self) -> bool {
        match self {
            Port::Tunnel(tunnel) => tunnel.holds_unsent(),
            Port::Flow(flow) => !flow.out.is_empty(),
            Port::Socket { .. } | Port::Device(_) => false,
        }
    }

    /// Moves the connection that carries it, if that is ours to do. What goes wrong there, receiving
    /// and sending tell.
    fn poll_carrier(&mut self, cx: &mut Context<'_>) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.poll_carrier(cx);
        }
    }

    /// Ends it in order.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_finish(cx),
            Port::Socket { .. } | Port::Flow(_) | Port::Device(_) => Poll::Ready(Ok(())),
        }
    }

    /// Ends it in order and hears the other side out, whose datagrams have nowhere to go any more.
    fn poll_close(&mut self, cx: &mut Context<'_>, worker: &Worker) -> Poll<()> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_close(cx, worker),
            Port::Socket { .. } | Port::Device(_) => Poll::Ready(()),
            // What comes from now on is another flow's.
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

/// The whole batch becomes one chunk: one DATA frame, one write.
fn capsules(room: &mut BytesMut, batch: &mut VecDeque<Bytes>) -> Bytes {
    room.reserve(batch.iter().map(|datagram| datagram.len() + capsule::MAX_DATAGRAM_OVERHEAD).sum());
    for datagram in batch.drain(..) {
        capsule::put_datagram(room, &datagram);
    }
    room.split().freeze()
}

/// Sends runs of equal length in one call each (the last of a run may be shorter).
fn poll_send_socket(
    socket: &UdpSocket,
    peer: SocketAddr,
    cx: &mut Context<'_>,
    worker: &Worker,
    batch: &mut VecDeque<Bytes>,
) -> Poll<io::Result<()>> {
    let mut told = false;
    let most = if peer.is_ipv4() { MAX_PAYLOAD } else { capsule::MAX_UDP_PAYLOAD };
    while let Some(first) = batch.front() {
        let segment = first.len();
        if segment > most {
            worker.shared.metrics.dropped("too-large", 1);
            batch.pop_front();
            continue;
        }
        let run = run_length(batch, segment, socket.max_segments());
        let sent = if run == 1 {
            socket.try_send(peer, first, segment.max(1))
        } else {
            let mut contents = worker.udp_run.borrow_mut();
            contents.clear();
            batch.iter().take(run).for_each(|datagram| contents.extend_from_slice(datagram));
            socket.try_send(peer, &contents, segment)
        };
        match sent {
            Ok(()) => {
                told = false;
                drop(batch.drain(..run));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(socket.poll_send_ready(cx))?,
            // An ICMP message about an earlier datagram, which is lost: this one was not sent yet.
            Err(error) if is_icmp(&error) && !std::mem::replace(&mut told, true) => {
                worker.shared.metrics.dropped("icmp", 1);
            }
            // As a router would: what cannot be sent is lost, the flow goes on.
            Err(error) => {
                tracing::debug!(%peer, %error, "a datagram could not be sent");
                worker.shared.metrics.dropped(if is_icmp(&error) { "icmp" } else { "send-failed" }, run as u64);
                drop(batch.drain(..run));
            }
        }
    }
    Poll::Ready(Ok(()))
}

fn run_length(batch: &VecDeque<Bytes>, segment: usize, most: usize) -> usize {
    if segment == 0 {
        return 1;
    }
    let most = most.min(MAX_PAYLOAD / segment).max(1);
    let equal = batch.iter().take(most).take_while(|datagram| datagram.len() == segment).count();
    match batch.get(equal) {
        Some(last) if equal < most && !last.is_empty() && last.len() < segment => equal + 1,
        _ => equal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(lengths: &[usize]) -> VecDeque<Bytes> {
        lengths.iter().map(|length| Bytes::from(vec![0; *length])).collect()
    }

    #[test]
    fn runs_are_of_equal_length_but_for_the_last() {
        assert_eq!(run_length(&batch(&[1200, 1200, 700, 1200]), 1200, 64), 3);
        assert_eq!(run_length(&batch(&[1200, 1300]), 1200, 64), 1);
        assert_eq!(run_length(&batch(&[1200; 100]), 1200, 64), 54);
        assert_eq!(run_length(&batch(&[10; 100]), 10, 64), 64);
        assert_eq!(run_length(&batch(&[0, 0]), 0, 64), 1);
        assert_eq!(run_length(&batch(&[5, 0]), 5, 64), 1);
    }
}
