//! A reader of a socket group, as quinn's [`AsyncUdpSocket`].
//!
//! In: a group, and the index of a socket. Out: the datagrams of this reader, from its socket and from other readers
//! that forward them. Sends through its socket. Once another process reads the socket, the reader receives only
//! forwarded datagrams.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use quinn_udp::{RecvMeta, Transmit};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::forwarder;
use super::gro_split::GroSplitter;
use super::group::{ForwardCounters, Group};

#[derive(Debug)]
pub(super) struct Reader {
    group: Arc<Group>,
    slot: u8,
    udp: Arc<dyn AsyncUdpSocket>,
    inbox: UnixDatagram,
    /// Another process reads the socket, so this reader receives only forwarded datagrams.
    has_parted: AtomicBool,
    /// Alternates between the socket and the forwarded datagrams, so that neither starves the other.
    turn: AtomicBool,
    counts: ForwardCounters,
    splitter: GroSplitter,
}

impl Reader {
    pub(super) fn new(group: &Arc<Group>, slot: u8) -> io::Result<Self> {
        let udp = TokioRuntime.wrap_udp_socket(group.socket(slot)?)?;
        let inbox = UnixDatagram::from_std(group.inbox(slot)?)?;
        let (has_parted, turn) = (AtomicBool::new(false), AtomicBool::new(false));
        let (counts, splitter) = (ForwardCounters::default(), GroSplitter::default());
        Ok(Self { group: group.clone(), slot, udp, inbox, has_parted, turn, counts, splitter })
    }

    /// Stops reading the socket. From now on, the reader receives only forwarded datagrams.
    pub(super) fn stop_reading(&self) {
        self.has_parted.store(true, Ordering::Release);
    }

    /// Splits GRO batches from now on, so that a buffered byte retains little other memory.
    pub(super) fn split_batches(&self) {
        self.splitter.enable();
    }

    /// Returns the number of forwarded datagrams since the last call, and how many of them were dropped.
    pub(super) fn passed_on(&self) -> (u64, u64) {
        (self.counts.passed.swap(0, Ordering::Relaxed), self.counts.lost.swap(0, Ordering::Relaxed))
    }

    fn poll_socket(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        if self.has_parted.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        let messages = ready!(self.udp.poll_recv(cx, bufs, metas))?;
        for (room, meta) in bufs.iter_mut().zip(metas).take(messages) {
            self.group.sort(self.slot, room, meta, &self.counts);
        }
        Poll::Ready(Ok(messages))
    }

    fn poll_inbox(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.inbox.poll_recv_ready(cx))?;
            let received = self.inbox.try_io(Interest::READABLE, || {
                let mut count = 0;
                for (room, meta) in bufs.iter_mut().zip(metas.iter_mut()) {
                    match forwarder::receive(&self.inbox, room) {
                        Ok(received) => *meta = received,
                        Err(error) if count == 0 => return Err(error),
                        Err(_) => break,
                    }
                    count += 1;
                }
                Ok(count)
            });
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // quinn would close the endpoint on an error, but none of these errors affects its connections.
                Err(error) => tracing::debug!(%error, "cannot read forwarded datagrams"),
                received => return Poll::Ready(received),
            }
        }
    }
}

impl AsyncUdpSocket for Reader {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.udp.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.udp.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.splitter.poll_recv(bufs, metas, |bufs, metas| {
            if self.turn.fetch_not(Ordering::Relaxed) {
                match self.poll_inbox(cx, bufs, metas) {
                    Poll::Pending => self.poll_socket(cx, bufs, metas),
                    received => received,
                }
            } else {
                match self.poll_socket(cx, bufs, metas) {
                    Poll::Pending => self.poll_inbox(cx, bufs, metas),
                    received => received,
                }
            }
        })
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
