//! Checks a route: its match, its one action, and whether the two fit each other.

use std::sync::Arc;

use http::StatusCode;

use super::context::{Names, unresolved};
use super::report::Report;
use super::{header, policy};
use crate::document::route as section;
use crate::facts::Kind;
use crate::matcher::{Matcher, list};
use crate::reach::Reach;
use crate::snapshot::{
    Action, Endpoint, Gateway, OnChange, Redirect, Respond, Route, Target, Terminate, TerminateKind, UpstreamProtocol,
};

const ACTIONS: &str = "upstream, terminate, respond, redirect";

/// The longest body of `respond`, in bytes. More belongs to an origin.
const MAX_BODY: usize = 1024 * 1024;

/// A route; `None` where something is missing without which it is none.
pub(super) fn build(section: &section::Route, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Route> {
    let mut matcher = build_match(&section.matching, &format!("{at}.match"), names, report);
    let retry = section.retry.as_ref().map(|retry| policy::retry(retry, &format!("{at}.retry"), report));
    let custody = section.custody.map(|custody| policy::custody(custody, &format!("{at}.custody"), names, report));
    let cache = section.cache.map(|cache| policy::cache(cache, &format!("{at}.cache"), names, report));
    let pace = section.pace.map(|pace| policy::pace(pace, &format!("{at}.pace"), report));
    let retrieve = section.retrieve.map(|retrieve| policy::retrieve(retrieve, &format!("{at}.retrieve"), report));
    let rewrite = section.rewrite.as_ref().map(|rewrite| policy::rewrite(rewrite, &format!("{at}.rewrite"), report));
    let timeout = policy::timeouts(section.timeout, &format!("{at}.timeout"), report);
    on_change(section, &matcher, at, report);
    let action = action(section, at, names, report)?;
    // Upstreams are asked for what the URI says, whatever else was told.
    matcher.accepts_announced_network = !matches!(action, Action::Upstream(_));
    fitting_kinds(&matcher, &action, at, report);
    fitting_policies(section, &matcher, &action, at, report);
    Some(Route {
        name: Arc::from(section.name.as_str()),
        matcher,
        action,
        rewrite,
        retry,
        custody,
        cache,
        pace,
        retrieve,
        trusts_keys: section.idempotency_key,
        timeout,
        on_change: section.on_change,
        early_data: section.early_data.unwrap_or(true),
    })
}

fn build_match(section: &section::Match, at: &str, names: &Names<'_>, report: &mut Report) -> Matcher {
    for (index, name) in section.listener.iter().enumerate().filter(|(_, name)| !names.listeners.contains(name)) {
        report.problem(
            element(at, "listener", section.listener.0.len(), index),
            unresolved("listener", name, names.listeners),
        );
    }
    let mut seen = header::Seen::default();
    let mut headers = Vec::new();
    for (text, values) in &section.headers {
        let name = header::name(text).and_then(|name| seen.once(name));
        let name = report.take(|| format!("{at}.headers.{text}"), name);
        headers.extend(name.map(|name| (name, values.0.clone())));
    }
    if section.port.iter().any(|port| *port == 0) {
        report.problem(format!("{at}.port"), "0 is no port; write 1 to 65535");
    }
    let only_ip = !section.network.is_empty() || !section.protocol.is_empty();
    if only_ip && !section.kind.is_empty() && !section.kind.iter().any(|kind| *kind == Kind::Ip) {
        let key = if section.network.is_empty() { "protocol" } else { "network" };
        report.problem(
            format!("{at}.{key}"),
            format!(
                "only ip sessions have a {key}, and the match wants {}; add kind: ip, or leave {key} out",
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

/// `match.listener`, or `match.listener[2]` where there are several.
fn element(at: &str, key: &str, count: usize, index: usize) -> String {
    if count == 1 { format!("{at}.{key}") } else { format!("{at}.{key}[{index}]") }
}

fn action(section: &section::Route, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    let written: Vec<&str> = [
        ("upstream", section.upstream.is_some()),
        ("terminate", section.terminate.is_some()),
        ("respond", section.respond.is_some()),
        ("redirect", section.redirect.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, is)| is.then_some(name))
    .collect();
    match written.as_slice() {
        [_] => {}
        [] => {
            report.problem(at, format!("there is no action; add exactly one of {ACTIONS}"));
            return None;
        }
        several => report.problem(at, format!("{} are more than one action; keep one", several.join(" and "))),
    }
    if let Some(name) = &section.upstream {
        upstream(name, &format!("{at}.upstream"), names, report)
    } else if let Some(terminate) = &section.terminate {
        build_terminate(terminate, &format!("{at}.terminate"), names, report)
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
    // One with problems of its own is there, though it could not be built.
    if !names.upstream_names.iter().any(|known| known == name) {
        report.problem(at, unresolved("upstream", name, names.upstream_names));
    }
    names.upstreams.get(name).map(|upstream| Action::Upstream(Arc::clone(upstream)))
}

fn build_terminate(section: &section::Terminate, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Action> {
    let dials = section.tcp.is_some() || section.udp.is_some() || section.http.is_some();
    if let (Some(device), false) = (&section.tun, dials) {
        return Some(Action::Device(build_gateway(section, &device.0, at, report)));
    }
    let mut of_tun = |key: &str, written: bool| {
        if written && section.tun.is_none() {
            report.problem(format!("{at}.{key}"), format!("only tun has {key}; leave it out"));
        }
    };
    of_tun("address", !section.address.is_empty());
    of_tun("assign", !section.assign.is_empty());
    of_tun("assign-networks", section.assign_networks);
    of_tun("nat", section.nat);
    of_tun("inner", section.inner.is_some());
    let written: Vec<(TerminateKind, &Target)> =
        [(TerminateKind::Tcp, &section.tcp), (TerminateKind::Udp, &section.udp), (TerminateKind::Http, &section.http)]
            .into_iter()
            .filter_map(|(kind, target)| Some((kind, target.as_ref()?)))
            .collect();
    let ([(kind, target)], None) = (written.as_slice(), &section.tun) else {
        let message = match written.len() {
            0 => {
                "it does not say what to open; add exactly one of tcp, udp, http: authority or HOST:PORT, or tun: DEVICE"
            }
            _ => "a route opens one thing; keep one of tcp, udp, http, tun, and make a route of the other",
        };
        report.problem(at, message);
        return None;
    };
    if section.reach.is_some() && **target != Target::Authority {
        let message = format!("reach bounds what a request may name, and this goes to {target} only; leave it out");
        report.problem(format!("{at}.reach"), message);
    }
    if section.proxy_protocol.is_some() && *kind != TerminateKind::Tcp {
        let message = "only tcp connections begin with a PROXY protocol header; leave it out";
        report.problem(format!("{at}.proxy-protocol"), message);
    }
    let ca = section.tls.as_ref().and_then(|tls| tls.ca.as_ref());
    let terminate = Terminate {
        kind: *kind,
        target: (*target).clone(),
        reach: section.reach.unwrap_or(Reach::Public),
        guard: section.guard,
        proxy_protocol: section.proxy_protocol.is_some(),
        origin_ca: names.context.optional_file(&format!("{at}.tls.ca"), ca, report),
    };
    if section.tls.is_some() && !terminate.speaks_tls() {
        let message = "tls verifies origins that https requests name, by http: authority; leave it out, or make an \
                       upstream with tls of a fixed origin";
        report.problem(format!("{at}.tls"), message);
    }
    Some(Action::Terminate(terminate))
}

fn build_gateway(section: &section::Terminate, device: &Arc<str>, at: &str, report: &mut Report) -> Gateway {
    for (key, written) in [
        ("reach", section.reach.is_some()),
        ("guard", section.guard),
        ("proxy-protocol", section.proxy_protocol.is_some()),
        ("tls", section.tls.is_some()),
    ] {
        if written {
            report.problem(format!("{at}.{key}"), format!("packets for a device have no {key}; leave it out"));
        }
    }
    if section.assign.is_empty() {
        let message = "clients may have any private address that they ask for, even one that this machine reaches by its \
                       default route; write the prefixes that are theirs";
        report.warning(format!("{at}.assign"), message);
    }
    if section.assign_networks && section.assign.is_empty() {
        let message = "there is nothing that a client could have a network of; write `assign`, or leave this out";
        report.problem(format!("{at}.assign-networks"), message);
    }
    Gateway {
        device: device.clone(),
        addresses: section.address.iter().map(|address| address.0).collect(),
        assign: section.assign.iter().map(|prefix| prefix.0).collect(),
        assign_networks: section.assign_networks,
        nat: section.nat,
        inner: section.inner.map(|inner| inner.0),
    }
}

fn build_respond(section: &section::Respond, at: &str, report: &mut Report) -> Option<Respond> {
    let headers = header::fixed(&format!("{at}.headers"), &section.headers, report);
    let status = StatusCode::from_u16(section.status).ok().filter(|status| (200..600).contains(&status.as_u16()));
    if status.is_none() {
        let message = format!("{} is no final status; write 200 to 599", section.status);
        report.problem(format!("{at}.status"), message);
    }
    // RFC 9110, 15.3.5, 15.3.6 and 15.4.5.
    if matches!(section.status, 204 | 205 | 304) && !section.body.is_empty() {
        let message = format!("{} has no body; leave body out, or write another status", section.status);
        report.problem(format!("{at}.body"), message);
    }
    if section.body.len() > MAX_BODY {
        report.problem(format!("{at}.body"), format!("the body has {} bytes; at most {MAX_BODY}", section.body.len()));
    }
    Some(Respond { status: status?, headers, body: section.body.as_bytes().into() })
}

fn build_redirect(section: &section::Redirect, at: &str, report: &mut Report) -> Option<Redirect> {
    let status =
        StatusCode::from_u16(section.status).ok().filter(|_| matches!(section.status, 301 | 302 | 303 | 307 | 308));
    if status.is_none() {
        let message = format!("{} is no redirection; write 301, 302, 303, 307 or 308", section.status);
        report.problem(format!("{at}.status"), message);
    }
    let illegal = |text: &str| text.bytes().any(|b| !b.is_ascii_graphic() || b"\"<>\\^`{|}".contains(&b));
    let text = section.location.to_string();
    if text.is_empty() || section.location.literals().any(illegal) {
        let message = format!("{text:?} is no URI; write one such as \"https://NEW{{path-and-query}}\"");
        report.problem(format!("{at}.location"), message);
    }
    Some(Redirect { status: status?, location: section.location.clone() })
}

/// The kinds that the match names must all be carried; where it names none, `decide` denies the others.
fn fitting_kinds(matcher: &Matcher, action: &Action, at: &str, report: &mut Report) {
    let misfits: Vec<Kind> = matcher.kinds.iter().copied().filter(|kind| !action.carries(*kind)).collect();
    if misfits.is_empty() {
        return;
    }
    let (key, message) = match action {
        Action::Upstream(upstream) => (
            "upstream",
            format!("upstream {} has protocol {}, which carries tcp only", upstream.name, upstream.protocol),
        ),
        Action::Terminate(terminate) => ("terminate", format!("terminate.{0} is for {0} sessions", terminate.kind)),
        Action::Respond(respond) => (
            "respond",
            format!("a tunnel cannot be answered with {}, only with an error (400 to 599)", respond.status.as_u16()),
        ),
        Action::Device(gateway) => ("terminate", format!("device {} takes ip sessions alone", gateway.device)),
        Action::Redirect(_) => ("redirect", "only http sessions can be redirected".to_owned()),
    };
    let message = format!("{message}, and the match wants {}; change kind or the action", list(&misfits));
    report.problem(format!("{at}.{key}"), message);
}

/// What is written and has no effect.
fn fitting_policies(section: &section::Route, matcher: &Matcher, action: &Action, at: &str, report: &mut Report) {
    let answered = matches!(action, Action::Respond(_) | Action::Redirect(_));
    let tunnel = match action {
        Action::Terminate(terminate) => terminate.kind != TerminateKind::Http,
        action => matches!(action, Action::Device(_)),
    };
    if section.retry.is_some() && answered {
        report.warning(format!("{at}.retry"), "nothing is tried again where the node answers by itself; leave it out");
    }
    if section.custody.is_some() {
        custody(action, &format!("{at}.custody"), report);
        if !matcher.kinds.is_empty() && matcher.kinds.iter().all(|kind| kind.is_datagrams()) {
            let message = "datagrams are not kept for later; leave it out, or let the route match http or tcp";
            report.warning(format!("{at}.custody"), message);
        }
    }
    let keeps = matches!(action, Action::Upstream(_) | Action::Terminate(Terminate { kind: TerminateKind::Http, .. }));
    if section.cache.is_some() && !keeps {
        let message =
            "there are no answers of others to keep; leave it out, or name an upstream or terminate: {http: ...}";
        report.problem(format!("{at}.cache"), message);
    }
    if section.pace.is_some() {
        pace(section, action, &format!("{at}.pace"), report);
    }
    if section.retrieve.is_some() && !keeps {
        let message = "there is nobody to ask again; leave it out, or name an upstream or terminate: {http: ...}";
        report.problem(format!("{at}.retrieve"), message);
    } else if section.retrieve.is_some() && section.custody.is_some() {
        let message = "what is in custody is brought by the nodes that have it; keep one of them";
        report.problem(format!("{at}.retrieve"), message);
    }
    if section.idempotency_key && !keeps {
        let message = "nothing is sent twice where no request is sent on; leave it out";
        report.warning(format!("{at}.idempotency-key"), message);
    }
    if section.rewrite.is_some() && (answered || tunnel) {
        report.warning(format!("{at}.rewrite"), "nothing is sent on that could be rewritten; leave it out");
    }
}

/// The one behind has to be a node that can be dialled, over a version that takes tunnels of any protocol.
fn custody(action: &Action, at: &str, report: &mut Report) {
    let Action::Upstream(upstream) = action else {
        return report.problem(at, "the next node takes custody; name it as the upstream, or leave this out");
    };
    let (name, protocol) = (&upstream.name, upstream.protocol);
    if !matches!(protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3) {
        let message = format!("upstream {name} has protocol {protocol}; custody goes over h2 or h3, from node to node");
        report.problem(at, message);
    }
    if upstream.overlay == Some(false) {
        report.problem(at, format!("upstream {name} is no node of the overlay: nobody there takes custody"));
    }
    if upstream.all().any(|endpoint| matches!(endpoint, Endpoint::Node(_))) {
        let message = format!("upstream {name} has a node that cannot be dialled; custody goes to addresses");
        report.problem(at, message);
    }
}

/// There has to be a service that may refuse, and whose refusals come by here.
fn pace(section: &section::Route, action: &Action, at: &str, report: &mut Report) {
    if !matches!(action, Action::Upstream(_)) {
        report.problem(at, "the rate is that of an upstream; name one as the action, or leave this out");
    } else if section.custody.is_some() {
        report.problem(at, "what is in custody goes when a link is up, not when a service has room; keep one of them");
    }
}

fn on_change(section: &section::Route, matcher: &Matcher, at: &str, report: &mut Report) {
    let movable = !matcher.kinds.is_empty() && matcher.kinds.iter().all(|kind| matches!(kind, Kind::Udp | Kind::Ip));
    if section.on_change == OnChange::Move && !movable {
        report.problem(
            format!("{at}.on-change"),
            "udp flows can move and byte streams cannot; add kind: udp to the match, or leave on-change out (ip sessions always move)",
        );
    }
}
