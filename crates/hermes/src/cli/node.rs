//! `hermes node`: the overlay's nodes, as the controller reports them.
//!
//! In: the name of a node. Out: its status and compiled document; or a drain, and the end of its sessions.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use hermes_controller::document::{self, Key, Name, Program};
use hermes_model::document::scalar::HumanDuration;
use http::Method;
use serde_json::{Value, json};

use super::overlay::{WAIT, change, render_outcome};
use crate::deploy::{Infrastructure as _, Machine, On, Placement};
use crate::kubernetes::{self, ManifestOptions};
use crate::operator::{Access, OperatorFile, block_on};

/// Timeout of a long poll for changes at the controller.
const NEWS: Duration = Duration::from_secs(5);

/// Lifetime of a token in printed manifests, equal to the default of `hermes token create`.
const TOKEN_LIFE: Duration = Duration::from_secs(24 * 3600);

/// Interval between checks of a started node, which its machine does not report.
const START_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Manage the nodes of the overlay
#[derive(Debug, Parser)]
pub(super) struct Node {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// List nodes with their enrolment, connection and revision
    List {
        /// Print the controller's response as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Drain a node: direct new sessions to other nodes, and wait until its sessions have ended.
    ///
    /// Other nodes use other paths, and applications on the node's own device are refused. A service without another
    /// path keeps using the node.
    Drain(Drain),
    /// Print the compiled document of a node, and whether the node runs it
    ExecConfig {
        /// Name of the node
        node: Name,
        /// Print the controller's response as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Deploy nodes with a token each, and wait until they have connected. For Kubernetes, print manifests
    Deploy {
        #[command(flatten)]
        at: At,
        /// Connect the nodes to this controller URL [default: the one this command uses]
        #[arg(long, value_name = "URL")]
        controller: Option<hermes_controller::client::ControllerAddr>,
        #[command(flatten)]
        placing: ManifestOptions,
    },
    /// Drain deployed nodes, stop them and delete their directories. Their documents stay
    Undeploy {
        #[command(flatten)]
        at: At,
        /// Stop without draining first. Sessions have the document's `drain` to finish
        #[arg(long)]
        now: bool,
        /// Connect to this controller [default: HERMES_CONTROLLER, else the one in the operator's file]
        #[arg(long, value_name = "URL")]
        controller: Option<hermes_controller::client::ControllerAddr>,
    },
    #[command(name = "place", hide = true)]
    FormerPlace(super::Former),
    #[command(name = "unplace", hide = true)]
    FormerUnplace(super::Former),
    /// Revoke a node's key: other nodes reject it within seconds. Its document stays; with a token and an empty --state
    /// it can enrol again
    Revoke {
        /// Name of the node
        node: Name,
        /// Print the controller's response as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Delete a node's document. The node stops serving, and returns only with a document and a token
    Remove {
        /// Name of the node
        node: Name,
        /// Print the controller's response as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
}

/// Nodes, and the machine on which they run.
#[derive(Debug, Parser)]
struct At {
    /// Names of the nodes
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<Name>,
    /// Run on this machine, in one of its network namespaces, on a host over ssh without a prompt, or in Kubernetes
    #[arg(long, value_name = "process[:NETNS]|ssh:[USER@]HOST[:PORT]|kubernetes[:NAMESPACE]")]
    on: On,
    /// Store each node's state below this directory on the target
    #[arg(long, value_name = "DIR", default_value = "hermes-nodes")]
    dir: String,
    /// Use this ssh configuration file [default: the user's]
    #[arg(long, value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// Fail after this time for each node
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    timeout: HumanDuration,
    #[command(flatten)]
    file: OperatorFile,
}

impl At {
    fn directory(&self, node: &Name) -> String {
        format!("{}/{node}", self.dir)
    }
}

/// Arguments of `hermes node drain`.
#[derive(Debug, Parser)]
struct Drain {
    /// Name of the node
    node: Name,
    /// Undo a drain: the node accepts sessions again
    #[arg(long)]
    undo: bool,
    /// Stop waiting after this time. The node stays drained
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    timeout: HumanDuration,
    #[command(flatten)]
    access: Access,
}

impl Node {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            NodeCommand::List { json, access } => list(&access, json),
            NodeCommand::Drain(Drain { node, undo: true, access, .. }) => {
                super::print(&render_outcome(&set_draining(&access, &node, false)?, false))?;
                Ok(ExitCode::SUCCESS)
            }
            NodeCommand::Drain(Drain { node, timeout, access, .. }) => {
                drain(&access, &node, timeout.0)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeCommand::ExecConfig { node, json, access } => exec_config(&access, &node, json),
            NodeCommand::Deploy { at, controller, placing } => {
                deploy(&at, controller.map(|place| place.to_string()), &placing)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeCommand::Undeploy { at, now, controller } => {
                undeploy(&at, &at.file.access(controller)?, now)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeCommand::FormerPlace(former) => former.reject("node place", "node deploy"),
            NodeCommand::FormerUnplace(former) => former.reject("node unplace", "node undeploy"),
            NodeCommand::Revoke { node, json, access } => {
                let answer = block_on(access.get(Method::DELETE, &format!("/v1/nodes/{node}"), Vec::new()))?;
                let said = format!("node {node} was revoked\nrevision {}\n", answer["revision"]);
                super::print(&if json { format!("{answer}\n") } else { said })?;
                Ok(ExitCode::SUCCESS)
            }
            NodeCommand::Remove { node, json, access } => {
                let path = format!("/v1/documents/{}", Key::node(&node));
                change(&access, Method::DELETE, &path, Vec::new(), false, json)
            }
        }
    }
}

/// Returns a boolean of the controller's report on a node.
fn is(node: &Value, key: &str) -> bool {
    node[key].as_bool().unwrap_or_default()
}

fn list(access: &Access, json: bool) -> anyhow::Result<ExitCode> {
    let answer = block_on(access.get(Method::GET, "/v1/nodes", Vec::new()))?;
    if json {
        super::print(&format!("{answer}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    rows.extend(answer["nodes"].as_array().into_iter().flatten().map(row));
    super::print(&aligned(&rows))?;
    Ok(ExitCode::SUCCESS)
}

const COLUMNS: [&str; 9] =
    ["NODE", "ROLE", "VERSION", "ADDRESS", "REVISION", "SESSIONS", "CERTIFICATE", "LAST SEEN", "STATE"];

/// Formats a row of the node table.
fn row(node: &Value) -> [String; 9] {
    let text = |key: &str| node[key].as_str().filter(|text| !text.is_empty()).unwrap_or("-").to_owned();
    let is_connected = is(node, "connected");
    let sessions = if is_connected { node["sessions"].to_string() } else { "-".to_owned() };
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    let seen = match node["last-seen"].as_u64() {
        _ if is_connected => "now".to_owned(),
        Some(at) => format!("{} ago", rounded(now.saturating_sub(at))),
        None => "-".to_owned(),
    };
    let certificate = match node["certificate-until"].as_u64() {
        Some(until) if until <= now => "expired".to_owned(),
        Some(until) => rounded(until - now),
        None => "-".to_owned(),
    };
    // No node dials a device, so the column shows the address that the device connects from.
    let address = if node["address"].is_string() { text("address") } else { text("from") };
    let revision = node["revision"].to_string();
    [text("name"), text("role"), text("version"), address, revision, sessions, certificate, seen, state(node)]
}

/// Formats a duration in its largest unit: `3d`, `5h`.
fn rounded(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= 2 * unit).unwrap_or((1, "s"));
    format!("{}{}", seconds / unit.0, unit.1)
}

fn aligned(rows: &[[String; 9]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..8).map(width).collect();
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  ", width = *width));
        format!("{}{}\n", cells.collect::<String>(), row[8])
    };
    rows.iter().map(line).collect()
}

fn state(node: &Value) -> String {
    let refused = node["refused"].as_str().filter(|reason| !reason.is_empty());
    let unhealthy = node["unhealthy"].as_str().filter(|reason| !reason.is_empty());
    match (is(node, "enrolled"), is(node, "connected"), refused, is(node, "current")) {
        (false, ..) => {
            let why = if is(node, "revoked") { "revoked" } else { "never enrolled" };
            format!("{why}: `hermes token create --node {}`", node["name"].as_str().unwrap_or("NAME"))
        }
        (_, false, ..) => "unreachable".to_owned(),
        (_, _, Some(reason), _) => format!("refuses its document: {reason}"),
        (_, _, None, true) if is(node, "draining") => "draining".to_owned(),
        (_, _, None, true) => {
            unhealthy.map_or_else(|| "running".to_owned(), |why| format!("running, unhealthy: {why}"))
        }
        (_, _, None, false) => "changing".to_owned(),
    }
}

fn exec_config(access: &Access, node: &Name, json: bool) -> anyhow::Result<ExitCode> {
    let answer = status(access, node, "")?;
    if json {
        super::print(&format!("{answer}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    // JSON is valid YAML, so `hermes check` and `hermes explain` accept it.
    let document = serde_json::to_string_pretty(&answer["document"])?;
    super::print(&format!("# revision {}: {}\n{document}\n", answer["revision"], state(&answer)))?;
    Ok(ExitCode::SUCCESS)
}

fn deploy(at: &At, controller: Option<String>, placing: &ManifestOptions) -> anyhow::Result<()> {
    let access = at.file.access(None)?;
    let controller = controller.map_or_else(|| access.controller(), Ok)?;
    match &at.on {
        On::Machine(machine) => {
            let machine = machine.clone().with_ssh_config(at.ssh_config.clone());
            at.nodes.iter().try_for_each(|node| start(at, &access, node, &machine, &controller))
        }
        On::Kubernetes { namespace } => {
            let find = |node: &Name| for_kubernetes(&access, node, placing.with_token);
            let nodes = at.nodes.iter().map(find).collect::<anyhow::Result<Vec<_>>>()?;
            super::print(&kubernetes::nodes(&nodes, &controller, namespace.as_deref(), placing)?)
        }
    }
}

/// Starts a node on a machine.
fn start(at: &At, access: &Access, node: &Name, machine: &Machine, controller: &str) -> anyhow::Result<()> {
    let controller = controller.to_owned();
    if is(&status(access, node, "")?, "draining") {
        super::print(&render_outcome(&set_draining(access, node, false)?, false))?;
    }
    let token = token(access, node, at.timeout.0.as_secs().max(60))?;
    let directory = at.directory(node);
    if !machine.put(&Placement { directory: directory.clone(), controller, token })? {
        return super::print(&format!("node {node} already runs there\n"));
    }
    let started = Instant::now();
    loop {
        let answer = status(access, node, "")?;
        if is(&answer, "connected") && is(&answer, "current") {
            return super::print(&format!("node {node} connected: {}\n", state(&answer)));
        }
        anyhow::ensure!(machine.is_running(&directory)?, "node {node} has exited; see {directory}/log there");
        anyhow::ensure!(
            started.elapsed() < at.timeout.0,
            "node {node} runs, but is {} after {:?}; see {directory}/log there",
            state(&answer),
            at.timeout.0
        );
        block_on(async {
            tokio::time::sleep(START_POLL_INTERVAL).await;
            Ok(())
        })?;
    }
}

/// Creates an enrolment token for a node, with a lifetime in seconds.
fn token(access: &Access, node: &Name, life: u64) -> anyhow::Result<String> {
    let asked = json!({ "node": node, "life": life }).to_string();
    let made = block_on(access.get(Method::POST, "/v1/tokens", asked.into_bytes()))?;
    Ok(made["token"].as_str().unwrap_or_default().to_owned())
}

/// Returns the manifest's view of a node: its document, and how others dial it.
fn for_kubernetes(access: &Access, node: &Name, with_token: bool) -> anyhow::Result<kubernetes::Node> {
    let mut answer = status(access, node, "")?;
    let document = serde_json::from_value(answer["document"].take())?;
    let path = format!("/v1/documents/{}", Key::node(node));
    let mut found = block_on(access.get(Method::GET, &path, Vec::new()))?;
    let mut found = found["document"].take();
    for key in ["kind", "name"] {
        let _ = found.as_object_mut().and_then(|found| found.remove(key));
    }
    let found: document::Node = serde_json::from_value(found)?;
    anyhow::ensure!(found.runs == Program::Hermes, "node {node} runs envoy; manifests are made for Hermes nodes only");
    let token = with_token.then(|| token(access, node, TOKEN_LIFE.as_secs())).transpose()?;
    Ok(kubernetes::Node { name: node.clone(), document, address: found.address, token })
}

fn undeploy(at: &At, access: &Access, now: bool) -> anyhow::Result<()> {
    for node in &at.nodes {
        match &at.on {
            On::Machine(machine) => {
                let (machine, directory) = (machine.clone().with_ssh_config(at.ssh_config.clone()), at.directory(node));
                if !now && machine.is_running(&directory)? {
                    drain(access, node, at.timeout.0)?;
                }
                machine.take(&directory, at.timeout.0)?;
            }
            On::Kubernetes { namespace } => {
                if !now {
                    drain(access, node, at.timeout.0)?;
                }
                super::print(&kubernetes::deletion(node, namespace.as_deref()))?;
                continue;
            }
        }
        super::print(&format!("node {node} stopped there; `hermes node remove {node}` deletes its document\n"))?;
    }
    Ok(())
}

/// Returns the status of a node.
fn status(access: &Access, node: &Name, query: &str) -> anyhow::Result<Value> {
    block_on(access.get(Method::GET, &format!("/v1/nodes/{node}{query}"), Vec::new()))
}

/// Sets `draining` in a node's document. Concurrent changes of the document are preserved.
fn set_draining(access: &Access, node: &Name, draining: bool) -> anyhow::Result<Value> {
    let key = Key::node(node);
    let mut found = block_on(access.get(Method::GET, &format!("/v1/documents/{key}"), Vec::new()))?;
    found["document"]["draining"] = draining.into();
    let wait = WAIT.parse::<HumanDuration>().map_err(anyhow::Error::msg)?.0.as_millis();
    let path = format!("/v1/apply?since={}&wait={wait}", found["revision"]);
    block_on(access.get(Method::POST, &path, found["document"].to_string().into_bytes()))
}

/// Drains a node, and waits until its sessions have ended.
///
/// # Errors
/// The node still has sessions after the timeout, or is unreachable.
fn drain(access: &Access, node: &Name, timeout: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    super::print(&render_outcome(&set_draining(access, node, true)?, false))?;
    let (mut said, mut has_warned) = (None, false);
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        let wait = left.min(NEWS).as_millis();
        let unless = said.map(|sessions: u64| format!("&sessions={sessions}")).unwrap_or_default();
        let answer = status(access, node, &format!("?wait={wait}{unless}"))?;
        let sessions = answer["sessions"].as_u64().unwrap_or_default();
        if !is(&answer, "connected") {
            anyhow::bail!(
                "node {node} is unreachable, so that its sessions are unknown; connected nodes send it nothing new"
            );
        }
        let refused = answer["refused"].as_str().filter(|reason| !reason.is_empty());
        if let Some(reason) = refused {
            anyhow::bail!("node {node} rejects its document; still running the previous one: {reason}");
        }
        let needed = answer["needed-by"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let needed = needed.collect::<Vec<_>>().join(", ");
        if !has_warned && !needed.is_empty() {
            // An idle node gets the warning too: stopping it ends these services.
            has_warned = true;
            super::print(&format!(
                "warning: node {node} is the only path to {needed}: it still receives new sessions, which fail once it stops; add a replica or a link first\n"
            ))?;
        }
        if is(&answer, "current") && sessions == 0 {
            return super::print(&format!("node {node} has no sessions\n"));
        }
        if said.replace(sessions) != Some(sessions) {
            super::print(&format!("node {node} has {}\n", counted(sessions)))?;
        }
        if left.is_zero() {
            let why = if needed.is_empty() { String::new() } else { format!("; it is the only path to {needed}") };
            anyhow::bail!(
                "node {node} has {} after {timeout:?}{why}. It continues to drain; --undo ends the drain",
                counted(sessions)
            );
        }
    }
}

fn counted(sessions: u64) -> String {
    super::counted(usize::try_from(sessions).unwrap_or(usize::MAX), "session")
}
