//! Combines datagrams that quinn sends in several calls into one GSO batch.
//!
//! In: transmits of quinn, of at most ten datagrams of one length. Out: the same datagrams in the same order, as many
//! in a call as the kernel segments. A message's path through the kernel costs as much CPU time as encrypting its
//! contents. With a quarter of the calls, a bulk transfer uses a fifth less CPU time for each byte.
//!
//! Only a transmit of quinn's maximum length is held back, because more is likely to follow. Everything else is sent
//! immediately, after the datagrams that were held back. The receiving task is woken, and sends the batch if nothing
//! was added to it since. That takes one turn of the worker's tasks; there is no timer. Never: another order, or more
//! than one message that is held back.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use quinn::{AsyncUdpSocket, UdpPoller};
use quinn_udp::{EcnCodepoint, RecvMeta, Transmit};

/// Number of datagrams in quinn's longest transmit. If quinn's limit changed, fewer datagrams would be combined.
const MAX_QUINN_SEGMENTS: usize = 10;
/// Maximum length of a message, in bytes: the maximum UDP payload of IPv4, rounded down.
const MAX_MESSAGE_BYTES: usize = 65_000;

/// A UDP socket for quinn that combines transmits into GSO batches.
#[derive(Debug)]
pub(super) struct GsoBatcher {
    udp: Arc<dyn AsyncUdpSocket>,
    pending: Mutex<PendingBatch>,
}

#[derive(Debug)]
struct PendingBatch {
    bytes: Vec<u8>,
    /// The common properties of the datagrams in the batch. `None`: the batch is empty.
    key: Option<BatchKey>,
    /// Datagrams were added since the last poll.
    has_grown: bool,
    /// The task that receives from the socket.
    receiver: Option<Waker>,
    writable: Pin<Box<dyn UdpPoller>>,
}

impl PendingBatch {
    fn new(writable: Pin<Box<dyn UdpPoller>>) -> Self {
        Self { bytes: Vec::new(), key: None, has_grown: false, receiver: None, writable }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BatchKey {
    destination: SocketAddr,
    ecn: Option<EcnCodepoint>,
    source: Option<IpAddr>,
    /// Bytes of each datagram; the last may have fewer.
    segment: usize,
}

impl BatchKey {
    fn of(transmit: &Transmit<'_>) -> Self {
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len());
        Self { destination: transmit.destination, ecn: transmit.ecn, source: transmit.src_ip, segment }
    }

    /// Whether a transmit can be appended to a batch with this key. A single datagram may be shorter, and ends the
    /// batch.
    fn takes(self, transmit: &Transmit<'_>) -> bool {
        let other = Self::of(transmit);
        let is_last = transmit.segment_size.is_none() && other.segment <= self.segment;
        self == other || is_last && self == Self { segment: self.segment, ..other }
    }
}

impl GsoBatcher {
    pub(super) fn new(udp: Arc<dyn AsyncUdpSocket>) -> Self {
        let pending = Mutex::new(PendingBatch::new(udp.clone().create_io_poller()));
        Self { udp, pending }
    }

    fn pending(&self) -> MutexGuard<'_, PendingBatch> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called at each receive: sends the batch if nothing was added since the last call.
    fn poll_flush(&self, cx: &Context<'_>) {
        let mut held = self.pending();
        if !held.receiver.as_ref().is_some_and(|receiver| receiver.will_wake(cx.waker())) {
            held.receiver = Some(cx.waker().clone());
        }
        if std::mem::take(&mut held.has_grown) {
            cx.waker().wake_by_ref();
        } else {
            // On an error the batch stays. quinn finds out that the socket is full at its next transmit.
            let _ = self.flush(&mut held);
        }
    }

