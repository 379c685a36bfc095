//! Detection of MTU black holes: paths whose MTU fell below the size of packets that QUIC sends.
//!
//! In: the events of a connection's congestion controller. quinn reports to it only the sum of lost bytes, so losses
//! count while a long packet is in flight. Out: whether long packets are lost and none arrives. quinn detects a black
//! hole after three separate losses. That takes seconds on a quiet connection and stalls its streams. This monitor
//! needs two losses, and its callers then send shorter packets. Never: another congestion window than that of the
//! wrapped controller, except for custody connections, whose link is dedicated.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use quinn::Connection;
use quinn::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn_proto::RttEstimator;

use super::intermittent_cc::{self, IntermittentController};

/// Packet size, in bytes, that every path of QUIC carries (RFC 9000, section 14).
pub const BASE: u64 = 1200;
/// Number of losses of long packets, with no arrival between them, after which the path counts as narrow.
const MAX_LOSSES: u32 = 2;

/// The link counts as down after this time without an answer, but not before [`ANSWER_TIMEOUT_TRIPS`] round trips.
const MIN_ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
const ANSWER_TIMEOUT_TRIPS: u32 = 3;

/// The observed state of one connection's path.
#[derive(Debug, Default)]
pub struct PathMonitor {
    lost: AtomicU32,
    arrived: AtomicU64,
    answered: AtomicU64,
    is_intermittent: AtomicBool,
    in_order: AtomicU64,
    trip: AtomicU64,
    /// The time of the oldest unanswered packet. Times are nanoseconds since [`epoch`]; 0 is never.
    asked: AtomicU64,
    /// The time at which the link last came back; 0 once [`PathMonitor::take_rise`] has returned it.
    rose: AtomicU64,
    /// The link came back, and the congestion controller has not processed that yet.
    has_risen: AtomicBool,
}

/// Returns the instant from which times are counted: that of the first call in this process.
fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

fn nanos(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(epoch()).as_nanos()).unwrap_or(u64::MAX).max(1)
}

impl PathMonitor {
    /// Whether packets of more than [`BASE`] bytes no longer arrive.
    pub fn is_narrow(&self) -> bool {
        self.lost.load(Ordering::Relaxed) >= MAX_LOSSES
    }

    /// Switches to the congestion window of a dedicated, intermittently available link, which ignores random losses.
    pub fn set_intermittent(&self) {
        self.is_intermittent.store(true, Ordering::Relaxed);
    }

