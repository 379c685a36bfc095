//! Netlink messages for addresses and routes of a device.
//!
//! In: prefixes, indexes of interfaces and tables. Out: messages, and the owner of a prefix. Never: a change in the
//! kernel.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressProtocol};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteScope, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::desired::{self, Setting};
use crate::netlink;
pub(super) use crate::netlink::PROTOCOL;
use crate::netlink::PROTOCOL_NUMBER;

/// The main routing table.
pub(super) const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
/// The table number that selects all tables in a listing.
pub(super) const ALL_TABLES: u32 = libc::RT_TABLE_UNSPEC as u32;

/// Metric of pool routes, with the interface index in the low bits. It is larger than all usual metrics, so any other
/// route wins. The index allows several devices to share a pool.
const POOL_METRIC: u32 = 0x4800_0000;
const DEVICE_BITS: u32 = 0x00ff_ffff;

/// The properties of a route besides its prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The initial path MTU of connections over the route, in bytes. `None`: the MTU of the device.
    pub mtu: Option<u32>,
    /// The source address of connections over the route, one of the device's addresses. `None`: the kernel selects it.
    pub source: Option<IpAddr>,
}

pub(super) fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

pub(super) fn address(device: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(address.addr());
    message.header.prefix_len = address.prefix_len();
    message.header.index = device;
    message.attributes.push(AddressAttribute::Local(address.addr()));
    message.attributes.push(AddressAttribute::Address(address.addr()));
    // Kernels before Linux 5.18 ignore the attribute.
    message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(PROTOCOL_NUMBER)));
    if address.addr().is_ipv6() {
        // Duplicate address detection is not needed, because no other host on the link could use the address.
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    message
}

pub(super) fn message(device: u32, table: u32, prefix: IpNet, route: Route) -> RouteMessage {
    let prefix = prefix.trunc();
    let mut message = to(table, prefix.addr());
    message.header.destination_prefix_length = prefix.prefix_len();
    message.header.protocol = PROTOCOL;
    message.header.scope = if prefix.addr().is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
    message.header.kind = RouteType::Unicast;
    message.attributes.push(RouteAttribute::Destination(prefix.addr().into()));
    message.attributes.push(RouteAttribute::Oif(device));
    message.attributes.extend(route.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
    message.attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    message
}

/// Returns the message for the route of a pool. Any other route takes precedence.
pub(super) fn pool_route(device: u32, prefix: IpNet) -> RouteMessage {
    let mut message = message(device, MAIN, prefix, Route::default());
    message.attributes.push(RouteAttribute::Priority(POOL_METRIC | (device & DEVICE_BITS)));
    message
}

fn is_pool_route(route: &RouteMessage) -> bool {
    let is_ours = |attribute: &RouteAttribute| matches!(attribute, RouteAttribute::Priority(metric) if metric & !DEVICE_BITS == POOL_METRIC);
    route.attributes.iter().any(is_ours)
}

/// Returns the routes of a device in this table that carry our protocol number, with their properties.
///
/// # Errors
/// The errors of the kernel.
pub(super) fn routes_of(device: u32, table: u32) -> io::Result<BTreeMap<Setting, Route>> {
    let mut found = BTreeMap::new();
    for any in [IpAddr::from([0; 4]), IpAddr::from([0; 16])] {
        let mut all = to(table, any);
        all.header.protocol = PROTOCOL;
        for message in netlink::list(RouteNetlinkMessage::GetRoute(all))? {
            let RouteNetlinkMessage::NewRoute(route) = message else { continue };
            let of_it = self::found(&route).filter(|(index, _)| *index == device);
            found.extend(of_it.map(|(_, item)| (item, has(&route))));
        }
    }
    Ok(found)
}

/// Returns the device and the identity of a route that carries our protocol number. `None`: another program's route.
pub(super) fn found(route: &RouteMessage) -> Option<(u32, Setting)> {
    let (device, item) = read(route)?;
    device.filter(|_| route.header.protocol == PROTOCOL).map(|device| (device, item))
}

/// Returns the identity of another program's route outside the main table, where it may have replaced a captured route
/// of ours.
pub(super) fn in_the_way(route: &RouteMessage) -> Option<Setting> {
    let (_, item) = read(route).filter(|_| route.header.protocol != PROTOCOL)?;
    matches!(item, Setting::Route(table, _) if table != MAIN).then_some(item)
}

fn read(route: &RouteMessage) -> Option<(Option<u32>, Setting)> {
    let (mut device, mut start, mut table) = (None, None, u32::from(route.header.table));
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(address) => start = ip(address),
            _ => {}
        }
    }
    let is_v4 = route.header.address_family == AddressFamily::Inet;
    // The kernel omits the destination of a default route.
    let start = start.unwrap_or_else(|| if is_v4 { [0; 4].into() } else { [0; 16].into() });
    let prefix = IpNet::new(start, route.header.destination_prefix_length).ok()?;
    Some((device, if is_pool_route(route) { Setting::Pool(prefix) } else { Setting::Route(table, prefix) }))
}

