//! During a change, sessions that have a path before it and after it have one at every moment.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hermes_model::document::Document;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::document::upstream::Endpoint;
use hermes_model::pattern::UserPattern;

use super::{Rollout, Step};
use crate::catalog::Catalog;
use crate::compile::Plan;
use crate::document::{Key, Name, Resource, read};

/// A reproducible random number generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

const ROUTERS: u64 = 5;
const SERVERS: u64 = 3;
const USERS: u64 = 3;
const SERVICES: u64 = 2;

fn links(chance: &mut Chance, own: u64) -> String {
    let routers = (0..ROUTERS).filter(|router| *router != own).map(|router| format!("r{router}"));
    let servers = (0..SERVERS).map(|server| format!("s{server}"));
    let all: Vec<_> = routers.chain(servers).filter(|_| chance.below(3) == 0).collect();
    if all.is_empty() { "s0".to_owned() } else { all.join(", ") }
}

fn router(chance: &mut Chance, number: u64) -> String {
    let links = links(chance, number);
    format!("{{kind: Node, name: r{number}, role: standalone, address: \"192.0.2.{number}:9443\", links: [{links}]}}")
}

fn device(chance: &mut Chance, number: u64) -> String {
    let router = chance.below(ROUTERS);
    format!("{{kind: Node, name: d{number}, links: r{router}, apps: {{bind: \"127.0.0.1:8080\"}}}}")
}

fn service(chance: &mut Chance, number: u64) -> String {
    let users: Vec<_> = (0..USERS).filter(|_| chance.below(2) == 0).map(|user| format!("u{user}")).collect();
    let whom = if users.is_empty() { "everyone".to_owned() } else { format!("{{users: [{}]}}", users.join(", ")) };
    let server = chance.below(SERVERS);
    let more = if chance.below(2) == 0 { chance.below(SERVERS) } else { server };
    let at: BTreeSet<_> = [server, more].into_iter().collect();
    let at: Vec<_> = at.into_iter().map(|server| format!("{{node: s{server}, http: \"127.0.0.1:1\"}}")).collect();
    format!("{{kind: Service, name: S{number}, at: [{}], for: {whom}}}", at.join(", "))
}

fn overlay(chance: &mut Chance) -> String {
    let mut all = vec!["{kind: Overlay, name: x}".to_owned()];
    all.extend((0..ROUTERS).map(|number| router(chance, number)));
    all.extend(
        (0..SERVERS).map(|number| format!("{{kind: Node, name: s{number}, address: \"192.0.2.9{number}:9443\"}}")),
    );
    for number in 0..USERS {
        all.push(device(chance, number));
        all.push(format!("{{kind: User, name: u{number}, nodes: d{number}}}"));
    }
    all.extend((0..SERVICES).map(|number| service(chance, number)));
    all.join("\n---\n")
}

fn change(chance: &mut Chance) -> Vec<Resource> {
    let text = match chance.below(4) {
        0 => {
            let number = chance.below(ROUTERS);
            router(chance, number)
        }
        1 => {
            let number = chance.below(USERS);
            device(chance, number)
        }
        _ => {
            let number = chance.below(SERVICES);
            service(chance, number)
        }
    };
    read(&text).unwrap()
}

/// The document of each node.
#[derive(Default)]
struct Fleet {
    bytes: BTreeMap<Name, Bytes>,
    documents: BTreeMap<Name, Document>,
}

impl Fleet {
    fn of(plan: &Plan) -> Self {
        let mut fleet = Self::default();
        plan.documents().for_each(|(node, bytes)| fleet.take(node, bytes));
        fleet
    }

    fn take(&mut self, node: &Name, bytes: &Bytes) {
        self.documents.insert(node.clone(), serde_json::from_slice(bytes).unwrap());
        self.bytes.insert(node.clone(), bytes.clone());
    }

