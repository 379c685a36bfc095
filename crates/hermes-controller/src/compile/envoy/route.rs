//! Routes of an Envoy, and the check of user claims.
//!
//! In: the routes and users of a node document. Out: one route configuration. A request's user selects the routes of
//! that user, in the document's order; the first match wins. Before that, a filter checks whether the sender may claim
//! that user, by the table "Trust" of the reference. A request without a claim has no user.
//! Never: a user claim that neither the sender's certificate nor the document permits, because the next nodes accept an
//! Envoy's claims.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use envoy_types::pb::envoy::config::common::mutation_rules::v3::{HeaderMutation, header_mutation};
use envoy_types::pb::envoy::config::route::v3::header_matcher::HeaderMatchSpecifier;
use envoy_types::pb::envoy::config::route::v3::retry_policy::{
    RetryHostPredicate, RetryPriority, retry_host_predicate, retry_priority,
};
use envoy_types::pb::envoy::config::route::v3::route_action::upgrade_config::ConnectConfig;
use envoy_types::pb::envoy::config::route::v3::route_action::{ClusterSpecifier, UpgradeConfig};
use envoy_types::pb::envoy::config::route::v3::route_match::{ConnectMatcher, PathSpecifier};
use envoy_types::pb::envoy::config::route::v3::{
    HeaderMatcher, RetryPolicy, Route, RouteAction, RouteConfiguration, RouteMatch, route::Action,
};
use envoy_types::pb::envoy::extensions::filters::http::header_mutation::v3::{HeaderMutationPerRoute, Mutations};
use envoy_types::pb::envoy::extensions::filters::http::rbac::v3::RbacPerRoute;
use envoy_types::pb::envoy::extensions::retry::host::previous_hosts::v3::PreviousHostsPredicate;
use envoy_types::pb::envoy::extensions::retry::priority::previous_priorities::v3::PreviousPrioritiesConfig;
use envoy_types::pb::envoy::r#type::matcher::v3::string_matcher::MatchPattern;
use envoy_types::pb::envoy::r#type::matcher::v3::{RegexMatcher, StringMatcher};
use envoy_types::pb::google::protobuf::{Any, UInt32Value};
use hermes_model::Problem;
use hermes_model::document::Document;
use hermes_model::document::route::{self, Match, Terminate};
use hermes_model::document::scalar::OneOrMany;
use hermes_model::facts::Kind;
use hermes_model::pattern::{AuthorityPattern, HostPattern, PathPattern, PortPattern, UserPattern};
use hermes_model::snapshot::Target;
use hermes_model::trust::HERMES_USER;
use prost::{Message as _, Name as _};

use super::cluster::{OriginProtocol, hop, origin, patient};
use super::listener::{MUTATION, TRUST};
use super::matcher::{self, Matcher, OnMatch, Rbac, VirtualHost};
use super::{EnvoyIdentity, OVERLAY, duration, exact, pack, problem};

/// The maximum number of routes of all users. Envoy tries the routes of a user in order.
const MAX_ROUTES: usize = 100_000;

/// A route of the document, translated.
struct Found {
    /// The users of the route; `None` if it is for everyone, or for any user.
    users: Option<BTreeSet<String>>,
    /// True if the route is for every request that has a user.
    is_of_somebody: bool,
    routes: Vec<Route>,
}

pub(super) fn routes(
    document: &Document,
    identity: EnvoyIdentity<'_>,
    clusters: &mut BTreeMap<String, Cluster>,
    problems: &mut Vec<Problem>,
) -> Any {
    let mut found = Vec::new();
    for (at, route) in document.routes.iter().enumerate() {
        let path = format!("routes[{at}]");
        let mut told = Vec::new();
        unable(route, &mut told);
        if told.is_empty() {
            found.push(one(route, clusters, &mut told));
        }
        problems.extend(told.into_iter().map(|told| Problem { path: format!("{path}{}", told.path), ..told }));
    }
    let host = by_user(&found, problems);
    let trust = matcher::RbacPerRoute { rbac: Some(Rbac { matcher: Some(trust(document, identity)) }) };
    let trust = Any { type_url: RbacPerRoute::type_url(), value: trust.encode_to_vec() };
    let whole = matcher::RouteConfiguration {
        name: OVERLAY.to_owned(),
        virtual_hosts: vec![host],
        typed_per_filter_config: BTreeMap::from([(TRUST.to_owned(), trust)]),
    };
    Any { type_url: RouteConfiguration::type_url(), value: whole.encode_to_vec() }
}

