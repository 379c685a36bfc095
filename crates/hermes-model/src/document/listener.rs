//! `listeners`: where bytes come in.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::keyword::Protocol;
use super::{Bind, is_default};
use crate::scalar::{DeviceName, HostAddress, Many, Prefix};
use crate::snapshot::{CarryNames, ClientAuth};

/// One listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Listener {
    /// Its name, unique among listeners.
    pub name: String,
    /// The address it binds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// For `http`: the upstream at whose endpoints it serves, over connections that it keeps to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dial: Option<String>,
    /// What is spoken there.
    pub protocol: Protocol,
    /// For `tcp` and `udp`: what each connection or flow becomes a request for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Headers that each session gets, over what the client sent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, String>,
    /// TLS; absent is plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ListenerTls>,
    /// Peers believed without a certificate, as standalone nodes are.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub trust: Many<Prefix>,
    /// Sources that begin with a PROXY protocol header.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub proxy_protocol: Many<Prefix>,
    /// Tunnels by POST are accepted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accept_post: bool,
    /// Whether HTTP/2 is spoken; by default it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http2: Option<bool>,
    /// HTTP/3 as well, at the same port of UDP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub http3: bool,
    /// Clients over HTTP/3 may ask with their first packet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub early_data: bool,
    /// For `tun`: the device, which is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// For `tun`: the device's addresses.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub address: Many<HostAddress>,
    /// For `dns`: the names that it answers itself, as patterns of hosts.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub names: Many<String>,
    /// For `dns`: the prefixes that names get their addresses from, one of each version of IP at most.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub addresses: Many<Prefix>,
    /// For `dns`: who is asked for all other names. Default: the system's servers.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub forward: Many<String>,
    /// For `dns`: whether questions for addresses of IPv6 get an answer; by default they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<bool>,
    /// For `tun`: the prefixes whose packets it takes, each a session.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub capture: Many<Capture>,
    /// For `tun`: how it carries what is sent to addresses that stand for names.
    #[serde(default, skip_serializing_if = "is_default")]
    pub carry_names: CarryNames,
    /// For `ip`: where packets go that come to its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Prefix>,
    /// For `ip`: who sends packets.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub peers: Many<Peer>,
}

impl Listener {
    /// One that says no more than that.
    pub fn new(name: &str, protocol: Protocol) -> Self {
        Self {
            name: name.to_owned(),
            bind: Default::default(),
            dial: Default::default(),
            protocol,
            authority: Default::default(),
            set_headers: Default::default(),
            tls: Default::default(),
            trust: Default::default(),
            proxy_protocol: Default::default(),
            accept_post: Default::default(),
            http2: Default::default(),
            http3: Default::default(),
            early_data: Default::default(),
            device: Default::default(),
            address: Default::default(),
            names: Default::default(),
            addresses: Default::default(),
            forward: Default::default(),
            ipv6: Default::default(),
            capture: Default::default(),
            carry_names: Default::default(),
            network: Default::default(),
            peers: Default::default(),
        }
    }
}

/// Who may send IP packets to an `ip` listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Peer {
    /// Where its datagrams come from. Default: this machine.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub from: Many<Prefix>,
    /// Where the packets in them come from.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub address: Many<Prefix>,
}

/// A prefix that a `tun` listener takes: a text, or with headers of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Capture {
    /// Destinations.
    pub network: Prefix,
    /// Headers of its session, over those of the listener.
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
        f.write_str("a prefix such as 10.0.0.0/8, or {network: PREFIX, set-headers: {}}")
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

/// TLS at a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenerTls {
    /// Whether clients show a certificate. Default `required` where a CA is known, else `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientAuth>,
    /// Certificate other than the identity's (PEM).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert: Option<String>,
    /// Its key (PEM).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// CA of client certificates, other than the identity's (PEM).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
}
