//! Machines of a demo's network: namespaces with one address each, behind a router that is a namespace too.
//!
//! In: root and iproute2. Out: namespaces that are removed with their values. A thread enters a namespace only to open
//! a socket; programs are started there by `ip netns exec`. Never: a change to the namespace in which the demo itself
//! runs.

use std::fs::File;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket, UdpSocket};

/// The congestion control of every connection, as on the paper's machines; this machine's default may differ.
pub(crate) const CONGESTION_CONTROL: &str = "cubic";
/// Kernel buffer of UDP sockets: seconds of video.
const UDP_BUFFER: usize = 16 << 20;

/// The directory of a demo's files: a temporary one, or the requested one, which remains.
///
/// # Errors
/// The directory cannot be created, or is not empty.
pub(crate) fn directory(prefix: &str, wanted: Option<&Path>) -> anyhow::Result<(TempDir, PathBuf)> {
    let temporary = tempfile::Builder::new().prefix(prefix).tempdir().context("no temporary directory")?;
    let Some(wanted) = wanted else {
        let path = temporary.path().to_owned();
        return Ok((temporary, path));
    };
    let cannot = || format!("cannot use {}", wanted.display());
    std::fs::create_dir_all(wanted).with_context(cannot)?;
    let mut found = std::fs::read_dir(wanted).with_context(cannot)?;
    ensure!(
        found.next().is_none(),
        "there is something in {} already, and the demo overwrites nothing: empty it, or name another --files",
        wanted.display()
    );
    Ok((temporary, wanted.to_owned()))
}

/// A namespace with one address; dropping it removes the namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
    /// The namespace's address in the lab network.
    pub(crate) address: Ipv4Addr,
}

impl Namespace {
    /// Creates a namespace. `prefix` identifies the demo, `number` the network within a process; the demo's pid between
    /// them identifies the owner.
    ///
    /// # Errors
    /// Returns iproute2's error output.
    pub(crate) fn new(prefix: &str, number: usize, what: &str, address: Ipv4Addr) -> anyhow::Result<Self> {
        let name = format!("{prefix}{}-{number}-{what}", std::process::id());
        feed(Command::new("ip").args(["netns", "add", &name]), "")?;
        let this = Self { name, address };
        this.ip("link set lo up\n")?;
        Ok(this)
    }

    /// The name in `ip netns`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Connects a namespace to this router, which has the first address of the namespace's /24. `link` holds arguments
    /// of `ip link set` for both ends.
    ///
    /// # Errors
    /// Returns iproute2's error output.
    pub(crate) fn attach(&self, place: &Self, device: &str, link: &str) -> anyhow::Result<()> {
        let [a, b, c, _] = place.address.octets();
        let mut ip = Command::new("ip");
        ip.args(["link", "add", device, "netns", &self.name, "type", "veth", "peer", "name", "eth0"]);
        feed(ip.args(["netns", &place.name]), "")?;
        place.ip(&format!(
            "addr add {}/24 dev eth0\nlink set eth0 {link} up\n\
             route replace {a}.{b}.{c}.0/24 dev eth0 congctl {CONGESTION_CONTROL}\n\
             route add default via {a}.{b}.{c}.1 congctl {CONGESTION_CONTROL}\n",
            place.address
        ))?;
        self.ip(&format!("addr add {a}.{b}.{c}.1/24 dev {device}\nlink set {device} {link} up\n"))
    }

