//! Checks a route: its match, its action, and their compatibility.

use std::path::PathBuf;
use std::sync::Arc;

use http::StatusCode;

use super::context::{Names, unresolved};
use super::report::Report;
use super::{header, policy, relay, rina};
use crate::dial_scope::DialScope;
use crate::document::keyword::Source;
use crate::document::route as section;
use crate::facts::Kind;
use crate::matcher::{Matcher, list};
use crate::snapshot::{
    Action, Endpoint, Face, FaceUri, Gateway, OnChange, Redirect, RelayTree, Respond, RinaNeighbour, Route, Target,
    Terminate, TerminateKind, Upstream, UpstreamProtocol,
};

const ACTIONS: &str = "upstream, terminate, relay, respond, redirect";

/// Maximum number of destinations of a race.
const MAX_RACE: usize = 4;

/// Maximum body of `respond`, in bytes. An origin should serve larger ones.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Builds a route; `None` if an essential part is missing.
pub(super) fn build(section: &section::Route, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Route> {
    let mut matcher = build_match(&section.matching, &format!("{at}.match"), names, report);
    let retry = section.retry.as_ref().map(|retry| policy::retry(retry, &format!("{at}.retry"), report));
    let custody = section.custody.map(|custody| policy::custody(custody, &format!("{at}.custody"), names, report));
    let cache = section.cache.map(|cache| policy::cache(cache, &format!("{at}.cache"), names, report));
    let upstream_rate_limit = section
        .upstream_rate_limit
        .map(|limit| policy::upstream_rate_limit(limit, &format!("{at}.upstream-rate-limit"), report));
    let resume = section.resume.map(|resume| policy::resume(resume, &format!("{at}.resume"), report));
    let rewrite = section.rewrite.as_ref().map(|rewrite| policy::rewrite(rewrite, &format!("{at}.rewrite"), report));
    let timeout = policy::timeouts(section.timeout, &format!("{at}.timeout"), report);
    on_change(section, &matcher, at, report);
    let action = action(section, at, names, report)?;
    // An upstream only gets the network of the URI, whatever network a peer announced.
    matcher.accepts_announced_network = !matches!(action, Action::Upstream(_));
    check_kinds(&matcher, &action, at, report);
    check_policies(section, &matcher, &action, at, report);
    Some(Route {
        name: Arc::from(section.name.as_str()),
        matcher,
        action,
        rewrite,
        retry,
        custody,
        cache,
        upstream_rate_limit,
        resume,
        trusts_idempotency_key: section.idempotency_key,
        timeout,
        on_change: section.on_change,
        early_data: section.early_data.unwrap_or(true),
        importance: section.importance,
    })
}

fn build_match(section: &section::Match, at: &str, names: &Names<'_>, report: &mut Report) -> Matcher {
    for (index, name) in section.listener.iter().enumerate().filter(|(_, name)| !names.listeners.contains(name)) {
        report.problem(
            element(at, "listener", section.listener.0.len(), index),
            unresolved("listener", name, names.listeners),
        );
    }
    let mut seen = header::UniqueNames::default();
    let mut headers = Vec::new();
    for (text, values) in &section.headers {
        let name = header::name(text).and_then(|name| seen.insert(name));
        let name = report.ok_or_report(|| format!("{at}.headers.{text}"), name);
        headers.extend(name.map(|name| (name, values.0.clone())));
    }
    if section.port.iter().any(|port| *port == 0) {
        report.problem(format!("{at}.port"), "invalid port 0; use 1 to 65535");
    }
    let only_ip = !section.network.is_empty() || !section.protocol.is_empty();
    if only_ip && !section.kind.is_empty() && !section.kind.iter().any(|kind| *kind == Kind::Ip) {
        let key = if section.network.is_empty() { "protocol" } else { "network" };
        report.problem(
            format!("{at}.{key}"),
            format!(
                "only ip sessions have a {key}, but the match requires kind {}; add kind: ip, or remove {key}",
                list(&section.kind.0)
            ),
        );
    }
    Matcher {
        listeners: section.listener.iter().map(|name| Arc::from(name.as_str())).collect(),
        kinds: section.kind.0.clone(),
        authorities: section.authority.0.clone(),
        paths: section.path.0.clone(),
        methods: section.method.iter().map(|method| method.0.clone()).collect(),
        headers,
        users: section.user.0.clone(),
        networks: section.network.iter().map(|prefix| prefix.0).collect(),
        accepts_announced_network: false,
        protocols: section.protocol.iter().map(|protocol| protocol.0).collect(),
        ports: section.port.0.clone(),
    }
}

/// `match.listener`, or `match.listener[2]` in a list of several.
fn element(at: &str, key: &str, count: usize, index: usize) -> String {
    if count == 1 { format!("{at}.{key}") } else { format!("{at}.{key}[{index}]") }
}

fn action(section: &section::Route, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    let written: Vec<&str> = [
        ("upstream", section.upstream.is_some()),
        ("terminate", section.terminate.is_some()),
        ("relay", section.relay.is_some()),
        ("respond", section.respond.is_some()),
        ("redirect", section.redirect.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, is)| is.then_some(name))
    .collect();
    match written.as_slice() {
        [_] => {}
        [] => {
            report.problem(at, format!("missing action; add exactly one of {ACTIONS}"));
            return None;
        }
        several => report.problem(at, format!("more than one action: {}; keep one", several.join(" and "))),
    }
    if let Some(name) = &section.upstream {
        upstream(name, &format!("{at}.upstream"), names, report)
    } else if let Some(terminate) = &section.terminate {
        build_terminate(terminate, &format!("{at}.terminate"), names, report)
    } else if let Some(section) = &section.relay {
        relay::build(section, &format!("{at}.relay"), names, report).map(Action::Relay)
    } else if let Some(respond) = &section.respond {
        build_respond(respond, &format!("{at}.respond"), report).map(Action::Respond)
    } else {
        section
            .redirect
            .as_ref()
            .and_then(|redirect| build_redirect(redirect, &format!("{at}.redirect"), report))
            .map(Action::Redirect)
    }
}

fn upstream(name: &str, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    upstream_named(name, at, names, report).map(Action::Upstream)
}

/// The upstream with this name.
pub(super) fn upstream_named(name: &str, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Arc<Upstream>> {
    // The name of an invalid upstream counts as known, although the upstream could not be built.
    if !names.upstream_names.iter().any(|known| known == name) {
        report.problem(at, unresolved("upstream", name, names.upstream_names));
    }
    names.upstreams.get(name).copied().cloned()
}

fn build_terminate(section: &section::Terminate, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    if !section.race.is_empty() {
        return build_race(section, at, names, report);
    }
    let dials = section.tcp.is_some() || section.udp.is_some() || section.http.is_some();
    let written = [section.ndn.is_some(), section.tun.is_some(), section.rina.is_some()];
    if dials || written.into_iter().filter(|is| *is).count() != 1 {
        return build_dial(section, at, names, report);
    }
    require_keys(section, at, report);
    if let Some(face) = &section.ndn {
        only_target(section, "a face", at, report);
        return Some(Action::Face(build_face(section, face, at, names, report)));
    }
    if let Some(neighbour) = &section.rina {
        only_target(section, "a neighbour in a DIF", at, report);
        let membership = rina::membership(section.dif.as_ref(), section.dif_key.as_ref(), at, names.context, report)?;
        let application = section.application.as_deref().map(Arc::from);
        return Some(Action::Rina(RinaNeighbour { neighbour: neighbour.clone(), membership, application }));
    }
    let device = section.tun.as_ref()?;
    only_target(section, "packets for a device", at, report);
    Some(Action::Device(build_gateway(section, &device.0, at, report)))
}

/// Builds a race of destinations.
fn build_race(section: &section::Terminate, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    let race = &section.race;
    if *section != (section::Terminate { race: race.clone(), ..section::Terminate::default() }) {
        report.problem(at, "race is the only key of its terminate; move the others into the list");
    }
    if !(2..=MAX_RACE).contains(&race.len()) {
        let message = format!("{} destinations; use 2 to {MAX_RACE}", race.len());
        report.problem(format!("{at}.race"), message);
    }
    let mut all = Vec::new();
    for (index, alternative) in race.iter().enumerate() {
        let at = format!("{at}.race[{index}]");
        if !alternative.race.is_empty() {
            report.problem(&at, "a race within a race; list all destinations in one");
            continue;
        }
        let Some(action) = build_terminate(alternative, &at, names, report) else { continue };
        if action.carries(Kind::Tcp) || action.carries(Kind::Http) {
            all.push((at, action));
        } else {
            let message = "a race supports only tcp, http, ndn and rina; add a route for the other sessions";
            report.problem(&at, message);
        }
    }
    let is_origin = |(_, action): &&(String, Action)| action.carries(Kind::Http) && !action.carries(Kind::Tcp);
    if all.iter().filter(is_origin).count() > 1 {
        let message = "a race has at most one http destination; use an upstream with several endpoints instead";
        report.problem(format!("{at}.race"), message);
    }
    let serves = |kind| all.iter().all(|(_, action)| action.carries(kind));
    if !serves(Kind::Tcp) && !serves(Kind::Http) {
        let message = "a race cannot mix http with tcp or rina; race http with ndn, and add a route for the others";
        report.problem(format!("{at}.race"), message);
    }
    // A race of requests ends with a response. A race of flows ends when one opens, which UDP does at once.
    for (at, action) in all.iter().filter(|_| serves(Kind::Tcp)) {
        if matches!(action, Action::Face(Face { uri: FaceUri::Udp(_), .. })) {
            report.problem(at, "a UDP face opens without a handshake and wins each race; use tcp:// or unix://");
        }
    }
    Some(Action::Race(all.into_iter().map(|(_, action)| action).collect()))
}

/// Reports keys whose destination is another one.
fn require_keys(section: &section::Terminate, at: &str, report: &mut Report) {
    let mut require = |key: &str, written: bool, destination: &str, is: bool| {
        if written && !is {
            report.problem(format!("{at}.{key}"), format!("{key} requires {destination}; remove it"));
        }
    };
    let ndn = section.ndn.is_some();
    require("anchors", !section.anchors.is_empty(), "ndn", ndn);
    require("accept-digest", section.accept_digest, "ndn", ndn);
    require("reliable", section.reliable, "ndn", ndn);
    let rina = section.rina.is_some();
    require("dif", section.dif.is_some(), "rina", rina);
    require("dif-key", section.dif_key.is_some(), "rina", rina);
    require("application", section.application.is_some(), "rina", rina);
    let tun = section.tun.is_some();
    require("address", !section.address.is_empty(), "tun", tun);
    require("assign", !section.assign.is_empty(), "tun", tun);
    require("assign-networks", section.assign_networks, "tun", tun);
    require("nat", section.nat, "tun", tun);
    require("dnat", section.dnat.is_some(), "tun", tun);
}

/// Builds a route that dials a host: over TCP or UDP, or as an HTTP origin.
fn build_dial(section: &section::Terminate, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    require_keys(section, at, report);
    let written: Vec<(TerminateKind, &Target)> =
        [(TerminateKind::Tcp, &section.tcp), (TerminateKind::Udp, &section.udp), (TerminateKind::Http, &section.http)]
            .into_iter()
            .filter_map(|(kind, target)| Some((kind, target.as_ref()?)))
            .collect();
    let ([(kind, target)], None, None, None) = (written.as_slice(), &section.tun, &section.ndn, &section.rina) else {
        let others = [section.tun.is_some(), section.ndn.is_some(), section.rina.is_some()];
        let message = if written.is_empty() && !others.contains(&true) {
            "missing destination; add exactly one of tcp, udp, http: authority or HOST:PORT, ndn: FACE, \
             rina: HOST:PORT, tun: DEVICE, or race: [...]"
        } else {
            "more than one destination; keep one of tcp, udp, http, ndn, rina, tun, and add a route for each other one"
        };
        report.problem(at, message);
        return None;
    };
    if section.reach.is_some() && matches!(target, Target::Fixed(_)) {
        let message = format!(
            "reach limits the targets that a request may name, but this destination is always {target}; remove it"
        );
        report.problem(format!("{at}.reach"), message);
    }
    if section.proxy_protocol.is_some() && *kind != TerminateKind::Tcp {
        let message = "proxy-protocol requires tcp; remove it";
        report.problem(format!("{at}.proxy-protocol"), message);
    }
    if section.source.is_some() && *kind == TerminateKind::Http {
        report.problem(format!("{at}.source"), "source requires tcp or udp; remove it");
    }
    if section.congestion.is_some() && *kind != TerminateKind::Tcp {
        report.problem(format!("{at}.congestion"), "congestion requires tcp; remove it");
    }
    if **target == Target::Original && *kind == TerminateKind::Http {
        report.problem(format!("{at}.http"), "original requires tcp or udp; use authority");
    }
    let ca = section.tls.as_ref().and_then(|tls| tls.ca.as_ref());
    let terminate = Terminate {
        kind: *kind,
        target: (*target).clone(),
        reach: section.reach.unwrap_or(default_reach(target)),
        guard: section.guard,
        proxy_protocol: section.proxy_protocol.is_some(),
        from_client: section.source == Some(Source::Client),
        congestion: section.congestion.as_ref().map(|name| name.0.clone()),
        origin_ca: names.context.optional_file(&format!("{at}.tls.ca"), ca, report),
    };
    if section.tls.is_some() && !terminate.speaks_tls() {
        let message = "tls requires http: authority, whose https requests name their origins; remove it, or make the fixed origin \
                       an upstream with tls";
        report.problem(format!("{at}.tls"), message);
    }
    Some(Action::Terminate(terminate))
}

/// A client reaches the addresses of its own network by itself, so a node on the way may dial them, too. Addresses that
/// packets do not reach through a router, such as loopback and link-local ones, stay forbidden.
fn default_reach(target: &Target) -> DialScope {
    if *target == Target::Original { DialScope::Private } else { DialScope::Public }
}

/// The face of a route, with the keys of its anchors.
fn build_face(section: &section::Terminate, uri: &FaceUri, at: &str, names: &Names<'_>, report: &mut Report) -> Face {
    let mut anchors: Vec<(Arc<str>, PathBuf)> = Vec::new();
    for (prefix, file) in &section.anchors {
        let path = names.context.optional_file(&format!("{at}.anchors.{prefix}"), Some(file), report);
        anchors.extend(path.map(|path| (prefix.0.clone(), path)));
    }
    anchors.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.matches('/').count()));
    if section.reliable && !matches!(uri, FaceUri::Udp(_)) {
        report
            .problem(format!("{at}.reliable"), "reliable requires a UDP face; remove it, because streams are reliable");
    }
    Face { uri: uri.clone(), anchors, accept_digest: section.accept_digest, reliable: section.reliable }
}

