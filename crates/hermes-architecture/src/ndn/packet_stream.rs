//! NDN packets as the bytes of a tunnel.
//!
//! In: packets of a face, in a queue, and bytes of a tunnel. Out: the packets as bytes, one after the other, and whole
//! packets for the face. Both ends of the overlay use it: the `ndn` listener, and the route that hands packets to a
//! forwarder. A full queue stops the sender, so no packet is lost between them. Never: a change of a packet.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_ndn::MAX_FRAME;
use hermes_ndn::framing::PacketSplitter;
use tokio::sync::mpsc;
use tokio_util::sync::PollSender;

use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::BoxedStream;

/// Packets that wait in one direction of a session. With the longest ones, half a mebibyte.
pub const QUEUE_PACKETS: usize = 64;
/// Bytes of packets that leave as one chunk.
const MAX_CHUNK: usize = 32 << 10;

/// The stream of a session whose other end is a face.
pub struct PacketStream {
    from_face: mpsc::Receiver<Bytes>,
    to_face: PollSender<Bytes>,
    splitter: PacketSplitter,
    /// Whole packets from the tunnel that the face has no room for yet.
    waiting: VecDeque<Bytes>,
    is_finished: bool,
}

impl PacketStream {
    /// Returns the stream of a face's queues.
    pub fn new(from_face: mpsc::Receiver<Bytes>, to_face: mpsc::Sender<Bytes>) -> Self {
        Self {
            from_face,
            to_face: PollSender::new(to_face),
            splitter: PacketSplitter::new(MAX_FRAME),
            waiting: VecDeque::new(),
            is_finished: false,
        }
    }

    /// Hands waiting packets to the face.
    fn poll_deliver(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the face has closed");
        while !self.waiting.is_empty() {
            ready!(self.to_face.poll_reserve(cx)).map_err(closed)?;
            if let Some(packet) = self.waiting.pop_front() {
                self.to_face.send_item(packet).map_err(closed)?;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl BoxedStream for PacketStream {
    fn bind(&self, _: &Rc<SessionEntry>) {}

    fn poll_carrier(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let Some(first) = ready!(self.from_face.poll_recv(cx)) else { return Poll::Ready(Ok(None)) };
        // Packets that wait together leave together.
        let Ok(second) = self.from_face.try_recv() else { return Poll::Ready(Ok(Some(first))) };
        let mut chunk = BytesMut::with_capacity(first.len() + second.len());
        chunk.extend_from_slice(&first);
        chunk.extend_from_slice(&second);
        while chunk.len() < MAX_CHUNK
            && let Ok(next) = self.from_face.try_recv()
        {
            chunk.extend_from_slice(&next);
        }
        Poll::Ready(Ok(Some(chunk.freeze())))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        ready!(self.poll_deliver(cx))?;
        if !chunk.is_empty() {
            self.splitter.push(&std::mem::take(chunk));
            let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
            while let Some(packet) = self.splitter.next_packet().map_err(malformed)? {
                self.waiting.push_back(packet);
            }
        }
        self.poll_deliver(cx)
    }

    /// A face has no half-close: its other direction ends, too, once the packets that wait have left.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_deliver(cx))?;
        if !self.is_finished {
            self.is_finished = true;
            self.to_face.close();
            self.from_face.close();
            // Closing a queue wakes its senders alone, and the reader is a part of this task.
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    fn abort(&mut self) {
        self.from_face.close();
        self.waiting.clear();
    }
}
