//! The nodes of the case: a root, and two relays below it. Each serves the chat page.
//!
//! In: a directory. Out: running nodes, their addresses, and the number of publications that crossed the links between
//! them. A page at any node uses the same channels, although it knows them by the address of its node.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context;

use crate::client::Client;
use crate::overlay::{READY, wait_ready};
use crate::ports::{self, loopback};
use crate::program::Program;
use crate::terminal::Paint;

/// The authority of the channels.
pub(super) const CHANNELS: &str = "chat.example";
const PAGE: &str = include_str!("chat.html");
/// The nodes, with the root first.
pub(super) const NODES: [&str; 3] = ["root", "hall", "yard"];

/// The running nodes.
pub(super) struct Tree {
    pub(super) programs: Vec<Program>,
    web: [SocketAddr; 3],
    admin: [SocketAddr; 3],
}

impl Tree {
    /// The address of the relay at hall.
    pub(super) fn hall(&self) -> SocketAddr {
        self.web[1]
    }

    /// The address of the relay at yard.
    pub(super) fn yard(&self) -> SocketAddr {
        self.web[2]
    }

    /// The URL of a channel, and the node as a proxy for it.
    pub(super) fn channel(name: &str) -> String {
        format!("http://{CHANNELS}/rooms/{name}")
    }

    /// A counter or gauge of a node.
    pub(super) async fn metric(&self, node: usize, name: &str) -> anyhow::Result<f64> {
        let mut client = Client::connect(self.admin[node]).await?;
        let text = client.get("/metrics").await?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or("0");
        Ok(line.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or_default())
    }

    /// Commands and pages for those who keep the nodes running.
    pub(super) fn to_try(&self, paint: Paint) -> String {
        let lobby = Self::channel("lobby");
        let commands = [
            format!("open http://{}/ and http://{}/ in a browser", self.hall(), self.yard()),
            format!("hermes subscribe {lobby} --proxy http://{}", self.yard()),
            format!("hermes publish {lobby} --proxy http://{} --data hello", self.hall()),
            format!("curl -N -H 'hermes-subscribe: true' -H 'host: {CHANNELS}' http://{}/rooms/lobby", self.yard()),
        ];
        let list: String = commands.iter().map(|command| format!("    {command}\n")).collect();
        format!("\n{}\n{list}\n  Ctrl-C ends the nodes.\n", paint.bold("  To try"))
    }
}

fn document(number: usize, web: &[SocketAddr; 3], admin: SocketAddr) -> anyhow::Result<String> {
    let name = NODES[number];
    let page = serde_json::to_string(&PAGE.replace("NODE", name))?;
    let mut document = format!(
        "node: {name}\nadmin: \"{admin}\"\naccess-log: off\nworkers: 1\nlisteners:\n\
         - {{name: web, bind: \"{}\", protocol: http, trust: 127.0.0.0/8}}\nroutes:\n\
         - name: page\n  match: {{path: /}}\n  respond: {{headers: {{content-type: text/html}}, body: {page}}}\n",
        web[number]
    );
    if number == 0 {
        document += "- {name: rooms, match: {path: \"/rooms/*\"}, relay: {history: {}}}\n";
    } else {
        document += &format!(
            "- name: rooms\n  match: {{path: \"/rooms/*\"}}\n  rewrite: {{authority: {CHANNELS}}}\n  \
             relay: {{upstream: root, stall: 5s}}\nupstreams:\n\
             - {{name: root, protocol: h2, overlay: true, endpoints: [\"{}\"]}}\n",
            web[0]
        );
    }
    Ok(document)
}

/// Starts the nodes, and waits until they are ready.
///
/// # Errors
/// A node does not start; the error has its last words.
pub(super) async fn start(directory: &Path) -> anyhow::Result<Tree> {
    let ports: [u16; 6] = ports::free()?;
    let [web, admin] = [0, 3].map(|first| [0, 1, 2].map(|number| loopback(ports[first + number])));
    let own = std::env::current_exe().context("the path of this program")?.display().to_string();
    let mut programs = Vec::new();
    for (number, name) in NODES.into_iter().enumerate() {
        let file = directory.join(format!("{name}.yaml"));
        std::fs::write(&file, document(number, &web, admin[number])?).with_context(|| file.display().to_string())?;
        let command = [&own, "proxy", "--config", &file.display().to_string()];
        programs.push(Program::start(name, &directory.join(format!("{name}.log")), &command)?);
    }
    for (program, admin) in programs.iter_mut().zip(admin) {
        wait_ready(program, READY, || Client::connect(admin)).await?;
    }
    Ok(Tree { programs, web, admin })
}

/// The publications of the root, and those that each node below it got over its link.
///
/// # Errors
/// A node does not answer.
pub(super) async fn link_publications(tree: &Tree) -> anyhow::Result<[u64; 3]> {
    let mut counts = [0; 3];
    for (number, count) in counts.iter_mut().enumerate() {
        *count = tree.metric(number, "hermes_relay_publications_total").await? as u64;
    }
    Ok(counts)
}
