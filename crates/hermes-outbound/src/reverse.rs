//! Reverse connections: connections that a node behind NAT dials, and on which its neighbour then sends requests.
//!
//! In: a node that dials (`listener/reverse_dialer`), and its neighbour that accepts (`outbound/reverse_acceptor`).
//! Both authenticate by certificate. From then on the roles are reversed: the node that dialled serves HTTP, and the
//! neighbour sends requests from a pool with the node's name. The neighbour's first request on each connection is a
//! call: it contains the number of connections that the neighbour's workers need. A later call announces that the
//! neighbour drains the connection. The answer to a call lists earlier connections that are dead. Never: a node name
//! that a certificate does not prove.

mod assignment;
pub mod channels;
pub mod keepalive;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hermes_net::tcp::AckMonitor;
use hermes_net::{Io, quic};
use http::header::VIA;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use tokio::sync::watch;
use tokio::time::Instant;

use self::assignment::WorkerAssignment;
pub use self::keepalive::{ACCEPTOR_PROBE_INTERVAL, Keepalive, Liveness, Probe};
use self::keepalive::{UNUSED_PROBE_INTERVAL, USED_PROBE_INTERVAL};
use hermes_transport::oneshot::Oneshot;

/// The ALPN protocol of a reverse connection over TCP.
pub const ALPN: &[u8] = b"hermes-reverse";
/// The ALPN protocol of a reverse connection over QUIC.
pub const ALPN_H3: &[u8] = b"hermes-reverse-h3";
/// The header of a call and of its answer. It is removed from the requests of clients.
pub const CALL: HeaderName = HeaderName::from_static("hermes-reverse");
/// The maximum number of reverse connections that this node dials to one endpoint, which needs one for each worker.
const MAX_WANTED_CONNECTIONS: usize = 1024;
/// The time for which requests wait for a node whose last connection has closed, because the node dials again.
const RECONNECT_GRACE: Duration = Duration::from_secs(3);

/// A reverse connection after its TLS or QUIC handshake.
pub enum ReverseTransport {
    /// A connection on which HTTP/2 is started.
    Tcp(Io),
    /// A connection on which HTTP/3 is started.
    Quic(quic::Connection),
}

/// The state of a node that dials this node, shared by all workers.
pub struct ReversePeer {
    pub node: Arc<str>,
    /// The number of connections of the node that accept requests.
    usable: AtomicUsize,
    /// The time at which `usable` last became 0, in milliseconds of this node's clock; 0 if it never did.
    went_at: AtomicU64,
    assignment: Mutex<WorkerAssignment>,
    /// The number of the node's newest connection, and the address from which the node dialled it.
    newest: watch::Sender<(u64, Option<IpAddr>)>,
    /// The numbers of connections that the node has declared dead.
    pub gone: SignalledIds,
    /// The numbers of connections that should be replaced by one on another worker, because that worker has none.
    pub leaving: SignalledIds,
}

/// The numbers of connections that were signalled. Only the latest numbers are stored, which suffices because the task
/// of each connection checks them at once.
#[derive(Default)]
pub struct SignalledIds(watch::Sender<VecDeque<u64>>);

/// The maximum number of stored connection numbers.
const MAX_SIGNALLED_IDS: usize = 64;

impl SignalledIds {
    pub fn add(&self, numbers: impl Iterator<Item = u64>) {
        self.0.send_modify(|told| {
            told.extend(numbers.take(MAX_SIGNALLED_IDS));
            told.drain(..told.len().saturating_sub(MAX_SIGNALLED_IDS));
        });
    }

    /// Waits until this connection number is signalled.
    pub async fn has_told(&self, number: u64) {
        // `wait_for` cannot fail, because `self` contains the sender.
        let _ = self.0.subscribe().wait_for(|told| told.contains(&number)).await;
    }
}

/// The assignment of a reverse connection to a worker. Dropping it releases the assignment.
pub struct ConnectionSlot {
    pub reverse_peer: Arc<ReversePeer>,
    /// The number of the worker.
    pub worker: usize,
    /// The number of the connection, which is greater than those of the node's earlier connections.
    pub number: u64,
}

impl ConnectionSlot {
    /// Releases the assignment, because the connection accepts no further request and another one should replace it.
    pub fn give_way(&self) {
        self.reverse_peer.release(self.worker, self.number);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.give_way();
    }
}

