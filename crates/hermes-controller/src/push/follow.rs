//! The stream on which a node receives its documents.
//!
//! In: the reports of one node, and changes of the overlay. Out: the orders for that node.
//! Never: another node's document.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use hermes_model::document::scalar::OneOrMany;
use tokio::sync::watch;
use tonic::{Response, Status, Streaming};

use super::presence::{ConnectedNode, Identity};
use super::{EXPELLED, Peer, Push, rejection};
use crate::control::{Order, Report};
use crate::controller::NodeUpdates;
use crate::digest::{hex, sha256};
use crate::document::ProgramDigest as Program;
use crate::trust::Trust;

/// The maximum time until a node sends its first report.
const FIRST_REPORT_TIMEOUT: Duration = Duration::from_secs(10);

impl Push {
    /// Sends a node its document whenever it differs from the one that the node reports.
    pub(crate) async fn follow(
        self: Arc<Self>,
        peer: &Peer,
        mut reports: Streaming<Report>,
    ) -> Result<Response<impl Stream<Item = Result<Order, Status>> + use<>>, Status> {
        let is_node = match self.node_of(peer) {
            Err(refused) if peer.uris.is_empty() => return Err(refused),
            other => other,
        };
        let first = tokio::time::timeout(FIRST_REPORT_TIMEOUT, reports.message()).await;
        let first = first.map_err(|_| {
            Status::deadline_exceeded(
                "no report received; the first message must be a \
                                                                 report",
            )
        })??;
        let first = first.ok_or_else(|| {
            Status::invalid_argument(
                "no report received; the first message must be a \
                                                                  report",
            )
        })?;
        // The controller first reads the revision that the node reports. Otherwise that revision would count as lost,
        // and the node would receive an older document than it has. A false report costs one read of the store.
        self.controller.catch_up_with(first.tried.max(first.latest)).await.map_err(|error| {
            Status::unavailable(format!(
                "the node has a later revision than this controller, and the controller cannot read the store: {error}"
            ))
        })?;
        // Revocations are recovered even if the node is no longer enrolled, because each has a proof.
        let member = is_node.as_ref().ok().map(|node| (node, peer.key.as_str()));
        let recalled = self.controller.recall(member, &first).await.map_err(|refused| rejection(&refused))?;
        recalled.into_iter().for_each(|event| self.audit.record(event));
        is_node?;
        // The recovered revocations may have removed this node.
        let node = self.node_of(peer)?;
        let presence = match first.identity_only {
            true => ConnectedNode::beside(self.clone(), node.clone(), peer),
            false => ConnectedNode::begin(self.clone(), node.clone(), peer),
        };
        presence.update(&first);
        let following = Following {
            trust: self.controller.trust(),
            identity: Identity::of(&first),
            told: (BTreeSet::new(), String::new()),
            held: self.controller.held(),
            programs: self.controller.programs(),
            program: hex(&first.program[..first.program.len().min(64)]),
            is_unlisted: false,
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
}

/// The stream of one node.
struct Following {
    trust: watch::Receiver<Arc<Trust>>,
    /// The identity that the node reports.
    identity: Identity,
    /// The trusted CAs and the issuer in the last orders to the node.
    told: (BTreeSet<String>, String),
    held: watch::Receiver<bool>,
    programs: watch::Receiver<OneOrMany<Program>>,
    /// SHA-256 of the node's program, as it reports it, in hex.
    program: String,
    /// True if the node's program is not in the overlay's `programs`, and that was audited.
    is_unlisted: bool,
    watched: watch::Receiver<NodeUpdates>,
    key: String,
    /// The digest of the document that the node runs.
    running: Bytes,
    /// The digest of the document in the last order, so that a refused document is not sent again.
    ordered: Option<Bytes>,
    is_ended: bool,
    reports: Streaming<Report>,
    presence: ConnectedNode,
}

impl Following {
    /// Waits for the next order. Returns `None` if the node disconnected.
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
                        if let Err(status) = self.recall(&report).await {
                            return Some(Err(status));
                        }
                        self.presence.update(&report);
                        self.identity = Identity::of(&report);
                        self.running = report.running;
                    }
                    Ok(None) | Err(_) => return None,
                },
                changed = self.watched.changed() => changed.ok()?,
                changed = self.programs.changed() => changed.ok()?,
                changed = self.held.changed() => changed.ok()?,
                changed = self.trust.changed() => changed.ok()?,
            }
        }
    }

    /// Recovers revocations from a further report, because the first report cannot contain all.
    async fn recall(&self, report: &Report) -> Result<(), Status> {
        if report.revoked.is_empty() {
            return Ok(());
        }
        let ConnectedNode { push, node, .. } = &self.presence;
        let recalled = push.controller.recall(Some((node, &self.key)), report).await;
        recalled.map_err(|refused| rejection(&refused))?.into_iter().for_each(|event| push.audit.record(event));
        Ok(())
    }

    /// Returns the order to send now; `None` if the node needs no order now.
    fn order(&mut self) -> Option<Result<Order, Status>> {
        let watched = self.watched.borrow_and_update().clone();
        if watched.key.as_ref() != Some(&self.key) {
            // An empty document makes the node stop serving before the stream ends.
            if self.ordered.replace(Bytes::new()) == Some(Bytes::new()) {
                return Some(Err(Status::permission_denied(EXPELLED)));
            }
            return Some(Ok(Order { revision: watched.given.since, ..Order::default() }));
        }
        if *self.held.borrow_and_update() {
            return None;
        }
        if let Some(order) = self.identify() {
            return Some(Ok(order));
        }
        if watched.given.document.is_none() && self.is_uncompiled() {
            return None;
        }
        if self.presence.is_beside {
            return None;
        }
        let is_listed = {
            let programs = self.programs.borrow_and_update();
            programs.is_empty() || programs.iter().any(|program| program.is(&self.program))
        };
        if !is_listed {
            self.presence.unlisted(&self.program, watched.given.since, !std::mem::replace(&mut self.is_unlisted, true));
            return None;
        }
        self.is_unlisted = false;
        let document = watched.given.document.unwrap_or_default();
        let wanted = if document.is_empty() { Bytes::new() } else { sha256(&document) };
        if self.ordered.as_ref() == Some(&wanted) || (self.ordered.is_none() && self.running == wanted) {
            return None;
        }
        self.ordered = Some(wanted);
        let order = Order { revision: watched.given.since, document, ..Order::default() };
        Some(Ok(self.presence.push.controller.with_history(order)))
    }

    /// True if this version of Hermes cannot compile the node's document, although another version accepted it. The
    /// node then keeps its current document.
    fn is_uncompiled(&self) -> bool {
        let view = self.presence.push.controller.view();
        view.state.catalog.node(&self.presence.node).is_some() && view.document(&self.presence.node).is_none()
    }

    /// The order that updates the trusted CAs, and then the node's certificate.
    fn identify(&mut self) -> Option<Order> {
        let trust = self.trust.borrow_and_update().clone();
        let (said, told) = (&self.identity, &mut self.told);
        if said.authorities.is_empty() {
            return None;
        }
        if said.authorities != trust.fingerprints {
            // An order is not repeated, because the node may be unable to follow it.
            let is_news = told.0 != trust.fingerprints;
            told.0.clone_from(&trust.fingerprints);
            return is_news.then(|| Order { authorities: trust.authorities.clone(), ..Order::default() });
        }
        told.0.clear();
        let is_news = said.issuer != trust.issuer && told.1 != trust.issuer;
        if is_news {
            told.1.clone_from(&trust.issuer);
        } else if said.issuer == trust.issuer {
            told.1.clear();
        }
        is_news.then(|| Order { renew: true, ..Order::default() })
    }
}
