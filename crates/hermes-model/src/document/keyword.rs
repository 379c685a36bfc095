//! Words: scalars of a document that are one of a few names.
//!
//! In: a string. Out: the value that it names, or a sentence with the names that may be written.
//! Names of later versions are known as such, so that nobody looks for a misspelling.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::nearest::did_you_mean;
use crate::facts::Kind;
use crate::reach::Reach;
use crate::scalar::TextVisitor;
use crate::snapshot::{CarryNames, ClientAuth, Dispatch, Durable, OnChange, Role, TunnelMethod, UpstreamProtocol};

/// A type with a fixed set of names.
pub(crate) trait Keyword: Copy + PartialEq + 'static {
    /// What it is called in problems, with its article.
    const WHAT: &'static str;
    /// Every name of this version.
    const KEYWORDS: &'static [(&'static str, Self)];
    /// Names of later versions.
    const LATER: &'static [&'static str];
    /// Names of what is written otherwise, and how.
    const OTHERWISE: &'static [(&'static str, &'static str)];
}

/// Reads a word.
pub(crate) fn parse<K: Keyword>(text: &str) -> Result<K, String> {
    if let Some((_, value)) = K::KEYWORDS.iter().find(|(keyword, _)| *keyword == text) {
        return Ok(*value);
    }
    let keywords: Vec<&str> = K::KEYWORDS.iter().map(|(keyword, _)| *keyword).collect();
    let choice = match keywords.as_slice() {
        [only] => format!("write {only}"),
        many => format!("write one of {}", many.join(", ")),
    };
    if K::LATER.contains(&text) {
        return Err(format!("{text} is not in this version of Hermes; {choice}"));
    }
    if let Some((_, remedy)) = K::OTHERWISE.iter().find(|(keyword, _)| *keyword == text) {
        return Err(format!("{text:?} is no {}; {remedy}", K::WHAT));
    }
    let hint = did_you_mean(text, keywords.iter().copied());
    let remedy = if hint.is_empty() { format!("; {choice}") } else { hint };
    Err(format!("{text:?} is no {}{remedy}", K::WHAT))
}

/// The name of a value.
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
    Dispatch,
    "dispatch",
    ["reuseport" = Dispatch::Reuseport, "exclusive" = Dispatch::Exclusive],
    later ["directed", "roundrobin"]
);
keywords!(
    ClientAuth,
    "client authentication",
    ["none" = ClientAuth::None, "optional" = ClientAuth::Optional, "required" = ClientAuth::Required]
);
keywords!(TunnelMethod, "tunnel method", ["CONNECT" = TunnelMethod::Connect, "POST" = TunnelMethod::Post]);
keywords!(CarryNames, "way to carry names", ["packets" = CarryNames::Packets, "flows" = CarryNames::Flows]);
keywords!(Durable, "degree of durability", ["process" = Durable::Process, "fsync" = Durable::Fsync]);
keywords!(OnChange, "reaction to a change", ["keep" = OnChange::Keep, "move" = OnChange::Move]);
keywords!(Reach, "reach", ["public" = Reach::Public, "private" = Reach::Private, "any" = Reach::Any]);
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

/// What a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 and HTTP/2.
    Http,
    /// Byte streams.
    Tcp,
    /// Datagrams.
    Udp,
    /// IP packets of a device of its own.
    Tun,
    /// SOCKS 5.
    Socks5,
    /// Questions of programs that only know DNS.
    Dns,
    /// IP packets in UDP datagrams.
    Ip,
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
    ],
    later ["transparent", "ndn"],
    otherwise ["h3" = "write protocol: http and http3: true", "h2" = "write protocol: http, which speaks it too"]
);

/// A version of the PROXY protocol that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyVersion {
    /// The binary one.
    V2,
}
keywords!(ProxyVersion, "version of the PROXY protocol to send", ["v2" = ProxyVersion::V2]);
