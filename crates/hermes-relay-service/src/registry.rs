//! The relay of each route, across configuration changes.
//!
//! In: snapshots, and routes of requests. Out: the relay of a route. It survives a reload, with new bounds; only a route
//! that no longer is a relay, or is a part of another tree, ends it. Never: a relay that two routes share, or one of a route that the node no longer has.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hermes_model::snapshot::{Action, Relay as RelaySettings, RelayTree, Snapshot};
use hermes_relay::{Losses, Relay, RelayCounters, RelayLimits};
use hermes_transport::log_throttle::LogThrottle;
use hermes_transport::metrics::{Metrics, ResultLabels};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::directory::Directory;
use crate::feeds::Feeds;
use crate::seen_signatures::SeenSignatures;

/// The time between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The relays of a node.
pub struct Relays {
    pub(crate) signatures: SeenSignatures,
    table: Mutex<RelayTable>,
    began: Instant,
    /// Milliseconds since the beginning.
    swept: AtomicU64,
}

/// The time as relays count it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelayClock {
    began: Instant,
}

impl RelayClock {
    pub(crate) fn now(self) -> Duration {
        self.began.elapsed()
    }
}

#[derive(Default)]
struct RelayTable {
    /// The routes that are relays now, each with the tree of which it is a part.
    routes: HashMap<Arc<str>, TreeIdentity>,
    /// Relays by the name of their route. A relay begins with its first request.
    by_route: HashMap<Arc<str>, Arc<RouteRelay>>,
    is_closed: bool,
}

/// The relay of a route.
pub(crate) struct RouteRelay {
    pub(crate) relay: Arc<Relay>,
    /// The roots of channels among peers, as far as this node knows them.
    pub(crate) directory: Directory,
    /// The channels that the next relay feeds.
    pub(crate) feeds: Feeds,
    /// Log lines about subscriptions at the next relay that broke off.
    pub(crate) breaks: LogThrottle,
    /// The channels of which this node is the root.
    pub(crate) roots: AtomicUsize,
    /// The other relays of the route.
    pub(crate) tree: watch::Sender<RelayTree>,
}

/// The part of the settings whose change makes identifiers of publications invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TreeIdentity {
    Root,
    Below(Arc<str>),
    /// If other nodes share the channels, these move.
    Peers,
}

impl TreeIdentity {
    fn of(tree: &RelayTree) -> Self {
        match tree {
            RelayTree::Root => Self::Root,
            RelayTree::Below(upstream) => Self::Below(upstream.name.clone()),
            RelayTree::Peers(_) => Self::Peers,
        }
    }
}

impl Default for Relays {
    fn default() -> Self {
        Self {
            signatures: SeenSignatures::default(),
            table: Mutex::default(),
            began: Instant::now(),
            swept: AtomicU64::new(0),
        }
    }
}

impl Relays {
    fn lock(&self) -> MutexGuard<'_, RelayTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn clock(&self) -> RelayClock {
        RelayClock { began: self.began }
    }

    /// The relay of a route. It is closed if the node no longer serves the route: a worker may still decide by the
    /// configuration before.
    pub(crate) fn of(&self, route: &Arc<str>, settings: &RelaySettings) -> Arc<RouteRelay> {
        let mut table = self.lock();
        let identity = TreeIdentity::of(&settings.tree);
        let is_current = !table.is_closed && table.routes.get(route) == Some(&identity);
        if let Some(of_route) = table.by_route.get(route).filter(|_| is_current) {
            return of_route.clone();
        }
        let of_route = Arc::new(RouteRelay {
            relay: Relay::new(limits(settings)),
            directory: Directory::default(),
            feeds: Feeds::default(),
            breaks: LogThrottle::default(),
            roots: AtomicUsize::new(0),
            tree: watch::Sender::new(settings.tree.clone()),
        });
        if !is_current {
            of_route.relay.close();
        } else {
            table.by_route.insert(route.clone(), of_route.clone());
        }
        of_route
    }

    /// Gives relays the bounds of a new configuration, and ends those of routes that are none any more.
    pub fn follow(&self, snapshot: &Snapshot) {
        let wanted: HashMap<&Arc<str>, &RelaySettings> = snapshot
            .routes
            .iter()
            .filter_map(|route| match &route.action {
                Action::Relay(settings) => Some((&route.name, settings)),
                _ => None,
            })
            .collect();
        let mut table = self.lock();
        table.routes =
            wanted.iter().map(|(name, settings)| ((*name).clone(), TreeIdentity::of(&settings.tree))).collect();
        table.by_route.retain(|name, of_route| match wanted.get(name) {
            Some(settings) if TreeIdentity::of(&of_route.tree.borrow()) == TreeIdentity::of(&settings.tree) => {
                of_route.relay.set_limits(&limits(settings));
                of_route.tree.send_if_modified(|tree| std::mem::replace(tree, settings.tree.clone()) != settings.tree);
                true
            }
            _ => {
                of_route.relay.close();
                false
            }
        });
    }

    /// Ends all subscriptions, so that their clients subscribe again to the process that takes over.
    pub fn close(&self) {
        let mut table = self.lock();
        table.is_closed = true;
        table.by_route.values().for_each(|of_route| of_route.relay.close());
    }

    /// Forgets channels that nobody uses, and reports the numbers of all relays, at most once a second.
    pub fn sweep(&self, metrics: &Metrics) {
        let now = self.clock().now();
        let (swept, milliseconds) = (self.swept.load(Ordering::Relaxed), now.as_millis() as u64);
        if milliseconds < swept + SWEEP_INTERVAL.as_millis() as u64 {
            return;
        }
        self.swept.store(milliseconds, Ordering::Relaxed);
        let relays: Vec<Arc<Relay>> = self.lock().by_route.values().map(|one| one.relay.clone()).collect();
        let (mut all, mut losses) = (RelayCounters::default(), Losses::default());
        for relay in relays {
            let of_relay = relay.sweep(now);
            losses.stalled += of_relay.stalled;
            losses.jobs += of_relay.jobs;
            let counters = relay.counters();
            all.channels += counters.channels;
            all.subscriptions += counters.subscriptions;
            all.memory += counters.memory;
        }
        if losses.stalled > 0 {
            metrics.limit_by("relay-stalled", losses.stalled);
        }
        if losses.jobs > 0 {
            metrics.relay_deliveries.get_or_create(&ResultLabels { result: "dropped" }).inc_by(losses.jobs);
        }
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        metrics.relay_channels.set(number(all.channels));
        metrics.relay_subscriptions.set(number(all.subscriptions));
        metrics.relay_memory.set(number(all.memory));
    }
}

fn limits(settings: &RelaySettings) -> RelayLimits {
    RelayLimits {
        channels: settings.channels,
        subscriptions: settings.subscriptions,
        subscriptions_per_subject: settings.per_client,
        queue: settings.queue,
        queue_bytes: settings.queue_bytes,
        max_timeout: settings.max_timeout,
        stall: settings.stall,
        history: settings.history,
        history_bytes: settings.history_bytes,
        history_age: settings.history_age,
        memory: settings.memory,
    }
}
