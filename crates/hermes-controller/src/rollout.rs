//! The order in which nodes take a change of paths: a node sends sessions to a neighbour only while the neighbour has
//! the route.
//!
//! In: the documents that nodes have, and those that they must have in the end. Out: steps, each with documents for
//! some nodes. The next step follows once the nodes of this one have reported, or after a timeout.
//! Never: steps for a change that moves no sessions, which all nodes receive at once.
//! Never: a rollout without an end, because each step and the whole have a time limit.
//!
//! First, all nodes receive the new routes and retain the old ones. Then nodes switch to their new routes, those
//! nearest to a service first. Routes that no node uses are removed last.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::check::{Problem, check_document};
use hermes_model::document::Document;
use hermes_model::document::listener::Listener;
use hermes_model::document::route::Route;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::document::upstream::Upstream;
use tokio::time::Instant;

use crate::compile::Plan;
use crate::document::{Key, Name, RolloutWaves};
use crate::store::Revision;

/// The time limit of a step for connected nodes that do not report.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(2);
/// The time limit of all steps. After it, all nodes receive their final documents, because a change may also revoke
/// permissions.
const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of changes that one rollout combines.
const MAX_CONCURRENT_CHANGES: usize = 16;
/// The suffix of a temporary route beside one of the same name.
const MEANWHILE: &str = "~";

/// The delay before unused routes are removed, so that sessions already sent can arrive.
const FORGET_DELAY: Duration = Duration::from_millis(500);

/// The documents that nodes receive in one step, by node.
pub type Step = BTreeMap<Name, Bytes>;

/// A step of a rollout: the revision of the change, and the number of the step, from 1.
pub type StepId = (Revision, usize);

/// A rollout in progress.
#[derive(Clone, Debug)]
pub struct Rollout {
    id: StepId,
    began: Instant,
    /// Current documents of the nodes that have not received their final ones.
    given: Step,
    /// The documents of the current step.
    current: Step,
    next: VecDeque<Step>,
    moved: BTreeSet<Key>,
    /// The plans whose documents nodes may still run: all earlier plans since the rollout began.
    before: Vec<Plan>,
    /// The time that nodes must stay healthy after each step; `None` if the rollout does not wait for health.
    settle: Option<Duration>,
    /// Steps before this one only add routes.
    turns_at: usize,
    /// True if the last step only removes unused routes.
    has_forget: bool,
}

/// The steps of a change, in order.
#[derive(Default)]
struct Order {
    given: Step,
    learn: Step,
    turn: BTreeMap<usize, Step>,
    forget: Step,
}

impl Rollout {
    /// Begins the rollout of a change, combined with an earlier rollout in progress. Returns `None` if all nodes
    /// receive the change at once.
    pub fn begin(
        earlier: Option<&Self>,
        (before, after): (&Plan, &Plan),
        touched: &[(Name, bool)],
        revision: Revision,
    ) -> Option<Self> {
        let mut moved = after.moved().clone();
        moved.extend(earlier.into_iter().flat_map(|earlier| earlier.moved.iter().cloned()));
        // The duration of an earlier rollout in waves does not count towards the time limit.
        let began =
            earlier.filter(|earlier| earlier.settle.is_none()).map_or_else(Instant::now, |earlier| earlier.began);
        let mut befores = earlier.map(|earlier| earlier.before.clone()).unwrap_or_default();
        if moved.is_empty() || began.elapsed() > ROLLOUT_TIMEOUT || befores.len() >= MAX_CONCURRENT_CHANGES {
            return None;
        }
        befores.push(before.clone());
        let Order { given, learn, turn, forget } = order(earlier, (&befores, after), touched, &moved);
        let has_forget = !forget.is_empty();
        let all = std::iter::once(learn).chain(turn.into_values()).chain([forget]);
        let next = all.filter(|step| !step.is_empty()).collect();
        let rollout = Self {
            id: (revision, 0),
            began,
            given,
            current: Step::new(),
            next,
            moved,
            before: befores,
            settle: None,
            turns_at: 0,
            has_forget,
        };
        rollout.advance(after)
    }

