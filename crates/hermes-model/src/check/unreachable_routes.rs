//! Finds unreachable routes: an earlier route matches all of their sessions.
//!
//! Comparing every pair would take 50 million steps for 10,000 routes. Instead, each route is indexed under the values of
//! one field of its match. A later route is only compared with routes under its own value and under wider values.

use std::collections::HashMap;
use std::sync::Arc;

use super::report::Report;
use crate::matcher::Matcher;
use crate::pattern::{HostPattern, UserPattern, ValuePattern};
use crate::snapshot::Route;

/// Maximum number of comparisons for a route without a selective field, to bound the cost of a warning.
const MAX_COMPARISONS: usize = 1000;

/// Warns about each route that an earlier one covers.
pub(super) fn unreachable_routes(routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let mut counts: HashMap<String, usize> = HashMap::new();
    for label in routes.iter().flat_map(|(_, route)| fields(&route.matcher)).flatten() {
        *counts.entry(label).or_default() += 1;
    }
    let mut indexed: HashMap<String, Vec<usize>> = HashMap::new();
    for (position, (at, route)) in routes.iter().enumerate() {
        let candidates = wider(&route.matcher).into_iter().filter_map(|label| indexed.get(&label)).flatten();
        let covers = |earlier: &&usize| routes[**earlier].1.matcher.covers(&route.matcher);
        let covering = candidates.take(MAX_COMPARISONS).filter(covers).min();
        if let Some((earlier, by)) = covering.map(|position| &routes[*position]) {
            report.warning(
                format!("routes[{at}]"),
                format!(
                    "unreachable: routes[{earlier}] ({}) matches all of its sessions first; \
                     move it before that route, or remove it",
                    by.name
                ),
            );
        } else {
            // A covered route covers nothing that the covering route does not.
            for label in labels(&route.matcher, &counts) {
                indexed.entry(label).or_default().push(position);
            }
        }
    }
}

/// Labels of a route: every value of its most selective field.
fn labels(matcher: &Matcher, counts: &HashMap<String, usize>) -> Vec<String> {
    let fullest = |labels: &Vec<String>| labels.iter().filter_map(|label| counts.get(label)).max().copied();
    fields(matcher).min_by_key(fullest).unwrap_or_else(|| vec!["any".to_owned()])
}

/// Labels of each field. A field counts only if each of its values has a label.
fn fields(matcher: &Matcher) -> impl Iterator<Item = Vec<String>> {
    let hosts = matcher.authorities.iter().map(|pattern| match &pattern.host {
        HostPattern::Exact(host) => Some(format!("host {host}")),
        HostPattern::Suffix(suffix) => Some(format!("suffix {suffix}")),
        HostPattern::Any => None,
    });
    let paths = matcher.paths.iter().map(|pattern| match pattern.exact() {
        Some(path) => Some(format!("path {path}")),
        None => Some(format!("under {}", pattern.literal_prefix())),
    });
    let users = matcher.users.iter().map(|user| match user {
        UserPattern::Is(name) => Some(format!("user {name}")),
        UserPattern::Any => None,
    });
    let networks = matcher.networks.iter().map(|net| Some(format!("net {net}")));
    let listeners = matcher.listeners.iter().map(|name| Some(format!("listener {name}")));
    let mut fields: Vec<Option<Vec<String>>> =
        vec![hosts.collect(), paths.collect(), users.collect(), networks.collect(), listeners.collect()];
    fields.extend(matcher.headers.iter().map(|(name, values)| {
        let label = |value: &ValuePattern| match value {
            ValuePattern::Exact(value) => Some(format!("header {name} {value:?}")),
            _ => None,
        };
        values.iter().map(label).collect()
    }));
    fields.into_iter().flatten().filter(|labels| !labels.is_empty())
}

/// Labels of all routes that may cover this one. A wider route covers every value of each field, so the first value is
/// sufficient for the lookup.
fn wider(matcher: &Matcher) -> Vec<String> {
    let mut found = vec!["any".to_owned()];
    match matcher.authorities.first().map(|pattern| &pattern.host) {
        Some(HostPattern::Exact(host)) => {
            found.push(format!("host {host}"));
            found.extend(suffixes(host).map(|suffix| format!("suffix {suffix}")));
        }
        // The suffix includes its leading dot, so it is among its own suffixes.
        Some(HostPattern::Suffix(suffix)) => found.extend(suffixes(suffix).map(|suffix| format!("suffix {suffix}"))),
        Some(HostPattern::Any) | None => {}
    }
    if let Some(pattern) = matcher.paths.first() {
        found.extend(pattern.exact().map(|path| format!("path {path}")));
        let prefix = pattern.exact().unwrap_or(pattern.literal_prefix());
        found.push("under ".to_owned());
        found.extend(prefix.match_indices('/').map(|(slash, _)| format!("under {}", &prefix[..=slash])));
    }
    if let Some(UserPattern::Is(user)) = matcher.users.first() {
        found.push(format!("user {user}"));
    }
    for (name, values) in &matcher.headers {
        if let Some(ValuePattern::Exact(value)) = values.first() {
            found.push(format!("header {name} {value:?}"));
        }
    }
    if let Some(net) = matcher.networks.first() {
        let nets = (0..=net.prefix_len()).filter_map(|length| ipnet::IpNet::new(net.addr(), length).ok());
        found.extend(nets.map(|net| format!("net {}", net.trunc())));
    }
    found.extend(matcher.listeners.first().map(|name| format!("listener {name}")));
    found
}

fn suffixes(host: &str) -> impl Iterator<Item = &str> {
    host.match_indices('.').map(|(dot, _)| &host[dot..])
}
