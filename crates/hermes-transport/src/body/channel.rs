//! A channel that passes the bytes of a tunnel by POST to the body of the request, one chunk at a time.
//!
//! In: chunks of the tunnel. Out: the body. The channel stores at most one chunk: the writer waits until the reader has
//! received it.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;

use crate::error::Error;

/// The shared state of a channel.
#[derive(Default)]
struct Channel {
    chunk: Option<Bytes>,
    ended: bool,
    /// The writer was dropped without a call of `finish`, so the body is incomplete.
    broken: bool,
    /// Why it is.
    failure: Option<Error>,
    reader_gone: bool,
    reader: Option<std::task::Waker>,
    writer: Option<std::task::Waker>,
}

/// The receiving side of a [`channel`], which is polled as a body.
pub struct ChannelBody(Rc<RefCell<Channel>>);

/// The sending side of a [`channel`].
pub struct ChannelSender(Rc<RefCell<Channel>>);

/// Creates a channel that stores at most one chunk.
pub fn channel() -> (ChannelSender, ChannelBody) {
    let shared = Rc::new(RefCell::new(Channel::default()));
    (ChannelSender(shared.clone()), ChannelBody(shared))
}

impl ChannelBody {
    pub(super) fn poll_frame(&self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut channel = self.0.borrow_mut();
        if let Some(chunk) = channel.chunk.take() {
            if let Some(writer) = channel.writer.take() {
                writer.wake();
            }
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        if channel.broken {
            let failure = channel.failure.take();
            return Poll::Ready(Some(Err(failure.unwrap_or_else(|| Error::ClientGone("the tunnel broke".to_owned())))));
        }
        if channel.ended {
            return Poll::Ready(None);
        }
        channel.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for ChannelBody {
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.reader_gone = true;
        if let Some(writer) = channel.writer.take() {
            writer.wake();
        }
    }
}

impl ChannelSender {
    /// Ready when [`Self::send`] may be called. Returns an error if the reader was dropped.
    pub fn poll_ready(&self, cx: &Context<'_>) -> Poll<std::io::Result<()>> {
        let mut channel = self.0.borrow_mut();
        if channel.reader_gone {
            return Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into()));
        }
        if channel.chunk.is_none() {
            return Poll::Ready(Ok(()));
        }
        channel.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Ready when the reader was dropped. It keeps the waker in the place of [`Self::poll_ready`].
    pub fn poll_reader_gone(&self, cx: &Context<'_>) -> Poll<()> {
        let mut channel = self.0.borrow_mut();
        if channel.reader_gone {
            return Poll::Ready(());
        }
        channel.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Sends a chunk. The caller must have seen `poll_ready` return `Ready(Ok(()))`: otherwise this chunk replaces one
    /// that the reader has not received.
    pub fn send(&self, chunk: Bytes) {
        let mut channel = self.0.borrow_mut();
        channel.chunk = Some(chunk);
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}

impl ChannelSender {
    /// Breaks the body off with this error.
    pub fn fail(self, error: Error) {
        self.0.borrow_mut().failure = Some(error);
    }

    /// Ends the body cleanly.
    pub fn finish(self) {
        self.0.borrow_mut().ended = true;
    }
}

impl Drop for ChannelSender {
    /// Marks the body as incomplete, unless [`Self::finish`] was called. Its reader then receives an error.
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.broken = !channel.ended;
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}
