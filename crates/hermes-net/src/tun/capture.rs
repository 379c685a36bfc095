//! Captures: prefixes whose packets, of every program but Hermes itself, are routed into a device.
//!
//! In: prefixes of any length, also `0.0.0.0/0`. Out: routes in a table of the device, and rules that select this table
//! for packets without our [`MARK`]. The longest prefix wins, as in a single table; at equal length, the capture wins
//! over the main table. So a capture of `0.0.0.0/0` does not capture packets to the local network. Never: a rule of
//! another process, or one that outlives its device beyond the next start.
//!
//! For each length of the captured prefixes there is a pair of rules, the longer lengths first. They select:
//!
//! 1. the main table, but only its routes with longer prefixes;
//! 2. the device's table, but only its routes with prefixes at least as long.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{MutexGuard, PoisonError};

use ipnet::IpNet;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use super::desired::Setting;
use super::route::{self, MAIN, PROTOCOL, Route, family};
use super::{Captures, Device, TunError, desired, reverse_path};
use crate::netlink::{self, Change};
use crate::socket_mark::MARK;

/// The numbers of our routing tables: "H" (0x48), and the interface index, which shows whether a table is still in use.
const TABLES: u32 = 0x4800_0000;
const DEVICE_BITS: u32 = 0x00ff_ffff;
/// First priority of the pairs of rules. All pairs come after the rule of the local table and before that of the main
/// table.
const PRIORITY: u32 = 31_000;
/// The exemption of [`Device::exempt`] comes before all pairs.
const EXEMPT_PRIORITY: u32 = PRIORITY - 1;

/// Number of captures of a device, by family (is it IPv4?) and prefix length.
pub(super) type PrefixLengths = HashMap<(bool, u8), usize>;

impl Device {
    /// Captures the packets to a prefix, except Hermes's own. Changes the route's properties if the prefix is captured
    /// already.
    ///
    /// # Errors
    /// `TunError`: no privilege, a kernel without policy routing, or a reverse path filter that would drop answers.
    pub fn capture(&self, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let prefix = prefix.trunc();
        reverse_path::check(self.name(), prefix)?;
        let mut captures = self.captures();
        self.set_in(self.table(), prefix, route)?;
        let (is_v4, length) = length_of(prefix);
        if captures.prefixes.contains(&prefix) {
            return Ok(());
        }
        if !captures.lengths.contains_key(&(is_v4, length)) {
            // The rule for longer routes comes first. Without it, the second rule would capture the packets of these
            // routes.
            let added = pair(self.table(), is_v4, length).into_iter().try_for_each(|rule| self.add_rule(rule));
            if let Err(source) = added {
                self.remove_pair(is_v4, length);
                let _ = self.remove_from(self.table(), prefix);
                return Err(TunError::Capture { device: self.name().to_owned(), prefix, source });
            }
        }
        if let Some(rival) = rival(prefix) {
            let device = self.name();
            tracing::warn!(%prefix, device, rival, "another process captures the same prefix; its packets go to \
                           the device that was first. Remove the capture from one of the two nodes");
        }
        captures.prefixes.insert(prefix);
        *captures.lengths.entry((is_v4, length)).or_default() += 1;
        Ok(())
    }

