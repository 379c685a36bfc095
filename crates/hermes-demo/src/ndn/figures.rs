//! The figures of the case, beside the paper's.
//!
//! In: the measurements. Out: for each file and way the median time and its difference to UDP without an overlay, as text
//! or JSON. Never: a figure that was not measured in this run, but for the paper's.

use std::collections::BTreeSet;

use serde::Serialize;

use super::consumer::Fetched;
use super::lab::RATE;
use super::run::Played;
use super::way::{PIPELINE, Published, Way, published};
use crate::terminal::{Align, Paint, bytes, grouped, table};

/// A file on a way.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    pub(super) size: usize,
    pub(super) way: Way,
    pub(super) median_s: f64,
    /// The difference to UDP without an overlay.
    added_ms: f64,
    pub(super) added_percent: f64,
    published: Option<Published>,
    repeated_interests: u64,
    seconds: Vec<f64>,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    rate_bits_s: u64,
    /// The command of the forwarders at both ends of each way.
    #[serde(skip_serializing_if = "Option::is_none")]
    forwarder: Option<String>,
    pipeline: usize,
    pub(super) lines: Vec<Line>,
    policy_fetches: u32,
    landed: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    astray: Option<String>,
}

fn median(fetches: &[Fetched]) -> f64 {
    let mut sorted: Vec<f64> = fetches.iter().map(|fetched| fetched.seconds).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = |at: usize| sorted.get(at).copied().unwrap_or_default();
    f64::midpoint(middle(sorted.len().saturating_sub(1) / 2), middle(sorted.len() / 2))
}

impl Line {
    fn of(played: &Played, size: usize, way: Way, fetches: &[Fetched]) -> Self {
        let direct = played.fetches.get(&(size, Way::Udp)).map_or(0.0, |fetches| median(fetches));
        let median_s = median(fetches);
        Self {
            size,
            way,
            median_s,
            added_ms: (median_s - direct) * 1e3,
            added_percent: (median_s / direct - 1.0) * 100.0,
            published: published(size).filter(|_| way.is_overlay()),
            repeated_interests: fetches.iter().map(|fetched| fetched.repeated).sum(),
            seconds: fetches.iter().map(|fetched| fetched.seconds).collect(),
        }
    }

    fn cells(&self) -> Vec<String> {
        let added = match (self.way, self.size) {
            (Way::Udp, _) => "-".to_owned(),
            (_, 0) => format!("{:+.2} ms", self.added_ms),
            _ => format!("{:+.1} %", self.added_percent),
        };
        let papers = match self.published {
            Some(Published::Milliseconds(added)) => format!("+{added} ms"),
            Some(Published::Percent(added)) => format!("+{added} %"),
            None => "-".to_owned(),
        };
        vec![
            if self.size == 0 { "0".to_owned() } else { bytes(self.size as u64) },
            self.way.name().to_owned(),
            if self.size == 0 { format!("{:.2} ms", self.median_s * 1e3) } else { format!("{:.3} s", self.median_s) },
            added,
            papers,
            self.repeated_interests.to_string(),
        ]
    }
}

impl Figures {
    pub(super) fn of(played: &Played, forwarder: &[String]) -> Self {
        let sizes: BTreeSet<usize> = played.fetches.keys().map(|(size, _)| *size).collect();
        let ways = Way::DIRECT.into_iter().chain(Way::OVERLAYS);
        let keys = sizes.into_iter().flat_map(|size| ways.clone().map(move |way| (size, way)));
        let lines = keys.filter_map(|(size, way)| {
            let fetches = played.fetches.get(&(size, way))?;
            Some(Line::of(played, size, way, fetches))
        });
        Self {
            rate_bits_s: RATE,
            forwarder: (!forwarder.is_empty()).then(|| forwarder.join(" ")),
            pipeline: PIPELINE,
            lines: lines.collect(),
            policy_fetches: played.policy_fetches,
            landed: played.landed,
            astray: played.astray.clone(),
        }
    }

    /// Whether every Interest reached the replica that policy names. Content that is not intact ends the case before.
    pub(super) fn is_whole(&self) -> bool {
        self.landed == self.policy_fetches
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(super) fn text(&self, paint: Paint, seconds: f64) -> String {
        let columns = [
            ("FILE", Align::Right),
            ("WAY", Align::Left),
            ("TIME", Align::Right),
            ("MORE THAN UDP", Align::Right),
            ("PAPER", Align::Right),
            ("SENT AGAIN", Align::Right),
        ];
        let rows: Vec<Vec<String>> = self.lines.iter().map(Line::cells).collect();
        let landed = format!("{} of {}", grouped(self.landed.into()), grouped(self.policy_fetches.into()));
        let forwarder = self.forwarder.as_ref();
        let forwarder =
            forwarder.map_or_else(String::new, |one| format!("  Both ends of each way have a forwarder: {one}\n"));
        let verdict = match &self.astray {
            None => paint.good("✓ everything arrived intact"),
            Some(why) => paint.bad(&format!("✗ {why}")),
        };
        format!(
            "\n                                               ┌══▶ replica of alice, DEV\n  \
             consumers ──▶ {device} ══▶ {first} ══▶ {second} ══╪══▶ ... alice, TEST\n  \
             alice, bob    10 Mbit/s                      ╪══▶ ... bob, DEV\n                                               \
             └══▶ ... bob, TEST\n\n{}{forwarder}\n{}\n  Interests that reached the replica of their user and namespace: {landed}\n  \
             {verdict} {}\n",
            paint.dim(
                "  Packets of NDN travel as the bytes of HTTP tunnels. The first proxy reads which service they are, the\n  \
                 second one their user and namespace. The paper's figures are those of its Table VIII.\n"
            ),
            table(paint, &columns, &rows),
            paint.dim(&format!("({seconds:.1} s)")),
            device = paint.bold("device"),
            first = paint.bold("proxy1"),
            second = paint.bold("proxy2"),
        )
    }
}
