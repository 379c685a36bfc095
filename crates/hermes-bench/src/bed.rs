//! The test bed: namespaces, certificates, origins, and a way to put loads on what stands between.
//!
//! In: which kind of bed. Out: [`Bed`], which makes plans for contenders and measures chains. All of it is gone when
//! the bed is dropped.

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
    chain::{Chain, Origins, Place, Plan, Ports, SECURE_NAME, Security, Shape},
    contender::Contender,
    machine,
    settings::{PAYLOAD, PYTHON_BACKLOG, RTT_MS},
};

/// Listening ports are below the ephemeral ones, so that no client takes a proxy's.
const FIRST_PORT: u16 = 2000;
const EPHEMERAL: &str = "10000 65000";
/// The ends of the delayed link.
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// Longest load: a burst that waits out its patience, and then some.
const LOAD: Duration = Duration::from_secs(120);

/// What stands around a measurement.
pub(crate) struct Bed {
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

/// What a load came to, with the CPU time sorted out.
#[derive(Debug)]
pub(crate) struct Measured {
    /// As the load tells it.
    pub(crate) outcome: Outcome,
    /// CPU seconds of all proxies of the chain.
    pub(crate) proxies: f64,
    /// CPU seconds of the origins.
    pub(crate) origin: f64,
    /// How fast the machine was just before: see [`machine::work_ms`].
    pub(crate) work_ms: f64,
}

impl Bed {
    /// Everything in one namespace, over its loopback. `pinned`: proxies and load on different cores.
    pub(crate) fn loopback(dir: &Path, pinned: bool) -> Result<Self> {
        let cores = if pinned { machine::Cores::apart()? } else { machine::Cores::default() };
        let dir = made(&dir.join(if pinned { "pinned" } else { "free" }))?;
        let near = namespace()?;
        let identities = identities(&dir, IpAddr::V4(Ipv4Addr::LOCALHOST))?;
        let origin = fast_origin(&near, &dir, &cores.origin)?;
        Self::around(origin, None, near, None, identities, cores, dir)
    }

    /// Two namespaces with a delayed link between, and the paper's Python server at the far end.
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
            serde_json::from_str(&line).with_context(|| format!("what the origins said: {line}"))?;
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

    /// Starts a contender's path. `None` when it has none of this kind.
    pub(crate) fn start(&self, contender: &dyn Contender, shape: Shape, security: Security) -> Result<Option<Chain>> {
        let number = self.next_chain.replace(self.next_chain.get() + 1);
        let dir = made(&self.dir.join(format!("{number:03}-{}-{}", contender.name(), security.name())))?;
        let far_namespace = self.far.as_ref().unwrap_or(&self.near);
        let addresses = if self.far.is_some() { (NEAR, FAR) } else { (Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST) };
        let plan = Plan {
            shape,
            security,
            near: Place { namespace: Some(&self.near), address: addresses.0, cpus: &self.cores.near },
            far: Place { namespace: Some(far_namespace), address: addresses.1, cpus: &self.cores.far },
            origins: &self.origins,
            identities: &self.identities,
            ports: self.ports(),
            dir: &dir,
        };
        contender.start(&plan).with_context(|| format!("starting {}; see {}", contender.name(), dir.display()))
    }

    /// Puts a load on a path and waits for what comes of it.
    pub(crate) fn measure(&self, chain: &Chain, load: Load) -> Result<Measured> {
        let (outcome, work_ms) = under(&self.load_program("load", &load, chain)?)?;
        chain.trim_logs();
        Ok(self.sorted(outcome, work_ms))
    }

    /// Puts idle clients on a path, calls `look` while they are there, and lets them go.
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

    /// Where TLS clients find the CA.
    pub(crate) fn ca(&self) -> &Path {
        &self.identities[0].ca
    }

    /// Where the load opens its sinks: TCP, UDP.
    pub(crate) fn sinks(&self) -> (SocketAddr, SocketAddr) {
        (self.origins.sink, self.origins.flood)
    }

    /// Frames that the delayed link has delivered and dropped.
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

    /// The origin was watched last, the proxies before it.
    fn sorted(&self, mut outcome: Outcome, work_ms: f64) -> Measured {
        let origin = outcome.watched_cpu.pop().unwrap_or_default();
        Measured { proxies: outcome.watched_cpu.iter().fold(0.0, |sum, cpu| sum + cpu), origin, work_ms, outcome }
    }

    fn ports(&self) -> Ports {
        let next = || {
            let port = self.next_port.get();
            // The namespace is ours alone and old chains have ended, so that numbers may come round again.
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

/// The process that does a task.
pub(crate) fn load_program(name: &str, task: Task, dir: &Path) -> Result<Program> {
    let task = serde_json::to_string(&task)?;
    let binary = std::env::current_exe().context("where this program is")?;
    Ok(Program::new(name, binary, dir).args(["load", &task]))
}

/// Runs a load's process to its end: the outcome, and how fast the machine was just before.
pub(crate) fn under(program: &Program) -> Result<(Outcome, f64)> {
    let work_ms = machine::work_ms();
    let output = program.start()?.wait_output(LOAD)?;
    // An idle load prints `ready` before; the outcome is the last line.
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

/// Identities of both proxies; the TLS origin's lies beside them.
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
    let binary = std::env::current_exe().context("where this program is")?;
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
