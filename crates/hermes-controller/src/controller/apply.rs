//! Changes of documents: the effect of a request, and the commit that makes it.
//!
//! In: a request, and the view against which it is validated. Out: the changes to write, and their effect at each node.
//! Never: a change that leads to an invalid node document.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{ApplyError, Controller, StateView, at_length, lock, now};
use crate::compile::{ChangedDocuments, Plan};
use crate::document::{Fault, Key, Kind, Name, Resource, Spec};
use crate::state::{Change, PreviousDocument, State, owner_of};
use crate::store::Revision;

/// Documents to put and delete, together or not at all.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The author of the request, as [`Commit::by`](crate::state::Commit::by).
    pub by: String,
    /// Documents to add or replace.
    pub put: Vec<Resource>,
    /// Documents to delete.
    pub delete: Vec<Key>,
    /// The revision that the client has read. The request fails if one of its documents changed later. `None` omits the
    /// check.
    pub since: Option<Revision>,
    /// A dry run: only reports the effect.
    pub is_dry: bool,
    /// True if all nodes receive the change at once, even if the overlay configures waves. A rollout in progress then
    /// ends.
    pub is_now: bool,
    /// The revision whose rollout the request rolls back, and the reason; `None` for all other requests.
    pub takes_back: Option<(Revision, String)>,
}

/// The effect of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The revision of the change. In a dry run, or if nothing changes, the current revision.
    pub revision: Revision,
    /// New documents.
    pub created: Vec<Key>,
    /// Changed documents.
    pub changed: Vec<Key>,
    /// Nodes that continue to drain, because their new documents do not set `draining`.
    pub still_draining: Vec<Name>,
    /// Deleted documents.
    pub deleted: Vec<Key>,
    /// The new document of each affected node; `None` if the node was removed.
    pub nodes: ChangedDocuments,
    /// Warnings: valid documents that are perhaps not intended.
    pub warnings: Vec<Fault>,
}

/// The compiled plan of a change that was validated.
pub(super) struct CompiledChange {
    pub(super) plan: Plan,
    /// Nodes with a new document, and whether they still exist.
    pub(super) touched: Vec<(Name, bool)>,
    /// Documents that differ from the plan before.
    pub(super) changed: BTreeSet<Key>,
}

impl CompiledChange {
    /// True if the plan was compiled for these documents: another controller may have written the revision.
    pub(super) fn is_of(&self, state: &State) -> bool {
        self.changed.iter().all(|key| self.plan.catalog().get(key) == state.catalog.get(key))
    }
}

impl Controller {
    /// Changes documents, or reports what that would change.
    ///
    /// # Errors
    /// Every reason against the change, which is then not made. After [`ApplyError::is_unknown`] the outcome is
    /// unknown.
    pub async fn apply(&self, request: &Request) -> Result<Outcome, ApplyError> {
        let judge = |view: &StateView| {
            if let Some(refused) = turn(view, request) {
                // The refusal is recorded once, so that the owner has a turn after the rollout.
                let owner = owner_of(&request.by);
                let is_own = view.state.rollout.as_ref().is_some_and(|waved| owner_of(&waved.by) == owner);
                let is_known = is_own || view.state.turns.waiting.contains(&owner);
                return Ok(((!is_known).then_some(Change::Awaited { owner }).into_iter().collect(), Err(refused)));
            }
            let (changes, outcome, planned) = at_length(|| plan(view, request))?;
            if request.is_dry {
                return Ok((Vec::new(), Ok(outcome)));
            }
            // `catch_up` uses this plan, so that it is not compiled again.
            *lock(&self.planned) = planned.map(|planned| (view.state.revision + 1, planned));
            Ok((changes, Ok(outcome)))
        };
        let (revision, outcome) = self.transact(&request.by, judge).await?;
        Ok(Outcome { revision, ..outcome? })
    }
}

/// Returns the error if another owner has the turn, or a rollout is in progress. Returns `None` if the request may
/// proceed.
fn turn(view: &StateView, request: &Request) -> Option<ApplyError> {
    if request.is_now || request.is_dry || request.takes_back.is_some() {
        return None;
    }
    if let Some(waved) = &view.state.rollout {
        return Some(ApplyError::Busy(waved.of));
    }
    let owner = owner_of(&request.by);
    let has_waves = view.state.catalog.overlay().is_some_and(|(_, overlay)| overlay.rollout.is_some());
    (has_waves && owner.is_some() && view.state.is_before(&owner, now())).then_some(ApplyError::Turn)
}

