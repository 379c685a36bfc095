//! A byte stream over any transport: a socket, an HTTP/1.1 connection after its upgrade, an HTTP/2 or HTTP/3 stream,
//! the two bodies of a POST, or custody.
//!
//! In: one of these transports. Out: chunks in both directions, each of which can end separately (half-close). Chunks
//! are not copied if the transport permits it. Never: the meaning of the bytes.

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
use hermes_net::{Io, quic, tcp};
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

pub use self::multiplexed::{Receiver, Sender};
use crate::h3::Datagrams;
use crate::runtime::session::SessionEntry;
pub use crate::stream_error::{Reset, StreamError};

/// The size in bytes of the first read from a socket. It is small because most tunnels transfer little.
const FIRST_CHUNK: usize = 4 << 10;
/// The maximum size in bytes of a read from a socket, and so of the chunk that waits for a slow receiver.
pub(crate) const CHUNK: usize = 64 << 10;
/// The maximum size in bytes of a read from a TLS connection: one TLS record.
const TLS_CHUNK: usize = 16 << 10;

/// A byte stream.
pub enum ByteStream {
    /// A socket. `ahead` are bytes that were already read from it. `is_http_tunnel`: an HTTP/1.1 proxy is at the other
    /// end. `is_after_urgent`: a read stopped at urgent data, so tokio may not know of further bytes. `_lease` counts the
    /// connection towards the limit of its endpoint; `None` for a connection without such a limit.
    Io {
        io: Io,
        ahead: Bytes,
        buffer: BytesMut,
        most: usize,
        is_http_tunnel: bool,
        is_after_urgent: bool,
        _lease: Option<Box<dyn StreamLease>>,
    },
    /// A multiplexed stream of HTTP/2 or HTTP/3. `datagrams` are the HTTP datagrams of its request; `None` if the
    /// request has none, or once they were taken.
    Multiplexed {
        recv: Receiver,
        send: Sender,
        sent_end: bool,
        datagrams: Option<Datagrams>,
        lease: Option<Box<dyn StreamLease>>,
    },
    /// A stream of a less frequent kind: the two bodies of a POST, or bytes in custody.
    Boxed(Box<dyn BoxedStream>),
}

/// Received bytes, or urgent data.
pub enum Received {
    /// Bytes of the stream.
    Chunk(Bytes),
    /// A byte that the peer marked as urgent (TCP, RFC 6093).
    Urgent(u8),
}

/// The lease of a connection to an endpoint, or of a stream on one. The stream owns it for its lifetime.
pub trait StreamLease {
    /// True if no further streams are opened on the connection, because the peer drains it or a better connection
    /// exists.
    fn is_leaving(&self) -> bool {
        false
    }
}

