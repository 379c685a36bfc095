//! A byte stream over any transport: a socket, an HTTP/1.1 connection after its upgrade, an HTTP/2 or HTTP/3 stream,
//! the two bodies of a POST, or custody.
//!
//! In: one of those. Out: chunks in and out; each direction ends on its own (half-close). Chunks are passed on without
//! a copy if the transport allows it. Never: the meaning of the bytes.

pub mod h2;
pub mod h3;
mod multiplexed;

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic::path_monitor::PathMonitor;
use hermes_net::{Io, quic};
use tokio::io::AsyncWrite;

pub use self::multiplexed::{Receiver, Sender};
use crate::h3::Datagrams;
use crate::runtime::session::SessionEntry;
pub use crate::stream_error::{Reset, StreamError};

/// The first read from a socket: most tunnels carry little.
const FIRST_CHUNK: usize = 4 << 10;
/// The largest read from a socket. Also the largest chunk that waits for a slow reader.
const CHUNK: usize = 64 << 10;
/// The largest TLS record.
const TLS_CHUNK: usize = 16 << 10;

/// A byte stream.
pub enum ByteStream {
    /// A socket; `ahead` was already read from it. `_lease` is its share of an endpoint's limit, if it has one.
    Io { io: Io, ahead: Bytes, buffer: BytesMut, most: usize, _lease: Option<Box<dyn StreamLease>> },
    /// A multiplexed stream of HTTP/2 or HTTP/3. `datagrams` are the HTTP datagrams of its request, until they are
    /// taken.
    Multiplexed {
        recv: Receiver,
        send: Sender,
        sent_end: bool,
        datagrams: Option<Datagrams>,
        lease: Option<Box<dyn StreamLease>>,
    },
    /// A rare stream: the two bodies of a POST, or bytes in custody.
    Boxed(Box<dyn BoxedStream>),
}

/// The lease of a stream on a connection to an endpoint, held for the lifetime of the stream.
pub trait StreamLease {
    /// True if the connection takes no further streams, because the peer drains it or a better one exists.
    fn is_leaving(&self) -> bool {
        false
    }
}

/// A byte stream that a layer above implements. The functions mean what they mean on [`ByteStream`].
pub trait BoxedStream {
    /// See [`ByteStream::bind`].
    fn bind(&self, session: &Rc<SessionEntry>);
    /// See [`ByteStream::poll_carrier`].
    fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// See [`ByteStream::poll_read`].
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>>;
    /// See [`ByteStream::poll_write`].
    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>>;
    /// See [`ByteStream::poll_finish`].
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// See [`ByteStream::abort`].
    fn abort(&mut self);
}

impl ByteStream {
    /// A socket to an endpoint, with its share of the endpoint's limit.
    pub fn leased_io(io: Io, ahead: Bytes, lease: Box<dyn StreamLease>) -> Self {
        ByteStream::Io { io, ahead, buffer: BytesMut::new(), most: FIRST_CHUNK, _lease: Some(lease) }
    }

    pub fn io(io: Io, ahead: Bytes) -> Self {
        ByteStream::Io { io, ahead, buffer: BytesMut::new(), most: FIRST_CHUNK, _lease: None }
    }

    pub fn multiplexed(recv: Receiver, send: Sender, lease: Option<Box<dyn StreamLease>>) -> Self {
        ByteStream::Multiplexed { recv, send, sent_end: false, datagrams: None, lease }
    }

    /// Attaches the HTTP datagrams of its request.
    pub fn with_datagrams(mut self, of_request: Option<Datagrams>) -> Self {
        if let ByteStream::Multiplexed { datagrams, .. } = &mut self {
            *datagrams = of_request;
        }
        self
    }

    /// Marks the link as intermittent, if it is QUIC, and returns the monitor of its path.
    pub fn is_dark_at_times(&self) -> Option<Arc<PathMonitor>> {
        let ByteStream::Multiplexed { send: Sender::H3(send), .. } = self else { return None };
        let narrow = quic::path_monitor::of(&send.link().connection);
        narrow.set_intermittent();
        Some(narrow)
    }

