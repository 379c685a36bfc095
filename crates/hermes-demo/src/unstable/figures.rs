//! Figures of the unstable case, beside the papers' and the physical limit.
//!
//! In: every download. Out: by size and way the number of complete downloads, medians, and ratios to the limit; as text
//! or JSON. Each download is compared with the limit at the moment of its start. Never: a figure of Hermes if nothing
//! arrived.

use hermes_lab::turns;
use serde::Serialize;

use super::run::{Played, Row, Try};
use super::test_path::Download;
use super::variant::{self, Published, Variant, published_without_outage, said};
use super::{Options, Protocol};
use crate::terminal::{Align, Paint, table};

/// The figures of one download.
#[derive(Debug, Serialize)]
struct One {
    /// Seconds since a slot of the client's link began.
    phase: f64,
    seconds: f64,
    limit: f64,
    bytes: u64,
    arrived: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// Downloads of a size on a way.
#[derive(Debug, Serialize)]
struct Line {
    way: Variant,
    size: u64,
    /// Whether another client repeats earlier downloads.
    again: bool,
    tried: usize,
    arrived: usize,
    /// The median of complete downloads, like the following fields.
    median_s: Option<f64>,
    limit_s: Option<f64>,
    ratio: Option<f64>,
    without_outage_s: Option<f64>,
    published: Option<Published>,
    runs: Vec<One>,
}

/// NDN's.
#[derive(Debug, Serialize)]
struct Ndn {
    size: u64,
    #[serde(flatten)]
    published: Published,
}

/// A variant that could not run, and the reason.
#[derive(Debug, Serialize)]
struct Missing {
    way: Variant,
    why: String,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    protocol: Protocol,
    sizes: Vec<u64>,
    patience_s: f64,
    lines: Vec<Line>,
    missing: Vec<Missing>,
    ndn: Vec<Ndn>,
}

fn median(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    let (low, high) = (numbers.get(numbers.len().checked_sub(1)? / 2)?, numbers.get(numbers.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

impl Line {
    fn of(row: &Row, again: bool) -> Self {
        let runs: Vec<One> = if again { &row.again } else { &row.first }.iter().map(One::of).collect();
        let arrived = || runs.iter().filter(|run| run.arrived);
        let steady = row.steady.as_ref().filter(|steady| !again && steady.failed.is_none());
        Self {
            way: row.way,
            size: row.size,
            again,
            tried: runs.len(),
            arrived: arrived().count(),
            median_s: median(arrived().map(|run| run.seconds)),
            limit_s: median(arrived().map(|run| run.limit)),
            ratio: median(arrived().map(|run| run.seconds / run.limit)),
            without_outage_s: steady.map(|steady| steady.seconds),
            published: row.way.published(row.size, again),
            runs,
        }
    }

    fn cells(&self, patience: f64) -> Vec<String> {
        let name = if self.again { "  the same again, by another client" } else { self.way.name() };
        let number = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.3}"));
        let never = || format!("not in {patience:.0} s");
        vec![
            name.to_owned(),
            format!("{} of {}", self.arrived, self.tried),
            self.median_s.map_or_else(never, seconds),
            self.limit_s.map_or("-".to_owned(), seconds),
            number(self.ratio),
            self.without_outage_s.map_or("-".to_owned(), seconds),
            papers(self.published),
        ]
    }
}

impl One {
    fn of(tried: &Try) -> Self {
        let Download { phase, seconds, bytes, failed } = tried.download.clone();
        Self { phase, seconds, limit: tried.limit, bytes, arrived: failed.is_none(), why: failed }
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 0.1 { format!("{seconds:.3} s") } else { format!("{seconds:.2} s") }
}

fn papers(published: Option<Published>) -> String {
    match published {
        None => "-".to_owned(),
        Some(Published { seconds: Some(seconds), arrived }) => format!("{seconds:.0} s, {arrived} %"),
        Some(Published { seconds: None, .. }) => "never".to_owned(),
    }
}

impl Figures {
    pub(super) fn of(options: &Options, played: &Played) -> Self {
        let again = |row: &Row| !row.again.is_empty();
        let lines = played.rows.iter().flat_map(|row| {
            let second = again(row).then(|| Line::of(row, true));
            std::iter::once(Line::of(row, false)).chain(second)
        });
        let sizes = options.sizes.clone();
        let ndn = sizes.iter().filter_map(|size| Some(Ndn { size: *size, published: variant::ndn(*size)? })).collect();
        let missing = played.missing.iter().map(|(way, why)| Missing { way: *way, why: why.clone() }).collect();
        let patience_s = options.patience.as_secs_f64();
        Self { protocol: options.protocol, sizes, patience_s, lines: lines.collect(), missing, ndn }
    }

    fn of_hermes(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| line.way.is_hermes())
    }

    /// Whether every download through Hermes is complete, with outage and without.
    pub(super) fn is_whole(&self) -> bool {
        self.of_hermes().all(|line| line.arrived == line.tried && (line.again || line.without_outage_s.is_some()))
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(super) fn text(&self, paint: Paint, took: f64) -> String {
        let sizes: String = self.sizes.iter().map(|size| self.block(paint, *size)).collect();
        format!("{}{sizes}{}{}", intro(paint), self.notes(paint), self.verdict(paint, took))
    }

    fn block(&self, paint: Paint, size: u64) -> String {
        let heading = said(size);
        let columns = [
            (heading.as_str(), Align::Left),
            ("ARRIVED", Align::Right),
            ("MEDIAN", Align::Right),
            ("LIMIT", Align::Right),
            ("RATIO", Align::Right),
            ("NO OUTAGE", Align::Right),
            ("PAPERS", Align::Right),
        ];
        let lines = self.lines.iter().filter(|line| line.size == size);
        let mut rows: Vec<_> = lines.map(|line| line.cells(self.patience_s)).collect();
        let empty = |name: &str, last: &[String]| [&[name.to_owned()][..], last].concat();
        let dash = || "-".to_owned();
        for missing in &self.missing {
            rows.push(empty(
                missing.way.name(),
                &[dash(), dash(), dash(), dash(), dash(), papers(missing.way.published(size, false))],
            ));
        }
        for ndn in self.ndn.iter().filter(|ndn| ndn.size == size) {
            rows.push(empty(
                "NDN, as published",
                &[dash(), dash(), dash(), dash(), dash(), papers(Some(ndn.published))],
            ));
        }
        let base = published_without_outage(size).map(|base| format!("; papers, direct: {base} s")).unwrap_or_default();
        let rate = format!("  Without outage the rate allows {}{base}.\n\n", seconds(turns::at_full_rate(size)));
        table(paint, &columns, &rows) + &paint.dim(&rate)
    }

    fn notes(&self, paint: Paint) -> String {
        let mut text = String::new();
        for Missing { way, why } in &self.missing {
            text += &format!("  {}: not run; {why}.\n", way.name());
        }
        let failed = self.of_hermes().flat_map(|line| line.runs.iter().map(move |run| (line, run)));
        for (line, run) in failed {
            if let Some(why) = &run.why {
                let what = format!("{} of {}: {why}", said(line.size), line.way.name());
                text += &format!("  {}\n", paint.bad(&what));
            }
        }
        text
            + &paint.dim(
                "  Limit: the earliest end that physics allows a download that begins at that moment. The papers' figures are means of their own\n  \
                 proxies and clients on such links; beside Hermes they are those of the same kind of proxying.\n",
            )
    }

    fn verdict(&self, paint: Paint, took: f64) -> String {
        let took = paint.dim(&format!("({took:.0} s)"));
        let (tried, arrived) =
            self.of_hermes().fold((0, 0), |(tried, arrived), line| (tried + line.tried, arrived + line.arrived));
        if tried == 0 {
            return format!("  Nothing was asked for through Hermes {took}\n");
        }
        let ratios = self.of_hermes().filter(|line| !line.again).filter_map(|line| line.ratio);
        let worst = ratios.fold(0.0, f64::max);
        let said = if self.is_whole() {
            paint.good(&format!(
                "✓ all {tried} downloads through Hermes whole, the slowest kind at {worst:.3} of the limit"
            ))
        } else if tried == arrived {
            paint.bad("✗ a download through Hermes did not arrive without outage")
        } else {
            paint.bad(&format!("✗ of {tried} downloads through Hermes {} did not arrive", tried - arrived))
        };
        format!("  {said} {took}\n")
    }
}

/// The topology; `═` is a link that is up one second in three.
fn intro(paint: Paint) -> String {
    let [client, server] = ["client", "web server"].map(|name| paint.bold(name));
    format!(
        "\n  {client} ── n1 ═══ n2 ═══ n3 ═══ n4 ── {server}\n\n{}\n",
        paint.dim(
            "  ═══ carries 10 Mbit/s in one second of three, and drops everything in the others; no two do at once, so that\n  \
             there is never a path. Nobody is told which one is up.\n"
        )
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Extent;
    use super::*;

    fn download(seconds: f64, failed: Option<&str>) -> Download {
        Download { phase: 0.5, seconds, bytes: 46_080, failed: failed.map(str::to_owned) }
    }

    fn row(way: Variant, failed: Option<&str>) -> Row {
        let tried = |seconds, failed| Try { download: download(seconds, failed), limit: 5.0 };
        let first = vec![tried(5.0, None), tried(60.0, failed), tried(5.5, None)];
        Row { way, size: 45 << 10, steady: Some(download(0.1, None)), first, again: Vec::new() }
    }

    fn figures(rows: Vec<Row>) -> Figures {
        let (sizes, tries, patience) = Extent::Quick.defaults();
        let options = Options {
            protocol: Protocol::H2,
            sizes,
            tries,
            hopeless_tries: 1,
            patience: Duration::from_secs(patience),
            ways: Variant::ALL.to_vec(),
            envoy: None,
            json: false,
            picture: None,
            files: None,
        };
        let missing = vec![(Variant::Envoy, "there is none".to_owned())];
        Figures::of(&options, &Played { rows, missing, drawn: Vec::new() })
    }

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }

    #[test]
    fn what_hermes_does_not_bring_is_a_failure_that_is_told() {
        let paint = Paint::for_stdout();
        let whole = figures(vec![row(Variant::Direct, Some("dark")), row(Variant::Hermes, None)]);
        assert!(whole.is_whole());
        assert_eq!(whole.lines[0].cells(10.0)[1..5], ["2 of 3", "5.25 s", "5.00 s", "1.050"]);
        let text = whole.text(paint, 1.0);
        assert!(text.contains("not run; there is none") && text.contains("17 s, 100 %"), "{text}");
        let broken = figures(vec![row(Variant::Hermes, Some("the stream broke"))]);
        assert!(!broken.is_whole());
        let text = broken.text(paint, 1.0);
        assert!(
            text.contains("the stream broke") && text.contains("of 3 downloads through Hermes 1 did not"),
            "{text}"
        );
    }
}
