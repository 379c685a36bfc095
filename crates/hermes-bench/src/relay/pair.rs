//! `relay-pair`: two clients and a relay on the host between them, beside a bare relay, ping and a bare forwarder (HTTP-RS,
//! Table 1 and Figure 7).
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table: round-trip times of small publications, and the
//! throughput of large ones with the CPU time of the server. Clients and host are namespaces. Contenders take turns. Never: a
//! round in which a publication is missing.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Port, Program, Running};
use serde::Serialize;

use super::client::{Publication, TIMEOUT, await_bytes, connect, ended, ending, publish_all, read_all, subscribe};
use super::voice;
use crate::pep::{cpu_of, mean_and_median};

const ALICE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const HOST_BY_ALICE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const HOST_BY_BOB: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const BOB: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const HERMES_PORT: u16 = 8001;
const BARE_PORT: u16 = 8002;
const FORWARDER_PORT: u16 = 8003;
const BOB_PORT: u16 = 8004;
/// The most publications of a size, so that small ones take no longer than large ones.
const MAX_UNITS: usize = 50_000;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct PairOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Round trips of a round.
    #[arg(long, default_value_t = 2000)]
    trips: usize,
    /// Bytes of a small publication.
    #[arg(long, default_value_t = 160)]
    bytes: usize,
    /// Bytes of a round with large publications.
    #[arg(long, default_value_t = 1 << 30)]
    total: usize,
    /// Bytes of a large publication.
    #[arg(long, default_value_t = 1 << 20)]
    unit: usize,
    /// Rate of both links for a second transfer of each round, as `tc` writes it. The paper's links have 10 Gbit/s.
    #[arg(long, default_value = "10gbit")]
    link: String,
    /// Sizes whose round trips and throughput are measured in each round, in bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [160, 1_000, 10_000, 100_000, 1_000_000, 10_000_000])]
    sizes: Vec<usize>,
    /// Round trips of a size.
    #[arg(long, default_value_t = 200)]
    size_trips: usize,
    /// Seconds of a voice stream after the rounds.
    #[arg(long, default_value_t = 120)]
    voice: u64,
    /// Rounds of each contender.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// The figures of a contender.
#[derive(Debug, Default, Serialize)]
struct Figures {
    /// Medians of the rounds, in milliseconds.
    round_trip_ms: Vec<f64>,
    /// Gigabits a second of content.
    gbit_s: Vec<f64>,
    /// The same over links of a limited rate.
    limited_gbit_s: Vec<f64>,
    /// CPU seconds of the server for each gigabyte.
    cpu_s_a_gb: Vec<f64>,
    /// By the size of a publication.
    sizes: BTreeMap<usize, OfSize>,
}

/// The figures of a contender with publications of one size.
#[derive(Debug, Default, Serialize)]
struct OfSize {
    /// Medians of the rounds, in milliseconds. Empty for the forwarder.
    round_trip_ms: Vec<f64>,
    gbit_s: Vec<f64>,
}

/// The namespaces, and the servers on the host.
struct Testbed {
    alice: Namespace,
    host: Namespace,
    bob: Namespace,
    /// The device of Alice, and that of the host towards Bob.
    devices: [String; 2],
    hermes: Running,
    bare: Running,
    forwarder: Running,
}

