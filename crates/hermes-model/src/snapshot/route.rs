//! Routes of a snapshot: a match, an action, and the policies of the sessions that it takes.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use http::{HeaderName, HeaderValue, StatusCode};
use ipnet::IpNet;

use super::overload::Importance;
use super::policy::{Cache, Custody, OnChange, Resume, Retry, Timeouts, UpstreamRateLimit};
use super::relay::{Relay, RelayTree};
use super::upstream::{Upstream, UpstreamProtocol};
use crate::dial_scope::DialScope;
use crate::facts::Kind;
use crate::matcher::Matcher;
use crate::rewrite::{Rewrite, Template};
use crate::scalar::{FaceUri, HostPort};

/// A match on request attributes, and one action.
#[derive(Debug, PartialEq)]
pub struct Route {
    /// Unique name, for people, logs and metrics.
    pub name: Arc<str>,
    /// Conjunction of conditions that a session must satisfy.
    pub matcher: Matcher,
    /// Action for sessions that match.
    pub action: Action,
    /// Changes to the request and its response.
    pub rewrite: Option<Rewrite>,
    /// Retry policy.
    pub retry: Option<Retry>,
    /// Custody: each node stores an exchange until the next one has acknowledged it.
    pub custody: Option<Custody>,
    /// Cache of responses.
    pub cache: Option<Cache>,
    /// Adaptive rate limit: requests that the service would reject for their rate wait here.
    pub upstream_rate_limit: Option<UpstreamRateLimit>,
    /// Resumable download: the node requests the content until it is complete.
    pub resume: Option<Resume>,
    /// The origin executes requests with the same `Idempotency-Key` once, so that they may be retried.
    pub trusts_idempotency_key: bool,
    /// Timeouts.
    pub timeout: Timeouts,
    /// Effect of a changed route on live sessions.
    pub on_change: OnChange,
    /// Requests in TLS early data are served, although they may be replays (RFC 8470).
    pub early_data: bool,
    /// How late its sessions are refused under overload.
    pub importance: Importance,
}

/// Action of a route.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Forward it to one endpoint of this upstream.
    Upstream(Arc<Upstream>),
    /// Open the tunnel or request at this node, and leave the overlay.
    Terminate(Terminate),
    /// Write the IP packets to a device of this machine.
    Device(Gateway),
    /// Hand NDN packets to a face of a forwarder (`tcp` sessions of `ndn` listeners), or fetch the content whose name is
    /// the path (`http` sessions).
    Face(Face),
    /// Request a flow of a neighbour in a DIF (RINA).
    Rina(RinaNeighbour),
    /// Open the tunnel by the best of these actions, each of which carries `tcp` sessions. None is a race itself.
    Race(Vec<Action>),
    /// Serve the URIs as channels of publish and subscribe.
    Relay(Relay),
    /// Respond at this node.
    Respond(Respond),
    /// Redirect the client.
    Redirect(Redirect),
}

impl Route {
    /// The upstream whose nodes accept custody of the route's sessions.
    pub fn custody_of(&self) -> Option<&Arc<str>> {
        match &self.action {
            Action::Upstream(upstream) if self.custody.is_some() => Some(&upstream.name),
            _ => None,
        }
    }

    /// True if the route matches and carries some session of this kind.
    pub(crate) fn serves(&self, kind: Kind) -> bool {
        let kinds = &self.matcher.kinds;
        (kinds.is_empty() || kinds.contains(&kind)) && self.action.carries(kind)
    }

    /// True if sessions of this kind move to the route when it has changed. Byte streams do not, UDP flows may, and IP
    /// tunnels always do because they last for days.
    pub fn moves_sessions(&self, kind: Kind) -> bool {
        match kind {
            Kind::Ip => true,
            Kind::Udp => self.on_change == OnChange::Move,
            Kind::Http | Kind::Tcp => false,
        }
    }

    /// True if clients choose the destination outside the overlay. Open to everybody, the route is an open proxy.
    pub fn lets_client_choose_target(&self) -> bool {
        let is_named = self.action.alternatives().iter().all(|action| match action {
            Action::Terminate(terminate) => matches!(terminate.target, Target::Fixed(_)),
            Action::Device(gateway) => {
                let networks = &self.matcher.networks;
                gateway.dnat.is_some() || !networks.is_empty() && networks.iter().all(|net| net.prefix_len() > 0)
            }
            Action::Upstream(_)
            | Action::Relay(_)
            | Action::Respond(_)
            | Action::Redirect(_)
            | Action::Face(_)
            | Action::Rina(_)
            | Action::Race(_) => true,
        });
        !is_named && self.matcher.admits_unnamed_hosts()
    }
}

impl Action {
    /// The upstreams that may receive requests of the route.
    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<Upstream>> {
        let (one, tree) = match self {
            Action::Upstream(upstream) => (Some(upstream), None),
            Action::Relay(relay) => (None, Some(&relay.tree)),
            _ => (None, None),
        };
        one.into_iter().chain(tree.into_iter().flat_map(RelayTree::upstreams))
    }

    /// The actions of a race, or the action itself.
    pub fn alternatives(&self) -> &[Action] {
        match self {
            Action::Race(all) => all,
            only => std::slice::from_ref(only),
        }
    }

