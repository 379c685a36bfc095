//! The path of a service: its nodes, the users whose sessions pass each, and the next hops.
//!
//! In: a valid catalog. Out: a [`Hop`] for each node on the path.
//! Never: a path through a dependent node, where sessions only begin and end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rpds::RedBlackTreeMapSync;

use super::graph::Graph;
use super::loop_free_alternate::Alternates;
use crate::catalog::{Catalog, ServiceOrNetwork};
use crate::document::{Audience, Key, Name, Node};

/// The hop of one node on the path of one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hop {
    /// The users whose sessions pass this node; `None` if those of everyone do.
    pub(super) users: Option<BTreeSet<Name>>,
    /// The neighbours nearest to the service; empty if this node has a replica.
    pub(super) next: BTreeSet<Name>,
    /// Neighbours that receive sessions while no next hop is reachable, in order of preference.
    pub(super) alternates: Vec<Name>,
    /// Neighbours that would be next hops, but drain, so that they receive no new sessions.
    pub(super) draining: BTreeSet<Name>,
    /// True if sessions may begin at this node.
    pub(super) is_first: bool,
    /// True if the node is on the path only as an alternate.
    pub(super) is_spare: bool,
}

impl Hop {
    /// Returns all neighbours that receive, or still have, sessions from this node.
    pub(super) fn beside(&self) -> BTreeSet<Name> {
        self.next.iter().chain(&self.draining).chain(&self.alternates).cloned().collect()
    }

    /// Returns the neighbours that receive new sessions from this node.
    pub(super) fn after(&self) -> Vec<Name> {
        self.next.iter().chain(&self.alternates).cloned().collect()
    }
}

/// The path of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServicePath {
    pub(super) hops: RedBlackTreeMapSync<Name, Hop>,
    /// The distance of each standalone node from the nearest replica.
    pub(super) distances: Arc<BTreeMap<Name, usize>>,
    /// The distances for new sessions, which avoid draining nodes; `None` if no node of the path drains.
    pub(super) avoiding: Option<Arc<BTreeMap<Name, usize>>>,
    /// The number of users of the service; [`usize::MAX`] means everyone.
    pub(super) audience: usize,
}

impl ServicePath {
    /// True if next hops changed at two nodes or more, so that the order of updates matters. Alternates do not count: a
    /// session that takes one early had no path otherwise.
    pub(super) fn is_moved(&self, before: &Self) -> bool {
        let gone = before.hops.keys().filter(|node| !self.hops.contains_key(node));
        let others = self.hops.keys().filter(|node| self.hops.get(node) != before.hops.get(node)).chain(gone);
        let others: Vec<_> = others.collect();
        let goes =
            |path: &Self, node: &Name| path.hops.get(node).filter(|hop| !hop.is_spare).map(|hop| hop.next.clone());
        others.len() > 1 && others.iter().any(|node| goes(self, node) != goes(before, node))
    }
}

/// Computes the path of a service, from the nodes of its users to its replicas.
///
/// A draining node keeps its hop for existing sessions, and its neighbours take another path for new ones. If there is
/// no other path, the draining node still receives new sessions, so that a drain makes no service unreachable.
pub(super) fn service_path(catalog: &Catalog, graph: &Graph, key: &Key, offer: ServiceOrNetwork<'_>) -> ServicePath {
    let places: BTreeSet<Name> = offer.nodes().into_iter().cloned().collect();
    let distances = graph.distances(&places, false);
    let is_concerned = graph.draining().any(|node| distances.contains_key(node));
    let avoiding = is_concerned.then(|| Arc::new(graph.distances(&places, true)));
    let users = catalog.audience(key, offer.audience());
    let audience = match offer.audience() {
        Audience::Everyone => usize::MAX,
        Audience::Those { .. } => users.as_ref().map_or(usize::MAX, BTreeSet::len),
    };
    let mut path = ServicePath { distances: Arc::new(distances), avoiding, audience, ..ServicePath::default() };
    path.hops = match users {
        Some(users) => users_hops(catalog, graph, (key, offer), &users, &path),
        None => {
            let public = PublicPaths::new(catalog, graph, offer, &path);
            catalog.nodes().filter_map(|(name, node)| Some((name.clone(), public.hop(name, node)?))).collect()
        }
    };
    path
}

