//! The controller: what is in the store, what that means for each node, and the way by which it changes.
//!
//! In: documents to be put and deleted, by somebody. Out: what that changes at which node, or every reason against it; and for
//! each node its document, with the revision since which that is so.
//! Never: a document given out that is not in the store. What the store has is what there is: this process may end at any
//! time, and another one may write beside it.

mod enrol;
mod history;
mod known;
mod operator;
mod rotation;
mod unsettled;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hermes_model::document::scalar::Many;
use rpds::RedBlackTreeMapSync;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::task::block_in_place;

pub use self::enrol::{Certificate, pin};
pub(crate) use self::history::HELD;
pub use self::operator::Asking;
use self::unsettled::Outcomes;
pub use self::unsettled::Settled;
use crate::audit::Event;
use crate::ca::Seal;
use crate::catalog::Revoked;
use crate::compile::{Plan, Touched};
use crate::document::{Fault, Key, Kind, Name, ProgramDigest, Resource, Spec};
use crate::rollout::{Rollout, StepId};
use crate::state::{Before, Change, Commit, Member, State, owner_of};
use crate::store::{After, Base, Revision, Shared, Store, StoreError};
use crate::trust::Trust;

/// After so many entries they are made a base: who begins reads no more than these.
const COMPACT: u64 = 1000;
/// A store that cannot be read is tried again after this.
const AGAIN: Duration = Duration::from_secs(1);
/// Other controllers may be faster so often in a row.
const TRIES: usize = 100;

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
pub enum Refused {
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
    Unready(String),
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

impl Refused {
    /// True if the change may have been made all the same.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Store(StoreError::Unknown(_)))
    }
}

impl Event<'_> {
    /// The same event, as one that failed.
    #[must_use]
    pub fn failed(self, why: &Refused) -> Self {
        match why.is_unknown() {
            true => Self { unknown: Some(why.to_string()), ..self },
            false => Self { refused: Some(why.to_string()), ..self },
        }
    }
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Documents to be put and deleted, together or not at all.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Who wants it, as [`Commit::by`].
    pub by: String,
    /// In the place of those with their keys.
    pub put: Vec<Resource>,
    /// There no more.
    pub delete: Vec<Key>,
    /// What whoever asks knows: nothing that changes may have been changed later. `None`: that does not matter.
    pub since: Option<Revision>,
    /// Only says what it would change.
    pub is_dry: bool,
    /// To all nodes at once, whatever the overlay says; and so is what was going out in waves.
    pub is_now: bool,
    /// Takes back what goes out in waves: which revision, and why.
    pub takes_back: Option<(Revision, String)>,
}

/// What a request changed, or would.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The revision that has it; of a dry run, and where nothing changes, the one before.
    pub revision: Revision,
    /// Documents that are new.
    pub created: Vec<Key>,
    /// Documents that say something else.
    pub changed: Vec<Key>,
    /// Nodes that keep draining, since their new documents do not set `draining`.
    pub still_draining: Vec<Name>,
    /// Documents that are gone.
    pub deleted: Vec<Key>,
    /// Nodes whose own document is another one, with it. `None`: the node is gone.
    pub nodes: Touched,
    /// Warnings: valid, but perhaps not intended.
    pub warnings: Vec<Fault>,
}

/// One controller.
pub struct Controller {
    store: Arc<dyn Store>,
    /// Only [`Controller::catch_up`] writes it, one at a time.
    known: Mutex<Arc<Known>>,
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

/// What a change comes to that was judged right.
struct Planned {
    plan: Plan,
    /// Nodes whose document is another one, and whether they are there.
    touched: Vec<(Name, bool)>,
    /// Documents that have changed by then.
    changed: BTreeSet<Key>,
}

impl Planned {
    /// Whether it was found for these documents: the entry with its revision may be another controller's.
    fn is_of(&self, state: &State) -> bool {
        self.changed.iter().all(|key| self.plan.catalog().get(key) == state.catalog.get(key))
    }
}

/// The state and what it comes to. A copy costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Known {
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
            known: Mutex::default(),
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

