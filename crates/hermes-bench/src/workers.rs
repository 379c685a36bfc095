//! `workers`: how connections come to workers, in the cases of paper 003 (Table 3), beside HAProxy and Envoy.
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table. All proxies have the same number of workers, which is
//! above the number of cores, and answer all requests themselves. A library makes their workers burn time or stand still, as each
//! request asks. Never: a comparison of two rounds that did not take turns.

mod contenders;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use hermes_testkit::envoy as envoy_binary;
use hermes_testkit::load::{Load, Outcome, Task};
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::{Program, Running};
use hermes_testkit::work;
use serde::Serialize;

use self::contenders::{ADMIN, ALL, Contender, Place};
use crate::pep::mean_and_median;
use crate::relay::client::ended;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkersOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Workers of each proxy.
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Rounds of each cell.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measured seconds of a round.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Only contenders whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Only cells whose name contains this.
    #[arg(long, default_value = "")]
    cell: String,
    /// Settings of Hermes for `dispatch`, such as `connections-offset: 20`.
    #[arg(long, default_value = "")]
    settings: String,
    /// Directory for logs and configurations, kept afterwards.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// Time after which a response counts as delayed (the paper's probes: 1 ms is normal).
const DELAYED_MS: u64 = 200;
const START: Duration = Duration::from_secs(5);
/// The share of the paper's offered load: medium and heavy are two and three times as much as light (Section 6.2).
const LOADS: [(&str, f64); 3] = [("light", 1.0), ("medium", 2.0), ("heavy", 3.0)];

/// What clients do in a case.
struct Case {
    name: &'static str,
    listeners: u16,
    /// Clients a second under light load.
    rate: f64,
    requests: usize,
    /// Mean pause of a client in milliseconds.
    pause: u64,
    work: &'static [(&'static str, u32)],
    warmup_ms: u64,
}

/// The paper's four cases: rate of connections, and work of a request.
const CASES: [Case; 4] = [
    Case {
        name: "1: many connections, little work",
        listeners: 64,
        rate: 1500.0,
        requests: 1,
        pause: 0,
        work: &[("burn 50", 1)],
        warmup_ms: 1000,
    },
    Case {
        name: "2: many connections, much work",
        listeners: 1,
        rate: 120.0,
        requests: 1,
        pause: 0,
        work: &[("burn 1000", 90), ("burn 40000", 10)],
        warmup_ms: 1000,
    },
    Case {
        name: "3: lasting connections, little work",
        listeners: 1,
        rate: 100.0,
        requests: 40,
        pause: 100,
        work: &[("burn 50", 1)],
        warmup_ms: 5000,
    },
    Case {
        name: "4: lasting connections, much work",
        listeners: 1,
        rate: 6.0,
        requests: 20,
        pause: 100,
        work: &[("burn 1000", 90), ("burn 40000", 10)],
        warmup_ms: 3000,
    },
];

/// The figures of a contender in a cell, one of each round.
#[derive(Debug, Default, Serialize)]
struct Figures {
    mean_ms: Vec<f64>,
    p99_ms: Vec<f64>,
    max_ms: Vec<f64>,
    responses_s: Vec<f64>,
    failed: Vec<u64>,
    delayed: Vec<u64>,
    /// Of the proxy, for a thousand responses.
    cpu_s: Vec<f64>,
    /// Standard deviation of the CPU time of the workers, in percent of a core.
    cpu_deviation: Vec<f64>,
    /// Mean over the samples of the standard deviation of the connections of the workers (Hermes alone tells them).
    connection_deviation: Vec<f64>,
}

