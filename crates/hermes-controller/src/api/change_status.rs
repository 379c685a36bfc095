//! The status of a change at each node whose document it changes.
//!
//! In: the outcome of the change, the reports of nodes, and later changes. Out: the status of each node, once no node
//! is waiting or the time limit is reached.
//! Never: a node listed as running a document that the node has not reported.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::body::Bytes;
use serde::Serialize;

use super::{ApiState, hex, sha256};
use crate::controller::{Outcome, StateView};
use crate::document::Name;
use crate::node_status::{NodeStatus, NodeStatuses};
use crate::store::Revision;

/// The status of a change at one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub(super) enum ChangeStatus {
    /// A dry run: the node would receive a new document.
    Planned,
    /// The node runs the new document.
    Running,
    /// The node refused the new document.
    Refused { reason: String },
    /// The node is connected and has not reported yet.
    Waiting,
    /// The node is not connected. It receives the latest document when it connects.
    Away,
    /// The node has not enrolled.
    Unenrolled,
    /// A later change replaced the document before the node ran it.
    Superseded { by: Revision },
    /// The node was removed from the overlay.
    Gone,
}

/// A change, while a request waits for its nodes.
struct Awaited<'a> {
    outcome: &'a Outcome,
    /// The digest of each node's new document; `None` if the change removed the node.
    digests: BTreeMap<Name, Option<String>>,
    /// The last revision that was checked for later changes.
    checked: Revision,
    /// Nodes whose document at the revision `checked` differs from that of this change.
    superseded: BTreeSet<Name>,
}

impl<'a> Awaited<'a> {
    fn of(outcome: &'a Outcome) -> Self {
        let digest = |document: &Option<Bytes>| document.as_ref().map(|document| hex(&sha256(document)));
        let digests = outcome.nodes.iter().map(|(node, document)| (node.clone(), digest(document))).collect();
        Self { outcome, digests, checked: outcome.revision, superseded: BTreeSet::new() }
    }

    /// Records the nodes whose document a later change has replaced. Documents are large, so each revision is compared
    /// only once.
    fn check_superseded(&mut self, view: &StateView) {
        if view.state.revision <= self.checked {
            return;
        }
        self.checked = view.state.revision;
        let is_other = |node, document| view.document(node) != Some(document);
        let documents = self.outcome.nodes.iter().filter_map(|(node, document)| Some((node, document.as_ref()?)));
        self.superseded =
            documents.filter(|(node, document)| is_other(node, document)).map(|(node, _)| node.clone()).collect();
    }

    fn status(&self, node: &Name, digest: &str, status: Option<&NodeStatus>) -> ChangeStatus {
        match status {
            Some(status) if status.running == digest => ChangeStatus::Running,
            Some(NodeStatus { connections: 1.., refused, tried, .. })
                if *tried >= self.outcome.revision && !refused.is_empty() =>
            {
                ChangeStatus::Refused { reason: refused.clone() }
            }
            _ if self.superseded.contains(node) => ChangeStatus::Superseded { by: self.checked },
            Some(NodeStatus { connections: 1.., .. }) => ChangeStatus::Waiting,
            _ => ChangeStatus::Away,
        }
    }

    fn all(&self, view: &StateView, statuses: &NodeStatuses) -> BTreeMap<Name, ChangeStatus> {
        let status = |node, digest: &Option<String>| {
            let status = digest.as_ref().map_or(ChangeStatus::Gone, |one| self.status(node, one, statuses.get(node)));
            if status == ChangeStatus::Away && !view.state.members.contains_key(node) {
                ChangeStatus::Unenrolled
            } else {
                status
            }
        };
        self.digests.iter().map(|(node, digest)| (node.clone(), status(node, digest))).collect()
    }
}

/// Waits, at most for `wait`, until no node of the change is in [`ChangeStatus::Waiting`] or its rollout has failed.
/// Returns the status of each node.
pub(super) async fn await_nodes(api: &ApiState, outcome: &Outcome, wait: Duration) -> BTreeMap<Name, ChangeStatus> {
    let mut awaited = Awaited::of(outcome);
    let (mut said, mut rollout) = (api.push.said(), api.controller.rollout());
    let deadline = tokio::time::Instant::now() + wait;
    // A node that no longer waits is not checked again, so that a report costs only one check for each remaining node.
    let mut waiting: Vec<_> =
        awaited.digests.iter().filter_map(|(node, one)| Some((node.clone(), one.clone()?))).collect();
    loop {
        said.borrow_and_update();
        let view = api.controller.view();
        awaited.check_superseded(&view);
        api.push.with_statuses(|statuses| {
            waiting.retain(|(node, digest)| awaited.status(node, digest, statuses.get(node)) == ChangeStatus::Waiting);
        });
        let is_failed = view.state.failed.as_ref().is_some_and(|(of, _)| *of == outcome.revision);
        let news = async {
            tokio::select! {
                changed = said.changed() => changed.is_ok(),
                changed = rollout.changed() => changed.is_ok(),
            }
        };
        if waiting.is_empty() || is_failed || !matches!(tokio::time::timeout_at(deadline, news).await, Ok(true)) {
            return api.push.with_statuses(|statuses| awaited.all(&view, statuses));
        }
    }
}