    /// Returns how many bytes of one stream may be sent beyond those that arrived in order. `None`: the link is not
    /// measured yet, or is not intermittent.
    pub fn in_order(&self) -> Option<u64> {
        Some(self.in_order.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// Records that an answer is expected from this time on, unless one is expected already.
    pub fn asked(&self, at: Instant) {
        let _ = self.asked.compare_exchange(0, nanos(at), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the shortest round trip, or zero before the first measurement.
    pub fn trip(&self) -> Duration {
        Duration::from_nanos(self.trip.load(Ordering::Relaxed))
    }

    /// Whether the link is down: no answer has arrived in time.
    pub fn is_dark(&self, now: Instant) -> bool {
        let asked = self.asked.load(Ordering::Relaxed);
        let answer_timeout = u64::try_from(self.answer_timeout().as_nanos()).unwrap_or(u64::MAX);
        asked > 0 && nanos(now).saturating_sub(asked) > answer_timeout
    }

    /// Returns the time to wait for an answer before the link counts as down.
    fn answer_timeout(&self) -> Duration {
        MIN_ANSWER_TIMEOUT.max(ANSWER_TIMEOUT_TRIPS * self.trip())
    }

    /// Records that a packet arrived from the peer. Returns true if the link was down until now.
    pub fn heard(&self, now: Instant) -> bool {
        let was_dark = self.is_dark(now);
        if was_dark {
            self.rose.store(nanos(now), Ordering::Relaxed);
            self.has_risen.store(true, Ordering::Relaxed);
        }
        self.asked.store(0, Ordering::Relaxed);
        was_dark
    }

    /// Returns the time at which the link came back, once for each outage. `None` at further calls.
    pub fn take_rise(&self) -> Option<Instant> {
        let rose = Some(self.rose.swap(0, Ordering::Relaxed)).filter(|rose| *rose > 0)?;
        Some(epoch() + Duration::from_nanos(rose))
    }

    /// Returns the number of sent packets of [`BASE`] bytes or more that the peer has acknowledged.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Returns the number of sent packets of any length that the peer has acknowledged.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}

/// Returns the monitor of a connection whose configuration was built by this module. For any other connection, returns
/// a new monitor that stays empty.
pub fn of(connection: &Connection) -> Arc<PathMonitor> {
    let watched = connection.congestion_state().into_any().downcast::<MonitoredController>();
    watched.map(|watched| watched.monitor).unwrap_or_default()
}

/// Builds congestion controllers, each with a path monitor.
#[derive(Debug, Default)]
pub(super) struct PathMonitorFactory {
    cubic: Arc<CubicConfig>,
    /// The shared monitor of a single connection. `None`: each connection gets its own.
    monitor: Option<Arc<PathMonitor>>,
}

impl PathMonitorFactory {
    /// Creates a factory for one connection, whose successive paths share one monitor.
    pub(super) fn of_one() -> Self {
        Self { monitor: Some(Arc::default()), ..Self::default() }
    }
}

impl ControllerFactory for PathMonitorFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let inner = self.cubic.clone().build(now, current_mtu);
        let monitor = self.monitor.clone().unwrap_or_default();
        // The path is new: its MTU and its capacity are measured again.
        monitor.lost.store(0, Ordering::Relaxed);
        monitor.in_order.store(0, Ordering::Relaxed);
        Box::new(MonitoredController {
            inner,
            monitor,
            intermittent: IntermittentController::default(),
            unacknowledged: None,
            last_sent: 0,
            has_sent_long: false,
        })
    }
}

struct MonitoredController {
    inner: Box<dyn Controller>,
    monitor: Arc<PathMonitor>,
    /// The controller that applies if the link is intermittent.
    intermittent: IntermittentController,
    /// The time at which the first packet since the last acknowledgement was sent.
    unacknowledged: Option<Instant>,
    /// The number of the packet that was sent last.
    last_sent: u64,
    /// A packet of more than [`BASE`] bytes may be in flight.
    has_sent_long: bool,
}

impl Controller for MonitoredController {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        // quinn reports a batch as one event: packets of one length, and perhaps a shorter one after them.
        let packets = last_packet_number.saturating_sub(self.last_sent).max(1);
        self.last_sent = last_packet_number;
        self.has_sent_long |= bytes > BASE * (packets - 1).max(1);
        self.unacknowledged.get_or_insert(now);
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        if bytes > BASE {
            self.monitor.lost.store(0, Ordering::Relaxed);
            self.has_sent_long = false;
        }
        if bytes >= BASE {
            self.monitor.arrived.fetch_add(1, Ordering::Relaxed);
        }
        self.monitor.answered.fetch_add(1, Ordering::Relaxed);
        self.unacknowledged = None;
        if self.monitor.is_intermittent.load(Ordering::Relaxed) {
            // A received datagram may have ended the outage before this acknowledgement.
            if self.monitor.heard(now) || self.monitor.has_risen.swap(false, Ordering::Relaxed) {
                self.monitor.has_risen.store(false, Ordering::Relaxed);
                self.intermittent.restored(now);
            }
            self.intermittent.arrived(now, sent, bytes, rtt.min(), app_limited);
            self.monitor
                .trip
                .store(u64::try_from(self.intermittent.trip().as_nanos()).unwrap_or_default(), Ordering::Relaxed);
            self.monitor.in_order.store(self.intermittent.in_order().unwrap_or_default(), Ordering::Relaxed);
        }
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        if in_flight > 0 {
            // Packets in flight are still unanswered, even if no more packets are sent.
            self.monitor.asked(now);
        }
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent: bool, lost_bytes: u64) {
        if lost_bytes > BASE && self.has_sent_long {
            // The counter stays far below overflow: after `MAX_LOSSES` losses no long packets are sent.
            self.monitor.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.intermittent.lost(sent, lost_bytes);
        self.inner.on_congestion_event(now, sent, is_persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        if self.monitor.is_intermittent.load(Ordering::Relaxed) {
            // Bytes lost in an outage count as in flight until an acknowledgement arrives, and the peer acknowledges
            // only after it receives another packet.
            let is_stale = self.unacknowledged.is_some_and(|since| since.elapsed() > self.monitor.answer_timeout());
            return if is_stale { intermittent_cc::MAX_WINDOW } else { self.intermittent.window() };
        }
        self.inner.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            monitor: self.monitor.clone(),
            intermittent: self.intermittent.clone(),
            ..*self
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Whether the path counts as narrow after these batches, each a number of packets and bytes, were sent and all
    /// lost, twice.
    fn is_narrow(batches: &[(u64, u64)]) -> bool {
        let now = Instant::now();
        let mut watched = Arc::new(PathMonitorFactory::default()).build(now, 1200);
        let mut sent = 0;
        for _ in 0..MAX_LOSSES {
            for (packets, bytes) in batches {
                sent += packets;
                watched.on_sent(now, *bytes, sent);
            }
            watched.on_congestion_event(now, now, false, batches.iter().map(|(_, bytes)| bytes).sum());
        }
        watched.into_any().downcast::<MonitoredController>().unwrap().monitor.is_narrow()
    }

    #[test]
    fn a_loss_narrows_no_window_of_a_link_that_is_dark_at_times() {
        let now = Instant::now();
        let mut watched = Arc::new(PathMonitorFactory::default())
            .build(now, 1200)
            .into_any()
            .downcast::<MonitoredController>()
            .unwrap();
        let before = watched.window();
        watched.monitor.set_intermittent();
        for number in 1..10 {
            watched.on_sent(now, 1200, number);
            watched.on_congestion_event(now, now, true, 1200);
        }
        assert!(watched.inner.window() < before && watched.window() >= 64 << 10);
    }

    #[test]
    fn many_short_packets_that_are_lost_are_no_long_one() {
        assert!(!is_narrow(&[(1, 200); 10]), "one by one");
        assert!(!is_narrow(&[(10, 2000)]), "together");
        assert!(is_narrow(&[(1, 1400)]));
        assert!(is_narrow(&[(1, 200), (2, 1400 + 60), (1, 200)]), "one of several");
    }

    #[test]
    fn what_the_dark_took_stands_in_nobodys_way() {
        let now = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        let mut watched = Arc::new(PathMonitorFactory::default())
            .build(now, 1200)
            .into_any()
            .downcast::<MonitoredController>()
            .unwrap();
        watched.monitor.set_intermittent();
        watched.on_sent(Instant::now(), 1200, 1);
        assert_eq!(watched.window(), 64 << 10);
        watched.unacknowledged = Some(now);
        let asked = Instant::now();
        watched.monitor.asked(asked);
        assert!(
            watched.monitor.heard(asked + Duration::from_secs(1)),
            "a word was heard, which says nothing of what is under way"
        );
        assert_eq!(watched.window(), intermittent_cc::MAX_WINDOW);
    }

    #[test]
    fn what_is_not_answered_was_sent_into_the_dark() {
        let (monitor, start) = (PathMonitor::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        assert!(!monitor.is_dark(at(5000)), "nothing is owed");
        monitor.asked(at(5000));
        monitor.asked(at(5090));
        assert!(!monitor.is_dark(at(5100)) && monitor.is_dark(at(5101)));
        assert!(monitor.heard(at(7000)) && !monitor.is_dark(at(9000)));
        monitor.asked(at(9000));
        assert!(!monitor.heard(at(9010)));
        assert_eq!((monitor.take_rise(), monitor.take_rise()), (Some(at(7000)), None));
    }
}
