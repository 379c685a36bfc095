//! `relay-receivers`: what many receivers and many pairs get from a relay, and what a relaying node beside the receivers saves (HTTP-RS,
//! Figure 8a to c).
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table of throughput. The site of the receivers has a slow link
//! to the relay, and a node of its own. All publications are reliable. Never: a receiver that lacks one.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hermes_testkit::link::{self, Conditions, Link};
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Port, Program, Running};
use serde::Serialize;

use super::client::{Publication, TIMEOUT, connect, ended, publish_all, read_all, read_head, subscribe};
use crate::pep::{cpu_of, mean_and_median};

const RELAY: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const SITE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const PORT: u16 = 8000;
/// How often a publisher asks whether all subscribers are there.
const ASK_INTERVAL: Duration = Duration::from_millis(50);

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReceiversOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Bytes that each receiver gets.
    #[arg(long, default_value_t = 50_000_000)]
    total: usize,
    /// Bytes of a publication.
    #[arg(long, default_value_t = 50_000)]
    unit: usize,
    /// Bits a second of the link between the site and the relay.
    #[arg(long, default_value_t = 100_000_000)]
    link: u64,
    /// Milliseconds of that link in each direction.
    #[arg(long, default_value_t = 20)]
    one_way: u64,
    /// Receivers at the site.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 5, 10])]
    at_site: Vec<usize>,
    /// Receivers, and pairs of sender and receiver, beside the relay.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 5, 10, 20, 50])]
    beside: Vec<usize>,
    /// Rounds of each case.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// A measured case, with its number of receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    /// Receivers at the site subscribe at the relay.
    OverLink(usize),
    /// They subscribe at the node of the site.
    OverNode(usize),
    /// Receivers beside the relay, and one sender.
    Receivers(usize),
    /// Pairs beside the relay, with a channel each.
    Pairs(usize),
}

impl Case {
    fn name(self) -> String {
        match self {
            Self::OverLink(count) => format!("site, at the relay, {count}"),
            Self::OverNode(count) => format!("site, at its node, {count}"),
            Self::Receivers(count) => format!("receivers, {count}"),
            Self::Pairs(count) => format!("pairs, {count}"),
        }
    }

    fn receivers(self) -> usize {
        match self {
            Self::OverLink(count) | Self::OverNode(count) | Self::Receivers(count) | Self::Pairs(count) => count,
        }
    }
}

/// The figures of a case, in megabits a second of content.
#[derive(Debug, Default, Serialize)]
struct Figures {
    /// The mean of the receivers.
    mbit_s_each: Vec<f64>,
    /// All receivers together, until the last one has everything.
    mbit_s_all: Vec<f64>,
    /// CPU seconds of the relay for each gigabyte that all receivers got.
    cpu_s_a_gb: Vec<f64>,
}

struct Testbed {
    world: Namespace,
    site: Namespace,
    relay: Running,
    _node: Running,
    _link: Link,
}

impl Testbed {
    fn new(options: &ReceiversOptions, dir: &Path) -> Result<Self> {
        let (world, site) = (Namespace::new()?, Namespace::new()?);
        let one_way = Duration::from_millis(options.one_way);
        let conditions = Conditions { one_way, rate: Some(options.link), ..Conditions::default() };
        let link = link::join((&world, RELAY), (&site, SITE), [conditions.clone(), conditions], Instant::now())?;
        let start = |name: &str, namespace: &Namespace, relay: &str, upstreams: &str| -> Result<Running> {
            let document = format!(
                "node: {name}\naccess-log: off\n\
                 listeners:\n- {{name: web, bind: '0.0.0.0:{PORT}', protocol: http, trust: 10.1.0.0/24}}\n\
                 routes:\n- {{name: all, match: {{path: '/*'}}, relay: {{mode: reliable{relay}}}}}\n{upstreams}"
            );
            let file = dir.join(format!("{name}.yaml"));
            std::fs::write(&file, document)?;
            let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
            let program = Program::new(name, hermes, dir).args(["proxy", "--config"]).args([&file]);
            let mut node = program.within(Some(namespace)).start()?;
            node.wait_listening(&[Port::Tcp(PORT)], TIMEOUT)?;
            Ok(node)
        };
        let relay = start("relay", &world, "", "")?;
        let upstreams =
            format!("upstreams:\n- {{name: relay, protocol: h2, overlay: true, endpoints: ['{RELAY}:{PORT}']}}\n");
        let node = start("node", &site, ", upstream: relay", &upstreams)?;
        Ok(Self { world, site, relay, _node: node, _link: link })
    }