/// Runs the benchmark.
///
/// # Errors
/// A program does not start, or the process is not root.
pub(crate) fn run(options: &WorkersOptions) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let temporary = tempfile::tempdir()?;
    let dir = options.keep.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&dir)?;
    let dir = dir.canonicalize()?;
    let library = work::library(&dir)?;
    let namespace = Namespace::new()?;
    let envoy = envoy_binary::find(&dir).inspect_err(|error| eprintln!("!!! envoy IS LEFT OUT: {error}")).ok();
    let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
    let mut all: BTreeMap<String, BTreeMap<String, Figures>> = BTreeMap::new();
    for round in 0..options.rounds {
        for case in &CASES {
            for (load, factor) in LOADS {
                let cell = format!("{}, {load}", case.name);
                if !cell.contains(&options.cell) {
                    continue;
                }
                for contender in ALL {
                    let name = contender.name();
                    if !name.contains(&options.only) {
                        continue;
                    }
                    let place = Place {
                        hermes: &hermes,
                        envoy: envoy.as_deref(),
                        library: &library,
                        dir: &dir,
                        namespace: &namespace,
                        workers: options.workers,
                        listeners: case.listeners,
                        settings: &options.settings,
                    };
                    eprintln!("round {} of {}: {cell}: {name}", round + 1, options.rounds);
                    let figures = all.entry(cell.clone()).or_default().entry(name.clone()).or_default();
                    measure(options, &place, contender, case, case.rate * factor, figures)
                        .with_context(|| format!("{cell}: {name}"))?;
                }
            }
        }
    }
    print_table(&all);
    let report = serde_json::json!({
        "workers": options.workers, "cores": std::thread::available_parallelism()?, "seconds": options.seconds, "cells": all,
    });
    let file = options.out.join("workers.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

fn measure(
    options: &WorkersOptions,
    place: &Place<'_>,
    contender: Contender,
    case: &Case,
    rate: f64,
    figures: &mut Figures,
) -> Result<()> {
    // Not every version of HAProxy knows every mode.
    let proxy = match place.start(contender) {
        Ok(Some(proxy)) => proxy,
        Ok(None) => return Ok(()),
        Err(error) if matches!(contender, Contender::HaProxy(_)) => {
            eprintln!("!!! {} IS LEFT OUT: {error:#}", contender.name());
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let load = Load::Arrivals {
        addresses: place.ports().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))).collect(),
        rate,
        requests: case.requests,
        pause: case.pause,
        work: case.work.iter().map(|(work, weight)| ((*work).to_owned(), *weight)).collect(),
        delayed: DELAYED_MS,
        warmup: case.warmup_ms,
        window: options.seconds * 1000,
    };
    let load = start_load(place, &Task { load, watch: vec![proxy.pid()] })?;
    let samples = Samples::take(place, &proxy, contender, Duration::from_millis(case.warmup_ms), options.seconds)?;
    let text = load.wait_output(Duration::from_secs(options.seconds + 60))?;
    let outcome: Outcome = serde_json::from_str(&text).context("the outcome of a load")?;
    let latency = outcome.latency.unwrap_or_default();
    figures.mean_ms.push(latency.mean_us / 1000.0);
    figures.p99_ms.push(latency.p99_us / 1000.0);
    figures.max_ms.push(latency.max_us / 1000.0);
    figures.responses_s.push(outcome.completed as f64 / outcome.seconds);
    figures.failed.push(outcome.failed);
    figures.delayed.push(outcome.delayed);
    figures.cpu_s.push(outcome.watched_cpu.iter().sum::<f64>() * 1000.0 / outcome.completed.max(1) as f64);
    figures.cpu_deviation.push(samples.cpu_deviation);
    figures.connection_deviation.extend(samples.connection_deviation);
    proxy.end(START)?;
    Ok(())
}

/// Starts a load that the proxies do not slow down: it goes first on all cores.
fn start_load(place: &Place<'_>, task: &Task) -> Result<Running> {
    let program = std::env::current_exe()?;
    let task = serde_json::to_string(task)?;
    let load = Program::new("load", "nice", place.dir).args(["-n", "-15"]).args([&program]).args(["load", &task]);
    Ok(load.within(Some(place.namespace)).start()?)
}

