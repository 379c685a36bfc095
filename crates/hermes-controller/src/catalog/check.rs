//! Checks the documents of an overlay: references, quotas, and keys that exclude each other.
//!
//! In: a catalog. Out: every fault, each with its document, the key and the remedy.
//! Never: faults of compiled node documents. [`crate::compile`] finds these.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hermes_model::document::did_you_mean::did_you_mean;
use hermes_model::document::scalar::{ByteSize, Prefix};
use hermes_model::snapshot::{Role, RootChoice};

use super::{Catalog, addresses, named_by, user_of_app};
use crate::document::{
    App, AppProtocol, Audience, Fault, Group, Key, Kind, Name, Network, Node, Overlay, Program, Quota, Reference,
    Replica, Resource, Service, Spec, User,
};

/// The maximum size of a provider's document, in bytes. Compiled documents of shared nodes contain parts of the
/// documents of several providers.
const MAX_PROVIDER_DOCUMENT: usize = 256 << 10;
/// The memory of a `relay` that does not set it.
const DEFAULT_RELAY_MEMORY: ByteSize = ByteSize(256 << 20);
/// The memory and the disk space of a `cache` or `custody` that does not set them.
const DEFAULT_MEMORY: ByteSize = ByteSize(64 << 20);
const DEFAULT_DISK: ByteSize = ByteSize(1 << 30);
/// The minimum and the maximum lifetime of a node's certificate.
const CERTIFICATE_LIVES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(366 * 24 * 3600)];

impl Catalog {
    /// Checks all documents: every invalid reference and every exceeded quota.
    pub fn check(&self) -> Vec<Fault> {
        self.check_these(self.all.values())
    }

    /// Checks changed documents, and the documents connected to them by references. All documents in `before` must be
    /// valid. The change may have deleted documents.
    pub fn check_changed(&self, before: &Catalog, changed: &BTreeSet<Key>) -> Vec<Fault> {
        if changed.iter().any(|key| key.kind == Kind::Overlay) {
            return self.check();
        }
        let around = |catalog: &Catalog, key: &Key| -> Vec<Key> {
            // The validity of a node's apps depends on the user's document.
            let user = catalog.get(key).filter(|resource| resource.key.kind == Kind::User);
            let named = user.map(|user| named_by(user)).into_iter().flatten();
            catalog.namers(key).cloned().chain(named).collect()
        };
        let touched: BTreeSet<Key> = changed
            .iter()
            .flat_map(|key| [around(before, key), around(self, key), vec![key.clone()]].into_iter().flatten())
            .collect();
        self.check_these(touched.iter().filter_map(|key| self.all.get(key)))
    }

    fn check_these<'a>(&'a self, these: impl Iterator<Item = &'a Arc<Resource>>) -> Vec<Fault> {
        let mut faults = Vec::new();
        let Some((_, overlay)) = self.overlay() else {
            return vec![self.without_overlay()];
        };
        let mut told = BTreeSet::new();
        for resource in these {
            let mut check = Check { catalog: self, overlay, key: &resource.key, faults: &mut faults, told: &mut told };
            check.owner();
            check.size(resource);
            match &resource.spec {
                Spec::Overlay(overlay) => check.life(overlay),
                Spec::Node(node) => check.node(node),
                Spec::Service(service) => check.service(service),
                Spec::Network(network) => check.network(network),
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
                let message =
                    format!("more than one Overlay document; the first is {}; delete one of them", first.key.name);
                Fault::of(&second.key, "", message)
            }
            _ => Fault {
                key: None,
                number: None,
                problem: hermes_model::Problem {
                    path: String::new(),
                    message: "no Overlay document; add one with kind: Overlay and a name".to_owned(),
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
                let mut own = self.owned(kind, &Some(name.clone()));
                if let Some(first) = own.nth(most) {
                    let message = format!(
                        "quota exceeded: {name} may have {most} {key}; delete some, or ask the operator for a larger \
                         quota (providers.{name}.quota.{key})"
                    );
                    faults.push(Fault::of(&first.key, "", message));
                }
            }
            self.check_room(name, quota, faults);
        }
    }

