//! The snapshot: one complete, validated, immutable configuration of a node.
//!
//! In: a `Document` in which `check` found no problem.
//! Out: parsed types, resolved references, compiled matchers. The types cannot express an invalid state.
//! Never: a partial snapshot, a change after the build, or knowledge of sockets, health or time.

mod index;
mod upstream;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::facts::Kind;
use crate::limits::Limits;
use crate::matcher::Matcher;
use crate::pattern::HostPattern;
use crate::reach::Reach;
use crate::rewrite::{Rewrite, Template};

pub use crate::scalar::HostPort;
pub use index::RouteIndex;
pub use upstream::{
    Balance, Contact, Endpoint, Health, Outlier, TunnelMethod, Upstream, UpstreamProtocol, UpstreamTls,
};

/// A complete, validated configuration.
#[derive(Debug)]
pub struct Snapshot {
    /// This node's name, as it appears in `Via` and in the node's certificate.
    pub node: Arc<str>,
    /// Address of the admin endpoint; `None` disables it.
    pub admin: Option<SocketAddr>,
    /// Maximum time that a drain waits for sessions before it closes them.
    pub drain: Duration,
    /// The node reports that it accepts no sessions.
    pub draining: bool,
    /// Number of worker threads; `None` is one per core.
    pub workers: Option<usize>,
    /// Whether this node may pass on identities that other nodes asserted.
    pub role: Role,
    /// Files of this node's certificate and key, and of the overlay's CA.
    pub identity: Option<IdentityFiles>,
    /// Names of revoked keys.
    pub revoked: BTreeSet<Arc<str>>,
    /// Users that this document binds to other nodes. `*` stands for any user.
    pub users: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Every limit; a limit that the document leaves out has its default.
    pub limits: Limits,
    /// Distribution of connections to workers.
    pub dispatch: Dispatch,
    /// Destination of the access log.
    pub access_log: AccessLog,
    /// Directory for state that outlives the process.
    pub state: Option<PathBuf>,
    /// All listeners, in the document's order; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// All routes, in the document's order; the first match wins.
    pub routes: Vec<Arc<Route>>,
    /// All upstreams, in the document's order; names are unique.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Finds the routes that may match without testing all of them.
    pub(crate) index: RouteIndex,
    /// The document without secrets, for `/config`. JSON text takes a fraction of the memory of a tree.
    pub redacted: String,
}

impl Snapshot {
    /// Names of all devices: those that listeners read, and those that routes write to. A name may occur more than
    /// once.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<str>> {
        let read = self.listeners.iter().filter_map(|listener| match &listener.protocol {
            ListenerProtocol::Tun(tun) => Some(&tun.device),
            _ => None,
        });
        let written = self.routes.iter().filter_map(|route| match &route.action {
            Action::Device(gateway) => Some(&gateway.device),
            _ => None,
        });
        read.chain(written)
    }

    /// The listener of this name.
    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.listeners.iter().find(|listener| &*listener.name == name)
    }

    /// True if any listener can authenticate clients, by certificate or by address.
    pub fn authenticates(&self) -> bool {
        self.listeners.iter().any(|listener| listener.authenticates())
    }
}

/// `role` of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Applications or devices connect to the node.
    #[default]
    Dependent,
    /// Only other nodes connect to it; it may pass on the identities that they asserted.
    Standalone,
}

/// Files of the node's identity (PEM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificate chain, the leaf first.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// CA certificates of the overlay.
    pub ca: PathBuf,
}

/// Distribution of connections to workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dispatch {
    /// The kernel's reuseport hash.
    #[default]
    Reuseport,
    /// All workers wait on one socket; the first one to wake accepts the connection.
    Exclusive,
}

/// Destination of the access log, one JSON object per line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error.
    Stderr,
    /// Append to this file; a reload opens it again, so that it can be rotated.
    File(PathBuf),
    /// No access log.
    Off,
}

