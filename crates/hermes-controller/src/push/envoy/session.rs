//! What one Envoy has, and what it is sent next: the same for both forms of xDS.
//!
//! In: what it is to have, and what it asks for, takes and refuses. Out: one message after the other.
//! Never: a route to a cluster that is not there. Clusters come before the routes that need them, and go after those that
//! needed them; nothing is sent of a kind while the last of that kind is not answered.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::compile::envoy::{Resources, VersionedResource};
use crate::digest::{hex, sha256};
use crate::store::Revision;

/// An Envoy asks for so many names of a kind; of more there is nothing.
const MAX_NAMES: usize = 50_000;

/// Kinds of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Clusters,
    Listeners,
    Routes,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Clusters, Kind::Listeners, Kind::Routes];

    pub(crate) fn url(self) -> &'static str {
        match self {
            Kind::Clusters => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Kind::Listeners => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Kind::Routes => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        }
    }

    /// `None`: nothing that we have told an Envoy to ask for.
    pub(crate) fn of(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }
}

/// What an Envoy is to have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Goal {
    pub(crate) revision: Revision,
    /// SHA-256 of the document that it is.
    pub(crate) digest: Bytes,
    pub(crate) resources: Resources,
}

/// What an Envoy says.
#[derive(Clone, Debug, Default)]
pub(crate) struct XdsRequest {
    /// Which message this answers. Empty: none.
    pub(crate) nonce: String,
    /// Why it does not take that one.
    pub(crate) refused: Option<String>,
    /// Names that it asks for, beside those before; `*` for all.
    pub(crate) subscribe: Vec<String>,
    pub(crate) unsubscribe: Vec<String>,
    /// It asks for these names, and for none of before.
    pub(crate) is_sotw: bool,
    /// Versions that it has from a connection before.
    pub(crate) has: BTreeMap<String, String>,
}

/// What an Envoy is told.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct XdsResponse {
    pub(crate) kind: Kind,
    pub(crate) nonce: String,
    /// Of all of the kind.
    pub(crate) version: String,
    /// All of the kind, as it is from then on.
    pub(crate) all: BTreeMap<String, VersionedResource>,
    /// Those that it has in another version, or not at all.
    pub(crate) changed: BTreeMap<String, VersionedResource>,
    pub(crate) removed: Vec<String>,
}

/// How it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It has taken all of it.
    Runs,
    /// It has refused something, and goes on with what it had.
    Refused(String),
}

/// How far it is on its way to the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Clusters that are new come, and none goes.
    Make,
    /// Listeners and routes are the new ones.
    Switch,
    /// Clusters that nothing needs any more go.
    Break,
    Done,
    Refused,
}

#[derive(Clone, Debug, Default)]
struct Subscription {
    /// Names; `*` is all. `None`: it has not asked yet.
    names: Option<BTreeSet<String>>,
    /// What it has, as far as it has said so.
    has: BTreeMap<String, VersionedResource>,
    /// What was sent and is not answered: which message, and what it has if it takes it.
    pending: Option<(String, BTreeMap<String, VersionedResource>)>,
    /// It waits for an answer, whatever that is.
    is_owed: bool,
}

/// One connection of an Envoy.
#[derive(Debug)]
pub(crate) struct Session {
    goal: Goal,
    step: Step,
    kinds: [Subscription; 3],
    sent: u64,
}

impl Session {
    pub(crate) fn new(goal: Goal) -> Self {
        Self { goal, step: Step::Make, kinds: Default::default(), sent: 0 }
    }

    /// From now on it is to have this.
    pub(crate) fn aim(&mut self, goal: Goal) {
        (self.goal, self.step) = (goal, Step::Make);
    }

    pub(crate) fn goal(&self) -> &Goal {
        &self.goal
    }

    /// It says something. What that comes to, where it comes to something.
    pub(crate) fn hear(&mut self, kind: Kind, heard: XdsRequest) -> Option<Verdict> {
        let subscription = &mut self.kinds[kind as usize];
        subscription.ask(&heard, kind);
        if heard.nonce.is_empty() {
            return None;
        }
        let (nonce, after) = subscription.pending.take()?;
        if nonce != heard.nonce {
            // It answers what was sent before that.
            subscription.pending = Some((nonce, after));
            return None;
        }
        if let Some(refused) = heard.refused {
            self.step = Step::Refused;
            return Some(Verdict::Refused(refused));
        }
        subscription.has = after;
        self.advance().then_some(Verdict::Runs)
    }

    /// Whether it has just come to the end.
    fn advance(&mut self) -> bool {
        loop {
            let has_listener = !self.goal.resources.listeners.is_empty();
            let is_done = |kind| self.is_settled(kind);
            self.step = match self.step {
                Step::Make if is_done(Kind::Clusters) => Step::Switch,
                // Without a listener it asks for no routes.
                Step::Switch if is_done(Kind::Listeners) && (is_done(Kind::Routes) || !has_listener) => Step::Break,
                Step::Break if is_done(Kind::Clusters) => {
                    self.step = Step::Done;
                    return true;
                }
                _ => return false,
            };
        }
    }

