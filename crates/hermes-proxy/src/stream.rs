//! A byte stream, whatever carries it: a socket, an h1 connection after its upgrade, an h2
//! stream, or two bodies of a POST.
//!
//! In: one of those. Out: chunks in, chunks out, each direction with an end of its own (half
//! close). A chunk is handed on, not copied, where its carrier allows that.
//! Never: what the bytes mean.

pub(crate) mod asked;
pub(crate) mod h2;
pub(crate) mod h3;
mod halves;
pub(crate) mod unread;

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic::path_monitor::PathMonitor;
use hermes_net::{Io, quic};
use http_body::Body as HttpBody;
use tokio::io::AsyncWrite;

pub(crate) use self::halves::{Receiver, Reset, Sender, StreamError};
use crate::body::{Body, ChannelSender};
use crate::custody::CustodyStream;
use crate::h3::Datagrams;
use crate::live::Entry;
use crate::upstream::pool::{H1Connection, Lease};
use crate::upstream::{InFlight, Seat};

/// What is read from a socket at first: most tunnels carry little.
const FIRST_CHUNK: usize = 4 << 10;
/// What is read at once from one that has more. Also the largest chunk that waits for a slow reader.
const CHUNK: usize = 64 << 10;
/// TLS records hold no more.
const TLS_CHUNK: usize = 16 << 10;

/// A byte stream.
pub(crate) enum ByteStream {
    /// A socket; `ahead` was read from it already. `_seat` is its place at an endpoint, if it has one.
    Io { io: Io, ahead: Bytes, buffer: BytesMut, most: usize, _seat: Option<Seat> },
    /// A multiplexed stream, of h2 or h3.
    /// `datagrams` are those of its request beside it, until they are taken.
    Multiplexed {
        recv: Receiver,
        send: Sender,
        sent_end: bool,
        datagrams: Option<Datagrams>,
        lease: Option<Lease>,
        _in_flight: Option<InFlight>,
    },
    /// The bodies of a request and its response. `carrier` is the connection that both are on,
    /// where nobody else moves it.
    Bodies { recv: Box<Body>, send: Option<ChannelSender>, carrier: Option<Box<H1Connection>> },
    /// Bytes in custody.
    Custody(Box<CustodyStream>),
}

impl ByteStream {
    /// A socket to an endpoint.
    pub(crate) fn seated(io: Io, ahead: Bytes, seat: Seat) -> Self {
        ByteStream::Io { io, ahead, buffer: BytesMut::new(), most: FIRST_CHUNK, _seat: Some(seat) }
    }

    pub(crate) fn io(io: Io, ahead: Bytes) -> Self {
        ByteStream::Io { io, ahead, buffer: BytesMut::new(), most: FIRST_CHUNK, _seat: None }
    }

    pub(crate) fn multiplexed(recv: Receiver, send: Sender, lease: Option<Lease>, in_flight: Option<InFlight>) -> Self {
        ByteStream::Multiplexed { recv, send, sent_end: false, datagrams: None, lease, _in_flight: in_flight }
    }

    /// With the datagrams of its request beside it.
    pub(crate) fn with_datagrams(mut self, of_request: Option<Datagrams>) -> Self {
        if let ByteStream::Multiplexed { datagrams, .. } = &mut self {
            *datagrams = of_request;
        }
        self
    }

    /// Its link may be dark at times, where it is QUIC's. What is known of that.
    pub(crate) fn is_dark_at_times(&self) -> Option<Arc<PathMonitor>> {
        let ByteStream::Multiplexed { send: Sender::H3(send), .. } = self else { return None };
        let narrow = quic::path_monitor::of(&send.link().connection);
        narrow.set_intermittent();
        Some(narrow)
    }

