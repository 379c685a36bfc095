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

use super::fair_shares::Shares;
use crate::dial_guard::DialGuard;
use crate::log_throttle::LogThrottle;
use crate::metrics::Metrics;

/// The interval between two log lines about connections that could not be accepted.
const UNACCEPTED_INTERVAL: Duration = Duration::from_secs(60);

/// The state that all workers of a node share.
pub struct Shared {
    /// The number of workers.
    pub workers: usize,
    pub metrics: Metrics,
    pub no_route: Arc<str>,
    /// Client connections, on all workers.
    pub connections: Arc<Shares>,
    /// Open tunnels, on all workers.
    pub tunnels: Arc<Shares>,
    epoch: Instant,
    ids: AtomicU64,
    own_addresses: ArcSwap<HashSet<IpAddr>>,
    /// Addresses that guarded routes must not dial.
    pub guard: DialGuard,
    /// Signals changes of the host's links, addresses and routes.
    pub network: watch::Sender<()>,
    /// Signals that a device was deleted.
    pub device_lost: Notify,
    /// The number of workers that forward packets to the predecessor process.
    pub predecessors: AtomicUsize,
    /// Asks all workers but one to displace entries of shared tables; set once the workers run.
    displace: OnceLock<Box<dyn Fn(usize) + Send + Sync>>,
    /// Throttles log lines about failed handshakes.
    pub handshakes: LogThrottle,
    /// Throttles log lines about connections that could not be accepted.
    pub unaccepted: LogThrottle,
    /// Throttles log lines about DNS queries without a reachable server.
    pub unanswered: LogThrottle,
    /// Throttles log lines about packets from unknown peers.
    pub strangers: LogThrottle,
    /// Throttles log lines about refused addresses.
    pub refused_addresses: LogThrottle,
    /// The source of the count of lost log lines.
    pub lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// The state of a node with this many workers.
    pub fn new(workers: usize) -> Self {
        Self {
            workers,
            displace: OnceLock::new(),
            network: watch::Sender::new(()),
            device_lost: Notify::new(),
            predecessors: AtomicUsize::new(0),
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
    pub fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// The host's addresses, as of a few seconds ago.
    pub fn own_addresses(&self) -> Arc<HashSet<IpAddr>> {
        self.own_addresses.load_full()
    }

    /// Sets how the other workers are asked to displace entries: `ask` gets the number of the worker that asks.
    pub fn displace_by(&self, ask: impl Fn(usize) + Send + Sync + 'static) {
        // Set once in a node.
        let _ = self.displace.set(Box::new(ask));
    }

    /// Asks the other workers to displace entries of shared tables now rather than at their next tick.
    pub fn ask_others_to_displace(&self, asking: usize) {
        if let Some(displace) = self.displace.get() {
            displace(asking);
        }
    }

    /// Reads the host's addresses again.
    pub fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::host::addresses()));
    }
}
