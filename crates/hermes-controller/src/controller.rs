//! The controller: what is in the store, what that means for each node, and the way by which it changes.
//!
//! In: documents to be put and deleted, by somebody. Out: what that changes at which node, or every reason against it; and for
//! each node its document, with the revision since which that is so.
//! Never: a document given out that is not in the store. What the store has is what there is: this process may end at any
//! time, and another one may write beside it.

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
use hermes_model::document::scalar::Many;
use rpds::RedBlackTreeMapSync;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::task::block_in_place;

use self::apply::Planned;
pub use self::apply::{Outcome, Request};
pub use self::enrol::{Certificate, pin};
pub(crate) use self::history::HELD;
pub use self::operator::Asking;
use self::unsettled::Outcomes;
pub use self::unsettled::Settled;
use crate::audit::Event;
use crate::ca::Seal;
use crate::compile::Plan;
use crate::document::{Fault, Key, Name, ProgramDigest};
use crate::rollout::Rollout;
use crate::state::{Change, Commit, State};
use crate::store::{Base, Revision, StatusExchange, Store, StoreError};
use crate::trust::Trust;

/// Other controllers may be faster so often in a row.
const MAX_ATTEMPTS: usize = 100;

/// What a node is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// A revision at which this controller knew that it is so; the first one, unless it began later or read several at once.
    pub since: Revision,
    /// The document (JSON, which is YAML too). `None`: the node is no part of the overlay.
    pub document: Option<Bytes>,
}

/// What is of concern to somebody who follows a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// What it is to run.
    pub given: Given,
    /// The digest of the key that it has enrolled with. `None`: it has not, or was expelled.
    pub key: Option<String>,
}

/// Why a change is not made.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The documents are wrong, or what they come to.
    #[error("{}", lines(.0))]
    Faults(Vec<Fault>),
    /// Somebody else has changed a document meanwhile.
    #[error("{key} was changed by revision {found}, after {since}; look at what is there now, and apply yours to that")]
    Conflict {
        /// Which one.
        key: Box<Key>,
        /// What whoever asks knows.
        since: Revision,
        /// When it was changed.
        found: Revision,
    },
    /// Another change is going out to nodes in waves.
    #[error(
        "revision {0} is still going out to nodes in waves; wait until it has, or end that with `hermes rollout finish` or `cancel`; `hermes apply --now` goes before it"
    )]
    Busy(Revision),
    /// Another owner, who waited, has the turn.
    #[error(
        "another provider, who was refused while a change went out in waves, has the next turn; try again in a minute"
    )]
    Turn,
    /// It is not the time for that.
    #[error("{0}")]
    NotReady(String),
    /// There is nobody of that name.
    #[error("{0}")]
    Unknown(String),
    /// What was brought is of no use.
    #[error("{0}")]
    Unusable(String),
    /// Whoever asks must not, or what is asked for cannot be.
    #[error("{0}")]
    Denied(String),
    /// It is not there.
    #[error("there is no {0}")]
    Absent(Box<Key>),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ApplyError {
    /// True if the change may have been made all the same.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Store(StoreError::Unknown(_)))
    }
}

impl Event<'_> {
    /// The same event, as one that failed.
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

/// One controller.
pub struct Controller {
    store: Arc<dyn Store>,
    /// Only [`Controller::catch_up`] writes it, one at a time.
    view: Mutex<Arc<StateView>>,
    reading: tokio::sync::Mutex<()>,
    /// One changes something at a time: only other controllers may be faster.
    writing: tokio::sync::Mutex<()>,
    /// What the next revision comes to, if it is what was judged last.
    planned: Mutex<Option<(Revision, Planned)>>,
    /// For each node somebody asked for, what it is to run.
    nodes: Mutex<BTreeMap<Name, watch::Sender<Watched>>>,
    /// The change that is on its way to nodes step by step.
    rollout: watch::Sender<Option<Arc<Rollout>>>,
    /// Programs that nodes may run.
    programs: watch::Sender<Many<ProgramDigest>>,
    /// Whom nodes are to trust.
    trust: watch::Sender<Arc<Trust>>,
    /// What the authority's key is sealed with in the store.
    seal: OnceLock<Seal>,
    /// The public URL of this controller.
    public: OnceLock<String>,
    /// Changes whose outcome is unknown.
    outcomes: Outcomes,
    /// Why the store is unreachable. `None`: it is reachable.
    trouble: watch::Sender<Option<String>>,
    /// True while nodes get nothing.
    held: watch::Sender<bool>,
    /// The revision that the store has lost. It is never cleared: what the store has since then is another history.
    lost: OnceLock<Revision>,
}

