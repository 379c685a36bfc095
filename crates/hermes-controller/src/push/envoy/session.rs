//! The state of one Envoy, and its next response: the same for both variants of xDS.
//!
//! In: the resources that the Envoy must have, and its requests. Out: one response after the other.
//! Never: a route to a missing cluster. Clusters are added before the routes that need them, and removed after those. A
//! type of resource has one unanswered response at most.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::compile::envoy::{Resources, VersionedResource};
use crate::digest::{hex, sha256};
use crate::store::Revision;

/// The maximum number of names that an Envoy may request of a type.
const MAX_NAMES: usize = 50_000;

/// The types of xDS resources that the controller serves.
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

    /// Returns the type of a type URL; `None` if the controller does not serve that type.
    pub(crate) fn of(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }
}

/// The resources that an Envoy must have.
#[derive(Clone, Debug, Default)]
pub(crate) struct WantedResources {
    pub(crate) revision: Revision,
    /// SHA-256 of the node document that they implement.
    pub(crate) digest: Bytes,
    pub(crate) resources: Resources,
}

/// A request of an Envoy.
#[derive(Clone, Debug, Default)]
pub(crate) struct XdsRequest {
    /// The nonce of the response that this request acknowledges or rejects; empty if it does neither.
    pub(crate) nonce: String,
    /// The reason for a rejection; `None` if the request does not reject a response.
    pub(crate) refused: Option<String>,
    /// Names to subscribe to; `*` for all.
    pub(crate) subscribe: Vec<String>,
    pub(crate) unsubscribe: Vec<String>,
    /// True for state-of-the-world xDS, in which the names replace all earlier ones.
    pub(crate) is_sotw: bool,
    /// Versions that the Envoy has from an earlier connection.
    pub(crate) has: BTreeMap<String, String>,
}

/// A response to an Envoy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct XdsResponse {
    pub(crate) kind: Kind,
    pub(crate) nonce: String,
    /// The version of all resources of the type.
    pub(crate) version: String,
    /// All resources of the type.
    pub(crate) all: BTreeMap<String, VersionedResource>,
    /// New resources, and those with a new version.
    pub(crate) changed: BTreeMap<String, VersionedResource>,
    pub(crate) removed: Vec<String>,
}

/// The result of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpdateOutcome {
    /// The Envoy has accepted all resources.
    Runs,
    /// The Envoy has rejected some resources, and keeps the earlier ones; the value is the reason.
    Refused(String),
}

/// The step of an update from the Envoy's resources to the wanted ones: make before break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// New clusters are added, none is removed.
    Make,
    /// Listeners and routes are replaced.
    Switch,
    /// Unused clusters are removed.
    Break,
    Done,
    Refused,
}

#[derive(Clone, Debug, Default)]
struct Subscription {
    /// The subscribed names, or `*` for all; `None` if the Envoy has not subscribed yet.
    names: Option<BTreeSet<String>>,
    /// The resources that the Envoy has acknowledged.
    has: BTreeMap<String, VersionedResource>,
    /// The nonce of the unanswered response, and the resources that the Envoy has if it accepts them.
    pending: Option<(String, BTreeMap<String, VersionedResource>)>,
    /// True if the Envoy waits for a response, even an empty one.
    is_owed: bool,
}

/// The xDS state of an Envoy's connection.
#[derive(Debug)]
pub(crate) struct Session {
    goal: WantedResources,
    step: Step,
    kinds: [Subscription; 3],
    sent: u64,
}

impl Session {
    pub(crate) fn new(goal: WantedResources) -> Self {
        Self { goal, step: Step::Make, kinds: Default::default(), sent: 0 }
    }

    /// Sets the resources that the Envoy must have, and begins an update to them.
    pub(crate) fn aim(&mut self, goal: WantedResources) {
        (self.goal, self.step) = (goal, Step::Make);
    }

    pub(crate) fn goal(&self) -> &WantedResources {
        &self.goal
    }

    /// Handles a request. Returns the outcome if the request completes or rejects an update.
    pub(crate) fn receive(&mut self, kind: Kind, heard: XdsRequest) -> Option<UpdateOutcome> {
        let subscription = &mut self.kinds[kind as usize];
        subscription.update(&heard, kind);
        if heard.nonce.is_empty() {
            return None;
        }
        let (nonce, after) = subscription.pending.take()?;
        if nonce != heard.nonce {
            // The request answers an earlier response.
            subscription.pending = Some((nonce, after));
            return None;
        }
        if let Some(refused) = heard.refused {
            self.step = Step::Refused;
            return Some(UpdateOutcome::Refused(refused));
        }
        subscription.has = after;
        self.advance().then_some(UpdateOutcome::Runs)
    }

    /// Advances past all steps that are done. Returns true if the update has just been completed.
    fn advance(&mut self) -> bool {
        loop {
            let has_listener = !self.goal.resources.listeners.is_empty();
            let is_done = |kind| self.is_settled(kind);
            self.step = match self.step {
                Step::Make if is_done(Kind::Clusters) => Step::Switch,
                // An Envoy without a listener subscribes to no routes.
                Step::Switch if is_done(Kind::Listeners) && (is_done(Kind::Routes) || !has_listener) => Step::Break,
                Step::Break if is_done(Kind::Clusters) => {
                    self.step = Step::Done;
                    return true;
                }
                _ => return false,
            };
        }
    }

    /// Returns the resources of a type that the Envoy must have at this step; `None` if the type must wait.
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

    /// Returns the next response; `None` if the Envoy needs no response now.
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
        // Names that do not exist are reported as removed.
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
    fn update(&mut self, heard: &XdsRequest, kind: Kind) {
        let is_first = self.names.is_none();
        let mut names = self.names.take().unwrap_or_default();
        if is_first {
            // An empty first subscription means all resources, except for routes, which need names.
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
                    // A repeated subscription means that the Envoy lacks the resource.
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
