//! A channel from a tunnel to a body: one chunk at a time.
//!
//! In: chunks of a tunnel by POST. Out: a body. Bounded by its reader: the writer waits until the previous chunk is
//! taken.

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
    /// The writer was dropped without an end: the body is incomplete.
    broken: bool,
    reader_gone: bool,
    reader: Option<std::task::Waker>,
    writer: Option<std::task::Waker>,
}

/// The reading end: a body.
pub struct ChannelBody(Rc<RefCell<Channel>>);

/// The writing end.
pub struct ChannelSender(Rc<RefCell<Channel>>);

/// Creates a channel.
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
            return Poll::Ready(Some(Err(Error::ClientGone("the tunnel broke".to_owned()))));
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
    /// Ready when a chunk may be sent; an error if the reader was dropped.
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

    /// Sends a chunk. Only after `poll_ready` was ready.
    pub fn send(&self, chunk: Bytes) {
        let mut channel = self.0.borrow_mut();
        channel.chunk = Some(chunk);
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}

impl ChannelSender {
    /// Ends the body cleanly.
    pub fn finish(self) {
        self.0.borrow_mut().ended = true;
    }
}

impl Drop for ChannelSender {
    /// Marks the body as broken unless it was ended, so that its reader does not take it for complete.
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.broken = !channel.ended;
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}
