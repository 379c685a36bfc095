//! Finds routes that no session reaches, since an earlier one matches all of theirs.
//!
//! Comparing every pair would take 50 million steps for 10,000 routes. So each route is filed
//! under the values of one field of its match, and a later one looks only where a wider one could
//! lie: under its own value and all that hold it.

use std::collections::HashMap;
use std::sync::Arc;

use super::report::Report;
use crate::matcher::Matcher;
use crate::pattern::{HostPattern, UserPattern, ValuePattern};
use crate::snapshot::Route;

/// A route that is told from the others by nothing is compared with this many at most: a warning
/// is worth no more.
const COMPARED: usize = 1000;

/// Warns of each route that an earlier one covers.
pub(super) fn unreachable_routes(routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let mut counts: HashMap<String, usize> = HashMap::new();
    for label in routes.iter().flat_map(|(_, route)| fields(&route.matcher)).flatten() {
        *counts.entry(label).or_default() += 1;
    }
    let mut filed: HashMap<String, Vec<usize>> = HashMap::new();
    for (position, (at, route)) in routes.iter().enumerate() {
        let candidates = wider(&route.matcher).into_iter().filter_map(|label| filed.get(&label)).flatten();
        let covers = |earlier: &&usize| routes[**earlier].1.matcher.covers(&route.matcher);
        let shadow = candidates.take(COMPARED).filter(covers).min();
        if let Some((earlier, by)) = shadow.map(|position| &routes[*position]) {
            report.warning(
                format!("routes[{at}]"),
                format!(
                    "no session reaches it, since routes[{earlier}] ({}) matches all that it does; \
                     put it before that one, or leave it out",
                    by.name
                ),
            );
        } else {
            // A covered route covers nothing that its coverer does not.
            for label in labels(&route.matcher, &counts) {
                filed.entry(label).or_default().push(position);
            }
        }
    }
}

/// Where a route is filed: under every value of the field whose values the fewest routes have.
fn labels(matcher: &Matcher, counts: &HashMap<String, usize>) -> Vec<String> {
    let fullest = |labels: &Vec<String>| labels.iter().filter_map(|label| counts.get(label)).max().copied();
    fields(matcher).min_by_key(fullest).unwrap_or_else(|| vec!["any".to_owned()])
}

/// The labels of each field. A field counts only where each of its values has one.
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

/// Under which labels a route may lie that covers this one. A wider route holds each value of
/// this one, so that the first value of each field is enough to find it.
fn wider(matcher: &Matcher) -> Vec<String> {
    let mut found = vec!["any".to_owned()];
    match matcher.authorities.first().map(|pattern| &pattern.host) {
        Some(HostPattern::Exact(host)) => {
            found.push(format!("host {host}"));
            found.extend(suffixes(host).map(|suffix| format!("suffix {suffix}")));
        }
        // With its own dot the suffix is among those of itself.
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
