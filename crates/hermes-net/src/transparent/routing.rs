//! Policy routing of a diversion: packets with its mark are delivered to this machine.
//!
//! In: a mark, which is also the number of a routing table. Out: a rule and a route for each IP version, tagged with the
//! protocol number of Hermes. Never: a rule of another process, except one whose nftables table no longer exists.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::SPOOF_MARK;
use super::rules::{MARKS, diversion_name};
use crate::netlink::{self, Change, PROTOCOL};

/// Before the rules of VPNs (from 5,210 on for Tailscale) and of captures (31,000). The table of local addresses comes
/// first (0), whose packets need no diversion.
const PRIORITY: u32 = 1_000;
const MAIN: u32 = libc::RT_TABLE_MAIN as u32;

fn families() -> [IpAddr; 2] {
    [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]
}

fn family(any: IpAddr) -> AddressFamily {
    if any.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// Adds rules and routes.
///
/// # Errors
/// No privilege, or a kernel without policy routing.
pub(super) fn add(mark: u32) -> io::Result<()> {
    for any in families() {
        let added = netlink::change(RouteNetlinkMessage::NewRoute(local_route(any, mark)), Change::Set)
            .and_then(|()| netlink::change(RouteNetlinkMessage::NewRule(rule(any, mark, mark)), Change::Add))
            // Sockets that use a client's address are never captured by a TUN device.
            .and_then(|()| netlink::change(RouteNetlinkMessage::NewRule(rule(any, SPOOF_MARK, MAIN)), Change::Add));
        match added {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // A kernel without IPv6.
            Err(error) if any.is_ipv6() && error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(error) => {
                remove(mark);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Removes rules and routes. Missing ones are no error.
pub(super) fn remove(mark: u32) {
    for any in families() {
        let _ = netlink::change(RouteNetlinkMessage::DelRule(rule(any, mark, mark)), Change::Existing);
        let _ = netlink::change(RouteNetlinkMessage::DelRoute(local_route(any, mark)), Change::Existing);
    }
    // The rule for sockets with a client's address is shared by all diversions, so the last one removes it.
    if marks().is_empty() {
        for any in families() {
            let _ = netlink::change(RouteNetlinkMessage::DelRule(rule(any, SPOOF_MARK, MAIN)), Change::Existing);
        }
    }
}

/// Removes the rules and routes of killed processes: those whose nftables table does not exist.
pub(super) fn remove_stale() {
    for mark in marks() {
        let id = u8::try_from((mark >> 8) & 0xff).unwrap_or_default();
        // If the kernel does not answer, nothing is removed.
        if !crate::nftables::exists(&diversion_name(id)).unwrap_or(true) {
            remove(mark);
        }
    }
}

/// The marks of all diversions that have a rule in this namespace.
fn marks() -> Vec<u32> {
    let mut found: Vec<u32> = families().into_iter().flat_map(marks_of).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn marks_of(any: IpAddr) -> Vec<u32> {
    let mut all = RuleMessage::default();
    all.header.family = family(any);
    let messages = netlink::list(RouteNetlinkMessage::GetRule(all)).unwrap_or_default();
    let mark = |message: RouteNetlinkMessage| {
        let RouteNetlinkMessage::NewRule(rule) = message else { return None };
        if !rule.attributes.contains(&RuleAttribute::Protocol(PROTOCOL)) {
            return None;
        }
        rule.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::FwMark(mark) if mark & 0xffff_00ff == MARKS => Some(*mark),
            _ => None,
        })
    };
    messages.into_iter().filter_map(mark).collect()
}

/// A rule that selects a table for packets with this mark.
fn rule(any: IpAddr, mark: u32, table: u32) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family(any);
    rule.header.action = RuleAction::ToTable;
    rule.header.table = u8::try_from(table).unwrap_or_default();
    rule.attributes.push(RuleAttribute::Table(table));
    rule.attributes.push(RuleAttribute::Priority(PRIORITY));
    rule.attributes.push(RuleAttribute::FwMark(mark));
    rule.attributes.push(RuleAttribute::Protocol(PROTOCOL));
    rule
}

/// A route that delivers packets to any address to this machine.
fn local_route(any: IpAddr, table: u32) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(any);
    message.header.table = u8::try_from(table).unwrap_or_default();
    message.header.protocol = PROTOCOL;
    message.header.kind = RouteType::Local;
    message.header.scope = if any.is_ipv4() { RouteScope::Host } else { RouteScope::Universe };
    message.attributes.push(RouteAttribute::Table(table));
    // The loopback interface is the first one of each namespace.
    message.attributes.push(RouteAttribute::Oif(1));
    message
}
