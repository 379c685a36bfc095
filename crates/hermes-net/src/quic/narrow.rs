//! Paths that have become narrower than QUIC believes.
//!
//! In: what a connection's congestion controller is told. Out: whether long packets are lost and none of them
//! arrives. quinn finds that out by itself after three losses apart from each other, which takes seconds where
//! little is sent, and stalls what waits for it; this takes two, and whoever asks sends shorter ones meanwhile.
//! Never: another rate than that of the controller within.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use quinn::Connection;
use quinn::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn_proto::RttEstimator;

/// Packets of so many bytes every path of QUIC carries (RFC 9000, section 14).
pub const BASE: u64 = 1200;
/// Losses of long packets, and no arrival between them, after which the path is held to be narrow.
const LOSSES: u32 = 2;

/// What is known of one connection's path.
#[derive(Debug, Default)]
pub struct Narrow {
    lost: AtomicU32,
    arrived: AtomicU64,
}

impl Narrow {
    /// Packets of more than [`BASE`] bytes do not arrive any more.
    pub fn is_narrow(&self) -> bool {
        self.lost.load(Ordering::Relaxed) >= LOSSES
    }

    /// Packets of [`BASE`] bytes or more that have arrived, since the connection began.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }
}

/// The path of a connection that was configured here.
pub fn of(connection: &Connection) -> Arc<Narrow> {
    let watched = connection.congestion_state().into_any().downcast::<Watched>();
    watched.map(|watched| watched.narrow).unwrap_or_default()
}

/// Makes controllers that watch.
#[derive(Debug, Default)]
pub(super) struct Factory(Arc<CubicConfig>);

impl ControllerFactory for Factory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Watched { inner: self.0.clone().build(now, current_mtu), narrow: Arc::default() })
    }
}

struct Watched {
    inner: Box<dyn Controller>,
    narrow: Arc<Narrow>,
}

impl Controller for Watched {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        if bytes > BASE {
            self.narrow.lost.store(0, Ordering::Relaxed);
        }
        if bytes >= BASE {
            self.narrow.arrived.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent: bool, lost_bytes: u64) {
        if lost_bytes > BASE {
            // It stays far below what would wrap: at `LOSSES` long packets are no longer sent.
            self.narrow.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.on_congestion_event(now, sent, is_persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { inner: self.inner.clone_box(), narrow: self.narrow.clone() })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
