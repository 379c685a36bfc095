//! Bounds the unread bytes of a worker's HTTP/2 and HTTP/3 streams.
//!
//! In: the receiving halves of the streams, at each tick. Out: bytes that nobody reads move out of the receive queues
//! of the connections, so that other streams keep flowing. If more than `limits.receive-buffer` bytes are then stalled,
//! sessions end: those of the client with the most stalled bytes first, and among them the one with the oldest read.
//! Never: a read in place of an active reader.

use std::cell::{Ref, RefCell, RefMut};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use hermes_net::client_address::network;
use http::HeaderMap;
use slab::Slab;

use super::WorkerContext;
use crate::error::Error;
use crate::runtime::session::SessionEntry;

/// The receiving half of a stream, whose unread bytes are bounded.
pub trait Unread {
    /// Moves unread bytes out of the connection's receive queue. Bytes that were already unread at the last sweep count
    /// as stalled.
    fn sweep(&mut self, worker: &WorkerContext);
    fn account(&mut self) -> &mut Account;
}

/// The unread bytes of a stream, and their accounting.
pub struct Account {
    /// Unread chunks that were moved out of the connection's receive queue.
    held: VecDeque<Bytes>,
    held_bytes: u64,
    pub notice: Arc<Notice>,
    /// The waker of `notice`. The connection is polled only with this waker.
    pub waker: Waker,
    /// The number of unread bytes at the last sweep.
    lay: u64,
    /// The number of bytes that were read since the last sweep.
    read: u64,
    /// The number of bytes that were unread at the last two sweeps.
    pub stalled: u64,
    /// The time of the last read, in milliseconds of the worker's clock.
    read_at: u64,
    /// The session that is charged for the bytes; `None` until one is bound.
    session: Option<Rc<SessionEntry>>,
}

impl Account {
    pub fn new(worker: &WorkerContext) -> Self {
        let (notice, waker) = Notice::new();
        let (held, read_at) = (VecDeque::new(), worker.now());
        Self { held, held_bytes: 0, notice, waker, lay: 0, read: 0, stalled: 0, read_at, session: None }
    }

    /// Appends a chunk that was moved out of the connection's receive queue.
    pub fn hold(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.held_bytes += chunk.len() as u64;
            self.held.push_back(chunk);
        }
    }

    /// Prepends the rest of a chunk that was too long for its reader.
    pub fn hold_first(&mut self, chunk: Bytes) {
        self.held_bytes += chunk.len() as u64;
        self.held.push_front(chunk);
        self.notice.set_idle(false);
    }

    pub fn take_held(&mut self) -> Option<Bytes> {
        let chunk = self.held.pop_front()?;
        self.held_bytes -= chunk.len() as u64;
        if self.held.is_empty() {
            self.held = VecDeque::new();
        }
        Some(chunk)
    }

    pub fn drop_held(&mut self) {
        (self.held, self.held_bytes) = (VecDeque::new(), 0);
    }

    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    pub fn note_read(&mut self, bytes: usize, now: u64) {
        self.read += bytes as u64;
        self.read_at = now;
    }

    /// True if no bytes were unread at the last sweep, and none have arrived since.
    pub fn is_quiet(&self) -> bool {
        self.lay == 0 && self.notice.is_idle()
    }

    /// Charges the session for a head or trailers that wait together with the unread bytes.
    pub fn hold_head(&self, worker: &WorkerContext, head: &HeaderMap) {
        if let Some(session) = &self.session {
            session.hold_head(worker, head);
        }
    }

    /// True if no reader will read the bytes, because the session was signalled to end.
    pub fn is_forsaken(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.end.get().is_some())
    }

    /// Sets the number of unread bytes, and returns how many of them were already unread at the last call.
    pub fn count(&mut self, lies: u64) -> u64 {
        std::mem::replace(&mut self.lay, lies).saturating_sub(std::mem::take(&mut self.read))
    }
}

