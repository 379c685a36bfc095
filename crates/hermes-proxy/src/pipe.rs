//! A body into an h2 stream, at the pace of the stream's window.
//!
//! In: a body. Out: DATA frames, trailers, END_STREAM. Holds at most one frame of the body beyond
//! the window. Both directions use it: requests to an upstream, responses to a client.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http_body::Body as HttpBody;

use crate::error::Error;
use crate::headers;

/// A body on its way into a stream.
pub(crate) struct Pipe<B> {
    body: B,
    stream: SendStream<Bytes>,
    done: bool,
    blocked: bool,
}

/// How a pipe failed.
#[derive(Debug)]
pub(crate) enum PipeError {
    /// The body broke: its source is at fault. The stream was reset.
    Source(Error),
    /// The stream broke: its reader is at fault.
    Sink(h2::Error),
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> Pipe<B> {
    pub(crate) fn new(body: B, stream: SendStream<Bytes>) -> Self {
        Self { body, stream, done: false, blocked: false }
    }

    /// The reader's window is shut: progress is up to it.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Moves what can be moved. Ready when the whole body is in the stream, or cannot be.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), PipeError>> {
        if self.done {
            return Poll::Ready(Ok(()));
        }
        loop {
            let window = self.poll_window(cx);
            self.blocked = window.is_pending();
            ready!(window).map_err(PipeError::Sink)?;
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if self.send(frame).map_err(PipeError::Sink)? {
                        return Poll::Ready(Ok(()));
                    }
                }
                Some(Err(error)) => {
                    self.stream.send_reset(Reason::INTERNAL_ERROR);
                    self.done = true;
                    return Poll::Ready(Err(PipeError::Source(error)));
                }
                None => {
                    self.done = true;
                    self.stream.send_data(Bytes::new(), true).map_err(PipeError::Sink)?;
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    /// Ready where the window has room for one byte at least.
    fn poll_window(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        self.stream.reserve_capacity(1);
        while self.stream.capacity() == 0 {
            match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Err(Reason::CANCEL.into())),
            }
        }
        match self.stream.poll_reset(cx) {
            Poll::Ready(Ok(reason)) => Poll::Ready(Err(reason.into())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }

    /// True where that was the last frame.
    fn send(&mut self, frame: http_body::Frame<Bytes>) -> Result<bool, h2::Error> {
        let frame = match frame.into_data() {
            Ok(data) => {
                self.done = self.body.is_end_stream();
                self.stream.send_data(data, self.done)?;
                return Ok(self.done);
            }
            Err(frame) => frame,
        };
        if let Ok(mut trailers) = frame.into_trailers() {
            headers::strip_trailers(&mut trailers);
            self.done = true;
            self.stream.send_trailers(trailers)?;
        }
        Ok(self.done)
    }
}

impl<B> Drop for Pipe<B> {
    fn drop(&mut self) {
        if !self.done {
            // Said aloud: h2 would send CANCEL too, but only where the other half is dropped as well.
            self.stream.send_reset(Reason::CANCEL);
        }
    }
}
