//! `upstreams`: named sets of endpoints.

use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::keyword::ProxyVersion;
use crate::scalar::{CongestionControl, HumanDuration, OneOrMany};
use crate::snapshot::{HostPort, TunnelMethod, UpstreamProtocol};

/// An upstream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Upstream {
    /// Unique name.
    pub name: String,
    /// Protocol of the endpoints.
    pub protocol: UpstreamProtocol,
    /// Endpoints. At least one, unless `node` is set.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub endpoints: OneOrMany<Endpoint>,
    /// Short form of endpoints that are all nodes with reverse connections.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub node: OneOrMany<String>,
    /// Backup endpoints, used in this order, and only while no regular endpoint is up.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub backup: OneOrMany<Endpoint>,
    /// Load-balancing policy.
    #[serde(default, skip_serializing_if = "is_default")]
    pub balance: Balance,
    /// Active health checks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// Outlier detection (passive health checks).
    #[serde(default, skip_serializing_if = "is_default")]
    pub outlier: Outlier,
    /// Method that opens a TCP tunnel over HTTP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tunnel_method: TunnelMethod,
    /// TLS; absent is plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<UpstreamTls>,
    /// Begin connections with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyVersion>,
    /// Whether the endpoint is a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<bool>,
    /// The upstream is a forward proxy, which accepts requests for any origin.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forward_proxy: bool,
    /// Congestion control of TCP connections to the endpoints. Default: the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion: Option<CongestionControl>,
    /// Contact plan of an intermittent link, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contact_plan: Option<Contact>,
}

impl Upstream {
    /// An upstream without endpoints.
    pub fn new(name: &str, protocol: UpstreamProtocol) -> Self {
        Self { name: name.to_owned(), protocol, ..Self::default() }
    }
}

/// `contact-plan` of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Contact {
    /// Period of the contact plan.
    pub every: HumanDuration,
    /// Offset within each period; the first period started at the Unix epoch. Default 0 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<HumanDuration>,
}

/// `HOST:PORT`, or `{node: NAME}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// An address to dial.
    Address(HostPort),
    /// A node with a reverse connection to this node.
    Node(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Address(address) => address.fmt(f),
            Endpoint::Node(node) => write!(f, "node {node}"),
        }
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Endpoint::Address(address) => address.serialize(serializer),
            Endpoint::Node(node) => {
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("node", node)?;
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EndpointVisitor)
    }
}

struct EndpointVisitor;

impl<'de> Visitor<'de> for EndpointVisitor {
    type Value = Endpoint;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a host and port such as 192.0.2.1:9443, or {node: NAME}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Endpoint, E> {
        text.parse().map(Endpoint::Address).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Endpoint, A::Error> {
        match map.next_entry::<String, String>()? {
            Some((key, node)) if key == "node" && map.next_key::<String>()?.is_none() => Ok(Endpoint::Node(node)),
            _ => Err(de::Error::custom(
                "invalid endpoint; use HOST:PORT, or {node: NAME} for a node with a reverse connection to this one",
            )),
        }
    }
}

/// `balance`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Balance {
    /// Round robin.
    RoundRobin,
    /// Uniformly at random.
    Random,
    /// The less busy of two random endpoints.
    #[default]
    LeastRequest,
    /// Hash of a header field's value.
    Hash(HashOn),
}

/// `balance.hash`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HashOn {
    /// Field name.
    pub header: String,
}

/// `health`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Health {
    /// Path of a GET that must return 2xx; without it, a probe only opens a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Time between probes. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<HumanDuration>,
    /// Maximum duration of a probe. Default 2 s, or the interval if shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
    /// Consecutive successes. Default 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<u32>,
    /// Consecutive failures. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<u32>,
}

/// `outlier`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Outlier {
    /// Consecutive failures before ejection; 0 disables it. Default 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<u32>,
    /// First ejection time. Default 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ejection_time: Option<HumanDuration>,
}

/// `tls` of an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UpstreamTls {
    /// Server name to send (SNI) and to verify.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// Nodes that the peer may be.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub node: OneOrMany<String>,
    /// CA (PEM) other than that of the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// Present no client certificate.
    #[serde(default, skip_serializing_if = "is_default")]
    pub anonymous: bool,
}
