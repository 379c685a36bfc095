//! Figures of the video case, beside the paper's.
//!
//! In: rounds. Out: mean and standard deviation of each count, for each way and length; a table, or JSON. The paper's
//! values are those of Table V: macroblock errors and processed frames, 30 runs.

use std::collections::BTreeSet;

use serde::Serialize;

use super::run::{Round, Stream, Variant};
use crate::terminal::{Align, Paint, grouped, table};

/// Mean and standard deviation (of the sample; 0 for one run).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Figure {
    mean: f64,
    sd: f64,
}

impl Figure {
    fn of(values: &[u64]) -> Self {
        let count = values.len().max(1) as f64;
        let mean = values.iter().map(|value| *value as f64).sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (*value as f64 - mean).powi(2)).sum();
        Self { mean, sd: if values.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 } }
    }

    /// The value of one run; else mean and deviation.
    fn text(self, runs: usize) -> String {
        if runs == 1 { grouped(self.mean as u64) } else { format!("{:.2} ± {:.2}", self.mean, self.sd) }
    }
}

/// The two ways; ═ is HTTP/2 with mutual TLS.
const OVERLAY: &str =
    "  overlay   ffmpeg ◀── alice ◀══ 1 % loss ══ ingress ◀══ dist-1 or dist-2 ◀══ server ◀── video server\n";
const DIRECT: &str =
    "  direct    ffmpeg ◀──────────── 1 % loss ────────────────────────────────────────────── video server\n";

/// The figures of Table V for a way and a length.
#[derive(Debug, Clone, Copy, Serialize)]
struct Paper {
    macroblock_errors: Figure,
    frames_processed: Figure,
}

const PAPER: [(Variant, u64, [f64; 4]); 4] = [
    (Variant::Overlay, 60, [0.0, 0.0, 1800.0, 0.0]),
    (Variant::Direct, 60, [26.74, 5.26, 1781.0, 10.28]),
    (Variant::Overlay, 120, [0.0, 0.0, 3600.0, 0.0]),
    (Variant::Direct, 120, [55.88, 7.02, 3561.47, 12.57]),
];

/// The figures of a way and length over all rounds.
#[derive(Debug, Serialize)]
struct Line {
    way: Variant,
    seconds: u64,
    packets_sent: Figure,
    packets_received: Figure,
    packets_missed: Figure,
    packets_altered: Figure,
    frames_sent: Figure,
    frames_processed: Figure,
    frames_damaged: Figure,
    frames_corrupt: Figure,
    macroblock_errors: Figure,
    macroblocks_concealed: Figure,
    /// The maximum over all rounds.
    most_packets_missed: u64,
    most_frames_corrupt: u64,
    most_frames_damaged: u64,
    /// Streams so damaged that the user's ffmpeg exited before they ended.
    given_up: usize,
    paper: Option<Paper>,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    runs: usize,
    loss_percent: f64,
    lines: Vec<Line>,
    rounds: Vec<Round>,
    /// The reasons of failed runs.
    failed: Vec<String>,
}

impl Figures {
    /// Computes the figures of at least one round.
    pub(super) fn of(rounds: Vec<Round>, failed: Vec<String>) -> Self {
        let first: &[Stream] = rounds.first().map_or(&[], |round| &round.streams);
        let lines = first.iter().map(|stream| Line::of(stream.way, stream.seconds, &rounds)).collect();
        let (lost, all) = rounds.iter().fold((0, 0), |(lost, all), Round { link, .. }| {
            (lost + link.down_lost + link.up_lost, all + link.down + link.up)
        });
        Self { runs: rounds.len(), loss_percent: 100.0 * lost as f64 / (all.max(1) as f64), lines, rounds, failed }
    }

