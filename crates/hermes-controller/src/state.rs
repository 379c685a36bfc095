//! The state of an overlay: documents, CA, tokens and enrolled nodes.
//!
//! In: commits, in the order of their revisions. Out: the state after each, the same at every controller.
//! Never: validation. The writer of a commit has checked it against the state before.

use std::sync::Arc;
use std::time::Duration;

use rpds::RedBlackTreeMapSync;
use serde::{Deserialize, Serialize};

use crate::ca::{CERTIFICATE_LIFE, Ca, OPERATOR_LIFE};
use crate::catalog::{Catalog, Revoked};
use crate::document::{Key, Name, Resource};
use crate::store::Revision;

/// An entry of the log: a set of changes, made together, and their author.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Commit {
    /// The time, in milliseconds since 1970, by the controller's clock.
    pub at: u64,
    /// The author: `operator/NAME`, `provider/PROVIDER/NAME`, `token/ID` or `controller`.
    pub by: String,
    /// The changes, in order.
    pub changes: Vec<Change>,
}

/// A change of the state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// Adds or replaces a document.
    Put(Resource),
    /// Deletes a document.
    Delete(Key),
    /// Sets the CA that signs.
    #[serde(rename = "authority")]
    Ca(Ca),
    /// Begins, changes or ends (`None`) a rotation, during which a second CA is trusted.
    Rotation(Option<Rotation>),
    /// Retires a CA: it no longer signs, and nodes no longer trust it.
    Retired(RetiredCa),
    /// Adds an operator's certificate.
    Operator(Operator),
    /// Revokes an operator's certificate.
    Dismissed {
        /// The digest of the key, as [`Operator::key`].
        key: String,
    },
    /// Adds an enrolment token.
    Token(Token),
    /// Removes a token that was used or revoked.
    Spent {
        /// The id of the token.
        token: String,
    },
    /// Enrols a node.
    Enrolled(EnrolledNode),
    /// Ends a node's enrolment.
    Expelled {
        /// The name of the node.
        node: Name,
    },
    /// Revokes a key, and so all certificates for it.
    Revoked(Revoked),
    /// Readmits a revoked key that has enrolled again.
    Readmitted {
        /// The name of the node.
        node: Name,
        /// The digest of the key, as [`EnrolledNode::key`].
        key: String,
    },
    /// Rolls this commit out in waves. The earlier documents are stored for a rollback.
    Rollout(Vec<PreviousDocument>),
    /// Records that an owner was refused during a rollout, and waits for a turn.
    Awaited {
        /// The owner of the documents; `None` for the operator.
        owner: Option<Name>,
    },
    /// Withholds documents: a node has run this revision, which the store has lost.
    Behind {
        /// The lost revision.
        revision: Revision,
    },
    /// An operator confirms the store's state, although changes may be lost.
    Confirmed,
    /// Advances the rollout to this step.
    Step(usize),
    /// Ends the rollout.
    Settled {
        /// The reason for the rollback; `None` if the rollout succeeded.
        failed: Option<String>,
    },
}

/// A document as it was before a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PreviousDocument {
    /// The key of the document.
    pub key: Key,
    /// The earlier document; `None` if it did not exist.
    pub resource: Option<Resource>,
}

/// A commit that is being rolled out in waves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WavedRollout {
    /// The revision of the commit.
    pub of: Revision,
    /// The current step, from 1.
    pub step: usize,
    /// The earlier documents.
    pub before: Vec<PreviousDocument>,
    /// The author of the commit, as [`Commit::by`].
    #[serde(default)]
    pub by: String,
}

/// The owners who may change documents next, after the current rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RolloutQueue {
    /// The waiting owners, in order.
    pub waiting: Vec<Option<Name>>,
    /// When the turn of the first owner ends, in milliseconds since 1970; 0 while a rollout is in progress.
    pub until: u64,
}

