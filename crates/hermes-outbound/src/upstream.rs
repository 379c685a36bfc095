//! Upstreams at run time: endpoints with their health and load, shared by all workers.
//!
//! In: the upstreams of a snapshot, and the outcomes of sessions. Out: an endpoint for a session. An unchanged upstream
//! retains its state when the snapshot is replaced. Never: connections, which belong to the pools of a worker.

mod outlier;
mod retry_budget;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hermes_model::facts::Facts;
use hermes_model::rendezvous;
use hermes_model::snapshot::{Balance, Endpoint as Place, Upstream};
use hermes_net::tls::RustlsClientConfig;

pub use self::retry_budget::GaugeGuard;

use crate::reverse::{ReversePeer, UplinkGroup};

/// The maximum number of endpoints that a session tries without `retry` on its route, until it has a connection.
const MAX_FAILOVERS: usize = 8;

/// The state of an endpoint, shared by all workers.
pub struct Endpoint {
    pub target: Target,
    /// The label for logs and the access log, such as `ingress/192.0.2.1:9443` or `devices/alice-laptop`.
    pub label: Arc<str>,
    /// The label without the name of the upstream, for metrics.
    pub name: Arc<str>,
    /// The authority of requests that this node itself sends to the endpoint: its address or the name that TLS
    /// verifies, with the port. For a node, it is the name of the node.
    pub authority: Arc<str>,
    /// The number of open sessions at the endpoint.
    pub in_flight: AtomicUsize,
    /// The result of active health checks; true if none are configured.
    pub healthy: AtomicBool,
    pub passive: outlier::Passive,
}

/// The means by which an endpoint is reached: its address, or reverse connections.
pub enum Target {
    /// An address, which this node dials. `group` is the state of the reverse connections that it dials to the
    /// endpoint.
    Address { host: Arc<str>, port: u16, group: UplinkGroup },
    /// A node that is reached over its reverse connections.
    Node(Arc<ReversePeer>),
}

impl Endpoint {
    fn new(upstream: &Upstream, place: &Place, nodes: &HashMap<Arc<str>, Arc<ReversePeer>>) -> Self {
        let (name, target) = match place {
            Place::Address(address) => {
                let target =
                    Target::Address { host: address.host.clone(), port: address.port, group: UplinkGroup::default() };
                (Arc::from(address.to_string()), target)
            }
            Place::Node(node) => {
                let reverse_peer = nodes.get(node).cloned().unwrap_or_else(|| Arc::new(ReversePeer::new(node)));
                (node.clone(), Target::Node(reverse_peer))
            }
        };
        let server_name = upstream.tls.as_ref().and_then(|tls| tls.server_name.as_ref());
        let authority = match (place, server_name) {
            (Place::Address(address), Some(server)) if server.contains(':') => {
                Arc::from(format!("[{server}]:{}", address.port))
            }
            (Place::Address(address), Some(server)) => Arc::from(format!("{server}:{}", address.port)),
            _ => name.clone(),
        };
        Self {
            target,
            label: Arc::from(format!("{}/{name}", upstream.name)),
            name,
            authority,
            in_flight: AtomicUsize::new(0),
            healthy: AtomicBool::new(true),
            passive: outlier::Passive::default(),
        }
    }

    fn takes_sessions(&self, now: u64) -> bool {
        self.healthy.load(Ordering::Relaxed) && !self.passive.rests(now) && self.is_here()
    }

    /// True if the endpoint can be dialled or has reverse connections.
    fn is_here(&self) -> bool {
        match &self.target {
            Target::Address { .. } => true,
            Target::Node(reverse_peer) => reverse_peer.is_here(),
        }
    }
}

/// The TLS configuration for an upstream or an origin.
#[derive(Clone)]
pub struct ClientTls {
    pub config: Arc<RustlsClientConfig>,
    /// The QUIC configuration; `None` without HTTP/3.
    pub quic: Option<hermes_net::quic::ClientConfig>,
    /// The server name for SNI, and for the verification of a certificate by name.
    pub name: Arc<str>,
    /// True if TLS verifies that the peer is a node of this overlay.
    pub proves_node: bool,
}

/// The state of an upstream.
pub struct UpstreamState {
    /// The pool ID, which is unique in this process. A changed upstream or a renewed identity has another ID, so that
    /// no connection of the previous state is reused.
    pub id: u64,
    pub config: Arc<Upstream>,
    /// All endpoints. Those in `backup` come last.
    pub endpoints: Vec<Endpoint>,
    /// The index of the first backup endpoint.
    first_backup: usize,
    pub tls: Option<ClientTls>,
    /// The position of round-robin balancing.
    turn: AtomicUsize,
    /// The number of active requests, for the retry budget.
    active: AtomicUsize,
    /// The number of retries in flight, for the retry budget.
    retrying: AtomicUsize,
}

