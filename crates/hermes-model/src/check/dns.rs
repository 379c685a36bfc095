//! Checks DNS listeners: the names that are theirs, the addresses that stand for them, and whom they ask.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::report::Report;
use crate::document::listener as section;
use crate::pattern::{AuthorityPattern, HostPattern, PortPattern};
use crate::reach::Reach;
use crate::snapshot::{CarryNames, Dns, Listener, ListenerProtocol, Reserved, Tun};

/// The port of DNS.
const PORT: u16 = 53;
/// Bits that a prefix leaves for names, at least.
const LEAST_BITS: u8 = 2;

/// What a DNS listener does; `None` where something is missing without which it is none.
pub(super) fn build(section: &section::Listener, at: &str, report: &mut Report) -> Option<Dns> {
    reachable_by_strangers(section, at, report);
    if section.names.is_empty() {
        let message = "no name is answered here, and every question is forwarded; add names: [NAME, \"*.NAME\"]";
        report.warning(format!("{at}.names"), message);
    }
    let names = section.names.iter().enumerate();
    let names: Vec<HostPattern> =
        names.filter_map(|(index, text)| report.take(|| format!("{at}.names[{index}]"), host(text))).collect();
    let addresses = reserved(section, at, report);
    let forward = section.forward.iter().enumerate();
    let forward: Vec<SocketAddr> =
        forward.filter_map(|(index, text)| report.take(|| format!("{at}.forward[{index}]"), server(text))).collect();
    let ipv6 = section.ipv6.unwrap_or(true);
    if !ipv6 && addresses.as_ref().is_some_and(|reserved| reserved.v6.is_some()) {
        let message = "ipv6: false hides the addresses of IPv6 that names get; leave out one of them";
        report.problem(format!("{at}.ipv6"), message);
    }
    Some(Dns { names, addresses: addresses?, forward, ipv6 })
}

/// What answers anyone's questions is used to flood third parties with answers.
fn reachable_by_strangers(section: &section::Listener, at: &str, report: &mut Report) {
    let Some(bind) = &section.bind else { return };
    let ip = bind.0.ip().to_canonical();
    let is_public = ip.is_unspecified() || Reach::Public.forbids(ip, &|_| false).is_none();
    if is_public {
        let message = format!(
            "{ip} lets strangers ask, and have answers sent to others in their stead; bind loopback or a private address"
        );
        report.problem(format!("{at}.bind"), message);
    }
}

fn host(text: &str) -> Result<HostPattern, String> {
    let wrong = |why: &str| format!("{text:?} is no name of this listener's: {why}; write VIDEO or *.corp");
    let pattern = AuthorityPattern::parse(text).map_err(|_| wrong("it is no pattern of hosts"))?;
    match pattern.host {
        _ if pattern.port != PortPattern::Default => Err(wrong("DNS knows no ports")),
        HostPattern::Any => Err(wrong("every name of the Internet would be its own")),
        HostPattern::Exact(host) if host.parse::<IpAddr>().is_ok() => Err(wrong("it is an address")),
        host => Ok(host),
    }
}

fn server(text: &str) -> Result<SocketAddr, String> {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let found = bracketed.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, PORT)).or_else(|_| text.parse());
    match found {
        Ok(server) if server.port() != 0 && !server.ip().is_unspecified() => Ok(server),
        _ => Err(format!("{text:?} is no server's address; write ADDRESS or ADDRESS:PORT, such as 192.0.2.53")),
    }
}

fn reserved(section: &section::Listener, at: &str, report: &mut Report) -> Option<Reserved> {
    let path = format!("{at}.addresses");
    let mut reserved = Reserved { v4: None, v6: None };
    for net in section.addresses.iter().map(|prefix| prefix.0) {
        if net.max_prefix_len() - net.prefix_len() < LEAST_BITS {
            report.problem(&path, format!("{net} has no room for names; write a shorter prefix"));
        }
        if Reach::Public.forbids(net.addr(), &|_| false).is_none() {
            let message = format!(
                "{net} belongs to somebody, who cannot be reached any more; write one that nobody has, such as \
                 198.18.0.0/16 or one of fd00::/8"
            );
            report.warning(&path, message);
        }
        let twice = match net {
            IpNet::V4(net) => reserved.v4.replace(net).is_some(),
            IpNet::V6(net) => reserved.v6.replace(net).is_some(),
        };
        if twice {
            report.problem(&path, "there are two prefixes of one version of IP; keep one of each at most");
        }
    }
    if reserved.v4.is_none() && reserved.v6.is_none() {
        report.problem(path, "names need addresses that stand for them; add addresses: 198.18.0.0/16");
        return None;
    }
    Some(reserved)
}

/// What one DNS listener says of another.
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
                "an address would be two names': listeners[{earlier}].addresses overlaps; write the same prefixes, or others"
            );
            report.problem(format!("listeners[{at}].addresses"), message);
        }
        let own = one.forward.iter().find(|server| all.iter().any(|(_, (bind, _))| *bind == Some(**server)));
        if let Some(own) = own {
            report
                .problem(format!("listeners[{at}].forward"), format!("{own} is this node itself; name another server"));
        }
    }
    let reserved: Vec<Reserved> = all.iter().map(|(_, (_, dns))| dns.addresses).collect();
    for (at, listener) in listeners {
        match &listener.protocol {
            ListenerProtocol::Tun(tun) if tun.carry_names == CarryNames::Flows => flows(tun, *at, &reserved, report),
            _ => {}
        }
    }
}

/// Checks a device that carries names as flows: it needs addresses that stand for names, and may have no headers but
/// those of its listener, since HTTP requests to a name get only these.
fn flows(tun: &Tun, at: usize, reserved: &[Reserved], report: &mut Report) {
    let nets = || reserved.iter().flat_map(|one| [one.v4.map(IpNet::from), one.v6.map(IpNet::from)]).flatten();
    let is_names = |network: &IpNet| nets().any(|net| net.contains(network) || network.contains(&net));
    if !tun.captures.iter().any(|capture| is_names(&capture.network)) {
        let message =
            "no captured address stands for a name; capture the addresses of a dns listener, or leave carry-names out";
        report.problem(format!("listeners[{at}].carry-names"), message);
    }
    for (index, capture) in tun.captures.iter().enumerate() {
        if is_names(&capture.network) && !capture.set_headers.is_empty() {
            let message = "connections to names get the headers of the listener alone; move these to its set-headers";
            report.problem(format!("listeners[{at}].capture[{index}].set-headers"), message);
        }
    }
}
