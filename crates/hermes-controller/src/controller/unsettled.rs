//! Changes with an unknown outcome: the store did not answer in time, and may have made them.
//!
//! In: an entry that may have been appended, and entries read later. Out: for each entry, whether it was made.
//! Never: an entry that counts as made because its revision exists; its bytes are compared with those in the store.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use crate::digest::sha256;
use crate::store::Revision;

/// The maximum number of unsettled changes; beyond it the oldest are forgotten.
const MAX_UNSETTLED: usize = 256;

/// The outcome of a change that was unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledChange {
    /// The author of the change, as in its commit.
    pub by: String,
    /// The revision that the change has if it was made.
    pub revision: Revision,
    /// True if the change was made; `None` if the log was compacted before this controller could read the entry.
    pub is_made: Option<bool>,
}

struct Unsettled {
    by: String,
    revision: Revision,
    digest: Bytes,
}

/// All unsettled changes.
#[derive(Default)]
pub(super) struct UnsettledChanges {
    state: Mutex<State>,
    changed: Notify,
    opened: Notify,
}

#[derive(Default)]
struct State {
    unsettled: Vec<Unsettled>,
    settled: Vec<SettledChange>,
}

impl UnsettledChanges {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry that may or may not have been appended.
    pub(super) fn add(&self, by: &str, revision: Revision, bytes: &Bytes) {
        let mut state = self.lock();
        if state.unsettled.len() >= MAX_UNSETTLED {
            state.unsettled.remove(0);
        }
        state.unsettled.push(Unsettled { by: by.to_owned(), revision, digest: sha256(bytes) });
        drop(state);
        self.opened.notify_one();
    }

    /// True while the outcome of a change for this revision is unknown.
    pub(super) fn is_open(&self, revision: Revision) -> bool {
        self.lock().unsettled.iter().any(|one| one.revision == revision)
    }

    /// Returns the lowest revision up to `view` with an unknown outcome. Its entry was read before the change was added
    /// here.
    pub(super) fn passed(&self, view: Revision) -> Option<Revision> {
        self.lock().unsettled.iter().map(|one| one.revision).filter(|revision| *revision <= view).min()
    }

    /// Waits until an outcome is unknown, and then for `pause`.
    pub(super) async fn wanted(&self, pause: Duration) {
        while self.lock().unsettled.is_empty() {
            self.opened.notified().await;
        }
        tokio::time::sleep(pause).await;
    }

    /// Settles the changes for a revision whose entry was read.
    pub(super) fn read(&self, revision: Revision, bytes: &Bytes) {
        self.settle(|one| (one.revision == revision).then(|| Some(one.digest == sha256(bytes))));
    }

    /// Settles the changes up to this revision, whose entries were compacted into a base before they were read.
    pub(super) fn skip(&self, revision: Revision) {
        self.settle(|one| (one.revision <= revision).then_some(None));
    }

    fn settle(&self, outcome: impl Fn(&Unsettled) -> Option<Option<bool>>) {
        let mut state = self.lock();
        if state.unsettled.is_empty() {
            return;
        }
        let State { unsettled, settled } = &mut *state;
        unsettled.retain(|one| {
            let outcome = outcome(one);
            let of = |is_made| SettledChange { by: one.by.clone(), revision: one.revision, is_made };
            settled.extend(outcome.map(of));
            outcome.is_none()
        });
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for an outcome, and returns all outcomes since the last call.
    pub(super) async fn next(&self) -> Vec<SettledChange> {
        loop {
            let settled = std::mem::take(&mut self.lock().settled);
            if !settled.is_empty() {
                return settled;
            }
            self.changed.notified().await;
        }
    }
}
