//! `workers`: how connections come to workers, in the cases of paper 003, beside HAProxy and Envoy.
//!
//! In: the binary of Hermes. Out: a JSON file with every round, and a table. All proxies have the same number of workers, and answer all
//! requests themselves. A library makes their workers burn time or stand still, as each
//! request asks. Never: a comparison of rounds that did not take turns.

mod contenders;
mod loads;
mod samples;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use hermes_testkit::envoy as envoy_binary;
use hermes_testkit::netns::Namespace;
use hermes_testkit::process::Running;
use hermes_testkit::work;

use self::contenders::{ALL, Contender, Place};
use self::loads::Case;
use crate::pep::mean_and_median;

/// The options of the benchmark.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkersOptions {
    /// Directory of the JSON file.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// Name of the JSON file.
    #[arg(long, default_value = "workers.json")]
    file: String,
    /// The binary to measure.
    #[arg(long, default_value = "target/release/hermes")]
    hermes: PathBuf,
    /// Workers of each proxy, instead of the case's own number.
    #[arg(long)]
    workers: Option<usize>,
    /// Rounds of each case.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measured seconds of a round.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Only contenders whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    case: String,
    /// Settings of Hermes for `dispatch`, such as `connections-offset: 20`.
    #[arg(long, default_value = "")]
    settings: String,
    /// Measures `directed` alone, with several offsets (Figure 15).
    #[arg(long)]
    sweep: bool,
    /// Directory for logs and configurations, kept afterwards.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// The offsets of a sweep, in percent.
const OFFSETS: [u16; 6] = [5, 10, 20, 50, 100, 200];

const END_WITHIN: Duration = Duration::from_secs(5);

/// The rounds of each figure, by case and contender.
type Rounds = BTreeMap<String, BTreeMap<String, BTreeMap<&'static str, Vec<f64>>>>;

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
    let envoy = envoy_binary::find(&dir).inspect_err(|error| eprintln!("!!! envoy IS LEFT OUT: {error}")).ok();
    let hermes = options.hermes.canonicalize().unwrap_or_else(|_| options.hermes.clone());
    let (library, namespace) = (work::library(&dir)?, Namespace::new()?);
    let cases: Vec<Case> = loads::all().into_iter().filter(|case| case.name().contains(&options.case)).collect();
    let cores = std::thread::available_parallelism()?.get();
    let mut all = Rounds::new();
    for round in 0..options.rounds {
        for case in &cases {
            for (name, contender, settings) in contenders(options) {
                let place = Place {
                    hermes: &hermes,
                    envoy: envoy.as_deref(),
                    library: &library,
                    dir: &dir,
                    namespace: &namespace,
                    workers: options.workers.unwrap_or_else(|| case.workers(cores)),
                    listeners: case.listeners(),
                    settings: &settings,
                };
                let case_name = case.name();
                eprintln!("round {} of {}: {case_name}: {name}", round + 1, options.rounds);
                let Some(proxy) = start(&place, contender)? else { continue };
                let figures = case.measure(&place, &proxy, contender, (options.seconds, round as u64));
                let figures = figures.with_context(|| format!("{case_name}: {name}"))?;
                proxy.end(END_WITHIN)?;
                let rounds = all.entry(case_name).or_default().entry(name).or_default();
                figures.into_iter().for_each(|(figure, value)| rounds.entry(figure).or_default().push(value));
            }
        }
        // After each round: all of them take half an hour.
        save(options, &all)?;
    }
    print_table(&all);
    Ok(())
}

/// The contenders by their names in the report, with the settings of `dispatch`.
fn contenders(options: &WorkersOptions) -> Vec<(String, Contender, String)> {
    if !options.sweep {
        let chosen = ALL.into_iter().filter(|contender| contender.name().contains(&options.only));
        return chosen.map(|contender| (contender.name(), contender, options.settings.clone())).collect();
    }
    let offsets = ["connections", "pending"].into_iter().flat_map(|of| OFFSETS.map(|offset| (of, offset)));
    let swept = offsets.map(|(of, offset)| {
        (format!("{of}-offset {offset}"), Contender::Hermes("directed"), format!("{of}-offset: {offset}"))
    });
    swept.collect()
}

fn save(options: &WorkersOptions, all: &Rounds) -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    let workers = loads::all().into_iter().filter(|case| all.contains_key(&case.name()));
    let workers: BTreeMap<String, usize> =
        workers.map(|case| (case.name(), options.workers.unwrap_or_else(|| case.workers(cores)))).collect();
    let report = serde_json::json!({
        "workers": workers, "cores": cores, "seconds": options.seconds,
        "settings": options.settings, "cases": all,
    });
    let file = options.out.join(&options.file);
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n").context(file.display().to_string())
}

/// Starts a contender. Not every version of HAProxy knows every mode.
fn start(place: &Place<'_>, contender: Contender) -> Result<Option<Running>> {
    match place.start(contender) {
        Err(error) if matches!(contender, Contender::HaProxy(_)) => {
            eprintln!("!!! {} IS LEFT OUT: {error:#}", contender.name());
            Ok(None)
        }
        other => other,
    }
}

/// Prints medians.
fn print_table(all: &Rounds) {
    for (case, contenders) in all {
        let figures = contenders.values().next().into_iter().flat_map(BTreeMap::keys).copied();
        let figures: Vec<&str> = figures.collect();
        println!("{case}");
        let columns: String = figures.iter().map(|figure| format!(" {figure:>13}")).collect();
        println!("  {:18}{columns}", "");
        for (name, rounds) in contenders {
            let median = |figure: &&str| rounds.get(figure).map_or(f64::NAN, |values| mean_and_median(values).1);
            let values: String = figures.iter().map(|figure| format!(" {:13.2}", median(figure))).collect();
            println!("  {name:18}{values}");
        }
    }
}