/// Reports keys that only dialled hosts have.
fn only_target(section: &section::Terminate, what: &str, at: &str, report: &mut Report) {
    for (key, written) in [
        ("reach", section.reach.is_some()),
        ("guard", section.guard),
        ("proxy-protocol", section.proxy_protocol.is_some()),
        ("source", section.source.is_some()),
        ("congestion", section.congestion.is_some()),
        ("tls", section.tls.is_some()),
    ] {
        if written {
            report.problem(format!("{at}.{key}"), format!("{key} does not apply to {what}; remove it"));
        }
    }
}

fn build_gateway(section: &section::Terminate, device: &Arc<str>, at: &str, report: &mut Report) -> Gateway {
    if section.assign.is_empty() {
        let message = "clients may get any private address that they request, even one that this machine reaches by its \
                       default route; list the networks reserved for them";
        report.warning(format!("{at}.assign"), message);
    }
    if section.assign_networks && section.assign.is_empty() {
        let message =
            "missing `assign`, which defines the networks that clients may request; add it, or remove this key";
        report.problem(format!("{at}.assign-networks"), message);
    }
    Gateway {
        device: device.clone(),
        addresses: section.address.iter().map(|address| address.0).collect(),
        assign: section.assign.iter().map(|prefix| prefix.0).collect(),
        assign_networks: section.assign_networks,
        nat: section.nat,
        dnat: section.dnat.map(|address| address.0),
    }
}