impl ReversePeer {
    /// Creates the state of a node without connections. Connection numbers start at the current time in microseconds. A
    /// node may declare a connection dead that it dialled to an earlier process or an earlier `ReversePeer`. The number
    /// of that connection must not be used again.
    pub fn new(node: &Arc<str>) -> Self {
        Self::numbering_from(node, SystemTime::now())
    }

    fn numbering_from(node: &Arc<str>, began: SystemTime) -> Self {
        let last = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        Self {
            node: node.clone(),
            usable: AtomicUsize::new(0),
            went_at: AtomicU64::new(0),
            assignment: Mutex::new(WorkerAssignment::numbering_from(last)),
            newest: watch::Sender::default(),
            gone: SignalledIds::default(),
            leaving: SignalledIds::default(),
        }
    }

    /// True if the node has a connection that accepts requests.
    pub fn is_here(&self) -> bool {
        self.usable.load(Ordering::Relaxed) > 0
    }

    /// Counts a connection that accepts requests.
    pub fn came(&self) {
        self.usable.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that no longer accepts requests. `now` is in milliseconds of this node's clock.
    pub fn went(&self, now: u64) {
        if self.usable.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.went_at.store(now.max(1), Ordering::Relaxed);
        }
    }

    /// Returns the time for which a request may wait for a connection of the node. It is unlimited while another worker
    /// has one, and short after the last connection has closed. Returns `None` if the node is not connected.
    pub fn patience(&self, now: u64) -> Option<Duration> {
        if self.is_here() {
            return Some(Duration::MAX);
        }
        let since = match self.went_at.load(Ordering::Relaxed) {
            0 => return None,
            went => Duration::from_millis(now.saturating_sub(went)),
        };
        RECONNECT_GRACE.checked_sub(since).filter(|left| !left.is_zero())
    }

    fn assignment(&self) -> MutexGuard<'_, WorkerAssignment> {
        self.assignment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns a connection, which worker `here` has accepted, to one of `workers` workers.
    pub fn assign(self: &Arc<Self>, here: usize, workers: usize) -> ConnectionSlot {
        let (worker, number) = self.assignment().assign(here, workers);
        ConnectionSlot { reverse_peer: self.clone(), worker, number }
    }

    fn release(&self, worker: usize, number: u64) {
        let leaving = self.assignment().release(worker, number);
        if leaving.is_some() {
            self.leaving.add(leaving.into_iter());
        }
    }

    /// Returns the number of the worker to which the newest assigned connection belongs, or `None` if none is assigned.
    pub fn latest(&self) -> Option<usize> {
        self.assignment().latest()
    }

    /// Announces the connection with this number to the subscribers of [`Self::newer`], if it is the newest one. They
    /// probe earlier connections, which may be dead.
    pub fn is_newest(&self, number: u64, source: IpAddr) {
        self.newest.send_if_modified(|newest| {
            let is_newer = number > newest.0;
            if is_newer {
                *newest = (number, Some(source));
            }
            is_newer
        });
    }

    /// Subscribes to the number and source address of the newest connection.
    pub fn newer(&self) -> watch::Receiver<(u64, Option<IpAddr>)> {
        self.newest.subscribe()
    }
}

/// All reverse connections that this node dials to one endpoint, on all workers.
#[derive(Clone, Debug)]
pub struct UplinkGroup(Arc<UplinkGroupState>);

#[derive(Debug)]
struct UplinkGroupState {
    /// The number of connections that the endpoint last requested.
    wanted: watch::Sender<usize>,
    /// Signals that the path of one connection may have failed. All connections then probe at once.
    doubts: watch::Sender<()>,
    /// The number of open sessions on all connections.
    sessions: AtomicUsize,
    /// The time at which the group was created.
    since: Instant,
    /// The time at which the last session ended, in milliseconds since `since`.
    used_at: AtomicU64,
}

impl Default for UplinkGroup {
    fn default() -> Self {
        Self(Arc::new(UplinkGroupState {
            wanted: watch::Sender::new(1),
            doubts: watch::Sender::default(),
            sessions: AtomicUsize::new(0),
            since: Instant::now(),
            used_at: AtomicU64::new(0),
        }))
    }
}

/// The time for which connections count as in use after their last session.
const RECENT_USE: Duration = Duration::from_secs(60);

