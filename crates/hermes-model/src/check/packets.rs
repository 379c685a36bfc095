//! Checks what a document says of packets at several places: prefixes that none may go to, and what two listeners, or
//! two routes, have of one another.
//!
//! In: prefixes, listeners, routes. Out: what no packet would pass by, or would pass by the wrong one of the two. Never:
//! a problem: somebody may want just that.

use std::collections::{BTreeMap, HashMap};
use std::iter::successors;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::report::Report;
use crate::snapshot::{Action, Gateway, Listener, ListenerProtocol, Route, Tun};

/// What a node drops, whatever a session is for: it is for one machine, for one link, or for many (RFC 1122, 3.2.1.3;
/// RFC 3927, 2.7; RFC 4291, 2.5).
const UNROUTED: [(IpAddr, u8, &str); 9] = [
    (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8, "loopback"),
    (IpAddr::V6(Ipv6Addr::LOCALHOST), 128, "loopback"),
    (IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16, "link-local"),
    (IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10, "link-local"),
    (IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4, "multicast"),
    (IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), 8, "multicast"),
    (IpAddr::V4(Ipv4Addr::BROADCAST), 32, "broadcast"),
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8, "no machine's"),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 128, "no machine's"),
];

/// What a prefix is of which every packet would be dropped; `None`: it is no such.
pub fn unrouted(network: IpNet) -> Option<&'static str> {
    let holds = |(start, length, _): &&(IpAddr, u8, &str)| {
        IpNet::new(*start, *length).is_ok_and(|block| block.contains(&network))
    };
    UNROUTED.iter().find(holds).map(|(_, _, what)| *what)
}

/// A prefix that packets are to go to.
pub(super) fn routed(network: IpNet, at: &str, report: &mut Report) {
    if let Some(what) = unrouted(network) {
        let message = format!("{network} is {what}, of which no packet leaves a machine by a tunnel: all are dropped");
        report.warning(at, message);
    }
}

/// What tun listeners say of one another: a packet is for one session, and comes from an address that this one has.
pub(super) fn among(listeners: &[(usize, Arc<Listener>)], report: &mut Report) {
    let mut captured: HashMap<IpNet, (usize, &str)> = HashMap::new();
    let mut devices: HashMap<&str, (usize, &Tun)> = HashMap::new();
    for (at, listener) in listeners {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { continue };
        for (index, capture) in tun.captures.iter().enumerate() {
            let (first, name) = *captured.entry(capture.network).or_insert((*at, &listener.name));
            // A listener's own are told of where they are read.
            if first != *at {
                let message = format!(
                    "{} is captured by listeners[{first}] ({name}) too: a packet that its sender has bound to neither's \
                     device goes to one of them alone; keep one, unless programs do so",
                    capture.network
                );
                report.warning(format!("listeners[{at}].capture[{index}]"), message);
            }
        }
        let (first, other) = *devices.entry(&tun.device).or_insert((*at, tun));
        if !same_addresses(tun, other) {
            let message = format!(
                "device {} has the addresses of listeners[{first}] too: packets come from whichever the kernel takes, and \
                 those from the other listener's are dropped; write the same addresses at both, or another device",
                tun.device
            );
            report.warning(format!("listeners[{at}].address"), message);
        }
    }
}

/// Reports addresses of this machine that lie in pools: no client can get them.
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
                    "{} is the device's own address, so that no client gets it; write addresses of clients",
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
                "it has {own}, the address of device {device} ({other}): a client that gets it is not reached, since this \
                 machine takes its packets; write a prefix without it"
            );
            report.warning(&path, message);
        }
        let is_lone = |own: &&IpAddr| gateway.assign.iter().all(|pool| pool.addr().is_ipv4() != own.is_ipv4());
        if let Some(own) = gateway.addresses.iter().find(is_lone).filter(|_| !gateway.assign.is_empty()) {
            let version = if own.is_ipv4() { "IPv4" } else { "IPv6" };
            let message = format!("no client reaches {own}, since `assign` has no {version} prefix; add one");
            report.warning(format!("routes[{at}].terminate.address"), message);
        }
    }
}

fn same_addresses(one: &Tun, other: &Tun) -> bool {
    let all_in = |one: &Tun, other: &Tun| one.addresses.iter().all(|address| other.addresses.contains(address));
    all_in(one, other) && all_in(other, one)
}

/// Routes may give addresses of one pool: each is one client's on the whole node. Of a pool of which whole networks are
/// given the first client can have all.
pub(super) fn pools(routes: &[(usize, Arc<Route>)], report: &mut Report) {
    let gateways: Vec<(usize, &Gateway)> = routes
        .iter()
        .filter_map(|(at, route)| match &route.action {
            Action::Device(gateway) => Some((*at, gateway)),
            _ => None,
        })
        .collect();
    // Of a pool two routes that give of it, of which one is another than whichever asks.
    let mut givers: BTreeMap<(IpAddr, u8), Vec<usize>> = BTreeMap::new();
    for (at, gateway) in &gateways {
        for pool in &gateway.assign {
            let two = givers.entry((pool.network(), pool.prefix_len())).or_default();
            if two.len() < 2 && two.last() != Some(at) {
                two.push(*at);
            }
        }
    }
    for (at, greedy) in gateways.iter().filter(|(_, gateway)| gateway.assign_networks) {
        let other = |pool: &IpNet| {
            let wider = successors(pool.supernet(), IpNet::supernet);
            let wider = wider.filter_map(|wider| givers.get(&(wider.network(), wider.prefix_len())));
            let ends = (pool.network(), pool.prefix_len())..=(pool.broadcast(), pool.max_prefix_len());
            wider.chain(givers.range(ends).map(|(_, two)| two)).flatten().find(|other| *other != at)
        };
        if let Some((pool, other)) = greedy.assign.iter().find_map(|pool| Some((pool, other(pool)?))) {
            let message = format!(
                "one client may have all of {pool}, of which routes[{other}] gives addresses too; give each route a pool of \
                 its own"
            );
            report.warning(format!("routes[{at}].terminate.assign-networks"), message);
        }
    }
}
