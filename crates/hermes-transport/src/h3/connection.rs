//! The control streams of an HTTP/3 connection, and the state that they signal.
//!
//! In: a QUIC connection. Out: SETTINGS and GOAWAY of both sides, and received HTTP datagrams by stream. A protocol
//! violation of the peer closes the connection with the error code of the RFC. Never: the stream of a request.

mod control;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use hermes_net::quic::{self, path_monitor::PathMonitor};
use hermes_wire::h3::{self, Code, Settings};
use tokio::sync::Notify;

use self::control::Fault;
pub use self::control::greet;
use crate::h3::Inbox;
use crate::oneshot::Oneshot;
use crate::runtime::WorkerContext;
use crate::stream_error::StreamError;

/// The total length of queued datagrams up to which a datagram is queued without a copy, in bytes.
const UNCOPIED_BYTES: usize = 64 << 10;
/// A datagram shorter than this, in bytes, is always copied, because the copy costs next to nothing.
const ALWAYS_COPIED_BYTES: usize = 512;

/// The receive windows of a connection: the number of bytes that a peer may send before they are read.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// The window of one stream.
    pub stream: u32,
    /// The window of all streams together.
    pub connection: u32,
}

/// The state that all streams of a connection share.
pub struct Link {
    pub connection: quic::Connection,
    narrow: Arc<PathMonitor>,
    is_server: bool,
    windows: Windows,
    /// The number of bytes that stalled streams add to the connection's receive window.
    stalled: Cell<u64>,
    /// The number of received bytes of incomplete heads. They were read from QUIC, so no receive window limits them.
    unfinished: Cell<usize>,
    /// The peer's SETTINGS; `None` until they have arrived.
    settings: Cell<Option<Settings>>,
    settled: Oneshot<()>,
    /// True at a server once the client's handshake is confirmed. Earlier requests may be replays.
    is_confirmed: Cell<bool>,
    confirming: Notify,
    /// The ID in the peer's last GOAWAY; `None` if it sent none. A server's GOAWAY names the first request stream that
    /// it will not process.
    goaway: Cell<Option<u64>>,
    /// Set to the ID for this node's GOAWAY when GOAWAY should be sent.
    farewell: Oneshot<u64>,
    /// The peer's last MAX_PUSH_ID; this node pushes nothing.
    most_pushes: Cell<u64>,
    /// The types of the critical streams (RFC 9114, section 6.2.1; RFC 9204, section 4.2) that the peer has opened.
    critical: RefCell<Vec<u64>>,
    /// The queues of received HTTP datagrams, by quarter stream ID (RFC 9297, section 2.1).
    datagrams: RefCell<HashMap<u64, Rc<Inbox>>>,
    /// The number of bytes in all queues of `datagrams`.
    waiting: Rc<Cell<usize>>,
    /// A lower bound of the free bytes in quinn's send buffer for datagrams.
    room: Cell<usize>,
}

/// The number of bytes by which quinn's send buffer shrinks for each queued datagram, in addition to its length.
const DATAGRAM_OVERHEAD_BYTES: usize = size_of::<Bytes>();

impl Link {
    /// Creates the state of a connection. `windows` are the configured receive windows; the connection's is set here.
    pub fn new(connection: quic::Connection, is_server: bool, windows: Windows) -> Rc<Self> {
        connection.set_receive_window(windows.connection.into());
        Rc::new(Self {
            narrow: quic::path_monitor::of(&connection),
            connection,
            is_server,
            windows,
            stalled: Cell::new(0),
            unfinished: Cell::new(0),
            settings: Cell::new(None),
            settled: Oneshot::default(),
            is_confirmed: Cell::new(false),
            confirming: Notify::new(),
            goaway: Cell::new(None),
            farewell: Oneshot::default(),
            most_pushes: Cell::new(0),
            critical: RefCell::default(),
            datagrams: RefCell::default(),
            waiting: Rc::default(),
            room: Cell::new(0),
        })
    }

    /// Reserves space for a datagram of `length` bytes in quinn's send buffer. Returns false if the buffer is full, in
    /// which case quinn would drop the oldest datagram. The query of quinn takes a lock, so its result is used for as
    /// many datagrams as fit: between two calls, quinn only frees space.
    pub(super) fn take_room(&self, length: usize) -> bool {
        let known = self.room.get();
        let room = if known < length { self.connection.datagram_send_buffer_space() } else { known };
        let rest = room.checked_sub(length);
        self.room.set(rest.unwrap_or(0).saturating_sub(DATAGRAM_OVERHEAD_BYTES));
        rest.is_some()
    }

    /// Resets the stored lower bound of the free space, after a datagram was sent without a reservation.
    pub(super) fn forget_room(&self) {
        self.room.set(0);
    }

    /// Returns the length in bytes of the longest QUIC datagram that the path carries now, or `None` if the peer does
    /// not support QUIC datagrams.
    pub(super) fn max_datagram_size(&self) -> Option<usize> {
        let most = self.connection.max_datagram_size()?;
        if !self.narrow.is_narrow() {
            return Some(most);
        }
        // The path's MTU has shrunk. Datagrams must fit the minimum QUIC packet until QUIC notices, because longer
        // packets are lost.
        let excess = u64::from(self.connection.stats().path.current_mtu).saturating_sub(quic::path_monitor::BASE);
        Some(most.saturating_sub(excess as usize))
    }

