//! Checks an `ip` listener: peers send it IP packets in UDP datagrams.
//!
//! In: the destination network and the peers. Out: the same, with disjoint sources and addresses for each peer.
//! Never: a peer that could be anyone, because a datagram proves only its source address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::listener::prefixes;
use super::packets;
use super::report::Report;
use crate::document::listener as section;
use crate::snapshot::{IpListener, Peer};

/// Builds the settings of an `ip` listener; `None` if an essential part is missing.
pub(super) fn build(section: &section::Listener, at: &str, report: &mut Report) -> Option<IpListener> {
    let network = section.network.map(|network| network.0);
    if network.is_none() {
        let message = "missing destination network; add network: PREFIX, such as 10.10.0.0/16";
        report.problem(format!("{at}.network"), message);
    }
    if let Some(network) = network {
        packets::routed(network, &format!("{at}.network"), report);
    }
    if section.peers.is_empty() {
        let message = "missing peers; add peers: [{address: ADDRESS}], with from: PREFIX for another machine";
        report.problem(format!("{at}.peers"), message);
    }
    let mut peers: Vec<Peer> = Vec::new();
    for (index, peer) in section.peers.iter().enumerate() {
        let path = format!("{at}.peers[{index}]");
        let peer = build_peer(peer, section, network, &path, report);
        for (other_index, other) in peers.iter().enumerate() {
            if overlap(&other.from, &peer.from) {
                let message =
                    format!("overlaps the sources of peers[{other_index}]; use disjoint networks, or one peer");
                report.problem(format!("{path}.from"), message);
            }
            if overlap(&other.addresses, &peer.addresses) {
                let message = format!(
                    "overlaps the addresses of peers[{other_index}], so replies would be ambiguous; use another address"
                );
                report.problem(format!("{path}.address"), message);
            }
        }
        peers.push(peer);
    }
    Some(IpListener { network: network?, peers })
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
            format!("{everyone} admits anyone, and source addresses can be forged; list the networks of your machines");
        report.problem(format!("{path}.from"), message);
    }
    // A datagram from this machine to such an address has that address as its source.
    let elsewhere = listener.bind.is_some_and(|bind| !bind.0.ip().is_loopback() && !bind.0.ip().is_unspecified());
    if peer.from.is_empty() && elsewhere {
        let message = "the default is loopback, but the listener binds another address; add from: PREFIX";
        report.problem(format!("{path}.from"), message);
    }
    let addresses = prefixes(&peer.address);
    for unusable in addresses.iter().filter(|prefix| is_no_host(prefix)) {
        report.problem(
            format!("{path}.address"),
            format!("{unusable} is not a host address; use the address of the peer's device"),
        );
    }
    let fits = |address: &IpNet| network.is_none_or(|network| network.addr().is_ipv4() == address.addr().is_ipv4());
    if !addresses.iter().any(fits) {
        let message = match network {
            Some(network) => {
                format!("missing address of the same IP version as {network}; add address: ADDRESS")
            }
            None => "missing source address of the packets; add address: ADDRESS, such as 10.20.0.2".to_owned(),
        };
        report.problem(format!("{path}.address"), message);
    }
    Peer { from, addresses: addresses.into_iter().filter(fits).collect() }
}

fn loopback() -> Vec<IpNet> {
    vec![IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8), IpNet::from(IpAddr::from(Ipv6Addr::LOCALHOST))]
}

fn is_no_host(prefix: &IpNet) -> bool {
    let address = prefix.addr();
    prefix.prefix_len() == 0 || address.is_multicast() || address.is_unspecified() || address.is_loopback()
}

fn overlap(some: &[IpNet], others: &[IpNet]) -> bool {
    some.iter().any(|one| others.iter().any(|other| one.contains(other) || other.contains(one)))
}