/// What the workers tell during a round.
struct Samples {
    cpu_deviation: f64,
    connection_deviation: Option<f64>,
}

impl Samples {
    /// Looks at the workers once a second of the measured time.
    fn take(place: &Place<'_>, proxy: &Running, contender: Contender, warmup: Duration, seconds: u64) -> Result<Self> {
        pause(warmup);
        let mut deviations = Vec::new();
        let mut connections = Vec::new();
        let mut before = worker_times(proxy.pid(), place.workers)?;
        let mut asked = Instant::now();
        for _ in 0..seconds {
            pause(Duration::from_secs(1));
            let after = worker_times(proxy.pid(), place.workers)?;
            let passed = asked.elapsed().as_secs_f64();
            asked = Instant::now();
            let shares: Vec<f64> =
                after.iter().zip(&before).map(|(after, before)| (after - before) / passed * 100.0).collect();
            deviations.push(deviation(&shares));
            before = after;
            if let Contender::Hermes(_) = contender {
                connections.push(deviation(&connections_of(place)?));
            }
        }
        let connection_deviation = (!connections.is_empty()).then(|| mean_and_median(&connections).0);
        Ok(Self { cpu_deviation: mean_and_median(&deviations).0, connection_deviation })
    }
}

#[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn deviation(values: &[f64]) -> f64 {
    let mean = mean_and_median(values).0;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / values.len().max(1) as f64).sqrt()
}

/// CPU seconds of the busiest threads of a process, as many as it has workers, in the order of their ids.
fn worker_times(pid: u32, workers: usize) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        let Some(id) = path.file_name().and_then(|name| name.to_str()?.parse::<u64>().ok()) else { continue };
        let name = std::fs::read_to_string(path.join("comm"))?;
        // Workers of Hermes and Envoy have names; those of HAProxy are all its threads.
        if name.starts_with("worker-") || name.starts_with("wrk:") || name.starts_with("haproxy") {
            let times_of = std::fs::read_to_string(path.join("schedstat"))?;
            let nanoseconds: f64 = times_of.split_whitespace().next().context("schedstat")?.parse()?;
            times.push((id, nanoseconds * 1e-9));
        }
    }
    times.sort_by_key(|(id, _)| *id);
    times.truncate(workers);
    Ok(times.into_iter().map(|(_, time)| time).collect())
}

/// The open connections of each worker of Hermes.
fn connections_of(place: &Place<'_>) -> Result<Vec<f64>> {
    let asked = place.namespace.spawn_thread(|| -> Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, ADMIN))?;
        stream.write_all(b"GET /workers HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let text = ended(asked)?;
    let (_, body) = text.split_once("\r\n\r\n").context("no response of /workers")?;
    let status: serde_json::Value = serde_json::from_str(body).context("/workers")?;
    let workers = status["workers"].as_array().context("/workers has no list")?;
    Ok(workers.iter().filter_map(|worker| worker["connections"].as_f64()).collect())
}

fn print_table(all: &BTreeMap<String, BTreeMap<String, Figures>>) {
    for (cell, contenders) in all {
        println!("{cell}");
        println!(
            "  {:20} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>8} {:>7}",
            "", "mean ms", "p99 ms", "max ms", "1/s", "failed", "delayed", "CPU dev.", "conn."
        );
        for (name, figures) in contenders {
            let median = |values: &[f64]| mean_and_median(values).1;
            println!(
                "  {name:20} {:9.3} {:9.2} {:9.1} {:9.0} {:7} {:7} {:8.1} {:7.1}",
                median(&figures.mean_ms),
                median(&figures.p99_ms),
                median(&figures.max_ms),
                median(&figures.responses_s),
                figures.failed.iter().sum::<u64>(),
                figures.delayed.iter().sum::<u64>(),
                median(&figures.cpu_deviation),
                median(&figures.connection_deviation),
            );
        }
    }
}
