//! What the store's entries come to: the documents, the overlay's authority, tokens, and who has enrolled.
//!
//! In: commits, in the order of their revisions. Out: the state after each of them, the same at every controller.
//! Never: a judgement. Who writes a commit has checked it against the state before; here it only takes effect.

use std::sync::Arc;
use std::time::Duration;

use rpds::RedBlackTreeMapSync;
use serde::{Deserialize, Serialize};

use crate::ca::{CERTIFICATE_LIFE, Ca, OPERATOR_LIFE};
use crate::catalog::{Catalog, Revoked};
use crate::document::{Key, Name, Resource};
use crate::store::Revision;

/// One entry of the log: what changes, all of it or nothing; and who did that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Commit {
    /// When, in milliseconds since 1970 by the controller's clock.
    pub at: u64,
    /// Who: `operator`, `provider/NAME`, `node/NAME` or `controller`.
    pub by: String,
    /// What changes, in this order.
    pub changes: Vec<Change>,
}

/// Something that changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// A document is there, in the place of the one with its key.
    Put(Resource),
    /// A document is there no more.
    Delete(Key),
    /// This authority signs.
    #[serde(rename = "authority")]
    Ca(Ca),
    /// Another one is trusted beside it. `None`: no other one is.
    Rotation(Option<Rotation>),
    /// An authority signs nothing any more, and nodes trust it no more.
    Retired(Retired),
    /// Somebody may change documents.
    Operator(Operator),
    /// Somebody may do so no more.
    Dismissed {
        /// As [`Operator::key`].
        key: String,
    },
    /// Somebody may enrol.
    Token(Token),
    /// A token is used, or taken back.
    Spent {
        /// Which one.
        token: String,
    },
    /// A node has a certificate.
    Enrolled(Member),
    /// A node's certificates are worth nothing any more, and it is to be no member.
    Expelled {
        /// Which one.
        node: Name,
    },
    /// A key is believed no more, whatever certificate its holder has.
    Revoked(Revoked),
    /// A key that was revoked has enrolled again.
    Readmitted {
        /// Whose it is.
        node: Name,
        /// As [`Member::key`].
        key: String,
    },
    /// This commit goes out in waves; that is how documents were before it.
    Rollout(Vec<Before>),
    /// An owner was refused while another change goes out in waves, and gets the next turn.
    Awaited {
        /// The owner of the documents. `None`: the operator.
        owner: Option<Name>,
    },
    /// A node has run this revision, which the store has lost: nodes get nothing until that is confirmed.
    Behind {
        /// Which one.
        revision: Revision,
    },
    /// An operator confirms the store's state, although changes may be lost.
    Confirmed,
    /// What goes out in waves is at this step.
    Step(usize),
    /// What went out in waves does so no more.
    Settled {
        /// Why it is taken back. `None`: it is not.
        failed: Option<String>,
    },
}

/// How a document was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Before {
    /// Which one.
    pub key: Key,
    /// What it said. `None`: there was none.
    pub resource: Option<Resource>,
}

/// A commit that goes out in waves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Waved {
    /// Its revision.
    pub of: Revision,
    /// The step that nodes are to take now, from 1.
    pub step: usize,
    /// How the documents were that it changed.
    pub before: Vec<Before>,
    /// The subject that began it, as [`Commit::by`].
    #[serde(default)]
    pub by: String,
}

/// The owners who may change documents next, after the current rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Turns {
    /// The waiting owners, in order.
    pub waiting: Vec<Option<Name>>,
    /// When the turn of the first owner ends, in milliseconds since 1970. 0: a change still goes out.
    pub until: u64,
}

/// Two authorities are trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rotation {
    /// The one that does not sign.
    pub other: Ca,
    /// It signed before. Else it is to sign.
    pub is_leaving: bool,
    /// The certificate of the newer one by the older one (PEM): who trusts only the older one believes the newer one by that.
    pub proof: String,
    /// Since when that is so, in milliseconds since 1970.
    pub since: u64,
}

/// An authority that was one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Retired {
    /// Its certificate (PEM).
    pub certificate: String,
    /// Those above it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub chain: String,
    /// The certificate of the one after it, by this one (PEM).
    pub proof: String,
    /// Until when anybody may have something of it, in milliseconds since 1970.
    pub until: u64,
}

