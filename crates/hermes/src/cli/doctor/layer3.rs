//! What this machine has for layer 3: the privilege, the driver of TUN devices, nftables, forwarding.
//!
//! In: what a document needs of it. Out: a finding each; what is missing and not needed is a note. Never: a device.

use hermes_model::Snapshot;
use hermes_model::snapshot::{Action, ListenerProtocol};
use hermes_net::tun::TunError;
use hermes_net::{nat, tun};
use ipnet::IpNet;

use super::Report;

/// What a document needs of it. The default: nothing.
#[derive(Default)]
pub(super) struct Needs {
    devices: bool,
    nat: bool,
    captures: Vec<(String, IpNet)>,
}

impl Needs {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let mut captures = Vec::new();
        for listener in &snapshot.listeners {
            if let ListenerProtocol::Tun(tun) = &listener.protocol {
                captures.extend(tun.captures.iter().map(|capture| (tun.device.to_string(), capture.network)));
            }
        }
        let nat = |action: &Action| matches!(action, Action::Device(gateway) if gateway.nat);
        Self {
            devices: snapshot.devices().next().is_some(),
            nat: snapshot.routes.iter().any(|route| nat(&route.action)),
            captures,
        }
    }

    pub(super) fn look(&self, report: &mut Report) {
        told(report, "layer 3", self.devices, tun::check_privilege().map(|()| "CAP_NET_ADMIN is there".to_owned()));
        told(report, tun::DRIVER, self.devices, tun::check_driver().map(|()| "can be opened".to_owned()));
        told(report, "nftables", self.nat, nat::nft_version());
        told(report, "forwarding", self.nat, nat::check_forwarding());
        for (device, network) in &self.captures {
            let what = format!("capture of {network}");
            let found = tun::check_reverse_path(device, *network);
            told(report, &what, true, found.map(|()| "answers to the node itself come through".to_owned()));
        }
    }
}

fn told(report: &mut Report, what: &str, needed: bool, found: Result<String, TunError>) {
    match found {
        Ok(found) => report.good(what, &found),
        Err(error) if needed => report.bad(what, &error.to_string(), error.remedy()),
        Err(error) => report.note(what, &error.to_string(), error.remedy()),
    }
}