/// The receiving halves of all HTTP/2 and HTTP/3 streams of a worker.
pub type Inboxes = RefCell<Slab<Rc<RefCell<dyn Unread>>>>;

/// A registered receiving half of a stream. It takes part in sweeps until this value is dropped.
pub struct SweptInbox<I> {
    inbox: Rc<RefCell<I>>,
    pub worker: Rc<WorkerContext>,
    key: usize,
}

impl<I: Unread + 'static> SweptInbox<I> {
    pub fn new(worker: &Rc<WorkerContext>, inbox: I) -> Self {
        let inbox = Rc::new(RefCell::new(inbox));
        let key = worker.tables.inboxes.borrow_mut().insert(inbox.clone());
        Self { inbox, worker: worker.clone(), key }
    }

    pub fn borrow(&self) -> Ref<'_, I> {
        self.inbox.borrow()
    }

    pub fn borrow_mut(&self) -> RefMut<'_, I> {
        self.inbox.borrow_mut()
    }

    /// Charges the unread bytes to a session. The session may end if `limits.receive-buffer` is exceeded.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        self.inbox.borrow_mut().account().session = Some(session.clone());
    }
}

impl<I> Drop for SweptInbox<I> {
    fn drop(&mut self) {
        self.worker.tables.inboxes.borrow_mut().remove(self.key);
    }
}

/// Forwards a connection's wake to the reader, and records it for the sweep. The record is needed because a reader that
/// was dropped, or waits for something else, does not poll after a wake.
#[derive(Default)]
pub struct Notice {
    /// True if nothing is unread: the reader found no data or the end of the stream, and there was no wake since.
    is_idle: AtomicBool,
    /// The waker of the reader.
    pub reader: AtomicWaker,
}

impl Notice {
    /// Returns a notice and its waker, which is the only one with which the connection is polled.
    fn new() -> (Arc<Self>, Waker) {
        let notice = Arc::<Self>::default();
        (notice.clone(), notice.into())
    }

    /// Sets whether nothing is unread. Callers set it to true before they poll the connection, because the connection
    /// may wake at once, and back to false if the poll returned data.
    pub fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Acquire)
    }
}

impl Wake for Notice {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.set_idle(false);
        self.reader.wake();
    }
}

/// Moves unread bytes of every stream of a worker out of the receive queues of the connections. Ends sessions if more
/// than `limits.receive-buffer` bytes are stalled.
pub fn sweep(worker: &WorkerContext) {
    let inboxes = worker.tables.inboxes.borrow();
    inboxes.iter().for_each(|(_, inbox)| inbox.borrow_mut().sweep(worker));
    let mut stalled: Vec<_> = inboxes
        .iter()
        .map(|(_, inbox)| RefMut::map(inbox.borrow_mut(), Unread::account))
        .filter(|account| account.stalled > 0 && account.holds() && account.session.is_some())
        .collect();
    let unread: u64 = stalled.iter().map(|account| account.stalled).sum();
    let mut over = unread.saturating_sub(worker.overload.bound(worker.snapshot().limits.receive_buffer) as u64);
    if over == 0 {
        return;
    }
    // The client with the most stalled bytes comes first, and among its sessions the one with the oldest read.
    let client = |account: &Account| account.session.as_ref().map(|session| network(session.facts.source.ip()));
    let mut holders: HashMap<_, u64> = HashMap::new();
    stalled.iter().for_each(|account| *holders.entry(client(account)).or_default() += account.stalled);
    stalled.sort_unstable_by_key(|account| (Reverse(holders.get(&client(account)).copied()), account.read_at));
    for account in stalled {
        if let Some(session) = &account.session {
            worker.shared.metrics.limit("receive-buffer");
            session.end_for_good(Error::Limit("unread bytes of streams"));
        }
        over = over.saturating_sub(account.stalled);
        if over == 0 {
            break;
        }
    }
}