/// The state and what it comes to. A copy costs nothing.
#[derive(Clone, Debug, Default)]
pub struct StateView {
    /// What the store's entries come to.
    pub state: State,
    /// What that means for nodes.
    plan: Plan,
    /// Since when each node is to run what it is.
    since: RedBlackTreeMapSync<Name, Revision>,
    /// Documents that have changed, and that the plan has not: they cannot be compiled by this version.
    waiting: BTreeSet<Key>,
    /// What is on its way to nodes step by step. `None`: each is to run what the plan says.
    rollout: Option<Arc<Rollout>>,
}

impl Controller {
    /// Reads what is in a store.
    ///
    /// # Errors
    /// It cannot be read, or another version wrote it.
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
            outcomes: Outcomes::default(),
            trouble: watch::Sender::new(None),
            held: watch::Sender::new(false),
            lost: OnceLock::new(),
        };
        this.catch_up().await?;
        Ok(this)
    }

    /// Watches whether nodes get nothing.
    pub fn held(&self) -> watch::Receiver<bool> {
        self.held.subscribe()
    }

    /// Watches why the store is unreachable. `None`: it is reachable.
    pub fn trouble(&self) -> watch::Receiver<Option<String>> {
        self.trouble.subscribe()
    }

    /// The outcomes of changes that were unknown; waits until one is known.
    pub(crate) async fn settled(&self) -> Vec<Settled> {
        self.outcomes.next().await
    }

    /// All of the state (JSON), as it is restored with [`Controller::restore`]. The authority's key is in it, sealed
    /// where the store's is.
    pub fn backup(&self) -> Vec<u8> {
        let state = &self.view().state;
        let base = state.base();
        let head = format!("{{\"revision\":{},\"state\":", state.revision);
        [head.as_bytes(), &base, b"}"].concat()
    }

    /// Puts a backup into a store that has nothing yet. The revision that it is of.
    ///
    /// # Errors
    /// It is none, or of another version; or the store has something, or cannot be written.
    pub async fn restore(store: &dyn Store, backup: &[u8]) -> Result<Revision, StoreError> {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Backup {
            revision: Revision,
            state: serde_json::Value,
        }
        let none = |why: String| StoreError::Foreign("this file".to_owned(), why);
        let backup: Backup =
            serde_json::from_slice(backup).map_err(|error| none(format!("it is no backup: {error}")))?;
        let Backup { revision, state } = backup;
        let state = state.to_string();
        let mut state = State::from_base(revision, state.as_bytes()).map_err(none)?;
        // It lacks all revocations, used tokens and rollbacks since then.
        state.is_unconfirmed = true;
        state.tokens = Default::default();
        store.begin(Base { revision, state: state.base().into() }).await?;
        Ok(revision)
    }

    /// What controllers say to each other. `None`: there is one.
    pub fn shared(&self) -> Option<&dyn StatusExchange> {
        self.store.shared()
    }

    /// What is known now.
    pub fn view(&self) -> Arc<StateView> {
        lock(&self.view).clone()
    }

    /// What a node is to run, now and from now on.
    pub fn watch(&self, node: &Name) -> watch::Receiver<Watched> {
        let mut nodes = lock(&self.nodes);
        // Within the lock: what is published afterwards finds it.
        let watched = || self.view().watched(node);
        nodes.entry(node.clone()).or_insert_with(|| watch::Sender::new(watched())).subscribe()
    }

    /// The change that is on its way to nodes step by step, now and from now on.
    pub fn rollout(&self) -> watch::Receiver<Option<Arc<Rollout>>> {
        self.rollout.subscribe()
    }

    /// Programs that nodes may run, now and from now on. None: any.
    pub fn programs(&self) -> watch::Receiver<Many<ProgramDigest>> {
        self.programs.subscribe()
    }

    /// Sets the public URL of this controller. Only the first call counts.
    pub fn announce(&self, url: String) {
        let _ = self.public.set(url);
    }

    /// The URL of this controller's public name. `None`: it has none.
    pub fn public(&self) -> Option<&str> {
        self.public.get().map(String::as_str)
    }

    /// Changes what is judged right for the state as it is then; judged anew where another controller was faster. The revision
    /// that has it: where nothing changes, the last one.
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
                    // It was made, whether or not it can be read now: `follow` reads it as soon as that works.
                    if let Err(error) = self.catch_up().await {
                        tracing::warn!(revision, "a change was made and cannot be read yet: {error}");
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

/// Does what may take seconds where an overlay is large, while others of the runtime go on.
pub(crate) fn at_length<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        // There is nobody else to go on: tests, and commands that end.
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
