//! The controller: the content of the store, the node documents that are compiled from it, and changes to it.
//!
//! In: requests to put and delete documents. Out: the effect at each node, or every reason against the change; and the
//! document of each node, with the revision since which it applies.
//! Never: a document that is not in the store. The store is the only truth: this process may end at any time, and other
//! controllers write to the same store.

mod apply;
mod enrol;
mod follow;
mod history;
mod operator;
mod rollout;
mod rotation;
mod unsettled;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hermes_model::document::scalar::OneOrMany;
use rpds::RedBlackTreeMapSync;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::task::block_in_place;

use self::apply::CompiledChange;
pub use self::apply::{Outcome, Request};
pub use self::enrol::{Certificate, pin};
pub(crate) use self::history::HELD;
pub use self::operator::RequestKey;
pub use self::unsettled::SettledChange;
use self::unsettled::UnsettledChanges;
use crate::audit::Event;
use crate::ca::Seal;
use crate::compile::Plan;
use crate::document::{Fault, Key, Name, ProgramDigest};
use crate::rollout::Rollout;
use crate::state::{Change, Commit, State};
use crate::store::{BaseState, Revision, StatusExchange, Store, StoreError};
use crate::trust::Trust;

/// The maximum number of attempts to append a change while other controllers append theirs first.
const MAX_ATTEMPTS: usize = 100;

/// The document that a node must run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedDocument {
    /// The revision since which the document applies. It is later than the true one if this controller started later,
    /// or read several revisions at once.
    pub since: Revision,
    /// The document (JSON, which is valid YAML); `None` if the node is not part of the overlay.
    pub document: Option<Bytes>,
}

/// The values that a controller's stream to a node watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeUpdates {
    /// The node's document.
    pub given: AssignedDocument,
    /// The digest of the key with which the node enrolled; `None` if it has not enrolled or was revoked.
    pub key: Option<String>,
}

/// The reason why a change is not made.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The documents are invalid, or compile to an invalid node document.
    #[error("{}", lines(.0))]
    Faults(Vec<Fault>),
    /// Another client changed a document in the meantime.
    #[error(
        "conflict: {key} changed in revision {found}, after {since}; get the current document, and apply your \
             change to it"
    )]
    Conflict {
        /// The document.
        key: Box<Key>,
        /// The revision that the client has read.
        since: Revision,
        /// The revision of the other client's change.
        found: Revision,
    },
    /// A rollout in waves is in progress.
    #[error(
        "rollout of revision {0} in progress; wait for its end, end it with `hermes rollout finish` or `cancel`, or \
         use `hermes apply --now`"
    )]
    Busy(Revision),
    /// Another owner waited for the last rollout, and may change documents first.
    #[error("another provider, refused during the last rollout, has the next turn; try again in a minute")]
    Turn,
    /// The state does not allow the operation now.
    #[error("{0}")]
    NotReady(String),
    /// The named object does not exist.
    #[error("{0}")]
    Unknown(String),
    /// The imported object is unusable.
    #[error("{0}")]
    Unusable(String),
    /// The caller lacks permission, or the operation is impossible.
    #[error("{0}")]
    Denied(String),
    /// The document does not exist.
    #[error("{0} not found")]
    Absent(Box<Key>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ApplyError {
    /// True if the change may have been made nevertheless.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Store(StoreError::Unknown(_)))
    }
}

