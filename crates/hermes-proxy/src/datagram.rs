//! The datagrams of one UDP flow, and the two ends that they move between.
//!
//! In: two ports: a tunnel (capsules on a byte stream, RFC 9297 and 9298), a connected socket, or
//! a flow of a listener. Out: datagrams, in order, one by one in count though many at a time in
//! system calls. A full tunnel holds back its source: a socket's kernel buffer, or a flow's queue,
//! where what does not fit is dropped and counted.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_model::snapshot::Route;
use hermes_net::udp::{MAX_PAYLOAD, UdpSocket};
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder};

use crate::early::Source;
use crate::error::Error;
use crate::live::{Phase, Session};
use crate::signal::Signal;
use crate::stream::ByteStream;
use crate::worker::Worker;

/// Datagrams that one turn takes from a port before it sends them on.
const BATCH: usize = 256;
/// Rounds before other tasks of the worker get their turn.
const TURNS: usize = 16;
/// After a move the old port is heard for so long.
const QUIET: Duration = Duration::from_secs(2);
/// Ports of earlier moves that a flow still hears; with more moves in that time the first is dropped.
const MAX_OLD: usize = 8;

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
    room: BytesMut,
}

/// One source of a listener: what it sent waits here.
pub(crate) struct Flow {
    pub(crate) queue: Rc<FlowQueue>,
    pub(crate) peer: SocketAddr,
}

/// Datagrams of one source, from the listener to the flow's task. Bounded in bytes.
pub(crate) struct FlowQueue {
    /// Where answers go out: the listener's, or after that is gone the flow's own.
    socket: RefCell<Rc<UdpSocket>>,
    datagrams: RefCell<VecDeque<Bytes>>,
    bytes: Cell<usize>,
    waker: Cell<Option<Waker>>,
    ended: Signal<()>,
}

impl FlowQueue {
    pub(crate) fn new(socket: Rc<UdpSocket>) -> Self {
        Self {
            socket: RefCell::new(socket),
            datagrams: RefCell::default(),
            bytes: Cell::new(0),
            waker: Cell::default(),
            ended: Signal::default(),
        }
    }

    /// From now on the flow has a socket of its own.
    pub(crate) fn part(&self, own: Rc<UdpSocket>) {
        *self.socket.borrow_mut() = own;
        // Who waited to send waited for the other one.
        self.wake();
    }

    /// The flow is over.
    pub(crate) fn close(&self) {
        self.ended.set(());
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.ended.get().is_some()
    }

    /// Waits for the flow's end.
    pub(crate) fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        self.ended.poll(cx)
    }

    /// Queues a datagram; false where it did not fit.
    pub(crate) fn push(&self, datagram: Bytes, most: usize) -> bool {
        let bytes = self.bytes.get() + datagram.len();
        if bytes > most {
            return false;
        }
        self.bytes.set(bytes);
        self.datagrams.borrow_mut().push_back(datagram);
        true
    }

    /// Tells the flow's task that something came.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll_take(&self, cx: &Context<'_>, batch: &mut VecDeque<Bytes>) -> Poll<()> {
        let mut datagrams = self.datagrams.borrow_mut();
        if datagrams.is_empty() {
            self.waker.set(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        if datagrams.len() <= BATCH {
            std::mem::swap(&mut *datagrams, batch);
        } else {
            batch.extend(datagrams.drain(..BATCH));
        }
        self.bytes.set(datagrams.iter().map(Bytes::len).sum());
        Poll::Ready(())
    }
}