    /// Follows the store, for as long as it is polled: what other controllers write is known here.
    pub async fn follow(&self) {
        loop {
            let revision = self.known().state.revision;
            let followed = async {
                self.check_lost()?;
                tokio::select! {
                    changed = self.store.changed(revision) => changed?,
                    () = self.outcomes.wanted(AGAIN) => {}
                }
                self.catch_up().await?;
                self.settle_next().await
            };
            let done = followed.await;
            self.heed(&done);
            if done.is_err() {
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    /// Settles changes whose revision was read before their append ended. Then settles a change that may still reach the
    /// store: an entry without changes takes the revision, or fails because the change has it.
    async fn settle_next(&self) -> Result<(), StoreError> {
        let _one = self.writing.lock().await;
        self.check_lost()?;
        let revision = self.known().state.revision;
        while let Some(passed) = self.outcomes.passed(revision) {
            match self.store.read(passed.saturating_sub(1)).await? {
                After::Lost => return Err(self.lose(revision)),
                After::Entries(entries) if !entries.is_empty() => self.outcomes.read(passed, &entries[0].bytes),
                After::Gone | After::Entries(_) => self.outcomes.skip(passed),
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

    /// The error while the store is known to have lost what this controller has read: until a restart.
    fn check_lost(&self) -> Result<(), StoreError> {
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
            Ok(()) => tracing::info!("the store is followed again"),
            Err(error @ StoreError::Lost(_)) => tracing::error!("{error}"),
            Err(error) => tracing::warn!(again_in = ?AGAIN, "the store cannot be followed: {error}"),
        }
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

    /// Reads the store now, where somebody has heard of a later revision than this controller: it may not have been told yet of
    /// what another one wrote.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) async fn catch_up_with(&self, revision: Revision) -> Result<(), StoreError> {
        if self.known().state.revision < revision { self.catch_up().await } else { Ok(()) }
    }

    /// All of the state (JSON), as it is restored with [`Controller::restore`]. The authority's key is in it, sealed
    /// where the store's is.
    pub fn backup(&self) -> Vec<u8> {
        let state = &self.known().state;
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
    pub fn shared(&self) -> Option<&dyn Shared> {
        self.store.shared()
    }

    /// What is known now.
    pub fn known(&self) -> Arc<Known> {
        lock(&self.known).clone()
    }

    /// What a node is to run, now and from now on.
    pub fn watch(&self, node: &Name) -> watch::Receiver<Watched> {
        let mut nodes = lock(&self.nodes);
        // Within the lock: what is published afterwards finds it.
        let watched = || self.known().watched(node);
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

    /// What goes out in waves goes on after this step, or is over.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn go_on(&self, (of, step): StepId) -> Result<(), Refused> {
        let judge = |known: &Known| {
            let is_it = known.state.rollout.as_ref().is_some_and(|waved| waved.of == of && waved.step == step);
            let is_last = known.rollout.as_ref().is_none_or(|rollout| rollout.remaining() == 0);
            let change = if is_last { Change::Settled { failed: None } } else { Change::Step(step + 1) };
            Ok((is_it.then_some(change).into_iter().collect(), ()))
        };
        self.transact("controller", judge).await.map(drop)
    }

    /// What goes out in waves does so no more: all nodes have it.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn finish(&self, by: &str, of: Revision) -> Result<(), Refused> {
        let judge = |known: &Known| {
            let is_it = known.state.rollout.as_ref().is_some_and(|waved| waved.of == of);
            Ok((is_it.then_some(Change::Settled { failed: None }).into_iter().collect(), ()))
        };
        self.transact(by, judge).await.map(drop)
    }

    /// What goes out in waves is taken back: documents are as they were before it.
    ///
    /// # Errors
    /// It is over; or the store cannot be written.
    pub async fn take_back(&self, by: &str, of: Revision, why: String) -> Result<(), Refused> {
        let known = self.known();
        let Some(waved) = known.state.rollout.as_ref().filter(|waved| waved.of == of) else { return Ok(()) };
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

    /// The next step is given, if this is the last one that was.
    pub async fn advance(&self, step: StepId) {
        let _one = self.reading.lock().await;
        let mut known = (*self.known()).clone();
        let Some(rollout) = known.rollout.take_if(|rollout| rollout.id() == step) else { return };
        let mut concerned: BTreeSet<Name> = rollout.pending().cloned().collect();
        known.rollout = Arc::unwrap_or_clone(rollout).advance(&known.plan).map(Arc::new);
        concerned.extend(known.rollout.iter().flat_map(|rollout| rollout.pending().cloned()));
        let known = Arc::new(known);
        *lock(&self.known) = known.clone();
        self.publish(&known, &concerned);
    }

    /// Sets the public URL of this controller. Only the first call counts.
    pub fn announce(&self, url: String) {
        let _ = self.public.set(url);
    }

    /// The URL of this controller's public name. `None`: it has none.
    pub fn public(&self) -> Option<&str> {
        self.public.get().map(String::as_str)
    }

    /// Changes documents, or says what that would change.
    ///
    /// # Errors
    /// Every reason against it. Nothing is changed then; except that of a store which could not say so it is not known.
    pub async fn apply(&self, request: &Request) -> Result<Outcome, Refused> {
        let judge = |known: &Known| {
            if let Some(refused) = turn(known, request) {
                // Recorded once: the owner has its turn from then on.
                let owner = owner_of(&request.by);
                let is_own = known.state.rollout.as_ref().is_some_and(|waved| owner_of(&waved.by) == owner);
                let is_known = is_own || known.state.turns.waiting.contains(&owner);
                return Ok(((!is_known).then_some(Change::Awaited { owner }).into_iter().collect(), Err(refused)));
            }
            let (changes, outcome, planned) = at_length(|| plan(known, request))?;
            if request.is_dry {
                return Ok((Vec::new(), Ok(outcome)));
            }
            // What was compiled to judge it is not compiled again.
            *lock(&self.planned) = planned.map(|planned| (known.state.revision + 1, planned));
            Ok((changes, Ok(outcome)))
        };
        let (revision, outcome) = self.transact(&request.by, judge).await?;
        Ok(Outcome { revision, ..outcome? })
    }

    /// Changes what is judged right for the state as it is then; judged anew where another controller was faster. The revision
    /// that has it: where nothing changes, the last one.
    async fn transact<T>(
        &self,
        by: &str,
        judge: impl Fn(&Known) -> Result<(Vec<Change>, T), Refused>,
    ) -> Result<(Revision, T), Refused> {
        let _one = self.writing.lock().await;
        for _ in 0..TRIES {
            self.check_lost()?;
            let known = self.known();
            let (changes, told) = judge(&known)?;
            if changes.is_empty() {
                return Ok((known.state.revision, told));
            }
            let commit = Commit { at: now(), by: by.to_owned(), changes };
            let bytes =
                serde_json::to_vec(&commit).map_err(|error| StoreError::Unable("be written", error.to_string()))?;
            let bytes = Bytes::from(bytes);
            match self.store.append(known.state.revision, bytes.clone()).await {
                Ok(revision) => {
                    // It was made, whether or not it can be read now: `follow` reads it as soon as that works.
                    if let Err(error) = self.catch_up().await {
                        tracing::warn!(revision, "a change was made and cannot be read yet: {error}");
                    }
                    return Ok((revision, told));
                }
                Err(StoreError::Behind(_)) => self.catch_up().await?,
                Err(error @ StoreError::Unknown(_)) => {
                    self.outcomes.add(by, known.state.revision + 1, &bytes);
                    return Err(error.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(StoreError::Behind(self.known().state.revision).into())
    }

    /// Reads what is new in the store, and tells the nodes that it concerns.
    pub(crate) async fn catch_up(&self) -> Result<(), StoreError> {
        let _one = self.reading.lock().await;
        self.check_lost()?;
        let before = self.known();
        let mut known = (*before).clone();
        let mut from = known.state.revision;
        let mut concerned = BTreeSet::new();
        loop {
            let entries = match self.store.read(known.state.revision).await? {
                After::Lost => return Err(self.lose(known.state.revision)),
                After::Gone => {
                    let state = self.read_base().await?;
                    self.outcomes.skip(state.revision);
                    // What differs is not told: all may.
                    let keys = |state: &State| state.catalog.iter().map(|one| one.key.clone()).collect::<Vec<_>>();
                    known.waiting.extend(keys(&known.state).into_iter().chain(keys(&state)));
                    concerned.extend(lock(&self.nodes).keys().cloned());
                    (from, known.state) = (state.revision, state);
                    continue;
                }
                After::Entries(entries) if entries.is_empty() => break,
                After::Entries(entries) => entries,
            };
            for entry in entries {
                self.outcomes.read(entry.revision, &entry.bytes);
                let commit: Commit = serde_json::from_slice(&entry.bytes)
                    .map_err(|error| foreign(format!("entry {}: {error}", entry.revision)))?;
                for change in &commit.changes {
                    match change {
                        Change::Put(resource) => _ = known.waiting.insert(resource.key.clone()),
                        Change::Delete(key) => _ = known.waiting.insert(key.clone()),
                        Change::Enrolled(Member { node, .. }) | Change::Expelled { node } => {
                            concerned.insert(node.clone());
                        }
                        // Others hear of it.
                        Change::Revoked(Revoked { node, .. }) | Change::Readmitted { node, .. } => {
                            known.waiting.insert(Key::node(node));
                        }
                        Change::Authority(_)
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
                known.state.apply(entry.revision, commit);
            }
        }
        let revision = known.state.revision;
        if revision == before.state.revision {
            return Ok(());
        }
        let planned = lock(&self.planned).take().filter(|(of, planned)| {
            *of == revision && before.state.revision + 1 == revision && planned.changed == known.waiting
        });
        concerned.extend(match planned {
            Some((_, planned)) if planned.is_of(&known.state) => known.take_plan(planned.plan, planned.touched),
            _ => at_length(|| known.replan()),
        });
        concerned.extend(known.step());
        let base = (revision / COMPACT > from / COMPACT).then(|| Base { revision, state: known.state.base().into() });
        let known = Arc::new(known);
        *lock(&self.known) = known.clone();
        self.publish(&known, &concerned);
        if let Some(base) = base {
            // What cannot be compacted is longer, and no worse.
            let compacted = self.store.compact(base).await;
            let _ = compacted.inspect_err(|error| tracing::warn!("the log stays as long as it is: {error}"));
        }
        Ok(())
    }

    async fn read_base(&self) -> Result<State, StoreError> {
        let base = self.store.base().await?.ok_or_else(|| foreign("it begins without a base".to_owned()))?;
        State::from_base(base.revision, &base.state).map_err(foreign)
    }

    /// Tells who follows one of these nodes.
    fn publish(&self, known: &Known, concerned: &BTreeSet<Name>) {
        // First: what a node is given by this is judged by it.
        let programs = known.state.catalog.overlay().map(|(_, overlay)| overlay.programs.clone()).unwrap_or_default();
        self.programs.send_if_modified(|before| {
            let is_new = *before != programs;
            *before = programs;
            is_new
        });
        match known.state.trust().map(Arc::new) {
            Ok(trust) => {
                _ = self.trust.send_if_modified(|before| {
                    let is_new = *before != trust;
                    *before = trust;
                    is_new
                })
            }
            Err(why) => tracing::error!("the authority in the store cannot be read; nodes trust whom they did: {why}"),
        }
        self.held.send_if_modified(|before| std::mem::replace(before, known.is_held()) != known.is_held());
        let mut nodes = lock(&self.nodes);
        for node in concerned {
            let Some(sender) = nodes.get(node) else { continue };
            // Whom nobody follows any more is looked up when somebody does.
            if sender.receiver_count() == 0 {
                nodes.remove(node);
                continue;
            }
            sender.send_if_modified(|before| {
                let watched = known.watched(node);
                let is_new = *before != watched;
                *before = watched;
                is_new
            });
        }
        drop(nodes);
        self.rollout.send_if_modified(|before| {
            let is_new = before.as_ref().map(|one| one.id()) != known.rollout.as_ref().map(|one| one.id())
                || known.is_over().is_some();
            before.clone_from(&known.rollout);
            is_new
        });
    }
}

fn foreign(why: String) -> StoreError {
    StoreError::Foreign("what the store holds".to_owned(), why)
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

/// The refusal if it is another owner's turn. `None`: the request may go on.
fn turn(known: &Known, request: &Request) -> Option<Refused> {
    if request.is_now || request.is_dry || request.takes_back.is_some() {
        return None;
    }
    if let Some(waved) = &known.state.rollout {
        return Some(Refused::Busy(waved.of));
    }
    let owner = owner_of(&request.by);
    let has_waves = known.state.catalog.overlay().is_some_and(|(_, overlay)| overlay.rollout.is_some());
    (has_waves && owner.is_some() && known.state.is_before(&owner, now())).then_some(Refused::Turn)
}

/// Keeps the drain of a node whose new document does not set `draining`: a command sets a drain, and applying a file
/// again must not end it.
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

/// What a request comes to with this state: what is to be written, and what that changes.
fn plan(known: &Known, request: &Request) -> Result<(Vec<Change>, Outcome, Option<Planned>), Refused> {
    let state = &known.state;
    let waved = state.rollout.as_ref().map(|waved| waved.of);
    if let Some((of, _)) = request.takes_back.as_ref().filter(|(of, _)| waved != Some(*of)) {
        return Err(Refused::Denied(format!("revision {of} goes out no more")));
    }
    let mut catalog = state.catalog.clone();
    let mut outcome = Outcome { revision: state.revision, ..Outcome::default() };
    let mut changes = Vec::new();
    for key in &request.delete {
        if catalog.remove(key).is_none() {
            return Err(Refused::Absent(Box::new(key.clone())));
        }
        outcome.deleted.push(key.clone());
        if let Some(member) = state.members.get(&key.name).filter(|_| key.kind == Kind::Node) {
            // What it has enrolled with is worth nothing for a node of this name that comes later.
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
                return Err(Refused::Conflict { key: Box::new(key.clone()), since, found });
            }
        }
    }
    if !changes.is_empty() {
        let changed: BTreeSet<Key> = known.waiting.iter().chain(&request.delete).cloned().collect();
        let written = changes.iter().filter_map(|change| match change {
            Change::Put(resource) => Some(resource.key.clone()),
            _ => None,
        });
        let changed: BTreeSet<Key> = changed.into_iter().chain(written).collect();
        let (plan, touched) = known.plan.update(&catalog, &changed).map_err(Refused::Faults)?;
        let nodes: Vec<_> = touched.iter().map(|(node, document)| (node.clone(), document.is_some())).collect();
        if waved.is_some() {
            changes.push(Change::Settled { failed: request.takes_back.as_ref().map(|(_, why)| why.clone()) });
        }
        let is_in_waves = !request.is_now && catalog.overlay().is_some_and(|(_, overlay)| overlay.rollout.is_some());
        if is_in_waves && nodes.iter().any(|(node, _)| known.plan.document(node).is_some()) {
            let keys = outcome.deleted.iter().chain(&outcome.changed).chain(&outcome.created);
            let before = |key: &Key| state.catalog.get(key).map(|resource| (**resource).clone());
            let all = keys.map(|key| Before { key: key.clone(), resource: before(key) });
            changes.push(Change::Rollout(all.collect()));
        }
        outcome.nodes = touched;
        outcome.warnings = plan.warnings().to_vec();
        return Ok((changes, outcome, Some(Planned { plan, touched: nodes, changed })));
    }
    // The earlier documents are in force already: the rollout ends all the same.
    if let Some((_, why)) = request.takes_back.as_ref().filter(|_| waved.is_some()) {
        changes.push(Change::Settled { failed: Some(why.clone()) });
    }
    Ok((changes, outcome, None))
}

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
