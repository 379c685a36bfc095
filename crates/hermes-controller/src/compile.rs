//! Compiles overlay documents to a document for each node.
//!
//! In: a catalog. Out: the document of each node, checked as by `hermes check`. The same catalog gives the same
//! documents, byte for byte.
//! Never: more than a node needs. A node's document names a service only if the node is on the path of a user of that
//! service. It names a user only if that user's sessions pass the node. It names other nodes only if they are
//! neighbours.
//!
//! A service has one path from each node with users: the fewest links, through standalone nodes, to the nearest
//! replicas. If several neighbours are equally near, all are endpoints of one upstream. If none of these is reachable,
//! sessions take loop-free alternates, where there are any.

pub mod envoy;
mod graph;
mod loop_free_alternate;
mod names;
mod render;
mod service_path;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use hermes_model::Problem;
use hermes_model::check::check_document;
use hermes_model::document::Document;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::snapshot::{Role, Target};
use hermes_model::ssrf_guard;
use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};

use self::envoy::EnvoyIdentity;
use self::graph::Graph;
use self::service_path::{Hop, PublicPaths, ServicePath, service_path};
use crate::catalog::{Catalog, ServiceOrNetwork, on_the_wire};
use crate::control::MAX_MESSAGE;
use crate::document::{Audience, Fault, Key, Kind, Name, Node, Program};

/// The name of the listener for other nodes.
pub const OVERLAY: &str = "overlay";

/// The files of a node's identity, beside its document.
pub const IDENTITY: [&str; 3] = ["node.pem", "node.key", "ca.pem"];

/// The compiled overlay, with the indexes that make updates incremental: an update computes only what its change
/// affects. Copies are cheap.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    catalog: Catalog,
    graph: Graph,
    paths: RedBlackTreeMapSync<Key, Arc<ServicePath>>,
    /// For each node, the services whose path includes it.
    at: RedBlackTreeMapSync<Name, RedBlackTreeSetSync<Key>>,
    /// For each node, the neighbours that send to it, and for which services.
    into: RedBlackTreeMapSync<Name, RedBlackTreeMapSync<Name, RedBlackTreeSetSync<Key>>>,
    /// The document of each node (JSON).
    documents: RedBlackTreeMapSync<Name, Bytes>,
    /// Services whose paths changed in the last update.
    moved: Arc<BTreeSet<Key>>,
    /// Warnings about the documents that the last update affected: valid, but perhaps not intended.
    warnings: Arc<Vec<Fault>>,
}

/// The new document of each affected node; `None` if the node was removed.
pub type ChangedDocuments = BTreeMap<Name, Option<Bytes>>;

impl Plan {
    /// Compiles a catalog that differs from the current one only in the documents that `changed` names.
    ///
    /// # Errors
    /// All faults of references and of compiled documents.
    pub fn update(&self, catalog: &Catalog, changed: &BTreeSet<Key>) -> Result<(Self, ChangedDocuments), Vec<Fault>> {
        let faults =
            if self.catalog.is_empty() { catalog.check() } else { catalog.check_changed(&self.catalog, changed) };
        if !faults.is_empty() {
            return Err(faults);
        }
        let mut next = Self { catalog: catalog.clone(), ..self.clone() };
        let mut touched = BTreeSet::new();
        let is_all = next.reshape(self, changed, &mut touched);
        next.beware(self, &mut touched);
        let moves = |key: &&Key| key.kind != Kind::Node || place(&self.catalog, key) != place(catalog, key);
        let services: BTreeSet<Key> = if is_all {
            let both = self.catalog.offers().chain(catalog.offers());
            both.map(|(key, _)| key.clone()).collect()
        } else {
            let both = |key: &Key| [services_by(&self.catalog, key), services_by(catalog, key)].concat();
            changed.iter().filter(moves).flat_map(both).collect()
        };
        for key in &services {
            next.lay(key, changed.contains(key), &mut touched);
        }
        let nodes = changed.iter().filter(|key| key.kind == Kind::Node && moves(key));
        let public: Vec<Key> = for_everyone(catalog).filter(|key| key.provider.is_none()).collect();
        for (node, service) in nodes.flat_map(|node| public.iter().map(move |service| (node, service))) {
            if !services.contains(service) {
                next.visit(service, &node.name, &mut touched);
            }
        }
        let is_moved = |key: &&Key| match (self.paths.get(*key), next.paths.get(*key)) {
            (Some(before), Some(after)) => after.is_moved(before),
            _ => false,
        };
        next.moved = Arc::new(services.iter().filter(is_moved).cloned().collect());
        next.warnings = Arc::new(services.iter().filter_map(|key| next.unreachable(key)).collect());
        next.render(self, touched)
    }

