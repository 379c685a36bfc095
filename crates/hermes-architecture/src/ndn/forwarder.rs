//! The forwarders before the faces of routes: requests of a worker share their faces, Interests and stored Data.
//!
//! In: Interests of requests, and packets of faces. Out: Interests to faces, and packets that the trust schema of the
//! route allows, to the requests that wait for them. A face closes when no request has needed it for a while; stored
//! Data stays until the configuration changes. Never: a packet that nobody has judged.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hermes_model::snapshot::{Face as FaceConfig, Route};
use hermes_ndn::Packet;
use hermes_ndn::forwarder::{ConsumerId, DataOutcome, Delivery, Forwarder, ForwarderLimits, Output, PitFull};
use hermes_ndn::lp::LpPacket;
use hermes_ndn::packet::Interest;
use hermes_ndn::signature::VerifyingKey;
use hermes_ndn::trust::TrustSchema;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::face::{Face, connect_face, label};
use hermes_outbound::generation::Generation;
use hermes_outbound::outbound::Outbound;
use hermes_transport::error::Error;
use hermes_transport::runtime::session::SessionEntry;

/// The time for which a face stays open that no request needs.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// The time that a face may stay without room before it counts as dead.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which a face is replaced that has sent nothing to requests that waited.
const SILENCE: Duration = Duration::from_secs(2);
/// Deliveries that may wait for one request: more than the Interests that it has under way.
const DELIVERIES: usize = 1024;

/// The forwarders of a worker, by the face of their routes.
#[derive(Default)]
pub struct Forwarders {
    by_face: RefCell<HashMap<FaceConfig, Rc<SharedForwarder>>>,
    /// The generation of the configuration that they belong to.
    generation: Cell<u64>,
}

/// A forwarder, and its face while that is open.
struct SharedForwarder {
    core: RefCell<Forwarder>,
    to_face: RefCell<Option<mpsc::Sender<Bytes>>>,
    consumers: RefCell<HashMap<ConsumerId, Registration>>,
    /// One request at a time connects the face. The others wait for its result.
    turn: Semaphore,
    /// The number of attempts to connect that have failed, and the last error.
    failed: RefCell<(u64, Option<Error>)>,
    next: Cell<ConsumerId>,
    used: Cell<Instant>,
    /// The number of frames that have arrived.
    received: Cell<u64>,
    started: Instant,
}

/// The destination of deliveries for a request.
struct Registration {
    deliveries: mpsc::Sender<Delivery>,
    /// The face that was open when the request joined. The request learns of its end.
    to_face: mpsc::Sender<Bytes>,
}

/// A request at a forwarder. Once it is dropped, deliveries for it are discarded.
pub(super) struct Consumer {
    forwarder: Rc<SharedForwarder>,
    to_face: mpsc::Sender<Bytes>,
    id: ConsumerId,
    deliveries: mpsc::Receiver<Delivery>,
    /// The number of frames that had arrived before it joined, and when it did.
    received: u64,
    joined: Instant,
    /// The face was open before this request.
    pub(super) is_kept: bool,
}

/// The face has closed.
#[derive(Debug)]
pub(super) struct Closed;

impl Forwarders {
    /// Joins the forwarder of a route, and connects its face if none is open.
    ///
    /// # Errors
    /// The face cannot be connected.
    pub(super) async fn join(
        &self,
        worker: &Rc<Outbound>,
        generation: &Generation,
        entry: &SessionEntry,
        config: &FaceConfig,
        route: &Route,
    ) -> Result<Consumer, Error> {
        let forwarder = self.forwarder(worker, generation, config);
        if let Some(to_face) = forwarder.open_face() {
            *entry.peer.borrow_mut() = Some(label(&config.uri, route));
            return Ok(forwarder.join(to_face, true));
        }
        let before = forwarder.failed.borrow().0;
        // The semaphore is never closed.
        let _turn = forwarder.turn.acquire().await.ok();
        if let Some(to_face) = forwarder.open_face() {
            *entry.peer.borrow_mut() = Some(label(&config.uri, route));
            return Ok(forwarder.join(to_face, true));
        }
        if let (failed, Some(error)) = &*forwarder.failed.borrow()
            && *failed > before
        {
            return Err(error.clone());
        }
        let connected = connect_face(worker, entry, config, route).await;
        let face = connected.inspect_err(|error| {
            *forwarder.failed.borrow_mut() = (before + 1, Some(error.clone()));
        })?;
        let consumer = forwarder.join(face.to_face.clone(), false);
        *forwarder.to_face.borrow_mut() = Some(face.to_face.clone());
        worker.spawn(serve(Rc::downgrade(&forwarder), worker.clone(), face));
        Ok(consumer)
    }

