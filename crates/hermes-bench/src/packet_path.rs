//! The fixture of layer 3: machines in a row, each a namespace, and paths for packets from the first to a later one.
//!
//! In: the number of machines, or the delay between the first and the others. Out: [`Machines`], which starts tunnels and
//! measures traffic through them. All tunnels of a row are up at the same time; each has its own devices, addresses and
//! ports.

use std::{
    cell::Cell,
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use hermes_testkit::{
    ca::{Authority, IdentityFiles, Subject},
    link::{self, Link},
    load::{Load, Task},
    netns::Namespace,
    process::{Program, Running},
};

use crate::{
    contender::Programs,
    testbed::{Measured, load_program, made, namespace, under},
};

/// The time until the first echo must return through a tunnel.
const UP: Duration = Duration::from_secs(20);
/// The port of the sinks.
const SINK: u16 = 2000;

/// A path of packets between two machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketPath {
    /// The kernels forward them.
    Bare,
    /// wireguard-go from end to end: a user-space tunnel without HTTP.
    WireGuard,
    /// `hermes tun` at the near end, which sends packets in UDP to a node at the far end: the paper's tunnel without
    /// HTTP.
    Udp,
    /// A device at either end, and CONNECT-IP over mutual TLS on every link.
    Hermes(&'static str),
}

/// A row of machines.
pub(crate) struct Machines {
    // Order matters: fields are dropped from the first to the last.
    links: Vec<Link>,
    places: Vec<Namespace>,
    identities: Vec<IdentityFiles>,
    next: Cell<u8>,
    dir: PathBuf,
}

/// A running tunnel. Dropping it ends its programs.
pub(crate) struct Tunnel {
    /// The name of the contender.
    pub(crate) contender: String,
    /// The number of links that it crosses.
    pub(crate) hops: usize,
    /// The far end's address in the tunnel.
    pub(crate) far: Ipv4Addr,
    programs: Vec<Running>,
}

impl PacketPath {
    /// The name in result files.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Bare => "bare".to_owned(),
            Self::WireGuard => "wireguard-go".to_owned(),
            Self::Udp => "hermes-udp".to_owned(),
            Self::Hermes(version) => format!("hermes-{version}"),
        }
    }
}

impl Machines {
    /// Creates `count` machines, joined by veth pairs.
    pub(crate) fn new(dir: &Path, count: usize) -> Result<Self> {
        let places = (0..count).map(|_| namespace()).collect::<Result<Vec<_>>>()?;
        for (link, pair) in places.windows(2).enumerate() {
            pair[0].join(end(link, 1), &pair[1], end(link, 2))?;
        }
        Self::around(dir, places, Vec::new())
    }

    /// Creates a user, a remote ingress, and a server next to the ingress.
    pub(crate) fn far(dir: &Path, one_way: Duration) -> Result<Self> {
        let places = (0..3).map(|_| namespace()).collect::<Result<Vec<_>>>()?;
        let link = link::delayed((&places[0], end(0, 1)), (&places[1], end(0, 2)), one_way)?;
        places[1].join(end(1, 1), &places[2], end(1, 2))?;
        Self::around(dir, places, vec![link])
    }

    fn around(dir: &Path, places: Vec<Namespace>, links: Vec<Link>) -> Result<Self> {
        let dir = made(dir)?;
        for (location, namespace) in places.iter().enumerate() {
            namespace.sysctl("net/ipv4/ip_forward", "1")?;
            for link in 0..places.len() - 1 {
                let gateway = match link {
                    link if link > location => end(location, 2),
                    link if link + 1 < location => end(location - 1, 1),
                    _ => continue,
                };
                let network = format!("{}/24", end(link, 0));
                namespace.ip(&["route", "add", &network, "via", &gateway.to_string(), "congctl", "cubic"])?;
            }
        }
        let ca = Authority::new("bench")?;
        let issue = |location: usize| {
            let name = format!("place-{location}");
            let subject = Subject::node(&name).standalone().with_dns(&name);
            Ok::<_, anyhow::Error>(ca.issue(&subject)?.write(&dir, &name)?)
        };
        let identities = (0..places.len()).map(issue).collect::<Result<Vec<_>>>()?;
        Ok(Self { links, places, identities, next: Cell::new(1), dir })
    }

