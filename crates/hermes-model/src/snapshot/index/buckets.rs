//! Buckets: routes by the values of one field each, and the lookup of a request's values.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use foldhash::fast::FixedState;
use http::{HeaderName, HeaderValue};
use ipnet::IpNet;
use smallvec::{SmallVec, smallvec};

use super::Search;
use super::build::Key;
use crate::authority::Authority;
use crate::pattern::{HostPattern, PortPattern, SegmentPattern};

/// A fixed, fast hash is safe here: only the document inserts keys. Clients only look up, so they cannot cause
/// collisions.
pub(super) type Map<K, V> = HashMap<K, V, FixedState>;

/// Routes with one value of a field.
#[derive(Debug)]
pub(super) enum Bucket {
    /// Positions of routes, ascending.
    Routes(Vec<u32>),
    /// A nested index over other fields, because there are too many routes to test.
    Nested(Box<Buckets>),
}

impl Default for Bucket {
    fn default() -> Self {
        Bucket::Routes(Vec::new())
    }
}

impl Bucket {
    fn search(&self, search: &mut Search<'_>) {
        match self {
            Bucket::Routes(routes) => search.test(routes),
            Bucket::Nested(buckets) => buckets.search(search),
        }
    }
}

fn search_bucket<K: Hash + Eq + std::borrow::Borrow<Q>, Q: Hash + Eq + ?Sized>(
    map: &Map<K, Bucket>,
    key: &Q,
    search: &mut Search<'_>,
) {
    if let Some(bucket) = map.get(key) {
        bucket.search(search);
    }
}

/// Routes by field and value.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    hosts: Map<Arc<str>, Ports>,
    suffixes: Suffixes,
    any_host: Ports,
    ports: Map<u16, Bucket>,
    paths: PathTree,
    users: Map<Arc<str>, Bucket>,
    headers: Map<HeaderName, Map<HeaderValue, Bucket>>,
    networks: Networks,
    listeners: Map<Arc<str>, Bucket>,
    /// Routes that are always tested.
    pub(super) rest: Vec<u32>,
}

impl Buckets {
    /// Adds a bucket; `first` is the position of its first route.
    pub(super) fn insert(&mut self, key: Key, bucket: Bucket, first: u32) {
        match key {
            Key::Authority(HostPattern::Exact(host), port) => self.hosts.entry(host).or_default().insert(port, bucket),
            Key::Authority(HostPattern::Suffix(suffix), port) => self.suffixes.insert(suffix, port, bucket),
            Key::Authority(HostPattern::Any, port) => self.any_host.insert(port, bucket),
            Key::Port(port) => _ = self.ports.insert(port, bucket),
            Key::Path(pattern) => self.paths.insert(pattern, bucket, first),
            Key::User(user) => _ = self.users.insert(user, bucket),
            Key::Header(name, value) => _ = self.headers.entry(name).or_default().insert(value, bucket),
            Key::Network(net) => self.networks.insert(net, bucket),
            Key::Listener(name) => _ = self.listeners.insert(name, bucket),
        }
    }

    pub(super) fn search(&self, search: &mut Search<'_>) {
        let facts = search.facts;
        let host = facts.authority.host();
        if let Some(ports) = self.hosts.get(host) {
            ports.search(&facts.authority, search);
        }
        self.suffixes.search(host, search);
        self.any_host.search(&facts.authority, search);
        self.paths.search(search);
        if let Some(user) = &facts.user {
            search_bucket(&self.users, &**user, search);
        }
        self.search_headers(search);
        for network in facts.network.into_iter().chain(facts.announced_network) {
            self.networks.search(network, search);
        }
        if let (false, Some(port)) = (self.ports.is_empty(), facts.authority.port()) {
            search_bucket(&self.ports, &port, search);
        }
        search_bucket(&self.listeners, &*facts.listener, search);
        search.test(&self.rest);
    }

    /// Iterates over the shorter list: the field names that routes match, or the fields of the request.
    fn search_headers(&self, search: &mut Search<'_>) {
        let facts = search.facts;
        if self.headers.is_empty() {
            return;
        }
        if self.headers.len() <= facts.headers.len() {
            for (name, values) in &self.headers {
                for line in facts.headers.get_all(name) {
                    search_bucket(values, line, search);
                }
            }
        } else {
            for (name, line) in &facts.headers {
                if let Some(values) = self.headers.get(name) {
                    search_bucket(values, line, search);
                }
            }
        }
    }
}

/// Routes of one host, by port pattern.
#[derive(Debug, Default)]
struct Ports {
    default: Bucket,
    any: Bucket,
    exact: Map<u16, Bucket>,
}

impl Ports {
    fn insert(&mut self, port: PortPattern, bucket: Bucket) {
        match port {
            PortPattern::Default => self.default = bucket,
            PortPattern::Any => self.any = bucket,
            PortPattern::Exact(port) => _ = self.exact.insert(port, bucket),
        }
    }

    fn search(&self, authority: &Authority, search: &mut Search<'_>) {
        if let (false, Some(port)) = (self.exact.is_empty(), authority.port()) {
            search_bucket(&self.exact, &port, search);
        }
        if authority.has_default_port() {
            self.default.search(search);
        }
        self.any.search(search);
    }
}

/// Routes of `*.NAME`, by `.NAME`.
#[derive(Debug, Default)]
struct Suffixes {
    by_suffix: Map<Arc<str>, Ports>,
    /// Length of the shortest and of the longest suffix: no other length is looked up.
    lengths: Option<(usize, usize)>,
}