/// A CA rotation: two CAs are trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rotation {
    /// The one of the two CAs that does not sign.
    pub other: Ca,
    /// True if `other` signed before; false if it will sign.
    pub is_leaving: bool,
    /// The cross-certificate of the new CA by the old one (PEM), for peers that trust only the old one.
    pub proof: String,
    /// When the rotation entered this phase, in milliseconds since 1970.
    pub since: u64,
}

/// A CA that no longer signs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RetiredCa {
    /// The certificate (PEM).
    pub certificate: String,
    /// The certificates of its issuers (PEM), up to the root.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub chain: String,
    /// The cross-certificate of the next CA by this one (PEM).
    pub proof: String,
    /// When the last certificate that the CA issued expires, in milliseconds since 1970.
    pub until: u64,
}

/// An operator, or an administrator of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Operator {
    /// SHA-256 of the public key, in hex.
    pub key: String,
    /// The name in the certificate.
    pub name: Name,
    /// The provider whose documents may be changed; `None` for all documents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<Name>,
    /// When the certificate expires, in milliseconds since 1970.
    pub until: u64,
}

impl RolloutQueue {
    fn join(&mut self, owner: Option<Name>) {
        if self.waiting.len() < MAX_WAITING && !self.waiting.contains(&owner) {
            self.waiting.push(owner);
        }
    }
}

/// Returns the provider whose documents an author of commits changes; `None` for the operator.
pub fn owner_of(by: &str) -> Option<Name> {
    by.strip_prefix("provider/")?.split('/').next()?.parse().ok()
}

/// The length of a turn, in milliseconds.
const TURN_DURATION: u64 = 30_000;
/// The maximum number of waiting owners.
const MAX_WAITING: usize = 1024;
/// The maximum number of retired CAs that the state contains.
const MAX_RETIRED: usize = 4;

/// A single-use enrolment token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Token {
    /// The id. The rest of the token is secret.
    pub id: String,
    /// SHA-256 of the secret, in hex, so that a reader of the store cannot use the token.
    pub digest: String,
    /// The node that may enrol.
    pub node: Name,
    /// When the token expires, in milliseconds since 1970.
    pub expires: u64,
}

/// An enrolled node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EnrolledNode {
    /// The name of the node.
    pub node: Name,
    /// SHA-256 of the node's public key, in hex: only certificates for this key are renewed.
    pub key: String,
    /// The time of enrolment, in milliseconds since 1970.
    pub since: u64,
    /// The digest of the token with which the node enrolled.
    pub token: String,
}

/// The state of an overlay after an entry of the log. Copies are cheap.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The revision of the last commit.
    pub revision: Revision,
    /// The documents.
    pub catalog: Catalog,
    /// The revision at which each document last changed.
    pub changed: RedBlackTreeMapSync<Key, Revision>,
    /// The revision at which each deleted document was deleted.
    pub deleted: RedBlackTreeMapSync<Key, Revision>,
    /// The revision up to which deletions are no longer in `deleted`.
    pub forgotten: Revision,
    /// The longest certificate lifetime that documents ever set, in milliseconds: some certificates may still have it.
    pub longest_life: u64,
    /// The CA that signs; `None` before the first one is created.
    pub authority: Option<Ca>,
    /// The rotation in progress.
    pub rotation: Option<Arc<Rotation>>,
    /// Retired CAs whose certificates may still be in use; the latest comes last.
    pub retired: Vec<RetiredCa>,
    /// Operators by the digest of their key.
    pub operators: RedBlackTreeMapSync<String, Operator>,
    /// Unused tokens, some of which may have expired.
    pub tokens: RedBlackTreeMapSync<String, Token>,
    /// Enrolled nodes.
    pub members: RedBlackTreeMapSync<Name, EnrolledNode>,
    /// Keys that were revoked and have enrolled again, with the time (milliseconds since 1970) until which a node may
    /// still store the revocation.
    pub readmitted: RedBlackTreeMapSync<String, u64>,
    /// True if the store was restored, or lacks a revision that nodes have run, and its content has not been confirmed.
    /// Documents are then withheld from nodes.
    pub is_unconfirmed: bool,
    /// The last revision that a node ran and the store has lost.
    pub behind: Revision,
    /// The rollout in waves that is in progress.
    pub rollout: Option<Arc<WavedRollout>>,
    /// The owners who wait for their turn.
    pub turns: Arc<RolloutQueue>,
    /// The last commit that was rolled back, and the reason.
    pub failed: Option<(Revision, String)>,
}