/// An entry point for sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Unique name of the listener.
    pub name: Arc<str>,
    /// Address to bind; `None` if the listener binds none.
    pub bind: Option<SocketAddr>,
    /// A listener with `dial` serves on connections that the node itself opens to the endpoints of this upstream.
    pub dial: Option<Arc<str>>,
    /// Protocol that clients speak.
    pub protocol: ListenerProtocol,
    /// Fields set on the header of each session; they replace those that the client sent.
    pub set_headers: Vec<(HeaderName, HeaderValue)>,
    /// TLS below the protocol (never for `udp`); `None` is plaintext.
    pub tls: Option<ListenerTls>,
    /// Peers trusted without a certificate, as standalone nodes are.
    pub trust: Vec<IpNet>,
    /// Sources that must begin with a PROXY protocol header, which is trusted. Connections from elsewhere are served
    /// without one. An empty list disables the protocol.
    pub proxy_protocol: Vec<IpNet>,
    /// Accept tunnels by POST, from authenticated or trusted peers only.
    pub accept_post: bool,
    /// Negotiate HTTP/2 with clients that offer it.
    pub http2: bool,
    /// Serve HTTP/3 too, on the UDP port of the same number. Only `http` listeners with TLS have it.
    pub http3: bool,
    /// Accept HTTP/3 requests in 0-RTT data, before the handshake completes.
    pub early_data: bool,
}

/// Transport protocol of a port that a listener binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// A TCP port.
    Tcp,
    /// A UDP port.
    Udp,
}

impl Listener {
    /// Transport protocols that the listener binds, all with one port number.
    pub fn ports(&self) -> &'static [PortKind] {
        match self.protocol {
            ListenerProtocol::Http if self.http3 => &[PortKind::Tcp, PortKind::Udp],
            ListenerProtocol::Http | ListenerProtocol::Tcp { .. } | ListenerProtocol::Socks5 => &[PortKind::Tcp],
            ListenerProtocol::Dns(_) => &[PortKind::Tcp, PortKind::Udp],
            ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_) => &[PortKind::Udp],
            ListenerProtocol::Tun(_) => &[],
        }
    }

    /// Kind of all its sessions, if every session has the same.
    pub(crate) fn only_kind(&self) -> Option<Kind> {
        match &self.protocol {
            ListenerProtocol::Tcp { .. } => Some(Kind::Tcp),
            ListenerProtocol::Udp { .. } => Some(Kind::Udp),
            ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows => None,
            ListenerProtocol::Tun(_) | ListenerProtocol::Ip(_) => Some(Kind::Ip),
            ListenerProtocol::Http | ListenerProtocol::Socks5 | ListenerProtocol::Dns(_) => None,
        }
    }

    /// True if the listener can authenticate clients, by certificate or by address.
    pub fn authenticates(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None) || !self.trust.is_empty()
    }

    /// True if a connection accepted by one listener may be served by the other: same protocol, same authentication.
    pub fn admits_like(&self, other: &Listener) -> bool {
        self.protocol == other.protocol
            && self.dial == other.dial
            && self.tls == other.tls
            && self.trust == other.trust
            && self.proxy_protocol == other.proxy_protocol
    }
}

/// Protocol of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerProtocol {
    /// HTTP/1.1 and HTTP/2 on one port, and HTTP/3 if the listener enables it.
    Http,
    /// Each connection becomes CONNECT to this authority (`host:port`).
    Tcp {
        /// Target that routes match.
        authority: crate::authority::Authority,
    },
    /// Each flow (one source address) becomes CONNECT-UDP to this authority.
    Udp {
        /// Target that routes match.
        authority: crate::authority::Authority,
    },
    /// The packets of a device: each captured prefix becomes a CONNECT-IP session.
    Tun(Tun),
    /// SOCKS 5 (RFC 1928): clients name the target of each connection and datagram.
    Socks5,
    /// DNS over UDP and TCP: the node answers some names with virtual addresses and forwards all other queries.
    Dns(Dns),
    /// IP packets in UDP datagrams: the packets of a peer become a CONNECT-IP session to the listener's prefix.
    Ip(IpListener),
}

impl ListenerProtocol {
    /// The keyword of the document.
    pub fn as_str(&self) -> &'static str {
        match self {
            ListenerProtocol::Http => "http",
            ListenerProtocol::Tcp { .. } => "tcp",
            ListenerProtocol::Udp { .. } => "udp",
            ListenerProtocol::Tun(_) => "tun",
            ListenerProtocol::Socks5 => "socks5",
            ListenerProtocol::Dns(_) => "dns",
            ListenerProtocol::Ip(_) => "ip",
        }
    }
}

