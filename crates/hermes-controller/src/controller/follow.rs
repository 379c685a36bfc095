//! Follows the store: reads the commits of all controllers, and publishes what they change for nodes.
//!
//! In: entries of the store, in the order of their revisions. Out: the current view, and a notification for each
//! affected node.
//! Never: an entry skipped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Controller, StateView, at_length, lock, now};
use crate::catalog::Revoked;
use crate::document::{Key, Name};
use crate::state::{Change, Commit, EnrolledNode, State};
use crate::store::{BaseState, LogRead, Revision, StoreError};

/// The number of entries after which the log is compacted into a base. A starting controller reads the base and the
/// entries after it.
pub(super) const COMPACT_INTERVAL: u64 = 1000;
/// The interval between attempts to read the store.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Controller {
    /// Follows the store for as long as it is polled, so that this controller reads what other controllers write.
    pub async fn follow(&self) {
        loop {
            let revision = self.view().state.revision;
            let followed = async {
                self.check_lost()?;
                tokio::select! {
                    changed = self.store.changed(revision) => changed?,
                    () = self.outcomes.wanted(RETRY_INTERVAL) => {}
                }
                self.catch_up().await?;
                self.settle_next().await
            };
            let done = followed.await;
            self.heed(&done);
            if done.is_err() {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }

    /// Settles changes whose revision was read before their append ended. Then settles a change that may still reach
    /// the store, by appending an empty entry with the same revision. Either the empty entry takes the revision, or its
    /// append fails because the change has it.
    pub(super) async fn settle_next(&self) -> Result<(), StoreError> {
        let _one = self.writing.lock().await;
        self.check_lost()?;
        let revision = self.view().state.revision;
        while let Some(passed) = self.outcomes.passed(revision) {
            match self.store.read(passed.saturating_sub(1)).await? {
                LogRead::Lost => return Err(self.lose(revision)),
                LogRead::Entries(entries) if !entries.is_empty() => self.outcomes.read(passed, &entries[0].bytes),
                LogRead::Gone | LogRead::Entries(_) => self.outcomes.skip(passed),
            }
        }
        if !self.outcomes.is_open(revision + 1) {
            return Ok(());
        }
        let commit = Commit { at: now(), by: "controller".to_owned(), changes: Vec::new() };
        let bytes = serde_json::to_vec(&commit).map_err(|error| StoreError::Unable("be written", error.to_string()))?;
        match self.store.append(revision, bytes.into()).await {
            Ok(_) | Err(StoreError::Behind(_)) => self.catch_up().await,
            Err(error) => Err(error),
        }
    }

    /// Returns an error once the store has lost entries that this controller has read. The error lasts until a restart.
    pub(super) fn check_lost(&self) -> Result<(), StoreError> {
        self.lost.get().map_or(Ok(()), |revision| Err(StoreError::Lost(*revision)))
    }

    /// Records that the store has lost this revision.
    fn lose(&self, revision: Revision) -> StoreError {
        StoreError::Lost(*self.lost.get_or_init(|| revision))
    }

    /// Records whether the store is reachable, and logs each transition.
    fn heed(&self, done: &Result<(), StoreError>) {
        let why = done.as_ref().err().map(ToString::to_string);
        let is_new = self.trouble.send_if_modified(|before| {
            let is_new =
                before.is_some() != why.is_some() || matches!(done, Err(StoreError::Lost(_))) && *before != why;
            before.clone_from(&why);
            is_new
        });
        match done {
            _ if !is_new => {}
            Ok(()) => tracing::info!("store reachable again"),
            Err(error @ StoreError::Lost(_)) => tracing::error!("{error}"),
            Err(error) => tracing::warn!(again_in = ?RETRY_INTERVAL, "store unreachable: {error}"),
        }
    }

    /// Reads the store now if a node reports a later revision: the notification of another controller's commit may be
    /// late.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) async fn catch_up_with(&self, revision: Revision) -> Result<(), StoreError> {
        if self.view().state.revision < revision { self.catch_up().await } else { Ok(()) }
    }

    /// Reads new entries of the store, and notifies the affected nodes.
    pub(crate) async fn catch_up(&self) -> Result<(), StoreError> {
        let _one = self.reading.lock().await;
        self.check_lost()?;
        let before = self.view();
        let mut view = (*before).clone();
        let mut from = view.state.revision;
        let mut concerned = BTreeSet::new();
        loop {
            let entries = match self.store.read(view.state.revision).await? {
                LogRead::Lost => return Err(self.lose(view.state.revision)),
                LogRead::Gone => {
                    let state = self.read_base().await?;
                    self.outcomes.skip(state.revision);
                    // A base does not record which documents changed, so all count as changed.
                    let keys = |state: &State| state.catalog.iter().map(|one| one.key.clone()).collect::<Vec<_>>();
                    view.waiting.extend(keys(&view.state).into_iter().chain(keys(&state)));
                    concerned.extend(lock(&self.nodes).keys().cloned());
                    (from, view.state) = (state.revision, state);
                    continue;
                }
                LogRead::Entries(entries) if entries.is_empty() => break,
                LogRead::Entries(entries) => entries,
            };
            for entry in entries {
                self.outcomes.read(entry.revision, &entry.bytes);
                let commit: Commit = serde_json::from_slice(&entry.bytes)
                    .map_err(|error| foreign(format!("entry {}: {error}", entry.revision)))?;
                for change in &commit.changes {
                    match change {
                        Change::Put(resource) => _ = view.waiting.insert(resource.key.clone()),
                        Change::Delete(key) => _ = view.waiting.insert(key.clone()),
                        Change::Enrolled(EnrolledNode { node, .. }) | Change::Expelled { node } => {
                            concerned.insert(node.clone());
                        }
                        // Neighbours list revoked keys in their documents.
                        Change::Revoked(Revoked { node, .. }) | Change::Readmitted { node, .. } => {
                            view.waiting.insert(Key::node(node));
                        }
                        Change::Ca(_)
                        | Change::Rotation(_)
                        | Change::Retired(_)
                        | Change::Operator(_)
                        | Change::Dismissed { .. }
                        | Change::Token(_)
                        | Change::Spent { .. }
                        | Change::Rollout(_)
                        | Change::Awaited { .. }
                        | Change::Behind { .. }
                        | Change::Confirmed
                        | Change::Step(_)
                        | Change::Settled { .. } => {}
                    }
                }
                view.state.apply(entry.revision, commit);
            }
        }
        let revision = view.state.revision;
        if revision == before.state.revision {
            return Ok(());
        }
        let planned = lock(&self.planned).take().filter(|(of, planned)| {
            *of == revision && before.state.revision + 1 == revision && planned.changed == view.waiting
        });
        concerned.extend(match planned {
            Some((_, planned)) if planned.is_of(&view.state) => view.take_plan(planned.plan, planned.touched),
            _ => at_length(|| view.replan()),
        });
        concerned.extend(view.step());
        let base = (revision / COMPACT_INTERVAL > from / COMPACT_INTERVAL)
            .then(|| BaseState { revision, state: view.state.base().into() });
        let view = Arc::new(view);
        *lock(&self.view) = view.clone();
        self.publish(&view, &concerned);
        if let Some(base) = base {
            // A failed compaction is harmless: the log is only longer.
            let compacted = self.store.compact(base).await;
            let _ = compacted.inspect_err(|error| tracing::warn!("log not compacted: {error}"));
        }
        Ok(())
    }

    async fn read_base(&self) -> Result<State, StoreError> {
        let base = self.store.base().await?.ok_or_else(|| foreign("no base at its beginning".to_owned()))?;
        State::from_base(base.revision, &base.state).map_err(foreign)
    }

    /// Notifies the streams of these nodes.
    pub(super) fn publish(&self, view: &StateView, concerned: &BTreeSet<Name>) {
        // Programs are published first: a node's stream checks its program before it sends a document.
        let programs = view.state.catalog.overlay().map(|(_, overlay)| overlay.programs.clone()).unwrap_or_default();
        self.programs.send_if_modified(|before| {
            let is_new = *before != programs;
            *before = programs;
            is_new
        });
        match view.state.trust().map(Arc::new) {
            Ok(trust) => {
                _ = self.trust.send_if_modified(|before| {
                    let is_new = *before != trust;
                    *before = trust;
                    is_new
                })
            }
            Err(why) => tracing::error!("invalid CA in the store; nodes keep the CAs that they trust: {why}"),
        }
        self.held.send_if_modified(|before| std::mem::replace(before, view.is_held()) != view.is_held());
        let mut nodes = lock(&self.nodes);
        for node in concerned {
            let Some(sender) = nodes.get(node) else { continue };
            // A node without a stream reads the current values when it connects.
            if sender.receiver_count() == 0 {
                nodes.remove(node);
                continue;
            }
            sender.send_if_modified(|before| {
                let watched = view.watched(node);
                let is_new = *before != watched;
                *before = watched;
                is_new
            });
        }
        drop(nodes);
        self.rollout.send_if_modified(|before| {
            let is_new = before.as_ref().map(|one| one.id()) != view.rollout.as_ref().map(|one| one.id())
                || view.is_over().is_some();
            before.clone_from(&view.rollout);
            is_new
        });
    }
}

fn foreign(why: String) -> StoreError {
    StoreError::Foreign("the content of the store".to_owned(), why)
}
