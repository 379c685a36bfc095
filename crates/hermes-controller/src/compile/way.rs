//! The way of a service: who is on it, with whose sessions, and who comes next.
//!
//! In: a catalog without faults. Out: for each node that is on its way, a [`Stop`].
//! Never: a way through a dependent node, which is where sessions begin and end.

use std::collections::{BTreeMap, BTreeSet};

use super::graph::Graph;
use crate::catalog::Catalog;
use crate::document::{Key, Name, Node, Service};

/// What one node has to do for one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stop {
    /// Whose sessions come by. `None`: anybody's.
    pub(super) users: Option<BTreeSet<Name>>,
    /// Neighbours that are nearest to the service. None where it lives here.
    pub(super) next: BTreeSet<Name>,
    /// Whether sessions begin here.
    pub(super) is_first: bool,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) stops: BTreeMap<Name, Stop>,
}

/// What nodes have to do for a service: those on the way from where its users are.
pub(super) fn way(catalog: &Catalog, graph: &Graph, key: &Key, service: &Service) -> Way {
    let places: BTreeSet<Name> = service.at.iter().map(|replica| replica.node.clone()).collect();
    let distances = graph.distances(&places);
    // Nodes that are to be looked at, the furthest first: who is on the way of somebody else comes after them.
    let mut waiting: BTreeMap<usize, BTreeMap<Name, Stop>> = BTreeMap::new();
    for (node, users) in entries(catalog, key, service) {
        let distance = distances.get(&node).copied();
        if let Some(distance) = distance.or_else(|| Some(graph.nearest(&node, &distances)?.0 + 1)) {
            waiting.entry(distance).or_default().insert(node, Stop { users, is_first: true, ..Stop::default() });
        }
    }
    let mut stops = BTreeMap::new();
    while let Some((distance, nodes)) = waiting.pop_last() {
        for (node, mut stop) in nodes {
            let next = if distance > 0 { graph.nearest(&node, &distances) } else { None };
            for next in next.into_iter().flat_map(|(_, next)| next) {
                let fresh = Stop { users: stop.users.as_ref().map(|_| BTreeSet::new()), ..Stop::default() };
                let after = waiting.entry(distance - 1).or_default().entry(next.clone()).or_insert(fresh);
                if let (Some(all), Some(more)) = (&mut after.users, &stop.users) {
                    all.extend(more.iter().cloned());
                }
                stop.next.insert(next);
            }
            stops.insert(node, stop);
        }
    }
    Way { stops }
}

/// Whether sessions may begin here that are nobody's.
pub(super) fn is_entry(node: &Node) -> bool {
    !node.apps.is_empty() || !node.listeners.is_empty()
}

/// Nodes where sessions of this service may begin, and whose.
fn entries(catalog: &Catalog, key: &Key, service: &Service) -> BTreeMap<Name, Option<BTreeSet<Name>>> {
    let Some(audience) = catalog.audience(key, service) else {
        return catalog.nodes().filter(|(_, node)| is_entry(node)).map(|(name, _)| (name.clone(), None)).collect();
    };
    let mut users: BTreeMap<Name, BTreeSet<Name>> = BTreeMap::new();
    for name in audience {
        let nodes = catalog.user(&key.provider, &name).map(|user| user.nodes.iter());
        for node in nodes.into_iter().flatten() {
            users.entry(node.clone()).or_default().insert(name.clone());
        }
    }
    users.into_iter().map(|(node, users)| (node, Some(users))).collect()
}