    /// Limits the total memory and disk that the services of a provider configure, so that a node shared by several
    /// providers can serve all.
    fn check_room(&self, provider: &Name, quota: &Quota, faults: &mut Vec<Fault>) {
        type Asked = fn(&Service) -> [Option<Option<ByteSize>>; 3];
        let memory: Asked = |service| {
            let of_relay = service.relay.as_ref().map(|relay| relay.memory.or(Some(DEFAULT_RELAY_MEMORY)));
            [service.cache.map(|one| one.memory), service.custody.map(|one| one.memory), of_relay]
        };
        let disk: Asked = |service| [service.cache.map(|one| one.disk), service.custody.map(|one| one.disk), None];
        for (most, key, default, asked) in
            [(quota.memory, "memory", DEFAULT_MEMORY, memory), (quota.disk, "disk", DEFAULT_DISK, disk)]
        {
            let mut sum = 0_u64;
            for resource in self.owned(Kind::Service, &Some(provider.clone())) {
                let Spec::Service(service) = &resource.spec else { continue };
                let sizes = asked(service).into_iter().flatten().map(|size| size.unwrap_or(default).0);
                sum = sizes.fold(sum, u64::saturating_add);
                if sum > most.0 {
                    let message = format!(
                        "quota exceeded: caches, custody and relays of {provider} need more than {most} of {key}; reduce \
                         them, or ask the operator for a larger quota (providers.{provider}.quota.{key})"
                    );
                    faults.push(Fault::of(&resource.key, "", message));
                    break;
                }
            }
        }
    }
}

/// Checks one document.
struct Check<'a, 'f> {
    catalog: &'a Catalog,
    overlay: &'a Overlay,
    key: &'a Key,
    faults: &'f mut Vec<Fault>,
    /// Pairs of services that were reported as ambiguous.
    told: &'f mut BTreeSet<[&'a Key; 2]>,
}

