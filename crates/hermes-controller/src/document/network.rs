//! A network: prefixes of addresses, where their packets come out, and for whom.

use hermes_model::document::policy::Timeout;
use hermes_model::document::scalar::{DeviceName, HostAddress, Many, Prefix};
use serde::{Deserialize, Serialize};

use super::is_default;
use super::name::Name;
use super::service::Audience;

/// `kind: Network`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Network {
    /// Its addresses. Devices of those who may use it take what is for them.
    pub prefixes: Many<Prefix>,
    /// Where its packets come out.
    pub at: Many<Gateway>,
    /// Who may use it. Nobody else does.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// How long is waited; at each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
}

/// A node that has a device whose packets are this network's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Gateway {
    /// Which node.
    pub node: Name,
    /// Its device, which is made; other networks of that node may have the same. Default: `ip-` and the network's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// Addresses of that device, at which the node itself is reached.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub address: Many<HostAddress>,
    /// Prefixes that clients get their addresses from.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub assign: Many<Prefix>,
    /// Whether clients may have whole networks of `assign`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub assign_networks: bool,
    /// Whether what leaves the node comes from the node's own address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat: bool,
    /// Where all packets go there, whatever address they are for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<HostAddress>,
}

impl Gateway {
    /// The device that the packets of a network of this name come out of: a name that the kernel takes.
    pub fn device_of(&self, network: &Name) -> Option<DeviceName> {
        let own = || format!("ip-{}", network.as_str().chars().take(12).collect::<String>()).parse().ok();
        self.device.clone().or_else(own)
    }
}
