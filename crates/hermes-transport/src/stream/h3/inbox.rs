//! The bytes that were received on an HTTP/3 stream and not yet read.
//!
//! In: the receiving half of quinn. Out: its bytes. Bytes that remain unread for a tick are moved out of quinn, up to a
//! quarter of the stream's window, which opens the connection's window by their length. Small chunks are coalesced,
//! because each keeps its whole packet alive. quinn does not report how many bytes are unread. So if the quarter is
//! used up, a whole stream window is counted as unread, and the connection's window is enlarged by it. Then the other
//! streams of the connection keep flowing. Never: the parsing of frames.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hermes_net::quic::{ReadError, RecvStream, StreamId};
use hermes_wire::h3::Code;

use crate::h3::{Link, connection::number};
use crate::runtime::WorkerContext;
use crate::runtime::receive_budget::{Account, SweptInbox, Unread};
use crate::runtime::session::SessionEntry;
use crate::stream::h2::GATHER;

/// The maximum size of one read from quinn, in bytes.
const READ: usize = 64 << 10;
/// The divisor of a stream's window that gives the number of unread bytes which may be moved out of quinn.
const PART: u64 = 4;

struct Inbox {
    recv: RecvStream,
    account: Account,
    /// The end (`Ok`) or the failure of the stream, which follows the bytes in `account`. `None` while the stream is
    /// open.
    over: Option<Result<(), ReadError>>,
    /// The number of bytes by which this stream enlarges the connection's window.
    widened: u64,
    link: Rc<Link>,
}

impl Inbox {
    fn poll_recv(&mut self) -> Poll<Result<Option<Bytes>, ReadError>> {
        if let Some(over) = &self.over {
            return Poll::Ready(over.clone().map(|()| None));
        }
        self.account.notice.set_idle(true);
        // The future may be created for each poll, because it contains no received data and quinn stores the waker.
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

    /// Returns the number of unread bytes in `account`, plus an upper bound of those in quinn.
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
    fn sweep(&mut self, _: &WorkerContext) {
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
            // A reader that quinn has woken may find quinn empty, because the bytes were moved to `account`.
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

/// Reads the bytes of a stream, in order.
pub(super) struct StreamReader {
    inbox: SweptInbox<Inbox>,
}

impl StreamReader {
    pub(super) fn new(worker: &Rc<WorkerContext>, recv: RecvStream, link: &Rc<Link>) -> Self {
        let inbox = Inbox { recv, account: Account::new(worker), over: None, widened: 0, link: link.clone() };
        Self { inbox: SweptInbox::new(worker, inbox) }
    }

    /// Charges the unread bytes to a session. The session may end if `limits.receive-buffer` is exceeded. `kept` is the
    /// number of bytes that the caller has read and still stores; the session is charged for these too.
    pub(super) fn bind(&self, session: &Rc<SessionEntry>, kept: usize) {
        self.inbox.bind(session);
        session.hold(&self.inbox.worker, kept as u64);
    }

    pub(super) fn id(&self) -> StreamId {
        self.inbox.borrow().recv.id()
    }

    pub(super) fn is_0rtt(&self) -> bool {
        self.inbox.borrow().recv.is_0rtt()
    }

    /// Returns the next chunk, or `None` at the end of the stream.
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

    /// Discards all unread bytes, and asks the peer to stop sending (STOP_SENDING).
    pub(super) fn stop(&mut self, code: Code) {
        self.inbox.borrow_mut().drop_all(code);
    }
}
