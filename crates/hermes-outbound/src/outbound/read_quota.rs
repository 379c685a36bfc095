//! A read quota for upstream HTTP/1.1 connections.
//!
//! In: a socket. Out: the same bytes, under two limits. At most `READ_BYTES_PER_TURN` bytes are read before the
//! worker's other tasks run, because hyper reads as long as input is available, and an origin can send one-byte chunks.
//! The number of bytes before a final response is limited too, because hyper skips any number of interim responses. A
//! failed write is not reported, because a response that the origin sent before it closed may still be unread. A later
//! read reports the end of the connection. Never: the meaning of the bytes.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hermes_net::Io;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use hermes_transport::body::TrailerSlot;

/// The number of bytes that are read before other tasks of the worker run.
const READ_BYTES_PER_TURN: usize = 64 << 10;
/// The maximum number of bytes up to the end of a final response head, as a multiple of the maximum head size. It
/// exceeds 1 to permit interim responses.
const HEAD_LIMIT_FACTOR: usize = 16;

/// The read quota of a connection, which the connection and its socket share.
#[derive(Clone)]
pub struct ReadMeter(Rc<Allowance>);

struct Allowance {
    /// The number of bytes that may still be read before other tasks run.
    turn: Cell<usize>,
    /// The number of bytes that may still be read before the final response head is complete. `None` if no response is
    /// pending.
    heads: Cell<Option<usize>>,
}

impl ReadMeter {
    fn new() -> Self {
        Self(Rc::new(Allowance { turn: Cell::new(READ_BYTES_PER_TURN), heads: Cell::new(None) }))
    }

    /// Begins to limit the bytes before a final response. `header_bytes` is the maximum size of a head.
    pub fn expect_head(&self, header_bytes: usize) {
        self.0.heads.set(Some(HEAD_LIMIT_FACTOR * header_bytes));
    }

    /// Returns the number of bytes that may still be read before the final response head is complete. Interim responses
    /// reduce it. Returns `None` if no response is pending.
    pub fn left(&self) -> Option<usize> {
        self.0.heads.get()
    }

    /// Ends the limit of [`Self::expect_head`], because the final response head has arrived.
    pub fn has_head(&self) {
        self.0.heads.set(None);
    }

    fn count(&self, read: usize) -> io::Result<()> {
        self.0.turn.set(self.0.turn.get().saturating_sub(read));
        if let Some(left) = self.0.heads.get() {
            let left = left.checked_sub(read).ok_or_else(|| io::Error::other("interim responses without end"))?;
            self.0.heads.set(Some(left));
        }
        Ok(())
    }
}

/// A socket with a read quota.
pub struct QuotaSocket {
    io: Io,
    meter: ReadMeter,
    trailers: TrailerSlot,
    /// True once a write has failed. Further writes stay pending.
    write_failed: bool,
}

impl QuotaSocket {
    /// Wraps a socket, and returns it with its meter. `trailers` is the slot for the trailers of chunked requests.
    pub fn new(io: Io, trailers: TrailerSlot) -> (Self, ReadMeter) {
        let meter = ReadMeter::new();
        (Self { io, meter: meter.clone(), trailers, write_failed: false }, meter)
    }

    /// Returns the outcome of a write. A failed write is recorded and stays pending: from then on, the connection is
    /// only read, until it ends.
    fn written<T>(&mut self, cx: &Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let Poll::Ready(Err(error)) = &polled else { return polled };
        tracing::debug!(%error, "the origin stopped reading the request; reading its response");
        self.write_failed = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Unwraps the socket.
    pub fn into_inner(self) -> Io {
        self.io
    }
}

impl AsyncRead for QuotaSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.meter.0.turn.get() == 0 {
            this.meter.0.turn.set(READ_BYTES_PER_TURN);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        Poll::Ready(this.meter.count(buf.filled().len() - before))
    }
}

impl AsyncWrite for QuotaSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.trailers.is_set() || self.write_failed {
            return self.poll_write_vectored(cx, &[io::IoSlice::new(buf)]);
        }
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_write(cx, buf);
        this.written(cx, polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.write_failed {
            return Poll::Pending;
        }
        let polled = match this.trailers.is_set() {
            true => this.trailers.poll_write(&mut this.io, cx, bufs),
            false => Pin::new(&mut this.io).poll_write_vectored(cx, bufs),
        };
        this.written(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.write_failed {
            return Poll::Pending;
        }
        let polled = Pin::new(&mut this.io).poll_flush(cx);
        this.written(cx, polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}