impl Testbed {
    fn new(options: &PairOptions, dir: &Path) -> Result<Self> {
        let [alice, host, bob] = [Namespace::new()?, Namespace::new()?, Namespace::new()?];
        let [by_alice, _] = alice.join(ALICE, &host, HOST_BY_ALICE)?;
        let [by_host, _] = host.join(HOST_BY_BOB, &bob, BOB)?;
        alice.ip(&["route", "add", "default", "via", &HOST_BY_ALICE.to_string()])?;
        bob.ip(&["route", "add", "default", "via", &HOST_BY_BOB.to_string()])?;
        host.sysctl("net/ipv4/ip_forward", "1")?;
        let document = format!(
            "node: relay\naccess-log: off\nlisteners:\n- {{name: web, bind: '0.0.0.0:{HERMES_PORT}', protocol: http}}\n\
             routes:\n\
             - {{name: cut, match: {{path: '/cut/*'}}, relay: {{mode: reliable, unit: 64MiB, cut-through: true}}}}\n\
             - {{name: all, match: {{path: '/*'}}, relay: {{mode: reliable, unit: 64MiB}}}}\n"
        );
        let file = dir.join("relay.yaml");
        std::fs::write(&file, document)?;
        let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
        let hermes = Program::new("relay", hermes, dir).args(["proxy", "--config"]).args([&file]);
        let bare = |name: &str, arguments: &[String]| -> Result<Program> {
            Ok(Program::new(name, std::env::current_exe()?, dir).args(["bare", name]).args(arguments))
        };
        let relay = bare("relay", &[format!("0.0.0.0:{BARE_PORT}")])?;
        let forwarder = bare("forwarder", &[format!("0.0.0.0:{FORWARDER_PORT}"), format!("{BOB}:{BOB_PORT}")])?;
        let start = |program: Program, port: u16| -> Result<Running> {
            let mut server = program.within(Some(&host)).start()?;
            server.wait_listening(&[Port::Tcp(port)], TIMEOUT)?;
            Ok(server)
        };
        let hermes = start(hermes, HERMES_PORT)?;
        let (bare, forwarder) = (start(relay, BARE_PORT)?, start(forwarder, FORWARDER_PORT)?);
        Ok(Self { hermes, bare, forwarder, alice, host, bob, devices: [by_alice, by_host] })
    }

    /// Limits the rate of both links in the direction of the transfers. `None`: no longer.
    fn limit(&self, rate: Option<&str>) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        for (namespace, device) in [&self.alice, &self.host].into_iter().zip(&self.devices) {
            let words = match rate {
                Some(rate) => {
                    vec!["add", "dev", device, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "5ms"]
                }
                None => vec!["del", "dev", device, "root"],
            };
            runtime.block_on(namespace.output(&[&["tc", "qdisc"], &words[..]].concat()))?;
        }
        Ok(())
    }
}

/// Publishes to one channel, and waits for what arrives on another one.
struct Player {
    publisher: TcpStream,
    publication: Publication,
    responses: Vec<u8>,
    subscriber: TcpStream,
    arrived: Vec<u8>,
}

impl Player {
    fn new(address: SocketAddr, from: &str, to: &str, bytes: usize) -> Result<Self> {
        let (subscriber, publisher) = (subscribe(address, from)?, connect(address)?);
        let publication = Publication::new(to, "reliable", bytes);
        Ok(Self { publisher, publication, responses: Vec::new(), subscriber, arrived: Vec::new() })
    }

    fn send(&mut self, number: usize) -> Result<()> {
        Ok(self.publisher.write_all(self.publication.numbered(number))?)
    }

    fn receive(&mut self, number: usize) -> Result<()> {
        await_bytes(&mut self.subscriber, &mut self.arrived, &ending(number))
    }

    /// Reads the response to the latest publication.
    fn confirm(&mut self) -> Result<()> {
        await_bytes(&mut self.publisher, &mut self.responses, b"\r\n\r\n")
    }
}

/// The median round-trip time over a relay.
fn round_trips(testbed: &Testbed, port: u16, trips: usize, bytes: usize) -> Result<f64> {
    let (ready, is_ready) = std::sync::mpsc::channel();
    let bob = testbed.bob.spawn_thread(move || -> Result<_> {
        let mut player = Player::new((HOST_BY_BOB, port).into(), "/to-bob", "/to-alice", bytes)?;
        ready.send(())?;
        for number in 0..trips {
            player.receive(number)?;
            player.send(number)?;
            player.confirm()?;
        }
        Ok(())
    })?;
    let alice = testbed.alice.spawn_thread(move || -> Result<_> {
        let mut player = Player::new((HOST_BY_ALICE, port).into(), "/to-alice", "/to-bob", bytes)?;
        is_ready.recv_timeout(TIMEOUT)?;
        let mut times = Vec::new();
        for number in 0..trips {
            let sent = Instant::now();
            player.send(number)?;
            player.receive(number)?;
            times.push(sent.elapsed().as_secs_f64() * 1e3);
            player.confirm()?;
        }
        Ok(mean_and_median(&times).1)
    })?;
    let times = ended(alice);
    ended(bob)?;
    times
}

