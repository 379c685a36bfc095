//! Figure 10 as a picture: four panels, clients across, mean completion upwards.
//!
//! In: the results of `figure10` or `delayed`. Out: an SVG. The paper prints no values for its curves, only a sentence
//! about 1,000 requests. This sentence is below each panel, beside the measured values.

use std::fmt::Write as _;

use crate::{
    chain::{Case, Security},
    record::{Key, Results, Spread, Summary},
};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 760.0;
/// A panel's plotting area.
const PANEL: (f64, f64) = (340.0, 210.0);
const COLOURS: [(&str, &str); 5] =
    [("direct", "#555555"), ("envoy", "#c2410c"), ("hermes", "#1d4ed8"), ("haproxy", "#15803d"), ("nginx", "#a16207")];

/// The curve of a contender.
struct Curve<'a> {
    name: &'a str,
    /// Clients; mean in milliseconds over rounds; standard deviation within a burst.
    points: Vec<(f64, Spread, f64)>,
}

/// `None` when the results hold no bursts.
pub(crate) fn figure10(results: &Results) -> Option<String> {
    let measure = match results.benchmark.as_str() {
        "figure10" => "burst",
        "delayed" => "delayed-burst",
        _ => return None,
    };
    let panels: Vec<_> = Case::ALL.into_iter().map(|case| (case, curves(results, measure, case))).collect();
    if panels.iter().all(|(_, curves)| curves.is_empty()) {
        return None;
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = if measure == "burst" {
        "Figure 10 on loopback, fast server: mean completion of one-shot clients that start together"
    } else {
        "Figure 10 with 20 ms between the proxies and the Python server: mean completion of one-shot clients"
    };
    let _ = writeln!(svg, "<text x=\"450\" y=\"24\" text-anchor=\"middle\" font-size=\"15\">{title}</text>");
    legend(&mut svg, results);
    for (i, (case, curves)) in panels.iter().enumerate() {
        let (column, row) = ((i % 2) as f64, (i / 2) as f64);
        panel(&mut svg, (85.0 + column * 430.0, 90.0 + row * 330.0), *case, curves);
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

fn curves<'a>(results: &'a Results, measure: &str, case: Case) -> Vec<Curve<'a>> {
    let wanted = |key: &Key| key.measure == measure && key.case == Some(case) && key.security == Some(Security::Plain);
    let curve = |name: &'a str| {
        let own = |s: &&Summary| wanted(&s.key) && s.contender == name;
        let mut points: Vec<_> = results.summary.iter().filter(own).filter_map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve { name, points }
    };
    results.contenders().into_iter().map(curve).filter(|curve| !curve.points.is_empty()).collect()
}

fn point(summary: &Summary) -> Option<(f64, Spread, f64)> {
    let mean = summary.figures.get("mean_us")?;
    let deviation = summary.figures.get("sd_us")?.median / 1e3;
    let ms = Spread { median: mean.median / 1e3, min: mean.min / 1e3, max: mean.max / 1e3 };
    Some((summary.key.clients? as f64, ms, deviation))
}

fn colour(name: &str) -> &'static str {
    COLOURS.iter().find(|(n, _)| *n == name).map_or("#000000", |(_, colour)| colour)
}

fn legend(svg: &mut String, results: &Results) {
    for (i, name) in results.contenders().into_iter().enumerate() {
        let x = 240.0 + i as f64 * 100.0;
        let colour = colour(name);
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"46\" x2=\"{}\" y2=\"46\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"50\">{name}</text>",
            x + 24.0,
            x + 30.0
        );
    }
}

fn panel(svg: &mut String, (x, y): (f64, f64), case: Case, curves: &[Curve<'_>]) {
    let (width, height) = PANEL;
    let most = curves.iter().flat_map(|l| &l.points).map(|(_, mean, sd)| mean.median + sd).fold(0.0, f64::max);
    let step = nice_step(most / 4.0);
    let top = (most / step).ceil().max(1.0) * step;
    let clients = curves.iter().flat_map(|l| &l.points).map(|p| p.0).fold(1.0, f64::max);
    let at = |c: f64, ms: f64| (x + width * c / (clients * 1.05), y + height * (1.0 - (ms / top).min(1.0)));
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n\
         <rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#999\"/>",
        x + width / 2.0,
        y - 8.0,
        case.title()
    );
    axes(svg, (x, y), (top, step), clients, &at);
    for curve in curves {
        draw(svg, curve, &at);
    }
    notes(svg, (x, y + height + 48.0), case, curves);
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.max(1e-3).log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|t| t * power >= rough).unwrap_or(10.0);
    times * power
}