impl UplinkGroup {
    /// Sets the number of connections that the endpoint requested.
    pub fn want(&self, wanted: usize) {
        let wanted = wanted.clamp(1, MAX_WANTED_CONNECTIONS);
        self.0.wanted.send_if_modified(|current| std::mem::replace(current, wanted) != wanted);
    }

    pub fn wanted(&self) -> watch::Receiver<usize> {
        self.0.wanted.subscribe()
    }

    pub fn use_it(&self) -> Use {
        self.0.sessions.fetch_add(1, Ordering::Relaxed);
        Use(self.clone())
    }

    /// True if a session is open, or ended less than a minute ago. The creation of the group counts as such an end.
    pub fn is_in_use(&self) -> bool {
        let used_at = || Duration::from_millis(self.0.used_at.load(Ordering::Relaxed));
        self.0.sessions.load(Ordering::Relaxed) > 0 || self.0.since.elapsed() < used_at() + RECENT_USE
    }

    /// Makes all connections of the group probe, because the path of one of them may have failed.
    pub fn doubt(&self) {
        self.0.doubts.send_replace(());
    }

    pub fn doubts(&self) -> watch::Receiver<()> {
        self.0.doubts.subscribe()
    }
}

/// The guard that counts a session on a connection of a group.
pub struct Use(UplinkGroup);

