//! A node: where others dial it, whom it dials, and what its device gets.

use hermes_model::document::listener::Listener;
use hermes_model::document::scalar::{DeviceName, HostAddress, Many, Period, Prefix};
use hermes_model::document::{AccessLog, Bind, Workers};
use hermes_model::limits::LimitsSection;
use hermes_model::snapshot::{Dispatch, HostPort, Role};
use serde::{Deserialize, Serialize};

use super::is_default;
use super::name::{Name, Reference};
use super::overlay::Probes;

/// `kind: Node`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Node {
    /// Standalone ones carry what others send to each other; dependent ones are where it begins and ends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// The program that it is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub runs: Program,
    /// Where other nodes dial it. `None`: nobody can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<HostPort>,
    /// Where it listens for them. `None`: at all addresses, at the port of `address`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// Whether others dial it over HTTP/3.
    #[serde(default, skip_serializing_if = "is_default")]
    pub http3: bool,
    /// Nodes that it dials. Where both name each other, or one has no address, one link carries both ways.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub links: Many<Name>,
    /// Providers whose services, users and groups may be on it. Without meaning where the overlay has none.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub providers: Many<Name>,
    /// Where programs of its device find the overlay.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub apps: Many<App>,
    /// Listeners as a node document has them, beside those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listeners: Vec<Listener>,
    /// Admin endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<Bind>,
    /// How long a drain waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Period>,
    /// True if the node gets no new sessions, so that it can be removed. `None` leaves a drain as it is, so that
    /// applying a file again does not end it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<bool>,
    /// Worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub workers: Workers,
    /// How connections are spread over workers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dispatch: Dispatch,
    /// Where session records go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_log: Option<AccessLog>,
    /// Limits other than the overlay's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsSection>,
    /// How it asks after those it sends to, where it has others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Probes>,
}

impl Node {
    /// True if the node gets no new sessions.
    pub fn is_draining(&self) -> bool {
        self.draining.unwrap_or_default()
    }
}

/// What a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// `hermes proxy`.
    #[default]
    Hermes,
    /// Envoy, which is configured over xDS.
    Envoy,
}

/// One place where programs of a device find the overlay, as one user, who may be the only one of that node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct App {
    /// Where it listens: all but `tun`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind: Option<Bind>,
    /// What programs speak there.
    #[serde(default, skip_serializing_if = "is_default")]
    pub protocol: Speech,
    /// Where a stream or a flow goes that names no target: of `tcp` and `udp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// Of `tun`: the device, which is made. Default: `hermes0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// Of `tun`: its addresses, which its packets come from.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub address: Many<HostAddress>,
    /// For `dns`: the prefixes whose addresses stand for names. Default: `100.64.0.0/10`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub addresses: Many<Prefix>,
    /// For `dns`: the servers of all other names. Default: the system's.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub forward: Many<String>,
    /// Whose sessions these are. `None`: the node's only user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<Reference>,
}

/// What programs speak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Speech {
    /// HTTP/1.1 and HTTP/2: requests to names, and CONNECT.
    #[default]
    Http,
    /// SOCKS 5.
    Socks5,
    /// Bytes for one target.
    Tcp,
    /// Datagrams for one target.
    Udp,
    /// The packets of a device for the networks that its user may use.
    Tun,
    /// DNS, for the names of the services that its user may use.
    Dns,
}
