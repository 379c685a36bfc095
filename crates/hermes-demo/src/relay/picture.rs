//! The delay of each packet and the gap before it, over time, as a picture.
//!
//! In: figures. Out: an SVG with two fields of dots: the relays and UDP. Never: a scale that begins elsewhere than at zero.

use std::fmt::Write as _;

use super::figures::{Figures, Summary, USUAL_GAP};
use super::voice::Stream;
use crate::bar_chart::{OWN, REFERENCE};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 60.0;
const FIELD: (f64, f64) = (760.0, 170.0);
/// The top of each field.
const TOPS: [f64; 2] = [96.0, 330.0];
const HEIGHT: f64 = 540.0;
/// The largest gap that is drawn, in milliseconds; larger ones are drawn at the top.
const MAX_GAP: f64 = 50.0;

/// A field of dots with its scale.
struct Field {
    top: f64,
    max: f64,
    count: usize,
}

impl Field {
    fn y(&self, value: f64) -> f64 {
        self.top + FIELD.1 * (1.0 - (value / self.max).clamp(0.0, 1.0))
    }

    fn dots(&self, svg: &mut String, values: impl Iterator<Item = Option<f64>>, colour: &str) {
        for (at, value) in values.enumerate() {
            let Some(value) = value else { continue };
            let x = LEFT + FIELD.0 * at as f64 / self.count.max(1) as f64;
            // Writing to a String cannot fail.
            let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"1.4\" fill=\"{colour}\"/>", self.y(value));
        }
    }

    fn frame(&self, svg: &mut String, title: &str, seconds: f64) {
        let bottom = self.top + FIELD.1;
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"{:.1}\">{title}</text>\
             <line x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{:.1}\" y2=\"{bottom}\" stroke=\"#999\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.1} ms</text>\
             <text x=\"{:.1}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{seconds:.0} s</text>",
            self.top - 10.0,
            LEFT + FIELD.0,
            LEFT - 8.0,
            self.top + 10.0,
            self.max,
            LEFT - 8.0,
            LEFT + FIELD.0,
            bottom + 18.0,
        );
    }
}

/// Draws them.
pub(super) fn svg(figures: &Figures) -> String {
    let (relay, udp) = (&figures.voice.relay, &figures.voice.udp);
    let (summary, direct) = (Summary::of(relay), Summary::of(udp));
    let seconds = relay.sent as f64 / 50.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"24\" y=\"30\" font-size=\"16\">50 packets of 160 B a second over three relays</text>\n\
         <text x=\"24\" y=\"52\"><tspan fill=\"{OWN}\">relays: median {:.2} ms</tspan> \
         <tspan dx=\"16\" fill=\"{REFERENCE}\">UDP on loopback: median {:.2} ms</tspan></text>\n",
        summary.median_ms, direct.median_ms
    );
    let longest = |stream: &Stream| stream.delay_ms.iter().flatten().copied().fold(0.0, f64::max);
    let max = longest(relay).max(longest(udp)).max(1.0).ceil();
    let delays = Field { top: TOPS[0], max, count: relay.sent };
    delays.frame(&mut svg, "Delay of each packet", seconds);
    delays.dots(&mut svg, udp.delay_ms.iter().copied(), REFERENCE);
    delays.dots(&mut svg, relay.delay_ms.iter().copied(), OWN);
    let gaps = Field { top: TOPS[1], max: MAX_GAP, count: relay.sent };
    gaps.frame(&mut svg, "Gap between two packets; usual between the lines", seconds);
    for bound in [*USUAL_GAP.start(), *USUAL_GAP.end()] {
        let (y, right) = (gaps.y(bound), LEFT + FIELD.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#bbb\" stroke-dasharray=\"4\"/>"
        );
    }
    gaps.dots(&mut svg, udp.gap_ms.iter().copied().map(Some), REFERENCE);
    gaps.dots(&mut svg, relay.gap_ms.iter().copied().map(Some), OWN);
    svg + "</svg>\n"
}