impl Suffixes {
    fn insert(&mut self, suffix: Arc<str>, port: PortPattern, bucket: Bucket) {
        let length = suffix.len();
        let (min_length, max_length) = self.lengths.unwrap_or((length, length));
        self.lengths = Some((min_length.min(length), max_length.max(length)));
        self.by_suffix.entry(suffix).or_default().insert(port, bucket);
    }

    fn search(&self, host: &str, search: &mut Search<'_>) {
        let Some((min_length, max_length)) = self.lengths else { return };
        // A host has at most 255 bytes, so there are at most 127 lookups. No host begins with a dot, so a label
        // precedes each suffix.
        let from = host.len().saturating_sub(max_length);
        let to = (host.len() + 1).saturating_sub(min_length);
        for at in (from..to).filter(|at| host.as_bytes()[*at] == b'.') {
            if let Some(ports) = self.by_suffix.get(&host[at..]) {
                ports.search(&search.facts.authority, search);
            }
        }
    }
}

/// Routes by path: a tree with a node for each segment. A lookup descends level by level and visits each node at most
/// once. Its cost depends on the segments that routes and path share, not on the length of the path or the number of
/// wildcards.
#[derive(Debug)]
struct PathTree {
    children: Map<Box<str>, PathTree>,
    /// Subtree of the wildcard, for any segment that is not empty.
    any: Option<Box<PathTree>>,
    /// Length of the longest segment of `children`: a longer one is not hashed.
    max_length: usize,
    /// Routes of exactly this path.
    exact: Bucket,
    /// Routes of paths that begin with this path, a `/` and a prefix of the next segment, which may be empty.
    under: SegmentPrefixes,
    /// First route of the subtree: once an earlier route matches, the subtree is skipped.
    first: u32,
}

impl Default for PathTree {
    fn default() -> Self {
        Self {
            children: Map::default(),
            any: None,
            max_length: 0,
            exact: Bucket::default(),
            under: SegmentPrefixes::default(),
            first: u32::MAX,
        }
    }
}

impl PathTree {
    fn insert(&mut self, pattern: SegmentPattern, bucket: Bucket, first: u32) {
        let mut node = self;
        node.first = node.first.min(first);
        for segment in pattern.segments {
            node = match segment {
                Some(text) => {
                    node.max_length = node.max_length.max(text.len());
                    node.children.entry(text).or_default()
                }
                None => node.any.get_or_insert_default(),
            };
            node.first = node.first.min(first);
        }
        match pattern.prefix {
            Some(beginning) => node.under.insert(beginning, bucket),
            None => node.exact = bucket,
        }
    }

    fn search(&self, search: &mut Search<'_>) {
        let path = search.path;
        let Some(mut rest) = path.strip_prefix('/').filter(|_| self.first != u32::MAX) else { return };
        let mut level: SmallVec<[&PathTree; 8]> = smallvec![self];
        while !level.is_empty() {
            let (segment, tail) = match rest.split_once('/') {
                Some((segment, tail)) => (segment, Some(tail)),
                None => (rest, None),
            };
            let mut next = SmallVec::new();
            for node in level {
                if node.first as usize >= search.best {
                    continue;
                }
                node.under.search(segment, search);
                let child = if segment.len() <= node.max_length { node.children.get(segment) } else { None };
                let any = node.any.as_deref().filter(|_| !segment.is_empty());
                for child in child.into_iter().chain(any) {
                    match tail {
                        Some(_) => next.push(child),
                        None if (child.first as usize) < search.best => child.exact.search(search),
                        None => {}
                    }
                }
            }
            let Some(tail) = tail else { return };
            (level, rest) = (next, tail);
            // Visit the earliest routes first: a match there skips the later ones.
            level.sort_unstable_by_key(|node: &&PathTree| node.first);
        }
    }
}

/// Routes by prefix of a segment.
#[derive(Debug, Default)]
struct SegmentPrefixes {
    /// Routes with an empty prefix.
    any: Bucket,
    by_text: Map<Box<str>, Bucket>,
    /// Lengths of the prefixes, ascending.
    lengths: Vec<usize>,
}

impl SegmentPrefixes {
    fn insert(&mut self, text: Box<str>, bucket: Bucket) {
        if text.is_empty() {
            self.any = bucket;
            return;
        }
        if let Err(at) = self.lengths.binary_search(&text.len()) {
            self.lengths.insert(at, text.len());
        }
        self.by_text.insert(text, bucket);
    }

    fn search(&self, segment: &str, search: &mut Search<'_>) {
        self.any.search(search);
        for beginning in self.lengths.iter().map_while(|length| segment.get(..*length)) {
            search_bucket(&self.by_text, beginning, search);
        }
    }
}

/// Routes by destination network.
#[derive(Debug, Default)]
struct Networks {
    by_net: Map<IpNet, Bucket>,
    /// Prefix lengths in use, ascending, of both IP versions.
    lengths: Vec<u8>,
}

impl Networks {
    fn insert(&mut self, net: IpNet, bucket: Bucket) {
        if let Err(at) = self.lengths.binary_search(&net.prefix_len()) {
            self.lengths.insert(at, net.prefix_len());
        }
        self.by_net.insert(net, bucket);
    }

    fn search(&self, network: IpNet, search: &mut Search<'_>) {
        for &length in self.lengths.iter().take_while(|length| **length <= network.prefix_len()) {
            if let Ok(net) = IpNet::new(network.addr(), length) {
                search_bucket(&self.by_net, &net.trunc(), search);
            }
        }
    }
}
