//! The content of a message that arrives as a byte stream.
//!
//! In: a stream whose head was read. Out: pieces, frames, and a checked end: a message that is longer or shorter than
//! its head declares fails. Dropping it decides what happens to the unread rest.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_wire::binary_http::Part as Piece;
use hermes_wire::custody::{Direction, ExchangeId};
use http_body::{Frame, SizeHint};

use super::{Reading, headers};
use hermes_custody::service::{CustodyService, Failure};
use hermes_transport::body::BoxedBody;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// The read size.
const READ: usize = 64 << 10;

/// The content of a message that arrives as a byte stream.
pub(crate) struct CustodyBody {
    office: Arc<CustodyService>,
    id: ExchangeId,
    part: Direction,
    reading: Reading,
    /// The session that waits for it.
    entry: OnceCell<Rc<SessionEntry>>,
    peer: Arc<str>,
    length: Option<u64>,
    /// True if the engine was informed that the exchange ends at this node.
    is_taken_in: bool,
    /// The stream has been read to its end.
    is_read: bool,
    is_done: bool,
    /// A client must read it to the end. Contains the client's request key, if the request may be repeated.
    owed: Option<Option<Bytes>>,
    /// The upload of the request, which ends with this.
    _with: Option<Uploading>,
    /// A piece that was read ahead, and is returned first.
    ahead: Option<Piece>,
}

/// A task that uploads the rest of a request; dropping this aborts it.
pub(crate) struct Uploading(pub(crate) tokio::task::AbortHandle);

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl CustodyBody {
    /// Creates the body from the rest of a stream whose head was read.
    pub(crate) fn new(
        office: Arc<CustodyService>,
        id: ExchangeId,
        part: Direction,
        reading: Reading,
        peer: Arc<str>,
    ) -> Self {
        Self {
            office,
            id,
            part,
            reading,
            entry: OnceCell::new(),
            peer,
            length: None,
            is_taken_in: part == Direction::Response,
            is_read: false,
            is_done: false,
            owed: None,
            _with: None,
            ahead: None,
        }
    }

    /// Sets whether the whole stream was read before.
    pub(crate) fn having_read_all(mut self, is_read: bool) -> Self {
        self.is_read = is_read;
        self
    }

    /// The engine already knows that the exchange ends at this node.
    pub(crate) fn taken_in(mut self) -> Self {
        self.is_taken_in = true;
        self
    }

    /// Makes this piece, which was read ahead, the first one to be returned.
    pub(crate) fn behind(mut self, ahead: Option<Piece>) -> Self {
        self.ahead = ahead;
        self
    }

    /// Ties the exchange to a client. If the client leaves, the exchange fails, or is kept for a client that sends the
    /// same request.
    pub(crate) fn owed(mut self, asked: Option<Bytes>, with: Option<Uploading>) -> Self {
        (self.owed, self._with) = (Some(asked), with);
        self
    }

    /// Sets the declared length.
    pub(crate) fn expect(&mut self, length: Option<u64>) {
        self.length = length;
    }

    /// The next piece of the message; `None` after its end.
    pub(crate) fn poll_piece(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        if let Some(piece) = self.ahead.take() {
            return Poll::Ready(Some(Ok(piece)));
        }
        loop {
            match self.reading.next() {
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(piece))),
                Ok(None) if self.is_read => return Poll::Ready(None),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(self.malformed(&error.to_string())))),
            }
            if !std::mem::replace(&mut self.is_taken_in, true) {
                self.office.accept_local(self.id, false);
            }
            let read = self.office.poll_read(cx, self.id, self.part, READ);
            if let Some(entry) = self.entry.get() {
                entry.set_held(read.is_pending());
            }
            match ready!(read) {
                Ok((bytes, is_last)) => {
                    self.is_read = is_last;
                    self.reading.push(bytes);
                }
                Err(failure) => return Poll::Ready(Some(Err(self.failed(&failure)))),
            }
        }
    }

    fn malformed(&mut self, why: &str) -> Error {
        let reason = format!("invalid message from {}: {why}", self.peer);
        self.office.fail(self.id, 502, &reason);
        self.failed(&Failure { status: 502, reason: Arc::from(reason) })
    }

    fn failed(&mut self, failure: &Failure) -> Error {
        self.is_done = true;
        match self.part {
            Direction::Request => Error::ClientGone(failure.reason.to_string()),
            Direction::Response => crate::custody::error_of(&self.peer, failure),
        }
    }

    /// Reads the end of the stream too, if it has arrived with the last content, because the reader may not poll again.
    fn read_end(&mut self, cx: &Context<'_>) {
        if let Poll::Ready(Some(Ok(piece))) = self.poll_piece(cx) {
            match piece {
                // The content has ended; reading past the end makes custody acknowledge it to the previous node.
                Piece::End(fields) if fields.is_empty() => {
                    while let Poll::Ready(Some(Ok(_))) = self.poll_piece(cx) {}
                    self.is_done = true;
                }
                other => self.ahead = Some(other),
            }
        }
    }
}

impl BoxedBody for CustodyBody {
    /// Binds it to a session, which is not subject to timeouts while custody waits.
    fn bind(&self, session: &Rc<SessionEntry>) {
        // Only the first binding counts.
        let _ = self.entry.set(session.clone());
    }

    /// The declared length, if any.
    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        while !self.is_done {
            match ready!(self.poll_piece(cx)) {
                Some(Ok(Piece::Content(bytes))) => {
                    if let Some(left) = &mut self.length {
                        match left.checked_sub(bytes.len() as u64) {
                            Some(0) => {
                                *left = 0;
                                self.read_end(cx);
                            }
                            Some(less) => *left = less,
                            None => return Poll::Ready(Some(Err(self.malformed("longer than content-length")))),
                        }
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // The head of the stream, which was decoded before.
                Some(Ok(Piece::Head(..))) => {}
                Some(Ok(Piece::End(_))) if self.length.is_some_and(|left| left > 0) => {
                    return Poll::Ready(Some(Err(self.malformed("shorter than content-length"))));
                }
                Some(Ok(Piece::End(fields))) => {
                    // Reading past the end makes custody acknowledge it to the previous node.
                    while let Poll::Ready(Some(Ok(_))) = self.poll_piece(cx) {}
                    self.is_done = true;
                    if !fields.is_empty() {
                        let trailers = headers(fields).map_err(|why| self.malformed(&why));
                        return Poll::Ready(Some(trailers.map(Frame::trailers)));
                    }
                }
                Some(Err(error)) => {
                    self.is_done = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(Some(Err(self.malformed("it is cut off")))),
            }
        }
        Poll::Ready(None)
    }

    /// True if it was read to its end.
    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}

impl Drop for CustodyBody {
    fn drop(&mut self) {
        // A complete content lacks only its end, which no reader awaits.
        let is_whole = self.is_done || self.length == Some(0);
        match self.owed.take() {
            Some(Some(asked)) if !is_whole => self.office.leave(self.id, asked),
            Some(_) => {
                if !self.is_done {
                    self.office.fail(self.id, 499, "its client is gone");
                }
                self.office.detach(self.id);
            }
            None => {}
        }
    }
}
