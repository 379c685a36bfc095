//! Explains how the node would handle a packet, for `hermes explain`.
//!
//! In: the header of a packet, its session's scope, and that session's action at this node. Out: whether the packet
//! passes, or the drop reason, by the same rules that filter packets. Never: a real packet, or facts of a running node,
//! such as assigned addresses and path MTUs.

use std::net::IpAddr;

use hermes_model::snapshot::{Action, Listener, ListenerProtocol};
use hermes_wire::connect_ip::Route;
use hermes_wire::ip::{self, Header};
use ipnet::IpNet;

use super::tunnel_end::prefix_of;
use hermes_ip::leases::gives;
use hermes_ip::packet_filter::{Direction, Rules, Verdict};

/// The header of a hypothetical packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub source: IpAddr,
    /// Destination address, of the same IP version as the source.
    pub destination: IpAddr,
    /// Protocol number.
    pub protocol: u8,
    /// Length in bytes, headers included.
    pub length: usize,
    /// MTU of the tunnel, as far as the user knows.
    pub mtu: usize,
}

impl Packet {
    fn verdict(&self, rules: &Rules, way: Direction) -> Verdict {
        // An ICMP query, because ICMP errors may come from any address.
        let kind = if self.protocol == ip::ICMPV6 { 128 } else { 8 };
        let header = Header {
            source: self.source,
            destination: self.destination,
            protocol: self.protocol,
            transport: 0,
            length: self.length,
            is_later_fragment: false,
            may_be_cut: false,
            is_source_routed: false,
            hops: u8::MAX,
        };
        rules.verdict(way, &[kind], &header, self.mtu)
    }

    /// Explains the result at this node for a session from `from`. `network` is the session's scope (`None`: any),
    /// `protocol` the only one that it carries, `action` the node's decision (`None`: denied).
    pub fn explain(
        &self,
        listener: &Listener,
        from: IpAddr,
        network: Option<IpNet>,
        protocol: Option<u8>,
        action: Option<&Action>,
    ) -> String {
        let Some(action @ (Action::Upstream(_) | Action::Device(_))) = action else {
            return self.dropped("no-session", "the session for this packet is denied");
        };
        let scope = network.map_or_else(
            || [IpAddr::from([0; 4]), IpAddr::from([0; 16])].map(|any| IpNet::new_assert(any, 0)).to_vec(),
            |network| vec![network],
        );
        let scope: Vec<Route> = scope.into_iter().map(|network| Route::to(prefix_of(network))).collect();
        let own: Option<Vec<IpNet>> = match &listener.protocol {
            ListenerProtocol::Tun(tun) => Some(tun.addresses.iter().map(|address| IpNet::from(*address)).collect()),
            ListenerProtocol::Ip(carried) => carried.peer(from).map(|peer| peer.addresses.clone()),
            _ => None,
        };
        if let Some(own) = own {
            let here = own.into_iter().map(|own| Route::to(prefix_of(own))).collect();
            let rules = Rules { here, there: scope.clone(), protocol };
            let whose = format!("listener {} has no such address as {}", listener.name, self.source);
            if let Some(dropped) = self.reason(self.verdict(&rules, Direction::Out), &whose, network) {
                return dropped;
            }
        }
        let Action::Device(gateway) = action else {
            return "passes here; the node that terminates the session checks it again".to_owned();
        };
        let source = IpNet::from(self.source);
        let given = gives(gateway, source).then(|| Route::to(prefix_of(source)));
        let rules = Rules { here: scope, there: given.into_iter().collect(), protocol };
        let whose = format!("the route assigns {} to no client", self.source);
        if let Some(dropped) = self.reason(self.verdict(&rules, Direction::In), &whose, network) {
            return dropped;
        }
        let to = gateway.dnat.unwrap_or(self.destination);
        format!("passes into device {} to {to}, where {} is assigned to its sender", gateway.device, self.source)
    }

    fn reason(&self, verdict: Verdict, whose: &str, network: Option<IpNet>) -> Option<String> {
        let Verdict::Drop(reason, _) = verdict else { return None };
        let why = match reason {
            "not-unicast" => "source and destination must be addresses of single hosts".to_owned(),
            "source-not-assigned" => whose.to_owned(),
            "too-big" => format!("the sender receives an ICMP error: {} bytes fit", self.mtu),
            _ => match network {
                Some(network) => format!(
                    "the session carries packets to {network} and of its protocol, between hosts that are not on one link"
                ),
                None => {
                    "the session carries packets of its protocol, between hosts that are not on one link".to_owned()
                }
            },
        };
        Some(self.dropped(reason, &why))
    }

    fn dropped(&self, reason: &str, why: &str) -> String {
        format!("dropped ({reason}): {why}")
    }
}