/// The median round-trip time of ping from Alice over the host to Bob.
fn ping(testbed: &Testbed, options: &PairOptions) -> Result<f64> {
    let count = options.trips.to_string();
    let bob = BOB.to_string();
    let words = ["ping", "-n", "-i", "0.001", "-s", &options.bytes.to_string(), "-c", &count, &bob];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let printed = runtime.block_on(testbed.alice.output(&words))?;
    let times = printed.lines().filter_map(|line| line.split("time=").nth(1)?.split(' ').next()?.parse().ok());
    let times: Vec<f64> = times.collect();
    ensure!(times.len() == options.trips, "{} of {count} pings came back", times.len());
    Ok(mean_and_median(&times).1)
}

/// A transfer from Alice to Bob.
#[derive(Clone, Copy)]
struct Transfer {
    port: u16,
    path: &'static str,
    /// Bytes of a publication.
    unit: usize,
    count: usize,
}

impl Transfer {
    fn new(port: u16, path: &'static str, unit: usize, total: usize) -> Self {
        Self { port, path, unit, count: total / unit }
    }

    /// The seconds that it takes.
    fn run(self, testbed: &Testbed) -> Result<f64> {
        let Self { port, path, unit, count } = self;
        let (ready, is_ready) = std::sync::mpsc::channel();
        let bob = testbed.bob.spawn_thread(move || -> Result<_> {
            let mut stream = if port == FORWARDER_PORT {
                let listener = TcpListener::bind((BOB, BOB_PORT))?;
                ready.send(())?;
                listener.accept()?.0
            } else {
                let stream = subscribe((HOST_BY_BOB, port).into(), path)?;
                ready.send(())?;
                stream
            };
            read_all(&mut stream, unit * count)
        })?;
        let alice = testbed.alice.spawn_thread(move || -> Result<_> {
            is_ready.recv_timeout(TIMEOUT)?;
            let mut stream = connect((HOST_BY_ALICE, port).into())?;
            if port != FORWARDER_PORT {
                return publish_all(&mut stream, path, unit, count);
            }
            let begun = Instant::now();
            let content = vec![b'x'; unit];
            for _ in 0..count {
                stream.write_all(&content)?;
            }
            Ok(begun)
        })?;
        let (begun, ended) = (ended(alice)?, ended(bob)?);
        Ok((ended - begun).as_secs_f64())
    }

    /// The gigabits of content in a second.
    fn rate(self, testbed: &Testbed) -> Result<f64> {
        Ok((self.unit * self.count) as f64 * 8e-9 / self.run(testbed)?)
    }
}