    /// Sessions that have a path.
    fn arriving(&self) -> BTreeSet<(u64, u64)> {
        let all = (0..USERS).flat_map(|user| (0..SERVICES).map(move |service| (user, service)));
        all.filter(|one| self.leads(*one).is_ok()).collect()
    }

    fn leads(&self, (user, service): (u64, u64)) -> Result<(), String> {
        let session = Session { fleet: &self.documents, user: &format!("u{user}"), service: &format!("S{service}") };
        session.goes(&format!("d{user}"), &mut Vec::new())
    }

    /// Alternates on the paths of all sessions. Each alternate leads to the service, and not back.
    fn alternates(&self) -> Result<usize, String> {
        let mut count = 0;
        for (user, service) in self.arriving() {
            let (user, service) = (&*format!("u{user}"), &*format!("S{service}"));
            let session = Session { fleet: &self.documents, user, service };
            for node in session.way(&user.replace('u', "d")) {
                let others = session.next(&node).map(|(_, others)| others).unwrap_or_default();
                for other in others {
                    let mut way = vec![node.clone()];
                    session.goes(&other, &mut way).map_err(|why| format!("{user} {service}, {node}|{other}: {why}"))?;
                    count += 1;
                }
            }
        }
        Ok(count)
    }
}

/// Routers have addresses 192.0.2.N, and servers 192.0.2.9N.
fn names(endpoints: &OneOrMany<Endpoint>) -> Vec<String> {
    let name = |endpoint: &Endpoint| match endpoint {
        Endpoint::Node(node) => node.clone(),
        Endpoint::Address(address) => {
            let number = address.host.trim_start_matches("192.0.2.");
            number.strip_prefix('9').map_or_else(|| format!("r{number}"), |server| format!("s{server}"))
        }
    };
    endpoints.iter().map(name).collect()
}

struct Session<'a> {
    fleet: &'a BTreeMap<Name, Document>,
    user: &'a str,
    service: &'a str,
}

impl Session<'_> {
    /// The next hops of a session at this node, and its alternates.
    fn next(&self, node: &str) -> Result<(Vec<String>, Vec<String>), String> {
        let document = self.fleet.get(&node.parse().unwrap()).ok_or_else(|| format!("{node} has nothing"))?;
        let is_for = |pattern: &UserPattern| matches!(pattern, UserPattern::Is(name) if **name == *self.user);
        let mut routes = document.routes.iter().filter(|route| route.name.trim_end_matches('~') == self.service);
        let route = routes.find(|route| route.matching.user.0.is_empty() || route.matching.user.0.iter().any(is_for));
        let route = route.ok_or_else(|| format!("{node} has no route of {}", self.service))?;
        if route.terminate.is_some() {
            return Ok(Default::default());
        }
        let name = route.upstream.as_ref().ok_or_else(|| format!("{node} sends it nowhere"))?;
        let upstream = document.upstreams.iter().find(|upstream| upstream.name == *name);
        let upstream = upstream.ok_or_else(|| format!("{node} knows no {name}"))?;
        Ok((names(&upstream.endpoints), names(&upstream.backup)))
    }

    /// True if the session arrives from this node by every choice of neighbours. `way` collects the nodes passed.
    fn goes(&self, node: &str, way: &mut Vec<String>) -> Result<(), String> {
        if way.iter().any(|before| before == node) {
            return Err(format!("comes to {node} again"));
        }
        way.push(node.to_owned());
        let (next, _) = self.next(node)?;
        let arrives = next
            .iter()
            .try_for_each(|next| self.goes(next, way).map_err(|why| format!("{node} sends to {next}: {why}")));
        way.pop();
        arrives
    }

    /// All nodes that the session may pass.
    fn way(&self, node: &str) -> BTreeSet<String> {
        let next = self.next(node).map(|(next, _)| next).unwrap_or_default();
        let behind = next.iter().flat_map(|next| self.way(next));
        behind.chain([node.to_owned()]).collect()
    }
}

