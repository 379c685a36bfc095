//! Checks a listener.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;

use super::context::Context;
use super::report::Report;
use super::{dns, header, ip_listener, packets};
use crate::authority::Authority;
use crate::document::keyword::Protocol;
use crate::document::listener as section;
use crate::scalar::{Many, Prefix};
use crate::snapshot::{Capture, CarryNames, ClientAuth, Listener, ListenerProtocol, ListenerTls, Tun};
use crate::spiffe::is_user_name;
use crate::trust::HERMES_USER;

/// A listener; `None` where something is missing without which it is none.
pub(super) fn build(
    section: &section::Listener,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<Listener> {
    if section.http3 && section.tls.is_none() && section.protocol == Protocol::Http {
        let message = "HTTP/3 is never in the clear; add tls: {} for this node's own certificate, or leave http3 out";
        report.problem(format!("{at}.http3"), message);
    }
    if section.early_data && !section.http3 {
        report.problem(format!("{at}.early-data"), "early data is HTTP/3's; add http3: true, or leave early-data out");
    }
    fitting_keys(section, at, report);
    let set_headers = header::fixed(&format!("{at}.set-headers"), &section.set_headers, report);
    let user = set_headers.iter().find(|(name, _)| *name == HERMES_USER);
    if user.is_some_and(|(_, user)| !user.to_str().is_ok_and(is_user_name)) {
        let message = "this is no user's name; write visible ASCII characters without commas and quotes";
        report.problem(format!("{at}.set-headers.hermes-user"), message);
    }
    let tls = section.tls.as_ref().map(|tls| build_tls(tls, &format!("{at}.tls"), context, report));
    let trust = prefixes(&section.trust);
    for everyone in trust.iter().filter(|net| net.prefix_len() == 0) {
        let message = format!("{everyone} believes whatever anyone claims to be; write the prefixes of your nodes");
        report.warning(format!("{at}.trust"), message);
    }
    let protocol = protocol(section, at, report);
    let binds = section.protocol != Protocol::Tun && section.dial.is_none();
    if binds && section.bind.is_none() {
        report.problem(format!("{at}.bind"), "there is no address; add bind: ADDRESS:PORT, such as 127.0.0.1:8080");
        return None;
    }
    Some(Listener {
        name: Arc::from(section.name.as_str()),
        bind: section.bind.filter(|_| binds).map(|bind| bind.0),
        dial: section.dial.as_deref().map(Arc::from),
        protocol: protocol?,
        set_headers,
        tls,
        trust,
        proxy_protocol: prefixes(&section.proxy_protocol),
        accept_post: section.accept_post,
        http2: section.http2.unwrap_or(true),
        http3: section.http3,
        early_data: section.early_data,
    })
}

pub(super) fn prefixes(section: &Many<Prefix>) -> Vec<IpNet> {
    section.iter().map(|prefix| prefix.0).collect()
}

/// Keys that only some protocols have.
fn fitting_keys(section: &section::Listener, at: &str, report: &mut Report) {
    let http = section.protocol == Protocol::Http;
    let mut only = |key: &str, written: bool, fits: bool, of: &str| {
        if written && !fits {
            report.problem(format!("{at}.{key}"), format!("only {of} have {key}; leave it out"));
        }
    };
    only("dial", section.dial.is_some(), http, "http listeners");
    only("accept-post", section.accept_post, http, "http listeners");
    only("http2", section.http2.is_some(), http, "http listeners");
    only("http3", section.http3, http, "http listeners");
    only("trust", !section.trust.is_empty(), http, "http listeners");
    let named = matches!(section.protocol, Protocol::Tcp | Protocol::Udp);
    only("authority", section.authority.is_some(), named, "tcp and udp listeners");
    let tun = section.protocol == Protocol::Tun;
    only("bind", section.bind.is_some(), !tun, "listeners with a port");
    only("device", section.device.is_some(), tun, "tun listeners");
    only("address", !section.address.is_empty(), tun, "tun listeners");
    only("capture", !section.capture.is_empty(), tun, "tun listeners");
    only("carry-names", section.carry_names != CarryNames::Packets, tun, "tun listeners");
    let dns = section.protocol == Protocol::Dns;
    only("names", !section.names.is_empty(), dns, "dns listeners");
    only("addresses", !section.addresses.is_empty(), dns, "dns listeners");
    only("forward", !section.forward.is_empty(), dns, "dns listeners");
    only("ipv6", section.ipv6.is_some(), dns, "dns listeners");
    let ip = section.protocol == Protocol::Ip;
    only("network", section.network.is_some(), ip, "ip listeners");
    only("peers", !section.peers.is_empty(), ip, "ip listeners");
    only("set-headers", !section.set_headers.is_empty(), !dns, "listeners whose clients begin sessions");
    let stream = matches!(section.protocol, Protocol::Http | Protocol::Tcp | Protocol::Socks5);
    only("tls", section.tls.is_some(), stream, "http, tcp and socks5 listeners");
    only("proxy-protocol", !section.proxy_protocol.is_empty(), stream, "http, tcp and socks5 listeners");
    if section.dial.is_some() {
        dialling_keys(section, at, report);
    }
}

/// What a listener that dials cannot have: nobody connects to it.
fn dialling_keys(section: &section::Listener, at: &str, report: &mut Report) {
    let mut no = |key: &str, written: bool, why: &str| {
        if written {
            report.problem(format!("{at}.{key}"), format!("a listener that dials {why}; leave {key} out"));
        }
    };
    no("bind", section.bind.is_some(), "binds nothing");
    no("tls", section.tls.is_some(), "has the TLS of its upstream");
    no("http2", section.http2.is_some(), "speaks the version of its upstream");
    no("http3", section.http3, "speaks the version of its upstream");
    no("trust", !section.trust.is_empty(), "knows the far end by its certificate");
    no("proxy-protocol", !section.proxy_protocol.is_empty(), "is connected to by nobody");
}

fn protocol(section: &section::Listener, at: &str, report: &mut Report) -> Option<ListenerProtocol> {
    match section.protocol {
        Protocol::Http => return Some(ListenerProtocol::Http),
        Protocol::Tun => return tun(section, at, report).map(ListenerProtocol::Tun),
        Protocol::Socks5 => return Some(ListenerProtocol::Socks5),
        Protocol::Dns => return dns::build(section, at, report).map(ListenerProtocol::Dns),
        Protocol::Ip => return ip_listener::build(section, at, report).map(ListenerProtocol::Ip),
        Protocol::Tcp | Protocol::Udp => {}
    }
    let at = format!("{at}.authority");
    let Some(text) = &section.authority else {
        report.problem(
            at,
            "each connection or flow needs a name to be routed by; add authority: NAME:PORT, such as DB:3306",
        );
        return None;
    };
    let authority = report.take(|| at, tunnel_authority(text))?;
    Some(match section.protocol {
        Protocol::Udp => ListenerProtocol::Udp { authority },
        _ => ListenerProtocol::Tcp { authority },
    })
}

/// A device, what it is called, and what it takes.
fn tun(section: &section::Listener, at: &str, report: &mut Report) -> Option<Tun> {
    if section.device.is_none() {
        report.problem(format!("{at}.device"), "the device needs a name; add device: NAME, such as hermes0");
    }
    let addresses: Vec<IpAddr> = section.address.iter().map(|address| address.0).collect();
    if addresses.is_empty() {
        let message = "packets need an address to come from; add address: [ADDRESS], such as 10.20.0.2";
        report.problem(format!("{at}.address"), message);
    }
    let mut captures: Vec<Capture> = Vec::new();
    for (index, capture) in section.capture.iter().enumerate() {
        let network = capture.network.0;
        let path = format!("{at}.capture[{index}]");
        packets::routed(network, &path, report);
        if captures.iter().any(|other| other.network == network) {
            report.problem(&path, format!("{network} is captured already; keep one"));
        }
        if !addresses.iter().any(|address| address.is_ipv4() == network.addr().is_ipv4()) {
            let message = format!("the device has no address of {network}'s version of IP; add one to address");
            report.problem(&path, message);
        }
        let set_headers = header::fixed(&format!("{path}.set-headers"), &capture.set_headers, report);
        captures.push(Capture { network, set_headers });
    }
    let device = section.device.as_ref()?.0.clone();
    Some(Tun { device, addresses, captures, carry_names: section.carry_names })
}

/// The target of a tunnel, which always has a port (RFC 9110, 9.3.6).
fn tunnel_authority(text: &str) -> Result<Authority, String> {
    let authority =
        Authority::parse(text, None).map_err(|error| format!("{text:?} is no authority: {error}; write NAME:PORT"))?;
    if authority.host().contains('*') {
        return Err(format!("{text:?} has a wildcard, and a tunnel has one target; write NAME:PORT"));
    }
    match authority.explicit_port() {
        Some(_) => Ok(authority),
        None => Err(format!("{text:?} has no port, and a tunnel needs one; write {text}:PORT")),
    }
}

fn build_tls(section: &section::ListenerTls, at: &str, context: &Context<'_>, report: &mut Report) -> ListenerTls {
    let client_ca = context.optional_file(&format!("{at}.ca"), section.ca.as_ref(), report);
    let cert_key = cert_key(section, at, context, report);
    let knows_ca = client_ca.is_some() || context.has_identity;
    let default = if knows_ca { ClientAuth::Required } else { ClientAuth::None };
    let client = section.client.unwrap_or(default);
    if client != ClientAuth::None && !knows_ca {
        report.problem(
            format!("{at}.client"),
            "clients are verified by a CA, and there is none; add identity at the top of the document, or tls.ca here",
        );
    }
    if client == ClientAuth::None && client_ca.is_some() {
        report
            .problem(format!("{at}.ca"), "nobody is asked for a certificate; leave ca out, or write client: required");
    }
    ListenerTls { client, cert_key, client_ca }
}

fn cert_key(
    section: &section::ListenerTls,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<(PathBuf, PathBuf)> {
    let cert = context.optional_file(&format!("{at}.cert"), section.cert.as_ref(), report);
    let key = context.optional_file(&format!("{at}.key"), section.key.as_ref(), report);
    match (&section.cert, &section.key) {
        (Some(_), Some(_)) => {}
        (Some(_), None) => report.problem(format!("{at}.key"), "a certificate needs its key; add key: FILE"),
        (None, Some(_)) => report.problem(format!("{at}.cert"), "a key needs its certificate; add cert: FILE"),
        (None, None) if !context.has_identity => report.problem(
            at,
            "there is no certificate to show; add identity: {cert, key, ca} at the top of the document, or cert and key here",
        ),
        (None, None) => {}
    }
    cert.zip(key)
}