    /// Its request may have datagrams beside it.
    pub(crate) fn has_datagrams(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { datagrams: Some(_), .. })
    }

    /// Others are on its connection.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { .. })
    }

    /// Its connection takes no further streams, since the peer goes, or there is a better one.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self, ByteStream::Multiplexed { lease: Some(lease), .. } if lease.connection.is_going())
    }

    /// The datagrams of its request, once.
    pub(crate) fn take_datagrams(&mut self) -> Option<Datagrams> {
        match self {
            ByteStream::Multiplexed { datagrams, .. } => datagrams.take(),
            _ => None,
        }
    }

    pub(crate) fn bodies(recv: Body, send: ChannelSender, carrier: Option<Box<H1Connection>>) -> Self {
        ByteStream::Bodies { recv: Box::new(recv), send: Some(send), carrier }
    }

    /// It is this session's, which ends where too much of it lies unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        match self {
            ByteStream::Multiplexed { recv, .. } => recv.bind(session),
            ByteStream::Bodies { recv, .. } => recv.bind(session),
            ByteStream::Custody(stream) => stream.bind(session),
            ByteStream::Io { .. } => {}
        }
    }

    /// Moves the connection that carries the bodies, if that is ours to do. Ready when all that was
    /// given to it is sent.
    pub(crate) fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let ByteStream::Custody(stream) = self {
            return stream.poll_pending(cx);
        }
        let ByteStream::Bodies { carrier: Some(carrier), .. } = self else { return Poll::Ready(Ok(())) };
        carrier.poll(cx).map_err(io::Error::other)?;
        // Both messages are through: the connection is over, or takes another request.
        if carrier.finished || carrier.is_reusable() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// The next chunk; `None` is the orderly end of this direction.
    pub(crate) fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        match self {
            ByteStream::Io { io, ahead, buffer, most, .. } => {
                if !ahead.is_empty() {
                    return Poll::Ready(Ok(Some(std::mem::take(ahead))));
                }
                poll_read_io(io, buffer, most, cx)
            }
            ByteStream::Multiplexed { recv, .. } => poll_read_half(recv, cx, usize::MAX),
            ByteStream::Custody(stream) => stream.poll_read(cx),
            ByteStream::Bodies { recv, .. } => loop {
                match ready!(Pin::new(&mut **recv).poll_frame(cx)) {
                    Some(Ok(frame)) => {
                        // Trailers of a tunnel mean nothing.
                        if let Ok(chunk) = frame.into_data() {
                            return Poll::Ready(Ok(Some(chunk)));
                        }
                    }
                    Some(Err(error)) => return Poll::Ready(Err(io::Error::other(error.to_string()))),
                    None => return Poll::Ready(Ok(None)),
                }
            },
        }
    }

    /// Takes what it can of the chunk. Ready when all of it is taken.
    pub(crate) fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
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
            ByteStream::Custody(stream) => stream.poll_write(cx, chunk),
            ByteStream::Bodies { send, .. } => {
                let send = send.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
                ready!(send.poll_ready(cx))?;
                send.send(std::mem::take(chunk));
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Sends on what TLS may hold back.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => Pin::new(io).poll_flush(cx),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ends this direction in order; the other may go on.
    pub(crate) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            ByteStream::Io { io, .. } => match ready!(Pin::new(io).poll_shutdown(cx)) {
                // The peer closed both directions meanwhile: it is as finished as can be.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
                other => Poll::Ready(other),
            },
            ByteStream::Multiplexed { send, sent_end, .. } => {
                if !std::mem::replace(sent_end, true) {
                    send.finish(cx)?;
                }
                send.poll_settled(cx).map_err(io::Error::from)
            }
            ByteStream::Custody(stream) => stream.poll_finish(cx),
            ByteStream::Bodies { send, .. } => {
                if let Some(send) = send.take() {
                    send.finish();
                }
                Poll::Ready(Ok(()))
            }
        }
    }

    /// To drop it is to end it, where both directions are at their end: a plain socket's `close`
    /// says what `shutdown` says.
    pub(crate) fn ends_by_drop(&self) -> bool {
        matches!(self, ByteStream::Io { io: Io::Plain(_), .. })
    }

    /// Ends this direction in order and hears the other one out, whatever it still says. Ready when
    /// both are over.
    pub(crate) fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
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

    /// The peer broke it off, though it had ended its own direction in order. Over TCP writing tells.
    pub(crate) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            ByteStream::Multiplexed { send, sent_end: false, .. } => send.poll_reset(cx).map(io::Error::from),
            _ => Poll::Pending,
        }
    }

    /// Breaks it off, so that the peer knows that bytes may be missing.
    pub(crate) fn abort(&mut self) {
        self.abort_as(Reset::Connect);
    }

    /// Breaks it off for this reason, where its version has a word for it.
    pub(crate) fn abort_as(&mut self, reset: Reset) {
        match self {
            ByteStream::Io { io, .. } => hermes_net::tcp::reset_on_close(io.tcp()),
            ByteStream::Multiplexed { send, .. } => send.reset(reset),
            ByteStream::Bodies { send, .. } => drop(send.take()),
            ByteStream::Custody(stream) => stream.abort(),
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

/// Nothing is broken: the peer needs no more.
pub(crate) fn has_parted(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<StreamError>());
    inner.is_some_and(StreamError::has_parted)
}

/// The next chunk of a multiplexed stream.
pub(crate) fn poll_read_half(
    recv: &mut Receiver,
    cx: &mut Context<'_>,
    most: usize,
) -> Poll<io::Result<Option<Bytes>>> {
    recv.poll_chunk(cx, most).map(|chunk| Ok(chunk.transpose()?))
}