impl<'a> Check<'a, '_> {
    fn fault(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.faults.push(Fault::of(self.key, path, message));
    }

    /// If an overlay has providers, each service, user and group needs one.
    fn owner(&mut self) {
        let providers = &self.overlay.providers;
        match &self.key.provider {
            Some(provider) if !providers.contains_key(provider) => {
                let known = did_you_mean(provider.as_str(), providers.keys().map(Name::as_str));
                self.fault("provider", format!("the overlay has no provider {provider}{known}"));
            }
            None if self.key.kind.is_of_providers() && !providers.is_empty() => {
                self.fault(
                    "provider",
                    "missing: the overlay has providers; set provider: NAME, or delete \
                                        this document if another one with a provider replaces it",
                );
            }
            _ => {}
        }
    }

    /// Limits the size of a provider's document, since providers share nodes.
    fn size(&mut self, resource: &Resource) {
        if resource.key.provider.is_none() {
            return;
        }
        let bytes = serde_json::to_vec(resource).map_or(usize::MAX, |text| text.len());
        if bytes > MAX_PROVIDER_DOCUMENT {
            self.fault(
                "",
                format!("document too large: {bytes} bytes, at most {MAX_PROVIDER_DOCUMENT} for a provider's document"),
            );
        }
    }

    fn life(&mut self, overlay: &Overlay) {
        let [shortest, longest] = CERTIFICATE_LIVES;
        if overlay.certificate_lifetime.is_some_and(|life| life.0 < shortest || life.0 > longest) {
            self.fault(
                "certificate-lifetime",
                format!("out of range; expected {}s to {}d", shortest.as_secs(), longest.as_secs() / 86_400),
            );
        }
    }

    /// Checks that the node exists and serves this provider.
    fn serving(&mut self, path: &str, name: &Name) {
        let Some(provider) = &self.key.provider else {
            self.node_at(path, name);
            return;
        };
        let is_serving = |node: &Node| node.providers.iter().any(|one| one == provider);
        if self.catalog.node(name).is_none_or(|node| !is_serving(node)) {
            // The message does not disclose whether the node exists, or which other providers it serves.
            let all = self.catalog.nodes().filter(|(_, node)| is_serving(node));
            let near = did_you_mean(name.as_str(), all.map(|(name, _)| name.as_str()));
            let message = format!(
                "no node {name} serves {provider}{near}; name another one, or have the operator add {provider} to its providers"
            );
            self.fault(path, message);
        }
    }

    fn node_at(&mut self, path: &str, name: &Name) -> Option<&'a Node> {
        let found = self.catalog.node(name);
        if found.is_none() {
            let near = did_you_mean(name.as_str(), self.catalog.nodes().map(|(name, _)| name.as_str()));
            self.faults.push(Fault::of(self.key, path, format!("unknown node {name}{near}")));
        }
        found
    }

    fn node(&mut self, node: &Node) {
        for (at, link) in node.links.iter().enumerate() {
            let path = format!("links[{at}]");
            if *link == self.key.name {
                self.fault(path, "a node cannot link to itself; leave it out");
            } else if let Some(other) = self.node_at(&path, link)
                && other.address.is_none()
            {
                let own = &self.key.name;
                let message = format!("node {link} has no address to dial; give it one, or let it link to {own}");
                self.fault(path, message);
            }
        }
        for (key, message) in unsupported_by_envoy(node) {
            self.fault(key, message);
        }
        for (at, provider) in node.providers.iter().enumerate() {
            if !self.overlay.providers.contains_key(provider) {
                self.fault(format!("providers[{at}]"), format!("the overlay has no provider {provider}"));
            }
        }
        for (at, app) in node.apps.iter().enumerate() {
            if let Err(message) = user_of_app(self.catalog, &self.key.name, app) {
                self.fault(format!("apps[{at}].user"), message);
            }
            self.app(node, at, app);
        }
    }

    /// Checks that the app has the keys that its protocol requires, and no key that only other protocols use.
    fn app(&mut self, node: &Node, at: usize, app: &App) {
        let (is_tun, is_dns) = (app.protocol == AppProtocol::Tun, app.protocol == AppProtocol::Dns);
        if !is_tun && app.bind.is_none() {
            self.fault(
                format!("apps[{at}].bind"),
                "missing; add an address to listen at, such as bind: \
                                                    \"127.0.0.1:8080\"",
            );
        }
        if is_tun && app.address.is_empty() {
            self.fault(format!("apps[{at}].address"), "missing; add the address of the device");
        }
        for (key, is_there, is_fit) in [
            ("bind", app.bind.is_some(), !is_tun),
            ("authority", app.authority.is_some(), !is_tun && !is_dns),
            ("device", app.device.is_some(), is_tun),
            ("address", !app.address.is_empty(), is_tun),
            ("addresses", !app.addresses.is_empty(), is_dns),
            ("forward", !app.forward.is_empty(), is_dns),
        ] {
            if is_there && !is_fit {
                let which = match key {
                    "device" | "address" => "only for protocol: tun",
                    "addresses" | "forward" => "only for protocol: dns",
                    _ if is_tun => "not for a device (protocol: tun)",
                    _ => "not for protocol: dns",
                };
                self.fault(format!("apps[{at}].{key}"), format!("{which}; leave it out"));
            }
        }
        if is_dns {
            self.names(node, at, app);
        }
    }

    /// Checks that a TUN device of the same user captures the virtual addresses of names. Names of different users of a
    /// node must not share a prefix.
    fn names(&mut self, node: &Node, at: usize, app: &App) {
        let catalog = self.catalog;
        let user = |app: &App| user_of_app(catalog, &self.key.name, app).ok();
        let own = user(app);
        let is_device = |other: &App| other.protocol == AppProtocol::Tun && user(other) == own;
        let has_device = node.apps.iter().any(is_device);
        let earlier =
            node.apps.iter().take(at).filter(|other| other.protocol == AppProtocol::Dns && user(other) != own);
        let prefixes = addresses(app);
        let is_shared = |prefix: &Prefix| {
            let overlaps = |other: &Prefix| other.0.contains(&prefix.0) || prefix.0.contains(&other.0);
            earlier.clone().flat_map(addresses).any(|other| overlaps(&other))
        };
        let shared = prefixes.iter().find(|prefix| is_shared(prefix)).copied();
        if !has_device {
            let message =
                "no device of this user captures the addresses of names; add an app {protocol: tun, address: ADDRESS}";
            self.fault(format!("apps[{at}]"), message);
        }
        if let Some(shared) = shared {
            let message = format!(
                "{} is used for names of another user of this node; set addresses: to another prefix",
                shared.0
            );
            self.fault(format!("apps[{at}].addresses"), message);
        }
    }

    fn network(&mut self, network: &Network) {
        let mut seen = BTreeSet::new();
        for (at, gateway) in network.at.iter().enumerate() {
            let path = format!("at[{at}].node");
            self.serving(&path, &gateway.node);
            if !seen.insert(&gateway.node) {
                self.fault(path, "duplicate node; keep one");
            }
            // All packets of a device share one network, so providers must not share a device.
            let device = gateway.device_of(&self.key.name);
            let node = Key::node(&gateway.node);
            let others = self.catalog.namers(&node).filter(|key| key.provider != self.key.provider);
            let mut others = others.filter_map(|key| match &self.catalog.get(key)?.spec {
                Spec::Network(other) => other.at.iter().find(|other| other.node == gateway.node)?.device_of(&key.name),
                _ => None,
            });
            if device.is_some() && others.any(|other| Some(other) == device) {
                self.fault(
                    format!("at[{at}].device"),
                    "device name in use by another provider's network on that node; choose another one",
                );
            }
        }
        self.audience(&network.audience);
    }

    fn service(&mut self, service: &Service) {
        let speaks = |replica: &Replica| (replica.http.is_some(), replica.tcp.is_some(), replica.udp.is_some());
        let mut seen = BTreeSet::new();
        let is_relay = service.relay.is_some();
        if is_relay {
            self.relay(service);
        }
        for (at, replica) in service.at.iter().enumerate() {
            self.serving(&format!("at[{at}].node"), &replica.node);
            if is_relay && speaks(replica) != (false, false, false) {
                self.fault(format!("at[{at}]"), "a relay has no origin; keep node alone, or remove relay");
            }
            if !is_relay && speaks(replica) == (false, false, false) {
                self.fault(format!("at[{at}]"), "origin missing; add http, tcp or udp, with HOST:PORT");
            }
            if service.at.0.first().is_some_and(|first| speaks(first) != speaks(replica)) {
                self.fault(
                    format!("at[{at}]"),
                    "all replicas of a service must have the same protocols; make this a service of its own",
                );
            }
            if !seen.insert(&replica.node) {
                self.fault(format!("at[{at}].node"), "duplicate node; keep one");
            }
        }
        self.audience(&service.audience);
        self.ambiguous(service);
    }

    /// The tree of a relay has one root, and follows the paths of the service.
    fn relay(&mut self, service: &Service) {
        let Some(relay) = &service.relay else { return };
        if service.at.0.len() > 1 {
            self.fault("at", "a relay has one root; keep one node, or write node documents with relay.peers");
        }
        let of_peers = !relay.peers.is_empty() || relay.authority.is_some() || relay.root != RootChoice::default();
        if of_peers || relay.upstream.is_some() || relay.user.is_some() {
            let reason =
                "the nodes of the tree follow from the links; remove upstream, user, peers, root and authority";
            self.fault("relay", reason);
        }
        let others = [
            ("retry", service.retry.is_some()),
            ("custody", service.custody.is_some()),
            ("cache", service.cache.is_some()),
            ("upstream-rate-limit", service.upstream_rate_limit.is_some()),
            ("resume", service.resume.is_some()),
            ("rewrite", service.rewrite.is_some()),
        ];
        for (key, _) in others.into_iter().filter(|(_, is_set)| *is_set) {
            self.fault(key, "a relay answers requests itself; remove this, or make it a service of its own");
        }
    }

    /// Reports ambiguous services. The narrower audience takes precedence; two audiences of the same size with a user
    /// in common have no order.
    fn ambiguous(&mut self, service: &Service) {
        let width = |key: &Key, audience: &Audience| match audience {
            Audience::Everyone => None,
            Audience::Those { .. } => self.catalog.audience(key, audience),
        };
        let others = self.catalog.beside(self.key);
        let own = if others.is_empty() { None } else { width(self.key, &service.audience) };
        let is_same = |other: &&Key| match (&own, self.catalog.offer(other).map(|one| width(other, one.audience()))) {
            (None, Some(None)) => true,
            (Some(own), Some(Some(others))) => own.len() == others.len() && !own.is_disjoint(&others),
            _ => false,
        };
        let others: Vec<_> = others.into_iter().filter(is_same).collect();
        for other in others {
            if self.told.insert([self.key.min(other), self.key.max(other)]) {
                let message = format!(
                    "ambiguous: {other} has the same authority and an audience of the same size; narrow one of them, \
                     or give it an authority, a path or a method of its own"
                );
                self.fault("authority", message);
            }
        }
    }

    fn audience(&mut self, audience: &Audience) {
        if let Audience::Those { users, groups } = audience {
            for (at, user) in users.iter().enumerate() {
                let path = format!("for.users[{at}]");
                let found = self.own(&path, user).map(|name| self.catalog.user(&self.key.provider, name).is_some());
                if found == Some(false) {
                    self.fault(path, format!("unknown user {user}; add a document with kind: User"));
                }
            }
            for (at, group) in groups.iter().enumerate() {
                let path = format!("for.groups[{at}]");
                let found = self.own(&path, group).map(|name| self.catalog.group(&self.key.provider, name).is_some());
                if found == Some(false) {
                    self.fault(path, format!("unknown group {group}; name it in `groups` of a user"));
                }
            }
        }
    }

    /// Returns the referenced name if it belongs to the same provider. Otherwise adds a fault.
    fn own<'n>(&mut self, path: &str, reference: &'n Reference) -> Option<&'n Name> {
        if reference.provider.is_some() && reference.provider != self.key.provider {
            self.fault(path, format!("{reference} belongs to another provider; name a document of the same provider"));
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
                self.fault(format!("users[{at}]"), format!("unknown user {user}; add a document with kind: User"));
            }
        }
    }
}