    fn forwarder(&self, worker: &Outbound, generation: &Generation, config: &FaceConfig) -> Rc<SharedForwarder> {
        let new = || Rc::new(SharedForwarder::new(trust_of(generation, config), random_nonce(worker)));
        let mut by_face = self.by_face.borrow_mut();
        match generation.number.cmp(&self.generation.get()) {
            // A session that began before the configuration changed trusts what was trusted then.
            Ordering::Less => return new(),
            Ordering::Equal => {}
            // Requests under way keep the forwarders that they have joined.
            Ordering::Greater => by_face.clear(),
        }
        self.generation.set(generation.number);
        by_face.entry(config.clone()).or_insert_with(new).clone()
    }
}

/// A random start for nonces.
pub(super) fn random_nonce(worker: &Outbound) -> u32 {
    u32::try_from(worker.random().1 & u64::from(u32::MAX)).unwrap_or_default()
}

fn trust_of(generation: &Generation, config: &FaceConfig) -> TrustSchema {
    let anchor = |(prefix, file): &(Arc<str>, std::path::PathBuf)| {
        let key = hermes_net::tls::public_key(generation.file(file)?).ok()?;
        Some((prefix.parse().ok()?, VerifyingKey::Public(key.into())))
    };
    TrustSchema::new(config.anchors.iter().filter_map(anchor).collect(), config.accept_digest)
}

impl SharedForwarder {
    fn new(trust: TrustSchema, nonce: u32) -> Self {
        Self {
            core: RefCell::new(Forwarder::new(ForwarderLimits::default(), trust, nonce)),
            to_face: RefCell::default(),
            consumers: RefCell::default(),
            turn: Semaphore::new(1),
            failed: RefCell::default(),
            next: Cell::new(0),
            used: Cell::new(Instant::now()),
            received: Cell::new(0),
            started: Instant::now(),
        }
    }

    fn open_face(&self) -> Option<mpsc::Sender<Bytes>> {
        self.to_face.borrow().clone().filter(|to_face| !to_face.is_closed())
    }

