//! Figure 7d as a picture: round trips over time, and the moments at which changes took effect.
//!
//! In: all results of a run. Out: an SVG. The paper's three means are dashed lines in their phases.

use std::fmt::Write as _;
use std::time::Instant;

use super::nodes::HOME;
use super::run::{Phase, Played};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
/// Left, top, width and height of the field.
const FIELD: (f64, f64, f64, f64) = (70.0, 50.0, 860.0, 300.0);
/// The paper's first mean, and a margin.
const TOP_MS: f64 = 400.0;
const STEP_MS: usize = 50;
/// The width of the label `1000 ms`.
const LABEL: f64 = 44.0;
const USERS: [(&str, &str); 2] = [("alice", "#1d4ed8"), ("bob", "#15803d")];

/// Draws the picture.
pub(super) fn svg(played: &Played) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{}\" y=\"24\" font-size=\"15\">Echo requests to {HOME}, one a 10 ms, while the overlay changes</text>\n",
        FIELD.0
    );
    let Some(end) = played.windows.last().map(|window| window.to) else { return svg + "</svg>\n" };
    let whole = (end - played.begun).as_secs_f64();
    let x = |at: Instant| FIELD.0 + FIELD.2 * at.saturating_duration_since(played.begun).as_secs_f64() / whole;
    axes(&mut svg, whole);
    phases(&mut svg, played, &x);
    for (user, colour) in USERS {
        points(&mut svg, played, user, colour, &x);
    }
    svg + "</svg>\n"
}

fn y(ms: f64) -> f64 {
    FIELD.1 + FIELD.3 * (1.0 - ms.min(TOP_MS) / TOP_MS)
}

// Writing to a String cannot fail.
fn axes(svg: &mut String, seconds: f64) {
    let (left, top, width, height) = FIELD;
    for ms in (0..=TOP_MS as usize).step_by(STEP_MS) {
        let level = y(ms as f64);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{level:.1}\" x2=\"{}\" y2=\"{level:.1}\" stroke=\"#eee\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>",
            left + width,
            left - 6.0,
            level + 4.0
        );
    }
    let step = [1, 2, 5, 10, 20, 50, 100, 200, 500].into_iter().find(|step| seconds / f64::from(*step) <= 20.0);
    for second in (0..=seconds as u32).step_by(step.unwrap_or(1000) as usize) {
        let place = left + width * f64::from(second) / seconds;
        let _ = writeln!(
            svg,
            "<text x=\"{place:.1}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
            top + height + 18.0
        );
    }
    let _ = writeln!(
        svg,
        "<text transform=\"translate({} {}) rotate(-90)\" text-anchor=\"middle\">round trip, ms</text>",
        left - 44.0,
        top + height / 2.0
    );
}

fn phases(svg: &mut String, played: &Played, x: &impl Fn(Instant) -> f64) {
    let (_, top, _, height) = FIELD;
    for window in &played.windows {
        let (name, paper) = match window.phase {
            Phase::A => ("(a)", 382.33),
            Phase::B => ("(b)", 206.33),
            Phase::C => ("(c)", 79.68),
            Phase::Back => continue,
        };
        let (from, to, level) = (x(window.from), x(window.to), y(paper));
        let _ = writeln!(
            svg,
            "<line x1=\"{from:.1}\" y1=\"{level:.1}\" x2=\"{to:.1}\" y2=\"{level:.1}\" stroke=\"#999\" \
             stroke-dasharray=\"5 4\"/><text x=\"{:.1}\" y=\"{:.1}\" fill=\"#666\" font-size=\"11\">paper: {paper}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
            from + 4.0,
            level - 5.0,
            from + 4.0,
            top - 5.0
        );
    }
    // A label that would overlap the previous one is drawn a line lower.
    let (mut last, mut low) = (f64::MIN, false);
    for change in &played.changes {
        let (saved, in_effect) = (x(change.saved), x(change.in_effect));
        low = saved - last < LABEL && !low;
        last = saved;
        let took = (change.in_effect - change.saved).as_secs_f64() * 1e3;
        let _ = writeln!(
            svg,
            "<rect x=\"{saved:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{height}\" fill=\"#c2410c\" opacity=\"0.35\"/>\
             <text x=\"{saved:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#c2410c\" font-size=\"11\">{took:.0} ms</text>",
            (in_effect - saved).max(1.0),
            top + height + if low { 48.0 } else { 36.0 }
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" fill=\"#c2410c\" font-size=\"11\">from a saved document to its path</text>",
        FIELD.0,
        top + height + 64.0
    );
}

fn points(svg: &mut String, played: &Played, user: &str, colour: &str, x: &impl Fn(Instant) -> f64) {
    let is_it = |pair: &super::run::Pair| pair.user == user && pair.address == HOME;
    let Some((_, echoes)) = played.echoes.iter().find(|(pair, _)| is_it(pair)) else { return };
    let shown = echoes.iter().filter(|echo| played.windows.iter().any(|w| (w.from..w.to).contains(&echo.sent)));
    let mut path = String::new();
    let mut lost = 0;
    for echo in shown {
        match echo.reply {
            Some(reply) => {
                let level = y(reply.after.as_secs_f64() * 1e3);
                let _ = write!(path, "M{:.1} {level:.1}h0", x(echo.sent));
            }
            None => {
                lost += 1;
                let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{}\" fill=\"red\">×</text>", x(echo.sent), FIELD.1 + 12.0);
            }
        }
    }
    let index = USERS.iter().position(|(name, _)| *name == user).unwrap_or_default();
    let _ = writeln!(
        svg,
        "<path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linecap=\"round\" fill=\"none\"/>\
         <text x=\"{}\" y=\"24\" fill=\"{colour}\" text-anchor=\"end\">{user}: {lost} lost</text>",
        FIELD.0 + FIELD.2 - 110.0 * (1 - index) as f64
    );
}
