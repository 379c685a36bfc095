//! Attributes of a session at the time of the decision.
//!
//! In: a listener that accepted a connection, flow or request.
//! Out: `Facts`, immutable and owned. A session keeps them for its whole life, because each new snapshot decides live
//! sessions again.
//! Never: anything known only after the decision (endpoint, status, bytes).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::{HeaderMap, Method};
use ipnet::IpNet;

use crate::authority::Authority;

/// The content of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An HTTP exchange: one request, one response.
    Http,
    /// A byte stream: CONNECT, or a TCP connection that a listener accepted.
    Tcp,
    /// Datagrams of one UDP flow: CONNECT-UDP (RFC 9298).
    Udp,
    /// IP packets: CONNECT-IP (RFC 9484).
    Ip,
}

impl Kind {
    /// Every kind, in the order of the reference.
    pub const ALL: [Kind; 4] = [Kind::Http, Kind::Tcp, Kind::Udp, Kind::Ip];

    /// True for kinds that HTTP Datagrams carry (RFC 9297).
    pub fn is_datagrams(self) -> bool {
        matches!(self, Kind::Udp | Kind::Ip)
    }

    /// The keyword in documents, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Http => "http",
            Kind::Tcp => "tcp",
            Kind::Udp => "udp",
            Kind::Ip => "ip",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The authenticated peer of a connection, as its certificate names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// The overlay (trust domain) of the certificate's URIs.
    pub overlay: Arc<str>,
    /// NAME of `spiffe://OVERLAY/node/NAME`.
    pub node: Option<Arc<str>>,
    /// NAME of every `spiffe://OVERLAY/user/NAME`, in the certificate's order.
    pub users: Vec<Arc<str>>,
    /// The certificate has `spiffe://OVERLAY/role/standalone`: the peer may pass on identities that others asserted.
    pub standalone: bool,
    /// Name of the peer's key (RFC 6920); `None` if the caller did not ask for it.
    pub key: Option<Arc<str>>,
}

/// Authentication of the connection that carries the session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// No authentication: an application on loopback, or anyone.
    #[default]
    Anonymous,
    /// The peer presented a certificate of this overlay.
    Certified(Arc<Peer>),
    /// The listener's `trust` contains the peer's address, which counts as a standalone node.
    Address,
}

impl Trust {
    /// The peer of an authenticated connection.
    pub fn peer(&self) -> Option<&Arc<Peer>> {
        match self {
            Trust::Certified(peer) => Some(peer),
            _ => None,
        }
    }

    /// True if the peer is authenticated, or trusted by address.
    pub fn is_believed(&self) -> bool {
        !matches!(self, Trust::Anonymous)
    }

    /// True for a proxy that may describe its own clients: a standalone node, or an address in the listener's `trust`.
    /// Any other certificate only speaks for its holder.
    pub fn is_proxy(&self) -> bool {
        match self {
            Trust::Anonymous => false,
            Trust::Certified(peer) => peer.standalone,
            Trust::Address => true,
        }
    }
}

/// Attributes of a session at the time of the decision.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name of the listener that accepted the session.
    pub listener: Arc<str>,
    /// Content of the session.
    pub kind: Kind,
    /// Source address: the peer's, or the one in a trusted PROXY protocol header.
    pub source: SocketAddr,
    /// Authentication of the connection.
    pub trust: Trust,
    /// The user, after `trust::identify` verified the claim in the headers.
    pub user: Option<Arc<str>>,
    /// Request method; CONNECT for tunnels.
    pub method: Method,
    /// Target of the session. For `udp`, the target in the URI template, not the request's `:authority`.
    pub authority: Authority,
    /// Path and query as received; `/` for TCP tunnels. Always begins with `/`, or is `*` for OPTIONS.
    pub path: PathAndQuery,
    /// Header fields, after the identity was verified and those of the listener were set.
    pub headers: HeaderMap,
    /// Destination network of an `ip` session, from the URI template or from a listener of this node.
    pub network: Option<IpNet>,
    /// Destination network that a peer announced (`hermes-network`), if the URI has a name or no target. The last node
    /// resolves the name, so the announced network is only a hint.
    pub announced_network: Option<IpNet>,
    /// IP protocol number of an `ip` session.
    pub protocol: Option<u8>,
}

impl Facts {
    /// `https` if an absent port means 443, else `http`; tunnels have a scheme as well.
    pub fn scheme(&self) -> &'static str {
        if self.authority.default_port() == Some(443) { "https" } else { "http" }
    }

    /// The client's address: the one that a trusted peer reports, else the source of the session. `X-Forwarded-For`
    /// precedes `Forwarded`. The last element counts, because a peer appends to what its own client sent.
    pub fn client_address(&self) -> IpAddr {
        let said = || {
            let last = |name: &str| self.headers.get_all(name).iter().next_back()?.to_str().ok()?.rsplit(',').next();
            let forwarded = || {
                let mut pairs = last("forwarded")?.split(';').filter_map(|pair| pair.split_once('='));
                pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("for")).map(|(_, value)| value)
            };
            last("x-forwarded-for").and_then(address).or_else(|| forwarded().and_then(address))
        };
        let said = if self.trust.is_proxy() { said() } else { None };
        said.unwrap_or(self.source.ip()).to_canonical()
    }
}

/// Parses an address in the forms that proxies write: quoted, in brackets, or with a port.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim().trim_matches('"');
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

pub use http::uri::PathAndQuery;