    /// Sends the batch.
    ///
    /// # Errors
    /// `WouldBlock`: the socket is full, and the receiving task is woken once it is writable. Like quinn's own sockets,
    /// this reports no other error: the datagrams count as lost.
    fn flush(&self, held: &mut PendingBatch) -> io::Result<()> {
        let Some(key) = held.key else { return Ok(()) };
        let contents = &held.bytes[..];
        let segment_size = (contents.len() > key.segment).then_some(key.segment);
        let BatchKey { destination, ecn, source: src_ip, .. } = key;
        let sent = self.udp.try_send(&Transmit { destination, ecn, contents, segment_size, src_ip });
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            if let Some(receiver) = &held.receiver
                && held.writable.as_mut().poll_writable(&mut Context::from_waker(receiver)).is_ready()
            {
                receiver.wake_by_ref();
            }
        } else {
            held.bytes.clear();
            (held.key, held.has_grown) = (None, false);
        }
        sent
    }

    /// Adds a transmit to the batch if it is bulk data, or sends it after the batch.
    fn send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut held = self.pending();
        let most = self.udp.max_transmit_segments();
        let is_longest =
            transmit.segment_size.is_some_and(|segment| transmit.contents.len() == MAX_QUINN_SEGMENTS * segment);
        if let Some(key) = held.key {
            let length = held.bytes.len() + transmit.contents.len();
            // A batch that ends with a shorter datagram takes no more. It is left from an attempt for which the socket
            // was full.
            let ends = !held.bytes.len().is_multiple_of(key.segment);
            if ends || !key.takes(transmit) || length > MAX_MESSAGE_BYTES.min(most * key.segment) {
                self.flush(&mut held)?;
            }
        }
        if held.key.is_none() && (!is_longest || most < 2 * MAX_QUINN_SEGMENTS || held.receiver.is_none()) {
            return self.udp.try_send(transmit);
        }
        held.key.get_or_insert_with(|| BatchKey::of(transmit));
        held.bytes.extend_from_slice(transmit.contents);
        held.has_grown = is_longest;
        if !is_longest {
            // The datagrams count as sent. If the socket is full, they leave as soon as it is writable.
            let _ = self.flush(&mut held);
        } else if let Some(receiver) = &held.receiver {
            receiver.wake_by_ref();
        }
        Ok(())
    }
}

/// Sends the batch when the socket is dropped, since quinn counts its datagrams as sent. quinn drops the socket when an
/// endpoint moves to another port.
impl Drop for GsoBatcher {
    fn drop(&mut self) {
        let mut held = std::mem::replace(&mut *self.pending(), PendingBatch::new(self.udp.clone().create_io_poller()));
        let _ = self.flush(&mut held);
    }
}

impl AsyncUdpSocket for GsoBatcher {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.udp.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.poll_flush(cx);
        self.udp.poll_recv(cx, bufs, metas)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.udp.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.udp.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.udp.may_fragment()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use quinn::{Runtime, TokioRuntime};

    use super::*;

    const SEGMENT: usize = 1000;

    struct Fixture {
        from: GsoBatcher,
        to: Arc<dyn AsyncUdpSocket>,
        /// Number of datagrams sent.
        sent: usize,
    }

