//! The retransmission timeout of a link (RFC 6298).
//!
//! In: round-trip times of frames that were sent once, and expired timers. Out: the current timeout, between the
//! configured bounds.

use std::time::Duration;

/// The estimator of RFC 6298, section 2.
#[derive(Debug, Clone)]
pub(super) struct RttEstimator {
    /// The smoothed round-trip time and its variation; `None` before the first sample.
    smoothed: Option<(Duration, Duration)>,
    timeout: Duration,
    bounds: (Duration, Duration),
    /// The time of the last back-off. A flight of lost frames backs off once.
    backed_off: Option<Duration>,
}

impl RttEstimator {
    pub(super) fn new(initial: Duration, min: Duration, max: Duration) -> Self {
        let min = min.min(max);
        Self { smoothed: None, timeout: initial.clamp(min, max), bounds: (min, max), backed_off: None }
    }

    /// Adds the round-trip time of a frame that was sent only once (section 3, Karn's algorithm).
    pub(super) fn sample(&mut self, rtt: Duration) {
        // A peer controls the delay of an Ack, and sums below must not overflow.
        let rtt = rtt.min(Duration::from_secs(3600));
        let (smoothed, variation) = match self.smoothed {
            None => (rtt, rtt / 2),
            Some((smoothed, variation)) => ((smoothed * 7 + rtt) / 8, (variation * 3 + smoothed.abs_diff(rtt)) / 4),
        };
        self.smoothed = Some((smoothed, variation));
        self.timeout = (smoothed + variation * 4).clamp(self.bounds.0, self.bounds.1);
    }

    /// Doubles the timeout after a timer expired (section 5.5), if the frame was sent after the last back-off.
    pub(super) fn back_off(&mut self, sent: Duration, now: Duration) {
        if self.backed_off.is_none_or(|last| sent >= last) {
            self.timeout = (self.timeout.saturating_mul(2)).min(self.bounds.1);
            self.backed_off = Some(now);
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }
}
