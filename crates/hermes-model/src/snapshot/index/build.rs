//! Builds the route index: chooses the most selective field for each route.

use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use ipnet::IpNet;

use super::buckets::{Bucket, Buckets, Map};
use crate::matcher::Matcher;
use crate::pattern::{HostPattern, PortPattern, SegmentPattern, UserPattern, ValuePattern};
use crate::snapshot::Route;

/// Key of a bucket: a field and its value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Authority(HostPattern, PortPattern),
    Path(SegmentPattern),
    User(Arc<str>),
    Header(HeaderName, HeaderValue),
    Network(IpNet),
    Port(u16),
    Listener(Arc<str>),
}

/// A field that routes may be filed under. If two fields are equally selective, the earlier one wins, because its lookup is
/// cheaper.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Authority,
    Path,
    User,
    Header(usize),
    Network,
    Port,
    Listener,
}

/// Testing up to this many candidates is as fast as another bucket lookup.
const MAX_FLAT_BUCKET: usize = 8;

/// Maximum nesting: six fields and a second header. Deeper levels would hardly be selective.
const MAX_DEPTH: usize = 7;

/// A route to index: its position and its match.
type IndexedRoute<'a> = (u32, &'a Matcher);

/// Indexes all routes.
pub(super) fn buckets(routes: &[Arc<Route>]) -> Buckets {
    let indexed: Vec<IndexedRoute<'_>> =
        routes.iter().enumerate().filter_map(|(at, route)| Some((u32::try_from(at).ok()?, &route.matcher))).collect();
    index(&indexed, &mut Vec::new())
}

/// Indexes `routes` by the fields that are not `used` yet.
fn index(routes: &[IndexedRoute<'_>], used: &mut Vec<Used>) -> Buckets {
    let counts = count(routes, used);
    let mut buckets = Buckets::default();
    let mut groups: Map<Key, Vec<IndexedRoute<'_>>> = Map::default();
    for route in routes {
        match best_keys(route.1, used, &counts) {
            Some(keys) => keys.into_iter().for_each(|key| {
                let group = groups.entry(key).or_default();
                // A list may contain one value twice.
                if group.last().map(|last| last.0) != Some(route.0) {
                    group.push(*route);
                }
            }),
            None => buckets.rest.push(route.0),
        }
    }
    for (key, group) in groups {
        let bucket = nest(&key, &group, routes.len(), used);
        let first = group.first().map_or(u32::MAX, |route| route.0);
        buckets.insert(key, bucket, first);
    }
    buckets
}

/// The bucket of a group: nested if it has many routes that another field separates.
fn nest(key: &Key, group: &[IndexedRoute<'_>], of: usize, used: &mut Vec<Used>) -> Bucket {
    if group.len() > MAX_FLAT_BUCKET && used.len() < MAX_DEPTH {
        used.push(Used::by(key));
        let is_selective = group.len() < of || group.iter().any(|route| fields(route.1, used).next().is_some());
        let nested = is_selective.then(|| index(group, used));
        used.pop();
        if let Some(nested) = nested.filter(|nested| nested.rest.len() < group.len()) {
            return Bucket::Nested(Box::new(nested));
        }
    }
    Bucket::Routes(group.iter().map(|route| route.0).collect())
}

/// A field that the buckets above already use. Headers are distinguished by name: another header may still be
/// selective.
#[derive(Clone, PartialEq, Eq)]
enum Used {
    Field(u8),
    Header(HeaderName),
}

impl Used {
    fn by(key: &Key) -> Self {
        match key {
            Key::Authority(..) => Used::Field(0),
            Key::Path(_) => Used::Field(1),
            Key::User(_) => Used::Field(2),
            Key::Network(_) => Used::Field(3),
            Key::Port(_) => Used::Field(4),
            Key::Listener(_) => Used::Field(5),
            Key::Header(name, _) => Used::Header(name.clone()),
        }
    }

    fn of(field: Field, matcher: &Matcher) -> Self {
        match field {
            Field::Authority => Used::Field(0),
            Field::Path => Used::Field(1),
            Field::User => Used::Field(2),
            Field::Network => Used::Field(3),
            Field::Port => Used::Field(4),
            Field::Listener => Used::Field(5),
            Field::Header(at) => Used::Header(matcher.headers[at].0.clone()),
        }
    }
}

/// Fields of a match that are not used yet, with their keys.
fn fields<'m>(matcher: &'m Matcher, used: &'m [Used]) -> impl Iterator<Item = Vec<Key>> + 'm {
    let all = [Field::Authority, Field::Path, Field::User]
        .into_iter()
        .chain((0..matcher.headers.len()).map(Field::Header).chain([Field::Network, Field::Port, Field::Listener]));
    all.filter(move |field| !used.contains(&Used::of(*field, matcher))).filter_map(|field| keys(field, matcher))
}

/// Number of routes that each bucket would hold if every route were in all of its buckets.
fn count(routes: &[IndexedRoute<'_>], used: &[Used]) -> Map<Key, u32> {
    let mut counts: Map<Key, u32> = Map::default();
    for route in routes {
        for key in fields(route.1, used).flatten() {
            *counts.entry(key).or_default() += 1;
        }
    }
    counts
}

/// The keys of the field whose fullest bucket holds the fewest routes.
fn best_keys(matcher: &Matcher, used: &[Used], counts: &Map<Key, u32>) -> Option<Vec<Key>> {
    fields(matcher, used).min_by_key(|keys| keys.iter().filter_map(|key| counts.get(key)).max().copied())
}

/// The keys of a field; `None` if the field is absent or one of its values has no bucket.
fn keys(field: Field, matcher: &Matcher) -> Option<Vec<Key>> {
    match field {
        Field::Authority => some(matcher.authorities.iter(), |p| Some(Key::Authority(p.host.clone(), p.port))),
        Field::Path => some(matcher.paths.iter(), |pattern| {
            pattern.segment_pattern().filter(SegmentPattern::is_selective).map(Key::Path)
        }),
        Field::User => some(matcher.users.iter(), |pattern| match pattern {
            UserPattern::Any => None,
            UserPattern::Is(name) => Some(Key::User(Arc::clone(name))),
        }),
        Field::Header(at) => {
            let (name, values) = matcher.headers.get(at)?;
            some(values.iter(), |value| match value {
                ValuePattern::Exact(value) => Some(Key::Header(name.clone(), value.clone())),
                _ => None,
            })
        }
        Field::Network => some(matcher.networks.iter(), |net| Some(Key::Network(net.trunc()))),
        Field::Port => some(matcher.ports.iter(), |port| Some(Key::Port(*port))),
        Field::Listener => some(matcher.listeners.iter(), |name| Some(Key::Listener(Arc::clone(name)))),
    }
}

fn some<T>(values: impl Iterator<Item = T>, key: impl Fn(T) -> Option<Key>) -> Option<Vec<Key>> {
    values.map(key).collect::<Option<Vec<_>>>().filter(|keys| !keys.is_empty())
}
