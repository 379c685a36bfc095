//! A type for plain TCP and TLS connections.
//!
//! An enum instead of a boxed trait object: the copy loops poll a plain socket for readiness before they allocate a
//! buffer, and other streams have no such operation.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A connected byte stream.
#[derive(Debug)]
pub enum Io {
    /// TCP without TLS.
    Plain(TcpStream),
    /// TLS over TCP, as client or as server. Boxed, because the state of rustls takes a kilobyte.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Io {
    /// The underlying socket.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Io::Plain(tcp) => tcp,
            Io::Tls(tls) => tls.get_ref().0,
        }
    }

    /// Whether the peer has closed the connection, or the connection is broken, according to the readiness events that
    /// tokio has received. Unread data does not matter.
    pub fn is_closed_there(&self) -> bool {
        // tokio reports a closed connection for every interest. Only TCP urgent data makes `PRIORITY` ready otherwise.
        let closed = pin!(self.tcp().ready(Interest::PRIORITY));
        closed.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// Whether the connection is broken in both directions, for example by a reset, according to the readiness events
    /// that tokio has received. False for a peer that has only half-closed, since it may still read.
    pub fn is_reset(&self) -> bool {
        let ready = pin!(self.tcp().ready(Interest::WRITABLE));
        match ready.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(ready)) => ready.is_write_closed(),
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        }
    }

    /// Moves the socket from another thread's runtime to the current one.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn rehome(&mut self) -> io::Result<()> {
        let tcp = match self {
            Io::Plain(tcp) => tcp,
            Io::Tls(tls) => match &mut **tls {
                TlsStream::Client(tls) => tls.get_mut().0,
                TlsStream::Server(tls) => tls.get_mut().0,
            },
        };
        let same: OwnedFd = tcp.as_fd().try_clone_to_owned()?;
        *tcp = TcpStream::from_std(same.into())?;
        Ok(())
    }

    /// The peer's address.
    ///
    /// # Errors
    /// The socket is no longer connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.tcp().peer_addr()
    }

    /// The protocol that ALPN selected; `None` for plaintext or without ALPN.
    pub fn alpn(&self) -> Option<&[u8]> {
        match self {
            Io::Plain(_) => None,
            Io::Tls(tls) => tls.get_ref().1.alpn_protocol(),
        }
    }

    /// Polls until a read would not block, so that an idle stream needs no buffer. TLS is always ready: only rustls
    /// knows whether it has buffered data.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Io::Plain(tcp) => tcp.poll_read_ready(cx),
            Io::Tls(_) => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Io::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

/// The number of buffers that one system call takes (`IOV_MAX`).
const MAX_BUFFERS: usize = 1024;

/// Sends buffers by sendmsg(2). The runtime would use writev(2), which takes the kernel a detour through its file layer.
fn poll_send(tcp: &TcpStream, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
    let bufs = &bufs[..bufs.len().min(MAX_BUFFERS)];
    loop {
        ready!(tcp.poll_write_ready(cx))?;
        let send = || SockRef::from(tcp).send_vectored_with_flags(bufs, libc::MSG_NOSIGNAL);
        match tcp.try_io(Interest::WRITABLE, send) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => return Poll::Ready(sent),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Io::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Io::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Io::Plain(tcp) => poll_send(tcp, cx, bufs),
            Io::Tls(tls) => Pin::new(tls).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Io::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Io::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}
