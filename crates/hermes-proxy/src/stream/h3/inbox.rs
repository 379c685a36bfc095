//! What was received on a stream of HTTP/3 and not read yet.
//!
//! In: quinn's half. Out: its bytes. What nobody reads for a tick leaves quinn, up to a quarter of the stream's
//! window: its connection's window opens by as much, and small pieces, each of which keeps all that came with it, are
//! put together. quinn does not tell what lies in it: beyond that quarter a whole window is counted, and the
//! connection's is widened by it, so that the streams beside go on. Never: frames.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic::{ReadError, RecvStream, StreamId};
use hermes_wire::h3::Code;

use crate::h3::{Link, link::number};
use crate::live::Entry;
use crate::stream::h2::GATHER;
use crate::stream::unread::{Notice, Unread};
use crate::worker::Worker;

/// What is asked of quinn at once.
const READ: usize = 64 << 10;
/// Of a stream's window so much leaves quinn unread.
const PART: u64 = 4;

struct Inbox {
    recv: RecvStream,
    /// Taken out of quinn.
    held: VecDeque<Bytes>,
    held_bytes: u64,
    /// What quinn said behind them: `Ok` is the stream's end.
    over: Option<Result<(), ReadError>>,
    notice: Arc<Notice>,
    /// Of `notice`: quinn is polled with no other.
    waker: Waker,
    /// What counted as unread at the last sweep, and bytes read since.
    lay: u64,
    read: u64,
    stalled: u64,
    read_at: u64,
    /// By how much the connection's window is wider for it.
    widened: u64,
    link: Rc<Link>,
    session: Option<Rc<Entry>>,
}

impl Inbox {
    fn poll_recv(&mut self) -> Poll<Result<Option<Bytes>, ReadError>> {
        if let Some(over) = &self.over {
            return Poll::Ready(over.clone().map(|()| None));
        }
        self.notice.set_idle(true);
        // A future of the moment: what it waits for wakes us, and it holds nothing.
        let read = ready!(pin!(self.recv.read_chunk(READ, true)).poll(&mut Context::from_waker(&self.waker)));
        let chunk = read.map(|chunk| chunk.map(|chunk| chunk.bytes));
        match &chunk {
            Ok(Some(_)) => self.notice.set_idle(false),
            Ok(None) => self.over = Some(Ok(())),
            Err(error) => self.over = Some(Err(error.clone())),
        }
        Poll::Ready(chunk)
    }

    fn hold(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.held_bytes += chunk.len() as u64;
            self.held.push_back(chunk);
        }
    }

    fn take_held(&mut self) -> Option<Bytes> {
        let chunk = self.held.pop_front()?;
        self.held_bytes -= chunk.len() as u64;
        if self.held.is_empty() {
            self.held = VecDeque::new();
        }
        Some(chunk)
    }

    fn most_held(&self) -> u64 {
        self.link.stream_window() / PART
    }

    fn is_full(&self) -> bool {
        self.over.is_none() && self.held_bytes >= self.most_held()
    }

    /// Bytes that lie here, and those in quinn at the most.
    fn lies(&self) -> u64 {
        self.held_bytes + if self.is_full() { self.link.stream_window() } else { 0 }
    }

    fn widen(&mut self, bytes: u64) {
        self.link.widen(std::mem::replace(&mut self.widened, bytes), bytes);
    }

    fn note_read(&mut self, bytes: usize, now: u64) {
        self.read += bytes as u64;
        self.read_at = now;
        self.stalled = self.stalled.saturating_sub(bytes as u64);
        if self.widened > 0 && !self.is_full() {
            self.widen(0);
        }
    }

    fn drop_all(&mut self, code: Code) {
        self.held = VecDeque::new();
        self.held_bytes = 0;
        if self.over.is_none() {
            self.over = Some(Err(ReadError::ClosedStream));
            let _ = self.recv.stop(number(code));
        }
    }
}

impl Unread for Inbox {
    fn sweep(&mut self) {
        if self.lay == 0 && self.notice.is_idle() {
            return;
        }
        let mut small = BytesMut::new();
        while self.over.is_none()
            && self.held_bytes + (small.len() as u64) < self.most_held()
            && let Poll::Ready(Ok(Some(chunk))) = self.poll_recv()
        {
            small.extend_from_slice(&chunk);
            if small.len() >= GATHER {
                self.hold(small.split().freeze());
            }
        }
        self.hold(small.freeze());
        if self.session.as_ref().is_some_and(|session| session.end.get().is_some()) {
            // Nobody is to read it any more.
            self.drop_all(Code::RequestCancelled);
        }
        self.stalled = self.lay.saturating_sub(self.read);
        self.lay = self.lies();
        self.read = 0;
        let is_stuck = self.stalled > 0 && self.is_full();
        self.widen(if is_stuck { self.link.stream_window() } else { 0 });
        if !self.held.is_empty() || self.over.is_some() {
            // Whoever was woken for it may ask quinn alone: it is here now.
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
        self.widen(0);
    }
}

/// A stream's bytes, in their order.
pub(super) struct Source {
    inbox: Rc<RefCell<Inbox>>,
    worker: Rc<Worker>,
    key: usize,
}

impl Source {
    pub(super) fn new(worker: &Rc<Worker>, recv: RecvStream, link: &Rc<Link>) -> Self {
        let (notice, waker) = Notice::new();
        let inbox = Rc::new(RefCell::new(Inbox {
            recv,
            held: VecDeque::new(),
            held_bytes: 0,
            over: None,
            notice,
            waker,
            lay: 0,
            read: 0,
            stalled: 0,
            read_at: worker.now(),
            widened: 0,
            link: link.clone(),
            session: None,
        }));
        let key = worker.live.inboxes.borrow_mut().insert(inbox.clone());
        Self { inbox, worker: worker.clone(), key }
    }

    /// It is this session's, which ends where too much lies unread.
    pub(super) fn bind(&self, session: &Rc<Entry>) {
        self.inbox.borrow_mut().session = Some(session.clone());
    }

    pub(super) fn id(&self) -> StreamId {
        self.inbox.borrow().recv.id()
    }

    pub(super) fn is_0rtt(&self) -> bool {
        self.inbox.borrow().recv.is_0rtt()
    }

    /// The next piece; `None` is the end.
    pub(super) fn poll_read(&mut self, cx: &Context<'_>) -> Poll<Result<Option<Bytes>, ReadError>> {
        let inbox = &mut *self.inbox.borrow_mut();
        let chunk = match inbox.take_held() {
            Some(chunk) => Some(chunk),
            None => {
                inbox.notice.reader.register(cx.waker());
                ready!(inbox.poll_recv())?
            }
        };
        if let Some(chunk) = &chunk {
            inbox.note_read(chunk.len(), self.worker.now());
        }
        Poll::Ready(Ok(chunk))
    }

    /// The peer is told that nobody wants the rest.
    pub(super) fn stop(&mut self, code: Code) {
        self.inbox.borrow_mut().drop_all(code);
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.worker.live.inboxes.borrow_mut().remove(self.key);
    }
}
