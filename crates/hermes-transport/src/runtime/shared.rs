//! The state that all workers of a node share.
//!
//! In: counts and table entries of every worker. Out: the node's clock, IDs, metrics, and limits for all workers
//! together. Almost everything is atomic, so that no worker waits for another.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hermes_net::dispatch::Groups;
use tokio::sync::{Notify, watch};

use super::fair_shares::Shares;
use super::overload::Usage;
use super::sandbox::Reason;
use super::workers::Workers;
use crate::dial_guard::DialGuard;
use crate::log_throttle::LogThrottle;
use crate::metrics::Metrics;

/// The interval between two log lines about connections that could not be accepted.
const UNACCEPTED_INTERVAL: Duration = Duration::from_secs(60);

/// The state that all workers of a node share.
pub struct Shared {
    /// The number of workers.
    pub workers: usize,
    /// The status of all workers, by which the kernel distributes connections.
    pub status: Arc<Workers>,
    pub metrics: Metrics,
    /// The memory and descriptors that the process uses.
    pub usage: Usage,
    pub no_route: Arc<str>,
    /// The table of client connections on all workers.
    pub connections: Arc<Shares>,
    /// The table of open tunnels on all workers.
    pub tunnels: Arc<Shares>,
    epoch: Instant,
    ids: AtomicU64,
    own_addresses: ArcSwap<HashSet<IpAddr>>,
    /// Addresses that guarded routes must not dial.
    pub guard: DialGuard,
    /// Signals changes of the host's links, addresses and routes.
    pub network: watch::Sender<()>,
    /// Signals that a device was deleted, or a worker broke.
    pub something_lost: Notify,
    /// The workers that broke, and have no listeners.
    lost_workers: Mutex<Vec<usize>>,
    /// The number of workers that forward packets to the predecessor process.
    pub predecessors: AtomicUsize,
    /// Asks all workers, except the one with this number, to displace entries of shared tables. Set when the workers
    /// run.
    displace: OnceLock<Box<dyn Fn(usize) + Send + Sync>>,
    /// Throttles log lines about failed handshakes.
    pub handshakes: LogThrottle,
    /// Throttles log lines about connections that could not be accepted.
    pub unaccepted: LogThrottle,
    /// Throttles log lines about times in which all workers stood still.
    pub standstills: LogThrottle,
    /// Throttles log lines about DNS queries for which no DNS server is reachable.
    pub unanswered: LogThrottle,
    /// Throttles log lines about packets from unknown peers.
    pub strangers: LogThrottle,
    /// Throttles log lines about refused address requests of IP sessions.
    pub refused_addresses: LogThrottle,
    /// Returns the number of log lines that were lost because stderr was slow.
    pub lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// Creates the state of a node with this number of workers.
    pub fn new(workers: usize) -> Self {
        Self::with_groups(workers, Groups::of(workers))
    }

    /// Creates the state of a node whose workers form these groups.
    pub fn with_groups(workers: usize, groups: Groups) -> Self {
        let status = Arc::new(Workers::new(workers, groups));
        Self {
            workers,
            metrics: Metrics::with(status.clone()),
            status,
            usage: Usage::default(),
            displace: OnceLock::new(),
            network: watch::Sender::new(()),
            something_lost: Notify::new(),
            lost_workers: Mutex::default(),
            predecessors: AtomicUsize::new(0),
            no_route: Arc::from("none"),
            connections: Arc::default(),
            tunnels: Arc::default(),
            epoch: Instant::now(),
            ids: AtomicU64::new(1),
            own_addresses: ArcSwap::from_pointee(hermes_net::host::addresses()),
            guard: DialGuard::default(),
            handshakes: LogThrottle::default(),
            unaccepted: LogThrottle::every(UNACCEPTED_INTERVAL),
            standstills: LogThrottle::default(),
            unanswered: LogThrottle::default(),
            strangers: LogThrottle::default(),
            refused_addresses: LogThrottle::default(),
            lost_lines: OnceLock::new(),
        }
    }

    /// Reserves `count` consecutive session IDs, and returns the first of them.
    pub(super) fn take_ids(&self, count: u64) -> u64 {
        self.ids.fetch_add(count, Ordering::Relaxed)
    }

    /// Returns the time since the start of the node in milliseconds.
    pub fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Returns the host's IP addresses, as last read by [`Self::refresh_own_addresses`].
    pub fn own_addresses(&self) -> Arc<HashSet<IpAddr>> {
        self.own_addresses.load_full()
    }

    /// Sets the function that asks the other workers to displace entries. Its argument is the number of the worker that
    /// asks.
    pub fn displace_by(&self, ask: impl Fn(usize) + Send + Sync + 'static) {
        // A node calls this once.
        let _ = self.displace.set(Box::new(ask));
    }

    /// Asks the other workers to displace entries of shared tables now instead of at their next tick. `asking` is the
    /// number of the worker that asks.
    pub fn ask_others_to_displace(&self, asking: usize) {
        if let Some(displace) = self.displace.get() {
            displace(asking);
        }
    }

    /// A worker broke, and has begun anew without listeners.
    pub fn lose_worker(&self, number: usize) {
        let mut lost = self.lost_workers.lock().unwrap_or_else(PoisonError::into_inner);
        if !lost.contains(&number) {
            lost.push(number);
        }
        drop(lost);
        self.something_lost.notify_one();
    }

    /// The workers that broke.
    pub fn lost_workers(&self) -> Vec<usize> {
        self.lost_workers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// These workers get their listeners again.
    pub fn found_workers(&self, numbers: &[usize]) {
        let mut lost = self.lost_workers.lock().unwrap_or_else(PoisonError::into_inner);
        lost.retain(|number| !numbers.contains(number));
    }

    /// Counts and reports that a listener is confined from now on.
    pub fn report_confined(&self, listener: Option<Arc<str>>, reason: Reason) {
        let Some(listener) = listener else { return };
        self.metrics.listeners_confined.inc();
        let why = match reason {
            Reason::HeldUp => "its connections hold up workers",
            Reason::Full => "it has as many connections as it may have",
        };
        tracing::warn!(%listener, why, "a listener is confined: its new connections come to the workers of the sandbox");
    }

    /// Ends confinements that have no reason any longer. Worker 0 calls it.
    pub fn release_confined(&self) {
        for listener in self.status.sandbox.release(&self.status.table, self.now()) {
            tracing::info!(%listener, "a listener is confined no longer");
        }
    }

    /// Reads the host's addresses again.
    pub fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::host::addresses()));
    }
}