impl Drop for Use {
    fn drop(&mut self) {
        let strands = &self.0.0;
        strands.used_at.store(strands.since.elapsed().as_millis() as u64, Ordering::Relaxed);
        strands.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The reason why a reverse connection is replaced by a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceReason {
    /// The connection has closed.
    Over,
    /// The peer has announced that it sends no further request on the connection.
    Leaving,
    /// The connection has received nothing for too long.
    Silent,
    /// The kernel would now send packets to the peer from another source address.
    Moved,
}

/// A reverse connection that this node has dialled, and on which it serves requests.
pub struct UplinkConnection {
    keepalive: RefCell<Keepalive>,
    /// The monitor of TCP acknowledgements, which the keepalive takes when HTTP begins. `None` for QUIC.
    acks: Cell<Option<AckMonitor>>,
    group: UplinkGroup,
    /// True for the one connection of its group that probes at the short interval.
    is_first: bool,
    /// Set when the connection should be replaced, with the reason.
    pub moves_on: Oneshot<ReplaceReason>,
    is_over: Cell<bool>,
    /// True if an acknowledgement is late, and the other connections of the group were signalled to probe.
    doubts: Cell<bool>,
    /// The number of PATH_CHALLENGE frames received from the peer.
    challenges: Cell<u64>,
    /// The number that the peer has assigned to the connection. Set by the peer's first call.
    pub number: Oneshot<u64>,
    /// The numbers of this node's earlier connections that are dead.
    given_up: Vec<u64>,
}

impl UplinkConnection {
    pub fn new(group: UplinkGroup, is_first: bool, acks: Option<AckMonitor>, given_up: Vec<u64>) -> Self {
        Self {
            keepalive: RefCell::new(Keepalive::new(None, None, UNUSED_PROBE_INTERVAL)),
            acks: Cell::new(acks),
            group,
            is_first,
            moves_on: Oneshot::default(),
            is_over: Cell::new(false),
            doubts: Cell::new(false),
            challenges: Cell::new(0),
            number: Oneshot::default(),
            given_up,
        }
    }

    /// Starts the keepalive. Called when HTTP has begun on the connection. With `None`, the keepalive sends no probes.
    pub fn begin(&self, probe: Option<Probe>) {
        self.keepalive.replace(Keepalive::new(probe, self.acks.take(), UNUSED_PROBE_INTERVAL));
    }

    /// Records the number of received PATH_CHALLENGE frames. An increase means that the peer received packets of this
    /// connection from a new address of this node, which only this frame reveals. The group is then signalled to probe,
    /// so that the peer learns the new address of the other connections too.
    pub fn note_challenges(&self, challenges: u64) {
        if self.challenges.replace(challenges) != challenges {
            self.group.doubt();
        }
    }

    /// Marks the connection as closed, and signals the group to probe.
    pub fn end(&self) {
        self.acks.take();
        self.keepalive.borrow_mut().end();
        self.is_over.set(true);
        self.moves_on.set(ReplaceReason::Over);
        self.group.doubt();
    }

    /// Makes the keepalive probe the peer now.
    pub fn probe(&self) {
        self.keepalive.borrow_mut().send_probe();
    }

    /// Ready when the connection has received nothing for so long that it counts as dead. `heard` is the number of
    /// reads.
    pub fn poll_dead(&self, cx: &mut Context<'_>, heard: u64) -> Poll<()> {
        let mut keepalive = self.keepalive.borrow_mut();
        keepalive.ask_after(if self.is_first && self.group.is_in_use() {
            USED_PROBE_INTERVAL
        } else {
            UNUSED_PROBE_INTERVAL
        });
        let beat = keepalive.poll(cx, heard);
        let is_late = keepalive.is_late();
        if !self.doubts.replace(is_late) && is_late {
            self.group.doubt();
        }
        match beat {
            Liveness::Alive => Poll::Pending,
            Liveness::Silent => {
                self.moves_on.set(ReplaceReason::Silent);
                Poll::Pending
            }
            Liveness::Dead => Poll::Ready(()),
        }
    }

    /// True if the connection has closed, or has received nothing for too long.
    pub fn is_dead(&self) -> bool {
        self.is_over.get() || self.keepalive.borrow().is_silent()
    }

    /// Returns a guard that counts the session of this request. Returns `None` for a request without `via`: it is a
    /// health check of the peer itself, which does not count as a use.
    pub fn used_for(&self, head: &Parts) -> Option<Use> {
        head.headers.contains_key(VIA).then(|| self.group.use_it())
    }

    /// Handles a call of the peer, and returns the answer. Returns `None` for any other request.
    pub fn answer(&self, head: &Parts) -> Option<Response<()>> {
        let call = head.headers.get(CALL)?.to_str().unwrap_or_default();
        match parse(call) {
            Call::Leaving => self.moves_on.set(ReplaceReason::Leaving),
            Call::Begins { number, wanted } => {
                if let Some(number) = number {
                    self.number.set(number);
                }
                if let Some(wanted) = wanted {
                    self.group.want(wanted);
                }
            }
        }
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let gone: Vec<String> = self.given_up.iter().map(|number| format!("gone={number}")).collect();
        if !gone.is_empty()
            && let Ok(value) = HeaderValue::try_from(gone.join(", "))
        {
            response.headers_mut().insert(CALL, value);
        }
        Some(response)
    }
}

/// The content of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `id=17, connections=4`: the number of this connection, and the number of connections that the sender needs.
    Begins { number: Option<u64>, wanted: Option<usize> },
    /// `leaving`: the sender opens no further session on this connection.
    Leaving,
}

impl Call {
    /// Returns the request that transmits the call, or `None` if the node's name is not a valid authority.
    pub fn request(self, node: &str) -> Option<Request<()>> {
        let words = match self {
            Call::Leaving => "leaving".to_owned(),
            Call::Begins { number, wanted } => {
                format!("id={}, connections={}", number.unwrap_or_default(), wanted.unwrap_or_default())
            }
        };
        let uri = Uri::builder().scheme("https").authority(node).path_and_query("/").build().ok()?;
        Request::builder().method(Method::OPTIONS).uri(uri).header(CALL, words).body(()).ok()
    }
}

/// Parses a call. Unknown parameters are ignored, because a later version may add some.
fn parse(words: &str) -> Call {
    let mut begins = (None, None);
    for word in words.split(',').map(str::trim) {
        match word.split_once('=') {
            None if word == "leaving" => return Call::Leaving,
            Some(("id", number)) => begins.0 = number.parse().ok(),
            Some(("connections", wanted)) => begins.1 = wanted.parse().ok(),
            _ => {}
        }
    }
    Call::Begins { number: begins.0, wanted: begins.1 }
}

/// Returns the numbers of the connections that the answer to a call declares dead.
pub fn given_up(answer: &HeaderMap) -> impl Iterator<Item = u64> {
    let words = answer.get(CALL).and_then(|value| value.to_str().ok()).unwrap_or_default();
    words.split(',').filter_map(|word| word.trim().strip_prefix("gone=")?.parse().ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn reverse_peer() -> ReversePeer {
        ReversePeer::new(&Arc::from("laptop"))
    }

    #[test]
    fn numbers_of_a_process_are_none_of_the_one_before() {
        let [before, after] = [1_000, 1_001].map(|millis| {
            let began = UNIX_EPOCH + Duration::from_millis(millis);
            let reverse_peer = Arc::new(ReversePeer::numbering_from(&Arc::from("laptop"), began));
            [(); 500].map(|()| reverse_peer.assign(0, 1).number)
        });
        assert!(before.is_sorted() && after.is_sorted() && before[499] < after[0], "{before:?} and {after:?}");
    }

    #[test]
    fn a_node_that_just_went_is_waited_for_and_one_that_never_came_is_not() {
        let reverse_peer = reverse_peer();
        assert_eq!(reverse_peer.patience(1_000), None);
        reverse_peer.came();
        assert_eq!(reverse_peer.patience(1_000), Some(Duration::MAX));
        reverse_peer.went(2_000);
        assert_eq!(reverse_peer.patience(2_500), Some(Duration::from_millis(2_500)));
        assert_eq!(reverse_peer.patience(5_000), None);
    }

    #[test]
    fn calls_are_read_as_they_are_written_and_what_is_unknown_says_nothing() {
        for call in [Call::Leaving, Call::Begins { number: Some(17), wanted: Some(4) }] {
            let request = call.request("laptop").unwrap();
            assert_eq!(parse(request.headers()[CALL].to_str().unwrap()), call);
        }
        assert_eq!(parse("colour=red, connections=x, id=3"), Call::Begins { number: Some(3), wanted: None });
    }

    #[tokio::test]
    async fn the_answer_to_a_call_gives_up_what_is_dead() {
        let uplink = UplinkConnection::new(UplinkGroup::default(), true, None, vec![3, 5]);
        let (head, ()) = Call::Begins { number: Some(9), wanted: Some(5000) }.request("laptop").unwrap().into_parts();
        let answer = uplink.answer(&head).unwrap();
        assert_eq!((uplink.number.get(), *uplink.group.wanted().borrow()), (Some(9), MAX_WANTED_CONNECTIONS));
        assert_eq!(given_up(answer.headers()).collect::<Vec<_>>(), [3, 5]);
        let (other, ()) = Request::new(()).into_parts();
        assert!(uplink.answer(&other).is_none(), "any other request is a session");
    }

    /// Without the probe of the other connections, the peer would notice the end only after a timeout, while flows
    /// wait.
    #[tokio::test]
    async fn a_connection_that_is_over_is_dead_whatever_was_found_before_and_makes_the_others_ask() {
        for before in [None, Some(ReplaceReason::Silent)] {
            let group = UplinkGroup::default();
            let (uplink, others) = (UplinkConnection::new(group.clone(), true, None, Vec::new()), group.doubts());
            before.inspect(|why| uplink.moves_on.set(*why));
            assert!(!uplink.is_dead() && !others.has_changed().unwrap());
            uplink.end();
            assert!(uplink.is_dead() && others.has_changed().unwrap());
        }
    }

    /// A session on any connection of the group counts as a use of all.
    #[tokio::test(start_paused = true)]
    async fn they_are_in_use_while_there_are_sessions_and_for_a_while_after() {
        let group = UplinkGroup::default();
        assert!(group.is_in_use());
        tokio::time::sleep(RECENT_USE).await;
        assert!(!group.is_in_use());
        let other = UplinkConnection::new(group.clone(), false, None, Vec::new());
        let (health, ()) = Request::get("/healthz").body(()).unwrap().into_parts();
        assert!(other.used_for(&health).is_none() && !group.is_in_use());
        let (session, ()) = Request::get("/").header(VIA, "2 ingress").body(()).unwrap().into_parts();
        let used = other.used_for(&session);
        tokio::time::sleep(2 * RECENT_USE).await;
        assert!(group.is_in_use(), "it lasts");
        drop(used);
        assert!(group.is_in_use());
        tokio::time::sleep(RECENT_USE).await;
        assert!(!group.is_in_use());
    }

    #[tokio::test]
    async fn who_was_given_up_hears_of_it_and_nobody_else() {
        let reverse_peer = reverse_peer();
        reverse_peer.gone.add([1, 7].into_iter());
        // This fills the list, so that the earlier numbers are removed.
        reverse_peer.gone.add(100..100 + MAX_SIGNALLED_IDS as u64);
        reverse_peer.gone.has_told(100).await;
        assert!(tokio::time::timeout(Duration::from_millis(10), reverse_peer.gone.has_told(7)).await.is_err());
        let other = tokio::time::timeout(Duration::from_millis(10), reverse_peer.gone.has_told(2));
        assert!(other.await.is_err());
    }
}