    /// True if the action can carry sessions of this kind. An error response applies to any kind: a route denies a
    /// tunnel that way.
    pub fn carries(&self, kind: Kind) -> bool {
        match self {
            Action::Upstream(upstream) => upstream.protocol != UpstreamProtocol::Tcp || kind == Kind::Tcp,
            Action::Terminate(terminate) => terminate.kind.session() == kind,
            Action::Device(_) => kind == Kind::Ip,
            Action::Face(_) => matches!(kind, Kind::Tcp | Kind::Http),
            Action::Rina(_) => kind == Kind::Tcp,
            Action::Race(all) => all.iter().all(|action| action.carries(kind)),
            Action::Respond(respond) => kind == Kind::Http || respond.status.as_u16() >= 400,
            Action::Relay(_) | Action::Redirect(_) => kind == Kind::Http,
        }
    }
}

/// Leave the overlay: open a connection, a socket or a request at this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// Transport to open.
    pub kind: TerminateKind,
    /// Destination.
    pub target: Target,
    /// Address ranges that the request may name. Not for `Target::Fixed`.
    pub reach: DialScope,
    /// The target was not chosen by the node's operator: the node does not dial addresses that [`crate::ssrf_guard`]
    /// forbids.
    pub guard: bool,
    /// Begin with a PROXY protocol v2 header that carries the session's source address (`tcp` only).
    pub proxy_protocol: bool,
    /// Connect with the address and port of the client (`tcp` and `udp`).
    pub from_client: bool,
    /// Congestion control of the connection; `None` means the kernel's default (`tcp` only).
    pub congestion: Option<Arc<str>>,
    /// CA certificates to verify the origins of `https` requests; `None` means those of the system.
    pub origin_ca: Option<PathBuf>,
}

impl Terminate {
    /// True if `https` requests reach their origins over TLS: requests that name their origin do.
    pub fn speaks_tls(&self) -> bool {
        self.kind == TerminateKind::Http && self.target == Target::Authority
    }
}

/// A face of an NDN forwarder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Face {
    /// Address of the forwarder.
    pub uri: FaceUri,
    /// Files with public keys, each with the prefix (URI) of the names that it may sign. The longest prefix comes first.
    pub anchors: Vec<(Arc<str>, PathBuf)>,
    /// Content that is protected by a digest alone is accepted.
    pub accept_digest: bool,
    /// Frames over UDP that are not acknowledged are sent again.
    pub reliable: bool,
}

/// A neighbour in a DIF, at which applications are reached by name (RINA).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RinaNeighbour {
    /// UDP address of the neighbour.
    pub neighbour: HostPort,
    /// Membership of the DIF.
    pub membership: DifMembership,
    /// Name of the application; `None` means the host of the request.
    pub application: Option<Arc<str>>,
}

/// The membership of a DIF (RINA).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DifMembership {
    /// Name of the DIF.
    pub dif: Arc<str>,
    /// File with the key that all members share. `None`: any node that knows the name may enrol.
    pub key: Option<PathBuf>,
}

/// A device through which IP packets leave the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Name of the device; the node creates it.
    pub device: Arc<str>,
    /// Addresses of the device.
    pub addresses: Vec<IpAddr>,
    /// Clients get addresses of these prefixes only. If empty, they get any free address that they request.
    pub assign: Vec<IpNet>,
    /// Clients may request whole networks.
    pub assign_networks: bool,
    /// NAT: packets leave the machine with its own source address.
    pub nat: bool,
    /// 1:1 NAT: packets of all clients go to this address, and replies come from the address that the client requested.
    pub dnat: Option<IpAddr>,
}

/// Transport that a terminating route opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminateKind {
    /// A TCP connection, for `tcp` sessions.
    Tcp,
    /// A UDP socket, for `udp` sessions.
    Udp,
    /// An HTTP/1.1 request to an origin. A forward proxy takes the origin from the request.
    Http,
}

impl TerminateKind {
    /// The kind of session that it serves.
    pub fn session(self) -> Kind {
        match self {
            TerminateKind::Tcp => Kind::Tcp,
            TerminateKind::Udp => Kind::Udp,
            TerminateKind::Http => Kind::Http,
        }
    }
}

impl fmt::Display for TerminateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.session().fmt(f)
    }
}

/// Destination of a terminating route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The authority of the request.
    Authority,
    /// The address and port to which the client connected: the authority, which must be an IP address. No name is
    /// resolved.
    Original,
    /// A fixed destination; a name is resolved when it is dialled.
    Fixed(HostPort),
}

/// A response generated by the node.
#[derive(Clone, Debug, PartialEq)]
pub struct Respond {
    /// Status, 200 to 599.
    pub status: StatusCode,
    /// Fields of the response header.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Complete body.
    pub body: Arc<[u8]>,
}

/// A redirect generated by the node.
#[derive(Clone, Debug, PartialEq)]
pub struct Redirect {
    /// 301, 302, 303, 307 or 308.
    pub status: StatusCode,
    /// The `Location`, with placeholders such as `{path}`.
    pub location: Template,
}