/// Returns a configuration without routes.
pub(super) fn nothing() -> Any {
    pack(&RouteConfiguration { name: OVERLAY.to_owned(), ..RouteConfiguration::default() })
}

/// Returns the matcher of the filter that checks user claims. Standalone nodes may claim any user, and other nodes
/// their own users. Every node may send requests without a claim. Other requests are denied.
fn trust(document: &Document, identity: EnvoyIdentity<'_>) -> Matcher {
    let silent = || (matcher::nobody(), matcher::allow());
    let standalone = matcher::peer_is(format!("spiffe://{}/role/standalone", identity.overlay));
    let otherwise = Matcher::list([(standalone, matcher::allow()), silent()]);
    let of_node = |users: &OneOrMany<String>| -> OnMatch {
        if users.iter().any(|user| user == "*") {
            return matcher::allow().into();
        }
        let own = users.iter().map(|user| (user.clone(), matcher::allow().into())).collect::<BTreeMap<_, _>>();
        if own.is_empty() {
            return Matcher::list([silent()]).into();
        }
        Matcher::tree(matcher::user(), own, Some(Matcher::list([silent()]).into())).into()
    };
    // A dependent node has exactly one URI.
    let nodes = document
        .users
        .iter()
        .map(|(node, users)| (format!("spiffe://{}/node/{node}", identity.overlay), of_node(users)))
        .collect::<BTreeMap<_, _>>();
    if nodes.is_empty() { otherwise } else { Matcher::tree(matcher::peer(), nodes, Some(otherwise.into())) }
}

/// Returns a virtual host with all routes, grouped by user.
fn by_user(found: &[Found], problems: &mut Vec<Problem>) -> VirtualHost {
    let users: BTreeSet<&String> = found.iter().filter_map(|found| found.users.as_ref()).flatten().collect();
    let of = |user: Option<&String>| -> Vec<&Found> {
        let fits = |found: &&Found| match &found.users {
            Some(users) => user.is_some_and(|user| users.contains(user)),
            None => true,
        };
        found.iter().filter(fits).collect()
    };
    let host = VirtualHost { name: OVERLAY.to_owned(), domains: vec!["*".to_owned()], ..VirtualHost::default() };
    let public = routes_of(&of(None));
    let mut count = public.len();
    let mut map = BTreeMap::new();
    for user in users {
        let routes = routes_of(&of(Some(user)));
        count += routes.len();
        if count > MAX_ROUTES {
            let message = format!(
                "too many routes for an Envoy: more than {MAX_ROUTES}, one for each user; move some services \
                         to other nodes"
            );
            problems.push(problem("routes", message));
            return host;
        }
        map.insert(user.clone(), matcher::routes(routes).into());
    }
    if map.is_empty() {
        return VirtualHost { routes: public, ..host };
    }
    let otherwise = (!public.is_empty()).then(|| matcher::routes(public).into());
    VirtualHost { matcher: Some(Matcher::tree(matcher::user(), map, otherwise)), ..host }
}

fn routes_of(found: &[&Found]) -> Vec<Route> {
    let mut all = Vec::new();
    for found in found {
        for route in &found.routes {
            let mut route = route.clone();
            if found.is_of_somebody
                && let Some(matching) = &mut route.r#match
            {
                matching.headers.push(HeaderMatcher {
                    name: HERMES_USER.as_str().to_owned(),
                    header_match_specifier: Some(HeaderMatchSpecifier::PresentMatch(true)),
                    ..HeaderMatcher::default()
                });
            }
            all.push(route);
        }
    }
    all
}

