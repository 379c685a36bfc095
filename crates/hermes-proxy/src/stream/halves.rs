//! The two halves of a multiplexed stream of any version, for bodies and tunnels.
//!
//! In: halves of HTTP/2 or HTTP/3. Out: chunks, trailers, ends and errors that mean the same in both. Never: the
//! meaning of the bytes.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use ::h2::Reason;
use bytes::Bytes;
use hermes_wire::h3::Code;
use http::HeaderMap;

use super::{h2, h3};
use crate::error::Oversize;
use crate::live::Entry;

/// The failure of a stream.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub(crate) struct StreamError {
    why: Why,
    /// The whole connection failed.
    pub(crate) is_of_connection: bool,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The peer processed nothing of it.
    Unprocessed,
    /// The peer reset it.
    Reset,
    /// The peer sent its complete message and wants no more of the request (RFC 9113, section 8.1; RFC 9114, section
    /// 4.1). Servers reset a stream with NO_ERROR after its end for that.
    Parted,
    /// The head or the trailers exceed the peer's limit. Nothing was sent.
    Oversize(Oversize),
    Other,
}

impl StreamError {
    /// True if the peer processed nothing of it, so that a retry is safe, to this peer or another.
    pub(crate) fn is_unprocessed(&self) -> bool {
        self.why == Why::Unprocessed
    }

    /// True if nothing is broken: the peer wants no further bytes.
    pub(crate) fn has_parted(&self) -> bool {
        self.why == Why::Parted
    }

    /// The head or trailers that exceed the peer's limit. The peer itself did not fail.
    pub(crate) fn oversize(&self) -> Option<Oversize> {
        match self.why {
            Why::Oversize(oversize) => Some(oversize),
            _ => None,
        }
    }
}

impl StreamError {
    /// The error of a stream that the peer reset with this HTTP/3 code (RFC 9114, section 8.1).
    pub(crate) fn of_code(code: u64) -> Self {
        let is = |other: Code| code == other.value();
        let why = if is(Code::RequestRejected) {
            Why::Unprocessed
        } else if is(Code::RequestCancelled) || is(Code::ConnectError) {
            Why::Reset
        } else if is(Code::NoError) {
            Why::Parted
        } else {
            Why::Other
        };
        Self { why, is_of_connection: false, text: format!("the peer broke the stream off with {code:#x}") }
    }

    /// The error of a stream whose connection failed.
    pub(crate) fn of_connection(text: impl Into<String>) -> Self {
        Self { why: Why::Other, is_of_connection: true, text: text.into() }
    }

    /// An error with any other reason.
    pub(crate) fn other(text: impl Into<String>) -> Self {
        Self { why: Why::Other, is_of_connection: false, text: text.into() }
    }
}

impl From<Oversize> for StreamError {
    fn from(oversize: Oversize) -> Self {
        Self { why: Why::Oversize(oversize), is_of_connection: false, text: oversize.to_string() }
    }
}

impl From<::h2::Error> for StreamError {
    fn from(error: ::h2::Error) -> Self {
        let is_of_connection = !error.is_reset();
        let why = match error.reason() {
            Some(Reason::REFUSED_STREAM) => Why::Unprocessed,
            // h2 reports this only for streams beyond the last one that the peer's GOAWAY names (RFC 9113, 6.8).
            Some(_) if error.is_go_away() && error.is_remote() => Why::Unprocessed,
            Some(Reason::NO_ERROR) if !error.is_go_away() => Why::Parted,
            Some(Reason::CONNECT_ERROR | Reason::CANCEL) => Why::Reset,
            _ => Why::Other,
        };
        Self { why, is_of_connection, text: error.to_string() }
    }
}

impl From<StreamError> for io::Error {
    fn from(error: StreamError) -> Self {
        match error.why {
            Why::Reset => io::ErrorKind::ConnectionReset.into(),
            _ => io::Error::other(error),
        }
    }
}

/// The reason with which a stream is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reset {
    /// The stream is no longer wanted.
    Cancel,
    /// The connection of a tunnel failed.
    Connect,
    /// The source of the bytes failed.
    Internal,
    /// The peer's message is malformed.
    Malformed,
}

impl Reset {
    fn h2(self) -> Reason {
        match self {
            Reset::Cancel => Reason::CANCEL,
            Reset::Connect => Reason::CONNECT_ERROR,
            Reset::Internal => Reason::INTERNAL_ERROR,
            Reset::Malformed => Reason::PROTOCOL_ERROR,
        }
    }

