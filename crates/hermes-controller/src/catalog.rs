//! All documents of an overlay, and what they say of each other.
//!
//! In: documents that were read. Out: the same, found by what names them; and every reference that leads nowhere, or to what
//! is another provider's.
//! Never: what that means for a node. That is [`crate::compile`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hermes_model::document::nearest::did_you_mean;

use crate::document::{
    Audience, Fault, Group, Key, Kind, Name, Node, Overlay, Reference, Replica, Resource, Service, Spec, User,
};

/// All documents of an overlay.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    all: BTreeMap<Key, Arc<Resource>>,
}

/// Whose documents: the operator's, or a provider's.
pub type Owner = Option<Name>;

impl Catalog {
    /// Puts a document in the place of the one with its key. The one that was there.
    pub fn put(&mut self, resource: Resource) -> Option<Arc<Resource>> {
        self.all.insert(resource.key.clone(), Arc::new(resource))
    }

    /// Takes a document out.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<Resource>> {
        self.all.remove(key)
    }

    /// The document with this key.
    pub fn get(&self, key: &Key) -> Option<&Arc<Resource>> {
        self.all.get(key)
    }

    /// All of them, by kind, provider and name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.all.values()
    }

    /// The overlay's own document, where there is one alone.
    pub fn overlay(&self) -> Option<(&Name, &Overlay)> {
        let mut overlays = self.of(Kind::Overlay);
        let (first, more) = (overlays.next()?, overlays.next());
        match &first.spec {
            Spec::Overlay(overlay) if more.is_none() => Some((&first.key.name, overlay)),
            _ => None,
        }
    }

    /// A node.
    pub fn node(&self, name: &Name) -> Option<&Node> {
        match &self.all.get(&Key { kind: Kind::Node, provider: None, name: name.clone() })?.spec {
            Spec::Node(node) => Some(node),
            _ => None,
        }
    }

    /// A user.
    pub fn user(&self, owner: &Owner, name: &Name) -> Option<&User> {
        match &self.all.get(&Key { kind: Kind::User, provider: owner.clone(), name: name.clone() })?.spec {
            Spec::User(user) => Some(user),
            _ => None,
        }
    }

    /// A group.
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

    /// All services.
    pub fn services(&self) -> impl Iterator<Item = (&Key, &Service)> {
        self.of(Kind::Service).filter_map(|resource| match &resource.spec {
            Spec::Service(service) => Some((&resource.key, &**service)),
            _ => None,
        })
    }

    /// All users, with their keys.
    pub fn users(&self) -> impl Iterator<Item = (&Key, &User)> {
        self.of(Kind::User).filter_map(|resource| match &resource.spec {
            Spec::User(user) => Some((&resource.key, user)),
            _ => None,
        })
    }

    fn of(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.all.values().filter(move |resource| resource.key.kind == kind)
    }

    /// Who may use a service: the names of users of its provider. `None`: whoever is there.
    pub fn audience(&self, key: &Key, service: &Service) -> Option<BTreeSet<Name>> {
        match &service.audience {
            // With several providers on one node, who has no user is nobody's.
            Audience::Everyone => key.provider.as_ref().map(|_| {
                let own = self.users().filter(|(user, _)| user.provider == key.provider);
                own.map(|(user, _)| user.name.clone()).collect()
            }),
            Audience::Those { users, groups } => {
                let mut all: BTreeSet<_> = users.iter().map(|user| user.name.clone()).collect();
                let groups = groups.iter().filter_map(|group| self.group(&key.provider, &group.name));
                all.extend(groups.flat_map(|group| group.users.iter().cloned()));
                Some(all)
            }
        }
    }

    /// Every reference that leads nowhere or where it must not, and every quota that is passed.
    pub fn check(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let Some((_, overlay)) = self.overlay() else {
            return vec![self.without_overlay()];
        };
        for resource in self.all.values() {
            let mut check = Check { catalog: self, overlay, key: &resource.key, faults: &mut faults };
            check.owner();
            match &resource.spec {
                Spec::Overlay(_) => {}
                Spec::Node(node) => check.node(node),
                Spec::Service(service) => check.service(service),
                Spec::User(user) => check.user(user),
                Spec::Group(group) => check.group(group),
            }
        }
        self.check_quotas(overlay, &mut faults);
        faults
    }

    fn without_overlay(&self) -> Fault {
        let mut overlays = self.of(Kind::Overlay);
        match (overlays.next(), overlays.next()) {
            (Some(first), Some(second)) => {
                let message = format!("there is one overlay, {}; delete one of them", first.key.name);
                Fault::of(&second.key, "", message)
            }
            _ => Fault {
                key: None,
                number: None,
                problem: hermes_model::Problem {
                    path: String::new(),
                    message: "there is no overlay yet; add a document with kind: Overlay and a name".to_owned(),
                },
            },
        }
    }

    fn check_quotas(&self, overlay: &Overlay, faults: &mut Vec<Fault>) {
        for (name, provider) in &overlay.providers {
            let quota = &provider.quota;
            for (kind, most, key) in [
                (Kind::Service, quota.services, "services"),
                (Kind::User, quota.users, "users"),
                (Kind::Group, quota.groups, "groups"),
            ] {
                let mut own = self.of(kind).filter(|resource| resource.key.provider.as_ref() == Some(name));
                if let Some(first) = own.nth(most) {
                    let message = format!(
                        "{name} may have {most} {key}, and this is one more; delete some, or ask the operator for a \
                         larger quota (providers.{name}.quota.{key})"
                    );
                    faults.push(Fault::of(&first.key, "", message));
                }
            }
        }
    }
}