    /// Starts a tunnel over `hops` links, and waits until an echo returns. `None` if its program is not installed.
    pub(crate) fn start(&self, path: PacketPath, programs: &Programs, hops: usize) -> Result<Option<Tunnel>> {
        let number = self.next.replace(self.next.get() + 1);
        let dir = made(&self.dir.join(format!("{number:03}-{}-{hops}", path.name())))?;
        let mut tunnel =
            Tunnel { contender: path.name(), hops, far: Ipv4Addr::new(10, 30, number, 1), programs: Vec::new() };
        match path {
            PacketPath::Bare => tunnel.far = end(hops - 1, 2),
            PacketPath::WireGuard => match &programs.wireguard {
                Some(binary) => tunnel.programs = self.wireguard(binary, number, hops, &dir)?,
                None => return Ok(None),
            },
            PacketPath::Udp => tunnel.programs = self.udp(&programs.hermes, number, hops, &dir)?,
            PacketPath::Hermes(version) => {
                tunnel.programs = self.hermes(&programs.hermes, version, number, hops, &dir)?
            }
        }
        self.answers(&tunnel).with_context(|| format!("{}; see {}", path.name(), dir.display()))?;
        Ok(Some(tunnel))
    }

    fn answers(&self, tunnel: &Tunnel) -> Result<()> {
        let deadline = Instant::now() + UP;
        while Instant::now() < deadline {
            let far = tunnel.far.to_string();
            if self.run(0, &["ping", "-n", "-c", "1", "-W", "0.5", &far]).is_ok() {
                return Ok(());
            }
        }
        bail!("no echo came back within {UP:?}")
    }

    /// Starts a node on each machine, the far one first.
    fn hermes(&self, binary: &Path, version: &str, number: u8, hops: usize, dir: &Path) -> Result<Vec<Running>> {
        let mut programs = Vec::new();
        for location in (0..=hops).rev() {
            let text = self.document(location, hops, version, number, dir);
            let path = dir.join(format!("place-{location}.yaml"));
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            let program = Program::new(&format!("place-{location}"), binary, dir).args(["proxy", "--config"]);
            programs.push(program.args([&path]).within(Some(&self.places[location])).start()?);
        }
        Ok(programs)
    }

    fn document(&self, location: usize, hops: usize, version: &str, number: u8, dir: &Path) -> String {
        let files = &self.identities[location];
        let [cert, key, ca] = [&files.cert, &files.key, &files.ca].map(|p| p.display().to_string());
        let port = 9000 + u16::from(number);
        let log = dir.join(format!("place-{location}.access.json"));
        let mut text = format!(
            "node: place-{location}\nrole: standalone\nadmin: 127.0.0.1:{}\naccess-log: {}\n\
             identity: {{cert: {cert}, key: {key}, ca: {ca}}}\nlisteners:\n",
            port + 500,
            log.display()
        );
        let _ = if location == 0 {
            writeln!(
                text,
                "- {{name: device, protocol: tun, device: near{number}, address: [10.20.{number}.2], \
                 capture: [10.30.{number}.1/32]}}"
            )
        } else {
            writeln!(
                text,
                "- {{name: overlay, bind: \"0.0.0.0:{port}\", protocol: http, http3: true, tls: {{client: required}}}}"
            )
        };
        let _ = if location == hops {
            writeln!(
                text,
                "routes:\n- {{name: gateway, match: {{kind: ip}}, \
                 terminate: {{tun: far{number}, address: [10.30.{number}.1], assign: [10.20.{number}.0/24]}}}}"
            )
        } else {
            let next = SocketAddr::from((end(location, 2), port));
            writeln!(
                text,
                "routes:\n- {{name: on, match: {{kind: ip}}, upstream: next}}\nupstreams:\n\
                 - {{name: next, protocol: {version}, endpoints: [\"{next}\"], tls: {{node: place-{}}}}}",
                location + 1
            )
        };
        text
    }

    /// Starts a device whose packets go to the far node in UDP; the kernels in between forward them.
    fn udp(&self, binary: &Path, number: u8, hops: usize, dir: &Path) -> Result<Vec<Running>> {
        let port = 9000 + u16::from(number);
        let text = format!(
            "node: far\nadmin: 127.0.0.1:{}\naccess-log: {}\nlisteners:\n\
             - {{name: packets, bind: \"0.0.0.0:{port}\", protocol: ip, network: 10.30.{number}.1/32, \
             peers: [{{from: {}, address: 10.20.{number}.2}}]}}\n\
             routes:\n- {{name: gateway, match: {{kind: ip}}, \
             terminate: {{tun: far{number}, address: [10.30.{number}.1], assign: [10.20.{number}.0/24]}}}}\n",
            port + 500,
            dir.join("far.access.json").display(),
            end(0, 1)
        );
        let path = dir.join("far.yaml");
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        let far = Program::new("far", binary, dir).args(["proxy", "--config"]).args([&path]);
        let far = far.within(Some(&self.places[hops])).start()?;
        let (device, address) = (format!("near{number}"), format!("10.20.{number}.2"));
        let to = format!("10.30.{number}.1/32={}:{port}", end(hops - 1, 2));
        let near =
            Program::new("near", binary, dir).args(["tun", "--device", &device, "--address", &address, "--to", &to]);
        Ok(vec![far, near.within(Some(&self.places[0])).start()?])
    }