fn has(route: &RouteMessage) -> Route {
    let mut found = Route::default();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::PrefSource(source) => found.source = ip(source),
            RouteAttribute::Metrics(metrics) => {
                found.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    found
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

/// Returns the interface and the prefix of an address, from a kernel message.
pub(super) fn address_of(message: &AddressMessage) -> Option<(u32, IpNet)> {
    let of = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    // For IPv4, `Address` may be the address of the link's peer. For IPv6, the kernel sends only `Address`.
    let local = of(|attribute| if let AddressAttribute::Local(address) = attribute { Some(*address) } else { None });
    let alone =
        || of(|attribute| if let AddressAttribute::Address(address) = attribute { Some(*address) } else { None });
    Some((message.header.index, IpNet::new(local.or_else(alone)?, message.header.prefix_len).ok()?))
}

/// Returns the addresses of a device that carry our protocol number.
///
/// # Errors
/// The errors of the kernel.
pub(super) fn addresses_of(device: u32) -> io::Result<Vec<IpNet>> {
    let ours = AddressAttribute::Protocol(AddressProtocol::Other(PROTOCOL_NUMBER));
    let all = netlink::list(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    let of_it = all.iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewAddress(address) if address.attributes.contains(&ours) => address_of(address),
        _ => None,
    });
    Ok(of_it.filter(|(index, _)| *index == device).map(|(_, address)| address).collect())
}

fn to(table: u32, of: IpAddr) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(of);
    // The 8-bit table field is set in addition to the attribute.
    message.header.table = u8::try_from(table).unwrap_or_default();
    message.attributes.push(RouteAttribute::Table(table));
    message
}

/// Whether the main table routes this address to a device of another process, or another device's pool contains it. The
/// default route does not count. Other routes to our own devices belong to sessions, which may be moving.
///
/// # Errors
/// The errors of the kernel.
pub(super) fn leads_elsewhere(device: u32, address: IpAddr) -> io::Result<bool> {
    let routes = netlink::list(RouteNetlinkMessage::GetRoute(to(MAIN, address)))?;
    let own: Vec<u32> = desired::registry().keys().copied().collect();
    Ok(routes.iter().any(|message| {
        let RouteNetlinkMessage::NewRoute(route) = message else { return false };
        let has = |attribute: RouteAttribute| route.attributes.contains(&attribute);
        let holds = route.attributes.iter().any(|attribute| {
            let RouteAttribute::Destination(start) = attribute else { return false };
            let net = ip(start).and_then(|start| IpNet::new(start, route.header.destination_prefix_length).ok());
            net.is_some_and(|net| net.contains(&address))
        });
        let is_own = own.iter().any(|own| has(RouteAttribute::Oif(*own))) && !is_pool_route(route);
        holds && has(RouteAttribute::Table(MAIN)) && !has(RouteAttribute::Oif(device)) && !is_own
    }))
}

/// Returns the device to which this table routes exactly this prefix. `None`: no such route. Pool routes do not count.
///
/// # Errors
/// The errors of the kernel.
pub(super) fn device_of(table: u32, prefix: IpNet) -> io::Result<Option<u32>> {
    let prefix = prefix.trunc();
    let routes = netlink::list(RouteNetlinkMessage::GetRoute(to(table, prefix.addr())))?;
    Ok(routes.iter().find_map(|message| {
        let RouteNetlinkMessage::NewRoute(route) = message else { return None };
        let has = |attribute: RouteAttribute| route.attributes.contains(&attribute);
        let to_prefix = has(RouteAttribute::Destination(prefix.addr().into())) || prefix.addr().is_unspecified();
        let is_it = route.header.destination_prefix_length == prefix.prefix_len();
        if !(to_prefix && is_it && has(RouteAttribute::Table(table))) || is_pool_route(route) {
            return None;
        }
        route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Oif(device) => Some(*device),
            _ => None,
        })
    }))
}
