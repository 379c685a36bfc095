//! A body on its way into a string.
//!
//! In: a head, and a body's frames. Out: bytes that custody takes, piece by piece, as it has room; what is small goes as
//! one.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_wire::custody::{ExchangeId, Part};
use http_body::{Body as HttpBody, Frame};

use super::{chunk, end};
use crate::error::Error;
use crate::live::Entry;
use hermes_custody::service::Office;

/// Brings a body as what follows a head, until all of it is taken.
pub(in crate::custody) struct Writing<B> {
    office: Arc<Office>,
    id: ExchangeId,
    part: Part,
    body: B,
    /// Goes before what comes next of the body, if that is there: what is small is one piece.
    head: Option<Bytes>,
    /// What is to be taken next, and whether that is the end.
    next: Option<(Bytes, bool)>,
    is_over: bool,
    entry: Option<Rc<Entry>>,
}

/// How a body was not brought.
pub(in crate::custody) enum Unwritten {
    /// It broke.
    Body(Error),
    /// The exchange is over.
    Over,
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> Writing<B> {
    /// What comes first is this head.
    pub(in crate::custody) fn new(office: Arc<Office>, id: ExchangeId, part: Part, head: Bytes, body: B) -> Self {
        Self { office, id, part, body, head: Some(head), next: None, is_over: false, entry: None }
    }

    /// It is this session's, which has patience.
    pub(in crate::custody) fn bound(mut self, entry: &Rc<Entry>) -> Self {
        self.entry = Some(entry.clone());
        self
    }

    pub(in crate::custody) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Unwritten>> {
        loop {
            if let Some((bytes, is_last)) = &self.next {
                let taken = self.office.poll_append(cx, self.id, self.part, bytes, *is_last);
                if let Some(entry) = &self.entry {
                    entry.set_held(taken.is_pending());
                }
                ready!(taken).map_err(|_| Unwritten::Over)?;
                self.is_over = *is_last;
                self.next = None;
            }
            if self.is_over {
                return Poll::Ready(Ok(()));
            }
            let (bytes, is_last) = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) if frame.data_ref().is_some_and(Bytes::is_empty) => continue,
                Poll::Ready(Some(Ok(frame))) => self.framed(frame),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Unwritten::Body(error))),
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

    /// A piece of the body, and whether it is the last one.
    fn framed(&self, frame: Frame<Bytes>) -> (Bytes, bool) {
        match frame.into_data() {
            // With its end, where that is known: who reads so far knows that it is whole.
            Ok(data) if self.body.is_end_stream() => ([chunk(&data), end(None)].concat().into(), true),
            Ok(data) => (chunk(&data), false),
            Err(frame) => (end(frame.trailers_ref()), true),
        }
    }
}
