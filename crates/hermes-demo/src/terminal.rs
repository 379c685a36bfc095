//! Terminal output: progress while a demo runs, colours and tables.
//!
//! In: texts. Out: on a terminal one line that is redrawn, elsewhere plain lines, both on standard error; tables as
//! text. Never: an escape sequence without a terminal, or if `NO_COLOR` is set.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

const FRAMES: [&str; 8] = ["⠋", "⠙", "⠸", "⠴", "⠦", "⠇", "⠏", "⠛"];
const REDRAW: Duration = Duration::from_millis(80);
/// The interval of detail lines if standard error is not a terminal.
const PLAIN_DETAIL: Duration = Duration::from_secs(15);
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Progress of a demo. Its drop clears the line.
pub(crate) struct Progress {
    text: Arc<Mutex<String>>,
    live: bool,
    said: Mutex<Instant>,
    /// The task that draws; it ends with this value.
    _drawing: JoinSet<()>,
}

impl Progress {
    /// Starts to draw. Requires a runtime.
    pub(crate) fn begin() -> Self {
        let live = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        let text = Arc::new(Mutex::new(String::new()));
        let mut drawing = JoinSet::new();
        if live {
            drawing.spawn(draw(text.clone()));
        }
        Self { text, live, said: Mutex::new(Instant::now()), _drawing: drawing }
    }

    /// Shows a new step.
    pub(crate) fn step(&self, text: &str) {
        self.set(text);
        if !self.live {
            self.print(text);
        }
    }

    /// Shows the progress of the step.
    pub(crate) fn detail(&self, text: &str) {
        self.set(text);
        let said = *self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.live && said.elapsed() >= PLAIN_DETAIL {
            self.print(text);
        }
    }

    fn set(&self, text: &str) {
        text.clone_into(&mut self.text.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn print(&self, text: &str) {
        // An error means that standard error is closed; progress is then not needed.
        let _ = writeln!(std::io::stderr(), "demo: {text}");
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.live {
            let _ = write!(std::io::stderr(), "{CLEAR_LINE}");
        }
    }
}

async fn draw(text: Arc<Mutex<String>>) {
    let mut ticks = tokio::time::interval(REDRAW);
    for frame in FRAMES.iter().cycle() {
        ticks.tick().await;
        let text = text.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let _ = write!(std::io::stderr(), "{CLEAR_LINE}  {frame} {text}");
    }
}

/// ANSI styles, if enabled.
#[derive(Clone, Copy)]
pub(crate) struct Paint {
    on: bool,
}

impl Paint {
    /// The styles that standard output supports.
    pub(crate) fn for_stdout() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        Self { on: wanted && able && std::io::stdout().is_terminal() }
    }

    /// Style for names and headings.
    pub(crate) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    /// Style for details that a reader may skip.
    pub(crate) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    /// Style for success.
    pub(crate) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// Style for failure.
    pub(crate) fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Left, for words.
    Left,
    /// Right, for numbers.
    Right,
}

/// Renders a table: a heading and rows of as many cells. Each column is as wide as its widest cell.
pub(crate) fn table(paint: Paint, columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(index, (heading, _))| {
            let cells = rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.chars().count());
            cells.chain([heading.chars().count()]).max().unwrap_or_default()
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> =
            cells.zip(columns).zip(&widths).map(|((cell, (_, align)), width)| pad(cell, *align, *width)).collect();
        format!("  {}", padded.join("  ").trim_end())
    };
    let heading = line(&mut columns.iter().map(|(heading, _)| *heading));
    let rows = rows.iter().map(|row| line(&mut row.iter().map(String::as_str)));
    std::iter::once(paint.dim(&heading)).chain(rows).map(|line| line + "\n").collect()
}

fn pad(cell: &str, align: Align, width: usize) -> String {
    match align {
        Align::Left => format!("{cell:<width$}"),
        Align::Right => format!("{cell:>width$}"),
    }
}

/// A number with thousands separators.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A byte count with a unit.
pub(crate) fn bytes(count: u64) -> String {
    let megabytes = count as f64 / 1e6;
    if megabytes >= 1.0 { format!("{megabytes:.1} MB") } else { format!("{:.1} kB", count as f64 / 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["http".to_owned(), "1,000".to_owned()], vec!["é".to_owned(), "7".to_owned()]];
        let text = table(Paint { on: false }, &[("KIND", Align::Left), ("N", Align::Right)], &rows);
        assert_eq!(text, "  KIND      N\n  http  1,000\n  é         7\n");
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(["0", "999", "1,000", "12,345,678"].map(str::to_owned), [0, 999, 1000, 12_345_678].map(grouped));
    }

    #[test]
    fn colours_only_where_they_are_on() {
        assert_eq!(Paint { on: false }.good("ok"), "ok");
        assert_eq!(Paint { on: true }.good("ok"), "\x1b[32mok\x1b[0m");
    }
}
