//! Upstreams of a snapshot: named sets of endpoints, how one is chosen, and which protocol it gets.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;

use super::HostPort;

/// A named set of endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Upstream {
    /// Unique name.
    pub name: Arc<str>,
    /// Protocol of the endpoints.
    pub protocol: UpstreamProtocol,
    /// Endpoints; at least one.
    pub endpoints: Vec<Endpoint>,
    /// Backup endpoints, used in this order, and only while no regular endpoint is up.
    pub backup: Vec<Endpoint>,
    /// Load-balancing policy.
    pub balance: Balance,
    /// Active health checks; `None` disables them.
    pub health: Option<Health>,
    /// Outlier detection (passive health checks).
    pub outlier: Outlier,
    /// Method that opens a TCP tunnel over HTTP.
    pub tunnel_method: TunnelMethod,
    /// TLS; `None` is plaintext (h2 with prior knowledge).
    pub tls: Option<UpstreamTls>,
    /// Begin each connection with a PROXY protocol v2 header. Only for `h1` and `tcp`; such a connection is not shared.
    pub proxy_protocol: bool,
    /// Whether the endpoint is a node, which gets the overlay's headers. `None` detects a node: `identity` TLS proves
    /// one, and so does plaintext h2 that offers extended CONNECT.
    pub overlay: Option<bool>,
    /// The upstream is a forward proxy: requests name their origin in absolute form, and may carry credentials for the
    /// proxy.
    pub forward_proxy: bool,
    /// Congestion control of TCP connections to the endpoints; `None` means the kernel's default.
    pub congestion: Option<Arc<str>>,
    /// Contact plan of an intermittent link; `None` means that the node detects when the link is up.
    pub contact_plan: Option<Contact>,
}

impl Upstream {
    /// Endpoints, followed by backup endpoints.
    pub fn all(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.iter().chain(&self.backup)
    }

    /// True if sessions at an endpoint may stay there when `other` replaces this upstream: same endpoints, same
    /// protocol, same authentication. Name, backups and health checks only matter to new sessions.
    pub fn is_compatible_with(&self, other: &Self) -> bool {
        let how = |upstream: &Self| {
            (
                upstream.protocol,
                upstream.tunnel_method,
                upstream.proxy_protocol,
                upstream.overlay,
                upstream.forward_proxy,
                upstream.contact_plan,
            )
        };
        let is_proven_alike = match (&self.tls, &other.tls) {
            (Some(own), Some(others)) => own.is_proven_like(others, self.endpoints.len()),
            (own, others) => own == others,
        };
        self.endpoints == other.endpoints && self.balance == other.balance && how(self) == how(other) && is_proven_alike
    }
}

/// Contact plan: the link comes up `from` after the start of each period. The first period started at the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    /// Period, at least [`Contact::MIN_PERIOD`].
    pub every: Duration,
    /// Offset within the period; shorter than the period.
    pub from: Duration,
}

impl Contact {
    /// Shortest useful period: back-off retries at least this often anyway.
    pub const MIN_PERIOD: Duration = Duration::from_millis(300);

    /// Time until the link comes up. `now` is the time since the Unix epoch.
    pub fn wait(&self, now: Duration) -> Duration {
        let into = now.as_nanos() % self.every.as_nanos();
        let from = self.from.as_nanos();
        let wait = if into < from { from - into } else { from + self.every.as_nanos() - into };
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

/// A destination for the sessions of an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// An address to dial.
    Address(HostPort),
    /// A node that dials us: sessions use the reverse connections that it keeps.
    Node(Arc<str>),
}

impl Endpoint {
    /// The host to dial.
    pub fn host(&self) -> Option<&Arc<str>> {
        match self {
            Endpoint::Address(address) => Some(&address.host),
            Endpoint::Node(_) => None,
        }
    }

    /// The node that keeps reverse connections.
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

/// Protocol of an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    H1,
    /// HTTP/2.
    H2,
    /// HTTP/3 (TLS only).
    H3,
    /// A byte stream without HTTP: only for `tcp` sessions.
    Tcp,
    /// The protocol that ALPN selects (TLS only).
    #[default]
    Auto,
}

/// Load-balancing policy among healthy endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Round robin.
    RoundRobin,
    /// Uniformly at random.
    Random,
    /// The one with fewer requests in flight, of two random endpoints.
    LeastRequest,
    /// Rendezvous hash of a header's value; without that header, of the source address.
    Hash(HeaderName),
}

/// Active health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Path of a GET that must return 2xx; `None` only opens a connection.
    pub path: Option<String>,
    /// Time between two probes of an endpoint; jittered.
    pub interval: Duration,
    /// Maximum duration of a probe.
    pub timeout: Duration,
    /// Consecutive successes that make an endpoint healthy.
    pub healthy: u32,
    /// Consecutive failures that make an endpoint unhealthy.
    pub unhealthy: u32,
}

/// Outlier detection: an endpoint that fails its sessions is ejected for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlier {
    /// Consecutive failures (connect failure, reset, 502 to 504) before ejection; 0 disables it. Default 5.
    pub failures: u32,
    /// First ejection time; doubles with each further ejection, up to 10 times. Default 10 s.
    pub ejection_time: Duration,
}

/// Method that opens a TCP tunnel over h1, h2 or h3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TunnelMethod {
    /// CONNECT.
    #[default]
    Connect,
    /// POST: the request body carries one direction, the response body the other.
    Post,
}

impl UpstreamTls {
    /// True if this number of endpoints is authenticated in the same way by both. Names of backup nodes may differ.
    fn is_proven_like(&self, other: &Self, endpoints: usize) -> bool {
        let common = || self.nodes.iter().filter(|node| other.nodes.contains(node)).count();
        (&self.server_name, &self.ca, self.anonymous) == (&other.server_name, &other.ca, other.anonymous)
            && (self.nodes == other.nodes || common() >= endpoints)
    }
}

/// TLS to an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// Server name to send (SNI) and to verify (DNS SAN). `None` verifies a node of the overlay by its URI SAN instead.
    pub server_name: Option<Arc<str>>,
    /// Nodes that the peer may be, by URI SAN; an empty list allows any node of the overlay.
    pub nodes: Vec<Arc<str>>,
    /// CA file other than that of `identity`. The peer is then not a node of this overlay.
    pub ca: Option<PathBuf>,
    /// Present no client certificate.
    pub anonymous: bool,
}

#[cfg(test)]
mod tests {
    use crate::test_fixtures::snapshot;

    /// Decides for a live session whether it may stay at its endpoint.
    #[test]
    fn backup_endpoints_do_not_affect_live_sessions() {
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
            assert_eq!(before.is_compatible_with(&upstream(text)), stays, "{text}");
        }
    }
}
