//! Bytes over time at each hop, as a picture.
//!
//! In: traced downloads. Out: an SVG. Each download has a row of three fields, the server's link first. A field shows
//! the bytes that the link delivered towards the client, and the slots in which it was up. All fields have the same
//! scales.

use std::fmt::Write as _;

use super::lab::LINKS;
use super::run::Drawn;
use super::variant::said;

const WIDTH: f64 = 960.0;
/// Left and width of a field.
const FIELD: (f64, f64) = (120.0, 800.0);
/// A field's height, and the gap between two fields.
const LANE: (f64, f64) = (84.0, 12.0);
/// The space above the fields of a download, and below.
const HEAD: f64 = 64.0;
const FOOT: f64 = 46.0;
/// The colours by link, the client's first.
const COLOURS: [&str; LINKS] = ["#1d4ed8", "#15803d", "#b45309"];

/// Draws them.
pub(super) fn svg(drawn: &[Drawn]) -> String {
    let panel = HEAD + LINKS as f64 * (LANE.0 + LANE.1) + FOOT;
    let height = panel * drawn.len().max(1) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let last = |one: &Drawn| one.trace.samples.last().map_or(0.0, |(at, _)| *at);
    let seconds = drawn.iter().map(last).fold(1.0, f64::max).ceil();
    let most = drawn.iter().filter_map(|one| one.trace.samples.last()).flat_map(|(_, bytes)| *bytes).max();
    let scale = Scale { seconds, bytes: most.unwrap_or(1).max(1) as f64 * 1.05 };
    for (number, one) in drawn.iter().enumerate() {
        scale.panel(&mut svg, one, panel * number as f64);
    }
    if drawn.is_empty() {
        let _ =
            writeln!(svg, "<text x=\"40\" y=\"40\">Nothing was drawn: neither Hermes nor a tuned Envoy ran.</text>");
    }
    svg + "</svg>\n"
}

/// The ranges that the fields' width and height represent.
struct Scale {
    seconds: f64,
    bytes: f64,
}

// Writing to a String cannot fail.
impl Scale {
    fn x(&self, at: f64) -> f64 {
        FIELD.0 + FIELD.1 * (at / self.seconds).clamp(0.0, 1.0)
    }

    fn panel(&self, svg: &mut String, one: &Drawn, top: f64) {
        let (download, limit) = (&one.tried.download, one.tried.limit);
        let end = one.trace.samples.last().map_or(0.0, |(at, _)| *at);
        let came = match &download.failed {
            None => format!("whole after {:.2} s", download.seconds),
            Some(_) => format!("not whole after {:.0} s", download.seconds),
        };
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" font-size=\"15\">{}: {}, {came}</text>\
             <text x=\"{}\" y=\"{}\" fill=\"#666\">bytes that came over each link, towards the client; shaded: the link is up</text>",
            FIELD.0,
            top + 24.0,
            one.way.name(),
            said(one.size),
            FIELD.0,
            top + 42.0
        );
        // The server's link is on top: bytes flow downwards.
        for (lane, link) in (0..LINKS).rev().enumerate() {
            self.lane(svg, one, link, top + HEAD + lane as f64 * (LANE.0 + LANE.1), end);
        }
        let bottom = top + HEAD + LINKS as f64 * (LANE.0 + LANE.1) - LANE.1;
        self.axis(svg, bottom);
        // A download begins some milliseconds after its trace, since curl has to start.
        let begun = (end - download.seconds).max(0.0);
        let mark = self.x(begun + limit);
        let _ = writeln!(
            svg,
            "<line x1=\"{mark:.1}\" y1=\"{:.1}\" x2=\"{mark:.1}\" y2=\"{:.1}\" stroke=\"#dc2626\" stroke-dasharray=\"5 4\"/>\
             <text x=\"{mark:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#dc2626\" font-size=\"11\">limit {limit:.2} s</text>",
            top + HEAD - 4.0,
            bottom + 4.0,
            top + HEAD - 8.0
        );
    }

    fn lane(&self, svg: &mut String, one: &Drawn, link: usize, top: f64, end: f64) {
        let (height, colour) = (LANE.0, COLOURS[link]);
        let trace = &one.trace;
        let slots = (trace.phase + end).ceil() as usize;
        for slot in (0..=slots).filter(|slot| slot % LINKS == link) {
            let (from, to) = (slot as f64 - trace.phase, slot as f64 + 1.0 - trace.phase);
            let (left, right) = (self.x(from.min(end)), self.x(to.min(end)));
            if right > left {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height}\" fill=\"{colour}\" opacity=\"0.14\"/>",
                    right - left
                );
            }
        }
        let bottom = top + height;
        let mut path = format!("M{:.1} {bottom:.1}", self.x(0.0));
        for (at, bytes) in &trace.samples {
            let _ = write!(path, "L{:.1} {:.1}", self.x(*at), bottom - height * bytes[link] as f64 / self.bytes);
        }
        let bytes = trace.samples.last().map_or(0, |(_, bytes)| bytes[link]);
        let hop = format!("n{} → n{}", link + 2, link + 1);
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{top:.1}\" width=\"{}\" height=\"{height}\" fill=\"none\" stroke=\"#ccc\"/>\
             <path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"1.8\" fill=\"none\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{hop}</text>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#666\" font-size=\"11\">{:.2} MB</text>",
            FIELD.0,
            FIELD.1,
            FIELD.0 - 8.0,
            top + height / 2.0,
            FIELD.0 - 8.0,
            top + height / 2.0 + 16.0,
            bytes as f64 / 1e6
        );
    }

    fn axis(&self, svg: &mut String, bottom: f64) {
        let step =
            [1, 2, 5, 10, 20, 50].into_iter().find(|step| self.seconds / f64::from(*step) <= 20.0).unwrap_or(100);
        for second in (0..=self.seconds as u32).step_by(step as usize) {
            let at = self.x(f64::from(second));
            let _ = writeln!(
                svg,
                "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{second} s</text>",
                bottom + 20.0
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::run::Try;
    use super::super::test_path::{Download, Trace};
    use super::super::variant::Variant;
    use super::*;

    #[test]
    fn slots_are_shaded_where_their_link_is_up() {
        let download = Download { phase: 0.5, seconds: 6.0, bytes: 100, failed: None };
        let samples = vec![(0.0, [0; LINKS]), (6.0, [100; LINKS])];
        let trace = Trace { phase: 0.5, samples };
        let one = Drawn { way: Variant::Hermes, size: 1 << 20, tried: Try { download, limit: 5.5 }, trace };
        let svg = svg(&[one]);
        // From 0.5 to 6.5: the client's link in 0.5-1, 3-4 and 6-6.5, each other one twice.
        assert_eq!(svg.matches("opacity=\"0.14\"").count(), 7, "{svg}");
        assert!(svg.contains("limit 5.50 s") && svg.ends_with("</svg>\n"), "{svg}");
        let x = |at: f64| FIELD.0 + FIELD.1 * at / 6.0;
        let first = format!("<rect x=\"{:.1}\"", x(0.0));
        assert!(svg.contains(&first), "{svg}");
    }
}
