//! The network of the video case: six namespaces, one of them a router, and a path that loses packets.
//!
//! In: root. Out: places with an address each, reached through the router; the user's link has
//! 10 Mbit/s and loses one packet in a hundred, by chance, in each direction. All is gone with the
//! value. Sockets are opened inside of a place by a thread that enters it for that moment; programs
//! are started there by `ip netns exec`.
//! Never: a change to the namespace that the demo itself runs in.

use std::fs::File;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};
use serde::Serialize;
use tokio::net::{TcpListener, TcpSocket, UdpSocket};

/// What every namespace's name begins with; the demo's pid follows, so that leftovers can be told.
const PREFIX: &str = "hermes-video-";
/// Packets in ten thousand that the user's link loses, each way: the paper's 1 %.
const LOST: u32 = 100;
/// Each way. The queue before it holds 300 ms: frames come in bursts, and only `LOST` may lose.
const SHAPER: [&str; 7] = ["tbf", "rate", "10mbit", "burst", "16kb", "latency", "300ms"];
/// Of every connection: the paper's machines had it, and this machine may have another default.
const CONGESTION_CONTROL: &str = "cubic";
/// Kernel buffer of taps: seconds of video.
const TAP_BUFFER: usize = 16 << 20;

/// A namespace with one address; gone when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    name: String,
    /// Its address, as others know it.
    pub(super) address: Ipv4Addr,
}

/// The whole network.
#[derive(Debug)]
pub(super) struct Lab {
    /// The user's machine, behind the link that loses packets.
    pub(super) user: Place,
    /// The provider's ingress.
    pub(super) ingress: Place,
    /// Two distributors.
    pub(super) distributors: [Place; 2],
    /// The video server's machine.
    pub(super) server: Place,
    router: Place,
}

/// What the user's link did.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Link {
    /// Packets that wanted to go to the user.
    pub(super) down: u64,
    /// Of those, lost on purpose.
    pub(super) down_lost: u64,
    /// Packets from the user.
    pub(super) up: u64,
    /// Of those, lost on purpose.
    pub(super) up_lost: u64,
}

