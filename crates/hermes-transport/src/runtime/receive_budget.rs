//! The unread bytes of a worker's HTTP/2 and HTTP/3 streams.
//!
//! In: the inboxes of the streams, at each tick. Out: bytes that nobody reads move out of the connections, so that
//! other streams keep flowing. If more than `limits.receive-buffer` remain, sessions end: those of the client that holds most,
//! starting with the one that read nothing for longest. Never: a read on behalf of an active reader.

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

/// The bytes that were received on a stream and not yet read.
pub trait Unread {
    /// Moves unread bytes out of the connection. Bytes that were unread at the last sweep already count as stalled.
    fn sweep(&mut self, worker: &WorkerContext);
    fn account(&mut self) -> &mut Account;
}

/// The unread bytes of a stream, and their accounting.
pub struct Account {
    /// Chunks taken out of the connection.
    held: VecDeque<Bytes>,
    held_bytes: u64,
    pub notice: Arc<Notice>,
    /// The waker of `notice`: the connection is polled with no other.
    pub waker: Waker,
    /// Unread bytes at the last sweep, and bytes read since.
    lay: u64,
    read: u64,
    /// Stalled bytes.
    pub stalled: u64,
    /// The time of the last read, in milliseconds of the worker's clock.
    read_at: u64,
    /// The session that owns the bytes, once one is bound.
    session: Option<Rc<SessionEntry>>,
}

impl Account {
    pub fn new(worker: &WorkerContext) -> Self {
        let (notice, waker) = Notice::new();
        let (held, read_at) = (VecDeque::new(), worker.now());
        Self { held, held_bytes: 0, notice, waker, lay: 0, read: 0, stalled: 0, read_at, session: None }
    }

    /// Appends a chunk that was taken out of the connection.
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

    /// True if nothing was unread, and nothing came since.
    pub fn is_quiet(&self) -> bool {
        self.lay == 0 && self.notice.is_idle()
    }

    /// Charges the session for a head that waits beside the unread bytes.
    pub fn hold_head(&self, worker: &WorkerContext, head: &HeaderMap) {
        if let Some(session) = &self.session {
            session.hold_head(worker, head);
        }
    }

    /// True if no reader will take the bytes: the session was told to end.
    pub fn is_forsaken(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.end.get().is_some())
    }

    /// Sets the number of unread bytes, and returns how many of them were unread at the last call already.
    pub fn count(&mut self, lies: u64) -> u64 {
        std::mem::replace(&mut self.lay, lies).saturating_sub(std::mem::take(&mut self.read))
    }
}

/// The receiving halves of a worker.
pub type Inboxes = RefCell<Slab<Rc<RefCell<dyn Unread>>>>;

/// A receiving half that is swept until this is dropped.
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

    /// Binds the half to a session, which ends if too many bytes remain unread.
    pub fn bind(&self, session: &Rc<SessionEntry>) {
        self.inbox.borrow_mut().account().session = Some(session.clone());
    }
}

impl<I> Drop for SweptInbox<I> {
    fn drop(&mut self) {
        self.worker.tables.inboxes.borrow_mut().remove(self.key);
    }
}

/// Forwards a connection's wake to the reader, and remembers it: a reader that was dropped, or is busy elsewhere, does
/// not poll after its wake.
#[derive(Default)]
pub struct Notice {
    /// The reader found nothing or saw the end, and no wake came since: nothing is unread.
    is_idle: AtomicBool,
    /// The waker of the reader.
    pub reader: AtomicWaker,
}

impl Notice {
    /// A notice, with the only waker that the connection is polled with.
    fn new() -> (Arc<Self>, Waker) {
        let notice = Arc::<Self>::default();
        (notice.clone(), notice.into())
    }

    /// Sets the state. Must be set before the connection is polled, because its wake may come at once; false if the
    /// poll returned data.
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

/// Moves unread bytes out of the connections, for every stream of a worker. Ends sessions if more than `limits.receive-buffer`
/// bytes are stalled.
pub fn sweep(worker: &WorkerContext) {
    let inboxes = worker.tables.inboxes.borrow();
    inboxes.iter().for_each(|(_, inbox)| inbox.borrow_mut().sweep(worker));
    let mut stalled: Vec<_> = inboxes
        .iter()
        .map(|(_, inbox)| RefMut::map(inbox.borrow_mut(), Unread::account))
        .filter(|account| account.stalled > 0 && account.holds() && account.session.is_some())
        .collect();
    let unread: u64 = stalled.iter().map(|account| account.stalled).sum();
    let mut over = unread.saturating_sub(worker.snapshot().limits.receive_buffer as u64);
    if over == 0 {
        return;
    }
    // The client that holds most comes first, and of its sessions the one that read nothing for longest.
    let client = |account: &Account| account.session.as_ref().map(|session| network(session.facts.source.ip()));
    let mut holders: HashMap<_, u64> = HashMap::new();
    stalled.iter().for_each(|account| *holders.entry(client(account)).or_default() += account.stalled);
    stalled.sort_unstable_by_key(|account| (Reverse(holders.get(&client(account)).copied()), account.read_at));
    for account in stalled {
        if let Some(session) = &account.session {
            worker.shared.metrics.limit("receive-buffer");
            session.end_for_good(Error::Limit("bytes that wait for readers who take none"));
        }
        over = over.saturating_sub(account.stalled);
        if over == 0 {
            break;
        }
    }
}
