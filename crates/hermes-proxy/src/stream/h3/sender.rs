//! The sending half of an HTTP/3 stream.
//!
//! In: heads, chunks, trailers. Out: frames, at the pace of the peer's windows. Dropped before its end it says that it
//! was broken off, where quinn would end it in order.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic;
use hermes_wire::h3::{self, Code};
use http::HeaderMap;

use crate::error::Oversize;
use crate::h3::fields::{self, Encoded};
use crate::h3::{Link, link::number};
use crate::stream::halves::{Reset, StreamError};

type Stopped = Pin<Box<dyn Future<Output = Result<Option<quic::VarInt>, quic::StoppedError>>>>;

/// The sending half.
pub(crate) struct Sender {
    send: quic::SendStream,
    link: Rc<Link>,
    /// What goes before anything else: heads, and what was sent whatever the peer takes.
    queue: VecDeque<Bytes>,
    /// Of the DATA frame that has begun what was not sent yet.
    missing: usize,
    /// The stream ends behind the queue.
    ends: bool,
    has_finished: bool,
    ended_in_order: Rc<Cell<bool>>,
    /// Becomes ready when the peer wants no more.
    stopped: Option<Stopped>,
}

impl Sender {
    pub(crate) fn new(send: quic::SendStream, link: Rc<Link>) -> Self {
        let ended_in_order = Rc::default();
        let queue = VecDeque::new();
        Self { send, link, queue, missing: 0, ends: false, has_finished: false, ended_in_order, stopped: None }
    }

    pub(crate) fn link(&self) -> &Rc<Link> {
        &self.link
    }

    /// The stream's number.
    pub(crate) fn id(&self) -> u64 {
        self.send.id().into()
    }

    /// Ready where the peer has received all; to be asked once this is through. One that was reset is ready at once.
    pub(crate) fn delivered(&self) -> impl Future<Output = ()> + use<> {
        let (stopped, in_order) = (self.send.stopped(), self.ended_in_order.clone());
        async move {
            if in_order.get() {
                drop(stopped.await);
            }
        }
    }

    /// A head, behind what waits.
    ///
    /// # Errors
    /// The peer takes none as large: nothing of it is sent.
    pub(crate) fn send_head(&mut self, head: Encoded, ends: bool) -> Result<(), Oversize> {
        let most = self.link.settings().and_then(|settings| settings.max_field_section);
        self.push_frame(h3::HEADERS, head.within(most)?);
        self.ends |= ends;
        Ok(())
    }

    fn push_frame(&mut self, kind: u64, payload: Bytes) {
        let mut head = BytesMut::with_capacity(h3::MAX_FRAME_HEADER);
        h3::put_header(kind, payload.len(), &mut head);
        self.queue.push_back(head.freeze());
        if !payload.is_empty() {
            self.queue.push_back(payload);
        }
    }

    /// Ready where something may be sent: nothing waits.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        while !self.queue.is_empty() {
            let chunks = self.queue.make_contiguous();
            let written = ready!(pin!(self.send.write_chunks(chunks)).poll(cx));
            let written = written.map_err(|error| self.write_error(error))?;
            drop(self.queue.drain(..written.chunks));
        }
        Poll::Ready(Ok(()))
    }

    /// As `poll_room`, and the end is said where it was to be.
    pub(crate) fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        ready!(self.poll_room(cx))?;
        if self.ends && !std::mem::replace(&mut self.has_finished, true) {
            self.send.finish().map_err(|error| StreamError::other(error.to_string()))?;
            self.ended_in_order.set(true);
        }
        Poll::Ready(Ok(()))
    }

    /// Sends what the peer takes of a chunk; what is left of it has to be given again. `ends` with the
    /// stream's end behind it.
    pub(crate) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunk: &mut Bytes,
        ends: bool,
    ) -> Poll<Result<(), StreamError>> {
        if self.missing == 0 && !chunk.is_empty() {
            let mut head = BytesMut::with_capacity(h3::MAX_FRAME_HEADER);
            h3::put_header(h3::DATA, chunk.len(), &mut head);
            self.queue.push_back(head.freeze());
            self.missing = chunk.len();
        }
        ready!(self.poll_room(cx))?;
        while !chunk.is_empty() {
            let mut chunks = [std::mem::take(chunk)];
            let written = pin!(self.send.write_chunks(&mut chunks)).poll(cx);
            let [rest] = chunks;
            *chunk = rest;
            let written = ready!(written).map_err(|error| self.write_error(error))?;
            self.missing = self.missing.saturating_sub(written.bytes);
        }
        self.ends |= ends;
        self.poll_settled(cx)
    }

    /// Sends a chunk whatever the peer takes.
    pub(crate) fn send(&mut self, chunk: Bytes, ends: bool) {
        if !chunk.is_empty() {
            self.push_frame(h3::DATA, chunk);
        }
        self.ends |= ends;
    }

    /// Ends the stream with trailers.
    ///
    /// # Errors
    /// The peer takes none as large. The stream has not ended then, so that nobody takes the message for whole.
    pub(crate) fn send_trailers(&mut self, trailers: &HeaderMap) -> Result<(), Oversize> {
        self.send_head(fields::put_trailers(trailers), true)
    }

    /// The peer wants no more. Pending as long as it did not say so.
    pub(crate) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        if self.has_finished {
            return Poll::Pending;
        }
        let send = &self.send;
        let stopped = self.stopped.get_or_insert_with(|| Box::pin(send.stopped()));
        match ready!(stopped.as_mut().poll(cx)) {
            Ok(Some(code)) => Poll::Ready(StreamError::of_code(code.into_inner())),
            // All of it was received: there is nothing to reset any more.
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(StreamError::of_connection(error.to_string())),
        }
    }

    /// Breaks it off.
    pub(crate) fn reset(&mut self, reset: Reset) {
        self.reset_with(reset.h3());
    }

    /// Breaks it off with this code.
    pub(crate) fn reset_with(&mut self, code: Code) {
        self.has_finished = true;
        self.ended_in_order.set(false);
        let _ = self.send.reset(number(code));
    }

    fn write_error(&self, error: quic::WriteError) -> StreamError {
        match error {
            quic::WriteError::Stopped(code) => StreamError::of_code(code.into_inner()),
            quic::WriteError::ConnectionLost(error) => self.link.lost(self.id(), &error),
            other => StreamError::other(other.to_string()),
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // quinn would end it in order.
        if !self.has_finished {
            let _ = self.send.reset(number(Code::RequestCancelled));
        }
    }
}
