//! CUBIC congestion control (RFC 9438).
//!
//! In: acknowledged bytes, congestion events, time. Out: the congestion window in bytes. Never: pacing; the sender
//! clocks itself with acknowledgements.

use std::time::Duration;

/// Window growth, in PDUs a second cubed (RFC 9438, section 5).
const C: f64 = 0.4;
/// Multiplicative decrease.
const BETA: f64 = 0.7;
/// Growth of the Reno estimate: 3 * (1 - BETA) / (1 + BETA).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);
/// Initial window, in PDUs (RFC 6928).
const INITIAL_PDUS: u64 = 10;
/// Minimum window, in PDUs.
const MIN_PDUS: u64 = 2;

/// The controller of one flow.
#[derive(Debug)]
pub(crate) struct Cubic {
    /// Maximum payload of a PDU, in bytes.
    unit: f64,
    window: f64,
    threshold: f64,
    /// The window before the last reduction.
    w_max: f64,
    /// Time from the start of the epoch until the window reaches `w_max`, in seconds.
    k: f64,
    /// The window of Reno under the same losses.
    w_reno: f64,
    /// The start of congestion avoidance. `None`: the next acknowledgement starts it.
    epoch: Option<Duration>,
    /// PDUs sent before this time cause no further reduction.
    recovery_start: Option<Duration>,
}

impl Cubic {
    pub(crate) fn new(unit: usize) -> Self {
        let unit = unit as f64;
        Self {
            unit,
            window: unit * INITIAL_PDUS as f64,
            threshold: f64::INFINITY,
            w_max: 0.0,
            k: 0.0,
            w_reno: 0.0,
            epoch: None,
            recovery_start: None,
        }
    }

    /// Returns the congestion window, in bytes.
    pub(crate) fn window(&self) -> u64 {
        self.window as u64
    }

    pub(crate) fn is_slow_start(&self) -> bool {
        self.window < self.threshold
    }

    /// Whether a PDU sent at this time belongs to a recovery period that has already reduced the window.
    fn is_recovering(&self, sent: Duration) -> bool {
        self.recovery_start.is_some_and(|start| sent <= start)
    }

    /// Records acknowledged bytes. `sent` is the time at which the newest of them was sent.
    pub(crate) fn acknowledged(&mut self, now: Duration, bytes: u64, sent: Duration, rtt: Duration) {
        if self.is_recovering(sent) {
            return;
        }
        let bytes = bytes as f64;
        if self.is_slow_start() {
            self.window = (self.window + bytes).min(self.threshold.max(self.window));
            return;
        }
        let epoch = *self.epoch.get_or_insert_with(|| {
            self.w_reno = self.window;
            if self.window >= self.w_max {
                // Without a reduction, or after the window has passed its old maximum (section 4.8).
                (self.w_max, self.k) = (self.window, 0.0);
            } else {
                self.k = ((self.w_max - self.window) / self.unit / C).cbrt();
            }
            now
        });
        let time = (now.saturating_sub(epoch) + rtt).as_secs_f64() - self.k;
        let cubic = self.w_max + C * time * time * time * self.unit;
        let alpha = if self.w_reno >= self.w_max { 1.0 } else { ALPHA };
        self.w_reno += alpha * self.unit * bytes / self.window;
        let target = cubic.clamp(self.window, 1.5 * self.window);
        self.window += (target - self.window) * (bytes / self.window).min(1.0);
        self.window = self.window.max(self.w_reno);
    }

    /// Reduces the window once in a round trip, after a loss or a congestion mark.
    pub(crate) fn congestion(&mut self, now: Duration, sent: Duration) {
        if self.is_recovering(sent) {
            return;
        }
        self.recovery_start = Some(now);
        self.epoch = None;
        // Fast convergence (section 4.7).
        self.w_max = if self.window < self.w_max { self.window * (1.0 + BETA) / 2.0 } else { self.window };
        self.window = (self.window * BETA).max(self.unit * MIN_PDUS as f64);
        self.threshold = self.window;
    }

    /// Collapses the window after persistent congestion (RFC 9002, section 7.6).
    pub(crate) fn collapse(&mut self, now: Duration) {
        self.congestion(now, now);
        self.window = self.unit * MIN_PDUS as f64;
    }

    /// Limits the window to the initial one after an idle period (RFC 5681, section 4.1).
    pub(crate) fn restart(&mut self) {
        self.window = self.window.min(self.unit * INITIAL_PDUS as f64);
        self.epoch = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    /// Acknowledges one window a round trip.
    fn rounds(cubic: &mut Cubic, now: &mut Duration, count: usize) {
        for _ in 0..count {
            *now += RTT;
            let (window, sent) = (cubic.window(), *now - Duration::from_millis(1));
            (0..10).for_each(|_| cubic.acknowledged(*now, window / 10, sent, RTT));
        }
    }

    #[test]
    fn slow_start_doubles_each_round() {
        let (mut cubic, mut now) = (Cubic::new(1000), Duration::ZERO);
        rounds(&mut cubic, &mut now, 3);
        assert_eq!(cubic.window(), 80_000);
    }

    #[test]
    fn a_loss_reduces_once_and_the_window_returns_to_its_maximum() {
        let (mut cubic, mut now) = (Cubic::new(1000), Duration::ZERO);
        rounds(&mut cubic, &mut now, 5);
        let before = cubic.window();
        cubic.congestion(now, now);
        cubic.congestion(now + RTT, now);
        assert_eq!(cubic.window(), (before as f64 * BETA) as u64);
        let k = (before as f64 * 0.3 / 1000.0 / C).cbrt();
        rounds(&mut cubic, &mut now, (k / RTT.as_secs_f64()) as usize);
        let after = cubic.window();
        assert!(after > before * 9 / 10 && after < before * 12 / 10, "{before} {after}");
        rounds(&mut cubic, &mut now, 200);
        assert!(cubic.window() > 2 * before, "the window grows beyond its old maximum");
    }

    #[test]
    fn the_window_has_a_minimum() {
        let mut cubic = Cubic::new(1000);
        for second in 0..50 {
            cubic.congestion(Duration::from_secs(second), Duration::from_secs(second));
        }
        assert_eq!(cubic.window(), 2000);
        cubic.collapse(Duration::from_secs(60));
        assert_eq!(cubic.window(), 2000);
    }
}