/// A device whose packets a listener captures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tun {
    /// Name of the device; the node creates it.
    pub device: Arc<str>,
    /// Addresses of the device: the sources of its packets.
    pub addresses: Vec<IpAddr>,
    /// Captured prefixes; each is a session of its own.
    pub captures: Vec<Capture>,
    /// Encoding of traffic to virtual addresses.
    pub carry_names: CarryNames,
}

/// Encoding of traffic to virtual addresses, which stand for names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CarryNames {
    /// IP packets: one CONNECT-IP session per name.
    #[default]
    Packets,
    /// Flows: each TCP connection becomes CONNECT to the name, each UDP flow CONNECT-UDP.
    Flows,
}

/// A prefix that a device captures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Destination of the packets.
    pub network: IpNet,
    /// Fields set on the header of the session; they replace those of the listener.
    pub set_headers: Vec<(HeaderName, HeaderValue)>,
}

/// An `ip` listener: peers send it IP packets, one per UDP datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpListener {
    /// Destination of the packets.
    pub network: IpNet,
    /// Peers that may send packets; their sources do not overlap.
    pub peers: Vec<Peer>,
}

impl IpListener {
    /// The peer that sends from this address; `None` if no peer may.
    pub fn peer(&self, from: IpAddr) -> Option<&Peer> {
        let from = from.to_canonical();
        self.peers.iter().find(|peer| peer.from.iter().any(|prefix| prefix.contains(&from)))
    }
}

/// A peer that may send IP packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Source addresses of its datagrams.
    pub from: Vec<IpNet>,
    /// Source addresses of the packets in them; same IP version as the network.
    pub addresses: Vec<IpNet>,
}

/// A DNS listener: the names that it answers itself, and the resolvers for the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// Names that get virtual addresses; hosts in the form of authorities.
    pub names: Vec<HostPattern>,
    /// Pool of virtual addresses.
    pub addresses: Reserved,
    /// Resolvers for all other names; an empty list means those of the system.
    pub forward: Vec<SocketAddr>,
    /// Answer AAAA queries with virtual addresses.
    pub ipv6: bool,
}

/// Pools of virtual addresses, which stand for names. At least one of the two is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// IPv4 pool, with at least two host bits.
    pub v4: Option<Ipv4Net>,
    /// IPv6 pool, with at least two host bits.
    pub v6: Option<Ipv6Net>,
}

impl Reserved {
    /// True if the pools contain the address.
    pub fn contains(&self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(v4) => self.v4.is_some_and(|net| net.contains(&v4)),
            IpAddr::V6(v6) => self.v6.is_some_and(|net| net.contains(&v6)),
        }
    }

    /// True if some address belongs to both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let v4 = self.v4.zip(other.v4).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        let v6 = self.v6.zip(other.v6).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        v4 || v6
    }
}

/// TLS of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTls {
    /// Whether clients must present a certificate of the overlay's CA.
    pub client: ClientAuth,
    /// Certificate and key, if other than those of `identity`.
    pub cert_key: Option<(PathBuf, PathBuf)>,
    /// CA for client certificates, if other than that of `identity`.
    pub client_ca: Option<PathBuf>,
}

/// Whether clients must present a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// The server requests no certificate.
    None,
    /// The server requests a certificate, and verifies it if the client presents one.
    Optional,
    /// The handshake fails without a certificate.
    #[default]
    Required,
}

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
        let is_named = match &self.action {
            Action::Terminate(terminate) => terminate.target != Target::Authority,
            Action::Device(gateway) => {
                let networks = &self.matcher.networks;
                gateway.dnat.is_some() || !networks.is_empty() && networks.iter().all(|net| net.prefix_len() > 0)
            }
            Action::Upstream(_) | Action::Respond(_) | Action::Redirect(_) => true,
        };
        !is_named && self.matcher.admits_unnamed_hosts()
    }
}

