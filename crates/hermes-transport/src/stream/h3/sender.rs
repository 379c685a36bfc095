//! The sending half of an HTTP/3 stream.
//!
//! In: heads, chunks, trailers. Out: frames, within the peer's flow-control windows. Dropping the half before its end
//! resets the stream, whereas quinn by itself would end it cleanly.

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
use crate::h3::{Link, connection::number};
use crate::stream_error::{Reset, StreamError};

type Stopped = Pin<Box<dyn Future<Output = Result<Option<quic::VarInt>, quic::StoppedError>>>>;

/// The sending half of an HTTP/3 stream.
pub struct Sender {
    send: quic::SendStream,
    link: Rc<Link>,
    /// Encoded bytes that are sent before any further chunk: frame headers, heads, and chunks that were queued
    /// regardless of the windows.
    queue: VecDeque<Bytes>,
    /// The number of unsent bytes of the current DATA frame.
    missing: usize,
    /// True if the stream ends after the queue.
    ends: bool,
    /// True once the stream was ended or reset.
    has_finished: bool,
    /// True once the stream was ended cleanly.
    ended_in_order: Rc<Cell<bool>>,
    /// Completes when the peer stops reading, or has received the whole stream.
    stopped: Option<Stopped>,
}

impl Sender {
    pub fn new(send: quic::SendStream, link: Rc<Link>) -> Self {
        let ended_in_order = Rc::default();
        let queue = VecDeque::new();
        Self { send, link, queue, missing: 0, ends: false, has_finished: false, ended_in_order, stopped: None }
    }

    pub fn link(&self) -> &Rc<Link> {
        &self.link
    }

    /// Returns the stream ID.
    pub fn id(&self) -> u64 {
        self.send.id().into()
    }

    /// Waits until the peer has acknowledged the whole stream, or stops reading. Called after the end of the stream.
    /// Returns at once if the stream was reset.
    pub fn delivered(&self) -> impl Future<Output = ()> + use<> {
        let (stopped, in_order) = (self.send.stopped(), self.ended_in_order.clone());
        async move {
            if in_order.get() {
                drop(stopped.await);
            }
        }
    }

    /// Queues a head. With `ends`, the stream ends after it.
    ///
    /// # Errors
    /// The head exceeds the peer's limit. Nothing of it is sent.
    pub fn send_head(&mut self, head: Encoded, ends: bool) -> Result<(), Oversize> {
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

    /// Sends the queue. Ready when it is empty, so that a chunk may be sent.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        while !self.queue.is_empty() {
            let chunks = self.queue.make_contiguous();
            let written = ready!(pin!(self.send.write_chunks(chunks)).poll(cx));
            let written = written.map_err(|error| self.write_error(error))?;
            drop(self.queue.drain(..written.chunks));
        }
        Poll::Ready(Ok(()))
    }

    /// Sends the queue, and ends the stream if its end is queued. Ready when the queue is empty.
    pub fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        ready!(self.poll_room(cx))?;
        if self.ends && !std::mem::replace(&mut self.has_finished, true) {
            self.send.finish().map_err(|error| StreamError::other(error.to_string()))?;
            self.ended_in_order.set(true);
        }
        Poll::Ready(Ok(()))
    }

    /// Sends as much of a chunk as the peer's windows permit, and removes it from the chunk. The caller passes the rest
    /// again. With `ends`, the stream ends after the chunk. Ready when the chunk is empty.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes, ends: bool) -> Poll<Result<(), StreamError>> {
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

    /// Queues a chunk regardless of the windows. With `ends`, the stream ends after it.
    pub fn send(&mut self, chunk: Bytes, ends: bool) {
        if !chunk.is_empty() {
            self.push_frame(h3::DATA, chunk);
        }
        self.ends |= ends;
    }

    /// Ends the stream with trailers.
    ///
    /// # Errors
    /// The trailers exceed the peer's limit. The stream then does not end, so that the peer does not accept the message
    /// as complete.
    pub fn send_trailers(&mut self, trailers: &HeaderMap) -> Result<(), Oversize> {
        self.send_head(fields::put_trailers(trailers), true)
    }

    /// Ready when the peer stops reading before the stream has ended (STOP_SENDING), or the connection fails.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        if self.has_finished {
            return Poll::Pending;
        }
        let send = &self.send;
        let stopped = self.stopped.get_or_insert_with(|| Box::pin(send.stopped()));
        match ready!(stopped.as_mut().poll(cx)) {
            Ok(Some(code)) => Poll::Ready(StreamError::of_code(code.into_inner())),
            // The peer has received the whole stream, so it cannot stop it any more.
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(StreamError::of_connection(error.to_string())),
        }
    }

    /// Resets the stream with the error code for this reason.
    pub fn reset(&mut self, reset: Reset) {
        self.reset_with(reset.h3());
    }

    /// Resets the stream with this error code.
    pub fn reset_with(&mut self, code: Code) {
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
        // quinn would end the stream cleanly.
        if !self.has_finished {
            let _ = self.send.reset(number(Code::RequestCancelled));
        }
    }
}
