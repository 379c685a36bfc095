//! The match of a route: a conjunction of conditions on request attributes.
//!
//! In: the parsed `match` section. Out: whether a request satisfies it, or the first condition that fails.
//! Never: an allocation during a test.

use std::fmt;
use std::sync::Arc;

use http::{HeaderName, Method};
use ipnet::IpNet;

use crate::facts::{Facts, Kind};
use crate::pattern::{AuthorityPattern, HostPattern, PathPattern, UserPattern, ValuePattern};

/// A conjunction of conditions. An empty list matches anything; otherwise one entry must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matcher {
    /// Listener names.
    pub listeners: Vec<Arc<str>>,
    /// Session kinds.
    pub kinds: Vec<Kind>,
    /// Patterns for the target's authority.
    pub authorities: Vec<AuthorityPattern>,
    /// Patterns for the path without the query.
    pub paths: Vec<PathPattern>,
    /// Methods; case-sensitive.
    pub methods: Vec<Method>,
    /// For each field name, one line of the field must match one of the patterns.
    pub headers: Vec<(HeaderName, Vec<ValuePattern>)>,
    /// Patterns for the user.
    pub users: Vec<UserPattern>,
    /// Networks; one must contain the whole destination network.
    pub networks: Vec<IpNet>,
    /// A network announced by a peer satisfies [`Matcher::networks`] as well. The action then restricts the session to
    /// these networks.
    pub accepts_announced_network: bool,
    /// IP protocol numbers.
    pub protocols: Vec<u8>,
    /// Ports of the authority, explicit or implied by the scheme.
    pub ports: Vec<u16>,
}

/// A condition of a match; `Header` carries the position in [`Matcher::headers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// `kind`
    Kind,
    /// `listener`
    Listener,
    /// `authority`
    Authority,
    /// `port`
    Port,
    /// `path`
    Path,
    /// `method`
    Method,
    /// `user`
    User,
    /// `network`
    Network,
    /// `protocol`
    Protocol,
    /// `headers.NAME`
    Header(usize),
}

fn any_of<T>(list: &[T], holds: impl FnMut(&T) -> bool) -> bool {
    list.is_empty() || list.iter().any(holds)
}

/// True if every entry of `narrow` lies within an entry of `wide`; an empty list matches everything.
fn covers<T>(wide: &[T], narrow: &[T], one: impl Fn(&T, &T) -> bool) -> bool {
    wide.is_empty() || (!narrow.is_empty() && narrow.iter().all(|n| wide.iter().any(|w| one(w, n))))
}

impl Matcher {
    /// True if the request satisfies every condition. `path` is one reading of its path.
    pub(crate) fn matches(&self, facts: &Facts, path: &str) -> bool {
        self.failing(facts, path).is_none()
    }

    /// The first condition that fails; cheap conditions are tested first.
    pub(crate) fn failing(&self, facts: &Facts, path: &str) -> Option<Condition> {
        let user = facts.user.as_deref();
        if !any_of(&self.kinds, |kind| *kind == facts.kind) {
            Some(Condition::Kind)
        } else if !any_of(&self.authorities, |pattern| pattern.matches(&facts.authority)) {
            Some(Condition::Authority)
        } else if !any_of(&self.ports, |port| facts.authority.port() == Some(*port)) {
            Some(Condition::Port)
        } else if !any_of(&self.users, |pattern| pattern.matches(user)) {
            Some(Condition::User)
        } else if !any_of(&self.paths, |pattern| pattern.matches(path)) {
            Some(Condition::Path)
        } else if !any_of(&self.listeners, |name| *name == facts.listener) {
            Some(Condition::Listener)
        } else if !any_of(&self.methods, |method| *method == facts.method) {
            Some(Condition::Method)
        } else if !any_of(&self.networks, |net| self.network_of(facts).is_some_and(|to| net.contains(&to))) {
            Some(Condition::Network)
        } else if !any_of(&self.protocols, |protocol| facts.protocol == Some(*protocol)) {
            Some(Condition::Protocol)
        } else {
            self.headers.iter().position(|header| !header_holds(header, facts)).map(Condition::Header)
        }
    }

    /// The destination network to test.
    fn network_of(&self, facts: &Facts) -> Option<IpNet> {
        facts.network.or(facts.announced_network.filter(|_| self.accepts_announced_network))
    }

    /// True if this match covers every session that `other` matches. May return false for a match that does.
    pub fn covers(&self, other: &Matcher) -> bool {
        covers(&self.kinds, &other.kinds, PartialEq::eq)
            && covers(&self.authorities, &other.authorities, AuthorityPattern::covers)
            && covers(&self.ports, &other.ports, PartialEq::eq)
            && covers(&self.users, &other.users, UserPattern::covers)
            && covers(&self.paths, &other.paths, PathPattern::covers)
            && covers(&self.listeners, &other.listeners, PartialEq::eq)
            && covers(&self.methods, &other.methods, PartialEq::eq)
            && covers(&self.networks, &other.networks, |wide, narrow| wide.contains(narrow))
            && (self.networks.is_empty() || self.accepts_announced_network || !other.accepts_announced_network)
            && covers(&self.protocols, &other.protocols, PartialEq::eq)
            && self.headers.iter().all(|(name, values)| {
                other.headers.iter().any(|(n, narrow)| n == name && covers(values, narrow, ValuePattern::covers))
            })
    }

    /// True if the client chooses the target host: no authority pattern, or one with a wildcard host.
    pub fn admits_unnamed_hosts(&self) -> bool {
        any_of(&self.authorities, |pattern| !matches!(pattern.host, HostPattern::Exact(_)))
    }

    /// The kinds that can match; all kinds if the match names none.
    pub fn kinds(&self) -> &[Kind] {
        if self.kinds.is_empty() { &Kind::ALL } else { &self.kinds }
    }
}

fn header_holds((name, values): &(HeaderName, Vec<ValuePattern>), facts: &Facts) -> bool {
    facts.headers.get_all(name).iter().any(|line| values.iter().any(|value| value.matches(line)))
}

/// Formats `[a, b]`, or `a` if there is only one.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    match items {
        [one] => one.to_string(),
        many => format!("[{}]", many.iter().map(T::to_string).collect::<Vec<_>>().join(", ")),
    }
}
