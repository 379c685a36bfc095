//! A tunnel whose bytes are the bodies of a POST request and of its response.
//!
//! In: the received body, and the sender of the other body. Out: a byte stream. Never: the meaning of the bytes.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Body as HttpBody;

use super::pool::H1Connection;
use hermes_transport::body::{Body, ChannelSender};
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::{BoxedStream, ByteStream};

/// The bodies of a request and its response, as one byte stream.
pub struct PostTunnel {
    recv: Body,
    /// The sender of the other body; `None` once that body has ended.
    send: Option<ChannelSender>,
    /// The HTTP/1.1 connection of both bodies, which this tunnel drives. `None` if another task drives it.
    connection: Option<Box<H1Connection>>,
}

impl PostTunnel {
    pub fn stream(recv: Body, send: ChannelSender, connection: Option<Box<H1Connection>>) -> ByteStream {
        ByteStream::Boxed(Box::new(Self { recv, send: Some(send), connection }))
    }
}

impl BoxedStream for PostTunnel {
    fn bind(&self, session: &Rc<SessionEntry>) {
        self.recv.bind(session);
    }

    fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(connection) = &mut self.connection else { return Poll::Ready(Ok(())) };
        connection.poll(cx).map_err(io::Error::other)?;
        // If both messages are complete, the connection has ended or accepts another request.
        if connection.finished || connection.is_reusable() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            match ready!(Pin::new(&mut self.recv).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // Trailers are ignored, because they have no meaning in a tunnel.
                    if let Ok(chunk) = frame.into_data() {
                        return Poll::Ready(Ok(Some(chunk)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Err(io::Error::other(error.to_string()))),
                None => return Poll::Ready(Ok(None)),
            }
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        let send = self.send.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        ready!(send.poll_ready(cx))?;
        send.send(std::mem::take(chunk));
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(send) = self.send.take() {
            send.finish();
        }
        Poll::Ready(Ok(()))
    }

    fn abort(&mut self) {
        drop(self.send.take());
    }
}
