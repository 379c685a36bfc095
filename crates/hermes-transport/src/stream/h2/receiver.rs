//! The receiving half of an HTTP/2 stream, and the window of its connection.
//!
//! In: the receiving half of h2. Out: chunks. Small frames are coalesced. Unread bytes are moved out of h2, because h2
//! counts unread frames and closes the whole connection if they are many. The window of a stream opens only when its
//! reader reads. The window of the connection grows by the bytes that remain unread for longer than a tick, so that its
//! other streams keep flowing. `limits.receive-buffer` bounds these bytes: see [`crate::runtime::receive_budget`].

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;

use super::end_stream::EndedStreams;
use super::{Coalesced, GATHER, SMALL};
use crate::oneshot::Oneshot;
use crate::runtime::WorkerContext;
use crate::runtime::receive_budget::{Account, SweptInbox, Unread};
use crate::runtime::session::SessionEntry;

/// The largest permitted flow-control window in bytes (RFC 9113, section 6.9.1).
const WIDEST: u64 = (1 << 31) - 1;

/// The flow-control window of one connection: its configured size plus the unread bytes of stalled streams.
pub struct Window {
    base: u32,
    /// The number of unread bytes of stalled streams.
    stalled: Cell<u64>,
    changed: Oneshot<()>,
    /// The streams that the peer ended before it reset them. Empty for a connection that this node accepted.
    ends: Rc<EndedStreams>,
}

impl Window {
    /// Returns a window with a configured size of `base` bytes.
    pub fn new(base: u32) -> Rc<Self> {
        Rc::new(Self { base, stalled: Cell::new(0), changed: Oneshot::default(), ends: Rc::default() })
    }

    /// Returns the state of the connection's streams, as its received frames show it.
    pub fn ends(&self) -> &Rc<EndedStreams> {
        &self.ends
    }

    /// Returns the configured size in bytes.
    pub fn base(&self) -> u32 {
        self.base
    }

    /// Returns the size in bytes that the window should have now. The polling task, which drives the connection, is
    /// woken when the size changes.
    pub fn poll_target(&self, cx: &Context<'_>) -> u32 {
        let _ = self.changed.poll(cx);
        (u64::from(self.base) + self.stalled.get()).min(WIDEST) as u32
    }

    fn restate(&self, before: u64, now: u64) {
        if before != now {
            self.stalled.set(self.stalled.get() + now - before);
            self.changed.nudge();
        }
    }
}

/// The bytes that were received on a stream and not yet read.
pub(super) struct Inbox {
    recv: RecvStream,
    /// The unread bytes that were moved out of h2. They still count against the windows of the stream and the
    /// connection. Stalled bytes enlarge the connection's window.
    account: Account,
    /// The error of h2, which is returned once the bytes in `account` are read.
    failed: Option<h2::Error>,
    /// The trailers that were moved out of h2.
    trailers: Option<HeaderMap>,
    window: Rc<Window>,
}

impl Inbox {
    /// Returns the next chunk of h2, or `None` at the end of the data.
    fn poll_recv(&mut self) -> Poll<Option<Result<Bytes, h2::Error>>> {
        self.account.notice.set_idle(true);
        let mut cx = Context::from_waker(&self.account.waker);
        loop {
            let polled = self.recv.poll_data(&mut cx);
            match &polled {
                // An empty DATA frame that only carries END_STREAM.
                Poll::Ready(Some(Ok(chunk))) if chunk.is_empty() => {}
                Poll::Ready(Some(_)) => {
                    self.account.notice.set_idle(false);
                    return polled;
                }
                Poll::Ready(None) | Poll::Pending => return polled,
            }
        }
    }

