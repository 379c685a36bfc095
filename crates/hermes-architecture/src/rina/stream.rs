//! The bytes of an allocated flow.
//!
//! In: a flow of an IPC process. Out: a byte stream with half-close. Never: the end of a direction before all its bytes.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_rina::FlowId;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::BoxedStream;

use super::process::IpcProcess;

/// A flow. Dropping it aborts it, unless both directions have ended.
pub(super) struct FlowStream {
    process: Rc<IpcProcess>,
    flow: FlowId,
    is_read: bool,
    is_finished: bool,
}

impl FlowStream {
    pub(super) fn new(process: Rc<IpcProcess>, flow: FlowId) -> Self {
        Self { process, flow, is_read: false, is_finished: false }
    }
}

impl BoxedStream for FlowStream {
    fn bind(&self, _: &Rc<SessionEntry>) {}

    fn poll_carrier(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let bytes = ready!(self.process.poll_read(cx, self.flow))?;
        self.is_read |= bytes.is_none();
        Poll::Ready(Ok(bytes))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        self.process.poll_write(cx, self.flow, chunk)
    }

    /// Ready at once: the engine delivers what was written, also after the stream was dropped.
    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_finished {
            self.process.finish(self.flow)?;
            self.is_finished = true;
        }
        Poll::Ready(Ok(()))
    }

    fn abort(&mut self) {
        self.is_finished = false;
        self.process.release(self.flow, false);
    }
}

impl Drop for FlowStream {
    fn drop(&mut self) {
        self.process.release(self.flow, self.is_read && self.is_finished);
    }
}