    /// Sends everything to all receivers of a case.
    fn measure(&self, options: &ReceiversOptions, case: Case, figures: &mut Figures) -> Result<()> {
        let local = (Ipv4Addr::LOCALHOST, PORT).into();
        let (home, address): (_, SocketAddr) = match case {
            Case::OverLink(_) => (&self.site, (RELAY, PORT).into()),
            Case::OverNode(_) => (&self.site, local),
            Case::Receivers(_) | Case::Pairs(_) => (&self.world, local),
        };
        let receivers = case.receivers();
        let channels = if matches!(case, Case::Pairs(_)) { receivers } else { 1 };
        let (unit, count) = (options.unit, options.total / options.unit);
        let cpu = cpu_of(self.relay.pid())?;
        let channel = |number: usize| format!("/{}-{}", case.name().replace([' ', ','], "-"), number % channels);
        let readers: Vec<_> = (0..receivers)
            .map(|number| {
                let path = channel(number);
                Ok(home.spawn_thread(move || read_all(&mut subscribe(address, &path)?, unit * count))?)
            })
            .collect::<Result<_>>()?;
        let writers: Vec<_> = (0..channels)
            .map(|number| {
                let path = channel(number);
                Ok(self.world.spawn_thread(move || {
                    let mut stream = connect(local)?;
                    await_subscribers(&mut stream, &path, receivers / channels)?;
                    publish_all(&mut stream, &path, unit, count)
                })?)
            })
            .collect::<Result<_>>()?;
        let begun = writers.into_iter().map(ended).collect::<Result<Vec<_>>>()?;
        let ends = readers.into_iter().map(ended).collect::<Result<Vec<_>>>()?;
        let (first, last) = (begun.iter().min().context("no sender")?, ends.iter().max().context("no receiver")?);
        let megabits = (unit * count) as f64 * 8e-6;
        let rates: Vec<f64> = ends
            .iter()
            .enumerate()
            .map(|(number, end)| megabits / (*end - begun[number % channels]).as_secs_f64())
            .collect();
        figures.mbit_s_each.push(mean_and_median(&rates).0);
        figures.mbit_s_all.push(megabits * receivers as f64 / (*last - *first).as_secs_f64());
        let gigabytes = (unit * count * receivers) as f64 * 1e-9;
        figures.cpu_s_a_gb.push((cpu_of(self.relay.pid())? - cpu) / gigabytes);
        Ok(())
    }
}

/// Publishes almost nothing until all subscribers get it.
#[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
fn await_subscribers(stream: &mut TcpStream, path: &str, count: usize) -> Result<()> {
    let begun = Instant::now();
    let mut probe = Publication::new(path, "reliable", 9);
    loop {
        stream.write_all(probe.numbered(0))?;
        let head = read_head(stream)?;
        if head.contains(&format!("hermes-delivered: {count}\r\n")) {
            return Ok(());
        }
        ensure!(begun.elapsed() < TIMEOUT, "{count} subscribers are missing: {head}");
        std::thread::sleep(ASK_INTERVAL);
    }
}

/// Runs the measurements.
///
/// # Errors
/// A program does not start, a publication is missing, or the process is not root.
pub(crate) fn run(options: &ReceiversOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let testbed = Testbed::new(options, dir.path())?;
    let at_site = options.at_site.iter().flat_map(|count| [Case::OverLink(*count), Case::OverNode(*count)]);
    let beside = options.beside.iter().flat_map(|count| [Case::Receivers(*count), Case::Pairs(*count)]);
    let cases: Vec<Case> = at_site.chain(beside).collect();
    let mut all: BTreeMap<Case, Figures> = BTreeMap::new();
    for round in 0..options.rounds {
        for case in &cases {
            eprintln!("round {} of {}: {}", round + 1, options.rounds, case.name());
            testbed.measure(options, *case, all.entry(*case).or_default()).with_context(|| case.name())?;
        }
    }
    println!("case                        Mbit/s each  Mbit/s all  CPU s/GB, medians of {}", options.rounds);
    for (case, figures) in &all {
        let median = |values: &[f64]| mean_and_median(values).1;
        let (each, together) = (median(&figures.mbit_s_each), median(&figures.mbit_s_all));
        println!("{:27} {each:11.1} {together:11.1} {:9.2}", case.name(), median(&figures.cpu_s_a_gb));
    }
    let ReceiversOptions { total, unit, link, one_way, .. } = options;
    let cases: BTreeMap<String, &Figures> = all.iter().map(|(case, figures)| (case.name(), figures)).collect();
    let report = serde_json::json!({
        "total": total, "unit": unit, "link-bit-s": link, "one-way-ms": one_way, "cases": cases,
    });
    let file = options.out.join("relay-receivers.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}
