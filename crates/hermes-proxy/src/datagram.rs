//! The datagrams of one UDP flow, and the two ends that they move between.
//!
//! In: two ports: a tunnel (capsules on a byte stream, RFC 9297 and 9298), a connected socket, or
//! a flow of a listener. Out: datagrams, in order, one by one in count though many at a time in
//! system calls. A full tunnel holds back its source: a socket's kernel buffer, or a flow's queue,
//! where the oldest make room for what comes, and are counted.

mod queue;
mod relay;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::udp::{MAX_PAYLOAD, UdpSocket};
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder};

pub(crate) use self::queue::{Flow, FlowQueue};
pub(crate) use self::relay::{QUIET, relay};
use crate::early::Source;
use crate::live::Entry;
use crate::stream::ByteStream;
use crate::worker::Worker;

/// Datagrams that one turn takes from a port before it sends them on.
const BATCH: usize = 256;

/// One end of a flow.
pub(crate) enum Port {
    /// Capsules on a byte stream.
    Tunnel(Box<Tunnel>),
    /// A socket of our own towards one peer.
    Socket { socket: UdpSocket, peer: SocketAddr },
    /// One source of a listener.
    Flow(Flow),
}

/// Capsules on a byte stream.
pub(crate) struct Tunnel {
    stream: ByteStream,
    decoder: CapsuleDecoder,
    out: Bytes,
    /// What was written may still be held back (by TLS).
    flushing: bool,
    room: BytesMut,
}

impl Source for Port {
    fn bind(&self, session: &Rc<Entry>) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.stream.bind(session);
        }
    }

    fn poll_early(&mut self, cx: &mut Context<'_>, _: usize) -> Poll<io::Result<Option<(Bytes, usize)>>> {
        let Port::Flow(flow) = self else { return Poll::Pending };
        let mut batch = VecDeque::new();
        ready!(flow.queue.poll_take(cx, &mut batch));
        let payload = batch.iter().map(Bytes::len).sum();
        Poll::Ready(Ok(Some((capsules(&mut BytesMut::new(), &mut batch), payload))))
    }
}

impl Port {
    /// A tunnel on a byte stream.
    pub(crate) fn tunnel(stream: ByteStream) -> Self {
        Port::Tunnel(Box::new(Tunnel {
            stream,
            decoder: CapsuleDecoder::new(capsule::MAX_HTTP_DATAGRAM),
            out: Bytes::new(),
            flushing: false,
            room: BytesMut::new(),
        }))
    }

    /// Receives at least one datagram into the (empty) batch. False where the flow ended.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        batch: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<bool>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_receive(cx, worker, batch),
            Port::Flow(flow) => flow.queue.poll_take(cx, batch).map(|()| Ok(true)),
            Port::Socket { socket, .. } => loop {
                let mut buffer = worker.udp_buffer.borrow_mut();
                match ready!(socket.poll_receive(cx, &mut buffer, |_, datagram| batch.push_back(datagram))) {
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
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        batch: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.poll_send(cx, batch),
            Port::Socket { socket, peer } => poll_send_socket(socket, *peer, cx, worker, batch),
            Port::Flow(flow) => {
                let socket = flow.queue.socket.borrow().clone();
                poll_send_socket(&socket, flow.peer, cx, worker, batch)
            }
        }
    }

    /// It took datagrams that it could not send yet.
    fn holds_unsent(&self) -> bool {
        matches!(self, Port::Tunnel(tunnel) if tunnel.flushing || !tunnel.out.is_empty())
    }

    /// Moves the connection that carries it, if that is ours to do. What goes wrong there, receiving
    /// and sending tell.
    fn poll_carrier(&mut self, cx: &mut Context<'_>) {
        if let Port::Tunnel(tunnel) = self {
            let _ = tunnel.stream.poll_carrier(cx);
        }
    }

    /// Ends it in order.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.stream.poll_finish(cx),
            Port::Socket { .. } | Port::Flow(_) => Poll::Ready(Ok(())),
        }
    }

    /// Ends it in order and hears the other side out, whose datagrams have nowhere to go any more.
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Port::Tunnel(tunnel) => match ready!(tunnel.poll_send(cx, &mut VecDeque::new())) {
                Ok(()) => tunnel.stream.poll_close(cx),
                Err(_) => Poll::Ready(()),
            },
            Port::Socket { .. } => Poll::Ready(()),
            // What comes from now on is another flow's.
            Port::Flow(flow) => {
                flow.queue.close_in_order();
                Poll::Ready(())
            }
        }
    }

    fn abort(&mut self) {
        if let Port::Tunnel(tunnel) = self {
            tunnel.stream.abort();
        }
    }
}

fn is_icmp(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}

impl Tunnel {
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        batch: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<bool>> {
        let malformed = |error: capsule::CapsuleError| io::Error::new(io::ErrorKind::InvalidData, error);
        loop {
            while let Some(capsule) = self.decoder.next().map_err(malformed)? {
                // Unknown capsules are skipped (RFC 9297, 3.2).
                let Capsule::Datagram(datagram) = capsule else { continue };
                match capsule::udp_payload(datagram).map_err(malformed)? {
                    Some(payload) => batch.push_back(payload),
                    None => worker.shared.metrics.dropped("unknown-context", 1),
                }
                if batch.len() >= BATCH {
                    return Poll::Ready(Ok(true));
                }
            }
            if !batch.is_empty() {
                return Poll::Ready(Ok(true));
            }
            match ready!(self.stream.poll_read(cx))? {
                Some(chunk) => self.decoder.push(chunk),
                None => {
                    self.decoder.finish().map_err(malformed)?;
                    return Poll::Ready(Ok(false));
                }
            }
        }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<io::Result<()>> {
        loop {
            if !self.out.is_empty() {
                ready!(self.stream.poll_write(cx, &mut self.out))?;
                self.flushing = true;
            }
            if self.flushing {
                ready!(self.stream.poll_flush(cx))?;
                self.flushing = false;
            }
            if batch.is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.out = capsules(&mut self.room, batch);
        }
    }
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