impl State {
    /// Applies a commit.
    pub fn apply(&mut self, revision: Revision, commit: Commit) {
        self.revision = revision;
        self.retired.retain(|before| before.until > commit.at);
        self.take_turn(&commit);
        for change in commit.changes {
            match change {
                Change::Put(resource) => {
                    self.changed.insert_mut(resource.key.clone(), revision);
                    self.deleted.remove_mut(&resource.key);
                    self.catalog.put(resource);
                    self.longest_life = self.longest_life.max(milliseconds(self.certificate_lifetime()));
                }
                Change::Delete(key) => {
                    self.changed.remove_mut(&key);
                    self.catalog.remove(&key);
                    if self.deleted.size() >= MAX_DELETED {
                        (self.deleted, self.forgotten) = (RedBlackTreeMapSync::default(), revision - 1);
                    }
                    self.deleted.insert_mut(key, revision);
                }
                Change::Ca(authority) => self.authority = Some(authority),
                Change::Rotation(rotation) => self.rotation = rotation.map(Arc::new),
                Change::Retired(retired) => self.retire(retired),
                Change::Operator(operator) => self.admit(operator, commit.at),
                Change::Dismissed { key } => _ = self.operators.remove_mut(&key),
                Change::Token(token) => self.tokens.insert_mut(token.id.clone(), token),
                Change::Spent { token } => _ = self.tokens.remove_mut(&token),
                Change::Enrolled(member) => self.members.insert_mut(member.node.clone(), member),
                Change::Expelled { node } => _ = self.members.remove_mut(&node),
                Change::Revoked(revoked) => {
                    self.readmitted.remove_mut(&revoked.key);
                    self.catalog.revoke(revoked, commit.at);
                }
                Change::Readmitted { key, .. } => {
                    self.catalog.readmit(&key);
                    let over: Vec<_> = self.readmitted.iter().filter(|(_, until)| **until < commit.at).collect();
                    let over: Vec<_> = over.into_iter().map(|(key, _)| key.clone()).collect();
                    over.iter().for_each(|key| _ = self.readmitted.remove_mut(key));
                    self.readmitted.insert_mut(key, commit.at.saturating_add(self.longest_life()));
                }
                Change::Behind { revision } => {
                    (self.is_unconfirmed, self.behind) = (true, self.behind.max(revision));
                }
                Change::Confirmed => self.is_unconfirmed = false,
                Change::Rollout(before) => {
                    let missed = self.missed(commit.at).min(self.turns.waiting.len());
                    let turns = Arc::make_mut(&mut self.turns);
                    turns.waiting.drain(..missed);
                    turns.until = 0;
                    let by = commit.by.clone();
                    self.rollout = Some(Arc::new(WavedRollout { of: revision, step: 1, before, by }));
                }
                Change::Awaited { owner } => Arc::make_mut(&mut self.turns).join(owner),
                Change::Step(step) => {
                    if let Some(waved) = &mut self.rollout {
                        Arc::make_mut(waved).step = step;
                    }
                }
                Change::Settled { failed } => {
                    let over = self.rollout.take();
                    Arc::make_mut(&mut self.turns).until = commit.at.saturating_add(TURN_DURATION);
                    self.failed = over.zip(failed).map(|(over, why)| (over.of, why)).or(self.failed.take());
                }
            }
        }
    }

