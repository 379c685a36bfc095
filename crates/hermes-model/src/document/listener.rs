//! `listeners`: where bytes come in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::scalar::{Many, Prefix};
use super::word::Protocol;
use super::{Bind, is_default};
use crate::snapshot::ClientAuth;

/// One listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Listener {
    /// Its name, unique among listeners.
    pub name: String,
    /// The address it binds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
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
    /// Sources that begin with a PROXY protocol v2 header.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub proxy_protocol: Many<Prefix>,
    /// Tunnels by POST are accepted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accept_post: bool,
    /// HTTP/3 as well, at the same port of UDP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub http3: bool,
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