impl UpstreamState {
    pub fn new(
        id: u64,
        config: Arc<Upstream>,
        tls: Option<ClientTls>,
        nodes: &HashMap<Arc<str>, Arc<ReversePeer>>,
    ) -> Self {
        let endpoints = config.all().map(|place| Endpoint::new(&config, place, nodes)).collect();
        Self {
            id,
            first_backup: config.endpoints.len(),
            config,
            endpoints,
            tls,
            turn: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            retrying: AtomicUsize::new(0),
        }
    }

    /// Lets round-robin begin at a random endpoint. After a change of endpoints that many nodes get at once, all of them would begin at
    /// the first one.
    pub fn begin_anywhere(&self, random: usize) {
        self.turn.store(random, Ordering::Relaxed);
    }

    /// Chooses an endpoint for a session, if possible none of those in `avoid`, which have just failed. `now` is in
    /// milliseconds of the node's clock. `random` is a new random number. Returns `None` if every endpoint is
    /// unhealthy, because an immediate error is better than a timeout. Ejected endpoints are chosen if no other one
    /// remains, because the ejection time is only an estimate. Backup endpoints are chosen, in their order, if no
    /// primary one qualifies.
    pub fn choose(&self, facts: &Facts, now: u64, random: u64, avoid: &[usize]) -> Option<usize> {
        if self.endpoints.len() == 1 {
            return self.endpoints[0].healthy.load(Ordering::Relaxed).then_some(0);
        }
        let is_healthy = |index: usize| self.endpoints[index].healthy.load(Ordering::Relaxed);
        let takes = |index: usize| self.endpoints[index].takes_sessions(now);
        let among = |fits: &dyn Fn(usize) -> bool| {
            let candidates: Vec<usize> = (0..self.first_backup).filter(|index| fits(*index)).collect();
            let backup = || (self.first_backup..self.endpoints.len()).find(|index| fits(*index));
            self.balance(&candidates, facts, random).or_else(backup)
        };
        among(&|index| takes(index) && !avoid.contains(&index)).or_else(|| among(&takes)).or_else(|| among(&is_healthy))
    }

    /// True if the endpoint is a backup, which is used only if no primary endpoint qualifies.
    pub fn is_backup(&self, index: usize) -> bool {
        index >= self.first_backup
    }

    /// True if a session of which nothing was sent may try another endpoint, even without `retry` on its route. `tried`
    /// are the endpoints that have failed. This failover exists for nodes and for upstreams with backups, where the
    /// loss of an endpoint is a normal event.
    pub fn has_another(&self, tried: &[usize], now: u64) -> bool {
        let mut others = self.endpoints.iter().enumerate().filter(|(index, _)| !tried.contains(index));
        tried.len() < self.failovers() && others.any(|(_, endpoint)| endpoint.takes_sessions(now))
    }

    /// Returns the maximum number of endpoints that a session tries in a failover without `retry`, or 0 if this
    /// upstream has no such failover.
    pub fn failovers(&self) -> usize {
        let is_node = |endpoint: &Endpoint| matches!(endpoint.target, Target::Node(_));
        let proves_node = self.tls.as_ref().is_some_and(|tls| tls.proves_node);
        let fails_over = proves_node || self.first_backup < self.endpoints.len() || self.endpoints.iter().any(is_node);
        if fails_over { self.endpoints.len().min(MAX_FAILOVERS) } else { 0 }
    }

    /// Returns the index of the endpoint with this label if it accepts sessions and is not a backup, otherwise `None`.
    pub fn takes_again(&self, label: &str, now: u64) -> Option<usize> {
        self.endpoints[..self.first_backup]
            .iter()
            .position(|endpoint| *endpoint.label == *label && endpoint.takes_sessions(now))
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
                // Rendezvous hashing: if an endpoint is added or removed, only sessions of that endpoint move.
                candidates.iter().copied().max_by_key(|index| rendezvous::weight(key, &self.endpoints[*index].name))?
            }
        })
    }

    /// Records that a session at the endpoint succeeded.
    pub fn succeeded(&self, endpoint: usize) {
        self.endpoints[endpoint].passive.succeeded();
    }

    /// Records that a session at the endpoint failed. Returns true if this failure ejects the endpoint.
    pub fn failed(&self, endpoint: usize, now: u64) -> bool {
        self.endpoints[endpoint].passive.failed(&self.config.outlier, now)
    }
}

/// The guard that counts a session as in flight at its endpoint.
pub struct InFlight {
    state: Arc<UpstreamState>,
    endpoint: usize,
}

impl InFlight {
    pub fn begin(state: &Arc<UpstreamState>, endpoint: usize) -> Self {
        state.endpoints[endpoint].in_flight.fetch_add(1, Ordering::Relaxed);
        Self { state: state.clone(), endpoint }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.state.endpoints[self.endpoint].in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
