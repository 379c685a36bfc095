//! The rate of each way where packets are lost, as a picture.
//!
//! In: figures. Out: an SVG with a bar for each way. Never: a bar without a measurement.

use super::figures::Figures;
use super::way::Way;
use crate::bar_chart::{self, Bar};

/// Draws them.
pub(super) fn svg(figures: &Figures) -> String {
    let bars = figures.lines.iter().filter_map(|line| {
        let (rate, gain) = (line.lossy_mbit_s?, line.gain?);
        let (colour, text) = match line.way {
            Way::Direct => (bar_chart::REFERENCE, format!("{rate:.1}")),
            Way::Haproxy => (bar_chart::PEER, format!("{rate:.1} ({gain:.1} times)")),
            _ => (bar_chart::OWN, format!("{rate:.1} ({gain:.1} times)")),
        };
        Some(Bar { label: line.way.name().to_owned(), length: rate, text, colour })
    });
    let title = "A download over 100 ms, of which the last 5 ms lose 1 % of the packets";
    let subtitle = "Mbit/s, median; in relation to one TCP connection (CUBIC) from end to end";
    bar_chart::svg(title, subtitle, &bars.collect::<Vec<_>>())
}
