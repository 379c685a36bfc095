//! The controller's side of [`crate::control`]: authenticates nodes, and sends them certificates and documents.
//!
//! In: connections with verified certificates. Out: certificates, documents whenever they change, and the status of
//! each node.
//! Never: another node's document. The certificate alone determines the node.

pub(crate) mod envoy;
mod follow;
mod presence;
mod rollout;
mod rotation;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hermes_net::outage::{FailureCounts, OutageLog};
use tokio::sync::watch;
use tonic::{Code, Response, Status};

pub(crate) use self::presence::ConnectedNode;
pub use self::rotation::{Blocker, Progress};
use crate::audit::{Audit, Event};
use crate::control::{EnrolRequest, Issued, RenewRequest};
use crate::controller::{ApplyError, Controller, HELD, SettledChange};
use crate::document::Name;
use crate::node_status::{NodeStatus, NodeStatuses};
use crate::token::EnrolmentToken;

/// The interval between status exchanges with other controllers, and between attempts to reach a failed store.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// The interval between log lines while documents are withheld from nodes.
const HELD_LOG_INTERVAL: Duration = Duration::from_secs(3600);
/// The peer of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// The URIs of the peer's certificate; empty if the peer presented none.
    pub uris: Vec<String>,
    /// The digest of the peer's public key, in the form in which the state has the keys of nodes and operators.
    pub key: String,
    /// The peer's address.
    pub from: Option<SocketAddr>,
    /// When the peer's certificate expires, in seconds since 1970.
    pub until: i64,
}

/// Sends orders to nodes, and records the status that nodes report.
pub struct Push {
    controller: Arc<Controller>,
    audit: Arc<Audit>,
    status: Mutex<NodeStatuses>,
    /// The number of status changes, which watchers observe.
    said: watch::Sender<u64>,
}

impl Push {
    /// Creates the service for the nodes of this controller.
    pub fn new(controller: Arc<Controller>, audit: Arc<Audit>) -> Arc<Self> {
        Arc::new(Self { controller, audit, status: Mutex::default(), said: watch::Sender::new(0) })
    }

    /// The controller whose documents are sent.
    pub(crate) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// The number of events left out of the audit log.
    pub(crate) fn audit_left_out(&self) -> u64 {
        self.audit.left_out()
    }

    /// Reads the status of all nodes.
    pub fn with_statuses<T>(&self, at: impl FnOnce(&NodeStatuses) -> T) -> T {
        at(&self.lock())
    }

    /// The status of one node.
    pub fn status_of(&self, node: &Name) -> NodeStatus {
        self.lock().get(node).cloned().unwrap_or_default()
    }

    /// Watches for status changes.
    pub fn said(&self) -> watch::Receiver<u64> {
        self.said.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NodeStatuses> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, node: &Name, change: impl FnOnce(&mut NodeStatus)) {
        self.lock().note(node, change);
        self.said.send_modify(|count| *count += 1);
    }

