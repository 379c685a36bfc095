//! Distinguishes HTTP/2 from HTTP/1.1 on one port.
//!
//! In: a connection, plain or TLS. Out: the same connection with its first bytes read, served by `h1` or `h2`. ALPN
//! decides if the client offered it over TLS. Otherwise the first bytes decide: HTTP/2 begins with a preface that is
//! not a valid HTTP/1.1 request (RFC 9113, 3.4).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use hermes_net::Io;
use http::HeaderValue;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Ready, h1, h2};
use crate::worker::Worker;
use hermes_outbound::reverse::UplinkConnection;
use hermes_transport::body::TrailerSlot;
use hermes_transport::lingering_close::LingeringClose;
use hermes_transport::runtime::session::{Connection, Stage};
use hermes_wire::request_target::RequestTargetEscaper;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Size of the first read in bytes; the heads of most requests fit.
const FIRST_READ: usize = 2048;
/// Buffer size for a small read quota. A small buffer is cheaper to clear.
const SMALL_READ: usize = 512;

/// Serves a connection of an HTTP listener.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, ready: Ready) {
    let Ready { mut io, source, trust, secure } = ready;
    let mut ahead = BytesMut::new();
    let is_h2 = match io.alpn() {
        Some(b"h2") => true,
        Some(_) => false,
        None if !connection.current_listener(worker).http2 => false,
        None => match begins_with_preface(&mut io, &mut ahead).await {
            Ok(is_h2) => is_h2,
            Err(error) => {
                tracing::debug!(%source, %error, "the connection ended before a request");
                return;
            }
        },
    };
    if secure && connection.current_listener(worker).http3 && trust.peer().is_none_or(|peer| peer.node.is_none()) {
        advertise(connection, &io);
    }
    let watched = WatchedIo { ahead: ahead.freeze(), ..WatchedIo::new(worker, connection, io) };
    let client = Client { source, trust, secure, uplink: None };
    if is_h2 {
        Box::pin(h2::serve(worker, connection, watched, client)).await;
    } else {
        Box::pin(h1::serve(worker, connection, watched, client)).await;
    }
}

/// Lifetime of the `Alt-Svc` entry in seconds. A client that cannot reach HTTP/3 falls back to this connection.
const ALTERNATIVE_FOR: u32 = 3600;

/// Makes responses on this connection advertise HTTP/3 (`Alt-Svc`) at the port that the client connected to. Nodes are
/// exempt, since their documents name the protocol.
fn advertise(connection: &Connection, io: &Io) {
    let Ok(port) = io.tcp().local_addr().map(|address| address.port()) else { return };
    if let Ok(value) = HeaderValue::try_from(format!("h3=\":{port}\"; ma={ALTERNATIVE_FOR}")) {
        let _ = connection.alternative.set(value);
    }
}

/// The peer at the other end of a connection.
pub(crate) struct Client {
    pub(crate) source: std::net::SocketAddr,
    pub(crate) trust: hermes_model::facts::Trust,
    pub(crate) secure: bool,
    /// Set on a reverse connection: this node dialled it, and serves the requests of the neighbour on it.
    pub(crate) uplink: Option<Rc<UplinkConnection>>,
}

