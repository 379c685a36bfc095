//! A controller, nodes and origins, on their own loopback address.
//!
//! In: overlay documents, and operator commands. Out: running processes, and their output. Never: an error value. A
//! fixture that cannot be created fails the test.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failure of the fixture is a failure of the test")]
#![allow(clippy::missing_panics_doc, reason = "all of them panic when the process does")]

mod operator_client;
mod persistent_client;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub use operator_client::OperatorClient;
pub use persistent_client::PersistentClient;

use crate::{
    binary::hermes,
    netns::Namespace,
    poll,
    process::{Program, Running},
};

/// The time that a test waits for an effect of the controller.
pub const EFFECT_TIMEOUT: Duration = Duration::from_secs(60);

/// A controller, and the nodes that follow it. Dropping it ends the controller.
pub struct ControllerFixture {
    /// The directory of the state and logs of all processes.
    pub directory: tempfile::TempDir,
    /// The loopback address of this test.
    pub address: Ipv4Addr,
    controller: Option<Running>,
    /// Whether the store is an etcd, running or not.
    has_etcd: bool,
    etcd: Option<Running>,
    /// A second controller with the same etcd.
    second: Option<Running>,
    /// The file with the key that encrypts (seals) the CA's private key.
    pub seal: Option<PathBuf>,
}

/// Waits until the condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    poll::until(what, || std::future::ready(holds())).await;
}

impl ControllerFixture {
    /// Starts two controllers with one etcd.
    pub async fn with_etcd() -> Self {
        let mut this = Self::nothing();
        this.start_etcd().await;
        this.start_controller().await;
        this.start_second().await;
        this
    }

    /// Starts a second controller at the same etcd.
    pub async fn start_second(&mut self) {
        self.second = Some(self.started("second", 9401).await);
    }

    /// Kills the second controller with SIGKILL.
    pub fn kill_second(&mut self) {
        sigkill(self.second.take().unwrap());
    }

    /// Starts a controller and waits until it listens, which requires its store.
    async fn started(&self, name: &str, port: u16) -> Running {
        let running = self.launch(name, self.state(name), port);
        let operator = self.state(name).join("operator.json");
        let listens = || TcpStream::connect(self.socket(port)).is_ok() && operator.exists();
        until(&format!("{name} listens"), listens).await;
        running
    }

    /// Starts the etcd.
    pub async fn start_etcd(&mut self) {
        let (client, peer) = (format!("http://{}", self.socket(2379)), format!("http://{}", self.socket(2380)));
        self.has_etcd = true;
        let program = Program::new("etcd", "etcd", self.directory.path());
        let program = program.args(["--name", "one", "--log-level", "error", "--data-dir"]).args([self.state("etcd")]);
        let program = program.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        let program = program.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        let program = program.args(["--initial-cluster", &format!("one={peer}")]);
        self.etcd = Some(program.start().expect("`scripts/setup.sh` installs etcd"));
        until("etcd listens", || TcpStream::connect(self.socket(2379)).is_ok()).await;
    }

