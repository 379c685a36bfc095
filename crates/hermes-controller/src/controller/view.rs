//! The state of an overlay at one moment, with its plan and its rollout.
//!
//! In: the state after some entry of the store. Out: the document of each node, now and at the end of the rollout.
//! Never: a notification. The controller publishes the view.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use super::{AssignedDocument, NodeUpdates, StateView, lines};
use crate::compile::Plan;
use crate::document::{Key, Name};
use crate::rollout::Rollout;
use crate::store::Revision;

impl StateView {
    /// Returns the document of a node at the end of the rollout; `None` if the node is not part of the overlay.
    pub fn document(&self, node: &Name) -> Option<&Bytes> {
        self.plan.document(node)
    }

    /// Services whose new sessions still use a node that drains.
    pub fn needing(&self, node: &Name) -> BTreeSet<Key> {
        self.plan.needing(node)
    }

    /// The document that a node must run now, and the key that it enrolled with.
    pub fn watched(&self, node: &Name) -> NodeUpdates {
        let since = self.since.get(node).copied().unwrap_or(self.state.revision);
        // A node that was removed from the overlay loses its document at once.
        let meanwhile = || self.rollout.as_ref()?.given(node);
        let document = self.document(node).map(|last| meanwhile().unwrap_or(last).clone());
        NodeUpdates {
            given: AssignedDocument { since, document },
            key: self.state.members.get(node).map(|member| member.key.clone()),
        }
    }

    /// Returns the revision of a rollout in waves that has no step left, but whose end is not in the log yet.
    pub fn is_over(&self) -> Option<Revision> {
        self.state.rollout.as_ref().filter(|_| self.rollout.is_none()).map(|waved| waved.of)
    }

    /// The rollout in progress.
    pub fn rollout(&self) -> Option<&Rollout> {
        self.rollout.as_deref()
    }

    pub(super) fn take_plan(&mut self, plan: Plan, touched: Vec<(Name, bool)>) -> Vec<Name> {
        let earlier = self.rollout.take();
        self.rollout = self.roll_out(earlier.as_deref(), &plan, &touched).map(Arc::new);
        (self.plan, self.waiting) = (plan, BTreeSet::new());
        for (node, is_there) in &touched {
            if *is_there {
                self.since.insert_mut(node.clone(), self.state.revision);
            } else {
                self.since.remove_mut(node);
            }
        }
        let pending = earlier.iter().flat_map(|earlier| earlier.pending().cloned());
        touched.into_iter().map(|(node, _)| node).chain(pending).collect()
    }

    /// The rollout of the change from the current plan to this one.
    fn roll_out(&self, earlier: Option<&Rollout>, plan: &Plan, touched: &[(Name, bool)]) -> Option<Rollout> {
        let Some(waved) = &self.state.rollout else {
            return Rollout::begin(earlier, (&self.plan, plan), touched, self.state.revision);
        };
        // The earlier documents are derived from the current ones, so that a controller that starts now computes the
        // same rollout.
        let mut catalog = plan.catalog().clone();
        for before in &waved.before {
            match &before.resource {
                Some(resource) => _ = catalog.put(resource.clone()),
                None => _ = catalog.remove(&before.key),
            }
        }
        let keys = waved.before.iter().map(|before| before.key.clone()).collect();
        let waves = plan.catalog().overlay().and_then(|(_, overlay)| overlay.rollout).unwrap_or_default();
        let compiled = plan.update(&catalog, &keys).and_then(|(old, _)| {
            let (again, touched) = old.update(plan.catalog(), &keys)?;
            let touched: Vec<_> = touched.iter().map(|(node, one)| (node.clone(), one.is_some())).collect();
            Ok(Rollout::in_waves((&old, &again), &touched, waved.of, waves))
        });
        compiled.unwrap_or_else(|faults| {
            tracing::error!("cannot compile the documents before revision {}: {}", waved.of, lines(&faults));
            None
        })
    }

    /// Advances the rollout to the step in the state. Returns the affected nodes.
    pub(super) fn step(&mut self) -> Vec<Name> {
        let Some(rollout) = self.rollout.take_if(|rollout| rollout.settle().is_some()) else { return Vec::new() };
        let step = self.state.rollout.as_ref().filter(|waved| waved.of == rollout.id().0).map(|waved| waved.step);
        let mut concerned: Vec<_> = rollout.pending().cloned().collect();
        let mut next = step.map(|_| rollout);
        while next.as_ref().is_some_and(|rollout| step.is_some_and(|step| rollout.id().1 < step)) {
            next = next.and_then(|rollout| Arc::unwrap_or_clone(rollout).advance(&self.plan)).map(Arc::new);
            concerned.extend(next.iter().flat_map(|rollout| rollout.pending().cloned()));
        }
        self.rollout = next;
        concerned
    }

    /// Compiles the changed documents. Returns the affected nodes.
    pub(super) fn replan(&mut self) -> Vec<Name> {
        if self.waiting.is_empty() || self.state.catalog.is_empty() {
            return Vec::new();
        }
        match self.plan.update(&self.state.catalog, &self.waiting) {
            Ok((plan, touched)) => {
                self.take_plan(plan, touched.into_iter().map(|(node, one)| (node, one.is_some())).collect())
            }
            Err(faults) => {
                tracing::error!(
                    "cannot compile the documents in the store; nodes keep their documents: {}",
                    lines(&faults)
                );
                Vec::new()
            }
        }
    }
}
