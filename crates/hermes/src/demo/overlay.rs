//! The overlay of the demo: three nodes on loopback, each a process of this binary.
//!
//! In: a directory of its own and the services to lead to. Out: `alice-laptop` (dependent: programs
//! talk to it), `router` (standalone, in the middle) and `server` (dependent: it knows the services),
//! running and ready, with certificates made for this run. All ends with the value.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use tempfile::TempDir;
use tokio::time::Instant;

use super::ca::{Authority, Proof};
use super::client::Client;
use super::origins::Origins;
use super::ports::{self, loopback};
use super::program::{self, Program};

pub(crate) const OVERLAY: &str = "demo";
/// The nodes, in the order of the way.
pub(crate) const NODES: [&str; 3] = ["alice-laptop", "router", "server"];
/// Where a node's admin endpoint says that it is ready.
pub(crate) const READY: &str = "/readyz";
/// How long a node may take to start.
const START: Duration = Duration::from_secs(10);
const STOP: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(5);
const SETTLE: Duration = Duration::from_millis(500);
/// Lines that a failure shows of a node.
const LAST_LINES: usize = 8;

/// Three nodes and what they need.
pub(crate) struct Overlay {
    programs: Vec<Program>,
    pub(crate) ports: Ports,
    directory: TempDir,
    services: Services,
}

/// Where the nodes listen.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    /// Programs speak HTTP here.
    pub(crate) apps: u16,
    /// And TCP for `DB:5432`.
    pub(crate) database: u16,
    /// And UDP for `CALL:5004`.
    pub(crate) call: u16,
    router: u16,
    server: u16,
    /// The nodes' admin endpoints.
    pub(crate) admin: [u16; 3],
}

/// The services' addresses, for the server's document.
#[derive(Clone, Copy)]
struct Services {
    blue: SocketAddr,
    green: SocketAddr,
    bank: SocketAddr,
    database: SocketAddr,
    call: SocketAddr,
}

impl Overlay {
    /// Makes certificates and documents in `directory`, starts the nodes and waits until they are ready.
    ///
    /// # Errors
    /// A node that does not start, with its last lines.
    pub(crate) async fn start(directory: TempDir, origins: &Origins) -> anyhow::Result<Self> {
        let authority = Authority::new(directory.path(), "overlay-ca")?;
        for (name, users, standalone) in
            [(NODES[0], &["alice"][..], false), (NODES[1], &[], true), (NODES[2], &[], false)]
        {
            authority.issue(name, &Proof::Node { overlay: OVERLAY, users, standalone })?;
        }
        let services = Services {
            blue: origins.blue,
            green: origins.green,
            bank: origins.bank,
            database: origins.database,
            call: origins.call,
        };
        let mut this = Self { programs: Vec::new(), ports: free_ports()?, directory, services };
        if this.launch().await.is_err() {
            // Somebody may have taken a port in between: once more, elsewhere.
            this.programs.clear();
            this.ports = free_ports()?;
            this.launch().await?;
        }
        Ok(this)
    }

    async fn launch(&mut self) -> anyhow::Result<()> {
        for (name, document) in NODES.into_iter().zip([self.laptop(), self.router("SHOP-BLUE"), self.server()]) {
            let config = self.document(name);
            std::fs::write(&config, document).with_context(|| format!("cannot write {}", config.display()))?;
            self.programs.push(start_node(self.directory.path(), name, &config, &[])?);
        }
        for (program, port) in self.programs.iter_mut().zip(self.ports.admin) {
            wait_ready(program, READY, || Client::connect(loopback(port))).await?;
        }
        Ok(())
    }

    /// A node's document.
    pub(crate) fn document(&self, node: &str) -> PathBuf {
        self.directory.path().join(format!("{node}.yaml"))
    }