    /// True if another waiting owner has a turn before this one.
    pub fn is_before(&self, owner: &Option<Name>, now: u64) -> bool {
        self.turns.waiting.get(self.missed(now)).is_some_and(|first| first != owner)
    }

    /// The number of waiting owners whose turns have passed; turns follow one another.
    fn missed(&self, now: u64) -> usize {
        if self.turns.until > now.saturating_add(TURN_DURATION) {
            // The clock was set back since then. The turns must not last until it has caught up.
            return usize::MAX;
        }
        let late = now.saturating_sub(self.turns.until).div_ceil(TURN_DURATION);
        if self.turns.until == 0 { 0 } else { usize::try_from(late).unwrap_or(usize::MAX) }
    }

    /// Ends the turn of the owner who changes documents; the next one begins.
    fn take_turn(&mut self, commit: &Commit) {
        let writes = |change: &Change| matches!(change, Change::Put(_) | Change::Delete(_));
        if self.turns.waiting.is_empty() || !commit.changes.iter().any(writes) {
            return;
        }
        let owner = owner_of(&commit.by);
        let turns = Arc::make_mut(&mut self.turns);
        let before = turns.waiting.len();
        turns.waiting.retain(|waiting| *waiting != owner);
        if turns.waiting.len() < before && turns.until > 0 {
            turns.until = commit.at.saturating_add(TURN_DURATION);
        }
    }

    fn retire(&mut self, retired: RetiredCa) {
        self.retired.retain(|before| before.certificate != retired.certificate);
        self.retired.push(retired);
        let over = self.retired.len().saturating_sub(MAX_RETIRED);
        self.retired.drain(..over);
    }

    fn admit(&mut self, operator: Operator, now: u64) {
        let over: Vec<_> = self.operators.values().filter(|one| one.until <= now).map(|one| one.key.clone()).collect();
        over.iter().for_each(|key| _ = self.operators.remove_mut(key));
        self.operators.insert_mut(operator.key.clone(), operator);
    }

    /// The CAs whose private keys are in the store.
    pub fn authorities(&self) -> impl Iterator<Item = &Ca> {
        self.authority.iter().chain(self.rotation.as_deref().map(|rotation| &rotation.other))
    }

    /// Returns the record of a CA that is retired now.
    pub fn retired(&self, authority: &Ca, proof: &str, now: u64) -> RetiredCa {
        // An overlay may give nodes a day more than operators get.
        let until = now.saturating_add(self.longest_life().max(milliseconds(OPERATOR_LIFE)));
        let Ca { certificate, chain, .. } = authority.clone();
        RetiredCa { certificate, chain, proof: proof.to_owned(), until }
    }

    /// The lifetime of a node's certificate.
    pub fn certificate_lifetime(&self) -> Duration {
        self.catalog
            .overlay()
            .and_then(|(_, overlay)| overlay.certificate_lifetime)
            .map_or(CERTIFICATE_LIFE, |life| life.0)
    }

    /// Returns the revocation of a node's key, which begins now.
    pub fn revoked(&self, member: &EnrolledNode, now: u64) -> Revoked {
        let until = now.saturating_add(self.longest_life());
        Revoked { node: member.node.clone(), key: member.key.clone(), until }
    }

    /// The longest lifetime that any node's certificate may have, in milliseconds. Earlier certificates may have had a
    /// longer one than the overlay sets now.
    pub fn longest_life(&self) -> u64 {
        self.longest_life.max(milliseconds(CERTIFICATE_LIFE))
    }

    /// Returns the revision at which a document last changed or was deleted. If that is no longer recorded, returns the
    /// highest revision at which it may have been deleted.
    pub fn touched(&self, key: &Key) -> Revision {
        let gone = || self.deleted.get(key).copied().unwrap_or(self.forgotten);
        self.changed.get(key).copied().unwrap_or_else(gone)
    }

