//! One connection of bytes, plain or TLS, behind one type.
//!
//! An enum and not a boxed trait object: the copy loops ask a plain socket for its readiness
//! before they hold a buffer for it, and that question has no meaning for other streams.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A connected byte stream.
#[derive(Debug)]
pub enum Io {
    /// TCP.
    Plain(TcpStream),
    /// TLS over TCP, either side. Boxed: rustls holds a kilobyte of state.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Io {
    /// The socket below.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Io::Plain(tcp) => tcp,
            Io::Tls(tls) => tls.get_ref().0,
        }
    }

    /// The other end has closed it, or it is broken, as far as its runtime has heard: known before what it sent is read.
    pub fn is_closed_there(&self) -> bool {
        // What is urgent is not asked for, so that nothing else is left.
        let closed = pin!(self.tcp().ready(Interest::PRIORITY));
        closed.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// True if the connection is broken in both directions, by a reset for example, as far as the runtime knows. A peer
    /// that has only half-closed may still read.
    pub fn is_reset(&self) -> bool {
        let ready = pin!(self.tcp().ready(Interest::WRITABLE));
        match ready.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(ready)) => ready.is_write_closed(),
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        }
    }

    /// Lets the current runtime watch the socket: until now that of another thread did.
    ///
    /// # Errors
    /// No descriptor is left.
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

    /// The far end's address.
    ///
    /// # Errors
    /// The socket is no longer connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.tcp().peer_addr()
    }

    /// What ALPN settled on; `None` on plaintext or where neither side asked.
    pub fn alpn(&self) -> Option<&[u8]> {
        match self {
            Io::Plain(_) => None,
            Io::Tls(tls) => tls.get_ref().1.alpn_protocol(),
        }
    }

    /// Ready where a read would not block, so that an idle stream needs no buffer.
    /// TLS always says ready: only rustls knows what it holds.
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
            Io::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
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
