//! Congestion controller for a dedicated, intermittently available link.
//!
//! In: acknowledged and lost packets, with their times. Out: a congestion window: the bandwidth-delay product and an
//! allowance for acknowledgements. A single loss does not change the rate, and losses during an outage never do. If
//! many packets are lost while the link is up, the allowance shrinks first, and then the estimated rate. The caller
//! passes the current time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time beyond a round trip that the window covers, because the receiver acknowledges with a delay.
const ACK_ALLOWANCE: Duration = Duration::from_millis(30);
/// Heavy loss halves the allowance down to this minimum. It doubles again after each [`RECOVERY_INTERVAL`] without
/// heavy loss: not sooner, because a queue that overflowed once overflows in the next round trip, too.
const MIN_ACK_ALLOWANCE: Duration = Duration::from_millis(2);
const RECOVERY_INTERVAL: Duration = Duration::from_secs(2);
/// Time that the data in flight of one stream covers. A stream is delivered in order, so data after a lost packet waits
/// for several round trips, and a little longer.
const IN_ORDER_ROUND_TRIPS: u32 = 5;
const IN_ORDER_ALLOWANCE: Duration = Duration::from_millis(10);
/// The smallest window, in bytes: 50 ms of a link of 10 Mbit/s.
const MIN_WINDOW: u64 = 64 << 10;
/// The largest window, in bytes. It also applies in an outage, when packets in flight are lost and a probe must leave
/// immediately.
pub(super) const MAX_WINDOW: u64 = 64 << 20;
/// Lifetime of the highest measured rate, and the interval at which the shortest round trip is measured again.
const FILTER_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum interval between two delivery samples, and maximum number of samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(1);
const MAX_SAMPLES: usize = 1024;
/// Losses are counted over at least this many bytes. A higher share than [`MAX_RANDOM_LOSS`] is not random loss.
const MIN_ROUND_BYTES: u64 = 192 << 10;
const MAX_RANDOM_LOSS: f64 = 0.05;

/// The measurements of a link, and the window that follows from them.
#[derive(Debug, Clone, Default)]
pub(super) struct IntermittentController {
    arrived: u64,
    /// The number of bytes delivered in total, at each sample's time.
    samples: VecDeque<(Instant, u64)>,
    /// The highest rate, in bytes per second, and when it was measured.
    rate: Option<(f64, Instant)>,
    trip: Duration,
    /// The start of the current interval ([`FILTER_INTERVAL`]), and the shortest round trip in it.
    shortest: Option<(Instant, Duration)>,
    /// The end of the last outage. Packets sent before it count as lost in the outage.
    up_since: Option<Instant>,
    /// Number of times that [`ACK_ALLOWANCE`] was halved, and when this number changed last.
    halvings: u32,
    halved: Option<Instant>,
    /// The current loss round: its start, and the bytes delivered before it. `lost`: the bytes lost in it.
    round: Option<(Instant, u64)>,
    lost: u64,
}

impl IntermittentController {
    /// Records that the link is up again after an outage.
    pub(super) fn restored(&mut self, now: Instant) {
        self.up_since = Some(now);
        (self.round, self.lost) = (None, 0);
    }

    /// Records the arrival of `bytes` that were sent at `sent`. `trip` is the shortest round trip ever measured.
    /// `is_idle`: the sender had too little data to fill the link, so the link may carry more.
    pub(super) fn arrived(&mut self, now: Instant, sent: Instant, bytes: u64, trip: Duration, is_idle: bool) {
        self.update_trip(now, sent, trip);
        // The last sample before the packet was sent. A packet that is older than all samples, as after an outage, has
        // none.
        let sample =
            self.samples.partition_point(|(at, _)| *at <= sent).checked_sub(1).map(|index| self.samples[index]);
        self.arrived += bytes;
        match self.samples.back_mut() {
            Some((at, upto)) if now.saturating_duration_since(*at) < SAMPLE_INTERVAL => *upto = self.arrived,
            _ => self.samples.push_back((now, self.arrived)),
        }
        if self.samples.len() > MAX_SAMPLES {
            self.samples.pop_front();
        }
        if let Some((at, before)) = sample
            && self.up_since.is_none_or(|since| sent >= since)
        {
            let took = now.saturating_duration_since(at).max(SAMPLE_INTERVAL);
            self.update_rate(now, (self.arrived - before) as f64 / took.as_secs_f64(), is_idle);
        }
        let (since, of_round) = *self.round.get_or_insert((now, self.arrived));
        let arrived = self.arrived - of_round;
        if arrived + self.lost >= MIN_ROUND_BYTES && now.saturating_duration_since(since) >= self.trip {
            self.end_round(now, arrived, now.saturating_duration_since(since));
            (self.round, self.lost) = (Some((now, self.arrived)), 0);
        }
    }

