//! A node: its address, its links, and its apps.

use hermes_model::document::dispatch::DispatchSection;
use hermes_model::document::listener::Listener;
use hermes_model::document::overload::OverloadSection;
use hermes_model::document::scalar::{DeviceName, HostAddress, HumanDuration, OneOrMany, Prefix};
use hermes_model::document::{AccessLog, Bind, Workers};
use hermes_model::limits::LimitsSection;
use hermes_model::snapshot::{HostPort, Role};
use serde::{Deserialize, Serialize};

use super::is_default;
use super::name::{Name, Reference};
use super::overlay::NeighbourHealth;

/// The content of a document of `kind: Node`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Node {
    /// The role: a standalone node forwards sessions of other nodes; at a dependent node, sessions only begin and end.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// The program that the node runs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub runs: Program,
    /// The address that other nodes dial; `None` if other nodes cannot dial this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<HostPort>,
    /// The address on which the node listens; `None` for all addresses, with the port of `address`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// True if other nodes dial the node over HTTP/3.
    #[serde(default, skip_serializing_if = "is_default")]
    pub http3: bool,
    /// Nodes that this node dials. If both list each other, or one has no address, one link carries both directions.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub links: OneOrMany<Name>,
    /// Providers whose services, users and groups may use the node. Ignored if the overlay has no providers.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub providers: OneOrMany<Name>,
    /// Listeners for applications on the node's host.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub apps: OneOrMany<App>,
    /// Further listeners, as in a node document.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listeners: Vec<Listener>,
    /// The admin endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// The drain timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<HumanDuration>,
    /// True if the node receives no new sessions, so that it can be removed. `None` does not change a drain, so that
    /// applying a file again does not end it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<bool>,
    /// Worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub workers: Workers,
    /// The distribution of connections over workers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dispatch: DispatchSection,
    /// The destination of the access log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_log: Option<AccessLog>,
    /// Settings for overload other than the overlay's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<OverloadSection>,
    /// Limits other than the overlay's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSection>,
    /// Health checks of next hops, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<NeighbourHealth>,
}

impl Node {
    /// True if the node receives no new sessions.
    pub fn is_draining(&self) -> bool {
        self.draining.unwrap_or_default()
    }
}

/// The program of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// `hermes proxy`.
    #[default]
    Hermes,
    /// Envoy, configured over xDS.
    Envoy,
}

/// A listener for applications on the node's host, for sessions of one user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct App {
    /// The address on which the listener accepts; not for `tun`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// The protocol that applications use.
    #[serde(default, skip_serializing_if = "is_default")]
    pub protocol: AppProtocol,
    /// For `tcp` and `udp`: the target of all streams and flows, because these protocols do not name a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// For `tun`: the device, which Hermes creates. Default: `hermes0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// For `tun`: the addresses of the device, which are the source of its packets.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub address: OneOrMany<HostAddress>,
    /// For `dns`: the prefixes of virtual addresses of names. Default: `100.64.0.0/10`.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub addresses: OneOrMany<Prefix>,
    /// For `dns`: the DNS servers for all names that are not names of services. Default: the system's.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub forward: OneOrMany<String>,
    /// The user of these sessions; `None` means the node's only user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<Reference>,
}

/// The protocol that applications use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AppProtocol {
    /// HTTP/1.1 and HTTP/2: requests to names, and CONNECT.
    #[default]
    Http,
    /// SOCKS 5.
    Socks5,
    /// A byte stream to one target.
    Tcp,
    /// Datagrams to one target.
    Udp,
    /// The packets of a device for the networks that its user may use.
    Tun,
    /// DNS, for the names of the services that its user may use.
    Dns,
}
