//! All documents of an overlay, and the references between them.
//!
//! In: parsed documents. Out: indexes by key, by reference and by authority; and the faults of invalid references.
//! Never: the documents of nodes. [`crate::compile`] makes these.

mod check;

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use hermes_model::document::scalar::Prefix;
use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};
use serde::{Deserialize, Serialize};

use crate::document::{App, Audience, Group, Key, Kind, Name, Network, Node, Overlay, Resource, Service, Spec, User};

/// All documents of an overlay. Copies are cheap and share memory.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    all: RedBlackTreeMapSync<Key, Arc<Resource>>,
    /// For each key, the documents that refer to it, whether or not a document with that key exists.
    namers: RedBlackTreeMapSync<Key, RedBlackTreeSetSync<Key>>,
    /// Services by their authorities.
    authorities: RedBlackTreeMapSync<(Owner, String), RedBlackTreeSetSync<Key>>,
    /// Revoked keys.
    revoked: RedBlackTreeMapSync<String, Revoked>,
}

/// A revoked key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Revoked {
    /// The node that had the key.
    pub node: Name,
    /// SHA-256 of the public key, in hex.
    pub key: String,
    /// When the last certificate for the key expires, in milliseconds since 1970.
    pub until: u64,
}

/// The document that a route leads to.
#[derive(Clone, Copy, Debug)]
pub enum ServiceOrNetwork<'a> {
    /// A service, which clients reach by an authority.
    Service(&'a Service),
    /// A network, which clients reach by its IP prefixes.
    Network(&'a Network),
}

impl<'a> ServiceOrNetwork<'a> {
    /// Nodes that have a replica or a gateway.
    pub fn nodes(self) -> Vec<&'a Name> {
        match self {
            ServiceOrNetwork::Service(service) => service.at.iter().map(|replica| &replica.node).collect(),
            ServiceOrNetwork::Network(network) => network.at.iter().map(|gateway| &gateway.node).collect(),
        }
    }

    /// The users who may use the service or network.
    pub fn audience(self) -> &'a Audience {
        match self {
            ServiceOrNetwork::Service(service) => &service.audience,
            ServiceOrNetwork::Network(network) => &network.audience,
        }
    }
}

/// The owner of documents: a provider, or the operator (`None`).
pub type Owner = Option<Name>;

impl Catalog {
    /// Adds a document, or replaces the one with its key. Returns the replaced one.
    pub fn put(&mut self, resource: Resource) -> Option<Arc<Resource>> {
        let before = self.remove(&resource.key);
        for named in named_by(&resource) {
            let mut namers = self.namers.get(&named).cloned().unwrap_or_else(RedBlackTreeSetSync::new_sync);
            namers.insert_mut(resource.key.clone());
            self.namers.insert_mut(named, namers);
        }
        for called in called(&resource) {
            let mut named = self.authorities.get(&called).cloned().unwrap_or_else(RedBlackTreeSetSync::new_sync);
            named.insert_mut(resource.key.clone());
            self.authorities.insert_mut(called, named);
        }
        self.all.insert_mut(resource.key.clone(), Arc::new(resource));
        before
    }