/// Returns the keys of a node's document that Envoy does not support, each with a message. Links and services are
/// checked in the compiled document.
pub(crate) fn unsupported_by_envoy(node: &Node) -> Vec<(&'static str, String)> {
    if node.runs != Program::Envoy {
        return Vec::new();
    }
    let mut told = Vec::new();
    let mut tell = |is_so: bool, key, message: &str| {
        if is_so {
            told.push((key, format!("this node runs Envoy, {message}")));
        }
    };
    tell(node.role != Role::Standalone, "role", "which supports no users of its own; set role: standalone");
    tell(node.address.is_none(), "address", "which other nodes dial; give it an address");
    tell(node.http3, "http3", "which does not verify client certificates over HTTP/3; leave http3 out");
    tell(!node.apps.is_empty(), "apps", "which only forwards for other nodes; move apps to another node");
    tell(!node.listeners.is_empty(), "listeners", "which only has a listener for other nodes; leave listeners out");
    let own = "which has this from its own bootstrap and command line; leave it out";
    tell(node.admin.is_some(), "admin", own);
    tell(node.drain.is_some(), "drain", own);
    tell(node.workers != Default::default(), "workers", own);
    tell(node.dispatch != Default::default(), "dispatch", own);
    tell(node.overload.is_some(), "overload", own);
    tell(node.limits.is_some(), "limits", own);
    told
}