/// Adds a problem for each key of a route that Envoy does not support.
fn unable(route: &route::Route, problems: &mut Vec<Problem>) {
    let name = &route.name;
    let mut tell = |is_so: bool, key: &str, message: &str| {
        if is_so {
            problems.push(problem(format!(".{key}"), format!("{name}: {message}")));
        }
    };
    tell(
        route.custody.is_some(),
        "custody",
        "an Envoy does not support custody; route this service through Hermes \
                                              nodes",
    );
    tell(
        route.relay.is_some(),
        "relay",
        "an Envoy is no relay; put Hermes nodes on the paths of this service, or keep it off them by links",
    );
    tell(
        route.rewrite.is_some(),
        "rewrite",
        "an Envoy does not support this rewrite; move the replica to a Hermes node",
    );
    tell(
        route.cache.is_some() || route.upstream_rate_limit.is_some() || route.resume.is_some() || route.retry.is_some(),
        "",
        "an Envoy does not support cache, upstream-rate-limit, resume and retry; let sessions begin at a Hermes node",
    );
    tell(
        route.respond.is_some() || route.redirect.is_some() || route.idempotency_key || route.early_data.is_some(),
        "",
        "an Envoy only forwards and terminates sessions",
    );
    let Match { kind, authority, path, method, user, .. } = route.matching.clone();
    let understood = Match { kind, authority, path, method, user, ..Match::default() };
    tell(route.matching != understood, "match", "an Envoy only matches kind, authority, path, method and user");
    tell(route.matching.kind.0.contains(&Kind::Ip), "match.kind", "an Envoy does not forward IP packets");
    let Some(terminate) = &route.terminate else { return };
    // The compiler checks literal targets; an Envoy has no further check.
    let Terminate { http, tcp, udp, guard, .. } = terminate.clone();
    let understood = Terminate { http, tcp, udp, guard, ..Terminate::default() };
    let is_named =
        [&terminate.http, &terminate.tcp, &terminate.udp].into_iter().flatten().any(|t| !matches!(t, Target::Fixed(_)));
    tell(
        is_named || *terminate != understood,
        "terminate",
        "an Envoy terminates sessions only at HOST:PORT; move the replica to a Hermes node",
    );
}

fn one(route: &route::Route, clusters: &mut BTreeMap<String, Cluster>, problems: &mut Vec<Problem>) -> Found {
    let matching = &route.matching;
    let is_of_somebody = matching.user.0.contains(&UserPattern::Any);
    let named = matching.user.iter().filter_map(|user| match user {
        UserPattern::Is(user) => Some(user.to_string()),
        UserPattern::Any => None,
    });
    let users = (!matching.user.is_empty() && !is_of_somebody).then(|| named.collect());
    let kinds: &[Kind] = if matching.kind.is_empty() { &[Kind::Http, Kind::Tcp, Kind::Udp] } else { &matching.kind.0 };
    let mut routes = Vec::new();
    for kind in kinds {
        if *kind != Kind::Http && !(matching.path.is_empty() && matching.method.is_empty()) {
            let message =
                format!("{}: at an Envoy only requests have a path and a method; leave {kind} out", route.name);
            problems.push(problem(".match", message));
            continue;
        }
        let Some(action) = action(route, *kind, clusters) else { continue };
        for matching in matches(matching, *kind) {
            routes.push(Route {
                name: route.name.clone(),
                r#match: Some(matching),
                action: Some(Action::Route(action.clone())),
                typed_per_filter_config: mutations(route),
                ..Route::default()
            });
        }
    }
    Found { users, is_of_somebody, routes }
}

/// Returns the header rules of a route to an origin: the overlay's headers are removed from requests and responses. The
/// map has one entry, so its order is fixed.
fn mutations(route: &route::Route) -> HashMap<String, Any> {
    if route.terminate.is_none() {
        return HashMap::new();
    }
    // Headers such as `hermes_user` are removed too. CGI replaces every character that is neither a letter nor a digit
    // with `_`, so an origin could mistake them for the overlay's headers.
    let overlay = StringMatcher { match_pattern: Some(regex("hermes[^a-z0-9].*")), ignore_case: false };
    let remove = header_mutation::RemoveOnMatch { key_matcher: Some(overlay) };
    let mutation = HeaderMutation { action: Some(header_mutation::Action::RemoveOnMatch(remove)) };
    let (request_mutations, response_mutations) = (vec![mutation.clone()], vec![mutation]);
    let mutations = Mutations { request_mutations, response_mutations, ..Mutations::default() };
    HashMap::from([(MUTATION.to_owned(), pack(&HeaderMutationPerRoute { mutations: Some(mutations) }))])
}