    /// Services whose paths changed in the last update, at two nodes or more.
    pub fn moved(&self) -> &BTreeSet<Key> {
        &self.moved
    }

    /// Warnings about the documents that the last update affected.
    pub fn warnings(&self) -> &[Fault] {
        &self.warnings
    }

    /// Returns a warning if no user can reach the service.
    fn unreachable(&self, key: &Key) -> Option<Fault> {
        let (offer, path) = (self.catalog.offer(key)?, self.paths.get(key)?);
        let begins =
            |(name, hop): (&Name, &Hop)| hop.is_first && self.catalog.node(name).is_some_and(service_path::is_entry);
        if path.hops.iter().any(begins) {
            return None;
        }
        let users = self.catalog.audience(key, offer.audience());
        let has_entry = |user: &Name| {
            let nodes = self.catalog.user(&key.provider, user).into_iter().flat_map(|user| user.nodes.iter());
            nodes.filter_map(|node| self.catalog.node(node)).any(service_path::is_entry)
        };
        let why = match users {
            Some(users) if users.is_empty() => "its audience is empty",
            Some(users) if !users.iter().any(has_entry) => "none of its users' nodes has apps or listeners",
            None if !self.catalog.nodes().any(|(_, node)| service_path::is_entry(node)) => {
                "no node has apps or listeners"
            }
            _ => "no links lead from its users' nodes to its replicas",
        };
        Some(Fault::of(key, "", format!("no user can reach it: {why}")))
    }

    /// Returns the distance, in links, from a node to the furthest of these services. A node is further away than the
    /// nodes to which it sends.
    pub fn distance(&self, node: &Name, services: &BTreeSet<Key>) -> usize {
        let of = |key: &Key| {
            let path = self.paths.get(key)?;
            path.hops.contains_key(node).then(|| path.distances.get(node).copied().unwrap_or(usize::MAX))
        };
        services.iter().filter_map(of).max().unwrap_or_default()
    }

    /// True if other nodes send sessions of this route to the node, for one of these services.
    pub fn is_sent(&self, node: &Name, route: &str, services: &BTreeSet<Key>) -> bool {
        let mut meant = services.iter().filter(|key| route_of(key) == route);
        let senders = || self.into.get(node).into_iter().flat_map(|senders| senders.values());
        meant.any(|key| senders().any(|services| services.contains(key)))
    }

    /// The documents that were compiled.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The document of a node (JSON).
    pub fn document(&self, node: &Name) -> Option<&Bytes> {
        self.documents.get(node)
    }

    /// The documents of all nodes.
    pub fn documents(&self) -> impl Iterator<Item = (&Name, &Bytes)> {
        self.documents.iter()
    }

    /// Services whose new sessions still use a node that drains, as they have no other path.
    pub fn needing(&self, node: &Name) -> BTreeSet<Key> {
        let senders = self.into.get(node).into_iter().flat_map(|senders| senders.iter());
        let sent = senders.flat_map(|(sender, services)| services.iter().map(move |key| (sender, key)));
        let is_next = |(sender, key): &(&Name, &Key)| {
            self.paths.get(*key).and_then(|path| path.hops.get(*sender)).is_some_and(|hop| hop.next.contains(node))
        };
        sent.filter(is_next).map(|(_, key)| key.clone()).collect()
    }

