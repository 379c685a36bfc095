//! `upstreams`: named sets of endpoints.

use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::keyword::ProxyVersion;
use crate::scalar::{Many, Period};
use crate::snapshot::{HostPort, TunnelMethod, UpstreamProtocol};

/// One upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Upstream {
    /// Its name, unique among upstreams.
    pub name: String,
    /// What is spoken to it.
    pub protocol: UpstreamProtocol,
    /// At least one, or `node`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub endpoints: Many<Endpoint>,
    /// Short for endpoints that are all nodes which keep connections to us.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub node: Many<String>,
    /// Used in this order, and only while none of the endpoints is up.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub backup: Many<Endpoint>,
    /// How one is chosen.
    #[serde(default, skip_serializing_if = "is_default")]
    pub balance: Balance,
    /// Active probing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// Passive watching.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outlier: Outlier,
    /// How TCP is carried over HTTP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tunnel_method: TunnelMethod,
    /// TLS; absent is plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<UpstreamTls>,
    /// Begin connections with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyVersion>,
    /// Whether the far end is a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<bool>,
    /// True if the upstream is a forward proxy, which accepts requests for any origin.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forward_proxy: bool,
    /// When the link to it comes, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contact: Option<Contact>,
}

impl Upstream {
    /// One without endpoints yet.
    pub fn new(name: &str, protocol: UpstreamProtocol) -> Self {
        Self {
            name: name.to_owned(),
            protocol,
            endpoints: Default::default(),
            node: Default::default(),
            backup: Default::default(),
            balance: Default::default(),
            health: Default::default(),
            outlier: Default::default(),
            tunnel_method: Default::default(),
            tls: Default::default(),
            proxy_protocol: Default::default(),
            overlay: Default::default(),
            forward_proxy: Default::default(),
            contact: Default::default(),
        }
    }
}

/// `contact` of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Contact {
    /// It comes so often.
    pub every: Period,
    /// So long after each of these periods has begun; the first began with 1970. Default 0 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<Period>,
}

/// `HOST:PORT`, or `{node: NAME}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// It is dialled.
    Address(HostPort),
    /// A node that keeps a connection to us.
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
                "an endpoint is HOST:PORT, or {node: NAME} for a node that keeps a connection to this one",
            )),
        }
    }
}

/// `balance`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Balance {
    /// In turn.
    RoundRobin,
    /// By chance.
    Random,
    /// The less busy of two.
    #[default]
    LeastRequest,
    /// By a header's value.
    Hash(HashOn),
}

/// `balance.hash`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HashOn {
    /// The header.
    pub header: String,
}

/// `health`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Health {
    /// Path of a GET that must answer 2xx; absent only connects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Between probes. Default 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Period>,
    /// For one probe. Default 2 s, or the interval where that is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Period>,
    /// Successes in a row. Default 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<u32>,
    /// Failures in a row. Default 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<u32>,
}

/// `outlier`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Outlier {
    /// Failures in a row before a rest; 0 is off. Default 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<u32>,
    /// The first rest. Default 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Period>,
}

/// `tls` of an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UpstreamTls {
    /// Name to ask for and to verify.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// Nodes that the far end may be.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub node: Many<String>,
    /// CA other than the identity's (PEM).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// Show no certificate of ours.
    #[serde(default, skip_serializing_if = "is_default")]
    pub anonymous: bool,
}