    /// Whether every stream over the overlay arrived unchanged.
    pub(super) fn overlay_is_perfect(&self) -> bool {
        let mut overlay =
            self.rounds.iter().flat_map(|round| &round.streams).filter(|stream| stream.way == Variant::Overlay);
        overlay.all(is_perfect) && self.failed.is_empty()
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(super) fn text(&self, paint: Paint, seconds: f64) -> String {
        let mut columns = vec![
            ("", Align::Left),
            ("RECEIVED", Align::Right),
            ("MISSED", Align::Right),
            ("FRAMES", Align::Right),
            ("CORRUPT", Align::Right),
            ("DAMAGED", Align::Right),
            ("MB ERRORS", Align::Right),
        ];
        let compared = self.lines.iter().any(|line| line.paper.is_some());
        if compared {
            columns.extend([("PAPER: FRAMES", Align::Right), ("MB ERRORS", Align::Right)]);
        }
        let rows: Vec<Vec<String>> = self.lines.iter().map(|line| line.cells(self.runs)).collect();
        let runs = if self.runs == 1 { String::new() } else { format!("Mean and deviation of {} runs. ", self.runs) };
        format!(
            "\n{}\n{}\n{}\n{}\n",
            Self::picture(paint),
            table(paint, &columns, &rows),
            paint.dim(&format!(
                "  {runs}Received and missed: RTP packets; the link lost {:.2} %.\n  \
                 Corrupt frames: as ffmpeg says, which conceals. Damaged: missing, or not to the pixel as sent.\n  \
                 MB errors: macroblocks that could not be decoded.{}",
                self.loss_percent,
                self.given_up()
            )),
            self.verdict(paint, seconds),
        )
    }

    fn given_up(&self) -> String {
        let (given_up, all) =
            (self.lines.iter().map(|line| line.given_up).sum::<usize>(), self.lines.len() * self.runs);
        if given_up == 0 {
            return String::new();
        }
        format!("\n  {given_up} of {all} streams were so damaged that ffmpeg ended early.")
    }

    fn picture(paint: Paint) -> String {
        let nodes = ["alice", "ingress", "dist-1", "dist-2", "server ◀"];
        let bold = |picture: String, name: &str| picture.replace(name, &paint.bold(name));
        nodes.into_iter().fold(OVERLAY.to_owned(), bold) + DIRECT
    }

    fn verdict(&self, paint: Paint, seconds: f64) -> String {
        let took = paint.dim(&format!("({seconds:.0} s)"));
        if self.overlay_is_perfect() {
            let by = self.distributors().join(" and ");
            format!(
                "  {} {took}",
                paint.good(&format!("✓ Over the overlay every packet and every frame arrived, by {by}"))
            )
        } else if let Some(first) = self.failed.first() {
            let count = self.failed.len();
            format!("  {} {took}", paint.bad(&format!("✗ {count} more came to nothing, the first for this: {first}")))
        } else {
            format!("  {} {took}", paint.bad("✗ Over the overlay something was lost"))
        }
    }

    fn distributors(&self) -> Vec<&'static str> {
        let streams = self.rounds.iter().flat_map(|round| &round.streams);
        streams.filter_map(|stream| stream.distributor).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

fn is_perfect(stream: &Stream) -> bool {
    stream.packets_sent > 0
        && stream.packets_missed == 0
        && stream.packets_altered == 0
        && stream.frames_processed == stream.frames_sent
        && stream.frames_damaged == 0
        && stream.frames_corrupt == 0
        && stream.macroblock_errors == 0
        && stream.gave_up.is_none()
}

impl Line {
    fn of(way: Variant, seconds: u64, rounds: &[Round]) -> Self {
        let streams: Vec<&Stream> = rounds
            .iter()
            .flat_map(|round| &round.streams)
            .filter(|stream| stream.way == way && stream.seconds == seconds)
            .collect();
        let values = |of: fn(&Stream) -> u64| streams.iter().map(|stream| of(stream)).collect::<Vec<u64>>();
        let figure = |of: fn(&Stream) -> u64| Figure::of(&values(of));
        let most = |of: fn(&Stream) -> u64| values(of).into_iter().max().unwrap_or_default();
        let paper =
            PAPER.iter().find(|(w, s, _)| *w == way && *s == seconds).map(|(_, _, [errors, e, frames, f])| Paper {
                macroblock_errors: Figure { mean: *errors, sd: *e },
                frames_processed: Figure { mean: *frames, sd: *f },
            });
        Self {
            way,
            seconds,
            packets_sent: figure(|stream| stream.packets_sent),
            packets_received: figure(|stream| stream.packets_received),
            packets_missed: figure(|stream| stream.packets_missed),
            packets_altered: figure(|stream| stream.packets_altered),
            frames_sent: figure(|stream| stream.frames_sent),
            frames_processed: figure(|stream| stream.frames_processed),
            frames_damaged: figure(|stream| stream.frames_damaged),
            frames_corrupt: figure(|stream| stream.frames_corrupt),
            macroblock_errors: figure(|stream| stream.macroblock_errors),
            macroblocks_concealed: figure(|stream| stream.macroblocks_concealed),
            most_packets_missed: most(|stream| stream.packets_missed),
            most_frames_corrupt: most(|stream| stream.frames_corrupt),
            most_frames_damaged: most(|stream| stream.frames_damaged),
            given_up: streams.iter().filter(|stream| stream.gave_up.is_some()).count(),
            paper,
        }
    }

    fn cells(&self, runs: usize) -> Vec<String> {
        let way = match self.way {
            Variant::Overlay => "overlay",
            Variant::Direct => "direct",
        };
        let length = if self.seconds.is_multiple_of(60) {
            format!("{} min", self.seconds / 60)
        } else {
            format!("{} s", self.seconds)
        };
        let text = |figure: Figure| figure.text(runs);
        let mut cells = vec![
            format!("{way}, {length}"),
            text(self.packets_received),
            text(self.packets_missed),
            text(self.frames_processed),
            text(self.frames_corrupt),
            text(self.frames_damaged),
            text(self.macroblock_errors),
        ];
        if let Some(paper) = self.paper {
            cells.extend([paper.frames_processed, paper.macroblock_errors].map(|figure| format!("{:.2}", figure.mean)));
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviation_is_of_the_sample() {
        assert_eq!(Figure::of(&[2, 4, 4, 4, 5, 5, 7, 9]).mean, 5.0);
        assert!((Figure::of(&[2, 4, 4, 4, 5, 5, 7, 9]).sd - 2.138).abs() < 0.001);
        assert_eq!(Figure::of(&[7]), Figure { mean: 7.0, sd: 0.0 });
    }

    #[test]
    fn one_lost_packet_is_not_perfect() {
        let stream = Stream {
            way: Variant::Overlay,
            seconds: 60,
            distributor: Some("dist-1"),
            packets_sent: 10,
            packets_received: 10,
            packets_missed: 0,
            packets_altered: 0,
            frames_sent: 5,
            frames_processed: 5,
            frames_damaged: 0,
            frames_corrupt: 0,
            macroblock_errors: 0,
            macroblocks_concealed: 0,
            missed_by_ffmpeg: 0,
            file_bytes: 1,
            gave_up: None,
        };
        assert!(is_perfect(&stream));
        assert!(!is_perfect(&Stream { gave_up: Some("Conversion failed!".to_owned()), ..stream.clone() }));
        assert!(!is_perfect(&Stream { packets_missed: 1, ..stream.clone() }));
        assert!(!is_perfect(&Stream { frames_processed: 4, ..stream.clone() }));
        assert!(!is_perfect(&Stream { packets_sent: 0, packets_received: 0, ..stream }));
    }
}