    /// Returns the number of sent packets of at least 1,200 bytes (QUIC's minimum MTU) that the peer has acknowledged.
    pub fn arrived(&self) -> u64 {
        self.narrow.arrived()
    }

    /// Returns the number of sent ack-eliciting packets, of any length, that the peer has acknowledged.
    pub fn answered(&self) -> u64 {
        self.narrow.answered()
    }

    /// Returns the receive window of one stream in bytes, which is never larger than that of the connection.
    pub fn stream_window(&self) -> u64 {
        self.windows.stream.min(self.windows.connection).into()
    }

    /// Changes the number of bytes by which a stalled stream enlarges the connection's receive window, from `before` to
    /// `now`.
    pub fn widen(&self, before: u64, now: u64) {
        if before != now {
            self.stalled.set(self.stalled.get() + now - before);
            let window = u64::from(self.windows.connection) + self.stalled.get();
            self.connection.set_receive_window(quic::VarInt::from_u64(window).unwrap_or(quic::VarInt::MAX));
        }
    }

    /// Changes the number of bytes in a stream's incomplete head, from `before` to `now`. Returns false if it grew and
    /// all incomplete heads together exceed the larger of the connection's receive window and `one`, the limit of one
    /// head.
    pub fn holds_unfinished(&self, before: usize, now: usize, one: usize) -> bool {
        self.unfinished.set(self.unfinished.get() - before + now);
        now <= before || self.unfinished.get() <= one.max(self.windows.connection as usize)
    }

    /// Closes the connection with an error code and a reason.
    pub fn close(&self, code: Code, reason: &str) {
        self.connection.close(number(code), reason.as_bytes());
    }

    /// Returns the peer's SETTINGS, or `None` if they have not arrived yet.
    pub fn settings(&self) -> Option<Settings> {
        self.settings.get()
    }

    /// True if this node is the HTTP server, whichever side dialled.
    pub fn is_server(&self) -> bool {
        self.is_server
    }

    /// Returns the ID of the first stream that a request can use. If the HTTP server dialled, requests use the streams
    /// that the QUIC server opens (RFC 9000, section 2.1).
    pub fn first_request(&self) -> u64 {
        let is_reversed = self.is_server == self.connection.side().is_client();
        u64::from(is_reversed)
    }

    /// Waits for the peer's SETTINGS, before which extended CONNECT must not be sent. Returns `None` if the connection
    /// closes before.
    pub async fn settled(&self) -> Option<Settings> {
        let closed = pin!(self.connection.closed());
        let settled = pin!(self.settled.wait());
        futures_util::future::select(settled, closed).await;
        self.settings.get()
    }

    /// Marks the handshake as confirmed at a server. Later requests are not replays.
    pub fn confirm(&self) {
        self.is_confirmed.set(true);
        self.confirming.notify_waiters();
    }

    pub fn is_confirmed(&self) -> bool {
        self.is_confirmed.get()
    }

    /// Waits until the handshake is confirmed. Any number of streams may wait.
    pub async fn confirmed(&self) {
        if !self.is_confirmed.get() {
            self.confirming.notified().await;
        }
    }

    /// Sends GOAWAY. This node rejects requests on streams with this ID and higher ones.
    pub fn say_goaway(&self, first_refused: u64) {
        self.farewell.set(first_refused);
    }

    /// True if the peer accepts no further request, because it has sent GOAWAY or the connection is closed.
    pub fn is_going(&self) -> bool {
        self.goaway.get().is_some() || self.connection.close_reason().is_some()
    }

    /// True if the peer's GOAWAY states that the peer did not process this stream. The GOAWAY of a client is ignored,
    /// because it names a push ID (RFC 9114, section 5.2).
    pub fn has_refused(&self, stream: u64) -> bool {
        !self.is_server && self.goaway.get().is_some_and(|first| stream >= first)
    }

    /// Returns the error of a stream whose connection failed.
    pub fn lost(&self, stream: u64, error: &quic::ConnectionError) -> StreamError {
        if self.has_refused(stream) {
            return StreamError::of_code(Code::RequestRejected.value());
        }
        StreamError::of_connection(error.to_string())
    }

    /// Creates a queue for the datagrams of a stream.
    pub(super) fn inbox(&self) -> Inbox {
        Inbox::among(&self.waiting)
    }

    /// Registers the queue for the datagrams of a stream. `None` removes the queue.
    pub(super) fn deliver_to(&self, stream: u64, inbox: Option<Rc<Inbox>>) {
        let mut datagrams = self.datagrams.borrow_mut();
        match inbox {
            Some(inbox) => drop(datagrams.insert(stream / 4, inbox)),
            None => drop(datagrams.remove(&(stream / 4))),
        }
    }

