//! Loop-free alternates (RFC 5286): the neighbours that receive a node's sessions while none of its next hops is
//! reachable.
//!
//! In: the distances to a service, and a node with its next hops. Out: other neighbours whose own path does not lead
//! back, the best first: those that avoid all next hops, then the nearer ones.
//! Never: an alternate of a node that is only an alternate itself, since its sessions have lost one path already.
//! Never: an alternate for custody, which waits for its link.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use hermes_model::snapshot::Role;

use super::graph::Graph;
use super::render::dialled;
use super::service_path::Hop;
use crate::catalog::{Catalog, ServiceOrNetwork};
use crate::document::{Name, Program};

/// The maximum number of alternates of a node for one service. The limit exists because each alternate, and the nodes
/// after it, have the service's users in their documents.
const MAX_ALTERNATES: usize = 3;

/// The alternates for one service.
pub(super) struct Alternates<'a> {
    catalog: &'a Catalog,
    graph: &'a Graph,
    distances: &'a BTreeMap<Name, usize>,
    offer: ServiceOrNetwork<'a>,
    /// Cache: whether a node reaches the service without these next hops. Thousands of devices share the same next
    /// hops.
    spares: RefCell<BTreeMap<(BTreeSet<Name>, Name), bool>>,
    carrying: RefCell<BTreeMap<Name, bool>>,
}

impl<'a> Alternates<'a> {
    pub(super) fn new(
        catalog: &'a Catalog,
        graph: &'a Graph,
        distances: &'a BTreeMap<Name, usize>,
        offer: ServiceOrNetwork<'a>,
    ) -> Self {
        Self { catalog, graph, distances, offer, spares: RefCell::default(), carrying: RefCell::default() }
    }

    /// The alternates of a node with these next hops.
    pub(super) fn of(&self, name: &Name, next: &BTreeSet<Name>) -> Vec<Name> {
        let Some(node) = self.catalog.node(name).filter(|_| !self.is_held() && !next.is_empty()) else {
            return Vec::new();
        };
        // No path leads back to a dependent node, because none goes through one. A path can lead back to a standalone
        // node only from a neighbour that is further away.
        let own = self.distances.get(name).filter(|_| node.role == Role::Standalone);
        let fits = |(distance, other): &(usize, &Name)| {
            own.is_none_or(|own| distance <= own)
                && !next.contains(*other)
                && !self.graph.is_draining(other)
                && self.joins(name, other)
                && self.carries(other)
        };
        let mut all: Vec<_> = self.graph.known(name, self.distances).into_iter().filter(fits).collect();
        all.sort_by_cached_key(|(distance, other)| (!self.spares(next, other), *distance, (*other).clone()));
        all.into_iter().take(MAX_ALTERNATES).map(|(_, other)| other.clone()).collect()
    }

    /// Whether the service has custody, which waits for its link instead of an alternate.
    fn is_held(&self) -> bool {
        matches!(self.offer, ServiceOrNetwork::Service(service) if service.custody.is_some())
    }

    /// True if sessions can go from one node to the other. An Envoy neither dials nor accepts reverse connections, and
    /// it does not forward IP packets.
    fn joins(&self, from: &Name, to: &Name) -> bool {
        let Some((here, there)) = self.catalog.node(from).zip(self.catalog.node(to)) else { return false };
        let has_envoy = [here, there].iter().any(|node| node.runs == Program::Envoy);
        let takes_envoys = matches!(self.offer, ServiceOrNetwork::Service(_));
        !has_envoy || takes_envoys && dialled(Some(here), there, to).is_some()
    }

    /// True if all paths from the node are usable. An alternate must not make a valid overlay invalid.
    fn carries(&self, node: &Name) -> bool {
        if let Some(known) = self.carrying.borrow().get(node) {
            return *known;
        }
        let lives = self.distances.get(node) == Some(&0);
        let next = self.graph.nearest(node, self.distances).filter(|_| !lives).map(|(_, next)| next);
        let carries = next.unwrap_or_default().iter().all(|next| self.joins(node, next) && self.carries(next));
        self.carrying.borrow_mut().insert(node.clone(), carries);
        carries
    }

    /// True if the node reaches the service without these (node-protecting, RFC 5286, section 3.2).
    fn spares(&self, these: &BTreeSet<Name>, node: &Name) -> bool {
        let key = (these.clone(), node.clone());
        if let Some(known) = self.spares.borrow().get(&key) {
            return *known;
        }
        let (mut waiting, mut seen) = (vec![node.clone()], BTreeSet::from([node.clone()]));
        let mut spares = false;
        while let Some(node) = waiting.pop().filter(|_| !spares) {
            spares = self.distances.get(&node) == Some(&0);
            let next = self.graph.nearest(&node, self.distances).map(|(_, next)| next).unwrap_or_default();
            waiting.extend(next.into_iter().filter(|next| !these.contains(next) && seen.insert(next.clone())));
        }
        self.spares.borrow_mut().insert(key, spares);
        spares
    }

    /// Adds alternates to the hops of a path. The alternates, and the nodes after them, then accept the users whose
    /// sessions may arrive.
    pub(super) fn join(&self, hops: &mut BTreeMap<Name, Hop>, may: impl Fn(&Name) -> bool) {
        for (name, hop) in hops.iter_mut().filter(|(name, _)| may(name)) {
            hop.alternates = self.of(name, &hop.next);
        }
        // The furthest nodes come first, so that most nodes are handled once.
        let turn = |name: &Name| (Reverse(self.distances.get(name).copied().unwrap_or(usize::MAX)), name.clone());
        let mut waiting: BTreeSet<_> =
            hops.iter().filter(|(_, hop)| !hop.alternates.is_empty()).map(|(name, _)| turn(name)).collect();
        while let Some((_, name)) = waiting.pop_first() {
            let Some(hop) = hops.get(&name) else { continue };
            let (users, to) = (hop.users.clone().unwrap_or_default(), hop.after());
            for other in to {
                let behind = hops.entry(other.clone()).or_insert_with(|| self.spare(&other));
                let known = behind.users.get_or_insert_default();
                if !users.is_subset(known) {
                    known.extend(users.iter().cloned());
                    waiting.insert(turn(&other));
                }
            }
        }
    }

    /// The hop of a node that is on the path only as an alternate.
    fn spare(&self, name: &Name) -> Hop {
        let lives = self.distances.get(name) == Some(&0);
        let next = self.graph.nearest(name, self.distances).filter(|_| !lives).map(|(_, next)| next);
        Hop { users: Some(BTreeSet::new()), next: next.unwrap_or_default(), is_spare: true, ..Hop::default() }
    }
}
