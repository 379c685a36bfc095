//! The case itself: each way first without outage, then with it, all ways in parallel.
//!
//! In: the options. Out: every download. At 10 Mbit/s the ways leave the machine idle, so they do not disturb each
//! other. Only the start of a chain costs CPU time, and no download runs meanwhile. Within a way downloads run one
//! after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use hermes_lab::{Conditions, turns};
use tokio::task::JoinSet;

use super::Options;
use super::lab::{LINKS, round};
use super::test_path::{Download, Setting, TestPath, Trace};
use super::variant::{Variant, said};
use crate::terminal::Progress;

/// The client timeout for Hermes, which has never needed that long; a longer download indicates a bug.
const HERMES_TIMEOUT: Duration = Duration::from_secs(240);
/// The client timeout without outage.
const STEADY_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A download, and its physical limit.
#[derive(Debug, Clone)]
pub(super) struct Try {
    pub(super) download: Download,
    pub(super) limit: f64,
}

/// A way and a size.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) way: Variant,
    pub(super) size: u64,
    /// The last download while all links were up. There are two; the first one opens connections.
    pub(super) steady: Option<Download>,
    /// Downloads of objects that were not requested before.
    pub(super) first: Vec<Try>,
    /// Downloads of the same objects by another client, if nodes have caches.
    pub(super) again: Vec<Try>,
}

/// A download for the picture.
pub(super) struct Drawn {
    pub(super) way: Variant,
    pub(super) size: u64,
    pub(super) tried: Try,
    pub(super) trace: Trace,
}

/// Everything that happened.
pub(super) struct Played {
    pub(super) rows: Vec<Row>,
    /// The ways that could not run, and the reasons.
    pub(super) missing: Vec<(Variant, String)>,
    pub(super) drawn: Vec<Drawn>,
}

/// The progress of each way, for the terminal.
#[derive(Default)]
struct Board(Mutex<BTreeMap<Variant, String>>);

impl Board {
    fn set(&self, way: Variant, what: Option<String>) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match what {
            Some(what) => board.insert(way, what),
            None => board.remove(&way),
        };
    }

    fn text(&self) -> String {
        let board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.iter().map(|(way, what)| format!("{} {what}", way.slug())).collect::<Vec<_>>().join(", ")
    }
}

/// The number of downloads of each size on a way.
fn tries(options: &Options, way: Variant) -> u32 {
    if way.is_hopeless() { options.hopeless_tries.min(options.tries) } else { options.tries }
}

/// The client timeout on a way.
fn patience(options: &Options, way: Variant) -> Duration {
    if way.is_hermes() { HERMES_TIMEOUT } else { options.patience }
}

/// The position in the links' cycle at which a download begins; downloads are spread over one cycle.
fn phase(number: u32, of: u32) -> Duration {
    round() * (2 * number + 1) / (2 * of)
}

/// The estimated duration: that of the slowest way.
pub(super) fn estimate(options: &Options) -> Duration {
    let of = |way: Variant| -> f64 {
        let tries = tries(options, way);
        let one = |size: &u64| -> f64 {
            let all = (0..tries).map(|number| {
                let limit = turns::limit(LINKS as u32, *size, way.round_trips(), phase(number, tries).as_secs_f64());
                match way {
                    Variant::Direct | Variant::Envoy => options.patience.as_secs_f64(),
                    Variant::EnvoyTuned => (2.0 * limit).min(options.patience.as_secs_f64()),
                    _ => limit,
                }
            });
            all.map(|seconds| seconds + round().as_secs_f64() / 2.0).sum()
        };
        options.sizes.iter().map(one).sum()
    };
    let longest = options.ways.iter().map(|way| of(*way)).fold(0.0, f64::max);
    let setting_up = 2.0 * options.ways.len() as f64;
    Duration::from_secs_f64(longest + setting_up)
}

