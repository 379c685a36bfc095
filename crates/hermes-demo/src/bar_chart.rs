//! A chart of horizontal bars, as a picture.
//!
//! In: a title, a subtitle, and for each bar its label, length, text and colour. Out: an SVG in which the longest bar
//! has the whole width. Never: a scale that begins elsewhere than at zero.

use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
/// Left and width of the bars.
const FIELD: (f64, f64) = (190.0, 520.0);
const TOP: f64 = 86.0;
const ROW: f64 = 34.0;
const BAR: f64 = 20.0;

/// The colour of what is measured, of a peer, and of the reference.
pub(crate) const OWN: &str = "#1d4ed8";
pub(crate) const PEER: &str = "#15803d";
pub(crate) const REFERENCE: &str = "#555555";

/// One bar.
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) length: f64,
    pub(crate) text: String,
    pub(crate) colour: &'static str,
}

/// Draws the bars. Texts are those of this program and need no escapes.
pub(crate) fn svg(title: &str, subtitle: &str, bars: &[Bar]) -> String {
    let height = TOP + ROW * bars.len().max(1) as f64 + 24.0;
    let longest = bars.iter().map(|bar| bar.length).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"24\" y=\"32\" font-size=\"16\">{title}</text>\n\
         <text x=\"24\" y=\"54\" fill=\"#666\">{subtitle}</text>\n"
    );
    for (row, bar) in bars.iter().enumerate() {
        let top = TOP + ROW * row as f64;
        let width = FIELD.1 * bar.length.max(0.0) / longest;
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            FIELD.0 - 12.0,
            top + 15.0,
            bar.label,
            FIELD.0,
            bar.colour,
            FIELD.0 + width + 8.0,
            top + 15.0,
            bar.text,
        );
    }
    if bars.is_empty() {
        let _ = writeln!(svg, "<text x=\"24\" y=\"{TOP}\">Nothing was measured.</text>");
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_has_the_whole_width() {
        let bar = |length| Bar { label: "a".to_owned(), length, text: String::new(), colour: OWN };
        let drawn = svg("title", "subtitle", &[bar(1.0), bar(4.0)]);
        assert!(drawn.contains("width=\"130.0\"") && drawn.contains("width=\"520.0\""), "{drawn}");
    }
}