fn build_respond(section: &section::Respond, at: &str, report: &mut Report) -> Option<Respond> {
    let headers = header::fixed(&format!("{at}.headers"), &section.headers, report);
    let status = StatusCode::from_u16(section.status).ok().filter(|status| (200..600).contains(&status.as_u16()));
    if status.is_none() {
        let message = format!("invalid status {}: not a final status; use 200 to 599", section.status);
        report.problem(format!("{at}.status"), message);
    }
    // These statuses have no body (RFC 9110, 15.3.5, 15.3.6 and 15.4.5).
    if matches!(section.status, 204 | 205 | 304) && !section.body.is_empty() {
        let message = format!("status {} has no body; remove body, or use another status", section.status);
        report.problem(format!("{at}.body"), message);
    }
    if section.body.len() > MAX_BODY_BYTES {
        report.problem(
            format!("{at}.body"),
            format!("body too large: {} bytes; the maximum is {MAX_BODY_BYTES}", section.body.len()),
        );
    }
    Some(Respond { status: status?, headers, body: section.body.as_bytes().into() })
}

fn build_redirect(section: &section::Redirect, at: &str, report: &mut Report) -> Option<Redirect> {
    let status =
        StatusCode::from_u16(section.status).ok().filter(|_| matches!(section.status, 301 | 302 | 303 | 307 | 308));
    if status.is_none() {
        let message = format!("invalid status {}: not a redirection; use 301, 302, 303, 307 or 308", section.status);
        report.problem(format!("{at}.status"), message);
    }
    let illegal = |text: &str| text.bytes().any(|b| !b.is_ascii_graphic() || b"\"<>\\^`{|}".contains(&b));
    let text = section.location.to_string();
    if text.is_empty() || section.location.literals().any(illegal) {
        let message = format!("invalid URI {text:?}; use a URI such as \"https://NEW{{path-and-query}}\"");
        report.problem(format!("{at}.location"), message);
    }
    Some(Redirect { status: status?, location: section.location.clone() })
}

