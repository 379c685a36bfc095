//! The progress report of a download, for people and programs.
//!
//! In: events and counters. Out: on standard error, a line that is redrawn on terminals, or one line for each event; or
//! JSON, one object on each line. Never: an escape sequence without a terminal.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

const REDRAW: Duration = Duration::from_millis(100);
/// Interval between two progress objects or lines.
const TELL: Duration = Duration::from_secs(1);
const SAY: Duration = Duration::from_secs(10);
/// Time constant of the rate, in seconds.
const MEMORY: f64 = 3.0;
const CLEAR_LINE: &str = "\r\x1b[2K";
/// Minimum width of a terminal; longer lines are cut.
const COLUMNS: usize = 79;
const BAR: usize = 10;

/// The form of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// No output before the end.
    Quiet,
    /// JSON; on standard error if standard output carries the content.
    Json { on_stderr: bool },
    /// A line for each event, and progress now and then.
    Lines,
    /// A progress bar.
    Bar,
}

impl Mode {
    /// Returns the form that fits standard error.
    pub(super) fn for_stderr() -> Self {
        let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        if able && std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines }
    }
}

/// An event of the download.
#[derive(Debug)]
pub(super) enum Event<'a> {
    /// A request was sent.
    Asks { from: u64 },
    /// Content arrives.
    Answers { status: u16 },
    /// The data held was discarded.
    Anew { why: &'a str },
    /// The attempt failed, and a pause follows.
    Waits { why: &'a str, pause: Duration },
    /// The object is complete and is being verified.
    Verifies,
}

/// The state of the progress bar.
#[derive(Debug, Default)]
struct Picture {
    held: u64,
    total: Option<u64>,
    attempt: u32,
    /// No response to the last request yet.
    is_asking: bool,
    /// The reason of the last failed attempt.
    why: Option<String>,
    until: Option<Instant>,
    deadline: Option<Instant>,
    /// The result was printed; no output follows.
    is_over: bool,
}

/// Reports events. Dropping it clears the line.
pub(super) struct Report {
    mode: Mode,
    picture: Arc<Mutex<Picture>>,
    /// Draws; ends with this value.
    _drawing: JoinSet<()>,
}

impl Report {
    /// Starts the report. Must run inside a runtime.
    pub(super) fn begin(mode: Mode, deadline: Instant) -> Self {
        let picture = Picture { deadline: Some(deadline), is_asking: true, ..Picture::default() };
        let picture = Arc::new(Mutex::new(picture));
        let mut drawing = JoinSet::new();
        match mode {
            Mode::Bar => drop(drawing.spawn(draw(picture.clone()))),
            Mode::Json { on_stderr } => drop(drawing.spawn(report_progress(picture.clone(), on_stderr))),
            Mode::Lines => drop(drawing.spawn(say_progress(picture.clone()))),
            Mode::Quiet => {}
        }
        Self { mode, picture, _drawing: drawing }
    }

    fn picture(&self) -> MutexGuard<'_, Picture> {
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the progress.
    pub(super) fn counts(&self, held: u64, total: Option<u64>) {
        let mut picture = self.picture();
        (picture.held, picture.total) = (held, total);
    }

    /// Returns the number of requests.
    pub(super) fn attempts(&self) -> u32 {
        self.picture().attempt
    }

    /// Returns why the last attempt was incomplete.
    pub(super) fn reason(&self) -> Option<String> {
        let picture = self.picture();
        let silence = || picture.is_asking.then(|| "no response".to_owned());
        picture.why.clone().or_else(silence)
    }

    pub(super) fn event(&self, event: &Event<'_>) {
        let (text, value) = {
            let mut picture = self.picture();
            if matches!(event, Event::Asks { .. }) {
                picture.attempt += 1;
            }
            let (text, value) = words(event, &picture);
            picture.is_asking = matches!(event, Event::Asks { .. });
            picture.until = None;
            if let Event::Waits { why, pause } = event {
                picture.until = Some(Instant::now() + *pause);
                picture.why = Some((*why).to_owned());
            }
            (text, value)
        };
        match self.mode {
            Mode::Json { on_stderr } => print_json(&value, on_stderr),
            Mode::Lines => print_line(&format!("fetch: {text}")),
            Mode::Bar | Mode::Quiet => {}
        }
    }

    /// Reports the result. On failure, the program prints the line for people as it exits.
    pub(super) fn end(&self, text: Option<&str>, value: &Value) {
        self.picture().is_over = true;
        match (self.mode, text) {
            (Mode::Json { on_stderr }, _) => print_json(value, on_stderr),
            (Mode::Lines, Some(text)) => print_line(&format!("fetch: {text}")),
            (Mode::Bar, Some(text)) => print_line(&format!("{CLEAR_LINE}fetch: {text}")),
            (Mode::Quiet, _) | (_, None) => {}
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if self.mode == Mode::Bar {
            let _ = write!(std::io::stderr(), "{CLEAR_LINE}");
        }
    }
}

fn words(event: &Event<'_>, picture: &Picture) -> (String, Value) {
    let Picture { held, total, attempt, .. } = picture;
    match event {
        Event::Asks { from: 0 } => (
            format!("attempt {attempt}: requesting the whole object"),
            json!({"event": "request", "attempt": attempt, "from": 0}),
        ),
        Event::Asks { from } => (
            format!("attempt {attempt}: requesting the rest from {}", size(*from)),
            json!({"event": "request", "attempt": attempt, "from": from}),
        ),
        Event::Answers { status } => (
            format!("try {attempt}: {status}, {}", progress(*held, *total)),
            json!({"event": "answer", "attempt": attempt, "status": status, "held": held, "total": total}),
        ),
        Event::Anew { why } => (format!("restarting: {why}"), json!({"event": "anew", "reason": why})),
        Event::Waits { why, pause } => (
            format!("{why}; {}; retrying in {}", progress(*held, *total), span(*pause)),
            json!({"event": "retry", "attempt": attempt, "reason": why, "held": held, "total": total,
                   "wait-seconds": pause.as_secs_f64()}),
        ),
        Event::Verifies => ("verifying the stored part".to_owned(), json!({"event": "verify", "held": held})),
    }
}

// A closed standard error is not reported.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn print_json(value: &Value, on_stderr: bool) {
    if on_stderr {
        print_line(&value.to_string());
    } else {
        let _ = writeln!(std::io::stdout(), "{value}");
    }
}

async fn draw(picture: Arc<Mutex<Picture>>) {
    let mut rate = Rate::default();
    let mut ticks = tokio::time::interval(REDRAW);
    loop {
        let now = ticks.tick().await;
        let picture = picture.lock().unwrap_or_else(PoisonError::into_inner);
        rate.add_sample(picture.held, now);
        if !picture.is_over {
            let _ = write!(std::io::stderr(), "{CLEAR_LINE}{}", line(&picture, rate.per_second, now));
        }
    }
}

async fn say_progress(picture: Arc<Mutex<Picture>>) {
    let mut rate = Rate::default();
    let mut ticks = tokio::time::interval(TELL);
    let mut said = Instant::now();
    loop {
        let now = ticks.tick().await;
        // The lock is held while printing, so that the result comes last.
        let picture = picture.lock().unwrap_or_else(PoisonError::into_inner);
        rate.add_sample(picture.held, now);
        if now - said >= SAY && !picture.is_over {
            said = now;
            print_line(&format!("fetch: {}", standing(&picture, rate.per_second, now)));
        }
    }
}

async fn report_progress(picture: Arc<Mutex<Picture>>, on_stderr: bool) {
    let mut rate = Rate::default();
    let mut ticks = tokio::time::interval(TELL);
    ticks.tick().await;
    loop {
        let now = ticks.tick().await;
        // The lock is held while printing, so that the result comes last.
        let picture = picture.lock().unwrap_or_else(PoisonError::into_inner);
        rate.add_sample(picture.held, now);
        let value = json!({"event": "progress", "attempt": picture.attempt, "held": picture.held, "total": picture.total,
                           "bytes-per-second": rate.per_second.round()});
        if !picture.is_over {
            print_json(&value, on_stderr);
        }
    }
}

/// Recent transfer rate in bytes a second.
#[derive(Default)]
struct Rate {
    per_second: f64,
    last: Option<(u64, Instant)>,
    looks: u32,
}

impl Rate {
    fn add_sample(&mut self, held: u64, now: Instant) {
        if let Some((before, then)) = self.last {
            let passed = (now - then).as_secs_f64().max(1e-3);
            let current = held.saturating_sub(before) as f64 / passed;
            // The mean seeds the rate, which would otherwise start at zero.
            self.looks += 1;
            let share = (passed / MEMORY).max(f64::from(self.looks).recip()).min(1.0);
            self.per_second += share * (current - self.per_second);
        }
        self.last = Some((held, now));
    }
}

fn line(picture: &Picture, per_second: f64, now: Instant) -> String {
    let done = picture.total.filter(|total| *total > 0).map(|total| picture.held as f64 / total as f64);
    let bar = done.map_or_else(String::new, |done| {
        let full = ((done * BAR as f64) as usize).min(BAR);
        format!("[{}{}] {:3.0}%  ", "#".repeat(full), "-".repeat(BAR - full), done * 100.0)
    });
    let text = format!("{bar}{}", standing(picture, per_second, now));
    text.chars().take(COLUMNS).collect()
}

/// Formats progress, activity and deadline. The parts that may be cut come last.
fn standing(picture: &Picture, per_second: f64, now: Instant) -> String {
    let Picture { held, total, attempt, .. } = picture;
    let until = |at: Instant| span(at.saturating_duration_since(now));
    let (doing, why) = match picture.until {
        Some(at) => (format!("{}  waits {}", size(*held), until(at)), picture.why.as_deref()),
        None if picture.is_asking => (format!("{}  waiting for a response", size(*held)), None),
        None if per_second < 1.0 => (format!("{}  nothing comes", size(*held)), None),
        None => (format!("{}  {}/s", progress(*held, *total), size(per_second as u64)), None),
    };
    // The deadline is not an estimate, so the text names it as a deadline.
    let end = picture.deadline.map(|at| format!(", giving up in {}", until(at).trim_end_matches(" min")));
    let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
    // Before the first request, the attempt number is that of the first.
    format!("{doing}  try {}{}{why}", (*attempt).max(1), end.unwrap_or_default())
}

fn progress(held: u64, total: Option<u64>) -> String {
    match total {
        Some(total) => format!("{} of {}", size(held), size(total)),
        None => size(held),
    }
}

/// Formats a size for people.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    // A value that would round to 1000 uses the next unit.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats a duration for people.
pub(super) fn span(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..60 => format!("{} s", time.as_secs()),
        60..3600 => format!("{}:{:02} min", time.as_secs() / 60, time.as_secs() % 60),
        seconds => format!("{}:{:02} h", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_peoples() {
        assert_eq!(
            [size(0), size(999), size(1000), size(999_949), size(999_950)],
            ["0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB"]
        );
        let seconds = |s| span(Duration::from_secs(s));
        assert_eq!([seconds(3), seconds(42), seconds(750), seconds(7260)], ["3.0 s", "42 s", "12:30 min", "2:01 h"]);
    }

    #[test]
    fn the_line_fits_and_says_what_it_waits_for() {
        let now = Instant::now();
        let mut picture = Picture { held: 45, total: Some(100), attempt: 3, ..Picture::default() };
        picture.deadline = Some(now + Duration::from_secs(61));
        let drawn = line(&picture, 2000.0, now);
        assert_eq!(drawn, "[####------]  45%  45 B of 100 B  2.0 kB/s  try 3, giving up in 1:01");
        picture.is_asking = true;
        let drawn = line(&picture, 2000.0, now);
        assert_eq!(drawn, "[####------]  45%  45 B  waiting for a response  try 3, giving up in 1:01");
        picture.until = Some(now + Duration::from_secs(2));
        picture.why = Some("503 Service Unavailable, and much more of it that fits no line".into());
        let drawn = line(&picture, 0.0, now);
        assert!(drawn.contains("waits 2.0 s  try 3, giving up in 1:01 (503 Se") && drawn.len() <= COLUMNS, "{drawn}");
        let first = line(&Picture { is_asking: true, ..Picture::default() }, 0.0, now);
        assert_eq!(first, "0 B  waiting for a response  try 1", "without a total there is no bar");
    }

    #[test]
    fn the_rate_follows_what_comes() {
        let start = Instant::now();
        let mut rate = Rate::default();
        for tick in 0..200u64 {
            rate.add_sample(tick * 100, start + REDRAW * u32::try_from(tick).unwrap_or_default());
        }
        assert!((rate.per_second - 1000.0).abs() < 10.0, "{}", rate.per_second);
    }
}
