//! The figures of the case, beside the paper's.
//!
//! In: the measurements. Out: means, rates and gains of each way, as text or JSON. A way's time is compared with the
//! direct way of the same run. Never: a figure that was not measured in this run, but for the paper's.

use serde::Serialize;

use super::Options;
use super::run::{LOSS, LOSSY_BYTES, Measured, Played};
use super::way::{Published, Way};
use crate::content::MAX_BYTES;
use crate::terminal::{Align, Paint, table};

/// One way.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    pub(super) way: Way,
    /// Mean milliseconds of a request, and what they are more than on the direct way.
    persistent_ms: f64,
    added_persistent_ms: f64,
    own_connection_ms: f64,
    added_own_connection_ms: f64,
    published: Option<Published>,
    /// Median megabits per second of downloads over cables, and over the path that loses packets.
    cable_mbit_s: f64,
    pub(super) lossy_mbit_s: Option<f64>,
    /// The rate over losses in relation to the direct way.
    pub(super) gain: Option<f64>,
    server_sees_client: bool,
    requests: usize,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) lines: Vec<Line>,
    refusal_passed: bool,
    pause_ms: u64,
    loss: f64,
    lossy_bytes: usize,
    cable_bytes: usize,
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

fn rate(bytes: usize, seconds: &[f64]) -> Option<f64> {
    median(seconds).map(|seconds| bytes as f64 * 8e-6 / seconds)
}

impl Line {
    fn of(way: Way, measured: &Measured, direct: &Measured) -> Self {
        let (persistent_ms, own_connection_ms) = (mean(&measured.persistent_ms), mean(&measured.own_connection_ms));
        let lossy_mbit_s = rate(LOSSY_BYTES, &measured.lossy_s);
        let direct_lossy = rate(LOSSY_BYTES, &direct.lossy_s);
        Self {
            way,
            persistent_ms,
            added_persistent_ms: persistent_ms - mean(&direct.persistent_ms),
            own_connection_ms,
            added_own_connection_ms: own_connection_ms - mean(&direct.own_connection_ms),
            published: way.published(),
            cable_mbit_s: rate(MAX_BYTES, &measured.cable_s).unwrap_or_default(),
            lossy_mbit_s,
            gain: lossy_mbit_s.zip(direct_lossy).map(|(own, direct)| own / direct),
            server_sees_client: measured.shows_client,
            requests: measured.persistent_ms.len(),
        }
    }

    fn cells(&self) -> Vec<String> {
        let is_direct = self.way == Way::Direct;
        let time = |total: f64, added: f64| {
            if is_direct { format!("{total:.3} ms") } else { format!("{added:+.3} ms") }
        };
        let papers = |figure: fn(Published) -> f64| {
            self.published.map_or_else(|| "-".to_owned(), |published| format!("+{:.3}", figure(published)))
        };
        let lossy = match (self.lossy_mbit_s, self.gain) {
            (Some(rate), Some(_)) if is_direct => format!("{rate:.1} Mbit/s"),
            (Some(rate), Some(gain)) => format!("{rate:.1} Mbit/s, {gain:.1} times"),
            _ => "-".to_owned(),
        };
        vec![
            self.way.name().to_owned(),
            time(self.persistent_ms, self.added_persistent_ms),
            papers(|published| published.persistent_ms),
            time(self.own_connection_ms, self.added_own_connection_ms),
            papers(|published| published.own_connection_ms),
            format!("{:.1} Gbit/s", self.cable_mbit_s / 1e3),
            lossy,
            if self.server_sees_client { "the client's" } else { "a router's" }.to_owned(),
        ]
    }
}

impl Figures {
    pub(super) fn of(options: &Options, played: &Played) -> Self {
        let nothing = Measured::default();
        let direct = played.ways.get(&Way::Direct).unwrap_or(&nothing);
        Self {
            lines: played.ways.iter().map(|(way, measured)| Line::of(*way, measured, direct)).collect(),
            refusal_passed: played.is_refusal_passed,
            pause_ms: u64::try_from(options.pause.as_millis()).unwrap_or(u64::MAX),
            loss: LOSS,
            lossy_bytes: LOSSY_BYTES,
            cable_bytes: MAX_BYTES,
        }
    }

    /// Whether refusals pass, and the server sees the client's address where Hermes shows it.
    pub(super) fn is_whole(&self) -> bool {
        self.refusal_passed && self.lines.iter().all(|line| line.server_sees_client || !line.way.shares_fate())
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(super) fn text(&self, paint: Paint, seconds: f64) -> String {
        let columns = [
            ("WAY", Align::Left),
            ("A REQUEST", Align::Right),
            ("PAPER", Align::Right),
            ("WITH A CONNECTION", Align::Right),
            ("PAPER", Align::Right),
            ("CABLES", Align::Right),
            ("100 MS, 1 % LOSS", Align::Right),
            ("THE SERVER SEES", Align::Left),
        ];
        let rows: Vec<Vec<String>> = self.lines.iter().map(Line::cells).collect();
        let refused = if self.refusal_passed { paint.good("✓ refused") } else { paint.bad("✗ connected") };
        let verdict = if self.is_whole() {
            paint.good("✓ everything arrived intact")
        } else {
            paint.bad("✗ an end saw something else than without routers")
        };
        format!(
            "\n  client ──▶ {ingress} ══▶ {egress} ──▶ server\n\n{}\n{}\n{}\n  {verdict} {}\n",
            paint.dim(
                "  Neither client nor server is configured. The first router takes TCP connections on their way. By the\n  \
                 server's port it passes them on over TCP, HTTP/2, RINA or NDN; the second router leads them back to TCP.\n  \
                 Times are what a way adds to a HEAD request; the paper is PEP-DNA, Table II.\n"
            ),
            table(paint, &columns, &rows),
            format_args!("  A client of a port at which nobody listens is {refused}."),
            paint.dim(&format!("({seconds:.1} s)")),
            ingress = paint.bold("router"),
            egress = paint.bold("router"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(ms: f64, seconds: f64) -> Measured {
        Measured {
            persistent_ms: vec![ms, ms],
            own_connection_ms: vec![2.0 * ms],
            cable_s: vec![seconds, 1.0, 9.0],
            lossy_s: vec![seconds],
            shows_client: true,
        }
    }

    #[test]
    fn a_way_is_compared_with_the_direct_one() {
        let line = Line::of(Way::Split, &measured(3.0, 2.0), &measured(1.0, 8.0));
        assert_eq!((line.added_persistent_ms, line.added_own_connection_ms), (2.0, 4.0));
        assert_eq!(line.gain, Some(4.0));
        assert_eq!(line.cable_mbit_s, MAX_BYTES as f64 * 8e-6 / 2.0);
    }
}