/// The action must support all kinds of the match. If the match names none, `decide` denies sessions of other kinds.
fn check_kinds(matcher: &Matcher, action: &Action, at: &str, report: &mut Report) {
    let unsupported: Vec<Kind> = matcher.kinds.iter().copied().filter(|kind| !action.carries(*kind)).collect();
    if unsupported.is_empty() {
        return;
    }
    let (key, message) = match action {
        Action::Upstream(upstream) => (
            "upstream",
            format!("upstream {} has protocol {}, which supports tcp only", upstream.name, upstream.protocol),
        ),
        Action::Terminate(terminate) => {
            ("terminate", format!("terminate.{0} supports {0} sessions only", terminate.kind))
        }
        Action::Respond(respond) => (
            "respond",
            format!(
                "the response to a tunnel request cannot be {}, only an error (400 to 599)",
                respond.status.as_u16()
            ),
        ),
        Action::Face(_) => ("terminate", "a face supports http and tcp sessions only".to_owned()),
        Action::Race(_) => {
            ("terminate.race", "a race supports only sessions that all its destinations support".to_owned())
        }
        Action::Rina(_) => ("terminate", "a neighbour in a DIF supports tcp sessions only".to_owned()),
        Action::Device(gateway) => ("terminate", format!("device {} supports ip sessions only", gateway.device)),
        Action::Relay(_) => ("relay", "relay supports http sessions only".to_owned()),
        Action::Redirect(_) => ("redirect", "redirect supports http sessions only".to_owned()),
    };
    let message = format!("{message}, but the match requires kind {}; change kind or the action", list(&unsupported));
    report.problem(format!("{at}.{key}"), message);
}

