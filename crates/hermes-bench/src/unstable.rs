//! `unstable`: downloads over three links that are up in turns, and over eight that are up at random, beside the
//! physical limit.
//!
//! In: the binary. Out: a JSON file with every run, and a line per case. Cases run in parallel, each on its own chain:
//! at 10 Mbit/s a chain leaves the machine idle. Each run is compared with the limit of its own phase.

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hermes_lab::turns;
use hermes_testkit::{
    limits::raise_open_files,
    link::Conditions,
    unstable::{self, Chain, HopSettings, SECOND, in_turns, seldom},
};
use serde::Serialize;

const LINKS: u32 = 3;
/// The object sizes: 45 KB, 500 KB, 1 MB and 5 MB, binary.
const SIZES: [u64; 4] = [45 << 10, 500 << 10, 1 << 20, 5 << 20];
const MANY: usize = 100;
/// The eight random links: their number, their mean up time (each is up a tenth of the time), and the seed of the
/// times.
const EIGHT: usize = 8;
const UP: Duration = Duration::from_millis(300);
const SEED: u64 = 8;
/// The interval of attempts on a link that is down: a link may be up this long before a node notices.
const BEACON: Duration = Duration::from_millis(20);

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct UnstableOptions {
    /// Path of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Phases of the links at which a download begins.
    #[arg(long, default_value_t = 10)]
    phases: u32,
    /// Only cases whose name has this in it.
    #[arg(long)]
    only: Option<String>,
    /// Measure the cost of custody on good links instead: rounds with and without it, in turns.
    #[arg(long)]
    good: bool,
}

/// The protocol of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    /// HTTP to the first node, with one round trip.
    Plain,
    /// TLS 1.3 through CONNECT, with two round trips.
    Connect,
    /// A hundred concurrent downloads, in the clear.
    Many,
    /// One round trip over eight links that are up at random.
    Eight,
}

#[derive(Debug, Clone, Serialize)]
struct Case {
    name: String,
    mode: Mode,
    protocol: &'static str,
    size: u64,
    /// Round trip of a link in milliseconds, and the share of lost frames.
    rtt_ms: u64,
    loss: f64,
}

#[derive(Debug, Serialize)]
struct Run {
    phase: f64,
    seconds: f64,
    limit: f64,
    /// The limit if nodes must first notice that a link is up.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_noticed: Option<f64>,
    is_whole: bool,
}

#[derive(Debug, Serialize)]
struct Measured {
    #[serde(flatten)]
    case: Case,
    runs: Vec<Run>,
    median_ratio: f64,
    worst_ratio: f64,
    /// The median ratio to `limit_noticed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    median_noticed: Option<f64>,
    success: f64,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |mode, protocol, size, rtt_ms, loss| {
        let word = match mode {
            Mode::Plain => "plain",
            Mode::Connect => "connect",
            Mode::Many => "many",
            Mode::Eight => "eight",
        };
        let link = if rtt_ms > 1 { "-far-lossy" } else { "" };
        let name = format!("{word}-{protocol}-{}K{link}", size >> 10);
        cases.push(Case { name, mode, protocol, size, rtt_ms, loss });
    };
    for protocol in ["h2", "h3"] {
        for size in SIZES {
            add(Mode::Plain, protocol, size, 1, 0.0);
            add(Mode::Connect, protocol, size, 1, 0.0);
            add(Mode::Plain, protocol, size, 40, 0.01);
        }
        add(Mode::Many, protocol, SIZES[0], 1, 0.0);
        add(Mode::Eight, protocol, SIZES[0], 1, 0.0);
        add(Mode::Eight, protocol, SIZES[2], 1, 0.0);
    }
    cases
}

/// The links of a case, starting at the client.
fn links(case: &Case) -> Vec<Conditions> {
    let (turns, seldom) = (in_turns(LINKS), seldom(UP, SEED));
    let links = match case.mode {
        Mode::Eight => (0..EIGHT).map(seldom).collect::<Vec<_>>(),
        _ => (0..LINKS as usize).map(turns).collect(),
    };
    let one_way = Duration::from_micros(500 * case.rtt_ms);
    links.into_iter().map(|link| Conditions { one_way, loss: case.loss, ..link }).collect()
}

