//! `hermes tun`: a device whose packets go to nodes elsewhere.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use hermes_model::document::scalar::{HostAddress, Prefix};
use hermes_model::unrouted;
use hermes_proxy::detached_device::Target;

/// Create a device without a node, and send its packets to `ip` listeners of nodes, one in each UDP datagram.
///
/// The nodes may run on this machine or another one. Needs CAP_NET_ADMIN, and drops all other privileges. The datagrams
/// are neither encrypted nor authenticated: use loopback or a trusted network.
#[derive(Debug, Parser)]
pub(super) struct Tun {
    /// Create a device with this name; it is removed when this program ends
    #[arg(long, value_name = "NAME", default_value = "hermes0")]
    device: String,
    /// Assign this address to the device, as in the listener's `peers`; one for each IP version
    #[arg(long, value_name = "ADDRESS", required = true, value_parser = address)]
    address: Vec<IpAddr>,
    /// Send packets for PREFIX to the `ip` listener at ADDRESS:PORT. May be repeated
    #[arg(long, value_name = "PREFIX=ADDRESS:PORT", required = true, value_parser = target)]
    to: Vec<Target>,
    /// Run as this user after the device is created, if started as root
    #[arg(long, value_name = "NAME", default_value = "nobody")]
    user: String,
    /// Set the log filter of standard error: error, warn, info, debug, or a filter
    #[arg(long, env = "HERMES_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
}

impl Tun {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        for (index, target) in self.to.iter().enumerate() {
            let fits = |address: &IpAddr| address.is_ipv4() == target.network.addr().is_ipv4();
            ensure!(
                self.address.iter().any(fits),
                "--to {}: the device has no address of that version of IP; add --address",
                target.network
            );
            let twice = self.to[..index].iter().any(|other| other.network == target.network);
            ensure!(!twice, "--to {}: duplicate; keep one", target.network);
        }
        crate::tun::run(&self.device, self.address, self.to, &self.user, &self.log)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses an address as documents do.
fn address(text: &str) -> Result<IpAddr, String> {
    text.parse().map(|HostAddress(address)| address)
}

fn target(text: &str) -> anyhow::Result<Target> {
    let (network, node) = text.split_once('=').context("write PREFIX=ADDRESS:PORT")?;
    let Prefix(network) = network.parse().map_err(anyhow::Error::msg::<String>)?;
    if let Some(what) = unrouted(network) {
        bail!("{network} is {what}, which cannot be tunnelled");
    }
    let node: SocketAddr = node.parse().with_context(|| format!("{node:?} is no address and port"))?;
    ensure!(node.port() != 0 && !node.ip().is_unspecified(), "{node} is nowhere; write where the listener is");
    Ok(Target { network, node })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_prefix_and_a_place() {
        let there =
            |network: &str, node: &str| Target { network: network.parse().unwrap(), node: node.parse().unwrap() };
        assert_eq!(target("10.10.0.0/16=192.0.2.1:10000").unwrap(), there("10.10.0.0/16", "192.0.2.1:10000"));
        assert_eq!(target("::/0=[2001:db8::1]:1").unwrap(), there("::/0", "[2001:db8::1]:1"));
        assert_eq!(target("10.0.0.1=127.0.0.1:1").unwrap(), there("10.0.0.1/32", "127.0.0.1:1"));
        for bad in
            ["10.10.0.0/16", "10.10.0.1/16=127.0.0.1:1", "ten=127.0.0.1:1", "10.0.0.1=127.0.0.1:0", "10.0.0.1=x:1"]
        {
            assert!(target(bad).is_err(), "{bad}");
        }
        let refusal = |text: &str| target(text).unwrap_err().to_string();
        assert!(refusal("10.10.0.1/16=127.0.0.1:1").contains("use 10.10.0.0/16 or 10.10.0.1/32"));
        assert!(refusal("127.0.0.0/8=192.0.2.1:1").contains("127.0.0.0/8 is loopback"));
    }

    #[test]
    fn an_address_is_the_devices_own() {
        assert_eq!(address("10.20.0.2").unwrap(), address("10.20.0.2/32").unwrap());
        let refused = address("10.20.0.2/24").unwrap_err();
        assert!(refused.contains("a network; use the device's own address, 10.20.0.2"), "{refused}");
        assert!(address("ten").unwrap_err().contains("invalid IP address"));
    }
}
