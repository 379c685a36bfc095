//! Listeners of a snapshot: ports, devices and what each accepts.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::route::DifMembership;
use crate::facts::Kind;
use crate::pattern::HostPattern;

/// An entry point for sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Unique name of the listener.
    pub name: Arc<str>,
    /// Address to bind; `None` if the listener binds none.
    pub bind: Option<SocketAddr>,
    /// Unix socket, beside the address or instead of it.
    pub unix: Option<Arc<Path>>,
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
    /// Congestion control of accepted TCP connections; `None` means the kernel's default.
    pub congestion: Option<Arc<str>>,
    /// Most client connections of this listener. `None`: only those of the node are limited.
    pub connections: Option<usize>,
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
            ListenerProtocol::Dns(_) | ListenerProtocol::Ndn(_) => &[PortKind::Tcp, PortKind::Udp],
            ListenerProtocol::Udp { .. } | ListenerProtocol::Ip(_) | ListenerProtocol::Rina(_) => &[PortKind::Udp],
            ListenerProtocol::Tun(_) | ListenerProtocol::Transparent(_) => &[],
        }
    }

    /// Kind of all its sessions, if every session has the same.
    pub(crate) fn only_kind(&self) -> Option<Kind> {
        match &self.protocol {
            ListenerProtocol::Tcp { .. } | ListenerProtocol::Ndn(_) | ListenerProtocol::Rina(_) => Some(Kind::Tcp),
            ListenerProtocol::Transparent(transparent) => (!transparent.udp && !transparent.http).then_some(Kind::Tcp),
            ListenerProtocol::Udp { .. } => Some(Kind::Udp),
            ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows => None,
            ListenerProtocol::Tun(_) | ListenerProtocol::Ip(_) => Some(Kind::Ip),
            ListenerProtocol::Http | ListenerProtocol::Socks5 | ListenerProtocol::Dns(_) => None,
        }
    }

    /// True if the listener can authenticate clients, by certificate, by address or by the key of a DIF.
    pub fn authenticates(&self) -> bool {
        let has_key = matches!(&self.protocol, ListenerProtocol::Rina(membership) if membership.key.is_some());
        self.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None) || !self.trust.is_empty() || has_key
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
    /// Connections to other hosts, intercepted on their way: each becomes CONNECT to its destination address.
    Transparent(Transparent),
    /// NDN packets over UDP, TCP and Unix sockets: the packets of a namespace become CONNECT to this authority.
    Ndn(Ndn),
    /// Flows that neighbours of a DIF request (RINA): each becomes CONNECT to the authority that its names contain.
    Rina(DifMembership),
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
            ListenerProtocol::Transparent(_) => "transparent",
            ListenerProtocol::Ndn(_) => "ndn",
            ListenerProtocol::Rina(_) => "rina",
        }
    }
}

/// The sessions of an `ndn` listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ndn {
    /// Target that routes match.
    pub authority: crate::authority::Authority,
    /// Names of namespaces, each with a prefix of NDN names (URI).
    pub namespaces: Vec<(Arc<str>, Arc<str>)>,
    /// Prefixes of NDN names (URI) whose Interests become HTTP requests to a host.
    pub content: Vec<(Arc<str>, crate::authority::Authority)>,
    /// The key that signs this content: its name (URI) and its file. `None` means digests instead of signatures.
    pub signing_key: Option<(Arc<str>, PathBuf)>,
}

/// The connections that a `transparent` listener intercepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transparent {
    /// Destinations; not empty.
    pub captures: Vec<IpNet>,
    /// Destination ports; all if empty.
    pub ports: Vec<u16>,
    /// A client's SYN is answered only when the far connection stands.
    pub hold_syn: bool,
    /// The connections carry HTTP: their requests become sessions.
    pub http: bool,
    /// Intercept UDP flows, too: each becomes CONNECT-UDP to its destination address.
    pub udp: bool,
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
    pub addresses: VirtualIpPools,
    /// Resolvers for all other names; an empty list means those of the system.
    pub forward: Vec<SocketAddr>,
    /// Answer AAAA queries with virtual addresses.
    pub ipv6: bool,
}

/// Pools of virtual addresses, which stand for names. At least one of the two is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualIpPools {
    /// IPv4 pool, with at least two host bits.
    pub v4: Option<Ipv4Net>,
    /// IPv6 pool, with at least two host bits.
    pub v6: Option<Ipv6Net>,
}

impl VirtualIpPools {
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
