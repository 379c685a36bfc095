//! Renders the document of one node.
//!
//! In: the node, and its hops for all services. Out: the document that the node runs.

use std::collections::{BTreeMap, BTreeSet};

use hermes_model::document::keyword::Protocol;
use hermes_model::document::listener::{Capture, Listener, ListenerTls};
use hermes_model::document::relay::Relay;
use hermes_model::document::route::{Match, Route, Terminate};
use hermes_model::document::scalar::{DeviceName, OneOrMany, Prefix};
use hermes_model::document::upstream::{Endpoint, Upstream, UpstreamTls};
use hermes_model::document::{Bind, Document, Identity};
use hermes_model::facts::Kind;
use hermes_model::pattern::UserPattern;
use hermes_model::snapshot::{CarryNames, ClientAuth, HostPort, Importance, Role, UpstreamProtocol};

use super::service_path::Hop;
use super::{Plan, names};
use crate::catalog::{Catalog, Revoked, ServiceOrNetwork, addresses, on_the_wire, user_of_app};
use crate::digest::key_name;
use crate::document::{App, AppProtocol, Key, Name, Network, Node, Service};

/// The default device of a `tun` app.
const DEVICE: &str = "hermes0";

pub(super) fn document(plan: &Plan, name: &Name, node: &Node) -> Document {
    let catalog = &plan.catalog;
    let defaults = catalog.overlay().map(|(_, overlay)| overlay.nodes.clone()).unwrap_or_default();
    let [cert, key, ca] = super::IDENTITY.map(str::to_owned);
    let mut upstreams = Upstreams::new(plan, name, node);
    let routes = routes(plan, name, &mut upstreams);
    let mut listeners = listeners(plan, name, node);
    listeners.extend(upstreams.uplinks.clone().iter().map(|sender| uplink(sender, &mut upstreams)));
    let is_told = |one: &&Revoked| node.address.is_some() || plan.graph.is_beside(name, &one.node);
    let revoked = catalog.revoked().filter(is_told).map(|one| key_name(&one.key)).collect();
    Document {
        admin: node.admin.or(defaults.admin),
        drain: node.drain.or(defaults.drain),
        draining: node.is_draining(),
        workers: node.workers,
        role: node.role,
        identity: Some(Identity { cert, key, ca, revoked: OneOrMany(revoked) }),
        users: bound(plan, name),
        limits: node.limits.clone().or(defaults.limits).unwrap_or_default(),
        dispatch: node.dispatch,
        overload: node.overload.or(defaults.overload).unwrap_or_default(),
        access_log: node.access_log.clone().or(defaults.access_log).unwrap_or_default(),
        listeners,
        routes,
        upstreams: upstreams.all.into_values().collect(),
        ..Document::new(name.as_str())
    }
}

/// Returns the users whose claims this node accepts, by dependent neighbour: exactly those whose sessions pass this
/// node.
fn bound(plan: &Plan, name: &Name) -> BTreeMap<String, OneOrMany<String>> {
    let senders = plan.into.get(name).into_iter().flat_map(|senders| senders.iter());
    let dependent =
        senders.filter(|(sender, _)| plan.catalog.node(sender).is_some_and(|node| node.role == Role::Dependent));
    dependent
        .filter_map(|(sender, services)| {
            let hops = services.iter().filter_map(|key| Some((key, plan.paths.get(key)?.hops.get(sender)?)));
            let users =
                hops.flat_map(|(key, hop)| hop.users.iter().flatten().map(|user| on_the_wire(&key.provider, user)));
            let mut users: BTreeSet<String> = users.collect();
            let is_for_everyone = |(_, hop): (&Key, &Hop)| hop.users.is_none();
            let mut hops = services.iter().filter_map(|key| Some((key, plan.paths.get(key)?.hops.get(sender)?)));
            if !users.is_empty() && hops.any(is_for_everyone) {
                // Other users of that neighbour use a public service, also with a claim. The node rejects a claim that
                // the neighbour's entry does not list, so these users are added.
                users.extend(plan.catalog.users_on(sender).map(|key| on_the_wire(&key.provider, &key.name)));
            }
            (!users.is_empty()).then(|| (sender.to_string(), OneOrMany(users.into_iter().collect())))
        })
        .collect()
}

