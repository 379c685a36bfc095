//! Writes a body into a multiplexed stream, within the stream's flow-control window.
//!
//! In: a body. Out: DATA frames, trailers, END_STREAM. Small chunks that are available together share one frame. The
//! writer stores at most one frame that the window does not accept yet. It sends requests to an upstream and responses
//! to a client.

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

/// The maximum number of frames that one poll writes before other tasks of the worker run.
const FRAMES_A_TURN: usize = 64;

/// A body that is written into a stream.
pub struct BodyWriter<B> {
    body: B,
    stream: Sender,
    /// The rest of a chunk that the flow-control window has not accepted yet.
    chunk: Bytes,
    /// The frame, error or end (`Some(None)`) that the body returned after small chunks; it is processed next.
    next: Option<Option<Result<Frame<Bytes>, Error>>>,
    /// The body has ended, and `chunk` is the rest of its last chunk.
    ended: bool,
    /// The whole body is in the stream, or the body failed.
    done: bool,
    blocked: bool,
}

/// The failure of a [`BodyWriter`].
#[derive(Debug)]
pub enum BodyWriteError {
    /// The body could not be read to its end. The stream was reset.
    Source(Error),
    /// The stream could not be written, because its receiver or its connection failed.
    Sink(StreamError),
}

impl<B: HttpBody<Data = Bytes, Error = Error> + Unpin> BodyWriter<B> {
    pub fn new(body: B, stream: Sender) -> Self {
        Self { body, stream, chunk: Bytes::new(), next: None, ended: false, done: false, blocked: false }
    }

    /// True if the last poll waited for the receiver of the stream, for example for its flow-control window.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Writes as much as the stream accepts. Ready when the stream has accepted the whole body, or when the body or the
    /// stream failed.
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

    /// Returns the next frame of the body. Small chunks that are available together are coalesced into one frame.
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
            // An explicit reset: h2 itself sends CANCEL only once the receiving half of the stream is dropped too.
            self.stream.reset(Reset::Cancel);
        }
    }
}

/// The time within which a client must read the response of a session that ended before the response was sent.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Sends the body of a response to a client, until the body is complete or the session ends.
pub async fn pass(body: ResponseBody, stream: Sender) {
    let (worker, entry) = (body.worker().clone(), body.entry().clone());
    // If the session has already ended, this response reports the reason. The client has less time to read it, and none
    // if the session ended because a limit was reached.
    let mut last_words = entry.end.get().map(|error| {
        let patience = if matches!(error, Error::Limit(_)) { Duration::ZERO } else { LAST_WORDS };
        (error, Box::pin(tokio::time::sleep(patience)))
    });
    let mut pipe = BodyWriter::new(body, stream);
    let result = std::future::poll_fn(|cx| {
        // While the client reads nothing, the body is not polled and cannot notice that the session was ended.
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