    /// Where everything lies.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Replaces the middle node's document by one that sends SHOP to the other server.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn send_shop_to_green(&self) -> anyhow::Result<()> {
        let document = self.document(NODES[1]);
        let fresh = document.with_extension("yaml.new");
        std::fs::write(&fresh, self.router("SHOP-GREEN"))
            .and_then(|()| std::fs::rename(&fresh, &document))
            .with_context(|| format!("cannot write {}", document.display()))
    }

    /// Ends the nodes in order.
    pub(crate) async fn stop(&mut self) {
        program::stop_all(&mut self.programs, STOP).await;
    }

    /// What the nodes said last, for whoever has to find out what went wrong. A dead node speaks alone.
    pub(crate) async fn last_words(&mut self) -> String {
        // Of a node that died its connections are heard to end before the node itself.
        let settled = Instant::now() + SETTLE;
        loop {
            for program in &mut self.programs {
                if let Some(status) = program.ended() {
                    let lines = indent(&program.last_lines(LAST_LINES));
                    return format!("node {} ended by itself ({status}); its last lines:\n{lines}", program.name);
                }
            }
            if Instant::now() >= settled {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        let one = |program: &Program| format!("last lines of {}:\n{}", program.name, indent(&program.last_lines(3)));
        self.programs.iter().map(one).collect::<Vec<_>>().join("\n")
    }

    fn laptop(&self) -> String {
        let Ports { apps, database, call, router, admin, .. } = self.ports;
        format!(
            "# Programs on Alice's laptop talk to this node. It knows one thing: the router.\n\
             {head}\
             listeners:\n\
             - {{name: apps, bind: 127.0.0.1:{apps}, protocol: http, set-headers: {{hermes-user: alice}}}}\n\
             - {{name: database, bind: 127.0.0.1:{database}, protocol: tcp, authority: \"DB:5432\", set-headers: {{hermes-user: alice}}}}\n\
             - {{name: call, bind: 127.0.0.1:{call}, protocol: udp, authority: \"CALL:5004\", set-headers: {{hermes-user: alice}}}}\n\
             routes:\n\
             - {{name: all, upstream: router}}\n\
             upstreams:\n\
             - {{name: router, protocol: h2, endpoints: [\"127.0.0.1:{router}\"], tls: {{node: router}}}}\n",
            head = head(NODES[0], "dependent", admin[0]),
        )
    }

    /// `shop` is what the name SHOP means for Alice.
    fn router(&self, shop: &str) -> String {
        let Ports { router, server, admin, .. } = self.ports;
        format!(
            "# The node in the middle: it decides, by name and user, where things go.\n\
             {head}\
             listeners:\n\
             - {{name: overlay, bind: 127.0.0.1:{router}, protocol: http, tls: {{client: required}}}}\n\
             routes:\n\
             - {{name: shop, match: {{authority: SHOP, user: alice}}, rewrite: {{authority: {shop}}}, upstream: server}}\n\
             - {{name: services, match: {{authority: [\"BANK:443\", \"DB:5432\", \"CALL:5004\"]}}, upstream: server}}\n\
             upstreams:\n\
             - {{name: server, protocol: h2, endpoints: [\"127.0.0.1:{server}\"], tls: {{node: server}}}}\n",
            head = head(NODES[1], "standalone", admin[1]),
        )
    }

    fn server(&self) -> String {
        let Services { blue, green, bank, database, call } = self.services;
        format!(
            "# The services' own node: the only one that knows their addresses.\n\
             {head}\
             listeners:\n\
             - {{name: overlay, bind: 127.0.0.1:{server}, protocol: http, tls: {{client: required}}}}\n\
             routes:\n\
             - {{name: blue, match: {{authority: SHOP-BLUE}}, terminate: {{http: \"{blue}\"}}}}\n\
             - {{name: green, match: {{authority: SHOP-GREEN}}, terminate: {{http: \"{green}\"}}}}\n\
             - {{name: bank, match: {{kind: tcp, authority: \"BANK:443\"}}, terminate: {{tcp: \"{bank}\"}}}}\n\
             - {{name: database, match: {{kind: tcp, authority: \"DB:5432\"}}, terminate: {{tcp: \"{database}\"}}}}\n\
             - {{name: call, match: {{kind: udp, authority: \"CALL:5004\"}}, terminate: {{udp: \"{call}\"}}}}\n",
            head = head(NODES[2], "dependent", self.ports.admin[2]),
            server = self.ports.server,
        )
    }
}

/// What every node's document begins with.
fn head(name: &str, role: &str, admin: u16) -> String {
    format!(
        "node: {name}\n\
         role: {role}\n\
         admin: 127.0.0.1:{admin}\n\
         identity: {{cert: {name}.pem, key: {name}.key, ca: overlay-ca.pem}}\n\
         access-log: {name}.access.json\n\
         drain: 250ms\n\
         workers: 1\n"
    )
}

fn free_ports() -> anyhow::Result<Ports> {
    let [apps, database, call, router, server, a, b, c] = ports::free()?;
    Ok(Ports { apps, database, call, router, server, admin: [a, b, c] })
}

/// Starts `hermes proxy` with a document; `prefix` is a command line that runs it (`ip netns exec`).
///
/// # Errors
/// It cannot be started.
pub(crate) fn start_node(directory: &Path, name: &str, config: &Path, prefix: &[&str]) -> anyhow::Result<Program> {
    let own = std::env::current_exe().context("cannot find the hermes binary itself")?;
    let own = own.to_str().context("the path of the hermes binary is not text")?;
    let config = config.to_str().context("the path of a document is not text")?;
    let command = [prefix, &[own, "proxy", "--config", config]].concat();
    Program::start(name, &directory.join(format!("{name}.log")), &command)
}

/// Waits until a node says that it is ready, by 200 for this path. `dial` connects to its admin endpoint.
///
/// # Errors
/// It ended, or is not ready in time; with its last lines.
pub(crate) async fn wait_ready<F>(program: &mut Program, path: &str, dial: impl Fn() -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<Client>>,
{
    let until = Instant::now() + START;
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
            bail!("node {} is not ready after {START:?}; its last lines:\n{}", program.name, lines(program));
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn indent(lines: &[String]) -> String {
    lines.iter().map(|line| format!("    {line}\n")).collect::<String>().trim_end().to_owned()
}
