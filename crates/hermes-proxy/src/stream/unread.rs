//! What lies unread on the streams of a worker, of HTTP/2 and HTTP/3.
//!
//! In: the streams' inboxes, at each tick. Out: what nobody reads leaves the connections, so that the streams beside
//! go on; where more than `limits.unread` lies there, the sessions end that have read nothing for the longest, those
//! of the client that holds most before others. Never: a read for somebody who reads.

use std::cell::{Ref, RefCell, RefMut};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use hermes_net::client::network;
use http::HeaderMap;
use slab::Slab;

use crate::error::Error;
use crate::live::Entry;
use crate::worker::Worker;

/// What was received on a stream and not read yet.
pub(crate) trait Unread {
    /// Takes out of the connection what nobody reads. Stalled is what lay there at the last sweep already.
    fn sweep(&mut self, worker: &Worker);
    fn account(&mut self) -> &mut Account;
}

/// What is known of what lies unread on a stream.
pub(crate) struct Account {
    /// Taken out of the connection.
    held: VecDeque<Bytes>,
    held_bytes: u64,
    pub(super) notice: Arc<Notice>,
    /// Of `notice`: the connection is polled with no other.
    pub(super) waker: Waker,
    /// Bytes that lay there at the last sweep, and bytes read since.
    lay: u64,
    read: u64,
    /// Bytes that are stalled.
    pub(super) stalled: u64,
    /// When something was read last, in milliseconds of the worker's clock.
    read_at: u64,
    /// Whose it is. `None` until it is somebody's.
    session: Option<Rc<Entry>>,
}

impl Account {
    pub(super) fn new(worker: &Worker) -> Self {
        let (notice, waker) = Notice::new();
        let (held, read_at) = (VecDeque::new(), worker.now());
        Self { held, held_bytes: 0, notice, waker, lay: 0, read: 0, stalled: 0, read_at, session: None }
    }

    /// Keeps what was taken out, behind what is kept.
    pub(super) fn hold(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.held_bytes += chunk.len() as u64;
            self.held.push_back(chunk);
        }
    }

    /// Keeps what was too much for its reader, in front of what is kept.
    pub(super) fn hold_first(&mut self, chunk: Bytes) {
        self.held_bytes += chunk.len() as u64;
        self.held.push_front(chunk);
        self.notice.set_idle(false);
    }

    pub(super) fn take_held(&mut self) -> Option<Bytes> {
        let chunk = self.held.pop_front()?;
        self.held_bytes -= chunk.len() as u64;
        if self.held.is_empty() {
            self.held = VecDeque::new();
        }
        Some(chunk)
    }

    pub(super) fn drop_held(&mut self) {
        (self.held, self.held_bytes) = (VecDeque::new(), 0);
    }

    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    pub(super) fn note_read(&mut self, bytes: usize, now: u64) {
        self.read += bytes as u64;
        self.read_at = now;
    }

    /// Nothing lay there, and nothing came.
    pub(super) fn is_quiet(&self) -> bool {
        self.lay == 0 && self.notice.is_idle()
    }

    /// Charges the session for a head that waits beside the unread bytes.
    pub(super) fn hold_head(&self, worker: &Worker, head: &HeaderMap) {
        if let Some(session) = &self.session {
            session.hold_head(worker, head);
        }
    }

    /// Nobody is to read it any more.
    pub(super) fn is_forsaken(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.end.get().is_some())
    }

    /// Counts anew: so many bytes lie there now. Out: how many of them did at the last time.
    pub(super) fn count(&mut self, lies: u64) -> u64 {
        std::mem::replace(&mut self.lay, lies).saturating_sub(std::mem::take(&mut self.read))
    }
}

/// The receiving halves of a worker.
pub(crate) type Inboxes = RefCell<Slab<Rc<RefCell<dyn Unread>>>>;

/// A receiving half that is swept as long as this lives.
pub(super) struct Swept<I> {
    inbox: Rc<RefCell<I>>,
    pub(super) worker: Rc<Worker>,
    key: usize,
}

impl<I: Unread + 'static> Swept<I> {
    pub(super) fn new(worker: &Rc<Worker>, inbox: I) -> Self {
        let inbox = Rc::new(RefCell::new(inbox));
        let key = worker.live.inboxes.borrow_mut().insert(inbox.clone());
        Self { inbox, worker: worker.clone(), key }
    }

    pub(super) fn borrow(&self) -> Ref<'_, I> {
        self.inbox.borrow()
    }

    pub(super) fn borrow_mut(&self) -> RefMut<'_, I> {
        self.inbox.borrow_mut()
    }

    /// It is this session's, which ends where too much lies unread.
    pub(super) fn bind(&self, session: &Rc<Entry>) {
        self.inbox.borrow_mut().account().session = Some(session.clone());
    }
}

impl<I> Drop for Swept<I> {
    fn drop(&mut self) {
        self.worker.live.inboxes.borrow_mut().remove(self.key);
    }
}

/// Passes a connection's wake on to the reader, and remembers that there was one: a reader that is gone, or busy
/// elsewhere, does not come for what it was woken for.
#[derive(Default)]
pub(super) struct Notice {
    /// The reader found nothing, or it saw the end, and nobody has called since: nothing lies unread.
    is_idle: AtomicBool,
    /// Who reads.
    pub(super) reader: AtomicWaker,
}

impl Notice {
    /// With the one waker that the connection is polled with.
    fn new() -> (Arc<Self>, Waker) {
        let notice = Arc::<Self>::default();
        (notice.clone(), notice.into())
    }

    /// To be said before the connection is asked, since its call may come at once; false where it had something.
    pub(super) fn set_idle(&self, is_idle: bool) {
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

/// Takes what lies unread out of the connections, for every stream of a worker. Ends sessions where more than
/// `limits.unread` lies there.
pub(crate) fn sweep(worker: &Worker) {
    let inboxes = worker.live.inboxes.borrow();
    inboxes.iter().for_each(|(_, inbox)| inbox.borrow_mut().sweep(worker));
    let mut stalled: Vec<_> = inboxes
        .iter()
        .map(|(_, inbox)| RefMut::map(inbox.borrow_mut(), Unread::account))
        .filter(|account| account.stalled > 0 && account.holds() && account.session.is_some())
        .collect();
    let unread: u64 = stalled.iter().map(|account| account.stalled).sum();
    let mut over = unread.saturating_sub(worker.generation().snapshot.limits.unread as u64);
    if over == 0 {
        return;
    }
    // Of whoever holds most, what lies there longest.
    let client = |account: &Account| account.session.as_ref().map(|session| network(session.facts.source.ip()));
    let mut holders: HashMap<_, u64> = HashMap::new();
    stalled.iter().for_each(|account| *holders.entry(client(account)).or_default() += account.stalled);
    stalled.sort_unstable_by_key(|account| (Reverse(holders.get(&client(account)).copied()), account.read_at));
    for account in stalled {
        if let Some(session) = &account.session {
            worker.shared.metrics.limit("unread");
            session.end_for_good(Error::Limit("bytes that wait for readers who take none"));
        }
        over = over.saturating_sub(account.stalled);
        if over == 0 {
            break;
        }
    }
}