/// The physical limit from this phase on, in seconds; and the limit if nodes do not know when a link is up.
fn limits(case: &Case, phase: f64) -> (f64, Option<f64>) {
    if case.mode == Mode::Eight {
        let (links, from) = (links(case), Duration::from_secs_f64(phase));
        let limit = |unnoticed| unstable::limit(&links, case.size, from, unnoticed);
        return (limit(Duration::ZERO), Some(limit(BEACON)));
    }
    (limit(case, phase), None)
}

fn limit(case: &Case, phase: f64) -> f64 {
    let bytes = case.size * if case.mode == Mode::Many { MANY as u64 } else { 1 };
    turns::limit(LINKS, bytes, if case.mode == Mode::Connect { 2 } else { 1 }, phase)
}

/// The results of a round on a good link.
#[derive(Debug, Serialize)]
struct GoodLinkRound {
    link: &'static str,
    protocol: &'static str,
    has_custody: bool,
    /// The throughput of one download of 256 MiB.
    gbit_s: f64,
    /// The time from request to response: the median of 2,000 sequential requests on one connection.
    request_us: f64,
    /// CPU seconds of all nodes for the download.
    cpu_s: f64,
}

/// Measures with and without custody in turns: on a link of 1 Gbit/s and 5 ms, and on an unimpaired link.
async fn measure_good_links(options: &UnstableOptions) -> Result<Vec<GoodLinkRound>> {
    let gigabit = Conditions {
        rate: Some(1_000_000_000),
        one_way: Duration::from_micros(2500),
        queue: Duration::from_millis(20),
        ..Conditions::default()
    };
    let mut rounds = Vec::new();
    for (link, conditions) in [("1 Gbit/s, 5 ms", gigabit), ("a cable", Conditions::default())] {
        for protocol in ["h2", "h3"] {
            let name = format!("{link}, {protocol}");
            if options.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
                continue;
            }
            let mut chains = Vec::new();
            for has_custody in [false, true] {
                let between = if has_custody { HopSettings::custody(protocol) } else { HopSettings::nothing(protocol) };
                chains.push(Chain::start(&options.hermes, 1, between, |_| conditions.clone()).await?);
            }
            for _ in 0..options.phases {
                for (chain, has_custody) in chains.iter().zip([false, true]) {
                    let path = format!("{}/bytes/128?[1-2000]", chain.apps());
                    let words = ["curl", "-sS", "-o", "/dev/null", "-w", "%{time_total} ", &path];
                    let text = chain.namespaces[0].output(&words).await?;
                    let mut times: Vec<f64> = text.split_whitespace().filter_map(|time| time.parse().ok()).collect();
                    times.sort_by(f64::total_cmp);
                    ensure!(times.len() == 2000, "{} answers", times.len());
                    let before = chain.cpu()?;
                    let done = chain.curl(&format!("/bytes/{}", 256 << 20)).await?;
                    ensure!(done.status == 200 && done.bytes == 256 << 20, "{done:?}");
                    let (gbit_s, cpu_s) = (8e-9 * done.bytes as f64 / done.seconds, chain.cpu()? - before);
                    let round =
                        GoodLinkRound { link, protocol, has_custody, gbit_s, request_us: 1e6 * times[1000], cpu_s };
                    println!("{}", serde_json::to_string(&round)?);
                    rounds.push(round);
                }
            }
        }
    }
    Ok(rounds)
}

/// Runs the selected measurements.
///
/// # Errors
/// The process lacks root, or a chain cannot be started.
pub(crate) fn run(options: &UnstableOptions) -> Result<bool> {
    raise_open_files()?;
    std::fs::create_dir_all(&options.out)?;
    if options.good {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let rounds = runtime.block_on(measure_good_links(options))?;
        std::fs::write(options.out.join("custody.json"), serde_json::to_string_pretty(&rounds)? + "\n")?;
        return Ok(true);
    }
    let wanted = |case: &Case| options.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
    let cases: Vec<_> = cases().into_iter().filter(wanted).collect();
    ensure!(!cases.is_empty(), "no case has that in its name");
    // The cases with eight links run separately: all nodes at once would exceed the inotify instances of a user
    // (`fs.inotify.max_user_instances`).
    let (eights, others): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| case.mode == Mode::Eight);
    let mut all = Vec::new();
    for group in [others, eights] {
        let began = group.into_iter().map(|case| {
            let options = options.clone();
            thread::spawn(move || measure(&options, case))
        });
        for thread in began.collect::<Vec<_>>() {
            let measured = thread.join().map_err(|_| anyhow::anyhow!("a case panicked"))??;
            print_result(&measured);
            all.push(measured);
        }
    }
    let file = options.out.join("unstable.json");
    std::fs::write(&file, serde_json::to_string_pretty(&all)? + "\n").context(file.display().to_string())?;
    Ok(all.iter().all(|measured| measured.success == 1.0))
}

