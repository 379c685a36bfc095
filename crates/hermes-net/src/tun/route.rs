//! Addresses and routes of a device, as messages to the kernel.
//!
//! In: prefixes, numbers of devices and tables. Out: messages, and whose a prefix is. Never: a change.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressProtocol};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::kept::{self, Item};
use crate::netlink;

/// The table that everybody's routes are in.
pub(super) const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
/// All of them, for a listing.
pub(super) const EVERY: u32 = libc::RT_TABLE_UNSPEC as u32;
/// Who made a route or a rule: `proto 72` (H) in iproute2's words, a number that nobody else is known by.
pub(super) const PROTOCOL: RouteProtocol = RouteProtocol::Other(NUMBER);
const NUMBER: u8 = 72;

/// What the routes of pools come after: the number of their device with these bits. Nobody else's metric is as large, and
/// several devices may have one pool.
const LAST: u32 = 0x4800_0000;
const DEVICE: u32 = 0x00ff_ffff;

/// What a route has besides its prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The largest packet, in bytes, that connections over it begin with; `None`: the device's.
    pub mtu: Option<u32>,
    /// The address that connections over it come from, one of the device's; `None`: the first that fits.
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
    // Older kernels than Linux 5.18 take no notice of it.
    message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(NUMBER)));
    if address.addr().is_ipv6() {
        // There is nobody on the link who could have it too.
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

/// The route of a pool: any other one goes before it.
pub(super) fn last(device: u32, prefix: IpNet) -> RouteMessage {
    let mut message = message(device, MAIN, prefix, Route::default());
    message.attributes.push(RouteAttribute::Priority(LAST | (device & DEVICE)));
    message
}

fn is_last(route: &RouteMessage) -> bool {
    let is_ours =
        |attribute: &RouteAttribute| matches!(attribute, RouteAttribute::Priority(metric) if metric & !DEVICE == LAST);
    route.attributes.iter().any(is_ours)
}

/// The routes of a device in this table that are in our name, and what each has.
///
/// # Errors
/// The kernel's.
pub(super) fn routes_of(device: u32, table: u32) -> io::Result<BTreeMap<Item, Route>> {
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

/// What a message of the kernel says of a route of ours: its device, and which one it is.
pub(super) fn found(route: &RouteMessage) -> Option<(u32, Item)> {
    let (device, item) = read(route)?;
    device.filter(|_| route.header.protocol == PROTOCOL).map(|device| (device, item))
}

/// The route of ours that this one of somebody else is in the place of, where a device has such a one in its own table.
pub(super) fn in_the_way(route: &RouteMessage) -> Option<Item> {
    let (_, item) = read(route).filter(|_| route.header.protocol != PROTOCOL)?;
    matches!(item, Item::Route(table, _) if table != MAIN).then_some(item)
}

fn read(route: &RouteMessage) -> Option<(Option<u32>, Item)> {
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
    // The kernel leaves out that of everything.
    let start = start.unwrap_or_else(|| if is_v4 { [0; 4].into() } else { [0; 16].into() });
    let prefix = IpNet::new(start, route.header.destination_prefix_length).ok()?;
    Some((device, if is_last(route) { Item::Pool(prefix) } else { Item::Route(table, prefix) }))
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

/// What a message of the kernel says of an address: whose it is, and with what prefix.
pub(super) fn address_of(message: &AddressMessage) -> Option<(u32, IpNet)> {
    let of = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    // The other one may be the peer's; IPv6 has it alone.
    let local = of(|attribute| if let AddressAttribute::Local(address) = attribute { Some(*address) } else { None });
    let alone =
        || of(|attribute| if let AddressAttribute::Address(address) = attribute { Some(*address) } else { None });
    Some((message.header.index, IpNet::new(local.or_else(alone)?, message.header.prefix_len).ok()?))
}

/// The addresses of a device that are in our name.
///
/// # Errors
/// The kernel's.
pub(super) fn addresses_of(device: u32) -> io::Result<Vec<IpNet>> {
    let ours = AddressAttribute::Protocol(AddressProtocol::Other(NUMBER));
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
    // Numbers of eight bits have a place of their own, and the attribute all the same.
    message.header.table = u8::try_from(table).unwrap_or_default();
    message.attributes.push(RouteAttribute::Table(table));
    message
}

/// Whether an address lies in a network that the main table leads to a device of another process, or that is a pool of
/// another device; the default route's aside. What else leads to one of ours a session has, which may be moving.
///
/// # Errors
/// The kernel's.
pub(super) fn leads_elsewhere(device: u32, address: IpAddr) -> io::Result<bool> {
    let routes = netlink::list(RouteNetlinkMessage::GetRoute(to(MAIN, address)))?;
    let own: Vec<u32> = kept::own().keys().copied().collect();
    Ok(routes.iter().any(|message| {
        let RouteNetlinkMessage::NewRoute(route) = message else { return false };
        let has = |attribute: RouteAttribute| route.attributes.contains(&attribute);
        let holds = route.attributes.iter().any(|attribute| {
            let RouteAttribute::Destination(start) = attribute else { return false };
            let net = ip(start).and_then(|start| IpNet::new(start, route.header.destination_prefix_length).ok());
            net.is_some_and(|net| net.contains(&address))
        });
        let is_own = own.iter().any(|own| has(RouteAttribute::Oif(*own))) && !is_last(route);
        holds && has(RouteAttribute::Table(MAIN)) && !has(RouteAttribute::Oif(device)) && !is_own
    }))
}

/// Which device a prefix leads to by this table, the routes of pools aside.
///
/// # Errors
/// The kernel's.
pub(super) fn device_of(table: u32, prefix: IpNet) -> io::Result<Option<u32>> {
    let prefix = prefix.trunc();
    let routes = netlink::list(RouteNetlinkMessage::GetRoute(to(table, prefix.addr())))?;
    Ok(routes.iter().find_map(|message| {
        let RouteNetlinkMessage::NewRoute(route) = message else { return None };
        let has = |attribute: RouteAttribute| route.attributes.contains(&attribute);
        let to_prefix = has(RouteAttribute::Destination(prefix.addr().into())) || prefix.addr().is_unspecified();
        let is_it = route.header.destination_prefix_length == prefix.prefix_len();
        if !(to_prefix && is_it && has(RouteAttribute::Table(table))) || is_last(route) {
            return None;
        }
        route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Oif(device) => Some(*device),
            _ => None,
        })
    }))
}
