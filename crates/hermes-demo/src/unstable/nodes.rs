//! The overlay of the unstable case: a Hermes node with custody on each machine.
//!
//! In: a lab, the protocol of the hops, and whether nodes cache. Out: documents. `http://UNSTABLE/...` and CONNECT to
//! `UNSTABLE:443` go from the client's node to the server's, and from there to the web server.

use std::net::{Ipv4Addr, SocketAddr};

use super::Protocol;
use super::lab::{NAME, NODES, SECURE, WEB, ends};

/// The address at which the first node accepts requests, on the client's loopback. Envoy uses the same.
pub(super) const APPS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// The address of each node's admin endpoint.
pub(super) const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9900);
/// The port on which nodes accept each other.
const OVERLAY: u16 = 9443;
/// The custody deadline, longer than any wait of the demo.
const CUSTODY: &str = "custody: {deadline: 15m}";

/// A node's name, from 0 at the client's.
pub(super) fn name(node: usize) -> String {
    format!("n{}", node + 1)
}

/// The address at which the previous node reaches a node.
pub(super) fn door(node: usize) -> SocketAddr {
    (ends(node - 1)[1], OVERLAY).into()
}

/// A node's document.
pub(super) fn document(node: usize, protocol: Protocol, has_cache: bool) -> String {
    let name = name(node);
    let role = if (1..NODES - 1).contains(&node) { "standalone" } else { "dependent" };
    let listener = if node == 0 {
        format!("- {{name: apps, bind: \"{APPS}\", protocol: http}}\n")
    } else {
        let at = door(node);
        format!("- {{name: overlay, bind: \"{at}\", protocol: http, http3: true, tls: {{client: required}}}}\n")
    };
    let head = format!(
        "node: {name}\nrole: {role}\nadmin: {ADMIN}\nworkers: 1\ndrain: 250ms\naccess-log: {name}.access.json\n\
         state: {name}.state\nidentity: {{cert: ../{name}.pem, key: ../{name}.key, ca: ../overlay-ca.pem}}\n\
         listeners:\n{listener}"
    );
    if node + 1 == NODES {
        return head
            + &format!(
                "routes:\n- {{name: secure, match: {{kind: tcp, authority: \"{NAME}:443\"}}, \
                 terminate: {{tcp: \"127.0.0.1:{SECURE}\"}}}}\n\
                 - {{name: web, match: {{kind: http, authority: {NAME}}}, upstream: server}}\n\
                 upstreams:\n- {{name: server, protocol: h1, endpoints: [\"127.0.0.1:{WEB}\"]}}\n"
            );
    }
    let cache = if has_cache { ", cache: {}" } else { "" };
    let (next, at, protocol) = (self::name(node + 1), door(node + 1), protocol.name());
    head + &format!(
        "routes:\n- {{name: on, upstream: {next}, {CUSTODY}{cache}}}\n\
         upstreams:\n- {{name: {next}, protocol: {protocol}, endpoints: [\"{at}\"], tls: {{node: {next}}}}}\n"
    )
}