/// A byte stream that a layer above this crate implements. Each function has the contract of the function of the same
/// name of [`ByteStream`].
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
    /// Returns the stream of a socket to an endpoint. `lease` counts the connection towards the endpoint's limit.
    pub fn leased_io(io: Io, ahead: Bytes, lease: Box<dyn StreamLease>) -> Self {
        Self::of_io(io, ahead, false, Some(lease))
    }

    pub fn io(io: Io, ahead: Bytes) -> Self {
        Self::of_io(io, ahead, false, None)
    }

    /// Returns the stream of a tunnel that an HTTP/1.1 request has opened on a connection.
    pub fn http_tunnel(io: Io, ahead: Bytes, lease: Option<Box<dyn StreamLease>>) -> Self {
        Self::of_io(io, ahead, true, lease)
    }

    fn of_io(io: Io, ahead: Bytes, is_http_tunnel: bool, lease: Option<Box<dyn StreamLease>>) -> Self {
        let (buffer, most, is_after_urgent) = (BytesMut::new(), FIRST_CHUNK, false);
        ByteStream::Io { io, ahead, buffer, most, is_http_tunnel, is_after_urgent, _lease: lease }
    }

    pub fn multiplexed(recv: Receiver, send: Sender, lease: Option<Box<dyn StreamLease>>) -> Self {
        ByteStream::Multiplexed { recv, send, sent_end: false, datagrams: None, lease }
    }

    /// Attaches the HTTP datagrams of the stream's request.
    pub fn with_datagrams(mut self, of_request: Option<Datagrams>) -> Self {
        if let ByteStream::Multiplexed { datagrams, .. } = &mut self {
            *datagrams = of_request;
        }
        self
    }

    /// Declares the link of the connection to be intermittent, which changes its congestion control, and returns the
    /// monitor of its path. Returns `None` if the connection is not QUIC.
    pub fn is_dark_at_times(&self) -> Option<Arc<PathMonitor>> {
        let ByteStream::Multiplexed { send: Sender::H3(send), .. } = self else { return None };
        let narrow = quic::path_monitor::of(&send.link().connection);
        narrow.set_intermittent();
        Some(narrow)
    }

    /// True if HTTP datagrams of the stream's request are attached.
    pub fn has_datagrams(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { datagrams: Some(_), .. })
    }

    /// True if other streams may share the connection of this stream.
    pub fn is_shared(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { .. })
    }

    /// True if no further streams are opened on this stream's connection, because the peer drains it or a better
    /// connection exists.
    pub fn is_leaving(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { lease: Some(lease), .. } if lease.is_leaving())
    }

    /// Detaches and returns the HTTP datagrams of the stream's request.
    pub fn take_datagrams(&mut self) -> Option<Datagrams> {
        match self {
            ByteStream::Multiplexed { datagrams, .. } => datagrams.take(),
            _ => None,
        }
    }

    /// Charges the unread bytes of the stream to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        match self {
            ByteStream::Multiplexed { recv, .. } => recv.bind(session),
            ByteStream::Boxed(stream) => stream.bind(session),
            ByteStream::Io { .. } => {}
        }
    }

    /// Drives the connection below the stream, unless another task does. Ready when all bytes that were written to the
    /// stream are sent.
    pub fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Boxed(stream) => stream.poll_carrier(cx),
            ByteStream::Io { .. } | ByteStream::Multiplexed { .. } => Poll::Ready(Ok(())),
        }
    }

    /// Returns the next received chunk, or `None` at the clean end of the receiving direction. Urgent data is part of the
    /// stream.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        self.poll_receive(cx).map_ok(|received| match received? {
            Received::Chunk(chunk) => Some(chunk),
            Received::Urgent(byte) => Some(Bytes::copy_from_slice(&[byte])),
        })
    }

    /// As [`poll_read`](Self::poll_read), and tells urgent data apart.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Received>>> {
        let read = match self {
            ByteStream::Io { io, ahead, buffer, most, is_after_urgent, .. } => {
                if !ahead.is_empty() {
                    return Poll::Ready(Ok(Some(Received::Chunk(std::mem::take(ahead)))));
                }
                if let Io::Plain(tcp) = io
                    && let Some(received) = receive_around_mark(tcp, is_after_urgent)?
                {
                    return Poll::Ready(Ok(received));
                }
                poll_read_io(io, buffer, most, cx)
            }
            ByteStream::Multiplexed { recv, .. } => poll_read_half(recv, cx, usize::MAX),
            ByteStream::Boxed(stream) => stream.poll_read(cx),
        };
        read.map_ok(|chunk| chunk.map(Received::Chunk))
    }

    /// Returns the socket of a stream over plain TCP, if no bytes were read ahead. The kernel can move its bytes.
    pub fn plain_tcp(&self) -> Option<&TcpStream> {
        match self {
            ByteStream::Io { io: Io::Plain(tcp), ahead, .. } if ahead.is_empty() => Some(tcp),
            _ => None,
        }
    }

    /// Returns the socket of the stream if urgent data can be sent on it. `None` for an HTTP tunnel: the next proxy may drop
    /// the urgent byte.
    pub fn urgent_sink(&self) -> Option<&TcpStream> {
        match self {
            ByteStream::Io { io: Io::Plain(tcp), is_http_tunnel: false, .. } => Some(tcp),
            _ => None,
        }
    }

    /// Writes bytes of the chunk, and removes them from it. Ready when the chunk is empty.
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

    /// Flushes bytes that TLS may have buffered.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => Pin::new(io).poll_flush(cx),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ends the sending direction cleanly. The receiving direction may continue.
    pub fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => match ready!(Pin::new(io).poll_shutdown(cx)) {
                // The connection is already closed, so nothing is left to shut down.
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

    /// True if dropping the stream ends the sending direction cleanly once the receiving direction has ended. This
    /// holds for a plain TCP socket, whose `close` sends a FIN like `shutdown`.
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

    /// Ready if the peer has reset a multiplexed stream, even while the stream is not read. Over TCP, a write reports
    /// the reset.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            ByteStream::Multiplexed { send, sent_end: false, .. } => send.poll_reset(cx).map(io::Error::from),
            _ => Poll::Pending,
        }
    }

    /// Resets the stream, which signals to the peer that bytes may be missing.
    pub fn abort(&mut self) {
        self.abort_as(Reset::Connect);
    }

    /// Resets the stream with this reason, if its protocol has a code for it.
    pub fn abort_as(&mut self, reset: Reset) {
        match self {
            ByteStream::Io { io, .. } => tcp::reset_on_close(io.tcp()),
            ByteStream::Multiplexed { send, .. } => send.reset(reset),
            ByteStream::Boxed(stream) => stream.abort(),
        }
    }
}

/// Reads the urgent byte, or the bytes that have arrived after it. The outer `None`: there are neither. The inner one: the
/// peer has ended its direction.
fn receive_around_mark(tcp: &TcpStream, is_after_urgent: &mut bool) -> io::Result<Option<Option<Received>>> {
    let is_urgent = tcp::is_at_urgent(tcp);
    if !is_urgent && !*is_after_urgent {
        return Ok(None);
    }
    let read = tcp::read_arrived(tcp, if is_urgent { 1 } else { CHUNK })?;
    *is_after_urgent = read.is_some();
    Ok(read.map(|bytes| match bytes.as_slice() {
        [] => None,
        [byte] if is_urgent => Some(Received::Urgent(*byte)),
        _ => Some(Received::Chunk(bytes.into())),
    }))
}

fn poll_read_io(
    io: &mut Io,
    buffer: &mut BytesMut,
    most: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Option<Bytes>>> {
    if io.poll_read_ready(cx)?.is_pending() {
        // The buffer of an idle tunnel is released.
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

/// True if the error is no failure: the peer has completed its response and wants no further bytes.
pub fn has_parted(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<StreamError>());
    inner.is_some_and(StreamError::has_parted)
}

/// Returns the next chunk of a multiplexed stream, of at most `most` bytes, or `None` at the end of the stream.
pub fn poll_read_half(recv: &mut Receiver, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Option<Bytes>>> {
    recv.poll_chunk(cx, most).map(|chunk| Ok(chunk.transpose()?))
}
