//! The graph of nodes and links.
//!
//! In: changed nodes. Out: neighbours, and distances between standalone nodes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hermes_model::snapshot::Role;
use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};

use crate::catalog::Catalog;
use crate::document::{Key, Kind, Name, Node};

type NeighbourMap = RedBlackTreeMapSync<Name, RedBlackTreeSetSync<Name>>;

/// The neighbours of all nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    /// All neighbours.
    beside: NeighbourMap,
    /// Only the standalone neighbours, because a node may have thousands of dependent ones.
    inner: NeighbourMap,
    /// Nodes that drain.
    draining: RedBlackTreeSetSync<Name>,
}

fn insert(beside: &mut NeighbourMap, node: &Name, other: &Name) {
    let mut all = beside.get(node).cloned().unwrap_or_else(RedBlackTreeSetSync::new_sync);
    all.insert_mut(other.clone());
    beside.insert_mut(node.clone(), all);
}

fn remove(beside: &mut NeighbourMap, node: &Name, other: &Name) {
    let Some(mut all) = beside.get(node).cloned() else { return };
    all.remove_mut(other);
    if all.is_empty() {
        beside.remove_mut(node);
    } else {
        beside.insert_mut(node.clone(), all);
    }
}

impl Graph {
    /// Updates the graph for a node that was added, changed or removed.
    pub(super) fn replace(&mut self, name: &Name, old: Option<&Node>, catalog: &Catalog) {
        if catalog.node(name).is_some_and(|node| node.is_draining()) {
            self.draining.insert_mut(name.clone());
        } else {
            self.draining.remove_mut(name);
        }
        // Considers the old and the new links, because a neighbour in the same change may be updated before or after
        // this node.
        let mut others: BTreeSet<Name> = old.into_iter().flat_map(|node| node.links.iter().cloned()).collect();
        others.extend(self.beside.get(name).into_iter().flat_map(|all| all.iter().cloned()));
        others.extend(catalog.node(name).into_iter().flat_map(|node| node.links.iter().cloned()));
        others
            .extend(catalog.namers(&Key::node(name)).filter(|key| key.kind == Kind::Node).map(|key| key.name.clone()));
        for other in others {
            let (here, there) = (catalog.node(name), catalog.node(&other));
            let links =
                |from: Option<&Node>, to: &Name| from.is_some_and(|node| node.links.iter().any(|link| link == to));
            let is_beside = here.is_some() && there.is_some() && (links(here, &other) || links(there, name));
            for (node, neighbour, neighbours_node) in [(name, &other, there), (&other, name, here)] {
                if !is_beside {
                    remove(&mut self.beside, node, neighbour);
                    remove(&mut self.inner, node, neighbour);
                    continue;
                }
                insert(&mut self.beside, node, neighbour);
                if neighbours_node.is_some_and(|node| node.role == Role::Standalone) {
                    insert(&mut self.inner, node, neighbour);
                } else {
                    remove(&mut self.inner, node, neighbour);
                }
            }
        }
    }

    /// True if one of the two nodes has a link to the other.
    pub(super) fn is_beside(&self, node: &Name, other: &Name) -> bool {
        self.beside.get(node).is_some_and(|beside| beside.contains(other))
    }

    /// Nodes that drain.
    pub(super) fn draining(&self) -> impl Iterator<Item = &Name> {
        self.draining.iter()
    }

    /// True if the node drains.
    pub(super) fn is_draining(&self, node: &Name) -> bool {
        self.draining.contains(node)
    }

    /// Returns the distance, in links, from `places` and from each standalone node to the nearest of `places`. If
    /// `is_avoiding`, draining nodes are left out.
    pub(super) fn distances(&self, places: &BTreeSet<Name>, is_avoiding: bool) -> BTreeMap<Name, usize> {
        let is_open = |node: &&Name| !(is_avoiding && self.is_draining(node));
        let mut distances: BTreeMap<Name, usize> =
            places.iter().filter(is_open).map(|place| (place.clone(), 0)).collect();
        let mut queue: VecDeque<Name> = distances.keys().cloned().collect();
        while let Some(node) = queue.pop_front() {
            let next = distances.get(&node).map_or(0, |distance| distance + 1);
            for neighbour in self.inner.get(&node).into_iter().flat_map(RedBlackTreeSetSync::iter).filter(is_open) {
                if !distances.contains_key(neighbour) {
                    distances.insert(neighbour.clone(), next);
                    queue.push_back(neighbour.clone());
                }
            }
        }
        distances
    }

    /// Returns the neighbours of a node that occur in `distances`, with their distances.
    pub(super) fn known<'g>(&'g self, node: &Name, distances: &'g BTreeMap<Name, usize>) -> Vec<(usize, &'g Name)> {
        let Some(beside) = self.beside.get(node) else { return Vec::new() };
        // Dependent neighbours count too, because they may have a replica. A node may have thousands of neighbours, so
        // the loop runs over the smaller map.
        if beside.size() <= distances.len() {
            beside.iter().filter_map(|neighbour| Some((*distances.get(neighbour)?, neighbour))).collect()
        } else {
            let all = distances.iter().filter(|(name, _)| beside.contains(*name));
            all.map(|(name, distance)| (*distance, name)).collect()
        }
    }

    /// Returns the neighbours with the smallest distance, and that distance; `None` if no neighbour has one.
    pub(super) fn nearest(&self, node: &Name, distances: &BTreeMap<Name, usize>) -> Option<(usize, BTreeSet<Name>)> {
        let known = self.known(node, distances);
        let nearest = known.iter().map(|(distance, _)| *distance).min()?;
        let next = known.into_iter().filter(|(distance, _)| *distance == nearest).map(|(_, name)| name.clone());
        Some((nearest, next.collect()))
    }
}
