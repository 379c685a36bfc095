//! Checks a listener.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;

use super::context::Context;
use super::report::Report;
use super::{dns, header, ip_listener, packets, rina};
use crate::authority::Authority;
use crate::document::keyword::Protocol;
use crate::document::listener as section;
use crate::scalar::{OneOrMany, Prefix};
use crate::snapshot::{
    Capture, CarryNames, ClientAuth, Listener, ListenerProtocol, ListenerTls, Ndn, Transparent, Tun,
};
use crate::spiffe::is_user_name;
use crate::trust::HERMES_USER;

/// The most pairs of prefix and port that a `transparent` listener intercepts. The kernel compares each SYN with them in
/// turn.
const MAX_INTERCEPTION_RULES: usize = 256;

/// The target of the sessions of an `ndn` listener that names none: NDN's port is 6363.
const NDN_AUTHORITY: &str = "NDN:6363";

/// The longest path of a Unix socket. unix(7) allows 107 bytes; the temporary name has a dot and the ID of the process more.
const MAX_UNIX_PATH: usize = 99;

/// Builds a listener; `None` if an essential part is missing.
pub(super) fn build(
    section: &section::Listener,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<Listener> {
    if section.http3 && section.tls.is_none() && section.protocol == Protocol::Http {
        let message = "http3 requires TLS; add tls: {} to use this node's certificate, or remove http3";
        report.problem(format!("{at}.http3"), message);
    }
    if section.early_data && !section.http3 {
        report.problem(format!("{at}.early-data"), "early-data requires HTTP/3; add http3: true, or remove early-data");
    }
    check_keys(section, at, report);
    if section.connections == Some(0) {
        report.problem(format!("{at}.connections"), "0 is out of range; use 1 or more, or remove the key for no bound");
    }
    let set_headers = header::fixed(&format!("{at}.set-headers"), &section.set_headers, report);
    let user = set_headers.iter().find(|(name, _)| *name == HERMES_USER);
    if user.is_some_and(|(_, user)| !user.to_str().is_ok_and(is_user_name)) {
        let message = "invalid user name; use visible ASCII characters without commas and quotes";
        report.problem(format!("{at}.set-headers.hermes-user"), message);
    }
    let tls = section.tls.as_ref().map(|tls| build_tls(tls, &format!("{at}.tls"), context, report));
    let trust = prefixes(&section.trust);
    for everyone in trust.iter().filter(|net| net.prefix_len() == 0) {
        let message = format!("{everyone} trusts any client to name its user; list the networks of your nodes");
        report.warning(format!("{at}.trust"), message);
    }
    let protocol = protocol(section, at, context, report);
    let unix = section.unix.as_deref().filter(|_| section.protocol == Protocol::Ndn);
    if unix.is_some_and(|path| !path.starts_with('/') || path.len() > MAX_UNIX_PATH || path.contains('\0')) {
        let message = format!("invalid path of a Unix socket; use an absolute path of at most {MAX_UNIX_PATH} bytes");
        report.problem(format!("{at}.unix"), message);
    }
    let has_port = !matches!(section.protocol, Protocol::Tun | Protocol::Transparent);
    let binds = has_port && section.dial.is_none();
    if binds && section.bind.is_none() && unix.is_none() {
        report.problem(format!("{at}.bind"), "missing address; add bind: ADDRESS:PORT, such as 127.0.0.1:8080");
        return None;
    }
    Some(Listener {
        name: Arc::from(section.name.as_str()),
        bind: section.bind.filter(|_| binds).map(|bind| bind.0),
        unix: unix.map(|path| Arc::from(Path::new(path))),
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
        congestion: section.congestion.as_ref().map(|name| name.0.clone()),
        connections: section.connections,
    })
}

pub(super) fn prefixes(section: &OneOrMany<Prefix>) -> Vec<IpNet> {
    section.iter().map(|prefix| prefix.0).collect()
}

/// Reports keys that the protocol does not have.
fn check_keys(section: &section::Listener, at: &str, report: &mut Report) {
    let http = section.protocol == Protocol::Http;
    let mut only = |key: &str, written: bool, fits: bool, of: &str| {
        if written && !fits {
            report.problem(format!("{at}.{key}"), format!("{key} requires {of}; remove it"));
        }
    };
    only("dial", section.dial.is_some(), http, "protocol http");
    only("accept-post", section.accept_post, http, "protocol http");
    only("http2", section.http2.is_some(), http, "protocol http");
    only("http3", section.http3, http, "protocol http");
    only("trust", !section.trust.is_empty(), http, "protocol http");
    let named = matches!(section.protocol, Protocol::Tcp | Protocol::Udp | Protocol::Ndn);
    only("authority", section.authority.is_some(), named, "protocol tcp, udp or ndn");
    let ndn = section.protocol == Protocol::Ndn;
    only("unix", section.unix.is_some(), ndn, "protocol ndn");
    only("namespaces", !section.namespaces.is_empty(), ndn, "protocol ndn");
    only("content", !section.content.is_empty(), ndn, "protocol ndn");
    only("signing-key", section.signing_key.is_some(), ndn, "protocol ndn");
    only("key-name", section.key_name.is_some(), ndn, "protocol ndn");
    let rina = section.protocol == Protocol::Rina;
    only("dif", section.dif.is_some(), rina, "protocol rina");
    only("dif-key", section.dif_key.is_some(), rina, "protocol rina");
    let tun = section.protocol == Protocol::Tun;
    let transparent = section.protocol == Protocol::Transparent;
    only("bind", section.bind.is_some(), !tun && !transparent, "a protocol with a port");
    only("device", section.device.is_some(), tun, "protocol tun");
    only("address", !section.address.is_empty(), tun, "protocol tun");
    only("capture", !section.capture.is_empty(), tun || transparent, "protocol tun or transparent");
    only("ports", !section.ports.is_empty(), transparent, "protocol transparent");
    only("hold-syn", section.hold_syn.is_some(), transparent, "protocol transparent");
    only("http", section.http, transparent, "protocol transparent");
    only("udp", section.udp, transparent, "protocol transparent");
    only("carry-names", section.carry_names != CarryNames::Packets, tun, "protocol tun");
    let dns = section.protocol == Protocol::Dns;
    only("names", !section.names.is_empty(), dns, "protocol dns");
    only("addresses", !section.addresses.is_empty(), dns, "protocol dns");
    only("forward", !section.forward.is_empty(), dns, "protocol dns");
    only("ipv6", section.ipv6.is_some(), dns, "protocol dns");
    let ip = section.protocol == Protocol::Ip;
    only("network", section.network.is_some(), ip, "protocol ip");
    only("peers", !section.peers.is_empty(), ip, "protocol ip");
    only("set-headers", !section.set_headers.is_empty(), !dns, "a protocol with sessions");
    let stream = matches!(section.protocol, Protocol::Http | Protocol::Tcp | Protocol::Socks5);
    let over_tcp = stream || transparent || ndn;
    only("congestion", section.congestion.is_some(), over_tcp, "a protocol over TCP");
    only("connections", section.connections.is_some(), over_tcp, "a protocol over TCP");
    only("tls", section.tls.is_some(), stream, "protocol http, tcp or socks5");
    only("proxy-protocol", !section.proxy_protocol.is_empty(), stream, "protocol http, tcp or socks5");
    if section.dial.is_some() {
        check_dialling_keys(section, at, report);
    }
}

/// Reports keys that a dialling listener cannot have, because nobody connects to it.
fn check_dialling_keys(section: &section::Listener, at: &str, report: &mut Report) {
    let mut no = |key: &str, written: bool, why: &str| {
        if written {
            report.problem(format!("{at}.{key}"), format!("a listener with dial {why}; remove {key}"));
        }
    };
    no("bind", section.bind.is_some(), "binds no address");
    no("tls", section.tls.is_some(), "uses the TLS of its upstream");
    no("http2", section.http2.is_some(), "uses the HTTP version of its upstream");
    no("http3", section.http3, "uses the HTTP version of its upstream");
    no("trust", !section.trust.is_empty(), "authenticates its peer by certificate");
    no("proxy-protocol", !section.proxy_protocol.is_empty(), "accepts no connections");
}

fn protocol(
    section: &section::Listener,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<ListenerProtocol> {
    match section.protocol {
        Protocol::Http => return Some(ListenerProtocol::Http),
        Protocol::Tun => return tun(section, at, report).map(ListenerProtocol::Tun),
        Protocol::Socks5 => return Some(ListenerProtocol::Socks5),
        Protocol::Dns => return dns::build(section, at, report).map(ListenerProtocol::Dns),
        Protocol::Ip => return ip_listener::build(section, at, report).map(ListenerProtocol::Ip),
        Protocol::Transparent => return Some(ListenerProtocol::Transparent(transparent(section, at, report))),
        Protocol::Rina => {
            let membership = rina::membership(section.dif.as_ref(), section.dif_key.as_ref(), at, context, report);
            return membership.map(ListenerProtocol::Rina);
        }
        Protocol::Tcp | Protocol::Udp | Protocol::Ndn => {}
    }
    let at_listener = at;
    let at = format!("{at}.authority");
    let text = section.authority.as_deref().or((section.protocol == Protocol::Ndn).then_some(NDN_AUTHORITY));
    let Some(text) = text else {
        report.problem(at, "missing target of the connections or flows; add authority: NAME:PORT, such as DB:3306");
        return None;
    };
    let authority = report.ok_or_report(|| at, tunnel_authority(text))?;
    Some(match section.protocol {
        Protocol::Udp => ListenerProtocol::Udp { authority },
        Protocol::Ndn => ListenerProtocol::Ndn(Ndn {
            authority,
            namespaces: namespaces(section, at_listener, report),
            content: content(section, at_listener, report),
            signing_key: signing_key(section, at_listener, context, report),
        }),
        _ => ListenerProtocol::Tcp { authority },
    })
}

/// The device of a `tun` listener, with its addresses and captured prefixes.
fn tun(section: &section::Listener, at: &str, report: &mut Report) -> Option<Tun> {
    if section.device.is_none() {
        report.problem(format!("{at}.device"), "missing device name; add device: NAME, such as hermes0");
    }
    let addresses: Vec<IpAddr> = section.address.iter().map(|address| address.0).collect();
    if addresses.is_empty() {
        let message = "missing source address of the packets; add address: [ADDRESS], such as 10.20.0.2";
        report.problem(format!("{at}.address"), message);
    }
    let mut captures: Vec<Capture> = Vec::new();
    for (index, capture) in section.capture.iter().enumerate() {
        let network = capture.network.0;
        let path = format!("{at}.capture[{index}]");
        packets::routed(network, &path, report);
        if captures.iter().any(|other| other.network == network) {
            report.problem(&path, format!("duplicate capture {network}; keep one"));
        }
        if !addresses.iter().any(|address| address.is_ipv4() == network.addr().is_ipv4()) {
            let message = format!("the device has no address of the same IP version as {network}; add one to address");
            report.problem(&path, message);
        }
        let set_headers = header::fixed(&format!("{path}.set-headers"), &capture.set_headers, report);
        captures.push(Capture { network, set_headers });
    }
    let device = section.device.as_ref()?.0.clone();
    Some(Tun { device, addresses, captures, carry_names: section.carry_names })
}

/// The prefixes of NDN names that an `ndn` listener serves.
fn namespaces(section: &section::Listener, at: &str, report: &mut Report) -> Vec<(Arc<str>, Arc<str>)> {
    if section.namespaces.is_empty() && section.content.is_empty() {
        let message = "missing namespaces; add namespaces: {NAME: /PREFIX}, such as {DEV: /org/dev}";
        report.problem(format!("{at}.namespaces"), message);
    }
    let mut all: Vec<(Arc<str>, Arc<str>)> = Vec::new();
    for (name, prefixes) in &section.namespaces {
        let path = format!("{at}.namespaces.{name}");
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',') {
            report.problem(&path, "invalid name of a namespace; use visible ASCII characters without commas");
        }
        for prefix in prefixes.iter() {
            if let Some((other, _)) = all.iter().find(|(_, known)| *known == prefix.0) {
                report.problem(&path, format!("{prefix} already belongs to namespace {other}; keep one"));
            }
            all.push((Arc::from(name.as_str()), prefix.0.clone()));
        }
    }
    all
}

/// The prefixes of NDN names whose content an `ndn` listener requests from HTTP hosts.
fn content(section: &section::Listener, at: &str, report: &mut Report) -> Vec<(Arc<str>, Authority)> {
    let mut all = Vec::new();
    for (prefix, host) in &section.content {
        let path = format!("{at}.content.{prefix}");
        if section.namespaces.values().any(|prefixes| prefixes.iter().any(|known| known == prefix)) {
            report.problem(&path, format!("{prefix} already belongs to a namespace; keep one"));
        }
        let authority = Authority::parse(host, Some(80))
            .map_err(|error| format!("invalid host {host:?}: {error}; use NAME or NAME:PORT, such as www.example"));
        all.extend(report.ok_or_report(|| path, authority).map(|authority| (prefix.0.clone(), authority)));
    }
    all
}

/// The key that signs the content of an `ndn` listener.
fn signing_key(
    section: &section::Listener,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<(Arc<str>, PathBuf)> {
    for (key, written) in [("signing-key", section.signing_key.is_some()), ("key-name", section.key_name.is_some())] {
        if written && section.content.is_empty() {
            report.problem(format!("{at}.{key}"), format!("{key} requires content; remove it"));
        }
    }
    let file = context.optional_file(&format!("{at}.signing-key"), section.signing_key.as_ref(), report);
    match (&section.key_name, file) {
        (Some(name), Some(file)) => return Some((name.0.clone(), file)),
        (None, Some(_)) => {
            let message = "missing name of the key; add key-name: NAME, such as /org/KEY/1";
            report.problem(format!("{at}.key-name"), message);
        }
        (Some(_), None) if section.signing_key.is_none() => {
            report.problem(format!("{at}.key-name"), "key-name requires signing-key; add it, or remove key-name");
        }
        _ => {}
    }
    None
}

/// The connections that a `transparent` listener intercepts.
fn transparent(section: &section::Listener, at: &str, report: &mut Report) -> Transparent {
    if section.capture.is_empty() {
        let message = "missing destinations to intercept; add capture: [PREFIX], such as 0.0.0.0/0";
        report.problem(format!("{at}.capture"), message);
    }
    let mut captures: Vec<IpNet> = Vec::new();
    for (index, capture) in section.capture.iter().enumerate() {
        let path = format!("{at}.capture[{index}]");
        if !capture.set_headers.is_empty() {
            let message = "set-headers requires protocol tun; set the headers of the listener instead";
            report.problem(format!("{path}.set-headers"), message);
        }
        let network = capture.network.0.trunc();
        if captures.contains(&network) {
            report.problem(&path, format!("duplicate capture {network}; keep one"));
        }
        captures.push(network);
    }
    let ports: Vec<u16> = section.ports.iter().copied().collect();
    if ports.contains(&0) {
        report.problem(format!("{at}.ports"), "invalid port 0; use 1 to 65535");
    }
    let rules = captures.len() * ports.len().max(1);
    if rules > MAX_INTERCEPTION_RULES {
        let message =
            format!("{rules} pairs of prefix and port; the maximum is {MAX_INTERCEPTION_RULES}; merge prefixes");
        report.problem(format!("{at}.capture"), message);
    }
    if section.http && section.hold_syn == Some(true) {
        let message = "a SYN waits for a far connection, but each request of HTTP has its own; remove hold-syn";
        report.problem(format!("{at}.hold-syn"), message);
    }
    Transparent {
        captures,
        ports,
        hold_syn: section.hold_syn.unwrap_or(!section.http),
        http: section.http,
        udp: section.udp,
    }
}

/// The target of a tunnel, which always has a port (RFC 9110, 9.3.6).
fn tunnel_authority(text: &str) -> Result<Authority, String> {
    let authority =
        Authority::parse(text, None).map_err(|error| format!("invalid authority {text:?}: {error}; use NAME:PORT"))?;
    if authority.host().contains('*') {
        return Err(format!("invalid authority {text:?}: a tunnel cannot have a wildcard target; use NAME:PORT"));
    }
    match authority.explicit_port() {
        Some(_) => Ok(authority),
        None => Err(format!("invalid authority {text:?}: missing port; use {text}:PORT")),
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
            "missing CA to verify clients; add identity at the top of the document, or tls.ca here",
        );
    }
    if client == ClientAuth::None && client_ca.is_some() {
        report
            .problem(format!("{at}.ca"), "no effect: clients need no certificate; remove ca, or add client: required");
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
        (Some(_), None) => report.problem(format!("{at}.key"), "missing key of the certificate; add key: FILE"),
        (None, Some(_)) => report.problem(format!("{at}.cert"), "missing certificate of the key; add cert: FILE"),
        (None, None) if !context.has_identity => report.problem(
            at,
            "missing server certificate; add identity: {cert, key, ca} at the top of the document, or cert and key here",
        ),
        (None, None) => {}
    }
    cert.zip(key)
}