    /// Updates the estimate of the round trip. A path may become longer while it is used, but a queue delays packets,
    /// too. So the estimate grows only if every packet of an interval took longer than our own queue explains.
    fn update_trip(&mut self, now: Instant, sent: Instant, shortest_ever: Duration) {
        if self.trip.is_zero() || shortest_ever > self.trip {
            self.trip = shortest_ever;
        }
        if self.up_since.is_some_and(|since| sent < since) {
            return;
        }
        let took = now.saturating_duration_since(sent);
        self.trip = self.trip.min(took.max(shortest_ever));
        let (since, shortest) = self.shortest.get_or_insert((now, took));
        *shortest = took.min(*shortest);
        if now.saturating_duration_since(*since) > FILTER_INTERVAL {
            let shortest = *shortest;
            self.shortest = None;
            if shortest > self.trip + 2 * ACK_ALLOWANCE {
                self.trip = shortest;
            }
        }
    }

    /// Returns the round trip without queueing delay.
    pub(super) fn trip(&self) -> Duration {
        self.trip
    }

    /// Records the loss of `bytes` that were sent no later than `sent`.
    pub(super) fn lost(&mut self, sent: Instant, bytes: u64) {
        if self.up_since.is_none_or(|since| sent >= since) {
            self.lost += bytes;
        }
    }

    fn update_rate(&mut self, now: Instant, rate: f64, is_idle: bool) {
        let is_old = |seen: Instant| !is_idle && now.saturating_duration_since(seen) > FILTER_INTERVAL;
        if self.rate.is_none_or(|(highest, seen)| rate >= highest || is_old(seen)) {
            self.rate = Some((rate, now));
        }
    }

    /// Ends a loss round of duration `took` in which `arrived` bytes arrived, and adapts to its losses.
    fn end_round(&mut self, now: Instant, arrived: u64, took: Duration) {
        if self.lost as f64 <= MAX_RANDOM_LOSS * (arrived + self.lost) as f64 {
            let calm = self.halved.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
            if calm > RECOVERY_INTERVAL {
                let times = u32::try_from(calm.as_millis() / RECOVERY_INTERVAL.as_millis()).unwrap_or(u32::MAX);
                self.halvings = self.halvings.saturating_sub(times);
                self.halved = Some(now);
            }
            return;
        }
        self.halved = Some(now);
        if self.ack_allowance() > MIN_ACK_ALLOWANCE {
            self.halvings += 1;
        } else if let Some((rate, _)) = &mut self.rate {
            *rate = rate.min(arrived as f64 / took.max(SAMPLE_INTERVAL).as_secs_f64());
        }
    }

    fn ack_allowance(&self) -> Duration {
        (ACK_ALLOWANCE / 2_u32.saturating_pow(self.halvings)).max(MIN_ACK_ALLOWANCE)
    }

    fn bytes_within(&self, during: Duration) -> Option<u64> {
        self.rate.map(|(rate, _)| ((rate * during.as_secs_f64()) as u64).clamp(MIN_WINDOW, MAX_WINDOW))
    }

    /// Returns the congestion window, in bytes.
    pub(super) fn window(&self) -> u64 {
        self.bytes_within(self.trip + self.ack_allowance()).unwrap_or(MIN_WINDOW)
    }