    /// The state as a base, from which a log can begin: see [`State::from_base`].
    pub fn base(&self) -> Vec<u8> {
        let documents = self.catalog.iter().map(|resource| {
            let changed = self.changed.get(&resource.key).copied().unwrap_or_default();
            (changed, (**resource).clone())
        });
        let base = SavedState {
            version: VERSION,
            documents: documents.collect(),
            authority: self.authority.clone(),
            rotation: self.rotation.as_deref().cloned(),
            retired: self.retired.clone(),
            operators: self.operators.values().cloned().collect(),
            tokens: self.tokens.values().cloned().collect(),
            members: self.members.values().cloned().collect(),
            deleted: self.deleted.iter().map(|(key, revision)| (key.clone(), *revision)).collect(),
            forgotten: self.forgotten,
            longest_life: self.longest_life,
            rollout: self.rollout.as_deref().cloned(),
            revoked: self.catalog.revoked().cloned().collect(),
            failed: self.failed.clone(),
            turns: (*self.turns).clone(),
            readmitted: self.readmitted.iter().map(|(key, until)| (key.clone(), *until)).collect(),
            is_unconfirmed: self.is_unconfirmed,
            behind: self.behind,
        };
        serde_json::to_vec(&base).unwrap_or_default()
    }

    /// Restores the state from a base, which is the state saved at this revision.
    ///
    /// # Errors
    /// The text is not a base of this version.
    pub fn from_base(revision: Revision, bytes: &[u8]) -> Result<Self, String> {
        let base: SavedState = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if base.version != VERSION {
            return Err(format!("version {}, expected {VERSION}", base.version));
        }
        let (rollout, failed) = (base.rollout.map(Arc::new), base.failed);
        let mut state = Self { revision, authority: base.authority, rollout, failed, ..Self::default() };
        for (changed, resource) in base.documents {
            state.changed.insert_mut(resource.key.clone(), changed);
            state.catalog.put(resource);
        }
        state.turns = Arc::new(base.turns);
        state.readmitted = base.readmitted.into_iter().collect();
        (state.is_unconfirmed, state.behind) = (base.is_unconfirmed, base.behind);
        state.deleted = base.deleted.into_iter().collect();
        state.forgotten = base.forgotten;
        state.longest_life = base.longest_life.max(milliseconds(state.certificate_lifetime()));
        state.rotation = base.rotation.map(Arc::new);
        state.retired = base.retired;
        state.operators = base.operators.into_iter().map(|operator| (operator.key.clone(), operator)).collect();
        base.revoked.into_iter().for_each(|revoked| state.catalog.revoke(revoked, 0));
        state.tokens = base.tokens.into_iter().map(|token| (token.id.clone(), token)).collect();
        state.members = base.members.into_iter().map(|member| (member.node.clone(), member)).collect();
        Ok(state)
    }
}

const VERSION: u32 = 1;
/// The maximum number of deletions that the state records.
const MAX_DELETED: usize = 10_000;

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct SavedState {
    version: u32,
    documents: Vec<(Revision, Resource)>,
    authority: Option<Ca>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rotation: Option<Rotation>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    retired: Vec<RetiredCa>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    operators: Vec<Operator>,
    tokens: Vec<Token>,
    members: Vec<EnrolledNode>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deleted: Vec<(Key, Revision)>,
    #[serde(default)]
    forgotten: Revision,
    #[serde(default)]
    longest_life: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    revoked: Vec<Revoked>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout: Option<WavedRollout>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<(Revision, String)>,
    #[serde(default, skip_serializing_if = "is_nobody")]
    turns: RolloutQueue,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    readmitted: Vec<(String, u64)>,
    #[serde(default)]
    is_unconfirmed: bool,
    #[serde(default)]
    behind: Revision,
}

