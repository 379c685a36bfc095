//! The content of a message, read from a string that comes.
//!
//! In: a string whose head was read. Out: pieces, frames, and the end that they must have: a message that is longer or
//! shorter than its head says comes to nothing. Its drop says what becomes of what nobody has read.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_wire::binary_http::Part as Piece;
use hermes_wire::custody::{ExchangeId, Part};
use http_body::{Frame, SizeHint};

use super::{Reading, headers};
use crate::error::Error;
use crate::live::Entry;
use hermes_custody::service::{Failure, Office};

/// Bytes that are read at once.
const READ: usize = 64 << 10;

/// The content of a message that comes as a string.
pub(crate) struct CustodyBody {
    office: Arc<Office>,
    id: ExchangeId,
    part: Part,
    reading: Reading,
    /// Whose session waits for it.
    entry: OnceCell<Rc<Entry>>,
    peer: Arc<str>,
    length: Option<u64>,
    /// The exchange is known to end here.
    is_taken_in: bool,
    /// The string has been read to its end.
    is_read: bool,
    is_done: bool,
    /// Somebody has to read it to its end. What its client had asked, where it may ask that again.
    owed: Option<Option<Bytes>>,
    /// Goes with it.
    _with: Option<Uploading>,
    /// A piece that was read already.
    ahead: Option<Piece>,
}

/// Brings the rest of a request; its drop ends that.
pub(in crate::custody) struct Uploading(pub(in crate::custody) tokio::task::AbortHandle);

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl CustodyBody {
    /// What is left of a string whose head was read.
    pub(in crate::custody) fn new(
        office: Arc<Office>,
        id: ExchangeId,
        part: Part,
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
            is_taken_in: part == Part::Response,
            is_read: false,
            is_done: false,
            owed: None,
            _with: None,
            ahead: None,
        }
    }

    /// All of the string was read before.
    pub(in crate::custody) fn having_read_all(mut self, is_read: bool) -> Self {
        self.is_read = is_read;
        self
    }

    /// That the exchange ends here is known already.
    pub(in crate::custody) fn taken_in(mut self) -> Self {
        self.is_taken_in = true;
        self
    }

    /// This piece was read before.
    pub(in crate::custody) fn behind(mut self, ahead: Option<Piece>) -> Self {
        self.ahead = ahead;
        self
    }

    /// Of a session whose client is to have it: where the client goes, the exchange comes to nothing, or is kept for one
    /// that asks the same.
    pub(in crate::custody) fn owed(mut self, asked: Option<Bytes>, with: Option<Uploading>) -> Self {
        (self.owed, self._with) = (Some(asked), with);
        self
    }

    /// It is this session's, which has patience.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        // It is bound once.
        let _ = self.entry.set(session.clone());
    }

    /// So much of it comes, as its head says.
    pub(in crate::custody) fn expect(&mut self, length: Option<u64>) {
        self.length = length;
    }

    /// What is known of its length.
    pub(crate) fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }

    /// The next piece of the message; `None` behind its end.
    pub(in crate::custody) fn poll_piece(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
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
                self.office.take_in(self.id, false);
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
        let reason = format!("{} holds no message: {why}", self.peer);
        self.office.fail(self.id, 502, &reason);
        self.failed(&Failure { status: 502, reason: Arc::from(reason) })
    }

    fn failed(&mut self, failure: &Failure) -> Error {
        self.is_done = true;
        match self.part {
            Part::Request => Error::ClientGone(failure.reason.to_string()),
            Part::Response => Error::custody(&self.peer, failure),
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
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
                            None => return Poll::Ready(Some(Err(self.malformed("it is longer than it says")))),
                        }
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // Its own head, where it was read before by others.
                Some(Ok(Piece::Head(..))) => {}
                Some(Ok(Piece::End(_))) if self.length.is_some_and(|left| left > 0) => {
                    return Poll::Ready(Some(Err(self.malformed("it is shorter than it says"))));
                }
                Some(Ok(Piece::End(fields))) => {
                    // Whoever brought it hears that it is held.
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

    /// Its content is whole, and nobody may ask for more of it: its end is taken along, if it is there.
    fn read_end(&mut self, cx: &Context<'_>) {
        if let Poll::Ready(Some(Ok(piece))) = self.poll_piece(cx) {
            match piece {
                // There is nothing behind it; whoever brought it hears that it is held.
                Piece::End(fields) if fields.is_empty() => {
                    while let Poll::Ready(Some(Ok(_))) = self.poll_piece(cx) {}
                    self.is_done = true;
                }
                other => self.ahead = Some(other),
            }
        }
    }

    /// All of it was read.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }
}

impl Drop for CustodyBody {
    fn drop(&mut self) {
        // Of a content that is whole nothing is missing but its end, which nobody waits for.
        let is_whole = self.is_done || self.length == Some(0);
        match self.owed.take() {
            Some(Some(asked)) if !is_whole => self.office.leave(self.id, asked),
            Some(_) => {
                if !self.is_done {
                    self.office.fail(self.id, 499, "its client is gone");
                }
                self.office.part(self.id);
            }
            None => {}
        }
    }
}
