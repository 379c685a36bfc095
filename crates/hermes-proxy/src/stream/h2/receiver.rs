//! The receiving half of an HTTP/2 stream, and the window of its connection.
//!
//! In: h2's half. Out: chunks. Small frames are put together. What lies unread is taken out of h2,
//! since that counts unread frames and ends the connection, which others share, when they are many.
//! The stream's window is given back only to who reads it; the connection's is widened by what
//! readers leave lying for longer than a tick, so that the streams beside theirs go on. What lies
//! there is bounded by `limits.unread` (see [`unread`](crate::stream::unread)).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;

use super::ends::Ends;
use super::{GATHER, SMALL, Whole};
use crate::live::Entry;
use crate::signal::Signal;
use crate::stream::unread::{Notice, Unread};
use crate::worker::Worker;

/// The largest window (RFC 9113, 6.9.1).
const WIDEST: u64 = (1 << 31) - 1;

/// The flow-control window of one connection: as it was given, and what unread bytes of stalled
/// streams add to it.
pub(crate) struct Window {
    base: u32,
    stalled: Cell<u64>,
    changed: Signal<()>,
    /// Which streams were ended before they were reset; of a server's connection nothing is known.
    ends: Rc<Ends>,
}

impl Window {
    /// `base` bytes (RFC 9113, 6.9.1).
    pub(crate) fn new(base: u32) -> Rc<Self> {
        Rc::new(Self { base, stalled: Cell::new(0), changed: Signal::default(), ends: Rc::default() })
    }

    /// What was read of the connection's frames.
    pub(crate) fn ends(&self) -> &Rc<Ends> {
        &self.ends
    }

    /// As it was given.
    pub(crate) fn base(&self) -> u32 {
        self.base
    }