    /// Drives the unidirectional streams and the datagrams of the connection until it closes. `control` is this node's
    /// control stream, or `None` if [`greet`] has not opened it yet.
    pub async fn drive(&self, worker: &WorkerContext, ours: Settings, control: Option<quic::SendStream>) {
        let mut streams = FuturesUnordered::new();
        let mut speaking = pin!(self.speak(ours, control));
        let mut has_spoken = false;
        let mut accepting = pin!(self.connection.accept_uni());
        let mut datagram = pin!(self.connection.read_datagram());
        std::future::poll_fn(|cx| {
            if !has_spoken && let Poll::Ready(result) = speaking.as_mut().poll(cx) {
                has_spoken = true;
                if let Err(fault) = result {
                    self.fail(fault);
                }
            }
            while let Poll::Ready(accepted) = accepting.as_mut().poll(cx) {
                let Ok(recv) = accepted else { return Poll::Ready(()) };
                streams.push(self.read_control_stream(recv));
                accepting.set(self.connection.accept_uni());
            }
            while let Poll::Ready(Some(result)) = streams.poll_next_unpin(cx) {
                if let Err(fault) = result {
                    self.fail(fault);
                }
            }
            self.poll_datagrams(cx, worker, |cx| {
                let polled = datagram.as_mut().poll(cx);
                if polled.is_ready() {
                    datagram.set(self.connection.read_datagram());
                }
                polled
            });
            Poll::Pending
        })
        .await;
    }

    fn poll_datagrams(
        &self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<Result<Bytes, quic::ConnectionError>>,
    ) {
        let most = worker.snapshot().limits.datagram_queue;
        // Datagrams have no flow control. The queues of all streams together are limited to the larger of the
        // connection's receive window and the limit of one queue.
        let most_of_all = most.max(self.windows.connection as usize);
        let mut touched: Option<Rc<Inbox>> = None;
        while let Poll::Ready(Ok(datagram)) = poll(cx) {
            let Some((stream, payload)) = h3::parse_datagram(datagram) else {
                self.close(Code::DatagramError, "a datagram without a stream");
                continue;
            };
            // A datagram that arrives before the stream opens, or after it ends, is dropped (RFC 9297, section 2.1).
            let Some(inbox) = self.datagrams.borrow().get(&(stream / 4)).cloned() else {
                worker.shared.metrics.dropped("no-stream", 1);
                continue;
            };
            // A queued datagram keeps its whole read buffer alive. So short datagrams are copied, and all of them if
            // many bytes are queued.
            let stands_alone = payload.len() < ALWAYS_COPIED_BYTES || self.waiting.get() > UNCOPIED_BYTES;
            let payload = if stands_alone { Bytes::copy_from_slice(&payload) } else { payload };
            let others = self.waiting.get() - inbox.bytes();
            let dropped = inbox.push(payload, most.min(most_of_all.saturating_sub(others)));
            if dropped > 0 {
                worker.shared.metrics.dropped("queue-full", dropped);
            }
            if touched.as_ref().is_none_or(|touched| !Rc::ptr_eq(touched, &inbox)) {
                touched.replace(inbox).inspect(|before| before.wake());
            }
        }
        touched.inspect(|last| last.wake());
    }

    fn fail(&self, Fault(code, reason): Fault) {
        tracing::debug!(peer = %self.connection.remote_address(), ?code, %reason, "an HTTP/3 connection is ended");
        self.close(code, &reason);
    }
}

/// Returns an HTTP/3 error code as a QUIC integer.
pub fn number(code: Code) -> quic::VarInt {
    // All codes fit 32 bits.
    quic::VarInt::from_u32(code.value() as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use quinn::{ClientConfig, Endpoint, ServerConfig};
    use rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// A link, with the endpoints that keep it open.
    async fn link() -> (Rc<Link>, impl Sized) {
        let own = rcgen::generate_simple_self_signed(["here".to_owned()]).unwrap();
        let certificate = own.cert.der().clone();
        let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
        let config = ServerConfig::with_single_cert(vec![certificate.clone()], key).unwrap();
        let server = Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate).unwrap();
        let config = ClientConfig::with_root_certificates(Arc::new(roots)).unwrap();
        let client = Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let connecting = client.connect_with(config, server.local_addr().unwrap(), "here").unwrap();
        let accepted = async { server.accept().await.unwrap().await.unwrap() };
        let (near, far) = tokio::join!(async { connecting.await.unwrap() }, accepted);
        let windows = Windows { stream: 1 << 16, connection: 1 << 20 };
        (Link::new(near, false, windows), (client, server, far))
    }

    /// Without room, quinn would silently drop the oldest datagram.
    #[tokio::test]
    async fn no_more_room_for_datagrams_is_known_than_there_is() {
        for length in [1, 60, 1000] {
            let (link, _rest) = link().await;
            let connection = &link.connection;
            let mut taken = 0;
            // No datagram is sent meanwhile, because this task never yields.
            while link.take_room(length) {
                connection.send_datagram(vec![0; length].into()).unwrap();
                taken += 1;
                assert!(link.room.get() <= connection.datagram_send_buffer_space(), "after {taken} of {length} bytes");
            }
            assert!(connection.datagram_send_buffer_space() < length, "{taken} of {length} bytes");
            assert!(taken > 100, "{taken} of {length} bytes");
        }
    }
}
