//! Batches of datagrams, taken apart.
//!
//! In: messages of a socket. Out: the same, dealt out in small ones once that is asked for. quinn puts each message of
//! a socket into one allocation, of which every stream that waits for an earlier byte, every frame that is not whole
//! and every datagram that nobody has read yet keeps a piece: one byte would keep a batch of 64 KiB. No window counts
//! that; quinn bounds what it keeps by the datagram that a byte was in, so that what is kept is at most as many times
//! more as there are datagrams of its length in an allocation. It costs a copy, four to ten hundredths of all that is
//! done for a byte, and is for clients that nobody knows: peers with a certificate, and upstreams, are somebody's
//! choice. What one of those keeps is not counted: it waits in quinn for an earlier byte, quinn allows a stream 32 KiB
//! of datagrams beyond what it counts, and tells nobody of it; so that such a peer's streams may keep some 27 batches
//! each. Only quinn could copy out what stays for long; what has left it our queues copy where it is short
//! (`hermes-proxy`, `h3/link.rs`) or stays (`stream/h3/inbox.rs`). Never: another order.

use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, ready};

use quinn_udp::{BATCH_SIZE, RecvMeta};

/// Bytes of the longest message: a batch is as long as the longest datagram may be.
const MESSAGE: usize = 64 << 10;
/// Datagrams of one length that stay together. A shorter one behind them stands alone.
const TOGETHER: usize = 4;

/// Between who reads a socket and quinn.
#[derive(Debug, Default)]
pub(super) struct Apart {
    has_begun: AtomicBool,
    /// One task alone asks for it.
    batches: Mutex<Batches>,
}

impl Apart {
    /// From now on, and to the end: who came before stays.
    pub(super) fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    /// What `receive` has, in as small batches as is asked for.
    pub(super) fn poll_recv(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
        mut receive: impl FnMut(&mut [IoSliceMut<'_>], &mut [RecvMeta]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if !self.has_begun.load(Ordering::Acquire) {
            return receive(bufs, metas);
        }
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let dealt = batches.deal(bufs, metas);
            if dealt > 0 {
                return Poll::Ready(Ok(dealt));
            }
            ready!(batches.fill(&mut receive))?;
        }
    }
}

/// Messages that were received, and how far they were dealt out.
#[derive(Debug)]
struct Batches {
    /// A piece of [`MESSAGE`] bytes each, from the first time on.
    room: Box<[u8]>,
    metas: [RecvMeta; BATCH_SIZE],
    messages: usize,
    /// The next one.
    message: usize,
    /// The next datagram in it.
    start: usize,
}

impl Default for Batches {
    fn default() -> Self {
        Self { room: Box::default(), metas: [RecvMeta::default(); BATCH_SIZE], messages: 0, message: 0, start: 0 }
    }
}

impl Batches {
    /// Receives anew, once all was dealt out.
    fn fill(
        &mut self,
        receive: impl FnOnce(&mut [IoSliceMut<'_>], &mut [RecvMeta]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<()>> {
        if self.room.is_empty() {
            self.room = vec![0; BATCH_SIZE * MESSAGE].into_boxed_slice();
        }
        let mut pieces = self.room.chunks_exact_mut(MESSAGE);
        let mut room: [IoSliceMut<'_>; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(pieces.next().unwrap_or_default()));
        self.messages = ready!(receive(&mut room, &mut self.metas))?;
        (self.message, self.start) = (0, 0);
        Poll::Ready(Ok(()))
    }

    /// How many messages went there.
    fn deal(&mut self, room: &mut [IoSliceMut<'_>], metas: &mut [RecvMeta]) -> usize {
        let mut dealt = 0;
        while self.message < self.messages
            && let (Some(room), Some(given)) = (room.get_mut(dealt), metas.get_mut(dealt))
        {
            let meta = self.metas[self.message];
            let left = meta.len - self.start;
            let stride = meta.stride.clamp(1, left.max(1));
            let together = (left / stride).min(TOGETHER).min(room.len() / stride);
            // One that finds no room is longer than any that we take.
            let length = if together == 0 { stride.min(left) } else { together * stride };
            if together > 0 {
                let start = self.message * MESSAGE + self.start;
                room[..length].copy_from_slice(&self.room[start..start + length]);
                *given = meta;
                (given.len, given.stride) = (length, stride);
                dealt += 1;
            }
            self.start += length;
            if self.start == meta.len {
                (self.message, self.start) = (self.message + 1, 0);
            }
        }
        dealt
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use quinn::{Runtime, TokioRuntime};
    use quinn_udp::Transmit;

    use super::*;

    const LENGTH: usize = 1000;

    /// A batch of ten datagrams and a shorter one, as it is received: the bytes of each message, and of a datagram in it.
    async fn received(is_apart: bool) -> Vec<(Vec<u8>, usize)> {
        let open = || TokioRuntime.wrap_udp_socket(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        let (from, to, apart) = (open(), open(), Apart::default());
        if is_apart {
            apart.begin();
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
            let mut room = [[0; MESSAGE]; 3];
            let mut bufs = room.each_mut().map(|room| IoSliceMut::new(room));
            let mut metas = [RecvMeta::default(); 3];
            let received = std::future::poll_fn(|cx| {
                apart.poll_recv(&mut bufs, &mut metas, |bufs, metas| to.poll_recv(cx, bufs, metas))
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
        let apart = received(true).await;
        let lengths: Vec<_> = apart.iter().map(|(bytes, stride)| (bytes.len(), *stride)).collect();
        assert_eq!(lengths, [(4 * LENGTH, LENGTH), (4 * LENGTH, LENGTH), (2 * LENGTH, LENGTH), (300, 300)]);
    }
}
