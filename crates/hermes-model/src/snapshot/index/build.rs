//! Builds the index: chooses for each route the field that tells it from the most others.

use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use ipnet::IpNet;

use super::buckets::{Bucket, Buckets, Map};
use crate::matcher::Matcher;
use crate::pattern::{HostPattern, PortPattern, Skeleton, UserPattern, ValuePattern};
use crate::snapshot::Route;

/// A bucket's label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Authority(HostPattern, PortPattern),
    Path(Skeleton),
    User(Arc<str>),
    Header(HeaderName, HeaderValue),
    Network(IpNet),
    Port(u16),
    Listener(Arc<str>),
}

/// A field that routes are filed by. Where two tell as much, the earlier one is taken: it is the
/// cheaper one to look up.
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

/// Walking up to this many candidates is as fast as opening one more bucket.
const FEW: usize = 8;

/// Fields have at most this many levels: six, and a second header. More would tell little apart.
const DEPTH: usize = 7;

/// A route to file: its position and its match.
type Filed<'a> = (u32, &'a Matcher);

/// Files all routes.
pub(super) fn buckets(routes: &[Arc<Route>]) -> Buckets {
    let filed: Vec<Filed<'_>> =
        routes.iter().enumerate().filter_map(|(at, route)| Some((u32::try_from(at).ok()?, &route.matcher))).collect();
    file(&filed, &mut Vec::new())
}

/// Files `routes` by the fields that are not `used` yet.
fn file(routes: &[Filed<'_>], used: &mut Vec<Used>) -> Buckets {
    let counts = count(routes, used);
    let mut buckets = Buckets::default();
    let mut groups: Map<Key, Vec<Filed<'_>>> = Map::default();
    for route in routes {
        match best_keys(route.1, used, &counts) {
            Some(keys) => keys.into_iter().for_each(|key| {
                let group = groups.entry(key).or_default();
                // A list may name one value twice.
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

/// A bucket for a group: nested where there are many routes, and another field tells them apart.
fn nest(key: &Key, group: &[Filed<'_>], of: usize, used: &mut Vec<Used>) -> Bucket {
    if group.len() > FEW && used.len() < DEPTH {
        used.push(Used::by(key));
        let tells = group.len() < of || group.iter().any(|route| fields(route.1, used).next().is_some());
        let nested = tells.then(|| file(group, used));
        used.pop();
        if let Some(nested) = nested.filter(|nested| nested.rest.len() < group.len()) {
            return Bucket::Nested(Box::new(nested));
        }
    }
    Bucket::Routes(group.iter().map(|route| route.0).collect())
}

/// A field that the way to this bucket went by. Headers are told by name: another one may
/// still tell routes apart.
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

/// Fields of a match that may be used here, with their keys.
fn fields<'m>(matcher: &'m Matcher, used: &'m [Used]) -> impl Iterator<Item = Vec<Key>> + 'm {
    let all = [Field::Authority, Field::Path, Field::User]
        .into_iter()
        .chain((0..matcher.headers.len()).map(Field::Header).chain([Field::Network, Field::Port, Field::Listener]));
    all.filter(move |field| !used.contains(&Used::of(*field, matcher))).filter_map(|field| keys(field, matcher))
}

/// How many routes would lie in each bucket, if every route lay in all of its buckets.
fn count(routes: &[Filed<'_>], used: &[Used]) -> Map<Key, u32> {
    let mut counts: Map<Key, u32> = Map::default();
    for route in routes {
        for key in fields(route.1, used).flatten() {
            *counts.entry(key).or_default() += 1;
        }
    }
    counts
}

/// The keys of the field whose fullest bucket is the emptiest.
fn best_keys(matcher: &Matcher, used: &[Used], counts: &Map<Key, u32>) -> Option<Vec<Key>> {
    fields(matcher, used).min_by_key(|keys| keys.iter().filter_map(|key| counts.get(key)).max().copied())
}

/// The keys of a field; `None` where it is absent, or where one of its values opens no bucket.
fn keys(field: Field, matcher: &Matcher) -> Option<Vec<Key>> {
    match field {
        Field::Authority => some(matcher.authorities.iter(), |p| Some(Key::Authority(p.host.clone(), p.port))),
        Field::Path => some(matcher.paths.iter(), |pattern| pattern.skeleton().filter(Skeleton::tells).map(Key::Path)),
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
