//! The time that each way adds to the largest file, as a picture.
//!
//! In: figures. Out: an SVG with a bar for each way, and one for the paper. Never: a bar without a measurement.

use super::figures::Figures;
use super::way::{Published, Way, published};
use crate::bar_chart::{self, Bar};
use crate::terminal::bytes;

/// Draws them.
pub(super) fn svg(figures: &Figures) -> String {
    let largest = figures.lines.iter().map(|line| line.size).max().unwrap_or_default();
    let of_largest = figures.lines.iter().filter(|line| line.size == largest && line.way != Way::Udp);
    let mut bars: Vec<Bar> = of_largest
        .map(|line| Bar {
            label: line.way.name().to_owned(),
            length: line.added_percent,
            text: format!("{:+.1} %", line.added_percent),
            colour: if line.way == Way::Tcp { bar_chart::REFERENCE } else { bar_chart::OWN },
        })
        .collect();
    if let Some(Published::Percent(added)) = published(largest) {
        let text = format!("+{added} %");
        bars.push(Bar { label: "the paper's overlay".to_owned(), length: added, text, colour: bar_chart::PEER });
    }
    let title =
        format!("A file of {} over 10 Mbit/s: time beyond that of UDP without an overlay", bytes(largest as u64));
    bar_chart::svg(&title, "per cent, medians", &bars)
}
