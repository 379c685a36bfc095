//! Upstreams at run time: endpoints with their health and load, shared by all workers.
//!
//! In: the upstreams of a snapshot. Out: an endpoint for a session, and what became of it.
//! An upstream that did not change keeps its state over a swap of the snapshot.
//! Never: connections; those belong to a worker (`pool`).

pub(crate) mod connect;
pub(crate) mod exchange;
pub(crate) mod health;
pub(crate) mod outlier;
pub(crate) mod pool;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hermes_model::facts::Facts;
use hermes_model::snapshot::{Balance, HostPort, Upstream};
use hermes_net::tls::RustlsClientConfig;

/// An endpoint's state, as all workers see it.
pub(crate) struct Endpoint {
    pub(crate) target: HostPort,
    /// For people: `ingress/192.0.2.1:9443`.
    pub(crate) label: Arc<str>,
    /// Its part of the label, for metrics.
    pub(crate) name: Arc<str>,
    pub(crate) in_flight: AtomicUsize,
    /// What active checks say; true without any.
    pub(crate) healthy: AtomicBool,
    passive: outlier::Passive,
}

impl Endpoint {
    fn new(upstream: &str, target: &HostPort) -> Self {
        let name: Arc<str> = if target.host.contains(':') {
            Arc::from(format!("[{}]:{}", target.host, target.port))
        } else {
            Arc::from(format!("{}:{}", target.host, target.port))
        };
        Self {
            target: target.clone(),
            label: Arc::from(format!("{upstream}/{name}")),
            name,
            in_flight: AtomicUsize::new(0),
            healthy: AtomicBool::new(true),
            passive: outlier::Passive::default(),
        }
    }

    fn takes_sessions(&self, now: u64) -> bool {
        self.healthy.load(Ordering::Relaxed) && !self.passive.rests(now)
    }
}

/// TLS towards an upstream.
#[derive(Clone)]
pub(crate) struct ClientTls {
    pub(crate) config: Arc<RustlsClientConfig>,
    /// What SNI asks for.
    pub(crate) name: Arc<str>,
    /// The far end is proven to be a node of this overlay.
    pub(crate) proves_node: bool,
}

/// An upstream's state.
pub(crate) struct UpstreamState {
    /// Unique in this process: pools are keyed by it, so that a changed upstream or a renewed
    /// identity never meets an old connection.
    pub(crate) id: u64,
    pub(crate) config: Arc<Upstream>,
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) tls: Option<ClientTls>,
    turn: AtomicUsize,
    /// Requests and, of those, retries under way: the retry budget.
    pub(crate) active: AtomicUsize,
    pub(crate) retrying: AtomicUsize,
}

impl UpstreamState {
    pub(crate) fn new(id: u64, config: Arc<Upstream>, tls: Option<ClientTls>) -> Self {
        let endpoints = config.endpoints.iter().map(|target| Endpoint::new(&config.name, target)).collect();
        Self {
            id,
            config,
            endpoints,
            tls,
            turn: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            retrying: AtomicUsize::new(0),
        }
    }

    /// Chooses an endpoint, if possible none of `avoid` (those that just failed). `now` is the
    /// node's clock in milliseconds, `random` a fresh random number. Where every endpoint is
    /// unhealthy there is none: an error now is better than a timeout later. Where they merely
    /// rest after failures, they are tried: the pause was a guess.
    pub(crate) fn choose(&self, facts: &Facts, now: u64, random: u64, avoid: &[usize]) -> Option<usize> {
        if self.endpoints.len() == 1 {
            return self.endpoints[0].healthy.load(Ordering::Relaxed).then_some(0);
        }
        let fit = |wanted: &dyn Fn(usize, &Endpoint) -> bool| -> Vec<usize> {
            self.endpoints
                .iter()
                .enumerate()
                .filter(|(index, endpoint)| wanted(*index, endpoint))
                .map(|(index, _)| index)
                .collect()
        };
        let mut candidates = fit(&|index, endpoint| endpoint.takes_sessions(now) && !avoid.contains(&index));
        if candidates.is_empty() {
            candidates = fit(&|_, endpoint| endpoint.takes_sessions(now));
        }
        if candidates.is_empty() {
            candidates = fit(&|_, endpoint| endpoint.healthy.load(Ordering::Relaxed));
        }
        self.balance(&candidates, facts, random)
    }

    fn balance(&self, candidates: &[usize], facts: &Facts, random: u64) -> Option<usize> {
        let count = candidates.len();
        if count == 0 {
            return None;
        }
        let drawn = |random: u64| candidates[(random % count as u64) as usize];
        Some(match &self.config.balance {
            Balance::RoundRobin => candidates[self.turn.fetch_add(1, Ordering::Relaxed) % count],
            Balance::Random => drawn(random),
            Balance::LeastRequest => {
                let (one, other) = (drawn(random), drawn(random >> 32));
                let load = |index: usize| self.endpoints[index].in_flight.load(Ordering::Relaxed);
                if load(other) < load(one) { other } else { one }
            }
            Balance::Hash(header) => {
                let source = facts.source.ip().to_string();
                let key = facts.headers.get(header).map_or(source.as_bytes(), |value| value.as_bytes());
                // Rendezvous hashing: only the sessions of an endpoint that goes or comes move.
                candidates.iter().copied().max_by_key(|index| weight(key, &self.endpoints[*index].name))?
            }
        })
    }

    /// A session ended well, as far as its endpoint goes.
    pub(crate) fn succeeded(&self, endpoint: usize) {
        self.endpoints[endpoint].passive.succeeded();
    }

    /// A session failed by its endpoint's fault. True where the endpoint rests from now on.
    pub(crate) fn failed(&self, endpoint: usize, now: u64) -> bool {
        self.endpoints[endpoint].passive.failed(&self.config.outlier, now)
    }

    /// How many requests may be on another try at once. `budget` is the share of requests under
    /// way, `floor` what is allowed however few those are.
    pub(crate) fn retries_allowed(&self, budget: f64, floor: usize) -> usize {
        let allowed = (self.active.load(Ordering::Relaxed) as f64 * budget) as usize;
        allowed.max(floor)
    }
}

fn weight(key: &[u8], endpoint: &str) -> u64 {
    // Keys are fixed on purpose: every worker and every node must come to the same choice.
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    endpoint.hash(&mut hasher);
    hasher.finish()
}

/// Counts a session on an endpoint while it lives.
pub(crate) struct InFlight {
    state: Arc<UpstreamState>,
    endpoint: usize,
}

impl InFlight {
    pub(crate) fn begin(state: &Arc<UpstreamState>, endpoint: usize) -> Self {
        state.endpoints[endpoint].in_flight.fetch_add(1, Ordering::Relaxed);
        Self { state: state.clone(), endpoint }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.state.endpoints[self.endpoint].in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
