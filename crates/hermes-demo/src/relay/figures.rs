//! The figures of the case.
//!
//! In: the chat and the stream. Out: text with a chart, or JSON. Never: a figure that was not measured in this run.

use serde::Serialize;
use serde_json::json;

use super::chat::Chat;
use super::voice::{Stream, Voice};
use crate::terminal::{Align, Paint, table};

/// The gaps between two packets that a listener does not notice, in milliseconds.
pub(super) const USUAL_GAP: std::ops::RangeInclusive<f64> = 10.0..=30.0;
/// The width of the longest bar of the chart, and the number of bars.
const BAR: usize = 44;
const BARS: usize = 10;

/// All figures.
pub(super) struct Figures {
    pub(super) chat: Chat,
    pub(super) voice: Voice,
    /// Publications at each node.
    pub(super) links: [u64; 3],
}

/// The figures of a stream.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    packets: usize,
    lost: usize,
    pub(super) median_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    gaps_outside_10_to_30_ms: usize,
    gaps: usize,
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1) as f64;
    sorted.get((last * part).round() as usize).copied().unwrap_or_default()
}

impl Summary {
    pub(super) fn of(stream: &Stream) -> Self {
        let mut delays: Vec<f64> = stream.delay_ms.iter().flatten().copied().collect();
        delays.sort_by(f64::total_cmp);
        Self {
            packets: stream.sent,
            lost: stream.sent - delays.len(),
            median_ms: quantile(&delays, 0.5),
            p99_ms: quantile(&delays, 0.99),
            max_ms: quantile(&delays, 1.0),
            gaps_outside_10_to_30_ms: stream.gap_ms.iter().filter(|gap| !USUAL_GAP.contains(gap)).count(),
            gaps: stream.gap_ms.len(),
        }
    }

    fn cells(&self, name: &str) -> Vec<String> {
        let ms = |ms: f64| format!("{ms:.2} ms");
        vec![
            name.to_owned(),
            self.packets.to_string(),
            self.lost.to_string(),
            ms(self.median_ms),
            ms(self.p99_ms),
            ms(self.max_ms),
            format!("{} of {}", self.gaps_outside_10_to_30_ms, self.gaps),
        ]
    }
}

impl Figures {
    /// Whether everything arrived, in order and once.
    pub(super) fn is_whole(&self) -> bool {
        let [root, _, yard] = self.links;
        self.chat.is_whole() && Summary::of(&self.voice.relay).lost == 0 && root == yard
    }

    /// All figures as JSON.
    ///
    /// # Errors
    /// None that can occur.
    pub(super) fn json(&self) -> anyhow::Result<String> {
        let [root, hall, yard] = self.links;
        let figures = json!({
            "chat": self.chat,
            "voice": {"relay": Summary::of(&self.voice.relay), "udp": Summary::of(&self.voice.udp)},
            "streams": self.voice,
            "publications": {"root": root, "hall": hall, "yard": yard},
            "whole": self.is_whole(),
        });
        Ok(serde_json::to_string_pretty(&figures)? + "\n")
    }

    /// All figures as text.
    pub(super) fn text(&self, paint: Paint) -> String {
        let mut text = format!("\n{}\n\n", paint.bold("  A chat and a voice over three relays: hall - root - yard"));
        for line in &self.chat.yard {
            text += &format!("    {line}\n");
        }
        let verdict = if self.chat.is_whole() {
            paint.good("each shell has each line once, in this order")
        } else {
            paint.bad("the shells differ")
        };
        text += &format!("  {verdict}\n\n");
        let columns = [
            ("50 packets a second", Align::Left),
            ("packets", Align::Right),
            ("lost", Align::Right),
            ("median", Align::Right),
            ("99 %", Align::Right),
            ("longest", Align::Right),
            ("odd gaps", Align::Right),
        ];
        let rows = [
            Summary::of(&self.voice.relay).cells("hall, root, yard"),
            Summary::of(&self.voice.udp).cells("UDP on loopback"),
        ];
        text += &table(paint, &columns, &rows);
        text += &paint.dim("  An odd gap between two packets is below 10 or above 30 ms.\n");
        text += &format!("\n{}\n", paint.dim("  packets by delay over the relays"));
        for (delay, count, share) in bars(&self.voice.relay) {
            let bar = "█".repeat((share * BAR as f64).round() as usize);
            text += &format!("  {delay:>9} │{bar} {count}\n");
        }
        let [root, hall, yard] = self.links;
        text + &format!("\n  {root} publications; {hall} crossed the link to hall, and {yard} that to yard\n")
    }
}

/// The packets by delay: the label, their number, and their share of the longest bar.
fn bars(stream: &Stream) -> Vec<(String, usize, f64)> {
    let longest = stream.delay_ms.iter().flatten().copied().fold(f64::MIN_POSITIVE, f64::max);
    let mut counts = [0_usize; BARS];
    for delay in stream.delay_ms.iter().flatten() {
        counts[((delay / longest * BARS as f64) as usize).min(BARS - 1)] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or_default().max(1);
    let label = |at: usize| format!("{:.2} ms", at as f64 * longest / BARS as f64);
    let bar = |(at, count): (usize, &usize)| (label(at), *count, *count as f64 / most as f64);
    counts.iter().enumerate().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_odd_gaps_are_counted() {
        let stream =
            Stream { sent: 4, delay_ms: vec![Some(1.0), None, Some(0.1), Some(9.0)], gap_ms: vec![20.0, 45.0] };
        let summary = Summary::of(&stream);
        assert_eq!((summary.lost, summary.gaps_outside_10_to_30_ms, summary.gaps), (1, 1, 2));
        assert!((summary.median_ms - 1.0).abs() < f64::EPSILON && (summary.max_ms - 9.0).abs() < f64::EPSILON);
        let bars = bars(&stream);
        assert_eq!((bars[0].1, bars[1].1, bars[BARS - 1].1), (1, 1, 1));
    }
}
