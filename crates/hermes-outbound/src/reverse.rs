//! Reverse connections: connections that a node behind NAT dials, and on which its neighbour then sends requests.
//!
//! In: a node that dials (`listener/reverse_dialer`), and its neighbour that accepts (`outbound/reverse_acceptor`). Both have shown certificates. From
//! then on the roles are reversed: the node that dialled serves HTTP as its listeners do, and the node that accepted
//! sends requests, from a pool under the node's name. Its first request on each connection is a call. It gives the
//! number of connections that its workers need, and later announces that it leaves. The answer lists earlier
//! connections that are dead. Never: a name that a certificate does not prove.

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

/// The ALPN of a reverse connection over TCP.
pub const ALPN: &[u8] = b"hermes-reverse";
/// The ALPN over QUIC.
pub const ALPN_H3: &[u8] = b"hermes-reverse-h3";
/// The header of a call and of its answer. It is removed from every client's request.
pub const CALL: HeaderName = HeaderName::from_static("hermes-reverse");
/// The limit of connections to one endpoint: no node has more workers.
const MAX_WANTED_CONNECTIONS: usize = 1024;
/// The time that requests wait for a node that lost its last connection, because it is dialling.
const RECONNECT_GRACE: Duration = Duration::from_secs(3);

/// A connection after its handshake.
pub enum ReverseTransport {
    /// HTTP/2 follows.
    Tcp(Io),
    /// HTTP/3 follows.
    Quic(quic::Connection),
}

/// The state of a node that dials this one, shared by all workers.
pub struct ReversePeer {
    pub node: Arc<str>,
    /// Connections of the node that take requests.
    usable: AtomicUsize,
    /// The time at which the last of them closed, in milliseconds of the node's clock; 0 if none ever did.
    went_at: AtomicU64,
    assignment: Mutex<WorkerAssignment>,
    /// The number of its newest connection, and the address of its peer.
    newest: watch::Sender<(u64, Option<IpAddr>)>,
    /// Connections that the node has given up.
    pub gone: SignalledIds,
    /// Connections that should leave their worker, because another worker has none.
    pub leaving: SignalledIds,
}

/// Numbers of connections that receive a signal. Bounded to the latest ones; the owner of each one checks the list at
/// once.
#[derive(Default)]
pub struct SignalledIds(watch::Sender<VecDeque<u64>>);

/// The limit of remembered numbers.
const MAX_SIGNALLED_IDS: usize = 64;

impl SignalledIds {
    pub fn add(&self, numbers: impl Iterator<Item = u64>) {
        self.0.send_modify(|told| {
            told.extend(numbers.take(MAX_SIGNALLED_IDS));
            told.drain(..told.len().saturating_sub(MAX_SIGNALLED_IDS));
        });
    }

    /// Waits until this number is signalled.
    pub async fn has_told(&self, number: u64) {
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|told| told.contains(&number)).await;
    }
}

/// A connection's assignment to a worker; dropping it releases the assignment.
pub struct ConnectionSlot {
    pub reverse_peer: Arc<ReversePeer>,
    pub worker: usize,
    /// The connection's number among all that the node has dialled.
    pub number: u64,
}

impl ConnectionSlot {
    /// Releases the assignment: the connection takes no further request, and another one should replace it.
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
    /// Connection numbers start at the current time in microseconds. A node may give up a connection of an earlier
    /// process, or of an earlier `ReversePeer`; its number must match none of these.
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

    pub fn came(&self) {
        self.usable.fetch_add(1, Ordering::Relaxed);
    }

    pub fn went(&self, now: u64) {
        if self.usable.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.went_at.store(now.max(1), Ordering::Relaxed);
        }
    }

    /// The time that a request may wait for it: a connection is on another worker, or was lost a moment ago. `None`: it
    /// is not connected.
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

    /// Assigns a connection that worker `here` accepted, among `workers` workers.
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

    /// The worker that received the newest connection that is still assigned.
    pub fn latest(&self) -> Option<usize> {
        self.assignment().latest()
    }

    /// Announces the connection with this number, if it is the newest. Earlier ones may be dead and are probed.
    pub fn is_newest(&self, number: u64, source: IpAddr) {
        self.newest.send_if_modified(|newest| {
            let is_newer = number > newest.0;
            if is_newer {
                *newest = (number, Some(source));
            }
            is_newer
        });
    }

    /// Subscribes to new connections.
    pub fn newer(&self) -> watch::Receiver<(u64, Option<IpAddr>)> {
        self.newest.subscribe()
    }
}

/// The reverse connections to one endpoint, on all workers.
#[derive(Clone, Debug)]
pub struct UplinkGroup(Arc<UplinkGroupState>);

