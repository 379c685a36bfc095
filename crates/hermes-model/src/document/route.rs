//! `routes`: each has a match and one action.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use http::Method;
use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::keyword::{ProxyVersion, Source};
use super::policy::{Cache, Custody, Resume, Retry, Rewrite, Timeout, UpstreamRateLimit};
use super::relay::Relay;
use crate::dial_scope::DialScope;
use crate::facts::Kind;
use crate::pattern::{AuthorityPattern, PathPattern, UserPattern, ValuePattern};
use crate::rewrite::Template;
use crate::scalar::{CongestionControl, DeviceName, FaceUri, HostAddress, NdnName, OneOrMany, Prefix, text_scalar};
use crate::snapshot::{HostPort, Importance, OnChange, Target};

/// A route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Route {
    /// Unique name.
    pub name: String,
    /// Conditions; an absent match matches everything.
    #[serde(default, rename = "match", skip_serializing_if = "is_default")]
    pub matching: Match,
    /// Forward to the upstream of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Leave the overlay at this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminate: Option<Terminate>,
    /// Serve the URIs as channels of publish and subscribe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<Relay>,
    /// Respond at this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub respond: Option<Respond>,
    /// Redirect the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<Redirect>,
    /// Changes to requests and responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewrite: Option<Rewrite>,
    /// Retry policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Custody: each node stores an exchange until the next one has acknowledged it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custody: Option<Custody>,
    /// Cache of responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Adaptive rate limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_rate_limit: Option<UpstreamRateLimit>,
    /// Resumable download.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Resume>,
    /// The origin executes requests with the same `Idempotency-Key` once.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idempotency_key: bool,
    /// Timeouts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
    /// Effect of a changed route on live sessions.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_change: OnChange,
    /// Whether requests in TLS early data are served. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_data: Option<bool>,
    /// How late its sessions are refused under overload.
    #[serde(default, skip_serializing_if = "is_default")]
    pub importance: Importance,
}

impl Route {
    /// A route that matches everything and has no action yet.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }
}

/// A conjunction; each field is one value or a list, of which one must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Match {
    /// Listener names.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub listener: OneOrMany<String>,
    /// `http`, `tcp`, `udp`, `ip`.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub kind: OneOrMany<Kind>,
    /// Patterns for the target's authority.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub authority: OneOrMany<AuthorityPattern>,
    /// Patterns for the path without the query.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub path: OneOrMany<PathPattern>,
    /// Methods.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub method: OneOrMany<MethodName>,
    /// By field name: patterns, one of which must match a line of the field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, OneOrMany<ValuePattern>>,
    /// Users; `*` is any authenticated user.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub user: OneOrMany<UserPattern>,
    /// Destination networks of `ip` sessions.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub network: OneOrMany<Prefix>,
    /// IP protocols of `ip` sessions.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub protocol: OneOrMany<IpProtocol>,
    /// Ports of the authority.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub port: OneOrMany<u16>,
}

macro_rules! pattern_scalar {
    ($type:ty, $expecting:literal) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                <$type>::parse(text)
            }
        }
        text_scalar!($type, $expecting);
    };
}
pattern_scalar!(AuthorityPattern, "an authority such as VIDEO, DB:3306 or *.example.com");
pattern_scalar!(PathPattern, "a path such as /hello or /files/*");
pattern_scalar!(ValuePattern, "a string");
pattern_scalar!(UserPattern, "a string (a user's name)");

/// A method; case-sensitive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodName(pub Method);
text_scalar!(MethodName, "a method such as GET");

impl FromStr for MethodName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        if upper != text {
            return Err(format!("invalid method {text:?}: methods are case-sensitive; use {upper}"));
        }
        Method::from_str(text)
            .map(MethodName)
            .map_err(|_| format!("invalid method {text:?}; use a token such as GET, POST or CONNECT"))
    }
}