    /// What the connection shall be set to now. Whoever drives it asks again when this changed.
    pub(crate) fn poll_target(&self, cx: &Context<'_>) -> u32 {
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

/// What was received on a stream and not read yet.
pub(crate) struct Inbox {
    recv: RecvStream,
    /// Taken out of h2; its window is not given back.
    held: VecDeque<Bytes>,
    /// What h2 said instead of data, once `held` is read.
    failed: Option<h2::Error>,
    notice: Arc<Notice>,
    /// Of `notice`: h2 is polled with no other.
    waker: Waker,
    /// Unread bytes at the last sweep, and bytes read since.
    lay: u64,
    read: u64,
    /// What of it the window counts as stalled; and when something was read last, in milliseconds of the worker's
    /// clock.
    stalled: u64,
    read_at: u64,
    window: Rc<Window>,
    /// Whose it is. `None` until it is somebody's.
    session: Option<Rc<Entry>>,
}

impl Inbox {
    fn new(recv: RecvStream, window: &Rc<Window>, now: u64) -> Self {
        let (notice, waker) = Notice::new();
        Self {
            recv,
            held: VecDeque::new(),
            failed: None,
            notice,
            waker,
            lay: 0,
            read: 0,
            stalled: 0,
            read_at: now,
            window: window.clone(),
            session: None,
        }
    }

    /// What h2 has; `None` is the end.
    fn poll_recv(&mut self) -> Poll<Option<Result<Bytes, h2::Error>>> {
        self.notice.set_idle(true);
        let mut cx = Context::from_waker(&self.waker);
        loop {
            let polled = self.recv.poll_data(&mut cx);
            match &polled {
                // END_STREAM in a frame of its own.
                Poll::Ready(Some(Ok(chunk))) if chunk.is_empty() => {}
                Poll::Ready(Some(_)) => {
                    self.notice.set_idle(false);
                    return polled;
                }
                Poll::Ready(None) | Poll::Pending => return polled,
            }
        }
    }

    /// One chunk, never empty, and the small ones behind it.
    fn poll_data(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        self.notice.reader.register(cx.waker());
        let first = match ready!(self.poll_recv()) {
            Some(Ok(chunk)) if chunk.len() < SMALL && !self.recv.is_end_stream() => chunk,
            other => return Poll::Ready(other),
        };
        let mut whole = Whole::from(first);
        while whole.len() < GATHER {
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

    /// The peer had said all, and then that it wants to hear no more.
    fn is_whole(&mut self, error: &h2::Error) -> bool {
        let stream = self.recv.stream_id().as_u32();
        error.reason() == Some(h2::Reason::NO_ERROR) && !error.is_go_away() && self.window.ends.is_whole(stream)
    }

    fn hold(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.held.push_back(chunk);
        }
    }

    fn release(&mut self, bytes: usize, now: u64) {
        let _ = self.recv.flow_control().release_capacity(bytes);
        self.read += bytes as u64;
        self.read_at = now;
        if self.stalled > 0 {
            self.restate(self.stalled.saturating_sub(bytes as u64));
        }
    }

    fn restate(&mut self, stalled: u64) {
        self.window.restate(std::mem::replace(&mut self.stalled, stalled), stalled);
    }
}

impl Unread for Inbox {
    fn sweep(&mut self) {
        if self.lay == 0 && self.notice.is_idle() {
            return;
        }
        let mut small = BytesMut::new();
        while self.failed.is_none()
            && let Poll::Ready(Some(taken)) = self.poll_recv()
        {
            match taken {
                // A chunk keeps all that was read from the socket with it, however little it is itself.
                Ok(chunk) if chunk.len() < GATHER && small.len() < GATHER => small.extend_from_slice(&chunk),
                Ok(chunk) => {
                    self.hold(small.split().freeze());
                    self.hold(chunk);
                }
                Err(error) => self.failed = Some(error),
            }
        }
        self.hold(small.freeze());
        if self.session.as_ref().is_some_and(|session| session.end.get().is_some()) {
            // Nobody is to read it any more; what it took of the windows it has until its stream is over.
            self.held = VecDeque::new();
            self.failed.get_or_insert(h2::Reason::CANCEL.into());
        }
        self.restate(self.lay.saturating_sub(self.read));
        self.lay = self.recv.flow_control().used_capacity() as u64;
        self.read = 0;
        if !self.held.is_empty() {
            // Whoever was woken for it may ask h2 alone: it is here now.
            self.notice.reader.wake();
        }
    }

    fn stalled(&self) -> u64 {
        self.stalled
    }

    fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn read_at(&self) -> u64 {
        self.read_at
    }

    fn session(&self) -> Option<&Rc<Entry>> {
        self.session.as_ref()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.restate(0);
    }
}

/// The receiving half of a stream.
pub(crate) struct Receiver {
    inbox: Rc<RefCell<Inbox>>,
    worker: Rc<Worker>,
    key: usize,
}

impl Receiver {
    /// `window` is the one of the stream's connection.
    pub(crate) fn new(worker: &Rc<Worker>, recv: RecvStream, window: &Rc<Window>) -> Self {
        let inbox = Rc::new(RefCell::new(Inbox::new(recv, window, worker.now())));
        let key = worker.live.inboxes.borrow_mut().insert(inbox.clone());
        Self { inbox, worker: worker.clone(), key }
    }

    /// It is this session's, which ends where too much lies unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        self.inbox.borrow_mut().session = Some(session.clone());
    }

    /// The next chunk, never empty, of at most so many bytes. The stream's window opens by as much.
    pub(crate) fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let inbox = &mut *self.inbox.borrow_mut();
        let mut chunk = match inbox.held.pop_front() {
            Some(chunk) => {
                if inbox.held.is_empty() {
                    inbox.held = VecDeque::new();
                }
                chunk
            }
            None => match ready!(inbox.poll_data(cx)) {
                Some(Ok(chunk)) => chunk,
                Some(Err(error)) if inbox.is_whole(&error) => return Poll::Ready(None),
                other => return Poll::Ready(other),
            },
        };
        if chunk.len() > most {
            inbox.held.push_front(chunk.split_off(most));
            inbox.notice.set_idle(false);
        }
        inbox.release(chunk.len(), self.worker.now());
        Poll::Ready(Some(Ok(chunk)))
    }

    /// How many lines trailers may have.
    pub(crate) fn most_lines(&self) -> usize {
        self.worker.generation().snapshot.limits.header_count
    }

    /// The trailers, after the last chunk.
    pub(crate) fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        let inbox = &mut *self.inbox.borrow_mut();
        match ready!(inbox.recv.poll_trailers(cx)) {
            Err(error) if inbox.is_whole(&error) => Poll::Ready(Ok(None)),
            other => Poll::Ready(other),
        }
    }

    /// Nothing is left to read.
    pub(crate) fn is_end_stream(&self) -> bool {
        let inbox = self.inbox.borrow();
        inbox.held.is_empty() && inbox.failed.is_none() && inbox.recv.is_end_stream()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.worker.live.inboxes.borrow_mut().remove(self.key);
    }
}
