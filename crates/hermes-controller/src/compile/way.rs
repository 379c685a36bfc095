//! The ways of services: who is on them, with whose sessions, and who comes next.
//!
//! In: a catalog without faults. Out: for each service and each node that is on its way, a [`Stop`].
//! Never: a way through a dependent node, which is where sessions begin and end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hermes_model::snapshot::Role;

use crate::catalog::Catalog;
use crate::document::{Key, Name, Node, Service};

/// What one node has to do for one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stop {
    /// Whose sessions come by. `None`: anybody's.
    pub(crate) users: Option<BTreeSet<Name>>,
    /// Neighbours that are nearest to the service. None where it lives here.
    pub(crate) next: BTreeSet<Name>,
    /// Whether sessions begin here.
    pub(crate) is_first: bool,
}

/// All ways.
pub(crate) struct Ways<'a> {
    pub(crate) stops: BTreeMap<&'a Name, BTreeMap<&'a Key, Stop>>,
    /// Who dials whom, for any service.
    pub(crate) links: BTreeMap<&'a Name, BTreeSet<&'a Name>>,
    /// Users of nodes that are not standalone, which their neighbours have to believe: by neighbour and node.
    pub(crate) bound: BTreeMap<&'a Name, BTreeMap<&'a Name, BTreeSet<String>>>,
}

impl<'a> Ways<'a> {
    pub(crate) fn of(catalog: &'a Catalog) -> Self {
        let graph = Graph::of(catalog);
        let mut ways = Self { stops: BTreeMap::new(), links: BTreeMap::new(), bound: BTreeMap::new() };
        for (key, service) in catalog.services() {
            for (node, stop) in stops(catalog, &graph, key, service) {
                ways.note(catalog, key, node, &stop);
                ways.stops.entry(node).or_default().insert(key, stop);
            }
        }
        ways
    }

    fn note(&mut self, catalog: &'a Catalog, key: &Key, node: &'a Name, stop: &Stop) {
        let is_bound = catalog.node(node).is_some_and(|node| node.role == Role::Dependent);
        for (next, _) in stop.next.iter().filter_map(|next| catalog.nodes().find(|(name, _)| *name == next)) {
            self.links.entry(node).or_default().insert(next);
            if let Some(users) = stop.users.as_ref().filter(|_| is_bound) {
                let bound = self.bound.entry(next).or_default().entry(node).or_default();
                bound.extend(users.iter().map(|user| super::user_on_the_wire(&key.provider, user)));
            }
        }
    }
}

/// Who is beside whom.
struct Graph<'a> {
    nodes: BTreeMap<&'a Name, &'a Node>,
    /// All neighbours.
    beside: BTreeMap<&'a Name, BTreeSet<&'a Name>>,
    /// Those that are standalone: a router has thousands of others.
    inner: BTreeMap<&'a Name, BTreeSet<&'a Name>>,
}

impl<'a> Graph<'a> {
    fn of(catalog: &'a Catalog) -> Self {
        let nodes: BTreeMap<_, _> = catalog.nodes().collect();
        let (mut beside, mut inner) = (BTreeMap::<_, BTreeSet<_>>::new(), BTreeMap::<_, BTreeSet<_>>::new());
        for (name, node) in &nodes {
            for link in node.links.iter() {
                let Some((other, far)) = nodes.get_key_value(link) else { continue };
                beside.entry(*name).or_default().insert(*other);
                beside.entry(*other).or_default().insert(*name);
                if far.role == Role::Standalone {
                    inner.entry(*name).or_default().insert(*other);
                }
                if node.role == Role::Standalone {
                    inner.entry(*other).or_default().insert(*name);
                }
            }
        }
        Self { nodes, beside, inner }
    }