    /// Updates the graph with the changed nodes, and adds to `touched` the nodes whose documents may change. Returns
    /// true if paths between standalone nodes may change.
    fn reshape(&mut self, before: &Self, changed: &BTreeSet<Key>, touched: &mut BTreeSet<Name>) -> bool {
        let mut is_all = false;
        for key in changed {
            match key.kind {
                Kind::Overlay => touched.extend(self.catalog.nodes().map(|(name, _)| name.clone())),
                Kind::User => {
                    for catalog in [&before.catalog, &self.catalog] {
                        let user = catalog.user(&key.provider, &key.name);
                        let nodes: Vec<_> = user.into_iter().flat_map(|user| user.nodes.iter().cloned()).collect();
                        // The neighbours that receive the user's sessions accept the user's claim, so their documents
                        // change.
                        touched.extend(nodes.iter().flat_map(|node| before.beside(node)));
                        touched.extend(nodes);
                    }
                }
                Kind::Node => {
                    touched.insert(key.name.clone());
                    let (old, new) = (before.catalog.node(&key.name), self.catalog.node(&key.name));
                    let shape = |node: &Node| {
                        let path = (node.role, node.links.clone(), node.is_draining());
                        (path, node.address.clone(), node.http3, node.runs)
                    };
                    if old.map(shape) == new.map(shape) {
                        continue;
                    }
                    let is_inner = |node: &Node| node.role == Role::Standalone;
                    // The address and the program matter as well: an Envoy has no reverse connections, so only some
                    // neighbours can be alternates.
                    let links = |node: &Node| {
                        (node.role, node.links.clone(), node.is_draining(), node.address.is_some(), node.runs)
                    };
                    is_all |=
                        (old.is_some_and(is_inner) || new.is_some_and(is_inner)) && old.map(links) != new.map(links);
                    // The documents of neighbours contain how they dial the node, or how it dials them.
                    touched.extend(before.beside(&key.name));
                }
                Kind::Service | Kind::Network | Kind::Group => {}
            }
        }
        let nodes: Vec<_> = changed.iter().filter(|key| key.kind == Kind::Node).map(|key| &key.name).collect();
        for name in nodes {
            self.graph.replace(name, before.catalog.node(name), &self.catalog);
        }
        is_all
    }

    /// If revoked keys have changed, adds to `touched` the nodes whose documents list them. These are nodes that other
    /// nodes dial, and neighbours of a node whose key was revoked or readmitted.
    fn beware(&self, before: &Self, touched: &mut BTreeSet<Name>) {
        let others = self.catalog.revoked_since(&before.catalog);
        if others.is_empty() {
            return;
        }
        let is_told = |(name, node): &(&Name, &Node)| {
            node.address.is_some() || others.iter().any(|other| self.graph.is_beside(name, other))
        };
        touched.extend(self.catalog.nodes().filter(is_told).map(|(name, _)| name.clone()));
    }

    /// Returns the neighbours that send to a node, and those to which it sends.
    fn beside(&self, node: &Name) -> BTreeSet<Name> {
        let senders = self.into.get(node).into_iter().flat_map(|senders| senders.keys().cloned());
        let services = self.at.get(node).into_iter().flat_map(RedBlackTreeSetSync::iter);
        let next = services.filter_map(|key| self.paths.get(key)?.hops.get(node)).flat_map(Hop::beside);
        senders.chain(next).collect()
    }

    /// Computes the path of a service again, and adds to `touched` the nodes whose hops change.
    fn lay(&mut self, key: &Key, is_changed: bool, touched: &mut BTreeSet<Name>) {
        let old = self.paths.get(key).cloned().unwrap_or_default();
        let new = self
            .catalog
            .offer(key)
            .map(|offer| service_path(&self.catalog, &self.graph, key, offer))
            .unwrap_or_default();
        let names: BTreeSet<&Name> = old.hops.keys().chain(new.hops.keys()).collect();
        for name in names {
            // The precedence of routes depends on audiences.
            if is_changed || (old.audience != new.audience && !self.catalog.beside(key).is_empty()) {
                touched.insert(name.clone());
            }
            self.hop(key, name, (old.hops.get(name), new.hops.get(name)), touched);
        }
        if self.catalog.offer(key).is_some() {
            self.paths.insert_mut(key.clone(), Arc::new(new));
        } else {
            self.paths.remove_mut(key);
        }
    }