    /// Exchanges the status of nodes with other controllers, for as long as it is polled.
    pub(crate) async fn share(&self) {
        let Some(shared) = self.controller.shared() else { return std::future::pending().await };
        let hear = |heard| {
            self.lock().apply(heard);
            self.said.send_modify(|count| *count += 1);
        };
        let hearing = async {
            let mut outage = OutageLog::default();
            loop {
                let began = tokio::time::Instant::now();
                let heard = shared.watch_status(&hear).await;
                // The subscription ends only when the store fails.
                if began.elapsed() > RETRY_INTERVAL {
                    outage.recovered();
                }
                if let Err(error) = heard
                    && let Some(FailureCounts { count, elapsed }) = outage.failed("", &error.to_string())
                {
                    tracing::warn!(
                        again_in = ?RETRY_INTERVAL, attempts = count, since = ?elapsed,
                        "cannot follow the status of nodes at other controllers: {error}"
                    );
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        };
        let saying = async {
            let mut said = self.said();
            let mut outage = OutageLog::default();
            loop {
                said.borrow_and_update();
                let unsaid = self.lock().unsaid();
                if let Err(error) = shared.publish_status(unsaid).await {
                    if let Some(FailureCounts { count, elapsed }) = outage.failed("", &error.to_string()) {
                        tracing::warn!(
                            again_in = ?RETRY_INTERVAL, attempts = count, since = ?elapsed,
                            "cannot publish the status of nodes to other controllers: {error}"
                        );
                    }
                    self.lock().say_all();
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    continue;
                }
                outage.recovered();
                let _ = tokio::time::timeout(RETRY_INTERVAL, said.changed()).await;
            }
        };
        tokio::join!(hearing, saying);
    }

    /// Audits the outcomes of changes that were unknown, for as long as it is polled.
    pub(crate) async fn settle(&self) {
        loop {
            for SettledChange { by, revision, is_made } in self.controller.settled().await {
                let event = Event { what: "settle", by: Some(&by), revision: Some(revision), ..Event::default() };
                self.audit.record(match is_made {
                    Some(true) => event,
                    Some(false) => {
                        let why = format!("not made: revision {revision} is another change");
                        Event { refused: Some(why), ..event }
                    }
                    None => Event { unknown: Some("the log was compacted before it was read".to_owned()), ..event },
                });
            }
        }
    }

    /// Confirms a restored store once all enrolled nodes have reported the revocations that they store. Runs for as
    /// long as it is polled.
    pub(crate) async fn confirm(&self) {
        let (mut said, mut held) = (self.said(), self.controller.held());
        let mut outage = OutageLog::default();
        // When the log line is written again; `None` while no documents are withheld.
        let mut due: Option<tokio::time::Instant> = None;
        loop {
            said.borrow_and_update();
            if !*held.borrow_and_update() {
                due = None;
            } else {
                let view = self.controller.view();
                let is_back =
                    |node: &Name| self.with_statuses(|statuses| statuses.get(node).is_some_and(NodeStatus::is_back));
                if view.missing(is_back).next().is_none() {
                    match self.controller.confirm("controller").await {
                        Ok(revision) => {
                            let about = Some("all enrolled nodes have reconnected".to_owned());
                            let by = Some("controller");
                            let revision = Some(revision);
                            self.audit.record(Event { what: "confirm", by, about, revision, ..Event::default() });
                        }
                        Err(error) => {
                            if let Some(FailureCounts { count, elapsed }) = outage.failed("", &error.to_string()) {
                                tracing::warn!(
                                    again_in = ?RETRY_INTERVAL, attempts = count, since = ?elapsed,
                                    "cannot confirm the restored store: {error}"
                                );
                            }
                            tokio::time::sleep(RETRY_INTERVAL).await;
                            continue;
                        }
                    }
                }
                let now = tokio::time::Instant::now();
                if view.is_held() && due.is_none_or(|due| due <= now) {
                    let missing = view.missing(is_back).count();
                    tracing::warn!(revision = view.state.revision, missing, "{HELD}");
                    due = Some(now + HELD_LOG_INTERVAL);
                }
            }
            tokio::select! {
                () = tokio::time::sleep_until(due.unwrap_or_else(tokio::time::Instant::now)), if due.is_some() => {}
                changed = said.changed() => if changed.is_err() { return },
                changed = held.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Enrols a node: issues its first certificate.
    pub(crate) async fn enrol(&self, peer: &Peer, request: EnrolRequest) -> Result<Response<Issued>, Status> {
        let event = Event { what: "enrol", from: peer.from, ..Event::default() };
        let ticket: EnrolmentToken = request.token.parse().map_err(|error: String| {
            self.audit.record(Event { refused: Some(error.clone()), ..event.clone() });
            Status::new(Code::PermissionDenied, error)
        })?;
        let event = Event { about: Some(format!("token {}", ticket.id)), ..event };
        let (node, issued) = match self.controller.enrol(&ticket, &request.request).await {
            Ok(enrolled) => enrolled,
            Err(refused) => {
                self.audit.record(event.failed(&refused));
                return Err(rejection(&refused));
            }
        };
        self.audit.record(Event { by: Some(&format!("node/{node}")), ..event });
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// Renews a node's certificate.
    pub(crate) fn renew(&self, peer: &Peer, request: &RenewRequest) -> Result<Response<Issued>, Status> {
        let node = self.node_of(peer)?;
        if self.controller.view().is_held() {
            return Err(Status::unavailable(HELD));
        }
        let issued = self.controller.renew(&node, &request.request).map_err(|refused| {
            let by = format!("node/{node}");
            let event = Event { what: "renew", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.record(Event { refused: Some(refused.to_string()), ..event });
            rejection(&refused)
        })?;
        if let Ok(facts) = crate::ca::facts(&issued.certificate) {
            self.note(&node, |status| status.certificate_until = facts.until);
        }
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// Returns the enrolled node that the peer's certificate names. Otherwise refuses the peer.
    pub(crate) fn node_of(&self, peer: &Peer) -> Result<Name, Status> {
        let view = self.controller.view();
        let overlay = view.state.catalog.overlay().map(|(name, _)| format!("spiffe://{name}/node/"));
        let named =
            overlay.and_then(|overlay| peer.uris.iter().find_map(|uri| uri.strip_prefix(&overlay)?.parse().ok()));
        let Some(node): Option<Name> = named else {
            return Err(Status::unauthenticated("certificate of a node of this overlay required"));
        };
        if view.state.members.get(&node).is_none_or(|member| member.key != peer.key) {
            let by = format!("node/{node}");
            let event = Event { what: "follow", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.record(Event { refused: Some(EXPELLED.to_owned()), ..event });
            return Err(Status::permission_denied(EXPELLED));
        }
        Ok(node)
    }
}

pub(crate) const EXPELLED: &str =
    "this node was removed, or has enrolled again; enrol it with a token and an empty --state";

/// The gRPC status of an error.
fn rejection(refused: &ApplyError) -> Status {
    let code = match refused {
        ApplyError::Faults(_) => Code::InvalidArgument,
        ApplyError::Conflict { .. } | ApplyError::Busy(_) | ApplyError::Turn | ApplyError::NotReady(_) => Code::Aborted,
        ApplyError::Unusable(_) => Code::InvalidArgument,
        ApplyError::Denied(_) => Code::PermissionDenied,
        ApplyError::Absent(_) | ApplyError::Unknown(_) => Code::NotFound,
        ApplyError::Store(_) => Code::Unavailable,
    };
    Status::new(code, refused.to_string())
}
