//! Checks an upstream.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::context::Context;
use super::header;
use super::node::{duration, node_name};
use super::report::Report;
use crate::authority::Authority;
use crate::document::upstream as section;
use crate::pattern::PathPattern;
use crate::snapshot::{Balance, Contact, Endpoint, Health, Outlier, Upstream, UpstreamProtocol, UpstreamTls};

const MAX_ENDPOINTS: usize = 10_000;

/// Builds an upstream; `None` if an essential part is missing.
pub(super) fn build(
    section: &section::Upstream,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<Upstream> {
    let (endpoints, backup) = (endpoints(section, at, report), backup(section, at, report));
    let all = || endpoints.iter().chain(&backup);
    if all().any(|endpoint| endpoint.node().is_some()) {
        check_reverse_keys(section, all().all(|endpoint| endpoint.node().is_some()), at, report);
    }
    check_keys(section, at, report);
    let hosts: Vec<_> = all().filter_map(Endpoint::host).collect();
    let tls = section.tls.as_ref().map(|tls| build_tls(tls, &hosts, &format!("{at}.tls"), context, report));
    Some(Upstream {
        name: Arc::from(section.name.as_str()),
        protocol: section.protocol,
        balance: balance(section, at, report)?,
        health: section.health.as_ref().map(|health| build_health(section, health, &format!("{at}.health"), report)),
        outlier: outlier(section.outlier, &format!("{at}.outlier"), report),
        tunnel_method: section.tunnel_method,
        tls,
        proxy_protocol: section.proxy_protocol.is_some(),
        overlay: section.overlay,
        forward_proxy: section.forward_proxy,
        congestion: section.congestion.as_ref().map(|name| name.0.clone()),
        contact_plan: section.contact_plan.map(|plan| build_contact(plan, &format!("{at}.contact-plan"), report)),
        endpoints,
        backup,
    })
}

fn endpoints(section: &section::Upstream, at: &str, report: &mut Report) -> Vec<Endpoint> {
    let short = !section.node.is_empty();
    if short && !section.endpoints.is_empty() {
        let message = "node is the short form of endpoints: [{node: NAME}]; keep one of them";
        report.problem(format!("{at}.node"), message);
    }
    let at = format!("{at}.{}", if short { "node" } else { "endpoints" });
    let written: Vec<section::Endpoint> =
        section.endpoints.iter().cloned().chain(section.node.iter().cloned().map(section::Endpoint::Node)).collect();
    if written.is_empty() {
        report.problem(&at, "missing endpoints; add a list of HOST:PORT");
    }
    let mut seen = HashSet::new();
    for (index, endpoint) in written.iter().enumerate().filter(|(_, endpoint)| !seen.insert(*endpoint)) {
        let message = format!("duplicate endpoint {endpoint} gets twice its share; keep one");
        report.warning(format!("{at}[{index}]"), message);
    }
    list(&written, &at, report)
}

fn backup(section: &section::Upstream, at: &str, report: &mut Report) -> Vec<Endpoint> {
    let at = format!("{at}.backup");
    let nodes = section.node.iter().cloned().map(section::Endpoint::Node);
    let mut seen: HashSet<section::Endpoint> = section.endpoints.iter().cloned().chain(nodes).collect();
    for (index, endpoint) in section.backup.iter().enumerate().filter(|(_, endpoint)| !seen.insert((*endpoint).clone()))
    {
        let message = format!("duplicate endpoint {endpoint}; keep one");
        report.problem(format!("{at}[{index}]"), message);
    }
    list(&section.backup.0, &at, report)
}

fn list(written: &[section::Endpoint], at: &str, report: &mut Report) -> Vec<Endpoint> {
    if written.len() > MAX_ENDPOINTS {
        report.problem(at, format!("too many endpoints: {}; the maximum is {MAX_ENDPOINTS}", written.len()));
    }
    let endpoint = |(index, written): (usize, &section::Endpoint)| match written {
        section::Endpoint::Address(address) => Some(Endpoint::Address(address.clone())),
        section::Endpoint::Node(node) => {
            report.ok_or_report(|| format!("{at}[{index}]"), node_name(node)).map(Endpoint::Node)
        }
    };
    written.iter().enumerate().filter_map(endpoint).collect()
}

fn build_contact(section: section::Contact, at: &str, report: &mut Report) -> Contact {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let every = duration(&format!("{at}.every"), Some(section.every), DAY, Contact::MIN_PERIOD..=7 * DAY, report);
    let max = every.saturating_sub(Duration::from_millis(1));
    let from = duration(&format!("{at}.from"), section.from, Duration::ZERO, Duration::ZERO..=max, report);
    Contact { every, from }
}

/// Reports keys that conflict with nodes on reverse connections, which the nodes open. `are_all`: there are no other
/// endpoints.
fn check_reverse_keys(section: &section::Upstream, are_all: bool, at: &str, report: &mut Report) {
    let mut no = |key: &str, written: bool, message: &str| {
        if written {
            report.problem(format!("{at}.{key}"), message);
        }
    };
    no(
        "protocol",
        matches!(section.protocol, UpstreamProtocol::H1 | UpstreamProtocol::Tcp),
        "reverse connections require h2 or h3; use either, since the node chooses",
    );
    no(
        "tls",
        section.tls.is_some() && are_all,
        "reverse connections use the tls of the listener, which authenticates the node; remove tls",
    );
    no("contact-plan", section.contact_plan.is_some(), "contact-plan belongs to the node that dials; move it there");
    no("forward-proxy", section.forward_proxy, "the endpoint is a node; remove forward-proxy");
    no("overlay", section.overlay == Some(false), "the endpoint is an authenticated node; remove overlay");
}

/// Reports keys that the protocol does not have.
fn check_keys(section: &section::Upstream, at: &str, report: &mut Report) {
    let protocol = section.protocol;
    let tcp = protocol == UpstreamProtocol::Tcp;
    let mut only = |key: &str, written: bool, message: &str| {
        if written {
            report.problem(format!("{at}.{key}"), message);
        }
    };
    let posts = section.tunnel_method != Default::default();
    only("tunnel-method", posts && tcp, "a tcp upstream gets no requests; remove tunnel-method");
    only(
        "overlay",
        section.overlay == Some(true) && tcp,
        "a tcp upstream gets no headers, so it cannot be a node; remove overlay",
    );
    let quic = protocol == UpstreamProtocol::H3;
    only("congestion", section.congestion.is_some() && quic, "congestion is that of TCP, not of QUIC; remove it");
    only("forward-proxy", section.forward_proxy && tcp, "a tcp upstream gets no requests; remove forward-proxy");
    only(
        "forward-proxy",
        section.forward_proxy && section.overlay == Some(true),
        "forward-proxy conflicts with overlay: a node accepts requests for any origin; keep one of them",
    );
    let shares = matches!(protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3 | UpstreamProtocol::Auto);
    only(
        "proxy-protocol",
        section.proxy_protocol.is_some() && shares,
        "connections are shared between clients, so they have no single source; use protocol h1 or tcp, or remove it",
    );
    let makes_requests = matches!(protocol, UpstreamProtocol::H2 | UpstreamProtocol::H3);
    only(
        "contact-plan",
        section.contact_plan.is_some() && !makes_requests,
        "contact-plan only applies to custody, which requires h2 or h3; remove it",
    );
    let is_address = |one: &section::Endpoint| matches!(one, section::Endpoint::Address(_));
    let has_nodes = !section.node.is_empty() || !section.endpoints.iter().all(is_address);
    let dials = !has_nodes || section.endpoints.iter().chain(section.backup.iter()).any(is_address);
    only(
        "protocol",
        protocol == UpstreamProtocol::Auto && section.tls.is_none() && dials,
        "auto requires TLS for ALPN; add tls: {}, or use h1 or h2",
    );
    only(
        "protocol",
        protocol == UpstreamProtocol::H3 && section.tls.is_none() && dials,
        "h3 requires TLS; add tls: {} for a node of this overlay, or use h2",
    );
    if protocol == UpstreamProtocol::H2 && section.tls.is_none() && section.overlay.is_none() && dials {
        report.warning(
            format!("{at}.overlay"),
            "over plaintext h2 a node is only recognised by its SETTINGS; add overlay: true or overlay: false",
        );
    }
}

fn balance(section: &section::Upstream, at: &str, report: &mut Report) -> Option<Balance> {
    Some(match &section.balance {
        section::Balance::RoundRobin => Balance::RoundRobin,
        section::Balance::Random => Balance::Random,
        section::Balance::LeastRequest => Balance::LeastRequest,
        section::Balance::Hash(on) => {
            Balance::Hash(report.ok_or_report(|| format!("{at}.balance.hash.header"), header::name(&on.header))?)
        }
    })
}

fn build_health(upstream: &section::Upstream, section: &section::Health, at: &str, report: &mut Report) -> Health {
    let interval = duration(
        &format!("{at}.interval"),
        section.interval,
        Duration::from_secs(5),
        Duration::from_millis(100)..=Duration::from_secs(3600),
        report,
    );
    let default = Duration::from_secs(2).min(interval);
    let timeout =
        duration(&format!("{at}.timeout"), section.timeout, default, Duration::from_millis(10)..=interval, report);
    if let Some(path) = &section.path {
        if upstream.protocol == UpstreamProtocol::Tcp {
            report.problem(
                format!("{at}.path"),
                "a tcp upstream cannot answer a GET; remove path to probe by connecting",
            );
        } else if PathPattern::parse(path).is_err() && path.parse::<http::uri::PathAndQuery>().is_err()
            || !path.starts_with('/')
        {
            report.problem(format!("{at}.path"), format!("invalid path {path:?}; must begin with /, such as /healthz"));
        }
    }
    Health {
        path: section.path.clone(),
        interval,
        timeout,
        healthy: count(section.healthy, 2, &format!("{at}.healthy"), report),
        unhealthy: count(section.unhealthy, 3, &format!("{at}.unhealthy"), report),
    }
}

fn count(written: Option<u32>, default: u32, at: &str, report: &mut Report) -> u32 {
    let value = written.unwrap_or(default);
    if !(1..=1000).contains(&value) {
        report.problem(at, format!("{value} is out of range; must be 1 to 1000"));
    }
    value
}

fn outlier(section: section::Outlier, at: &str, report: &mut Report) -> Outlier {
    let failures = section.failures.unwrap_or(5);
    if failures > 1000 {
        report.problem(format!("{at}.failures"), format!("{failures} is out of range; must be 0 (off) to 1000"));
    }
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    Outlier {
        failures,
        ejection_time: duration(
            &format!("{at}.ejection-time"),
            section.ejection_time,
            Duration::from_secs(10),
            range,
            report,
        ),
    }
}

fn build_tls(
    section: &section::UpstreamTls,
    hosts: &[&Arc<str>],
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> UpstreamTls {
    let ca = context.optional_file(&format!("{at}.ca"), section.ca.as_ref(), report);
    if ca.is_none() && !context.has_identity {
        report.problem(at, "missing CA to verify the peer; add identity at the top of the document, or ca here");
    }
    if ca.is_some() && !section.node.is_empty() {
        let message = "with a separate ca the peer is not a node of this overlay; remove node or ca";
        report.problem(format!("{at}.node"), message);
    }
    if section.server_name.is_some() && !section.node.is_empty() {
        let message = "server-name conflicts with node: the peer is verified by one of them; keep one";
        report.problem(format!("{at}.server-name"), message);
    }
    let nodes =
        section.node.iter().filter_map(|name| report.ok_or_report(|| format!("{at}.node"), node_name(name))).collect();
    let server_name = match &section.server_name {
        Some(name) => report.ok_or_report(|| format!("{at}.server-name"), server_name(name)),
        None if ca.is_some() => shared_host(hosts, at, report),
        None => None,
    };
    UpstreamTls { server_name, nodes, ca, anonymous: section.anonymous }
}

fn server_name(text: &str) -> Result<Arc<str>, String> {
    match Authority::parse(text, None) {
        Ok(name) if name.explicit_port().is_none() && !name.host().contains('*') => Ok(Arc::from(name.host())),
        _ => Err(format!("invalid server name {text:?}; use a DNS name or an address, without a port")),
    }
}

/// A separate CA verifies the host of the endpoint, so all endpoints must have the same one.
fn shared_host(hosts: &[&Arc<str>], at: &str, report: &mut Report) -> Option<Arc<str>> {
    let first = *hosts.first()?;
    if hosts.iter().all(|host| *host == first) {
        return Some(first.clone());
    }
    let message = "the endpoints have different hosts, but a separate ca verifies a single name; add server-name";
    report.problem(format!("{at}.server-name"), message);
    None
}