/// Nodes take a step one by one, in random order. Sessions with a path before and after the change always have one.
fn take(step: &Step, running: &mut Fleet, always: &BTreeSet<(u64, u64)>, chance: &mut Chance, what: &str) {
    let mut order: Vec<_> = step.iter().collect();
    while !order.is_empty() {
        let (node, document) = order.swap_remove(chance.below(order.len() as u64) as usize);
        running.take(node, document);
        for one in always {
            assert_eq!(running.leads(*one), Ok(()), "{what}: after {node} took it, {one:?}");
        }
    }
}

struct Count {
    changes: usize,
    by_steps: usize,
    superseded: usize,
    alternates: usize,
}

fn walk(seed: u64, count: &mut Count) {
    let mut chance = Chance(seed);
    let mut catalog = Catalog::default();
    read(&overlay(&mut chance)).unwrap().into_iter().for_each(|resource| _ = catalog.put(resource));
    let all: BTreeSet<Key> = catalog.iter().map(|resource| resource.key.clone()).collect();
    let Ok((mut plan, _)) = Plan::default().update(&catalog, &all) else { return };
    let (mut running, mut rollout, mut always) = (Fleet::of(&plan), None::<Rollout>, BTreeSet::new());
    for revision in 1..40 {
        let (mut next, mut changed) = (catalog.clone(), BTreeSet::new());
        for resource in change(&mut chance) {
            changed.insert(resource.key.clone());
            next.put(resource);
        }
        let Ok((after, touched)) = plan.update(&next, &changed) else { continue };
        let what = format!("seed {seed}, change {revision} of {changed:?}");
        let last = Fleet::of(&after);
        if rollout.is_none() {
            always = running.arriving();
        }
        always = always.intersection(&last.arriving()).copied().collect();
        let nodes: Vec<_> = touched.iter().map(|(node, document)| (node.clone(), document.is_some())).collect();
        rollout = Rollout::begin(rollout.as_ref(), (&plan, &after), &nodes, revision);
        count.changes += 1;
        count.by_steps += usize::from(rollout.is_some());
        // The next change may begin before this one is done.
        let mut steps = if chance.below(3) == 0 { chance.below(4) } else { 100 };
        while let Some(rolling) = rollout.take_if(|_| steps > 0) {
            take(rolling.current(), &mut running, &always, &mut chance, &what);
            for (node, document) in &running.bytes {
                let wanted = rolling.given(node).or_else(|| after.document(node));
                assert_eq!(wanted, Some(document), "{what}: {node}");
            }
            (rollout, steps) = (rolling.advance(&after), steps - 1);
        }
        if let Some(rolling) = &rollout {
            count.superseded += 1;
            // Some nodes have taken the step by then.
            let some = rolling.current().clone().into_iter().filter(|_| chance.below(2) == 0).collect();
            take(&some, &mut running, &always, &mut chance, &what);
        } else {
            let rest = last.bytes.into_iter().filter(|(node, document)| running.bytes.get(node) != Some(document));
            take(&rest.collect(), &mut running, &always, &mut chance, &what);
            count.alternates += running.alternates().unwrap_or_else(|why| panic!("{what}: {why}"));
        }
        (plan, catalog) = (after, next);
    }
}

#[test]
fn who_has_a_way_before_and_after_has_one_all_the_time() {
    let mut count = Count { changes: 0, by_steps: 0, superseded: 0, alternates: 0 };
    (0..24).for_each(|seed| walk(seed, &mut count));
    let Count { changes, by_steps, superseded, alternates } = count;
    let is_much = changes > 400 && by_steps > 200 && superseded > 50 && alternates > 400;
    let words = format!(
        "{changes} changes, {by_steps} by steps, {superseded} of them not to their end, {alternates} alternates"
    );
    assert!(is_much, "{words}");
    println!("{words}");
}
