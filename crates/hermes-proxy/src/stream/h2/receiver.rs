//! The receiving half of an HTTP/2 stream, and the window of its connection.
//!
//! In: h2's half. Out: chunks. Small frames are put together. What lies unread is taken out of h2,
//! since that counts unread frames and ends the connection, which others share, when they are many.
//! The stream's window is given back only to who reads it; the connection's is widened by what
//! readers leave lying, so that the streams beside theirs go on. What lies there is bounded by
//! `limits.unread`: beyond it the sessions end that have read nothing for the longest.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;
use slab::Slab;

use super::{GATHER, SMALL, Whole};
use crate::error::Error;
use crate::live::Entry;
use crate::signal::Signal;
use crate::worker::Worker;

/// The largest window (RFC 9113, 6.9.1).
const WIDEST: u64 = (1 << 31) - 1;

/// The flow-control window of one connection: as it was given, and what unread bytes of stalled
/// streams add to it.
pub(crate) struct Window {
    base: u32,
    stalled: Cell<u64>,
    changed: Signal<()>,
}

impl Window {
    /// `base` bytes (RFC 9113, 6.9.1).
    pub(crate) fn new(base: u32) -> Rc<Self> {
        Rc::new(Self { base, stalled: Cell::new(0), changed: Signal::default() })
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

/// The receiving halves of a worker, for the sweep.
pub(crate) type Inboxes = RefCell<Slab<Rc<RefCell<Inbox>>>>;

/// What was received on a stream and not read yet.
pub(crate) struct Inbox {
    recv: RecvStream,
    /// Taken out of h2; its window is not given back.
    held: VecDeque<Bytes>,
    /// What h2 said instead of data, once `held` is read.
    failed: Option<h2::Error>,
    /// The reader found nothing and will be woken, or it saw the end: nothing lies unread.
    is_awaited: bool,
    /// Bytes were read since the last sweep.
    is_read: bool,
    /// What the window counts of it as stalled, and since when it is; milliseconds of the worker's clock.
    stalled: u64,
    stalled_since: u64,
    window: Rc<Window>,
    /// Whose it is. `None` as long as there is no session.
    session: Option<Rc<Entry>>,
}

impl Inbox {
    /// One chunk from h2, and the small ones behind it.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let first = match ready!(self.recv.poll_data(cx)) {
            Some(Ok(chunk)) if chunk.len() < SMALL && !self.recv.is_end_stream() => chunk,
            other => return Poll::Ready(other),
        };
        let mut whole = Whole::from(first);
        while whole.len() < GATHER {
            match self.recv.poll_data(cx) {
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

    fn hold(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.held.push_back(chunk);
        }
    }

    fn release(&mut self, bytes: usize) {
        let _ = self.recv.flow_control().release_capacity(bytes);
        self.is_read = true;
        self.restate(0);
    }

    fn restate(&mut self, stalled: u64) {
        self.window.restate(std::mem::replace(&mut self.stalled, stalled), stalled);
    }

    /// Takes out of h2 what nobody reads. Returns how much that is.
    fn sweep(&mut self, now: u64) -> u64 {
        if self.is_awaited {
            return 0;
        }
        // Nobody waits for it, and who comes next asks h2 anew: there is no one to wake.
        let mut cx = Context::from_waker(Waker::noop());
        let mut small = BytesMut::new();
        while self.failed.is_none()
            && let Poll::Ready(Some(taken)) = self.recv.poll_data(&mut cx)
        {
            match taken {
                Ok(chunk) if chunk.len() < SMALL => small.extend_from_slice(&chunk),
                Ok(chunk) => {
                    self.hold(small.split().freeze());
                    self.hold(chunk);
                }
                Err(error) => self.failed = Some(error),
            }
        }
        self.hold(small.freeze());
        if !std::mem::take(&mut self.is_read) {
            let unread = self.recv.flow_control().used_capacity() as u64;
            if self.stalled == 0 {
                self.stalled_since = now;
            }
            self.restate(unread);
        }
        self.stalled
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.restate(0);
    }
}

/// Takes what lies unread out of h2, for every stream of a worker, and widens the windows. Ends
/// sessions where more than `limits.unread` lies there.
pub(crate) fn sweep(worker: &Worker) {
    let inboxes = worker.live.inboxes.borrow();
    let now = worker.now();
    let unread: u64 = inboxes.iter().map(|(_, inbox)| inbox.borrow_mut().sweep(now)).sum();
    let most = worker.generation().snapshot.limits.unread as u64;
    let Some(mut over) = unread.checked_sub(most).filter(|over| *over > 0) else { return };
    let mut stalled: Vec<_> =
        inboxes.iter().map(|(_, inbox)| inbox.borrow()).filter(|inbox| inbox.stalled > 0).collect();
    stalled.sort_unstable_by_key(|inbox| inbox.stalled_since);
    for inbox in stalled {
        if let Some(session) = &inbox.session {
            worker.shared.metrics.limit("unread");
            session.end_for_good(Error::Limit("bytes that wait for readers who take none"));
            over = over.saturating_sub(inbox.stalled);
        }
        if over == 0 {
            break;
        }
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
        let inbox = Rc::new(RefCell::new(Inbox {
            recv,
            held: VecDeque::new(),
            failed: None,
            is_awaited: false,
            is_read: true,
            stalled: 0,
            stalled_since: 0,
            window: window.clone(),
            session: None,
        }));
        let key = worker.live.inboxes.borrow_mut().insert(inbox.clone());
        Self { inbox, worker: worker.clone(), key }
    }

    /// It is this session's, which ends where too much lies unread.
    pub(crate) fn bind(&self, session: &Rc<Entry>) {
        self.inbox.borrow_mut().session = Some(session.clone());
    }

    /// The next chunk, of at most so many bytes. The stream's window opens by as much.
    pub(crate) fn poll_chunk(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let inbox = &mut *self.inbox.borrow_mut();
        let mut chunk = match inbox.held.pop_front() {
            Some(chunk) => chunk,
            None => {
                let polled = inbox.poll_data(cx);
                inbox.is_awaited = !matches!(polled, Poll::Ready(Some(Ok(_))));
                match ready!(polled) {
                    Some(Ok(chunk)) => chunk,
                    other => return Poll::Ready(other),
                }
            }
        };
        if chunk.len() > most {
            inbox.held.push_front(chunk.split_off(most));
        }
        inbox.release(chunk.len());
        Poll::Ready(Some(Ok(chunk)))
    }

    /// The trailers, after the last chunk.
    pub(crate) fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        self.inbox.borrow_mut().recv.poll_trailers(cx)
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