    /// Begins a rollout in waves. Returns `None` if no existing node receives a new document.
    pub fn in_waves(
        (before, after): (&Plan, &Plan),
        touched: &[(Name, bool)],
        revision: Revision,
        waves: RolloutWaves,
    ) -> Option<Self> {
        let (moved, befores) = (after.moved().clone(), vec![before.clone()]);
        let Order { given, learn, turn, forget } = order(None, (&befores, after), touched, &moved);
        let mut next: VecDeque<Step> = Some(learn).filter(|step| !step.is_empty()).into_iter().collect();
        let (turns_at, mut size) = (next.len() + 1, waves.first.get());
        for step in turn.into_values() {
            let mut nodes = step.into_iter().peekable();
            while nodes.peek().is_some() {
                next.push_back(nodes.by_ref().take(size).collect());
                size = size.saturating_mul(waves.growth.get());
            }
        }
        let has_forget = !forget.is_empty();
        let mut nodes = forget.into_iter().peekable();
        if next.len() < turns_at {
            // No node switches routes, so the change consists of removals, which are sent in waves.
            while nodes.peek().is_some() {
                next.push_back(nodes.by_ref().take(size).collect());
                size = size.saturating_mul(waves.growth.get());
            }
        }
        next.extend(Some(nodes.collect::<Step>()).filter(|step| !step.is_empty()));
        let (id, began, settle) = ((revision, 0), Instant::now(), Some(waves.settle.0));
        Self { id, began, given, current: Step::new(), next, moved, before: befores, settle, turns_at, has_forget }
            .advance(after)
    }

    /// Advances to the next step. Returns `None` if all nodes have their final documents.
    pub fn advance(mut self, plan: &Plan) -> Option<Self> {
        self.current = self.next.pop_front()?;
        self.id.1 += 1;
        for (node, document) in &self.current {
            if plan.document(node) == Some(document) {
                self.given.remove(node);
            } else {
                self.given.insert(node.clone(), document.clone());
            }
        }
        Some(self)
    }

    /// The time that nodes must stay healthy after this step; `None` if the rollout does not wait for health.
    pub fn settle(&self) -> Option<Duration> {
        self.settle.map(|settle| if self.id.1 < self.turns_at { Duration::ZERO } else { settle })
    }

    /// The delay after this step. It is needed because a node's report can overtake the sessions that the node sent
    /// just before.
    pub fn linger(&self) -> Duration {
        if self.has_forget && self.next.len() == 1 { FORGET_DELAY } else { Duration::ZERO }
    }

    /// The number of steps after this one.
    pub fn remaining(&self) -> usize {
        self.next.len()
    }

    /// The current step.
    pub fn id(&self) -> StepId {
        self.id
    }

    /// The document that a node must have at this step; `None` if it is the one in the plan.
    pub fn given(&self, node: &Name) -> Option<&Bytes> {
        self.given.get(node)
    }

    /// The documents of the current step.
    pub fn current(&self) -> &Step {
        &self.current
    }

    /// Nodes that have not received their final documents.
    pub fn pending(&self) -> impl Iterator<Item = &Name> {
        self.given.keys()
    }
}

fn order(
    earlier: Option<&Rollout>,
    (befores, after): (&[Plan], &Plan),
    touched: &[(Name, bool)],
    moved: &BTreeSet<Key>,
) -> Order {
    let pending = earlier.into_iter().flat_map(|earlier| earlier.given.keys().chain(earlier.current.keys()));
    let nodes: BTreeSet<&Name> = touched.iter().map(|(node, _)| node).chain(pending).collect();
    let mut order = Order::default();
    for node in nodes {
        let Some(last) = after.document(node) else { continue };
        let given = earlier.and_then(|earlier| earlier.given.get(node));
        let Some(has) = given.or_else(|| befores.last()?.document(node)) else {
            order.learn.insert(node.clone(), last.clone());
            continue;
        };
        order.given.insert(node.clone(), has.clone());
        let is_sent = |route: &str| befores.iter().any(|before| before.is_sent(node, route, moved));
        let (both, most) = if moved.is_empty() {
            (has.clone(), last.clone())
        } else {
            between((has, last), is_sent).unwrap_or_else(|why| {
                tracing::warn!(
                    node = node.as_str(),
                    "cannot combine the old and the new document; applying the change at once: {why}"
                );
                (has.clone(), last.clone())
            })
        };
        // The nodes of an earlier rollout's current step may not have reported yet. They are in the first step, so that
        // this rollout waits for them.
        if both != *has || earlier.is_some_and(|earlier| earlier.current.contains_key(node)) {
            order.learn.insert(node.clone(), both.clone());
        }
        if most != both {
            order.turn.entry(after.distance(node, moved)).or_default().insert(node.clone(), most.clone());
        }
        if *last != most {
            order.forget.insert(node.clone(), last.clone());
        }
    }
    order
}

