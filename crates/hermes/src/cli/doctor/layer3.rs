//! Checks of layer 3: the privilege, the TUN driver, nftables, forwarding.
//!
//! In: the needs of a document. Out: one finding for each. A missing feature that the document does not need is a note.
//! Never: a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use hermes_model::Snapshot;
use hermes_model::snapshot::{Action, Listener, ListenerProtocol, Peer};
use hermes_net::tun::TunError;
use hermes_net::tun::{self, nat};
use ipnet::IpNet;

use super::Report;
use super::running::Running;

/// Layer-3 needs of a document [default: none].
#[derive(Default)]
pub(super) struct Needs {
    /// Devices, and whether the running node has each already.
    devices: BTreeMap<Arc<str>, bool>,
    nat: bool,
    captures: Vec<(String, IpNet)>,
    carried: Vec<Arc<Listener>>,
}

impl Needs {
    pub(super) fn of(snapshot: &Snapshot, running: Option<&Running>) -> Self {
        let mut captures = Vec::new();
        for listener in &snapshot.listeners {
            if let ListenerProtocol::Tun(tun) = &listener.protocol {
                captures.extend(tun.captures.iter().map(|capture| (tun.device.to_string(), capture.network)));
            }
        }
        let has = |name: &str| running.is_some_and(|node| node.has_device(name));
        let nat = |action: &Action| matches!(action, Action::Device(gateway) if gateway.nat);
        Self {
            devices: snapshot.devices().map(|name| (name.clone(), has(name))).collect(),
            nat: snapshot.routes.iter().any(|route| nat(&route.action)),
            captures,
            carried: snapshot.listeners.iter().filter(|listener| waits_for(listener).is_some()).cloned().collect(),
        }
    }

    pub(super) fn inspect(&self, report: &mut Report) {
        let needed = !self.devices.is_empty();
        report_result(report, "layer 3", needed, tun::check_privilege().map(|()| "CAP_NET_ADMIN available".to_owned()));
        report_result(report, tun::DRIVER, needed, tun::check_driver().map(|()| "can be opened".to_owned()));
        report_result(report, "nftables", self.nat, nat::nft_version());
        report_result(report, "forwarding", self.nat, nat::check_forwarding());
        for (name, has_it) in &self.devices {
            let what = format!("device {name}");
            match tun::check_name(name) {
                Err(_) if *has_it => report.good(&what, "in use by the running node"),
                found => report_result(report, &what, true, found.map(|()| "free".to_owned())),
            }
        }
        for (device, network) in &self.captures {
            let what = format!("capture of {network}");
            let found = tun::check_reverse_path(device, *network);
            report_result(report, &what, true, found.map(|()| "responses to the node itself pass".to_owned()));
        }
        for listener in &self.carried {
            let Some(programs) = waits_for(listener) else { continue };
            report.good(&format!("packets of listener {}", listener.name), &programs.join("; "));
        }
    }
}

/// Returns how the devices are created whose packets reach a listener; `None` if the listener has none.
fn waits_for(listener: &Listener) -> Option<Vec<String>> {
    let ListenerProtocol::Ip(carried) = &listener.protocol else { return None };
    let bind = listener.bind?;
    let node = if bind.ip().is_unspecified() { format!("ADDRESS:{}", bind.port()) } else { bind.to_string() };
    let program = |peer: &Peer| {
        let listed = |prefixes: &[IpNet]| prefixes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let address = peer.addresses.first().map(|prefix| prefix.addr().to_string()).unwrap_or_default();
        let network = carried.network;
        format!("at {} run `hermes tun --address {address} --to {network}={node}`", listed(&peer.from))
    };
    Some(carried.peers.iter().map(program).collect())
}

fn report_result(report: &mut Report, what: &str, needed: bool, found: Result<String, TunError>) {
    match found {
        Ok(found) => report.good(what, &found),
        Err(error) if needed => report.bad(what, &error.to_string(), error.remedy()),
        Err(error) => report.note(what, &error.to_string(), error.remedy()),
    }
}