fn axes(
    svg: &mut String,
    (x, y): (f64, f64),
    (top, step): (f64, f64),
    clients: f64,
    at: &impl Fn(f64, f64) -> (f64, f64),
) {
    let (width, height) = PANEL;
    for tick in 0..=(top / step).round() as u32 {
        let ms = f64::from(tick) * step;
        let level = at(0.0, ms).1;
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{level:.1}\" x2=\"{}\" y2=\"{level:.1}\" stroke=\"#eee\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>",
            x + width,
            x - 6.0,
            level + 4.0
        );
    }
    for count in (200..=clients as u32).step_by(200) {
        let location = at(f64::from(count), 0.0).0;
        let _ = writeln!(
            svg,
            "<text x=\"{location:.1}\" y=\"{}\" text-anchor=\"middle\">{count}</text>",
            y + height + 16.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">clients at once</text>\
         <text transform=\"translate({} {}) rotate(-90)\" text-anchor=\"middle\">mean ms</text>",
        x + width / 2.0,
        y + height + 32.0,
        x - 48.0,
        y + height / 2.0
    );
}

/// Draws a curve with the standard deviation within a burst as error bars, as in the paper.
fn draw(svg: &mut String, curve: &Curve<'_>, at: &impl Fn(f64, f64) -> (f64, f64)) {
    let colour = colour(curve.name);
    let path: Vec<_> = curve.points.iter().map(|(c, mean, _)| at(*c, mean.median)).collect();
    let text: Vec<_> = path.iter().map(|(px, py)| format!("{px:.1},{py:.1}")).collect();
    let _ =
        writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", text.join(" "));
    for ((c, mean, sd), (px, py)) in curve.points.iter().zip(path) {
        let (high, low) = (at(*c, mean.median + sd).1, at(*c, (mean.median - sd).max(0.0)).1);
        let _ = writeln!(
            svg,
            "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"3\" fill=\"{colour}\"/>\
             <line x1=\"{px:.1}\" y1=\"{high:.1}\" x2=\"{px:.1}\" y2=\"{low:.1}\" stroke=\"{colour}\" opacity=\"0.4\"/>"
        );
    }
}

/// Draws the paper's sentence about 1,000 requests, and the same sentence with the measured values.
fn notes(svg: &mut String, (x, y): (f64, f64), case: Case, curves: &[Curve<'_>]) {
    let paper = match case {
        Case::Http => "direct 18.4 % slower than proxied",
        Case::Tcp => "direct 110.5 % slower than proxied",
        Case::Connect => "direct 23.2 % faster than proxied",
        Case::Udp => "direct 72.2 % faster than proxied",
    };
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" fill=\"#666\" font-size=\"11\">paper at 1,000: {paper}</text>");
    let last = |name: &str| {
        let points = &curves.iter().find(|l| l.name == name)?.points;
        points.last().map(|(_, mean, _)| mean.median)
    };
    let Some(direct) = last("direct") else { return };
    let mut below = y;
    for name in ["envoy", "hermes"] {
        let Some(proxied) = last(name) else { continue };
        below += 14.0;
        let output = compared(direct, proxied);
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{below}\" fill=\"#666\" font-size=\"11\">here: direct {output} than {name}</text>"
        );
    }
}

/// The paper's phrasing: slower by the excess over the other, faster by the share of the other.
fn compared(direct: f64, proxied: f64) -> String {
    if direct > proxied {
        format!("{:.1} % slower", (direct / proxied - 1.0) * 100.0)
    } else {
        format!("{:.1} % faster", (1.0 - direct / proxied) * 100.0)
    }
}