    /// What it is to have of a kind at this step. `None`: it waits.
    fn target(&self, kind: Kind) -> Option<BTreeMap<String, VersionedResource>> {
        let Subscription { names, has, .. } = &self.kinds[kind as usize];
        let names = names.as_ref()?;
        let all = match kind {
            Kind::Clusters => &self.goal.resources.clusters,
            Kind::Listeners => &self.goal.resources.listeners,
            Kind::Routes => &self.goal.resources.routes,
        };
        let is_asked = |name: &String| names.contains("*") || names.contains(name);
        let wanted = all.iter().filter(|(name, _)| is_asked(name)).map(|(name, held)| (name.clone(), held.clone()));
        match (self.step, kind) {
            (Step::Refused, _) | (Step::Make, Kind::Listeners | Kind::Routes) => None,
            (Step::Make | Step::Switch, Kind::Clusters) => Some(has.clone().into_iter().chain(wanted).collect()),
            _ => Some(wanted.collect()),
        }
    }

    fn is_settled(&self, kind: Kind) -> bool {
        let subscription = &self.kinds[kind as usize];
        let is_there = |target| is_same(&target, &subscription.has);
        subscription.pending.is_none() && !subscription.is_owed && self.target(kind).is_some_and(is_there)
    }

    /// The next message, where there is one to be sent.
    pub(crate) fn next(&mut self) -> Option<XdsResponse> {
        self.advance();
        let (kind, all) = Kind::ALL.into_iter().find_map(|kind| {
            let subscription = &self.kinds[kind as usize];
            let all = self.target(kind).filter(|_| subscription.pending.is_none())?;
            (subscription.is_owed || !is_same(&all, &subscription.has)).then_some((kind, all))
        })?;
        self.sent += 1;
        let nonce = self.sent.to_string();
        let subscription = &mut self.kinds[kind as usize];
        let is_new = |name: &String, held: &VersionedResource| {
            subscription.has.get(name).is_none_or(|has| has.version != held.version)
        };
        let changed = all.iter().filter(|(name, held)| is_new(name, held));
        let changed = changed.map(|(name, held)| (name.clone(), held.clone())).collect();
        // Names that it asks for, and that are not there, are said to be gone.
        let asked = subscription.names.iter().flatten().filter(|name| *name != "*" && subscription.is_owed);
        let removed: BTreeSet<_> =
            subscription.has.keys().chain(asked).filter(|name| !all.contains_key(*name)).collect();
        let removed = removed.into_iter().cloned().collect();
        subscription.is_owed = false;
        subscription.pending = Some((nonce.clone(), all.clone()));
        Some(XdsResponse { kind, nonce, version: version(&all), all, changed, removed })
    }
}

impl Subscription {
    fn ask(&mut self, heard: &XdsRequest, kind: Kind) {
        let is_first = self.names.is_none();
        let mut names = self.names.take().unwrap_or_default();
        if is_first {
            // Who asks for nothing at first asks for all, except of what has to be named.
            if heard.subscribe.is_empty() && kind != Kind::Routes {
                names.insert("*".to_owned());
            }
            let view = |(name, version): (&String, &String)| {
                (name.clone(), VersionedResource { version: version.clone(), body: None })
            };
            self.has = heard.has.iter().take(MAX_NAMES).map(view).collect();
        }
        if heard.is_sotw {
            let asked: BTreeSet<_> = heard.subscribe.iter().take(MAX_NAMES).cloned().collect();
            let is_other = !asked.is_empty() && asked != names;
            self.is_owed |= is_first || is_other;
            if is_other {
                names = asked;
                self.has.retain(|name, _| names.contains(name) || names.contains("*"));
            }
        } else {
            self.is_owed |= is_first || !heard.subscribe.is_empty();
            for name in &heard.subscribe {
                if names.len() < MAX_NAMES {
                    names.insert(name.clone());
                }
                if !is_first {
                    // Who asks again has it no more.
                    self.has.remove(name);
                }
            }
            for name in &heard.unsubscribe {
                names.remove(name);
                self.has.remove(name);
            }
        }
        self.names = Some(names);
    }
}

fn is_same(a: &BTreeMap<String, VersionedResource>, b: &BTreeMap<String, VersionedResource>) -> bool {
    let versions = |map: &BTreeMap<String, VersionedResource>| {
        map.iter().map(|(name, held)| (name.clone(), held.version.clone())).collect::<Vec<_>>()
    };
    a.len() == b.len() && versions(a) == versions(b)
}

fn version(all: &BTreeMap<String, VersionedResource>) -> String {
    let text: String = all.iter().map(|(name, held)| format!("{name}\n{}\n", held.version)).collect();
    hex(&sha256(text.as_bytes())[..8])
}