impl Action {
    /// True if the action can carry sessions of this kind. An error response applies to any kind: a route denies a
    /// tunnel that way.
    pub fn carries(&self, kind: Kind) -> bool {
        match self {
            Action::Upstream(upstream) => upstream.protocol != UpstreamProtocol::Tcp || kind == Kind::Tcp,
            Action::Terminate(terminate) => terminate.kind.session() == kind,
            Action::Device(_) => kind == Kind::Ip,
            Action::Respond(respond) => kind == Kind::Http || respond.status.as_u16() >= 400,
            Action::Redirect(_) => kind == Kind::Http,
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
    /// Address ranges that the request may name. Only for `Target::Authority`.
    pub reach: Reach,
    /// The target was not chosen by the node's operator: the node does not dial addresses that [`crate::guard`]
    /// forbids.
    pub guard: bool,
    /// Begin with a PROXY protocol v2 header that carries the session's source address (`tcp` only).
    pub proxy_protocol: bool,
    /// CA certificates to verify the origins of `https` requests; `None` means those of the system.
    pub origin_ca: Option<PathBuf>,
}

impl Terminate {
    /// True if `https` requests reach their origins over TLS: requests that name their origin do.
    pub fn speaks_tls(&self) -> bool {
        self.kind == TerminateKind::Http && self.target == Target::Authority
    }
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

/// Timeouts of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time for a new connection to become usable: dial, TLS, preface. Default 5 s.
    pub connect: Duration,
    /// Time without a byte in either direction of an open session. `None` is the default of the kind: `http` 5 min,
    /// `tcp` 1 h, `udp` 2 min (RFC 4787, REQ-5).
    pub idle: Option<Duration>,
    /// Time without progress while bytes are due: no response head, or a reader that reads nothing. Default 60 s.
    pub progress: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), idle: None, progress: Duration::from_secs(60) }
    }
}

impl Timeouts {
    /// Idle timeout of a session of this kind: the route's, or the kind's default.
    pub fn idle_of(&self, kind: Kind) -> Duration {
        let default = match kind {
            Kind::Http => Duration::from_secs(5 * 60),
            Kind::Tcp => Duration::from_secs(60 * 60),
            Kind::Udp => Duration::from_secs(2 * 60),
            // An IP tunnel is a link, which may be idle for long.
            Kind::Ip => Duration::from_secs(24 * 60 * 60),
        };
        self.idle.unwrap_or(default)
    }
}

/// Effect of a changed route on live sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnChange {
    /// Sessions keep their old destination.
    #[default]
    Keep,
    /// Sessions move to the new destination (`udp`).
    Move,
}

/// Custody policy of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Custody {
    /// An exchange that is not delivered within this time fails.
    pub deadline: Duration,
    /// Bytes in memory, for all exchanges of the route.
    pub memory: u64,
    /// Bytes on disk; zero if the node has no `state`.
    pub disk: u64,
    /// Durability required before a byte is acknowledged.
    pub durable: Durable,
}

/// Adaptive rate limit of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamRateLimit {
    /// Maximum time that a request waits, whatever `Retry-After` the service sends.
    pub deadline: Duration,
    /// Maximum number of waiting requests.
    pub queue: usize,
}

/// Resumable download of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// Maximum time without progress; each byte restarts it.
    pub deadline: Duration,
}

/// Failure that bytes in custody survive once they are acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durable {
    /// Loss of the process: bytes are written to the file.
    #[default]
    Process,
    /// Loss of power: bytes are synced to the disk.
    Fsync,
}

/// Cache policy of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Bytes in memory, including heads.
    pub memory: u64,
    /// Bytes on disk; zero if the node has no `state`.
    pub disk: u64,
    /// The cache is shared by all users; otherwise each user has a partition.
    pub shared: bool,
    /// Time that stale responses are served while the origin is unreachable (`stale-if-error`).
    pub stale_if_error: Duration,
}

/// Retry policy of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// Retry if the connection could not be opened: nothing was sent.
    pub on_connect_failure: bool,
    /// Retry if the connection was reset before a response.
    pub on_reset: bool,
    /// Retry on any 5xx.
    pub on_5xx: bool,
    /// Retry on these statuses (429, 503, ...).
    pub on_status: Vec<StatusCode>,
    /// Total attempts, including the first; at least 1.
    pub attempts: u32,
    /// Delay before the second attempt; doubles, with full jitter.
    pub backoff_base: Duration,
    /// Maximum delay.
    pub backoff_max: Duration,
    /// Retries in flight may be at most this share of requests in flight (0.0 to 1.0). A small floor allows a single
    /// request to be retried.
    pub budget: f64,
}
