//! Checks the settings for overload.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::report::Report;
use crate::document::overload::{OverloadSection, SignalSection};
use crate::scalar::{ByteSize, HumanDuration};
use crate::snapshot::{Overload, Signal, Step};

/// The range of a step, in percent of the limit.
const PERCENT: RangeInclusive<u16> = 1..=1000;
/// The default percentages of the steps for memory and descriptors.
const BEFORE_THE_END: [u16; 4] = [80, 90, 95, 98];
/// The default percentages of the steps for a delay, which may exceed its limit. Two steps are out of reach: smaller buffers do not
/// shorten a delay, and connections that one worker does not accept would wait although others have time.
const BEYOND_THE_LIMIT: [u16; 4] = [1000, 100, 200, 1000];
/// The default limit of the delay.
const DELAY: Duration = Duration::from_millis(500);

/// Builds the settings for overload.
pub(super) fn build(section: &OverloadSection, report: &mut Report) -> Overload {
    let OverloadSection { memory, descriptors, delay } = section;
    let least_memory = ByteSize(16 << 20);
    if let Some(limit) = memory.limit.filter(|limit| limit.0 < least_memory.0) {
        report.problem("overload.memory.limit", format!("{limit} is too small; use at least {least_memory}"));
    }
    if let Some(limit) = descriptors.limit.filter(|limit| *limit < 64) {
        report.problem("overload.descriptors.limit", format!("{limit} is too small; use at least 64"));
    }
    let range = Duration::from_millis(1)..=Duration::from_secs(60);
    if let Some(limit) = delay.limit.filter(|limit| !range.contains(&limit.0)) {
        report.problem("overload.delay.limit", format!("{limit} is out of range; must be 1ms to 1m"));
    }
    Overload {
        memory: signal("memory", memory, memory.limit.map(|limit| limit.0), BEFORE_THE_END, report),
        descriptors: signal("descriptors", descriptors, descriptors.limit, BEFORE_THE_END, report),
        delay: signal(
            "delay",
            delay,
            Some(delay.limit.map_or(DELAY, |HumanDuration(limit)| limit)),
            BEYOND_THE_LIMIT,
            report,
        ),
    }
}

fn signal<T, L>(
    name: &str,
    section: &SignalSection<T>,
    limit: Option<L>,
    defaults: [u16; 4],
    report: &mut Report,
) -> Signal<L> {
    let mut steps = defaults;
    let written = [section.shrink, section.shed, section.refuse, section.stop];
    for ((step, value), key) in steps.iter_mut().zip(written).zip(Step::ALL) {
        let Some(value) = value else { continue };
        if !PERCENT.contains(&value) {
            let (least, most) = (PERCENT.start(), PERCENT.end());
            report.problem(
                format!("overload.{name}.{}", key.as_str()),
                format!("{value} is out of range; use {least} to {most} percent of the limit"),
            );
        }
        *step = value;
    }
    Signal { limit, steps }
}