/// Somebody who may change documents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Operator {
    /// SHA-256 of the public key, in hex.
    pub key: String,
    /// As in the certificate.
    pub name: Name,
    /// Whose documents. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<Name>,
    /// Until when the certificate lives, in milliseconds since 1970.
    pub until: u64,
}

impl Turns {
    fn join(&mut self, owner: Option<Name>) {
        if self.waiting.len() < MAX_WAITING && !self.waiting.contains(&owner) {
            self.waiting.push(owner);
        }
    }
}

/// The owner of the documents that a subject of the log changes.
pub fn owner_of(by: &str) -> Option<Name> {
    by.strip_prefix("provider/")?.split('/').next()?.parse().ok()
}

/// The length of a turn, in milliseconds.
const TURN_DURATION: u64 = 30_000;
/// Owners that wait for a turn.
const MAX_WAITING: usize = 1024;
/// So many authorities are remembered that were one.
const MAX_RETIRED: usize = 4;

/// Leave to enrol, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Token {
    /// What it is known by. The rest of it is a secret.
    pub id: String,
    /// SHA-256 of the secret, in hex: who reads the store cannot use it.
    pub digest: String,
    /// Which node may enrol with it.
    pub node: Name,
    /// Until when, in milliseconds since 1970.
    pub expires: u64,
}

/// A node that has enrolled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Member {
    /// Its name.
    pub node: Name,
    /// SHA-256 of its public key, in hex: certificates are renewed for this key alone.
    pub key: String,
    /// When, in milliseconds since 1970.
    pub since: u64,
    /// The digest of the token that it enrolled with.
    pub token: String,
}

/// All of it. A copy costs nothing.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The last commit's.
    pub revision: Revision,
    /// The documents.
    pub catalog: Catalog,
    /// When each document changed last.
    pub changed: RedBlackTreeMapSync<Key, Revision>,
    /// When those were deleted that are there no more.
    pub deleted: RedBlackTreeMapSync<Key, Revision>,
    /// Of deletions up to here nothing is known any more.
    pub forgotten: Revision,
    /// The longest life of a certificate that documents ever gave, in milliseconds: some may live as long.
    pub longest_life: u64,
    /// The certificate authority, which signs. `None`: there is none yet.
    pub authority: Option<Ca>,
    /// Another one beside it.
    pub rotation: Option<Arc<Rotation>>,
    /// Those before it, of which somebody may still have something; the latest one last.
    pub retired: Vec<Retired>,
    /// Who has a certificate of an operator, by the digest of the key.
    pub operators: RedBlackTreeMapSync<String, Operator>,
    /// Tokens that are not used, some of which may have expired.
    pub tokens: RedBlackTreeMapSync<String, Token>,
    /// Nodes that have enrolled.
    pub members: RedBlackTreeMapSync<Name, Member>,
    /// Keys that were revoked and have enrolled again, with the time (milliseconds since 1970) until which a node may
    /// still hold the revocation.
    pub readmitted: RedBlackTreeMapSync<String, u64>,
    /// The store was restored, or is behind a revision that nodes have run, and nobody has confirmed it: nodes get
    /// nothing.
    pub is_unconfirmed: bool,
    /// The last revision that a node has run, of a history that the store has lost.
    pub behind: Revision,
    /// The commit that goes out in waves.
    pub rollout: Option<Arc<Waved>>,
    /// The owners who wait for their turn.
    pub turns: Arc<Turns>,
    /// The last commit that was taken back, and why.
    pub failed: Option<(Revision, String)>,
}

impl State {
    /// A commit takes effect.
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
                    self.longest_life = self.longest_life.max(milliseconds(self.certificate_life()));
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
                    self.rollout = Some(Arc::new(Waved { of: revision, step: 1, before, by }));
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
            // The clock was set back since: the turns must not last until it has caught up.
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

