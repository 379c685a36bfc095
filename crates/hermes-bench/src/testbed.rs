//! The test fixture: namespaces, certificates, origins, and functions that put a load on a path.
//!
//! In: the kind of fixture. Out: [`Testbed`], which makes plans for contenders and measures chains. Dropping the fixture removes
//! everything.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use hermes_testkit::{
    ca::{Authority, IdentityFiles, Subject},
    link::{self, Link},
    load::{Load, Outcome, Task, exchange::payload},
    netns::Namespace,
    origin::slow,
    process::{Program, Running},
};

use crate::{
    chain::{Chain, Location, Origins, Plan, Ports, SECURE_NAME, Security, Shape},
    contender::Contender,
    machine,
    settings::{PAYLOAD, PYTHON_BACKLOG, RTT_MS},
};

/// The first listening port. The ports are below the ephemeral range, so that no client takes a proxy's.
const FIRST_PORT: u16 = 2000;
const EPHEMERAL: &str = "10000 65000";
/// The ends of the delayed link.
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The limit of the longest load: a burst that waits for its timeout, with a margin.
const LOAD: Duration = Duration::from_secs(120);

/// The environment of a measurement.
pub(crate) struct Testbed {
    // Order matters: fields are dropped from the first to the last.
    origin: Running,
    link: Option<Link>,
    near: Namespace,
    far: Option<Namespace>,
    origins: Origins,
    identities: [IdentityFiles; 2],
    cores: machine::Cores,
    next_port: Cell<u16>,
    next_chain: Cell<u32>,
    dir: PathBuf,
}

/// The result of a load, with the CPU time by process group.
#[derive(Debug)]
pub(crate) struct Measured {
    /// The outcome that the load reports.
    pub(crate) outcome: Outcome,
    /// CPU seconds of all proxies of the chain.
    pub(crate) proxies: f64,
    /// CPU seconds of the origins.
    pub(crate) origin: f64,
    /// The speed of the machine just before: see [`machine::work_ms`].
    pub(crate) work_ms: f64,
}

impl Testbed {
    /// All processes in one namespace, over its loopback. With `pinned`, proxies and load use different cores.
    pub(crate) fn loopback(dir: &Path, pinned: bool) -> Result<Self> {
        let cores = if pinned { machine::Cores::apart()? } else { machine::Cores::default() };
        let dir = made(&dir.join(if pinned { "pinned" } else { "free" }))?;
        let near = namespace()?;
        let identities = identities(&dir, IpAddr::V4(Ipv4Addr::LOCALHOST))?;
        let origin = fast_origin(&near, &dir, &cores.origin)?;
        Self::around(origin, None, near, None, identities, cores, dir)
    }

    /// Two namespaces connected by a delayed link, and the paper's Python server at the far end.
    pub(crate) fn delayed(dir: &Path) -> Result<Self> {
        let dir = made(&dir.join("delayed"))?;
        let (near, far) = (namespace()?, namespace()?);
        let link = link::delayed((&near, NEAR), (&far, FAR), Duration::from_millis(RTT_MS) / 2)?;
        let identities = identities(&dir, IpAddr::V4(FAR))?;
        let origin = slow_origin(&far, &dir)?;
        Self::around(origin, Some(link), near, Some(far), identities, machine::Cores::default(), dir)
    }

    fn around(
        mut origin: Running,
        link: Option<Link>,
        near: Namespace,
        far: Option<Namespace>,
        identities: [IdentityFiles; 2],
        cores: machine::Cores,
        dir: PathBuf,
    ) -> Result<Self> {
        let line = origin.wait_first_line(Duration::from_secs(20))?;
        let addresses: BTreeMap<String, SocketAddr> =
            serde_json::from_str(&line).with_context(|| format!("cannot parse the origins' output: {line}"))?;
        let at = |name: &str| addresses.get(name).copied().with_context(|| format!("no origin for {name}"));
        let sinks = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let origins = Origins {
            http: at("http")?,
            http2: at("http2").ok(),
            secure: at("secure")?,
            tcp: at("tcp")?,
            udp: at("udp")?,
            sink: sinks(FIRST_PORT),
            flood: sinks(FIRST_PORT + 1),
        };
        let next_port = Cell::new(FIRST_PORT + 2);
        Ok(Self { origin, link, near, far, origins, identities, cores, next_port, next_chain: Cell::new(0), dir })
    }

    /// Starts a contender's path. `None` if the contender does not support this kind.
    pub(crate) fn start(&self, contender: &dyn Contender, shape: Shape, security: Security) -> Result<Option<Chain>> {
        let number = self.next_chain.replace(self.next_chain.get() + 1);
        let dir = made(&self.dir.join(format!("{number:03}-{}-{}", contender.name(), security.name())))?;
        let far_namespace = self.far.as_ref().unwrap_or(&self.near);
        let addresses = if self.far.is_some() { (NEAR, FAR) } else { (Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST) };
        let plan = Plan {
            shape,
            security,
            near: Location { namespace: Some(&self.near), address: addresses.0, cpus: &self.cores.near },
            far: Location { namespace: Some(far_namespace), address: addresses.1, cpus: &self.cores.far },
            origins: &self.origins,
            identities: &self.identities,
            ports: self.ports(),
            dir: &dir,
        };
        contender.start(&plan).with_context(|| format!("starting {}; see {}", contender.name(), dir.display()))
    }