    fn join(self: &Rc<Self>, to_face: mpsc::Sender<Bytes>, is_kept: bool) -> Consumer {
        let (sender, deliveries) = mpsc::channel(DELIVERIES);
        let id = self.next.replace(self.next.get() + 1);
        let registration = Registration { deliveries: sender, to_face: to_face.clone() };
        self.consumers.borrow_mut().insert(id, registration);
        Consumer {
            forwarder: self.clone(),
            to_face,
            id,
            deliveries,
            received: self.received.get(),
            joined: Instant::now(),
            is_kept,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Lets the next request connect a new face, if this one is still in use.
    fn drop_face(&self, to_face: &mpsc::Sender<Bytes>) {
        if self.to_face.borrow_mut().take_if(|open| open.same_channel(to_face)).is_some() {
            self.core.borrow_mut().close_face();
        }
    }

    /// Hands out what waits, and returns the Interests to send.
    fn hand_out(&self) -> Vec<Interest> {
        let (mut core, consumers) = (self.core.borrow_mut(), self.consumers.borrow());
        let mut interests = Vec::new();
        while let Some(output) = core.next_output() {
            match output {
                Output::Send(interest) => interests.push(*interest),
                // A request that has ended gets nothing, and one whose queue is full asks again.
                Output::Deliver(consumer, delivery) => {
                    let _ = consumers.get(&consumer).map(|consumer| consumer.deliveries.try_send(delivery));
                }
            }
        }
        interests
    }

    /// Takes a frame of the face.
    fn take(&self, worker: &Outbound, frame: Bytes) {
        let metrics = &worker.shared.metrics;
        self.received.set(self.received.get() + 1);
        let frame = LpPacket::decode(frame).ok();
        let parts = frame.and_then(|frame| Some((frame.fragment?, frame.nack, frame.congestion.is_some())));
        let packet = parts.map(|(packet, nack, is_marked)| (Packet::decode(packet), nack, is_marked));
        let now = self.now();
        // The clock of the machine may have been set since the last packet.
        let utc = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match packet {
            Some((Ok(Packet::Data(data)), None, is_marked)) => {
                let taken = self.core.borrow_mut().take_data(data, is_marked, now, utc);
                match taken {
                    DataOutcome::Unsolicited => metrics.dropped("ndn-unsolicited", 1),
                    DataOutcome::NoRoom => metrics.limit("ndn-certificates"),
                    DataOutcome::Delivered
                    | DataOutcome::Certificate
                    | DataOutcome::Unverified
                    | DataOutcome::Untrusted => {}
                }
            }
            Some((Ok(Packet::Interest(interest)), Some(reason), _)) => {
                self.core.borrow_mut().take_nack(&interest, reason, now);
            }
            // An Interest of the peer; the gateway offers no content.
            Some((Ok(_), _, _)) => {}
            Some((Err(_), _, _)) | None => metrics.dropped("ndn-malformed", 1),
        }
    }
}

/// Serves a face until it closes, or nobody has needed it for a while.
async fn serve(forwarder: Weak<SharedForwarder>, worker: Rc<Outbound>, mut face: Face) {
    loop {
        let wait = {
            // All requests have ended, and another configuration runs.
            let Some(forwarder) = forwarder.upgrade() else { return };
            let due = forwarder.core.borrow().next_timeout();
            due.map_or(IDLE_TIME, |due| due.saturating_sub(forwarder.now()).min(IDLE_TIME))
        };
        let received = tokio::time::timeout(wait, face.from_face.recv()).await;
        let Some(forwarder) = forwarder.upgrade() else { return };
        match received {
            Ok(Some(frame)) => forwarder.take(&worker, frame),
            Ok(None) => break,
            Err(_) => forwarder.core.borrow_mut().handle_timeout(forwarder.now()),
        }
        let refused = forwarder.core.borrow_mut().take_refused();
        if refused > 0 {
            worker.shared.metrics.dropped("ndn-untrusted", refused);
        }
        for certificate in forwarder.hand_out() {
            // It is requested again if the face has no room. To wait here would stop the packets that make room.
            let _ = face.to_face.try_send(certificate.encode());
        }
        let is_of_face = |to_face: &mpsc::Sender<Bytes>| to_face.same_channel(&face.to_face);
        let is_needed = forwarder.consumers.borrow().values().any(|consumer| is_of_face(&consumer.to_face));
        let is_open = forwarder.to_face.borrow().as_ref().is_some_and(is_of_face);
        if !is_needed && (!is_open || forwarder.used.get().elapsed() >= IDLE_TIME) {
            break;
        }
    }
    if let Some(forwarder) = forwarder.upgrade() {
        // A request may have connected a new face already.
        forwarder.drop_face(&face.to_face);
        // Requests learn it from the end of their queues.
        forwarder.consumers.borrow_mut().retain(|_, consumer| !consumer.to_face.same_channel(&face.to_face));
    }
}

impl Consumer {
    /// Sends an Interest, unless stored Data answers it or it is under way for another request. `PitFull` means that too
    /// many Interests wait; the Interest must be repeated.
    ///
    /// # Errors
    /// The face has closed.
    pub(super) async fn send_interest(
        &self,
        worker: &Outbound,
        interest: Interest,
    ) -> Result<Result<(), PitFull>, Closed> {
        let forwarder = &self.forwarder;
        let taken = forwarder.core.borrow_mut().take_interest(self.id, interest, forwarder.now());
        if taken.is_err() {
            worker.shared.metrics.limit("ndn-pending-interests");
        }
        for interest in forwarder.hand_out() {
            let sent = tokio::time::timeout(SEND_TIMEOUT, self.to_face.send(interest.encode())).await;
            if !matches!(sent, Ok(Ok(()))) {
                forwarder.drop_face(&self.to_face);
                return Err(Closed);
            }
        }
        Ok(taken)
    }

    /// Waits for the next delivery.
    ///
    /// # Errors
    /// The face has closed.
    pub(super) async fn next(&mut self) -> Result<Delivery, Closed> {
        self.deliveries.recv().await.ok_or(Closed)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.forwarder.consumers.borrow_mut().remove(&self.id);
        self.forwarder.core.borrow_mut().leave(self.id);
        // Nothing has come while it waited, for it or for others: the peer may be gone. The next request connects again.
        if self.forwarder.received.get() == self.received && self.joined.elapsed() >= SILENCE {
            self.forwarder.drop_face(&self.to_face);
        }
        self.forwarder.used.set(Instant::now());
    }
}
