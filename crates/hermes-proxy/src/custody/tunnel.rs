//! A TCP stream whose two ends may be up at different times: its bytes are in custody, each direction as one byte
//! stream.
//!
//! In: bytes of the client, or of the server. Out: those of the other side. The client's end is open before there is
//! any path; the head of the response later reports the outcome of the dial. Never: a second dial. A restart of the
//! node at either end ends the stream, because the state of its socket is lost.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_wire::binary_http::{Control, Part as Piece};
use hermes_wire::custody::{Direction, ExchangeId};

use super::message::{CustodyBody, chunk, end};
use hermes_custody::service::CustodyService;
use hermes_transport::body::BoxedBody;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::BoxedStream;

/// An end of such a stream.
pub(crate) struct CustodyStream {
    office: Arc<CustodyService>,
    id: ExchangeId,
    /// The direction that this end writes.
    writes: Direction,
    reads: CustodyBody,
    /// Bytes that custody has not yet accepted.
    pending: Option<(Bytes, bool)>,
    has_read_end: bool,
    has_written_end: bool,
}

impl CustodyStream {
    /// Creates an end. `head` is written before all other bytes.
    pub(crate) fn new(
        office: Arc<CustodyService>,
        id: ExchangeId,
        writes: Direction,
        head: Bytes,
        reads: CustodyBody,
    ) -> Self {
        let pending = Some((head, false));
        Self { office, id, writes, reads, pending, has_read_end: false, has_written_end: false }
    }
}

impl BoxedStream for CustodyStream {
    /// Binds it to its session.
    fn bind(&self, session: &Rc<SessionEntry>) {
        self.reads.bind(session);
    }

    /// Writes the pending bytes.
    fn poll_carrier(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some((bytes, is_last)) = &self.pending else { return Poll::Ready(Ok(())) };
        let taken = self.office.poll_append(cx, self.id, self.writes, bytes, *is_last);
        ready!(taken).map_err(|failure| broken(&failure.reason))?;
        self.has_written_end |= *is_last;
        self.pending = None;
        Poll::Ready(Ok(()))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        while !self.has_read_end {
            match ready!(self.reads.poll_piece(cx)) {
                Some(Ok(Piece::Content(bytes))) => return Poll::Ready(Ok(Some(bytes))),
                Some(Ok(Piece::Head(Control::Response { status }, _))) if !(200..300).contains(&status) => {
                    let reason = format!("the far end could not be reached: status {status}");
                    self.office.fail(self.id, status, &reason);
                    return Poll::Ready(Err(broken(&reason)));
                }
                Some(Ok(Piece::Head(..))) => {}
                Some(Ok(Piece::End(_))) => {
                    // Reading past the end makes custody acknowledge it to the previous node.
                    while let Poll::Ready(Some(Ok(_))) = self.reads.poll_piece(cx) {}
                    self.has_read_end = true;
                }
                Some(Err(error)) => return Poll::Ready(Err(broken(&error.to_string()))),
                None => return Poll::Ready(Err(broken("it is cut off"))),
            }
        }
        Poll::Ready(Ok(None))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        // Bytes of earlier writes come first; they may be the head.
        ready!(self.poll_carrier(cx))?;
        if !bytes.is_empty() {
            self.pending = Some((chunk(bytes), false));
            bytes.clear();
        }
        self.poll_carrier(cx)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_carrier(cx))?;
        if !self.has_written_end {
            self.pending = Some((end(None), true));
        }
        self.poll_carrier(cx)
    }

    fn abort(&mut self) {
        if !(self.has_read_end && self.has_written_end) {
            let who = if self.writes == Direction::Request { "client" } else { "server" };
            self.office.fail(self.id, 502, &format!("the {who} reset the stream"));
        }
    }
}

impl Drop for CustodyStream {
    fn drop(&mut self) {
        self.abort();
        self.office.detach(self.id);
    }
}

fn broken(reason: &str) -> io::Error {
    io::Error::other(reason.to_owned())
}
