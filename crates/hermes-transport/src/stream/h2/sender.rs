//! The sending half of an HTTP/2 stream, and the frames that wait for the socket of its connection.
//!
//! In: chunks. Out: DATA frames within the flow-control windows, so that frames in h2 wait only for the socket. These
//! frames are bounded too, because a client may open its windows and read nothing from the socket. One limit is on the
//! bytes of all streams of the connection, another on the small frames of each stream.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use h2::{Reason, SendStream};
use http::HeaderMap;

use super::SMALL;

/// The maximum number of a stream's small frames that were not written to the socket.
const MAX_SMALL_FRAMES: usize = 64;
/// The number of a connection's bytes, not yet written to the socket, from which on its streams wait.
const MAX_UNSENT_BYTES: usize = 4 << 20;
/// The length in bytes up to which the last frame of a stream is not counted. Most responses are one short frame, and
/// counting costs an allocation.
const UNCOUNTED_LAST_FRAME_BYTES: usize = 4 << 10;

/// The frames that wait for the socket of one connection. The counts are atomic although one worker uses them, because
/// h2 requires buffers that are `Send`.
#[derive(Clone, Default)]
pub struct Backlog(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    bytes: AtomicUsize,
    /// The streams that wait until `bytes` is below its limit.
    streams: Mutex<Vec<Arc<Tally>>>,
    has_streams: AtomicBool,
}

impl Waiting {
    fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Acquire) >= MAX_UNSENT_BYTES
    }

    fn join(&self, stream: &Arc<Tally>) {
        if !stream.is_queued.swap(true, Ordering::AcqRel) {
            self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream.clone());
            self.has_streams.store(true, Ordering::Release);
        }
    }

    fn leave(&self, stream: &Arc<Tally>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|other| !Arc::ptr_eq(other, stream));
    }

    fn wake_all(&self) {
        if self.has_streams.swap(false, Ordering::AcqRel) {
            let streams = std::mem::take(&mut *self.streams.lock().unwrap_or_else(PoisonError::into_inner));
            for stream in streams {
                stream.is_queued.store(false, Ordering::Release);
                stream.waker.wake();
            }
        }
    }
}

/// The small frames of one stream that wait for the socket.
#[derive(Default)]
struct Tally {
    small: AtomicUsize,
    /// True if the stream is in `Waiting::streams`.
    is_queued: AtomicBool,
    waker: AtomicWaker,
}

/// The payload of a frame. It is counted until h2 drops it, after the frame was written or when its stream ends.
struct Counted {
    chunk: Bytes,
    connection: Arc<Waiting>,
    stream: Arc<Tally>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.chunk
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.connection.bytes.fetch_sub(self.chunk.len(), Ordering::AcqRel);
        if self.chunk.len() < SMALL && self.stream.small.fetch_sub(1, Ordering::AcqRel) == MAX_SMALL_FRAMES {
            self.stream.waker.wake();
        }
        if !self.connection.is_full() {
            self.connection.wake_all();
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if let Some(tally) = self.tally.take().filter(|tally| tally.is_queued.load(Ordering::Acquire)) {
            self.connection.leave(&tally);
        }
    }
}

/// The sending half of an HTTP/2 stream.
pub struct Sender {
    stream: SendStream<Bytes>,
    connection: Arc<Waiting>,
    /// The stream's small frames; `None` until a frame was counted or had to wait.
    tally: Option<Arc<Tally>>,
}

impl Sender {
    /// Wraps the sending half of h2. `backlog` counts the frames that wait for the socket of the stream's connection.
    pub fn new(stream: SendStream<Bytes>, backlog: &Backlog) -> Self {
        Self { stream, connection: backlog.0.clone(), tally: None }
    }

    /// Ready when a frame may be sent: the windows permit at least one byte, and the backlog is below its limits.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        self.poll_window(cx, 1)
    }

    fn poll_window(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<Result<(), h2::Error>> {
        self.stream.reserve_capacity(wanted);
        while self.stream.capacity() == 0 {
            match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Err(Reason::CANCEL.into())),
            }
        }
        self.poll_backlog(cx).map(Ok)
    }

    /// Ready when the frames that wait for the socket are below their limits.
    pub fn poll_backlog(&mut self, cx: &Context<'_>) -> Poll<()> {
        let has_many = |tally: &Arc<Tally>| tally.small.load(Ordering::Acquire) >= MAX_SMALL_FRAMES;
        if !self.connection.is_full() && !self.tally.as_ref().is_some_and(has_many) {
            return Poll::Ready(());
        }
        let tally = self.tally.get_or_insert_default();
        tally.waker.register(cx.waker());
        if self.connection.is_full() {
            self.connection.join(tally);
        }
        Poll::Pending
    }

    /// Ready when the peer resets the stream.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<h2::Error> {
        self.stream.poll_reset(cx).map(|reset| reset.map_or_else(|error| error, Into::into))
    }

    /// Returns the reason why the stream accepts no more bytes: the peer's reset, otherwise `error`. After a reset, h2
    /// itself reports only that the stream has ended.
    pub fn why(&mut self, cx: &mut Context<'_>, error: h2::Error) -> h2::Error {
        match self.poll_reset(cx) {
            Poll::Ready(reset) => reset,
            Poll::Pending => error,
        }
    }

    /// Sends as much of a chunk as the windows permit, and removes it from the chunk. With `ends`, the last frame has
    /// END_STREAM. Ready when the chunk is empty.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes, ends: bool) -> Poll<Result<(), h2::Error>> {
        self.poll_send_parts(cx, chunk, ends).map_err(|error| self.why(cx, error))
    }

    fn poll_send_parts(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes, ends: bool) -> Poll<Result<(), h2::Error>> {
        while !chunk.is_empty() {
            ready!(self.poll_window(cx, chunk.len()))?;
            let part = chunk.split_to(chunk.len().min(self.stream.capacity()));
            self.send(part, ends && chunk.is_empty())?;
        }
        Poll::Ready(Ok(()))
    }

    /// Queues a chunk regardless of the windows. With `ends`, its frame has END_STREAM.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&mut self, chunk: Bytes, ends: bool) -> Result<(), h2::Error> {
        if chunk.is_empty() && !ends {
            // Some peers count empty frames, and close the connection after a hundred of them.
            return Ok(());
        }
        let is_counted = !ends || chunk.len() > UNCOUNTED_LAST_FRAME_BYTES;
        let chunk = if is_counted { self.counted(chunk) } else { chunk };
        self.stream.send_data(chunk, ends)
    }

    fn counted(&mut self, chunk: Bytes) -> Bytes {
        let (connection, stream) = (self.connection.clone(), self.tally.get_or_insert_default().clone());
        connection.bytes.fetch_add(chunk.len(), Ordering::AcqRel);
        if chunk.len() < SMALL {
            stream.small.fetch_add(1, Ordering::AcqRel);
        }
        Bytes::from_owner(Counted { chunk, connection, stream })
    }

    /// Ends the stream with trailers.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send_trailers(&mut self, trailers: HeaderMap) -> Result<(), h2::Error> {
        self.stream.send_trailers(trailers)
    }

    /// Resets the stream.
    pub fn reset(&mut self, reason: Reason) {
        self.stream.send_reset(reason);
    }
}