    pub(super) fn h3(self) -> Code {
        match self {
            Reset::Cancel => Code::RequestCancelled,
            Reset::Connect => Code::ConnectError,
            Reset::Internal => Code::InternalError,
            Reset::Malformed => Code::MessageError,
        }
    }
}

/// The receiving half.
pub(crate) enum Receiver {
    H2(h2::Receiver),
    H3(Box<h3::Receiver>),
}

impl Receiver {
    /// Binds the half to a session, which ends if too many bytes remain unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        match self {
            Receiver::H2(recv) => recv.bind(session),
            Receiver::H3(recv) => recv.bind(session),
        }
    }

    /// The next chunk, never empty, of at most `most` bytes; `None` is the end.
    pub(crate) fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, StreamError>>> {
        match self {
            Receiver::H2(recv) => recv.poll_chunk(cx, most).map(|chunk| chunk.map(|chunk| Ok(chunk?))),
            Receiver::H3(recv) => recv.poll_chunk(cx, most),
        }
    }

    /// Sets the message's `content-length`. h2 checks the length itself.
    pub(crate) fn expect(&mut self, length: Option<u64>) {
        match self {
            Receiver::H2(_) => {}
            Receiver::H3(recv) => recv.expect(length),
        }
    }

    /// The limit of lines in trailers.
    pub(crate) fn most_lines(&self) -> usize {
        match self {
            Receiver::H2(recv) => recv.most_lines(),
            Receiver::H3(recv) => recv.most_lines(),
        }
    }

    /// The trailers, after the last chunk.
    pub(crate) fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, StreamError>> {
        match self {
            Receiver::H2(recv) => recv.poll_trailers(cx).map_err(StreamError::from),
            Receiver::H3(recv) => recv.poll_trailers(cx),
        }
    }

    /// True if nothing is left to read.
    pub(crate) fn is_end_stream(&self) -> bool {
        match self {
            Receiver::H2(recv) => recv.is_end_stream(),
            Receiver::H3(recv) => recv.is_end_stream(),
        }
    }
}

/// The sending half.
pub(crate) enum Sender {
    H2(h2::Sender),
    H3(Box<h3::Sender>),
}

impl Sender {
    /// Ready when something may be sent.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_room(cx).map_err(StreamError::from),
            Sender::H3(send) => send.poll_room(cx),
        }
    }

    /// Ready when the connection has taken enough of the backlog.
    pub(crate) fn poll_backlog(&mut self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Sender::H2(send) => send.poll_backlog(cx),
            Sender::H3(_) => Poll::Ready(()),
        }
    }

    /// Ready when the peer resets the stream.
    pub(crate) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match self {
            Sender::H2(send) => send.poll_reset(cx).map(StreamError::from),
            Sender::H3(send) => send.poll_reset(cx),
        }
    }

    /// Sends as much of a chunk as the peer takes; with `ends`, the stream ends after the last byte. Ready when nothing
    /// of it is left.
    pub(crate) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunk: &mut Bytes,
        ends: bool,
    ) -> Poll<Result<(), StreamError>> {
        match self {
            Sender::H2(send) => send.poll_send(cx, chunk, ends).map_err(StreamError::from),
            Sender::H3(send) => send.poll_send(cx, chunk, ends),
        }
    }

    /// Queues a chunk regardless of the windows; with `ends`, the stream ends after it.
    ///
    /// # Errors
    /// The stream has ended.
    pub(crate) fn send(&mut self, chunk: Bytes, ends: bool) -> Result<(), StreamError> {
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
    pub(crate) fn finish(&mut self, cx: &mut Context<'_>) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send(Bytes::new(), true).map_err(|error| send.why(cx, error))?),
            Sender::H3(send) => {
                send.send(Bytes::new(), true);
                Ok(())
            }
        }
    }

    /// Ready when nothing that was sent waits in this half.
    pub(crate) fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
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
    pub(crate) fn send_trailers(&mut self, trailers: HeaderMap) -> Result<(), StreamError> {
        match self {
            Sender::H2(send) => Ok(send.send_trailers(trailers)?),
            Sender::H3(send) => Ok(send.send_trailers(&trailers)?),
        }
    }

    /// Resets the stream.
    pub(crate) fn reset(&mut self, reset: Reset) {
        match self {
            Sender::H2(send) => send.reset(reset.h2()),
            Sender::H3(send) => send.reset(reset),
        }
    }
}
