//! The retransmission timeout of RFC 6298.
//!
//! In: round-trip times of Interests that were sent once. Out: a timeout, which doubles until the next sample.

use std::time::Duration;

const INITIAL: Duration = Duration::from_secs(1);
const MIN_TIMEOUT: Duration = Duration::from_millis(200);
const MAX_TIMEOUT: Duration = Duration::from_secs(4);

/// Estimates the round-trip time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RttEstimator {
    /// The smoothed round-trip time and its variation; `None` before the first sample.
    estimate: Option<(Duration, Duration)>,
    back_off: u32,
}

impl RttEstimator {
    pub(crate) fn sample(&mut self, rtt: Duration) {
        self.back_off = 0;
        self.estimate = Some(match self.estimate {
            None => (rtt, rtt / 2),
            Some((smoothed, variation)) => {
                let error = smoothed.abs_diff(rtt);
                ((smoothed * 7 + rtt) / 8, (variation * 3 + error) / 4)
            }
        });
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.estimate.map_or(INITIAL, |(smoothed, _)| smoothed)
    }

    pub(crate) fn timeout(&self) -> Duration {
        let base = self.estimate.map_or(INITIAL, |(smoothed, variation)| smoothed + variation * 4);
        (base.max(MIN_TIMEOUT) * (1 << self.back_off.min(5))).min(MAX_TIMEOUT)
    }

    pub(crate) fn back_off(&mut self) {
        self.back_off += 1;
    }
}