    /// Puts a load on a path and waits for the result.
    pub(crate) fn measure(&self, chain: &Chain, load: Load) -> Result<Measured> {
        let (outcome, work_ms) = under(&self.load_program("load", &load, chain)?)?;
        chain.trim_logs();
        Ok(self.sorted(outcome, work_ms))
    }

    /// Opens idle clients on a path, calls `look` while they are connected, and closes them.
    pub(crate) fn while_idle<T>(
        &self,
        chain: &Chain,
        load: &Load,
        look: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Measured)> {
        let work_ms = machine::work_ms();
        let mut running = self.load_program("idle", load, chain)?.start()?;
        running.wait_first_line(LOAD)?;
        let seen = look()?;
        running.close_stdin();
        let output = running.wait_output(LOAD)?;
        let outcome = serde_json::from_str(output.lines().last().unwrap_or_default())?;
        Ok((seen, self.sorted(outcome, work_ms)))
    }

    /// The CA file for TLS clients.
    pub(crate) fn ca(&self) -> &Path {
        &self.identities[0].ca
    }

    /// The addresses at which the load opens its sinks: TCP, UDP.
    pub(crate) fn sinks(&self) -> (SocketAddr, SocketAddr) {
        (self.origins.sink, self.origins.flood)
    }

    /// The number of frames that the delayed link delivered and dropped.
    pub(crate) fn frames(&self) -> Option<(u64, u64)> {
        let link = self.link.as_ref()?;
        Some((link::arrived(link), link::overflown(link)))
    }

    fn load_program(&self, name: &str, load: &Load, chain: &Chain) -> Result<Program> {
        let mut watch = chain.pids();
        watch.push(self.origin.pid());
        let program = load_program(name, Task { load: load.clone(), watch }, &self.dir)?;
        Ok(program.within(Some(&self.near)).on_cpus(&self.cores.load))
    }

    /// The last watched process is the origin; the proxies precede it.
    fn sorted(&self, mut outcome: Outcome, work_ms: f64) -> Measured {
        let origin = outcome.watched_cpu.pop().unwrap_or_default();
        Measured { proxies: outcome.watched_cpu.iter().fold(0.0, |sum, cpu| sum + cpu), origin, work_ms, outcome }
    }

    fn ports(&self) -> Ports {
        let next = || {
            let port = self.next_port.get();
            // Ports may repeat: the namespace belongs to this fixture alone, and old chains have ended.
            self.next_port.set(if port < 9990 { port + 1 } else { FIRST_PORT + 2 });
            port
        };
        Ports {
            http: next(),
            http2: next(),
            tcp: next(),
            sink: next(),
            udp: next(),
            flood: next(),
            link: next(),
            admin: [next(), next()],
        }
    }
}

/// The process that runs a task.
pub(crate) fn load_program(name: &str, task: Task, dir: &Path) -> Result<Program> {
    let task = serde_json::to_string(&task)?;
    let binary = std::env::current_exe().context("cannot find the path of this program")?;
    Ok(Program::new(name, binary, dir).args(["load", &task]))
}

/// Runs a load's process to its end. Returns the outcome, and the speed of the machine just before.
pub(crate) fn under(program: &Program) -> Result<(Outcome, f64)> {
    let work_ms = machine::work_ms();
    let output = program.start()?.wait_output(LOAD)?;
    // The outcome is the last line; an idle load prints `ready` before it.
    Ok((serde_json::from_str(output.lines().last().unwrap_or_default())?, work_ms))
}

pub(crate) fn namespace() -> Result<Namespace> {
    let namespace = Namespace::new()?;
    namespace.sysctl("net/ipv4/ip_local_port_range", EPHEMERAL)?;
    namespace.sysctl("net/core/somaxconn", "4096")?;
    Ok(namespace)
}

pub(crate) fn made(dir: &Path) -> Result<PathBuf> {
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    Ok(dir.to_owned())
}

/// The identities of both proxies; the TLS origin's is in the same directory.
fn identities(dir: &Path, address: IpAddr) -> Result<[IdentityFiles; 2]> {
    let ca = Authority::new("bench")?;
    ca.issue(&Subject::server(SECURE_NAME).with_address(address))?.write(dir, "origin")?;
    let issue = |name: &str| {
        let subject = Subject::node(name).standalone().with_dns(name).with_address(address);
        Ok::<_, anyhow::Error>(ca.issue(&subject)?.write(dir, name)?)
    };
    Ok([issue("near")?, issue("far")?])
}

fn fast_origin(namespace: &Namespace, dir: &Path, cpus: &[usize]) -> Result<Running> {
    let binary = std::env::current_exe().context("cannot find the path of this program")?;
    let program = Program::new("origin", binary, dir)
        .args(["origin", "--bind", "127.0.0.1", "--length", &PAYLOAD.to_string()])
        .args(["--cert".as_ref(), dir.join("origin.pem").as_os_str()])
        .args(["--key".as_ref(), dir.join("origin.key").as_os_str()]);
    Ok(program.within(Some(namespace)).on_cpus(cpus).start()?)
}

fn slow_origin(namespace: &Namespace, dir: &Path) -> Result<Running> {
    let file = dir.join("payload");
    fs::write(&file, payload(PAYLOAD)).context("writing the payload")?;
    let program = Program::new("python", "python3", dir)
        .args([slow::write(dir)?.as_os_str(), FAR.to_string().as_ref(), file.as_os_str()])
        .args([PYTHON_BACKLOG.to_string()])
        .args([dir.join("origin.pem"), dir.join("origin.key")]);
    Ok(program.within(Some(namespace)).start()?)
}