    /// How many links each standalone node is from the nearest of these, which are at 0.
    fn distances(&self, places: &BTreeSet<&'a Name>) -> BTreeMap<&'a Name, usize> {
        let mut distances: BTreeMap<&Name, usize> = places.iter().map(|place| (*place, 0)).collect();
        let mut queue: VecDeque<_> = places.iter().copied().collect();
        while let Some(node) = queue.pop_front() {
            let next = distances.get(node).map_or(0, |distance| distance + 1);
            for neighbour in self.inner.get(node).into_iter().flatten() {
                if !distances.contains_key(neighbour) {
                    distances.insert(neighbour, next);
                    queue.push_back(neighbour);
                }
            }
        }
        distances
    }
}

/// What nodes have to do for a service: those on the way from where its users are.
fn stops<'a>(catalog: &'a Catalog, graph: &Graph<'a>, key: &Key, service: &'a Service) -> Vec<(&'a Name, Stop)> {
    let places = service.at.iter().filter_map(|replica| graph.nodes.get_key_value(&replica.node));
    let places: BTreeSet<&Name> = places.map(|(name, _)| *name).collect();
    let distances = graph.distances(&places);
    // The nearest of the neighbours; only they know where a dependent node is.
    let nearest = |node: &Name| {
        let beside = graph.beside.get(node).into_iter().flatten();
        let known = beside.filter_map(|neighbour| Some((distances.get(neighbour)?, *neighbour)));
        let mut nearest: (usize, BTreeSet<&Name>) = (usize::MAX, BTreeSet::new());
        for (distance, neighbour) in known {
            if *distance < nearest.0 {
                nearest = (*distance, BTreeSet::new());
            }
            if *distance == nearest.0 {
                nearest.1.insert(neighbour);
            }
        }
        nearest
    };
    // Nodes that are to be looked at, the furthest first: who is on the way of somebody else comes after them.
    let mut waiting: BTreeMap<usize, BTreeMap<&'a Name, Stop>> = BTreeMap::new();
    let far_of = |node: &Name| match distances.get(node) {
        Some(distance) => Some(*distance),
        None => nearest(node).0.checked_add(1),
    };
    for (node, users) in entries(catalog, graph, key, service) {
        if let Some(distance) = far_of(node) {
            waiting.entry(distance).or_default().insert(node, Stop { users, is_first: true, ..Stop::default() });
        }
    }
    let mut stops = Vec::new();
    while let Some((distance, nodes)) = waiting.pop_last() {
        for (node, mut stop) in nodes {
            if distance > 0 {
                for next in nearest(node).1 {
                    stop.next.insert(next.clone());
                    let fresh = Stop { users: stop.users.as_ref().map(|_| BTreeSet::new()), ..Stop::default() };
                    let after = waiting.entry(distance - 1).or_default().entry(next).or_insert(fresh);
                    if let (Some(all), Some(more)) = (&mut after.users, &stop.users) {
                        all.extend(more.iter().cloned());
                    }
                }
            }
            stops.push((node, stop));
        }
    }
    stops
}

/// Nodes where sessions of this service may begin, and whose.
fn entries<'a>(
    catalog: &'a Catalog,
    graph: &Graph<'a>,
    key: &Key,
    service: &Service,
) -> Vec<(&'a Name, Option<BTreeSet<Name>>)> {
    let Some(audience) = catalog.audience(key, service) else {
        let is_entry = |node: &Node| !node.apps.is_empty() || !node.listeners.is_empty();
        return graph.nodes.iter().filter(|(_, node)| is_entry(node)).map(|(name, _)| (*name, None)).collect();
    };
    let mut users: BTreeMap<&Name, BTreeSet<Name>> = BTreeMap::new();
    for name in audience {
        let nodes = catalog.user(&key.provider, &name).map(|user| user.nodes.iter());
        for node in nodes.into_iter().flatten() {
            if let Some((node, _)) = graph.nodes.get_key_value(node) {
                users.entry(*node).or_default().insert(name.clone());
            }
        }
    }
    users.into_iter().map(|(node, users)| (node, Some(users))).collect()
}