    /// Removes a document. Returns it.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<Resource>> {
        let before = self.all.get(key).cloned()?;
        self.all.remove_mut(key);
        for named in named_by(&before) {
            let Some(mut namers) = self.namers.get(&named).cloned() else { continue };
            namers.remove_mut(key);
            if namers.is_empty() {
                self.namers.remove_mut(&named);
            } else {
                self.namers.insert_mut(named, namers);
            }
        }
        for called in called(&before) {
            let Some(mut named) = self.authorities.get(&called).cloned() else { continue };
            named.remove_mut(key);
            if named.is_empty() {
                self.authorities.remove_mut(&called);
            } else {
                self.authorities.insert_mut(called, named);
            }
        }
        Some(before)
    }

    /// Revokes a key, and forgets keys whose certificates have all expired.
    pub fn revoke(&mut self, revoked: Revoked, now: u64) {
        let over: Vec<_> = self.revoked.values().filter(|one| one.until < now).map(|one| one.key.clone()).collect();
        over.iter().for_each(|key| _ = self.revoked.remove_mut(key));
        self.revoked.insert_mut(revoked.key.clone(), revoked);
    }

    /// Readmits a revoked key.
    pub fn readmit(&mut self, key: &str) {
        self.revoked.remove_mut(key);
    }

    /// All revoked keys.
    pub fn revoked(&self) -> impl Iterator<Item = &Revoked> {
        self.revoked.values()
    }

    /// Returns the nodes whose keys were revoked or readmitted since an earlier catalog.
    pub fn revoked_since(&self, before: &Self) -> BTreeSet<Name> {
        let more = |one: &Self, other: &Self, key: &String| one.revoked.get(key) != other.revoked.get(key);
        let keys = self.revoked.keys().chain(before.revoked.keys()).filter(|key| more(self, before, key));
        keys.filter_map(|key| self.revoked.get(key).or_else(|| before.revoked.get(key)))
            .map(|one| one.node.clone())
            .collect()
    }

    /// The document with this key.
    pub fn get(&self, key: &Key) -> Option<&Arc<Resource>> {
        self.all.get(key)
    }

    /// All documents, sorted by kind, provider and name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.all.values()
    }

    /// True if there are no documents.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the keys of the documents that refer to this document.
    pub fn namers(&self, key: &Key) -> impl Iterator<Item = &Key> {
        self.namers.get(key).into_iter().flat_map(RedBlackTreeSetSync::iter)
    }

    /// Returns the other services that would match some of the same sessions if all had the same audience.
    pub fn beside(&self, key: &Key) -> BTreeSet<&Key> {
        let Some((resource, ServiceOrNetwork::Service(service))) = self.all.get(key).zip(self.offer(key)) else {
            return BTreeSet::new();
        };
        let all = called(resource).into_iter().filter_map(|called| self.authorities.get(&called));
        let meets = |other: &&Key| match self.offer(other) {
            Some(ServiceOrNetwork::Service(offered)) => {
                *other != key && service.meets(&key.name, (offered, &other.name))
            }
            _ => false,
        };
        all.flat_map(RedBlackTreeSetSync::iter).filter(meets).collect()
    }

    /// The document of the overlay. `None` if there is not exactly one.
    pub fn overlay(&self) -> Option<(&Name, &Overlay)> {
        let mut overlays = self.of(Kind::Overlay);
        let (first, more) = (overlays.next()?, overlays.next());
        match &first.spec {
            Spec::Overlay(overlay) if more.is_none() => Some((&first.key.name, overlay)),
            _ => None,
        }
    }

    /// Returns the node with this name.
    pub fn node(&self, name: &Name) -> Option<&Node> {
        match &self.all.get(&Key::node(name))?.spec {
            Spec::Node(node) => Some(node),
            _ => None,
        }
    }

    /// Returns the service or network with this key.
    pub fn offer(&self, key: &Key) -> Option<ServiceOrNetwork<'_>> {
        match &self.all.get(key)?.spec {
            Spec::Service(service) => Some(ServiceOrNetwork::Service(service)),
            Spec::Network(network) => Some(ServiceOrNetwork::Network(network)),
            _ => None,
        }
    }

    /// Returns the user with this owner and name.
    pub fn user(&self, owner: &Owner, name: &Name) -> Option<&User> {
        match &self.all.get(&Key { kind: Kind::User, provider: owner.clone(), name: name.clone() })?.spec {
            Spec::User(user) => Some(user),
            _ => None,
        }
    }

    /// Returns the group with this owner and name.
    pub fn group(&self, owner: &Owner, name: &Name) -> Option<&Group> {
        match &self.all.get(&Key { kind: Kind::Group, provider: owner.clone(), name: name.clone() })?.spec {
            Spec::Group(group) => Some(group),
            _ => None,
        }
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Iterator<Item = (&Name, &Node)> {
        self.of(Kind::Node).filter_map(|resource| match &resource.spec {
            Spec::Node(node) => Some((&resource.key.name, &**node)),
            _ => None,
        })
    }

    /// All services and networks.
    pub fn offers(&self) -> impl Iterator<Item = (&Key, ServiceOrNetwork<'_>)> {
        let all = self.of(Kind::Service).chain(self.of(Kind::Network));
        all.filter_map(|resource| Some((&resource.key, self.offer(&resource.key)?)))
    }

    /// Returns the users of a provider, or of the operator.
    pub fn users_of<'a>(&'a self, owner: &Owner) -> impl Iterator<Item = &'a Key> + use<'a> {
        self.owned(Kind::User, owner).map(|resource| &resource.key)
    }

    /// Users on a node.
    pub fn users_on(&self, node: &Name) -> impl Iterator<Item = &Key> {
        self.namers(&Key::node(node)).filter(|key| key.kind == Kind::User).collect::<Vec<_>>().into_iter()
    }

    fn of(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> + use<'_> {
        let first = Key { kind, provider: None, name: Name::lowest() };
        let all = self.all.range((Bound::Included(first), Bound::Unbounded));
        all.take_while(move |(key, _)| key.kind == kind).map(|(_, resource)| resource)
    }

    fn owned<'a>(&'a self, kind: Kind, owner: &Owner) -> impl Iterator<Item = &'a Arc<Resource>> + use<'a> {
        let (first, owner) = (Key { kind, provider: owner.clone(), name: Name::lowest() }, owner.clone());
        let all = self.all.range((Bound::Included(first), Bound::Unbounded));
        all.take_while(move |(key, _)| key.kind == kind && key.provider == owner).map(|(_, resource)| resource)
    }

    /// Returns the names of the users who may use a service or network; `None` if everyone may use it.
    pub fn audience(&self, key: &Key, audience: &Audience) -> Option<BTreeSet<Name>> {
        match audience {
            // For a provider, everyone means all its users, because a session without a user belongs to no provider.
            Audience::Everyone => {
                key.provider.as_ref().map(|_| self.users_of(&key.provider).map(|user| user.name.clone()).collect())
            }
            Audience::Those { users, groups } => {
                let mut all: BTreeSet<_> = users.iter().map(|user| user.name.clone()).collect();
                let groups = groups.iter().filter_map(|group| self.group(&key.provider, &group.name));
                all.extend(groups.flat_map(|group| group.users.iter().cloned()));
                Some(all)
            }
        }
    }
}

