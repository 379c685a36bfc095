//! Results: every round of every contender, and their summaries.
//!
//! In: measurements. Out: one JSON file per benchmark, with the machine, the versions and the settings; medians, ranges
//! and ratios to a reference. Each ratio is computed within a round. Failures are recorded beside the figures, never
//! omitted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use hermes_testkit::load::{Failures, Outcome};
use serde::{Deserialize, Serialize};

use crate::{
    chain::{Case, Security},
    machine::Machine,
    testbed::Measured,
};

/// The contender that the others of a benchmark are compared with.
pub(crate) fn reference(benchmark: &str) -> &'static str {
    match benchmark {
        "layer3" => "wireguard-go",
        "table7" => "bare",
        _ => "envoy",
    }
}

/// The kind of a measurement. All samples of one key are comparable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    /// `single`, `burst`, `keepalive-h1`, ...
    pub(crate) measure: String,
    /// The case of the paper.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) case: Option<Case>,
    /// The protocol between the proxies.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) security: Option<Security>,
    /// The number of clients or connections.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) clients: Option<usize>,
}

/// Figures by name; the name ends with the unit.
pub(crate) type Figures = BTreeMap<String, f64>;

/// One measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// The kind of measurement.
    #[serde(flatten)]
    pub(crate) key: Key,
    /// The contender that was measured.
    pub(crate) contender: String,
    /// The number of the round.
    pub(crate) round: usize,
    /// The measured figures.
    pub(crate) figures: Figures,
    /// Exchanges that failed.
    pub(crate) failed: u64,
    /// The number of failures of each kind.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub(crate) failures: Failures,
    /// The CPU usage by process group.
    pub(crate) cpu: Cpu,
}

/// CPU usage in cores over the measured time: 1.0 is one core busy throughout.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Cpu {
    /// Length of the measurement in seconds.
    pub(crate) seconds: f64,
    /// The load's process.
    pub(crate) load: f64,
    /// The origins' process.
    pub(crate) origin: f64,
    /// All proxies.
    pub(crate) proxies: f64,
    /// All other processes on the machine, which are noise.
    pub(crate) foreign: f64,
    /// Milliseconds that the calibration workload took just before.
    pub(crate) work_ms: f64,
}

/// Median and range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    /// The middle value; for an even number of values the mean of the middle two.
    pub(crate) median: f64,
    /// The minimum.
    pub(crate) min: f64,
    /// The maximum.
    pub(crate) max: f64,
}

/// The summary of the samples of one key and contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// The kind of measurement.
    #[serde(flatten)]
    pub(crate) key: Key,
    /// The contender that was measured.
    pub(crate) contender: String,
    /// The number of samples.
    pub(crate) samples: usize,
    /// Median and range of each figure.
    pub(crate) figures: BTreeMap<String, Spread>,
    /// Ratios to the reference in the same round, by figure.
    #[serde(alias = "to_envoy")]
    pub(crate) to_reference: BTreeMap<String, Spread>,
    /// Failures of all samples.
    pub(crate) failed: u64,
}

/// A result file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Results {
    /// The name of the benchmark.
    pub(crate) benchmark: String,
    /// The command line of the run.
    pub(crate) command: String,
    /// The start, in seconds since 1970.
    pub(crate) began: u64,
    /// The duration in seconds.
    pub(crate) took: f64,
    /// The machine of the run.
    pub(crate) machine: Machine,
    /// Versions of the contenders.
    pub(crate) versions: BTreeMap<String, String>,
    /// The settings of the run.
    pub(crate) settings: serde_json::Value,
    /// The summaries of the samples.
    pub(crate) summary: Vec<Summary>,
    /// Every measurement.
    pub(crate) samples: Vec<Sample>,
}

impl Key {
    /// A key without case, security and clients.
    pub(crate) fn new(measure: &str) -> Self {
        Self { measure: measure.into(), case: None, security: None, clients: None }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.measure)?;
        if let Some(case) = &self.case {
            write!(f, " {}", case.name())?;
        }
        if let Some(security) = &self.security {
            write!(f, " {}", security.name())?;
        }
        if let Some(clients) = &self.clients {
            write!(f, " x{clients}")?;
        }
        Ok(())
    }
}

impl Sample {
    /// Records a measurement; failures are also printed.
    pub(crate) fn new(key: Key, contender: &str, round: usize, measured: &Measured, figures: Figures) -> Self {
        let outcome = &measured.outcome;
        if outcome.failed > 0 {
            eprintln!("!!! {contender}: {key}: {} FAILED: {:?}", outcome.failed, outcome.failures);
        }
        Self {
            key,
            contender: contender.to_owned(),
            round,
            figures,
            failed: outcome.failed,
            failures: outcome.failures.clone(),
            cpu: Cpu::of(measured),
        }
    }
}

