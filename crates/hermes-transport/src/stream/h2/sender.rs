//! The sending half of an HTTP/2 stream, and the frames that wait for the socket of its connection.
//!
//! In: chunks. Out: DATA frames within the windows, so that frames given to h2 wait only for the socket. Those are
//! bounded too, because a client may open its windows and read nothing: a limit of bytes for the connection, over all
//! its streams, and a limit of small frames for a stream.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use h2::{Reason, SendStream};
use http::HeaderMap;

use super::SMALL;

/// The limit of a stream's small frames that the socket has not taken.
const MAX_SMALL_FRAMES: usize = 64;
/// The limit of a connection's bytes that the socket has not taken.
const MAX_UNSENT_BYTES: usize = 4 << 20;
/// The last frame of a stream counts only if it is longer: most responses are one short frame.
const UNCOUNTED_LAST_FRAME_BYTES: usize = 4 << 10;

/// The frames that wait for the socket of one connection. Atomics, although only one worker uses it: h2 requires
/// buffers that are `Send`.
#[derive(Clone, Default)]
pub struct Backlog(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    bytes: AtomicUsize,
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

/// The part of one stream.
#[derive(Default)]
struct Tally {
    small: AtomicUsize,
    is_queued: AtomicBool,
    waker: AtomicWaker,
}

/// A frame that counts until h2 drops it: after it was written, or when its stream ends.
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

/// The sending half of a stream.
pub struct Sender {
    stream: SendStream<Bytes>,
    connection: Arc<Waiting>,
    /// `None` before the first counted frame or the first wait.
    tally: Option<Arc<Tally>>,
}

impl Sender {
    /// Creates the sending half. `backlog` counts the frames that wait on the stream's connection.
    pub fn new(stream: SendStream<Bytes>, backlog: &Backlog) -> Self {
        Self { stream, connection: backlog.0.clone(), tally: None }
    }

    /// Ready when something may be sent: the windows have room for at least one byte, and the backlog is below its
    /// limits.
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

    /// Ready when the socket has taken enough of the backlog.
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

    /// The reason why a stream takes no more bytes. After a reset by the peer, h2 itself reports only that the stream
    /// has ended.
    pub fn why(&mut self, cx: &mut Context<'_>, error: h2::Error) -> h2::Error {
        match self.poll_reset(cx) {
            Poll::Ready(reset) => reset,
            Poll::Pending => error,
        }
    }

    /// Sends as much of a chunk as the windows take; with `ends`, END_STREAM follows the last byte. Ready when nothing
    /// of it is left.
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

    /// Sends a chunk regardless of the windows; with `ends`, END_STREAM follows.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&mut self, chunk: Bytes, ends: bool) -> Result<(), h2::Error> {
        if chunk.is_empty() && !ends {
            // Peers count empty frames, and close the connection after a hundred.
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
