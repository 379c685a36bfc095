//! The status of all workers of a node: for the choice of a worker, for `/workers` and for the metrics.
//!
//! In: what each worker says of itself, at each turn of its loop. Out: views of it. Never: a choice.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hermes_net::dispatch::scheduler::Status;
use hermes_net::dispatch::{self, Groups, Mode, Table};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use serde::Serialize;

use super::sandbox::Sandbox;
use super::turns::{CLASSES, Histogram, TurnCounts};
use crate::metrics::ListenerLabels;

/// The time from which others may accept connections of a worker: most turns are much shorter.
const STANDING: Duration = Duration::from_millis(1);
/// The time from which clients notice that nothing happens.
pub const STANDSTILL: Duration = Duration::from_secs(1);

/// The status of all workers of a node.
pub struct Workers {
    pub table: Table,
    /// The counts of each worker's turns.
    pub turns: Vec<TurnCounts>,
    /// How long ready work of each worker waits, in microseconds.
    pub delays: Vec<AtomicU64>,
    /// True for workers that accept no connection, because of overload.
    pub stopped: Vec<AtomicBool>,
    /// The listeners that are confined to some of the workers.
    pub sandbox: Sandbox,
    /// True if workers without work accept connections of others (mode `directed`).
    pub relieves: AtomicBool,
}

impl Workers {
    /// Creates the status of this number of workers. Without privileges, no program in the kernel reads it.
    pub fn new(count: usize, groups: Groups) -> Self {
        let table = Table::shared(count, groups).unwrap_or_else(|_| Table::private(count, groups));
        let turns = std::iter::repeat_with(TurnCounts::default).take(count).collect();
        let delays = std::iter::repeat_with(AtomicU64::default).take(count).collect();
        let stopped = std::iter::repeat_with(AtomicBool::default).take(count).collect();
        Self { table, turns, delays, stopped, sandbox: Sandbox::default(), relieves: AtomicBool::new(false) }
    }

    /// The status of each worker, for `/workers`.
    pub fn view(&self) -> Vec<WorkerView> {
        let now = dispatch::now().unwrap_or_default();
        let hung_after = self.table.parameters().hung_after;
        let statuses = self.table.statuses().zip(&self.turns).enumerate();
        let view = statuses.map(|(number, (status, turns))| {
            let silence = if status.is_parked { Duration::ZERO } else { now.saturating_sub(status.turned) };
            WorkerView {
                worker: number,
                state: match () {
                    () if status.is_parked => "waiting",
                    () if silence < hung_after => "turning",
                    () => "hung",
                },
                silence_ms: u64::try_from(silence.as_millis()).unwrap_or(u64::MAX),
                is_selected: self.table.is_selected(number),
                is_sandbox: self.table.is_sandbox(number),
                connections: status.connections,
                sessions: status.sessions,
                pending: status.pending,
                delay_ms: self.delays[number].load(Ordering::Relaxed) / 1000,
                turns: turns.events.count(),
                events: turns.events.sum(),
                busy_ms: turns.micros.sum() / 1000,
                selections: turns.selections.load(Ordering::Relaxed),
            }
        });
        view.collect()
    }

    /// The workers whose loops stand still.
    pub fn hung(&self) -> Vec<usize> {
        let (now, after) = (dispatch::now().unwrap_or_default(), self.table.parameters().hung_after);
        let stands_still = |status: &Status| !status.is_parked && now.saturating_sub(status.turned) >= after;
        self.table.statuses().enumerate().filter(|(_, status)| stands_still(status)).map(|(worker, _)| worker).collect()
    }

    /// The workers of the same group whose loops have not turned for a moment.
    pub fn standing(&self, worker: usize, now: Duration) -> impl Iterator<Item = usize> {
        let stands = move |status: &Status| !status.is_parked && now.saturating_sub(status.turned) >= STANDING;
        self.table.neighbours(worker).filter(move |(_, status)| stands(status)).map(|(other, _)| other)
    }

    /// True if the loops of all workers stand still for so long that clients notice: nobody serves them. `but` is the number of a
    /// worker that does not count, since it asks.
    pub fn stand_still(&self, but: Option<usize>) -> bool {
        let now = dispatch::now().unwrap_or_default();
        let stands_still = |status: &Status| !status.is_parked && now.saturating_sub(status.turned) >= STANDSTILL;
        // Workers of the sandbox serve confined listeners alone.
        let counts = |worker: usize| Some(worker) != but && !self.table.is_sandbox(worker);
        let mut others = self.table.statuses().enumerate().filter(|(worker, _)| counts(*worker));
        others.all(|(_, status)| stands_still(&status))
    }