/// Returns the two intermediate documents of a node. The first is the current one with the new routes added. The second
/// is the final one with the old routes to which neighbours still send.
///
/// # Errors
/// The documents cannot be combined; the error says why.
fn between((has, last): (&Bytes, &Bytes), is_sent: impl Fn(&str) -> bool) -> Result<(Bytes, Bytes), String> {
    let parsed = |bytes: &Bytes| serde_json::from_slice::<Document>(bytes).map_err(|error| error.to_string());
    let (old, new) = (parsed(has)?, parsed(last)?);
    let bytes = |document: Document| {
        let bytes = serde_json::to_vec(&document).map_err(|error| error.to_string())?;
        // The first problem is enough for the log.
        let first = |problems: Vec<Problem>| problems.first().map(ToString::to_string).unwrap_or_default();
        check_document(document, Path::new(".")).map_err(first)?;
        Ok::<_, String>(Bytes::from(bytes))
    };
    Ok((bytes(with(old.clone(), &new, |_| true))?, bytes(with(new, &old, is_sent))?))
}

/// Adds routes, upstreams, listeners and users of another document. Added routes follow the document's own routes,
/// because earlier routes take precedence.
fn with(mut document: Document, other: &Document, is_wanted: impl Fn(&str) -> bool) -> Document {
    for route in other.routes.iter().filter(|route| is_wanted(plain(&route.name))) {
        let users = &route.matching.user;
        let is_theirs =
            |own: &OneOrMany<_>| own.is_empty() || (!users.is_empty() && users.iter().all(|user| own.0.contains(user)));
        let mut own = document.routes.iter().filter(|own| plain(&own.name) == plain(&route.name));
        if own.any(|own| is_theirs(&own.matching.user)) {
            continue;
        }
        // The route is for users whose sessions still take the old path, or already take the new one.
        let mut name = route.name.clone();
        while document.routes.iter().any(|own| own.name == name) {
            name += MEANWHILE;
        }
        document.routes.push(Route { name, ..route.clone() });
    }
    let is_free = |upstream: &&Upstream| !document.upstreams.iter().any(|own| own.name == upstream.name);
    let upstreams: Vec<_> = other.upstreams.iter().filter(is_free).cloned().collect();
    // Only listeners for other nodes and reverse connections to them are added. Listeners for applications start with
    // the final document.
    let is_door = |listener: &&Listener| listener.dial.is_some() || listener.tls.is_some();
    let is_free = |listener: &&Listener| {
        let collides = |own: &Listener| own.name == listener.name || (own.bind.is_some() && own.bind == listener.bind);
        !document.listeners.iter().any(collides)
    };
    let doors: Vec<_> = other.listeners.iter().filter(is_door).filter(is_free).cloned().collect();
    document.upstreams.extend(upstreams);
    document.listeners.extend(doors);
    for (node, users) in &other.users {
        join(document.users.entry(node.clone()).or_default(), users);
    }
    document
}

/// The name of a route without the temporary suffix.
fn plain(name: &str) -> &str {
    name.trim_end_matches(MEANWHILE)
}

fn join<T: Clone + PartialEq>(own: &mut OneOrMany<T>, other: &OneOrMany<T>) {
    let more: Vec<_> = other.iter().filter(|one| !own.0.contains(one)).cloned().collect();
    own.0.extend(more);
}

#[cfg(test)]
mod tests;