    /// The process id of the etcd.
    pub fn etcd(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.etcd.as_ref().unwrap().pid()).unwrap())
    }

    /// Kills the etcd with SIGKILL.
    pub fn kill_etcd(&mut self) {
        sigkill(self.etcd.take().unwrap());
    }

    fn launch(&self, name: &str, data: PathBuf, port: u16) -> Running {
        self.launch_with(name, data, port, &[])
    }

    fn launch_with(&self, name: &str, data: PathBuf, port: u16, more: &[&str]) -> Running {
        let listen = self.socket(port).to_string();
        let store = if self.has_etcd { format!("etcd://{}", self.socket(2379)) } else { "sqlite".to_owned() };
        let program = Program::new(name, hermes(), self.directory.path());
        let admin = self.socket(port + 90).to_string();
        let program = program.args(["controller", "--listen", &listen, "--admin", &admin, "--store", &store, "--data"]);
        let program = program.args([data]).args(more);
        match &self.seal {
            Some(seal) => program.env("HERMES_SEAL_FILE", seal).start().unwrap(),
            None => program.start().unwrap(),
        }
    }

    fn nothing() -> Self {
        let [a, b, c, _] = rand::random::<[u8; 4]>();
        Self::nothing_at(Ipv4Addr::new(127, a.max(1), b, c.clamp(1, 254)))
    }

    fn nothing_at(address: Ipv4Addr) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, address, controller: None, has_etcd: false, etcd: None, second: None, seal: None }
    }

    /// Starts a controller that seals the CA's private key.
    pub async fn sealed(seal: &str) -> Self {
        let mut this = Self::nothing();
        this.seal = Some(this.state(seal));
        this.start_controller().await;
        this
    }

    /// Starts a controller without any documents.
    pub async fn new() -> Self {
        let mut this = Self::nothing();
        this.start_controller().await;
        this
    }

    /// Starts a controller at an address that other namespaces reach.
    pub async fn at(address: Ipv4Addr) -> Self {
        let mut this = Self::nothing_at(address);
        this.start_controller().await;
        this
    }

    /// A port of this test.
    pub fn socket(&self, port: u16) -> SocketAddr {
        (self.address, port).into()
    }

    /// The directory or file of this name in the directory of the test.
    pub fn state(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts the controller and waits until it listens.
    pub async fn start_controller(&mut self) {
        self.controller = Some(self.started("controller", 9400).await);
    }

    /// Starts the controller with a public name.
    pub async fn start_controller_as(&mut self, name: &str) {
        let launched = self.launch_with("controller", self.state("controller"), 9400, &["--name", name]);
        until("it listens", || TcpStream::connect(self.socket(9400)).is_ok()).await;
        self.controller = Some(launched);
    }

    /// Starts a controller without waiting: it does not listen while its store is unreachable.
    pub fn launch_controller(&mut self) {
        self.controller = Some(self.launch("controller", self.state("controller"), 9400));
    }

    /// The controller's resident memory in bytes.
    pub fn weight(&self) -> u64 {
        self.controller.as_ref().unwrap().usage().unwrap().memory.rss
    }

    /// Kills the controller with SIGKILL.
    pub fn kill_controller(&mut self) {
        sigkill(self.controller.take().unwrap());
    }

    /// Runs an operator command at a running controller.
    pub fn hermes(&self, args: &[&str], input: &str) -> Output {
        self.hermes_at(if self.controller.is_some() { "controller" } else { "second" }, args, input)
    }

    /// Runs an operator command at this controller.
    pub fn hermes_at(&self, controller: &str, args: &[&str], input: &str) -> Output {
        let mut child = Command::new(hermes())
            .args(args)
            .env("HERMES_OPERATOR", self.state(controller).join("operator.json"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A command that reads no input may have exited already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// Runs an operator command that must succeed. Returns its standard output.
    pub fn hermes_ok(&self, args: &[&str], input: &str) -> String {
        let output = self.hermes(args, input);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{args:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Runs an operator command that must fail. Returns its standard error.
    pub fn refused(&self, args: &[&str], input: &str) -> String {
        let output = self.hermes(args, input);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).unwrap()
    }

    /// Creates a token for a node.
    pub fn token(&self, node: &str) -> String {
        self.hermes_ok(&["token", "create", "--node", node], "").trim().to_owned()
    }

    /// Starts a node, with a token if it is not enrolled yet.
    pub fn node(&self, name: &str, token: Option<&str>) -> Running {
        self.node_within(None, name, token)
    }

    /// Starts a node in a namespace.
    pub fn node_within(&self, namespace: Option<&Namespace>, name: &str, token: Option<&str>) -> Running {
        let second = self.second.as_ref().map(|_| format!(",https://{}", self.socket(9401))).unwrap_or_default();
        let url = format!("https://{}{second}", self.socket(9400));
        let program = Program::new(name, hermes(), self.directory.path()).within(namespace);
        let program = program.args(["proxy", "--controller", &url, "--state"]).args([self.state(name)]);
        match token {
            Some(token) => program.env("HERMES_TOKEN", token).start().unwrap(),
            None => program.start().unwrap(),
        }
    }

    /// The log of the node so far.
    pub fn log(&self, node: &str) -> String {
        std::fs::read_to_string(self.state(&format!("{node}.err"))).unwrap_or_default()
    }

    /// Starts an origin that responds with its name.
    pub fn origin(&self, port: u16, name: &'static str) {
        origin(self.socket(port), name);
    }

    /// The response to an application's request: status and body; `None` if nobody listens.
    pub fn get(&self, authority: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(self.socket(8080)).ok()?;
        stream.set_read_timeout(Some(EFFECT_TIMEOUT)).unwrap();
        write!(stream, "GET / HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let status = text.split(' ').nth(1)?.parse().ok()?;
        Some((status, text.split("\r\n\r\n").nth(1)?.to_owned()))
    }

    /// Waits until an application receives this body.
    pub async fn until_answers(&self, authority: &str, wanted: &str) {
        let answers = || self.get(authority) == Some((200, wanted.to_owned()));
        until(&format!("{authority} answers {wanted}"), answers).await;
    }

    /// Documents with two nodes, and a service at one of them for the other one's user.
    pub fn documents(&self, port: u16) -> String {
        let (overlay, apps, origin) = (self.socket(9443), self.socket(8080), self.socket(port));
        format!(
            "kind: Overlay\nname: test\n---\n\
             {{kind: Node, name: laptop, links: server, apps: {{bind: \"{apps}\"}}}}\n---\n\
             {{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
             {{kind: User, name: ann, nodes: laptop}}\n---\n\
             {{kind: Service, name: APP, at: {{node: server, http: \"{origin}\"}}, for: {{users: ann}}}}\n"
        )
    }
}

/// Starts an origin that responds with its name, in the namespace of the calling thread.
pub fn origin(address: SocketAddr, name: &'static str) {
    let listener = TcpListener::bind(address).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let length = name.len();
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{name}");
        }
    });
}

/// The content of all audit files in a controller's directory; the lines of each file are in order.
pub fn audit(directory: &std::path::Path) -> String {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_audit = |path: &PathBuf| {
        path.extension().is_some_and(|end| end == "jsonl")
            && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("audit"))
    };
    files.filter(is_audit).map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// Kills a process with SIGKILL.
pub fn sigkill(node: Running) {
    kill(Pid::from_raw(i32::try_from(node.pid()).unwrap()), Signal::SIGKILL).unwrap();
    let _ = node.end(Duration::from_secs(5));
}

/// The number of CAs in the node's file, and whether one of them issued its certificate.
pub fn trusted(directory: &std::path::Path) -> (usize, bool) {
    let text = std::fs::read_to_string(directory.join("ca.pem")).unwrap();
    let leaf = directory.join("node.pem");
    let mut verify = Command::new("openssl");
    verify.arg("verify").arg("-CAfile").arg(directory.join("ca.pem")).arg("-untrusted").arg(&leaf).arg(&leaf);
    (text.matches("BEGIN CERTIFICATE").count(), verify.output().unwrap().status.success())
}
