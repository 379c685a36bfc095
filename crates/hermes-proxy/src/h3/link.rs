//! A connection's own streams, and what they tell.
//!
//! In: a QUIC connection. Out: our SETTINGS and GOAWAY, the peer's, HTTP Datagrams by their streams;
//! where the peer breaks the protocol, the connection's end with the code that says how. Never: a
//! request's stream.

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
pub(crate) use self::control::greet;
use crate::datagram::Inbox;
use crate::signal::Signal;
use crate::stream::StreamError;
use crate::worker::Worker;

/// Bytes of datagrams that wait while their readers are at it.
const FEW: usize = 64 << 10;
/// A shorter datagram costs next to nothing to copy.
const SHORT: usize = 512;

/// Bytes that a peer may send before they are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// On one stream.
    pub(crate) stream: u32,
    /// On all of them.
    pub(crate) connection: u32,
}

/// What all streams of a connection share.
pub(crate) struct Link {
    pub(crate) connection: quic::Connection,
    narrow: Arc<PathMonitor>,
    is_server: bool,
    windows: Windows,
    /// What streams that nobody reads add to the connection's.
    stalled: Cell<u64>,
    /// Bytes of heads that have not come whole. They were read, so that no window counts them.
    unfinished: Cell<usize>,
    /// The peer's.
    settings: Cell<Option<Settings>>,
    settled: Signal<()>,
    /// Of a client: its handshake is over. What came before may be somebody's replay.
    is_confirmed: Cell<bool>,
    confirming: Notify,
    /// The first request that the peer will not process.
    goaway: Cell<Option<u64>>,
    /// Of the first request that we will not process.
    farewell: Signal<u64>,
    /// The last push that the peer would take: nothing is pushed.
    most_pushes: Cell<u64>,
    /// Critical streams that the peer has opened.
    critical: RefCell<Vec<u64>>,
    /// By the quarter of their stream's number.
    datagrams: RefCell<HashMap<u64, Rc<Inbox>>>,
    /// What waits in all of them.
    waiting: Rc<Cell<usize>>,
    /// Bytes of datagrams that quinn takes at least.
    room: Cell<usize>,
}

/// What quinn counts for a datagram that waits, besides its bytes.
const BESIDE: usize = size_of::<Bytes>();

impl Link {
    /// `windows` are those of the connection's configuration, or what that of the connection is to be.
    pub(crate) fn new(connection: quic::Connection, is_server: bool, windows: Windows) -> Rc<Self> {
        connection.set_receive_window(windows.connection.into());
        Rc::new(Self {
            narrow: quic::path_monitor::of(&connection),
            connection,
            is_server,
            windows,
            stalled: Cell::new(0),
            unfinished: Cell::new(0),
            settings: Cell::new(None),
            settled: Signal::default(),
            is_confirmed: Cell::new(false),
            confirming: Notify::new(),
            goaway: Cell::new(None),
            farewell: Signal::default(),
            most_pushes: Cell::new(0),
            critical: RefCell::default(),
            datagrams: RefCell::default(),
            waiting: Rc::default(),
            room: Cell::new(0),
        })
    }

    /// Takes room for a datagram of that many bytes, where quinn has it: it would drop the oldest otherwise. Room only
    /// grows while nobody sends, so that quinn, which locks, is asked once for all that fits.
    pub(super) fn take_room(&self, length: usize) -> bool {
        let known = self.room.get();
        let room = if known < length { self.connection.datagram_send_buffer_space() } else { known };
        let rest = room.checked_sub(length);
        self.room.set(rest.unwrap_or(0).saturating_sub(BESIDE));
        rest.is_some()
    }

    /// For who sent without taking room.
    pub(super) fn forget_room(&self) {
        self.room.set(0);
    }

    /// The longest datagram of QUIC that gets through now; `None`: the peer takes none.
    pub(super) fn max_datagram_size(&self) -> Option<usize> {
        let most = self.connection.max_datagram_size()?;
        if !self.narrow.is_narrow() {
            return Some(most);
        }
        // What is sent meanwhile fits the shortest packets that QUIC has: longer ones are lost.
        let excess = u64::from(self.connection.stats().path.current_mtu).saturating_sub(quic::path_monitor::BASE);
        Some(most.saturating_sub(excess as usize))
    }

    /// Packets of QUIC's shortest path or more that have arrived.
    pub(crate) fn arrived(&self) -> u64 {
        self.narrow.arrived()
    }

    /// Packets of ours that the peer has acknowledged.
    pub(crate) fn answered(&self) -> u64 {
        self.narrow.answered()
    }

    /// What may lie unread on one stream, as far as its connection lets it.
    pub(crate) fn stream_window(&self) -> u64 {
        self.windows.stream.min(self.windows.connection).into()
    }

    /// A stream that nobody reads adds so much to the connection's window now.
    pub(crate) fn widen(&self, before: u64, now: u64) {
        if before != now {
            self.stalled.set(self.stalled.get() + now - before);
            let window = u64::from(self.windows.connection) + self.stalled.get();
            self.connection.set_receive_window(quic::VarInt::from_u64(window).unwrap_or(quic::VarInt::MAX));
        }
    }

