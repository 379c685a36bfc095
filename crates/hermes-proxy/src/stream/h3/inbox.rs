//! What was received on a stream of HTTP/3 and not read yet.
//!
//! In: quinn's half. Out: its bytes. What nobody reads for a tick leaves quinn, up to a quarter of the stream's
//! window: its connection's window opens by as much, and small pieces, each of which keeps all that came with it, are
//! put together. quinn does not tell what lies in it: beyond that quarter a whole window is counted, and the
//! connection's is widened by it, so that the streams beside go on. Never: frames.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic::{ReadError, RecvStream, StreamId};
use hermes_wire::h3::Code;

use crate::h3::{Link, link::number};
use crate::live::Entry;
use crate::stream::h2::GATHER;
use crate::stream::unread::{Account, Swept, Unread};
use crate::worker::Worker;

/// What is asked of quinn at once.
const READ: usize = 64 << 10;
/// Of a stream's window so much leaves quinn unread.
const PART: u64 = 4;

struct Inbox {
    recv: RecvStream,
    account: Account,
    /// What quinn said behind what is held: `Ok` is the stream's end.
    over: Option<Result<(), ReadError>>,
    /// By how much the connection's window is wider for it.
    widened: u64,
    link: Rc<Link>,
}

impl Inbox {
    fn poll_recv(&mut self) -> Poll<Result<Option<Bytes>, ReadError>> {
        if let Some(over) = &self.over {
            return Poll::Ready(over.clone().map(|()| None));
        }
        self.account.notice.set_idle(true);
        // A future of the moment: what it waits for wakes us, and it holds nothing.
        let read = ready!(pin!(self.recv.read_chunk(READ, true)).poll(&mut Context::from_waker(&self.account.waker)));
        let chunk = read.map(|chunk| chunk.map(|chunk| chunk.bytes));
        match &chunk {
            Ok(Some(_)) => self.account.notice.set_idle(false),
            Ok(None) => self.over = Some(Ok(())),
            Err(error) => self.over = Some(Err(error.clone())),
        }
        Poll::Ready(chunk)
    }

    fn most_held(&self) -> u64 {
        self.link.stream_window() / PART
    }

    fn is_full(&self) -> bool {
        self.over.is_none() && self.account.held_bytes() >= self.most_held()
    }

    /// Bytes that lie here, and those in quinn at the most.
    fn lies(&self) -> u64 {
        self.account.held_bytes() + if self.is_full() { self.link.stream_window() } else { 0 }
    }

    fn widen(&mut self, bytes: u64) {
        self.link.widen(std::mem::replace(&mut self.widened, bytes), bytes);
    }

    fn note_read(&mut self, bytes: usize, now: u64) {
        self.account.note_read(bytes, now);
        self.account.stalled = self.account.stalled.saturating_sub(bytes as u64);
        if self.widened > 0 && !self.is_full() {
            self.widen(0);
        }
    }

    fn drop_all(&mut self, code: Code) {
        self.account.drop_held();
        if self.over.is_none() {
            self.over = Some(Err(ReadError::ClosedStream));
            let _ = self.recv.stop(number(code));
        }
    }
}

impl Unread for Inbox {
    fn sweep(&mut self, _: &Worker) {
        if self.account.is_quiet() {
            return;
        }
        let mut small = BytesMut::new();
        while self.over.is_none()
            && self.account.held_bytes() + (small.len() as u64) < self.most_held()
            && let Poll::Ready(Ok(Some(chunk))) = self.poll_recv()
        {
            small.extend_from_slice(&chunk);
            if small.len() >= GATHER {
                self.account.hold(small.split().freeze());
            }
        }
        self.account.hold(small.freeze());
        if self.account.is_forsaken() {
            self.drop_all(Code::RequestCancelled);
        }
        self.account.stalled = self.account.count(self.lies());
        let is_stuck = self.account.stalled > 0 && self.is_full();
        self.widen(if is_stuck { self.link.stream_window() } else { 0 });
        if self.account.holds() || self.over.is_some() {
            // Whoever was woken for it may ask quinn alone: it is here now.
            self.account.notice.reader.wake();
        }
    }

    fn account(&mut self) -> &mut Account {
        &mut self.account
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.widen(0);
    }
}

/// A stream's bytes, in their order.
pub(super) struct Source {
    inbox: Swept<Inbox>,
}

impl Source {
    pub(super) fn new(worker: &Rc<Worker>, recv: RecvStream, link: &Rc<Link>) -> Self {
        let inbox = Inbox { recv, account: Account::new(worker), over: None, widened: 0, link: link.clone() };
        Self { inbox: Swept::new(worker, inbox) }
    }

    /// It is this session's, which ends where too much lies unread.
    /// Binds it to a session, with the number of bytes that were read and are kept.
    pub(super) fn bind(&self, session: &Rc<Entry>, kept: usize) {
        self.inbox.bind(session);
        session.hold(&self.inbox.worker, kept as u64);
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
        let chunk = match inbox.account.take_held() {
            Some(chunk) => Some(chunk),
            None => {
                inbox.account.notice.reader.register(cx.waker());
                ready!(inbox.poll_recv())?
            }
        };
        if let Some(chunk) = &chunk {
            inbox.note_read(chunk.len(), self.inbox.worker.now());
        }
        Poll::Ready(Ok(chunk))
    }

    /// The peer is told that nobody wants the rest.
    pub(super) fn stop(&mut self, code: Code) {
        self.inbox.borrow_mut().drop_all(code);
    }
}