async fn begins_with_preface(io: &mut Io, ahead: &mut BytesMut) -> io::Result<bool> {
    loop {
        let common = ahead.iter().zip(PREFACE).take_while(|(got, want)| got == want).count();
        if common == PREFACE.len() {
            return Ok(true);
        }
        if common < ahead.len() {
            return Ok(false);
        }
        if read_first(io, ahead).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Reads the available bytes through a buffer on the stack: a connection that waits for its first bytes holds no
/// buffer, and most requests arrive with one system call.
pub(super) async fn read_first(io: &mut Io, ahead: &mut BytesMut) -> io::Result<usize> {
    std::future::poll_fn(|cx| {
        let mut first = [0; FIRST_READ];
        let mut buf = ReadBuf::new(&mut first);
        std::task::ready!(Pin::new(&mut *io).poll_read(cx, &mut buf))?;
        ahead.extend_from_slice(buf.filled());
        Poll::Ready(Ok(buf.filled().len()))
    })
    .await
}

/// A connection that reports two facts to the sweep: the arrival of a request's first bytes, and whether the client
/// reads its responses.
pub(crate) struct WatchedIo {
    /// Shared with the sweep, which inspects the socket and reads nothing.
    io: Rc<RefCell<Io>>,
    ahead: Bytes,
    connection: Rc<Connection>,
    worker: Rc<Worker>,
    /// The number of bytes that may be read before other tasks run.
    turn: Rc<Cell<usize>>,
    /// The client has closed its direction.
    ended: bool,
    linger: LingeringClose,
    trailers: TrailerSlot,
    /// Tracks the requests of an HTTP/1.1 connection.
    requests: Option<Rc<RequestTargetEscaper>>,
}

impl WatchedIo {
    pub(crate) fn new(worker: &Rc<Worker>, connection: &Rc<Connection>, io: Io) -> Self {
        let io = Rc::new(RefCell::new(io));
        let (connection, worker) = (connection.clone(), worker.clone());
        Self {
            io,
            ahead: Bytes::new(),
            connection,
            worker,
            turn: Rc::new(Cell::new(usize::MAX)),
            ended: false,
            linger: LingeringClose::default(),
            trailers: TrailerSlot::default(),
            requests: None,
        }
    }

    /// The read quota for one turn of the reading task, which sets it again for each turn.
    pub(super) fn turn(&self) -> Rc<Cell<usize>> {
        self.turn.clone()
    }

    /// Lets the sweep inspect the socket: a client that has closed is detected even while bytes of it are unread.
    pub(crate) fn is_looked_at(&self) {
        *self.connection.socket.borrow_mut() = Rc::downgrade(&self.io);
    }

    fn poll_read_in_turn(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        let turn = self.turn.get();
        if turn == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let io = &mut *self.io.borrow_mut();
        let before = buf.filled().len();
        // Reads at most the quota of this turn, however large the buffer is.
        std::task::ready!(match turn {
            0..=SMALL_READ => read_at_most::<SMALL_READ>(io, cx, buf, turn),
            _ if turn < FIRST_READ => read_at_most::<FIRST_READ>(io, cx, buf, turn),
            _ => Pin::new(io).poll_read(cx, buf),
        })?;
        let read = buf.filled().len() - before;
        self.turn.set(turn.saturating_sub(read));
        Poll::Ready(Ok(read))
    }

    /// The slot for the trailers of a chunked response over HTTP/1.1.
    pub(crate) fn trailers(&self) -> &TrailerSlot {
        &self.trailers
    }

    /// Treats the bytes as HTTP/1.1 requests whose targets may need escaping.
    pub(super) fn follow_requests(&mut self) -> Rc<RequestTargetEscaper> {
        let requests = self.requests.insert(Rc::default());
        if let Some(escaped) = requests.read(&self.ahead) {
            self.ahead = escaped.into();
        }
        requests.clone()
    }

    /// Replaces the bytes that were read if a request target among them needs escaping. Bytes that no longer fit wait
    /// for the next read.
    fn escape(&mut self, buf: &mut ReadBuf<'_>, before: usize) {
        let escaped = self.requests.as_ref().and_then(|requests| requests.read(&buf.filled()[before..]));
        if let Some(escaped) = escaped {
            buf.set_filled(before);
            let (fits, rest) = escaped.split_at(escaped.len().min(buf.remaining()));
            buf.put_slice(fits);
            self.ahead = Bytes::copy_from_slice(rest);
        }
    }

    /// The connection itself; `None` if another owner still holds it.
    pub(crate) fn into_io(self) -> Option<Io> {
        Rc::into_inner(self.io).map(RefCell::into_inner)
    }
}

/// Reads up to `limit` bytes, at most `N`.
fn read_at_most<const N: usize>(
    io: &mut Io,
    cx: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
    limit: usize,
) -> Poll<io::Result<()>> {
    let mut part = [0; N];
    let mut part = ReadBuf::new(&mut part[..limit.min(buf.remaining())]);
    std::task::ready!(Pin::new(io).poll_read(cx, &mut part))?;
    buf.put_slice(part.filled());
    Poll::Ready(Ok(()))
}

impl AsyncRead for WatchedIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.ahead.is_empty() {
            let most = this.ahead.len().min(buf.remaining());
            buf.put_slice(&this.ahead[..most]);
            this.ahead.advance(most);
        } else {
            let before = buf.filled().len();
            if std::task::ready!(this.poll_read_in_turn(cx, buf))? == 0 {
                this.ended |= buf.remaining() > 0;
                return Poll::Ready(Ok(()));
            }
            if this.requests.is_some() {
                this.escape(buf, before);
            }
        }
        this.connection.heard.set(this.connection.heard.get() + 1);
        if !this.connection.is_shared.get() && matches!(this.connection.stage(), Stage::Idle | Stage::Handshake) {
            this.connection.set_stage(&this.worker, Stage::Head);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WatchedIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.trailers.is_set() {
            return self.poll_write_vectored(cx, &[io::IoSlice::new(buf)]);
        }
        let this = self.get_mut();
        let written = Pin::new(&mut *this.io.borrow_mut()).poll_write(cx, buf);
        this.connection.is_blocked.set(written.is_pending());
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let io = &mut *this.io.borrow_mut();
        let written = match this.trailers.is_set() {
            true => this.trailers.poll_write(io, cx, bufs),
            false => Pin::new(io).poll_write_vectored(cx, bufs),
        };
        this.connection.is_blocked.set(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().io.borrow_mut()).poll_flush(cx)
    }

    /// Completes once no reset can overtake the last response.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let waits = !this.ended && !this.connection.is_long_idle(&this.worker);
        this.linger.poll(cx, &this.worker, &mut this.io.borrow_mut(), waits)
    }
}
