//! Send window towards a neighbour: slightly more than the bandwidth-delay product of the path.
//!
//! In: times of sent data and of acknowledgements. Out: a window in bytes. Queued data is lost when an intermittent
//! link goes down, so the window keeps queues short. A window that is too small leaves the link idle. Callers pass the
//! time.

use std::collections::VecDeque;
use std::time::Duration;

/// Time beyond a round trip that a neighbour takes to write and to acknowledge.
const ACK_ALLOWANCE: Duration = Duration::from_millis(30);
/// Minimum window, in bytes: 50 ms of a link of 10 Mbit/s.
const MIN_WINDOW: u64 = 64 << 10;
/// Maximum window, in bytes.
const MAX_WINDOW: u64 = 16 << 20;
/// Age at which a measured rate or round trip is replaced.
const SAMPLE_LIFETIME: Duration = Duration::from_secs(10);
/// Maximum number of samples in flight; beyond it, the oldest are dropped.
const MAX_SAMPLES: usize = 1024;

/// The measured path to a neighbour. Times count from any fixed moment.
#[derive(Debug, Default)]
pub(crate) struct SendWindow {
    /// Bytes acknowledged in total, over all channels.
    delivered: u64,
    under_way: VecDeque<Sample>,
    /// Bytes sent over the present channel.
    sent: u64,
    acknowledged: u64,
    /// The highest delivery rate in bytes a second, and its time.
    rate: Option<(f64, Duration)>,
    /// The shortest round trip, and its time.
    trip: Option<(Duration, Duration)>,
}

/// A sample of sent data.
#[derive(Debug)]
struct Sample {
    at: Duration,
    /// Number of bytes sent over the channel up to the end of the sample.
    upto: u64,
    /// Number of bytes acknowledged in total when the sample was sent.
    delivered: u64,
}

impl SendWindow {
    /// Starts a new channel: nothing is in flight.
    pub(crate) fn begin(&mut self) {
        self.under_way.clear();
        (self.sent, self.acknowledged) = (0, 0);
    }

    pub(crate) fn sent(&mut self, now: Duration, bytes: u64) {
        self.sent += bytes;
        if self.under_way.len() == MAX_SAMPLES {
            self.under_way.pop_front();
        }
        self.under_way.push_back(Sample { at: now, upto: self.sent, delivered: self.delivered });
    }

    /// Records an acknowledgement of more bytes.
    pub(crate) fn held(&mut self, now: Duration, bytes: u64) {
        self.delivered = self.delivered.saturating_add(bytes);
        self.acknowledged = self.acknowledged.saturating_add(bytes).min(self.sent);
        let mut newest = None;
        while self.under_way.front().is_some_and(|sample| sample.upto <= self.acknowledged) {
            newest = self.under_way.pop_front();
        }
        let Some(sample) = newest else { return };
        let took = now.saturating_sub(sample.at).max(Duration::from_micros(50));
        let rate = (self.delivered - sample.delivered) as f64 / took.as_secs_f64();
        let is_old = |seen: Duration| now.saturating_sub(seen) > SAMPLE_LIFETIME;
        if self.rate.is_none_or(|(highest, seen)| rate >= highest || is_old(seen)) {
            self.rate = Some((rate, now));
        }
        if self.trip.is_none_or(|(shortest, seen)| took <= shortest || is_old(seen)) {
            self.trip = Some((took, now));
        }
    }

    /// Returns the maximum number of bytes in flight.
    pub(crate) fn window(&self) -> u64 {
        let (Some((rate, _)), Some((trip, _))) = (self.rate, self.trip) else { return MIN_WINDOW };
        ((rate * (trip + ACK_ALLOWANCE).as_secs_f64()) as u64).clamp(MIN_WINDOW, MAX_WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Simulates a link with this rate in bytes a millisecond and this round trip, always full.
    fn after_a_second(rate: u64, trip: u32) -> u64 {
        let (mut pace, mut link, mut in_flight) = (SendWindow::default(), VecDeque::new(), 0);
        let mut free_at = 0;
        for now in 0..1000_u64 {
            while link.front().is_some_and(|(at, _)| *at <= now) {
                let (_, bytes) = link.pop_front().unwrap_or_default();
                in_flight -= bytes;
                pace.held(MS * now as u32, bytes);
            }
            while in_flight + rate <= pace.window() {
                free_at = now.max(free_at) + 1;
                link.push_back((free_at + u64::from(trip), rate));
                in_flight += rate;
                pace.sent(MS * now as u32, rate);
            }
        }
        pace.window()
    }

    #[test]
    fn a_window_is_what_the_link_carries_in_a_trip_and_a_little_more() {
        // 10 Mbit/s and 1 ms give the minimum. 100 Mbit/s and 40 ms give 12.5 kB for each of some 71 ms.
        assert_eq!(after_a_second(1250, 1), MIN_WINDOW);
        let wide = after_a_second(12_500, 40);
        assert!((800_000..1_200_000).contains(&wide), "{wide}");
    }
}
