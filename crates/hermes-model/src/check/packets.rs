//! Checks the flow of IP packets: destinations that are never routed, and conflicts between listeners or routes.
//!
//! In: networks, listeners, routes. Out: warnings about packets that would be dropped or take the wrong path. Most of
//! them are warnings, because such a setup may be intended.

use std::collections::{BTreeMap, HashMap};
use std::iter::successors;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::report::Report;
use crate::snapshot::{Action, Gateway, Listener, ListenerProtocol, Route, Tun};

/// Networks whose packets a node drops in any session: they address one machine, one link, or many machines (RFC 1122,
/// 3.2.1.3; RFC 3927, 2.7; RFC 4291, 2.5).
const UNROUTED: [(IpAddr, u8, &str); 9] = [
    (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8, "loopback"),
    (IpAddr::V6(Ipv6Addr::LOCALHOST), 128, "loopback"),
    (IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16, "link-local"),
    (IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10, "link-local"),
    (IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4, "multicast"),
    (IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), 8, "multicast"),
    (IpAddr::V4(Ipv4Addr::BROADCAST), 32, "broadcast"),
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8, "unspecified"),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 128, "unspecified"),
];

/// The kind of a network that is never routed; `None` if it may be routed.
pub fn unrouted(network: IpNet) -> Option<&'static str> {
    let holds = |(start, length, _): &&(IpAddr, u8, &str)| {
        IpNet::new(*start, *length).is_ok_and(|block| block.contains(&network))
    };
    UNROUTED.iter().find(holds).map(|(_, _, what)| *what)
}

/// Warns about a destination network that is never routed.
pub(super) fn routed(network: IpNet, at: &str, report: &mut Report) {
    if let Some(what) = unrouted(network) {
        let message = format!("{network} is {what}; such packets cannot be tunnelled, and all are dropped");
        report.warning(at, message);
    }
}

/// Warns about conflicts between `tun` listeners: a packet belongs to one session, and its source must be an address of
/// that listener.
pub(super) fn among(listeners: &[(usize, Arc<Listener>)], report: &mut Report) {
    let mut captured: HashMap<IpNet, (usize, &str)> = HashMap::new();
    let mut devices: HashMap<&str, (usize, &Tun)> = HashMap::new();
    for (at, listener) in listeners {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
        for (index, capture) in tun.captures.iter().enumerate() {
            let (first, name) = *captured.entry(capture.network).or_insert((*at, &listener.name));
            // Duplicates within one listener are reported by its own check.
            if first != *at {
                let message = format!(
                    "{} is also captured by listeners[{first}] ({name}), so packets go to only one of them unless the program \
                     binds to a device; keep one, unless that is intended",
                    capture.network
                );
                report.warning(format!("listeners[{at}].capture[{index}]"), message);
            }
        }
        let (first, other) = *devices.entry(&tun.device).or_insert((*at, tun));
        if !same_addresses(tun, other) {
            let message = format!(
                "device {} also has the addresses of listeners[{first}]; the kernel picks the source, and packets from the \
                 other listener's addresses are dropped; use the same addresses for both, or another device",
                tun.device
            );
            report.warning(format!("listeners[{at}].address"), message);
        }
    }
}

/// Reports addresses of this machine within pools: no client can get them.
pub(super) fn own_addresses(listeners: &[(usize, Arc<Listener>)], routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let mut owned: Vec<(IpAddr, String, &str)> = Vec::new();
    for (at, listener) in listeners {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
        owned.extend(tun.addresses.iter().map(|own| (*own, format!("listeners[{at}].address"), &*tun.device)));
    }
    let gateways = || {
        routes.iter().filter_map(|(at, route)| match &route.action {
            Action::Device(gateway) => Some((*at, gateway)),
            _ => None,
        })
    };
    for (at, gateway) in gateways() {
        let path = format!("routes[{at}].terminate.address");
        owned.extend(gateway.addresses.iter().map(|own| (*own, path.clone(), &*gateway.device)));
    }
    for (at, gateway) in gateways() {
        let path = format!("routes[{at}].terminate.assign");
        for pool in gateway.assign.iter().filter(|pool| pool.prefix_len() == pool.max_prefix_len()) {
            if gateway.addresses.contains(&pool.addr()) {
                let message = format!(
                    "{} is the device's own address, so no client can get it; use addresses for clients",
                    pool.addr()
                );
                report.problem(&path, message);
            }
        }
        let of_other = |(own, _, device): &&(IpAddr, String, &str)| {
            **device != *gateway.device && gateway.assign.iter().any(|pool| pool.contains(own))
        };
        if let Some((own, other, device)) = owned.iter().find(of_other) {
            let message = format!(
                "contains {own}, the address of device {device} ({other}); a client with that address is unreachable, since \
                 this machine receives its packets; use a network without it"
            );
            report.warning(&path, message);
        }
        let is_lone = |own: &&IpAddr| gateway.assign.iter().all(|pool| pool.addr().is_ipv4() != own.is_ipv4());
        if let Some(own) = gateway.addresses.iter().find(is_lone).filter(|_| !gateway.assign.is_empty()) {
            let version = if own.is_ipv4() { "IPv4" } else { "IPv6" };
            let message = format!("no client can reach {own}, since `assign` has no {version} network; add one");
            report.warning(format!("routes[{at}].terminate.address"), message);
        }
    }
}

fn same_addresses(one: &Tun, other: &Tun) -> bool {
    let all_in = |one: &Tun, other: &Tun| one.addresses.iter().all(|address| other.addresses.contains(address));
    all_in(one, other) && all_in(other, one)
}

/// Warns about pools that several routes share: each address has one client on the whole node. If a route assigns whole
/// networks, its first client can take the complete pool.
pub(super) fn pools(routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let gateways: Vec<(usize, &Gateway)> = routes
        .iter()
        .filter_map(|(at, route)| match &route.action {
            Action::Device(gateway) => Some((*at, gateway)),
            _ => None,
        })
        .collect();
    // For each pool up to two routes that assign from it, so that every route finds another one.
    let mut assigners: BTreeMap<(IpAddr, u8), Vec<usize>> = BTreeMap::new();
    for (at, gateway) in &gateways {
        for pool in &gateway.assign {
            let two = assigners.entry((pool.network(), pool.prefix_len())).or_default();
            if two.len() < 2 && two.last() != Some(at) {
                two.push(*at);
            }
        }
    }
    for (at, gateway) in gateways.iter().filter(|(_, gateway)| gateway.assign_networks) {
        let other = |pool: &IpNet| {
            let wider = successors(pool.supernet(), IpNet::supernet);
            let wider = wider.filter_map(|wider| assigners.get(&(wider.network(), wider.prefix_len())));
            let ends = (pool.network(), pool.prefix_len())..=(pool.broadcast(), pool.max_prefix_len());
            wider.chain(assigners.range(ends).map(|(_, two)| two)).flatten().find(|other| *other != at)
        };
        if let Some((pool, other)) = gateway.assign.iter().find_map(|pool| Some((pool, other(pool)?))) {
            let message = format!(
                "one client may take all of {pool}, from which routes[{other}] assigns addresses too; use a separate pool \
                 for each route"
            );
            report.warning(format!("routes[{at}].terminate.assign-networks"), message);
        }
    }
}
