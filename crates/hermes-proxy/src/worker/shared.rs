//! The state that all workers of a node share.
//!
//! In: counts and shares of every worker; connections and queries for another worker. Out: the node's clock, IDs,
//! metrics, and limits for all workers together. Atomic: no worker waits here.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hermes_cache::registry::CacheRegistry;
use http::StatusCode;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::Command;
use crate::custody::Office;
use crate::filters::rate_limit::Paces;
use crate::guard::Guard;
use crate::ip::Given;
use crate::metrics::Metrics;
use crate::reverse::Presence;
use crate::reverse::arrival::{Arrived, Question};
use crate::seldom::Seldom;
use crate::shares::Shares;

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
    pub(crate) guard: Guard,
    /// Signals changes of the host's links, addresses and routes.
    pub(crate) network: watch::Sender<()>,
    /// Signals that a device was deleted.
    pub(crate) device_lost: Notify,
    /// The number of workers that forward packets to the predecessor process.
    pub(crate) elders: AtomicUsize,
    /// The command channels of all workers, by number, to pass connections and queries on.
    others: OnceLock<Vec<mpsc::WeakSender<Command>>>,
    /// Throttles log lines about failed handshakes.
    pub(crate) handshakes: Seldom,
    /// Throttles log lines about connections that could not be accepted.
    pub(crate) unaccepted: Seldom,
    /// Throttles log lines about DNS queries without a reachable server.
    pub(crate) unanswered: Seldom,
    /// Throttles log lines about packets from unknown peers.
    pub(crate) strangers: Seldom,
    /// Throttles log lines about refused addresses.
    pub(crate) refused_addresses: Seldom,
    /// The response caches of routes.
    pub(crate) caches: CacheRegistry,
    /// The custody service.
    pub(crate) custody: Arc<Office>,
    /// The learnt rates of services.
    pub(crate) paces: Paces,
    /// The address leases of devices' clients.
    pub(crate) given: Arc<Given>,
    /// The source of the count of lost log lines.
    pub(crate) lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// The state of a node with this many workers.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers,
            others: OnceLock::new(),
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
            guard: Guard::default(),
            handshakes: Seldom::default(),
            unaccepted: Seldom::every(UNACCEPTED_INTERVAL),
            unanswered: Seldom::default(),
            strangers: Seldom::default(),
            refused_addresses: Seldom::default(),
            caches: CacheRegistry::default(),
            custody: Arc::new(Office::new()),
            paces: Paces::default(),
            given: Arc::default(),
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

    /// Sets the command channels of the workers.
    pub(crate) fn meet(&self, workers: Vec<mpsc::WeakSender<Command>>) {
        // Set once in a node.
        let _ = self.others.set(workers);
    }

    /// Passes a connection to another worker; false if that worker is gone or busy.
    pub(crate) fn pass_on(&self, worker: usize, arrived: Arrived) -> bool {
        let other = self.others.get().and_then(|all| all.get(worker)?.upgrade());
        other.is_some_and(|other| other.try_send(Command::Adopt(Box::new(arrived))).is_ok())
    }

    /// Asks the other workers to displace entries of shared tables now rather than at their next tick.
    pub(crate) fn ask_others_to_displace(&self, asking: usize) {
        let others = self.others.get().into_iter().flatten().enumerate().filter(|(number, _)| *number != asking);
        for other in others.filter_map(|(_, other)| other.upgrade()) {
            let _ = other.try_send(Command::Displace);
        }
    }

    /// Sends a GET to a node through its reverse connection.
    ///
    /// # Errors
    /// The reason why there is no response.
    pub(crate) async fn ask_node(&self, presence: &Arc<Presence>, path: &str) -> Result<StatusCode, String> {
        let gone = || "its connection is gone".to_owned();
        let worker = presence.latest().and_then(|worker| self.others.get()?.get(worker)?.upgrade()).ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let question = Question { presence: presence.clone(), path: path.to_owned(), reply };
        worker.send(Command::Ask(Box::new(question))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Reads the host's addresses again.
    pub(crate) fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::host::addresses()));
    }
}