    /// Updates the hop of an entry node for a public service. No other node's hop depends on that hop.
    fn visit(&mut self, key: &Key, node: &Name, touched: &mut BTreeSet<Name>) {
        let Some(old) = self.paths.get(key).cloned() else { return };
        let documents = self.catalog.offer(key).zip(self.catalog.node(node));
        let now = documents.and_then(|(offer, document)| {
            PublicPaths::new(&self.catalog, &self.graph, offer, &old).hop(node, document)
        });
        let before = old.hops.get(node);
        if before == now.as_ref() {
            return;
        }
        self.hop(key, node, (before, now.as_ref()), touched);
        let mut new = (*old).clone();
        match now {
            Some(hop) => new.hops.insert_mut(node.clone(), hop),
            None => _ = new.hops.remove_mut(node),
        }
        self.paths.insert_mut(key.clone(), Arc::new(new));
    }

    /// Replaces the hop of a node for a service.
    fn hop(
        &mut self,
        key: &Key,
        name: &Name,
        (before, now): (Option<&Hop>, Option<&Hop>),
        touched: &mut BTreeSet<Name>,
    ) {
        if before == now {
            return;
        }
        touched.insert(name.clone());
        let of = |hop: Option<&Hop>| hop.map(Hop::beside).unwrap_or_default();
        let (before_next, now_next) = (of(before), of(now));
        for next in before_next.difference(&now_next) {
            self.unlink(next, name, key);
        }
        for next in now_next.difference(&before_next) {
            self.link(next, name, key);
        }
        // The documents of the next nodes change too: they accept other users, or other reverse connections.
        touched.extend(before_next.into_iter().chain(now_next));
        let mut services = self.at.get(name).cloned().unwrap_or_else(RedBlackTreeSetSync::new_sync);
        if now.is_some() {
            services.insert_mut(key.clone());
        } else {
            services.remove_mut(key);
        }
        if services.is_empty() {
            self.at.remove_mut(name);
        } else {
            self.at.insert_mut(name.clone(), services);
        }
    }

    fn link(&mut self, next: &Name, sender: &Name, key: &Key) {
        let mut senders = self.into.get(next).cloned().unwrap_or_else(RedBlackTreeMapSync::new_sync);
        let mut services = senders.get(sender).cloned().unwrap_or_else(RedBlackTreeSetSync::new_sync);
        services.insert_mut(key.clone());
        senders.insert_mut(sender.clone(), services);
        self.into.insert_mut(next.clone(), senders);
    }

    fn unlink(&mut self, next: &Name, sender: &Name, key: &Key) {
        let Some(mut senders) = self.into.get(next).cloned() else { return };
        let Some(mut services) = senders.get(sender).cloned() else { return };
        services.remove_mut(key);
        if services.is_empty() {
            senders.remove_mut(sender);
        } else {
            senders.insert_mut(sender.clone(), services);
        }
        if senders.is_empty() {
            self.into.remove_mut(next);
        } else {
            self.into.insert_mut(next.clone(), senders);
        }
    }

    /// Renders the documents of these nodes. Returns those that changed.
    fn render(mut self, before: &Self, touched: BTreeSet<Name>) -> Result<(Self, ChangedDocuments), Vec<Fault>> {
        let (mut faults, mut others) = (Vec::new(), ChangedDocuments::new());
        let mut warnings = (*self.warnings).clone();
        let touched: Vec<Name> = touched.into_iter().collect();
        for (name, (document, found)) in touched.iter().zip(on_all_cores(&touched, |name| self.made(before, name))) {
            faults.extend(found);
            match document {
                Made::Same => {}
                Made::None => {
                    if self.documents.remove_mut(name) {
                        others.insert(name.clone(), None);
                    }
                }
                Made::Other(bytes, hints) => {
                    warnings.extend(hints);
                    self.documents.insert_mut(name.clone(), bytes.clone());
                    others.insert(name.clone(), Some(bytes));
                }
            }
        }
        self.warnings = Arc::new(warnings);
        if faults.is_empty() { Ok((self, others)) } else { Err(faults) }
    }

