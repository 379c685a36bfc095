//! The gain of each way where packets are lost, as a picture.
//!
//! In: figures. Out: an SVG with a bar for each way: its rate over the path that loses packets. Never: a bar without a
//! measurement.

use std::fmt::Write as _;

use super::figures::Figures;
use super::way::Way;

const WIDTH: f64 = 860.0;
/// Left and width of the bars.
const FIELD: (f64, f64) = (190.0, 520.0);
const TOP: f64 = 86.0;
const ROW: f64 = 34.0;
const BAR: f64 = 20.0;

/// Draws them.
pub(super) fn svg(figures: &Figures) -> String {
    let bars: Vec<(Way, f64, f64)> =
        figures.lines.iter().filter_map(|line| Some((line.way, line.lossy_mbit_s?, line.gain?))).collect();
    let height = TOP + ROW * bars.len().max(1) as f64 + 24.0;
    let most = bars.iter().map(|(_, rate, _)| *rate).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"24\" y=\"32\" font-size=\"16\">A download over 100 ms, of which the last 5 ms lose 1 % of the packets</text>\n\
         <text x=\"24\" y=\"54\" fill=\"#666\">Mbit/s, median; in relation to one TCP connection (CUBIC) from end to end</text>\n"
    );
    for (row, (way, rate, gain)) in bars.iter().enumerate() {
        let top = TOP + ROW * row as f64;
        let width = FIELD.1 * rate / most;
        let colour = match way {
            Way::Direct => "#555555",
            Way::Haproxy => "#15803d",
            _ => "#1d4ed8",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{rate:.1}{}</text>",
            FIELD.0 - 12.0,
            top + 15.0,
            way.name(),
            FIELD.0,
            FIELD.0 + width + 8.0,
            top + 15.0,
            if *way == Way::Direct { String::new() } else { format!(" ({gain:.1} times)") },
        );
    }
    if bars.is_empty() {
        let _ = writeln!(svg, "<text x=\"24\" y=\"{TOP}\">No download was measured.</text>");
    }
    svg + "</svg>\n"
}