    /// Enables IP forwarding.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn forward(&self) -> anyhow::Result<()> {
        self.sysctl("net/ipv4/ip_forward", "1")
    }

    /// Sets a sysctl of the namespace.
    ///
    /// # Errors
    /// The kernel refuses, or has no sysctl of that name.
    pub(crate) fn sysctl(&self, name: &str, value: &str) -> anyhow::Result<()> {
        self.inside(|| std::fs::write(Path::new("/proc/sys").join(name), value))
    }

    /// The start of a command line that runs the rest in this namespace.
    pub(crate) fn prefix(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }

    /// A command line that runs in this namespace.
    pub(crate) fn command(&self, command: &[&str]) -> Command {
        let [ip, rest @ ..] = self.prefix();
        let mut all = Command::new(ip);
        all.args(rest).args(command);
        all
    }

    /// Lines of `ip -batch`.
    ///
    /// # Errors
    /// Returns iproute2's error output.
    pub(crate) fn ip(&self, lines: &str) -> anyhow::Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.name, "-batch", "-"]);
        feed(ip, lines).map(drop)
    }

    /// Runs `act` on a thread that enters the namespace for this call. `act` must not wait for the network.
    ///
    /// # Errors
    /// Returns the error of `act`, or the namespace cannot be entered.
    pub(crate) fn inside<T: Send>(&self, act: impl FnOnce() -> io::Result<T> + Send) -> anyhow::Result<T> {
        let enter = || -> io::Result<T> {
            let namespace = File::open(Path::new("/run/netns").join(&self.name))?;
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        let done = std::thread::scope(|scope| scope.spawn(enter).join());
        match done {
            Ok(done) => done.with_context(|| format!("in {}", self.name)),
            Err(_) => bail!("a thread in {} panicked", self.name),
        }
    }

    /// A TCP socket of this place, not yet connected.
    ///
    /// # Errors
    /// No socket is left.
    pub(crate) fn tcp(&self) -> anyhow::Result<TcpSocket> {
        self.inside(|| {
            let socket = TcpSocket::new_v4()?;
            socket.set_nodelay(true)?;
            Ok(socket)
        })
    }

    /// A listening socket of this place.
    ///
    /// # Errors
    /// The address is taken.
    pub(crate) fn listen(&self, address: SocketAddr) -> anyhow::Result<TcpListener> {
        let socket = self.inside(|| std::net::TcpListener::bind(address))?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from_std(socket)?)
    }

    /// A UDP socket of this place, with room for seconds of video.
    ///
    /// # Errors
    /// The address is taken.
    pub(crate) fn udp(&self, address: SocketAddr) -> anyhow::Result<UdpSocket> {
        let socket = self.inside(|| std::net::UdpSocket::bind(address))?;
        // Root may have more than the system's limit.
        setsockopt(&socket, sockopt::RcvBufForce, &UDP_BUFFER)?;
        socket.set_nonblocking(true)?;
        Ok(UdpSocket::from_std(socket)?)
    }

    /// Whether a socket is bound to this UDP port. The kernel's table is read instead of a test bind, which could take
    /// the port from a program that binds at that moment.
    pub(crate) fn has_udp(&self, port: u16) -> bool {
        let tables = ["udp", "udp6"].map(|name| Path::new("/proc/thread-self/net").join(name));
        let read = self.inside(|| Ok(tables.map(|table| std::fs::read_to_string(table).unwrap_or_default())));
        read.is_ok_and(|tables| tables.iter().any(|table| lists(table, port)))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = feed(Command::new("ip").args(["netns", "del", &self.name]), "");
    }
}

/// Whether a table of sockets (proc(5), `/proc/net/udp`) has one at this local port.
fn lists(table: &str, port: u16) -> bool {
    let ending = format!(":{port:04X}");
    table.lines().skip(1).any(|line| line.split_whitespace().nth(1).is_some_and(|local| local.ends_with(&ending)))
}

/// Removes the leftovers of killed demos with this prefix.
pub(crate) fn sweep(prefix: &str) {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let maker = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = feed(Command::new("ip").args(["netns", "del", &name]), "");
        }
    }
}

/// Runs a command to its end with this input. Returns its output.
///
/// # Errors
/// Returns the command's standard error.
pub(crate) fn feed(mut command: impl std::borrow::BorrowMut<Command>, input: &str) -> anyhow::Result<Vec<u8>> {
    let command = command.borrow_mut();
    let line = format!("{command:?}").replace('"', "");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| line.clone())?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read its input reports the reason on standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}
