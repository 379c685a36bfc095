//! Writes a body into a byte stream of custody.
//!
//! In: a head, and a body's frames. Out: bytes, as custody has room for them; small pieces are coalesced.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_wire::custody::{Direction, ExchangeId};
use http_body::{Body as HttpBody, Frame};

use super::{chunk, end};
use hermes_custody::service::CustodyService;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// A body that is written after a head, until custody has accepted all of it.
pub(crate) struct Writing<B> {
    office: Arc<CustodyService>,
    id: ExchangeId,
    part: Direction,
    body: B,
    /// The head, which is sent together with the first frame if that is available.
    head: Option<Bytes>,
    /// The bytes that custody should accept next, and whether they are the last.
    next: Option<(Bytes, bool)>,
    is_over: bool,
    entry: Option<Rc<SessionEntry>>,
}

/// The reason why a body was not written.
pub(crate) enum WriteError {
    /// The body failed.
    Body(Error),
    /// The exchange has ended.
    Over,
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> Writing<B> {
    /// Writes this head first.
    pub(crate) fn new(office: Arc<CustodyService>, id: ExchangeId, part: Direction, head: Bytes, body: B) -> Self {
        Self { office, id, part, body, head: Some(head), next: None, is_over: false, entry: None }
    }

    /// Binds it to a session, which is not subject to timeouts while custody waits.
    pub(crate) fn bound(mut self, entry: &Rc<SessionEntry>) -> Self {
        self.entry = Some(entry.clone());
        self
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WriteError>> {
        loop {
            if let Some((bytes, is_last)) = &self.next {
                let taken = self.office.poll_append(cx, self.id, self.part, bytes, *is_last);
                if let Some(entry) = &self.entry {
                    entry.set_held(taken.is_pending());
                }
                ready!(taken).map_err(|_| WriteError::Over)?;
                self.is_over = *is_last;
                self.next = None;
            }
            if self.is_over {
                return Poll::Ready(Ok(()));
            }
            let (bytes, is_last) = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) if frame.data_ref().is_some_and(Bytes::is_empty) => continue,
                Poll::Ready(Some(Ok(frame))) => self.framed(frame),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(WriteError::Body(error))),
                Poll::Ready(None) => (end(None), true),
                Poll::Pending if self.head.is_none() => return Poll::Pending,
                Poll::Pending => (Bytes::new(), false),
            };
            self.next = Some(match self.head.take() {
                Some(head) => ([&head[..], &bytes].concat().into(), is_last),
                None => (bytes, is_last),
            });
        }
    }

    /// A frame of the body, encoded, and whether it is the last.
    fn framed(&self, frame: Frame<Bytes>) -> (Bytes, bool) {
        match frame.into_data() {
            // The end of the stream is written with the last chunk, so that the reader of this chunk sees that the body
            // is complete.
            Ok(data) if self.body.is_end_stream() => ([chunk(&data), end(None)].concat().into(), true),
            Ok(data) => (chunk(&data), false),
            Err(frame) => (end(frame.trailers_ref()), true),
        }
    }
}