impl Lab {
    /// Makes it. `number` tells labs of one process apart.
    ///
    /// # Errors
    /// What iproute2 or nftables said.
    pub(super) fn new(number: usize) -> anyhow::Result<Self> {
        let place = |index: u8, what: &str| Place::new(number, index, what);
        let this = Self {
            user: place(1, "user")?,
            ingress: place(2, "ingress")?,
            distributors: [place(3, "dist-1")?, place(4, "dist-2")?],
            server: place(5, "server")?,
            router: place(0, "router")?,
        };
        for (place, what) in this.places().into_iter().zip(["user", "ingress", "dist-1", "dist-2", "server"]) {
            this.join(place, what)?;
        }
        this.router.inside(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?;
        feed(this.router.command(&["nft", "-f", "-"]), &rules())?;
        for (place, device) in [(&this.user, "eth0"), (&this.router, "user")] {
            feed(place.command(&[&["tc", "qdisc", "add", "dev", device, "root"], &SHAPER[..]].concat()), "")?;
        }
        Ok(this)
    }

    fn places(&self) -> [&Place; 5] {
        let [one, two] = &self.distributors;
        [&self.user, &self.ingress, one, two, &self.server]
    }

    /// A link of its own between a place and the router.
    fn join(&self, place: &Place, what: &str) -> anyhow::Result<()> {
        let (inner, outer) = (&place.name, &self.router.name);
        let [a, b, c, _] = place.address.octets();
        let mut ip = Command::new("ip");
        ip.args(["link", "add", what, "netns", outer, "type", "veth", "peer", "name", "eth0", "netns", inner]);
        feed(ip, "")?;
        // Packets as long as the wire's: a lost one must not be forty in one.
        place.ip(&format!(
            "addr add {}/24 dev eth0\nlink set eth0 gso_max_segs 1\nlink set eth0 up\n\
             route replace {a}.{b}.{c}.0/24 dev eth0 congctl {CONGESTION_CONTROL}\n\
             route add default via {a}.{b}.{c}.1 congctl {CONGESTION_CONTROL}\n",
            place.address
        ))?;
        self.router
            .ip(&format!("addr add {a}.{b}.{c}.1/24 dev {what}\nlink set {what} gso_max_segs 1\nlink set {what} up\n"))
    }

    /// What the user's link did so far.
    ///
    /// # Errors
    /// nftables does not say.
    pub(super) fn link(&self) -> anyhow::Result<Link> {
        let listed = feed(self.router.command(&["nft", "-j", "list", "counters"]), "")?;
        let listed: serde_json::Value = serde_json::from_slice(&listed).context("nft list counters")?;
        let packets = |name: &str| {
            let counters = listed["nftables"].as_array().into_iter().flatten().map(|item| &item["counter"]);
            counters.filter(|counter| counter["name"] == name).find_map(|counter| counter["packets"].as_u64())
        };
        let packets = |name: &str| packets(name).with_context(|| format!("nft has no counter {name}"));
        Ok(Link {
            down: packets("down")?,
            down_lost: packets("down-lost")?,
            up: packets("up")?,
            up_lost: packets("up-lost")?,
        })
    }
}

fn rules() -> String {
    let mut text = "table inet path {\n".to_owned();
    for name in ["down", "down-lost", "up", "up-lost"] {
        text += &format!("  counter {name} {{}}\n");
    }
    text += "  chain forward {\n    type filter hook forward priority 0\n";
    for (device, name) in [("oifname", "down"), ("iifname", "up")] {
        text += &format!("    {device} \"user\" counter name \"{name}\"\n");
        text += &format!("    {device} \"user\" numgen random mod 10000 < {LOST} counter name \"{name}-lost\" drop\n");
    }
    text + "  }\n}\n"
}

impl Place {
    fn new(number: usize, index: u8, what: &str) -> anyhow::Result<Self> {
        let name = format!("{PREFIX}{}-{number}-{what}", std::process::id());
        feed(Command::new("ip").args(["netns", "add", &name]), "")?;
        let this = Self { name, address: Ipv4Addr::new(10, 77, index, 2) };
        this.ip("link set lo up\n")?;
        Ok(this)
    }

    /// The words before a command line that make it run here.
    pub(super) fn prefix(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }

    fn command(&self, command: &[&str]) -> Command {
        let [ip, rest @ ..] = self.prefix();
        let mut all = Command::new(ip);
        all.args(rest).args(command);
        all
    }

    /// Lines of `ip -batch`.
    fn ip(&self, lines: &str) -> anyhow::Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.name, "-batch", "-"]);
        feed(ip, lines).map(drop)
    }

    /// Does something on a thread that is here for so long. It must not wait for the network.
    fn inside<T: Send>(&self, act: impl FnOnce() -> io::Result<T> + Send) -> anyhow::Result<T> {
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
    pub(super) fn tcp(&self) -> anyhow::Result<TcpSocket> {
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
    pub(super) fn listen(&self, address: SocketAddr) -> anyhow::Result<TcpListener> {
        let socket = self.inside(|| std::net::TcpListener::bind(address))?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from_std(socket)?)
    }

    /// A UDP socket of this place, with room for seconds of video.
    ///
    /// # Errors
    /// The address is taken.
    pub(super) fn udp(&self, address: SocketAddr) -> anyhow::Result<UdpSocket> {
        let socket = self.inside(|| std::net::UdpSocket::bind(address))?;
        // Root may have more than the system's limit.
        setsockopt(&socket, sockopt::RcvBufForce, &TAP_BUFFER)?;
        socket.set_nonblocking(true)?;
        Ok(UdpSocket::from_std(socket)?)
    }

    /// Whether somebody has this UDP port. Looked up: to bind it for a look would take it from
    /// whoever binds it at that moment.
    pub(super) fn has_udp(&self, port: u16) -> bool {
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

/// Removes what demos that were killed left behind.
pub(super) fn sweep() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = feed(Command::new("ip").args(["netns", "del", &name]), "");
        }
    }
}

/// Runs a command to its end with this input. Returns what it said.
fn feed(mut command: impl std::borrow::BorrowMut<Command>, input: &str) -> anyhow::Result<Vec<u8>> {
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
