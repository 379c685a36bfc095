//! Upstreams of a snapshot: named sets of endpoints, and how one of them is chosen and spoken to.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;

use super::HostPort;

/// A named set of endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Upstream {
    /// Its name, unique in the document.
    pub name: Arc<str>,
    /// What is spoken to it.
    pub protocol: UpstreamProtocol,
    /// At least one.
    pub endpoints: Vec<Endpoint>,
    /// Used in this order, and only while none of these is up.
    pub backup: Vec<Endpoint>,
    /// How one of them is chosen.
    pub balance: Balance,
    /// Active probing; `None` is none.
    pub health: Option<Health>,
    /// Passive watching.
    pub outlier: Outlier,
    /// How TCP is carried over HTTP.
    pub tunnel_method: TunnelMethod,
    /// TLS; `None` is plaintext (h2 by prior knowledge).
    pub tls: Option<UpstreamTls>,
    /// Begin each connection with a PROXY protocol v2 header (`h1` and `tcp` only: the
    /// connection is then not shared).
    pub proxy_protocol: bool,
    /// Whether the far end is a node, which is sent the overlay's headers. `None`: a node where
    /// the connection proved it (`identity` TLS), or plaintext h2 that offers extended CONNECT.
    pub overlay: Option<bool>,
    /// The upstream is a forward proxy: requests name their origin in absolute form, and may carry credentials for the
    /// proxy.
    pub forward_proxy: bool,
    /// When the link to it comes; `None` is found out.
    pub contact: Option<Contact>,
}

impl Upstream {
    /// Its endpoints, and behind them those that are there for when none of them is up.
    pub fn all(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.iter().chain(&self.backup)
    }

    /// Whether what is at one of its endpoints may stay there by another document's: the same endpoints, reached and proven in the
    /// same way. What else they are called, who stands in for them, and how they are watched, matters to what is new.
    pub fn leads_as(&self, other: &Self) -> bool {
        let how = |upstream: &Self| {
            (
                upstream.protocol,
                upstream.tunnel_method,
                upstream.proxy_protocol,
                upstream.overlay,
                upstream.forward_proxy,
                upstream.contact,
            )
        };
        let proves = match (&self.tls, &other.tls) {
            (Some(own), Some(others)) => own.proves_as(others, self.endpoints.len()),
            (own, others) => own == others,
        };
        self.endpoints == other.endpoints && self.balance == other.balance && how(self) == how(other) && proves
    }
}

/// A link that comes in order: `from` after each period has begun, of which the first began with 1970 (UTC).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The period, at least [`Contact::SHORTEST`].
    pub every: Duration,
    /// Less than a period.
    pub from: Duration,
}

impl Contact {
    /// What comes more often has no order that is of use: whoever tries does so more often.
    pub const SHORTEST: Duration = Duration::from_millis(300);

    /// How long until it comes. `now`: since 1970.
    pub fn wait(&self, now: Duration) -> Duration {
        let into = now.as_nanos() % self.every.as_nanos();
        let from = self.from.as_nanos();
        let wait = if into < from { from - into } else { from + self.every.as_nanos() - into };
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

/// One place that an upstream's sessions may go to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// It is dialled.
    Address(HostPort),
    /// This node, over a connection that it keeps to us.
    Node(Arc<str>),
}

impl Endpoint {
    /// The host that is dialled.
    pub fn host(&self) -> Option<&Arc<str>> {
        match self {
            Endpoint::Address(address) => Some(&address.host),
            Endpoint::Node(_) => None,
        }
    }

    /// The node that dials.
    pub fn node(&self) -> Option<&Arc<str>> {
        match self {
            Endpoint::Address(_) => None,
            Endpoint::Node(node) => Some(node),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Address(address) => address.fmt(f),
            Endpoint::Node(node) => write!(f, "node {node}"),
        }
    }
}

/// What is spoken to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    H1,
    /// HTTP/2.
    H2,
    /// HTTP/3 (TLS only).
    H3,
    /// Bytes: only for `tcp` sessions.
    Tcp,
    /// What ALPN settles on (TLS only).
    Auto,
}

