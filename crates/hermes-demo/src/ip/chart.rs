//! Round trips over time, drawn with Braille characters.
//!
//! In: all results of a run. Out: lines of text: Alice's round trips to her server, Bob's to his, and below them the
//! moments at which changes took effect. Never: wider than a terminal of eighty columns.

use std::time::Instant;

use super::run::{Phase, Played};
use crate::terminal::Paint;

/// Characters per row and column; each has two by four dots.
const COLUMNS: usize = 68;
const ROWS: usize = 10;
/// The dots of a letter, by column and row (Unicode, 2800).
const DOTS: [[u32; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

/// A field of dots.
struct Field {
    letters: Vec<u32>,
}

impl Field {
    /// Draws a dot at (`x`, `y`), each from 0 to 1; `y` points upwards.
    fn dot(&mut self, x: f64, y: f64) {
        let across = ((x * (2 * COLUMNS) as f64) as usize).min(2 * COLUMNS - 1);
        let down = (((1.0 - y).max(0.0) * (4 * ROWS) as f64) as usize).min(4 * ROWS - 1);
        self.letters[down / 4 * COLUMNS + across / 2] |= DOTS[across % 2][down % 4];
    }

    fn line(&self, row: usize) -> String {
        let letters = &self.letters[row * COLUMNS..(row + 1) * COLUMNS];
        letters.iter().map(|dots| char::from_u32(0x2800 + dots).unwrap_or(' ')).collect()
    }
}

/// Draws the chart.
pub(super) fn of(paint: Paint, played: &Played) -> String {
    let Some(end) = played.windows.last().map(|window| window.to) else { return String::new() };
    let whole = (end - played.begun).as_secs_f64();
    let x = |at: Instant| at.saturating_duration_since(played.begun).as_secs_f64() / whole;
    let top = top(played);
    let mut field = Field { letters: vec![0; ROWS * COLUMNS] };
    for (pair, echoes) in &played.echoes {
        if pair.address != super::nodes::HOME {
            continue;
        }
        for echo in echoes.iter().filter(|echo| (played.begun..end).contains(&echo.sent)) {
            if let Some(reply) = echo.reply {
                field.dot(x(echo.sent), reply.after.as_secs_f64() * 1e3 / top);
            }
        }
    }
    let mut text = paint.dim("  round trips to 10.0.0.1 in ms: Alice's, and Bob's at the bottom") + "\n";
    for row in 0..ROWS {
        let label = if row == 0 { format!("{top:.0}") } else { String::new() };
        text += &format!("  {label:>4} │{}\n", field.line(row));
    }
    text + &format!("     0 └{}\n       {}\n", "─".repeat(COLUMNS), below(played, x).trim_end())
}

/// The upper end of the scale is slightly above most round trips: one late packet must not flatten the curve.
fn top(played: &Played) -> f64 {
    let echoes = played.echoes.iter().flat_map(|(_, echoes)| echoes);
    let mut times: Vec<f64> = echoes.filter_map(|echo| Some(echo.reply?.after.as_secs_f64() * 1e3)).collect();
    times.sort_by(f64::total_cmp);
    let most = times.get(times.len() * 99 / 100).copied().unwrap_or(1.0);
    (most * 1.15 / 10.0).ceil() * 10.0
}

/// The letters of the phases, each below the start of its phase.
fn below(played: &Played, x: impl Fn(Instant) -> f64) -> String {
    let mut line = vec![' '; COLUMNS + 4];
    for window in &played.windows {
        let name = match window.phase {
            Phase::A => "(a)",
            Phase::B => "(b)",
            Phase::C => "(c)",
            Phase::Back => continue,
        };
        let at = (x(window.from) * COLUMNS as f64) as usize;
        for (place, letter) in line.iter_mut().skip(at).zip(name.chars()) {
            *place = letter;
        }
    }
    line.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corners_are_where_they_belong() {
        let mut field = Field { letters: vec![0; ROWS * COLUMNS] };
        field.dot(0.0, 1.0);
        field.dot(1.0, 0.0);
        // Beyond the top is at the top.
        field.dot(0.5, 7.0);
        assert!(field.line(0).starts_with('⠁'));
        assert!(field.line(ROWS - 1).ends_with('⢀'));
        assert_eq!(field.line(0).chars().filter(|letter| *letter != '\u{2800}').count(), 2);
    }
}