fn listeners(plan: &Plan, name: &Name, node: &Node) -> Vec<Listener> {
    let overlay = node.address.as_ref().map(|address| Listener {
        bind: node.bind.or_else(|| Some(Bind((std::net::Ipv4Addr::UNSPECIFIED, address.port).into()))),
        tls: Some(ListenerTls { client: Some(ClientAuth::Required), ..ListenerTls::default() }),
        http3: node.http3,
        ..Listener::new(super::OVERLAY, Protocol::Http)
    });
    // No new session begins at a node that drains.
    let begins = !node.is_draining();
    let apps =
        node.apps.iter().enumerate().filter(|_| begins).map(|(at, app)| listener_of(plan, (name, node), at, app));
    overlay.into_iter().chain(apps).chain(node.listeners.iter().filter(|_| begins).cloned()).collect()
}

fn listener_of(plan: &Plan, (node, section): (&Name, &Node), at: usize, app: &App) -> Listener {
    let (word, protocol) = match app.protocol {
        AppProtocol::Http => ("http", Protocol::Http),
        AppProtocol::Socks5 => ("socks5", Protocol::Socks5),
        AppProtocol::Tcp => ("tcp", Protocol::Tcp),
        AppProtocol::Udp => ("udp", Protocol::Udp),
        AppProtocol::Tun => ("tun", Protocol::Tun),
        AppProtocol::Dns => ("dns", Protocol::Dns),
    };
    let user = user_of_app(&plan.catalog, node, app).unwrap_or_default();
    let device = || app.device.clone().unwrap_or_else(|| DeviceName(DEVICE.into()));
    let (is_tun, is_dns) = (app.protocol == AppProtocol::Tun, app.protocol == AppProtocol::Dns);
    let of_names = if is_tun { names::captured(plan, (node, section), app) } else { Vec::new() };
    Listener {
        bind: app.bind,
        authority: app.authority.clone(),
        device: is_tun.then(device),
        address: app.address.clone(),
        capture: OneOrMany(if is_tun { captures(plan, (node, app), user.as_deref(), &of_names) } else { Vec::new() }),
        carry_names: if of_names.is_empty() { CarryNames::Packets } else { CarryNames::Flows },
        names: OneOrMany(if is_dns { names::names(plan, node, user.as_deref()) } else { Vec::new() }),
        addresses: OneOrMany(if is_dns { addresses(app) } else { Vec::new() }),
        forward: app.forward.clone(),
        set_headers: user.filter(|_| !is_dns).map(|user| ("hermes-user".to_owned(), user)).into_iter().collect(),
        ..Listener::new(&format!("app-{at}-{word}"), protocol)
    }
}

/// Returns the prefixes that a device captures: the virtual addresses of names, and the networks that its user may use.
/// Networks with a gateway at this node, and those of an IP version of which the device has no address, are left out.
fn captures(plan: &Plan, (node, app): (&Name, &App), user: Option<&str>, of_names: &[Prefix]) -> Vec<Capture> {
    let offered = plan.at.get(node).into_iter().flat_map(|offers| offers.iter());
    let is_for = |hop: &Hop, key: &Key| {
        let is_one = |one: &Name| user == Some(&*on_the_wire(&key.provider, one));
        !hop.next.is_empty() && hop.users.as_ref().is_none_or(|users| users.iter().any(is_one))
    };
    let networks = offered.filter_map(|key| match plan.catalog.offer(key)? {
        ServiceOrNetwork::Network(network) => is_for(plan.paths.get(key)?.hops.get(node)?, key).then_some(network),
        ServiceOrNetwork::Service(_) => None,
    });
    let mut prefixes: Vec<Prefix> = of_names.to_vec();
    for prefix in networks.flat_map(|network| network.prefixes.iter()) {
        // Two networks may share a prefix, in different locations or for different users.
        let is_v4 = prefix.0.addr().is_ipv4();
        if app.address.iter().any(|own| own.0.is_ipv4() == is_v4) && !prefixes.contains(prefix) {
            prefixes.push(*prefix);
        }
    }
    prefixes.into_iter().map(|network| Capture { network, set_headers: BTreeMap::new() }).collect()
}

