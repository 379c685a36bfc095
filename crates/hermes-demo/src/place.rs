//! Machines of a demo's network: a namespace each, with one address, behind a router that is one too.
//!
//! In: root and iproute2. Out: places that are gone with their values. Sockets are opened inside of a
//! place by a thread that enters it for that moment; programs are started there by `ip netns exec`.
//! Never: a change to the namespace that the demo itself runs in.

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

/// Of every connection: the paper's machines had it, and this machine may have another default.
pub(crate) const CONGESTION_CONTROL: &str = "cubic";
/// Kernel buffer of UDP sockets: seconds of video.
const UDP_BUFFER: usize = 16 << 20;

/// Where a demo's files go: a directory that is removed in the end, or the one that was asked for and stays.
///
/// # Errors
/// It cannot be made, or there is something in it already.
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

/// A namespace with one address; gone when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    name: String,
    /// Its address, as others know it.
    pub(crate) address: Ipv4Addr,
}

impl Place {
    /// Makes one. `prefix` tells demos apart, `number` networks of one process; the demo's pid between them tells
    /// whose it is.
    ///
    /// # Errors
    /// What iproute2 said.
    pub(crate) fn new(prefix: &str, number: usize, what: &str, address: Ipv4Addr) -> anyhow::Result<Self> {
        let name = format!("{prefix}{}-{number}-{what}", std::process::id());
        feed(Command::new("ip").args(["netns", "add", &name]), "")?;
        let this = Self { name, address };
        this.ip("link set lo up\n")?;
        Ok(this)
    }

    /// Its name, as `ip netns` has it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Gives a place a link of its own to this router, which has the first address of the place's /24. `link` is what
    /// `ip link set` does to both ends.
    ///
    /// # Errors
    /// What iproute2 said.
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

    /// Lets it pass on what is not for itself.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn forward(&self) -> anyhow::Result<()> {
        self.sysctl("net/ipv4/ip_forward", "1")
    }

    /// Sets one of the kernel's knobs that each namespace has.
    ///
    /// # Errors
    /// The kernel refuses, or has none of that name.
    pub(crate) fn sysctl(&self, name: &str, value: &str) -> anyhow::Result<()> {
        self.inside(|| std::fs::write(Path::new("/proc/sys").join(name), value))
    }

    /// The words before a command line that make it run here.
    pub(crate) fn prefix(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }

    /// A command line that runs here.
    pub(crate) fn command(&self, command: &[&str]) -> Command {
        let [ip, rest @ ..] = self.prefix();
        let mut all = Command::new(ip);
        all.args(rest).args(command);
        all
    }

    /// Lines of `ip -batch`.
    ///
    /// # Errors
    /// What iproute2 said.
    pub(crate) fn ip(&self, lines: &str) -> anyhow::Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.name, "-batch", "-"]);
        feed(ip, lines).map(drop)
    }

    /// Does something on a thread that is here for so long. It must not wait for the network.
    ///
    /// # Errors
    /// Its own, or the place cannot be entered.
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

    /// Whether somebody has this UDP port. Looked up: to bind it for a look would take it from
    /// whoever binds it at that moment.
    pub(crate) fn has_udp(&self, port: u16) -> bool {
        let tables = ["udp", "udp6"].map(|name| Path::new("/proc/thread-self/net").join(name));
        let read = self.inside(|| Ok(tables.map(|table| std::fs::read_to_string(table).unwrap_or_default())));
        read.is_ok_and(|tables| tables.iter().any(|table| lists(table, port)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = feed(Command::new("ip").args(["netns", "del", &self.name]), "");
    }
}

/// Whether a table of sockets (proc(5), `/proc/net/udp`) has one at this local port.
fn lists(table: &str, port: u16) -> bool {
    let ending = format!(":{port:04X}");
    table.lines().skip(1).any(|line| line.split_whitespace().nth(1).is_some_and(|local| local.ends_with(&ending)))
}

/// Removes what demos of this prefix that were killed left behind.
pub(crate) fn sweep(prefix: &str) {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let maker = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = feed(Command::new("ip").args(["netns", "del", &name]), "");
        }
    }
}

/// Runs a command to its end with this input. Returns what it said.
///
/// # Errors
/// What it said on standard error.
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
        // Who does not read its input says why on standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}
