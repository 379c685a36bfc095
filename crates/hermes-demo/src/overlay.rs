//! The overlay of the demo: a controller and three nodes on loopback, each a process of this binary.
//!
//! In: its own directory and the services. Out: `alice-laptop` (dependent: programs connect to it), `router`
//! (standalone, in the middle) and `server` (dependent: it knows the services), enrolled and ready, and the commands
//! that change them. All processes end with the value. Never: private access to the controller; the demo uses an
//! operator's commands.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use tempfile::TempDir;
use tokio::time::Instant;

use super::child_guard;
use super::client::Client;
use super::origins::Origins;
use super::ports::{self, loopback};
use super::program::{self, Program};

pub(crate) const OVERLAY: &str = "demo";
/// The nodes, in the order of the path.
pub(crate) const NODES: [&str; 3] = ["alice-laptop", "router", "server"];
/// The file with the overlay's documents, in its directory.
pub(crate) const DOCUMENTS: &str = "overlay.yaml";
/// The controller's directory, which commands use by default.
const CONTROLLER: &str = "hermes-controller";
/// The file in a controller's data directory that lets an operator in.
const OPERATOR_FILE: &str = "operator.json";
/// The admin path that reports a node's readiness.
pub(crate) const READY: &str = "/readyz";
/// Limit for the start of a process.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const SETTLE: Duration = Duration::from_millis(500);
/// The number of log lines of a process that an error contains.
const LAST_LINES: usize = 8;

/// A controller, three nodes, and what they need.
pub(crate) struct Overlay {
    programs: Vec<Program>,
    pub(crate) ports: Ports,
    directory: TempDir,
    services: Services,
}

/// The ports of the listeners.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    /// Programs speak HTTP here.
    pub(crate) apps: u16,
    /// The TCP listener for `DB:5432`.
    pub(crate) database: u16,
    /// The UDP listener for `CALL:5004`.
    pub(crate) call: u16,
    router: u16,
    server: u16,
    controller: u16,
    /// The nodes' admin endpoints.
    pub(crate) admin: [u16; 3],
}

/// The services' addresses, for the overlay's documents.
#[derive(Clone, Copy)]
struct Services {
    blue: SocketAddr,
    green: SocketAddr,
    bank: SocketAddr,
    database: SocketAddr,
    call: SocketAddr,
}

/// A command as typed in the demo's directory, and its output.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Typed {
    /// The command.
    pub(crate) command: String,
    /// The command's standard output.
    pub(crate) said: String,
}

impl Overlay {
    /// Starts a controller in `directory`, applies the overlay's documents, and starts nodes that enrol with a token
    /// each. Returns when all are ready.
    ///
    /// # Errors
    /// A process does not start; the error contains its last lines.
    pub(crate) async fn start(directory: TempDir, origins: &Origins) -> anyhow::Result<Self> {
        let services = Services {
            blue: origins.blue,
            green: origins.green,
            bank: origins.bank,
            database: origins.database,
            call: origins.call,
        };
        let mut this = Self { programs: Vec::new(), ports: free_ports()?, directory, services };
        if this.launch().await.is_err() {
            // Another process may have taken a port in the meantime: the launch is repeated once with other ports.
            this.programs.clear();
            this.ports = free_ports()?;
            this.launch().await?;
        }
        Ok(this)
    }

    async fn launch(&mut self) -> anyhow::Result<()> {
        for name in [&[CONTROLLER][..], &NODES].concat() {
            // Removes files of a launch that failed.
            let _ = std::fs::remove_dir_all(self.file(name));
        }
        self.write(self.services.blue, "")?;
        let listen = loopback(self.ports.controller).to_string();
        let data = self.text(CONTROLLER)?;
        self.run("controller", &["controller", "--listen", &listen, "--data", &data])?;
        self.wait_operator().await?;
        self.verb(&["apply", "-f", DOCUMENTS, "--wait", "0s"]).await?;
        let controller = format!("https://{listen}");
        for name in NODES {
            let token = self.verb(&["token", "create", "--node", name]).await?.said;
            let (state, file) = (self.text(name)?, self.text(&format!("{name}.token"))?);
            super::ca::write_private(Path::new(&file), &token)?;
            self.run(name, &["proxy", "--controller", &controller, "--state", &state, "--token-file", &file])?;
        }
        for (program, port) in self.programs[1..].iter_mut().zip(self.ports.admin) {
            wait_ready(program, READY, || Client::connect(loopback(port))).await?;
        }
        // The tokens are used: no node could enrol with them again.
        NODES.iter().try_for_each(|name| std::fs::remove_file(self.file(&format!("{name}.token")))).context("tokens")
    }

