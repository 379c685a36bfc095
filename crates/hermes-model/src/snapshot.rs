//! The snapshot: one whole, validated, immutable configuration of a node.
//!
//! In: a `Document` that `check` found free of problems.
//! Out: parsed types, resolved references, compiled matchers. Invalid states cannot be written.
//! Never: partly built, changed after it was built, or aware of sockets, health or time.

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

/// One whole, validated configuration.
#[derive(Debug)]
pub struct Snapshot {
    /// This node's name, as in `Via` and in its certificate.
    pub node: Arc<str>,
    /// Where the admin endpoint listens; `None` leaves it out.
    pub admin: Option<SocketAddr>,
    /// How long a drain waits for sessions before it ends them.
    pub drain: Duration,
    /// The node says that it takes no sessions.
    pub draining: bool,
    /// Worker threads; `None` is one a core.
    pub workers: Option<usize>,
    /// Whether this node may pass on identities that other nodes asserted.
    pub role: Role,
    /// Files of this node's certificate, key and the overlay's CA.
    pub identity: Option<IdentityFiles>,
    /// Names of keys that are not believed any more.
    pub revoked: BTreeSet<Arc<str>>,
    /// Users bound to other nodes by this document. `*` among them is any user.
    pub users: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Every limit, with its default where the document says nothing.
    pub limits: Limits,
    /// How connections are spread over workers.
    pub dispatch: Dispatch,
    /// Where session records go.
    pub access_log: AccessLog,
    /// A directory for what outlives the process.
    pub state: Option<PathBuf>,
    /// In the document's order; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// In the document's order; the first match wins.
    pub routes: Vec<Arc<Route>>,
    /// In the document's order; names are unique.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Finds the routes that may match without walking all of them.
    pub(crate) index: RouteIndex,
    /// The document with secrets left out, for `/config`: JSON as text, which takes a fraction of a tree's memory.
    pub redacted: String,
}

impl Snapshot {
    /// The names of all devices, some more than once: those that listeners read, and those that routes lead to.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<str>> {
        let read = self.listeners.iter().filter_map(|listener| match &listener.protocol {
            ListenerProtocol::Tun(tun) => Some(&tun.device),
            _ => None,
        });
        let led_to = self.routes.iter().filter_map(|route| match &route.action {
            Action::Device(gateway) => Some(&gateway.device),
            _ => None,
        });
        read.chain(led_to)
    }
}

/// `role` of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Applications or devices talk to it.
    #[default]
    Dependent,
    /// Only other nodes do; it may pass on what they asserted.
    Standalone,
}

/// Files with the node's identity (PEM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificate chain, the leaf first.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// CA certificates of the overlay.
    pub ca: PathBuf,
}

/// How connections are spread over workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dispatch {
    /// The kernel's reuseport hash.
    #[default]
    Reuseport,
    /// All workers wait on one socket; whoever wakes first takes the connection.
    Exclusive,
}

/// Where session records go, one JSON object a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error.
    Stderr,
    /// Appended to this file; opened again on reload, so that it may be rotated.
    File(PathBuf),
    /// Nowhere.
    Off,
}

/// Where bytes come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its name, unique in the document.
    pub name: Arc<str>,
    /// The address it binds; `None` where it binds none.
    pub bind: Option<SocketAddr>,
    /// The upstream at whose endpoints it serves instead, over connections that it keeps to them.
    pub dial: Option<Arc<str>>,
    /// What is spoken there.
    pub protocol: ListenerProtocol,
    /// Set on each session's headers, over what the client sent.
    pub set_headers: Vec<(HeaderName, HeaderValue)>,
    /// TLS in front of the protocol (not of `udp`); `None` is plaintext.
    pub tls: Option<ListenerTls>,
    /// Peers believed without a certificate, as standalone nodes are.
    pub trust: Vec<IpNet>,
    /// Sources that must begin with a PROXY protocol header, which is believed. Connections
    /// from elsewhere are served without one. Empty: the protocol is off.
    pub proxy_protocol: Vec<IpNet>,
    /// Tunnels by POST are accepted, from authenticated or trusted peers only.
    pub accept_post: bool,
    /// HTTP/2 is used with clients that offer it.
    pub http2: bool,
    /// HTTP/3 as well, at the same port of UDP. Only `http` listeners with TLS have it.
    pub http3: bool,
    /// Requests of HTTP/3 are taken that come with a client's first packet, before its handshake is over.
    pub early_data: bool,
}

/// A port that a listener binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// Of TCP.
    Tcp,
    /// Of UDP.
    Udp,
}

