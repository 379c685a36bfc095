//! A body that a tunnel writes and an exchange sends: one chunk at a time.
//!
//! In: chunks of a tunnel that is carried in bodies (POST). Out: a body. Bounded by its reader: the
//! writer waits until the chunk before is taken.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;

use crate::error::Error;

/// A body that a tunnel writes: one chunk at a time, so that it is bounded by its reader.
#[derive(Default)]
struct Channel {
    chunk: Option<Bytes>,
    ended: bool,
    /// The writer gave up: what was sent is not the whole.
    broken: bool,
    reader_gone: bool,
    reader: Option<std::task::Waker>,
    writer: Option<std::task::Waker>,
}

/// The reading end: a body.
pub(crate) struct ChannelBody(Rc<RefCell<Channel>>);

/// The writing end.
pub(crate) struct ChannelSender(Rc<RefCell<Channel>>);

/// A body and its writer.
pub(crate) fn channel() -> (ChannelSender, ChannelBody) {
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
    /// Ready where a chunk may be sent; an error where nobody reads any more.
    pub(crate) fn poll_ready(&self, cx: &Context<'_>) -> Poll<std::io::Result<()>> {
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

    /// Sends a chunk. Only after `poll_ready` said so.
    pub(crate) fn send(&self, chunk: Bytes) {
        let mut channel = self.0.borrow_mut();
        channel.chunk = Some(chunk);
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}

impl ChannelSender {
    /// An orderly end.
    pub(crate) fn finish(self) {
        self.0.borrow_mut().ended = true;
    }
}

impl Drop for ChannelSender {
    /// Without an orderly end the reader must not take what it has for the whole.
    fn drop(&mut self) {
        let mut channel = self.0.borrow_mut();
        channel.broken = !channel.ended;
        if let Some(reader) = channel.reader.take() {
            reader.wake();
        }
    }
}
