//! In which order nodes take a change that leads sessions another way: nobody sends to who does not know yet, or not any more.
//!
//! In: what nodes have been given, and what they are to have in the end. Out: steps, each for some nodes; the next one is given
//! when those of the one before have said that they run it, or cannot be waited for.
//! Never: a step for a change that leads no sessions elsewhere: all of its nodes have it at once. Nor an end that is not reached:
//! who does not answer is waited for so long, and all of it has its time.
//!
//! First everybody keeps what it does, and learns what is new; then who is nearest to a service does as it is to do, then who
//! sends to it; what nobody sends to any more is forgotten last.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hermes_model::check::{Problem, check_document};
use hermes_model::document::Document;
use hermes_model::document::listener::Listener;
use hermes_model::document::route::Route;
use hermes_model::document::scalar::Many;
use hermes_model::document::upstream::Upstream;
use tokio::time::Instant;

use crate::compile::Plan;
use crate::document::{Key, Name, Waves};
use crate::store::Revision;

/// A node that is connected and does not answer is waited for so long, at each step.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(2);
/// From the first step on; then everybody gets what it is to have. Who may do less by a change does less by then.
const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(10);

/// Changes that come while one is on its way, so often.
const MAX_CONCURRENT_CHANGES: usize = 16;
/// What a route is called that stands beside the one with its name for a moment.
const MEANWHILE: &str = "~";

/// What nobody begins to send any more has so long to arrive, before it is forgotten.
const FORGET_DELAY: Duration = Duration::from_millis(500);

/// What is given to nodes at once.
pub type Step = BTreeMap<Name, Bytes>;

/// Which step of which change.
pub type StepId = (Revision, usize);

/// A change that is on its way.
#[derive(Clone, Debug)]
pub struct Rollout {
    id: StepId,
    began: Instant,
    /// What nodes have been given so far that are to have something else in the end.
    given: Step,
    /// What was given last.
    current: Step,
    next: VecDeque<Step>,
    moved: BTreeSet<Key>,
    /// What nodes may still do as it says: each plan since it began.
    before: Vec<Plan>,
    /// How long nodes have to go on well, at each step. `None`: it goes on whatever they do.
    settle: Option<Duration>,
    /// Steps before this one change nothing that is there.
    turns_at: usize,
    /// The last step takes away what nobody sends to any more.
    has_forget: bool,
}

/// A change in the order in which it is to be taken.
#[derive(Default)]
struct Order {
    given: Step,
    learn: Step,
    turn: BTreeMap<usize, Step>,
    forget: Step,
}

impl Rollout {
    /// Of the change from one plan to the next, and of the one that was on its way before. `None`: all nodes have it at once.
    pub fn begin(
        earlier: Option<&Self>,
        (before, after): (&Plan, &Plan),
        touched: &[(Name, bool)],
        revision: Revision,
    ) -> Option<Self> {
        let mut moved = after.moved().clone();
        moved.extend(earlier.into_iter().flat_map(|earlier| earlier.moved.iter().cloned()));
        // One that took the time that it was given does not count.
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

    /// The same in waves, from one plan to the next. `None`: no node that was there before has something else to do.
    pub fn in_waves(
        (before, after): (&Plan, &Plan),
        touched: &[(Name, bool)],
        revision: Revision,
        waves: Waves,
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
            // Nobody turns: what is forgotten is what changes.
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

    /// The next step is given. `None`: there is none more, and all have what they are to have.
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

    /// How long nodes have to go on well with this step before the next one. `None`: that does not matter.
    pub fn settle(&self) -> Option<Duration> {
        self.settle.map(|settle| if self.id.1 < self.turns_at { Duration::ZERO } else { settle })
    }

    /// How long the next step is to be waited with when nodes have taken this one: their word is faster than what they sent
    /// just before.
    pub fn linger(&self) -> Duration {
        if self.has_forget && self.next.len() == 1 { FORGET_DELAY } else { Duration::ZERO }
    }

    /// How many steps there are after this one.
    pub fn remaining(&self) -> usize {
        self.next.len()
    }

    /// Which step is given now.
    pub fn id(&self) -> StepId {
        self.id
    }

    /// What a node has to have meanwhile. `None`: what the plan says.
    pub fn given(&self, node: &Name) -> Option<&Bytes> {
        self.given.get(node)
    }

    /// What was given by this step.
    pub fn current(&self) -> &Step {
        &self.current
    }

    /// Nodes that are not given what they are to have in the end.
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
                    "it takes a change at once: what it does and what it is to do cannot be together: {why}"
                );
                (has.clone(), last.clone())
            })
        };
        // Who was given something that nobody has waited for is waited for now.
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

/// What a node has together with what it will have; and what it will have, with what is sent to it until all know.
///
/// # Errors
/// They cannot be together, and why.
fn between((has, last): (&Bytes, &Bytes), is_sent: impl Fn(&str) -> bool) -> Result<(Bytes, Bytes), String> {
    let parsed = |bytes: &Bytes| serde_json::from_slice::<Document>(bytes).map_err(|error| error.to_string());
    let (old, new) = (parsed(has)?, parsed(last)?);
    let bytes = |document: Document| {
        let bytes = serde_json::to_vec(&document).map_err(|error| error.to_string())?;
        // The first one says enough to whoever reads the log.
        let first = |problems: Vec<Problem>| problems.first().map(ToString::to_string).unwrap_or_default();
        check_document(document, Path::new(".")).map_err(first)?;
        Ok::<_, String>(Bytes::from(bytes))
    };
    Ok((bytes(with(old.clone(), &new, |_| true))?, bytes(with(new, &old, is_sent))?))
}

/// A document, and what another one has besides: behind its own, where names are taken first.
fn with(mut document: Document, other: &Document, is_wanted: impl Fn(&str) -> bool) -> Document {
    for route in other.routes.iter().filter(|route| is_wanted(plain(&route.name))) {
        let users = &route.matching.user;
        let is_theirs =
            |own: &Many<_>| own.is_empty() || (!users.is_empty() && users.iter().all(|user| own.0.contains(user)));
        let mut own = document.routes.iter().filter(|own| plain(&own.name) == plain(&route.name));
        if own.any(|own| is_theirs(&own.matching.user)) {
            continue;
        }
        // Whose sessions come already, or still, while the others' go another way.
        let mut name = route.name.clone();
        while document.routes.iter().any(|own| own.name == name) {
            name += MEANWHILE;
        }
        document.routes.push(Route { name, ..route.clone() });
    }
    let is_free = |upstream: &&Upstream| !document.upstreams.iter().any(|own| own.name == upstream.name);
    let upstreams: Vec<_> = other.upstreams.iter().filter(is_free).cloned().collect();
    // Doors for other nodes, and connections to them. Those for applications are there from the moment on in which they are.
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

/// What a route is called when all is done.
fn plain(name: &str) -> &str {
    name.trim_end_matches(MEANWHILE)
}

fn join<T: Clone + PartialEq>(own: &mut Many<T>, other: &Many<T>) {
    let more: Vec<_> = other.iter().filter(|one| !own.0.contains(one)).cloned().collect();
    own.0.extend(more);
}

#[cfg(test)]
mod tests;