    /// The document of a node, and its faults.
    fn made(&self, before: &Self, name: &Name) -> (Made, Vec<Fault>) {
        let Some(node) = self.catalog.node(name) else { return (Made::None, Vec::new()) };
        let document = render::document(self, name, node);
        let mut problems = Vec::new();
        if node.runs == Program::Envoy {
            let identity = EnvoyIdentity { overlay: "", directory: "", revocations: "" };
            problems.extend(envoy::resources(&document, identity).err().unwrap_or_default());
        }
        let bytes: Bytes = serde_json::to_vec(&document).unwrap_or_default().into();
        if before.documents.get(name) == Some(&bytes) {
            return (Made::Same, of_node(name, problems));
        }
        let guarded = self.guarded(name, node, &document);
        let mut hints = Vec::new();
        match check_document(document, Path::new(".")) {
            Ok(checked) => {
                let key = Key::node(name);
                let hint = |warning| Fault::of(&key, "", format!("its document: {warning}"));
                // A node on no path has no routes. The warning about that is dropped, because it is not an error of the
                // author.
                let is_meant = |warning: &Problem| warning.path != "routes" || !checked.snapshot.routes.is_empty();
                hints.extend(checked.warnings.into_iter().filter(is_meant).map(hint));
            }
            Err(found) => problems.extend(found),
        }
        if bytes.len() > MAX_DOCUMENT_BYTES {
            let message = format!(
                "document too large: {} bytes, at most {MAX_DOCUMENT_BYTES}; route fewer services through this node",
                bytes.len()
            );
            problems.push(Problem { path: String::new(), message });
        }
        let mut faults = of_node(name, problems);
        faults.extend(guarded);
        (Made::Other(bytes, hints), faults)
    }

    /// Returns a fault for each target of a provider's service that is an address of the node itself. It checks only
    /// literal addresses; the node checks each address that it dials.
    fn guarded(&self, name: &Name, node: &Node, document: &Document) -> Vec<Fault> {
        const OWN: &str = "is where the node itself listens";
        let host = node.address.as_ref().and_then(|address| ssrf_guard::literal(&address.host));
        let listening: Vec<_> =
            document.listeners.iter().filter_map(|listener| listener.bind).map(|bind| bind.0).collect();
        let own = |ip| host == Some(ip) || listening.iter().any(|bind| bind.ip() == ip);
        let all = || listening.iter().copied().chain(document.admin.map(|bind| bind.0)).map(|address| (address, OWN));
        let mut faults = Vec::new();
        for key in
            self.at.get(name).into_iter().flat_map(RedBlackTreeSetSync::iter).filter(|key| key.provider.is_some())
        {
            let Some(ServiceOrNetwork::Service(service)) = self.catalog.offer(key) else { continue };
            let Some((at, replica)) = service.at.iter().enumerate().find(|(_, replica)| replica.node == *name) else {
                continue;
            };
            for (which, target) in [("http", &replica.http), ("tcp", &replica.tcp), ("udp", &replica.udp)] {
                let Some(Target::Fixed(target)) = target else { continue };
                let Some(ip) = ssrf_guard::literal(&target.host) else { continue };
                if let Some(why) = ssrf_guard::forbids((ip, target.port).into(), all(), &own) {
                    let message = format!("{target} {why}, which providers may not use; name a server of your own");
                    faults.push(Fault::of(key, format!("at[{at}].{which}"), message));
                }
            }
        }
        faults
    }
}

/// The rendered document of a node.
enum Made {
    /// The node does not exist.
    None,
    /// The document is unchanged.
    Same,
    /// The document changed; the second value has its warnings.
    Other(Bytes, Vec<Fault>),
}

/// The maximum size of a node's document, in bytes. It leaves space for the other fields of a message to the node.
const MAX_DOCUMENT_BYTES: usize = MAX_MESSAGE / 4 * 3;