    impl Fixture {
        async fn new() -> Self {
            let open = || TokioRuntime.wrap_udp_socket(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
            let (from, to) = (open(), open());
            let mut writable = from.clone().create_io_poller();
            std::future::poll_fn(|cx| writable.as_mut().poll_writable(cx)).await.unwrap();
            assert!(from.max_transmit_segments() >= 2 * MAX_QUINN_SEGMENTS, "the kernel segments nothing");
            Self { from: GsoBatcher::new(from), to, sent: 0 }
        }

        /// Sends `count` datagrams in one transmit, the last of them with `last` bytes. All bytes of a datagram are its
        /// number.
        fn send(&mut self, count: usize, last: usize) {
            let mut contents = Vec::new();
            for place in 1..=count {
                let length = if place == count { last } else { SEGMENT };
                contents.resize(contents.len() + length, self.sent as u8);
                self.sent += 1;
            }
            let (destination, segment_size) = (self.to.local_addr().unwrap(), (count > 1).then_some(SEGMENT));
            let transmit = Transmit { destination, ecn: None, contents: &contents, segment_size, src_ip: None };
            self.from.try_send(&transmit).unwrap();
        }

        fn poll_flush(&self) {
            self.from.poll_flush(&Context::from_waker(Waker::noop()));
        }

        fn holds(&self) -> usize {
            self.from.pending().bytes.len()
        }

        /// Returns the number of datagrams in each received message, until all datagrams have arrived.
        async fn messages(&self) -> Vec<usize> {
            let (mut messages, mut next) = (Vec::new(), 0);
            while next < self.sent {
                let mut room = vec![0; 64 << 10];
                let mut metas = [RecvMeta::default()];
                let received =
                    std::future::poll_fn(|cx| self.to.poll_recv(cx, &mut [IoSliceMut::new(&mut room)], &mut metas));
                received.await.unwrap();
                let datagrams = room[..metas[0].len].chunks(metas[0].stride);
                messages.push(datagrams.len());
                for datagram in datagrams {
                    assert!(datagram.iter().all(|byte| *byte == next as u8), "datagram {next} is another");
                    next += 1;
                }
            }
            messages
        }
    }

    #[tokio::test]
    async fn bulk_leaves_in_one_message_once_nothing_is_added() {
        let mut fixture = Fixture::new().await;
        fixture.poll_flush();
        for _ in 0..3 {
            fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
            // The batch has grown since the last poll.
            fixture.poll_flush();
            assert_ne!(fixture.holds(), 0);
        }
        fixture.poll_flush();
        assert_eq!(fixture.holds(), 0);
        assert_eq!(fixture.messages().await, [3 * MAX_QUINN_SEGMENTS]);
    }

    #[tokio::test]
    async fn what_is_no_bulk_waits_for_nobody_and_passes_nobody() {
        let mut fixture = Fixture::new().await;
        fixture.poll_flush();
        fixture.send(3, SEGMENT);
        fixture.send(1, 200);
        fixture.send(MAX_QUINN_SEGMENTS, 300);
        assert_eq!(fixture.holds(), 0);
        // A shorter datagram ends the bulk transfer.
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        fixture.send(4, 700);
        assert_eq!(fixture.holds(), 0);
        // The length differs.
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        fixture.send(1, SEGMENT + 100);
        assert_eq!(fixture.holds(), 0);
        assert_eq!(
            fixture.messages().await,
            [3, 1, MAX_QUINN_SEGMENTS, 2 * MAX_QUINN_SEGMENTS + 4, MAX_QUINN_SEGMENTS, 1]
        );
    }

    #[tokio::test]
    async fn a_message_is_no_longer_than_the_kernel_takes() {
        let mut fixture = Fixture::new().await;
        fixture.poll_flush();
        for _ in 0..13 {
            fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        }
        assert_eq!(fixture.holds(), MAX_QUINN_SEGMENTS * SEGMENT);
        fixture.send(1, SEGMENT);
        assert_eq!(fixture.messages().await, [6 * MAX_QUINN_SEGMENTS, 6 * MAX_QUINN_SEGMENTS, MAX_QUINN_SEGMENTS + 1]);
    }

    #[tokio::test]
    async fn nothing_is_held_where_nobody_looks() {
        let mut fixture = Fixture::new().await;
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        assert_eq!(fixture.holds(), 0);
        assert_eq!(fixture.messages().await, [MAX_QUINN_SEGMENTS; 2]);
    }

    #[tokio::test]
    async fn what_is_held_leaves_with_the_socket() {
        let mut fixture = Fixture::new().await;
        fixture.poll_flush();
        fixture.send(MAX_QUINN_SEGMENTS, SEGMENT);
        assert_ne!(fixture.holds(), 0);
        fixture.from = GsoBatcher::new(fixture.from.udp.clone());
        assert_eq!(fixture.messages().await, [MAX_QUINN_SEGMENTS]);
    }
}