    /// True if its request may have HTTP datagrams.
    pub fn has_datagrams(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { datagrams: Some(_), .. })
    }

    /// True if other streams may share its connection.
    pub fn is_shared(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { .. })
    }

    /// True if its connection takes no further streams, because the peer drains it or a better one exists.
    pub fn is_leaving(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { lease: Some(lease), .. } if lease.is_leaving())
    }

    /// Takes the HTTP datagrams of its request.
    pub fn take_datagrams(&mut self) -> Option<Datagrams> {
        match self {
            ByteStream::Multiplexed { datagrams, .. } => datagrams.take(),
            _ => None,
        }
    }

    /// Binds the stream to a session, which ends if too many of its bytes remain unread.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        match self {
            ByteStream::Multiplexed { recv, .. } => recv.bind(session),
            ByteStream::Boxed(stream) => stream.bind(session),
            ByteStream::Io { .. } => {}
        }
    }

    /// Drives the connection below the stream, if no other task does. Ready when all bytes that were given to it are
    /// sent.
    pub fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Boxed(stream) => stream.poll_carrier(cx),
            ByteStream::Io { .. } | ByteStream::Multiplexed { .. } => Poll::Ready(Ok(())),
        }
    }

    /// The next chunk; `None` is the clean end of this direction.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        match self {
            ByteStream::Io { io, ahead, buffer, most, .. } => {
                if !ahead.is_empty() {
                    return Poll::Ready(Ok(Some(std::mem::take(ahead))));
                }
                poll_read_io(io, buffer, most, cx)
            }
            ByteStream::Multiplexed { recv, .. } => poll_read_half(recv, cx, usize::MAX),
            ByteStream::Boxed(stream) => stream.poll_read(cx),
        }
    }

    /// Writes the chunk, and leaves the unwritten rest in it. Ready when nothing is left.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => {
                while !chunk.is_empty() {
                    let written = ready!(Pin::new(&mut *io).poll_write(cx, chunk))?;
                    if written == 0 {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    bytes::Buf::advance(chunk, written);
                }
                Poll::Ready(Ok(()))
            }
            ByteStream::Multiplexed { send, .. } => send.poll_send(cx, chunk, false).map_err(io::Error::from),
            ByteStream::Boxed(stream) => stream.poll_write(cx, chunk),
        }
    }

    /// Flushes bytes that TLS may hold back.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => Pin::new(io).poll_flush(cx),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ends the sending direction cleanly; the other may continue.
    pub fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => match ready!(Pin::new(io).poll_shutdown(cx)) {
                // The peer closed both directions meanwhile, so nothing is left to shut down.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
                other => Poll::Ready(other),
            },
            ByteStream::Multiplexed { send, sent_end, .. } => {
                if !std::mem::replace(sent_end, true) {
                    send.finish(cx)?;
                }
                send.poll_settled(cx).map_err(io::Error::from)
            }
            ByteStream::Boxed(stream) => stream.poll_finish(cx),
        }
    }

    /// True if dropping the stream ends it cleanly once both directions have ended: `close` of a plain socket sends
    /// what `shutdown` sends.
    pub fn ends_by_drop(&self) -> bool {
        matches!(self, ByteStream::Io { io: Io::Plain(_), .. })
    }

    /// Ends the sending direction cleanly and discards what the peer still sends. Ready when both directions have
    /// ended.
    pub fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let finished = self.poll_finish(cx);
        let carried = self.poll_carrier(cx);
        if matches!(finished, Poll::Ready(Err(_))) {
            return Poll::Ready(());
        }
        loop {
            match ready!(self.poll_read(cx)) {
                Ok(Some(_)) => {}
                Ok(None) if finished.is_ready() && carried.is_ready() => return Poll::Ready(()),
                Ok(None) => return Poll::Pending,
                Err(_) => return Poll::Ready(()),
            }
        }
    }

    /// Ready if the peer reset the stream after it had ended its own direction cleanly. Over TCP, a write reports that.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            ByteStream::Multiplexed { send, sent_end: false, .. } => send.poll_reset(cx).map(io::Error::from),
            _ => Poll::Pending,
        }
    }

    /// Resets the stream, so that the peer knows that bytes may be missing.
    pub fn abort(&mut self) {
        self.abort_as(Reset::Connect);
    }

    /// Resets the stream with this reason, if its protocol has a code for it.
    pub fn abort_as(&mut self, reset: Reset) {
        match self {
            ByteStream::Io { io, .. } => hermes_net::tcp::reset_on_close(io.tcp()),
            ByteStream::Multiplexed { send, .. } => send.reset(reset),
            ByteStream::Boxed(stream) => stream.abort(),
        }
    }
}

fn poll_read_io(
    io: &mut Io,
    buffer: &mut BytesMut,
    most: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Option<Bytes>>> {
    if io.poll_read_ready(cx)?.is_pending() {
        // An idle tunnel holds no buffer.
        *buffer = BytesMut::new();
        return Poll::Pending;
    }
    buffer.reserve(*most);
    match tokio_util::io::poll_read_buf(Pin::new(&mut *io), cx, buffer) {
        Poll::Ready(Ok(0)) => Poll::Ready(Ok(None)),
        Poll::Ready(Ok(read)) => {
            if read >= *most {
                *most = (4 * *most).min(if matches!(io, Io::Tls(_)) { TLS_CHUNK } else { CHUNK });
            }
            Poll::Ready(Ok(Some(buffer.split().freeze())))
        }
        Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        Poll::Pending => {
            *buffer = BytesMut::new();
            Poll::Pending
        }
    }
}

/// True if nothing is broken: the peer wants no further bytes.
pub fn has_parted(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<StreamError>());
    inner.is_some_and(StreamError::has_parted)
}

/// The next chunk of a multiplexed stream.
pub fn poll_read_half(recv: &mut Receiver, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<Bytes>>> {
    recv.poll_chunk(cx, most).map(|chunk| Ok(chunk.transpose()?))
}