/// Runs the case.
///
/// # Errors
/// A network or a node of Hermes does not start.
pub(super) async fn play(options: &Options, setting: &Setting, progress: &Progress) -> anyhow::Result<Played> {
    let lacking = |way: &Variant| setting.lacks(*way).map(|why| (*way, why));
    let mut missing: Vec<_> = options.ways.iter().filter_map(lacking).collect();
    let mut ways: Vec<_> = options.ways.iter().copied().filter(|way| setting.lacks(*way).is_none()).collect();
    let board = Arc::new(Board::default());

    let mut steady = JoinSet::new();
    for chain in start(setting, &ways, 0, |_| turns::steady(), (progress, &mut missing)).await? {
        steady.spawn(measure_steady(chain, options.sizes.clone(), board.clone()));
    }
    let mut rows: Vec<_> =
        finish(steady, "without outage", &board, progress, None).await?.into_iter().flatten().collect();

    let mut turning = JoinSet::new();
    let used = ways.len();
    ways.retain(|way| missing.iter().all(|(lacking, _)| lacking != way));
    for chain in start(setting, &ways, used, turns::in_turns(LINKS as u32), (progress, &mut missing)).await? {
        let mine = rows.extract_if(.., |row: &mut Row| row.way == chain.way).collect();
        turning.spawn(measure_turning(chain, mine, options.clone(), board.clone()));
    }
    let end = Instant::now() + estimate(options);
    let (mut rows, mut drawn) = (Vec::new(), Vec::new());
    for (of_way, traced) in finish(turning, "one link up at a time", &board, progress, Some(end)).await? {
        rows.extend(of_way);
        drawn.extend(traced);
    }
    rows.sort_by_key(|row: &Row| (row.size, row.way));
    // Downloads through Hermes come first.
    drawn.sort_by_key(|drawn: &Drawn| drawn.way.is_envoy());
    Ok(Played { rows, missing, drawn })
}

/// Starts a chain for each way, one after the other. An Envoy that does not start only removes its way.
async fn start(
    setting: &Setting,
    ways: &[Variant],
    first: usize,
    conditions: impl Fn(usize) -> Conditions + Copy,
    (progress, missing): (&Progress, &mut Vec<(Variant, String)>),
) -> anyhow::Result<Vec<TestPath>> {
    let mut chains = Vec::new();
    for (number, way) in ways.iter().enumerate() {
        progress.step(&format!("four machines, three links: {}", way.name()));
        match TestPath::start(setting, *way, first + number, conditions).await {
            Ok(chain) => chains.push(chain),
            Err(error) if way.is_envoy() => missing.push((*way, format!("{error:#}"))),
            Err(error) => return Err(error.context(way.name())),
        }
    }
    Ok(chains)
}

/// Waits for all ways, and shows progress.
async fn finish<T: 'static>(
    mut running: JoinSet<anyhow::Result<T>>,
    what: &str,
    board: &Board,
    progress: &Progress,
    end: Option<Instant>,
) -> anyhow::Result<Vec<T>> {
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    let mut done = Vec::new();
    progress.step(what);
    while !running.is_empty() {
        tokio::select! {
            Some(one) = running.join_next() => done.push(one.context("a way broke off")??),
            _ = ticks.tick() => {
                let left = end.map(|end| end.saturating_duration_since(Instant::now()).as_secs());
                let left = left.map(|left| format!(", about {}:{:02} left", left / 60, left % 60)).unwrap_or_default();
                progress.detail(&format!("{what}{left}: {}", board.text()));
            }
        }
    }
    Ok(done)
}

async fn measure_steady(mut chain: TestPath, sizes: Vec<u64>, board: Arc<Board>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for size in sizes {
        board.set(chain.way, Some(said(size)));
        let mut steady = None;
        for _ in 0..2 {
            let object = chain.fresh();
            steady = Some(chain.download(object, size, STEADY_TIMEOUT).await?.0);
        }
        rows.push(Row { way: chain.way, size, steady, first: Vec::new(), again: Vec::new() });
    }
    board.set(chain.way, None);
    Ok(rows)
}

async fn measure_turning(
    mut chain: TestPath,
    mut rows: Vec<Row>,
    options: Options,
    board: Arc<Board>,
) -> anyhow::Result<(Vec<Row>, Vec<Drawn>)> {
    let (way, mut drawn) = (chain.way, Vec::new());
    let (tries, patience) = (tries(&options, way), patience(&options, way));
    for row in &mut rows {
        for number in 0..tries {
            let counted = if tries > 1 { format!(" {} of {tries}", number + 1) } else { String::new() };
            board.set(way, Some(said(row.size) + &counted));
            let object = chain.fresh();
            let begin = phase(number, tries);
            let (tried, trace) = attempt(&mut chain, object, row.size, (begin, patience)).await?;
            if number == 0 && row.size == options.drawn() && matches!(way, Variant::Hermes | Variant::EnvoyTuned) {
                drawn.push(Drawn { way, size: row.size, tried: tried.clone(), trace });
            }
            row.first.push(tried);
            if way == Variant::HermesCache {
                row.again.push(attempt(&mut chain, object, row.size, (begin, patience)).await?.0);
            }
        }
    }
    board.set(way, None);
    Ok((rows, drawn))
}

async fn attempt(
    chain: &mut TestPath,
    object: u64,
    size: u64,
    (begin, patience): (Duration, Duration),
) -> anyhow::Result<(Try, Trace)> {
    chain.lab.wait_for(begin).await;
    let (download, trace) = chain.download(object, size, patience).await?;
    let limit = turns::limit(LINKS as u32, size, chain.way.round_trips(), download.phase);
    Ok((Try { download, limit }, trace))
}