/// What is checked of one document.
struct Check<'a, 'f> {
    catalog: &'a Catalog,
    overlay: &'a Overlay,
    key: &'a Key,
    faults: &'f mut Vec<Fault>,
}

impl<'a> Check<'a, '_> {
    fn fault(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.faults.push(Fault::of(self.key, path, message));
    }

    /// Where an overlay has providers, each service, user and group is one's.
    fn owner(&mut self) {
        let providers = &self.overlay.providers;
        match &self.key.provider {
            Some(provider) if !providers.contains_key(provider) => {
                let known = did_you_mean(provider.as_str(), providers.keys().map(Name::as_str));
                self.fault("provider", format!("the overlay has no provider {provider}{known}"));
            }
            None if self.key.kind.is_of_providers() && !providers.is_empty() => {
                self.fault("provider", "the overlay has providers; say whose this is with provider: NAME");
            }
            _ => {}
        }
    }

    /// A node that is there and may have what this provider has.
    fn serving(&mut self, path: &str, name: &Name) {
        let Some(node) = self.node_at(path, name) else { return };
        let is_serving = |provider: &Name| node.providers.iter().any(|one| one == provider);
        if let Some(provider) = self.key.provider.as_ref().filter(|provider| !is_serving(provider)) {
            // Whose else it is is not told.
            let message = format!("node {name} does not serve {provider}; its operator would add it to its providers");
            self.fault(path, message);
        }
    }

    fn node_at(&mut self, path: &str, name: &Name) -> Option<&'a Node> {
        let found = self.catalog.node(name);
        if found.is_none() {
            // A provider learns of no node that is not for it.
            let known = self.catalog.nodes().filter(|(_, node)| match &self.key.provider {
                Some(provider) => node.providers.iter().any(|one| one == provider),
                None => true,
            });
            let near = did_you_mean(name.as_str(), known.map(|(name, _)| name.as_str()));
            self.faults.push(Fault::of(self.key, path, format!("there is no node {name}{near}")));
        }
        found
    }

    fn node(&mut self, node: &Node) {
        for (at, link) in node.links.iter().enumerate() {
            let path = format!("links[{at}]");
            if *link == self.key.name {
                self.fault(path, "a node has no link to itself; leave it out");
            } else if let Some(other) = self.node_at(&path, link)
                && other.address.is_none()
            {
                let own = &self.key.name;
                let message =
                    format!("nobody can dial {link}, which has no address; give it one, or let it link to {own}");
                self.fault(path, message);
            }
        }
        for (at, provider) in node.providers.iter().enumerate() {
            if !self.overlay.providers.contains_key(provider) {
                self.fault(format!("providers[{at}]"), format!("the overlay has no provider {provider}"));
            }
        }
        for (at, app) in node.apps.iter().enumerate() {
            if let Err(message) = crate::compile::user_of_app(self.catalog, &self.key.name, app) {
                self.fault(format!("apps[{at}].user"), message);
            }
        }
    }

    fn service(&mut self, service: &Service) {
        let speaks = |replica: &Replica| (replica.http.is_some(), replica.tcp.is_some(), replica.udp.is_some());
        let mut seen = BTreeSet::new();
        for (at, replica) in service.at.iter().enumerate() {
            self.serving(&format!("at[{at}].node"), &replica.node);
            if speaks(replica) == (false, false, false) {
                self.fault(format!("at[{at}]"), "say what it dials there: http, tcp or udp, with HOST:PORT");
            }
            if service.at.0.first().is_some_and(|first| speaks(first) != speaks(replica)) {
                self.fault(
                    format!("at[{at}]"),
                    "all places of a service speak the same; make this a service of its own",
                );
            }
            if !seen.insert(&replica.node) {
                self.fault(format!("at[{at}].node"), "this node stands here a second time; keep one");
            }
        }
        if let Audience::Those { users, groups } = &service.audience {
            for (at, user) in users.iter().enumerate() {
                let path = format!("for.users[{at}]");
                let found = self.own(&path, user).map(|name| self.catalog.user(&self.key.provider, name).is_some());
                if found == Some(false) {
                    self.fault(path, format!("there is no user {user}"));
                }
            }
            for (at, group) in groups.iter().enumerate() {
                let path = format!("for.groups[{at}]");
                let found = self.own(&path, group).map(|name| self.catalog.group(&self.key.provider, name).is_some());
                if found == Some(false) {
                    self.fault(path, format!("there is no group {group}"));
                }
            }
        }
    }

    /// The name, where it is the same provider's.
    fn own<'n>(&mut self, path: &str, reference: &'n Reference) -> Option<&'n Name> {
        if reference.provider.is_some() && reference.provider != self.key.provider {
            self.fault(path, format!("{reference} is another provider's; name what is yours"));
            return None;
        }
        Some(&reference.name)
    }

    fn user(&mut self, user: &User) {
        for (at, node) in user.nodes.iter().enumerate() {
            self.serving(&format!("nodes[{at}]"), node);
        }
    }

    fn group(&mut self, group: &Group) {
        for (at, user) in group.users.iter().enumerate() {
            if self.catalog.user(&self.key.provider, user).is_none() {
                self.fault(format!("users[{at}]"), format!("there is no user {user}"));
            }
        }
    }
}