/// Returns the routes of a node, and adds the upstreams that they need. The most specific routes come first, since the
/// first match wins.
fn routes(plan: &Plan, name: &Name, upstreams: &mut Upstreams<'_>) -> Vec<Route> {
    let mut routes: Vec<_> = hops(plan, name)
        .filter_map(|(key, hop)| {
            let offer = plan.catalog.offer(key)?;
            let onward = (!hop.next.is_empty()).then(|| match offer {
                ServiceOrNetwork::Service(Service { relay: Some(_), .. }) => upstreams.of_relay(hop),
                _ => upstreams.of(&hop.next, &hop.alternates),
            });
            let (general, route) = match offer {
                ServiceOrNetwork::Service(service) => {
                    let route = match &service.relay {
                        Some(relay) => route_of_relay(plan, (name, hop), (key, service, relay), onward),
                        None => route((name, hop), (key, service), onward),
                    };
                    (generality(service, key), route)
                }
                ServiceOrNetwork::Network(network) => {
                    (breadth(network), route_of_packets((name, hop), (key, network), onward))
                }
            };
            Some((general, key.clone(), route))
        })
        .collect();
    routes.sort_by(|(a, a_key, _), (b, b_key, _)| (a, a_key).cmp(&(b, b_key)));
    narrower_first(plan, &mut routes);
    routes.into_iter().map(|(.., route)| route).collect()
}

/// Puts the service with fewer users first, among services that match the same sessions. Other services keep their
/// order, so that a service without a route at the node never changes its document.
fn narrower_first(plan: &Plan, routes: &mut [(Generality, Key, Route)]) {
    let audience = |key: &Key| plan.paths.get(key).map_or(usize::MAX, |path| path.audience);
    for at in 1..routes.len() {
        let (general, key, _) = &routes[at];
        let beside = plan.catalog.beside(key);
        let is_wider = |(other, wide, _): &(Generality, Key, Route)| {
            other == general && beside.contains(wide) && audience(wide) > audience(key)
        };
        if beside.is_empty() {
            continue;
        }
        if let Some(to) = routes[..at].iter().position(is_wider) {
            routes[to..=at].rotate_right(1);
        }
    }
}

/// The hops of a node, by service.
fn hops<'a>(plan: &'a Plan, name: &'a Name) -> impl Iterator<Item = (&'a Key, &'a Hop)> {
    let services = plan.at.get(name).into_iter().flat_map(|services| services.iter());
    services.filter_map(move |key| Some((key, plan.paths.get(key)?.hops.get(name)?)))
}

/// The order of services, the most specific first: exact names before wildcards, short wildcards last. Among equal
/// names, services with a path come before those without, then those with a method.
type Generality = (bool, usize, bool, usize, bool);

fn generality(service: &Service, key: &Key) -> Generality {
    let authorities = service.authorities(&key.name);
    let texts = || authorities.iter().map(ToString::to_string);
    let is_wild = texts().any(|text| text.contains('*'));
    let shortest = texts().map(|text| text.len()).min().unwrap_or_default();
    let path = service.path.iter().map(|path| path.to_string().len()).min();
    let path_length = usize::MAX - path.unwrap_or_default();
    (is_wild, usize::MAX - shortest, path.is_none(), path_length, service.method.is_empty())
}

/// The order of networks, which share no session with services: short prefixes come last.
fn breadth(network: &Network) -> Generality {
    let shortest = network.prefixes.iter().map(|prefix| usize::from(prefix.0.prefix_len())).min();
    (false, usize::MAX - shortest.unwrap_or_default(), false, 0, false)
}

/// The users of a hop.
fn users(key: &Key, hop: &Hop) -> OneOrMany<UserPattern> {
    let users = hop.users.iter().flatten();
    OneOrMany(users.map(|user| UserPattern::Is(on_the_wire(&key.provider, user).into())).collect())
}

fn route_of_packets((node, hop): (&Name, &Hop), (key, network): (&Key, &Network), upstream: Option<String>) -> Route {
    let gateway = network.at.iter().find(|gateway| gateway.node == *node).filter(|_| upstream.is_none());
    Route {
        matching: Match {
            kind: OneOrMany(vec![Kind::Ip]),
            network: network.prefixes.clone(),
            user: users(key, hop),
            ..Match::default()
        },
        upstream,
        terminate: gateway.map(|gateway| Terminate {
            tun: gateway.device_of(&key.name),
            address: gateway.address.clone(),
            assign: gateway.assign.clone(),
            assign_networks: gateway.assign_networks,
            nat: gateway.nat,
            dnat: gateway.dnat,
            ..Terminate::default()
        }),
        timeout: network.timeout,
        ..Route::new(&super::route_of(key))
    }
}

/// The user as which a node subscribes at other relays. No user of an overlay has such a name, and no device may claim it.
fn relay_user(node: &Name) -> String {
    format!("relay:{node}")
}

