//! A network: prefixes of addresses, their gateways, and their audience.

use hermes_model::document::policy::Timeout;
use hermes_model::document::scalar::{DeviceName, HostAddress, OneOrMany, Prefix};
use serde::{Deserialize, Serialize};

use super::is_default;
use super::name::Name;
use super::service::Audience;

/// The content of a document of `kind: Network`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Network {
    /// The address prefixes. Devices of the network's users capture packets to them.
    pub prefixes: OneOrMany<Prefix>,
    /// The gateways.
    pub at: OneOrMany<Gateway>,
    /// The users who may use the network.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// Timeouts at each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
}

/// A gateway: a node that forwards packets of the network through a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Gateway {
    /// The name of the node.
    pub node: Name,
    /// The device, which Hermes creates. Several networks of a node may share one. Default: `ip-` and the network's
    /// name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// Addresses of the device, at which the node itself is reachable.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub address: OneOrMany<HostAddress>,
    /// Prefixes from which clients receive their addresses.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub assign: OneOrMany<Prefix>,
    /// True if clients may receive whole networks of `assign` instead of single addresses.
    #[serde(default, skip_serializing_if = "is_default")]
    pub assign_networks: bool,
    /// True if packets leave the node with the node's own address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat: bool,
    /// The address to which the destination of all packets is translated (DNAT).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dnat: Option<HostAddress>,
}

impl Gateway {
    /// Returns the device of a network with this name. The default name is short enough for the kernel, which accepts
    /// 15 characters.
    pub fn device_of(&self, network: &Name) -> Option<DeviceName> {
        let own = || format!("ip-{}", network.as_str().chars().take(12).collect::<String>()).parse().ok();
        self.device.clone().or_else(own)
    }
}