impl Event<'_> {
    /// Converts the event to that of a failed action.
    #[must_use]
    pub fn failed(self, why: &ApplyError) -> Self {
        match why.is_unknown() {
            true => Self { unknown: Some(why.to_string()), ..self },
            false => Self { refused: Some(why.to_string()), ..self },
        }
    }
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A controller: the state of the overlay, and the channels that publish its changes.
pub struct Controller {
    store: Arc<dyn Store>,
    /// The current view. It is only replaced while `reading` is locked.
    view: Mutex<Arc<StateView>>,
    reading: tokio::sync::Mutex<()>,
    /// Serialises the changes of this controller, so that only other controllers can append in between.
    writing: tokio::sync::Mutex<()>,
    /// The plan of the next revision, compiled when its change was validated.
    planned: Mutex<Option<(Revision, CompiledChange)>>,
    /// For each node with a stream, its document and key.
    nodes: Mutex<BTreeMap<Name, watch::Sender<NodeUpdates>>>,
    /// The rollout in progress.
    rollout: watch::Sender<Option<Arc<Rollout>>>,
    /// Programs that nodes may run.
    programs: watch::Sender<OneOrMany<ProgramDigest>>,
    /// The CAs that nodes must trust.
    trust: watch::Sender<Arc<Trust>>,
    /// The seal that decrypts the CA's key in the store.
    seal: OnceLock<Seal>,
    /// The public URL of this controller.
    public: OnceLock<String>,
    /// Changes whose outcome is unknown.
    outcomes: UnsettledChanges,
    /// The reason why the store is unreachable; `None` if it is reachable.
    trouble: watch::Sender<Option<String>>,
    /// True while documents are withheld from nodes.
    held: watch::Sender<bool>,
    /// The revision that this controller has read and the store has lost. Never cleared: later entries of the store
    /// belong to another history.
    lost: OnceLock<Revision>,
}

/// The state, and what is compiled from it. Copies are cheap.
#[derive(Clone, Debug, Default)]
pub struct StateView {
    /// The state after the last entry of the log that was read.
    pub state: State,
    /// The compiled documents of nodes.
    plan: Plan,
    /// For each node, the revision since which its document applies.
    since: RedBlackTreeMapSync<Name, Revision>,
    /// Changed documents that are not in the plan, because this version of Hermes cannot compile them.
    waiting: BTreeSet<Key>,
    /// The rollout in progress; `None` if each node runs its document of the plan.
    rollout: Option<Arc<Rollout>>,
}

impl Controller {
    /// Creates a controller from the content of the store.
    ///
    /// # Errors
    /// The store cannot be read, or another version wrote it.
    pub async fn start(store: Arc<dyn Store>) -> Result<Self, StoreError> {
        let this = Self {
            store,
            view: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            writing: tokio::sync::Mutex::default(),
            planned: Mutex::default(),
            nodes: Mutex::default(),
            rollout: watch::Sender::new(None),
            programs: watch::Sender::default(),
            trust: watch::Sender::default(),
            seal: OnceLock::new(),
            public: OnceLock::new(),
            outcomes: UnsettledChanges::default(),
            trouble: watch::Sender::new(None),
            held: watch::Sender::new(false),
            lost: OnceLock::new(),
        };
        this.catch_up().await?;
        Ok(this)
    }

    /// Watches whether documents are withheld from nodes.
    pub fn held(&self) -> watch::Receiver<bool> {
        self.held.subscribe()
    }

    /// Watches the reason why the store is unreachable; `None` if it is reachable.
    pub fn trouble(&self) -> watch::Receiver<Option<String>> {
        self.trouble.subscribe()
    }

    /// Waits until the outcome of a change that was unknown becomes known. Returns all such outcomes since the last
    /// call.
    pub(crate) async fn settled(&self) -> Vec<SettledChange> {
        self.outcomes.next().await
    }

    /// The complete state (JSON), as [`Controller::restore`] reads it. Contains the CA's key, sealed if it is sealed in
    /// the store.
    pub fn backup(&self) -> Vec<u8> {
        let state = &self.view().state;
        let base = state.base();
        let head = format!("{{\"revision\":{},\"state\":", state.revision);
        [head.as_bytes(), &base, b"}"].concat()
    }