impl Listener {
    /// The kinds of port that it binds, all of one number.
    pub fn ports(&self) -> &'static [PortKind] {
        match self.protocol {
            ListenerProtocol::Http if self.http3 => &[PortKind::Tcp, PortKind::Udp],
            ListenerProtocol::Http | ListenerProtocol::Tcp { .. } | ListenerProtocol::Socks5 => &[PortKind::Tcp],
            ListenerProtocol::Dns(_) => &[PortKind::Tcp, PortKind::Udp],
            ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_) => &[PortKind::Udp],
            ListenerProtocol::Tun(_) => &[],
        }
    }

    /// What its sessions carry, where that is always the same.
    pub(crate) fn only_kind(&self) -> Option<Kind> {
        match &self.protocol {
            ListenerProtocol::Tcp { .. } => Some(Kind::Tcp),
            ListenerProtocol::Udp { .. } => Some(Kind::Udp),
            ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows => None,
            ListenerProtocol::Tun(_) | ListenerProtocol::Ip(_) => Some(Kind::Ip),
            ListenerProtocol::Http | ListenerProtocol::Socks5 | ListenerProtocol::Dns(_) => None,
        }
    }

    /// True where a connection that one of them accepted is as good as one of the other: the same
    /// protocol, the same proof of identity.
    pub fn admits_like(&self, other: &Listener) -> bool {
        self.protocol == other.protocol
            && self.dial == other.dial
            && self.tls == other.tls
            && self.trust == other.trust
            && self.proxy_protocol == other.proxy_protocol
    }
}

/// What a listener speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerProtocol {
    /// HTTP/1.1 and HTTP/2 on one port, and HTTP/3 where the listener says so.
    Http,
    /// Each connection becomes CONNECT to this authority (`host:port`).
    Tcp {
        /// The target that routes see.
        authority: crate::authority::Authority,
    },
    /// Each flow (one source address) becomes CONNECT-UDP to this authority.
    Udp {
        /// The target that routes see.
        authority: crate::authority::Authority,
    },
    /// The packets of a device: each prefix becomes CONNECT-IP to it.
    Tun(Tun),
    /// SOCKS 5 (RFC 1928): clients say whom each connection and datagram is for.
    Socks5,
    /// DNS, by UDP and TCP: some names get an address of their own, all others are asked for elsewhere.
    Dns(Dns),
    /// IP packets in UDP datagrams: those of a peer become CONNECT-IP to the listener's prefix.
    Ip(Carried),
}

impl ListenerProtocol {
    /// The word that the document has for it.
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

/// A device whose packets a listener takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tun {
    /// The device; it is made.
    pub device: Arc<str>,
    /// Its own addresses, which its packets come from.
    pub addresses: Vec<IpAddr>,
    /// What it takes; each is a session of its own.
    pub captures: Vec<Capture>,
    /// How it carries what is sent to addresses that stand for names.
    pub carry_names: CarryNames,
}

/// How a device carries what programs send to addresses that stand for names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CarryNames {
    /// As IP packets: CONNECT-IP for each name.
    #[default]
    Packets,
    /// Each TCP connection as CONNECT, each UDP flow as CONNECT-UDP, to the name.
    Flows,
}

/// A prefix that a device takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Where packets go.
    pub network: IpNet,
    /// Set on its session's headers, over those of the listener.
    pub set_headers: Vec<(HeaderName, HeaderValue)>,
}

/// IP packets that others bring to a port, one in each UDP datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Where they go.
    pub network: IpNet,
    /// Who may bring them; no two of them come from one place.
    pub peers: Vec<Peer>,
}

impl Carried {
    /// The peer whose datagrams come from there; `None`: nobody's may.
    pub fn peer(&self, from: IpAddr) -> Option<&Peer> {
        let from = from.to_canonical();
        self.peers.iter().find(|peer| peer.from.iter().any(|prefix| prefix.contains(&from)))
    }
}

/// Who may bring IP packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where its datagrams come from.
    pub from: Vec<IpNet>,
    /// Where the packets in them come from; of the network's version of IP.
    pub addresses: Vec<IpNet>,
}

/// What a DNS listener answers itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The names; hosts as authorities have them.
    pub names: Vec<HostPattern>,
    /// Where they get their addresses from.
    pub addresses: Reserved,
    /// Who is asked for all other names; empty where that is whom the system asks.
    pub forward: Vec<SocketAddr>,
    /// Names get IPv6 addresses.
    pub ipv6: bool,
}

