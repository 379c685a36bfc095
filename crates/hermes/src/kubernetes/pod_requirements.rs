//! Derives from node documents what their pods need of Kubernetes.
//!
//! In: documents of nodes. Out: ports, whether there is a TUN device, and the termination grace period. A document
//! that a pod could not run is refused with the change that it needs.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use hermes_model::document::AccessLog;
use hermes_model::document::keyword::Protocol;
use hermes_model::document::listener::Listener;
use serde_json::{Value, json};

use super::{GRACE, HOME, Node};

/// The default of `drain` in a node document.
const DRAIN: Duration = Duration::from_secs(10);

/// The transport and number of a pod's port.
type Port = (&'static str, u16);

/// The requirements of a pod.
#[derive(PartialEq)]
pub(super) struct PodRequirements {
    /// Ports that peers connect to, each with the port number that peers know.
    ports: BTreeMap<Port, u16>,
    /// The node creates TUN devices.
    pub(super) has_device: bool,
    /// The node listens on a port below 1024.
    pub(super) has_low_port: bool,
    /// The pod uses the network of its machine.
    pub(super) host_network: bool,
    /// The time between SIGTERM and SIGKILL.
    pub(super) grace: Duration,
}

impl PodRequirements {
    /// The shape of a controller.
    pub(super) fn listens_at(port: u16) -> Self {
        Self {
            ports: [(("TCP", port), port)].into(),
            has_device: false,
            has_low_port: port < 1024,
            host_network: false,
            grace: GRACE,
        }
    }

    /// The common shape of nodes that share one pod template.
    pub(super) fn of(nodes: &[Node], host_network: bool) -> anyhow::Result<Self> {
        let (first, others) = nodes.split_first().context("there are no nodes")?;
        let mut shape = Self::of_one(first, host_network)?;
        for other in others {
            let next = Self::of_one(other, host_network)?;
            let grace = shape.grace.max(next.grace);
            (shape.grace, shape) = (grace, Self { grace, ..shape });
            ensure!(
                shape == Self { grace, ..next },
                "nodes {} and {} listen at different ports, or one has a device; they cannot share a DaemonSet",
                first.name,
                other.name
            );
        }
        Ok(shape)
    }

    fn of_one(node: &Node, host_network: bool) -> anyhow::Result<Self> {
        let (name, document) = (&node.name, &node.document);
        ensure!(
            document.admin.is_some(),
            "node {name} has no `admin` for its probes; add `admin: \"127.0.0.1:9900\"` to it, or to `nodes` of the overlay"
        );
        ensure!(
            !document.draining,
            "node {name} drains, and has no listeners for programs meanwhile: `hermes node drain {name} --undo` first"
        );
        if let AccessLog::File(file) = &document.access_log {
            ensure!(
                file.starts_with(HOME) || !file.starts_with('/'),
                "node {name} writes to {file}, which a container may not: `access-log: stdout`, or a file below {HOME}"
            );
        }
        let mut ports = BTreeMap::new();
        let mut is_hidden = false;
        for (bind, transport) in document.listeners.iter().flat_map(sockets) {
            let (ip, port) = (bind.ip().to_canonical(), bind.port());
            let fault = format!("node {name} listens at {bind}");
            ensure!(port != 0, "{fault}; choose a port, since a Service needs one");
            is_hidden |= ip.is_loopback();
            if !ip.is_loopback() {
                ensure!(
                    ip.is_unspecified() || host_network,
                    "{fault}; the address of a pod is unknown in advance, so bind 0.0.0.0, or deploy with --host-network"
                );
                ports.insert((transport, port), port);
            }
        }
        ensure!(
            !is_hidden || !ports.is_empty() || host_network,
            "node {name} listens at loopback addresses only, which other pods cannot reach; bind 0.0.0.0, or deploy with --host-network"
        );
        // The first listener serves the overlay. Peers may know it by another port.
        if let (Some(address), Some(bind)) = (&node.address, document.listeners.first().and_then(|first| first.bind)) {
            ports
                .iter_mut()
                .filter(|((_, port), _)| *port == bind.0.port())
                .for_each(|(_, known)| *known = address.port);
        }
        let mut binds = document.listeners.iter().filter_map(|listener| listener.bind);
        let is_tun = |listener: &Listener| matches!(listener.protocol, Protocol::Tun | Protocol::Transparent);
        let ends_at_tun =
            document.routes.iter().filter_map(|route| route.terminate.as_ref()).any(|end| end.tun.is_some());
        let drain = document.drain.map_or(DRAIN, |drain| drain.0);
        Ok(Self {
            ports,
            has_device: document.listeners.iter().any(is_tun) || ends_at_tun,
            has_low_port: binds.any(|bind| bind.0.port() < 1024),
            host_network,
            // Kubernetes takes whole seconds: round up.
            grace: Duration::from_secs(drain.as_secs() + u64::from(drain.subsec_nanos() > 0)) + GRACE,
        })
    }

    pub(super) fn container_ports(&self) -> Vec<Value> {
        let one = |(transport, port): &Port| json!({ "name": called(transport, *port), "containerPort": port, "protocol": transport });
        self.ports.keys().map(one).collect()
    }

    pub(super) fn service_ports(&self) -> Vec<Value> {
        let one = |(&(transport, port), known): (&Port, &u16)| {
            let name = called(transport, port);
            json!({ "name": name, "port": known, "targetPort": name, "protocol": transport })
        };
        self.ports.iter().map(one).collect()
    }
}

fn called(transport: &str, port: u16) -> String {
    format!("{}-{port}", transport.to_ascii_lowercase())
}

/// The addresses and transports of a listener's sockets.
fn sockets(listener: &Listener) -> impl Iterator<Item = (std::net::SocketAddr, &'static str)> {
    let transports: &[&'static str] = match listener.protocol {
        Protocol::Http if listener.http3 => &["TCP", "UDP"],
        Protocol::Http | Protocol::Tcp | Protocol::Socks5 => &["TCP"],
        Protocol::Udp | Protocol::Ip | Protocol::Rina => &["UDP"],
        Protocol::Dns | Protocol::Ndn => &["TCP", "UDP"],
        Protocol::Tun | Protocol::Transparent => &[],
    };
    let bind = listener.bind.map(|bind| bind.0);
    bind.into_iter().flat_map(move |bind| transports.iter().map(move |transport| (bind, *transport)))
}
