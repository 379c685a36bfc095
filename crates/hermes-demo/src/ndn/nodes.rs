//! The overlay of the case: a node on the device, two standalone proxies, and a node for each replica.
//!
//! In: a lab, a directory and the version of HTTP. Out: running nodes. The first proxy reads the header of the service
//! alone, the second one user and namespace, as in the paper. All nodes authenticate each other by certificates.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Context;

use super::lab::{self, Lab, REPLICAS};
use super::way::Way;
use crate::ca::{Authority, Proof};
use crate::client::Client;
use crate::namespace::Namespace;
use crate::overlay::{READY, wait_ready};
use crate::program::Program;

const OVERLAY_NAME: &str = "ndn";
/// The users, each with a listener of the device.
pub(super) const USERS: [&str; 2] = ["alice", "bob"];
/// The namespaces: the names in headers, and the prefixes of NDN.
pub(super) const NAMESPACES: [(&str, &str); 2] = [("DEV", "/dev"), ("TEST", "/test")];
/// The admin port of the first node on a machine; the others follow.
const ADMIN: u16 = 9900;

/// The replica for a user and a namespace.
pub(super) fn replica_of(user: usize, namespace: usize) -> usize {
    user * NAMESPACES.len() + namespace
}

fn admin(number: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), ADMIN + number as u16)
}

fn head(name: &str, role: &str, admin: SocketAddr) -> String {
    format!(
        "node: {name}\nrole: {role}\nadmin: {admin}\nworkers: 1\naccess-log: {name}.access.json\n\
         identity: {{cert: {name}.pem, key: {name}.key, ca: overlay-ca.pem}}\nlisteners:\n"
    )
}

fn overlay_listener(at: SocketAddr) -> String {
    format!("- {{name: overlay, bind: \"{at}\", protocol: http, http3: true, tls: {{client: required}}}}\nroutes:\n")
}

fn upstream(name: &str, way: Way, at: SocketAddr) -> String {
    let protocol = way.protocol();
    format!("- {{name: {name}, protocol: {protocol}, endpoints: [\"{at}\"], overlay: true, tls: {{node: {name}}}}}\n")
}

fn device_document(way: Way) -> String {
    let namespaces: Vec<String> = NAMESPACES.iter().map(|(name, prefix)| format!("{name}: {prefix}")).collect();
    let namespaces = namespaces.join(", ");
    let mut document = head("device", "dependent", admin(0));
    for (number, user) in USERS.iter().enumerate() {
        let at = lab::device(number);
        document += &format!("- {{name: {user}, bind: \"{at}\", protocol: ndn, namespaces: {{{namespaces}}}, ");
        document += &format!("set-headers: {{hermes-user: {user}}}}}\n");
    }
    document += "routes:\n- {name: packets, match: {headers: {hermes-service: NDN}}, upstream: proxy1}\nupstreams:\n";
    document + &upstream("proxy1", way, lab::proxy(0))
}

fn first_proxy_document(way: Way) -> String {
    let route = "- {name: service, match: {headers: {hermes-service: NDN}}, upstream: proxy2}\nupstreams:\n";
    let head = head("proxy1", "standalone", admin(0));
    [head, overlay_listener(lab::proxy(0)), route.to_owned(), upstream("proxy2", way, lab::proxy(1))].concat()
}

fn second_proxy_document(way: Way) -> String {
    let mut document = head("proxy2", "standalone", admin(0)) + &overlay_listener(lab::proxy(1));
    let mut upstreams = "upstreams:\n".to_owned();
    for (user, user_name) in USERS.iter().enumerate() {
        for (namespace, (namespace_name, _)) in NAMESPACES.iter().enumerate() {
            let replica = replica_of(user, namespace);
            let name = format!("replica{replica}");
            let matching = format!("{{user: {user_name}, headers: {{hermes-namespace: {namespace_name}}}}}");
            document += &format!("- {{name: {name}, match: {matching}, upstream: {name}}}\n");
            upstreams += &upstream(&name, way, lab::replica(replica));
        }
    }
    document + &upstreams
}

fn replica_document(number: usize, forwarder: SocketAddr) -> String {
    let route = format!("- {{name: packets, match: {{kind: tcp}}, terminate: {{ndn: \"tcp://{forwarder}\"}}}}\n");
    let head = head(&format!("replica{number}"), "dependent", admin(number));
    [head, overlay_listener(lab::replica(number)), route].concat()
}

/// Issues the certificates of all nodes.
///
/// # Errors
/// A file cannot be written.
pub(super) fn issue_certificates(directory: &Path) -> anyhow::Result<()> {
    let ca = Authority::new(directory, "overlay-ca")?;
    let issue = |name: &str, users: &[&str], standalone| {
        ca.issue(name, &Proof::Node { overlay: OVERLAY_NAME, users, standalone }).map(drop)
    };
    issue("device", &USERS, false)?;
    issue("proxy1", &[], true)?;
    issue("proxy2", &[], true)?;
    (0..REPLICAS).try_for_each(|replica| issue(&format!("replica{replica}"), &[], false))
}

/// Starts the overlay and waits until it is ready. Replica 0 dials `first_target`, each other one its
/// producer.
///
/// # Errors
/// A node does not start; the error has its last words.
pub(super) async fn start(
    lab: &Lab,
    directory: &Path,
    way: Way,
    first_target: SocketAddr,
) -> anyhow::Result<Vec<Program>> {
    let forwarder = |replica| if replica == 0 { first_target } else { lab::producer(replica) };
    let mut all: Vec<(String, &Namespace, SocketAddr, String)> = vec![
        ("device".to_owned(), lab.device(), admin(0), device_document(way)),
        ("proxy1".to_owned(), lab.proxy(0), admin(0), first_proxy_document(way)),
        ("proxy2".to_owned(), lab.proxy(1), admin(0), second_proxy_document(way)),
    ];
    all.extend((0..REPLICAS).map(|replica| {
        let document = replica_document(replica, forwarder(replica));
        (format!("replica{replica}"), lab.server(), admin(replica), document)
    }));
    let own = std::env::current_exe().context("the path of this program")?.display().to_string();
    let mut programs = Vec::new();
    for (name, place, _, document) in &all {
        let file = directory.join(format!("{name}.yaml"));
        std::fs::write(&file, document).with_context(|| file.display().to_string())?;
        let file = file.display().to_string();
        let command = [&place.prefix()[..], &[&own, "proxy", "--config", &file]].concat();
        programs.push(Program::start(name, &directory.join(format!("{name}.log")), &command)?);
    }
    for (program, (_, place, admin, _)) in programs.iter_mut().zip(&all) {
        wait_ready(program, READY, || Client::connect_from(place, *admin)).await?;
    }
    Ok(programs)
}