impl Cpu {
    fn of(measured: &Measured) -> Self {
        let outcome = &measured.outcome;
        let seconds = outcome.seconds.max(1e-9);
        let ours = outcome.load_cpu + measured.origin + measured.proxies;
        Self {
            seconds,
            load: outcome.load_cpu / seconds,
            origin: measured.origin / seconds,
            proxies: measured.proxies / seconds,
            // The result is approximate because of clock ticks and the benchmark's own waiting.
            foreign: ((outcome.machine_cpu - ours) / seconds).max(0.0),
            work_ms: measured.work_ms,
        }
    }
}

impl Spread {
    /// Computes the spread; `None` without values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Some(Self { median, min, max })
    }
}

impl Results {
    /// Computes the summaries.
    pub(crate) fn sum_up(&mut self) {
        let groups: BTreeSet<_> = self.samples.iter().map(|s| (s.key.clone(), s.contender.clone())).collect();
        self.summary = groups.into_iter().map(|(key, contender)| self.summary_of(key, contender)).collect();
    }

    fn summary_of(&self, key: Key, contender: String) -> Summary {
        let of = |name: &str| self.samples.iter().filter(|s| s.key == key && s.contender == *name).collect::<Vec<_>>();
        let own = of(&contender);
        let others = of(reference(&self.benchmark));
        let names: BTreeSet<&String> = own.iter().flat_map(|s| s.figures.keys()).collect();
        let (mut figures, mut to_reference) = (BTreeMap::new(), BTreeMap::new());
        for name in names {
            let values: Vec<f64> = own.iter().filter_map(|s| s.figures.get(name).copied()).collect();
            figures.extend(Spread::of(&values).map(|spread| (name.clone(), spread)));
            let ratios: Vec<f64> = own.iter().filter_map(|s| ratio(s, &others, name)).collect();
            to_reference.extend(Spread::of(&ratios).map(|spread| (name.clone(), spread)));
        }
        let (failed, samples) = (own.iter().map(|s| s.failed).sum(), own.len());
        Summary { key, contender, samples, figures, to_reference, failed }
    }

    /// The summary of a key and contender.
    pub(crate) fn find(&self, key: &Key, contender: &str) -> Option<&Summary> {
        self.summary.iter().find(|s| s.key == *key && s.contender == contender)
    }

    /// Contenders in the order in which they took turns.
    pub(crate) fn contenders(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for sample in &self.samples {
            if !names.contains(&sample.contender.as_str()) {
                names.push(sample.contender.as_str());
            }
        }
        names
    }

    /// Writes `BENCHMARK.json` into `dir`.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(format!("{}.json", self.benchmark));
        fs::write(&path, self.text()?).with_context(|| format!("writing {}", path.display()))
    }

    /// Renders indented JSON, with one line per sample and summary: a diff of two runs stays readable.
    fn text(&self) -> Result<String> {
        let head = Self { summary: Vec::new(), samples: Vec::new(), ..self.clone() };
        let text = serde_json::to_string_pretty(&head)?;
        let text = text.replacen("\"summary\": []", &format!("\"summary\": {}", lines(&self.summary)?), 1);
        Ok(text.replacen("\"samples\": []", &format!("\"samples\": {}", lines(&self.samples)?), 1) + "\n")
    }

    /// Reads a result file; `None` if it does not exist.
    pub(crate) fn read(dir: &Path, benchmark: &str) -> Result<Option<Self>> {
        let path = dir.join(format!("{benchmark}.json"));
        let Ok(text) = fs::read_to_string(&path) else { return Ok(None) };
        serde_json::from_str(&text).map(Some).with_context(|| format!("reading {}", path.display()))
    }
}

fn lines<T: Serialize>(items: &[T]) -> Result<String> {
    let lines = items.iter().map(serde_json::to_string).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(format!("[\n    {}\n  ]", lines.join(",\n    ")))
}

/// Computes the ratio within a round: a disturbance of the round affects both contenders.
fn ratio(sample: &Sample, reference: &[&Sample], figure: &str) -> Option<f64> {
    let other = reference.iter().find(|r| r.round == sample.round)?;
    let (own, other) = (sample.figures.get(figure)?, other.figures.get(figure)?);
    (*other != 0.0).then(|| own / other)
}

/// Latencies in microseconds.
pub(crate) fn latencies(outcome: &Outcome) -> Figures {
    let mut figures = Figures::new();
    if let Some(latency) = outcome.latency {
        for (name, value) in [
            ("mean_us", latency.mean_us),
            ("sd_us", latency.sd_us),
            ("p50_us", latency.p50_us),
            ("p99_us", latency.p99_us),
            ("max_us", latency.max_us),
        ] {
            figures.insert(name.into(), value);
        }
    }
    if let Some(own) = outcome.own_latency {
        figures.insert("own_mean_us".into(), own.mean_us);
    }
    figures
}

/// Rates of `what`: `count` per second, and per CPU second of the proxies.
pub(crate) fn rates(what: &str, count: f64, measured: &Measured) -> Figures {
    let mut figures = Figures::from([(format!("{what}_per_s"), count / measured.outcome.seconds)]);
    if measured.proxies > 0.0 {
        figures.insert(format!("{what}_per_cpu_s"), count / measured.proxies);
    }
    figures
}
