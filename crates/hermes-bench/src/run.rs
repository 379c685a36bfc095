//! The run: from the command line to the result files.
//!
//! In: options and the benchmarks' names. Out: JSON files, `RESULTS.md`, pictures, and an exit status that is a failure
//! if Hermes failed any request.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::ExitCode,
    time::{Instant, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use hermes_testkit::{limits, netns::Namespace};

use crate::{
    Options,
    cases::{self, Session},
    contender,
    machine::Machine,
    progress,
    record::Results,
    settings::Settings,
    svg, table,
};

/// Every benchmark, in the order in which `all` runs them.
pub(crate) const BENCHMARKS: [&str; 7] = ["figure10", "throughput", "tunnels", "memory", "delayed", "layer3", "table7"];

/// Runs benchmarks one after another and writes the report.
pub(crate) fn run(options: &Options, names: &[&str]) -> Result<ExitCode> {
    progress::start();
    limits::raise_open_files()?;
    Namespace::sweep();
    fs::create_dir_all(&options.out).with_context(|| format!("making {}", options.out.display()))?;
    let temporary = tempfile::tempdir().context("a directory for logs")?;
    let dir = options.keep.as_deref().unwrap_or(temporary.path());
    let settings = Settings::new(options);
    // Envoy's virtual environment is kept between runs, in the build directory.
    let contenders = contender::present(&options.hermes, &options.only, Path::new("target"));
    let programs = contender::layer3(&options.hermes, &options.only);
    let mut versions: BTreeMap<_, _> = contenders.iter().map(|c| (c.name().to_owned(), c.version())).collect();
    versions.extend(programs.wireguard.iter().map(|path| ("wireguard-go".to_owned(), contender::build_of(path))));
    for (name, version) in &versions {
        eprintln!("{name}: {version}");
    }
    let mut failed_by_hermes = 0;
    for name in names {
        let began = Instant::now();
        let everybody = contenders.iter().map(AsRef::as_ref).collect();
        let mut session = Session {
            contenders: everybody,
            settings: &settings,
            dir,
            programs: &programs,
            only: &options.only,
            samples: Vec::new(),
        };
        let mut results = Results {
            benchmark: (*name).to_owned(),
            command: command(),
            began: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs()),
            machine: Machine::read(),
            versions: versions.clone(),
            settings: serde_json::to_value(&settings)?,
            ..Results::default()
        };
        benchmark(name, &mut session)?;
        results.samples = session.samples;
        results.took = began.elapsed().as_secs_f64();
        results.sum_up();
        results.write(&options.out)?;
        failed_by_hermes += results.summary.iter().filter(|s| s.contender == "hermes").map(|s| s.failed).sum::<u64>();
    }
    report(&options.out)?;
    progress::print(&format!("results are in {}", options.out.display()));
    if failed_by_hermes > 0 {
        eprintln!("!!! HERMES FAILED {failed_by_hermes} REQUESTS");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn benchmark(name: &str, session: &mut Session<'_>) -> Result<()> {
    match name {
        "figure10" => cases::figure10::run(session),
        "throughput" => cases::throughput::run(session),
        "tunnels" => cases::tunnels::run(session),
        "memory" => cases::memory::run(session),
        "delayed" => cases::delayed::run(session),
        "layer3" => cases::layer3::run(session),
        "table7" => cases::table7::run(session),
        other => bail!("there is no benchmark {other}"),
    }
}

/// Writes table and pictures from the existing JSON files.
pub(crate) fn report(out: &Path) -> Result<()> {
    let mut results = Vec::new();
    for name in BENCHMARKS {
        results.extend(Results::read(out, name)?);
    }
    if results.is_empty() {
        bail!("{} holds no results; run a benchmark first", out.display());
    }
    let write = |name: &str, text: String| {
        let path = out.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    };
    write("RESULTS.md", table::markdown(&results))?;
    for result in &results {
        if let Some(svg) = svg::figure10(result) {
            write(&format!("{}.svg", result.benchmark), svg)?;
        }
    }
    Ok(())
}

/// The command line without local directories: the result file is published.
fn command() -> String {
    let name = |word: String| match Path::new(&word).file_name() {
        Some(name) if Path::new(&word).is_absolute() => name.to_string_lossy().into_owned(),
        _ => word,
    };
    std::env::args().map(name).collect::<Vec<_>>().join(" ")
}
