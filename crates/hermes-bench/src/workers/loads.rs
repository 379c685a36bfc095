//! The cases: the twelve cells of Table 3, workers that stand still (Figure 11), a surge on idle connections (Figure 3), and the highest
//! load that delays no probe (Figure 12).
//!
//! In: a running contender. Out: delays, throughput, and how evenly the workers are used. Never: a load that waits for slow responses.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hermes_testkit::load::{Load, Outcome, Task};
use hermes_testkit::process::{Program, Running};

use super::contenders::{Contender, FIRST_PORT, Place};
use super::samples::{self, Figures};

/// Time after which a response counts as delayed (the paper's probes: 1 ms is normal).
const DELAYED_MS: u64 = 200;
/// Time that a load may take beyond its own.
const GRACE: Duration = Duration::from_secs(60);
/// Medium and heavy loads are two and three times as much as light ones (Section 6.2).
const LOADS: [(&str, f64); 3] = [("light", 1.0), ("medium", 2.0), ("heavy", 3.0)];

/// The clients of a cell.
pub(super) struct Traffic {
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

/// Microseconds of requests, and how often each comes: most are short.
const MUCH_WORK: [(&str, u32); 2] = [("burn 1000", 90), ("burn 40000", 10)];

/// The paper's four cases: rate of connections, and work of a request.
const TRAFFIC: [Traffic; 4] = [
    Traffic {
        name: "1: many connections, little work",
        listeners: 64,
        rate: 1500.0,
        requests: 1,
        pause: 0,
        work: &[("burn 50", 1)],
        warmup_ms: 1000,
    },
    Traffic {
        name: "2: many connections, much work",
        listeners: 1,
        rate: 120.0,
        requests: 1,
        pause: 0,
        work: &MUCH_WORK,
        warmup_ms: 1000,
    },
    Traffic {
        name: "3: lasting connections, little work",
        listeners: 1,
        rate: 100.0,
        requests: 40,
        pause: 100,
        work: &[("burn 50", 1)],
        warmup_ms: 5000,
    },
    Traffic {
        name: "4: lasting connections, much work",
        listeners: 1,
        rate: 6.0,
        requests: 20,
        pause: 100,
        work: &MUCH_WORK,
        warmup_ms: 3000,
    },
];

/// Clients a second at which the highest load begins, the factor from one to the next, and the most steps.
const HIGHEST: (f64, f64, u64) = (10.0, 1.4, 12);

/// Requests of which few stop a worker.
const SELDOM_STILL: [(&str, u32); 2] = [("burn 1000", 98), ("block 300000", 2)];

/// Clients a second that stop a worker, and for how long.
const HANGS: (f64, &str) = (1.5, "block 400000");
/// Probes a second.
const PROBES: f64 = 100.0;
/// How much longer the probes last than another case: hangs are rare.
const PROBES_LAST: u64 = 4;

/// Clients that are idle before the surge, how many of them connect in a second, and their idle time in milliseconds.
const IDLE: (usize, f64, u64) = (2000, 1000.0, 3000);
/// Requests of each of them, and the work of a request.
const SURGE: (usize, &str) = (5, "burn 100");

/// A case.
pub(super) enum Case {
    /// A cell of Table 3: the load by its name, and its clients a second.
    Cell(&'static Traffic, &'static str, f64),
    /// New connections while workers stand still.
    Hangs,
    /// Requests on connections that were idle.
    Surge,
    /// The highest load at which no probe is delayed.
    Highest,
}

/// All cases.
pub(super) fn all() -> Vec<Case> {
    let cells = TRAFFIC
        .iter()
        .flat_map(|traffic| LOADS.iter().map(move |(load, factor)| Case::Cell(traffic, load, traffic.rate * factor)));
    cells.chain([Case::Hangs, Case::Surge, Case::Highest]).collect()
}

impl Case {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Cell(traffic, load, _) => format!("{}, {load}", traffic.name),
            Self::Hangs => "new connections while workers stand still".to_owned(),
            Self::Surge => "surge on idle connections".to_owned(),
            Self::Highest => "highest load without delayed probes".to_owned(),
        }
    }

    /// The workers of each proxy. The cells have one on each core, as in the paper. If all of so few stood still, nobody could serve.
    pub(super) fn workers(&self, cores: usize) -> usize {
        match self {
            Self::Cell(..) => cores,
            Self::Hangs | Self::Surge | Self::Highest => 2 * cores,
        }
    }

    pub(super) fn listeners(&self) -> u16 {
        match self {
            Self::Cell(traffic, ..) => traffic.listeners,
            Self::Hangs | Self::Surge | Self::Highest => 1,
        }
    }

    /// Measures a contender for some seconds. The same seed makes the same clients.
    pub(super) fn measure(
        &self,
        place: &Place<'_>,
        proxy: &Running,
        contender: Contender,
        (seconds, seed): (u64, u64),
    ) -> Result<Figures> {
        let watch = vec![proxy.pid()];
        match self {
            Self::Cell(traffic, _, rate) => {
                let load = arrivals(place, *rate, traffic, (seconds, seed));
                let load = start_load(place, "load", &Task { load, watch })?;
                let mut figures = Figures::new();
                let times = (Duration::from_millis(traffic.warmup_ms), seconds);
                samples::take(place, proxy, contender, times, &mut figures)?;
                let outcome = outcome_of(load, seconds)?;
                figures.extend(figures_of(&outcome));
                Ok(figures)
            }
            Self::Hangs => {
                let seconds = seconds * PROBES_LAST;
                let (rate, work) = HANGS;
                let hangs = traffic_of(&[(work, 1)]);
                let hangs =
                    start_load(place, "hangs", &Task { load: one(place, rate, &hangs, (seconds, seed)), watch })?;
                let probes = traffic_of(&[("none", 1)]);
                let load = one(place, PROBES, &probes, (seconds, seed + 1));
                let outcome = outcome_of(start_load(place, "load", &Task { load, watch: Vec::new() })?, seconds)?;
                outcome_of(hangs, seconds)?;
                Ok(figures_of(&outcome))
            }
            Self::Highest => {
                let (first, factor, steps) = HIGHEST;
                let work = traffic_of(&SELDOM_STILL);
                let (mut highest, mut rate) = (0.0, first);
                for step in 0..steps {
                    let load = one(place, rate, &work, (seconds, seed + step));
                    let load = start_load(place, "load", &Task { load, watch: Vec::new() })?;
                    let probes = one(place, PROBES, &traffic_of(&[("none", 1)]), (seconds, seed + step));
                    let probes = start_load(place, "probes", &Task { load: probes, watch: Vec::new() })?;
                    let delayed = outcome_of(probes, seconds)?.delayed;
                    outcome_of(load, seconds)?;
                    if delayed > 0 {
                        break;
                    }
                    (highest, rate) = (rate, rate * factor);
                }
                Ok(Figures::from([("highest_rate", highest)]))
            }
            Self::Surge => {
                let ((clients, rate, idle), (requests, work)) = (IDLE, SURGE);
                let address = (Ipv4Addr::LOCALHOST, FIRST_PORT).into();
                let load = Load::Surge { address, clients, rate, idle, requests, work: work.to_owned() };
                let load = start_load(place, "load", &Task { load, watch })?;
                let mut figures = Figures::new();
                // While they are idle, before the surge.
                let opened = Duration::from_secs_f64(clients as f64 / rate);
                samples::take(place, proxy, contender, (opened, idle / 1000 - 1), &mut figures)?;
                let outcome = outcome_of(load, seconds)?;
                figures.extend(figures_of(&outcome));
                Ok(figures)
            }
        }
    }
}

