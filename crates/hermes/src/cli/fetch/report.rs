//! What people and programs see of a download.
//!
//! In: events, and counts. Out: on a terminal a line that is drawn anew, elsewhere a line an event, both on standard error;
//! or JSON, an object a line. Never: an escape sequence where no terminal reads it.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

const REDRAW: Duration = Duration::from_millis(100);
/// Between two objects of progress, and between two lines of it.
const TELL: Duration = Duration::from_secs(1);
const SAY: Duration = Duration::from_secs(10);
/// How much of the past the rate is of.
const MEMORY: f64 = 3.0;
const CLEAR: &str = "\r\x1b[2K";
/// A terminal has so many columns at least; what is longer is cut.
const COLUMNS: usize = 79;
const BAR: usize = 10;

/// How it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nothing before the end.
    Quiet,
    /// For programs; on standard error where standard output has the content.
    Json { on_stderr: bool },
    /// A line an event, and now and then how far it is.
    Lines,
    /// A bar.
    Bar,
}

impl Mode {
    /// As standard error can show it.
    pub(super) fn for_stderr() -> Self {
        let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        if able && std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines }
    }
}

/// Something happened.
#[derive(Debug)]
pub(super) enum Event<'a> {
    /// A request goes out.
    Asks { from: u64 },
    /// Content comes.
    Answers { status: u16 },
    /// What was held is worth nothing.
    Anew { why: &'a str },
    /// It was not to be had this time.
    Waits { why: &'a str, pause: Duration },
    /// All is held, and compared with what it should be.
    Verifies,
}

/// What is drawn.
#[derive(Debug, Default)]
struct Picture {
    held: u64,
    total: Option<u64>,
    attempt: u32,
    /// Nothing has come of the last request.
    is_asking: bool,
    /// Why the last try that failed did.
    why: Option<String>,
    until: Option<Instant>,
    deadline: Option<Instant>,
    /// How it ended was said, and nothing comes after that.
    is_over: bool,
}

/// Tells what happens. Its drop clears the line.
pub(super) struct Report {
    mode: Mode,
    picture: Arc<Mutex<Picture>>,
    /// Draws; ends with this value.
    _drawing: JoinSet<()>,
}

impl Report {
    /// Begins. Inside of a runtime.
    pub(super) fn begin(mode: Mode, deadline: Instant) -> Self {
        let picture = Picture { deadline: Some(deadline), is_asking: true, ..Picture::default() };
        let picture = Arc::new(Mutex::new(picture));
        let mut drawing = JoinSet::new();
        match mode {
            Mode::Bar => drop(drawing.spawn(draw(picture.clone()))),
            Mode::Json { on_stderr } => drop(drawing.spawn(tell(picture.clone(), on_stderr))),
            Mode::Lines => drop(drawing.spawn(say_progress(picture.clone()))),
            Mode::Quiet => {}
        }
        Self { mode, picture, _drawing: drawing }
    }

    fn picture(&self) -> MutexGuard<'_, Picture> {
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far it is.
    pub(super) fn counts(&self, held: u64, total: Option<u64>) {
        let mut picture = self.picture();
        (picture.held, picture.total) = (held, total);
    }

    /// How many requests there were.
    pub(super) fn attempts(&self) -> u32 {
        self.picture().attempt
    }

    /// What kept the last try from bringing all.
    pub(super) fn reason(&self) -> Option<String> {
        let picture = self.picture();
        let silence = || picture.is_asking.then(|| "there was no answer".to_owned());
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
            Mode::Json { on_stderr } => say_json(&value, on_stderr),
            Mode::Lines => say(&format!("fetch: {text}")),
            Mode::Bar | Mode::Quiet => {}
        }
    }

    /// How it ended. The line for people is said by whoever ends the program where it failed.
    pub(super) fn end(&self, text: Option<&str>, value: &Value) {
        self.picture().is_over = true;
        match (self.mode, text) {
            (Mode::Json { on_stderr }, _) => say_json(value, on_stderr),
            (Mode::Lines, Some(text)) => say(&format!("fetch: {text}")),
            (Mode::Bar, Some(text)) => say(&format!("{CLEAR}fetch: {text}")),
            (Mode::Quiet, _) | (_, None) => {}
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if self.mode == Mode::Bar {
            let _ = write!(std::io::stderr(), "{CLEAR}");
        }
    }
}

fn words(event: &Event<'_>, picture: &Picture) -> (String, Value) {
    let Picture { held, total, attempt, .. } = picture;
    match event {
        Event::Asks { from: 0 } => {
            (format!("try {attempt}: asks for all"), json!({"event": "request", "attempt": attempt, "from": 0}))
        }
        Event::Asks { from } => (
            format!("try {attempt}: asks for what is behind {}", size(*from)),
            json!({"event": "request", "attempt": attempt, "from": from}),
        ),
        Event::Answers { status } => (
            format!("try {attempt}: {status}, {}", progress(*held, *total)),
            json!({"event": "answer", "attempt": attempt, "status": status, "held": held, "total": total}),
        ),
        Event::Anew { why } => (format!("begins anew: {why}"), json!({"event": "anew", "reason": why})),
        Event::Waits { why, pause } => (
            format!("{why}; {}; tries again in {}", progress(*held, *total), span(*pause)),
            json!({"event": "retry", "attempt": attempt, "reason": why, "held": held, "total": total,
                   "wait-seconds": pause.as_secs_f64()}),
        ),
        Event::Verifies => ("verifies what is held".to_owned(), json!({"event": "verify", "held": held})),
    }
}

// Who closed standard error does not want to know.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn say_json(value: &Value, on_stderr: bool) {
    if on_stderr {
        say(&value.to_string());
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
        rate.look(picture.held, now);
        if !picture.is_over {
            let _ = write!(std::io::stderr(), "{CLEAR}{}", line(&picture, rate.per_second, now));
        }
    }
}