/// Warns about policies without an effect.
fn check_policies(section: &section::Route, matcher: &Matcher, action: &Action, at: &str, report: &mut Report) {
    let answered = matches!(action, Action::Relay(_) | Action::Respond(_) | Action::Redirect(_));
    let is_tunnel = |action: &Action| match action {
        Action::Terminate(terminate) => terminate.kind != TerminateKind::Http,
        action => matches!(action, Action::Device(_) | Action::Face(_)),
    };
    let tunnel = action.alternatives().iter().all(is_tunnel);
    if section.retry.is_some() && answered {
        report.warning(format!("{at}.retry"), "no effect: the node responds itself, without retries; remove it");
    }
    if section.custody.is_some() {
        custody(action, &format!("{at}.custody"), report);
        if !matcher.kinds.is_empty() && matcher.kinds.iter().all(|kind| kind.is_datagrams()) {
            let message = "no effect: datagrams are not stored; remove it, or match http or tcp";
            report.warning(format!("{at}.custody"), message);
        }
    }
    let is_content = matcher.kinds == [Kind::Http] || !matcher.paths.is_empty();
    let accepts_none = |face: &Face| face.anchors.is_empty() && !face.accept_digest;
    if is_content && action.alternatives().iter().any(|one| matches!(one, Action::Face(face) if accepts_none(face))) {
        let message = "no content would be accepted; add anchors with the public keys of its signers, or accept-digest";
        report.problem(format!("{at}.terminate"), message);
    }
    let keeps = matches!(action, Action::Upstream(_) | Action::Terminate(Terminate { kind: TerminateKind::Http, .. }));
    if section.cache.is_some() && !keeps {
        let message =
            "cache requires an origin whose responses it stores; remove it, or use upstream or terminate: {http: ...}";
        report.problem(format!("{at}.cache"), message);
    }
    if section.upstream_rate_limit.is_some() {
        check_rate_limit(section, action, &format!("{at}.upstream-rate-limit"), report);
    }
    if section.resume.is_some() && !keeps {
        let message = "resume requires an origin; remove it, or use upstream or terminate: {http: ...}";
        report.problem(format!("{at}.resume"), message);
    } else if section.resume.is_some() && section.custody.is_some() {
        let message = "resume conflicts with custody, which retries by itself; keep one of them";
        report.problem(format!("{at}.resume"), message);
    }
    if section.idempotency_key && !keeps && tunnel {
        let message = "no effect: this route forwards no requests; remove it";
        report.warning(format!("{at}.idempotency-key"), message);
    }
    let is_below = matches!(action, Action::Relay(relay) if relay.tree != RelayTree::Root);
    if is_below && section.rewrite.as_ref().is_some_and(|rewrite| rewrite.path.is_some()) {
        let message = "the paths of channels must be the same at all relays, since they say whose key counts; remove it, \
                       or use an upstream without relay";
        report.problem(format!("{at}.rewrite.path"), message);
    }
    let is_relay = matches!(action, Action::Relay(_));
    if section.rewrite.is_some() && (answered && !is_relay || tunnel) {
        report.warning(format!("{at}.rewrite"), "no effect: this route forwards no requests; remove it");
    }
}

