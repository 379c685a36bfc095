//! The two halves of an HTTP/3 stream (RFC 9114, section 4.1), for bodies and for tunnels.
//!
//! In: the stream halves of quinn. Out: heads, chunks, trailers. A protocol violation of the peer ends the stream or
//! the connection, with the error code of the RFC. A half that is dropped before its end resets or stops its direction.
//! Never: the meaning of the bytes.

mod inbox;
mod sender;

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_net::quic;
use hermes_wire::h3::{self, Code, Frame, FrameDecoder, FrameError};
use hermes_wire::varint;
use http::HeaderMap;

use self::inbox::StreamReader;
pub use self::sender::Sender;
use super::h2::{Coalesced, GATHER, SMALL};
use crate::h3::fields::{self, Bounds, FieldError};
use crate::h3::{Datagrams, Link};
use crate::runtime::WorkerContext;
use crate::runtime::session::SessionEntry;
use crate::stream_error::StreamError;

/// An error of the peer's message that ends the stream and not the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The peer reset its sending direction.
    Reset,
    /// The message is malformed (RFC 9114, section 4.1.2).
    Malformed,
    /// A field section exceeds the node's limits.
    TooLarge,
}

/// The receiving half of an HTTP/3 stream.
pub struct Receiver {
    recv: StreamReader,
    link: Rc<Link>,
    bounds: Bounds,
    decoder: FrameDecoder,
    /// The number of bytes of an incomplete frame, as counted for the connection.
    unfinished: usize,
    /// A chunk that was read before its reader requested it.
    held: Option<Bytes>,
    /// The encoded trailers.
    trailers: Option<Bytes>,
    /// An error that is returned after the bytes that preceded it.
    failed: Option<StreamError>,
    /// True if the peer has ended its sending direction.
    has_ended: bool,
    /// The number of bytes of `content-length` that are still to come; `None` without `content-length`.
    missing: Option<u64>,
    /// True if only DATA frames are allowed, because the stream is a CONNECT tunnel (RFC 9114, section 4.4).
    is_bytes: bool,
    fault: Rc<Cell<Option<Fault>>>,
    /// The error code of STOP_SENDING if this half is dropped before the end of the stream.
    parting: Code,
}

impl Receiver {
    /// Wraps the receiving half of quinn. `parting` is the error code of STOP_SENDING if this half is dropped before
    /// the end of the stream.
    pub fn new(
        worker: &Rc<WorkerContext>,
        recv: quic::RecvStream,
        link: Rc<Link>,
        bounds: Bounds,
        parting: Code,
    ) -> Self {
        Self {
            recv: StreamReader::new(worker, recv, &link),
            link,
            bounds,
            decoder: FrameDecoder::new(bounds.bytes),
            unfinished: 0,
            held: None,
            trailers: None,
            failed: None,
            has_ended: false,
            missing: None,
            is_bytes: false,
            fault: Rc::default(),
            parting,
        }
    }

