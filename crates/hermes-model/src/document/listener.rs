//! `listeners`: entry points for sessions.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::keyword::Protocol;
use super::{Bind, is_default};
use crate::scalar::{CongestionControl, DeviceName, HostAddress, NdnName, OneOrMany, Prefix};
use crate::snapshot::{CarryNames, ClientAuth};

/// A listener.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Listener {
    /// Unique name.
    pub name: String,
    /// Address to bind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// Serve on connections that the node itself opens to the endpoints of this upstream (`http`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dial: Option<String>,
    /// Protocol that clients speak.
    pub protocol: Protocol,
    /// Target of each connection or flow (`tcp` and `udp`; default `NDN:6363` for `ndn`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Fields set on the header of each session; they replace those of the client.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, String>,
    /// TLS; absent is plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ListenerTls>,
    /// Peers trusted without a certificate, as standalone nodes are.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub trust: OneOrMany<Prefix>,
    /// Sources that begin with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub proxy_protocol: OneOrMany<Prefix>,
    /// Accept tunnels by POST.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accept_post: bool,
    /// Whether clients may negotiate HTTP/2. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http2: Option<bool>,
    /// Serve HTTP/3 too, on the UDP port of the same number.
    #[serde(default, skip_serializing_if = "is_default")]
    pub http3: bool,
    /// Accept HTTP/3 requests in 0-RTT data.
    #[serde(default, skip_serializing_if = "is_default")]
    pub early_data: bool,
    /// Name of the device; the node creates it (`tun`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// Addresses of the device (`tun`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub address: OneOrMany<HostAddress>,
    /// Host patterns of names that the node answers itself (`dns`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub names: OneOrMany<String>,
    /// Pools of virtual addresses, at most one per IP version (`dns`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub addresses: OneOrMany<Prefix>,
    /// Resolvers for all other names (`dns`). Default: those of the system.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub forward: OneOrMany<String>,
    /// Whether AAAA queries get virtual addresses (`dns`). Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<bool>,
    /// Captured prefixes; each is a session (`tun`), or each of its connections (`transparent`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub capture: OneOrMany<Capture>,
    /// Destination ports to intercept (`transparent`). Default: all.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub ports: OneOrMany<u16>,
    /// Whether a client's SYN is answered only when the far connection stands (`transparent`). Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_syn: Option<bool>,
    /// The connections carry HTTP (`transparent`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub http: bool,
    /// Intercept UDP flows, too (`transparent`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub udp: bool,
    /// Absolute path of a Unix socket, beside `bind` or instead of it (`ndn`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix: Option<String>,
    /// Prefixes of NDN names, by the name of their namespace (`ndn`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub namespaces: BTreeMap<String, OneOrMany<NdnName>>,
    /// Hosts of HTTP content that is published under NDN names, by the prefix of the names (`ndn`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub content: BTreeMap<NdnName, String>,
    /// Private key (PEM, PKCS#8) that signs the published content (`ndn`). Default: digests instead of signatures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signing_key: Option<String>,
    /// Name of the signing key, which consumers see (`ndn`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_name: Option<NdnName>,
    /// Name of the DIF (`rina`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dif: Option<String>,
    /// File with the key that the members of the DIF share (`rina`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dif_key: Option<String>,
    /// Congestion control of the connections that it accepts. Default: the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion: Option<CongestionControl>,
    /// Most client connections of this listener. Default: those of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<usize>,
    /// Encoding of traffic to virtual addresses (`tun`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub carry_names: CarryNames,
    /// Destination of the packets (`ip`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Prefix>,
    /// Peers that may send packets (`ip`).
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub peers: OneOrMany<Peer>,
}

impl Listener {
    /// A listener with defaults only.
    pub fn new(name: &str, protocol: Protocol) -> Self {
        Self { name: name.to_owned(), protocol, ..Self::default() }
    }
}

/// A peer that may send IP packets to an `ip` listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Peer {
    /// Source addresses of its datagrams. Default: this machine.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub from: OneOrMany<Prefix>,
    /// Source addresses of the packets.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub address: OneOrMany<Prefix>,
}

/// A prefix that a `tun` listener captures: a string, or a map with headers of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Capture {
    /// Destination network.
    pub network: Prefix,
    /// Fields set on the header of its session; they replace those of the listener.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Capture {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CaptureVisitor)
    }
}

struct CaptureVisitor;

impl<'de> Visitor<'de> for CaptureVisitor {
    type Value = Capture;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a network such as 10.0.0.0/8, or {network: PREFIX, set-headers: {}}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Capture, E> {
        let network = text.parse().map_err(E::custom)?;
        Ok(Capture { network, set_headers: BTreeMap::new() })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Capture, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        struct Whole {
            network: Prefix,
            #[serde(default)]
            set_headers: BTreeMap<String, String>,
        }
        let Whole { network, set_headers } = Whole::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Capture { network, set_headers })
    }
}

/// TLS of a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenerTls {
    /// Whether clients must present a certificate. Default `required` if a CA is known, else `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientAuth>,
    /// Certificate (PEM) other than that of the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert: Option<String>,
    /// Key (PEM) of the certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// CA of client certificates (PEM) other than that of the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
}
