//! Executes rollouts: sends each step of a change to its nodes once the nodes of the previous step have reported.
//!
//! In: the current step, and the status reports of nodes. Out: the next step, or a rollback.
//! Never: a wait without a limit.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hermes_net::outage::{FailureCounts, OutageLog};

use super::{Push, RETRY_INTERVAL};
use crate::audit::Event;
use crate::digest::{hex, sha256};
use crate::document::Name;
use crate::node_status::NodeStatus;
use crate::rollout::{Rollout, STEP_TIMEOUT};

/// The maximum time for the connected nodes of a wave to run the change.
const WAVE_TIMEOUT: Duration = Duration::from_secs(30);

impl Push {
    /// Advances the rollout step by step, for as long as it is polled.
    pub(crate) async fn roll_out(&self) {
        let mut rollout = self.controller.rollout();
        let mut outage = OutageLog::default();
        loop {
            let step = rollout.borrow_and_update().clone();
            if let Some(step) = step {
                tokio::select! {
                    () = self.take(&step, &mut outage) => {}
                    // A new rollout replaces these steps.
                    changed = rollout.changed() => if changed.is_err() { return },
                }
            } else {
                if let Some(of) = self.controller.view().is_over()
                    && let Err(error) = self.controller.finish("controller", of).await
                {
                    if let Some(FailureCounts { count, elapsed }) = outage.failed("", &error.to_string()) {
                        tracing::warn!(
                            revision = of, again_in = ?RETRY_INTERVAL, attempts = count, since = ?elapsed,
                            "cannot end the rollout: {error}"
                        );
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    continue;
                }
                outage.recovered();
                if rollout.changed().await.is_err() {
                    return;
                }
            }
        }
    }

    /// Waits until this step is done, and advances the rollout.
    async fn take(&self, step: &Rollout, outage: &mut OutageLog) {
        let Some(settle) = step.settle() else {
            let _ = self.taken(step, STEP_TIMEOUT).await.inspect_err(|late| {
                tracing::warn!(
                    "rollout step timeout; \
                                                                                        continuing: {late}"
                )
            });
            tokio::time::sleep(step.linger()).await;
            return self.controller.advance(step.id()).await;
        };
        let (of, number) = step.id();
        let done = match self.wait_for_wave(step, settle.max(step.linger())).await {
            Ok(()) => self.controller.advance_rollout(step.id()).await,
            Err(why) => {
                let about = Some(format!("revision {of} at step {number}: {why}"));
                self.audit.record(Event { what: "roll-back", by: Some("controller"), about, ..Event::default() });
                self.controller.roll_back("controller", of, why).await
            }
        };
        if let Err(error) = done {
            if let Some(FailureCounts { count, elapsed }) = outage.failed("", &error.to_string()) {
                tracing::warn!(
                    revision = of, again_in = ?RETRY_INTERVAL, attempts = count, since = ?elapsed,
                    "cannot advance the rollout: {error}"
                );
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        } else {
            outage.recovered();
        }
    }

    /// Waits until the nodes of a wave run the change, and then for `settle`. Returns the reason for a rollback.
    async fn wait_for_wave(&self, step: &Rollout, settle: Duration) -> Result<(), String> {
        let is_there = |node: &Name| {
            self.with_statuses(|statuses| statuses.get(node).is_some_and(|status| status.connections > 0))
        };
        // After a start, no node may have connected yet: if all are disconnected, they get time to connect. Nodes that
        // have not enrolled do not.
        let comes_nobody = || {
            let members = &self.controller.view().state.members;
            !step.current().keys().any(|node| members.contains_key(node))
        };
        self.heard(WAVE_TIMEOUT, || step.current().keys().any(is_there) || comes_nobody()).await;
        let there: Vec<_> = step.current().keys().filter(|node| is_there(node)).collect();
        let were_unhealthy: BTreeSet<_> =
            there.iter().filter(|node| !self.status_of(node).unhealthy.is_empty()).collect();
        self.taken(step, WAVE_TIMEOUT).await?;
        if there.is_empty() {
            return Ok(());
        }
        let mut why = None;
        let is_wrong = || {
            // A node that was revoked meanwhile does not count.
            let view = self.controller.view();
            let gone = there.iter().find(|node| !is_there(node) && view.state.members.contains_key(**node));
            let gone = gone.map(|node| format!("node {node} disconnected after revision {}", step.id().0));
            // A node that was unhealthy before the step does not count.
            let unhealthy = || {
                let fallen =
                    |node: &&&Name| !were_unhealthy.contains(*node) && !self.status_of(node).unhealthy.is_empty();
                there
                    .iter()
                    .find(fallen)
                    .map(|node| format!("node {node} is unhealthy: {}", self.status_of(node).unhealthy))
            };
            why = gone.or_else(unhealthy);
            why.is_some()
        };
        self.heard(settle, is_wrong).await;
        why.map_or(Ok(()), Err)
    }

    /// Waits until the condition holds for the status of nodes. Returns false on a timeout.
    async fn heard(&self, patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
        let mut said = self.said();
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            said.borrow_and_update();
            if holds() {
                return true;
            }
            match tokio::time::timeout_at(deadline, said.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return false,
            }
        }
    }

    /// Waits until the connected nodes of a step run it. Returns the node that refuses it, or the nodes that did not
    /// report in time.
    async fn taken(&self, rollout: &Rollout, patience: Duration) -> Result<(), String> {
        let wanted = rollout.current().iter().map(|(node, document)| (node, hex(&sha256(document))));
        let mut wanted: BTreeMap<&Name, String> = wanted.collect();
        let (of, _) = rollout.id();
        let mut refused = Ok(());
        let is_latest = |node: &Name, status: &NodeStatus| {
            let document = self.controller.view().watched(node).given.document;
            document.is_some_and(|document| hex(&sha256(&document)) == status.running)
        };
        let is_over = || {
            self.with_statuses(|statuses| {
                wanted.retain(|node, digest| {
                    let status =
                        statuses.get(node).filter(|status| status.connections > 0 && status.running != *digest);
                    // The node may run a later document by now, for example with more revoked keys.
                    let status = status
                        .filter(|status| status.tried < of || !status.refused.is_empty() || !is_latest(node, status));
                    let reason = status.filter(|status| status.tried >= of && !status.refused.is_empty());
                    if let Some(NodeStatus { refused: reason, .. }) = reason {
                        refused = Err(format!("node {node} refused the document: {reason}"));
                    }
                    status.is_some() && reason.is_none()
                });
            });
            wanted.is_empty() || (refused.is_err() && rollout.settle().is_some())
        };
        if self.heard(patience, is_over).await {
            return refused;
        }
        let first = wanted.keys().next().map(ToString::to_string).unwrap_or_default();
        Err(format!("no report from {} nodes in {patience:?}, {first} among them", wanted.len()))
    }
}
