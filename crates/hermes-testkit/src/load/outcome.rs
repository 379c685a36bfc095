//! The outcome of a load: summarised latencies, and failures counted by kind.
//!
//! In: single results. Out: [`Outcome`], which the load's process passes to the benchmark as JSON. No failure is
//! dropped: `completed + failed` is the number of attempts.

use std::{collections::BTreeMap, io, time::Duration};

use serde::{Deserialize, Serialize};

/// Maximum number of samples for percentiles; further ones count only in mean and deviation. 40 MB.
const SAMPLES: usize = 5_000_000;

/// The reason why an exchange failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Connecting failed.
    Connect(io::ErrorKind),
    /// TLS failed.
    Tls(String),
    /// Reading or writing failed.
    Io(io::ErrorKind),
    /// The peer closed the connection before the response was complete.
    Closed,
    /// A status other than 200.
    Status(u16),
    /// The response is not HTTP, or has no length.
    Malformed(&'static str),
    /// The content is wrong.
    WrongBytes,
    /// The response timed out.
    Timeout,
    /// An error of HTTP/2.
    H2(String),
}

/// Failures by kind.
pub type Failures = BTreeMap<String, u64>;

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean_us: f64,
    /// Standard deviation.
    pub sd_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    #[serde(default)]
    pub p999_us: f64,
    /// Longest.
    pub max_us: f64,
}

/// The outcome of a load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Number of exchanges or datagrams that arrived intact.
    pub completed: u64,
    /// Number of failed ones.
    pub failed: u64,
    /// The failures by kind.
    pub failures: Failures,
    /// Measured time in seconds.
    pub seconds: f64,
    /// Latency of completed exchanges; for a burst from the common instant.
    pub latency: Option<Latency>,
    /// Completed exchanges that took longer than the load calls delayed.
    #[serde(default)]
    pub delayed: u64,
    /// Responses within the measured time, if others count too: exchanges that began in it.
    #[serde(default)]
    pub in_time: Option<u64>,
    /// For a burst, also the latency from each client's own start.
    pub own_latency: Option<Latency>,
    /// Payload bytes that arrived in the measured time (bulk and datagrams).
    pub bytes: u64,
    /// CPU seconds of this process in the measured time.
    pub load_cpu: f64,
    /// CPU seconds of each watched process in the measured time.
    pub watched_cpu: Vec<f64>,
    /// CPU seconds of the whole machine in the measured time.
    pub machine_cpu: f64,
}

/// Collects single results.
#[derive(Debug, Default)]
pub struct Recorder {
    samples: Vec<u64>,
    count: u64,
    sum: f64,
    squares: f64,
    failures: Failures,
}

impl Recorder {
    /// Counts one result.
    pub fn record(&mut self, result: Result<Duration, Failure>) {
        match result {
            Ok(latency) => self.success(latency),
            Err(failure) => self.failure(&failure),
        }
    }

    /// Counts a success.
    pub fn success(&mut self, latency: Duration) {
        let us = latency.as_secs_f64() * 1e6;
        self.count += 1;
        self.sum += us;
        self.squares += us * us;
        if self.samples.len() < SAMPLES {
            self.samples.push(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// Counts a failure.
    pub fn failure(&mut self, failure: &Failure) {
        *self.failures.entry(failure.to_string()).or_default() += 1;
    }

    /// Adds the results of another collector.
    pub fn absorb(&mut self, other: Self) {
        let room = SAMPLES - self.samples.len();
        self.samples.extend(other.samples.into_iter().take(room));
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
        for (kind, count) in other.failures {
            *self.failures.entry(kind).or_default() += count;
        }
    }

    /// Summarises the results. The window adds times and CPU (see `super::window`).
    pub fn outcome(mut self) -> Outcome {
        let latency = self.latency();
        Outcome {
            completed: self.count,
            failed: self.failures.values().sum(),
            failures: self.failures,
            latency,
            ..Outcome::default()
        }
    }

    /// `None` when nothing succeeded.
    pub fn latency(&mut self) -> Option<Latency> {
        if self.count == 0 {
            return None;
        }
        self.samples.sort_unstable();
        let n = self.count as f64;
        let mean = self.sum / n;
        let at = |q: f64| self.samples[((self.samples.len() - 1) as f64 * q).round() as usize] as f64 / 1e3;
        Some(Latency {
            mean_us: mean,
            sd_us: (self.squares / n - mean * mean).max(0.0).sqrt(),
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
        })
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect(kind) => write!(f, "connect: {kind}"),
            Self::Tls(why) => write!(f, "TLS: {why}"),
            Self::Io(kind) => write!(f, "{kind}"),
            Self::Closed => f.write_str("closed before the answer was whole"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::Malformed(what) => write!(f, "malformed: {what}"),
            Self::WrongBytes => f.write_str("wrong bytes"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::H2(why) => write!(f, "h2: {why}"),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error.kind())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn figures_are_those_of_the_samples() {
        let mut recorder = Recorder::default();
        for us in (1..=100).rev() {
            recorder.record(Ok(Duration::from_micros(us)));
        }
        let latency = recorder.latency().unwrap();
        assert!((latency.mean_us - 50.5).abs() < 1e-9);
        assert!((latency.sd_us - 28.866).abs() < 1e-3);
        assert_eq!((latency.p50_us, latency.p99_us, latency.max_us), (51.0, 99.0, 100.0));
    }

    #[test]
    fn failures_are_counted_by_kind_and_never_as_successes() {
        let mut a = Recorder::default();
        a.record(Err(Failure::Status(503)));
        let mut b = Recorder::default();
        b.record(Err(Failure::Status(503)));
        b.record(Err(Failure::Timeout));
        b.record(Ok(Duration::from_micros(5)));
        a.absorb(b);
        let outcome = a.outcome();
        assert_eq!((outcome.completed, outcome.failed), (1, 3));
        assert_eq!(outcome.failures["status 503"], 2);
    }
}
