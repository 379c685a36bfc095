//! A queue of a TUN device: reads and writes packets, many in one call.
//!
//! In and out: whole IP packets. Splits the kernel's GSO packets after reading, and merges packets before writing.
//! Never: an address, a route, or a decision about a packet.

use std::fs::File;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::gro_merge::{self, MergeRun};
use super::gso_split::split;
use super::offload::{self, Offload};

/// Length of the longest read, in bytes: a GSO packet and its virtio header.
const ROOM: usize = offload::LENGTH + 65_536;
/// Maximum number of reads in one call, which yield up to a megabyte. Then other tasks run.
const READS: usize = 16;

/// A queue without a runtime: created by [`Device::create`](super::Device::create) on one thread, for use on another.
#[derive(Debug)]
pub struct IdleQueue {
    descriptor: OwnedFd,
    with_udp: bool,
}

/// A queue on the runtime of one worker.
#[derive(Debug)]
pub struct Queue {
    io: AsyncFd<File>,
    /// Whether the kernel splits GSO packets of UDP, too (from Linux 6.2 on).
    with_udp: bool,
}

/// The buffer into which a packet is read before it is split. One buffer serves all queues of a worker.
#[derive(Debug)]
pub struct ReceiveBuffer {
    room: Box<[u8]>,
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        Self { room: vec![0; ROOM].into_boxed_slice() }
    }
}

/// The result of one call that receives or sends packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueResult {
    /// Packets that were received or sent.
    pub packets: usize,
    /// Dropped packets: those that are not IP packets (sending), or that have an invalid virtio header (receiving).
    pub refused: usize,
    /// System calls that moved packets: fewer than packets if some were merged.
    pub calls: usize,
}

impl QueueResult {
    /// Returns how many of the packets passed to [`Queue::try_send`] were sent or dropped. They must not be passed
    /// again.
    pub fn taken(&self) -> usize {
        self.packets + self.refused
    }
}

impl IdleQueue {
    pub(super) fn new(descriptor: OwnedFd, with_udp: bool) -> Self {
        Self { descriptor, with_udp }
    }

    /// Creates a connected pair of queues without a device: one merges and sends packets, the other receives and splits
    /// them. Needs no privilege.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn pair() -> io::Result<(Self, Self)> {
        use socket2::{Domain, Socket, Type};
        let (one, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET.nonblocking().cloexec(), None)?;
        Ok((Self::new(one.into(), true), Self::new(other.into(), true)))
    }

    /// Registers the queue with the runtime of the caller.
    ///
    /// # Errors
    /// The runtime cannot watch the descriptor.
    #[allow(unsafe_code)] // The registered descriptor must stay open and must not change.
    pub fn start(self) -> io::Result<Queue> {
        // SAFETY: a `File` of std owns one descriptor, which stays open until the `File` is dropped. No other code has
        // access to it.
        let io = unsafe { AsyncFd::register(File::from(self.descriptor)) }?;
        Ok(Queue { io, with_udp: self.with_udp })
    }
}

impl IdleQueue {
    /// Duplicates the queue.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::new(self.descriptor.try_clone()?, self.with_udp))
    }

    /// Returns the file descriptor, for another process.
    pub fn into_fd(self) -> OwnedFd {
        self.descriptor
    }

    /// Wraps an end of an [`IdleQueue::pair`] that another process created.
    pub fn from_pair(descriptor: OwnedFd) -> Self {
        Self::new(descriptor, true)
    }
}

impl AsFd for IdleQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Queue {
    /// Receives the waiting packets, up to about a megabyte, and passes each to `each`. Packets of one GSO packet share
    /// one allocation.
    ///
    /// # Errors
    /// The queue's error: `EBADFD` if its device was removed.
    pub fn poll_receive(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReceiveBuffer,
        mut each: impl FnMut(Bytes),
    ) -> Poll<io::Result<QueueResult>> {
        let mut moved = QueueResult::default();
        while moved.calls < READS {
            let mut ready = match self.io.poll_read_ready(cx) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => break,
            };
            match ready.try_io(|io| io.get_ref().read(&mut buffer.room)) {
                Ok(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(Ok(length)) => deliver(&mut buffer.room[..length], &mut moved, &mut each),
                Ok(Err(error)) if moved.calls == 0 => return Poll::Ready(Err(error)),
                // The error occurs again at the next call.
                Ok(Err(_)) => break,
                // The queue is no longer ready: the next poll returns pending and registers the waker.
                Err(_would_block) => {}
            }
        }
        if moved.calls == 0 { Poll::Pending } else { Poll::Ready(Ok(moved)) }
    }

    /// Sends as many packets as the kernel accepts, in order. Adjacent packets of one TCP or UDP flow are sent in one
    /// call.
    ///
    /// # Errors
    /// `WouldBlock` if the kernel accepts no packet (see [`Queue::poll_send_ready`]). Other errors are those of the
    /// queue: `EIO` if the device is down, `EBADFD` if it was removed.
    pub fn try_send(&self, packets: &[Bytes]) -> io::Result<QueueResult> {
        let mut moved = QueueResult::default();
        while let Some(left) = packets.get(moved.taken()..).filter(|left| !left.is_empty()) {
            match self.send_first(left, &mut moved) {
                Ok(()) => {}
                Err(error) if moved.taken() == 0 => return Err(error),
                // The error occurs again at the next call.
                Err(_) => break,
            }
        }
        Ok(moved)
    }

    /// Polls until a send may succeed.
    ///
    /// # Errors
    /// The errors of the runtime.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The guard is dropped without a change, so the queue stays ready until a send would block.
        drop(ready!(self.io.poll_write_ready(cx))?);
        Poll::Ready(Ok(()))
    }

    fn send_first(&self, packets: &[Bytes], moved: &mut QueueResult) -> io::Result<()> {
        let run = MergeRun::of(packets, self.with_udp);
        let count = match self.write(packets, &run) {
            Ok(()) => run.count,
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            // The kernel rejects the merged packet: send the first one alone; later ones may still be merged.
            Err(_) if run.count > 1 && self.write(packets, &MergeRun::single()).is_ok() => 1,
            Err(_) => {
                moved.refused += 1;
                return Ok(());
            }
        };
        moved.packets += count;
        moved.calls += 1;
        Ok(())
    }

    fn write(&self, packets: &[Bytes], run: &MergeRun) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); 1 + gro_merge::MAX_PACKETS];
        slices[0] = IoSlice::new(run.header());
        for (slice, packet) in slices[1..].iter_mut().zip(&packets[..run.count]) {
            *slice = IoSlice::new(&packet[run.skipped..]);
        }
        // A packet is written whole or not at all.
        self.io.try_io(Interest::WRITABLE, |mut io| io.write_vectored(&slices[..=run.count])).map(drop)
    }
}

fn deliver(message: &mut [u8], moved: &mut QueueResult, each: &mut impl FnMut(Bytes)) {
    moved.calls += 1;
    let whole = message.split_first_chunk_mut::<{ offload::LENGTH }>();
    let packets = whole.and_then(|(header, packet)| split(Offload::parse(header)?, packet, each));
    match packets {
        Some(packets) => moved.packets += packets,
        None => moved.refused += 1,
    }
}