impl fmt::Display for MethodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An IP protocol: its number, or `icmp`, `tcp`, `udp`, `icmpv6`, `sctp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpProtocol(pub u8);

/// Names from the IANA registry of assigned internet protocol numbers.
const IP_PROTOCOLS: [(&str, u8); 5] = [("icmp", 1), ("tcp", 6), ("udp", 17), ("icmpv6", 58), ("sctp", 132)];

impl Serialize for IpProtocol {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.0)
    }
}

impl<'de> Deserialize<'de> for IpProtocol {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IpProtocolVisitor)
    }
}

struct IpProtocolVisitor;

impl Visitor<'_> for IpProtocolVisitor {
    type Value = IpProtocol;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an IP protocol: 0 to 255, or icmp, tcp, udp, icmpv6, sctp")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<IpProtocol, E> {
        u8::try_from(number).map(IpProtocol).map_err(|_| {
            E::custom(format!("invalid IP protocol {number}; use 0 to 255, or icmp, tcp, udp, icmpv6, sctp"))
        })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<IpProtocol, E> {
        let known = IP_PROTOCOLS.iter().find(|(name, _)| *name == text);
        known.map(|(_, number)| IpProtocol(*number)).ok_or_else(|| {
            E::custom(format!("unknown IP protocol {text:?}; use 0 to 255, or icmp, tcp, udp, icmpv6, sctp"))
        })
    }
}

/// `terminate`: exactly one of `tcp`, `udp`, `http`, `ndn`, `rina`, `tun` and `race`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Terminate {
    /// TCP destination to dial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Target>,
    /// UDP destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Target>,
    /// Face of an NDN forwarder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ndn: Option<FaceUri>,
    /// Public keys (PEM) that verify the content of NDN names, by prefix (`ndn`, for `http` sessions).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub anchors: BTreeMap<NdnName, String>,
    /// Accept content with a digest instead of a signature, which anybody can make (`ndn`, for `http` sessions).
    #[serde(default, skip_serializing_if = "is_default")]
    pub accept_digest: bool,
    /// Send frames over UDP again that the forwarder does not acknowledge (`ndn`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub reliable: bool,
    /// Destinations for the same sessions, of which the best is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub race: Vec<Terminate>,
    /// Neighbour in a DIF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rina: Option<HostPort>,
    /// Name of the DIF (`rina`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dif: Option<String>,
    /// File with the key that the members of the DIF share (`rina`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dif_key: Option<String>,
    /// Name of the application at the neighbour (`rina`). Default: the host of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub application: Option<String>,
    /// HTTP origin for the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Target>,
    /// Name of the device for the packets; the node creates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tun: Option<DeviceName>,
    /// Addresses of the device (`tun`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub address: OneOrMany<HostAddress>,
    /// Networks from which clients get addresses (`tun`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub assign: OneOrMany<Prefix>,
    /// Clients may request whole networks of `assign` (`tun`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub assign_networks: bool,
    /// NAT to this machine's own address (`tun`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat: bool,
    /// 1:1 NAT; packets go to this address, whichever address the client requests (`tun`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dnat: Option<HostAddress>,
    /// Address ranges that the request may name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<DialScope>,
    /// Never dial the node's own listeners, its `admin` endpoint, its controllers or a metadata service.
    #[serde(default, skip_serializing_if = "is_default")]
    pub guard: bool,
    /// Begin with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyVersion>,
    /// The source address of the connection (`tcp` and `udp`). Default: this node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Congestion control of the connection (`tcp`). Default: the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion: Option<CongestionControl>,
    /// Verification of the origins of `https` requests (`http: authority`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<OriginTls>,
}

/// `terminate.tls`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OriginTls {
    /// CA certificates (PEM) instead of those of the system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "authority" => Ok(Target::Authority),
            "original" => Ok(Target::Original),
            _ => text.parse::<HostPort>().map(Target::Fixed).map_err(|error| format!("{error}, authority or original")),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Authority => f.write_str("authority"),
            Target::Original => f.write_str("original"),
            Target::Fixed(target) => target.fmt(f),
        }
    }
}
text_scalar!(Target, "authority, original, or a host and port such as 127.0.0.1:7000");

/// `respond`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Respond {
    /// Status. Default 200.
    #[serde(default = "Respond::status", deserialize_with = "final_status")]
    pub status: u16,
    /// Fields of the response header.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Body.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub body: String,
}

impl Respond {
    fn status() -> u16 {
        200
    }
}

/// `redirect`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Redirect {
    /// Status. Default 308.
    #[serde(default = "Redirect::status", deserialize_with = "redirection")]
    pub status: u16,
    /// Target of the redirect.
    pub location: Template,
}

impl Redirect {
    fn status() -> u16 {
        308
    }
}

fn final_status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    deserializer.deserialize_u16(StatusVisitor { named: "a status from 200 to 599" })
}

fn redirection<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    deserializer.deserialize_u16(StatusVisitor { named: "one of 301, 302, 303, 307 and 308" })
}

/// Parses an integer that may be a status; `check` validates it.
struct StatusVisitor {
    /// Description of the valid statuses.
    named: &'static str,
}

impl Visitor<'_> for StatusVisitor {
    type Value = u16;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.named)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<u16, E> {
        u16::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<u16, E> {
        u16::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }
}