/// The next hop must be a node that can be dialled, over an HTTP version that supports extended CONNECT.
fn custody(action: &Action, at: &str, report: &mut Report) {
    let Action::Upstream(upstream) = action else {
        return report.problem(at, "custody requires a next node; use it as the upstream, or remove this key");
    };
    let (name, protocol) = (&upstream.name, upstream.protocol);
    if !matches!(protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3) {
        let message = format!("upstream {name} has protocol {protocol}, but custody requires h2 or h3 to a node");
        report.problem(at, message);
    }
    if upstream.overlay == Some(false) {
        report.problem(at, format!("upstream {name} is not a node of the overlay, so it cannot accept custody"));
    }
    if upstream.all().any(|endpoint| matches!(endpoint, Endpoint::Node(_))) {
        let message =
            format!("upstream {name} has a node that cannot be dialled; custody requires endpoints with addresses");
        report.problem(at, message);
    }
}

/// The route needs a service whose rate-limit responses pass through this node.
fn check_rate_limit(section: &section::Route, action: &Action, at: &str, report: &mut Report) {
    if !matches!(action, Action::Upstream(_)) {
        report.problem(
            at,
            "upstream-rate-limit requires an upstream, whose rate limit it follows; use one as the action, or remove this key",
        );
    } else if section.custody.is_some() {
        report.problem(
            at,
            "upstream-rate-limit conflicts with custody, which sends when the link is up; keep one of them",
        );
    }
}

fn on_change(section: &section::Route, matcher: &Matcher, at: &str, report: &mut Report) {
    let movable = !matcher.kinds.is_empty() && matcher.kinds.iter().all(|kind| matches!(kind, Kind::Udp | Kind::Ip));
    if section.on_change == OnChange::Move && !movable {
        report.problem(
            format!("{at}.on-change"),
            "only udp flows can move; add kind: udp to the match, or remove on-change (ip sessions always move)",
        );
    }
}