    /// True if all workers outside the sandbox accept no connection, because of overload.
    pub fn are_stopped(&self) -> bool {
        let mut ordinary = self.stopped.iter().enumerate().filter(|(worker, _)| !self.table.is_sandbox(*worker));
        ordinary.all(|(_, is_stopped)| is_stopped.load(Ordering::Relaxed))
    }

    /// How the kernel chooses a worker for a new connection.
    pub fn mode(&self) -> &'static str {
        match self.table.mode() {
            Mode::Hash => "reuseport",
            Mode::Directed => "directed",
            Mode::RoundRobin => "roundrobin",
            Mode::First => "exclusive",
        }
    }
}

/// The status of a worker.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerView {
    pub worker: usize,
    /// `waiting` for events, `turning`, or `hung`: its loop stands still.
    pub state: &'static str,
    /// Time since the loop last turned. 0 while it waits.
    pub silence_ms: u64,
    /// True if new connections come to this worker in the mode `directed`.
    #[serde(rename = "selected")]
    pub is_selected: bool,
    /// True if only confined listeners use this worker.
    #[serde(rename = "sandbox")]
    pub is_sandbox: bool,
    pub connections: u64,
    pub sessions: u64,
    /// Tasks that are woken and not yet polled.
    pub pending: u64,
    /// How long ready work waits, at least for the last second.
    pub delay_ms: u64,
    /// Turns since the start.
    pub turns: u64,
    /// Polled tasks since the start.
    pub events: u64,
    /// Time of all turns.
    pub busy_ms: u64,
    /// Runs of the scheduler.
    pub selections: u64,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WorkerLabels {
    worker: usize,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.view()).finish()
    }
}

/// The metrics of the workers.
impl Collector for Workers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let view = self.view();
        let mut confined = encoder.encode_descriptor(
            "listener_confined",
            "1 while the sandbox serves the listener",
            None,
            MetricType::Gauge,
        )?;
        for (listener, is_confined) in self.sandbox.listeners() {
            confined.encode_family(&ListenerLabels { listener })?.encode_gauge(&i64::from(is_confined))?;
        }
        let mut each = |name: &str, help: &str, kind: MetricType, value: &dyn Fn(&WorkerView) -> u64| {
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for worker in &view {
                let labels = WorkerLabels { worker: worker.worker };
                let mut metric = family.encode_family(&labels)?;
                match kind {
                    MetricType::Counter => metric.encode_counter::<NoLabelSet, _, u64>(&value(worker), None)?,
                    _ => metric.encode_gauge(&i64::try_from(value(worker)).unwrap_or(i64::MAX))?,
                }
            }
            Ok(())
        };
        each("worker_connections", "Open connections of each worker", MetricType::Gauge, &|view| view.connections)?;
        each("worker_sessions", "Open sessions of each worker", MetricType::Gauge, &|view| view.sessions)?;
        each("worker_pending", "Tasks that are woken and not yet polled", MetricType::Gauge, &|view| view.pending)?;
        each("worker_delay_milliseconds", "How long ready work waits", MetricType::Gauge, &|view| view.delay_ms)?;
        each("worker_hung", "1 while the loop of the worker stands still", MetricType::Gauge, &|view| {
            (view.state == "hung").into()
        })?;
        each("worker_selected", "1 while new connections are directed to the worker", MetricType::Gauge, &|view| {
            view.is_selected.into()
        })?;
        each("worker_selections", "Runs of the scheduler", MetricType::Counter, &|view| view.selections)?;
        let mut histograms = |name: &str, help: &str, unit: Option<&Unit>, of: fn(&TurnCounts) -> (&Histogram, f64)| {
            let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
            for (worker, counts) in self.turns.iter().enumerate() {
                let (histogram, scale) = of(counts);
                // Read only once, because the worker keeps counting.
                let classes = histogram.counts();
                family.encode_family(&WorkerLabels { worker })?.encode_histogram::<NoLabelSet>(
                    histogram.sum() as f64 * scale,
                    classes.iter().sum(),
                    &buckets(classes, scale),
                    None,
                )?;
            }
            Ok(())
        };
        histograms("worker_turn_events", "Polled tasks of each turn of the loop", None, |counts| {
            (&counts.events, 1.0)
        })?;
        histograms("worker_turn", "Duration of each turn of the loop", Some(&Unit::Seconds), |counts| {
            (&counts.micros, 1e-6)
        })
    }
}

/// The upper bound and the count of each bucket. Two classes are a bucket, since each worker has all of them.
fn buckets(classes: [u64; CLASSES], scale: f64) -> Vec<(f64, u64)> {
    let bound = |class: usize| if class + 1 == CLASSES { f64::INFINITY } else { ((1_u64 << class) - 1) as f64 * scale };
    let pairs = classes.chunks(2).zip((1..).step_by(2));
    pairs.map(|(pair, last)| (bound(last), pair.iter().sum())).collect()
}