/// The hops of a service for these users.
fn users_hops(
    catalog: &Catalog,
    graph: &Graph,
    (key, offer): (&Key, ServiceOrNetwork<'_>),
    users: &BTreeSet<Name>,
    path: &ServicePath,
) -> RedBlackTreeMapSync<Name, Hop> {
    let sources = entries(catalog, key, users);
    let is_first: BTreeSet<Name> = sources.keys().cloned().collect();
    let mut hops = hops_of(graph, &is_first, sources, &path.distances);
    let mut now = BTreeMap::new();
    if let Some(distances) = &path.avoiding {
        // All nodes of the old path count as sources, because a neighbour that has not been updated yet may still send
        // new sessions to them.
        let sources = hops.iter().filter(|(node, _)| !graph.is_draining(node));
        let sources = sources.map(|(node, hop)| (node.clone(), hop.users.clone().unwrap_or_default())).collect();
        now = hops_of(graph, &is_first, sources, distances);
        Alternates::new(catalog, graph, distances, offer).join(&mut now, |_| true);
    }
    let may = |node: &Name| !graph.is_draining(node) && !now.contains_key(node);
    Alternates::new(catalog, graph, &path.distances, offer).join(&mut hops, may);
    for (node, hop) in now {
        let hop = instead(hops.get(&node), hop);
        hops.insert(node, hop);
    }
    hops.into_iter().collect()
}

fn instead(before: Option<&Hop>, mut now: Hop) -> Hop {
    now.draining = before.into_iter().flat_map(|before| before.next.difference(&now.next).cloned()).collect();
    now
}

/// The hops of a public service: its sessions may pass each standalone node.
pub(super) struct PublicPaths<'a> {
    graph: &'a Graph,
    path: &'a ServicePath,
    before: Alternates<'a>,
    now: Option<Alternates<'a>>,
}

impl<'a> PublicPaths<'a> {
    pub(super) fn new(
        catalog: &'a Catalog,
        graph: &'a Graph,
        offer: ServiceOrNetwork<'a>,
        path: &'a ServicePath,
    ) -> Self {
        let alternates = |distances| Alternates::new(catalog, graph, distances, offer);
        let now = path.avoiding.as_deref().map(alternates);
        Self { graph, path, before: alternates(&path.distances), now }
    }

    /// Returns the hop of one node; `None` if the node is not on the path.
    pub(super) fn hop(&self, name: &Name, node: &Node) -> Option<Hop> {
        let is_draining = self.graph.is_draining(name);
        let before = hop_by(self.graph, &self.path.distances, name, node);
        let avoiding = self.path.avoiding.as_ref().zip(self.now.as_ref()).filter(|_| !is_draining);
        let now = avoiding.and_then(|(distances, now)| Some((hop_by(self.graph, distances, name, node)?, now)));
        let (mut hop, alternates) = match now {
            Some((hop, now)) => (instead(before.as_ref(), hop), now),
            None => (before?, &self.before),
        };
        if !is_draining {
            hop.alternates = alternates.of(name, &hop.next);
        }
        Some(hop)
    }
}

fn hop_by(graph: &Graph, distances: &BTreeMap<Name, usize>, name: &Name, node: &Node) -> Option<Hop> {
    let (distance, is_first) = (distances.get(name), is_entry(node));
    if distance.is_none() && !is_first {
        return None;
    }
    let next = if distance == Some(&0) { BTreeSet::new() } else { graph.nearest(name, distances)?.1 };
    Some(Hop { users: None, next, is_first, ..Hop::default() })
}

/// Returns the hops on the paths from these sources to the service.
fn hops_of(
    graph: &Graph,
    is_first: &BTreeSet<Name>,
    sources: BTreeMap<Name, BTreeSet<Name>>,
    distances: &BTreeMap<Name, usize>,
) -> BTreeMap<Name, Hop> {
    // Nodes to handle, the furthest first, so that each comes before its next hops.
    let mut waiting: BTreeMap<usize, BTreeMap<Name, Hop>> = BTreeMap::new();
    for (node, users) in sources {
        let distance = distances.get(&node).copied();
        if let Some(distance) = distance.or_else(|| Some(graph.nearest(&node, distances)?.0 + 1)) {
            let hop = Hop { users: Some(users), is_first: is_first.contains(&node), ..Hop::default() };
            waiting.entry(distance).or_default().insert(node, hop);
        }
    }
    let mut hops = BTreeMap::new();
    while let Some((distance, nodes)) = waiting.pop_last() {
        for (node, mut hop) in nodes {
            let next = if distance > 0 { graph.nearest(&node, distances) } else { None };
            for next in next.into_iter().flat_map(|(_, next)| next) {
                let fresh = Hop { users: Some(BTreeSet::new()), ..Hop::default() };
                let after = waiting.entry(distance - 1).or_default().entry(next.clone()).or_insert(fresh);
                if let (Some(all), Some(more)) = (&mut after.users, &hop.users) {
                    all.extend(more.iter().cloned());
                }
                hop.next.insert(next);
            }
            hops.insert(node, hop);
        }
    }
    hops
}

/// True if the node has apps or listeners, so that sessions without a user may begin there.
pub(super) fn is_entry(node: &Node) -> bool {
    !node.apps.is_empty() || !node.listeners.is_empty()
}

/// Returns the nodes where sessions of a service may begin, with their users.
fn entries(catalog: &Catalog, key: &Key, users: &BTreeSet<Name>) -> BTreeMap<Name, BTreeSet<Name>> {
    let mut entries: BTreeMap<Name, BTreeSet<Name>> = BTreeMap::new();
    for name in users {
        let nodes = catalog.user(&key.provider, name).map(|user| user.nodes.iter());
        for node in nodes.into_iter().flatten() {
            entries.entry(node.clone()).or_default().insert(name.clone());
        }
    }
    entries
}
