//! A network: prefixes of addresses, their gateways, and their audience.

use hermes_model::document::policy::Timeout;
use hermes_model::document::scalar::{DeviceName, HostAddress, OneOrMany, Prefix};
use serde::{Deserialize, Serialize};

use super::is_default;
use super::name::Name;
use super::service::Audience;

/// `kind: Network`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Network {
    /// The addresses. Devices of its users capture packets to these.
    pub prefixes: OneOrMany<Prefix>,
    /// The gateways.
    pub at: OneOrMany<Gateway>,
    /// The audience: nobody else may use the network.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// Timeouts at each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
}

/// A node with a device that carries packets of this network.
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
    /// Prefixes from which clients get their addresses.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub assign: OneOrMany<Prefix>,
    /// True if clients may get whole networks of `assign`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub assign_networks: bool,
    /// True if packets leave the node with the node's own address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat: bool,
    /// The destination of all packets, whatever address they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dnat: Option<HostAddress>,
}

impl Gateway {
    /// The device of a network of this name: a name that the kernel accepts.
    pub fn device_of(&self, network: &Name) -> Option<DeviceName> {
        let own = || format!("ip-{}", network.as_str().chars().take(12).collect::<String>()).parse().ok();
        self.device.clone().or_else(own)
    }
}