    /// Restores a backup into an empty store. Returns the revision of the backup.
    ///
    /// # Errors
    /// The file is not a backup of this version; or the store is not empty, or cannot be written.
    pub async fn restore(store: &dyn Store, backup: &[u8]) -> Result<Revision, StoreError> {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Backup {
            revision: Revision,
            state: serde_json::Value,
        }
        let none = |why: String| StoreError::Foreign("this file".to_owned(), why);
        let backup: Backup = serde_json::from_slice(backup).map_err(|error| none(format!("not a backup: {error}")))?;
        let Backup { revision, state } = backup;
        let state = state.to_string();
        let mut state = State::from_base(revision, state.as_bytes()).map_err(none)?;
        // The backup lacks all later revocations, used tokens and rollbacks.
        state.is_unconfirmed = true;
        state.tokens = Default::default();
        store.begin(BaseState { revision, state: state.base().into() }).await?;
        Ok(revision)
    }

    /// The exchange of node status between controllers; `None` if the store supports only one controller.
    pub fn shared(&self) -> Option<&dyn StatusExchange> {
        self.store.shared()
    }

    /// The current view.
    pub fn view(&self) -> Arc<StateView> {
        lock(&self.view).clone()
    }

    /// Watches the document and the key of a node.
    pub fn watch(&self, node: &Name) -> watch::Receiver<NodeUpdates> {
        let mut nodes = lock(&self.nodes);
        // Evaluated under the lock, so that a later publication finds the entry.
        let watched = || self.view().watched(node);
        nodes.entry(node.clone()).or_insert_with(|| watch::Sender::new(watched())).subscribe()
    }

    /// Watches the rollout in progress.
    pub fn rollout(&self) -> watch::Receiver<Option<Arc<Rollout>>> {
        self.rollout.subscribe()
    }

    /// Watches the list of programs that nodes may run; an empty list permits any program.
    pub fn programs(&self) -> watch::Receiver<OneOrMany<ProgramDigest>> {
        self.programs.subscribe()
    }

    /// Sets the public URL of this controller. Only the first call counts.
    pub fn announce(&self, url: String) {
        let _ = self.public.set(url);
    }

    /// The public URL of this controller; `None` if it has none.
    pub fn public(&self) -> Option<&str> {
        self.public.get().map(String::as_str)
    }

    /// Validates a change with `judge`, and appends it. Repeats both if another controller appended first. Returns the
    /// revision of the change, or the last one if nothing changes.
    async fn transact<T>(
        &self,
        by: &str,
        judge: impl Fn(&StateView) -> Result<(Vec<Change>, T), ApplyError>,
    ) -> Result<(Revision, T), ApplyError> {
        let _one = self.writing.lock().await;
        for _ in 0..MAX_ATTEMPTS {
            self.check_lost()?;
            let view = self.view();
            let (changes, told) = judge(&view)?;
            if changes.is_empty() {
                return Ok((view.state.revision, told));
            }
            let commit = Commit { at: now(), by: by.to_owned(), changes };
            let bytes =
                serde_json::to_vec(&commit).map_err(|error| StoreError::Unable("be written", error.to_string()))?;
            let bytes = Bytes::from(bytes);
            match self.store.append(view.state.revision, bytes.clone()).await {
                Ok(revision) => {
                    // The change was made even if it cannot be read now; `follow` reads it later.
                    if let Err(error) = self.catch_up().await {
                        tracing::warn!(revision, "change made, but not readable yet: {error}");
                    }
                    return Ok((revision, told));
                }
                Err(StoreError::Behind(_)) => self.catch_up().await?,
                Err(error @ StoreError::Unknown(_)) => {
                    self.outcomes.add(by, view.state.revision + 1, &bytes);
                    return Err(error.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(StoreError::Behind(self.view().state.revision).into())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs work that may take seconds in a large overlay, without blocking other tasks of the runtime.
pub(crate) fn at_length<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        // A single-threaded runtime belongs to a test or a command, so no other task is blocked.
        _ => work(),
    }
}

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