/// A load of clients with one request each.
fn traffic_of(work: &[(&'static str, u32)]) -> Vec<(String, u32)> {
    work.iter().map(|(work, weight)| ((*work).to_owned(), *weight)).collect()
}

fn one(place: &Place<'_>, rate: f64, work: &[(String, u32)], (seconds, seed): (u64, u64)) -> Load {
    Load::Arrivals {
        addresses: addresses(place),
        rate,
        requests: 1,
        pause: 0,
        work: work.to_vec(),
        delayed: DELAYED_MS,
        seed,
        warmup: 1000,
        window: seconds * 1000,
    }
}

fn arrivals(place: &Place<'_>, rate: f64, traffic: &Traffic, (seconds, seed): (u64, u64)) -> Load {
    Load::Arrivals {
        addresses: addresses(place),
        rate,
        requests: traffic.requests,
        pause: traffic.pause,
        work: traffic_of(traffic.work),
        delayed: DELAYED_MS,
        seed,
        warmup: traffic.warmup_ms,
        window: seconds * 1000,
    }
}

fn addresses(place: &Place<'_>) -> Vec<SocketAddr> {
    place.ports().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))).collect()
}

/// Starts a load that the proxies do not slow down: it goes first on all cores.
fn start_load(place: &Place<'_>, name: &str, task: &Task) -> Result<Running> {
    let program = std::env::current_exe()?;
    let task = serde_json::to_string(task)?;
    let load = Program::new(name, "nice", place.dir).args(["-n", "-15"]).args([&program]).args(["load", &task]);
    Ok(load.within(Some(place.namespace)).start()?)
}

fn outcome_of(load: Running, seconds: u64) -> Result<Outcome> {
    let text = load.wait_output(Duration::from_secs(seconds) + GRACE)?;
    serde_json::from_str(&text).context("the outcome of a load")
}

fn figures_of(outcome: &Outcome) -> Figures {
    let latency = outcome.latency.unwrap_or_default();
    let mut figures = Figures::from([
        ("mean_ms", latency.mean_us / 1000.0),
        ("p99_ms", latency.p99_us / 1000.0),
        ("p999_ms", latency.p999_us / 1000.0),
        ("max_ms", latency.max_us / 1000.0),
        ("responses_s", outcome.in_time.unwrap_or(outcome.completed) as f64 / outcome.seconds),
        ("failed", outcome.failed as f64),
        ("delayed", outcome.delayed as f64),
    ]);
    if let [cpu] = outcome.watched_cpu[..] {
        figures.insert("cpu_ms_each", cpu * 1000.0 / outcome.completed.max(1) as f64);
    }
    figures
}