    /// Starts both ends; the kernels in between forward the datagrams.
    fn wireguard(&self, binary: &Path, number: u8, hops: usize, dir: &Path) -> Result<Vec<Running>> {
        let sides = [(0, "near", format!("10.20.{number}.2")), (hops, "far", format!("10.30.{number}.1"))];
        let mut programs = Vec::new();
        let mut public = Vec::new();
        // The device names must be unique, since the control sockets of all namespaces share one directory.
        let device = |name: &str| format!("wg-{name}{number}");
        for (location, name, _) in &sides {
            let device = device(name);
            let program = Program::new(name, binary, dir).args(["--foreground", &device]);
            programs.push(program.env("LOG_LEVEL", "error").within(Some(&self.places[*location])).start()?);
            let key = dir.join(format!("{name}.key"));
            let script = format!("umask 77; wg genkey > {0}; wg pubkey < {0}", key.display());
            public.push(self.run(*location, &["sh", "-c", &script])?.trim().to_owned());
        }
        let port = (9000 + u16::from(number)).to_string();
        let ends = [end(hops - 1, 2), end(0, 1)];
        for (side, (location, name, address)) in sides.iter().enumerate() {
            let (other, device) = (&sides[1 - side], device(name));
            self.until_there(*location, &device)?;
            let key = dir.join(format!("{name}.key")).display().to_string();
            let peer = SocketAddr::from((ends[side], 9000 + u16::from(number))).to_string();
            let allowed = format!("{}/32", other.2);
            let words = ["wg", "set", &device, "listen-port", &port, "private-key", &key, "peer", &public[1 - side]];
            self.run(*location, &[&words[..], &["allowed-ips", &allowed, "endpoint", &peer]].concat())?;
            self.places[*location].ip(&["addr", "add", &format!("{address}/32"), "dev", &device])?;
            self.places[*location].ip(&["link", "set", &device, "up"])?;
            self.places[*location].ip(&["route", "add", &allowed, "dev", &device, "congctl", "cubic"])?;
        }
        Ok(programs)
    }

    /// Waits for the device and its control socket, which wireguard-go creates after its start.
    fn until_there(&self, location: usize, device: &str) -> Result<()> {
        let deadline = Instant::now() + UP;
        while self.run(location, &["wg", "show", device]).is_err() {
            if Instant::now() > deadline {
                bail!("{device} did not come up");
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn run(&self, location: usize, words: &[&str]) -> Result<String> {
        let output = Command::new("ip").args(["netns", "exec", self.places[location].name()]).args(words).output();
        let output = output.with_context(|| format!("running {}", words.join(" ")))?;
        if !output.status.success() {
            bail!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The destination of a load, the address of its sink, and the namespace of the sink.
    pub(crate) fn sink(&self, tunnel: &Tunnel) -> (SocketAddr, SocketAddr, Option<String>) {
        let at = SocketAddr::from((tunnel.far, SINK));
        (at, at, Some(self.places[tunnel.hops].name().to_owned()))
    }

    /// Puts a load on a tunnel and waits for the result.
    pub(crate) fn measure(&self, tunnel: &Tunnel, load: Load) -> Result<Measured> {
        let watch = tunnel.programs.iter().map(Running::pid).collect();
        let program = load_program("load", Task { load, watch }, &self.dir)?.within(Some(&self.places[0]));
        let (outcome, work_ms) = under(&program)?;
        let proxies = outcome.watched_cpu.iter().fold(0.0, |sum, cpu| sum + cpu);
        Ok(Measured { proxies, origin: 0.0, work_ms, outcome })
    }

    /// Frames that delayed links have dropped; the expected number is zero.
    pub(crate) fn dropped(&self) -> u64 {
        self.links.iter().map(link::overflown).sum()
    }
}

/// The address of one end of a link; side 0 is its network.
fn end(link: usize, side: u8) -> Ipv4Addr {
    let link = u8::try_from(link).unwrap_or(u8::MAX);
    Ipv4Addr::new(10, 77, link, side)
}

/// The far end's address, for an echo.
pub(crate) fn target(tunnel: &Tunnel) -> IpAddr {
    tunnel.far.into()
}