    /// Returns how many bytes of one stream may be sent beyond those that arrived in order. `None`: nothing is measured
    /// yet.
    pub(super) fn in_order(&self) -> Option<u64> {
        self.bytes_within(IN_ORDER_ROUND_TRIPS * self.trip + self.ack_allowance() + IN_ORDER_ALLOWANCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PACKET: u64 = 1250;

    /// Simulates a full link of `rate` packets per millisecond with a queue of `queue` packets, which loses one of
    /// `loses` packets at random. Returns the window and the share of lost packets.
    fn after(seconds: u32, rate: u64, trip: u32, queue: usize, loses: u64) -> (u64, f64) {
        along(seconds, rate, |_| trip, queue, loses)
    }

    /// Works like [`after`], with a round trip that changes over time; both are in milliseconds.
    fn along(seconds: u32, rate: u64, trip: impl Fn(u32) -> u32, queue: usize, loses: u64) -> (u64, f64) {
        let start = Instant::now();
        let (mut link, mut under_way, mut waiting) =
            (IntermittentController::default(), VecDeque::new(), VecDeque::new());
        let (mut in_flight, mut number, mut sent, mut lost) = (0, 0_u64, 0_u64, 0_u64);
        let mut shortest = u32::MAX;
        for tick in 0..seconds * 1000 {
            let (now, trip) = (start + MS * tick, trip(tick));
            shortest = shortest.min(trip);
            while let Some((at, when, is_lost)) = under_way.front().copied()
                && at <= now
            {
                under_way.pop_front();
                in_flight -= PACKET;
                if is_lost { link.lost(when, PACKET) } else { link.arrived(now, when, PACKET, MS * shortest, false) }
            }
            while in_flight + PACKET <= link.window() {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let is_lost = waiting.len() >= queue || (loses > 0 && (number >> 33) % loses == 0);
                sent += 1;
                lost += u64::from(is_lost);
                in_flight += PACKET;
                if is_lost {
                    under_way.push_back((now + MS * trip, now, true));
                } else {
                    waiting.push_back(now);
                }
            }
            for _ in 0..rate {
                under_way.extend(waiting.pop_front().map(|when| (now + MS * trip, when, false)));
            }
        }
        (link.window(), lost as f64 / sent as f64)
    }

    #[test]
    fn a_window_is_what_the_link_carries_in_a_trip_and_a_little_more() {
        // 10 Mbit/s and 1 ms: the minimum. 100 Mbit/s and 40 ms: 12.5 kB for each of some 70 ms.
        assert_eq!(after(2, 1, 1, 1000, 0).0, MIN_WINDOW);
        let (wide, _) = after(2, 10, 40, 10_000, 0);
        assert!((700_000..1_100_000).contains(&wide), "{wide}");
        let (lossy, _) = after(5, 10, 40, 10_000, 100);
        assert!((700_000..1_100_000).contains(&lossy), "one of a hundred is chance: {lossy}");
    }

    #[test]
    fn a_short_queue_is_not_overrun() {
        // The queue holds five milliseconds of a link of 100 Mbit/s.
        let (window, lost) = after(5, 10, 40, 50, 0);
        assert!((400_000..650_000).contains(&window) && lost < 0.05, "{window} {lost}");
        // The sender does not overrun it again in every round trip.
        let (window, lost) = after(60, 10, 40, 50, 0);
        assert!((400_000..650_000).contains(&window) && lost < 0.01, "{window} {lost}");
    }

    /// At 3 % random loss a round often loses more than 5 %.
    #[test]
    fn a_link_that_loses_much_by_chance_keeps_its_rate() {
        let (window, lost) = after(120, 10, 70, 10_000, 33);
        assert!((870_000..1_400_000).contains(&window), "{window} {lost}");
    }

    #[test]
    fn a_way_that_becomes_longer_is_filled_again() {
        // 100 Mbit/s: 12.5 kB for each of some 240 milliseconds, then of some 40 again.
        let (long, _) = along(60, 10, |at| if at < 3_000 { 40 } else { 240 }, 10_000, 0);
        assert!((2_700_000..3_900_000).contains(&long), "{long}");
        let (short, _) = along(60, 10, |at| if (3_000..30_000).contains(&at) { 240 } else { 40 }, 10_000, 0);
        // While the link is full, the queue hides part of the shorter round trip.
        assert!((700_000..1_500_000).contains(&short), "{short}");
        // Our own queue does not make the path longer.
        let (full, _) = after(120, 10, 40, 10_000, 0);
        assert!((700_000..1_100_000).contains(&full), "{full}");
    }

    #[test]
    fn what_the_dark_took_says_nothing() {
        let (start, mut link) = (Instant::now(), IntermittentController::default());
        let sent = |at: u32| start + MS * at;
        for at in 0..500 {
            link.arrived(sent(at + 10), sent(at), 2 * PACKET, MS * 10, false);
        }
        let window = link.window();
        link.restored(sent(2000));
        link.arrived(sent(2000), sent(1990), 50, MS * 10, true);
        (0..100).for_each(|at| link.lost(sent(500 + at), 100 * PACKET));
        for at in 2000..2100 {
            link.arrived(sent(at + 10), sent(at), 2 * PACKET, MS * 10, false);
        }
        assert_eq!(link.window(), window);
        // Control messages alone do not change the rate.
        for at in (3000..30_000).step_by(20) {
            link.arrived(sent(at + 10), sent(at), 50, MS * 10, true);
        }
        assert_eq!(link.window(), window);
    }
}
