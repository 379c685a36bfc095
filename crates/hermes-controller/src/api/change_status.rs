//! What becomes of a change at the nodes that it touches.
//!
//! In: what it came to, what nodes say, and what is changed after it. Out: a status for each node, as soon as none is open.
//! Never: a node that is said to run what it has not said itself that it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::body::Bytes;
use serde::Serialize;

use super::{Desk, hex, sha256};
use crate::controller::{Known, Outcome};
use crate::document::Name;
use crate::seen::{Roll, Seen};
use crate::store::Revision;

/// What became of a change at one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub(super) enum ChangeStatus {
    /// It would have another document.
    Planned,
    /// It runs it.
    Running,
    /// It does not.
    Refused { reason: String },
    /// It has not said so yet.
    Waiting,
    /// It is not there; it gets what is newest when it comes back.
    Away,
    /// The node has not enrolled.
    Unenrolled,
    /// It gets what another change made of it, which came before it had this one.
    Superseded { by: Revision },
    /// It is no part of the overlay any more.
    Gone,
}

/// What becomes of a change at the nodes that it touches.
struct Awaited<'a> {
    outcome: &'a Outcome,
    /// Of what each is to run. `None`: it is gone.
    digests: BTreeMap<Name, Option<String>>,
    /// As of this revision,
    seen: Revision,
    /// these are to run something else.
    superseded: BTreeSet<Name>,
}

impl<'a> Awaited<'a> {
    fn of(outcome: &'a Outcome) -> Self {
        let digest = |document: &Option<Bytes>| document.as_ref().map(|document| hex(&sha256(document)));
        let digests = outcome.nodes.iter().map(|(node, document)| (node.clone(), digest(document))).collect();
        Self { outcome, digests, seen: outcome.revision, superseded: BTreeSet::new() }
    }

    /// Looks for later changes, once for each revision: documents are long.
    fn heed(&mut self, known: &Known) {
        if known.state.revision <= self.seen {
            return;
        }
        self.seen = known.state.revision;
        let is_other = |node, document| known.document(node) != Some(document);
        let documents = self.outcome.nodes.iter().filter_map(|(node, document)| Some((node, document.as_ref()?)));
        self.superseded =
            documents.filter(|(node, document)| is_other(node, document)).map(|(node, _)| node.clone()).collect();
    }

    fn status(&self, node: &Name, digest: &str, seen: Option<&Seen>) -> ChangeStatus {
        match seen {
            Some(seen) if seen.running == digest => ChangeStatus::Running,
            Some(Seen { connections: 1.., refused, tried, .. })
                if *tried >= self.outcome.revision && !refused.is_empty() =>
            {
                ChangeStatus::Refused { reason: refused.clone() }
            }
            _ if self.superseded.contains(node) => ChangeStatus::Superseded { by: self.seen },
            Some(Seen { connections: 1.., .. }) => ChangeStatus::Waiting,
            _ => ChangeStatus::Away,
        }
    }

    fn fates(&self, known: &Known, seen: &Roll) -> BTreeMap<Name, ChangeStatus> {
        let status = |node, digest: &Option<String>| {
            let status = digest.as_ref().map_or(ChangeStatus::Gone, |one| self.status(node, one, seen.get(node)));
            if status == ChangeStatus::Away && !known.state.members.contains_key(node) {
                ChangeStatus::Unenrolled
            } else {
                status
            }
        };
        self.digests.iter().map(|(node, digest)| (node.clone(), status(node, digest))).collect()
    }
}

/// Waits until each node that a change touches has had its say, or can have none, or for so long.
pub(super) async fn await_nodes(desk: &Desk, outcome: &Outcome, wait: Duration) -> BTreeMap<Name, ChangeStatus> {
    let mut awaited = Awaited::of(outcome);
    let (mut said, mut rollout) = (desk.push.said(), desk.controller.rollout());
    let deadline = tokio::time::Instant::now() + wait;
    // Who has been seen to be done is not looked at again: the last one's word costs as much as the first one's.
    let mut waiting: Vec<_> =
        awaited.digests.iter().filter_map(|(node, one)| Some((node.clone(), one.clone()?))).collect();
    loop {
        said.borrow_and_update();
        let known = desk.controller.known();
        awaited.heed(&known);
        desk.push.look(|seen| {
            waiting.retain(|(node, digest)| awaited.status(node, digest, seen.get(node)) == ChangeStatus::Waiting);
        });
        let is_failed = known.state.failed.as_ref().is_some_and(|(of, _)| *of == outcome.revision);
        let news = async {
            tokio::select! {
                changed = said.changed() => changed.is_ok(),
                changed = rollout.changed() => changed.is_ok(),
            }
        };
        if waiting.is_empty() || is_failed || !matches!(tokio::time::timeout_at(deadline, news).await, Ok(true)) {
            return desk.push.look(|seen| awaited.fates(&known, seen));
        }
    }
}