/// Returns the authorities of a service, each with its owner. Other documents have none.
fn called(resource: &Resource) -> Vec<(Owner, String)> {
    let Spec::Service(service) = &resource.spec else { return Vec::new() };
    let owner = &resource.key.provider;
    service.authorities(&resource.key.name).iter().map(|one| (owner.clone(), one.to_string())).collect()
}

/// Returns the keys of the documents to which a document refers.
fn named_by(resource: &Resource) -> BTreeSet<Key> {
    let owner = &resource.key.provider;
    let own = |kind: Kind, name: &Name| Key { kind, provider: owner.clone(), name: name.clone() };
    let offered = |offer: ServiceOrNetwork<'_>| {
        let mut all: BTreeSet<_> = offer.nodes().into_iter().map(Key::node).collect();
        if let Audience::Those { users, groups } = offer.audience() {
            all.extend(users.iter().map(|user| own(Kind::User, &user.name)));
            all.extend(groups.iter().map(|group| own(Kind::Group, &group.name)));
        }
        all
    };
    match &resource.spec {
        Spec::Overlay(_) => BTreeSet::new(),
        Spec::Node(node) => node.links.iter().map(Key::node).collect(),
        Spec::User(user) => user.nodes.iter().map(Key::node).collect(),
        Spec::Group(group) => group.users.iter().map(|user| own(Kind::User, user)).collect(),
        Spec::Service(service) => offered(ServiceOrNetwork::Service(service)),
        Spec::Network(network) => offered(ServiceOrNetwork::Network(network)),
    }
}

/// Returns the name of a user or service in requests between nodes, which includes the provider.
pub(crate) fn on_the_wire(owner: &Owner, name: &Name) -> String {
    match owner {
        Some(provider) => format!("{provider}/{name}"),
        None => name.to_string(),
    }
}

/// Returns the user of an app's sessions, as named in requests between nodes; `None` if the sessions have no user.
///
/// # Errors
/// The user is not on that node, or the node has several users and the app names none.
pub(crate) fn user_of_app(catalog: &Catalog, node: &Name, app: &App) -> Result<Option<String>, String> {
    let here: Vec<_> = catalog.users_on(node).collect();
    let wire = |key: &Key| on_the_wire(&key.provider, &key.name);
    match &app.user {
        Some(user) => {
            let is_meant = |key: &Key| key.name == user.name && key.provider == user.provider;
            let found = here.iter().find(|key| is_meant(key));
            found
                .map(|key| Some(wire(key)))
                .ok_or_else(|| format!("user {user} is not on this node; add {node} to the user's nodes"))
        }
        None if here.len() > 1 => {
            // The error does not list other users: only the operator may see them.
            Err("several users are on this node; set user: NAME, or user: PROVIDER/NAME".to_owned())
        }
        None => Ok(here.first().map(|key| wire(key))),
    }
}

/// The default prefix of virtual addresses: the shared address space (RFC 6598), which the Internet does not route.
const ADDRESSES: &str = "100.64.0.0/10";

/// Returns the prefixes from which a DNS app assigns virtual addresses to names.
pub(crate) fn addresses(app: &App) -> Vec<Prefix> {
    if app.addresses.is_empty() { ADDRESSES.parse().into_iter().collect() } else { app.addresses.0.clone() }
}
