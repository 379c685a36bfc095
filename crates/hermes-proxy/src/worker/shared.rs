//! What all workers of a node see.
//!
//! In: what any of them counts or takes a place in; connections and questions that are another's. Out: the node's
//! clock, ids, metrics, and bounds that hold for all of them together. Atomic: nobody waits here.

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

/// What all workers of a node see.
pub(crate) struct Shared {
    /// How many of them there are.
    pub(crate) workers: usize,
    pub(crate) metrics: Metrics,
    pub(crate) no_route: Arc<str>,
    /// Client connections, on all workers.
    pub(crate) connections: Arc<Shares>,
    /// Tunnels under way, on all workers.
    pub(crate) tunnels: Arc<Shares>,
    epoch: Instant,
    ids: AtomicU64,
    own_addresses: ArcSwap<HashSet<IpAddr>>,
    /// Addresses that guarded routes must not dial.
    pub(crate) guard: Guard,
    /// Changes with the machine's links, addresses and routes.
    pub(crate) network: watch::Sender<()>,
    /// Somebody has deleted a device.
    pub(crate) device_lost: Notify,
    /// Workers that pass packets on to the process before us.
    pub(crate) elders: AtomicUsize,
    /// All of them, by number: for what one of them accepted and another one is to have.
    others: OnceLock<Vec<mpsc::WeakSender<Command>>>,
    /// Failed handshakes, said now and then.
    pub(crate) handshakes: Seldom,
    /// Throttles log lines about connections that could not be accepted.
    pub(crate) unaccepted: Seldom,
    /// Questions that nobody could be asked.
    pub(crate) unanswered: Seldom,
    /// Packets of those who are no peers.
    pub(crate) strangers: Seldom,
    /// Addresses that were asked for and are others'.
    pub(crate) refused_addresses: Seldom,
    /// What routes keep of their answers.
    pub(crate) caches: CacheRegistry,
    /// What this node answers for.
    pub(crate) custody: Arc<Office>,
    /// Rates of services, as their answers have shown.
    pub(crate) paces: Paces,
    /// What clients of devices were given.
    pub(crate) given: Arc<Given>,
    /// Who knows how many lines of the log were lost.
    pub(crate) lost_lines: OnceLock<Box<dyn Fn() -> usize + Send + Sync>>,
}

impl Shared {
    /// Of a node with so many workers.
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

    /// The first of so many ids that nobody else has.
    pub(super) fn take_ids(&self, count: u64) -> u64 {
        self.ids.fetch_add(count, Ordering::Relaxed)
    }

    /// Milliseconds since the node began.
    pub(crate) fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// This machine's addresses, as of a few seconds ago.
    pub(crate) fn own_addresses(&self) -> Arc<HashSet<IpAddr>> {
        self.own_addresses.load_full()
    }

    /// The workers that have started.
    pub(crate) fn meet(&self, workers: Vec<mpsc::WeakSender<Command>>) {
        // Once a node.
        let _ = self.others.set(workers);
    }

    /// Gives a connection to another worker; false where that is not to be had.
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

    /// What a node that keeps connections to us answers to a GET.
    ///
    /// # Errors
    /// There is no answer, in words.
    pub(crate) async fn ask_node(&self, presence: &Arc<Presence>, path: &str) -> Result<StatusCode, String> {
        let gone = || "its connection is gone".to_owned();
        let worker = presence.latest().and_then(|worker| self.others.get()?.get(worker)?.upgrade()).ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let question = Question { presence: presence.clone(), path: path.to_owned(), reply };
        worker.send(Command::Ask(Box::new(question))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Looks at the interfaces again.
    pub(crate) fn refresh_own_addresses(&self) {
        self.own_addresses.store(Arc::new(hermes_net::host::addresses()));
    }
}
