//! Keywords: scalars of a document that are one of a few names.
//!
//! In: a string. Out: its value, or a message with the valid names. Names of later versions get a message of their own,
//! because they are no misspelling.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::did_you_mean::did_you_mean;
use crate::dial_scope::DialScope;
use crate::facts::Kind;
use crate::scalar::TextVisitor;
use crate::snapshot::{
    CarryNames, ClientAuth, DispatchMode, Durable, Importance, OnChange, RelayMode, Role, RootChoice, TunnelMethod,
    UpstreamProtocol,
};

/// A type with a fixed set of keywords.
pub(crate) trait Keyword: Copy + PartialEq + 'static {
    /// Description of the type in messages.
    const WHAT: &'static str;
    /// All keywords of this version.
    const KEYWORDS: &'static [(&'static str, Self)];
    /// Keywords of later versions.
    const LATER: &'static [&'static str];
    /// Frequent wrong keywords, each with the remedy.
    const OTHERWISE: &'static [(&'static str, &'static str)];
}

/// Parses a keyword.
pub(crate) fn parse<K: Keyword>(text: &str) -> Result<K, String> {
    if let Some((_, value)) = K::KEYWORDS.iter().find(|(keyword, _)| *keyword == text) {
        return Ok(*value);
    }
    let keywords: Vec<&str> = K::KEYWORDS.iter().map(|(keyword, _)| *keyword).collect();
    let expected = match keywords.as_slice() {
        [only] => format!("expected {only}"),
        many => format!("expected one of: {}", many.join(", ")),
    };
    if K::LATER.contains(&text) {
        return Err(format!("{} {text:?} is not supported by this version of Hermes; {expected}", K::WHAT));
    }
    if let Some((_, remedy)) = K::OTHERWISE.iter().find(|(keyword, _)| *keyword == text) {
        return Err(format!("unknown {} {text:?}; {remedy}", K::WHAT));
    }
    let hint = did_you_mean(text, keywords.iter().copied());
    let remedy = if hint.is_empty() { format!("; {expected}") } else { hint };
    Err(format!("unknown {} {text:?}{remedy}", K::WHAT))
}

/// The keyword of a value.
pub(crate) fn name<K: Keyword>(value: K) -> &'static str {
    K::KEYWORDS.iter().find(|(_, known)| *known == value).map_or("", |(keyword, _)| keyword)
}

macro_rules! keywords {
    ($type:ty, $what:literal, [$($keyword:literal = $value:expr),* $(,)?] $(, later [$($later:literal),*])?
     $(, otherwise [$($other:literal = $remedy:literal),*])?) => {
        impl Keyword for $type {
            const WHAT: &'static str = $what;
            const KEYWORDS: &'static [(&'static str, Self)] = &[$(($keyword, $value)),*];
            const LATER: &'static [&'static str] = &[$($($later),*)?];
            const OTHERWISE: &'static [(&'static str, &'static str)] = &[$($(($other, $remedy)),*)?];
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                parse(text)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(name(*self))
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(TextVisitor::new(concat!("a ", $what)))
            }
        }
    };
}

keywords!(Kind, "kind", ["http" = Kind::Http, "tcp" = Kind::Tcp, "udp" = Kind::Udp, "ip" = Kind::Ip]);
keywords!(Role, "role", ["dependent" = Role::Dependent, "standalone" = Role::Standalone]);
keywords!(
    DispatchMode,
    "dispatch",
    [
        "directed" = DispatchMode::Directed,
        "reuseport" = DispatchMode::Reuseport,
        "exclusive" = DispatchMode::Exclusive,
        "roundrobin" = DispatchMode::RoundRobin
    ]
);
keywords!(
    Importance,
    "importance",
    ["low" = Importance::Low, "normal" = Importance::Normal, "high" = Importance::High]
);
keywords!(
    ClientAuth,
    "client authentication",
    ["none" = ClientAuth::None, "optional" = ClientAuth::Optional, "required" = ClientAuth::Required]
);
keywords!(TunnelMethod, "tunnel method", ["CONNECT" = TunnelMethod::Connect, "POST" = TunnelMethod::Post]);
keywords!(CarryNames, "encoding of names", ["packets" = CarryNames::Packets, "flows" = CarryNames::Flows]);
keywords!(RootChoice, "choice of a root", ["hash" = RootChoice::Hash, "first" = RootChoice::First]);
keywords!(RelayMode, "relay mode", ["realtime" = RelayMode::Realtime, "reliable" = RelayMode::Reliable]);
keywords!(Durable, "durability", ["process" = Durable::Process, "fsync" = Durable::Fsync]);
keywords!(OnChange, "change policy", ["keep" = OnChange::Keep, "move" = OnChange::Move]);
keywords!(DialScope, "reach", ["public" = DialScope::Public, "private" = DialScope::Private, "any" = DialScope::Any]);
keywords!(
    UpstreamProtocol,
    "upstream protocol",
    [
        "h1" = UpstreamProtocol::H1,
        "h2" = UpstreamProtocol::H2,
        "h3" = UpstreamProtocol::H3,
        "tcp" = UpstreamProtocol::Tcp,
        "auto" = UpstreamProtocol::Auto
    ],
    later["ndn"]
);

impl fmt::Display for UpstreamProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name(*self))
    }
}

/// Protocol of a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 and HTTP/2.
    #[default]
    Http,
    /// TCP connections.
    Tcp,
    /// UDP datagrams.
    Udp,
    /// IP packets of a virtual device.
    Tun,
    /// SOCKS 5.
    Socks5,
    /// DNS queries.
    Dns,
    /// IP packets in UDP datagrams.
    Ip,
    /// TCP connections to other hosts, intercepted on their way.
    Transparent,
    /// NDN packets over UDP and TCP.
    Ndn,
    /// Flows that neighbours of a DIF request.
    Rina,
}
keywords!(
    Protocol,
    "listener protocol",
    [
        "http" = Protocol::Http,
        "tcp" = Protocol::Tcp,
        "udp" = Protocol::Udp,
        "tun" = Protocol::Tun,
        "socks5" = Protocol::Socks5,
        "dns" = Protocol::Dns,
        "ip" = Protocol::Ip,
        "transparent" = Protocol::Transparent,
        "ndn" = Protocol::Ndn,
        "rina" = Protocol::Rina,
    ],
    otherwise ["h3" = "use protocol: http with http3: true", "h2" = "use protocol: http, which includes HTTP/2"]
);

/// The source address of connections that a terminating route opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An address of this node.
    Node,
    /// The address and port of the client.
    Client,
}
keywords!(Source, "source", ["node" = Source::Node, "client" = Source::Client]);

/// PROXY protocol version to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyVersion {
    /// Version 2, the binary one.
    V2,
}
keywords!(ProxyVersion, "PROXY protocol version", ["v2" = ProxyVersion::V2]);