fn route_of_relay(
    plan: &Plan,
    (name, hop): (&Name, &Hop),
    (key, service, relay): (&Key, &Service, &Relay),
    upstream: Option<String>,
) -> Route {
    let matching = Match {
        kind: OneOrMany(vec![Kind::Http]),
        authority: OneOrMany(service.authorities(&key.name)),
        path: service.path.clone(),
        method: service.method.clone(),
        user: users(key, hop),
        ..Match::default()
    };
    let common = Route {
        matching,
        timeout: service.timeout,
        on_change: service.on_change,
        importance: importance(key, service),
        ..Route::new(&super::route_of(key))
    };
    let is_relay = |name: &Name| plan.catalog.node(name).is_some_and(|node| node.role == Role::Standalone);
    // A device carries the requests of its users, so that the next node decides about each of them.
    if upstream.is_some() && !is_relay(name) {
        return Route { upstream, ..common };
    }
    let user = upstream.is_some().then(|| relay_user(name));
    let mut route = Route { relay: Some(Relay { upstream, user, ..relay.clone() }), ..common };
    if hop.users.is_some() {
        let senders = plan.into.get(name).into_iter().flat_map(|senders| senders.iter());
        let relays = senders.filter(|(sender, services)| services.contains(key) && is_relay(sender));
        route.matching.user.0.extend(relays.map(|(sender, _)| UserPattern::Is(relay_user(sender).into())));
    }
    route
}

fn route((node, hop): (&Name, &Hop), (key, service): (&Key, &Service), upstream: Option<String>) -> Route {
    let replica = service.at.iter().find(|replica| replica.node == *node).filter(|_| upstream.is_none());
    let kinds = service.at.0.first().map(|first| {
        let speaks =
            [(Kind::Http, first.http.is_some()), (Kind::Tcp, first.tcp.is_some()), (Kind::Udp, first.udp.is_some())];
        speaks.into_iter().filter(|(_, is_so)| *is_so).map(|(kind, _)| kind).collect()
    });
    let matching = Match {
        kind: OneOrMany(kinds.unwrap_or_default()),
        authority: OneOrMany(service.authorities(&key.name)),
        path: service.path.clone(),
        method: service.method.clone(),
        user: users(key, hop),
        ..Match::default()
    };
    let first = hop.is_first.then_some(service);
    let onward = upstream.is_some();
    Route {
        matching,
        upstream,
        terminate: replica.map(|replica| Terminate {
            http: replica.http.clone(),
            tcp: replica.tcp.clone(),
            udp: replica.udp.clone(),
            reach: replica.reach,
            // The node must not dial its own addresses for a provider, because the operator runs the node.
            guard: key.provider.is_some(),
            ..Terminate::default()
        }),
        rewrite: service.rewrite.clone().filter(|_| !onward),
        retry: first.and_then(|service| service.retry.clone()).filter(|_| onward),
        custody: service.custody.filter(|_| onward),
        cache: first.and_then(|service| service.cache),
        upstream_rate_limit: first.and_then(|service| service.upstream_rate_limit),
        resume: first.and_then(|service| service.resume).filter(|_| onward),
        timeout: service.timeout,
        on_change: service.on_change,
        importance: importance(key, service),
        ..Route::new(&super::route_of(key))
    }
}

/// The importance of a service. One of a provider is never above those of others on the nodes that they share.
fn importance(key: &Key, service: &Service) -> Importance {
    match service.importance {
        Importance::High if key.provider.is_some() => Importance::Normal,
        own => own,
    }
}

/// The upstreams of a node, by name.
struct Upstreams<'a> {
    catalog: &'a Catalog,
    node: &'a Name,
    /// Neighbours that send sessions to this node but do not dial it. This node dials a reverse connection to each.
    uplinks: Vec<Name>,
    /// For each set of next hops, the alternates that come first in order among its services. The name of their
    /// upstream does not contain the alternates, so that state which the node stores by name survives a change of
    /// alternates.
    first: BTreeMap<BTreeSet<Name>, Vec<Name>>,
    all: BTreeMap<String, Upstream>,
}

