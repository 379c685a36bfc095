//! The state that all workers of a node share.
//!
//! In: counts and shares of every worker. Out: the node's clock, IDs, metrics, and limits for all workers together.
//! Atomic: no worker waits here.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};

use super::shares::Shares;
use crate::dial_guard::DialGuard;
use crate::log_throttle::LogThrottle;
use crate::metrics::Metrics;

/// The interval between two log lines about connections that could not be accepted.
const UNACCEPTED_INTERVAL: Duration = Duration::from_secs(60);

/// The state that all workers of a node share.
pub(crate) struct Shared {
    /// The number of workers.
    pub(crate) workers: usize,
    pub(crate) metrics: Metrics,
    pub(crate) no_route: Arc<str>,
    /// Client connections, on all workers.
    pub(crate) connections: Arc<Shares>,
    /// Open tunnels, on all workers.
    pub(crate) tunnels: Arc<Shares>,
    epoch: Instant,
    ids: AtomicU64,
    own_addresses: ArcSwap<HashSet<IpAddr>>,
    /// Addresses that guarded routes must not dial.
    pub(crate) guard: DialGuard,
    /// Signals changes of the host's links, addresses and routes.
    pub(crate) network: watch::Sender<()>,
    /// Signals that a device was deleted.
    pub(crate) device_lost: Notify,
    /// The number of workers that forward packets to the predecessor process.
    pub(crate) elders: AtomicUsize,
    /// Asks all workers but one to displace entries of shared tables; set once the workers run.
    displace: OnceLock<Box<dyn Fn(usize) + Send + Sync>>,
    /// Throttles log lines about failed handshakes.
    pub(crate) handshakes: LogThrottle,
    /// Throttles log lines about connections that could not be accepted.
    pub(crate) unaccepted: LogThrottle,
    /// Throttles log lines about DNS queries without a reachable server.
    pub(crate) unanswered: LogThrottle,
    /// Throttles log lines about packets from unknown peers.
    pub(crate) strangers: LogThrottle,
    /// Throttles log lines about refused addresses.
    pub(crate) refused_addresses: LogThrottle,
    /// The source of the count of lost log lines.
    pub(crate) lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// The state of a node with this many workers.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers,
            displace: OnceLock::new(),
            network: watch::Sender::new(()),
            device_lost: Notify::new(),
            elders: AtomicUsize::new(0),
            metrics: Metrics::default(),
            no_route: Arc::from("none"),
            connections: Arc::default(),
            tunnels: Arc::default(),
            epoch: Instant::now(),
            ids: AtomicU64::new(1),
            own_addresses: ArcSwap::from_pointee(hermes_net::host::addresses()),
            guard: DialGuard::default(),
            handshakes: LogThrottle::default(),
            unaccepted: LogThrottle::every(UNACCEPTED_INTERVAL),
            unanswered: LogThrottle::default(),
            strangers: LogThrottle::default(),
            refused_addresses: LogThrottle::default(),
            lost_lines: OnceLock::new(),
        }
    }

    /// Reserves a block of IDs, and returns its first.
    pub(super) fn take_ids(&self, count: u64) -> u64 {
        self.ids.fetch_add(count, Ordering::Relaxed)
    }

    /// Milliseconds since the start of the node.
    pub(crate) fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// The host's addresses, as of a few seconds ago.
    pub(crate) fn own_addresses(&self) -> Arc<HashSet<IpAddr>> {
        self.own_addresses.load_full()
    }

    /// Sets how the other workers are asked to displace entries: `ask` gets the number of the worker that asks.
    pub(crate) fn displace_by(&self, ask: impl Fn(usize) + Send + Sync + 'static) {
        // Set once in a node.
        let _ = self.displace.set(Box::new(ask));
    }

    /// Asks the other workers to displace entries of shared tables now rather than at their next tick.
    pub(crate) fn ask_others_to_displace(&self, asking: usize) {
        if let Some(displace) = self.displace.get() {
            displace(asking);
        }
    }

    /// Reads the host's addresses again.
    pub(crate) fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::host::addresses()));
    }
}