    /// A stream keeps so much of a head that has not come whole. False where that of all streams is more than the
    /// connection's window, or one head, may be.
    pub(crate) fn holds_unfinished(&self, before: usize, now: usize, one: usize) -> bool {
        self.unfinished.set(self.unfinished.get() - before + now);
        now <= before || self.unfinished.get() <= one.max(self.windows.connection as usize)
    }

    /// Ends it, and says why.
    pub(crate) fn close(&self, code: Code, reason: &str) {
        self.connection.close(number(code), reason.as_bytes());
    }

    /// What the peer can do, once it has said so.
    pub(crate) fn settings(&self) -> Option<Settings> {
        self.settings.get()
    }

    /// It is the side that serves, whichever has dialled.
    pub(crate) fn is_server(&self) -> bool {
        self.is_server
    }

    /// The number of the first stream that a request can have, of all four kinds: where who serves has dialled,
    /// it is the server of QUIC that opens them (RFC 9000, section 2.1).
    pub(crate) fn first_request(&self) -> u64 {
        let is_reversed = self.is_server == self.connection.side().is_client();
        u64::from(is_reversed)
    }

    /// Waits for the peer's settings: extended CONNECT may not be sent before.
    pub(crate) async fn settled(&self) -> Option<Settings> {
        let closed = pin!(self.connection.closed());
        let settled = pin!(self.settled.wait());
        futures_util::future::select(settled, closed).await;
        self.settings.get()
    }

    /// The handshake is over, at a server: what comes from now on is no replay.
    pub(crate) fn confirm(&self) {
        self.is_confirmed.set(true);
        self.confirming.notify_waiters();
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.is_confirmed.get()
    }

    /// Waits for the end of the client's handshake; any number of streams may.
    pub(crate) async fn confirmed(&self) {
        if !self.is_confirmed.get() {
            self.confirming.notified().await;
        }
    }

    /// Says that requests from this stream on are not taken any more.
    pub(crate) fn say_goaway(&self, first_refused: u64) {
        self.farewell.set(first_refused);
    }

    /// The peer takes no further request.
    pub(crate) fn is_going(&self) -> bool {
        self.goaway.get().is_some() || self.connection.close_reason().is_some()
    }

    /// The peer has said that it did nothing with this stream. A client speaks of pushes instead.
    pub(crate) fn has_refused(&self, stream: u64) -> bool {
        !self.is_server && self.goaway.get().is_some_and(|first| stream >= first)
    }

    /// How a stream failed whose connection did.
    pub(crate) fn lost(&self, stream: u64, error: &quic::ConnectionError) -> StreamError {
        if self.has_refused(stream) {
            return StreamError::of_code(Code::RequestRejected.value());
        }
        StreamError::of_connection(error.to_string())
    }

    /// For the datagrams of a stream.
    pub(super) fn inbox(&self) -> Inbox {
        Inbox::among(&self.waiting)
    }

    /// Puts the datagrams of a stream there; `None`: nobody wants them any more.
    pub(super) fn deliver_to(&self, stream: u64, inbox: Option<Rc<Inbox>>) {
        let mut datagrams = self.datagrams.borrow_mut();
        match inbox {
            Some(inbox) => drop(datagrams.insert(stream / 4, inbox)),
            None => drop(datagrams.remove(&(stream / 4))),
        }
    }

    /// Moves what is the connection's own, until it is over. `control` is our control stream, where it was opened
    /// before (see [`greet`]).
    pub(crate) async fn drive(&self, worker: &Worker, ours: Settings, control: Option<quic::SendStream>) {
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
                streams.push(self.hear(recv));
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
        worker: &Worker,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<Result<Bytes, quic::ConnectionError>>,
    ) {
        let most = worker.generation().snapshot.limits.datagram_queue;
        // No window holds datagrams up: all streams together have what one may fill, or the connection.
        let most_of_all = most.max(self.windows.connection as usize);
        let mut touched: Option<Rc<Inbox>> = None;
        while let Poll::Ready(Ok(datagram)) = poll(cx) {
            let Some((stream, payload)) = h3::parse_datagram(datagram) else {
                self.close(Code::DatagramError, "a datagram without a stream");
                continue;
            };
            // One that came before its stream, or after its end, is dropped (RFC 9297, 2.1).
            let Some(inbox) = self.datagrams.borrow().get(&(stream / 4)).cloned() else {
                worker.shared.metrics.dropped("no-stream", 1);
                continue;
            };
            // It keeps all that was read from the socket with it: short ones, and all where many wait, stand alone.
            let stands_alone = payload.len() < SHORT || self.waiting.get() > FEW;
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

/// As QUIC has it.
pub(crate) fn number(code: Code) -> quic::VarInt {
    // All codes are small.
    quic::VarInt::from_u32(code.value() as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use quinn::{ClientConfig, Endpoint, ServerConfig};
    use rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// One in the midst of an overlay, and what it needs to live.
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

    /// quinn would drop the oldest without a word.
    #[tokio::test]
    async fn no_more_room_for_datagrams_is_known_than_there_is() {
        for length in [1, 60, 1000] {
            let (link, _rest) = link().await;
            let connection = &link.connection;
            let mut taken = 0;
            // Nothing leaves meanwhile: that is another task's, and this one does not wait.
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