#[derive(Debug)]
struct UplinkGroupState {
    /// The number of connections that the endpoint last asked for.
    wanted: watch::Sender<usize>,
    /// Signals that one of them suspects its path: all probe at once.
    doubts: watch::Sender<()>,
    /// Open sessions on them.
    sessions: AtomicUsize,
    since: Instant,
    /// The end of the last session, in milliseconds since `since`.
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

/// A service that was used within this time is likely to be used again.
const RECENT_USE: Duration = Duration::from_secs(60);

impl UplinkGroup {
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

    /// True if there is a session or was one lately. The start counts as a use.
    pub fn is_in_use(&self) -> bool {
        let used_at = || Duration::from_millis(self.0.used_at.load(Ordering::Relaxed));
        self.0.sessions.load(Ordering::Relaxed) > 0 || self.0.since.elapsed() < used_at() + RECENT_USE
    }

    pub fn doubt(&self) {
        self.0.doubts.send_replace(());
    }

    pub fn doubts(&self) -> watch::Receiver<()> {
        self.0.doubts.subscribe()
    }
}

/// A guard for the duration of one session.
pub struct Use(UplinkGroup);

impl Drop for Use {
    fn drop(&mut self) {
        let strands = &self.0.0;
        strands.used_at.store(strands.since.elapsed().as_millis() as u64, Ordering::Relaxed);
        strands.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The reason for dialling a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceReason {
    /// The connection closed.
    Over,
    /// The peer sends no further request on it.
    Leaving,
    /// The connection receives nothing.
    Silent,
    /// Packets to the peer would now leave from another address.
    Moved,
}

/// A connection that this node dialled and serves on.
pub struct UplinkConnection {
    keepalive: RefCell<Keepalive>,
    /// The acknowledgement counters for the keepalive over TCP, taken once HTTP begins.
    acks: Cell<Option<AckMonitor>>,
    group: UplinkGroup,
    /// True for the connection that probes on behalf of the whole bundle.
    is_first: bool,
    pub moves_on: Oneshot<ReplaceReason>,
    is_over: Cell<bool>,
    /// The connection suspects its path, and the others were told.
    doubts: Cell<bool>,
    /// The number of PATH_CHALLENGE frames from the peer.
    challenges: Cell<u64>,
    /// The connection's number at the peer. Set once the peer has accepted it.
    pub number: Oneshot<u64>,
    /// Numbers of earlier connections that are dead.
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

    /// Starts the keepalive once HTTP has begun.
    pub fn begin(&self, probe: Option<Probe>) {
        self.keepalive.replace(Keepalive::new(probe, self.acks.take(), UNUSED_PROBE_INTERVAL));
    }

    /// Handles a change of the PATH_CHALLENGE count. The peer's QUIC stack saw this node at another address, which no
    /// other signal reports. The peer knows the new address of this connection; the others must send too.
    pub fn note_challenges(&self, challenges: u64) {
        if self.challenges.replace(challenges) != challenges {
            self.group.doubt();
        }
    }

    /// Marks the connection as closed, with all streams on it.
    pub fn end(&self) {
        self.acks.take();
        self.keepalive.borrow_mut().end();
        self.is_over.set(true);
        self.moves_on.set(ReplaceReason::Over);
        self.group.doubt();
    }

    /// Probes the peer.
    pub fn probe(&self) {
        self.keepalive.borrow_mut().send_probe();
    }

    /// Ready when the connection was silent for so long that it counts as dead. `heard` counts all reads.
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

    /// True if no byte can arrive on it.
    pub fn is_dead(&self) -> bool {
        self.is_over.get() || self.keepalive.borrow().is_silent()
    }

    /// A guard for the session of this request. A request without `via` is the peer's own health check, which alone
    /// does not count as use.
    pub fn used_for(&self, head: &Parts) -> Option<Use> {
        head.headers.contains_key(VIA).then(|| self.group.use_it())
    }

    /// The answer to a request that is a call; `None` for any other request.
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
    /// `id=17, connections=4`: the connection's number, and the number of connections that are wanted.
    Begins { number: Option<u64>, wanted: Option<usize> },
    /// `leaving`: no further session on this connection.
    Leaving,
}

impl Call {
    /// The request that carries the call.
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

/// Parses a call. Unknown words are ignored, because a later version may add some.
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

/// The numbers of connections that an answer gives up.
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

    /// Otherwise the peer would notice only after a timeout, while its flows wait.
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

    /// A session on any of the connections counts.
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
        // The loop fills the list, so that earlier numbers are forgotten.
        reverse_peer.gone.add(100..100 + MAX_SIGNALLED_IDS as u64);
        reverse_peer.gone.has_told(100).await;
        assert!(tokio::time::timeout(Duration::from_millis(10), reverse_peer.gone.has_told(7)).await.is_err());
        let other = tokio::time::timeout(Duration::from_millis(10), reverse_peer.gone.has_told(2));
        assert!(other.await.is_err());
    }
}
