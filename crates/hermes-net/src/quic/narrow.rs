//! Paths that have become narrower than QUIC believes.
//!
//! In: what a connection's congestion controller is told: of losses their sum alone, so that they count where a long
//! packet is on its way. Out: whether long packets are lost and none of them arrives. quinn finds that out by itself
//! after three losses apart from each other, which takes seconds where little is sent, and stalls what waits for it;
//! this takes two, and whoever asks sends shorter ones meanwhile.
//! Never: another rate than that of the controller within; but for connections of custody, whose link is known.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use quinn::Connection;
use quinn::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn_proto::RttEstimator;

use super::known::{self, Link};

/// Packets of so many bytes every path of QUIC carries (RFC 9000, section 14).
pub const BASE: u64 = 1200;
/// Losses of long packets, and no arrival between them, after which the path is held to be narrow.
const LOSSES: u32 = 2;

/// What is not answered for so long, and for so many round trips, was sent into the dark.
const SILENCE: Duration = Duration::from_millis(100);
const SILENT_TRIPS: u32 = 3;

/// What is known of one connection's path.
#[derive(Debug, Default)]
pub struct Narrow {
    lost: AtomicU32,
    arrived: AtomicU64,
    answered: AtomicU64,
    is_dark_at_times: AtomicBool,
    in_order: AtomicU64,
    trip: AtomicU64,
    /// Since when an answer is owed. Times are nanoseconds since [`epoch`]; 0 is never.
    asked: AtomicU64,
    /// When it came back last, and nobody has asked about that.
    rose: AtomicU64,
    /// It came back, and nothing was acknowledged since.
    has_risen: AtomicBool,
}

/// Before all times of connections.
fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

fn nanos(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(epoch()).as_nanos()).unwrap_or(u64::MAX).max(1)
}

impl Narrow {
    /// Packets of more than [`BASE`] bytes do not arrive any more.
    pub fn is_narrow(&self) -> bool {
        self.lost.load(Ordering::Relaxed) >= LOSSES
    }

    /// From now on the window is that of a link that is there for us and dark at times, whatever is lost.
    pub fn is_dark_at_times(&self) {
        self.is_dark_at_times.store(true, Ordering::Relaxed);
    }