    /// Changes the properties of a captured prefix. Does nothing if the prefix is not captured.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn change_capture(&self, prefix: IpNet, route: Route) -> Result<(), TunError> {
        let prefix = prefix.trunc();
        let captures = self.captures();
        if !captures.prefixes.contains(&prefix) {
            return Ok(());
        }
        self.replace_in(self.table(), prefix, route)
    }

    /// Ends a capture. A prefix that is not captured is not an error.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn release(&self, prefix: IpNet) -> Result<(), TunError> {
        let prefix = prefix.trunc();
        let mut captures = self.captures();
        if !captures.prefixes.remove(&prefix) {
            return Ok(());
        }
        let (is_v4, length) = length_of(prefix);
        let left = captures.lengths.get(&(is_v4, length)).map_or(0, |count| count - 1);
        if left == 0 {
            captures.lengths.remove(&(is_v4, length));
            self.remove_pair(is_v4, length);
        } else {
            captures.lengths.insert((is_v4, length), left);
        }
        self.remove_from(self.table(), prefix)
    }

    /// Exempts packets from this device from all captures, because at a gateway they have come through the overlay
    /// already. The exemption ends with the device.
    ///
    /// # Errors
    /// `TunError`: the kernel refuses.
    pub fn exempt(&self) -> Result<(), TunError> {
        for is_v4 in [true, false] {
            let rule = exemption(self.table(), is_v4, self.name());
            match self.add_rule(rule) {
                // A missing address family has no captures.
                Err(error) if error.raw_os_error() != Some(libc::EAFNOSUPPORT) => {
                    let device = self.name().to_owned();
                    return Err(TunError::Device { device, doing: "add a rule for", source: error });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn remove_pair(&self, is_v4: bool, length: u8) {
        // The rule for longer routes must stay until the capturing rule is removed.
        pair(self.table(), is_v4, length).into_iter().rev().for_each(|rule| self.remove_rule(rule));
    }

    pub(super) fn captures(&self) -> MutexGuard<'_, Captures> {
        self.inner.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the table with this device's captures.
    pub fn table(&self) -> u32 {
        TABLES | (self.index() & DEVICE_BITS)
    }
}

fn length_of(prefix: IpNet) -> (bool, u8) {
    (prefix.addr().is_ipv4(), prefix.prefix_len())
}

fn any(is_v4: bool) -> IpAddr {
    if is_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Returns a rule that selects a table for all packets.
fn rule(is_v4: bool, priority: u32, table: u32) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family(any(is_v4));
    rule.header.action = RuleAction::ToTable;
    rule.header.table = u8::try_from(table).unwrap_or_default();
    rule.attributes.push(RuleAttribute::Table(table));
    rule.attributes.push(RuleAttribute::Priority(priority));
    rule.attributes.push(RuleAttribute::Protocol(PROTOCOL));
    rule
}

fn pair(table: u32, is_v4: bool, length: u8) -> [RuleMessage; 2] {
    let longest = if is_v4 { 32 } else { 128 };
    let priority = PRIORITY + 2 * u32::from(longest - length);
    let mut main = rule(is_v4, priority, MAIN);
    main.attributes.push(RuleAttribute::SuppressPrefixLen(u32::from(length)));
    main.attributes.push(owner(table));
    let mut own = rule(is_v4, priority + 1, table);
    if length > 0 {
        own.attributes.push(RuleAttribute::SuppressPrefixLen(u32::from(length) - 1));
    }
    let mut both = [main, own];
    for rule in &mut both {
        rule.header.flags = RuleFlags::Invert;
        rule.attributes.push(RuleAttribute::FwMark(MARK));
    }
    both
}

/// Returns an attribute that records the owner of a rule for another table. The attribute suppresses routes through
/// devices of a group, and no device is in the group with the number of the owner's table.
fn owner(table: u32) -> RuleAttribute {
    RuleAttribute::SuppressIfGroup(table)
}

fn exemption(table: u32, is_v4: bool, device: &str) -> RuleMessage {
    let mut rule = rule(is_v4, EXEMPT_PRIORITY, MAIN);
    rule.attributes.push(RuleAttribute::Iifname(device.to_owned()));
    rule.attributes.push(owner(table));
    rule
}

/// Removes a rule. If that fails, the rule selects an empty table, which is harmless, and the next start tries again.
pub(super) fn remove(rule: RuleMessage) {
    let Err(error) = netlink::change(RouteNetlinkMessage::DelRule(rule), Change::Existing) else { return };
    if error.kind() != io::ErrorKind::NotFound {
        tracing::warn!(%error, "cannot remove a rule of a capture; see `ip rule`");
    }
}

/// Returns the name of another process's device that captures the same prefix.
fn rival(prefix: IpNet) -> Option<String> {
    let (is_v4, length) = length_of(prefix);
    // The devices that capture a prefix of this length.
    let [_, own] = pair(0, is_v4, length);
    let devices = rules().filter(|rule| key(rule) == key(&own)).filter_map(|rule| device_of(&rule));
    let is_ours = |device: &u32| desired::registry().keys().any(|index| is_of(*index, *device));
    let captures = |device: &u32| route::device_of(TABLES | device, prefix).is_ok_and(|found| found.is_some());
    let rival = devices.filter(|device| !is_ours(device)).find(captures)?;
    let name = nix::net::if_::if_indextoname(rival).ok()?;
    Some(name.to_string_lossy().into_owned())
}

/// Removes every rule of one device.
pub(super) fn remove_rules_of(device: u32) {
    rules_of(device).into_iter().rev().for_each(|(_, rule)| remove(rule));
}

/// Removes the rules of devices that no longer exist, left by killed processes.
pub(super) fn remove_stale_rules() {
    // For a missing device, nix returns an empty name instead of an error. (A device is created before its rules, so
    // the device of a listed rule cannot be about to appear.)
    let is_gone = |owner: u32| match nix::net::if_::if_indextoname(owner) {
        Ok(name) => name.is_empty(),
        // Any other error, for example a lack of file descriptors, does not mean that the device is missing.
        Err(error) => matches!(error, Errno::ENXIO | Errno::ENODEV),
    };
    let stale = |rule: &RuleMessage| device_of(rule).is_some_and(is_gone);
    rules().filter(stale).for_each(remove);
}

/// Returns the rules of one device, by family and priority.
pub(super) fn rules_of(device: u32) -> BTreeMap<Setting, RuleMessage> {
    let of_it = rules().filter(|rule| device_of(rule) == Some(device & DEVICE_BITS));
    of_it.filter_map(|rule| Some((item(&rule)?, rule))).collect()
}

/// Returns all rules of both families. Empty for a family that the kernel does not support, or without policy routing.
fn rules() -> impl Iterator<Item = RuleMessage> {
    [true, false].into_iter().flat_map(|is_v4| {
        let mut all = RuleMessage::default();
        all.header.family = family(any(is_v4));
        let messages = netlink::list(RouteNetlinkMessage::GetRule(all)).unwrap_or_default();
        messages.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewRule(rule) => Some(rule),
            _ => None,
        })
    })
}

/// Returns the family (is it IPv4?) and the priority of a rule, which identify it among the rules of a device.
pub(super) fn key(rule: &RuleMessage) -> Option<(bool, u32)> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(priority) => Some((rule.header.family == AddressFamily::Inet, *priority)),
        _ => None,
    })
}

/// Whether `device` is the interface index whose shortened form [`found`] returned.
pub(super) fn is_of(device: u32, found: u32) -> bool {
    device & DEVICE_BITS == found
}

fn item(rule: &RuleMessage) -> Option<Setting> {
    key(rule).map(|(is_v4, priority)| Setting::Rule(is_v4, priority))
}

/// Returns the device and the identity of a rule that Hermes set. `None`: another program's rule. The interface index
/// is shortened to the bits in a table number.
pub(super) fn found(rule: &RuleMessage) -> Option<(u32, Setting)> {
    Some((device_of(rule)?, item(rule)?))
}

/// Returns the device that owns a rule. `None`: another program's rule.
fn device_of(rule: &RuleMessage) -> Option<u32> {
    if !rule.attributes.contains(&RuleAttribute::Protocol(PROTOCOL)) {
        return None;
    }
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Table(number) | RuleAttribute::SuppressIfGroup(number) if number & !DEVICE_BITS == TABLES => {
            Some(number & DEVICE_BITS)
        }
        _ => None,
    })
}
