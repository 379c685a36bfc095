//! The controller's side of [`crate::control`]: who may ask, and what each node is told.
//!
//! In: connections whose certificates were verified. Out: certificates, documents at the moment in which they change, and what
//! nodes said about them.
//! Never: another node's document. What a node asks for is found by its certificate, and by nothing that it says.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use serde::Serialize;
use tokio::sync::watch;
use tonic::{Code, Response, Status, Streaming};

use crate::audit::{Audit, Event};
use crate::control::{EnrolRequest, Issued, Order, RenewRequest, Report};
use crate::controller::{Controller, Refused, Watched};
use crate::document::Name;
use crate::store::Revision;
use crate::token::Ticket;

/// Nodes that are remembered for what they said.
const MOST_SEEN: usize = 100_000;
/// What a node says against a document is kept up to here.
const MOST_SAID: usize = 16 << 10;

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// The URIs of its certificate. Empty: it has shown none.
    pub uris: Vec<String>,
    /// The digest of its key.
    pub key: String,
    /// From where.
    pub from: Option<SocketAddr>,
}

/// What is known of a node from itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Seen {
    /// How many connections it follows by: one, if all is well, and none where it is away.
    pub connections: usize,
    /// SHA-256 of the document that it runs, in hex; empty where it runs none.
    pub running: String,
    /// The revision that it has tried last.
    pub tried: Revision,
    /// Why it does not run that one; empty where it does.
    pub refused: String,
    /// Its version of Hermes.
    pub version: String,
    /// SHA-256 of its program, in hex, as it says.
    pub program: String,
}

/// What nodes are told, and what they say.
pub struct Push {
    controller: Arc<Controller>,
    audit: Arc<Audit>,
    seen: Mutex<BTreeMap<Name, Seen>>,
    /// Counts what they say.
    said: watch::Sender<u64>,
}

impl Push {
    /// For the nodes of this controller.
    pub fn new(controller: Arc<Controller>, audit: Arc<Audit>) -> Arc<Self> {
        Arc::new(Self { controller, audit, seen: Mutex::default(), said: watch::Sender::new(0) })
    }

    /// Whose documents they are told.
    pub(crate) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// What nodes have said so far.
    pub fn seen(&self) -> BTreeMap<Name, Seen> {
        self.lock().clone()
    }

    /// Follows that they say something.
    pub fn said(&self) -> watch::Receiver<u64> {
        self.said.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Name, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, node: &Name, change: impl FnOnce(&mut Seen)) {
        let mut seen = self.lock();
        if seen.len() < MOST_SEEN || seen.contains_key(node) {
            change(seen.entry(node.clone()).or_default());
        }
        drop(seen);
        self.said.send_modify(|count| *count += 1);
    }

