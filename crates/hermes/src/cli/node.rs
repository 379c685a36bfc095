//! `hermes node`: the overlay's nodes, as the controller knows them.
//!
//! In: the name of a node. Out: how it stands and what it is to run; or that nothing new comes to it, and when it has no
//! sessions any more.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use hermes_controller::document::{self, Key, Name, Program};
use hermes_model::document::scalar::Period;
use http::Method;
use serde_json::{Value, json};

use super::overlay::{WAIT, change, told};
use crate::kubernetes::{self, Placing};
use crate::operator::{Access, OperatorFile, block_on};
use crate::place::{Infrastructure as _, Machine, On, Placement};

/// How long a question to the controller waits for something new.
const NEWS: Duration = Duration::from_secs(5);

/// A token that is printed for a cluster may be used for so long: as `hermes token create` says it.
const TOKEN_LIFE: Duration = Duration::from_secs(24 * 3600);

/// A node that was started is looked at so often: its machine tells of nothing.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Nodes of the overlay, as the controller knows them.
#[derive(Debug, Parser)]
pub(super) struct Node {
    #[command(subcommand)]
    verb: NodeVerb,
}

#[derive(Debug, Subcommand)]
enum NodeVerb {
    /// Lists them: whether they have enrolled, are there, and run what they should.
    List {
        /// Prints the controller's answer.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Keeps new sessions away from a node, and waits until those that it has are over.
    ///
    /// Other nodes find other ways, and programs of its own device find nobody there any more. A service that has no other way
    /// goes on to come by.
    Drain(Drain),
    /// Prints the document that a node is to run, as it was compiled from the overlay's, and whether the node runs it.
    ExecConfig {
        /// Which one.
        node: Name,
        /// Prints the controller's answer.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Starts nodes somewhere, each with a token of its own, and waits until they are under control. Of Kubernetes it prints manifests.
    Place {
        #[command(flatten)]
        at: At,
        /// How nodes there reach the controller, where that is otherwise than from here.
        #[arg(long, value_name = "URL")]
        controller: Option<hermes_controller::client::ControllerAddr>,
        #[command(flatten)]
        placing: Placing,
    },
    /// Drains nodes that were placed, ends them, and deletes their directories. Their documents stay.
    Unplace {
        #[command(flatten)]
        at: At,
        /// Does not drain them first: their sessions have the document's `drain` to finish.
        #[arg(long)]
        now: bool,
        /// Ask this controller instead of the one that the environment (HERMES_CONTROLLER) or the operator's file names.
        #[arg(long, value_name = "URL")]
        controller: Option<hermes_controller::client::ControllerAddr>,
    },
    /// Believes a node's key no more: it is cut off within seconds, whatever it does. Its document stays; with a token and an empty
    /// --state it may enrol again.
    Revoke {
        /// Which one.
        node: Name,
        /// Prints the controller's answer.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
    /// Deletes a node's document: it serves nobody from then on, and comes back only with a document and a token.
    Remove {
        /// Which one.
        node: Name,
        /// Prints the controller's answer.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        access: Access,
    },
}

/// Which nodes, and where.
#[derive(Debug, Parser)]
struct At {
    /// Which ones.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<Name>,
    /// This machine, a network namespace of it, one that ssh reaches without a question, or a cluster of Kubernetes.
    #[arg(long, value_name = "process[:NETNS]|ssh:[USER@]HOST[:PORT]|kubernetes[:NAMESPACE]")]
    on: On,
    /// A directory there, in which each node has its own.
    #[arg(long, value_name = "DIR", default_value = "hermes-nodes")]
    dir: String,
    /// A configuration file of ssh, in the place of the user's.
    #[arg(long, value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// How long each may take.
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    timeout: Period,
    #[command(flatten)]
    file: OperatorFile,
}

impl At {
    fn directory(&self, node: &Name) -> String {
        format!("{}/{node}", self.dir)
    }
}

/// `hermes node drain`.
#[derive(Debug, Parser)]
struct Drain {
    /// Which one.
    node: Name,
    /// It takes sessions again.
    #[arg(long)]
    undo: bool,
    /// How long it may take until its sessions are over. It drains all the same after that.
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    timeout: Period,
    #[command(flatten)]
    access: Access,
}

impl Node {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.verb {
            NodeVerb::List { json, access } => list(&access, json),
            NodeVerb::Drain(Drain { node, undo: true, access, .. }) => {
                super::print(&told(&set_draining(&access, &node, false)?, false))?;
                Ok(ExitCode::SUCCESS)
            }
            NodeVerb::Drain(Drain { node, timeout, access, .. }) => {
                drain(&access, &node, timeout.0)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeVerb::ExecConfig { node, json, access } => exec_config(&access, &node, json),
            NodeVerb::Place { at, controller, placing } => {
                place(&at, controller.map(|place| place.to_string()), &placing)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeVerb::Unplace { at, now, controller } => {
                unplace(&at, &at.file.access(controller)?, now)?;
                Ok(ExitCode::SUCCESS)
            }
            NodeVerb::Revoke { node, json, access } => {
                let answer = block_on(access.get(Method::DELETE, &format!("/v1/nodes/{node}"), Vec::new()))?;
                let said = format!("node {node} is believed no more\nrevision {}\n", answer["revision"]);
                super::print(&if json { format!("{answer}\n") } else { said })?;
                Ok(ExitCode::SUCCESS)
            }
            NodeVerb::Remove { node, json, access } => {
                let path = format!("/v1/documents/{}", Key::node(&node));
                change(&access, Method::DELETE, &path, Vec::new(), false, json)
            }
        }
    }
}

/// Whether the controller says so of a node.
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

/// A row of the table of nodes.
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

/// A duration in its largest unit: `3d`, `5h`.
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
    let unwell = node["unwell"].as_str().filter(|reason| !reason.is_empty());
    match (is(node, "enrolled"), is(node, "connected"), refused, is(node, "current")) {
        (false, ..) => {
            let why = if is(node, "revoked") { "revoked" } else { "never enrolled" };
            format!("{why}: `hermes token create --node {}`", node["name"].as_str().unwrap_or("NAME"))
        }
        (_, false, ..) => "unreachable".to_owned(),
        (_, _, Some(reason), _) => format!("refuses its document: {reason}"),
        (_, _, None, true) if is(node, "draining") => "draining".to_owned(),
        (_, _, None, true) => {
            unwell.map_or_else(|| "running".to_owned(), |why| format!("running, and not well: {why}"))
        }
        (_, _, None, false) => "changing".to_owned(),
    }
}

fn exec_config(access: &Access, node: &Name, json: bool) -> anyhow::Result<ExitCode> {
    let answer = look(access, node, "")?;
    if json {
        super::print(&format!("{answer}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    // It is JSON, which is YAML too: `hermes check` and `hermes explain` take it.
    let document = serde_json::to_string_pretty(&answer["document"])?;
    super::print(&format!("# revision {}: {}\n{document}\n", answer["revision"], state(&answer)))?;
    Ok(ExitCode::SUCCESS)
}

fn place(at: &At, controller: Option<String>, placing: &Placing) -> anyhow::Result<()> {
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
    if is(&look(access, node, "")?, "draining") {
        super::print(&told(&set_draining(access, node, false)?, false))?;
    }
    let token = token(access, node, at.timeout.0.as_secs().max(60))?;
    let directory = at.directory(node);
    if !machine.put(&Placement { directory: directory.clone(), controller, token })? {
        return super::print(&format!("node {node} runs there already\n"));
    }
    let started = Instant::now();
    loop {
        let answer = look(access, node, "")?;
        if is(&answer, "connected") && is(&answer, "current") {
            return super::print(&format!("node {node} is there: {}\n", state(&answer)));
        }
        anyhow::ensure!(machine.look(&directory)?, "node {node} has ended; {directory}/log there says why");
        anyhow::ensure!(
            started.elapsed() < at.timeout.0,
            "node {node} runs, and is {} after {:?}; {directory}/log there says why",
            state(&answer),
            at.timeout.0
        );
        block_on(async {
            tokio::time::sleep(LOOK_AGAIN).await;
            Ok(())
        })?;
    }
}

/// Leave for a node to enrol, for so many seconds.
fn token(access: &Access, node: &Name, life: u64) -> anyhow::Result<String> {
    let asked = json!({ "node": node, "life": life }).to_string();
    let made = block_on(access.get(Method::POST, "/v1/tokens", asked.into_bytes()))?;
    Ok(made["token"].as_str().unwrap_or_default().to_owned())
}

/// What manifests say of a node: what it is to run, and how others dial it.
fn for_kubernetes(access: &Access, node: &Name, with_token: bool) -> anyhow::Result<kubernetes::Node> {
    let mut answer = look(access, node, "")?;
    let document = serde_json::from_value(answer["document"].take())?;
    let path = format!("/v1/documents/{}", Key::node(node));
    let mut found = block_on(access.get(Method::GET, &path, Vec::new()))?;
    let mut found = found["document"].take();
    for key in ["kind", "name"] {
        let _ = found.as_object_mut().and_then(|found| found.remove(key));
    }
    let found: document::Node = serde_json::from_value(found)?;
    anyhow::ensure!(found.runs == Program::Hermes, "node {node} runs envoy, of which this makes no manifests");
    let token = with_token.then(|| token(access, node, TOKEN_LIFE.as_secs())).transpose()?;
    Ok(kubernetes::Node { name: node.clone(), document, address: found.address, token })
}

fn unplace(at: &At, access: &Access, now: bool) -> anyhow::Result<()> {
    for node in &at.nodes {
        match &at.on {
            On::Machine(machine) => {
                let (machine, directory) = (machine.clone().with_ssh_config(at.ssh_config.clone()), at.directory(node));
                if !now && machine.look(&directory)? {
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
        super::print(&format!("node {node} runs there no more; `hermes node remove {node}` deletes its document\n"))?;
    }
    Ok(())
}

/// How a node stands.
fn look(access: &Access, node: &Name, query: &str) -> anyhow::Result<Value> {
    block_on(access.get(Method::GET, &format!("/v1/nodes/{node}{query}"), Vec::new()))
}

/// Says in a node's document whether it drains. Nothing of it is lost that somebody else changes at the same time.
fn set_draining(access: &Access, node: &Name, draining: bool) -> anyhow::Result<Value> {
    let key = Key::node(node);
    let mut found = block_on(access.get(Method::GET, &format!("/v1/documents/{key}"), Vec::new()))?;
    found["document"]["draining"] = draining.into();
    let wait = WAIT.parse::<Period>().map_err(anyhow::Error::msg)?.0.as_millis();
    let path = format!("/v1/apply?since={}&wait={wait}", found["revision"]);
    block_on(access.get(Method::POST, &path, found["document"].to_string().into_bytes()))
}

/// Keeps new sessions away from a node, and waits until it has none.
///
/// # Errors
/// It still has some after this time, or is away.
fn drain(access: &Access, node: &Name, timeout: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    super::print(&told(&set_draining(access, node, true)?, false))?;
    let (mut said, mut has_warned) = (None, false);
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        let wait = left.min(NEWS).as_millis();
        let unless = said.map(|sessions: u64| format!("&sessions={sessions}")).unwrap_or_default();
        let answer = look(access, node, &format!("?wait={wait}{unless}"))?;
        let sessions = answer["sessions"].as_u64().unwrap_or_default();
        if !is(&answer, "connected") {
            anyhow::bail!(
                "node {node} is unreachable, so that its sessions are unknown; connected nodes send it nothing new"
            );
        }
        let refused = answer["refused"].as_str().filter(|reason| !reason.is_empty());
        if let Some(reason) = refused {
            anyhow::bail!("node {node} refuses its document, and goes on with the one before: {reason}");
        }
        let needed = answer["needed-by"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let needed = needed.collect::<Vec<_>>().join(", ");
        if !has_warned && !needed.is_empty() {
            // Also for an idle node: stopping it ends these services.
            has_warned = true;
            super::print(&format!(
                "warning: node {node} is the only path to {needed}: new sessions still come to it, and fail once it stops; add a \
                 replica or a link first\n"
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
                "node {node} has {} after {timeout:?}{why}. It goes on to drain; --undo takes that back",
                counted(sessions)
            );
        }
    }
}

fn counted(sessions: u64) -> String {
    super::counted(usize::try_from(sessions).unwrap_or(usize::MAX), "session")
}