/// How an endpoint is chosen among the healthy ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Balance {
    /// In turn.
    RoundRobin,
    /// By chance.
    Random,
    /// Of two drawn by chance, the one with fewer requests under way.
    LeastRequest,
    /// Rendezvous hash of a header's value; without the header, by source address.
    Hash(HeaderName),
}

/// Active health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Path of a GET that must answer 2xx; `None` only connects.
    pub path: Option<String>,
    /// Time between probes of an endpoint; jittered.
    pub interval: Duration,
    /// How long one probe may take.
    pub timeout: Duration,
    /// Successes in a row that make it healthy.
    pub healthy: u32,
    /// Failures in a row that make it unhealthy.
    pub unhealthy: u32,
}

/// Passive health: an endpoint that fails its sessions rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlier {
    /// Failures in a row (connect failure, reset, 502 to 504) before it rests; 0 is off. Default 5.
    pub failures: u32,
    /// The first rest; doubles with each further one, up to 10 times. Default 10 s.
    pub rest: Duration,
}

/// How TCP is carried over h1, h2 or h3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TunnelMethod {
    /// CONNECT.
    #[default]
    Connect,
    /// POST: the request's body is one direction, the response's the other.
    Post,
}

impl UpstreamTls {
    /// Whether so many endpoints prove themselves to both in the same way: names of whoever stands in for them are beside theirs.
    fn proves_as(&self, other: &Self, endpoints: usize) -> bool {
        let common = || self.nodes.iter().filter(|node| other.nodes.contains(node)).count();
        (&self.server_name, &self.ca, self.anonymous) == (&other.server_name, &other.ca, other.anonymous)
            && (self.nodes == other.nodes || common() >= endpoints)
    }
}

/// TLS towards an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// Name to ask for and to verify (DNS SAN). `None`: a node of the overlay is verified by its
    /// URI SAN instead.
    pub server_name: Option<Arc<str>>,
    /// Nodes that the far end may be, by URI SAN. Empty: any node of the overlay.
    pub nodes: Vec<Arc<str>>,
    /// CA file other than `identity`'s. The far end is then no node of this overlay.
    pub ca: Option<PathBuf>,
    /// Show no certificate of ours.
    pub anonymous: bool,
}

#[cfg(test)]
mod tests {
    use crate::test_fixtures::snapshot;

    /// Of a session that lasts: whether it may stay where it is.
    #[test]
    fn who_stands_in_changes_nothing_for_who_is_there() {
        let upstream = |text: &str| {
            let document = format!(
                "{{node: a, identity: {{cert: a.pem, key: a.key, ca: ca.pem}}, routes: [{{name: r, upstream: u}}], \
                 upstreams: [{{name: u, protocol: h2, {text}}}]}}"
            );
            snapshot(&document).upstreams[0].clone()
        };
        let before = upstream("endpoints: ['b:1', 'c:1'], backup: 'd:1', tls: {node: [b, c, d]}");
        for (text, stays) in [
            ("endpoints: ['b:1', 'c:1'], tls: {node: [b, c]}", true),
            ("endpoints: ['b:1', 'c:1'], backup: ['e:1', 'f:1'], health: {}, tls: {node: [b, c, e, f]}", true),
            ("endpoints: ['b:1', 'c:1'], tls: {node: [b, x]}", false),
            ("endpoints: ['b:1', 'c:1'], tls: {}", false),
            ("endpoints: ['b:1', 'd:1'], backup: 'c:1', tls: {node: [b, c, d]}", false),
            ("endpoints: ['b:1', 'c:1'], tls: {node: [b, c], anonymous: true}", false),
            ("endpoints: ['b:1', 'c:1'], overlay: true", false),
        ] {
            assert_eq!(before.leads_as(&upstream(text)), stays, "{text}");
        }
    }
}