    /// A node's first certificate.
    pub(crate) async fn enrol(&self, peer: &Peer, request: EnrolRequest) -> Result<Response<Issued>, Status> {
        let event = Event { what: "enrol", from: peer.from, ..Event::default() };
        let ticket: Ticket = request.token.parse().map_err(|error: String| {
            self.audit.tell(Event { refused: Some(error.clone()), ..event.clone() });
            Status::new(Code::PermissionDenied, error)
        })?;
        let event = Event { about: Some(format!("token {}", ticket.id)), ..event };
        let (node, issued) = match self.controller.enrol(&ticket, &request.request).await {
            Ok(enrolled) => enrolled,
            Err(refused) => {
                self.audit.tell(Event { refused: Some(refused.to_string()), ..event });
                return Err(status(&refused));
            }
        };
        self.audit.tell(Event { by: Some(&format!("node/{node}")), ..event });
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// The next one.
    pub(crate) fn renew(&self, peer: &Peer, request: &RenewRequest) -> Result<Response<Issued>, Status> {
        let node = self.node_of(peer)?;
        let issued = self.controller.renew(&node, &request.request).map_err(|refused| {
            let by = format!("node/{node}");
            let event = Event { what: "renew", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.tell(Event { refused: Some(refused.to_string()), ..event });
            status(&refused)
        })?;
        Ok(Response::new(Issued {
            node: node.to_string(),
            certificate: issued.certificate,
            authorities: issued.authorities,
        }))
    }

    /// Tells a node what it is to run, whenever that is something else than it says that it runs.
    pub(crate) async fn follow(
        self: Arc<Self>,
        peer: &Peer,
        mut reports: Streaming<Report>,
    ) -> Result<Response<impl Stream<Item = Result<Order, Status>> + use<>>, Status> {
        let node = self.node_of(peer)?;
        let first = reports.message().await?.ok_or_else(|| Status::invalid_argument("say first what you run"))?;
        let presence = Presence::begin(self.clone(), node.clone());
        presence.hear(&first);
        let following = Following {
            watched: self.controller.watch(&node),
            key: peer.key.clone(),
            running: first.running,
            ordered: None,
            is_ended: false,
            reports,
            presence,
        };
        Ok(Response::new(unfold(following, async |mut following| {
            let item = following.next().await?;
            following.is_ended = item.is_err();
            Some((item, following))
        })))
    }

    /// Which node that is.
    pub(crate) fn node_of(&self, peer: &Peer) -> Result<Name, Status> {
        let known = self.controller.known();
        let overlay = known.state.catalog.overlay().map(|(name, _)| format!("spiffe://{name}/node/"));
        let named =
            overlay.and_then(|overlay| peer.uris.iter().find_map(|uri| uri.strip_prefix(&overlay)?.parse().ok()));
        let Some(node): Option<Name> = named else {
            return Err(Status::unauthenticated(
                "only nodes may ask this: show the certificate of one of this overlay",
            ));
        };
        if known.state.members.get(&node).is_none_or(|member| member.key != peer.key) {
            let by = format!("node/{node}");
            let event = Event { what: "follow", by: Some(&by), from: peer.from, ..Event::default() };
            self.audit.tell(Event { refused: Some(EXPELLED.to_owned()), ..event });
            return Err(Status::permission_denied(EXPELLED));
        }
        Ok(node)
    }
}

pub(crate) const EXPELLED: &str = "this node is no member any more, or has enrolled anew; enrol it with a token";

/// That a node is there, for as long as this lives.
pub(crate) struct Presence {
    push: Arc<Push>,
    node: Name,
}

impl Presence {
    pub(crate) fn begin(push: Arc<Push>, node: Name) -> Self {
        push.note(&node, |seen| seen.connections += 1);
        Self { push, node }
    }

    pub(crate) fn hear(&self, report: &Report) {
        let Report { running, tried, refused, version, program } = report;
        let mut refused = refused.clone();
        if refused.len() > MOST_SAID {
            refused.truncate(refused.floor_char_boundary(MOST_SAID));
            refused.push_str(" ...");
        }
        self.push.note(&self.node, |seen| {
            *seen = Seen {
                connections: seen.connections,
                running: crate::authority::hex(&running[..running.len().min(64)]),
                tried: *tried,
                refused,
                version: version.chars().take(64).collect(),
                program: crate::authority::hex(&program[..program.len().min(64)]),
            };
        });
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.push.note(&self.node, |seen| seen.connections = seen.connections.saturating_sub(1));
    }
}

/// One node that follows.
struct Following {
    watched: watch::Receiver<Watched>,
    key: String,
    /// The digest of what it runs.
    running: Bytes,
    /// The digest of what it was told last: it is not told again what it refuses.
    ordered: Option<Bytes>,
    is_ended: bool,
    reports: Streaming<Report>,
    presence: Presence,
}

impl Following {
    /// The next order, once there is one. `None`: the node is gone.
    async fn next(&mut self) -> Option<Result<Order, Status>> {
        loop {
            if self.is_ended {
                return None;
            }
            if let Some(order) = self.order() {
                return Some(order);
            }
            tokio::select! {
                report = self.reports.message() => match report {
                    Ok(Some(report)) => {
                        self.presence.hear(&report);
                        self.running = report.running;
                    }
                    Ok(None) | Err(_) => return None,
                },
                changed = self.watched.changed() => changed.ok()?,
            }
        }
    }

    /// What it is to be told now.
    fn order(&mut self) -> Option<Result<Order, Status>> {
        let watched = self.watched.borrow_and_update().clone();
        if watched.key.as_ref() != Some(&self.key) {
            // First it is told to serve nobody.
            if self.ordered.replace(Bytes::new()) == Some(Bytes::new()) {
                return Some(Err(Status::permission_denied(EXPELLED)));
            }
            return Some(Ok(Order { revision: watched.given.since, document: Bytes::new() }));
        }
        let document = watched.given.document.unwrap_or_default();
        let wanted = if document.is_empty() { Bytes::new() } else { sha256(&document) };
        if self.ordered.as_ref() == Some(&wanted) || (self.ordered.is_none() && self.running == wanted) {
            return None;
        }
        self.ordered = Some(wanted);
        Some(Ok(Order { revision: watched.given.since, document }))
    }
}

/// What a document is known by.
pub fn sha256(document: &[u8]) -> Bytes {
    Bytes::copy_from_slice(digest(&SHA256, document).as_ref())
}

/// As gRPC says it.
fn status(refused: &Refused) -> Status {
    let code = match refused {
        Refused::Faults(_) => Code::InvalidArgument,
        Refused::Conflict { .. } => Code::Aborted,
        Refused::Denied(_) => Code::PermissionDenied,
        Refused::Absent(_) => Code::NotFound,
        Refused::Store(_) => Code::Unavailable,
    };
    Status::new(code, refused.to_string())
}