/// The minimum number of values for which other threads are started. A smaller batch is done before they have started.
const MIN_PARALLEL: usize = 64;

/// Maps all values on all cores, in order. Rendering documents is the largest part of a compilation, and each document
/// is independent.
fn on_all_cores<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if all.len() < MIN_PARALLEL || cores == 1 {
        return all.iter().map(work).collect();
    }
    let work = &work;
    std::thread::scope(|scope| {
        let parts = all.chunks(all.len().div_ceil(cores));
        let threads: Vec<_> =
            parts.map(|part| scope.spawn(move || part.iter().map(work).collect::<Vec<R>>())).collect();
        let done =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        done.flatten().collect()
    })
}

/// The properties of a node that determine paths from it and to it.
fn place<'a>(catalog: &'a Catalog, key: &Key) -> Option<(Role, &'a OneOrMany<Name>, [bool; 3])> {
    let flags = |node: &Node| [service_path::is_entry(node), node.is_draining(), node.address.is_some()];
    catalog.node(&key.name).map(|node| (node.role, &node.links, flags(node)))
}

/// Services whose paths may change with this document.
fn services_by(catalog: &Catalog, key: &Key) -> Vec<Key> {
    let offered = |key: &Key| catalog.namers(key).filter(|one| one.kind.is_offered()).cloned().collect::<Vec<_>>();
    let of_kind =
        |key: &Key, kind: Kind| catalog.namers(key).filter(move |one| one.kind == kind).cloned().collect::<Vec<_>>();
    match key.kind {
        Kind::Overlay => Vec::new(),
        Kind::Service | Kind::Network => vec![key.clone()],
        Kind::Group => offered(key),
        Kind::User => {
            let mut all = offered(key);
            all.extend(of_kind(key, Kind::Group).iter().flat_map(&offered));
            all.extend(
                for_everyone(catalog).filter(|service| service.provider == key.provider && key.provider.is_some()),
            );
            all
        }
        Kind::Node => {
            let mut all = offered(key);
            all.extend(of_kind(key, Kind::User).iter().flat_map(|user| services_by(catalog, user)));
            // Public services are not in the list, because `visit` updates their hop at a changed node.
            all
        }
    }
}

fn for_everyone(catalog: &Catalog) -> impl Iterator<Item = Key> {
    catalog.offers().filter(|(_, offer)| *offer.audience() == Audience::Everyone).map(|(key, _)| key.clone())
}

/// Compiles all documents of an overlay.
///
/// # Errors
/// All faults of references and of compiled documents.
pub fn compile(catalog: &Catalog) -> Result<BTreeMap<Name, Document>, Vec<Fault>> {
    let all = catalog.iter().map(|resource| resource.key.clone()).collect();
    let (plan, _) = Plan::default().update(catalog, &all)?;
    Ok(catalog.nodes().map(|(name, node)| (name.clone(), render::document(&plan, name, node))).collect())
}

/// Warnings about an overlay: valid documents that are perhaps not intended.
///
/// # Errors
/// The same as for [`compile`].
pub fn check(catalog: &Catalog) -> Result<Vec<Fault>, Vec<Fault>> {
    let all = catalog.iter().map(|resource| resource.key.clone()).collect();
    let (plan, _) = Plan::default().update(catalog, &all)?;
    Ok(plan.warnings().to_vec())
}

/// Faults of a node's compiled document.
fn of_node(node: &Name, problems: Vec<Problem>) -> Vec<Fault> {
    let key = Key::node(node);
    let fault = |problem| Fault::of(&key, "", format!("invalid compiled document: {problem}"));
    problems.into_iter().map(fault).collect()
}

/// Returns the name of the route of a service or a network. It distinguishes a service and a network with the same
/// name.
pub(crate) fn route_of(key: &Key) -> String {
    let name = on_the_wire(&key.provider, &key.name);
    if key.kind == Kind::Network { format!("{name}:ip") } else { name }
}

#[cfg(test)]
mod tests;
