//! The two halves of a multiplexed stream of any version, for bodies and tunnels.
//!
//! In: halves of HTTP/2 or HTTP/3. Out: chunks, trailers, ends and errors that mean the same in both. Never: the
//! meaning of the bytes.

use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;

use super::{h2, h3};
use crate::runtime::session::SessionEntry;
use crate::stream_error::{Reset, StreamError};

/// The receiving half.
pub enum Receiver {
    H2(h2::Receiver),
    H3(Box<h3::Receiver>),
}

impl Receiver {
    /// Binds the half to a session, which ends if too many bytes remain unread.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        match self {
            Receiver::H2(recv) => recv.bind(session),
            Receiver::H3(recv) => recv.bind(session),
        }
    }

    /// The next chunk, never empty, of at most `most` bytes; `None` is the end.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, StreamError>>> {
        match self {
            Receiver::H2(recv) => recv.poll_chunk(cx, most).map(|chunk| chunk.map(|chunk| Ok(chunk?))),
            Receiver::H3(recv) => recv.poll_chunk(cx, most),
        }
    }

    /// Sets the message's `content-length`. h2 checks the length itself.
    pub fn expect(&mut self, length: Option<u64>) {
        match self {
            Receiver::H2(_) => {}
            Receiver::H3(recv) => recv.expect(length),
        }
    }

    /// The limit of lines in trailers.
    pub fn most_lines(&self) -> usize {
        match self {
            Receiver::H2(recv) => recv.most_lines(),
            Receiver::H3(recv) => recv.most_lines(),
        }
    }

    /// The trailers, after the last chunk.
    pub fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, StreamError>> {
        match self {
            Receiver::H2(recv) => recv.poll_trailers(cx).map_err(StreamError::from),
            Receiver::H3(recv) => recv.poll_trailers(cx),
        }
    }

    /// True if nothing is left to read.
    pub fn is_end_stream(&self) -> bool {
        match self {
            Receiver::H2(recv) => recv.is_end_stream(),
            Receiver::H3(recv) => recv.is_end_stream(),
        }
    }
}

/// The sending half.
pub enum Sender {
    H2(h2::Sender),
    H3(Box<h3::Sender>),
}

impl Sender {
    /// Ready when something may be sent.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_room(cx).map_err(StreamError::from),
            Sender::H3(send) => send.poll_room(cx),
        }
    }

    /// Ready when the connection has taken enough of the backlog.
    pub fn poll_backlog(&mut self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Sender::H2(send) => send.poll_backlog(cx),
            Sender::H3(_) => Poll::Ready(()),
        }
    }

    /// Ready when the peer resets the stream.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match self {
            Sender::H2(send) => send.poll_reset(cx).map(StreamError::from),
            Sender::H3(send) => send.poll_reset(cx),
        }
    }

    /// Sends as much of a chunk as the peer takes; with `ends`, the stream ends after the last byte. Ready when nothing
    /// of it is left.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes, ends: bool) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_send(cx, chunk, ends).map_err(StreamError::from),
            Sender::H3(send) => send.poll_send(cx, chunk, ends),
        }
    }

    /// Queues a chunk regardless of the windows; with `ends`, the stream ends after it.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&mut self, chunk: Bytes, ends: bool) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send(chunk, ends)?),
            Sender::H3(send) => {
                send.send(chunk, ends);
                Ok(())
            }
        }
    }

    /// Ends the stream cleanly, once.
    ///
    /// # Errors
    /// The stream has ended, with the peer's reason if it gave one.
    pub fn finish(&mut self, cx: &mut Context<'_>) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send(Bytes::new(), true).map_err(|error| send.why(cx, error))?),
            Sender::H3(send) => {
                send.send(Bytes::new(), true);
                Ok(())
            }
        }
    }

    /// Ready when nothing that was sent waits in this half.
    pub fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        match self {
            // h2 sends queued frames itself.
            Sender::H2(_) => Poll::Ready(Ok(())),
            Sender::H3(send) => send.poll_settled(cx),
        }
    }

    /// Ends the stream with trailers.
    ///
    /// # Errors
    /// The stream has ended, or the trailers exceed the peer's limit.
    pub fn send_trailers(&mut self, trailers: HeaderMap) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send_trailers(trailers)?),
            Sender::H3(send) => Ok(send.send_trailers(&trailers)?),
        }
    }

    /// Resets the stream.
    pub fn reset(&mut self, reset: Reset) {
        match self {
            Sender::H2(send) => send.reset(reset.h2()),
            Sender::H3(send) => send.reset(reset),
        }
    }
}
