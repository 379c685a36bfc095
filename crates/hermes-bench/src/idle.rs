//! `idle`: what many idle clients cost a proxy, and what active clients notice of them.
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table. It has the memory of an idle HTTP/1.1 connection and of an
//! idle HTTP/2 stream. It also has the rate, the latency and the CPU time of active requests before and while they are there. HAProxy
//! does the same work. Never: an origin for the active requests; the proxies answer them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use clap::Args;
use hermes_testkit::limits;
use hermes_testkit::load::{Exchange, Load, Outcome, Task};
use hermes_testkit::origin::{http, listen};
use hermes_testkit::port::reserve;
use hermes_testkit::process::{Port, Program, Running};
use hermes_testkit::tool::on_path;

use crate::pep::mean_and_median;
use crate::testbed::load_program;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct IdleOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Idle connections. A proxy needs two descriptors for each, if it has to ask an upstream.
    #[arg(long, default_value_t = 9900)]
    connections: usize,
    /// Idle streams, 1,000 on each connection.
    #[arg(long, default_value_t = 100_000)]
    streams: usize,
    /// Directory for logs and configurations, kept afterwards.
    #[arg(long)]
    keep: Option<PathBuf>,
}

const AUTHORITY: &str = "web.bench";
const STREAMS_OF_CONNECTION: usize = 1000;
/// The origin sends the first byte of this response at once, and the second one ten minutes later.
const HELD: &str = "/drip/2/1/600000";
/// The active clients, and how long they are measured, in milliseconds.
const ACTIVE: (usize, u64, u64) = (32, 500, 3000);
const WAIT: Duration = Duration::from_secs(180);
const END_WITHIN: Duration = Duration::from_secs(10);

type Rounds = BTreeMap<String, BTreeMap<&'static str, BTreeMap<&'static str, Vec<f64>>>>;
type Figures = Vec<(&'static str, f64)>;

/// Runs the benchmark.
///
/// # Errors
/// A program does not start, or a client fails.
pub(crate) fn run(options: &IdleOptions) -> Result<()> {
    limits::raise_open_files()?;
    std::fs::create_dir_all(&options.out)?;
    let temporary = tempfile::tempdir()?;
    let dir = options.keep.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&dir)?;
    let dir = dir.canonicalize()?;
    let origin = start_origin()?;
    let mut all = Rounds::new();
    for round in 0..options.rounds {
        for name in ["hermes", "haproxy"] {
            for is_of_streams in [false, true] {
                // Whole connections.
                let most = STREAMS_OF_CONNECTION.min(options.streams).max(1);
                let count = if is_of_streams { options.streams / most * most } else { options.connections };
                let what = if is_of_streams { "streams" } else { "connections" };
                eprintln!("round {} of {}: {name}: {count} {what}", round + 1, options.rounds);
                let Some((proxy, address)) = start(options, &dir, name, origin)? else {
                    eprintln!("!!! {name} IS LEFT OUT: it is not installed");
                    continue;
                };
                let idle = if is_of_streams { streams(address, count) } else { connections(address, count) };
                let measured = measure(&dir, &proxy, address, &idle, count).with_context(|| format!("{name}: {what}"));
                let figures = match measured {
                    Err(error) if name != "hermes" => {
                        eprintln!("!!! {name} IS LEFT OUT: {error:#}");
                        continue;
                    }
                    measured => measured?,
                };
                proxy.end(END_WITHIN)?;
                let rounds = all.entry(format!("{count} {what}")).or_default().entry(name).or_default();
                figures.into_iter().for_each(|(figure, value)| rounds.entry(figure).or_default().push(value));
            }
        }
    }
    let file = options.out.join("idle.json");
    std::fs::write(&file, serde_json::to_string_pretty(&all)? + "\n").context(file.display().to_string())?;
    print_table(&all);
    Ok(())
}

/// Starts an origin of HTTP/2 in a thread, which ends with this process.
fn start_origin() -> Result<SocketAddr> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let origin = runtime.block_on(async { http::serve(listen(any)?, http::Version::H2, Bytes::new()) })?;
    let address = origin.address();
    std::thread::spawn(move || {
        runtime.block_on(std::future::pending::<()>());
        drop(origin);
    });
    Ok(address)
}

fn connections(address: SocketAddr, clients: usize) -> Load {
    Load::Idle { exchange: Exchange::Http { address, authority: AUTHORITY.to_owned(), length: 0 }, clients }
}

fn streams(address: SocketAddr, count: usize) -> Load {
    Load::IdleStreams {
        address,
        authority: AUTHORITY.to_owned(),
        path: HELD.to_owned(),
        connections: count.div_ceil(STREAMS_OF_CONNECTION),
        streams: STREAMS_OF_CONNECTION.min(count),
    }
}