impl<'a> Upstreams<'a> {
    fn new(plan: &'a Plan, name: &'a Name, node: &Node) -> Self {
        let senders = plan.into.get(name).into_iter().flat_map(|senders| senders.keys());
        let kept = senders.filter(|sender| dialled(plan.catalog.node(sender), node, name).is_none());
        let uplinks: Vec<_> = kept.filter(|sender| node.links.iter().any(|link| link == *sender)).cloned().collect();
        let mut first = BTreeMap::new();
        for (_, hop) in hops(plan, name).filter(|(_, hop)| !hop.alternates.is_empty()) {
            let known = first.entry(hop.next.clone()).or_insert_with(|| hop.alternates.clone());
            if hop.alternates < *known {
                known.clone_from(&hop.alternates);
            }
        }
        Self { catalog: &plan.catalog, node: name, uplinks, first, all: BTreeMap::new() }
    }

    /// Returns the name of the upstream with these next hops and alternates, and adds the upstream if it does not
    /// exist.
    fn of(&mut self, next: &BTreeSet<Name>, alternates: &[Name]) -> String {
        let joined = |names: &mut dyn Iterator<Item = &Name>| names.map(Name::as_str).collect::<Vec<_>>().join("+");
        let mut name = joined(&mut next.iter());
        // Reverse connections belong to an upstream without alternates, whose name never equals that of an upstream
        // with alternates.
        if !alternates.is_empty() {
            let is_first = self.first.get(next).is_some_and(|first| first == alternates);
            name = format!("{name}|{}", if is_first { "*".to_owned() } else { joined(&mut alternates.iter()) });
        }
        if !self.all.contains_key(&name) {
            let upstream = self.upstream(&name, next, alternates);
            self.all.insert(name.clone(), upstream);
        }
        name
    }

    /// Returns the name of the upstream towards the root of a relay. All that passes a node towards the root must take one path,
    /// or the tree would have several branches with the same publications.
    fn of_relay(&mut self, hop: &Hop) -> String {
        let first = hop.next.first().cloned();
        let others: Vec<Name> = hop.next.iter().skip(1).chain(&hop.alternates).cloned().collect();
        self.of(&first.into_iter().collect(), &others)
    }

    fn upstream(&self, name: &str, next: &BTreeSet<Name>, alternates: &[Name]) -> Upstream {
        let (catalog, own) = (self.catalog, self.catalog.node(self.node));
        let is_h3 = next.iter().all(|next| catalog.node(next).is_some_and(|next| next.http3));
        let endpoint = |name: &Name| {
            let address = dialled(own, catalog.node(name)?, name);
            Some(address.map_or_else(|| Endpoint::Node(name.to_string()), Endpoint::Address))
        };
        let endpoints: Vec<_> = next.iter().filter_map(endpoint).collect();
        let backup: Vec<_> = alternates.iter().filter_map(endpoint).collect();
        // A neighbour with a reverse connection to this node has already authenticated on that connection.
        let is_dialled = endpoints.iter().chain(&backup).any(|endpoint| matches!(endpoint, Endpoint::Address(_)));
        let names = next.iter().chain(alternates).map(Name::to_string).collect();
        let tls = UpstreamTls { node: OneOrMany(names), ..UpstreamTls::default() };
        // Health checks are useless for a single endpoint, because it is used even if it is unhealthy.
        let has_others = endpoints.len() + backup.len() > 1;
        let probes = own.and_then(|own| own.health).or_else(|| catalog.overlay()?.1.nodes.health);
        Upstream {
            endpoints: OneOrMany(endpoints),
            backup: OneOrMany(backup),
            health: has_others.then(|| probes.unwrap_or_default().health()),
            tls: Some(tls).filter(|_| is_dialled),
            ..Upstream::new(name, if is_h3 { UpstreamProtocol::H3 } else { UpstreamProtocol::H2 })
        }
    }
}

/// Returns the address at which a node dials a neighbour; `None` if the neighbour dials the node.
pub(super) fn dialled(own: Option<&Node>, next: &Node, name: &Name) -> Option<HostPort> {
    let is_own_link = own.is_some_and(|own| own.links.iter().any(|link| link == name));
    let is_other_link = own.is_none_or(|own| own.address.is_some());
    next.address.clone().filter(|_| is_own_link || !is_other_link)
}

/// Returns the listener that dials a reverse connection to a neighbour.
fn uplink(sender: &Name, upstreams: &mut Upstreams<'_>) -> Listener {
    let to = upstreams.of(&BTreeSet::from([sender.clone()]), &[]);
    Listener { dial: Some(to), ..Listener::new(&format!("uplink-{sender}"), Protocol::Http) }
}
