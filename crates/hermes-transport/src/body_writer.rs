//! Writes a body into a multiplexed stream, within the stream's flow-control window.
//!
//! In: a body. Out: DATA frames, trailers, END_STREAM. Small chunks that are available together share one frame. It
//! holds at most one frame of the body beyond the window. Both directions use it: requests to an upstream, responses to
//! a client.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};

use crate::body::ResponseBody;
use crate::error::Error;
use crate::headers;
use crate::runtime::session::Phase;
use crate::stream::h2::{Coalesced, GATHER, SMALL};
use crate::stream::{Reset, Sender, StreamError};

/// The limit of frames before other tasks of the worker run.
const FRAMES_A_TURN: usize = 64;

/// A body that is written into a stream.
pub struct BodyWriter<B> {
    body: B,
    stream: Sender,
    /// The rest of a chunk that the window has not taken yet.
    chunk: Bytes,
    /// The frame, error or end that followed small chunks.
    next: Option<Option<Result<Frame<Bytes>, Error>>>,
    /// The body has ended; `chunk` is its last.
    ended: bool,
    /// The whole body is in the stream, or the body failed.
    done: bool,
    blocked: bool,
}

/// The failure of a pipe.
#[derive(Debug)]
pub enum BodyWriteError {
    /// The body failed: its source is at fault. The stream was reset.
    Source(Error),
    /// The stream failed: its reader is at fault.
    Sink(StreamError),
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> BodyWriter<B> {
    pub fn new(body: B, stream: Sender) -> Self {
        Self { body, stream, chunk: Bytes::new(), next: None, ended: false, done: false, blocked: false }
    }

    /// True if the reader takes nothing: it owes progress.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Writes as much as the stream accepts. Ready when the stream has the whole body, or when the body or the stream
    /// failed.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyWriteError>> {
        for _ in 0..FRAMES_A_TURN {
            if self.done {
                let settled = self.stream.poll_settled(cx);
                self.blocked = settled.is_pending();
                return settled.map_err(BodyWriteError::Sink);
            }
            let room = match self.chunk.is_empty() {
                true => self.stream.poll_room(cx),
                false => self.stream.poll_send(cx, &mut self.chunk, self.ended),
            };
            self.blocked = room.is_pending();
            ready!(room).map_err(BodyWriteError::Sink)?;
            if self.ended {
                self.done = true;
                continue;
            }
            if let Poll::Ready(error) = self.stream.poll_reset(cx) {
                return Poll::Ready(Err(BodyWriteError::Sink(error)));
            }
            match ready!(self.poll_frame(cx)) {
                Some(Ok(frame)) => self.take(frame).map_err(BodyWriteError::Sink)?,
                Some(Err(error)) => {
                    self.stream.reset(Reset::Internal);
                    self.done = true;
                    return Poll::Ready(Err(BodyWriteError::Source(error)));
                }
                None => self.end().map_err(BodyWriteError::Sink)?,
            }
        }
        if self.done {
            return self.stream.poll_settled(cx).map_err(BodyWriteError::Sink);
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// The next frame of the body, with small chunks coalesced.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(next) = self.next.take() {
            return Poll::Ready(next);
        }
        let first = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if data.len() < SMALL && !self.body.is_end_stream() => data,
                Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Err(other) => return Poll::Ready(Some(Ok(other))),
            },
            other => return Poll::Ready(other),
        };
        let mut whole = Coalesced::from(first);
        while whole.byte_len() < GATHER && self.next.is_none() {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => whole.add(&data),
                    Err(other) => self.next = Some(Some(Ok(other))),
                },
                Poll::Ready(other) => self.next = Some(other),
                Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(Frame::data(whole.into_bytes()))))
    }

    fn take(&mut self, frame: Frame<Bytes>) -> Result<(), StreamError> {
        let frame = match frame.into_data() {
            Ok(data) => {
                self.ended = match self.next {
                    None => self.body.is_end_stream(),
                    Some(None) => true,
                    Some(Some(_)) => false,
                };
                self.chunk = data;
                return if self.ended && self.chunk.is_empty() { self.end() } else { Ok(()) };
            }
            Err(frame) => frame,
        };
        if let Ok(mut trailers) = frame.into_trailers() {
            headers::strip_trailers(&mut trailers);
            self.done = true;
            self.stream.send_trailers(trailers)?;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), StreamError> {
        self.done = true;
        self.stream.send(Bytes::new(), true)
    }
}

impl<B> Drop for BodyWriter<B> {
    fn drop(&mut self) {
        if !self.done {
            // An explicit reset: h2 itself sends CANCEL only once the other half is dropped too.
            self.stream.reset(Reset::Cancel);
        }
    }
}

/// The time for a client to read the response of a session that was already ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Sends the body of a response to a client, until it is complete or the session ends.
pub async fn pass(body: ResponseBody, stream: Sender) {
    let (worker, entry) = (body.worker().clone(), body.entry().clone());
    // If the session was already ended, this response reports that. It gets less time, and none if the session was
    // ended for the memory that it holds.
    let mut last_words = entry.end.get().map(|error| {
        let patience = if matches!(error, Error::Limit(_)) { Duration::ZERO } else { LAST_WORDS };
        (error, Box::pin(tokio::time::sleep(patience)))
    });
    let mut pipe = BodyWriter::new(body, stream);
    let result = std::future::poll_fn(|cx| {
        // A body whose client reads nothing is not polled, so the signal of the sweep is checked here.
        if last_words.is_none()
            && let Poll::Ready(error) = entry.end.poll(cx)
        {
            return Poll::Ready(Err(BodyWriteError::Source(error)));
        }
        let polled = pipe.poll(cx);
        entry.set_phase(&worker, if pipe.is_blocked() { Phase::Blocked } else { Phase::Open });
        if polled.is_pending()
            && let Some((error, timer)) = &mut last_words
            && timer.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(BodyWriteError::Source(error.clone())));
        }
        polled
    })
    .await;
    match result {
        Ok(()) => {}
        Err(BodyWriteError::Sink(error)) => entry.fail(&match error.oversize() {
            Some(oversize) => Error::AnswerTooLarge(oversize),
            None => Error::ClientGone(error.to_string()),
        }),
        Err(BodyWriteError::Source(error)) => entry.fail(&error),
    }
}