    /// So many bytes of one string may be sent beyond what of it has arrived in order. `None`: nothing is known of the
    /// link yet, or it is like any.
    pub fn in_order(&self) -> Option<u64> {
        Some(self.in_order.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// From then on an answer is owed, if none was before.
    pub fn asked(&self, at: Instant) {
        let _ = self.asked.compare_exchange(0, nanos(at), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The shortest round trip; nothing, where none is known.
    pub fn trip(&self) -> Duration {
        Duration::from_nanos(self.trip.load(Ordering::Relaxed))
    }

    /// What was sent is not answered: the link is dark.
    pub fn is_dark(&self, now: Instant) -> bool {
        let asked = self.asked.load(Ordering::Relaxed);
        let patience = u64::try_from(self.patience().as_nanos()).unwrap_or(u64::MAX);
        asked > 0 && nanos(now).saturating_sub(asked) > patience
    }

    /// An answer is waited for no longer.
    fn patience(&self) -> Duration {
        SILENCE.max(SILENT_TRIPS * self.trip())
    }

    /// Something was heard from the far end. True where it was dark until now.
    pub fn heard(&self, now: Instant) -> bool {
        let was_dark = self.is_dark(now);
        if was_dark {
            self.rose.store(nanos(now), Ordering::Relaxed);
            self.has_risen.store(true, Ordering::Relaxed);
        }
        self.asked.store(0, Ordering::Relaxed);
        was_dark
    }

    /// When something was heard after it had been dark, if nobody has asked since.
    pub fn take_rise(&self) -> Option<Instant> {
        let rose = Some(self.rose.swap(0, Ordering::Relaxed)).filter(|rose| *rose > 0)?;
        Some(epoch() + Duration::from_nanos(rose))
    }

    /// Packets of [`BASE`] bytes or more that have arrived, since the connection began.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Packets of any length that have arrived, of those that ask for an acknowledgement.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}

/// The path of a connection that was configured here.
pub fn of(connection: &Connection) -> Arc<Narrow> {
    let watched = connection.congestion_state().into_any().downcast::<Watched>();
    watched.map(|watched| watched.narrow).unwrap_or_default()
}

/// Makes controllers that watch.
#[derive(Debug, Default)]
pub(super) struct Factory {
    cubic: Arc<CubicConfig>,
    /// Of the one connection that it is for. `None`: it is for many.
    narrow: Option<Arc<Narrow>>,
}

impl Factory {
    /// For one connection: all of its paths, one after the other, are told of in one place.
    pub(super) fn of_one() -> Self {
        Self { narrow: Some(Arc::default()), ..Self::default() }
    }
}

impl ControllerFactory for Factory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let inner = self.cubic.clone().build(now, current_mtu);
        let narrow = self.narrow.clone().unwrap_or_default();
        // Another path: how wide it is, and how far, has to be found out.
        narrow.lost.store(0, Ordering::Relaxed);
        narrow.in_order.store(0, Ordering::Relaxed);
        Box::new(Watched {
            inner,
            narrow,
            known: Link::default(),
            unacknowledged: None,
            last_sent: 0,
            has_sent_long: false,
        })
    }
}

struct Watched {
    inner: Box<dyn Controller>,
    narrow: Arc<Narrow>,
    /// Of a link that is dark at times.
    known: Link,
    /// The first packet since the last acknowledgement.
    unacknowledged: Option<Instant>,
    /// The number of the packet that was sent last.
    last_sent: u64,
    /// One of more than [`BASE`] bytes may be on its way.
    has_sent_long: bool,
}

impl Controller for Watched {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        // A batch is told of as one: packets of one length, and perhaps a shorter one behind them.
        let packets = last_packet_number.saturating_sub(self.last_sent).max(1);
        self.last_sent = last_packet_number;
        self.has_sent_long |= bytes > BASE * (packets - 1).max(1);
        self.unacknowledged.get_or_insert(now);
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        if bytes > BASE {
            self.narrow.lost.store(0, Ordering::Relaxed);
            self.has_sent_long = false;
        }
        if bytes >= BASE {
            self.narrow.arrived.fetch_add(1, Ordering::Relaxed);
        }
        self.narrow.answered.fetch_add(1, Ordering::Relaxed);
        self.unacknowledged = None;
        if self.narrow.is_dark_at_times.load(Ordering::Relaxed) {
            // It may have been heard by words before.
            if self.narrow.heard(now) || self.narrow.has_risen.swap(false, Ordering::Relaxed) {
                self.narrow.has_risen.store(false, Ordering::Relaxed);
                self.known.rose(now);
            }
            self.known.arrived(now, sent, bytes, rtt.min(), app_limited);
            self.narrow.trip.store(u64::try_from(self.known.trip().as_nanos()).unwrap_or_default(), Ordering::Relaxed);
            self.narrow.in_order.store(self.known.in_order().unwrap_or_default(), Ordering::Relaxed);
        }
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        if in_flight > 0 {
            // An answer is owed to what is still under way, though nothing may be sent beside it.
            self.narrow.asked(now);
        }
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent: bool, lost_bytes: u64) {
        if lost_bytes > BASE && self.has_sent_long {
            // It stays far below what would wrap: at `LOSSES` long packets are no longer sent.
            self.narrow.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.known.lost(sent, lost_bytes);
        self.inner.on_congestion_event(now, sent, is_persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        if self.narrow.is_dark_at_times.load(Ordering::Relaxed) {
            // What the dark took stays counted until something is acknowledged, and that has to be sent first.
            let is_stale = self.unacknowledged.is_some_and(|since| since.elapsed() > self.narrow.patience());
            return if is_stale { known::MOST } else { self.known.window() };
        }
        self.inner.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            narrow: self.narrow.clone(),
            known: self.known.clone(),
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

    /// What is held of a path after such batches were sent, of so many packets and bytes, and all of them lost at once,
    /// twice.
    fn is_narrow(batches: &[(u64, u64)]) -> bool {
        let now = Instant::now();
        let mut watched = Arc::new(Factory::default()).build(now, 1200);
        let mut sent = 0;
        for _ in 0..LOSSES {
            for (packets, bytes) in batches {
                sent += packets;
                watched.on_sent(now, *bytes, sent);
            }
            watched.on_congestion_event(now, now, false, batches.iter().map(|(_, bytes)| bytes).sum());
        }
        watched.into_any().downcast::<Watched>().unwrap().narrow.is_narrow()
    }

    #[test]
    fn a_loss_narrows_no_window_of_a_link_that_is_dark_at_times() {
        let now = Instant::now();
        let mut watched = Arc::new(Factory::default()).build(now, 1200).into_any().downcast::<Watched>().unwrap();
        let before = watched.window();
        watched.narrow.is_dark_at_times();
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
        let mut watched = Arc::new(Factory::default()).build(now, 1200).into_any().downcast::<Watched>().unwrap();
        watched.narrow.is_dark_at_times();
        watched.on_sent(Instant::now(), 1200, 1);
        assert_eq!(watched.window(), 64 << 10);
        watched.unacknowledged = Some(now);
        let asked = Instant::now();
        watched.narrow.asked(asked);
        assert!(
            watched.narrow.heard(asked + Duration::from_secs(1)),
            "a word was heard, which says nothing of what is under way"
        );
        assert_eq!(watched.window(), known::MOST);
    }

    #[test]
    fn what_is_not_answered_was_sent_into_the_dark() {
        let (narrow, start) = (Narrow::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        assert!(!narrow.is_dark(at(5000)), "nothing is owed");
        narrow.asked(at(5000));
        narrow.asked(at(5090));
        assert!(!narrow.is_dark(at(5100)) && narrow.is_dark(at(5101)));
        assert!(narrow.heard(at(7000)) && !narrow.is_dark(at(9000)));
        narrow.asked(at(9000));
        assert!(!narrow.heard(at(9010)));
        assert_eq!((narrow.take_rise(), narrow.take_rise()), (Some(at(7000)), None));
    }
}