/// Returns the action for sessions of this kind; `None` if the replica has no target for the kind.
fn action(route: &route::Route, kind: Kind, clusters: &mut BTreeMap<String, Cluster>) -> Option<RouteAction> {
    let (cluster, upgrade) = match (&route.upstream, &route.terminate) {
        (Some(upstream), _) => (hop(upstream), None),
        (None, Some(terminate)) => {
            let (target, speaks, upgrade) = match kind {
                Kind::Http => (&terminate.http, OriginProtocol::Http, None),
                Kind::Tcp => (&terminate.tcp, OriginProtocol::Raw, Some("CONNECT")),
                Kind::Udp => (&terminate.udp, OriginProtocol::Raw, Some("CONNECT-UDP")),
                Kind::Ip => return None,
            };
            let Some(Target::Fixed(at)) = target else { return None };
            (origin(clusters, speaks, at), upgrade)
        }
        (None, None) => return None,
    };
    patient(clusters, &cluster, route.timeout.connect.map(|connect| connect.0));
    let idle = route.timeout.idle.map_or(
        match kind {
            Kind::Http => Duration::from_secs(300),
            Kind::Udp => Duration::from_secs(120),
            Kind::Tcp | Kind::Ip => Duration::from_secs(3600),
        },
        |idle| idle.0,
    );
    Some(RouteAction {
        cluster_specifier: Some(ClusterSpecifier::Cluster(cluster)),
        // No limit on the whole request; the idle timeout applies.
        timeout: Some(duration(Duration::ZERO)),
        idle_timeout: Some(duration(idle)),
        retry_policy: Some(elsewhere()),
        upgrade_configs: upgrade
            .map(|upgrade| UpgradeConfig {
                upgrade_type: upgrade.to_owned(),
                connect_config: Some(ConnectConfig::default()),
                ..UpgradeConfig::default()
            })
            .into_iter()
            .collect(),
        ..RouteAction::default()
    })
}

/// Returns the policy that retries a request which the next node has not received: at another next hop, and then at an
/// alternate.
fn elsewhere() -> RetryPolicy {
    let previous = RetryHostPredicate {
        name: "envoy.retry_host_predicates.previous_hosts".to_owned(),
        config_type: Some(retry_host_predicate::ConfigType::TypedConfig(pack(&PreviousHostsPredicate {}))),
    };
    let alternate = RetryPriority {
        name: "envoy.retry_priorities.previous_priorities".to_owned(),
        config_type: Some(retry_priority::ConfigType::TypedConfig(pack(&PreviousPrioritiesConfig {
            update_frequency: 2,
        }))),
    };
    RetryPolicy {
        retry_on: "connect-failure,refused-stream,reset-before-request".to_owned(),
        num_retries: Some(UInt32Value { value: 3 }),
        retry_host_predicate: vec![previous],
        retry_priority: Some(alternate),
        host_selection_retry_max_attempts: 3,
        ..RetryPolicy::default()
    }
}

/// Returns all matches for requests of this kind. A match of Envoy is a conjunction without alternatives, so each
/// combination of authority, path and method becomes a match.
fn matches(matching: &Match, kind: Kind) -> Vec<RouteMatch> {
    let (base, paths) = match kind {
        Kind::Http => {
            // Envoy treats CONNECT-UDP as a request with an upgrade and a path.
            let udp = StringMatcher { ignore_case: true, ..exact("connect-udp") };
            let not_udp = HeaderMatcher { invert_match: true, ..header("upgrade", udp) };
            let not_udp = HeaderMatcher { treat_missing_header_as_empty: true, ..not_udp };
            let paths = matching.path.iter().map(path).collect::<Vec<_>>();
            (not_udp, if paths.is_empty() { vec![PathSpecifier::Prefix("/".to_owned())] } else { paths })
        }
        Kind::Tcp | Kind::Ip => {
            (header(":method", exact("CONNECT")), vec![PathSpecifier::ConnectMatcher(ConnectMatcher {})])
        }
        Kind::Udp => {
            let udp = StringMatcher { ignore_case: true, ..exact("connect-udp") };
            (header("upgrade", udp), vec![PathSpecifier::ConnectMatcher(ConnectMatcher {})])
        }
    };
    let methods: Vec<_> =
        matching.method.iter().map(|method| Some(header(":method", exact(method.0.as_str())))).collect();
    let methods = if methods.is_empty() { vec![None] } else { methods };
    let mut authorities: Vec<Vec<HeaderMatcher>> = matching.authority.iter().flat_map(authority).collect();
    if matching.authority.is_empty() {
        authorities.push(Vec::new());
    }
    let mut all = Vec::new();
    for authority in &authorities {
        for path in &paths {
            for method in &methods {
                let headers = authority.iter().chain(method).chain([&base]).cloned().collect();
                all.push(RouteMatch { headers, path_specifier: Some(path.clone()), ..RouteMatch::default() });
            }
        }
    }
    all
}