fn print_result(measured: &Measured) {
    let Measured { case, runs, median_ratio, worst_ratio, median_noticed, success } = measured;
    let noticed = median_noticed.map(|ratio| format!("  to who has to notice {ratio:.3}")).unwrap_or_default();
    let seconds = runs.iter().map(|run| run.seconds).sum::<f64>() / runs.len().max(1) as f64;
    let limit = runs.iter().map(|run| run.limit).sum::<f64>() / runs.len().max(1) as f64;
    println!(
        "{:28} {:3.0} %  mean {seconds:6.2} s of {limit:6.2}  median {median_ratio:.3}  worst {worst_ratio:.3}{noticed}",
        case.name,
        100.0 * success
    );
}

fn measure(options: &UnstableOptions, case: Case) -> Result<Measured> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let links = links(&case);
    let mut runs = Vec::new();
    runtime.block_on(async {
        let between = HopSettings::custody(case.protocol);
        let chain = Chain::start(&options.hermes, links.len(), between, |link| links[link].clone()).await?;
        for number in 0..options.phases {
            let phase = begin(&chain, &case, number, options.phases).await;
            let (seconds, is_whole) = download(&chain, &case).await;
            let (limit, limit_noticed) = limits(&case, phase);
            runs.push(Run { phase, seconds, limit, limit_noticed, is_whole });
            eprintln!("{} {phase:.2}: {seconds:.2} s", case.name);
        }
        anyhow::Ok(())
    })?;
    let (median, worst) = middle_and_most(runs.iter().map(|run| run.seconds / run.limit));
    let noticed: Vec<_> = runs.iter().filter_map(|run| Some(run.seconds / run.limit_noticed?)).collect();
    let noticed = (!noticed.is_empty()).then(|| middle_and_most(noticed.into_iter()).0);
    let success = runs.iter().filter(|run| run.is_whole).count() as f64 / runs.len() as f64;
    Ok(Measured { case, runs, median_ratio: median, worst_ratio: worst, median_noticed: noticed, success })
}

/// The median and the maximum.
fn middle_and_most(ratios: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut ratios: Vec<_> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    let count = ratios.len().max(1);
    let at = |index: usize| ratios.get(index).copied().unwrap_or_default();
    ((at((count - 1) / 2) + at(count / 2)) / 2.0, at(count - 1))
}

/// Waits for the start of a download, in seconds after the links' epoch. The downloads are spread over the links'
/// cycle; random links have no cycle.
async fn begin(chain: &Chain, case: &Case, number: u32, of: u32) -> f64 {
    if case.mode == Mode::Eight {
        return chain.elapsed().as_secs_f64();
    }
    let phase = f64::from(LINKS) * (f64::from(number) + 0.5) / f64::from(of);
    chain.phase(Duration::from_secs_f64(phase), LINKS * SECOND).await;
    phase
}

/// The duration in seconds, and whether the download is complete.
async fn download(chain: &Chain, case: &Case) -> (f64, bool) {
    let path = format!("/bytes/{}", case.size);
    let done = match case.mode {
        Mode::Plain | Mode::Eight => chain.curl(&path).await,
        Mode::Connect => chain.curl_through(&path).await,
        Mode::Many => {
            let began = std::time::Instant::now();
            let url = format!("{}{path}?[1-{MANY}]", chain.apps());
            let form = "%{http_code}:%{size_download} ";
            let words = ["curl", "-sS", "-Z", "--parallel-immediate", "--parallel-max", "100", "-w", form];
            let words = [&words[..], &["-o", "/dev/null", "--max-time", "300", &url]].concat();
            let text = chain.namespaces[0].output(&words).await.unwrap_or_default();
            let right = format!("200:{}", case.size);
            let whole = text.split_whitespace().filter(|one| **one == *right).count();
            return (began.elapsed().as_secs_f64(), whole == MANY);
        }
    };
    match done {
        Ok(done) => (done.seconds, done.status == 200 && done.bytes == case.size),
        Err(error) => {
            eprintln!("{}: {error}", case.name);
            (0.0, false)
        }
    }
}