    /// Charges the unread bytes to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        self.recv.bind(session, self.trailers.as_ref().map_or(0, Bytes::len));
    }

    /// Returns the encoded head, which is the first HEADERS frame, or `None` if the stream ended without one.
    pub fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamError>> {
        match ready!(self.poll_frame(cx)) {
            Some(Ok(Frame::Headers(block))) => Poll::Ready(Ok(Some(block))),
            Some(Ok(frame)) => Poll::Ready(Err(self.stray(&frame, "a message that does not begin with HEADERS"))),
            Some(Err(error)) => Poll::Ready(Err(error)),
            None => Poll::Ready(Ok(None)),
        }
    }

    /// Reads the next chunk ahead of its reader, unless one was read ahead already. Afterwards, [`Self::is_end_stream`]
    /// shows whether the message ended with its head.
    pub fn peek(&mut self, cx: &mut Context<'_>) {
        if self.held.is_none() && self.failed.is_none() {
            match self.poll_data(cx) {
                Poll::Ready(Some(Ok(chunk))) => self.held = Some(chunk),
                Poll::Ready(Some(Err(error))) => self.failed = Some(error),
                Poll::Ready(None) | Poll::Pending => {}
            }
        }
    }

    /// Sets the message's `content-length`. A body of another length makes the message malformed (RFC 9114, section
    /// 4.1.2).
    pub fn expect(&mut self, length: Option<u64>) {
        let here = self.held.as_ref().map_or(0, Bytes::len) as u64;
        self.missing = length.map(|length| length.saturating_sub(here));
        let is_wrong = length.is_some_and(|length| here > length || (here < length && self.is_over()));
        if is_wrong {
            // A reader must not receive these bytes, because it would accept them as the complete body.
            self.held = None;
            self.failed = Some(self.malformed("length differs from content-length"));
        }
    }

    /// Accepts only DATA frames from now on, because the stream is a CONNECT tunnel (RFC 9114, section 4.4).
    pub fn expect_tunnel(&mut self) {
        self.is_bytes = true;
        if self.trailers.take().is_some() {
            self.failed = Some(self.unexpected("HEADERS in a tunnel"));
        }
    }

    /// Returns a shared cell that contains the error of the peer's message, if there was one. The cell remains usable
    /// after this half was moved into a body.
    pub fn fault(&self) -> Rc<Cell<Option<Fault>>> {
        self.fault.clone()
    }

    /// True if the request arrived in 0-RTT data and the handshake is not yet confirmed.
    pub fn is_early(&self) -> bool {
        self.recv.is_0rtt() && !self.link.is_confirmed()
    }

    pub fn link(&self) -> &Rc<Link> {
        &self.link
    }

    /// True if no further byte of the body follows.
    fn is_over(&self) -> bool {
        self.trailers.is_some() || (self.has_ended && self.decoder.finish().is_ok())
    }

    /// Returns the HTTP datagrams of the stream's request, and begins to queue received ones.
    pub fn datagrams(&self) -> Datagrams {
        Datagrams::of(&self.link, self.recv.id().into())
    }

    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    pub fn most_lines(&self) -> usize {
        self.bounds.lines
    }

    /// Returns the next chunk, which is never empty and has at most `most` bytes, or `None` at the end of the body.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, StreamError>>> {
        let mut chunk = match self.held.take() {
            Some(chunk) => chunk,
            None => match ready!(self.poll_gathered(cx)) {
                Some(Ok(chunk)) => chunk,
                other => return Poll::Ready(other),
            },
        };
        if self.missing == Some(0) && !self.is_over() {
            // A reader that counts bytes stops after this chunk. So the end of the body must be verified before the
            // last chunk is returned.
            match self.poll_data(cx) {
                Poll::Ready(None) => {}
                Poll::Ready(other) => return Poll::Ready(other),
                Poll::Pending => {
                    self.held = Some(chunk);
                    return Poll::Pending;
                }
            }
        }
        if chunk.len() > most {
            self.held = Some(chunk.split_off(most));
        }
        Poll::Ready(Some(Ok(chunk)))
    }

    /// Returns the next chunk, coalesced with those that follow it, because a chunk is at most one packet long.
    fn poll_gathered(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamError>>> {
        let first = match ready!(self.poll_data(cx)) {
            Some(Ok(chunk)) => chunk,
            other => return Poll::Ready(other),
        };
        let mut whole = Coalesced::from(first);
        while whole.byte_len() < GATHER - SMALL {
            match self.poll_data(cx) {
                Poll::Ready(Some(Ok(chunk))) => whole.add(&chunk),
                Poll::Ready(Some(Err(error))) => {
                    self.failed = Some(error);
                    break;
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(whole.into_bytes())))
    }

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamError>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if self.trailers.is_some() {
            return Poll::Ready(None);
        }
        match ready!(self.poll_frame(cx)) {
            Some(Ok(Frame::Data(chunk))) => {
                if let Some(missing) = &mut self.missing {
                    match missing.checked_sub(chunk.len() as u64) {
                        Some(left) => *missing = left,
                        None => return Poll::Ready(Some(Err(self.malformed("more bytes than content-length")))),
                    }
                }
                Poll::Ready(Some(Ok(chunk)))
            }
            Some(Ok(Frame::Headers(_))) if self.is_bytes => {
                Poll::Ready(Some(Err(self.unexpected("HEADERS in a tunnel"))))
            }
            Some(Ok(Frame::Headers(_))) if self.missing.is_some_and(|missing| missing > 0) => {
                Poll::Ready(Some(Err(self.malformed("fewer bytes than content-length"))))
            }
            Some(Ok(Frame::Headers(block))) => {
                self.trailers = Some(block);
                Poll::Ready(None)
            }
            Some(Ok(frame @ Frame::Control { .. })) => {
                Poll::Ready(Some(Err(self.stray(&frame, "a frame of the control stream in a message"))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None if self.missing.is_some_and(|missing| missing > 0) => {
                Poll::Ready(Some(Err(self.malformed("fewer bytes than content-length"))))
            }
            None => Poll::Ready(None),
        }
    }

    /// Returns the trailers, or `None` if the message has none. Called after the last chunk.
    pub fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, StreamError>> {
        if self.trailers.is_none() {
            return Poll::Ready(Ok(None));
        }
        match ready!(self.poll_frame(cx)) {
            None => {}
            Some(Ok(frame)) => return Poll::Ready(Err(self.stray(&frame, "frame after the trailers"))),
            Some(Err(error)) => return Poll::Ready(Err(error)),
        }
        let Some(block) = self.trailers.take() else { return Poll::Ready(Ok(None)) };
        Poll::Ready(fields::read_trailers(block, self.bounds).map(Some).map_err(|error| self.field_error(&error)))
    }

    /// True if no data and no trailers are left to read.
    pub fn is_end_stream(&self) -> bool {
        self.has_ended && self.held.is_none() && self.trailers.is_none() && self.failed.is_none()
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame, StreamError>>> {
        loop {
            let next = self.decoder.next();
            let before = std::mem::replace(&mut self.unfinished, self.decoder.held());
            if !self.link.holds_unfinished(before, self.unfinished, self.bounds.bytes) {
                let error = FieldError::TooLarge(self.bounds);
                return Poll::Ready(Some(Err(self.field_error(&error))));
            }
            match next {
                Ok(Some(frame)) => return Poll::Ready(Some(Ok(frame))),
                Ok(None) if self.has_ended => {
                    return Poll::Ready(
                        self.decoder.finish().err().map(|error| Err(self.fatal(error.code(), &error.to_string()))),
                    );
                }
                Ok(None) => {}
                Err(FrameError::TooLong { kind: h3::HEADERS, .. }) => {
                    let error = FieldError::TooLarge(self.bounds);
                    return Poll::Ready(Some(Err(self.field_error(&error))));
                }
                Err(error) => return Poll::Ready(Some(Err(self.fatal(error.code(), &error.to_string())))),
            }
            match ready!(self.recv.poll_read(cx)) {
                Ok(Some(chunk)) => self.decoder.push(chunk),
                Ok(None) => self.has_ended = true,
                Err(error) => return Poll::Ready(Some(Err(self.read_error(error)))),
            }
        }
    }

    /// Records that the message is malformed, and returns the error. Dropping this half then stops the stream with
    /// H3_MESSAGE_ERROR; the connection continues.
    pub fn malformed(&mut self, what: &str) -> StreamError {
        self.parting = Code::MessageError;
        self.fault.set(Some(Fault::Malformed));
        StreamError::other(what)
    }

    /// Returns the error for a field section that could not be decoded. Closes the connection if QPACK failed.
    pub fn field_error(&mut self, error: &FieldError) -> StreamError {
        match error {
            FieldError::Undecodable(_) => self.fatal(Code::DecompressionFailed, &error.to_string()),
            FieldError::TooLarge(_) => {
                self.parting = Code::ExcessiveLoad;
                self.fault.set(Some(Fault::TooLarge));
                StreamError::other(error.to_string())
            }
            FieldError::Malformed(what) => self.malformed(what),
        }
    }

    /// Closes the connection because of a frame that is not allowed in this position, and returns the error.
    fn stray(&self, frame: &Frame, what: &str) -> StreamError {
        match frame {
            // The server pushes, which this node never allows (RFC 9114, section 7.2.5).
            Frame::Control { kind: h3::PUSH_PROMISE, payload } if !self.link.is_server() => {
                let code = if varint::decode(payload).is_some() { Code::IdError } else { Code::FrameError };
                self.fatal(code, "a push that was never allowed")
            }
            _ => self.unexpected(what),
        }
    }

    fn unexpected(&self, what: &str) -> StreamError {
        self.fatal(Code::FrameUnexpected, what)
    }

    /// Closes the connection, and returns the error for this stream.
    fn fatal(&self, code: Code, what: &str) -> StreamError {
        self.link.close(code, what);
        StreamError::of_connection(what)
    }

    fn read_error(&self, error: quic::ReadError) -> StreamError {
        match error {
            quic::ReadError::Reset(code) => {
                self.fault.set(Some(Fault::Reset));
                StreamError::of_code(code.into_inner())
            }
            quic::ReadError::ConnectionLost(error) => self.link.lost(self.recv.id().into(), &error),
            other => StreamError::other(other.to_string()),
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.link.holds_unfinished(self.unfinished, 0, self.bounds.bytes);
        if !self.has_ended {
            self.recv.stop(self.parting);
        }
    }
}