/// Starts a proxy, with the address at which it speaks HTTP/1.1 and HTTP/2. `None`: it is not installed.
fn start(options: &IdleOptions, dir: &Path, name: &str, origin: SocketAddr) -> Result<Option<(Running, SocketAddr)>> {
    let address = reserve(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let (binary, file, text, args) = match name {
        "hermes" => (Some(options.hermes.clone()), "yaml", hermes(address, origin), ["proxy", "--config"]),
        _ => (on_path("haproxy"), "cfg", haproxy(address, origin), ["-db", "-f"]),
    };
    let Some(binary) = binary else { return Ok(None) };
    let config = dir.join(format!("{name}.{file}"));
    std::fs::write(&config, text)?;
    let mut running = Program::new(name, binary, dir).args(args).args([&config]).start()?;
    running.wait_listening(&[Port::Tcp(address.port())], END_WITHIN)?;
    Ok(Some((running, address)))
}

fn hermes(address: SocketAddr, origin: SocketAddr) -> String {
    format!(
        "node: bench\nworkers: 1\naccess-log: off\nlimits: {{connections: 20000, request-memory: 1GiB}}\n\
         listeners:\n- {{name: web, bind: '{address}', protocol: http}}\n\
         routes:\n- {{name: held, match: {{path: '/drip/*'}}, upstream: origin}}\n- {{name: all, respond: {{status: 200}}}}\n\
         upstreams:\n- {{name: origin, protocol: h2, endpoints: ['{origin}']}}\n"
    )
}

const HAPROXY: &str = "global
  nbthread 1
  maxconn 9950
  tune.h2.max-concurrent-streams $STREAMS
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend web
  bind $ADDRESS
  http-request return status 200 unless { path_beg /drip/ }
  default_backend origin
backend origin
  server origin $ORIGIN proto h2
";

fn haproxy(address: SocketAddr, origin: SocketAddr) -> String {
    let streams = STREAMS_OF_CONNECTION.to_string();
    let values = [("$STREAMS", streams), ("$ADDRESS", address.to_string()), ("$ORIGIN", origin.to_string())];
    values.into_iter().fold(HAPROXY.to_owned(), |text, (name, value)| text.replace(name, &value))
}

/// Measures active clients, has idle ones come, measures the active ones again, and weighs the proxy before and after.
fn measure(dir: &Path, proxy: &Running, address: SocketAddr, idle: &Load, count: usize) -> Result<Figures> {
    // Memory that is allocated on first use does not count for a client.
    let alone = active(dir, proxy, address)?;
    let before = proxy.usage()?.memory.rss;
    let mut clients = load_program("idle", Task { load: idle.clone(), watch: Vec::new() }, dir)?.start()?;
    clients.wait_first_line(WAIT)?;
    let with = proxy.usage()?.memory.rss;
    let together = active(dir, proxy, address)?;
    clients.close_stdin();
    let output = clients.wait_output(WAIT)?;
    let outcome: Outcome = serde_json::from_str(output.lines().last().unwrap_or_default())?;
    ensure!(outcome.failed == 0, "{} of {count} idle clients failed: {:?}", outcome.failed, outcome.failures);
    ensure!(outcome.completed == count as u64, "{} of {count} idle clients came", outcome.completed);
    let mut figures = vec![("kib_each", (with as f64 - before as f64) / 1024.0 / count as f64)];
    for (names, outcome) in [
        (["alone_requests_s", "alone_p99_ms", "alone_cpu_us"], alone),
        (["idle_requests_s", "idle_p99_ms", "idle_cpu_us"], together),
    ] {
        let cpu: f64 = outcome.watched_cpu.iter().sum();
        let values = [
            outcome.completed as f64 / outcome.seconds,
            outcome.latency.unwrap_or_default().p99_us / 1000.0,
            cpu * 1e6 / outcome.completed.max(1) as f64,
        ];
        figures.extend(names.into_iter().zip(values));
    }
    Ok(figures)
}

fn active(dir: &Path, proxy: &Running, address: SocketAddr) -> Result<Outcome> {
    let (connections, warmup, window) = ACTIVE;
    let load = Load::KeepAlive { address, authority: AUTHORITY.to_owned(), length: 0, connections, warmup, window };
    let running = load_program("active", Task { load, watch: vec![proxy.pid()] }, dir)?.start()?;
    let outcome: Outcome = serde_json::from_str(&running.wait_output(WAIT)?)?;
    ensure!(outcome.failed == 0, "active clients failed: {:?}", outcome.failures);
    Ok(outcome)
}

/// Prints medians.
fn print_table(all: &Rounds) {
    for (case, contenders) in all {
        println!("{case}");
        for (name, figures) in contenders {
            let values = figures.iter().map(|(figure, values)| format!("{figure} {:.2}", mean_and_median(values).1));
            println!("  {name:8} {}", values.collect::<Vec<_>>().join("  "));
        }
    }
}