/// Preserves the drain of a node whose new document does not set `draining`. A command starts a drain, and applying a
/// file again must not end it.
fn with_drain(mut resource: Resource, before: Option<&Arc<Resource>>, still: &mut Vec<Name>) -> Resource {
    let Spec::Node(node) = &mut resource.spec else { return resource };
    let was_draining = matches!(before.map(|before| &before.spec), Some(Spec::Node(before)) if before.is_draining());
    if node.draining.is_none() && was_draining {
        still.push(resource.key.name.clone());
    }
    let is_draining = node.draining.unwrap_or(was_draining);
    node.draining = is_draining.then_some(true);
    resource
}

/// Returns the changes that a request makes in this view, and their effect.
fn plan(view: &StateView, request: &Request) -> Result<(Vec<Change>, Outcome, Option<CompiledChange>), ApplyError> {
    let state = &view.state;
    let waved = state.rollout.as_ref().map(|waved| waved.of);
    if let Some((of, _)) = request.takes_back.as_ref().filter(|(of, _)| waved != Some(*of)) {
        return Err(ApplyError::Denied(format!("the rollout of revision {of} has ended")));
    }
    let mut catalog = state.catalog.clone();
    let mut outcome = Outcome { revision: state.revision, ..Outcome::default() };
    let mut changes = Vec::new();
    for key in &request.delete {
        if catalog.remove(key).is_none() {
            return Err(ApplyError::Absent(Box::new(key.clone())));
        }
        outcome.deleted.push(key.clone());
        if let Some(member) = state.members.get(&key.name).filter(|_| key.kind == Kind::Node) {
            // A later node of the same name must not inherit this node's enrolment.
            let revoked = state.revoked(member, now());
            catalog.revoke(revoked.clone(), now());
            changes.extend([Change::Expelled { node: key.name.clone() }, Change::Revoked(revoked)]);
        }
        if key.kind == Kind::Node {
            let tokens = state.tokens.values().filter(|token| token.node == key.name);
            changes.extend(tokens.map(|token| Change::Spent { token: token.id.clone() }));
        }
        changes.push(Change::Delete(key.clone()));
    }
    for resource in &request.put {
        let before = state.catalog.get(&resource.key);
        // A rollback restores the earlier document, drained or not.
        let resource = match &request.takes_back {
            Some(_) => resource.clone(),
            None => with_drain(resource.clone(), before, &mut outcome.still_draining),
        };
        let key = resource.key.clone();
        match catalog.put(resource.clone()) {
            Some(before) if *before == resource => continue,
            Some(_) => outcome.changed.push(key),
            None => outcome.created.push(key),
        }
        changes.push(Change::Put(resource));
    }
    if let Some(since) = request.since {
        for key in outcome.changed.iter().chain(&outcome.created).chain(&outcome.deleted) {
            let found = state.touched(key);
            if found > since {
                return Err(ApplyError::Conflict { key: Box::new(key.clone()), since, found });
            }
        }
    }
    if !changes.is_empty() {
        let changed: BTreeSet<Key> = view.waiting.iter().chain(&request.delete).cloned().collect();
        let written = changes.iter().filter_map(|change| match change {
            Change::Put(resource) => Some(resource.key.clone()),
            _ => None,
        });
        let changed: BTreeSet<Key> = changed.into_iter().chain(written).collect();
        let (plan, touched) = view.plan.update(&catalog, &changed).map_err(ApplyError::Faults)?;
        let nodes: Vec<_> = touched.iter().map(|(node, document)| (node.clone(), document.is_some())).collect();
        if waved.is_some() {
            changes.push(Change::Settled { failed: request.takes_back.as_ref().map(|(_, why)| why.clone()) });
        }
        let is_in_waves = !request.is_now && catalog.overlay().is_some_and(|(_, overlay)| overlay.rollout.is_some());
        if is_in_waves && nodes.iter().any(|(node, _)| view.plan.document(node).is_some()) {
            let keys = outcome.deleted.iter().chain(&outcome.changed).chain(&outcome.created);
            let before = |key: &Key| state.catalog.get(key).map(|resource| (**resource).clone());
            let all = keys.map(|key| PreviousDocument { key: key.clone(), resource: before(key) });
            changes.push(Change::Rollout(all.collect()));
        }
        outcome.nodes = touched;
        outcome.warnings = plan.warnings().to_vec();
        return Ok((changes, outcome, Some(CompiledChange { plan, touched: nodes, changed })));
    }
    // The earlier documents are already in force; the rollout still ends.
    if let Some((_, why)) = request.takes_back.as_ref().filter(|_| waved.is_some()) {
        changes.push(Change::Settled { failed: Some(why.clone()) });
    }
    Ok((changes, outcome, None))
}
