//! What lies unread on the streams of a worker, of HTTP/2 and HTTP/3.
//!
//! In: the streams' inboxes, at each tick. Out: what nobody reads leaves the connections, so that the streams beside
//! go on; where more than `limits.unread` lies there, the sessions end that have read nothing for the longest, those
//! of the client that holds most before others. Never: a read for somebody who reads.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use futures_util::task::AtomicWaker;
use slab::Slab;

use crate::error::Error;
use crate::live::Entry;
use crate::worker::Worker;

/// What was received on a stream and not read yet.
pub(crate) trait Unread {
    /// Takes out of the connection what nobody reads. Stalled is what lay there at the last sweep already.
    fn sweep(&mut self);
    /// Bytes that are stalled.
    fn stalled(&self) -> u64;
    /// Something was taken out, and lies here.
    fn holds(&self) -> bool;
    /// When something was read last, in milliseconds of the worker's clock.
    fn read_at(&self) -> u64;
    /// Whose it is. `None` until it is somebody's.
    fn session(&self) -> Option<&Rc<Entry>>;
}

/// The receiving halves of a worker.
pub(crate) type Inboxes = RefCell<Slab<Rc<RefCell<dyn Unread>>>>;

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
    pub(super) fn new() -> (Arc<Self>, Waker) {
        let notice = Arc::<Self>::default();
        (notice.clone(), notice.into())
    }

    /// To be said before the connection is asked, since its call may come at once; false where it had something.
    pub(super) fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Ordering::Release);
    }

    pub(super) fn is_idle(&self) -> bool {
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
    inboxes.iter().for_each(|(_, inbox)| inbox.borrow_mut().sweep());
    let mut stalled: Vec<_> = inboxes
        .iter()
        .map(|(_, inbox)| inbox.borrow())
        .filter(|inbox| inbox.stalled() > 0 && inbox.holds() && inbox.session().is_some())
        .collect();
    let unread: u64 = stalled.iter().map(|inbox| inbox.stalled()).sum();
    let mut over = unread.saturating_sub(worker.generation().snapshot.limits.unread as u64);
    if over == 0 {
        return;
    }
    // Of whoever holds most, what lies there longest.
    let client = |inbox: &dyn Unread| inbox.session().map(|session| network(session.facts.source.ip()));
    let mut holders: HashMap<_, u64> = HashMap::new();
    stalled.iter().for_each(|inbox| *holders.entry(client(&**inbox)).or_default() += inbox.stalled());
    stalled.sort_unstable_by_key(|inbox| (Reverse(holders.get(&client(&**inbox)).copied()), inbox.read_at()));
    for inbox in stalled {
        if let Some(session) = inbox.session() {
            worker.shared.metrics.limit("unread");
            session.end_for_good(Error::Limit("bytes that wait for readers who take none"));
        }
        over = over.saturating_sub(inbox.stalled());
        if over == 0 {
            break;
        }
    }
}

/// One client: an address of IPv4, or a network of IPv6, of which each has many addresses.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}