async fn say_progress(picture: Arc<Mutex<Picture>>) {
    let mut rate = Rate::default();
    let mut ticks = tokio::time::interval(TELL);
    let mut said = Instant::now();
    loop {
        let now = ticks.tick().await;
        // Said while it is locked: how it ended comes last.
        let picture = picture.lock().unwrap_or_else(PoisonError::into_inner);
        rate.look(picture.held, now);
        if now - said >= SAY && !picture.is_over {
            said = now;
            say(&format!("fetch: {}", standing(&picture, rate.per_second, now)));
        }
    }
}

async fn tell(picture: Arc<Mutex<Picture>>, on_stderr: bool) {
    let mut rate = Rate::default();
    let mut ticks = tokio::time::interval(TELL);
    ticks.tick().await;
    loop {
        let now = ticks.tick().await;
        // Said while it is locked: how it ended comes last.
        let picture = picture.lock().unwrap_or_else(PoisonError::into_inner);
        rate.look(picture.held, now);
        let value = json!({"event": "progress", "attempt": picture.attempt, "held": picture.held, "total": picture.total,
                           "bytes-per-second": rate.per_second.round()});
        if !picture.is_over {
            say_json(&value, on_stderr);
        }
    }
}

/// Bytes a second, of the last few of them.
#[derive(Default)]
struct Rate {
    per_second: f64,
    last: Option<(u64, Instant)>,
    looks: u32,
}

impl Rate {
    fn look(&mut self, held: u64, now: Instant) {
        if let Some((before, then)) = self.last {
            let passed = (now - then).as_secs_f64().max(1e-3);
            let current = held.saturating_sub(before) as f64 / passed;
            // In the beginning it is the mean, and not what nothing has grown to.
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

/// How far it is, what it does, and until when. What may be cut comes last.
fn standing(picture: &Picture, per_second: f64, now: Instant) -> String {
    let Picture { held, total, attempt, .. } = picture;
    let until = |at: Instant| span(at.saturating_duration_since(now));
    let (doing, why) = match picture.until {
        Some(at) => (format!("{}  waits {}", size(*held), until(at)), picture.why.as_deref()),
        None if picture.is_asking => (format!("{}  waits for an answer", size(*held)), None),
        None if per_second < 1.0 => (format!("{}  nothing comes", size(*held)), None),
        None => (format!("{}  {}/s", progress(*held, *total), size(per_second as u64)), None),
    };
    // It is no estimate: of that it is for whoever reads a bar.
    let end = picture.deadline.map(|at| format!(", gives up in {}", until(at).trim_end_matches(" min")));
    let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
    // Before the first request goes out it is that one.
    format!("{doing}  try {}{}{why}", (*attempt).max(1), end.unwrap_or_default())
}

fn progress(held: u64, total: Option<u64>) -> String {
    match total {
        Some(total) => format!("{} of {}", size(held), size(total)),
        None => size(held),
    }
}

/// As people say it.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    // What would be written as a thousand is one of the next.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A time, as people say it.
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
        assert_eq!(drawn, "[####------]  45%  45 B of 100 B  2.0 kB/s  try 3, gives up in 1:01");
        picture.is_asking = true;
        let drawn = line(&picture, 2000.0, now);
        assert_eq!(drawn, "[####------]  45%  45 B  waits for an answer  try 3, gives up in 1:01");
        picture.until = Some(now + Duration::from_secs(2));
        picture.why = Some("503 Service Unavailable, and much more of it that fits no line".into());
        let drawn = line(&picture, 0.0, now);
        assert!(drawn.contains("waits 2.0 s  try 3, gives up in 1:01 (503 Se") && drawn.len() <= COLUMNS, "{drawn}");
        let first = line(&Picture { is_asking: true, ..Picture::default() }, 0.0, now);
        assert_eq!(first, "0 B  waits for an answer  try 1", "without a total there is no bar");
    }

    #[test]
    fn the_rate_follows_what_comes() {
        let start = Instant::now();
        let mut rate = Rate::default();
        for tick in 0..200u64 {
            rate.look(tick * 100, start + REDRAW * u32::try_from(tick).unwrap_or_default());
        }
        assert!((rate.per_second - 1000.0).abs() < 10.0, "{}", rate.per_second);
    }
}