/// Addresses that stand for names. At least one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Of IPv4; two bits at least are left for names.
    pub v4: Option<Ipv4Net>,
    /// Of IPv6; likewise.
    pub v6: Option<Ipv6Net>,
}

impl Reserved {
    /// Is it one of them?
    pub fn contains(&self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(v4) => self.v4.is_some_and(|net| net.contains(&v4)),
            IpAddr::V6(v6) => self.v6.is_some_and(|net| net.contains(&v6)),
        }
    }

    /// Is an address in both?
    pub fn overlaps(&self, other: &Self) -> bool {
        let v4 = self.v4.zip(other.v4).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        let v6 = self.v6.zip(other.v6).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        v4 || v6
    }
}

/// TLS at a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTls {
    /// Whether clients show a certificate of the overlay's CA.
    pub client: ClientAuth,
    /// Certificate and key other than `identity`'s.
    pub cert_key: Option<(PathBuf, PathBuf)>,
    /// CA for client certificates other than `identity`'s.
    pub client_ca: Option<PathBuf>,
}

/// Whether clients show a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// Not asked for.
    None,
    /// Asked for; verified where shown.
    Optional,
    /// No handshake without.
    #[default]
    Required,
}

/// A match on facts, and one action.
#[derive(Debug, PartialEq)]
pub struct Route {
    /// Its name, for people, logs and metrics. Unique in the document.
    pub name: Arc<str>,
    /// The conjunction that must hold.
    pub matcher: Matcher,
    /// What becomes of the session.
    pub action: Action,
    /// Changes to the request and its response on the way.
    pub rewrite: Option<Rewrite>,
    /// What may be tried again, how often.
    pub retry: Option<Retry>,
    /// Nodes answer for it, hop by hop, until it is through.
    pub custody: Option<Custody>,
    /// What is kept of its answers.
    pub cache: Option<Cache>,
    /// What the service refuses for its rate waits here.
    pub pace: Option<Pace>,
    /// It is asked for until it is there.
    pub retrieve: Option<Retrieve>,
    /// Its origin does once what comes twice with one `Idempotency-Key`.
    pub trusts_keys: bool,
    /// How long to wait for what.
    pub timeout: Timeouts,
    /// What a changed route does to live sessions.
    pub on_change: OnChange,
    /// It serves what may be somebody's replay (RFC 8470).
    pub early_data: bool,
}

/// What becomes of a session.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Forward it to one endpoint of this upstream.
    Upstream(Arc<Upstream>),
    /// Open the tunnel here.
    Terminate(Terminate),
    /// Give the IP packets to a device of this machine.
    Device(Gateway),
    /// Answer it here.
    Respond(Respond),
    /// Send the client elsewhere.
    Redirect(Redirect),
}

impl Route {
    /// The upstream whose nodes take its sessions into custody.
    pub fn custody_of(&self) -> Option<&Arc<str>> {
        match &self.action {
            Action::Upstream(upstream) if self.custody.is_some() => Some(&upstream.name),
            _ => None,
        }
    }

    /// Whether there may be a session of this kind that it does something for.
    pub(crate) fn serves(&self, kind: Kind) -> bool {
        let kinds = &self.matcher.kinds;
        (kinds.is_empty() || kinds.contains(&kind)) && self.action.carries(kind)
    }

    /// Whether sessions choose for themselves where they go, out of the overlay: for anybody, that is an open proxy.
    pub fn goes_where_it_is_asked(&self) -> bool {
        let is_named = match &self.action {
            Action::Terminate(terminate) => terminate.target != Target::Authority,
            Action::Device(gateway) => {
                let networks = &self.matcher.networks;
                gateway.inner.is_some() || !networks.is_empty() && networks.iter().all(|net| net.prefix_len() > 0)
            }
            Action::Upstream(_) | Action::Respond(_) | Action::Redirect(_) => true,
        };
        !is_named && self.matcher.admits_unnamed_hosts()
    }
}

impl Action {
    /// Whether the action can carry sessions of this kind. An error answered by a route is an
    /// answer to any kind: that is how a route denies a tunnel.
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

/// Open a session here, and go on outside of the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// What is opened.
    pub kind: TerminateKind,
    /// Where to.
    pub target: Target,
    /// Which addresses the request may name. Only for `Target::Authority`.
    pub reach: Reach,
    /// Somebody other than the node's operator named the target: addresses that [`crate::guard`] forbids are not
    /// dialled.
    pub guard: bool,
    /// Begin with a PROXY protocol v2 header that carries the session's source (`tcp` only).
    pub proxy_protocol: bool,
    /// CA certificates that origins of `https` requests are verified by; `None`: the system's.
    pub origin_ca: Option<PathBuf>,
}

