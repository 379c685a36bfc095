//! Checks an `ip` listener: IP packets that others bring in UDP datagrams.
//!
//! In: where they go, and who may bring them. Out: the same, each peer with places and addresses of its own.
//! Never: a peer that could be anybody: datagrams prove nothing but where they seem to come from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::listener::prefixes;
use super::packets;
use super::report::Report;
use crate::document::listener as section;
use crate::snapshot::{Carried, Peer};

/// What comes to a port, and whose it may be; `None` where something is missing without which it is nothing.
pub(super) fn build(section: &section::Listener, at: &str, report: &mut Report) -> Option<Carried> {
    let network = section.network.map(|network| network.0);
    if network.is_none() {
        let message = "packets need a network that they go to; add network: PREFIX, such as 10.10.0.0/16";
        report.problem(format!("{at}.network"), message);
    }
    if let Some(network) = network {
        packets::routed(network, &format!("{at}.network"), report);
    }
    if section.peers.is_empty() {
        let message = "nobody may send packets; add peers: [{address: ADDRESS}], and from: PREFIX for another machine";
        report.problem(format!("{at}.peers"), message);
    }
    let mut peers: Vec<Peer> = Vec::new();
    for (index, peer) in section.peers.iter().enumerate() {
        let path = format!("{at}.peers[{index}]");
        let peer = build_peer(peer, section, network, &path, report);
        for (other_index, other) in peers.iter().enumerate() {
            if overlap(&other.from, &peer.from) {
                let message =
                    format!("peers[{other_index}] comes from there as well; write other prefixes, or one peer");
                report.problem(format!("{path}.from"), message);
            }
            if overlap(&other.addresses, &peer.addresses) {
                let message =
                    format!("peers[{other_index}] has it too, and answers are for one; write another address");
                report.problem(format!("{path}.address"), message);
            }
        }
        peers.push(peer);
    }
    Some(Carried { network: network?, peers })
}

fn build_peer(
    peer: &section::Peer,
    listener: &section::Listener,
    network: Option<IpNet>,
    path: &str,
    report: &mut Report,
) -> Peer {
    let from = if peer.from.is_empty() { loopback() } else { prefixes(&peer.from) };
    for everyone in from.iter().filter(|prefix| prefix.prefix_len() == 0) {
        let message =
            format!("{everyone} is everybody, and datagrams prove nothing; write the prefixes of your machines");
        report.problem(format!("{path}.from"), message);
    }
    // From its own machine a datagram to such an address comes from that address.
    let elsewhere = listener.bind.is_some_and(|bind| !bind.0.ip().is_loopback() && !bind.0.ip().is_unspecified());
    if peer.from.is_empty() && elsewhere {
        let message = "by default it is this machine's loopback, where the listener is not; add from: PREFIX";
        report.problem(format!("{path}.from"), message);
    }
    let addresses = prefixes(&peer.address);
    for unfit in addresses.iter().filter(|prefix| is_unfit(prefix)) {
        report.problem(format!("{path}.address"), format!("no machine has {unfit}; write the address of its device"));
    }
    let fits = |address: &IpNet| network.is_none_or(|network| network.addr().is_ipv4() == address.addr().is_ipv4());
    if !addresses.iter().any(fits) {
        let message = match network {
            Some(network) => {
                format!("packets to {network} come from an address of its version of IP; add address: ADDRESS")
            }
            None => "packets need an address to come from; add address: ADDRESS, such as 10.20.0.2".to_owned(),
        };
        report.problem(format!("{path}.address"), message);
    }
    Peer { from, addresses: addresses.into_iter().filter(fits).collect() }
}

fn loopback() -> Vec<IpNet> {
    vec![IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8), IpNet::from(IpAddr::from(Ipv6Addr::LOCALHOST))]
}

fn is_unfit(prefix: &IpNet) -> bool {
    let address = prefix.addr();
    prefix.prefix_len() == 0 || address.is_multicast() || address.is_unspecified() || address.is_loopback()
}

fn overlap(some: &[IpNet], others: &[IpNet]) -> bool {
    some.iter().any(|one| others.iter().any(|other| one.contains(other) || other.contains(one)))
}
