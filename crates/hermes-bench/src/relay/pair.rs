//! `relay-pair`: two clients and a relay on the host between them, beside a bare relay, ping and a bare forwarder (HTTP-RS,
//! Table 1 and Figure 7).
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table: round-trip times of small publications, and the
//! throughput of large ones with the CPU time of the server. Clients and host are namespaces. Contenders take turns. Never: a
//! round in which a publication is missing.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Port, Program, Running};
use serde::Serialize;

use crate::pep::{cpu_of, mean_and_median};

const ALICE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const HOST_BY_ALICE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const HOST_BY_BOB: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const BOB: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const HERMES_PORT: u16 = 8001;
const BARE_PORT: u16 = 8002;
const FORWARDER_PORT: u16 = 8003;
const BOB_PORT: u16 = 8004;
/// The time for the start of a server, and for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);

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

/// The outcome of a thread in a namespace.
fn ended<T>(thread: JoinHandle<hermes_testkit::Result<Result<T>>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))??
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).context(address.to_string())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Subscribes, and returns the connection after the head of the response.
fn subscribe(address: SocketAddr, path: &str) -> Result<TcpStream> {
    let mut stream = connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: relay\r\nhermes-subscribe: true\r\naccept: multipart/mixed\r\n\r\n")?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    ensure!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
    Ok(stream)
}

fn publication(path: &str, content: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {path} HTTP/1.1\r\nhost: relay\r\nhermes-relay: reliable\r\ncontent-length: {}\r\n\r\n",
        content.len()
    )
    .into_bytes();
    request.extend_from_slice(content);
    request
}

/// Reads until these bytes have arrived.
fn await_bytes(stream: &mut TcpStream, buffer: &mut Vec<u8>, wanted: &[u8]) -> Result<()> {
    let mut part = [0; 16 << 10];
    loop {
        if let Some(at) = buffer.windows(wanted.len()).position(|window| window == wanted) {
            buffer.drain(..at + wanted.len());
            return Ok(());
        }
        let read = stream.read(&mut part)?;
        ensure!(read > 0, "the relay closed a connection");
        buffer.extend_from_slice(&part[..read]);
    }
}

/// The content of a publication, which no other one has.
fn content(number: usize, bytes: usize) -> Vec<u8> {
    format!("{number:08}").into_bytes().into_iter().cycle().take(bytes).collect()
}

/// Publishes to one channel, and waits for what arrives on another one.
struct Player {
    publisher: TcpStream,
    responses: Vec<u8>,
    subscriber: TcpStream,
    arrived: Vec<u8>,
    to: &'static str,
    bytes: usize,
}

impl Player {
    fn new(address: SocketAddr, from: &str, to: &'static str, bytes: usize) -> Result<Self> {
        let (subscriber, publisher) = (subscribe(address, from)?, connect(address)?);
        Ok(Self { publisher, responses: Vec::new(), subscriber, arrived: Vec::new(), to, bytes })
    }

    fn send(&mut self, number: usize) -> Result<()> {
        Ok(self.publisher.write_all(&publication(self.to, &content(number, self.bytes)))?)
    }

    fn receive(&mut self, number: usize) -> Result<()> {
        await_bytes(&mut self.subscriber, &mut self.arrived, &content(number, self.bytes))
    }

    /// Reads the response to the latest publication.
    fn confirm(&mut self) -> Result<()> {
        let before = self.responses.len();
        await_bytes(&mut self.publisher, &mut self.responses, b"\r\n\r\n").with_context(|| format!("{before} bytes"))
    }
}

/// The median round-trip time over a relay.
fn round_trips(testbed: &Testbed, options: &PairOptions, port: u16) -> Result<f64> {
    let (trips, bytes) = (options.trips, options.bytes);
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

/// Seconds for all large publications from Alice to Bob.
fn transfer(testbed: &Testbed, options: &PairOptions, port: u16, path: &'static str) -> Result<f64> {
    let (unit, count) = (options.unit, options.total / options.unit);
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
        let mut buffer = vec![0; 256 << 10];
        let mut arrived = 0;
        // The framing of a relay comes on top.
        while arrived < unit * count {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "the connection ended after {arrived} bytes");
            arrived += read;
        }
        Ok(Instant::now())
    })?;
    let alice = testbed.alice.spawn_thread(move || -> Result<_> {
        is_ready.recv_timeout(TIMEOUT)?;
        let mut stream = connect((HOST_BY_ALICE, port).into())?;
        let begun = Instant::now();
        if port == FORWARDER_PORT {
            let content = vec![b'x'; unit];
            for _ in 0..count {
                stream.write_all(&content)?;
            }
            return Ok(begun);
        }
        let mut responses = stream.try_clone()?;
        // Requests are sent one after the other, and their responses are read beside.
        let reader = std::thread::spawn(move || -> Result<()> {
            let mut buffer = Vec::new();
            (0..count).try_for_each(|_| await_bytes(&mut responses, &mut buffer, b"HTTP/1.1 204"))
        });
        let request = publication(path, &vec![b'x'; unit]);
        for _ in 0..count {
            stream.write_all(&request)?;
        }
        reader.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))??;
        Ok(begun)
    })?;
    let (begun, ended) = (ended(alice)?, ended(bob)?);
    Ok((ended - begun).as_secs_f64())
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
    let relays = [("hermes", HERMES_PORT), ("bare relay", BARE_PORT)];
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for (name, port) in relays {
            let median = round_trips(&testbed, options, port).context(name)?;
            all.entry(name).or_default().round_trip_ms.push(median);
        }
        all.entry("ping").or_default().round_trip_ms.push(ping(&testbed, options)?);
        for (name, port, server, path) in [
            ("hermes", HERMES_PORT, &testbed.hermes, "/large"),
            ("hermes, cut-through", HERMES_PORT, &testbed.hermes, "/cut/large"),
            ("bare relay", BARE_PORT, &testbed.bare, "/large"),
            ("forwarder", FORWARDER_PORT, &testbed.forwarder, ""),
        ] {
            let cpu = cpu_of(server.pid())?;
            let seconds = transfer(&testbed, options, port, path).context(name)?;
            let figures = all.entry(name).or_default();
            figures.gbit_s.push(options.total as f64 * 8e-9 / seconds);
            figures.cpu_s_a_gb.push((cpu_of(server.pid())? - cpu) / (options.total as f64 * 1e-9));
            testbed.limit(Some(&options.link))?;
            let seconds = transfer(&testbed, options, port, path).context(name)?;
            testbed.limit(None)?;
            figures.limited_gbit_s.push(options.total as f64 * 8e-9 / seconds);
        }
    }
    let PairOptions { link, rounds, .. } = options;
    println!("contender            round trip ms  Gbit/s  CPU s/GB  Gbit/s over {link}, medians of {rounds}");
    for (name, figures) in &all {
        let median = |values: &[f64]| mean_and_median(values).1;
        let (trip, rate, cpu) = (median(&figures.round_trip_ms), median(&figures.gbit_s), median(&figures.cpu_s_a_gb));
        let limited = median(&figures.limited_gbit_s);
        println!("{name:20} {trip:13.3} {rate:7.2} {cpu:9.2} {limited:11.2}");
    }
    let PairOptions { trips, bytes, total, unit, .. } = options;
    let report = serde_json::json!({
        "trips": trips, "bytes": bytes, "total": total, "unit": unit, "link": link, "contenders": all,
    });
    let file = options.out.join("relay-pair.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}