fn header(name: &str, matcher: StringMatcher) -> HeaderMatcher {
    HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: Some(HeaderMatchSpecifier::StringMatch(matcher)),
        ..HeaderMatcher::default()
    }
}

/// Function that returns the header matcher for an authority with this port.
type WithPort = Box<dyn Fn(u16) -> HeaderMatcher>;

/// Returns the header matchers of an authority pattern; each item of the list is one alternative.
fn authority(pattern: &AuthorityPattern) -> Vec<Vec<HeaderMatcher>> {
    let by =
        |pattern: MatchPattern| header(":authority", StringMatcher { match_pattern: Some(pattern), ignore_case: true });
    let scheme = |scheme: &str| header(":scheme", exact(scheme));
    // Matchers for the host without a port, with a given port, and with any port.
    let (bare, with, any): (HeaderMatcher, WithPort, Option<HeaderMatcher>) = match &pattern.host {
        HostPattern::Exact(host) => {
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
            let with = host.clone();
            let any = by(MatchPattern::Prefix(format!("{host}:")));
            let with = Box::new(move |port| by(MatchPattern::Exact(format!("{with}:{port}"))));
            (by(MatchPattern::Exact(host)), with, Some(any))
        }
        HostPattern::Suffix(suffix) => {
            let with = suffix.to_string();
            let any = by(regex(&format!("(?i).+{}:[0-9]+", escaped(suffix))));
            let with = Box::new(move |port| by(MatchPattern::Suffix(format!("{with}:{port}"))));
            (by(MatchPattern::Suffix(suffix.to_string())), with, Some(any))
        }
        HostPattern::Any => {
            let with = Box::new(move |port| by(MatchPattern::Suffix(format!(":{port}"))));
            (by(regex(r"[^:]+|\[[^\]]*\]")), with, None)
        }
    };
    match pattern.port {
        PortPattern::Default => vec![vec![bare], vec![with(80)], vec![with(443)]],
        PortPattern::Exact(80) => vec![vec![with(80)], vec![bare, scheme("http")]],
        PortPattern::Exact(443) => vec![vec![with(443)], vec![bare, scheme("https")]],
        PortPattern::Exact(port) => vec![vec![with(port)]],
        PortPattern::Any => match any {
            Some(any) => vec![vec![bare], vec![any]],
            None => vec![Vec::new()],
        },
    }
}

/// Returns the matcher of a path. Hermes and Envoy both compare normalised paths.
fn path(pattern: &PathPattern) -> PathSpecifier {
    let text = pattern.to_string();
    match (pattern.exact(), text.strip_suffix('*')) {
        (Some(path), _) => PathSpecifier::Path(path.to_owned()),
        (None, Some("")) => PathSpecifier::Prefix("/".to_owned()),
        (None, Some(prefix)) if !prefix.contains('*') => PathSpecifier::Prefix(prefix.to_owned()),
        (None, open) => {
            let pieces: Vec<String> = open.unwrap_or(&text).split('*').map(escaped).collect();
            let tail = if open.is_some() { ".*" } else { "" };
            match regex(&format!("{}{tail}", pieces.join("[^/]+"))) {
                MatchPattern::SafeRegex(regex) => PathSpecifier::SafeRegex(regex),
                // `regex` returns no other form.
                _ => PathSpecifier::Path(text),
            }
        }
    }
}

fn regex(text: &str) -> MatchPattern {
    MatchPattern::SafeRegex(RegexMatcher { regex: text.to_owned(), ..RegexMatcher::default() })
}

fn escaped(text: &str) -> String {
    text.chars().flat_map(|c| (!c.is_ascii_alphanumeric()).then_some('\\').into_iter().chain([c])).collect()
}
