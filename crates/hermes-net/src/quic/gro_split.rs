//! Splits received GRO batches of datagrams into small ones.
//!
//! In: received messages of a socket. Out: the same datagrams in small batches, once enabled.
//!
//! quinn puts each message into one allocation. A stream that waits for an earlier byte, an incomplete frame, and an
//! unread datagram each retain part of it, so a single byte could retain a batch of 64 KiB in memory. No flow-control
//! window counts that. quinn limits what it retains by the length of the datagrams, so it may retain at most as many
//! times more as an allocation has datagrams.
//!
//! The split costs a copy, 4 to 10 % of the CPU time for each byte. It is used for clients without a certificate; peers
//! with a certificate and upstreams were chosen by an operator. Their overhead is not counted: quinn allows a stream 32
//! KiB of datagrams beyond what it counts, so a stream of such a peer may retain about 27 batches. Only quinn could
//! copy data that it retains for long. Our own queues copy data that is short (`hermes-transport`, `h3/connection.rs`)
//! or that stays unread (`stream/h3/inbox.rs`). Never: another order of datagrams.

use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, ready};

use quinn_udp::{BATCH_SIZE, RecvMeta};

/// Maximum length of a received message, in bytes. A GRO batch is at most as long as the longest UDP datagram.
const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Maximum number of datagrams in a small batch. All have one length; a shorter datagram after them forms its own
/// batch.
const MAX_BATCH: usize = 4;

/// The splitter between a socket's reader and quinn.
#[derive(Debug, Default)]
pub(super) struct GroSplitter {
    is_enabled: AtomicBool,
    /// Uncontended: only one task receives.
    batches: Mutex<Batches>,
}

impl GroSplitter {
    /// Enables splitting for the rest of the socket's life, because earlier clients may still be connected.
    pub(super) fn enable(&self) {
        self.is_enabled.store(true, Ordering::Release);
    }

    /// Receives through `receive`. Returns small batches if splitting is enabled.
    pub(super) fn poll_recv(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
        mut receive: impl FnMut(&mut [IoSliceMut<'_>], &mut [RecvMeta]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if !self.is_enabled.load(Ordering::Acquire) {
            return receive(bufs, metas);
        }
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let filled = batches.split(bufs, metas);
            if filled > 0 {
                return Poll::Ready(Ok(filled));
            }
            ready!(batches.fill(&mut receive))?;
        }
    }
}

/// Received messages, and the position up to which they were passed on.
#[derive(Debug)]
struct Batches {
    /// A slice of [`MAX_MESSAGE_BYTES`] bytes for each message; empty until the first use.
    room: Box<[u8]>,
    metas: [RecvMeta; BATCH_SIZE],
    messages: usize,
    /// The index of the next message.
    message: usize,
    /// The offset of the next datagram in that message.
    start: usize,
}

impl Default for Batches {
    fn default() -> Self {
        Self { room: Box::default(), metas: [RecvMeta::default(); BATCH_SIZE], messages: 0, message: 0, start: 0 }
    }
}

impl Batches {
    /// Receives new messages. The caller has passed on all earlier ones.
    fn fill(
        &mut self,
        receive: impl FnOnce(&mut [IoSliceMut<'_>], &mut [RecvMeta]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<()>> {
        if self.room.is_empty() {
            self.room = vec![0; BATCH_SIZE * MAX_MESSAGE_BYTES].into_boxed_slice();
        }
        let mut pieces = self.room.chunks_exact_mut(MAX_MESSAGE_BYTES);
        let mut room: [IoSliceMut<'_>; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(pieces.next().unwrap_or_default()));
        self.messages = ready!(receive(&mut room, &mut self.metas))?;
        (self.message, self.start) = (0, 0);
        Poll::Ready(Ok(()))
    }

    /// Copies the next small batches into `room`. Returns their number.
    fn split(&mut self, room: &mut [IoSliceMut<'_>], metas: &mut [RecvMeta]) -> usize {
        let mut filled = 0;
        while self.message < self.messages
            && let (Some(room), Some(given)) = (room.get_mut(filled), metas.get_mut(filled))
        {
            let meta = self.metas[self.message];
            let left = meta.len - self.start;
            let stride = meta.stride.clamp(1, left.max(1));
            let together = (left / stride).min(MAX_BATCH).min(room.len() / stride);
            // A datagram that does not fit into the buffer is longer than any that the endpoint accepts, so it is
            // dropped.
            let length = if together == 0 { stride.min(left) } else { together * stride };
            if together > 0 {
                let start = self.message * MAX_MESSAGE_BYTES + self.start;
                room[..length].copy_from_slice(&self.room[start..start + length]);
                *given = meta;
                (given.len, given.stride) = (length, stride);
                filled += 1;
            }
            self.start += length;
            if self.start == meta.len {
                (self.message, self.start) = (self.message + 1, 0);
            }
        }
        filled
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use quinn::{Runtime, TokioRuntime};
    use quinn_udp::Transmit;

    use super::*;

    const LENGTH: usize = 1000;

    /// A received batch of ten datagrams and a shorter one: the bytes of each message, and the length of its datagrams.
    async fn received(is_split: bool) -> Vec<(Vec<u8>, usize)> {
        let open = || TokioRuntime.wrap_udp_socket(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        let (from, to, splitter) = (open(), open(), GroSplitter::default());
        if is_split {
            splitter.enable();
        }
        let contents: Vec<u8> = (0..10 * LENGTH + 300).map(|place| (place / 7) as u8).collect();
        let destination = to.local_addr().unwrap();
        let transmit =
            Transmit { destination, ecn: None, contents: &contents, segment_size: Some(LENGTH), src_ip: None };
        let mut writable = from.clone().create_io_poller();
        std::future::poll_fn(|cx| writable.as_mut().poll_writable(cx)).await.unwrap();
        from.try_send(&transmit).unwrap();
        let mut messages = Vec::new();
        while messages.iter().map(|(bytes, _): &(Vec<u8>, usize)| bytes.len()).sum::<usize>() < contents.len() {
            let mut room = [[0; MAX_MESSAGE_BYTES]; 3];
            let mut bufs = room.each_mut().map(|room| IoSliceMut::new(room));
            let mut metas = [RecvMeta::default(); 3];
            let received = std::future::poll_fn(|cx| {
                splitter.poll_recv(&mut bufs, &mut metas, |bufs, metas| to.poll_recv(cx, bufs, metas))
            });
            let count = received.await.unwrap();
            messages
                .extend(metas[..count].iter().zip(&bufs).map(|(meta, room)| (room[..meta.len].to_vec(), meta.stride)));
        }
        assert!(messages.iter().flat_map(|(bytes, _)| bytes).eq(&contents));
        messages
    }

    #[tokio::test]
    async fn one_byte_of_a_stranger_keeps_few_datagrams() {
        let whole = received(false).await;
        assert!(whole.len() < 3, "the kernel hands over no batches: {} messages", whole.len());
        let splitter = received(true).await;
        let lengths: Vec<_> = splitter.iter().map(|(bytes, stride)| (bytes.len(), *stride)).collect();
        assert_eq!(lengths, [(4 * LENGTH, LENGTH), (4 * LENGTH, LENGTH), (2 * LENGTH, LENGTH), (300, 300)]);
    }
}