    /// Returns the next chunk of h2, which is never empty. A small chunk is coalesced with those that follow it.
    fn poll_data(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        self.account.notice.reader.register(cx.waker());
        let first = match ready!(self.poll_recv()) {
            Some(Ok(chunk)) if chunk.len() < SMALL && !self.recv.is_end_stream() => chunk,
            other => return Poll::Ready(other),
        };
        let mut whole = Coalesced::from(first);
        while whole.byte_len() < GATHER {
            match self.poll_recv() {
                Poll::Ready(Some(Ok(chunk))) => whole.add(&chunk),
                Poll::Ready(Some(Err(error))) => {
                    self.failed = Some(error);
                    break;
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(whole.into_bytes())))
    }

    /// Moves trailers that follow unread bytes out of h2. Trailers with too many lines are dropped, because their
    /// reader would refuse them.
    fn take_trailers(&mut self, worker: &WorkerContext) {
        let mut cx = Context::from_waker(&self.account.waker);
        if let Poll::Ready(Ok(Some(trailers))) = self.recv.poll_trailers(&mut cx) {
            if trailers.len() > worker.snapshot().limits.header_count {
                self.failed = Some(h2::Reason::ENHANCE_YOUR_CALM.into());
                return;
            }
            self.account.hold_head(worker, &trailers);
            self.trailers = Some(trailers);
        }
    }

    /// True if this error is a reset that the peer sent after its complete message.
    fn is_whole(&mut self, error: &h2::Error) -> bool {
        let stream = self.recv.stream_id().as_u32();
        error.reason() == Some(h2::Reason::NO_ERROR) && !error.is_go_away() && self.window.ends.is_whole(stream)
    }

    fn release(&mut self, bytes: usize, now: u64) {
        let _ = self.recv.flow_control().release_capacity(bytes);
        self.account.note_read(bytes, now);
        if self.account.stalled > 0 {
            self.restate(self.account.stalled.saturating_sub(bytes as u64));
        }
    }

    fn restate(&mut self, stalled: u64) {
        self.window.restate(std::mem::replace(&mut self.account.stalled, stalled), stalled);
    }
}

impl Unread for Inbox {
    fn sweep(&mut self, worker: &WorkerContext) {
        if self.account.is_quiet() {
            return;
        }
        let mut small = BytesMut::new();
        while self.failed.is_none()
            && let Poll::Ready(taken) = self.poll_recv()
        {
            match taken {
                // Short chunks are copied, because each chunk keeps its whole read buffer alive.
                Some(Ok(chunk)) if chunk.len() < GATHER && small.len() < GATHER => small.extend_from_slice(&chunk),
                Some(Ok(chunk)) => {
                    self.account.hold(small.split().freeze());
                    self.account.hold(chunk);
                }
                Some(Err(error)) => self.failed = Some(error),
                None => {
                    self.take_trailers(worker);
                    break;
                }
            }
        }
        self.account.hold(small.freeze());
        if self.account.is_forsaken() {
            // The dropped bytes count against the windows until the stream ends.
            self.account.drop_held();
            self.failed.get_or_insert(h2::Reason::CANCEL.into());
        }
        let lies = self.recv.flow_control().used_capacity() as u64;
        let stalled = self.account.count(lies);
        self.restate(stalled);
        if self.account.holds() {
            // A reader that h2 has woken may find h2 empty, because the bytes were moved to `account`.
            self.account.notice.reader.wake();
        }
    }

    fn account(&mut self) -> &mut Account {
        &mut self.account
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.restate(0);
    }
}

/// The receiving half of an HTTP/2 stream.
pub struct Receiver {
    inbox: SweptInbox<Inbox>,
}

impl Receiver {
    /// Wraps the receiving half of h2. `window` is the window of the stream's connection.
    pub fn new(worker: &Rc<WorkerContext>, recv: RecvStream, window: &Rc<Window>) -> Self {
        let inbox = Inbox { recv, account: Account::new(worker), failed: None, trailers: None, window: window.clone() };
        Self { inbox: SweptInbox::new(worker, inbox) }
    }

    /// Charges the unread bytes to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        self.inbox.bind(session);
    }

    /// Returns the next chunk, which is never empty and has at most `most` bytes, or `None` at the end. The windows
    /// open by its length.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let inbox = &mut *self.inbox.borrow_mut();
        let mut chunk = match inbox.account.take_held() {
            Some(chunk) => chunk,
            None => match ready!(inbox.poll_data(cx)) {
                Some(Ok(chunk)) => chunk,
                Some(Err(error)) if inbox.is_whole(&error) => return Poll::Ready(None),
                other => return Poll::Ready(other),
            },
        };
        if chunk.len() > most {
            inbox.account.hold_first(chunk.split_off(most));
        }
        inbox.release(chunk.len(), self.inbox.worker.now());
        Poll::Ready(Some(Ok(chunk)))
    }

    /// Returns the maximum number of lines in trailers.
    pub fn most_lines(&self) -> usize {
        self.inbox.worker.snapshot().limits.header_count
    }

    /// Returns the trailers, or `None` if the message has none. Called after the last chunk.
    pub fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        let inbox = &mut *self.inbox.borrow_mut();
        if let Some(trailers) = inbox.trailers.take() {
            return Poll::Ready(Ok(Some(trailers)));
        }
        // h2 is polled with the waker of `account`, as for data, because h2 stores one waker and the sweep uses that
        // one.
        inbox.account.notice.reader.register(cx.waker());
        let polled = inbox.recv.poll_trailers(&mut Context::from_waker(&inbox.account.waker));
        match ready!(polled) {
            Err(error) if inbox.is_whole(&error) => Poll::Ready(Ok(None)),
            other => Poll::Ready(other),
        }
    }

    /// True if no data and no trailers are left to read.
    pub fn is_end_stream(&self) -> bool {
        let inbox = self.inbox.borrow();
        !inbox.account.holds() && inbox.failed.is_none() && inbox.trailers.is_none() && inbox.recv.is_end_stream()
    }
}