    fn run(&mut self, name: &str, args: &[&str]) -> anyhow::Result<()> {
        let log = self.file(&format!("{name}.log"));
        self.programs.push(Program::start(name, &log, &[&[&*own()?], args].concat())?);
        Ok(())
    }

    /// Waits for the operator's file; the controller listens once it has written the file.
    async fn wait_operator(&mut self) -> anyhow::Result<()> {
        let file = self.file(CONTROLLER).join(OPERATOR_FILE);
        let is_whole =
            || std::fs::read(&file).is_ok_and(|text| serde_json::from_slice::<serde_json::Value>(&text).is_ok());
        let until = Instant::now() + START_TIMEOUT;
        while !is_whole() {
            let controller = &mut self.programs[0];
            let ended = controller.ended().is_some() || Instant::now() >= until;
            let lines = || indent(&controller.last_lines(LAST_LINES));
            ensure!(!ended, "the controller did not start; its last lines:\n{}", lines());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Runs a command of this binary as an operator would in the demo's directory.
    ///
    /// # Errors
    /// The command failed; the error contains its output.
    pub(crate) async fn verb(&self, args: &[&str]) -> anyhow::Result<Typed> {
        let mut command = child_guard::leashed(&[&[&*own()?], args].concat())?;
        // Ctrl-C must not reach the command directly, as for nodes; and it must not use credentials of another overlay.
        command.current_dir(self.directory()).env_remove("HERMES_OPERATOR").process_group(0).stdin(Stdio::null());
        let output = tokio::process::Command::from(command).kill_on_drop(true).output().await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let typed = Typed { command: format!("hermes {}", args.join(" ")), said: text(&output.stdout) };
        if !output.status.success() {
            bail!("`{}` failed: {}{}", typed.command, typed.said, text(&output.stderr).trim_end());
        }
        Ok(typed)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    fn text(&self, name: &str) -> anyhow::Result<String> {
        self.file(name).into_os_string().into_string().ok().context("the path of the temporary directory is not text")
    }

    /// The document that a node runs, as compiled by its controller.
    pub(crate) fn document(&self, node: &str) -> PathBuf {
        self.file(node).join("document.json")
    }

    /// The directory of the overlay.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Changes the documents: SHOP maps to the other server, and the new name NEWS to the one that SHOP mapped to.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn edit(&self) -> anyhow::Result<()> {
        let Services { blue, green, .. } = self.services;
        let news = format!(
            "---\n{{kind: Service, name: NEWS, at: {{node: server, http: \"{blue}\"}}, for: {{users: alice}}}}\n"
        );
        self.write(green, &news)
    }

    /// The documents that map SHOP to the first server again.
    pub(crate) fn edit_back(&self) -> String {
        let Services { blue, green, .. } = self.services;
        format!("sed -i '/name: SHOP/s/{}/{}/' {DOCUMENTS}", green.port(), blue.port())
    }

    /// Stops the nodes in order.
    pub(crate) async fn stop(&mut self) {
        program::stop_all(&mut self.programs, STOP_TIMEOUT).await;
    }

    /// The last log lines of the processes, for the diagnosis of a failure. If a process died, only its lines are
    /// shown.
    pub(crate) async fn last_words(&mut self) -> String {
        // The connections of a node that died end before its process does, so the check waits briefly.
        let settled = Instant::now() + SETTLE;
        loop {
            for program in &mut self.programs {
                if let Some(status) = program.ended() {
                    let lines = indent(&program.last_lines(LAST_LINES));
                    return format!("{} ended by itself ({status}); its last lines:\n{lines}", whom(&program.name));
                }
            }
            if Instant::now() >= settled {
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let one = |program: &Program| format!("last lines of {}:\n{}", program.name, indent(&program.last_lines(3)));
        self.programs.iter().map(one).collect::<Vec<_>>().join("\n")
    }

    fn write(&self, shop: SocketAddr, more: &str) -> anyhow::Result<()> {
        let file = self.file(DOCUMENTS);
        std::fs::write(&file, self.documents(shop) + more).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Renders the documents; `shop` is the address that SHOP maps to.
    fn documents(&self, shop: SocketAddr) -> String {
        let Ports { apps, database, call, router, server, admin, .. } = self.ports;
        let Services { bank, database: echo, call: datagrams, .. } = self.services;
        let node =
            |at: usize| format!("kind: Node, name: {}, admin: \"127.0.0.1:{}\", workers: 1", NODES[at], admin[at]);
        let [a, b, c] = [0, 1, 2].map(node);
        let service = |name: &str, at: &str| {
            format!("{{kind: Service, name: {name}, at: {{node: server, {at}}}, for: {{users: alice}}}}\n")
        };
        let services = [
            service("SHOP", &format!("http: \"{shop}\"")),
            service("BANK, authority: \"BANK:443\"", &format!("tcp: \"{bank}\"")),
            service("DB, authority: \"DB:5432\"", &format!("tcp: \"{echo}\"")),
            service("CALL, authority: \"CALL:5004\"", &format!("udp: \"{datagrams}\"")),
        ]
        .join("---\n");
        format!(
            "# The whole overlay. Each node receives its part of it.\n\
             kind: Overlay\n\
             name: {OVERLAY}\n\
             nodes: {{drain: 250ms, access-log: access.json}}\n\
             ---\n\
             # Programs on Alice's laptop talk to this node. Of the way it knows the router.\n\
             {{{a}, links: router, apps: [\n  \
               {{bind: \"127.0.0.1:{apps}\"}},\n  \
               {{bind: \"127.0.0.1:{database}\", protocol: tcp, authority: \"DB:5432\"}},\n  \
               {{bind: \"127.0.0.1:{call}\", protocol: udp, authority: \"CALL:5004\"}}]}}\n\
             ---\n\
             # The node in the middle: it decides, by name and user, where things go.\n\
             {{{b}, role: standalone, address: \"127.0.0.1:{router}\", bind: \"127.0.0.1:{router}\", links: server}}\n\
             ---\n\
             # The services' own node: the only one that knows their addresses.\n\
             {{{c}, address: \"127.0.0.1:{server}\", bind: \"127.0.0.1:{server}\"}}\n\
             ---\n\
             {{kind: User, name: alice, nodes: alice-laptop}}\n\
             ---\n\
             {services}"
        )
    }
}

fn whom(name: &str) -> String {
    if NODES.contains(&name) { format!("node {name}") } else { format!("the {name}") }
}

fn free_ports() -> anyhow::Result<Ports> {
    let [apps, database, call, router, server, controller, a, b, c] = ports::free()?;
    Ok(Ports { apps, database, call, router, server, controller, admin: [a, b, c] })
}

fn own() -> anyhow::Result<String> {
    let own = std::env::current_exe().context("cannot find the hermes binary itself")?;
    own.into_os_string().into_string().ok().context("the path of the hermes binary is not text")
}

/// Starts `hermes proxy` with a document; `prefix` is a command line that wraps it (`ip netns exec`).
///
/// # Errors
/// The process cannot be started.
pub(crate) fn start_node(directory: &Path, name: &str, config: &Path, prefix: &[&str]) -> anyhow::Result<Program> {
    let own = own()?;
    let config = config.to_str().context("the path of a document is not text")?;
    let command = [prefix, &[&own, "proxy", "--config", config]].concat();
    Program::start(name, &directory.join(format!("{name}.log")), &command)
}

/// Waits until a node answers this path with 200. `dial` connects to its admin endpoint.
///
/// # Errors
/// The node exited, or is not ready in time; the error contains its last lines.
pub(crate) async fn wait_ready<F>(program: &mut Program, path: &str, dial: impl Fn() -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<Client>>,
{
    let until = Instant::now() + START_TIMEOUT;
    loop {
        if let Ok(mut client) = dial().await
            && client.get(path).await.is_ok()
        {
            return Ok(());
        }
        let lines = |program: &Program| indent(&program.last_lines(LAST_LINES));
        if let Some(status) = program.ended() {
            bail!("node {} did not start ({status}); its last lines:\n{}", program.name, lines(program));
        }
        if Instant::now() >= until {
            bail!("node {} is not ready after {START_TIMEOUT:?}; its last lines:\n{}", program.name, lines(program));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn indent(lines: &[String]) -> String {
    lines.iter().map(|line| format!("    {line}\n")).collect::<String>().trim_end().to_owned()
}