impl Source for Port {
    fn poll_early(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<(Bytes, usize)>>> {
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

    /// Ends it in order.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Port::Tunnel(tunnel) => tunnel.stream.poll_finish(cx),
            Port::Socket { .. } | Port::Flow(_) => Poll::Ready(Ok(())),
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
                    Some(payload) if payload.len() <= MAX_PAYLOAD => batch.push_back(payload),
                    Some(_) => worker.shared.metrics.dropped("too-large", 1),
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
                ready!(self.stream.poll_flush(cx))?;
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
    while let Some(first) = batch.front() {
        let segment = first.len();
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
            Ok(()) => drop(batch.drain(..run)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(socket.poll_send_ready(cx))?,
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

type Opening = Pin<Box<dyn Future<Output = Result<Port, Error>>>>;
/// Opens the far port that a changed route asks for.
pub(crate) type Reopen<'a> = &'a dyn Fn(Arc<Route>) -> Opening;

/// The port that a flow has moved away from. It is heard for a while, then ended in order and heard
/// until it has ended as well: a stream that is merely dropped is a failure to the far end.
struct Old {
    port: Port,
    timer: Pin<Box<tokio::time::Sleep>>,
    finishing: bool,
}

impl Old {
    /// Receives what still comes. False where nothing will any more.
    fn poll(&mut self, cx: &mut Context<'_>, worker: &Worker, batch: &mut VecDeque<Bytes>) -> bool {
        let received = self.port.poll_receive(cx, worker, batch);
        let open = matches!(received, Poll::Pending | Poll::Ready(Ok(true)));
        while open && self.timer.as_mut().poll(cx).is_ready() {
            if std::mem::replace(&mut self.finishing, true) {
                return false;
            }
            self.timer.as_mut().reset(tokio::time::Instant::now() + QUIET);
            let _ = self.port.poll_finish(cx);
        }
        open
    }
}

/// A flow under way.
struct Relay<'a> {
    session: &'a Session,
    near: Port,
    far: Port,
    /// The ports before moves, the latest last.
    old: Vec<Old>,
    /// Where the flow moves to.
    opening: Option<(Arc<Route>, Opening)>,
    reopen: Reopen<'a>,
    up: VecDeque<Bytes>,
    down: VecDeque<Bytes>,
}

/// Relays until one end is over. The session's record gets what went wrong.
pub(crate) async fn relay(near: Port, far: Port, session: &Session, reopen: Reopen<'_>) {
    session.entry.set_phase(&session.worker, Phase::Open);
    let mut relay = Relay {
        session,
        near,
        far,
        old: Vec::new(),
        opening: None,
        reopen,
        up: VecDeque::new(),
        down: VecDeque::new(),
    };
    let failed = std::future::poll_fn(|cx| relay.poll(cx)).await;
    match failed {
        Some(error) => {
            relay.near.abort();
            relay.far.abort();
            session.entry.fail(&error);
        }
        None => {
            let _ = std::future::poll_fn(|cx| relay.near.poll_finish(cx)).await;
            let _ = std::future::poll_fn(|cx| relay.far.poll_finish(cx)).await;
            for mut old in relay.old {
                let _ = std::future::poll_fn(|cx| old.port.poll_finish(cx)).await;
            }
        }
    }
}

impl Relay<'_> {
    /// Ready with `None` at the flow's orderly end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Error>> {
        if let Poll::Ready(error) = self.session.entry.end.poll(cx) {
            return Poll::Ready(Some(error));
        }
        self.poll_move(cx);
        for _ in 0..TURNS {
            let up = self.poll_up(cx);
            let down = self.poll_down(cx);
            let blocked = !self.up.is_empty() || !self.down.is_empty();
            self.session.entry.set_phase(&self.session.worker, if blocked { Phase::Blocked } else { Phase::Open });
            match (up, down) {
                (Poll::Ready(Ok(true)), Poll::Ready(Ok(true)) | Poll::Pending)
                | (Poll::Pending, Poll::Ready(Ok(true))) => {}
                (Poll::Pending, Poll::Pending) => return Poll::Pending,
                (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => return Poll::Ready(Some(error)),
                (Poll::Ready(Ok(false)), _) | (_, Poll::Ready(Ok(false))) => return Poll::Ready(None),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        let client = |error: io::Error| Error::ClientGone(error.to_string());
        if self.up.is_empty() && !ready!(self.near.poll_receive(cx, worker, &mut self.up)).map_err(client)? {
            return Poll::Ready(Ok(false));
        }
        let bytes: usize = self.up.iter().map(Bytes::len).sum();
        let sent = self.far.poll_send(cx, worker, &mut self.up);
        let left: usize = self.up.iter().map(Bytes::len).sum();
        self.session.entry.add_received(worker, bytes - left);
        ready!(sent).map_err(|error| self.far_error(&error))?;
        Poll::Ready(Ok(true))
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        let worker = &self.session.worker;
        if self.down.is_empty() {
            self.poll_old(cx);
        }
        if self.down.is_empty() {
            let open =
                ready!(self.far.poll_receive(cx, worker, &mut self.down)).map_err(|error| self.far_error(&error))?;
            if !open {
                return Poll::Ready(Ok(false));
            }
        }
        let bytes: usize = self.down.iter().map(Bytes::len).sum();
        let sent = self.near.poll_send(cx, worker, &mut self.down);
        let left: usize = self.down.iter().map(Bytes::len).sum();
        self.session.entry.add_sent(worker, bytes - left);
        ready!(sent).map_err(|error| Error::ClientGone(error.to_string()))?;
        Poll::Ready(Ok(true))
    }

    /// What the old port still brings after a move.
    fn poll_old(&mut self, cx: &mut Context<'_>) {
        let worker = &self.session.worker;
        let down = &mut self.down;
        self.old.retain_mut(|old| old.poll(cx, worker, down));
    }

    /// Make before break: the flow stays on its old port until the new one is open.
    fn poll_move(&mut self, cx: &mut Context<'_>) {
        let moved = &self.session.entry.moved;
        let wanted = moved.borrow().as_ref().map(Arc::as_ptr);
        if wanted != self.opening.as_ref().map(|(route, _)| Arc::as_ptr(route)) {
            // What was not wanted any more, before it was open, is dropped.
            self.opening = moved.borrow().as_ref().map(|route| (route.clone(), (self.reopen)(route.clone())));
        }
        let Some((_, opening)) = &mut self.opening else { return };
        let Poll::Ready(opened) = opening.as_mut().poll(cx) else { return };
        self.opening = None;
        moved.take();
        match opened {
            Ok(port) => {
                let port = std::mem::replace(&mut self.far, port);
                if self.old.len() == MAX_OLD {
                    self.old.remove(0);
                }
                self.old.push(Old { port, timer: Box::pin(tokio::time::sleep(QUIET)), finishing: false });
            }
            Err(error) => tracing::warn!(%error, "a flow could not move; it stays where it is"),
        }
    }

    fn far_error(&self, error: &io::Error) -> Error {
        Error::Broken {
            peer: self.session.entry.peer.borrow().clone().unwrap_or_else(|| "the far end".into()),
            reason: error.to_string(),
            unprocessed: false,
        }
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