fn is_nobody(turns: &RolloutQueue) -> bool {
    *turns == RolloutQueue::default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::{Ca, Change, Commit, EnrolledNode, RolloutQueue, State, TURN_DURATION, Token};
    use crate::document::read;

    fn commits() -> Vec<Commit> {
        let commit = |changes| Commit { at: 7, by: "operator".to_owned(), changes };
        let documents = read("kind: Overlay\nname: x\n---\nkind: Node\nname: a\n---\nkind: Node\nname: b\n").unwrap();
        let token = |id: &str| {
            let node = "a".parse().unwrap();
            Change::Token(Token { id: id.to_owned(), digest: "00".to_owned(), node, expires: 9 })
        };
        let member = |node: &str| {
            Change::Enrolled(EnrolledNode {
                node: node.parse().unwrap(),
                key: "11".to_owned(),
                since: 8,
                token: "22".to_owned(),
            })
        };
        let (certificate, key) = ("c".to_owned(), "secret".to_owned());
        let authority = Ca { certificate, chain: String::new(), key };
        vec![
            commit(vec![Change::Ca(authority), token("one"), token("two")]),
            commit(documents.into_iter().map(Change::Put).collect()),
            commit(vec![member("a"), Change::Spent { token: "one".to_owned() }, member("b")]),
            commit(vec![Change::Delete("Node/b".parse().unwrap()), Change::Expelled { node: "b".parse().unwrap() }]),
        ]
    }

    /// A turn that begins in the future was recorded before the clock was set back.
    #[test]
    fn turns_do_not_wait_for_a_clock_that_was_set_back() {
        let turns = RolloutQueue { waiting: vec![Some("acme".parse().unwrap())], until: 10 * TURN_DURATION };
        let state = State { turns: Arc::new(turns), ..State::default() };
        assert!(state.is_before(&None, 10 * TURN_DURATION - 1), "its turn");
        assert!(!state.is_before(&None, 10 * TURN_DURATION + 1), "after its turn");
        assert!(!state.is_before(&None, TURN_DURATION), "after the clock was set back");
    }

    #[test]
    fn commits_take_effect_and_a_base_is_what_they_came_to() {
        let mut state = State::default();
        for (at, commit) in commits().into_iter().enumerate() {
            let text = serde_json::to_vec(&commit).unwrap();
            assert_eq!(serde_json::from_slice::<Commit>(&text).unwrap(), commit);
            state.apply(at as u64 + 1, commit);
        }
        let again = State::from_base(4, &state.base()).unwrap();
        for state in [&state, &again] {
            assert_eq!(state.catalog.iter().count(), 2);
            assert_eq!(state.changed[&"Node/a".parse().unwrap()], 2);
            assert_eq!(state.tokens.keys().collect::<Vec<_>>(), ["two"]);
            assert_eq!(state.members.size(), 1);
            assert_eq!(state.revision, 4);
        }
        assert_eq!(again.base(), state.base());
        assert!(!format!("{state:?}").contains("secret"));
    }

    #[test]
    fn a_retired_ca_is_remembered_as_long_as_its_longest_certificate() {
        let document = "kind: Overlay\nname: x\ncertificate-lifetime: 366d\n";
        let put = read(document).unwrap().into_iter().map(Change::Put).collect();
        let mut state = State::default();
        state.apply(1, Commit { at: 7, by: "operator".to_owned(), changes: put });
        let ca = Ca { certificate: "c".to_owned(), chain: String::new(), key: "secret".to_owned() };
        assert_eq!(state.retired(&ca, "proof", 1000).until, 1000 + 366 * 24 * 3600 * 1000);
        // Operators' certificates live longer than a node's of a day.
        assert_eq!(State::default().retired(&ca, "proof", 1000).until, 1000 + 365 * 24 * 3600 * 1000);
    }

    #[test]
    fn what_is_no_base_is_refused() {
        assert!(State::from_base(1, b"{}").is_err());
        let other = State::default().base();
        let other = String::from_utf8(other).unwrap().replace("\"version\":1", "\"version\":2");
        assert!(State::from_base(1, other.as_bytes()).unwrap_err().contains("version 2"));
    }
}
