//! Checks DNS listeners: the names that they answer, the pools of virtual addresses, and the resolvers for other names.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::report::Report;
use crate::dial_scope::DialScope;
use crate::document::listener as section;
use crate::pattern::{AuthorityPattern, HostPattern, PortPattern};
use crate::snapshot::{CarryNames, Dns, Listener, ListenerProtocol, Tun, VirtualIpPools};

/// Port of DNS.
const DNS_PORT: u16 = 53;
/// Minimum number of host bits in a pool of virtual addresses.
const MIN_HOST_BITS: u8 = 2;

/// Builds the settings of a DNS listener; `None` if an essential part is missing.
pub(super) fn build(section: &section::Listener, at: &str, report: &mut Report) -> Option<Dns> {
    check_open_resolver(section, at, report);
    if section.names.is_empty() {
        let message = "no names: all queries are forwarded; add names: [NAME, \"*.NAME\"]";
        report.warning(format!("{at}.names"), message);
    }
    let names = section.names.iter().enumerate();
    let names: Vec<HostPattern> = names
        .filter_map(|(index, text)| report.ok_or_report(|| format!("{at}.names[{index}]"), host_pattern(text)))
        .collect();
    let addresses = reserved(section, at, report);
    let forward = section.forward.iter().enumerate();
    let forward: Vec<SocketAddr> = forward
        .filter_map(|(index, text)| report.ok_or_report(|| format!("{at}.forward[{index}]"), resolver(text)))
        .collect();
    let ipv6 = section.ipv6.unwrap_or(true);
    if !ipv6 && addresses.as_ref().is_some_and(|reserved| reserved.v6.is_some()) {
        let message = "ipv6: false conflicts with the IPv6 pool in addresses; remove one of them";
        report.problem(format!("{at}.ipv6"), message);
    }
    Some(Dns { names, addresses: addresses?, forward, ipv6 })
}

/// An open resolver is a means of reflection attacks.
fn check_open_resolver(section: &section::Listener, at: &str, report: &mut Report) {
    let Some(bind) = &section.bind else { return };
    let ip = bind.0.ip().to_canonical();
    let is_public = ip.is_unspecified() || DialScope::Public.forbids(ip, &|_| false).is_none();
    if is_public {
        let message = format!(
            "{ip} makes this an open resolver, which can be abused for reflection attacks; bind a loopback or private address"
        );
        report.problem(format!("{at}.bind"), message);
    }
}

fn host_pattern(text: &str) -> Result<HostPattern, String> {
    let wrong = |why: &str| format!("invalid name {text:?}: {why}; use VIDEO or *.corp");
    let pattern = AuthorityPattern::parse(text).map_err(|_| wrong("not a host pattern"))?;
    match pattern.host {
        _ if pattern.port != PortPattern::Default => Err(wrong("DNS names have no port")),
        HostPattern::Any => Err(wrong("it would match every name of the Internet")),
        HostPattern::Exact(host) if host.parse::<IpAddr>().is_ok() => Err(wrong("it is an IP address")),
        host => Ok(host),
    }
}

fn resolver(text: &str) -> Result<SocketAddr, String> {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let found = bracketed.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, DNS_PORT)).or_else(|_| text.parse());
    match found {
        Ok(server) if server.port() != 0 && !server.ip().is_unspecified() => Ok(server),
        _ => Err(format!("invalid resolver {text:?}; use ADDRESS or ADDRESS:PORT, such as 192.0.2.53")),
    }
}

fn reserved(section: &section::Listener, at: &str, report: &mut Report) -> Option<VirtualIpPools> {
    let path = format!("{at}.addresses");
    let mut reserved = VirtualIpPools { v4: None, v6: None };
    for net in section.addresses.iter().map(|prefix| prefix.0) {
        if net.max_prefix_len() - net.prefix_len() < MIN_HOST_BITS {
            report.problem(&path, format!("{net} is too small for a pool; use a shorter prefix"));
        }
        if DialScope::Public.forbids(net.addr(), &|_| false).is_none() {
            let message = format!(
                "{net} is public, and its hosts become unreachable; use a reserved network such as 198.18.0.0/16 \
                 or one of fd00::/8"
            );
            report.warning(&path, message);
        }
        let twice = match net {
            IpNet::V4(net) => reserved.v4.replace(net).is_some(),
            IpNet::V6(net) => reserved.v6.replace(net).is_some(),
        };
        if twice {
            report.problem(&path, "more than one network of an IP version; keep at most one of each");
        }
    }
    if reserved.v4.is_none() && reserved.v6.is_none() {
        report.problem(path, "missing pool of virtual addresses; add addresses: 198.18.0.0/16");
        return None;
    }
    Some(reserved)
}

/// Checks DNS listeners against each other.
pub(super) fn among(listeners: &[(usize, Arc<Listener>)], report: &mut Report) {
    let dns = |listener: &Arc<Listener>| match &listener.protocol {
        ListenerProtocol::Dns(dns) => Some((listener.bind, dns.clone())),
        _ => None,
    };
    let all: Vec<_> = listeners.iter().filter_map(|(at, listener)| Some((*at, dns(listener)?))).collect();
    for (at, (_, one)) in &all {
        let mut earlier = all.iter().take_while(|(earlier, _)| earlier < at);
        let overlaps = |other: &Dns| one.addresses != other.addresses && one.addresses.overlaps(&other.addresses);
        if let Some((earlier, _)) = earlier.find(|(_, (_, other))| overlaps(other)) {
            let message = format!(
                "overlaps listeners[{earlier}].addresses, so an address could stand for two names; use the same networks, or disjoint ones"
            );
            report.problem(format!("listeners[{at}].addresses"), message);
        }
        let own = one.forward.iter().find(|server| all.iter().any(|(_, (bind, _))| *bind == Some(**server)));
        if let Some(own) = own {
            report.problem(
                format!("listeners[{at}].forward"),
                format!("{own} is this node itself; use another resolver"),
            );
        }
    }
    let reserved: Vec<VirtualIpPools> = all.iter().map(|(_, (_, dns))| dns.addresses).collect();
    for (at, listener) in listeners {
        match &listener.protocol {
            ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows => flows(tun, *at, &reserved, report),
            _ => {}
        }
    }
}

/// Checks a device with `carry-names: flows`. It must capture virtual addresses. Its captures have no header fields of
/// their own, because HTTP requests to a name only get those of the listener.
fn flows(tun: &Tun, at: usize, reserved: &[VirtualIpPools], report: &mut Report) {
    let nets = || reserved.iter().flat_map(|one| [one.v4.map(IpNet::from), one.v6.map(IpNet::from)]).flatten();
    let is_names = |network: &IpNet| nets().any(|net| net.contains(network) || network.contains(&net));
    if !tun.captures.iter().any(|capture| is_names(&capture.network)) {
        let message = "no captured prefix contains virtual addresses; capture the addresses of a dns listener, or remove carry-names";
        report.problem(format!("listeners[{at}].carry-names"), message);
    }
    for (index, capture) in tun.captures.iter().enumerate() {
        if is_names(&capture.network) && !capture.set_headers.is_empty() {
            let message = "connections to names only get the headers of the listener; move these to its set-headers";
            report.problem(format!("listeners[{at}].capture[{index}].set-headers"), message);
        }
    }
}