impl Terminate {
    /// True if requests for `https` reach their origins by TLS: those that name their origin do.
    pub fn speaks_tls(&self) -> bool {
        self.kind == TerminateKind::Http && self.target == Target::Authority
    }
}

/// Where IP packets leave the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The device; it is made.
    pub device: Arc<str>,
    /// The device's own addresses.
    pub addresses: Vec<IpAddr>,
    /// Clients get addresses of these prefixes alone. Empty: whichever they ask for, if nobody has it.
    pub assign: Vec<IpNet>,
    /// They may have whole networks of them.
    pub assign_networks: bool,
    /// What leaves the machine comes from its own address.
    pub nat: bool,
    /// The packets of all clients go to this address, and come back from the one that they asked for.
    pub inner: Option<IpAddr>,
}

/// What a terminating route opens.
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
    /// The sessions that it is for.
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

/// Where a terminating route goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// What the request names.
    Authority,
    /// This one; a name is resolved by DNS when it is dialled.
    Fixed(HostPort),
}

/// An answer made here.
#[derive(Clone, Debug, PartialEq)]
pub struct Respond {
    /// Status, 200 to 599.
    pub status: StatusCode,
    /// Headers of the answer.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Its whole body.
    pub body: Arc<[u8]>,
}

/// A redirection made here.
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
    /// For a new connection to be usable: dial, TLS, preface. Default 5 s.
    pub connect: Duration,
    /// No byte in either direction of an open session. `None` takes the default of its kind:
    /// `http` 5 min, `tcp` 1 h, `udp` 2 min (RFC 4787, REQ-5).
    pub idle: Option<Duration>,
    /// Bytes are owed and none come: no response head, or a reader that takes nothing. Default 60 s.
    pub progress: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), idle: None, progress: Duration::from_secs(60) }
    }
}

impl Timeouts {
    /// The idle timeout of a session of this kind: what the route says, or the kind's default.
    pub fn idle_of(&self, kind: Kind) -> Duration {
        let default = match kind {
            Kind::Http => Duration::from_secs(5 * 60),
            Kind::Tcp => Duration::from_secs(60 * 60),
            Kind::Udp => Duration::from_secs(2 * 60),
            // An IP tunnel is a link: it idles for as long as nobody talks.
            Kind::Ip => Duration::from_secs(24 * 60 * 60),
        };
        self.idle.unwrap_or(default)
    }
}

/// What a changed route does to live sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnChange {
    /// They stay where they are.
    #[default]
    Keep,
    /// They move to the new place (`udp`).
    Move,
}

/// How a node answers for the exchanges of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Custody {
    /// What is not through by then comes to nothing.
    pub deadline: Duration,
    /// Bytes in memory, of all of the route's exchanges.
    pub memory: u64,
    /// Bytes on disk; zero where the node has no `state`.
    pub disk: u64,
    /// When bytes count as safe.
    pub durable: Durable,
}

/// How requests of a route wait for the rate that its service allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// None waits longer, whatever the service says.
    pub deadline: Duration,
    /// Requests that wait at a time.
    pub queue: usize,
}

/// How answers of a route are asked for until they are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retrieve {
    /// How long nothing may come of it: each byte begins it anew.
    pub deadline: Duration,
}

/// What bytes in custody survive before anybody hears that they are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durable {
    /// The end of the process: they are written.
    #[default]
    Process,
    /// The loss of power: they are on the disk.
    Fsync,
}

/// What a node keeps of the answers of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Bytes in memory, heads included.
    pub memory: u64,
    /// Bytes on disk; zero where the node has no `state`.
    pub disk: u64,
    /// One for all users; else each has its own part.
    pub shared: bool,
    /// How long something stale is given while nobody behind can be reached.
    pub stale: Duration,
}

/// What may be tried again.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// A connection could not be made: nothing was sent.
    pub on_connect_failure: bool,
    /// The connection broke before a response.
    pub on_reset: bool,
    /// Any 5xx.
    pub on_5xx: bool,
    /// These statuses (429, 503 ...).
    pub on_status: Vec<StatusCode>,
    /// Tries in all, the first included; at least 1.
    pub attempts: u32,
    /// Wait before the second try; doubles, with full jitter.
    pub backoff_base: Duration,
    /// The wait's ceiling.
    pub backoff_max: Duration,
    /// Retries under way may be at most this share of requests under way (0.0 to 1.0), plus a
    /// small floor so that a lone request may be retried.
    pub budget: f64,
}
