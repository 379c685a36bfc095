//! Rollouts in waves: the next step, the end, and the rollback.
//!
//! In: the decision of an operator or of the rollout itself. Out: commits, and the next step to nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{ApplyError, Controller, Request, StateView, lock};
use crate::document::Name;
use crate::rollout::StepId;
use crate::state::Change;
use crate::store::Revision;

impl Controller {
    /// Advances a rollout in waves from this step to the next one, or ends it after the last. Does nothing if the
    /// rollout is no longer at this step.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn advance_rollout(&self, (of, step): StepId) -> Result<(), ApplyError> {
        let judge = |view: &StateView| {
            let is_it = view.state.rollout.as_ref().is_some_and(|waved| waved.of == of && waved.step == step);
            let is_last = view.rollout.as_ref().is_none_or(|rollout| rollout.remaining() == 0);
            let change = if is_last { Change::Settled { failed: None } } else { Change::Step(step + 1) };
            Ok((is_it.then_some(change).into_iter().collect(), ()))
        };
        self.transact("controller", judge).await.map(drop)
    }

    /// Ends the rollout: all nodes receive the change at once.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn finish(&self, by: &str, of: Revision) -> Result<(), ApplyError> {
        let judge = |view: &StateView| {
            let is_it = view.state.rollout.as_ref().is_some_and(|waved| waved.of == of);
            Ok((is_it.then_some(Change::Settled { failed: None }).into_iter().collect(), ()))
        };
        self.transact(by, judge).await.map(drop)
    }

    /// Rolls the change back: the earlier documents are restored.
    ///
    /// # Errors
    /// The documents cannot be restored, or the store cannot be written.
    pub async fn roll_back(&self, by: &str, of: Revision, why: String) -> Result<(), ApplyError> {
        let view = self.view();
        let Some(waved) = view.state.rollout.as_ref().filter(|waved| waved.of == of) else { return Ok(()) };
        let (mut put, mut delete) = (Vec::new(), Vec::new());
        for before in &waved.before {
            match &before.resource {
                Some(resource) => put.push(resource.clone()),
                None => delete.push(before.key.clone()),
            }
        }
        let by = by.to_owned();
        let takes_back = Some((of, why));
        self.apply(&Request { by, put, delete, takes_back, is_now: true, ..Request::default() }).await.map(drop)
    }

    /// Advances a rollout without waves from this step to the next one, in memory only. Does nothing if the rollout is
    /// no longer at this step.
    pub async fn advance(&self, step: StepId) {
        let _one = self.reading.lock().await;
        let mut view = (*self.view()).clone();
        let Some(rollout) = view.rollout.take_if(|rollout| rollout.id() == step) else { return };
        let mut concerned: BTreeSet<Name> = rollout.pending().cloned().collect();
        view.rollout = Arc::unwrap_or_clone(rollout).advance(&view.plan).map(Arc::new);
        concerned.extend(view.rollout.iter().flat_map(|rollout| rollout.pending().cloned()));
        let view = Arc::new(view);
        *lock(&self.view) = view.clone();
        self.publish(&view, &concerned);
    }
}
