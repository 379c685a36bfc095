//! The two halves of an HTTP/2 or HTTP/3 stream behind one interface, for bodies and tunnels.
//!
//! In: stream halves of either version. Out: chunks, trailers, ends and errors with the same meaning for both versions.
//! Never: the meaning of the bytes.

use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;

use super::{h2, h3};
use crate::runtime::session::SessionEntry;
use crate::stream_error::{Reset, StreamError};

/// The receiving half of an HTTP/2 or HTTP/3 stream.
pub enum Receiver {
    H2(h2::Receiver),
    H3(Box<h3::Receiver>),
}

impl Receiver {
    /// Charges the unread bytes to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        match self {
            Receiver::H2(recv) => recv.bind(session),
            Receiver::H3(recv) => recv.bind(session),
        }
    }

    /// Returns the next chunk, which is never empty and has at most `most` bytes, or `None` at the end of the data.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, StreamError>>> {
        match self {
            Receiver::H2(recv) => recv.poll_chunk(cx, most).map(|chunk| chunk.map(|chunk| Ok(chunk?))),
            Receiver::H3(recv) => recv.poll_chunk(cx, most),
        }
    }

    /// Sets the message's `content-length`, against which the body is checked. h2 checks the length itself.
    pub fn expect(&mut self, length: Option<u64>) {
        match self {
            Receiver::H2(_) => {}
            Receiver::H3(recv) => recv.expect(length),
        }
    }

    /// Returns the maximum number of lines in trailers.
    pub fn most_lines(&self) -> usize {
        match self {
            Receiver::H2(recv) => recv.most_lines(),
            Receiver::H3(recv) => recv.most_lines(),
        }
    }

    /// Returns the trailers, or `None` if the message has none. Called after the last chunk.
    pub fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, StreamError>> {
        match self {
            Receiver::H2(recv) => recv.poll_trailers(cx).map_err(StreamError::from),
            Receiver::H3(recv) => recv.poll_trailers(cx),
        }
    }

    /// True if no data and no trailers are left to read.
    pub fn is_end_stream(&self) -> bool {
        match self {
            Receiver::H2(recv) => recv.is_end_stream(),
            Receiver::H3(recv) => recv.is_end_stream(),
        }
    }
}

/// The sending half of an HTTP/2 or HTTP/3 stream.
pub enum Sender {
    H2(h2::Sender),
    H3(Box<h3::Sender>),
}

impl Sender {
    /// Ready when a chunk may be sent.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_room(cx).map_err(StreamError::from),
            Sender::H3(send) => send.poll_room(cx),
        }
    }

    /// Ready when the frames that wait for the socket of the connection are below their limits. HTTP/3 has no such
    /// limits.
    pub fn poll_backlog(&mut self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Sender::H2(send) => send.poll_backlog(cx),
            Sender::H3(_) => Poll::Ready(()),
        }
    }

    /// Ready when the peer resets the stream or stops reading it.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match self {
            Sender::H2(send) => send.poll_reset(cx).map(StreamError::from),
            Sender::H3(send) => send.poll_reset(cx),
        }
    }

    /// Sends as much of a chunk as the peer's windows permit, and removes it from the chunk. With `ends`, the stream
    /// ends after the chunk. Ready when the chunk is empty.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes, ends: bool) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_send(cx, chunk, ends).map_err(StreamError::from),
            Sender::H3(send) => send.poll_send(cx, chunk, ends),
        }
    }

    /// Queues a chunk regardless of the windows. With `ends`, the stream ends after it.
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

    /// Ends the stream cleanly. May be called once.
    ///
    /// # Errors
    /// The stream has already ended. If the peer has reset it, the error is that reset.
    pub fn finish(&mut self, cx: &mut Context<'_>) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send(Bytes::new(), true).map_err(|error| send.why(cx, error))?),
            Sender::H3(send) => {
                send.send(Bytes::new(), true);
                Ok(())
            }
        }
    }

    /// Ready when no queued bytes remain in this half.
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
