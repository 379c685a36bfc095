//! Round-trip time estimator (RFC 6298) and probe timeout (RFC 9002, section 6.2).
//!
//! In: samples and the delay that the peer reports. Out: the smoothed round trip, and timeouts. Never: a clock.

use std::time::Duration;

/// Granularity of timers.
pub(crate) const GRANULARITY: Duration = Duration::from_millis(1);
/// Time for which a receiver may delay an acknowledgement.
pub(crate) const MAX_ACK_DELAY: Duration = Duration::from_millis(5);
/// The round trip before the first sample.
const INITIAL: Duration = Duration::from_millis(200);
/// Minimum probe timeout.
const MIN_PTO: Duration = Duration::from_millis(10);
/// Maximum probe timeout after back-off.
const MAX_PTO: Duration = Duration::from_secs(10);

/// The estimate of a path.
#[derive(Debug)]
pub(crate) struct Rtt {
    smoothed: Duration,
    variation: Duration,
    latest: Duration,
    min: Option<Duration>,
}

impl Rtt {
    /// Returns an estimate that begins with the round trip of the enrolment, if known.
    pub(crate) fn new(known: Option<Duration>) -> Self {
        let smoothed = known.unwrap_or(INITIAL).max(Duration::from_micros(1));
        Self { smoothed, variation: smoothed / 2, latest: smoothed, min: None }
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// Records a sample, reduced by the delay of the acknowledgement if the result stays above the minimum.
    pub(crate) fn sample(&mut self, sample: Duration, delay: Duration) {
        let is_first = self.min.is_none();
        let min = self.min.map_or(sample, |min| min.min(sample));
        self.min = Some(min);
        let delay = delay.min(MAX_ACK_DELAY);
        let sample = if sample >= min + delay { sample - delay } else { sample };
        self.latest = sample;
        if is_first {
            (self.smoothed, self.variation) = (sample, sample / 2);
            return;
        }
        let difference = self.smoothed.abs_diff(sample);
        self.variation = (self.variation * 3 + difference) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
    }

    /// Returns the time after which a later acknowledgement makes a PDU lost.
    pub(crate) fn loss_delay(&self) -> Duration {
        (self.smoothed.max(self.latest) * 9 / 8).max(GRANULARITY)
    }

    /// Returns the probe timeout after `count` consecutive timeouts.
    pub(crate) fn pto(&self, count: u32) -> Duration {
        let base = self.smoothed + (self.variation * 4).max(GRANULARITY) + MAX_ACK_DELAY;
        (base.max(MIN_PTO) * (1 << count.min(10))).min(MAX_PTO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn first_sample_replaces_the_guess_and_later_ones_are_smoothed() {
        let mut rtt = Rtt::new(None);
        rtt.sample(40 * MS, 3 * MS);
        assert_eq!(rtt.smoothed(), 40 * MS);
        rtt.sample(80 * MS, Duration::ZERO);
        assert_eq!(rtt.smoothed(), 45 * MS);
        assert_eq!(rtt.loss_delay(), 90 * MS);
    }

    #[test]
    fn the_reported_delay_is_bounded() {
        let mut rtt = Rtt::new(Some(10 * MS));
        rtt.sample(10 * MS, Duration::ZERO);
        rtt.sample(50 * MS, Duration::from_secs(9));
        assert_eq!(rtt.latest, 45 * MS);
        rtt.sample(12 * MS, 5 * MS);
        assert_eq!(rtt.latest, 12 * MS, "never below the minimum");
    }

    #[test]
    fn timeouts_double_up_to_a_limit() {
        let rtt = Rtt::new(Some(20 * MS));
        assert_eq!(rtt.pto(1), 2 * rtt.pto(0));
        assert_eq!(rtt.pto(u32::MAX), MAX_PTO);
    }
}