    fn retire(&mut self, retired: Retired) {
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

    /// The authorities whose keys are here.
    pub fn authorities(&self) -> impl Iterator<Item = &Ca> {
        self.authority.iter().chain(self.rotation.as_deref().map(|rotation| &rotation.other))
    }

    /// What an authority becomes that signs no more.
    pub fn retired(&self, authority: &Ca, proof: &str, now: u64) -> Retired {
        // Nothing of it lives longer than a certificate of an operator.
        let life = u64::try_from(OPERATOR_LIFE.as_millis()).unwrap_or(u64::MAX);
        let until = now.saturating_add(life);
        let Ca { certificate, chain, .. } = authority.clone();
        Retired { certificate, chain, proof: proof.to_owned(), until }
    }

    /// How long a certificate of a node lives.
    pub fn certificate_life(&self) -> Duration {
        self.catalog.overlay().and_then(|(_, overlay)| overlay.certificate_life).map_or(CERTIFICATE_LIFE, |life| life.0)
    }

    /// That a member's key is believed no more, from then on.
    pub fn revoked(&self, member: &Member, now: u64) -> Revoked {
        let until = now.saturating_add(self.longest_life());
        Revoked { node: member.node.clone(), key: member.key.clone(), until }
    }

    /// No certificate of a node lives longer, in milliseconds: some may be from when they lived longer than now.
    pub fn longest_life(&self) -> u64 {
        self.longest_life.max(milliseconds(CERTIFICATE_LIFE))
    }

    /// When a document was changed last, or deleted, as far as that is known.
    pub fn touched(&self, key: &Key) -> Revision {
        let gone = || self.deleted.get(key).copied().unwrap_or(self.forgotten);
        self.changed.get(key).copied().unwrap_or_else(gone)
    }

    /// What an entry becomes that begins with all of this: see [`State::from_base`].
    pub fn base(&self) -> Vec<u8> {
        let documents = self.catalog.iter().map(|resource| {
            let changed = self.changed.get(&resource.key).copied().unwrap_or_default();
            (changed, (**resource).clone())
        });
        let base = Base {
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

    /// The state that was made a base at this revision.
    ///
    /// # Errors
    /// It is no such state, or another version's.
    pub fn from_base(revision: Revision, bytes: &[u8]) -> Result<Self, String> {
        let base: Base = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if base.version != VERSION {
            return Err(format!("it has version {}, and this is {VERSION}", base.version));
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
        state.longest_life = base.longest_life.max(milliseconds(state.certificate_life()));
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
/// So many deletions are remembered.
const MAX_DELETED: usize = 10_000;

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Base {
    version: u32,
    documents: Vec<(Revision, Resource)>,
    authority: Option<Ca>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rotation: Option<Rotation>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    retired: Vec<Retired>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    operators: Vec<Operator>,
    tokens: Vec<Token>,
    members: Vec<Member>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deleted: Vec<(Key, Revision)>,
    #[serde(default)]
    forgotten: Revision,
    #[serde(default)]
    longest_life: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    revoked: Vec<Revoked>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout: Option<Waved>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<(Revision, String)>,
    #[serde(default, skip_serializing_if = "is_nobody")]
    turns: Turns,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    readmitted: Vec<(String, u64)>,
    #[serde(default)]
    is_unconfirmed: bool,
    #[serde(default)]
    behind: Revision,
}

fn is_nobody(turns: &Turns) -> bool {
    *turns == Turns::default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::{Ca, Change, Commit, Member, State, TURN_DURATION, Token, Turns};
    use crate::document::read;

    fn commits() -> Vec<Commit> {
        let commit = |changes| Commit { at: 7, by: "operator".to_owned(), changes };
        let documents = read("kind: Overlay\nname: x\n---\nkind: Node\nname: a\n---\nkind: Node\nname: b\n").unwrap();
        let token = |id: &str| {
            let node = "a".parse().unwrap();
            Change::Token(Token { id: id.to_owned(), digest: "00".to_owned(), node, expires: 9 })
        };
        let member = |node: &str| {
            Change::Enrolled(Member {
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
        let turns = Turns { waiting: vec![Some("acme".parse().unwrap())], until: 10 * TURN_DURATION };
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
    fn what_is_no_base_is_refused() {
        assert!(State::from_base(1, b"{}").is_err());
        let other = State::default().base();
        let other = String::from_utf8(other).unwrap().replace("\"version\":1", "\"version\":2");
        assert!(State::from_base(1, other.as_bytes()).unwrap_err().contains("version 2"));
    }
}
