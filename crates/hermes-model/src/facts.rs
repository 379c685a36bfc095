//! What is known of a session when it is decided.
//!
//! In: a listener that accepted something and turned it into a request.
//! Out: `Facts`, immutable, owned, and small enough to keep for the whole life of a tunnel,
//! since a live session is decided again after every swap of the snapshot.
//! Never: anything learnt after the decision (endpoint, status, bytes).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::{HeaderMap, Method};
use ipnet::IpNet;

use crate::authority::Authority;

/// What a session carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An HTTP exchange: one request, one response.
    Http,
    /// A byte stream: CONNECT, or a TCP connection that a listener turned into one.
    Tcp,
    /// Datagrams of one UDP flow: CONNECT-UDP (RFC 9298).
    Udp,
    /// IP packets: CONNECT-IP (RFC 9484).
    Ip,
}

impl Kind {
    /// Every kind, in the order of the reference.
    pub const ALL: [Kind; 4] = [Kind::Http, Kind::Tcp, Kind::Udp, Kind::Ip];

    /// Whether it is carried as HTTP Datagrams (RFC 9297).
    pub fn is_datagrams(self) -> bool {
        matches!(self, Kind::Udp | Kind::Ip)
    }

    /// The word that documents, logs and metrics use.
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

/// Who stands at the other end of the connection, proven by its certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// The overlay (trust domain) of its URIs.
    pub overlay: Arc<str>,
    /// `spiffe://OVERLAY/node/NAME`.
    pub node: Option<Arc<str>>,
    /// Every `spiffe://OVERLAY/user/NAME` of the certificate, in its order.
    pub users: Vec<Arc<str>>,
    /// The certificate has `spiffe://OVERLAY/role/standalone`: it may pass on what others asserted.
    pub standalone: bool,
    /// What its key is called (RFC 6920). `None`: that was not asked.
    pub key: Option<Arc<str>>,
}

/// How far the connection that a request came over is believed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Nothing is known: an application on loopback, or anyone.
    #[default]
    Anonymous,
    /// A certificate of this overlay was shown.
    Certified(Arc<Peer>),
    /// No certificate, but the listener's `trust` names its address: believed as a standalone node.
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

    /// Authenticated, or believed by address.
    pub fn is_believed(&self) -> bool {
        !matches!(self, Trust::Anonymous)
    }

    /// A proxy whose statements about its own clients count: a standalone node, or an address in the listener's
    /// `trust`. Any other certificate speaks for its holder alone.
    pub fn is_proxy(&self) -> bool {
        match self {
            Trust::Anonymous => false,
            Trust::Certified(peer) => peer.standalone,
            Trust::Address => true,
        }
    }
}

/// What is known of a session when it is decided.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name of the listener that accepted it.
    pub listener: Arc<str>,
    /// What it carries.
    pub kind: Kind,
    /// Where it came from: the peer's address, or what a believed PROXY header said.
    pub source: SocketAddr,
    /// How far the connection is believed.
    pub trust: Trust,
    /// The user, after `trust::identify` judged what the headers claim.
    pub user: Option<Arc<str>>,
    /// The request's method; CONNECT for tunnels.
    pub method: Method,
    /// Whom it is for. For `udp` the target in the URI template, not the request's `:authority`.
    pub authority: Authority,
    /// Path and query as received, `/` for TCP tunnels. Always begins with `/` (or is `*` for OPTIONS).
    pub path: PathAndQuery,
    /// The request's headers, after identity was judged and the listener's were set.
    pub headers: HeaderMap,
    /// Destination prefix, of `ip` sessions: what the URI template says, or a listener of our own.
    pub network: Option<IpNet>,
    /// The same as a peer told it (`hermes-network`) whose URI has a name, or none: which machine the packets reach is
    /// for the far end to find.
    pub told: Option<IpNet>,
    /// IP protocol number, of `ip` sessions.
    pub protocol: Option<u8>,
}

impl Facts {
    /// `https` where an absent port means 443, else `http` (for tunnels as well).
    pub fn scheme(&self) -> &'static str {
        if self.authority.default_port() == Some(443) { "https" } else { "http" }
    }

    /// The client's address: as a trusted peer names it (`X-Forwarded-For`, else `Forwarded`; the last element counts,
    /// since a peer appends to what its own client sent), else the source of the session.
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

/// Parses an address as proxies write it: perhaps quoted, in brackets, or with a port.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim().trim_matches('"');
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

pub use http::uri::PathAndQuery;