/// Runs the measurements.
///
/// # Errors
/// A program does not start, a publication is missing, or the process is not root.
pub(crate) fn run(options: &PairOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let dir = tempfile::tempdir()?;
    let testbed = Testbed::new(options, dir.path())?;
    let mut all: BTreeMap<&str, Figures> = BTreeMap::new();
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        one_round(&testbed, options, &mut all)?;
        for size in &options.sizes {
            sizes_of_one_round(&testbed, options, *size, &mut all).with_context(|| format!("{size} bytes"))?;
        }
    }
    eprintln!("{} s of voice", options.voice);
    let voice = voice::measure(&testbed.alice, &testbed.bob, voice_by_relay(), (BOB, BOB_PORT).into(), options.voice)?;
    let PairOptions { link, rounds, .. } = options;
    println!("contender            round trip ms  Gbit/s  CPU s/GB  Gbit/s over {link}, medians of {rounds}");
    for (name, figures) in &all {
        let median = |values: &[f64]| mean_and_median(values).1;
        let (trip, rate, cpu) = (median(&figures.round_trip_ms), median(&figures.gbit_s), median(&figures.cpu_s_a_gb));
        let limited = median(&figures.limited_gbit_s);
        println!("{name:20} {trip:13.3} {rate:7.2} {cpu:9.2} {limited:11.2}");
    }
    print_sizes(options, &all);
    voice::print(&voice);
    let PairOptions { trips, bytes, total, unit, .. } = options;
    let report = serde_json::json!({
        "trips": trips, "bytes": bytes, "total": total, "unit": unit, "link": link, "contenders": all, "voice": voice,
    });
    let file = options.out.join("relay-pair.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

fn voice_by_relay() -> [SocketAddr; 2] {
    [(HOST_BY_ALICE, HERMES_PORT).into(), (HOST_BY_BOB, HERMES_PORT).into()]
}

fn one_round(testbed: &Testbed, options: &PairOptions, all: &mut BTreeMap<&str, Figures>) -> Result<()> {
    for (name, port) in [("hermes", HERMES_PORT), ("bare relay", BARE_PORT)] {
        let median = round_trips(testbed, port, options.trips, options.bytes).context(name)?;
        all.entry(name).or_default().round_trip_ms.push(median);
    }
    all.entry("ping").or_default().round_trip_ms.push(ping(testbed, options)?);
    for (name, port, server, path) in [
        ("hermes", HERMES_PORT, &testbed.hermes, "/large"),
        ("hermes, cut-through", HERMES_PORT, &testbed.hermes, "/cut/large"),
        ("bare relay", BARE_PORT, &testbed.bare, "/large"),
        ("forwarder", FORWARDER_PORT, &testbed.forwarder, ""),
    ] {
        let cpu = cpu_of(server.pid())?;
        let transfer = Transfer::new(port, path, options.unit, options.total);
        let rate = transfer.rate(testbed).context(name)?;
        let figures = all.entry(name).or_default();
        figures.gbit_s.push(rate);
        figures.cpu_s_a_gb.push((cpu_of(server.pid())? - cpu) / (options.total as f64 * 1e-9));
        testbed.limit(Some(&options.link))?;
        let rate = transfer.rate(testbed).context(name)?;
        testbed.limit(None)?;
        figures.limited_gbit_s.push(rate);
    }
    Ok(())
}

fn sizes_of_one_round(
    testbed: &Testbed,
    options: &PairOptions,
    size: usize,
    all: &mut BTreeMap<&str, Figures>,
) -> Result<()> {
    let total = options.total.min(size * MAX_UNITS);
    for (name, port) in [("hermes", HERMES_PORT), ("bare relay", BARE_PORT), ("forwarder", FORWARDER_PORT)] {
        let figures = all.entry(name).or_default().sizes.entry(size).or_default();
        if port != FORWARDER_PORT {
            figures.round_trip_ms.push(round_trips(testbed, port, options.size_trips, size).context(name)?);
        }
        figures.gbit_s.push(Transfer::new(port, "/size", size, total).rate(testbed).context(name)?);
    }
    Ok(())
}

fn print_sizes(options: &PairOptions, all: &BTreeMap<&str, Figures>) {
    println!("contender                bytes  round trip ms  Gbit/s, medians of {}", options.rounds);
    for (name, figures) in all {
        for (size, of_size) in &figures.sizes {
            let trip = match of_size.round_trip_ms.is_empty() {
                true => "-".to_owned(),
                false => format!("{:.3}", mean_and_median(&of_size.round_trip_ms).1),
            };
            println!("{name:20} {size:9} {trip:>14} {:7.2}", mean_and_median(&of_size.gbit_s).1);
        }
    }
}
