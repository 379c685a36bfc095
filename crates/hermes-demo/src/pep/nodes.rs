//! The programs on the two routers: nodes of Hermes, and HAProxy on the first one.
//!
//! In: a lab and a directory. Out: running programs, ready to split connections. The first node splits by the server's
//! port, which selects the architecture behind it. Never: a node on client or server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::time::Instant;

use super::lab::{self, CLOSED, Lab};
use super::way::Way;
use crate::client::Client;
use crate::overlay::{READY, wait_ready};
use crate::program::{Program, last_words};

const OVERLAY: u16 = 9443;
const DIF: u16 = 4000;
const NDN: u16 = 6363;
/// The address of each node's admin endpoint.
const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9900);
/// Maximum time of HAProxy's start.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The beginning of a node's document.
fn head(name: &str) -> String {
    format!("node: {name}\nadmin: {ADMIN}\naccess-log: {name}.access.json\nlisteners:\n")
}

fn ingress_document() -> String {
    let [split, overlay, rina, ndn] = [Way::Split, Way::Overlay, Way::Rina, Way::Ndn].map(Way::port);
    let (next, dif, forwarder) = (lab::egress(OVERLAY), lab::egress(DIF), lab::egress(NDN));
    let pep = "- {name: pep, protocol: transparent, capture: [0.0.0.0/0], ports: ";
    let flow = format!("{{rina: \"{dif}\", dif: demo, dif-key: dif.key}}");
    let named = format!("{{ndn: \"udp://{forwarder}\", accept-digest: true}}");
    [
        head("ingress"),
        format!("{pep}[{split}, {overlay}, {rina}, {CLOSED}]}}\n"),
        format!("- {{name: named, protocol: transparent, capture: [0.0.0.0/0], ports: {ndn}, http: true}}\nroutes:\n"),
        format!("- {{name: overlay, match: {{kind: tcp, port: {overlay}}}, upstream: egress}}\n"),
        format!("- {{name: rina, match: {{kind: tcp, port: {rina}}}, terminate: {flow}}}\n"),
        format!("- {{name: ndn, match: {{kind: http}}, terminate: {named}}}\n"),
        "- {name: split, match: {listener: pep}, terminate: {tcp: original, source: client}}\n".to_owned(),
        format!("upstreams:\n- {{name: egress, protocol: h2, endpoints: [\"{next}\"], overlay: true}}\n"),
    ]
    .concat()
}

fn egress_document() -> String {
    let (next, dif, forwarder) = (lab::egress(OVERLAY), lab::egress(DIF), lab::egress(NDN));
    let origin = lab::server(Way::Ndn.port());
    let content = format!("{{/content: \"{origin}\", /whoami: \"{origin}\"}}");
    [
        head("egress"),
        format!("- {{name: overlay, bind: \"{next}\", protocol: http, trust: 10.73.1.0/24}}\n"),
        format!("- {{name: dif, bind: \"{dif}\", protocol: rina, dif: demo, dif-key: dif.key}}\n"),
        format!("- {{name: ndn, bind: \"{forwarder}\", protocol: ndn, content: {content}}}\nroutes:\n"),
        format!("- {{name: web, match: {{kind: http}}, terminate: {{http: \"{origin}\"}}}}\n"),
        "- {name: out, match: {kind: tcp}, terminate: {tcp: original, source: client}}\n".to_owned(),
    ]
    .concat()
}

fn haproxy_document() -> String {
    format!(
        "global\n  nbthread 2\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  \
         option splice-auto\nlisten pep\n  bind {}\n  server s {}\n",
        lab::ingress(Way::Haproxy.port()),
        lab::server(Way::Direct.port()),
    )
}

/// Whether HAProxy is installed.
pub(super) fn has_haproxy() -> bool {
    Command::new("haproxy").arg("-v").output().is_ok_and(|output| output.status.success())
}

/// Starts the programs and waits until they are ready.
///
/// # Errors
/// A program does not start; the error has its last words.
pub(super) async fn start(lab: &Lab, directory: &Path) -> anyhow::Result<Vec<Program>> {
    let own = std::env::current_exe().context("the path of this program")?.display().to_string();
    let mut key = [0; 32];
    rand::RngCore::fill_bytes(&mut rand::rng(), &mut key);
    std::fs::write(directory.join("dif.key"), key).context("the key of the DIF")?;
    let mut programs = Vec::new();
    for (name, place, document) in
        [("egress", lab.egress(), egress_document()), ("ingress", lab.ingress(), ingress_document())]
    {
        let file = directory.join(format!("{name}.yaml"));
        std::fs::write(&file, document).with_context(|| file.display().to_string())?;
        let file = file.display().to_string();
        let command = [&place.prefix()[..], &[&own, "proxy", "--config", &file]].concat();
        programs.push(Program::start(name, &directory.join(format!("{name}.log")), &command)?);
    }
    if has_haproxy() {
        let file = directory.join("haproxy.cfg");
        std::fs::write(&file, haproxy_document()).with_context(|| file.display().to_string())?;
        let file = file.display().to_string();
        let command = [&lab.ingress().prefix()[..], &["haproxy", "-db", "-f", &file]].concat();
        programs.push(Program::start("haproxy", &directory.join("haproxy.log"), &command)?);
    }
    await_ready(lab, &mut programs).await?;
    Ok(programs)
}

/// Waits until both nodes are ready, and HAProxy accepts connections.
async fn await_ready(lab: &Lab, programs: &mut [Program]) -> anyhow::Result<()> {
    for (program, place) in programs.iter_mut().zip([lab.egress(), lab.ingress()]) {
        wait_ready(program, READY, || Client::connect_from(place, ADMIN)).await?;
    }
    let until = Instant::now() + START_TIMEOUT;
    let [_, _, haproxy] = programs else { return Ok(()) };
    while lab.ingress().tcp()?.connect(lab::ingress(Way::Haproxy.port())).await.is_err() {
        ensure!(haproxy.ended().is_none(), "HAProxy has ended early{}", last_words(programs));
        ensure!(Instant::now() < until, "HAProxy does not listen{}", last_words(programs));
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}
